//! Compare before use: clean lines of which it is not known whether the disk still has the same are compared with it.
//!
//! After a kill another program may have changed the disk. Then every clean line is *unproven* when it is loaded
//! ([`crate::index::Index`]), and no read gets it from the cache: only dirty sectors are read there. A background task reads
//! the lines from both devices, in the order of the disk. Sectors that are equal are used from then on, and the others are
//! taken out. A read of the guest that brings an unproven line from the disk has it compared at once.
//!
//! Invariants:
//! - The superblock says "unproven" durably before the first request is served, and until neither memory nor a crash finds
//!   an unproven line. So no kill, no clean stop and no copy makes one trusted.
//! - A piece is compared while its range is held as a change holds it: no change of the guest and no fill touches it.
//! - A change of the guest takes the unproven sectors that it writes out, durably, before it begins: write-back would
//!   otherwise mark as dirty what the disk may have newer.
//! - A line that cannot be read from the disk stays unproven; it is tried again.

use std::cell::Cell;
use std::rc::Weak;
use std::time::Duration;

use larder_block::event_loop::yield_now;
use larder_block::range_lock::Mode as Hold;
use larder_block::signal::Signal;
use larder_block::{AlignedBuf, ByteLen, ByteRange, Io, IoResult, LoopTime, ReadBuf, join};
use smallvec::SmallVec;

use crate::Cache;
use crate::commit::Failed;
use crate::fill::Fill;
use crate::parts::Part;
use crate::place::Retract;
use crate::shape::{Line, SECTOR, Sectors, Slot};

/// Bytes of the disk that are compared at once. As many are read from the cache device.
const PIECE_LEN: u64 = 256 << 10;

/// Beside requests of the guest the task pauses so many times as long as it took for a piece...
const PAUSE_FACTOR: u32 = 3;

/// ...but no longer than this.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// When lines that could not be read from the disk are tried again.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// How far the comparing is.
#[derive(Default)]
pub(crate) struct Comparing {
    /// Lines that are loaded are unproven, and the superblock says so.
    enabled: Cell<bool>,
    stopped: Cell<bool>,
    /// A piece is being compared.
    busy: Cell<bool>,
    idle: Signal,
    /// Bytes that were compared.
    equal: Cell<u64>,
    unequal: Cell<u64>,
}

impl Comparing {
    pub(crate) fn new(enabled: bool) -> Self {
        Self {
            enabled: Cell::new(enabled),
            ..Self::default()
        }
    }

    /// Whether clean lines that are loaded are unproven.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled.get()
    }

    /// Completes when nothing is being compared, nor will be.
    pub(crate) async fn stop(&self) {
        self.stopped.set(true);
        self.idle.when(|| !self.busy.get()).await;
    }

    fn count(&self, clean: Sectors, stale: Sectors) {
        let bytes = |sectors: Sectors| u64::from(sectors.count_ones()) * SECTOR;
        self.equal.set(self.equal.get() + bytes(clean & !stale));
        self.unequal.set(self.unequal.get() + bytes(stale));
    }
}

/// Says that a piece is being compared, until this is dropped.
struct Busy<'a>(&'a Comparing);

impl<'a> Busy<'a> {
    fn new(comparing: &'a Comparing) -> Self {
        comparing.busy.set(true);
        Self(comparing)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.set(false);
        self.0.idle.raise();
    }
}

/// A line that is being compared.
struct Compared {
    line: Line,
    slot: Slot,
    /// The sectors that are compared.
    clean: Sectors,
    /// Those of them that the disk has otherwise.
    stale: Cell<Sectors>,
}

/// Those of `sectors` that differ between two copies of a line, of which `first` is the first sector.
fn unequal(sectors: Sectors, first: u32, one: &[u8], other: &[u8]) -> Sectors {
    let pairs = one
        .chunks_exact(SECTOR as usize)
        .zip(other.chunks_exact(SECTOR as usize));
    let differ = pairs.zip(first..).filter(|((one, other), _)| one != other);
    differ.fold(0, |mask, (_, sector)| mask | 1 << sector) & sectors
}

impl Cache {
    /// Compares all that is unproven, once everything is loaded, until nothing is left of it or the cache is closed.
    pub(crate) async fn compare_all(this: Weak<Self>) {
        let (mut next, mut is_failed) = (0, false);
        loop {
            let pause = {
                let Some(cache) = this.upgrade() else { return };
                let comparing = &cache.comparing;
                if comparing.stopped.get() || cache.has_failed() || !cache.index.borrow().are_all_loaded() {
                    return;
                }
                let _busy = Busy::new(comparing);
                let (asked, began) = (cache.cleaning.asked(), cache.now());
                let lines = cache.next_unproven(next);
                match lines.last() {
                    None if cache.index.borrow().unproven.is_empty() => return cache.all_compared().await,
                    None => {
                        next = 0;
                        std::mem::take(&mut is_failed).then_some(RETRY_AFTER)
                    }
                    Some(last) => {
                        next = last + 1;
                        if let Err(error) = cache.compare_piece(&lines).await
                            && !std::mem::replace(&mut is_failed, true)
                        {
                            tracing::warn!(
                                "{}: lines of its cache cannot be compared with the disk, and are not used until they can be: {error}",
                                cache.lower.name()
                            );
                        }
                        (cache.cleaning.asked() != asked).then(|| cache.pause_after(began))
                    }
                }
            };
            let sleep = pause.and_then(|pause| {
                let cache = this.upgrade()?;
                cache.on.upgrade().map(|on| on.sleep(pause))
            });
            match sleep {
                Some(sleep) => sleep.await,
                // Files in memory do everything in the call.
                None => yield_now().await,
            }
        }
    }

    fn pause_after(&self, began: LoopTime) -> Duration {
        (self.now().since(began) * PAUSE_FACTOR).min(PAUSE_MAX)
    }

    /// The unproven lines of the next piece, from `next` on.
    fn next_unproven(&self, next: Line) -> Vec<Line> {
        let index = self.index.borrow();
        let per_piece = (PIECE_LEN >> self.shape.line_bits).max(1);
        let Some(first) = index.unproven.within(next..Line::MAX).next() else {
            return Vec::new();
        };
        index.unproven.within(first..first + per_piece).collect()
    }

    /// Compares some lines, which are in order and within [`PIECE_LEN`].
    ///
    /// # Errors
    /// The disk's: the lines stay unproven.
    async fn compare_piece(&self, lines: &[Line]) -> IoResult {
        let (Some(first), Some(last)) = (lines.first(), lines.last()) else {
            return Ok(());
        };
        let whole = self.range_of(*first..last + 1);
        let _held = self.changes.enter(whole, Hold::Exclusive).await;
        // None begins now.
        self.fills.ended(whole).await;
        if self.has_other_size() {
            self.see_size().await?;
        }
        let range = whole.intersection(ByteRange::new(0, self.lower.geometry().size.get()));
        if range.is_empty() {
            return Ok(());
        }
        // Before the disk is read: what is dirty now may be clean by then, and is what the disk has.
        let compared: Vec<Compared> = lines.iter().filter_map(|line| self.to_compare(*line, range)).collect();
        let pins: Vec<_> = compared.iter().map(|compared| self.pin(compared.slot)).collect();
        let mut on_disk = AlignedBuf::zeroed(whole.len.as_usize());
        let bytes = ReadBuf::new(&mut on_disk[..range.len.as_usize()]);
        self.lower.read(range.start, bytes).await?;
        let line_len = self.shape.line_len();
        let is_next = |one: &Compared, next: &Compared| {
            one.line + 1 == next.line
                && self.shape.data_of(one.slot) + ByteLen::new(line_len) == self.shape.data_of(next.slot)
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
        let is_any_stale = compared.iter().any(|compared| compared.stale.get() != 0);
        if is_any_stale && self.has_loose(whole) && self.harden_queued().await.is_err() {
            return Ok(());
        }
        for compared in &compared {
            self.is_compared(compared);
        }
        if is_any_stale {
            // A failure is seen to next. This bounds what waits to be written down.
            let _ = self.commit().await;
        }
        Ok(())
    }

    /// What is to be compared of an unproven line, as far as it is on the disk; `None` if it has left the cache.
    fn to_compare(&self, line: Line, disk: ByteRange) -> Option<Compared> {
        let index = self.index.borrow();
        let slot = index.find(line).filter(|_| index.unproven.contains(line))?;
        let on_disk = self.shape.part_of(line, disk).sectors;
        Some(Compared {
            line,
            slot,
            clean: index.valid(slot) & !index.dirty(slot) & on_disk,
            stale: Cell::new(0),
        })
    }

    /// Compares lines that follow each other on both devices with what the disk has from the first one on.
    async fn compare_run(&self, run: &[Compared], on_disk: &[u8]) -> IoResult {
        let line_len = self.shape.line_len() as usize;
        let len = run.len() * line_len;
        let at = self.shape.data_of(run[0].slot);
        let in_cache = self.fast.read(at, AlignedBuf::zeroed(len), 0..len).await?;
        let copies = in_cache.chunks_exact(line_len).zip(on_disk.chunks_exact(line_len));
        for (compared, (one, other)) in run.iter().zip(copies) {
            compared.stale.set(unequal(compared.clean, 0, one, other));
        }
        Ok(())
    }

    /// A line is used from now on, without the sectors that are stale.
    fn is_compared(&self, compared: &Compared) {
        let Compared { line, slot, clean, .. } = *compared;
        let stale = {
            let mut index = self.index.borrow_mut();
            if index.find(line) != Some(slot) || !index.unproven.remove(line) {
                return;
            }
            compared.stale.get() & index.valid(slot) & !index.dirty(slot)
        };
        self.comparing.count(clean, stale);
        self.take_sectors(slot, stale);
    }

    /// Compares an unproven line with `bytes`, which a fill has read of `part` of it. Returns whether they may be stored:
    /// the cache has something else of the line, or nothing any more.
    pub(crate) async fn compare_filled(&self, fill: &Fill, bytes: &[u8], part: Part) -> bool {
        let Some(compared) = self.to_compare(part.line, part.range) else {
            return self.index.borrow().find(part.line).is_none();
        };
        let slot = compared.slot;
        let clean = {
            let index = self.index.borrow();
            index.valid(slot) & !index.dirty(slot)
        };
        if clean != compared.clean || self.has_loose(part.range) {
            // The task compares all of it.
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
        // A change that came meanwhile takes the line itself.
        if fill.is_void() || self.has_failed() {
            return false;
        }
        let is_stale = unequal(clean, part.sectors.trailing_zeros(), &in_cache, bytes) != 0;
        if is_stale {
            // All of it makes room for what was read.
            compared.stale.set(clean);
        }
        self.is_compared(&compared);
        is_stale
    }

    /// Before a change of `range`, which is held and loaded: neither memory nor a crash finds unproven sectors of it.
    pub(crate) async fn retract_unproven(&self, range: ByteRange) -> Result<(), Failed> {
        let is_any = {
            let unproven = &self.index.borrow().unproven;
            !unproven.is_empty() && unproven.within(self.shape.lines_of(range)).next().is_some()
        };
        match is_any {
            true => self.retract(range, Retract::Clean).await,
            false => Ok(()),
        }
    }

    /// Notes that nothing is unproven any more.
    async fn all_compared(&self) {
        if self.loading.has_fences() {
            // Whoever mends the device may find clean lines there that nobody has compared.
            return;
        }
        // Also what was evicted: a crash is not to find it.
        if self.commit().await.is_err() {
            return;
        }
        if let Err(error) = self.note(|superblock| superblock.unproven = false).await {
            self.fail(&error);
            return;
        }
        self.comparing.enabled.set(false);
        tracing::info!(
            "{}: its cache was compared with the disk: {} are equal, {} were stale and are dropped",
            self.lower.name(),
            ByteLen::new(self.comparing.equal.get()),
            ByteLen::new(self.comparing.unequal.get())
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unequal_sectors_are_told_by_their_place() {
        let one = vec![1; 4 * SECTOR as usize];
        let mut other = one.clone();
        other[SECTOR as usize] = 2;
        other[4 * SECTOR as usize - 1] = 2;
        assert_eq!(unequal(Sectors::MAX, 0, &one, &other), 0b1010);
        assert_eq!(unequal(Sectors::MAX, 4, &one, &other), 0b1010_0000);
        assert_eq!(unequal(0b0111, 0, &one, &other), 0b0010);
        assert_eq!(unequal(Sectors::MAX, 0, &one, &one), 0);
    }
}
