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
use larder_block::range_lock::{Mode as Hold, Ranges};
use larder_block::{AlignedBuf, ByteRange, Io, IoError, IoResult, LoopTime, Operation, WriteBuf, WriteFlags, join};
use smallvec::SmallVec;

use crate::Cache;
use crate::parts::runs;
use crate::shape::{Line, Sectors, Slot};
use larder_block::signal::Signal;

/// Bytes that one write to the disk has at most.
const RUN_LEN: u64 = 256 << 10;

/// Bytes written to the disk before it is flushed.
const BATCH_LEN: u64 = 2 << 20;

/// Bytes written at most before a pause while the guest has requests; [`BESIDE_RUNS`] bounds the number of writes.
const BESIDE_LEN: u64 = 512 << 10;
const BESIDE_RUNS: usize = 16;

/// Length of a pause while the guest has requests, as a multiple of the time that writing took; half of it if much is
/// dirty.
const REST: u32 = 3;

/// The longest pause.
const REST_MAX: Duration = Duration::from_millis(500);

/// Lines that are cleaned at once for a change that must not find them dirty.
const CLEANED_MAX: usize = 256;

/// Delay before lines are tried again after an error, or when all of them are being written.
const PAUSE: Duration = Duration::from_millis(500);

/// Conditions under each of which dirty lines are cleaned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CleanOptions {
    /// Age of dirty lines from which they are cleaned, or up to twice that.
    pub after: Duration,
    /// Percentage of dirty lines above which lines are cleaned.
    pub percent: u8,
    /// Time without requests after which lines are cleaned, or up to twice that.
    pub idle: Duration,
}

impl Default for CleanOptions {
    fn default() -> Self {
        Self {
            after: Duration::from_secs(30),
            percent: 20,
            idle: Duration::from_secs(5),
        }
    }
}

/// State of the cleaning.
pub(crate) struct Cleaning {
    pub(crate) options: CleanOptions,
    /// First line of the next batch.
    next: Cell<Line>,
    /// Lines that are being written to the disk; no change of the disk touches them.
    pub(crate) busy: Ranges,
    /// Slots that are being cleaned, each with whether it was changed since that began.
    slots: RefCell<HashMap<Slot, bool>>,
    running: Cell<bool>,
    timed: Cell<bool>,
    /// Set once only [`Cache::clean`] may start the cleaning.
    stopped: Cell<bool>,
    /// Set once nothing may start it, because another cache owns the disk.
    gone: Cell<bool>,
    /// Number of callers that wait for all lines to be clean.
    waited_for: Cell<u32>,
    /// Requests of the guest so far.
    asked: Cell<u64>,
    /// Bytes written to the disk so far.
    pub(crate) written: Cell<u64>,
    /// Number of runs that have ended; `error` is that of the last one, if it failed.
    ends: Cell<u64>,
    error: RefCell<Option<IoError>>,
    ended: Signal,
}

impl Cleaning {
    pub(crate) fn new(options: CleanOptions) -> Self {
        Self {
            options,
            next: Cell::new(0),
            busy: Ranges::default(),
            slots: RefCell::default(),
            running: Cell::new(false),
            timed: Cell::new(false),
            stopped: Cell::new(false),
            gone: Cell::new(false),
            waited_for: Cell::new(0),
            asked: Cell::new(0),
            written: Cell::new(0),
            ends: Cell::new(0),
            error: RefCell::default(),
            ended: Signal::default(),
        }
    }

    /// Counts a request of the guest.
    pub(crate) fn is_asked(&self) {
        self.asked.set(self.asked.get().wrapping_add(1));
    }

    /// Returns the number of the guest's requests so far.
    pub(crate) fn asked(&self) -> u64 {
        self.asked.get()
    }

    /// Stops the background cleaning for good, and waits until it has stopped.
    pub(crate) async fn stop(&self) {
        self.stopped.set(true);
        self.ended.when(|| !self.running.get()).await;
    }

    /// Stops all cleaning for good, whichever caller wants it, and waits until it has stopped.
    pub(crate) async fn abandon(&self) {
        self.gone.set(true);
        self.ended.when(|| !self.running.get()).await;
    }

    /// Completes when one more run has ended.
    async fn end(&self) {
        let ends = self.ends.get();
        self.ended.when(|| self.ends.get() != ends).await;
    }

    /// Notes that a slot has changed, in case it is being cleaned.
    pub(crate) fn is_changed(&self, slot: Slot) {
        if let Some(changed) = self.slots.borrow_mut().get_mut(&slot) {
            *changed = true;
        }
    }
}

/// Line that is being cleaned.
struct Cleaned {
    line: Line,
    slot: Slot,
    dirty: Sectors,
}

/// Returns how many of `lines`, which are sorted, are in the first `runs` runs of consecutive lines.
fn len_of_runs(lines: &[Line], runs: usize) -> usize {
    let is_end = |(_, pair): &(usize, &[Line])| pair[0] + 1 != pair[1];
    let ends = lines.windows(2).enumerate().filter(is_end);
    ends.map(|(at, _)| at + 1).nth(runs - 1).unwrap_or(lines.len())
}

/// State after a batch could not be cleaned: every other line is tried once more.
struct Failed {
    error: IoError,
    /// First line that was tried; `is_around` is set once the search has wrapped to the first line.
    from: Line,
    is_around: bool,
    in_vain: u32,
}

impl Failed {
    fn new(error: IoError, from: Line) -> Self {
        Self {
            error,
            from,
            is_around: false,
            in_vain: 0,
        }
    }

    /// Removes those of `lines` that were tried already. The lines are the next ones from `next` on, or the first
    /// ones of the disk if none follow `next`.
    fn keep_untried(&mut self, lines: &mut Vec<Line>, next: Line) {
        self.is_around |= lines.first().is_some_and(|first| *first < next);
        if self.is_around {
            lines.truncate(lines.partition_point(|line| *line < self.from));
        }
    }
}

/// Ends the cleaning of some slots when dropped.
struct Busy<'a> {
    cache: &'a Cache,
    lines: Vec<Cleaned>,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut slots = self.cache.cleaning.slots.borrow_mut();
        self.lines.iter().for_each(|cleaned| {
            slots.remove(&cleaned.slot);
        });
    }
}

/// Number of consecutive failed parts after which cleaning stops: a bad spot cannot be the cause then.
const IN_VAIN_MAX: u32 = 16;

/// Counts a caller that waits for all lines to be clean, until it is dropped.
struct WaitedFor<'a>(&'a Cell<u32>);

impl<'a> WaitedFor<'a> {
    fn new(count: &'a Cell<u32>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for WaitedFor<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Cache {
    /// Starts the cleaning if there is a reason, or a timer that checks for one.
    pub(crate) fn clean_in_time(&self) {
        let cleaning = &self.cleaning;
        let cannot = cleaning.stopped.get() || self.lower.geometry().read_only;
        if cannot || self.index.borrow().dirty.len() == 0 {
            return;
        }
        if self.has_dirty(cleaning.options.percent) {
            self.index.borrow_mut().dirty.age();
            self.start_cleaning();
        }
        if !cleaning.timed.replace(true) {
            let options = cleaning.options;
            self.look_again(options.after.min(options.idle), Duration::ZERO, cleaning.asked.get());
        }
    }

    /// Returns whether more than `percent` of all lines are dirty.
    fn has_dirty(&self, percent: u8) -> bool {
        self.index.borrow().dirty.len() * 100 > self.shape.slots() * u64::from(percent)
    }

    /// Checks periodically, while lines are dirty, whether some have been dirty for long or the disk is idle.
    fn look_again(&self, interval: Duration, waited: Duration, asked: u64) {
        let Some(sleep) = self.on.upgrade().map(|on| on.sleep(interval)) else {
            return;
        };
        let this = self.this.clone();
        self.spawn(async move {
            sleep.await;
            let Some(cache) = this.upgrade() else { return };
            let cleaning = &cache.cleaning;
            if cleaning.stopped.get() || cache.index.borrow().dirty.len() == 0 {
                cleaning.timed.set(false);
                return;
            }
            let mut waited = waited + interval;
            if cleaning.asked.get() == asked {
                cache.index.borrow_mut().dirty.age();
                cache.start_cleaning();
            } else if waited >= cleaning.options.after {
                cache.start_cleaning();
                cache.index.borrow_mut().dirty.age();
                waited = Duration::ZERO;
            }
            cache.look_again(interval, waited, cleaning.asked.get());
        });
    }

    /// Cleans aged lines in the background.
    pub(crate) fn start_cleaning(&self) {
        let cleaning = &self.cleaning;
        if cleaning.gone.get() || !self.index.borrow().dirty.has_old() || cleaning.running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move {
            let cleaning = &cache.cleaning;
            let cleaned = cache.clean_old().await;
            cleaning.error.replace(cleaned.err());
            cleaning.ends.set(cleaning.ends.get() + 1);
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
        let cleaning = &self.cleaning;
        let _now = WaitedFor::new(&cleaning.waited_for);
        self.load_all().await?;
        for _ in 0..rounds {
            if cleaning.running.get() {
                // The running one may have failed before this call.
                cleaning.end().await;
            }
            self.index.borrow_mut().dirty.age();
            if !self.index.borrow().dirty.has_old() {
                return Ok(());
            }
            if cleaning.gone.get() {
                return Err(self.refused(Operation::Write, ByteRange::default()));
            }
            // All waiters get the result of the same run.
            self.start_cleaning();
            cleaning.end().await;
            if let Some(error) = &*cleaning.error.borrow() {
                return Err(error.clone());
            }
        }
        Ok(())
    }

    async fn clean_old(&self) -> IoResult {
        let mut failed: Option<Failed> = None;
        loop {
            let (asked, began) = (self.cleaning.asked.get(), self.now());
            let hurries = self.hurries();
            let bytes = if hurries { BATCH_LEN } else { BESIDE_LEN };
            let per_batch = (bytes / self.shape.line_len()) as usize;
            if self.cleaning.gone.get() {
                return Err(self.refused(Operation::Write, ByteRange::default()));
            }
            let next = self.cleaning.next.get();
            let mut lines = self.index.borrow().dirty.old_from(next, per_batch);
            if !hurries {
                lines.truncate(len_of_runs(&lines, BESIDE_RUNS));
            }
            if let Some(failed) = &mut failed {
                failed.keep_untried(&mut lines, next);
            }
            let Some(last) = lines.last() else {
                return failed.map_or(Ok(()), |failed| Err(failed.error));
            };
            self.cleaning.next.set(last + 1);
            match self.clean_lines(&lines).await {
                Ok(0) => {}
                Ok(_) => {
                    if self.cleaning.asked.get() != asked {
                        self.rest(began).await;
                    }
                    // Files in memory complete in the call, so nothing above yields.
                    yield_now().await;
                    continue;
                }
                Err(error) => {
                    if self.cleaning.error.borrow().is_none() && failed.is_none() {
                        tracing::error!(
                            "{}: data that only its cache has could not be written to it; retrying: {error}",
                            self.lower.name()
                        );
                    }
                    let (failed, is_waited_for) = (
                        failed.get_or_insert(Failed::new(error.clone(), lines[0])),
                        self.cleaning.waited_for.get() > 0,
                    );
                    if is_waited_for && self.clean_in_parts(&lines, &mut failed.in_vain).await {
                        continue;
                    }
                    self.pause().await;
                    return Err(error);
                }
            }
            self.pause().await;
        }
    }

    async fn pause(&self) {
        if let Some(sleep) = self.on.upgrade().map(|on| on.sleep(PAUSE)) {
            sleep.await;
        }
    }

    /// Cleans as many as possible of the lines of a batch that failed, so that a bad spot on a device does not keep
    /// the rest from the disk. Returns whether it is worth continuing; `in_vain` counts failed parts since the last
    /// success.
    async fn clean_in_parts(&self, lines: &[Line], in_vain: &mut u32) -> bool {
        let mut parts = vec![lines];
        while let Some(part) = parts.pop() {
            let cleaned = match part.len() == lines.len() {
                // The whole batch has just failed.
                true => false,
                false => self.clean_lines(part).await.is_ok(),
            };
            if cleaned {
                *in_vain = 0;
                continue;
            }
            *in_vain += 1;
            if *in_vain >= IN_VAIN_MAX {
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
    fn hurries(&self) -> bool {
        self.cleaning.waited_for.get() > 0 || self.has_dirty(self.cleaning.options.percent.saturating_mul(2))
    }

    /// Pauses for a while that depends on the time since `began`, so that the guest has the disk.
    async fn rest(&self, began: LoopTime) {
        if self.hurries() {
            return;
        }
        let times = match self.has_dirty(self.cleaning.options.percent) {
            true => REST / 2,
            false => REST,
        };
        let took = self.now().since(began);
        let Some(sleep) = self.on.upgrade().map(|on| on.sleep((took * times).min(REST_MAX))) else {
            return;
        };
        sleep.await;
    }

    /// Cleans some lines, which are sorted. Returns how many were cleaned.
    pub(crate) async fn clean_lines(&self, lines: &[Line]) -> Result<usize, IoError> {
        let (Some(first), Some(last)) = (lines.first(), lines.last()) else {
            return Ok(0);
        };
        if self.has_other_size() {
            self.see_size().await?;
        }
        let whole = self.range_of(*first..last + 1);
        let _held = self.cleaning.busy.enter(whole, Hold::Exclusive).await;
        self.clean_held(lines).await
    }

    /// Cleans lines that the caller has locked in [`Cleaning::busy`].
    pub(crate) async fn clean_held(&self, lines: &[Line]) -> Result<usize, IoError> {
        let mut busy = Busy {
            cache: self,
            lines: Vec::new(),
        };
        for line in lines {
            let found = self.index.borrow().find(*line);
            let dirty = found.map_or(0, |slot| self.index.borrow().dirty(slot));
            let Some(slot) = found.filter(|_| dirty != 0) else {
                continue;
            };
            // This run may miss data that is being written to the slot now.
            let is_changing = self.index.borrow().has_writers(slot);
            self.cleaning.slots.borrow_mut().insert(slot, is_changing);
            busy.lines.push(Cleaned {
                line: *line,
                slot,
                dirty,
            });
        }
        if busy.lines.is_empty() {
            return Ok(0);
        }
        let is_leaving = lines.iter().any(|line| self.has_leaving(*line..line + 1));
        if is_leaving && !self.has_failed() {
            // The following check handles a failure.
            let _ = self.commit().await;
        }
        if self.has_failed() {
            let first = busy.lines[0].line;
            self.detached(Operation::Write, self.range_of(first..first + 1)).await?;
        }
        let mut ios: SmallVec<[Io<'_>; 8]> = SmallVec::new();
        let mut from = 0;
        while from < busy.lines.len() {
            let start = busy.lines[from].line;
            let near = |at: &usize| {
                let line = busy.lines[*at].line;
                line - start == (*at - from) as u64 && (line + 1 - start) << self.shape.line_bits <= RUN_LEN
            };
            let to = from + (from..busy.lines.len()).take_while(near).count().max(1);
            ios.push(Io::task(self.clean_run(&busy.lines[from..to])));
            from = to;
        }
        let written = join(ios).await;
        self.changes.flushing.changed();
        if written.is_err() && self.has_other_size() {
            // The line may have been past the disk's end.
            return Ok(0);
        }
        written?;
        self.flush_disk().await?;
        let mut cleaned = 0;
        for Cleaned { slot, dirty, .. } in &busy.lines {
            if self.cleaning.slots.borrow().get(slot) != Some(&false) {
                continue;
            }
            cleaned += 1;
            let memory = self.index.borrow().entry(*slot);
            self.ledger.borrow_mut().note(*slot, || memory);
            self.index
                .borrow_mut()
                .set_sectors(*slot, memory.valid, memory.dirty & !dirty);
        }
        self.settle_in_time();
        Ok(cleaned)
    }

    /// Writes all dirty data of the lines of a range, which the caller has locked in [`Cleaning::busy`], to the disk.
    pub(crate) async fn clean_range(&self, operation: Operation, range: ByteRange) -> IoResult {
        loop {
            let dirty = self
                .index
                .borrow()
                .dirty
                .within(self.shape.lines_of(range), CLEANED_MAX);
            if dirty.is_empty() {
                return Ok(());
            }
            if self.clean_held(&dirty).await? == 0 {
                return Err(self.refused(operation, range));
            }
        }
    }

    /// Writes consecutive lines to the disk.
    async fn clean_run(&self, lines: &[Cleaned]) -> IoResult {
        let line_len = self.shape.line_len() as usize;
        let mut memory = AlignedBuf::zeroed(lines.len() * line_len);
        let size = self.lower.geometry().size.get();
        let mut written: SmallVec<[ByteRange; 4]> = SmallVec::new();
        for (cleaned, from) in lines.iter().zip((0..).step_by(line_len)) {
            let whole = self.range_of(cleaned.line..cleaned.line + 1);
            let part = self.shape.part_of(cleaned.line, whole);
            let dirty = runs(part, cleaned.dirty).filter(|(inside, _)| *inside);
            for (_, piece) in dirty {
                let from = from + self.shape.within(piece.start) as usize;
                let at = self.data_at(cleaned.slot, piece.start);
                memory = self.fast.read(at, memory, from..from + piece.len.as_usize()).await?;
                match written.last_mut() {
                    Some(last) if last.end() == piece.start => last.len += piece.len,
                    _ => written.push(piece),
                }
            }
        }
        let start = lines.first().map_or(0, |cleaned| cleaned.line << self.shape.line_bits);
        let disk = ByteRange::new(0, size);
        let ios: SmallVec<[Io<'_>; 4]> = written
            .iter()
            .map(|piece| piece.intersection(disk))
            .filter(|piece| !piece.is_empty())
            .map(|piece| {
                let from = (piece.start.get() - start) as usize;
                let bytes = &memory[from..from + piece.len.as_usize()];
                self.cleaning.written.set(self.cleaning.written.get() + piece.len.get());
                self.lower.write(piece.start, WriteBuf::new(bytes), WriteFlags::NONE)
            })
            .collect();
        join(ios).await
    }

    pub(crate) fn range_of(&self, lines: Range<Line>) -> ByteRange {
        let len = (lines.end - lines.start) << self.shape.line_bits;
        ByteRange::new(lines.start << self.shape.line_bits, len)
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
