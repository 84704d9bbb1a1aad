//! An NBD server over any block device, on the device's own loop.
//!
//! Fixed newstyle with `GO`; simple, structured and extended replies; block status; TLS with certificates.
//! `docs/nbd.md` lists what of the protocol is there.
//!
//! Invariants:
//! - Clients, requests of a client, bytes of buffers of a client, and those of all clients are bounded. A client at a
//!   bound is not read from. One that takes no answers keeps no other client from its small requests, and for a while only
//!   from its large ones.
//! - Where there is no room for another client, one that is idle gives way, or one of a peer that has more than its share.
//! - A client that stalls in the handshake is dropped after a while; one that vanishes takes nothing with it: its
//!   requests end on their own, their answers are thrown away.
//! - A stopping server answers what is under way, fails what is new with `ESHUTDOWN`, then closes.
//!
//! How it fails: what the device says goes to the log, and to the client as the spec's error number, with the device's
//! message where replies have room for one. A client that breaks the protocol is disconnected and named in the log.

mod admission;
mod buffers;
mod connection;
mod handshake;
mod limits;
mod reply;
mod serve;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use larder_block::event_loop::{Listener, Socket};
use larder_block::nbd::transmission::Framing;
use larder_block::signal::Signal;
use larder_block::tls::ServerTls;
use larder_block::{BlockDevice, ByteLen, Loop};

use crate::activity::Activity;
use crate::clients::Clients;
use crate::turns::Turns;
use admission::{Admission, NoRoom, Peer, Room};
use buffers::Buffers;
use limits::Memory;

/// Clients that are turned away within this time of the first are told of together.
const CROWD_TIME: Duration = Duration::from_secs(10);

/// How a device is served.
#[derive(Clone)]
pub struct NbdServerOptions {
    /// The export's name. Clients that ask for the default export (the empty name) get it too.
    pub export: String,
    /// About the export, for people; may be empty.
    pub description: String,
    /// Refuse changes, whatever the device allows.
    pub read_only: bool,
    /// Require TLS, with this certificate.
    pub tls: Option<ServerTls>,
    /// What the clients are counted with, those of other exports perhaps too.
    pub clients: Option<Rc<Clients>>,
    /// Where what is asked for is counted, beside what is counted of this server alone.
    pub activity: Option<Rc<Activity>>,
    /// Clients at a time. For more, one that is idle gives way, or they are turned away.
    pub connections_max: usize,
    /// Requests of one client under way at a time; more wait in the socket.
    pub requests_max: usize,
    /// Buffers of one client's requests under way. One request always fits.
    pub buffer_len_max: ByteLen,
    /// Buffers of all clients' requests under way: a quarter in equal shares for each of [`Self::connections_max`], the
    /// rest for whoever asks. The longest request always fits, which may be more than this.
    pub memory_max: ByteLen,
    /// How long a client that has more than its share of the memory may keep the server waiting, to take its answers or
    /// to send what it has announced, while others wait for memory. It may take twice as long until that is noticed.
    pub stall_timeout: Duration,
    /// How long a handshake may take.
    pub handshake_timeout: Duration,
    /// How long a stopping server waits for what is under way.
    pub stop_timeout: Duration,
}

impl Default for NbdServerOptions {
    fn default() -> Self {
        Self {
            export: String::new(),
            description: String::new(),
            read_only: false,
            tls: None,
            clients: None,
            activity: None,
            connections_max: 64,
            requests_max: 64,
            buffer_len_max: ByteLen::mib(64),
            memory_max: ByteLen::mib(256),
            stall_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(10),
            stop_timeout: Duration::from_secs(10),
        }
    }
}

/// What a server has done; for status output and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NbdServerStatistics {
    /// Clients now, those in the handshake included.
    pub connections: usize,
    /// Clients that were let in, ever.
    pub connections_accepted: u64,
    /// Clients that agreed on extended headers, ever.
    pub connections_extended: u64,
    /// Clients that were turned away because there were too many.
    pub connections_refused: u64,
    /// Requests of all kinds.
    pub requests: u64,
    /// Requests that failed.
    pub requests_failed: u64,
    /// Bytes that reads asked for.
    pub bytes_read: ByteLen,
    /// Bytes that writes brought.
    pub bytes_written: ByteLen,
}

/// Serves one device to any number of clients.
pub struct NbdServer {
    shared: Rc<Shared>,
}

struct Shared {
    on: Loop,
    device: Rc<dyn BlockDevice>,
    turns: Turns,
    activity: Rc<Activity>,
    options: NbdServerOptions,
    buffers: Rc<Buffers>,
    memory: Rc<Memory>,
    counters: Counters,
    /// Reads left to be answered with data, without a question for extents.
    sparse_skipped: Cell<u32>,
    /// The device was asked for extents by a read that has not waited for them.
    is_asking: Cell<bool>,
    admission: Admission,
    /// Clients whose connection has not ended yet, those included that have given way.
    connections: Cell<usize>,
    /// Clients that were turned away after the first of a crowd; `None` if there is no crowd.
    crowd: Cell<Option<u64>>,
    /// No new clients, no new requests.
    stopping: Cell<bool>,
    /// Enough waited.
    cut: Cell<bool>,
    /// A field above has changed, a question for extents has ended, or a client was given up or has to give way.
    changed: Signal,
}

#[derive(Default)]
struct Counters {
    accepted: Cell<u64>,
    extended: Cell<u64>,
    refused: Cell<u64>,
    requests: Cell<u64>,
    /// Those refused included.
    failed: Cell<u64>,
    bytes_read: Cell<u64>,
    bytes_written: Cell<u64>,
}

fn add(counter: &Cell<u64>, amount: u64) {
    counter.set(counter.get().wrapping_add(amount));
}

impl Counters {
    fn request(&self) {
        add(&self.requests, 1);
    }

    fn agreed(&self, framing: Framing) {
        if framing == Framing::Extended {
            add(&self.extended, 1);
        }
    }

    fn failed(&self) {
        add(&self.failed, 1);
    }

    fn read(&self, len: ByteLen) {
        add(&self.bytes_read, len.get());
    }

    fn wrote(&self, len: ByteLen) {
        add(&self.bytes_written, len.get());
    }
}

impl NbdServer {
    /// A server of `device` on `on`, the loop that the device lives on. Nobody can reach it before
    /// [`NbdServer::listen`].
    pub fn new(on: &Loop, device: Rc<dyn BlockDevice>, options: NbdServerOptions) -> Self {
        let shared = Rc::new(Shared {
            on: on.clone(),
            device,
            turns: Turns::new(on),
            activity: options.activity.clone().unwrap_or_else(|| Activity::new(on)),
            buffers: Rc::default(),
            admission: Admission::new(options.connections_max),
            memory: Memory::new(options.memory_max.as_usize(), options.connections_max),
            options,
            counters: Counters::default(),
            sparse_skipped: Cell::new(0),
            is_asking: Cell::new(false),
            connections: Cell::new(0),
            crowd: Cell::new(None),
            stopping: Cell::new(false),
            cut: Cell::new(false),
            changed: Signal::default(),
        });
        on.spawn(connection::drop_stalled(Rc::clone(&shared)));
        Self { shared }
    }

    /// Takes clients from `listener`, unix or TCP, until the server stops. May be called for several.
    pub fn listen(&self, listener: Listener) {
        let accepting = connection::accept_all(Rc::clone(&self.shared), listener);
        self.shared.on.spawn(accepting);
    }

    /// Stops: listens no more, lets requests under way finish, and closes all connections; those of clients that do
    /// not take their answers after [`NbdServerOptions::stop_timeout`]. What was written is flushed only if a client
    /// asked for that.
    pub async fn stop(&self) {
        let shared = &self.shared;
        shared.stopping.set(true);
        shared.changed.raise();
        shared.end_crowd();
        let limit = shared.options.stop_timeout;
        if shared.on.timeout(limit, shared.until_idle()).await.is_none() {
            shared.cut();
            shared.until_empty().await;
        }
    }

    /// What it has done so far.
    pub fn statistics(&self) -> NbdServerStatistics {
        let counters = &self.shared.counters;
        NbdServerStatistics {
            connections: self.shared.admission.len(),
            connections_accepted: counters.accepted.get(),
            connections_extended: counters.extended.get(),
            connections_refused: counters.refused.get(),
            requests: counters.requests.get(),
            requests_failed: counters.failed.get(),
            bytes_read: ByteLen::new(counters.bytes_read.get()),
            bytes_written: ByteLen::new(counters.bytes_written.get()),
        }
    }
}

/// A server that is dropped stops at once.
impl Drop for NbdServer {
    fn drop(&mut self) {
        self.shared.cut();
    }
}

impl Shared {
    fn is_read_only(&self) -> bool {
        self.options.read_only || self.device.geometry().read_only
    }

    fn is_export(&self, name: &str) -> bool {
        name.is_empty() || name == self.options.export
    }

    /// Wakes the client that gives way, if one has to.
    fn wake_victim(&self, room: Room) {
        if room == Room::Made {
            self.changed.raise();
        }
    }

    fn admit(self: &Rc<Self>, socket: Socket) {
        let member = match self.admission.connect(Peer::of(&socket), self.on.now()) {
            Ok((member, room)) => {
                self.wake_victim(room);
                member
            }
            Err(NoRoom) => return self.turn_away(),
        };
        add(&self.counters.accepted, 1);
        self.connections.set(self.connections.get() + 1);
        let shared = Rc::clone(self);
        let client = self.options.clients.as_ref().map(Clients::enter);
        self.on.spawn(async move {
            connection::serve(Rc::clone(&shared), socket, &member).await;
            drop(client);
            shared.admission.leave(&member);
            shared.connections.set(shared.connections.get() - 1);
            shared.changed.raise();
        });
    }

    /// Counts a client that there is no room for. The log gets the first of a crowd, and how many more there were.
    fn turn_away(self: &Rc<Self>) {
        add(&self.counters.refused, 1);
        if let Some(more) = self.crowd.get() {
            self.crowd.set(Some(more + 1));
            return;
        }
        self.crowd.set(Some(0));
        tracing::warn!(
            export = self.options.export,
            limit = self.options.connections_max,
            "too many NBD clients: one was turned away"
        );
        let (on, shared) = (self.on.clone(), Rc::downgrade(self));
        self.on.spawn(async move {
            on.sleep(CROWD_TIME).await;
            if let Some(shared) = shared.upgrade() {
                shared.end_crowd();
            }
        });
    }

    /// Tells how many clients of a crowd were turned away after the first. The next one begins another crowd.
    fn end_crowd(&self) {
        let more = self.crowd.take().unwrap_or(0);
        if more > 0 {
            tracing::warn!(
                export = self.options.export,
                limit = self.options.connections_max,
                "too many NBD clients: {more} more were turned away"
            );
        }
    }

    fn cut(&self) {
        self.stopping.set(true);
        self.cut.set(true);
        self.changed.raise();
    }

    async fn until_stopping(&self) {
        self.changed.until(|| self.stopping.get().then_some(())).await;
    }

    async fn until_idle(&self) {
        let is_idle = || self.connections.get() == 0 && !self.is_asking.get();
        self.changed.when(is_idle).await;
    }

    async fn until_empty(&self) {
        self.changed.until(|| (self.connections.get() == 0).then_some(())).await;
    }
}
