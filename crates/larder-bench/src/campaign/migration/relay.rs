//! A TCP relay between sender and receiver, with which a test makes the network fail.
//!
//! The first connection is the control connection, all others are lanes ([`docs/migration-wire.md`]). A [`Tamper`]
//! for each connection and direction determines the changes to its bytes. The relay can also hold the lanes at an
//! exact byte count, so that a test acts at exactly that point.
//!
//! [`docs/migration-wire.md`]: ../../../../../docs/migration-wire.md

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::LOOK;

/// Direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the sender to the receiver.
    There,
    /// From the receiver to the sender.
    Back,
}

/// Modifies a connection's bytes in one direction.
pub trait Tamper: Send {
    /// Takes bytes from one side, and appends to `out` the bytes for the other side. After a return of `false` the
    /// connection ends.
    fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool;
}

/// Creates the [`Tamper`] for a connection number and a direction; `None` leaves the bytes unchanged.
pub type TamperFactory = dyn Fn(usize, Way) -> Option<Box<dyn Tamper>> + Send + Sync;

/// A running relay; its connections are cut when it is dropped.
pub struct Relay {
    shared: Arc<Shared>,
    listener: Arc<TcpListener>,
    address: SocketAddr,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    to: SocketAddr,
    tamper: Box<TamperFactory>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Both ends of each connection, by its number.
    connections: Vec<[Arc<TcpStream>; 2]>,
    /// Bytes of lanes delivered to the receiver.
    carried: u64,
    /// Limit for `carried`, if any.
    hold_at: Option<u64>,
    /// True if a lane has more bytes than the limit permits.
    held: bool,
    /// True if all connections are stalled: nothing is read or written.
    stalled: bool,
    /// Connections with a lower number carry nothing any more, by direction.
    frozen: [usize; 2],
    over: bool,
}

/// One direction of a connection.
#[derive(Clone, Copy)]
struct Lane {
    number: usize,
    way: Way,
    /// True if the connection carries frames in this direction, whose bytes count in `carried`.
    counts: bool,
}

impl State {
    fn is_frozen(&self, lane: Lane) -> bool {
        lane.number < self.frozen[lane.way as usize]
    }
}

impl Relay {
    /// Starts a relay to a receiver.
    ///
    /// # Errors
    /// If no port is free.
    pub fn start(to: SocketAddr) -> anyhow::Result<Self> {
        Self::start_with_tamper(to, |_, _| None)
    }

    /// Starts a relay that modifies the bytes in transit.
    ///
    /// # Errors
    /// If no port is free.
    pub fn start_with_tamper(
        to: SocketAddr,
        tamper: impl Fn(usize, Way) -> Option<Box<dyn Tamper>> + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let listener = Arc::new(TcpListener::bind("127.0.0.1:0")?);
        let address = listener.local_addr()?;
        let shared =
            Arc::new(Shared { to, tamper: Box::new(tamper), state: Mutex::default(), changed: Condvar::new() });
        let (relay, accept_listener) = (Arc::clone(&shared), Arc::clone(&listener));
        let accepting = std::thread::spawn(move || relay.accept(&accept_listener));
        Ok(Self { shared, listener, address, accepting: Some(accepting) })
    }

    /// Returns the address to which the sender connects.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of bytes that the lanes have carried.
    pub fn carried(&self) -> u64 {
        self.shared.lock().carried
    }

    /// Holds the lanes after this number of bytes. The control connection continues.
    pub fn hold_at(&self, bytes: u64) {
        let mut state = self.shared.lock();
        state.hold_at = Some(bytes);
        state.held = false;
        self.shared.changed.notify_all();
    }

    /// Waits until the lanes have carried that number of bytes, and have more.
    ///
    /// # Errors
    /// If they do not.
    pub fn wait_until_held(&self, limit: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit;
        let mut state = self.shared.lock();
        while !state.held {
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "the lanes have carried only {} bytes", state.carried);
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Waits until the lanes have carried at least this number of bytes, and the flow has stopped.
    ///
    /// # Errors
    /// If that does not happen in time.
    pub fn wait_until_full(&self, bytes: u64, limit: Duration) -> anyhow::Result<()> {
        const STABLE_POLLS: u32 = 10;
        let deadline = Instant::now() + limit;
        let (mut before, mut stable_polls) = (0, 0);
        while stable_polls < STABLE_POLLS {
            let carried = self.carried();
            ensure!(Instant::now() < deadline, "the lanes have carried {carried} bytes, and the flow has not stopped");
            stable_polls = if carried >= bytes && carried == before { stable_polls + 1 } else { 0 };
            before = carried;
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Releases all held or stalled connections.
    pub fn release(&self) {
        let mut state = self.shared.lock();
        (state.hold_at, state.held, state.stalled) = (None, false, false);
        self.shared.changed.notify_all();
    }

    /// Stalls all connections in both directions without closing them, like a network that has failed.
    pub fn stall(&self) {
        self.shared.lock().stalled = true;
    }

    /// Stalls the present connections in one direction without closing them; later ones work. A router that has lost
    /// its connection table behaves like this.
    pub fn freeze(&self, way: Way) {
        let mut state = self.shared.lock();
        state.frozen[way as usize] = state.connections.len();
        self.shared.changed.notify_all();
    }

    /// Returns the number of connections so far.
    pub fn connections(&self) -> usize {
        self.shared.lock().connections.len()
    }

    /// Ends all connections with an orderly TCP shutdown.
    pub fn cut(&self) {
        self.cut_matching(|_| true);
    }

    /// Ends the connection with this number.
    pub fn cut_connection(&self, number: usize) {
        self.cut_matching(|is| is == number);
    }

    fn cut_matching(&self, which: impl Fn(usize) -> bool) {
        let state = self.shared.lock();
        for (_, ends) in state.connections.iter().enumerate().filter(|(number, _)| which(*number)) {
            for end in ends {
                // The end may be closed already.
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
        // Dropping the relay shuts the listener down.
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
        let lane = Lane { number, way, counts: number > 0 && way == Way::There };
        std::thread::spawn(move || relay.pump(&from, &to, lane, tamper));
    }

    fn pump(&self, mut from: &TcpStream, to: &TcpStream, lane: Lane, mut tamper: Option<Box<dyn Tamper>>) {
        let mut buffer = vec![0; 64 << 10];
        let mut changed = Vec::new();
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            let mut bytes = &buffer[..len];
            let mut continues = true;
            if let Some(tamper) = &mut tamper {
                changed.clear();
                continues = tamper.pass(bytes, &mut changed);
                bytes = &changed;
            }
            if !self.write(bytes, to, lane) {
                break;
            }
            if !continues {
                let _ = from.shutdown(Shutdown::Both);
                break;
            }
        }
        // A stalled peer must not see the end of the stream either.
        let mut state = self.lock();
        while (state.stalled || state.is_frozen(lane)) && !state.over {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        let _ = to.shutdown(Shutdown::Write);
    }

    /// Writes bytes as the limits permit. Returns `false` when the connection ends.
    fn write(&self, mut bytes: &[u8], mut to: &TcpStream, lane: Lane) -> bool {
        while !bytes.is_empty() {
            let len = self.wait_for_quota(bytes.len(), lane);
            if len == 0 || to.write_all(&bytes[..len]).is_err() {
                return false;
            }
            bytes = &bytes[len..];
        }
        true
    }

    /// Waits until some of `len` bytes may be written. Returns their number; 0 at the end.
    fn wait_for_quota(&self, len: usize, lane: Lane) -> usize {
        let mut state = self.lock();
        loop {
            if state.over {
                return 0;
            }
            let quota = match state.hold_at {
                Some(hold_at) if lane.counts => hold_at.saturating_sub(state.carried),
                _ => u64::MAX,
            };
            if quota > 0 && !state.stalled && !state.is_frozen(lane) {
                let len = quota.min(len as u64);
                if lane.counts {
                    state.carried += len;
                }
                return len as usize;
            }
            if quota == 0 && !state.held {
                state.held = true;
                self.changed.notify_all();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
