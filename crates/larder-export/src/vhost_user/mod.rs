//! vhost-user-blk device: QEMU passes the guest's memory and virtqueues over a unix socket, and requests reach the
//! disk's thread directly from the guest, bypassing QEMU.
//!
//! [`message`] parses the protocol, [`receive`] reads messages, [`session`] executes them, [`memory`] maps the
//! guest's memory, [`ring`] reads virtqueues, [`queue`] runs requests and [`blk`] interprets them. For a successor
//! process, [`inflight`] records the requests in flight, [`active_queues`] the active queues, [`frontend_state`] the
//! state that it cannot query, and [`message_record`] the messages that the front-end does not repeat; [`handover`]
//! hands a connection over to it.

mod active_queues;
pub mod blk;
pub mod frontend_state;
pub mod handover;
pub mod inflight;
pub mod memory;
pub mod message;
pub mod message_record;
mod queue;
mod receive;
pub mod ring;
mod serial;
mod session;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

use larder_block::event_loop::{Listener, Socket};
use larder_block::signal::first_of;
use larder_block::{BlockDevice, ByteLen, Loop};

pub use serial::Serial;
pub use session::SessionError;

use crate::activity::Activity;
use crate::clients::Clients;
use crate::external_mapping::PagerClient;
use crate::piece_scheduler::PieceScheduler;
use active_queues::ActiveQueues;
use handover::{HandoverOptions, StoredConnection};
use queue::{LostMemory, Shared};
use session::{HandoverSignal, Session, SessionEnd, warn_not_stored};

/// Largest number of queues that a disk offers; QEMU uses as many as its `num-queues` option says.
pub const QUEUES_MAX: u16 = 64;

/// Smallest queue size that can be announced: a request of one segment.
pub const QUEUE_SIZE_MIN: u16 = 4;

/// Largest queue size, as in QEMU.
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// Default queue size of QEMU's vhost-user-blk.
pub const QUEUE_SIZE_DEFAULT: u16 = 128;

/// Time for which a silent front-end may block another one before the block is logged. A front-end that has just
/// ended makes room sooner.
const SILENCE_WARNING_DELAY: Duration = Duration::from_secs(3);

/// Options of a vhost-user-blk device.
#[derive(Clone, Debug)]
pub struct VhostUserOptions {
    /// Number of queues offered, 1 to [`QUEUES_MAX`].
    pub queues: u16,
    /// Number of descriptors that the front-end will give each queue (QEMU's `queue-size`), which limits the size of
    /// a request. A power of two (virtio 1.2, section 2.7), from [`QUEUE_SIZE_MIN`] to [`QUEUE_SIZE_MAX`].
    pub queue_size: u16,
    /// Serial number, which the guest sees in `/dev/disk/by-id`.
    pub serial: Serial,
    /// Sector size that the guest sees, in bytes: 512 or 4096, as real disks have. The device's own block size is
    /// presented if it is larger. The disk's size must be a multiple of it.
    pub block_size: u32,
}

impl Default for VhostUserOptions {
    fn default() -> Self {
        Self { queues: QUEUES_MAX, queue_size: QUEUE_SIZE_DEFAULT, serial: Serial::default(), block_size: 512 }
    }
}

impl VhostUserOptions {
    /// Checks that the options are in range.
    ///
    /// # Errors
    /// An option is out of range.
    pub fn check(&self) -> Result<(), OptionsError> {
        if !(1..=QUEUES_MAX).contains(&self.queues) {
            return Err(OptionsError::Queues(self.queues));
        }
        if !self.queue_size.is_power_of_two() || !(QUEUE_SIZE_MIN..=QUEUE_SIZE_MAX).contains(&self.queue_size) {
            return Err(OptionsError::QueueSize(self.queue_size));
        }
        if !matches!(self.block_size, 512 | 4096) {
            return Err(OptionsError::BlockSize(self.block_size));
        }
        Ok(())
    }
}

/// Reason why options are invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum OptionsError {
    #[error("queues {0}: a disk has 1 to {QUEUES_MAX} virtqueues")]
    Queues(u16),
    #[error("queue-size {0}: a queue has a power of two of descriptors, from {QUEUE_SIZE_MIN} to {QUEUE_SIZE_MAX}")]
    QueueSize(u16),
    #[error("block-size {0}: a disk has sectors of 512 or 4096 bytes")]
    BlockSize(u32),
    #[error(
        "{disk} is {size}, no multiple of the sectors of {block_size} bytes that the guest sees: the guest could not reach \
         the last {rest} bytes; make the image larger (truncate -s %{block_size}), or the sectors smaller"
    )]
    PartialSector { disk: String, size: ByteLen, block_size: u32, rest: u64 },
    #[error("cannot allocate the memory shared with the pager: {0}")]
    SharedMemory(std::io::ErrorKind),
}

/// Server of a disk for one front-end at a time. The next one is accepted when all requests of the previous one are
/// done.
pub struct VhostUserServer {
    on: Loop,
    shared: Rc<Shared>,
    queues: u16,
    current: RefCell<Option<Rc<Socket>>>,
    stopping: Cell<bool>,
    clients: OnceCell<Rc<Clients>>,
    /// Store that keeps the connection for the next process.
    handover_options: OnceCell<HandoverOptions>,
    /// Connection that the previous process left.
    inherited: RefCell<Option<(StoredConnection, OwnedFd)>>,
    /// Check of the peers that may connect; without it every process may.
    admission_check: OnceCell<AdmissionCheck>,
    /// Connections that were accepted while another front-end is served.
    waiting: RefCell<VecDeque<Socket>>,
    handover: Rc<HandoverSignal>,
    /// Number of front-ends that were served so far.
    sessions: Cell<u64>,
}

/// Check of a connecting process; returns the reason if it may not use the disk.
pub type AdmissionCheck = Box<dyn Fn(BorrowedFd<'_>) -> Result<(), String>>;

/// Front-ends that wait to be served, in addition to those in the listener's queue.
const WAITING_FRONT_ENDS_MAX: usize = 8;

/// Handling of the front-end's connection when its server stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// The connection is closed.
    Close,
    /// The connection is left to the next process, if it is stored for that; otherwise it is closed.
    HandOver,
}

impl VhostUserServer {
    /// Creates a server for `device`, on the device's own loop. Requests are counted in `activity`.
    ///
    /// # Errors
    /// The options are out of range, or there is no memory.
    pub fn new(
        on: &Loop,
        device: Rc<dyn BlockDevice>,
        options: &VhostUserOptions,
        activity: &Rc<Activity>,
    ) -> Result<Rc<Self>, OptionsError> {
        options.check()?;
        let size = device.geometry().size;
        let rest = size.get() % u64::from(options.block_size);
        if rest > 0 {
            return Err(OptionsError::PartialSector {
                disk: device.name().to_string(),
                size,
                block_size: options.block_size,
                rest,
            });
        }
        let in_flight_counter =
            PagerClient::instance().map_err(|error| OptionsError::SharedMemory(error.kind()))?.request_counter();
        Ok(Rc::new(Self {
            on: on.clone(),
            shared: Rc::new(Shared {
                device,
                serial: options.serial,
                block_size: options.block_size,
                queue_size: options.queue_size,
                write_cache: Cell::new(true),
                driver_flushes: Cell::new(true),
                dirty_log: RefCell::new(None),
                activity: Rc::clone(activity),
                scheduler: PieceScheduler::new(on),
                paused: Cell::new(false),
                lost_memory: LostMemory::default(),
                in_flight_weight: Cell::new(0),
                running_queues: RefCell::default(),
                active_queues: ActiveQueues::default(),
                in_flight_counter,
            }),
            queues: options.queues,
            current: RefCell::new(None),
            stopping: Cell::new(false),
            clients: OnceCell::new(),
            handover_options: OnceCell::new(),
            inherited: RefCell::new(None),
            waiting: RefCell::default(),
            admission_check: OnceCell::new(),
            handover: Rc::default(),
            sessions: Cell::new(0),
        }))
    }

    /// Counts front-ends among `clients`; must be called only once.
    pub fn set_clients(&self, clients: &Rc<Clients>) {
        let _ = self.clients.set(Rc::clone(clients));
    }

    /// Closes connections that `check` refuses, and logs the reason that it returns. Must be called only once,
    /// before [`VhostUserServer::run`].
    pub fn set_admission_check(&self, check: AdmissionCheck) {
        let _ = self.admission_check.set(check);
    }

    /// Stores connections for the next process, and continues with the one that was left there. Must be called only
    /// once, before [`VhostUserServer::run`].
    pub fn enable_handover(&self, options: &HandoverOptions) {
        match StoredConnection::resume(options) {
            Ok(inherited) => *self.inherited.borrow_mut() = inherited,
            Err(error) => tracing::warn!(
                event = "guest-disconnected",
                disk = options.disk,
                "cannot continue the front-end's connection, so the front-end has to reconnect: {error}"
            ),
        }
        let _ = self.handover_options.set(options.clone());
    }

    /// Returns whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.current.borrow().is_some()
    }

    /// Pauses or resumes all queues. A paused queue accepts no request; messages are still answered.
    pub fn set_paused(&self, paused: bool) {
        // Queues recheck the flag when the loop has returned from the caller.
        if self.shared.paused.replace(paused) == paused {
            return;
        }
        if paused {
            tracing::debug!(event = "queues-paused", "the guest's queues accept no requests");
        } else {
            tracing::debug!(event = "queues-resumed", "the guest's queues accept requests again");
        }
    }

    /// Returns whether a front-end has started a queue and not stopped it: its guest runs.
    pub fn has_running_queue(&self) -> bool {
        !self.shared.running_queues.borrow().is_empty()
    }

    /// Records the active queues in `file` for a successor process, and continues with the queues that are recorded
    /// there. The file must belong to this disk alone and be empty at first. Must be called only once, before
    /// [`VhostUserServer::run`].
    ///
    /// # Errors
    /// The file cannot be read or written, or has other contents.
    pub fn persist_active_queues(&self, file: File) -> io::Result<()> {
        self.shared.active_queues.persist_in(file)
    }

    /// Returns whether the front-end has fetched the position of every started queue (GET_VRING_BASE).
    pub fn all_bases_fetched(&self) -> bool {
        self.shared.active_queues.queues().next().is_none()
    }

    /// Returns a queue whose position the front-end does not know, so that its stopped guest could not continue on
    /// another host. Such a queue runs, or its server was killed or its connection had ended before the front-end
    /// fetched the position. A queue that was started at the front-end's position, and has taken no request since, is
    /// still at that position.
    pub fn queue_with_stale_base(&self) -> Option<u16> {
        let running = self.shared.running_queues.borrow();
        let is_base_current = |index: u16| {
            let queue = running.iter().filter_map(Weak::upgrade).find(|queue| queue.index() == index);
            queue.is_some_and(|queue| !queue.base_differs())
        };
        self.shared.active_queues.queues().find(|index| !is_base_current(*index))
    }

    /// Accepts and serves front-ends, one after the other, until [`VhostUserServer::stop`].
    ///
    /// # Errors
    /// The listening socket is broken.
    pub async fn run(&self, listener: &Listener) -> std::io::Result<()> {
        while !self.stopping.get() {
            let inherited = self.inherited.borrow_mut().take();
            let (socket, stored) = match inherited {
                Some((kept, connection)) => (Socket::from_descriptor(&self.on, connection)?, Some(kept)),
                None => {
                    let waiting = self.waiting.borrow_mut().pop_front();
                    match waiting {
                        Some(next) => (next, None),
                        None => (self.accept(listener).await?, None),
                    }
                }
            };
            first_of(self.serve_connection(socket, stored), self.watch_waiting(listener)).await;
        }
        Ok(())
    }

    /// Accepts the next front-end that may connect, and closes other connections.
    async fn accept(&self, listener: &Listener) -> io::Result<Socket> {
        loop {
            let socket = listener.accept(&self.on).await?;
            let Some(check) = self.admission_check.get() else {
                return Ok(socket);
            };
            match check(socket.as_fd()) {
                Ok(()) => return Ok(socket),
                Err(why) => tracing::warn!(
                    event = "guest-refused",
                    disk = %self.shared.device.name(),
                    "refused a connection: {why}"
                ),
            }
        }
    }

    /// Logs once, while a front-end is served, that another one waits. With an admission check, permitted connections
    /// are also taken out of the listener's queue, so that others do not fill it. Never completes.
    async fn watch_waiting(&self, listener: &Listener) {
        if self.admission_check.get().is_none() {
            let readable = listener.readable().await;
            self.on.sleep(SILENCE_WARNING_DELAY).await;
            // A broken listener is reported when the next front-end is accepted.
            if readable.is_ok() {
                self.warn_of_waiting();
            }
            return std::future::pending().await;
        }
        let mut has_warned = false;
        while let Ok(waiting) = self.accept(listener).await {
            // A connection that is not stored is closed by the drop.
            if self.waiting.borrow().len() < WAITING_FRONT_ENDS_MAX {
                self.waiting.borrow_mut().push_back(waiting);
            }
            if !std::mem::replace(&mut has_warned, true) {
                self.on.sleep(SILENCE_WARNING_DELAY).await;
                self.warn_of_waiting();
            }
        }
        std::future::pending().await
    }

    fn warn_of_waiting(&self) {
        tracing::warn!(
            event = "guest-waits",
            disk = %self.shared.device.name(),
            "another front-end waits: the disk serves one client at a time, and {} is connected",
            self.describe_front_end()
        );
    }

    /// Serves a connected front-end until it disconnects.
    pub async fn serve(&self, socket: Socket) {
        self.serve_connection(socket, None).await;
    }

    /// Serves a front-end; `stored` is its stored state if the previous process served it.
    async fn serve_connection(&self, socket: Socket, stored: Option<StoredConnection>) {
        let _client = self.clients.get().map(Clients::register);
        let socket = Rc::new(socket);
        *self.current.borrow_mut() = Some(Rc::clone(&socket));
        let disk = self.shared.device.name();
        self.sessions.set(self.sessions.get() + 1);
        let span = tracing::debug_span!("vhost-user", session = self.sessions.get());
        let is_new = stored.is_none();
        if is_new {
            tracing::info!(parent: &span, event = "guest-connected", %disk, "front-end connected");
        }
        let mut session = Session::new(
            &self.on,
            Rc::clone(&socket),
            Rc::clone(&self.shared),
            self.queues,
            Rc::clone(&self.handover),
            span.clone(),
        );
        let done = Rc::new(Cell::new(false));
        self.on.spawn(announce_sizes(Rc::clone(&self.shared), session.backend_channel(), Rc::clone(&done)));
        let kept = match (stored, self.handover_options.get()) {
            (None, Some(options)) => {
                let created = StoredConnection::create(&self.on, options, &*socket).await;
                created.inspect_err(warn_not_stored).ok()
            }
            (kept, _) => kept,
        };
        if let Some(stored) = kept {
            session.set_stored_connection(stored);
        }
        if is_new {
            self.wait_for_first_message(&socket).await;
        }
        match session.run().await {
            Ok(SessionEnd::Closed) => {
                tracing::info!(parent: &span, event = "guest-disconnected", %disk, "front-end disconnected");
            }
            Ok(SessionEnd::HandedOver) => tracing::info!(
                parent: &span, event = "hand-over", %disk,
                "the front-end's connection is handed over to the next process"
            ),
            Err(error) if self.stopping.get() => {
                tracing::debug!(parent: &span, event = "guest-disconnected", "the session has ended: {error}");
            }
            Err(error) => tracing::error!(
                parent: &span, event = "guest-disconnected", %disk,
                "connection to the front-end closed: {error}"
            ),
        }
        done.set(true);
        // Wakes the announcer, which then ends.
        self.shared.device.size_changes().wake();
        *self.current.borrow_mut() = None;
    }

    /// Waits for a front-end's first message, which QEMU sends at once. A connected front-end keeps all others out.
    async fn wait_for_first_message(&self, socket: &Socket) {
        let readable = async {
            // Errors are reported by the session.
            let _ = socket.readable().await;
        };
        let mut first_message = pin!(first_of(readable, self.handover.requested()));
        if self.on.timeout(SILENCE_WARNING_DELAY, first_message.as_mut()).await.is_none() {
            tracing::warn!(
                event = "guest-waits",
                disk = %self.shared.device.name(),
                "{} has connected, sends nothing, and blocks other front-ends; is it a client of another protocol, such as NBD?",
                self.describe_front_end()
            );
            first_message.await;
        }
    }

    /// Returns a description of the connected process, for messages.
    fn describe_front_end(&self) -> String {
        let current = self.current.borrow();
        let process = current.as_ref().and_then(|socket| socket.peer_process());
        process.map_or_else(|| "a client".to_owned(), |process| format!("a client ({process})"))
    }

    /// Accepts no more requests. The requests in flight finish, then the present connection ends as `how` says.
    pub fn stop(&self, how: StopMode) {
        self.stopping.set(true);
        match (how, self.current.borrow().as_ref()) {
            (StopMode::HandOver, _) => self.handover.request(),
            (StopMode::Close, Some(socket)) => socket.shutdown(),
            (StopMode::Close, None) => {}
        }
    }
}

/// Notifies the front-end of changes of the disk's size, by configuration changes.
async fn announce_sizes(shared: Rc<Shared>, channel: Rc<RefCell<Option<Socket>>>, done: Rc<Cell<bool>>) {
    let changes = shared.device.size_changes();
    let mut generation = changes.generation();
    while !done.get() {
        changes.changed_after_or(generation, || done.get()).await;
        if changes.generation() == generation {
            continue;
        }
        generation = changes.generation();
        shared.warn_partial_sector();
        session::announce_size(Rc::clone(&channel)).await;
    }
}
