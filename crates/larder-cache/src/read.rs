//! The guest's reads.

use larder_block::{AlignedBuf, ByteLen, ByteRange, Io, IoError, IoResult, LoopTime, Operation, ReadBuf, join};
use smallvec::SmallVec;

use crate::fill::{FILL_LEN_MAX, FillLookup};
use crate::index::SlotUse;
use crate::layout::{Line, Slot};
use crate::line_parts::{LinePart, runs};
use crate::{Cache, CacheMode};
use larder_policy::policy::{AccessContext, AccessKind};

/// Reads of up to this length consist of a few fragments at most.
const SMALL_READ_MAX: ByteLen = ByteLen::kib(4);

/// Fragments of one read that are read concurrently; a fragment is contiguous on one device.
const FRAGMENTS_PER_READ_MAX: usize = 128;

/// Fragments of all reads that are read concurrently. This bounds memory: each takes some hundred bytes.
pub(crate) const FRAGMENTS_MAX: usize = 8192;

/// Read of one line that the cache serves entirely.
#[derive(Clone, Copy)]
struct FullHit {
    part: LinePart,
    slot: Slot,
    since: LoopTime,
}

/// Keeps a slot from being given to another line while it is read.
pub(crate) struct ReadPin<'a> {
    cache: &'a Cache,
    slot: Slot,
}

impl Drop for ReadPin<'_> {
    fn drop(&mut self) {
        self.cache.index.borrow_mut().unpin(self.slot, SlotUse::Read);
        self.cache.reader_done.raise();
    }
}

impl Cache {
    pub(crate) fn read_any<'a>(&'a self, range: ByteRange, buffer: ReadBuf<'a>) -> Io<'a> {
        if !self.is_cacheable(range) || (!self.is_readable() && !self.may_be_dirty.get()) {
            return self.lower.read(range.start, buffer);
        }
        let first = self.layout.line_at(range.start);
        self.index.borrow().prefetch_set(self.layout.set_of(first));
        if self.is_readable() {
            self.record_use(range);
        }
        match self.full_hit(range) {
            Some(hit) => self.read_full_hit(hit, range, buffer),
            None if range.len <= SMALL_READ_MAX => Io::task(self.read_steps(range, buffer)),
            None => Io::task(self.read_in_windows(range, buffer)),
        }
    }

    /// Reads a range that may consist of many fragments: up to [`FRAGMENTS_PER_READ_MAX`] at a time, and
    /// [`FRAGMENTS_MAX`] for all reads together.
    async fn read_in_windows(&self, range: ByteRange, buffer: ReadBuf<'_>) -> IoResult {
        let mut rest = range;
        while !rest.is_empty() {
            let (window, fragments) = self.window_of(rest);
            // With a failed cache there is no wait for the reads of others, which may never end.
            let _share = self.fragments.acquire(fragments, || self.has_failed()).await;
            let from = (window.start - range.start).as_usize();
            self.read_steps(window, buffer.slice(from, window.len.as_usize())).await?;
            rest = ByteRange::between(window.end(), rest.end());
        }
        Ok(())
    }

    /// Returns the beginning of `range`, at least one line, and its present number of fragments on the two devices.
    fn window_of(&self, range: ByteRange) -> (ByteRange, usize) {
        let index = self.index.borrow();
        let (mut fragments, mut end) = (0, range.start);
        for part in self.layout.parts_of(range) {
            let valid = index.find(part.line).map_or(0, |slot| index.valid(slot));
            let more = fragments + runs(part, valid).count();
            if more > FRAGMENTS_PER_READ_MAX && fragments > 0 {
                break;
            }
            (fragments, end) = (more, part.range.end());
        }
        (ByteRange::between(range.start, end), fragments)
    }

    /// Returns whether the cache may be read.
    fn is_readable(&self) -> bool {
        !self.has_failed() && self.mode.get() != CacheMode::PassThrough
    }

    /// Returns whether reads should bypass the cache where the disk has the data.
    fn is_bypassed(&self, now: LoopTime) -> bool {
        self.fast.is_late() || self.bypass.is_active(now)
    }

    /// Returns whether the cache may be read, and its device is fast enough.
    pub(crate) fn serves_reads(&self) -> bool {
        self.is_readable() && !self.is_bypassed(self.turn_time())
    }

    /// Returns the location of a range of one line, if all of it is cached and can be read without waiting.
    fn full_hit(&self, range: ByteRange) -> Option<FullHit> {
        let lines = self.layout.lines_of(range);
        let line = lines.start;
        if lines.end - line != 1 || !self.is_readable() || self.has_size_changed() || self.has_dropped_dirty(range) {
            return None;
        }
        let set = self.layout.set_of(line);
        self.check_fence(lines, Operation::Read, range).ok()?;
        let part = self.layout.part_of(line, range);
        let slot = {
            let index = self.index.borrow();
            let slot = index.find(line).filter(|_| index.is_loaded(set))?;
            index.prefetch_policy_state(slot);
            (index.visible(slot) & part.sectors == part.sectors).then_some(slot)?
        };
        let since = self.turn_time();
        let must_wait = self.is_bypassed(since) || (self.may_be_dirty.get() && self.has_queued_unflushed(slot));
        (!must_wait).then_some(FullHit { part, slot, since })
    }

    fn read_full_hit<'a>(&'a self, hit: FullHit, range: ByteRange, buffer: ReadBuf<'a>) -> Io<'a> {
        let FullHit { part, slot, since } = hit;
        let begin = self.bypass.should_time_next().then(|| self.now());
        let mut read = self.fast.read_for_guest(self.data_at(slot, range.start), buffer);
        let result = read.take_ready_result();
        // Touched after the read: by now the prefetched state of the policy is in the processor's cache.
        let context = self.context(since, AccessKind::Read, range.len.get());
        self.index.borrow_mut().policy().touch(slot, part.line, context);
        {
            let counts = &mut *self.counts.borrow_mut();
            counts.hits += 1;
            counts.hit_bytes += range.len.get();
        }
        let pin = match result {
            Some(Ok(())) => {
                if let Some(begin) = begin {
                    self.bypass.record_ready_hit(begin, self.now());
                }
                return Io::ready(Ok(()));
            }
            Some(Err(error)) => return Io::task(self.read_failed(error, slot, part, range, buffer)),
            None => self.pin(slot),
        };
        Io::task(async move {
            self.read_hit(read, pin, part, range, buffer).await?;
            self.bypass.record_hit(since, self.now());
            Ok(())
        })
    }

    async fn read_steps(&self, range: ByteRange, buffer: ReadBuf<'_>) -> IoResult {
        let since = self.turn_time();
        self.load_range(range, Operation::Read).await?;
        self.wait_dropped_dirty(Operation::Read, range).await?;
        let part_of = |piece: ByteRange| {
            let from = (piece.start - range.start).as_usize();
            buffer.slice(from, piece.len.as_usize())
        };
        let mut ios: SmallVec<[Io<'_>; 4]> = SmallVec::new();
        let mut missing = ByteRange::default();
        let context = self.context(since, AccessKind::Read, range.len.get());
        let (mut found, mut hit_bytes) = (false, 0);
        // A cache that is unused or bypassed is read only for dirty data.
        let (is_readable, bypasses) = (self.is_readable(), self.is_bypassed(since));
        let mut is_bypassed = false;
        for part in self.layout.parts_of(range) {
            let slot = self.index.borrow().find(part.line);
            let valid = slot.map_or(0, |slot| {
                let index = self.index.borrow();
                if is_readable && !bypasses {
                    return index.visible(slot);
                }
                let dirty = index.dirty(slot);
                is_bypassed |= is_readable && index.visible(slot) & part.sectors & !dirty != 0;
                dirty
            });
            for (inside, piece) in runs(part, valid) {
                match (inside, slot) {
                    (true, Some(slot)) => {
                        found = true;
                        hit_bytes += piece.len.get();
                        let read = self.read_slot(slot, piece, part_of(piece));
                        ios.push(Io::task(self.read_hit(read, self.pin(slot), part, piece, part_of(piece))));
                    }
                    _ if !missing.is_empty()
                        && missing.end() == piece.start
                        && (missing.len + piece.len).get() <= FILL_LEN_MAX =>
                    {
                        missing.len += piece.len;
                    }
                    _ => {
                        if !missing.is_empty() {
                            ios.push(Io::task(self.read_missing(missing, part_of(missing), context)));
                        }
                        missing = piece;
                    }
                }
            }
            if let Some(slot) = slot {
                self.index.borrow_mut().policy().touch(slot, part.line, context);
            }
        }
        let is_hit = missing.is_empty() && hit_bytes == range.len.get();
        {
            let counts = &mut *self.counts.borrow_mut();
            counts.hit_bytes += hit_bytes;
            let count = match (is_hit, found) {
                _ if is_bypassed => &mut counts.bypassed_slow,
                (true, _) => &mut counts.hits,
                (false, true) => &mut counts.partial_hits,
                (false, false) => &mut counts.misses,
            };
            *count += 1;
        }
        if !missing.is_empty() {
            ios.push(Io::task(self.read_missing(missing, part_of(missing), context)));
        }
        join(ios).await?;
        match is_hit {
            true => self.bypass.record_hit(since, self.now()),
            false => self.bypass.record_miss(since, self.now()),
        }
        Ok(())
    }

    /// Reads from a slot; if the cache has failed, into separate memory, so that the caller need not wait for a
    /// hanging device.
    fn read_slot<'a>(&'a self, slot: Slot, piece: ByteRange, buffer: ReadBuf<'a>) -> Io<'a> {
        let at = self.data_at(slot, piece.start);
        if !self.has_failed() {
            return self.fast.read_for_guest(at, buffer);
        }
        Io::task(async move {
            let memory = AlignedBuf::zeroed(buffer.len());
            let memory = self.fast.read(at, memory, 0..buffer.len()).await?;
            buffer.copy_from_slice(&memory);
            Ok(())
        })
    }

    pub(crate) fn pin(&self, slot: Slot) -> ReadPin<'_> {
        self.index.borrow_mut().pin(slot, SlotUse::Read);
        ReadPin { cache: self, slot }
    }

    /// Completes a read of `piece` from the cache device.
    async fn read_hit(
        &self,
        read: Io<'_>,
        pin: ReadPin<'_>,
        part: LinePart,
        piece: ByteRange,
        buffer: ReadBuf<'_>,
    ) -> IoResult {
        let slot = pin.slot;
        if let Err(error) = read.await {
            return self.read_failed(error, slot, part, piece, buffer).await;
        }
        // Data that a reader has seen must survive a kill.
        if self.has_queued_unflushed(slot) && self.commit().await.is_err() {
            return Err(self.device_error(Operation::Read, piece));
        }
        Ok(())
    }

    /// Reads `piece` from the disk after the cache device failed to, unless it is dirty.
    async fn read_failed(
        &self,
        error: IoError,
        slot: Slot,
        part: LinePart,
        piece: ByteRange,
        buffer: ReadBuf<'_>,
    ) -> IoResult {
        if error.failure().is_memory_fault() {
            return Err(error);
        }
        self.fail(&error);
        if self.index.borrow().dirty(slot) & part.sectors != 0 {
            return Err(error);
        }
        // Dirty data may have been removed since.
        self.wait_dropped_dirty(Operation::Read, piece).await?;
        self.lower.read(piece.start, buffer).await
    }

    /// Reads data that is not cached.
    async fn read_missing(&self, piece: ByteRange, buffer: ReadBuf<'_>, context: AccessContext) -> IoResult {
        loop {
            match self.fills.find(piece) {
                FillLookup::Ready(fill) => {
                    if fill.copy(piece, buffer) {
                        self.counts.borrow_mut().joined += 1;
                        return Ok(());
                    }
                    return self.lower.read(piece.start, buffer).await;
                }
                FillLookup::InFlight(fill) => {
                    self.fills.wait_data(&fill).await;
                    if self.may_be_dirty.get() {
                        // The cache may have newer data than the disk by now.
                        return Io::task(self.read_steps(piece, buffer)).await;
                    }
                }
                FillLookup::Partial => return self.lower.read(piece.start, buffer).await,
                FillLookup::Missing => break,
            }
        }
        // The rest of a partly cached line is always filled.
        let should_fill = |line| self.index.borrow().find(line).is_some() || self.should_admit(line, context);
        let lines = self.layout.lines_of(piece).filter(|line| should_fill(*line)).collect::<SmallVec<[Line; 16]>>();
        if lines.is_empty() || !self.is_readable() || self.is_bypassed(self.turn_time()) {
            return self.lower.read(piece.start, buffer).await;
        }
        self.read_and_fill(piece, buffer, &lines, context).await
    }
}
