//! The guest's writes in write-back mode, where the cache may have data that the disk does not have.
//!
//! A write is complete when its data is on the cache device and a record of it in the journal, both written and
//! neither flushed: it survives a kill. A flush makes both durable ([`Cache::harden`]). A power loss between the two
//! must leave either the old or the new data:
//! - Where recovery would trust that the slot equals the disk, a record first says, durably, that the slot is dirty.
//!   So old or new data stays valid, even after the line is evicted.
//! - Anywhere else recovery finds nothing until the record is durable.

use larder_block::{
    ByteLen, ByteRange, Extent, ExtentKind, Geometry, Io, IoResult, Operation, WriteBuf, WriteFlags, check_request,
    join,
};
use larder_policy::policy::{Access, Context};
use smallvec::SmallVec;

use crate::Cache;
use crate::commit::Failed;
use crate::entry::Entry;
use crate::parts::Part;
use crate::place::Place;
use crate::shape::{Sectors, Slot};

/// Fewest dirty lines that a request for extents looks up.
const DIRTY_AT_ONCE: usize = 1024;

/// Parts of a write with their slots.
type Places<'a> = SmallVec<[(Part, Place<'a>); 2]>;

/// Sectors that are being written in slots where recovery would not find them: no reader may see data that a crash
/// would undo. If the write does not complete, the content of the sectors is unknown, and they are removed.
struct Hidden<'a> {
    cache: &'a Cache,
    slots: SmallVec<[(Slot, Sectors); 2]>,
}

impl Hidden<'_> {
    async fn hide(&mut self, places: &[(Part, Place<'_>)]) -> Result<(), Failed> {
        let cache = self.cache;
        let mut unfound: SmallVec<[Slot; 2]> = SmallVec::new();
        for (part, place) in places {
            let sectors = part.sectors & !cache.left_by_kill(place.slot()).dirty;
            if sectors == 0 {
                continue;
            }
            unfound.push(place.slot());
            let mut index = cache.index.borrow_mut();
            let sectors = sectors & index.valid(place.slot());
            if sectors != 0 {
                index.hide(place.slot(), sectors);
                self.slots.push((place.slot(), sectors));
            }
        }
        // Readers of a line that was removed from the slot count too.
        let is_read = |slot: &Slot| cache.index.borrow().has_readers(*slot);
        let is_over = || cache.has_failed() || !unfound.iter().any(is_read);
        cache.readers.when(is_over).await;
        (!cache.has_failed()).then_some(()).ok_or(Failed)
    }

    /// Makes the written data visible; a reader then waits until it survives a kill.
    fn are_new(&mut self) {
        for (slot, _) in self.slots.drain(..) {
            self.cache.index.borrow_mut().hide(slot, 0);
        }
    }
}

impl Drop for Hidden<'_> {
    fn drop(&mut self) {
        for (slot, sectors) in &self.slots {
            self.cache.index.borrow_mut().hide(*slot, 0);
            self.cache.take_sectors(*slot, *sectors);
        }
    }
}

impl Cache {
    /// Writes to `range`, which the caller has locked, and whose sets are loaded. Data that the disk would refuse is
    /// refused here, because it could never be cleaned.
    pub(crate) async fn write_back(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        // A copy is checked and written, since a guest could change its memory in between. It is short: only the
        // beginning of the disk is checked, and one write at a time touches that.
        let copied = self.lower.minds_content(range).then(|| buffer.to_vec());
        let buffer = copied.as_deref().map_or(buffer, WriteBuf::new);
        if copied.is_some() {
            self.lower.check_content(range.start, buffer)?;
        }
        loop {
            match self.write_to_cache(range, buffer, flags).await {
                Ok(Some(written)) => return written,
                Ok(None) => {}
                Err(Failed) => return self.write_apart(range, buffer, flags).await,
            }
        }
    }

    /// Writes to `range` while the cache device works; returns `None` if cached lines were removed during the write.
    async fn write_to_cache(
        &self,
        range: ByteRange,
        buffer: WriteBuf<'_>,
        flags: WriteFlags,
    ) -> Result<Option<IoResult>, Failed> {
        let context = self.context(self.turn_time(), Access::Write, range.len.get());
        self.allow_dirty().await?;
        let room = self.room_for_copy(buffer).await?;
        let mut places = self.places_there(range, context);
        self.premark(&places).await?;
        let mut hidden = Hidden {
            cache: self,
            slots: SmallVec::new(),
        };
        hidden.hide(&places).await?;
        let mut around: SmallVec<[Part; 2]> = SmallVec::new();
        let there = places.len();
        let mut at = 0;
        for part in self.shape.parts_of(range) {
            // The cached lines are in order.
            if places[..there]
                .get(at)
                .is_some_and(|(other, _)| other.line == part.line)
            {
                at += 1;
                continue;
            }
            let place = match self.admits(part.line, context) {
                true => self.place_for(part),
                false => None,
            };
            match place {
                Some(place) => places.push((part, place)),
                None => around.push(part),
            }
        }
        let is_leaving = around.iter().any(|part| self.has_leaving(part.line..part.line + 1));
        if is_leaving {
            self.commit().await?;
        }
        let piece = |part: &Part| {
            let from = (part.range.start - range.start).as_usize();
            buffer.slice(from, part.range.len.as_usize())
        };
        let memory = (!places.is_empty()).then(|| room.copy(buffer));
        let changed = (!places.is_empty()).then(|| self.kept.change());
        let to_cache: SmallVec<[Io<'_>; 2]> = places
            .iter()
            .zip(memory.iter().cycle())
            .map(|((part, place), memory)| self.write_slot(place, part, range, memory))
            .collect();
        let to_disk: SmallVec<[Io<'_>; 2]> = around
            .iter()
            .map(|part| self.lower.write(part.range.start, piece(part), flags))
            .collect();
        let mut in_cache = Ok(());
        let cached = Io::task(async {
            in_cache = join(to_cache).await;
            Ok(())
        });
        let both: SmallVec<[Io<'_>; 2]> = SmallVec::from_buf([cached, Io::task(join(to_disk))]);
        let on_disk = join(both).await;
        drop((changed, memory));
        if let Err(error) = in_cache {
            self.fail(&error);
        }
        if self.has_failed() {
            // From now on no line may become dirty.
            return Err(Failed);
        }
        let size = self.size.get();
        if range.end().get() > size {
            // The disk has become shorter during the write.
            let geometry = Geometry {
                size: ByteLen::new(size),
                ..self.lower.geometry()
            };
            let refused = check_request(self.lower.name(), &geometry, Operation::Write, range);
            return Ok(Some(refused));
        }
        let is_gone = |(part, place): &(Part, Place<'_>)| {
            let found = self.index.borrow().find(part.line);
            place.is_old() && found != Some(place.slot())
        };
        if places.iter().any(is_gone) {
            // The disk was shorter for a moment.
            return Ok(None);
        }
        hidden.are_new();
        if self.are_kept(&places, context) {
            self.commit().await?;
        }
        drop((hidden, places));
        self.clean_in_time();
        if flags.fua && self.harden().await.is_err() {
            return Ok(Some(Err(self.refused(Operation::Write, range))));
        }
        Ok(Some(on_disk))
    }

    /// Returns the parts of a write whose lines are cached, with their slots.
    fn places_there(&self, range: ByteRange, context: Context) -> Places<'_> {
        let mut places = Places::new();
        for part in self.shape.parts_of(range) {
            let found = self.index.borrow().find(part.line);
            if let Some(slot) = found {
                self.index.borrow_mut().policy().touch(slot, part.line, context);
                self.cleaning.is_changed(slot);
                places.push((part, self.place_of(slot)));
            }
        }
        places
    }

    /// Returns the sectors of `part` that recovery would trust as clean.
    fn believed_clean(&self, slot: Slot, part: Part) -> Sectors {
        match self.ledger.borrow().get(slot) {
            Some(place) if !place.last.open => place.last.valid & !place.last.dirty & part.sectors,
            _ => 0,
        }
    }

    /// Ensures, durably, that recovery finds the sectors of a write dirty before they are written.
    async fn premark(&self, places: &[(Part, Place<'_>)]) -> Result<(), Failed> {
        let is_clean = |(part, place): &&(Part, Place<'_>)| self.believed_clean(place.slot(), *part) != 0;
        let is_loose = |(_, place): &(Part, Place<'_>)| {
            let ledger = self.ledger.borrow();
            ledger.get(place.slot()).is_some_and(|place| place.loose.is_some())
        };
        if places.iter().filter(is_clean).any(is_loose) {
            // A firm record replaces the unflushed one, which must be durable before.
            self.harden_queued().await?;
        }
        // Records that a cancelled write has queued may not be written yet.
        let is_asked_for = |(_, place): &(Part, Place<'_>)| {
            let ledger = self.ledger.borrow();
            ledger.get(place.slot()).is_some_and(|place| place.commits > 0)
        };
        let mut commits = places.iter().any(is_asked_for);
        for (part, place) in places.iter().filter(is_clean) {
            let slot = place.slot();
            let Some(last) = self.ledger.borrow().get(slot).map(|place| place.last) else {
                continue;
            };
            let dirty = last.dirty | (last.valid & part.sectors);
            self.queue(slot, Entry { dirty, ..last });
            commits = true;
        }
        if commits {
            self.commit().await?;
        }
        if self.has_failed() {
            return Err(Failed);
        }
        // From here on the slots may have any mix of old and new data, and recovery would find them dirty.
        for (part, place) in places {
            let left = self.left_by_kill(place.slot());
            let mut index = self.index.borrow_mut();
            let (valid, dirty) = (index.valid(place.slot()), index.dirty(place.slot()));
            // The disk may have become shorter in between.
            if valid != 0 {
                index.set_sectors(place.slot(), valid, dirty | (valid & part.sectors & left.dirty));
            }
        }
        Ok(())
    }

    /// Makes written data dirty in memory and queues its records; returns whether the commit must be waited for.
    fn are_kept(&self, places: &[(Part, Place<'_>)], context: Context) -> bool {
        let mut commits = false;
        for (part, place) in places {
            let slot = place.slot();
            let left = self.left_by_kill(slot);
            if left.dirty & part.sectors != part.sectors {
                let tag = self.shape.tag_of(part.line);
                let (valid, dirty) = (left.valid | part.sectors, left.dirty | part.sectors);
                self.queue_loose(
                    slot,
                    Entry {
                        tag,
                        valid,
                        dirty,
                        ..left
                    },
                );
            }
            commits |= self.is_loose_unwritten(slot);
            self.is_stored(place, *part, part.sectors, context);
        }
        commits
    }

    /// Returns the state of a slot after a kill, once all queued records are written.
    fn left_by_kill(&self, slot: Slot) -> Entry {
        let ledger = self.ledger.borrow();
        let place = ledger.get(slot);
        place.map_or_else(|| self.index.borrow().entry(slot), |place| place.after_kill())
    }

    /// Returns whether an unflushed record of a slot is still queued.
    pub(crate) fn is_loose_unwritten(&self, slot: Slot) -> bool {
        let ledger = self.ledger.borrow();
        let loose = ledger.get(slot).and_then(|place| place.loose);
        loose.is_some_and(|(_, number)| !self.commits.have_written(number + 1))
    }

    /// Flushes both devices.
    pub(crate) async fn flush_both(&self) -> IoResult {
        if self.has_failed() && self.may_be_dirty.get() {
            // The data cannot be made durable on the failed cache device.
            self.let_go().await?;
            return self.flush_disk().await;
        }
        let disk = Io::task(self.flush_disk());
        let cache = Io::task(async {
            if self.has_failed() || self.harden().await.is_ok() {
                return Ok(());
            }
            self.let_go().await?;
            self.flush_disk().await
        });
        let both: SmallVec<[Io<'_>; 2]> = SmallVec::from_buf([disk, cache]);
        join(both).await
    }

    /// Returns whether memory has, or recovery would find, data that the disk does not have.
    pub(crate) fn is_anything_dirty(&self) -> bool {
        self.index.borrow().dirty.len() > 0 || self.ledger.borrow().is_anything_dirty()
    }

    /// Returns whether it is certain that memory has no dirty data and recovery would find none: all sets are loaded
    /// and undamaged.
    pub(crate) fn is_known_clean(&self) -> bool {
        self.index.borrow().are_all_loaded() && !self.loading.has_fences() && !self.is_anything_dirty()
    }

    /// Returns the extents of the disk, with dirty lines as data.
    pub(crate) async fn extents_of(&self, range: ByteRange, limit: usize) -> IoResult<Vec<Extent>> {
        if !self.may_be_dirty.get() {
            return self.lower.extents(range, limit).await;
        }
        if !self.index.borrow().are_all_loaded() {
            self.load_all().await?;
        }
        // Looked up before the disk is asked: the disk's answer may predate the cleaning of a line.
        let count = limit.max(DIRTY_AT_ONCE);
        let dirty = self.index.borrow().dirty.within(self.shape.lines_of(range), count);
        let known = match dirty.last() {
            // After the last line that was looked up nothing is known.
            Some(last) if dirty.len() >= count => ByteRange::between(range.start, self.range_of(0..last + 1).end()),
            _ => range,
        };
        let below = self.lower.extents(range.intersection(known), limit).await?;
        self.undone(Operation::Extents, range).await?;
        let mut extents: Vec<Extent> = Vec::new();
        let mut push = |range: ByteRange, kind: ExtentKind| match extents.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.kind == kind => last.range.len += range.len,
            _ => extents.push(Extent { range, kind }),
        };
        for Extent { range, kind } in below {
            let lines = self.shape.lines_of(range);
            let place_of = |line| dirty.partition_point(|other| *other < line);
            let dirty = match kind {
                ExtentKind::Data => &[],
                _ => &dirty[place_of(lines.start)..place_of(lines.end)],
            };
            let mut at = range.start;
            for line in dirty {
                let part = self.range_of(*line..line + 1).intersection(range);
                push(ByteRange::between(at, part.start), kind);
                push(part, ExtentKind::Data);
                at = part.end();
            }
            push(ByteRange::between(at, range.end()), kind);
        }
        extents.truncate(limit.max(1));
        Ok(extents)
    }

    /// Records, durably, that there may be dirty lines.
    async fn allow_dirty(&self) -> Result<(), Failed> {
        if self.may_be_dirty.get() {
            return Ok(());
        }
        if let Err(error) = self.note(|superblock| superblock.may_be_dirty = true).await {
            self.fail(&error);
            return Err(Failed);
        }
        if self.has_failed() {
            // Writes may bypass the cache already, and a fill may have data older than those.
            return Err(Failed);
        }
        self.may_be_dirty.set(true);
        Ok(())
    }
}
