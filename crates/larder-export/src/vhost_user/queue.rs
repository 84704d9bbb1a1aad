//! Running virtqueue: pops available requests, runs each as a task on the disk's loop, and pushes them as used.
//!
//! A request is a token ([`Request`]): it is pushed as used exactly once, and dropping it before that panics. A
//! running queue is polled by the loop, and kicks are enabled only before the loop sleeps. Interrupts are sent once
//! per turn, and in a long batch once per `SIGNAL_EVERY` requests.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};

use larder_block::event_loop::{Poller, PollerGuard, TaskPool};
use larder_block::signal::Signal;
use larder_block::{BlockDevice, ByteOffset, Geometry, IoVec, Loop};

use super::Serial;
use super::blk::{self, DiskState};
use super::inflight::InflightQueue;
use super::lent::Lent;
use super::memory::{DirtyLog, GuestMemory, LostMapping, any_lost};
use super::ring::{Chain, Head, Ring, RingError, RingPosition};
use crate::activity::Activity;
use crate::turns::{PIECE_LEN, PIECES_AT_ONCE, Turns};
use crate::view::{Begun, UnderWay};

/// State that all queues of a disk share.
pub(super) struct Shared {
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) serial: Serial,
    /// Smallest sector size to present, in bytes.
    pub(super) block_size: u32,
    /// Number of descriptors that a front-end is expected to give a queue.
    pub(super) queue_size: u16,
    /// Write-cache setting of the guest. If it is off, every write is durable on completion. It stays off until the
    /// guest switches it on, because front-ends do not repeat it after a reset or a reconnect.
    pub(super) write_cache: Cell<bool>,
    /// True if the driver supports flushes or the write-cache setting. A driver with neither relies on the durability
    /// of every write.
    pub(super) driver_flushes: Cell<bool>,
    /// Log of written pages, set while the front-end requests it.
    pub(super) dirty_log: RefCell<Option<Rc<DirtyLog>>>,
    pub(super) activity: Rc<Activity>,
    pub(super) turns: Turns,
    /// True while queues are paused, because the disk is not on this host.
    pub(super) rests: Cell<bool>,
    /// Report to the session that the front-end's memory is lost.
    pub(super) lost: Lost,
    /// Total weight of the requests in flight.
    pub(super) weight: Cell<u32>,
    /// Queues that were started and not stopped.
    pub(super) at_work: RefCell<Vec<Weak<Queue>>>,
    /// Queues whose position the front-end has not fetched.
    pub(super) lent: Lent,
    /// Counter of requests in flight for the pager.
    pub(super) under_way: UnderWay,
}

/// Report that memory of the front-end is lost.
#[derive(Default)]
pub(super) struct Lost {
    found: Cell<Option<LostMapping>>,
    changed: Signal,
}

impl Lost {
    fn report(&self, lost: LostMapping) {
        self.found.set(Some(lost));
        self.changed.raise();
    }

    fn is_reported(&self) -> bool {
        self.found.get().is_some()
    }

    /// Clears the report of an earlier session.
    pub(super) fn reset(&self) {
        self.found.set(None);
    }

    /// Waits until memory is lost.
    pub(super) async fn wait(&self) -> LostMapping {
        self.changed.until(|| self.found.get()).await
    }
}

impl Shared {
    /// Returns the geometry of the device as presented to the guest.
    pub(super) fn geometry(&self) -> Geometry {
        let mut geometry = self.device.geometry();
        geometry.block_size = geometry.block_size.max(self.block_size);
        let whole = ByteOffset::new(geometry.size.get()).align_down(u64::from(geometry.block_size));
        geometry.size = whole - ByteOffset::ZERO;
        geometry
    }

    /// Warns if the disk's new size ends within one of the guest's sectors.
    pub(super) fn tell_of_part_of_sector(&self) {
        let (all, seen) = (self.device.geometry().size, self.geometry().size);
        let rest = all.get() - seen.get();
        if rest > 0 {
            tracing::warn!(
                disk = %self.device.name(),
                "the guest cannot reach the last {rest} bytes of {all}: they do not fill one of its sectors of {} bytes",
                self.block_size
            );
        }
    }
}

/// Number of requests after which the guest is interrupted in a long batch, so that it processes the first results
/// while the rest is being served. The guest asks for one interrupt at a time, so this costs it nothing.
const SIGNAL_EVERY: u32 = 8;

/// Requests and bytes that a queue takes in one turn of the loop, so that other queues and completed requests get
/// their turn.
const TURN_REQUESTS: u32 = 64;
const TURN_BYTES: usize = 256 << 10;

/// Total weight of a disk's requests from which each queue is limited to its share of the same amount. A request
/// weighs 1, or more if it is split into pieces or its memory is scattered. A queue at its limit takes its next
/// request when others have ended. The limit exists because layers use host memory for requests, and a guest may send
/// as many as its rings have descriptors.
const WEIGHT_MAX: u32 = 1024;

/// Number of memory pieces that a request of weight 1 may have.
const MEMORY_PIECES: usize = 128;

/// Number of chains that a queue retains for reuse, and the largest capacity of a retained chain.
const CHAINS_KEPT: usize = 256;
const ROOM_KEPT: usize = 256;

/// Parts from which a queue is created.
pub(super) struct QueueParts {
    pub(super) index: u16,
    pub(super) shared: Rc<Shared>,
    pub(super) memory: Rc<GuestMemory>,
    pub(super) ring: Ring,
    pub(super) size: u32,
    pub(super) inflight: Option<InflightQueue>,
    /// Position that the front-end assumes, as set by SET_VRING_BASE, if it is known.
    pub(super) told: Option<u32>,
    /// Kick event. `None` means that the front-end does not kick, so the ring is polled without sleep.
    pub(super) kick: Option<Rc<OwnedFd>>,
    /// Call event. `None` means that the front-end polls the used ring.
    pub(super) call: Option<Rc<OwnedFd>>,
    pub(super) enabled: bool,
    pub(super) log_ring: bool,
}

/// Running virtqueue.
pub(super) struct Queue {
    me: Weak<Queue>,
    index: u16,
    size: u32,
    shared: Rc<Shared>,
    memory: RefCell<Rc<GuestMemory>>,
    ring: RefCell<Ring>,
    inflight: RefCell<Option<InflightQueue>>,
    has_kick: bool,
    call: RefCell<Option<Rc<OwnedFd>>>,
    enabled: Cell<bool>,
    /// True if no more requests are taken, because the queue is being stopped.
    stopped: Cell<bool>,
    broken: Cell<bool>,
    log_ring: Cell<bool>,
    /// True if a request was pushed as used since the last interrupt.
    unsignalled: Cell<bool>,
    running: Cell<u32>,
    /// Weight of the running requests beyond 1 each.
    extra_weight: Cell<u32>,
    /// True if the queue is not at the position that the front-end assumes.
    moved: Cell<bool>,
    idle_waker: RefCell<Option<Waker>>,
    kick_waker: RefCell<Option<Waker>>,
    spare_chains: RefCell<Vec<Chain>>,
    start: RefCell<Option<Start>>,
    poller: RefCell<Option<PollerGuard>>,
}

/// Function that starts a request's task. It is boxed because the task's type has no name.
type Start = Box<dyn Fn(Request)>;

/// Request in flight: a token that must be pushed as used.
struct Request {
    queue: Rc<Queue>,
    memory: Rc<GuestMemory>,
    chain: Chain,
    head: Head,
    note: u16,
    /// See [`weight_of`].
    weight: u32,
    begun: Begun,
    answered: bool,
}

impl Drop for Request {
    fn drop(&mut self) {
        assert!(
            self.answered || std::thread::panicking(),
            "a request of queue {} was dropped before it was pushed as used",
            self.queue.index
        );
    }
}

/// Returns the weight of a request.
fn weight_of(chain: &Chain, bytes: usize) -> u32 {
    if bytes <= PIECE_LEN && chain.pieces() <= MEMORY_PIECES {
        return 1;
    }
    let pieces = bytes.div_ceil(PIECE_LEN).min(PIECES_AT_ONCE);
    let scattered = chain.pieces().div_ceil(MEMORY_PIECES);
    pieces.max(scattered) as u32
}

async fn serve(mut request: Request) {
    let shared = Rc::clone(&request.queue.shared);
    let state = DiskState {
        serial: &shared.serial,
        write_cache: shared.write_cache.get() && shared.driver_flushes.get(),
        activity: &shared.activity,
        turns: &shared.turns,
    };
    // SAFETY: the request holds the mappings that its chain was translated with.
    let outcome = unsafe { blk::execute(&*shared.device, state, &request.chain) }.await;
    if let Some(error) = &outcome.error {
        shared.activity.report(error);
    }
    // No device reads or writes the request's memory any more.
    shared.under_way.end(request.begun);
    request.answered = true;
    let chain = std::mem::take(&mut request.chain);
    request.queue.give_back(&request, chain, outcome.written);
}

impl Queue {
    /// Starts a queue: first the requests that a previous server left in flight, then available ones.
    pub(super) fn start(on: &Loop, parts: QueueParts) -> Rc<Self> {
        let packed = matches!(parts.ring, Ring::Packed(_));
        let queue = Rc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            index: parts.index,
            size: parts.size,
            shared: parts.shared,
            memory: RefCell::new(parts.memory),
            ring: RefCell::new(parts.ring),
            inflight: RefCell::new(parts.inflight),
            has_kick: parts.kick.is_some(),
            call: RefCell::new(parts.call),
            enabled: Cell::new(parts.enabled),
            stopped: Cell::new(false),
            broken: Cell::new(false),
            log_ring: Cell::new(parts.log_ring),
            unsignalled: Cell::new(false),
            running: Cell::new(0),
            extra_weight: Cell::new(0),
            moved: Cell::new(false),
            idle_waker: RefCell::new(None),
            kick_waker: RefCell::new(None),
            spare_chains: RefCell::default(),
            start: RefCell::new(None),
            poller: RefCell::new(None),
        });
        // The number of chains in flight is at most `size`, which `take_one` ensures.
        let pool = TaskPool::new(on);
        *queue.start.borrow_mut() = Some(Box::new(move |request: Request| pool.start(|| serve(request))));
        queue.shared.at_work.borrow_mut().push(Rc::downgrade(&queue));
        queue.resubmit();
        if parts.told != Some(queue.position().to_base(packed)) {
            queue.moved.set(true);
        }
        // A previous server may have pushed requests without interrupting; a superfluous interrupt does no harm.
        queue.unsignalled.set(true);
        *queue.poller.borrow_mut() = Some(on.add_poller(Rc::clone(&queue) as Rc<dyn Poller>));
        if let Some(kick) = parts.kick {
            on.spawn(watch_kicks(on.clone(), kick, Rc::downgrade(&queue)));
        }
        queue
    }

    fn resubmit(self: &Rc<Self>) {
        let mut notes = self.inflight.borrow_mut();
        let Some(inflight) = notes.as_mut() else { return };
        let mut ring = self.ring.borrow_mut();
        let found = inflight.recover(&mut ring);
        if found.is_empty() {
            return;
        }
        tracing::info!(
            queue = self.index,
            requests = found.len(),
            "resubmitting requests that were in flight"
        );
        let memory = Rc::clone(&self.memory.borrow());
        let mut requests = Vec::new();
        for left in &found {
            let mut chain = Chain::default();
            match inflight.chain_of(&ring, &memory, left, &mut chain) {
                Ok(()) => requests.push((left.head, left.note, chain)),
                Err(error) => {
                    drop((ring, notes));
                    return self.break_down(error);
                }
            }
        }
        drop((ring, notes));
        for (head, note, chain) in requests {
            let bytes = chain.bytes();
            self.launch(Rc::clone(&memory), chain, bytes, head, note);
        }
    }

    fn launch(self: &Rc<Self>, memory: Rc<GuestMemory>, chain: Chain, bytes: usize, head: Head, note: u16) {
        self.running.set(self.running.get() + 1);
        let weight = weight_of(&chain, bytes);
        self.shared.weight.set(self.shared.weight.get() + weight);
        if weight > 1 {
            self.extra_weight.set(self.extra_weight.get() + (weight - 1));
        }
        self.moved.set(true);
        let request = Request {
            queue: Rc::clone(self),
            memory,
            chain,
            head,
            note,
            weight,
            begun: self.shared.under_way.begin(),
            answered: false,
        };
        let start = self.start.borrow();
        if let Some(start) = start.as_ref() {
            start(request);
        }
    }

    /// Takes and starts available requests within a turn's bounds; returns whether there were any.
    fn take_available(self: &Rc<Self>) -> bool {
        let mut taken = 0u32;
        let mut bytes = 0;
        while taken < TURN_REQUESTS && bytes < TURN_BYTES && self.has_room() {
            let Some((memory, chain, head, note)) = self.take_one() else {
                break;
            };
            let chain_bytes = chain.bytes();
            bytes += chain_bytes;
            self.launch(memory, chain, chain_bytes, head, note);
            taken += 1;
            if taken.is_multiple_of(SIGNAL_EVERY) {
                self.signal();
            }
        }
        taken > 0
    }

    fn take_one(&self) -> Option<(Rc<GuestMemory>, Chain, Head, u16)> {
        let mut ring = self.ring.borrow_mut();
        if !ring.has_available() {
            return None;
        }
        if self.running.get() >= self.size {
            drop(ring);
            self.break_down(RingError::TooManyInFlight { size: self.size });
            return None;
        }
        let memory = self.memory.borrow();
        let mut chain = self.spare_chains.borrow_mut().pop().unwrap_or_default();
        match ring.take(&memory, &mut chain) {
            Ok(Some(head)) => {
                let note = match self.inflight.borrow_mut().as_mut() {
                    Some(inflight) => inflight.begin(&ring, head),
                    None => 0,
                };
                Some((Rc::clone(&memory), chain, head, note))
            }
            Ok(None) => None,
            Err(error) => {
                drop((ring, memory));
                self.break_down(error);
                None
            }
        }
    }

    /// Stops the queue until its reset, because the guest violated the protocol. Requests in flight continue.
    fn break_down(&self, error: RingError) {
        if let Err(lost) = self.check(&self.memory.borrow()) {
            return self.lose(lost);
        }
        if !self.broken.replace(true) {
            tracing::error!(
                queue = self.index,
                "the guest has corrupted its virtqueue: {error}; the queue is stopped until the guest resets it"
            );
        }
    }

    /// Checks that neither the given memory of a request nor memory of the queue itself is lost.
    fn check(&self, of_request: &GuestMemory) -> Result<(), LostMapping> {
        // A mapping is lost once in the life of a process, if ever.
        if !any_lost() {
            return Ok(());
        }
        of_request.check()?;
        self.memory.borrow().check()?;
        self.inflight.borrow().as_ref().map_or(Ok(()), InflightQueue::check)?;
        self.shared
            .dirty_log
            .borrow()
            .as_ref()
            .map_or(Ok(()), |log| log.check())
    }

    /// Takes no more requests, and ends the session: data read from, or written to, lost memory differs from the
    /// guest's.
    fn lose(&self, lost: LostMapping) {
        self.broken.set(true);
        self.shared.lost.report(lost);
    }

    /// Ends the session if memory is lost; returns whether that was found by this call.
    fn find_loss(&self) -> bool {
        if !any_lost() || self.shared.lost.is_reported() {
            return false;
        }
        let found = self.check(&self.memory.borrow()).err();
        found.map(|lost| self.lose(lost)).is_some()
    }

    fn give_back(&self, request: &Request, mut chain: Chain, written: u32) {
        if let Err(lost) = self.check(&request.memory) {
            // The data that was read has not reached the guest, or the data that was written is not the guest's. The
            // request therefore stays in flight for the next session.
            self.lose(lost);
        } else {
            let mut ring = self.ring.borrow_mut();
            let mut inflight = self.inflight.borrow_mut();
            if let Some(inflight) = inflight.as_mut() {
                inflight.before_give_back(&ring, request.head, request.note);
            }
            let log = self.shared.dirty_log.borrow();
            if let Some(log) = log.as_ref() {
                chain
                    .writable()
                    .iter()
                    .for_each(|piece| log.mark(&request.memory, *piece));
            }
            let changed = ring.give_back(request.head, written);
            if let Some(log) = log.as_ref().filter(|_| self.log_ring.get()) {
                log.mark(&self.memory.borrow(), IoVec::new(changed.base(), changed.len()));
            }
            // A ring that was lost just now has not received the entry: the request stays in flight.
            let is_given_back = !any_lost() || self.memory.borrow().check().is_ok();
            if let Some(inflight) = inflight.as_mut().filter(|_| is_given_back) {
                inflight.after_give_back(&ring, request.note);
            }
        }
        self.shared.weight.set(self.shared.weight.get() - request.weight);
        if request.weight > 1 {
            self.extra_weight.set(self.extra_weight.get() - (request.weight - 1));
        }
        let mut spare = self.spare_chains.borrow_mut();
        if spare.len() < CHAINS_KEPT && chain.room() <= ROOM_KEPT {
            chain.clear();
            spare.push(chain);
        }
        drop(spare);
        self.unsignalled.set(true);
        self.running.set(self.running.get() - 1);
        if self.running.get() == 0
            && let Some(waker) = self.idle_waker.borrow_mut().take()
        {
            waker.wake();
        }
    }

    /// Interrupts the guest if a request was pushed as used, unless the guest suppresses it.
    fn signal(&self) {
        if self.unsignalled.replace(false) {
            self.interrupt();
        }
    }

    fn interrupt(&self) {
        if self.ring.borrow_mut().wants_interrupt()
            && let Some(call) = self.call.borrow().as_ref()
        {
            // A full counter means that the event is already signalled.
            let _ = rustix::io::write(call.as_ref(), &1u64.to_ne_bytes());
        }
    }

    /// Returns whether the weight limit allows another request.
    fn has_room(&self) -> bool {
        self.shared.weight.get() < WEIGHT_MAX || {
            let queues = self.shared.at_work.borrow().len().max(1) as u32;
            self.running.get() + self.extra_weight.get() < (WEIGHT_MAX / queues).max(1)
        }
    }

    fn may_take(&self) -> bool {
        self.enabled.get() && !self.stopped.get() && !self.broken.get() && !self.shared.rests.get()
    }

    pub(super) fn set_enabled(&self, enabled: bool) {
        self.enabled.set(enabled);
    }

    pub(super) fn set_call(&self, call: Option<Rc<OwnedFd>>) {
        *self.call.borrow_mut() = call;
        // The new event may have missed an interrupt that was sent to the old one, or not sent at all.
        self.ring.borrow_mut().forget_interrupts();
        self.unsignalled.set(true);
    }

    pub(super) fn set_log_ring(&self, log: bool) {
        self.log_ring.set(log);
    }

    pub(super) fn index(&self) -> u16 {
        self.index
    }

    /// Returns whether the queue is not at the position that the front-end assumes.
    pub(super) fn has_moved(&self) -> bool {
        self.moved.get()
    }

    pub(super) fn position(&self) -> RingPosition {
        self.ring.borrow().position()
    }

    /// Continues in another table of guest memory, in which `ring` lies.
    pub(super) fn replace_memory(&self, memory: Rc<GuestMemory>, ring: Ring) {
        *self.memory.borrow_mut() = memory;
        *self.ring.borrow_mut() = ring;
        self.unsignalled.set(true);
    }

    /// Takes no more requests, waits for those in flight, and returns the ring's position. The in-flight record has
    /// the same position.
    pub(super) async fn stop(&self) -> RingPosition {
        self.stopped.set(true);
        if let Some(waker) = self.kick_waker.borrow_mut().take() {
            waker.wake();
        }
        std::future::poll_fn(|context| {
            if self.running.get() == 0 {
                return Poll::Ready(());
            }
            *self.idle_waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        self.signal();
        if let Some(poller) = self.poller.borrow_mut().take() {
            drop(poller);
            self.shared.at_work.borrow_mut().retain(|queue| !queue.ptr_eq(&self.me));
        }
        drop(self.start.borrow_mut().take());
        self.position()
    }
}

impl Poller for Queue {
    fn poll(&self) -> bool {
        self.signal();
        self.find_loss();
        if !self.may_take() || !self.has_room() || !self.ring.borrow().has_available() {
            return false;
        }
        let any = self.me.upgrade().is_some_and(|me| me.take_available());
        self.signal();
        any
    }

    fn arm(&self) -> bool {
        // A request that ends wakes the loop.
        if !self.may_take() || !self.has_room() {
            return false;
        }
        if !self.has_kick {
            return true;
        }
        let has_available = {
            let mut ring = self.ring.borrow_mut();
            ring.want_kicks(true);
            ring.has_available()
        };
        // A lost ring has no available requests.
        has_available || self.find_loss()
    }

    fn disarm(&self) {
        if self.may_take() {
            self.ring.borrow_mut().want_kicks(false);
        }
    }

    fn recheck(&self) {
        // The guest may have enabled interrupts before its last look at the used ring, without this being visible yet
        // when the ring was checked.
        self.interrupt();
    }
}

/// Wakes the loop for each kick; the poller does the rest. Ends when the queue stops.
async fn watch_kicks(on: Loop, kick: Rc<OwnedFd>, queue: Weak<Queue>) {
    loop {
        let mut readable = pin!(on.readable(kick.as_fd()));
        let kicked = std::future::poll_fn(|context| {
            let Some(queue) = queue.upgrade().filter(|queue| !queue.stopped.get()) else {
                return Poll::Ready(false);
            };
            if let Poll::Ready(result) = readable.as_mut().poll(context) {
                return Poll::Ready(result.is_ok());
            }
            *queue.kick_waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        });
        if !kicked.await {
            return;
        }
        let mut counter = [0; 8];
        // The read finds nothing if the front-end has read the counter itself.
        let _ = rustix::io::read(kick.as_ref(), &mut counter);
    }
}
