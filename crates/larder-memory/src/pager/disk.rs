//! Tiers on disks: what compressed RAM has no room for is written there, and read when it is wanted.
//!
//! # The way of a copy
//! What lives of the oldest segment is copied, as it is stored, to memory that is to become a segment of the disk. That
//! is written as a whole. Only then do the entries lead there, and only if the page has not been wanted back meanwhile;
//! until then the copy above counts. So nothing of what is being written is missed when this process is killed.
//!
//! # A disk that fails
//! Writes that fail lose nothing, as the copy above counts; after a few the disk is not written to any more. A page that
//! cannot be read, after a few tries, is lost. A disk that cannot be reached (an NBD server that is away) is another thing:
//! it may come back, and has what it had. So its pages are waited for as long as that takes, which is told.
//!
//! # Room
//! A full disk makes room by moving what lives in its emptiest segment, or its oldest one to the next disk. What it
//! holds of pages that are in memory too is dropped then. A segment of which something is still being read is not written
//! to, though nothing lives there any more: a page that is stored there afterwards may have to be read, too, and one read
//! is made for all who want what it brings.

mod read;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use larder_block::{AlignedBuf, Failure, IoError};

use super::{Pager, Stuck};
use crate::entry::{Location, Stored, Tier, Word};
use crate::guest::GuestMemory;
use crate::log::{SEGMENT, SegmentIndex, Segments, data_at};
use crate::store::{Finished, Store, Ticket};
use crate::units::PageIndex;
use crate::worker::{Copied, DiskLease, Job, Lease, Origin, Worker};

/// How many segments are written at a time.
const WRITES_MAX: usize = 2;
/// So many free segments are kept for those that make room.
const KEPT_FOR_CLEANING: u32 = 2;
/// A disk makes room when less than this share of it is free.
const FREE_SHARE: u32 = 32;
/// From a segment in which more than this lives there is little to gain.
const WORTH_CLEANING: u32 = (SEGMENT - SEGMENT / 8) as u32;
/// After a write that fails nothing is written for so long.
const WRITE_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// After so many of them the disk is not written to any more.
const WRITE_FAILURES_MAX: u32 = 8;

/// How many pages are put in place in one call, of those that nobody wants yet.
pub(super) const AHEAD_PAGES: usize = 32;

/// What becomes a segment of a disk.
#[derive(Default)]
struct Filling {
    copied: Vec<Copied>,
    /// Segments of which nothing else is left to be moved.
    origins: Vec<Moved>,
}

/// A segment that is left when its copies count.
#[derive(Clone, Copy)]
enum Moved {
    Ram(SegmentIndex),
    Disk(Tier, SegmentIndex),
}

/// A read that is under way, or is to be made again.
struct Reading {
    disk: usize,
    start: u64,
    len: usize,
    tries: u32,
    what: Wanted,
}

enum Wanted {
    /// These pages, whose entries said this.
    Pages(Vec<(PageIndex, Word)>),
    /// A whole segment, to be moved to this disk.
    Segment(SegmentIndex, usize),
}

/// A tier on a disk.
pub(super) struct Disk {
    tier: Tier,
    store: Box<dyn Store>,
    pub(super) log: Segments,
    filling: Option<(DiskLease, Filling)>,
    /// What belongs to the memory that the worker fills.
    with_worker: Option<Filling>,
    /// What is to be moved here, from which byte on.
    queue: VecDeque<(Origin, usize)>,
    writes: HashMap<SegmentIndex, Filling>,
    /// A segment of it is being read, or copied, to make room.
    is_cleaning: bool,
    failures: u32,
    /// What was tried last could not reach it.
    is_unreachable: bool,
    failed_until: Option<Instant>,
    /// Bytes written and read since the beginning.
    pub(super) written_bytes: u64,
    pub(super) read_bytes: u64,
}

impl Disk {
    fn new(tier: Tier, store: Box<dyn Store>) -> Self {
        Self {
            tier,
            log: Segments::new(store.segments()),
            store,
            filling: None,
            with_worker: None,
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

    /// It is short of free segments.
    fn is_short(&self) -> bool {
        self.log.available() <= (self.log.count() / FREE_SHARE).max(KEPT_FOR_CLEANING)
    }

    /// It is not written to any more.
    pub(super) fn has_failed(&self) -> bool {
        self.failures >= WRITE_FAILURES_MAX
    }

    /// It is not written to now.
    fn rests(&self, now: Instant) -> bool {
        self.has_failed() || self.failed_until.is_some_and(|until| until > now)
    }

    /// Whether a request failed because the disk cannot be reached. What changes is told.
    fn is_out_of_reach(&mut self, failed: Option<&IoError>) -> bool {
        let is_unreachable = failed.is_some_and(|error| error.failure() == Failure::Unreachable);
        if is_unreachable != self.is_unreachable {
            self.is_unreachable = is_unreachable;
            let name = self.store.name();
            match is_unreachable {
                true => {
                    tracing::error!("{name} cannot be reached: whoever wants a page that is there waits until it can")
                }
                false => tracing::info!("{name} can be reached again"),
            }
        }
        is_unreachable
    }
}

/// How a tier on a disk is.
#[derive(Clone, Debug)]
pub struct DiskStatus {
    /// Which.
    pub tier: Tier,
    /// What the disk is called.
    pub name: String,
    /// What it may hold, in bytes.
    pub limit_bytes: u64,
    /// What it holds, with what is not needed any more, in bytes.
    pub used_bytes: u64,
    /// What of that is needed, in bytes.
    pub live_bytes: u64,
    /// What was written since the pager began, in bytes.
    pub written_bytes: u64,
    /// What was read, in bytes.
    pub read_bytes: u64,
    /// It cannot be written to, and is not any more.
    pub failed: bool,
    /// It cannot be reached now: whoever wants a page that is there waits.
    pub unreachable: bool,
    /// What is there is enciphered.
    pub encrypted: bool,
}

/// All tiers on disks, the fastest first.
#[derive(Default)]
pub(super) struct Disks {
    pub(super) all: Vec<Disk>,
    reads: BTreeMap<Ticket, Reading>,
    again: Vec<(Instant, Reading)>,
    ticket: u64,
    spare: Vec<AlignedBuf>,
}

/// How many buffers are kept.
const SPARE_MAX: usize = 8;

impl Disks {
    pub(super) fn new(stores: Vec<(Tier, Box<dyn Store>)>) -> Self {
        Self {
            all: stores.into_iter().map(|(tier, store)| Disk::new(tier, store)).collect(),
            ..Self::default()
        }
    }

    pub(super) fn index_of(&self, tier: Tier) -> Option<usize> {
        self.all.iter().position(|disk| disk.tier == tier)
    }

    /// Reads under way, or to be made again.
    pub(super) fn reads(&self) -> usize {
        self.reads.len() + self.again.len()
    }

    /// What is taken of memory besides, in bytes.
    pub(super) fn buffer_bytes(&self) -> u64 {
        let segments: usize = self
            .all
            .iter()
            .map(|disk| {
                let filled = usize::from(disk.filling.is_some() || disk.with_worker.is_some());
                filled + disk.writes.len() + usize::from(disk.is_cleaning)
            })
            .sum();
        let reads: usize = self.reads.values().map(|reading| reading.len).sum();
        let spare: usize = self.spare.iter().map(|bytes| bytes.len()).sum();
        (segments * SEGMENT + reads + spare) as u64
    }

    fn buffer(&mut self, len: usize) -> AlignedBuf {
        let fits = |bytes: &AlignedBuf| bytes.len() >= len && bytes.len() <= len.next_power_of_two();
        match self.spare.iter().position(fits) {
            Some(index) => self.spare.swap_remove(index),
            None => AlignedBuf::zeroed(len.next_power_of_two().min(SEGMENT)),
        }
    }

    fn give_back(&mut self, bytes: AlignedBuf) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(bytes);
        }
    }

    fn begin(&mut self, reading: Reading) {
        self.ticket += 1;
        let ticket = Ticket(self.ticket);
        let bytes = self.buffer(reading.len);
        self.all[reading.disk]
            .store
            .read(reading.start, reading.len, bytes, ticket);
        self.reads.insert(ticket, reading);
    }

    /// The read under way that will bring what is stored there.
    fn reading_of(&mut self, disk: usize, stored: Stored) -> Option<&mut Vec<(PageIndex, Word)>> {
        let from = stored.place.bytes();
        let to = data_at(stored.place) + u64::from(stored.len);
        self.reads.values_mut().find_map(|reading| match &mut reading.what {
            Wanted::Pages(pages)
                if reading.disk == disk && reading.start <= from && to <= reading.start + reading.len as u64 =>
            {
                Some(pages)
            }
            _ => None,
        })
    }
}

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// What disks have done; whether there was something.
    pub(super) fn take_from_disks(&mut self) -> bool {
        let mut worked = false;
        for index in 0..self.disks.all.len() {
            while let Some(finished) = self.disks.all[index].store.take() {
                worked = true;
                match finished {
                    Finished::Written { segment, bytes, failed } => {
                        self.disks.give_back(bytes);
                        self.written_to_disk(index, segment, failed);
                    }
                    Finished::Read { ticket, bytes, failed } => {
                        self.disks.all[index].is_out_of_reach(failed.as_ref());
                        if let Some(reading) = self.disks.reads.remove(&ticket) {
                            match failed {
                                None => self.read_from_disk(reading, bytes),
                                Some(error) => {
                                    self.disks.give_back(bytes);
                                    self.read_failed(reading, &error);
                                }
                            }
                        }
                    }
                }
            }
        }
        if self.disks.again.iter().any(|(at, _)| *at <= self.now) {
            let due = self.disks.again.extract_if(.., |(at, _)| *at <= self.now);
            let due: Vec<Reading> = due.map(|(_, reading)| reading).collect();
            for reading in due {
                self.disks.begin(reading);
            }
            worked = true;
        }
        worked
    }

    /// When a read that has failed is made again.
    pub(super) fn next_read_again(&self) -> Option<Instant> {
        self.disks.again.iter().map(|(at, _)| *at).min()
    }

    /// Whether something is on its way that makes room in compressed RAM, or for what is there.
    pub(super) fn is_demoting(&self) -> bool {
        let reads = self.disks.reads.values();
        self.disks
            .all
            .iter()
            .any(|disk| disk.with_worker.is_some() || !disk.writes.is_empty())
            || reads
                .chain(self.disks.again.iter().map(|(_, reading)| reading))
                .any(|reading| matches!(reading.what, Wanted::Segment(..)))
    }

    /// Moves what is too much from tier to tier; whether there was anything to do.
    pub(super) fn demote(&mut self, now: Instant) -> bool {
        let mut worked = false;
        for index in 0..self.disks.all.len() {
            worked |= self.fill_disk(index, now);
            worked |= self.clean_disk(index, now);
        }
        worked
    }

    /// Segments that compressed RAM may have before what is oldest goes to a disk.
    fn ram_target(&self) -> u32 {
        let max = self.segments_max();
        max - (max / 8).clamp(2, 16).min(max)
    }

    fn fill_disk(&mut self, index: usize, now: Instant) -> bool {
        let ram_is_over = index == 0 && self.ram.used() > self.ram_target();
        if self.disks.all[index].has_failed() {
            self.leave_failed(index);
            return false;
        }
        let disk = &mut self.disks.all[index];
        if disk.with_worker.is_some() || disk.failed_until.is_some_and(|until| until > now) {
            return false;
        }
        let has_room = disk.filling.is_some() || disk.log.available() > KEPT_FOR_CLEANING;
        if disk.queue.is_empty() && ram_is_over && has_room {
            let from = crate::log::SEGMENT_HEADER;
            let oldest = self.ram.oldest();
            disk.queue.extend(oldest.map(|segment| (Origin::Ram(segment), from)));
        }
        // What makes room here has the last free segments for itself.
        let may = |origin: &Origin| has_room || matches!(origin, Origin::Disk { tier, .. } if *tier == disk.tier);
        let Some(next) = disk.queue.iter().position(|(origin, _)| may(origin)) else {
            return false;
        };
        let (into, filling) = match disk.filling.take() {
            Some(filling) => filling,
            None => {
                if disk.writes.len() >= WRITES_MAX {
                    return false;
                }
                // What is read of a segment from before it was free must not be taken for what is there then.
                let reads = self.disks.reads.values();
                let reads = reads.chain(self.disks.again.iter().map(|(_, reading)| reading));
                let is_read = |segment: SegmentIndex| {
                    let mut reads = reads.clone().filter(|reading| reading.disk == index);
                    reads.any(|reading| reading.start / SEGMENT as u64 == u64::from(segment.get()))
                };
                let Some((segment, number)) = disk.log.take_but(is_read) else {
                    return false;
                };
                let (tier, bytes) = (disk.tier, self.disks.buffer(SEGMENT));
                let lease = Lease {
                    segment,
                    from: 0,
                    filling: number,
                };
                (DiskLease { tier, lease, bytes }, Filling::default())
            }
        };
        let disk = &mut self.disks.all[index];
        let Some((origin, at)) = disk.queue.remove(next) else {
            unreachable!("looked at above");
        };
        disk.with_worker = Some(filling);
        self.give(Job::Demote { origin, at, into });
        true
    }

    pub(super) fn demoted(
        &mut self,
        origin: Origin,
        next_at: Option<usize>,
        copied: Vec<Copied>,
        into: DiskLease,
        is_full: bool,
    ) {
        let Some(index) = self.disks.index_of(into.tier) else {
            unreachable!("a job of a disk that there is");
        };
        let disk = &mut self.disks.all[index];
        let mut filling = disk.with_worker.take().unwrap_or_default();
        filling.copied.extend(copied);
        match next_at {
            Some(at) => disk.queue.push_front((origin, at)),
            None => match origin {
                Origin::Ram(segment) => filling.origins.push(Moved::Ram(segment)),
                Origin::Disk {
                    tier, segment, bytes, ..
                } => {
                    filling.origins.push(Moved::Disk(tier, segment));
                    self.disks.give_back(bytes);
                    // The next one may fill up what is not full.
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
        disk.written_bytes += SEGMENT as u64;
        disk.writes.insert(lease.segment, filling);
        disk.store.write(lease.segment, bytes);
    }

    fn written_to_disk(&mut self, index: usize, segment: SegmentIndex, failed: Option<IoError>) {
        let disk = &mut self.disks.all[index];
        let Some(filling) = disk.writes.remove(&segment) else {
            return;
        };
        let tier = disk.tier;
        if disk.is_out_of_reach(failed.as_ref()) {
            // Nothing is wrong with it: the same is tried again.
            disk.log.untake(segment);
            disk.failed_until = Some(self.now + WRITE_AGAIN_AFTER);
        } else if let Some(error) = failed {
            disk.log.spoil(segment);
            disk.failures += 1;
            disk.failed_until = Some(self.now + WRITE_AGAIN_AFTER);
            let what = match disk.has_failed() {
                true => "it is not written to any more; what is there is read on",
                false => "nothing is lost; another place of it is tried",
            };
            tracing::error!("{error}: {what}");
        } else {
            disk.failures = 0;
            for Copied { page, from, to } in filling.copied {
                let word = self.state.word(page);
                if word.with_clean(false) != from.with_clean(false) {
                    continue;
                }
                let there = Location::In {
                    tier,
                    stored: to,
                    // It may have come back meanwhile.
                    clean: word.is_clean(),
                };
                self.set_word(page, Word::of(there));
                self.disks.all[index].log.add(to);
                self.forget_copy(word);
            }
            self.disks.all[index].log.seal(segment);
        }
        self.moved_out(filling.origins);
    }

    fn moved_out(&mut self, origins: Vec<Moved>) {
        for origin in origins {
            match origin {
                Moved::Ram(segment) => self.ram.left(segment),
                Moved::Disk(tier, segment) => {
                    if let Some(of) = self.disks.index_of(tier) {
                        self.disks.all[of].log.left(segment);
                    }
                }
            }
        }
    }

    /// Nothing goes to a disk that has failed: what was to go there stays where it is.
    fn leave_failed(&mut self, index: usize) {
        let disk = &mut self.disks.all[index];
        if disk.with_worker.is_some() {
            return;
        }
        let mut origins = Vec::new();
        if let Some((into, filling)) = disk.filling.take() {
            disk.log.spoil(into.lease.segment);
            origins.extend(filling.origins);
            self.disks.give_back(into.bytes);
        }
        for (origin, _) in std::mem::take(&mut self.disks.all[index].queue) {
            match origin {
                Origin::Ram(segment) => origins.push(Moved::Ram(segment)),
                Origin::Disk {
                    tier, segment, bytes, ..
                } => {
                    origins.push(Moved::Disk(tier, segment));
                    self.disks.give_back(bytes);
                    if let Some(of) = self.disks.index_of(tier) {
                        self.disks.all[of].is_cleaning = false;
                    }
                }
            }
        }
        self.moved_out(origins);
    }

    /// Has a segment read of which what lives is to go elsewhere.
    fn clean_disk(&mut self, index: usize, now: Instant) -> bool {
        let has_next = self.disks.all.get(index + 1).is_some_and(|next| !next.has_failed());
        let disk = &mut self.disks.all[index];
        if disk.is_cleaning || disk.rests(now) || !disk.is_short() {
            return false;
        }
        // Half a segment of dead space is worth more than another place.
        let limit = if has_next { SEGMENT as u32 / 2 } else { WORTH_CLEANING };
        let is_stuck = disk.log.available() == 0 && disk.filling.is_none();
        let emptiest = if is_stuck { None } else { disk.log.emptiest(limit) };
        let (segment, to) = match emptiest {
            Some(segment) => (segment, index),
            None if has_next => match disk.log.oldest() {
                Some(segment) => (segment, index + 1),
                None => return false,
            },
            None => return false,
        };
        disk.is_cleaning = true;
        self.disks.begin(Reading {
            disk: index,
            start: segment.start(),
            len: SEGMENT,
            tries: 0,
            what: Wanted::Segment(segment, to),
        });
        true
    }

    /// Whether the disks have room again.
    pub(super) fn disks_have_room(&self) -> bool {
        self.disks
            .all
            .first()
            .is_some_and(|disk| !disk.rests(self.now) && disk.log.available() > KEPT_FOR_CLEANING)
    }

    /// What is at a disk that there is not, or not at it, is found when this process begins.
    pub(super) fn found_on_disk(&mut self, tier: Tier, stored: Stored) -> bool {
        match self.disks.index_of(tier) {
            Some(index) => self.disks.all[index].log.found(stored),
            None => false,
        }
    }

    /// How the tiers on disks are.
    pub fn disk_status(&self) -> Vec<DiskStatus> {
        let of = |disk: &Disk| DiskStatus {
            tier: disk.tier,
            name: disk.store.name().to_owned(),
            limit_bytes: u64::from(disk.log.count()) * SEGMENT as u64,
            used_bytes: u64::from(disk.log.used()) * SEGMENT as u64,
            live_bytes: disk.log.live_bytes(),
            written_bytes: disk.written_bytes,
            read_bytes: disk.read_bytes,
            failed: disk.has_failed(),
            unreachable: disk.is_unreachable,
            encrypted: self.cipher.is_some(),
        };
        self.disks.all.iter().map(of).collect()
    }

    /// Why nothing more goes down.
    pub(super) fn why_full(&self) -> Stuck {
        match self.disks.all.first() {
            Some(disk) if disk.rests(self.now) || disk.is_unreachable => Stuck::DiskFailed,
            _ => Stuck::TiersFull,
        }
    }
}
