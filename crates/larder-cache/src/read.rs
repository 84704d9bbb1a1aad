//! The guest's reads.

use larder_block::{ByteRange, Io, IoResult, Operation, ReadBuf, join};
use smallvec::SmallVec;

use crate::fill::{FILL_LEN, Found};
use crate::index::Use;
use crate::parts::{Part, runs};
use crate::shape::{Line, Slot};
use crate::{Cache, Mode};
use larder_policy::policy::{Access, Context};

/// Keeps a slot from being given to another line while it is read from.
struct Pin<'a> {
    cache: &'a Cache,
    slot: Slot,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.cache.index.borrow_mut().unpin(self.slot, Use::Read);
        self.cache.readers.wake();
    }
}

impl Cache {
    pub(crate) fn read_any<'a>(&'a self, range: ByteRange, buffer: ReadBuf<'a>) -> Io<'a> {
        let is_used = !self.has_failed() && self.mode.get() != Mode::PassThrough;
        if !self.is_fit(range) || (!is_used && !self.may_be_dirty.get()) {
            return self.lower.read(range.start, buffer);
        }
        Io::task(self.read_steps(range, buffer))
    }

    async fn read_steps(&self, range: ByteRange, buffer: ReadBuf<'_>) -> IoResult {
        self.undone(Operation::Read, range).await?;
        self.load_range(range, Operation::Read).await?;
        let part_of = |piece: ByteRange| {
            let from = (piece.start - range.start).as_usize();
            buffer.slice(from, piece.len.as_usize())
        };
        let mut ios: SmallVec<[Io<'_>; 4]> = SmallVec::new();
        let mut missing = ByteRange::default();
        let context = self.context(Access::Read, range.len.get());
        let (mut found, mut hit_bytes) = (false, 0);
        for part in self.shape.parts_of(range) {
            let slot = self.index.borrow().find(part.line);
            // Of a cache that is not used, only what nobody else has.
            let is_used = !self.has_failed() && self.mode.get() != Mode::PassThrough;
            let valid = slot.map_or(0, |slot| match is_used {
                true => self.index.borrow().visible(slot),
                false => self.index.borrow().dirty(slot),
            });
            for (inside, piece) in runs(part, valid) {
                match (inside, slot) {
                    (true, Some(slot)) => {
                        found = true;
                        hit_bytes += piece.len.get();
                        ios.push(Io::task(self.read_hit(self.pin(slot), part, piece, part_of(piece))));
                    }
                    _ if !missing.is_empty()
                        && missing.end() == piece.start
                        && (missing.len + piece.len).get() <= FILL_LEN =>
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
                self.index.borrow_mut().policy.touch(slot, part.line, context);
            }
        }
        {
            let counts = &mut *self.counts.borrow_mut();
            counts.hit_bytes += hit_bytes;
            let count = match (missing.is_empty() && hit_bytes == range.len.get(), found) {
                (true, _) => &mut counts.hits,
                (false, true) => &mut counts.partial_hits,
                (false, false) => &mut counts.misses,
            };
            *count += 1;
        }
        if !missing.is_empty() {
            ios.push(Io::task(self.read_missing(missing, part_of(missing), context)));
        }
        join(ios).await
    }

    fn pin(&self, slot: Slot) -> Pin<'_> {
        self.index.borrow_mut().pin(slot, Use::Read);
        Pin { cache: self, slot }
    }

    async fn read_hit(&self, pin: Pin<'_>, part: Part, piece: ByteRange, buffer: ReadBuf<'_>) -> IoResult {
        let slot = pin.slot;
        let read = self.fast.read(self.data_at(slot, piece.start), buffer).await;
        let Err(error) = read else {
            // What has been seen must outlive this process.
            if self.is_loose_unwritten(slot) && self.commit().await.is_err() {
                return Err(self.refused(Operation::Read, piece));
            }
            return Ok(());
        };
        self.fail(&error);
        if self.index.borrow().dirty(slot) & part.sectors != 0 {
            return Err(error);
        }
        self.lower.read(piece.start, buffer).await
    }

    /// Reads what is not in the cache.
    async fn read_missing(&self, piece: ByteRange, buffer: ReadBuf<'_>, context: Context) -> IoResult {
        loop {
            match self.fills.find(piece) {
                Found::Here(fill) => {
                    if fill.copy(piece, buffer) {
                        self.counts.borrow_mut().joined += 1;
                        return Ok(());
                    }
                    return self.lower.read(piece.start, buffer).await;
                }
                Found::Coming(fill) => {
                    self.fills.arrival(&fill).await;
                    if self.may_be_dirty.get() {
                        // By now the cache may have what the disk has not.
                        return Io::task(self.read_steps(piece, buffer)).await;
                    }
                }
                Found::Some => return self.lower.read(piece.start, buffer).await,
                Found::Nothing => break,
            }
        }
        // Of a line that is there in part, the rest is wanted.
        let is_wanted = |line| self.index.borrow().find(line).is_some() || self.admits(line, context);
        let lines = self
            .shape
            .lines_of(piece)
            .filter(|line| is_wanted(*line))
            .collect::<SmallVec<[Line; 16]>>();
        if lines.is_empty() || self.has_failed() || self.mode.get() == Mode::PassThrough {
            return self.lower.read(piece.start, buffer).await;
        }
        self.read_and_fill(piece, buffer, &lines, context).await
    }
}
