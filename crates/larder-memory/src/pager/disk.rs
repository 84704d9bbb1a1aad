//! Tiers on disks: they store the pages that do not fit in compressed RAM.
//!
//! # Demotion
//! The live objects of the oldest segment are copied, as they are stored, to a buffer that becomes a segment of the
//! disk and is written as a whole. Only then do the entries point there, and only for pages that have not been wanted
//! meanwhile. Until then the copy in the tier above is valid, so a kill during the write loses nothing.
//!
//! # Failing disks
//! A failed write loses nothing, because the copy in the tier above stays valid. After a few failures the disk is not
//! written to any more. A page that cannot be read after a few attempts is lost. A disk that is unreachable (a
//! disconnected NBD server) is different: it still has its data and may return. The pager logs this and waits for its
//! pages without a time limit.
//!
//! # Space
//! A full disk frees space by moving the live objects of its emptiest segment, or by moving its oldest segment to the
//! next disk. Copies of pages that are in memory too are dropped then. A dead segment that is still being read is not
//! written to: a new page stored there could join the old read, since one read serves all pages in its range.

mod read;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use larder_block::{AlignedBuf, Failure, IoError};

use super::{Pager, StuckReason};
use crate::entry::{CopyLocation, EntryWord, StoredObject, Tier};
use crate::guest::GuestMemory;
use crate::segment_log::{SEGMENT_BYTES, SegmentIndex, SegmentTable, data_at};
use crate::store::{ReadId, SegmentStore, StoreCompletion};
use crate::units::PageIndex;
use crate::worker::{CopiedObject, DemotionSource, DiskLease, Job, SegmentLease, Worker};

/// Maximum number of segments being written at a time.
const WRITES_MAX: usize = 2;
/// Number of free segments reserved for cleaning.
const CLEANING_SEGMENTS_RESERVED: u32 = 2;
/// A disk is cleaned when less than this share of it is free.
const FREE_SHARE_MIN: u32 = 32;
/// A segment with more live bytes than this frees too little to be cleaned.
const CLEANABLE_LIVE_BYTES_MAX: u32 = (SEGMENT_BYTES - SEGMENT_BYTES / 8) as u32;
/// Time without writes after a write has failed.
const WRITE_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Number of consecutive failed writes after which the disk is not written to any more.
const WRITE_FAILURES_MAX: u32 = 8;

/// Maximum number of prefetched pages that are put in place with one call.
pub(super) const PREFETCH_FILL_PAGES_MAX: usize = 32;

/// Contents of a buffer that becomes a segment of a disk.
#[derive(Default)]
struct SegmentContents {
    copied: Vec<CopiedObject>,
    /// Segments whose last live objects are in this buffer.
    sources: Vec<SourceSegment>,
}

/// A segment that is released once the new copies of its objects are valid.
#[derive(Clone, Copy)]
enum SourceSegment {
    Ram(SegmentIndex),
    Disk(Tier, SegmentIndex),
}

/// A read in progress, or waiting to be retried.
struct DiskRead {
    disk: usize,
    start: u64,
    len: usize,
    attempts: u32,
    target: ReadTarget,
}

enum ReadTarget {
    /// These pages, with the first words of their entries.
    Pages(Vec<(PageIndex, EntryWord)>),
    /// A whole segment, whose live objects are moved to the disk with this index.
    Segment(SegmentIndex, usize),
}

/// A tier on a disk.
pub(super) struct Disk {
    tier: Tier,
    store: Box<dyn SegmentStore>,
    pub(super) log: SegmentTable,
    filling: Option<(DiskLease, SegmentContents)>,
    /// Contents of the buffer that the worker fills.
    worker_contents: Option<SegmentContents>,
    /// Segments to be moved to this disk, each with the offset of its next object in bytes.
    queue: VecDeque<(DemotionSource, usize)>,
    writes: HashMap<SegmentIndex, SegmentContents>,
    /// A segment of this disk is being read or copied, to free space.
    is_cleaning: bool,
    failures: u32,
    /// The last request could not reach the disk.
    is_unreachable: bool,
    failed_until: Option<Instant>,
    /// Bytes written and read since the pager was made.
    pub(super) written_bytes: u64,
    pub(super) read_bytes: u64,
}

impl Disk {
    fn new(tier: Tier, store: Box<dyn SegmentStore>) -> Self {
        Self {
            tier,
            log: SegmentTable::new(store.segments()),
            store,
            filling: None,
            worker_contents: None,
            queue: VecDeque::new(),
            writes: HashMap::new(),
            is_cleaning: false,
            failures: 0,
            is_unreachable: false,
            failed_until: None,
            written_bytes: 0,
            read_bytes: 0,
        }
    }

    /// Returns true if few segments are free.
    fn is_low_on_space(&self) -> bool {
        self.log.available() <= (self.log.count() / FREE_SHARE_MIN).max(CLEANING_SEGMENTS_RESERVED)
    }

    /// Returns true if the disk is not written to any more.
    pub(super) fn has_failed(&self) -> bool {
        self.failures >= WRITE_FAILURES_MAX
    }

    /// Returns true if the disk is not written to now.
    fn is_backing_off(&self, now: Instant) -> bool {
        self.has_failed() || self.failed_until.is_some_and(|until| until > now)
    }

    /// Returns true if a request failed because the disk is unreachable. Logs each change.
    fn update_reachability(&mut self, failed: Option<&IoError>) -> bool {
        let is_unreachable = failed.is_some_and(|error| error.failure() == Failure::Unreachable);
        if is_unreachable != self.is_unreachable {
            self.is_unreachable = is_unreachable;
            let name = self.store.name();
            match is_unreachable {
                true => {
                    tracing::error!("{name} cannot be reached: threads that need a page from it wait until it can")
                }
                false => tracing::info!("{name} can be reached again"),
            }
        }
        is_unreachable
    }
}

/// Status of a tier on a disk.
#[derive(Clone, Debug)]
pub struct DiskStatus {
    /// The tier.
    pub tier: Tier,
    /// Name of the disk.
    pub name: String,
    /// Capacity of the tier on the disk, in bytes.
    pub limit_bytes: u64,
    /// Space used, dead objects included, in bytes.
    pub used_bytes: u64,
    /// Space used by live objects, in bytes.
    pub live_bytes: u64,
    /// Bytes written since the pager was made.
    pub written_bytes: u64,
    /// Bytes read since the pager was made.
    pub read_bytes: u64,
    /// The disk has failed too many writes and is not written to any more.
    pub failed: bool,
    /// The disk is unreachable now. Threads that want a page from it wait.
    pub unreachable: bool,
    /// The contents are encrypted.
    pub encrypted: bool,
}

/// All tiers on disks, the fastest first.
#[derive(Default)]
pub(super) struct Disks {
    pub(super) all: Vec<Disk>,
    reads: BTreeMap<ReadId, DiskRead>,
    retries: Vec<(Instant, DiskRead)>,
    last_read_id: u64,
    spare_buffers: Vec<AlignedBuf>,
}

/// Maximum number of spare buffers.
const SPARE_MAX: usize = 8;

impl Disks {
    pub(super) fn new(stores: Vec<(Tier, Box<dyn SegmentStore>)>) -> Self {
        Self { all: stores.into_iter().map(|(tier, store)| Disk::new(tier, store)).collect(), ..Self::default() }
    }

    pub(super) fn index_of(&self, tier: Tier) -> Option<usize> {
        self.all.iter().position(|disk| disk.tier == tier)
    }

    /// Returns the number of reads in progress or waiting to be retried.
    pub(super) fn reads(&self) -> usize {
        self.reads.len() + self.retries.len()
    }

    /// Returns the memory that buffers use, in bytes.
    pub(super) fn buffer_bytes(&self) -> u64 {
        let segments: usize = self
            .all
            .iter()
            .map(|disk| {
                let filled = usize::from(disk.filling.is_some() || disk.worker_contents.is_some());
                filled + disk.writes.len() + usize::from(disk.is_cleaning)
            })
            .sum();
        let reads: usize = self.reads.values().map(|reading| reading.len).sum();
        let spare: usize = self.spare_buffers.iter().map(|bytes| bytes.len()).sum();
        (segments * SEGMENT_BYTES + reads + spare) as u64
    }

    fn buffer(&mut self, len: usize) -> AlignedBuf {
        let fits = |bytes: &AlignedBuf| bytes.len() >= len && bytes.len() <= len.next_power_of_two();
        match self.spare_buffers.iter().position(fits) {
            Some(index) => self.spare_buffers.swap_remove(index),
            None => AlignedBuf::zeroed(len.next_power_of_two().min(SEGMENT_BYTES)),
        }
    }

    fn recycle(&mut self, bytes: AlignedBuf) {
        if self.spare_buffers.len() < SPARE_MAX {
            self.spare_buffers.push(bytes);
        }
    }

    fn start_read(&mut self, reading: DiskRead) {
        self.last_read_id += 1;
        let ticket = ReadId(self.last_read_id);
        let bytes = self.buffer(reading.len);
        self.all[reading.disk].store.read(reading.start, reading.len, bytes, ticket);
        self.reads.insert(ticket, reading);
    }

    /// Returns the pages of a read in progress that covers the object `stored`.
    fn pages_of_covering_read(
        &mut self,
        disk: usize,
        stored: StoredObject,
    ) -> Option<&mut Vec<(PageIndex, EntryWord)>> {
        let from = stored.offset.bytes();
        let to = data_at(stored.offset) + u64::from(stored.len);
        self.reads.values_mut().find_map(|reading| match &mut reading.target {
            ReadTarget::Pages(pages)
                if reading.disk == disk && reading.start <= from && to <= reading.start + reading.len as u64 =>
            {
                Some(pages)
            }
            _ => None,
        })
    }
}

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Handles all finished requests of the disks, and retries reads that are due. Returns true if there was any.
    pub(super) fn handle_disk_completions(&mut self) -> bool {
        let mut worked = false;
        for index in 0..self.disks.all.len() {
            while let Some(finished) = self.disks.all[index].store.next_completion() {
                worked = true;
                match finished {
                    StoreCompletion::Written { segment, bytes, failed } => {
                        self.disks.recycle(bytes);
                        self.on_disk_written(index, segment, failed);
                    }
                    StoreCompletion::Read { read_id: ticket, bytes, failed } => {
                        self.disks.all[index].update_reachability(failed.as_ref());
                        if let Some(reading) = self.disks.reads.remove(&ticket) {
                            match failed {
                                None => self.on_disk_read(reading, bytes),
                                Some(error) => {
                                    self.disks.recycle(bytes);
                                    self.on_read_failed(reading, &error);
                                }
                            }
                        }
                    }
                }
            }
        }
        if self.disks.retries.iter().any(|(at, _)| *at <= self.now) {
            let due = self.disks.retries.extract_if(.., |(at, _)| *at <= self.now);
            let due: Vec<DiskRead> = due.map(|(_, reading)| reading).collect();
            for reading in due {
                self.disks.start_read(reading);
            }
            worked = true;
        }
        worked
    }

    /// Returns the time at which the next failed read is retried.
    pub(super) fn next_read_retry(&self) -> Option<Instant> {
        self.disks.retries.iter().map(|(at, _)| *at).min()
    }

    /// Returns true if a demotion or a cleaning in progress will free space.
    pub(super) fn is_demoting(&self) -> bool {
        let reads = self.disks.reads.values();
        self.disks.all.iter().any(|disk| disk.worker_contents.is_some() || !disk.writes.is_empty())
            || reads
                .chain(self.disks.retries.iter().map(|(_, reading)| reading))
                .any(|reading| matches!(reading.target, ReadTarget::Segment(..)))
    }

    /// Demotes pages to the disks, and cleans the disks. Returns true if there was anything to do.
    pub(super) fn demote(&mut self, now: Instant) -> bool {
        let mut worked = false;
        for index in 0..self.disks.all.len() {
            worked |= self.demote_to_disk(index, now);
            worked |= self.clean_disk(index, now);
        }
        worked
    }

    /// Returns the number of segments of compressed RAM above which the oldest is demoted.
    fn ram_segments_target(&self) -> u32 {
        let max = self.segments_max();
        max - (max / 8).clamp(2, 16).min(max)
    }

    fn demote_to_disk(&mut self, index: usize, now: Instant) -> bool {
        let ram_is_over = index == 0 && self.ram.used() > self.ram_segments_target();
        if self.disks.all[index].has_failed() {
            self.stop_demotion(index);
            return false;
        }
        let disk = &mut self.disks.all[index];
        if disk.worker_contents.is_some() || disk.failed_until.is_some_and(|until| until > now) {
            return false;
        }
        let has_room = disk.filling.is_some() || disk.log.available() > CLEANING_SEGMENTS_RESERVED;
        if disk.queue.is_empty() && ram_is_over && has_room {
            let from = crate::segment_log::SEGMENT_HEADER_BYTES;
            let oldest = self.ram.reserve_oldest();
            disk.queue.extend(oldest.map(|segment| (DemotionSource::Ram(segment), from)));
        }
        // The reserved free segments are only for moving objects within this disk.
        let is_allowed = |origin: &DemotionSource| {
            has_room || matches!(origin, DemotionSource::Disk { tier, .. } if *tier == disk.tier)
        };
        let Some(next) = disk.queue.iter().position(|(origin, _)| is_allowed(origin)) else {
            return false;
        };
        let (into, filling) = match disk.filling.take() {
            Some(filling) => filling,
            None => {
                if disk.writes.len() >= WRITES_MAX {
                    return false;
                }
                // Data of a read that began before the segment became free must not be taken for its new contents.
                let reads = self.disks.reads.values();
                let reads = reads.chain(self.disks.retries.iter().map(|(_, reading)| reading));
                let is_being_read = |segment: SegmentIndex| {
                    let mut reads = reads.clone().filter(|reading| reading.disk == index);
                    reads.any(|reading| reading.start / SEGMENT_BYTES as u64 == u64::from(segment.get()))
                };
                let Some((segment, number)) = disk.log.allocate_except(is_being_read) else {
                    return false;
                };
                let (tier, bytes) = (disk.tier, self.disks.buffer(SEGMENT_BYTES));
                let lease = SegmentLease { segment, from: 0, generation: number };
                (DiskLease { tier, lease, bytes }, SegmentContents::default())
            }
        };
        let disk = &mut self.disks.all[index];
        let Some((origin, at)) = disk.queue.remove(next) else {
            unreachable!("the index was found above");
        };
        disk.worker_contents = Some(filling);
        self.submit(Job::Demote { origin, at, into });
        true
    }

    pub(super) fn on_demoted(
        &mut self,
        origin: DemotionSource,
        next_at: Option<usize>,
        copied: Vec<CopiedObject>,
        into: DiskLease,
        is_full: bool,
    ) {
        let Some(index) = self.disks.index_of(into.tier) else {
            unreachable!("the job belongs to an existing disk");
        };
        let disk = &mut self.disks.all[index];
        let mut filling = disk.worker_contents.take().unwrap_or_default();
        filling.copied.extend(copied);
        match next_at {
            Some(at) => disk.queue.push_front((origin, at)),
            None => match origin {
                DemotionSource::Ram(segment) => filling.sources.push(SourceSegment::Ram(segment)),
                DemotionSource::Disk { tier, segment, bytes, .. } => {
                    filling.sources.push(SourceSegment::Disk(tier, segment));
                    self.disks.recycle(bytes);
                    // The next segment to be cleaned may fill the rest of the buffer.
                    if let Some(of) = self.disks.index_of(tier) {
                        self.disks.all[of].is_cleaning = false;
                    }
                }
            },
        }
        let disk = &mut self.disks.all[index];
        if !is_full {
            disk.filling = Some((into, filling));
            return;
        }
        let DiskLease { lease, bytes, .. } = into;
        disk.written_bytes += SEGMENT_BYTES as u64;
        disk.writes.insert(lease.segment, filling);
        disk.store.write(lease.segment, bytes);
    }

    fn on_disk_written(&mut self, index: usize, segment: SegmentIndex, failed: Option<IoError>) {
        let disk = &mut self.disks.all[index];
        let Some(filling) = disk.writes.remove(&segment) else {
            return;
        };
        let tier = disk.tier;
        if disk.update_reachability(failed.as_ref()) {
            // The disk has no fault: the same segment is retried later.
            disk.log.undo_allocate(segment);
            disk.failed_until = Some(self.now + WRITE_RETRY_DELAY);
        } else if let Some(error) = failed {
            disk.log.mark_bad(segment);
            disk.failures += 1;
            disk.failed_until = Some(self.now + WRITE_RETRY_DELAY);
            let what = match disk.has_failed() {
                true => "the disk is not written to any more; its pages can still be read",
                false => "nothing is lost; another segment is tried",
            };
            tracing::error!("{error}: {what}");
        } else {
            disk.failures = 0;
            for CopiedObject { page, from, to } in filling.copied {
                let word = self.state.word(page);
                if word.with_clean(false) != from.with_clean(false) {
                    continue;
                }
                let location = CopyLocation::InTier {
                    tier,
                    object: to,
                    // The page may have been paged in meanwhile.
                    clean: word.is_clean(),
                };
                self.set_word(page, EntryWord::encode(location));
                self.disks.all[index].log.add_live(to);
                self.release_copy(word);
            }
            self.disks.all[index].log.seal(segment);
        }
        self.release_sources(filling.sources);
    }

    fn release_sources(&mut self, origins: Vec<SourceSegment>) {
        for origin in origins {
            match origin {
                SourceSegment::Ram(segment) => self.ram.unreserve(segment),
                SourceSegment::Disk(tier, segment) => {
                    if let Some(of) = self.disks.index_of(tier) {
                        self.disks.all[of].log.unreserve(segment);
                    }
                }
            }
        }
    }

    /// Stops demotion to a failed disk. Objects that were waiting to be moved there stay where they are.
    fn stop_demotion(&mut self, index: usize) {
        let disk = &mut self.disks.all[index];
        if disk.worker_contents.is_some() {
            return;
        }
        let mut origins = Vec::new();
        if let Some((into, filling)) = disk.filling.take() {
            disk.log.mark_bad(into.lease.segment);
            origins.extend(filling.sources);
            self.disks.recycle(into.bytes);
        }
        for (origin, _) in std::mem::take(&mut self.disks.all[index].queue) {
            match origin {
                DemotionSource::Ram(segment) => origins.push(SourceSegment::Ram(segment)),
                DemotionSource::Disk { tier, segment, bytes, .. } => {
                    origins.push(SourceSegment::Disk(tier, segment));
                    self.disks.recycle(bytes);
                    if let Some(of) = self.disks.index_of(tier) {
                        self.disks.all[of].is_cleaning = false;
                    }
                }
            }
        }
        self.release_sources(origins);
    }

    /// Starts to read a segment whose live objects are to be moved, if the disk is short of space.
    fn clean_disk(&mut self, index: usize, now: Instant) -> bool {
        let has_next = self.disks.all.get(index + 1).is_some_and(|next| !next.has_failed());
        let disk = &mut self.disks.all[index];
        if disk.is_cleaning || disk.is_backing_off(now) || !disk.is_low_on_space() {
            return false;
        }
        // With a next disk, only a segment that is at least half dead is moved within this disk.
        let limit = if has_next { SEGMENT_BYTES as u32 / 2 } else { CLEANABLE_LIVE_BYTES_MAX };
        let is_stuck = disk.log.available() == 0 && disk.filling.is_none();
        let emptiest = if is_stuck { None } else { disk.log.reserve_emptiest(limit) };
        let (segment, to) = match emptiest {
            Some(segment) => (segment, index),
            None if has_next => match disk.log.reserve_oldest() {
                Some(segment) => (segment, index + 1),
                None => return false,
            },
            None => return false,
        };
        disk.is_cleaning = true;
        self.disks.start_read(DiskRead {
            disk: index,
            start: segment.start(),
            len: SEGMENT_BYTES,
            attempts: 0,
            target: ReadTarget::Segment(segment, to),
        });
        true
    }

    /// Returns true if the first disk can be written to and has free segments.
    pub(super) fn disks_have_room(&self) -> bool {
        self.disks
            .all
            .first()
            .is_some_and(|disk| !disk.is_backing_off(self.now) && disk.log.available() > CLEANING_SEGMENTS_RESERVED)
    }

    /// Adopts an object on a disk that an earlier pager has stored. Returns false if there is no such disk, or the
    /// object cannot be on it.
    pub(super) fn adopt_on_disk(&mut self, tier: Tier, stored: StoredObject) -> bool {
        match self.disks.index_of(tier) {
            Some(index) => self.disks.all[index].log.adopt(stored),
            None => false,
        }
    }

    /// Returns the status of each tier on a disk.
    pub fn disk_status(&self) -> Vec<DiskStatus> {
        let of = |disk: &Disk| DiskStatus {
            tier: disk.tier,
            name: disk.store.name().to_owned(),
            limit_bytes: u64::from(disk.log.count()) * SEGMENT_BYTES as u64,
            used_bytes: u64::from(disk.log.used()) * SEGMENT_BYTES as u64,
            live_bytes: disk.log.live_bytes(),
            written_bytes: disk.written_bytes,
            read_bytes: disk.read_bytes,
            failed: disk.has_failed(),
            unreachable: disk.is_unreachable,
            encrypted: self.cipher.is_some(),
        };
        self.disks.all.iter().map(of).collect()
    }

    /// Returns the reason why nothing can be demoted.
    pub(super) fn full_reason(&self) -> StuckReason {
        match self.disks.all.first() {
            Some(disk) if disk.is_backing_off(self.now) || disk.is_unreachable => StuckReason::DiskFailed,
            _ => StuckReason::TiersFull,
        }
    }
}
