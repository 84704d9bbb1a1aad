//! A TCP relay between sender and receiver, by which a test makes the network fail.
//!
//! The first connection is the control connection, all others are lanes ([`docs/migration-wire.md`]). What a relay may do
//! to the bytes is up to a [`Tamper`] for each connection and way; it can hold back what the lanes carry at a given place,
//! so that something is done there and not about there.
//!
//! [`docs/migration-wire.md`]: ../../../../../docs/migration-wire.md

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::LOOK;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the sender to the receiver.
    There,
    /// And back.
    Back,
}

/// What becomes of a connection's bytes, one way.
pub trait Tamper: Send {
    /// Takes what one side has sent, and appends to `out` what the other one is to get. `false`: the connection ends after
    /// that.
    fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool;
}

/// Makes the [`Tamper`] of a connection, by its number and the way; none: it is left alone.
pub type Tampers = dyn Fn(usize, Way) -> Option<Box<dyn Tamper>> + Send + Sync;

/// A running relay; its connections are cut when it is dropped.
pub struct Relay {
    shared: Arc<Shared>,
    listener: Arc<TcpListener>,
    address: SocketAddr,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    to: SocketAddr,
    tamper: Box<Tampers>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Both ends of each connection, by its number.
    connections: Vec<[Arc<TcpStream>; 2]>,
    /// Bytes of lanes that the receiver was given.
    carried: u64,
    /// How many of them there may be.
    hold_at: Option<u64>,
    /// Somebody has more.
    held: bool,
    /// Nothing is read from or written to any connection.
    stalled: bool,
    /// Connections with a lower number carry nothing any more, there and back.
    frozen: [usize; 2],
    over: bool,
}

/// One way of a connection.
#[derive(Clone, Copy)]
struct Lane {
    number: usize,
    way: Way,
    /// It carries frames.
    counts: bool,
}

impl State {
    fn is_frozen(&self, lane: Lane) -> bool {
        lane.number < self.frozen[lane.way as usize]
    }
}

impl Relay {
    /// To a receiver.
    ///
    /// # Errors
    /// There is no port.
    pub fn start(to: SocketAddr) -> anyhow::Result<Self> {
        Self::tampering(to, |_, _| None)
    }

    /// Likewise, and changes what goes by.
    ///
    /// # Errors
    /// There is no port.
    pub fn tampering(
        to: SocketAddr,
        tamper: impl Fn(usize, Way) -> Option<Box<dyn Tamper>> + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            to,
            tamper: Box::new(tamper),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let (relay, taken) = (Arc::clone(&shared), Arc::clone(&listener));
        let accepting = std::thread::spawn(move || relay.accept(&taken));
        Ok(Self {
            shared,
            listener,
            address,
            accepting: Some(accepting),
        })
    }

    /// Where the sender connects.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes that the lanes have carried.
    pub fn carried(&self) -> u64 {
        self.shared.lock().carried
    }

    /// Lets the lanes carry so many bytes and no more. The control connection goes on.
    pub fn hold_at(&self, bytes: u64) {
        let mut state = self.shared.lock();
        state.hold_at = Some(bytes);
        state.held = false;
        self.shared.changed.notify_all();
    }

    /// Waits until they have carried that, and have more.
    ///
    /// # Errors
    /// They do not.
    pub fn wait_until_held(&self, limit: Duration) -> anyhow::Result<()> {
        let give_up = Instant::now() + limit;
        let mut state = self.shared.lock();
        while !state.held {
            let left = give_up.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "{} bytes have come, no more", state.carried);
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Waits until the lanes have carried so many bytes at least, and no more come.
    ///
    /// # Errors
    /// They do not.
    pub fn wait_until_full(&self, bytes: u64, limit: Duration) -> anyhow::Result<()> {
        const LOOKS: u32 = 10;
        let give_up = Instant::now() + limit;
        let (mut before, mut same) = (0, 0);
        while same < LOOKS {
            let carried = self.carried();
            ensure!(Instant::now() < give_up, "{carried} bytes have come");
            same = if carried >= bytes && carried == before {
                same + 1
            } else {
                0
            };
            before = carried;
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Lets everything go on.
    pub fn release(&self) {
        let mut state = self.shared.lock();
        (state.hold_at, state.held, state.stalled) = (None, false, false);
        self.shared.changed.notify_all();
    }

    /// Carries nothing any more, on no connection, neither way, and says nothing of it: a network that is gone.
    pub fn stall(&self) {
        self.shared.lock().stalled = true;
    }

    /// Carries nothing any more on the connections that there are now, that way, and says nothing of it; those that come
    /// later work. A router that has forgotten them.
    pub fn freeze(&self, way: Way) {
        let mut state = self.shared.lock();
        state.frozen[way as usize] = state.connections.len();
        self.shared.changed.notify_all();
    }

    /// How many connections there have been.
    pub fn connections(&self) -> usize {
        self.shared.lock().connections.len()
    }

    /// Ends all connections, in order as far as TCP knows.
    pub fn cut(&self) {
        self.cut_those(|_| true);
    }

    /// Ends the connection with this number.
    pub fn cut_one(&self, number: usize) {
        self.cut_those(|is| is == number);
    }

    fn cut_those(&self, which: impl Fn(usize) -> bool) {
        let state = self.shared.lock();
        for (_, ends) in state
            .connections
            .iter()
            .enumerate()
            .filter(|(number, _)| which(*number))
        {
            for end in ends {
                // It may have ended by itself.
                let _ = end.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.changed.notify_all();
        self.cut();
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        // It is shut in the end.
        while let Ok((from, _)) = listener.accept() {
            let Ok(to) = TcpStream::connect(self.to) else { continue };
            let (from, to) = (Arc::new(from), Arc::new(to));
            for socket in [&from, &to] {
                let _ = socket.set_nodelay(true);
            }
            let number = {
                let mut state = self.lock();
                state.connections.push([Arc::clone(&from), Arc::clone(&to)]);
                state.connections.len() - 1
            };
            self.spawn(number, Way::There, [&from, &to]);
            self.spawn(number, Way::Back, [&to, &from]);
        }
    }

    fn spawn(self: &Arc<Self>, number: usize, way: Way, [from, to]: [&Arc<TcpStream>; 2]) {
        let (relay, from, to) = (Arc::clone(self), Arc::clone(from), Arc::clone(to));
        let tamper = (self.tamper)(number, way);
        let lane = Lane {
            number,
            way,
            counts: number > 0 && way == Way::There,
        };
        std::thread::spawn(move || relay.pump(&from, &to, lane, tamper));
    }

    fn pump(&self, mut from: &TcpStream, to: &TcpStream, lane: Lane, mut tamper: Option<Box<dyn Tamper>>) {
        let mut buffer = vec![0; 64 << 10];
        let mut changed = Vec::new();
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            let mut bytes = &buffer[..len];
            let mut goes_on = true;
            if let Some(tamper) = &mut tamper {
                changed.clear();
                goes_on = tamper.pass(bytes, &mut changed);
                bytes = &changed;
            }
            if !self.write(bytes, to, lane) {
                break;
            }
            if !goes_on {
                let _ = from.shutdown(Shutdown::Both);
                break;
            }
        }
        // Nor is it told that nothing more will come.
        let mut state = self.lock();
        while (state.stalled || state.is_frozen(lane)) && !state.over {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        let _ = to.shutdown(Shutdown::Write);
    }

    /// Hands on what may go on, and waits where it may not.
    fn write(&self, mut bytes: &[u8], mut to: &TcpStream, lane: Lane) -> bool {
        while !bytes.is_empty() {
            let len = self.may_go(bytes.len(), lane);
            if len == 0 || to.write_all(&bytes[..len]).is_err() {
                return false;
            }
            bytes = &bytes[len..];
        }
        true
    }

    /// How many of so many bytes may go, once some may; 0 at the end.
    fn may_go(&self, len: usize, lane: Lane) -> usize {
        let mut state = self.lock();
        loop {
            if state.over {
                return 0;
            }
            let room = match state.hold_at {
                Some(hold_at) if lane.counts => hold_at.saturating_sub(state.carried),
                _ => u64::MAX,
            };
            if room > 0 && !state.stalled && !state.is_frozen(lane) {
                let len = room.min(len as u64);
                if lane.counts {
                    state.carried += len;
                }
                return len as usize;
            }
            if room == 0 && !state.held {
                state.held = true;
                self.changed.notify_all();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
