//! A disk as a vhost-user-blk device: QEMU hands us the guest's memory and virtqueues over a unix socket, and requests
//! go from the guest to the disk's thread without QEMU.
//!
//! [`message`] parses the protocol, [`receive`] reads messages, [`session`] carries them out, [`memory`] maps the guest,
//! [`ring`] reads virtqueues, [`inflight`] notes what is under way so that a successor can take it up, [`lent`] which queues
//! run, [`memo`] what a successor could not ask for, [`record`] what the front-end would not say again, [`takeover`] hands a
//! connection to the next process, [`queue`] runs requests and [`blk`] says what they mean.

pub mod blk;
pub mod inflight;
mod lent;
pub mod memo;
pub mod memory;
pub mod message;
mod queue;
mod receive;
pub mod record;
pub mod ring;
mod serial;
mod session;
pub mod takeover;

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
use crate::turns::Turns;
use crate::view::View;
use lent::Lent;
use queue::{Lost, Shared};
use session::{End, Leave, Session, not_kept};
use takeover::{Keeping, Kept};

/// The most queues that a disk offers; QEMU takes as many as its `num-queues` says.
pub const QUEUES_MAX: u16 = 64;

/// The smallest queue size that can be announced: a request of one segment.
pub const QUEUE_SIZE_MIN: u16 = 4;

/// The largest, as QEMU has it.
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// What QEMU's vhost-user-blk uses unless it is told otherwise.
pub const QUEUE_SIZE_DEFAULT: u16 = 128;

/// How long a front-end may say nothing, and another one wait, before the log tells of it. One that has just ended makes
/// room sooner.
const QUIET: Duration = Duration::from_secs(3);

/// How a disk presents itself.
#[derive(Clone, Debug)]
pub struct VhostUserOptions {
    /// Queues offered, 1 to [`QUEUES_MAX`].
    pub queues: u16,
    /// The number of descriptors that the front-end will give each queue (QEMU's `queue-size`); what a guest may put
    /// into one request follows from it. A power of two (virtio 1.2, section 2.7), [`QUEUE_SIZE_MIN`] to
    /// [`QUEUE_SIZE_MAX`].
    pub queue_size: u16,
    /// Serial number; the guest sees it in `/dev/disk/by-id`.
    pub serial: Serial,
    /// Sector size that the guest sees, in bytes: 512 or 4096, as disks have it. The device's own block size is
    /// presented if it is larger. The disk's size must be a multiple of it.
    pub block_size: u32,
}

impl Default for VhostUserOptions {
    fn default() -> Self {
        Self {
            queues: QUEUES_MAX,
            queue_size: QUEUE_SIZE_DEFAULT,
            serial: Serial::default(),
            block_size: 512,
        }
    }
}

impl VhostUserOptions {
    /// Checks that they are in range.
    ///
    /// # Errors
    /// They are not.
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

/// Why the options are wrong.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum OptionsError {
    #[error("queues {0}: a disk has 1 to {QUEUES_MAX} virtqueues")]
    Queues(u16),
    #[error("queues of {0} descriptors; a queue has a power of two of them, from {QUEUE_SIZE_MIN} to {QUEUE_SIZE_MAX}")]
    QueueSize(u16),
    #[error("block-size {0}: a disk has sectors of 512 or 4096 bytes")]
    BlockSize(u32),
    #[error(
        "{disk} is {size}, no multiple of the sectors of {block_size} bytes that the guest is to see: it could not reach \
         the last {rest} bytes; make the image larger (truncate -s %{block_size}), or the sectors smaller"
    )]
    PartOfSector {
        disk: String,
        size: ByteLen,
        block_size: u32,
        rest: u64,
    },
    #[error("there is no memory for counting what is under way in guest memory: {0}")]
    View(std::io::ErrorKind),
}

/// Serves a disk to one front-end at a time; the next one is accepted when the last one's requests are done.
pub struct VhostUserServer {
    on: Loop,
    shared: Rc<Shared>,
    queues: u16,
    current: RefCell<Option<Rc<Socket>>>,
    stopping: Cell<bool>,
    clients: OnceCell<Rc<Clients>>,
    /// Where the connection is kept for the next process.
    keeping: OnceCell<Keeping>,
    /// What the process before this one has left.
    left: RefCell<Option<(Kept, OwnedFd)>>,
    /// Who may connect; everybody if that is not said.
    admits: OnceCell<Admits>,
    /// Those that have connected while another one is served, and may.
    next: RefCell<VecDeque<Socket>>,
    leave: Rc<Leave>,
}

/// Says why the process at the other end of a connection may not use the disk, if it may not.
pub type Admits = Box<dyn Fn(BorrowedFd<'_>) -> Result<(), String>>;

/// Front-ends that wait to be served, beside those in the listener's queue.
const NEXT_MAX: usize = 8;

/// What becomes of a front-end's connection when its server stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It is closed.
    Close,
    /// It is left to the next process, if it is kept for that; else it is closed.
    Leave,
}

impl VhostUserServer {
    /// A server for `device`, on the device's own loop. What it is asked for is counted in `activity`.
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
            return Err(OptionsError::PartOfSector {
                disk: device.name().to_string(),
                size,
                block_size: options.block_size,
                rest,
            });
        }
        let under_way = View::own()
            .map_err(|error| OptionsError::View(error.kind()))?
            .under_way();
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
                turns: Turns::new(on),
                rests: Cell::new(false),
                lost: Lost::default(),
                weight: Cell::new(0),
                at_work: RefCell::default(),
                lent: Lent::default(),
                under_way,
            }),
            queues: options.queues,
            current: RefCell::new(None),
            stopping: Cell::new(false),
            clients: OnceCell::new(),
            keeping: OnceCell::new(),
            left: RefCell::new(None),
            next: RefCell::default(),
            admits: OnceCell::new(),
            leave: Rc::default(),
        }))
    }

    /// Counts front-ends among `clients`, which is said once.
    pub fn count_among(&self, clients: &Rc<Clients>) {
        let _ = self.clients.set(Rc::clone(clients));
    }

    /// Closes the connections of those that `admits` refuses; what it returns says why. Said once, before
    /// [`VhostUserServer::run`].
    pub fn admit(&self, admits: Admits) {
        let _ = self.admits.set(admits);
    }

    /// Keeps connections for the next process, and goes on with the one that was left there. Said once, before
    /// [`VhostUserServer::run`].
    pub fn keep_in(&self, keeping: &Keeping) {
        match Kept::take_up(keeping) {
            Ok(left) => *self.left.borrow_mut() = left,
            Err(error) => tracing::warn!(disk = keeping.disk, "the front-end has to connect again: {error}"),
        }
        let _ = self.keeping.set(keeping.clone());
    }

    /// Whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.current.borrow().is_some()
    }

    /// Has no queue take a request, while all else is answered, or has them go on.
    pub fn rest(&self, rests: bool) {
        // Queues look again when the loop has done what calls this.
        self.shared.rests.set(rests);
    }

    /// Whether a front-end has started a queue and not stopped it: its guest runs.
    pub fn is_at_work(&self) -> bool {
        !self.shared.at_work.borrow().is_empty()
    }

    /// Has a process after this one know which queues were not taken back, by this file, which is its disk's alone and empty
    /// at first; this one goes on with what is in it. Said once, before [`VhostUserServer::run`].
    ///
    /// # Errors
    /// It cannot be read or written, or is something else.
    pub fn note_queues_in(&self, file: File) -> io::Result<()> {
        self.shared.lent.keep_in(file)
    }

    /// Whether no queue was started since it was taken back.
    pub fn all_taken_back(&self) -> bool {
        self.shared.lent.queues().next().is_none()
    }

    /// A queue of which the front-end does not know where it is, so that its guest, once stopped, could not go on elsewhere:
    /// it runs, or its server was killed, or its connection had ended, before the front-end had asked. One that has been
    /// started where the front-end said, and has taken nothing since, is where it thinks.
    pub fn not_taken_back(&self) -> Option<u16> {
        let at_work = self.shared.at_work.borrow();
        let is_as_told = |index: u16| {
            let queue = at_work
                .iter()
                .filter_map(Weak::upgrade)
                .find(|queue| queue.index() == index);
            queue.is_some_and(|queue| !queue.has_moved())
        };
        self.shared.lent.queues().find(|index| !is_as_told(*index))
    }

    /// Accepts and serves front-ends, one after the other, until [`VhostUserServer::stop`].
    ///
    /// # Errors
    /// The listening socket is broken.
    pub async fn run(&self, listener: &Listener) -> std::io::Result<()> {
        while !self.stopping.get() {
            let left = self.left.borrow_mut().take();
            let (socket, kept) = match left {
                Some((kept, connection)) => (Socket::from_descriptor(&self.on, connection)?, Some(kept)),
                None => {
                    let next = self.next.borrow_mut().pop_front();
                    match next {
                        Some(next) => (next, None),
                        None => (self.accept(listener).await?, None),
                    }
                }
            };
            first_of(self.serve_kept(socket, kept), self.take_next(listener)).await;
        }
        Ok(())
    }

    /// Accepts the next front-end that may connect, and closes the connections of others.
    async fn accept(&self, listener: &Listener) -> io::Result<Socket> {
        loop {
            let socket = listener.accept(&self.on).await?;
            let Some(admits) = self.admits.get() else {
                return Ok(socket);
            };
            match admits(socket.as_fd()) {
                Ok(()) => return Ok(socket),
                Err(why) => tracing::warn!(
                    disk = %self.shared.device.name(),
                    "a connection was closed: {why}"
                ),
            }
        }
    }

    /// While a front-end is served, tells once that another one waits. Where not everybody may connect, those that do are taken
    /// out of the listener's queue, so that strangers do not fill it. Never ends.
    async fn take_next(&self, listener: &Listener) {
        if self.admits.get().is_none() {
            let waits = listener.readable().await;
            self.on.sleep(QUIET).await;
            // A broken listener is reported when the next one is accepted.
            if waits.is_ok() {
                self.tell_of_next();
            }
            return std::future::pending().await;
        }
        let mut is_told = false;
        while let Ok(next) = self.accept(listener).await {
            // One that is not taken is closed.
            if self.next.borrow().len() < NEXT_MAX {
                self.next.borrow_mut().push_back(next);
            }
            if !std::mem::replace(&mut is_told, true) {
                self.on.sleep(QUIET).await;
                self.tell_of_next();
            }
        }
        std::future::pending().await
    }

    fn tell_of_next(&self) {
        tracing::warn!(
            disk = %self.shared.device.name(),
            "another front-end waits: the disk is served to one at a time, and {} is connected",
            self.front_end()
        );
    }

    /// Serves a front-end that is connected already, until it disconnects.
    pub async fn serve(&self, socket: Socket) {
        self.serve_kept(socket, None).await;
    }

    /// Serves a front-end; one that was served by the process before this one comes with what was kept of it.
    async fn serve_kept(&self, socket: Socket, kept: Option<Kept>) {
        let _client = self.clients.get().map(Clients::enter);
        let socket = Rc::new(socket);
        *self.current.borrow_mut() = Some(Rc::clone(&socket));
        let disk = self.shared.device.name();
        let is_new = kept.is_none();
        if is_new {
            tracing::info!(%disk, "front-end connected");
        }
        let mut session = Session::new(
            &self.on,
            Rc::clone(&socket),
            Rc::clone(&self.shared),
            self.queues,
            Rc::clone(&self.leave),
        );
        let done = Rc::new(Cell::new(false));
        self.on.spawn(announce_sizes(
            Rc::clone(&self.shared),
            session.backend_channel(),
            Rc::clone(&done),
        ));
        let kept = match (kept, self.keeping.get()) {
            (None, Some(keeping)) => {
                let begun = Kept::begin(&self.on, keeping, &*socket).await;
                begun.inspect_err(not_kept).ok()
            }
            (kept, _) => kept,
        };
        if let Some(kept) = kept {
            session.keep(kept);
        }
        if is_new {
            self.until_it_speaks(&socket).await;
        }
        match session.run().await {
            Ok(End::Closed) => tracing::info!(%disk, "front-end disconnected"),
            Ok(End::Left) => tracing::info!(%disk, "the front-end's connection is left to the next process"),
            Err(_) if self.stopping.get() => {}
            Err(error) => tracing::error!(%disk, "connection to the front-end closed: {error}"),
        }
        done.set(true);
        // Lets the announcer see that it is done.
        self.shared.device.size_changes().wake();
        *self.current.borrow_mut() = None;
    }

    /// Waits for a front-end's first message, which QEMU sends at once. Whoever is connected keeps all others out.
    async fn until_it_speaks(&self, socket: &Socket) {
        let readable = async {
            // An error is the session's to report.
            let _ = socket.readable().await;
        };
        let mut speaks = pin!(first_of(readable, self.leave.asked()));
        if self.on.timeout(QUIET, speaks.as_mut()).await.is_none() {
            tracing::warn!(
                disk = %self.shared.device.name(),
                "{} has connected, says nothing, and keeps other front-ends out; is it a client of something else, as of NBD?",
                self.front_end()
            );
            speaks.await;
        }
    }

    /// The process that is connected, for messages.
    fn front_end(&self) -> String {
        let current = self.current.borrow();
        let named = current.as_ref().and_then(|socket| socket.peer_process());
        named.map_or_else(|| "one".to_owned(), |process| format!("one ({process})"))
    }

    /// Takes no more requests; what is under way is done, then the present connection ends as `how` says.
    pub fn stop(&self, how: Stop) {
        self.stopping.set(true);
        match (how, self.current.borrow().as_ref()) {
            (Stop::Leave, _) => self.leave.ask(),
            (Stop::Close, Some(socket)) => socket.shutdown(),
            (Stop::Close, None) => {}
        }
    }
}

/// Tells the front-end of changes of the disk's size, by a configuration change.
async fn announce_sizes(shared: Rc<Shared>, channel: Rc<RefCell<Option<Socket>>>, done: Rc<Cell<bool>>) {
    let changes = shared.device.size_changes();
    let mut generation = changes.generation();
    while !done.get() {
        changes.after_or(generation, || done.get()).await;
        if changes.generation() == generation {
            continue;
        }
        generation = changes.generation();
        shared.tell_of_part_of_sector();
        session::announce_size(Rc::clone(&channel)).await;
    }
}
