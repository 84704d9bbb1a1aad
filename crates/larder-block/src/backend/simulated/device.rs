//! A device that fails, delays, reorders, tears and loses data as far as the contract allows, from a seed.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::future::{pending, ready};
use std::io;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use smallvec::SmallVec;

use super::fault::{FaultEffect, Faults, InjectedFault};
use super::latency::LatencyDistribution;
use super::medium::{ALLOCATION_UNIT_BYTES, ChangeNumber, FlushCoverage, SimulatedMedium, Source};
use super::options::{DeviceStop, SimulatedOptions};
use super::random::SeededRng;
use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{
    BlockDevice, BoxFuture, Extent, ExtentKind, Geometry, Io, SizeChanges, WriteFlags, ZeroFlags, check_request,
};
use crate::error::{Failure, IoError, IoResult, Operation};
use crate::event_loop::{Loop, LoopTime, WeakLoop};
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// A device over a [`SimulatedMedium`]. The duration and the failures of requests follow from its options, faults and
/// seed.
///
/// A change takes effect in one or several parts at moments before its completion. A flush makes durable no more than
/// the changes that had completed when it was called, a FUA write no more than its own bytes and the versions that
/// they overwrote.
pub struct SimulatedDevice {
    name: Rc<str>,
    seed: u64,
    on: WeakLoop,
    geometry: Cell<Geometry>,
    latency: Cell<LatencyDistribution>,
    failures_per_mille: Cell<u32>,
    state: RefCell<State>,
    changes: SizeChanges,
}

struct State {
    medium: SimulatedMedium,
    random: SeededRng,
    faults: Faults,
    in_flight: BTreeMap<ChangeNumber, InFlightChange>,
    stopped: bool,
    failures: u64,
    /// The number of unallocated parts of the medium that may still be allocated; `None` for no limit.
    free_units: Option<u64>,
    /// The number of times that stuck requests were released, and the wakers of requests that are stuck now.
    releases: u64,
    hung_requests: Vec<Waker>,
}

/// A write, zeroes or discard that has not completed.
struct InFlightChange {
    range: ByteRange,
    source: Source,
    /// The parts that have not taken effect yet.
    remaining: Parts,
}

type Parts = SmallVec<[ByteRange; 3]>;

/// The planned outcome of a request.
struct RequestPlan {
    /// The duration of the request; `None` if it completes synchronously.
    delay: Option<Duration>,
    failure: Option<Failure>,
    hangs: bool,
}

impl SimulatedDevice {
    /// Opens a device over `medium`, on the loop `on`.
    ///
    /// # Panics
    /// If the block size is not a power of two and a multiple of the medium's sector.
    pub fn open(on: &Loop, medium: SimulatedMedium, options: SimulatedOptions) -> Rc<Self> {
        let block_size = options.block_size;
        assert!(block_size.is_power_of_two() && block_size >= medium.sector_size());
        Rc::new(Self {
            name: options.name.into(),
            seed: options.seed,
            on: on.downgrade(),
            geometry: Cell::new(Geometry {
                size: whole_blocks(medium.size(), block_size),
                block_size,
                physical_block_size: block_size.max(4096),
                discard_granularity: block_size,
                memory_alignment: options.memory_alignment,
                read_only: options.read_only,
                fast_zeroes: options.fast_zeroes,
            }),
            latency: Cell::new(options.latency),
            failures_per_mille: Cell::new(options.failures_per_mille),
            state: RefCell::new(State {
                medium,
                random: SeededRng::new(options.seed),
                faults: Faults::default(),
                in_flight: BTreeMap::new(),
                stopped: false,
                failures: 0,
                free_units: None,
                releases: 0,
                hung_requests: Vec::new(),
            }),
            changes: SizeChanges::default(),
        })
    }

    /// Adds a fault. If a request meets several faults, the oldest takes effect.
    pub fn inject(&self, fault: InjectedFault) {
        self.state.borrow_mut().faults.add(fault);
    }

    /// Sets the number of requests in a thousand that fail from now on, in addition to the injected faults.
    pub fn set_failures(&self, per_mille: u32) {
        self.failures_per_mille.set(per_mille);
    }

    /// Removes all injected faults, and stops random failures. Stuck requests stay stuck.
    pub fn clear_faults(&self) {
        self.failures_per_mille.set(0);
        self.state.borrow_mut().faults.clear();
    }

    /// Limits the space that can still be allocated, on a medium that tracks allocation; `None` for no limit. A write
    /// that needs more fails with [`Failure::NoSpace`]. A discard releases the space of whole units.
    pub fn limit_free_space(&self, free_space: Option<ByteLen>) {
        self.state.borrow_mut().free_units = free_space.map(|room| room.get() / ALLOCATION_UNIT_BYTES);
    }

    /// Sets the latency of requests from now on.
    pub fn set_latency(&self, latency: LatencyDistribution) {
        self.latency.set(latency);
    }

    /// Lets stuck requests continue.
    pub fn release(&self) {
        let wakers = {
            let mut state = self.state.borrow_mut();
            state.releases += 1;
            std::mem::take(&mut state.hung_requests)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Returns the seed from the options.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns a user's file in the memory of the disk's host. It outlives the process, but not a power loss.
    ///
    /// # Errors
    /// The error of the real host.
    pub fn host_memory(&self, user: u32) -> io::Result<Rc<File>> {
        self.state.borrow_mut().medium.host_memory(user)
    }

    /// Returns the number of requests that have failed because of a fault or at random.
    pub fn failures(&self) -> u64 {
        self.state.borrow().failures
    }

    /// Changes the size, rounded down to whole blocks, as the host's administrator does: at once and durably. Data
    /// after the new end is lost; added space reads as zeros.
    pub fn set_size(&self, size: ByteLen) {
        let mut geometry = self.geometry.get();
        geometry.size = whole_blocks(size, geometry.block_size);
        self.state.borrow_mut().medium.set_size(geometry.size);
        self.geometry.set(geometry);
        self.changes.announce_size(geometry.size);
    }

    /// Stops the device for good and returns its medium. Each sector of an in-flight change may have been written;
    /// no request completes any more.
    ///
    /// A second stop returns an empty medium.
    pub fn stop(&self, stop: DeviceStop) -> SimulatedMedium {
        let mut state = self.state.borrow_mut();
        state.stopped = true;
        let changes = std::mem::take(&mut state.in_flight);
        for (number, change) in &changes {
            state.abandon(*number, change);
        }
        let empty = SimulatedMedium::new(ByteLen::ZERO, state.medium.sector_size());
        let mut medium = std::mem::replace(&mut state.medium, empty);
        match stop {
            DeviceStop::PowerLoss => medium.lose_power(&mut state.random),
            DeviceStop::KillAndClearMemory => medium.clear_host_memory(),
            DeviceStop::Kill => {}
        }
        medium
    }

    fn error(&self, operation: Operation, range: ByteRange, failure: Failure) -> IoError {
        IoError::new(&self.name, operation, range, failure)
    }

    /// Decides the outcome of a request.
    fn plan(&self, operation: Operation, range: ByteRange) -> RequestPlan {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let mut plan = RequestPlan { delay: self.latency.get().draw(&mut state.random), failure: None, hangs: false };
        match state.faults.effect_on(operation, range) {
            Some(FaultEffect::Fail(failure)) => plan.failure = Some(failure),
            Some(FaultEffect::Delay(more)) => plan.delay = Some(plan.delay.unwrap_or_default() + more),
            Some(FaultEffect::Hang) => plan.hangs = true,
            None if state.random.chance(self.failures_per_mille.get()) => {
                plan.failure = Some(Failure::Os(libc::EIO));
            }
            None => {}
        }
        if plan.failure.is_none() && !state.allocate_for(operation, range) {
            plan.failure = Some(Failure::NoSpace);
        }
        if plan.failure.is_some() {
            state.failures += 1;
        }
        plan
    }

    /// Waits until `at`; for ever if the device is stopped by then.
    async fn wait_until(&self, at: LoopTime) {
        match self.on.upgrade().map(|on| on.sleep_until(at)) {
            Some(sleep) => sleep.await,
            None => pending().await,
        }
        if self.state.borrow().stopped {
            pending().await
        }
    }

    /// Waits until a stuck request is released. Returns the request's start and end times.
    async fn wait_for_start(&self, plan: &RequestPlan) -> (LoopTime, LoopTime) {
        if plan.hangs {
            self.wait_for_release().await;
        }
        let now = self.on.upgrade().map_or_else(LoopTime::default, |on| on.now());
        (now, now.after(plan.delay.unwrap_or_default()))
    }

    async fn wait_for_release(&self) {
        let releases_before = self.state.borrow().releases;
        std::future::poll_fn(|context| {
            let mut state = self.state.borrow_mut();
            if state.releases != releases_before {
                return Poll::Ready(());
            }
            state.hung_requests.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Returns a random moment between two, both included.
    fn random_time(&self, first: LoopTime, last: LoopTime) -> LoopTime {
        let random = &mut self.state.borrow_mut().random;
        first.after(random.duration(Duration::ZERO, last.since(first)))
    }

    fn fill(&self, range: ByteRange, buffer: ReadBuf<'_>) -> Result<(), Failure> {
        let state = self.state.borrow();
        if range.end().get() > state.medium.size().get() {
            return Err(Failure::OutOfRange);
        }
        let mut bytes = vec![0; buffer.len()];
        state.medium.read(range.start, &mut bytes);
        buffer.copy_from_slice(&bytes);
        Ok(())
    }

    async fn read_steps(&self, range: ByteRange, buffer: ReadBuf<'_>, plan: RequestPlan) -> IoResult {
        let failed = |failure| self.error(Operation::Read, range, failure);
        let (begin, end) = self.wait_for_start(&plan).await;
        let parts = self.state.borrow_mut().split(range);
        let mut at = begin;
        for part in parts {
            at = self.random_time(at, end);
            self.wait_until(at).await;
            let from = (part.start - range.start).as_usize();
            self.fill(part, buffer.slice(from, part.len.as_usize())).map_err(failed)?;
        }
        self.wait_until(end).await;
        plan.failure.map_or(Ok(()), |failure| Err(failed(failure)))
    }

    /// Starts a change whose range is valid.
    fn change<'a>(&'a self, operation: Operation, range: ByteRange, source: Source, fua: bool) -> Io<'a> {
        let plan = self.plan(operation, range);
        let number = {
            let mut state = self.state.borrow_mut();
            let remaining = state.split(range);
            let number = state.medium.start_change();
            let change = InFlightChange { range, source, remaining };
            state.in_flight.insert(number, change);
            number
        };
        let request = ChangeRequest { device: self, operation, range, number, fua };
        if plan.delay.is_none() && !plan.hangs {
            return Io::ready(request.finish(plan.failure));
        }
        Io::task(request.steps(plan))
    }

    fn check_range(&self, operation: Operation, range: ByteRange) -> IoResult {
        check_request(&self.name, &self.geometry.get(), operation, range)
    }

    fn check_with_memory(&self, operation: Operation, range: ByteRange, aligned: bool) -> IoResult {
        self.check_range(operation, range)?;
        if !aligned {
            return Err(self.error(operation, range, Failure::Misaligned));
        }
        Ok(())
    }

    fn memory_alignment(&self) -> usize {
        self.geometry.get().memory_alignment as usize
    }

    fn is_stopped(&self) -> bool {
        self.state.borrow().stopped
    }

    async fn flush_steps(&self, coverage: FlushCoverage, plan: RequestPlan) -> IoResult {
        let (_, end) = self.wait_for_start(&plan).await;
        self.wait_until(end).await;
        self.finish_flush(&coverage, plan.failure)
    }

    async fn allocate_steps(&self, range: ByteRange, plan: RequestPlan) -> IoResult {
        let (_, end) = self.wait_for_start(&plan).await;
        self.wait_until(end).await;
        self.finish_allocate(range, plan.failure)
    }

    fn finish_allocate(&self, range: ByteRange, failure: Option<Failure>) -> IoResult {
        failure.map_or(Ok(()), |failure| Err(self.error(Operation::Write, range, failure)))
    }

    fn finish_flush(&self, coverage: &FlushCoverage, failure: Option<Failure>) -> IoResult {
        if let Some(failure) = failure {
            return Err(self.error(Operation::Flush, ByteRange::default(), failure));
        }
        self.state.borrow_mut().medium.flush(coverage);
        Ok(())
    }

    async fn extents_steps(&self, range: ByteRange, limit: usize, plan: RequestPlan) -> IoResult<Vec<Extent>> {
        let (begin, end) = self.wait_for_start(&plan).await;
        self.wait_until(self.random_time(begin, end)).await;
        let found = self.finish_extents(range, limit, plan.failure);
        self.wait_until(end).await;
        found
    }

    fn finish_extents(&self, range: ByteRange, limit: usize, failure: Option<Failure>) -> IoResult<Vec<Extent>> {
        // The device may have shrunk meanwhile.
        self.check_range(Operation::Extents, range)?;
        if let Some(failure) = failure {
            return Err(self.error(Operation::Extents, range, failure));
        }
        let medium = &self.state.borrow().medium;
        let unit = u64::from(self.geometry.get().block_size);
        let mut found = Vec::new();
        let mut at = range.start;
        while at < range.end() && found.len() < limit.max(1) {
            let rest = ByteRange::between(at, range.end());
            // A boundary inside a block belongs to the data.
            let data = medium.next_data(rest).map(|data| data.widened(unit).intersection(rest));
            let (kind, part) = match data {
                Some(data) if data.start == at => (ExtentKind::Data, data),
                Some(data) => (ExtentKind::Hole, ByteRange::between(at, data.start)),
                None => (ExtentKind::Hole, rest),
            };
            found.push(Extent { range: part, kind });
            at = part.end();
        }
        Ok(found)
    }
}

impl State {
    /// Allocates the space that a request needs, or releases the space that it discards. Returns false if there is
    /// not enough.
    fn allocate_for(&mut self, operation: Operation, range: ByteRange) -> bool {
        match operation {
            Operation::Write | Operation::WriteZeroes => {
                if let Some(free_units) = &mut self.free_units {
                    let Some(rest) = free_units.checked_sub(self.medium.unallocated_units(range)) else {
                        return false;
                    };
                    *free_units = rest;
                }
                self.medium.allocate(range);
            }
            Operation::Discard => {
                let deallocated = self.medium.deallocate(range);
                self.free_units = self.free_units.map(|left| left + deallocated);
            }
            Operation::Read | Operation::Flush | Operation::Extents | Operation::Grow => {}
        }
        true
    }

    /// Splits a range into the parts in which a request takes effect, in that order.
    fn split(&mut self, range: ByteRange) -> Parts {
        let sectors = range.len.get() / u64::from(self.medium.sector_size());
        let mut parts = Parts::new();
        let mut at = range.start;
        while sectors > 1 && parts.len() < 2 && at < range.end() && self.random.chance(400) {
            let rest = (range.end() - at).get() / u64::from(self.medium.sector_size());
            let taken = self.random.between(1, rest);
            let part = at.range(ByteLen::new(taken * u64::from(self.medium.sector_size())));
            parts.push(part);
            at = part.end();
        }
        if at < range.end() {
            parts.push(ByteRange::between(at, range.end()));
        }
        if self.random.chance(500) {
            parts.reverse();
        }
        parts
    }

    /// Ends a change of which each remaining sector is written or not, at random.
    fn abandon(&mut self, number: ChangeNumber, change: &InFlightChange) {
        let applied_per_mille = self.random.pick(&[0, 500, 1000]);
        let size = ByteOffset::new(self.medium.size().get());
        let inside = ByteRange::between(ByteOffset::ZERO, size);
        for part in &change.remaining {
            let part = part.intersection(inside);
            if !part.is_empty() {
                self.apply(number, change, part, applied_per_mille);
            }
        }
    }

    fn apply(&mut self, number: ChangeNumber, change: &InFlightChange, part: ByteRange, per_mille: u32) {
        let choose = |random: &mut SeededRng| per_mille == 1000 || random.chance(per_mille);
        self.medium.apply(number, change.range, part, &change.source, &mut self.random, choose);
    }
}

/// An in-flight change. If it is dropped before it has completed, each of its sectors is old or new.
struct ChangeRequest<'a> {
    device: &'a SimulatedDevice,
    operation: Operation,
    range: ByteRange,
    number: ChangeNumber,
    fua: bool,
}

impl ChangeRequest<'_> {
    async fn steps(self, plan: RequestPlan) -> IoResult {
        let device = self.device;
        let (mut at, end) = device.wait_for_start(&plan).await;
        while plan.failure.is_none() && self.has_remaining() {
            at = device.random_time(at, end);
            device.wait_until(at).await;
            self.apply_next()?;
        }
        device.wait_until(end).await;
        self.finish(plan.failure)
    }

    fn has_remaining(&self) -> bool {
        let state = self.device.state.borrow();
        state.in_flight.get(&self.number).is_some_and(|change| !change.remaining.is_empty())
    }

    /// Applies the next part, if there is one.
    fn apply_next(&self) -> IoResult {
        let state = &mut *self.device.state.borrow_mut();
        let Some(mut change) = state.in_flight.remove(&self.number) else {
            return Ok(());
        };
        if self.range.end().get() > state.medium.size().get() {
            // The disk has shrunk: the rest is not applied.
            return Err(self.device.error(self.operation, self.range, Failure::OutOfRange));
        }
        if !change.remaining.is_empty() {
            let part = change.remaining.remove(0);
            state.apply(self.number, &change, part, 1000);
        }
        state.in_flight.insert(self.number, change);
        Ok(())
    }

    /// Completes the request.
    fn finish(self, failure: Option<Failure>) -> IoResult {
        if let Some(failure) = failure {
            // Dropping the request leaves each sector old or new.
            return Err(self.device.error(self.operation, self.range, failure));
        }
        while self.has_remaining() {
            self.apply_next()?;
        }
        let state = &mut *self.device.state.borrow_mut();
        state.in_flight.remove(&self.number);
        if self.fua {
            state.medium.flush_change(self.number, self.range);
        }
        Ok(())
    }
}

impl Drop for ChangeRequest<'_> {
    fn drop(&mut self) {
        let state = &mut *self.device.state.borrow_mut();
        if let Some(change) = state.in_flight.remove(&self.number) {
            state.abandon(self.number, &change);
        }
    }
}

fn whole_blocks(size: ByteLen, block_size: u32) -> ByteLen {
    ByteOffset::new(size.get()).align_down(u64::from(block_size)) - ByteOffset::ZERO
}

impl BlockDevice for SimulatedDevice {
    fn name(&self) -> &Rc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        if self.is_stopped() {
            return Io::task(pending());
        }
        let range = start.range(buffer.byte_len());
        let aligned = buffer.is_aligned(self.memory_alignment());
        if let Err(error) = self.check_with_memory(Operation::Read, range, aligned) {
            return Io::ready(Err(error));
        }
        let plan = self.plan(Operation::Read, range);
        if plan.delay.is_some() || plan.hangs {
            return Io::task(self.read_steps(range, buffer, plan));
        }
        let filled = match plan.failure {
            Some(failure) => Err(failure),
            None => self.fill(range, buffer),
        };
        Io::ready(filled.map_err(|failure| self.error(Operation::Read, range, failure)))
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        if self.is_stopped() {
            return Io::task(pending());
        }
        let range = start.range(buffer.byte_len());
        let aligned = buffer.is_aligned(self.memory_alignment());
        if let Err(error) = self.check_with_memory(Operation::Write, range, aligned) {
            return Io::ready(Err(error));
        }
        self.change(Operation::Write, range, Source::Data(buffer.to_vec().into()), flags.fua)
    }

    fn flush(&self) -> Io<'_> {
        if self.is_stopped() {
            return Io::task(pending());
        }
        let plan = self.plan(Operation::Flush, ByteRange::default());
        let coverage = {
            let state = self.state.borrow();
            FlushCoverage::new(&state.medium, state.in_flight.keys().copied())
        };
        if plan.delay.is_some() || plan.hangs {
            return Io::task(self.flush_steps(coverage, plan));
        }
        Io::ready(self.finish_flush(&coverage, plan.failure))
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        if self.is_stopped() {
            return Io::task(pending());
        }
        match self.check_range(Operation::Discard, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => self.change(Operation::Discard, range, Source::Discard, false),
        }
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        if self.is_stopped() {
            return Io::task(pending());
        }
        if let Err(error) = self.check_range(Operation::WriteZeroes, range) {
            return Io::ready(Err(error));
        }
        if flags.fast_only && !self.geometry.get().fast_zeroes {
            return Io::ready(Err(self.error(Operation::WriteZeroes, range, Failure::Unsupported)));
        }
        self.change(Operation::WriteZeroes, range, Source::Zeros, flags.fua)
    }

    fn allocate(&self, range: ByteRange) -> Io<'_> {
        if self.is_stopped() {
            return Io::task(pending());
        }
        if let Err(error) = self.check_range(Operation::Write, range) {
            return Io::ready(Err(error));
        }
        let plan = self.plan(Operation::Write, range);
        if plan.delay.is_some() || plan.hangs {
            return Io::task(self.allocate_steps(range, plan));
        }
        Io::ready(self.finish_allocate(range, plan.failure))
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        if self.is_stopped() {
            return Box::pin(pending());
        }
        if let Err(error) = self.check_range(Operation::Extents, range) {
            return Box::pin(ready(Err(error)));
        }
        let plan = self.plan(Operation::Extents, range);
        if plan.delay.is_some() || plan.hangs {
            return Box::pin(self.extents_steps(range, limit, plan));
        }
        Box::pin(ready(self.finish_extents(range, limit, plan.failure)))
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        Box::pin(async move {
            let range = ByteOffset::ZERO.range(size);
            if size.get() <= self.geometry.get().size.get() {
                return Ok(());
            }
            let plan = self.plan(Operation::Grow, range);
            let (_, end) = self.wait_for_start(&plan).await;
            self.wait_until(end).await;
            if let Some(failure) = plan.failure {
                return Err(self.error(Operation::Grow, range, failure));
            }
            let mut geometry = self.geometry.get();
            if size.get() > geometry.size.get() {
                let size = ByteOffset::new(size.get()).align_up(u64::from(geometry.block_size));
                geometry.size = ByteLen::new(size.get());
                self.state.borrow_mut().medium.set_size(geometry.size);
                self.geometry.set(geometry);
            }
            Ok(())
        })
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.changes
    }
}
