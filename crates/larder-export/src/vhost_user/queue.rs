//! Running virtqueue: pops available requests, runs each as a task on the disk's loop, and pushes them as used.
//!
//! A request is a token ([`Request`]): it is pushed as used exactly once, and dropping it before that panics. A
//! running queue is polled by the loop, and kicks are enabled only before the loop sleeps. Interrupts are sent once
//! per turn, and in a long batch once per `INTERRUPT_BATCH_REQUESTS` requests.

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
use super::active_queues::ActiveQueues;
use super::blk::{self, RequestContext};
use super::inflight::InflightQueue;
use super::memory::{DirtyLog, GuestMemory, LostMapping, any_lost};
use super::ring::{DescriptorChain, Head, Ring, RingError, RingPosition};
use crate::activity::Activity;
use crate::external_mapping::{InFlightCounter, InFlightToken};
use crate::piece_scheduler::{PIECE_BYTES_MAX, PIECES_IN_FLIGHT_MAX, PieceScheduler};

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
    pub(super) scheduler: PieceScheduler,
    /// True while queues are paused, because the disk is not on this host.
    pub(super) paused: Cell<bool>,
    /// Report to the session that the front-end's memory is lost.
    pub(super) lost_memory: LostMemory,
    /// Total weight of the requests in flight.
    pub(super) in_flight_weight: Cell<u32>,
    /// Queues that were started and not stopped.
    pub(super) running_queues: RefCell<Vec<Weak<Queue>>>,
    /// Queues whose position the front-end has not fetched.
    pub(super) active_queues: ActiveQueues,
    /// Counter of requests in flight for the pager.
    pub(super) in_flight_counter: InFlightCounter,
}

/// Report that memory of the front-end is lost.
#[derive(Default)]
pub(super) struct LostMemory {
    mapping: Cell<Option<LostMapping>>,
    changed: Signal,
}

impl LostMemory {
    fn report(&self, lost: LostMapping) {
        self.mapping.set(Some(lost));
        self.changed.raise();
    }

    fn is_reported(&self) -> bool {
        self.mapping.get().is_some()
    }

    /// Clears the report of an earlier session.
    pub(super) fn reset(&self) {
        self.mapping.set(None);
    }

    /// Waits until memory is lost.
    pub(super) async fn wait(&self) -> LostMapping {
        self.changed.until(|| self.mapping.get()).await
    }
}

impl Shared {
    /// Returns the geometry of the device as presented to the guest.
    pub(super) fn geometry(&self) -> Geometry {
        let mut geometry = self.device.geometry();
        geometry.block_size = geometry.block_size.max(self.block_size);
        let aligned_end = ByteOffset::new(geometry.size.get()).align_down(u64::from(geometry.block_size));
        geometry.size = aligned_end - ByteOffset::ZERO;
        geometry
    }

    /// Warns if the disk's new size ends within one of the guest's sectors.
    pub(super) fn warn_partial_sector(&self) {
        let (all, seen) = (self.device.geometry().size, self.geometry().size);
        let rest = all.get() - seen.get();
        if rest > 0 {
            tracing::warn!(
                event = "size-changed",
                disk = %self.device.name(),
                "the guest cannot reach the last {rest} bytes of {all}: they do not fill one of its sectors of {} bytes",
                self.block_size
            );
        }
    }
}

/// Number of requests after which the guest is interrupted in a long batch, so that it processes the first results
/// while the rest is being served. The guest asks for one interrupt at a time, so this costs it nothing.
const INTERRUPT_BATCH_REQUESTS: u32 = 8;

/// Requests and bytes that a queue takes in one turn of the loop, so that other queues and completed requests get
/// their turn.
const TURN_REQUESTS_MAX: u32 = 64;
const TURN_BYTES_MAX: usize = 256 << 10;

/// Total weight of a disk's requests from which each queue is limited to its share of the same amount. A request
/// weighs 1, or more if it is split into pieces or its memory is scattered. A queue at its limit takes its next
/// request when others have ended. The limit exists because layers use host memory for requests, and a guest may send
/// as many as its rings have descriptors.
const IN_FLIGHT_WEIGHT_MAX: u32 = 1024;

/// Number of memory pieces that a request of weight 1 may have.
const UNIT_WEIGHT_PIECES_MAX: usize = 128;

/// Number of chains that a queue retains for reuse, and the largest capacity of a retained chain.
const SPARE_CHAINS_MAX: usize = 256;
const SPARE_CHAIN_PIECES_MAX: usize = 256;

/// Parts from which a queue is created.
pub(super) struct QueueParts {
    pub(super) index: u16,
    pub(super) shared: Rc<Shared>,
    pub(super) memory: Rc<GuestMemory>,
    pub(super) ring: Ring,
    pub(super) size: u32,
    pub(super) inflight: Option<InflightQueue>,
    /// Position that the front-end assumes, as set by SET_VRING_BASE, if it is known.
    pub(super) frontend_base: Option<u32>,
    /// Kick event. `None` means that the front-end does not kick, so the ring is polled without sleep.
    pub(super) kick: Option<Rc<OwnedFd>>,
    /// Call event. `None` means that the front-end polls the used ring.
    pub(super) call: Option<Rc<OwnedFd>>,
    pub(super) enabled: bool,
    pub(super) log_ring: bool,
}

/// Running virtqueue.
pub(super) struct Queue {
    weak_self: Weak<Queue>,
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
    interrupt_pending: Cell<bool>,
    requests_in_flight: Cell<u32>,
    /// Weight of the running requests beyond 1 each.
    excess_weight: Cell<u32>,
    /// True if the queue is not at the position that the front-end assumes.
    base_differs: Cell<bool>,
    idle_waker: RefCell<Option<Waker>>,
    kick_waker: RefCell<Option<Waker>>,
    spare_chains: RefCell<Vec<DescriptorChain>>,
    start_request: RefCell<Option<StartRequest>>,
    poller: RefCell<Option<PollerGuard>>,
}

/// Function that starts a request's task. It is boxed because the task's type has no name.
type StartRequest = Box<dyn Fn(Request)>;

/// Request in flight: a token that must be pushed as used.
struct Request {
    queue: Rc<Queue>,
    memory: Rc<GuestMemory>,
    chain: DescriptorChain,
    head: Head,
    inflight_entry: u16,
    /// See [`weight_of`].
    weight: u32,
    begun: InFlightToken,
    is_completed: bool,
}

impl Drop for Request {
    fn drop(&mut self) {
        assert!(
            self.is_completed || std::thread::panicking(),
            "a request of queue {} was dropped before it was pushed as used",
            self.queue.index
        );
    }
}

/// Returns the weight of a request.
fn weight_of(chain: &DescriptorChain, bytes: usize) -> u32 {
    if bytes <= PIECE_BYTES_MAX && chain.pieces() <= UNIT_WEIGHT_PIECES_MAX {
        return 1;
    }
    let pieces = bytes.div_ceil(PIECE_BYTES_MAX).min(PIECES_IN_FLIGHT_MAX);
    let scattered = chain.pieces().div_ceil(UNIT_WEIGHT_PIECES_MAX);
    pieces.max(scattered) as u32
}

async fn serve(mut request: Request) {
    let shared = Rc::clone(&request.queue.shared);
    let state = RequestContext {
        serial: &shared.serial,
        write_cache: shared.write_cache.get() && shared.driver_flushes.get(),
        activity: &shared.activity,
        scheduler: &shared.scheduler,
    };
    // SAFETY: the request holds the mappings that its chain was translated with.
    let outcome = unsafe { blk::execute(&*shared.device, state, &request.chain) }.await;
    if let Some(error) = &outcome.error {
        shared.activity.report(error);
    }
    // No device reads or writes the request's memory any more.
    shared.in_flight_counter.end_request(request.begun);
    request.is_completed = true;
    let chain = std::mem::take(&mut request.chain);
    request.queue.push_used(&request, chain, outcome.written);
}

impl Queue {
    /// Starts a queue: first the requests that a previous server left in flight, then available ones.
    pub(super) fn start(on: &Loop, parts: QueueParts) -> Rc<Self> {
        let packed = matches!(parts.ring, Ring::Packed(_));
        let queue = Rc::new_cyclic(|me| Self {
            weak_self: Weak::clone(me),
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
            interrupt_pending: Cell::new(false),
            requests_in_flight: Cell::new(0),
            excess_weight: Cell::new(0),
            base_differs: Cell::new(false),
            idle_waker: RefCell::new(None),
            kick_waker: RefCell::new(None),
            spare_chains: RefCell::default(),
            start_request: RefCell::new(None),
            poller: RefCell::new(None),
        });
        // The number of chains in flight is at most `size`, which `pop_avail` ensures.
        let pool = TaskPool::new(on);
        *queue.start_request.borrow_mut() = Some(Box::new(move |request: Request| pool.start(|| serve(request))));
        queue.shared.running_queues.borrow_mut().push(Rc::downgrade(&queue));
        queue.resubmit_in_flight();
        if parts.frontend_base != Some(queue.position().to_base(packed)) {
            queue.base_differs.set(true);
        }
        // A previous server may have pushed requests without interrupting; a superfluous interrupt does no harm.
        queue.interrupt_pending.set(true);
        *queue.poller.borrow_mut() = Some(on.add_poller(Rc::clone(&queue) as Rc<dyn Poller>));
        if let Some(kick) = parts.kick {
            on.spawn(watch_kicks(on.clone(), kick, Rc::downgrade(&queue)));
        }
        queue
    }

    fn resubmit_in_flight(self: &Rc<Self>) {
        let mut record = self.inflight.borrow_mut();
        let Some(inflight) = record.as_mut() else { return };
        let mut ring = self.ring.borrow_mut();
        let found = inflight.recover(&mut ring);
        if found.is_empty() {
            return;
        }
        tracing::info!(
            event = "requests-resubmitted",
            queue = self.index,
            requests = found.len(),
            "resubmitting requests that were in flight"
        );
        let memory = Rc::clone(&self.memory.borrow());
        let mut requests = Vec::new();
        for request in &found {
            let mut chain = DescriptorChain::default();
            match inflight.read_chain(&ring, &memory, request, &mut chain) {
                Ok(()) => requests.push((request.head, request.entry_index, chain)),
                Err(error) => {
                    drop((ring, record));
                    return self.mark_broken(error);
                }
            }
        }
        drop((ring, record));
        for (head, entry, chain) in requests {
            let bytes = chain.bytes();
            self.launch(Rc::clone(&memory), chain, bytes, head, entry);
        }
    }

    fn launch(self: &Rc<Self>, memory: Rc<GuestMemory>, chain: DescriptorChain, bytes: usize, head: Head, entry: u16) {
        self.requests_in_flight.set(self.requests_in_flight.get() + 1);
        let weight = weight_of(&chain, bytes);
        self.shared.in_flight_weight.set(self.shared.in_flight_weight.get() + weight);
        if weight > 1 {
            self.excess_weight.set(self.excess_weight.get() + (weight - 1));
        }
        self.base_differs.set(true);
        let request = Request {
            queue: Rc::clone(self),
            memory,
            chain,
            head,
            inflight_entry: entry,
            weight,
            begun: self.shared.in_flight_counter.begin_request(),
            is_completed: false,
        };
        let start = self.start_request.borrow();
        if let Some(start) = start.as_ref() {
            start(request);
        }
    }

    /// Takes and starts available requests within a turn's bounds; returns whether there were any.
    fn start_available(self: &Rc<Self>) -> bool {
        let mut started = 0u32;
        let mut bytes = 0;
        while started < TURN_REQUESTS_MAX && bytes < TURN_BYTES_MAX && self.has_room() {
            let Some((memory, chain, head, entry)) = self.pop_avail() else {
                break;
            };
            let chain_bytes = chain.bytes();
            bytes += chain_bytes;
            self.launch(memory, chain, chain_bytes, head, entry);
            started += 1;
            if started.is_multiple_of(INTERRUPT_BATCH_REQUESTS) {
                self.interrupt_if_pending();
            }
        }
        started > 0
    }

    fn pop_avail(&self) -> Option<(Rc<GuestMemory>, DescriptorChain, Head, u16)> {
        let mut ring = self.ring.borrow_mut();
        if !ring.has_available() {
            return None;
        }
        if self.requests_in_flight.get() >= self.size {
            drop(ring);
            self.mark_broken(RingError::TooManyInFlight { size: self.size });
            return None;
        }
        let memory = self.memory.borrow();
        let mut chain = self.spare_chains.borrow_mut().pop().unwrap_or_default();
        match ring.pop_avail(&memory, &mut chain) {
            Ok(Some(head)) => {
                let entry = match self.inflight.borrow_mut().as_mut() {
                    Some(inflight) => inflight.begin(&ring, head),
                    None => 0,
                };
                Some((Rc::clone(&memory), chain, head, entry))
            }
            Ok(None) => None,
            Err(error) => {
                drop((ring, memory));
                self.mark_broken(error);
                None
            }
        }
    }

    /// Stops the queue until its reset, because the guest violated the protocol. Requests in flight continue.
    fn mark_broken(&self, error: RingError) {
        if let Err(lost) = self.check_memory(&self.memory.borrow()) {
            return self.abort_on_lost_memory(lost);
        }
        if !self.broken.replace(true) {
            tracing::error!(
                event = "queue-failed",
                queue = self.index,
                "the guest has corrupted its virtqueue: {error}; the queue is stopped until the guest resets it"
            );
        }
    }

    /// Checks that neither the given memory of a request nor memory of the queue itself is lost.
    fn check_memory(&self, request_memory: &GuestMemory) -> Result<(), LostMapping> {
        // A mapping is lost once in the life of a process, if ever.
        if !any_lost() {
            return Ok(());
        }
        request_memory.check()?;
        self.memory.borrow().check()?;
        self.inflight.borrow().as_ref().map_or(Ok(()), InflightQueue::check)?;
        self.shared.dirty_log.borrow().as_ref().map_or(Ok(()), |log| log.check())
    }

    /// Takes no more requests, and ends the session: data read from, or written to, lost memory differs from the
    /// guest's.
    fn abort_on_lost_memory(&self, lost: LostMapping) {
        self.broken.set(true);
        self.shared.lost_memory.report(lost);
    }

    /// Ends the session if memory is lost; returns whether that was found by this call.
    fn detect_lost_memory(&self) -> bool {
        if !any_lost() || self.shared.lost_memory.is_reported() {
            return false;
        }
        let found = self.check_memory(&self.memory.borrow()).err();
        found.map(|lost| self.abort_on_lost_memory(lost)).is_some()
    }

    fn push_used(&self, request: &Request, mut chain: DescriptorChain, written: u32) {
        if let Err(lost) = self.check_memory(&request.memory) {
            // The data that was read has not reached the guest, or the data that was written is not the guest's. The
            // request therefore stays in flight for the next session.
            self.abort_on_lost_memory(lost);
        } else {
            let mut ring = self.ring.borrow_mut();
            let mut inflight = self.inflight.borrow_mut();
            if let Some(inflight) = inflight.as_mut() {
                inflight.before_push_used(&ring, request.head, request.inflight_entry);
            }
            let log = self.shared.dirty_log.borrow();
            if let Some(log) = log.as_ref() {
                chain.writable().iter().for_each(|piece| log.mark(&request.memory, *piece));
            }
            let changed = ring.push_used(request.head, written);
            if let Some(log) = log.as_ref().filter(|_| self.log_ring.get()) {
                log.mark(&self.memory.borrow(), IoVec::new(changed.base(), changed.len()));
            }
            // A ring that was lost just now has not received the entry: the request stays in flight.
            let is_pushed = !any_lost() || self.memory.borrow().check().is_ok();
            if let Some(inflight) = inflight.as_mut().filter(|_| is_pushed) {
                inflight.after_push_used(&ring, request.inflight_entry);
            }
        }
        self.shared.in_flight_weight.set(self.shared.in_flight_weight.get() - request.weight);
        if request.weight > 1 {
            self.excess_weight.set(self.excess_weight.get() - (request.weight - 1));
        }
        let mut spare = self.spare_chains.borrow_mut();
        if spare.len() < SPARE_CHAINS_MAX && chain.capacity() <= SPARE_CHAIN_PIECES_MAX {
            chain.clear();
            spare.push(chain);
        }
        drop(spare);
        self.interrupt_pending.set(true);
        self.requests_in_flight.set(self.requests_in_flight.get() - 1);
        if self.requests_in_flight.get() == 0
            && let Some(waker) = self.idle_waker.borrow_mut().take()
        {
            waker.wake();
        }
    }

    /// Interrupts the guest if a request was pushed as used, unless the guest suppresses it.
    fn interrupt_if_pending(&self) {
        if self.interrupt_pending.replace(false) {
            self.interrupt_if_wanted();
        }
    }

    fn interrupt_if_wanted(&self) {
        if self.ring.borrow_mut().wants_interrupt()
            && let Some(call) = self.call.borrow().as_ref()
        {
            // A full counter means that the event is already signalled.
            let _ = rustix::io::write(call.as_ref(), &1u64.to_ne_bytes());
        }
    }

    /// Returns whether the weight limit allows another request.
    fn has_room(&self) -> bool {
        self.shared.in_flight_weight.get() < IN_FLIGHT_WEIGHT_MAX || {
            let queues = self.shared.running_queues.borrow().len().max(1) as u32;
            self.requests_in_flight.get() + self.excess_weight.get() < (IN_FLIGHT_WEIGHT_MAX / queues).max(1)
        }
    }

    fn accepts_requests(&self) -> bool {
        self.enabled.get() && !self.stopped.get() && !self.broken.get() && !self.shared.paused.get()
    }

    pub(super) fn set_enabled(&self, enabled: bool) {
        self.enabled.set(enabled);
    }

    pub(super) fn set_call(&self, call: Option<Rc<OwnedFd>>) {
        *self.call.borrow_mut() = call;
        // The new event may have missed an interrupt that was sent to the old one, or not sent at all.
        self.ring.borrow_mut().reset_interrupt_state();
        self.interrupt_pending.set(true);
    }

    pub(super) fn set_log_ring(&self, log: bool) {
        self.log_ring.set(log);
    }

    pub(super) fn index(&self) -> u16 {
        self.index
    }

    /// Returns whether the queue is not at the position that the front-end assumes.
    pub(super) fn base_differs(&self) -> bool {
        self.base_differs.get()
    }

    pub(super) fn position(&self) -> RingPosition {
        self.ring.borrow().position()
    }

    /// Continues in another table of guest memory, in which `ring` lies.
    pub(super) fn replace_memory(&self, memory: Rc<GuestMemory>, ring: Ring) {
        *self.memory.borrow_mut() = memory;
        *self.ring.borrow_mut() = ring;
        self.interrupt_pending.set(true);
    }

    /// Takes no more requests, waits for those in flight, and returns the ring's position. The in-flight record has
    /// the same position.
    pub(super) async fn stop(&self) -> RingPosition {
        self.stopped.set(true);
        if let Some(waker) = self.kick_waker.borrow_mut().take() {
            waker.wake();
        }
        std::future::poll_fn(|context| {
            if self.requests_in_flight.get() == 0 {
                return Poll::Ready(());
            }
            *self.idle_waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        self.interrupt_if_pending();
        if let Some(poller) = self.poller.borrow_mut().take() {
            drop(poller);
            self.shared.running_queues.borrow_mut().retain(|queue| !queue.ptr_eq(&self.weak_self));
        }
        drop(self.start_request.borrow_mut().take());
        self.position()
    }
}

impl Poller for Queue {
    fn poll(&self) -> bool {
        self.interrupt_if_pending();
        self.detect_lost_memory();
        if !self.accepts_requests() || !self.has_room() || !self.ring.borrow().has_available() {
            return false;
        }
        let any = self.weak_self.upgrade().is_some_and(|me| me.start_available());
        self.interrupt_if_pending();
        any
    }

    fn arm(&self) -> bool {
        // A request that ends wakes the loop.
        if !self.accepts_requests() || !self.has_room() {
            return false;
        }
        if !self.has_kick {
            return true;
        }
        let has_available = {
            let mut ring = self.ring.borrow_mut();
            ring.set_kicks_enabled(true);
            ring.has_available()
        };
        // A lost ring has no available requests.
        has_available || self.detect_lost_memory()
    }

    fn disarm(&self) {
        if self.accepts_requests() {
            self.ring.borrow_mut().set_kicks_enabled(false);
        }
    }

    fn recheck(&self) {
        // The guest may have enabled interrupts before its last look at the used ring, without this being visible yet
        // when the ring was checked.
        self.interrupt_if_wanted();
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
