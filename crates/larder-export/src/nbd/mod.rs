//! NBD server for any block device, on the device's own loop.
//!
//! It implements fixed newstyle with `GO`; simple, structured and extended replies; block status; and TLS with
//! certificates. `docs/nbd.md` lists the supported parts of the protocol.
//!
//! Invariants:
//! - The number of clients, of requests of a client, and of buffer bytes of a client and of all clients are bounded.
//!   A client at a bound is not read from. A client that does not receive its replies never delays other clients'
//!   small requests, and delays their large ones only for a while.
//! - If there is no room for another client, an idle one is evicted, or one of a peer that has more than its share.
//! - A client that stalls in the handshake is dropped after a timeout. A client that disconnects leaves nothing
//!   behind: its requests end on their own, and their replies are dropped.
//! - A stopping server answers requests in flight, fails new ones with `ESHUTDOWN`, then closes.
//!
//! Failures: an error of the device is logged, and sent to the client as an error number of the specification, with
//! the device's message where the reply has room for one. A client that violates the protocol is disconnected and
//! named in the log.

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
use crate::piece_scheduler::PieceScheduler;
use admission::{Admission, NoSlot, Peer, SlotSource};
use buffers::Buffers;
use limits::BufferMemory;

/// Time within which further refused clients are reported in one log line.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Configuration of an NBD server.
#[derive(Clone)]
pub struct NbdServerOptions {
    /// Name of the export. Clients that ask for the default export (the empty name) get it, too.
    pub export: String,
    /// Description of the export for people; may be empty.
    pub description: String,
    /// Refuses changes, even if the device allows them.
    pub read_only: bool,
    /// Certificate for TLS, which is then required.
    pub tls: Option<ServerTls>,
    /// Counter of the disk's clients, which other exports may share.
    pub clients: Option<Rc<Clients>>,
    /// Statistics of the disk's requests, in addition to those of this server.
    pub activity: Option<Rc<Activity>>,
    /// Clients at a time. For further ones an idle client is evicted, or they are refused.
    pub connections_max: usize,
    /// Requests of one client in flight; further ones wait in the socket.
    pub requests_max: usize,
    /// Buffer bytes of one client's requests in flight. One request always fits.
    pub buffer_len_max: ByteLen,
    /// Buffer bytes of all clients' requests in flight. A quarter is reserved in equal shares for each of
    /// [`Self::connections_max`], the rest is shared. The longest request always fits, even if it exceeds this.
    pub memory_max: ByteLen,
    /// Time for which a client that exceeds its share of the memory may keep the server waiting, by not receiving
    /// replies or not sending an announced payload, while others wait for memory. Detection may take twice as long.
    pub stall_timeout: Duration,
    /// Time within which a handshake must end.
    pub handshake_timeout: Duration,
    /// Time for which a stopping server waits for requests in flight.
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

/// Statistics of a server; for status output and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NbdServerStatistics {
    /// Clients now, including those in the handshake.
    pub connections: usize,
    /// Clients that were accepted since the start.
    pub connections_accepted: u64,
    /// Clients that agreed on extended headers since the start.
    pub connections_extended: u64,
    /// Clients that were refused because there were too many.
    pub connections_refused: u64,
    /// Requests of all kinds.
    pub requests: u64,
    /// Requests that failed.
    pub requests_failed: u64,
    /// Bytes that reads requested.
    pub bytes_read: ByteLen,
    /// Bytes that writes contained.
    pub bytes_written: ByteLen,
}

/// NBD server of one device for any number of clients.
pub struct NbdServer {
    shared: Rc<Shared>,
}

struct Shared {
    on: Loop,
    device: Rc<dyn BlockDevice>,
    scheduler: PieceScheduler,
    activity: Rc<Activity>,
    options: NbdServerOptions,
    buffers: Rc<Buffers>,
    memory: Rc<BufferMemory>,
    counters: Counters,
    /// Number of next reads that are answered with data, without a query of extents.
    sparse_skipped: Cell<u32>,
    /// True while an extent query that no read waits for is in flight.
    has_extent_query: Cell<bool>,
    admission: Admission,
    /// Clients whose connection has not ended yet, including evicted ones.
    connections: Cell<usize>,
    /// Clients that were refused after the first of a burst; `None` if there is no burst.
    burst_refusals: Cell<Option<u64>>,
    /// True if neither clients nor requests are accepted any more.
    stopping: Cell<bool>,
    /// True if the stop timeout has expired.
    aborted: Cell<bool>,
    /// Raised when a field above changes, an extent query ends, or a client is evicted or marked for disconnection.
    changed: Signal,
}

#[derive(Default)]
struct Counters {
    accepted: Cell<u64>,
    extended: Cell<u64>,
    refused: Cell<u64>,
    requests: Cell<u64>,
    /// Failed requests, including refused ones.
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

    fn negotiated(&self, framing: Framing) {
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
    /// Creates a server of `device` on `on`, the loop that the device runs on. Clients can connect only after
    /// [`NbdServer::listen`].
    pub fn new(on: &Loop, device: Rc<dyn BlockDevice>, options: NbdServerOptions) -> Self {
        let shared = Rc::new(Shared {
            on: on.clone(),
            device,
            scheduler: PieceScheduler::new(on),
            activity: options.activity.clone().unwrap_or_else(|| Activity::new(on)),
            buffers: Rc::default(),
            admission: Admission::new(options.connections_max),
            memory: BufferMemory::new(options.memory_max.as_usize(), options.connections_max),
            options,
            counters: Counters::default(),
            sparse_skipped: Cell::new(0),
            has_extent_query: Cell::new(false),
            connections: Cell::new(0),
            burst_refusals: Cell::new(None),
            stopping: Cell::new(false),
            aborted: Cell::new(false),
            changed: Signal::default(),
        });
        on.spawn(connection::drop_stalled(Rc::clone(&shared)));
        Self { shared }
    }

    /// Accepts clients from `listener`, unix or TCP, until the server stops. May be called for several listeners.
    pub fn listen(&self, listener: Listener) {
        let accepting = connection::accept_all(Rc::clone(&self.shared), listener);
        self.shared.on.spawn(accepting);
    }

    /// Stops the server: stops listening, lets requests in flight finish, and closes all connections. Connections of
    /// clients that do not receive their replies are closed after [`NbdServerOptions::stop_timeout`]. Written data is
    /// flushed only if a client asked for that.
    pub async fn stop(&self) {
        let shared = &self.shared;
        shared.stopping.set(true);
        shared.changed.raise();
        shared.end_burst();
        let limit = shared.options.stop_timeout;
        if shared.on.timeout(limit, shared.until_idle()).await.is_none() {
            shared.abort();
            shared.until_empty().await;
        }
    }

    /// Returns the statistics.
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

/// Stops the server at once.
impl Drop for NbdServer {
    fn drop(&mut self) {
        self.shared.abort();
    }
}

impl Shared {
    fn is_read_only(&self) -> bool {
        self.options.read_only || self.device.geometry().read_only
    }

    fn is_export(&self, name: &str) -> bool {
        name.is_empty() || name == self.options.export
    }

    /// Wakes the evicted client, if there is one.
    fn wake_evicted(&self, source: SlotSource) {
        if source == SlotSource::Evicted {
            self.changed.raise();
        }
    }

    fn admit(self: &Rc<Self>, socket: Socket) {
        let peer = Peer::of(&socket);
        let member = match self.admission.connect(peer, self.on.now()) {
            Ok((member, room)) => {
                self.wake_evicted(room);
                member
            }
            Err(NoSlot) => return self.refuse(),
        };
        add(&self.counters.accepted, 1);
        self.connections.set(self.connections.get() + 1);
        let span = tracing::debug_span!("nbd", client = self.counters.accepted.get(), ?peer);
        let shared = Rc::clone(self);
        let client = self.options.clients.as_ref().map(Clients::register);
        self.on.spawn(async move {
            connection::serve(Rc::clone(&shared), socket, &member, &span).await;
            drop(client);
            shared.admission.remove_client(&member);
            shared.connections.set(shared.connections.get() - 1);
            shared.changed.raise();
        });
    }

    /// Counts a client that is refused. The first of a burst is logged, and later the number of further ones.
    fn refuse(self: &Rc<Self>) {
        add(&self.counters.refused, 1);
        if let Some(more) = self.burst_refusals.get() {
            self.burst_refusals.set(Some(more + 1));
            return;
        }
        self.burst_refusals.set(Some(0));
        tracing::warn!(
            event = "nbd-refused",
            export = self.options.export,
            limit = self.options.connections_max,
            "too many NBD clients: one was refused"
        );
        let (on, shared) = (self.on.clone(), Rc::downgrade(self));
        self.on.spawn(async move {
            on.sleep(REFUSAL_LOG_INTERVAL).await;
            if let Some(shared) = shared.upgrade() {
                shared.end_burst();
            }
        });
    }

    /// Logs the number of clients that were refused after the first of a burst. The next one begins another burst.
    fn end_burst(&self) {
        let more = self.burst_refusals.take().unwrap_or(0);
        if more > 0 {
            tracing::warn!(
                event = "nbd-refused",
                export = self.options.export,
                limit = self.options.connections_max,
                "too many NBD clients: {more} more were refused"
            );
        }
    }

    fn abort(&self) {
        self.stopping.set(true);
        self.aborted.set(true);
        self.changed.raise();
    }

    async fn until_stopping(&self) {
        self.changed.until(|| self.stopping.get().then_some(())).await;
    }

    async fn until_idle(&self) {
        let is_idle = || self.connections.get() == 0 && !self.has_extent_query.get();
        self.changed.when(is_idle).await;
    }

    async fn until_empty(&self) {
        self.changed.until(|| (self.connections.get() == 0).then_some(())).await;
    }
}
