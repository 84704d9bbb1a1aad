//! Compare before use: clean lines that the disk may no longer match are compared with it.
//!
//! After a kill another program may have changed the disk. Then every clean line is *unproven* when it is loaded
//! ([`crate::index::LineIndex`]), and no read gets it from the cache: only dirty sectors are read there. A background
//! task reads the lines from both devices, in the order of the disk. Equal sectors are used from then on, and the
//! others are removed. A read of the guest that gets an unproven line from the disk has the line compared at once.
//!
//! Invariants:
//! - The superblock says "unproven" durably before the first request is served, and until no line is unproven,
//!   neither in memory nor after recovery. So no kill, no clean stop and no copy makes such a line trusted.
//! - The range of a piece is locked as for a change while it is compared: no change of the guest and no fill touches
//!   it.
//! - A change of the guest removes the unproven sectors that it writes, durably, before it begins: write-back would
//!   otherwise mark sectors as dirty of which the disk may have a newer version.
//! - A line that cannot be read from the disk stays unproven, and is tried again.

use std::cell::Cell;
use std::rc::Weak;
use std::time::Duration;

use larder_block::event_loop::yield_now;
use larder_block::range_lock::RangeLockMode as DiskLocks;
use larder_block::signal::Signal;
use larder_block::{AlignedBuf, ByteLen, ByteRange, Io, IoResult, LoopTime, ReadBuf, join};
use smallvec::SmallVec;

use crate::Cache;
use crate::commit::CacheFailed;
use crate::fill::Fill;
use crate::layout::{Line, SECTOR, SectorMask, Slot};
use crate::line_parts::LinePart;
use crate::slot_allocation::Invalidation;

/// Bytes of the disk that are compared at once. As many are read from the cache device.
const PIECE_LEN: u64 = 256 << 10;

/// Length of the pause after a piece while the guest has requests, as a multiple of the time that the piece took.
const PAUSE_FACTOR: u32 = 3;

/// The longest pause after a piece.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Delay before lines that could not be read from the disk are tried again.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// State of the comparison.
#[derive(Default)]
pub(crate) struct Comparison {
    /// Set while loaded clean lines are unproven, which the superblock says too.
    enabled: Cell<bool>,
    stopped: Cell<bool>,
    /// Set while a piece is being compared.
    busy: Cell<bool>,
    idle: Signal,
    /// Bytes that were compared and equal; `unequal` counts the others.
    equal: Cell<u64>,
    unequal: Cell<u64>,
}

impl Comparison {
    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled: Cell::new(enabled), ..Self::default() }
    }

    /// Returns whether clean lines are unproven when they are loaded.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled.get()
    }

    /// Stops the comparison for good, and waits until it has stopped.
    pub(crate) async fn stop(&self) {
        self.stopped.set(true);
        self.idle.when(|| !self.busy.get()).await;
    }

    fn count(&self, clean: SectorMask, stale: SectorMask) {
        let bytes = |sectors: SectorMask| u64::from(sectors.count_ones()) * SECTOR;
        self.equal.set(self.equal.get() + bytes(clean & !stale));
        self.unequal.set(self.unequal.get() + bytes(stale));
    }
}

/// Marks a piece as being compared until it is dropped.
struct BusyGuard<'a>(&'a Comparison);

impl<'a> BusyGuard<'a> {
    fn new(comparing: &'a Comparison) -> Self {
        comparing.busy.set(true);
        Self(comparing)
    }
}

impl Drop for BusyGuard<'_> {
    fn drop(&mut self) {
        self.0.busy.set(false);
        self.0.idle.raise();
    }
}

/// Line that is being compared.
struct LineComparison {
    line: Line,
    slot: Slot,
    /// Sectors to compare.
    clean: SectorMask,
    /// Sectors that differ on the disk.
    stale: Cell<SectorMask>,
}

/// Returns those of `sectors` that differ between two copies of a part of a line; `first` is the part's first sector.
fn unequal(sectors: SectorMask, first: u32, one: &[u8], other: &[u8]) -> SectorMask {
    let pairs = one.chunks_exact(SECTOR as usize).zip(other.chunks_exact(SECTOR as usize));
    let differ = pairs.zip(first..).filter(|((one, other), _)| one != other);
    differ.fold(0, |mask, (_, sector)| mask | 1 << sector) & sectors
}

impl Cache {
    /// Compares all unproven lines, once every set is loaded, until none is left or the cache is closed.
    pub(crate) async fn compare_all(this: Weak<Self>) {
        let (mut next, mut has_failed) = (0, false);
        loop {
            let pause = {
                let Some(cache) = this.upgrade() else { return };
                let comparing = &cache.comparison;
                if comparing.stopped.get() || cache.has_failed() || !cache.index.borrow().are_all_loaded() {
                    return;
                }
                let _busy = BusyGuard::new(comparing);
                let (requests, began) = (cache.cleaner.guest_requests(), cache.now());
                let lines = cache.next_unproven(next);
                match lines.last() {
                    None if cache.index.borrow().unproven.is_empty() => return cache.record_all_proven().await,
                    None => {
                        next = 0;
                        std::mem::take(&mut has_failed).then_some(RETRY_AFTER)
                    }
                    Some(last) => {
                        next = last + 1;
                        if let Err(error) = cache.compare_piece(&lines).await
                            && !std::mem::replace(&mut has_failed, true)
                        {
                            tracing::warn!(
                                "{}: lines of its cache cannot be compared with the disk, and are not used until they can be: {error}",
                                cache.lower.name()
                            );
                        }
                        (cache.cleaner.guest_requests() != requests).then(|| cache.pause_after(began))
                    }
                }
            };
            let sleep = pause.and_then(|pause| {
                let cache = this.upgrade()?;
                cache.on.upgrade().map(|on| on.sleep(pause))
            });
            match sleep {
                Some(sleep) => sleep.await,
                // Files in memory complete in the call, so nothing above yields.
                None => yield_now().await,
            }
        }
    }

    fn pause_after(&self, began: LoopTime) -> Duration {
        (self.now().since(began) * PAUSE_FACTOR).min(PAUSE_MAX)
    }

    /// Returns the unproven lines of the next piece, from `next` on.
    fn next_unproven(&self, next: Line) -> Vec<Line> {
        let index = self.index.borrow();
        let per_piece = (PIECE_LEN >> self.layout.line_bits).max(1);
        let Some(first) = index.unproven.within(next..Line::MAX).next() else {
            return Vec::new();
        };
        index.unproven.within(first..first + per_piece).collect()
    }

    /// Compares some lines, which are sorted and within [`PIECE_LEN`].
    ///
    /// # Errors
    /// An error of the disk: the lines stay unproven.
    async fn compare_piece(&self, lines: &[Line]) -> IoResult {
        let (Some(first), Some(last)) = (lines.first(), lines.last()) else {
            return Ok(());
        };
        let lines_range = self.range_of(*first..last + 1);
        let _held = self.changes.lock(lines_range, DiskLocks::Exclusive).await;
        // No fill begins now.
        self.fills.wait_ended(lines_range).await;
        if self.has_size_changed() {
            self.apply_size().await?;
        }
        let range = lines_range.intersection(ByteRange::new(0, self.lower.geometry().size.get()));
        if range.is_empty() {
            return Ok(());
        }
        // Before the disk is read: sectors that are dirty now may be clean by then, and then equal the disk.
        let compared: Vec<LineComparison> =
            lines.iter().filter_map(|line| self.line_comparison(*line, range)).collect();
        let pins: Vec<_> = compared.iter().map(|compared| self.pin(compared.slot)).collect();
        let mut on_disk = AlignedBuf::zeroed(lines_range.len.as_usize());
        let bytes = ReadBuf::new(&mut on_disk[..range.len.as_usize()]);
        self.lower.read(range.start, bytes).await?;
        let line_len = self.layout.line_len();
        let is_next = |one: &LineComparison, next: &LineComparison| {
            one.line + 1 == next.line
                && self.layout.data_of(one.slot) + ByteLen::new(line_len) == self.layout.data_of(next.slot)
        };
        let reads: SmallVec<[Io<'_>; 16]> = compared
            .chunk_by(is_next)
            .map(|run| {
                let from = (run[0].line - first) * line_len;
                Io::task(self.compare_run(run, &on_disk[from as usize..]))
            })
            .collect();
        let read = join(reads).await;
        drop(pins);
        if let Err(error) = read {
            self.fail(&error);
            return Ok(());
        }
        let any_stale = compared.iter().any(|compared| compared.stale.get() != 0);
        if any_stale && self.has_unflushed_records(lines_range) && self.harden_queued().await.is_err() {
            return Ok(());
        }
        for compared in &compared {
            self.finish_comparison(compared);
        }
        if any_stale {
            // The next piece handles a failure. The commit bounds the records that wait to be written.
            let _ = self.commit().await;
        }
        Ok(())
    }

    /// Returns the sectors to compare of an unproven line, as far as it is on the disk; `None` if it has left the
    /// cache.
    fn line_comparison(&self, line: Line, disk: ByteRange) -> Option<LineComparison> {
        let index = self.index.borrow();
        let slot = index.find(line).filter(|_| index.unproven.contains(line))?;
        let on_disk = self.layout.part_of(line, disk).sectors;
        Some(LineComparison {
            line,
            slot,
            clean: index.valid(slot) & !index.dirty(slot) & on_disk,
            stale: Cell::new(0),
        })
    }

    /// Compares lines that are consecutive on both devices with `on_disk`, the disk's data from the first one on.
    async fn compare_run(&self, run: &[LineComparison], on_disk: &[u8]) -> IoResult {
        let line_len = self.layout.line_len() as usize;
        let len = run.len() * line_len;
        let at = self.layout.data_of(run[0].slot);
        let in_cache = self.fast.read(at, AlignedBuf::zeroed(len), 0..len).await?;
        let copies = in_cache.chunks_exact(line_len).zip(on_disk.chunks_exact(line_len));
        for (compared, (one, other)) in run.iter().zip(copies) {
            compared.stale.set(unequal(compared.clean, 0, one, other));
        }
        Ok(())
    }

    /// Makes a line usable, without its stale sectors.
    fn finish_comparison(&self, compared: &LineComparison) {
        let LineComparison { line, slot, clean, .. } = *compared;
        let stale = {
            let mut index = self.index.borrow_mut();
            if index.find(line) != Some(slot) || !index.unproven.remove(line) {
                return;
            }
            compared.stale.get() & index.valid(slot) & !index.dirty(slot)
        };
        if stale != 0 && self.was_dirty && self.comparison.unequal.get() == 0 {
            tracing::warn!(
                "{}: another program has changed it since the server with its cache was killed; the cache also has data \
                 that was not written to it before, which replaces the other program's changes where both wrote",
                self.lower.name()
            );
        }
        self.comparison.count(clean, stale);
        self.remove_sectors(slot, stale);
    }

    /// Compares an unproven line with `bytes`, which a fill has read of `part` of it. Returns whether the fill may
    /// store them: the cache had other data of the line, which is removed, or has none any more.
    pub(crate) async fn compare_filled(&self, fill: &Fill, bytes: &[u8], part: LinePart) -> bool {
        let Some(compared) = self.line_comparison(part.line, part.range) else {
            return self.index.borrow().find(part.line).is_none();
        };
        let slot = compared.slot;
        let clean = {
            let index = self.index.borrow();
            index.valid(slot) & !index.dirty(slot)
        };
        if clean != compared.clean || self.has_unflushed_records(part.range) {
            // The background task compares the whole line.
            return false;
        }
        let pin = self.pin(slot);
        let (at, len) = (self.data_at(slot, part.range.start), bytes.len());
        let in_cache = match self.fast.read(at, AlignedBuf::zeroed(len), 0..len).await {
            Ok(in_cache) => in_cache,
            Err(error) => {
                self.fail(&error);
                return false;
            }
        };
        drop(pin);
        // A change that began during the read removes the line itself.
        if fill.is_void() || self.has_failed() {
            return false;
        }
        let is_stale = unequal(clean, part.sectors.trailing_zeros(), &in_cache, bytes) != 0;
        if is_stale {
            // The whole line makes room for the bytes that were read.
            compared.stale.set(clean);
        }
        self.finish_comparison(&compared);
        is_stale
    }

    /// Removes the unproven sectors of `range` before a change, from memory and durably. The caller has locked and
    /// loaded the range.
    pub(crate) async fn invalidate_unproven(&self, range: ByteRange) -> Result<(), CacheFailed> {
        let is_any = {
            let unproven = &self.index.borrow().unproven;
            !unproven.is_empty() && unproven.within(self.layout.lines_of(range)).next().is_some()
        };
        match is_any {
            true => self.invalidate(range, Invalidation::Clean).await,
            false => Ok(()),
        }
    }

    /// Records that no line is unproven any more.
    async fn record_all_proven(&self) {
        if self.loading.has_fenced_sets() {
            // After a repair of the device, fenced sets may have clean lines that were never compared.
            return;
        }
        // Evicted lines count too: recovery must not find them.
        if self.commit().await.is_err() {
            return;
        }
        if let Err(error) = self.update_superblock(|superblock| superblock.unproven = false).await {
            self.fail(&error);
            return;
        }
        self.comparison.enabled.set(false);
        tracing::info!(
            "{}: its cache was compared with the disk: {} are equal, {} were stale and are dropped",
            self.lower.name(),
            ByteLen::new(self.comparison.equal.get()),
            ByteLen::new(self.comparison.unequal.get())
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Differing sectors are returned by their positions in the line, as far as the mask has them.
    #[test]
    fn unequal_returns_mask_of_differing_sectors() {
        let one = vec![1; 4 * SECTOR as usize];
        let mut other = one.clone();
        other[SECTOR as usize] = 2;
        other[4 * SECTOR as usize - 1] = 2;
        assert_eq!(unequal(SectorMask::MAX, 0, &one, &other), 0b1010);
        assert_eq!(unequal(SectorMask::MAX, 4, &one, &other), 0b1010_0000);
        assert_eq!(unequal(0b0111, 0, &one, &other), 0b0010);
        assert_eq!(unequal(SectorMask::MAX, 0, &one, &one), 0);
    }
}
