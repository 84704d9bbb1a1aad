//! Cleaning: writes dirty data to the disk, in the order of the disk.
//!
//! Lines are cleaned when they have been dirty for a while, when there are many, or when the disk is idle. The guest
//! comes first: while it has requests, little is written at a time, with pauses in between. A line stays dirty until
//! the disk has been flushed. If the line is written before that flush ends, it stays dirty, and the disk has an
//! earlier state of it, which no read returns.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use larder_block::event_loop::yield_now;
use larder_block::range_lock::{RangeLockMode as DiskLocks, RangeLocks};
use larder_block::{AlignedBuf, ByteRange, Io, IoError, IoResult, LoopTime, Operation, WriteBuf, WriteFlags, join};
use smallvec::SmallVec;

use crate::Cache;
use crate::layout::{Line, SectorMask, Slot};
use crate::line_parts::runs;
use larder_block::signal::Signal;

/// Bytes that one write to the disk has at most.
const RUN_LEN: u64 = 256 << 10;

/// Bytes written to the disk before it is flushed.
const BATCH_LEN: u64 = 2 << 20;

/// Bytes written at most before a pause while the guest has requests; [`BUSY_BATCH_RUNS`] bounds the number of writes.
const BUSY_BATCH_LEN: u64 = 512 << 10;
const BUSY_BATCH_RUNS: usize = 16;

/// Length of a pause while the guest has requests, as a multiple of the time that writing took; half of it if much is
/// dirty.
const PAUSE_FACTOR: u32 = 3;

/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Lines that are cleaned at once for a change that must not find them dirty.
const CLEAN_LINES_MAX: usize = 256;

/// Delay before lines are tried again after an error, or when all of them are being written.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Conditions under each of which dirty lines are cleaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CleanOptions {
    /// Age of dirty lines from which they are cleaned, or up to twice that.
    pub dirty_age: Duration,
    /// Percentage of dirty lines above which lines are cleaned.
    pub percent: u8,
    /// Time without requests after which lines are cleaned, or up to twice that.
    pub idle: Duration,
}

impl Default for CleanOptions {
    fn default() -> Self {
        Self { dirty_age: Duration::from_secs(30), percent: 20, idle: Duration::from_secs(5) }
    }
}

/// State of the cleaning.
pub(crate) struct Cleaner {
    pub(crate) options: CleanOptions,
    /// First line of the next batch.
    next: Cell<Line>,
    /// Lines that are being written to the disk; no change of the disk touches them.
    pub(crate) busy: RangeLocks,
    /// Slots that are being cleaned, each with whether it was changed since that began.
    in_flight: RefCell<HashMap<Slot, bool>>,
    running: Cell<bool>,
    timer_running: Cell<bool>,
    /// Set once only [`Cache::clean`] may start the cleaning.
    stopped: Cell<bool>,
    /// Set once nothing may start it, because another cache owns the disk.
    inactive: Cell<bool>,
    /// Number of callers that wait for all lines to be clean.
    waiters: Cell<u32>,
    /// Requests of the guest so far.
    guest_requests: Cell<u64>,
    /// Bytes written to the disk so far.
    pub(crate) written: Cell<u64>,
    /// Number of runs that have ended; `error` is that of the last one, if it failed.
    runs_ended: Cell<u64>,
    error: RefCell<Option<IoError>>,
    ended: Signal,
}

impl Cleaner {
    pub(crate) fn new(options: CleanOptions) -> Self {
        Self {
            options,
            next: Cell::new(0),
            busy: RangeLocks::default(),
            in_flight: RefCell::default(),
            running: Cell::new(false),
            timer_running: Cell::new(false),
            stopped: Cell::new(false),
            inactive: Cell::new(false),
            waiters: Cell::new(0),
            guest_requests: Cell::new(0),
            written: Cell::new(0),
            runs_ended: Cell::new(0),
            error: RefCell::default(),
            ended: Signal::default(),
        }
    }

    /// Counts a request of the guest.
    pub(crate) fn count_request(&self) {
        self.guest_requests.set(self.guest_requests.get().wrapping_add(1));
    }

    /// Returns the number of the guest's requests so far.
    pub(crate) fn guest_requests(&self) -> u64 {
        self.guest_requests.get()
    }

    /// Stops the background cleaning for good, and waits until it has stopped.
    pub(crate) async fn stop(&self) {
        self.stopped.set(true);
        self.ended.when(|| !self.running.get()).await;
    }

    /// Stops all cleaning for good, whichever caller wants it, and waits until it has stopped.
    pub(crate) async fn inactivate(&self) {
        self.inactive.set(true);
        self.ended.when(|| !self.running.get()).await;
    }

    /// Completes when one more run has ended.
    async fn wait_run_end(&self) {
        let ends = self.runs_ended.get();
        self.ended.when(|| self.runs_ended.get() != ends).await;
    }

    /// Notes that a slot has changed, in case it is being cleaned.
    pub(crate) fn mark_changed(&self, slot: Slot) {
        if let Some(changed) = self.in_flight.borrow_mut().get_mut(&slot) {
            *changed = true;
        }
    }
}

/// Line that is being cleaned.
struct LineToClean {
    line: Line,
    slot: Slot,
    dirty: SectorMask,
}

/// Returns how many of `lines`, which are sorted, are in the first `runs` runs of consecutive lines.
fn len_of_runs(lines: &[Line], runs: usize) -> usize {
    let is_end = |(_, pair): &(usize, &[Line])| pair[0] + 1 != pair[1];
    let ends = lines.windows(2).enumerate().filter(is_end);
    ends.map(|(at, _)| at + 1).nth(runs - 1).unwrap_or(lines.len())
}

/// State after a batch could not be cleaned: every other line is tried once more.
struct CleanRetry {
    error: IoError,
    /// First line that was tried; `has_wrapped` is set once the search has wrapped to the first line.
    from: Line,
    has_wrapped: bool,
    failed_parts: u32,
}

impl CleanRetry {
    fn new(error: IoError, from: Line) -> Self {
        Self { error, from, has_wrapped: false, failed_parts: 0 }
    }

    /// Removes those of `lines` that were tried already. The lines are the next ones from `next` on, or the first
    /// ones of the disk if none follow `next`.
    fn retain_untried(&mut self, lines: &mut Vec<Line>, next: Line) {
        self.has_wrapped |= lines.first().is_some_and(|first| *first < next);
        if self.has_wrapped {
            lines.truncate(lines.partition_point(|line| *line < self.from));
        }
    }
}

/// Ends the cleaning of some slots when dropped.
struct InFlightLines<'a> {
    cache: &'a Cache,
    lines: Vec<LineToClean>,
}

impl Drop for InFlightLines<'_> {
    fn drop(&mut self) {
        let mut slots = self.cache.cleaner.in_flight.borrow_mut();
        self.lines.iter().for_each(|cleaned| {
            slots.remove(&cleaned.slot);
        });
    }
}

/// Number of consecutive failed parts after which cleaning stops: a bad spot cannot be the cause then.
const FAILED_PARTS_MAX: u32 = 16;

/// Counts a caller that waits for all lines to be clean, until it is dropped.
struct Waiter<'a>(&'a Cell<u32>);

impl<'a> Waiter<'a> {
    fn new(count: &'a Cell<u32>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Cache {
    /// Starts the cleaning if there is a reason, or a timer that checks for one.
    pub(crate) fn schedule_cleaning(&self) {
        let cleaning = &self.cleaner;
        let is_disabled = cleaning.stopped.get() || self.lower.geometry().read_only;
        if is_disabled || self.index.borrow().dirty.len() == 0 {
            return;
        }
        if self.exceeds_dirty_percent(cleaning.options.percent) {
            self.index.borrow_mut().dirty.age();
            self.start_cleaning();
        }
        if !cleaning.timer_running.replace(true) {
            let options = cleaning.options;
            self.schedule_recheck(options.dirty_age.min(options.idle), Duration::ZERO, cleaning.guest_requests.get());
        }
    }

    /// Returns whether more than `percent` of all lines are dirty.
    fn exceeds_dirty_percent(&self, percent: u8) -> bool {
        self.index.borrow().dirty.len() * 100 > self.layout.slots() * u64::from(percent)
    }

    /// Checks periodically, while lines are dirty, whether some have been dirty for long or the disk is idle.
    fn schedule_recheck(&self, interval: Duration, waited: Duration, requests: u64) {
        let Some(sleep) = self.on.upgrade().map(|on| on.sleep(interval)) else {
            return;
        };
        let this = self.this.clone();
        self.spawn(async move {
            sleep.await;
            let Some(cache) = this.upgrade() else { return };
            let cleaning = &cache.cleaner;
            if cleaning.stopped.get() || cache.index.borrow().dirty.len() == 0 {
                cleaning.timer_running.set(false);
                return;
            }
            let mut waited = waited + interval;
            if cleaning.guest_requests.get() == requests {
                cache.index.borrow_mut().dirty.age();
                cache.start_cleaning();
            } else if waited >= cleaning.options.dirty_age {
                cache.start_cleaning();
                cache.index.borrow_mut().dirty.age();
                waited = Duration::ZERO;
            }
            cache.schedule_recheck(interval, waited, cleaning.guest_requests.get());
        });
    }

    /// Cleans aged lines in the background.
    pub(crate) fn start_cleaning(&self) {
        let cleaning = &self.cleaner;
        if cleaning.inactive.get() || !self.index.borrow().dirty.has_old() || cleaning.running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move {
            let cleaning = &cache.cleaner;
            let cleaned = cache.clean_old().await;
            cleaning.error.replace(cleaned.err());
            cleaning.runs_ended.set(cleaning.runs_ended.get() + 1);
            cleaning.running.set(false);
            cleaning.ended.raise();
        });
    }

    /// Writes all dirty data to the disk.
    ///
    /// # Errors
    /// An error of the disk or the cache device. All lines are tried first.
    pub async fn clean(&self) -> IoResult {
        self.clean_rounds(u32::MAX).await
    }

    /// Cleans all lines. While new data keeps coming, stops after `rounds` rounds; a round cleans the lines that are
    /// dirty when it starts.
    pub(crate) async fn clean_rounds(&self, rounds: u32) -> IoResult {
        let cleaning = &self.cleaner;
        let _waiter = Waiter::new(&cleaning.waiters);
        self.load_all().await?;
        for _ in 0..rounds {
            if cleaning.running.get() {
                // The running one may have failed before this call.
                cleaning.wait_run_end().await;
            }
            self.index.borrow_mut().dirty.age();
            if !self.index.borrow().dirty.has_old() {
                return Ok(());
            }
            if cleaning.inactive.get() {
                return Err(self.device_error(Operation::Write, ByteRange::default()));
            }
            // All waiters get the result of the same run.
            self.start_cleaning();
            cleaning.wait_run_end().await;
            if let Some(error) = &*cleaning.error.borrow() {
                return Err(error.clone());
            }
        }
        Ok(())
    }

    async fn clean_old(&self) -> IoResult {
        let mut failed: Option<CleanRetry> = None;
        loop {
            let (requests, began) = (self.cleaner.guest_requests.get(), self.now());
            let is_urgent = self.is_urgent();
            let bytes = if is_urgent { BATCH_LEN } else { BUSY_BATCH_LEN };
            let per_batch = (bytes / self.layout.line_len()) as usize;
            if self.cleaner.inactive.get() {
                return Err(self.device_error(Operation::Write, ByteRange::default()));
            }
            let next = self.cleaner.next.get();
            let mut lines = self.index.borrow().dirty.old_from(next, per_batch);
            if !is_urgent {
                lines.truncate(len_of_runs(&lines, BUSY_BATCH_RUNS));
            }
            if let Some(failed) = &mut failed {
                failed.retain_untried(&mut lines, next);
            }
            let Some(last) = lines.last() else {
                return failed.map_or(Ok(()), |failed| Err(failed.error));
            };
            self.cleaner.next.set(last + 1);
            match self.clean_lines(&lines).await {
                Ok(0) => {}
                Ok(_) => {
                    if self.cleaner.guest_requests.get() != requests {
                        self.pause_for_guest(began).await;
                    }
                    // Files in memory complete in the call, so nothing above yields.
                    yield_now().await;
                    continue;
                }
                Err(error) => {
                    if self.cleaner.error.borrow().is_none() && failed.is_none() {
                        tracing::error!(
                            event = "write-back-failed",
                            "{}: data that only its cache has could not be written to it; retrying: {error}",
                            self.lower.name()
                        );
                    }
                    let (failed, has_waiters) = (
                        failed.get_or_insert(CleanRetry::new(error.clone(), lines[0])),
                        self.cleaner.waiters.get() > 0,
                    );
                    if has_waiters && self.clean_by_halves(&lines, &mut failed.failed_parts).await {
                        continue;
                    }
                    self.wait_retry_delay().await;
                    return Err(error);
                }
            }
            self.wait_retry_delay().await;
        }
    }

    async fn wait_retry_delay(&self) {
        if let Some(sleep) = self.on.upgrade().map(|on| on.sleep(RETRY_DELAY)) {
            sleep.await;
        }
    }

    /// Cleans as many as possible of the lines of a batch that failed, so that a bad spot on a device does not keep
    /// the rest from the disk. Returns whether it is worth continuing; `failed_parts` counts failed parts since the
    /// last success.
    async fn clean_by_halves(&self, lines: &[Line], failed_parts: &mut u32) -> bool {
        let mut parts = vec![lines];
        while let Some(part) = parts.pop() {
            let cleaned = match part.len() == lines.len() {
                // The whole batch has just failed.
                true => false,
                false => self.clean_lines(part).await.is_ok(),
            };
            if cleaned {
                *failed_parts = 0;
                continue;
            }
            *failed_parts += 1;
            if *failed_parts >= FAILED_PARTS_MAX {
                return false;
            }
            if part.len() > 1 {
                let (first, second) = part.split_at(part.len() / 2);
                parts.extend([second, first]);
            }
        }
        true
    }

    /// Returns whether to clean without pauses.
    fn is_urgent(&self) -> bool {
        self.cleaner.waiters.get() > 0 || self.exceeds_dirty_percent(self.cleaner.options.percent.saturating_mul(2))
    }

    /// Pauses for a while that depends on the time since `began`, so that the guest has the disk.
    async fn pause_for_guest(&self, began: LoopTime) {
        if self.is_urgent() {
            return;
        }
        let times = match self.exceeds_dirty_percent(self.cleaner.options.percent) {
            true => PAUSE_FACTOR / 2,
            false => PAUSE_FACTOR,
        };
        let took = self.now().since(began);
        let Some(sleep) = self.on.upgrade().map(|on| on.sleep((took * times).min(PAUSE_MAX))) else {
            return;
        };
        sleep.await;
    }

    /// Cleans some lines, which are sorted. Returns how many were cleaned.
    pub(crate) async fn clean_lines(&self, lines: &[Line]) -> Result<usize, IoError> {
        let (Some(first), Some(last)) = (lines.first(), lines.last()) else {
            return Ok(0);
        };
        if self.has_size_changed() {
            self.apply_size().await?;
        }
        let range = self.range_of(*first..last + 1);
        let _held = self.cleaner.busy.lock(range, DiskLocks::Exclusive).await;
        self.clean_locked(lines).await
    }

    /// Cleans lines that the caller has locked in [`Cleaner::busy`].
    pub(crate) async fn clean_locked(&self, lines: &[Line]) -> Result<usize, IoError> {
        let mut in_flight = InFlightLines { cache: self, lines: Vec::new() };
        for line in lines {
            let found = self.index.borrow().find(*line);
            let dirty = found.map_or(0, |slot| self.index.borrow().dirty(slot));
            let Some(slot) = found.filter(|_| dirty != 0) else {
                continue;
            };
            // This run may miss data that is being written to the slot now.
            let is_changing = self.index.borrow().has_writers(slot);
            self.cleaner.in_flight.borrow_mut().insert(slot, is_changing);
            in_flight.lines.push(LineToClean { line: *line, slot, dirty });
        }
        if in_flight.lines.is_empty() {
            return Ok(0);
        }
        let has_pending = lines.iter().any(|line| self.has_pending_removal(*line..line + 1));
        if has_pending && !self.has_failed() {
            // The following check handles a failure.
            let _ = self.commit().await;
        }
        if self.has_failed() {
            let first = in_flight.lines[0].line;
            self.wait_failure_recorded(Operation::Write, self.range_of(first..first + 1)).await?;
        }
        let mut ios: SmallVec<[Io<'_>; 8]> = SmallVec::new();
        let mut from = 0;
        while from < in_flight.lines.len() {
            let start = in_flight.lines[from].line;
            let near = |at: &usize| {
                let line = in_flight.lines[*at].line;
                line - start == (*at - from) as u64 && (line + 1 - start) << self.layout.line_bits <= RUN_LEN
            };
            let to = from + (from..in_flight.lines.len()).take_while(near).count().max(1);
            ios.push(Io::task(self.clean_run(&in_flight.lines[from..to])));
            from = to;
        }
        let written = join(ios).await;
        self.changes.flushing.record_change();
        if written.is_err() && self.has_size_changed() {
            // The line may have been past the disk's end.
            return Ok(0);
        }
        written?;
        self.flush_disk().await?;
        let mut cleaned = 0;
        for LineToClean { slot, dirty, .. } in &in_flight.lines {
            if self.cleaner.in_flight.borrow().get(slot) != Some(&false) {
                continue;
            }
            cleaned += 1;
            let current = self.index.borrow().entry(*slot);
            self.ledger.borrow_mut().record_change(*slot, || current);
            self.index.borrow_mut().set_sectors(*slot, current.valid, current.dirty & !dirty);
        }
        self.schedule_persist();
        Ok(cleaned)
    }

    /// Writes all dirty data of the lines of a range, which the caller has locked in [`Cleaner::busy`], to the disk.
    pub(crate) async fn clean_range(&self, operation: Operation, range: ByteRange) -> IoResult {
        loop {
            let dirty = self.index.borrow().dirty.within(self.layout.lines_of(range), CLEAN_LINES_MAX);
            if dirty.is_empty() {
                return Ok(());
            }
            if self.clean_locked(&dirty).await? == 0 {
                return Err(self.device_error(operation, range));
            }
        }
    }

    /// Writes consecutive lines to the disk.
    async fn clean_run(&self, lines: &[LineToClean]) -> IoResult {
        let line_len = self.layout.line_len() as usize;
        let mut memory = AlignedBuf::zeroed(lines.len() * line_len);
        let size = self.lower.geometry().size.get();
        let mut written: SmallVec<[ByteRange; 4]> = SmallVec::new();
        for (cleaned, from) in lines.iter().zip((0..).step_by(line_len)) {
            let line_range = self.range_of(cleaned.line..cleaned.line + 1);
            let part = self.layout.part_of(cleaned.line, line_range);
            let dirty = runs(part, cleaned.dirty).filter(|(inside, _)| *inside);
            for (_, piece) in dirty {
                let from = from + self.layout.offset_in_line(piece.start) as usize;
                let at = self.data_at(cleaned.slot, piece.start);
                memory = self.fast.read(at, memory, from..from + piece.len.as_usize()).await?;
                match written.last_mut() {
                    Some(last) if last.end() == piece.start => last.len += piece.len,
                    _ => written.push(piece),
                }
            }
        }
        let start = lines.first().map_or(0, |cleaned| cleaned.line << self.layout.line_bits);
        let disk = ByteRange::new(0, size);
        let ios: SmallVec<[Io<'_>; 4]> = written
            .iter()
            .map(|piece| piece.intersection(disk))
            .filter(|piece| !piece.is_empty())
            .map(|piece| {
                let from = (piece.start.get() - start) as usize;
                let bytes = &memory[from..from + piece.len.as_usize()];
                self.cleaner.written.set(self.cleaner.written.get() + piece.len.get());
                self.lower.write(piece.start, WriteBuf::new(bytes), WriteFlags::NONE)
            })
            .collect();
        join(ios).await
    }

    pub(crate) fn range_of(&self, lines: Range<Line>) -> ByteRange {
        let len = (lines.end - lines.start) << self.layout.line_bits;
        ByteRange::new(lines.start << self.layout.line_bits, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_length_counts_consecutive_lines() {
        let lines = [1, 2, 3, 7, 8, 10, 12];
        let lens: Vec<usize> = (1..6).map(|runs| len_of_runs(&lines, runs)).collect();
        assert_eq!(lens, [3, 5, 6, 7, 7]);
        assert_eq!(len_of_runs(&[], 1), 0);
    }
}
