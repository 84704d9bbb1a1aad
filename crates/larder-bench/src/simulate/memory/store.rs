//! A disk for pages: it keeps its content as long as the host runs, completes requests in any order, fails, and
//! corrupts data.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use larder_block::{AlignedBuf, ByteRange, Failure, IoError, Operation};
use larder_memory::entry::{CopyLocation, Tier};
use larder_memory::segment_log::{SEGMENT_BYTES, SegmentIndex, data_at};
use larder_memory::store::{ReadId, SegmentStore, StoreCompletion};
use larder_memory::units::PageIndex;

use super::world::{Moment, World};

/// The disk's state that outlives a pager.
pub(super) struct StoreMedium {
    tier: Tier,
    segments: u32,
    contents: BTreeMap<u32, Box<[u8]>>,
    pending: Vec<Request>,
    finished: VecDeque<StoreCompletion>,
    /// Number of failures of each read for the current pager.
    failures: BTreeMap<(u64, usize), u32>,
    /// True if all writes fail.
    pub(super) is_dead: bool,
    /// True if requests no longer fail, except on a dead disk.
    pub(super) is_healed: bool,
    pub(super) writes: u64,
}

enum Request {
    Write(SegmentIndex, AlignedBuf),
    Read(u64, usize, AlignedBuf, ReadId),
}

/// A disk, as a pager sees it.
#[derive(Clone)]
pub(super) struct Disk {
    world: Rc<World>,
    medium: Rc<RefCell<StoreMedium>>,
}

impl StoreMedium {
    pub(super) fn new(tier: Tier, segments: u32) -> Rc<RefCell<Self>> {
        Rc::new(RefCell::new(Self {
            tier,
            segments,
            contents: BTreeMap::new(),
            pending: Vec::new(),
            finished: VecDeque::new(),
            failures: BTreeMap::new(),
            is_dead: false,
            is_healed: false,
            writes: 0,
        }))
    }

    pub(super) fn tier(&self) -> Tier {
        self.tier
    }

    /// Flips a bit of the stored byte at this offset of the log.
    pub(super) fn flip_bit(&mut self, at: u64, bit: u8) -> bool {
        let segment = self.contents.get_mut(&((at / SEGMENT_BYTES as u64) as u32));
        let Some(byte) = segment.and_then(|bytes| bytes.get_mut((at % SEGMENT_BYTES as u64) as usize)) else {
            return false;
        };
        *byte ^= 1 << bit;
        true
    }

    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.finished.is_empty()
    }
}

/// Returns the stored copies of a tier's pages, according to the state: page, offset and length.
pub(super) fn stored_in(world: &World, tier: Tier) -> Vec<(PageIndex, u64, u64)> {
    let memory = world.memory.borrow();
    let Some((state, _)) = &*memory else { return Vec::new() };
    let pages = (0..world.kernel.borrow().pages()).map(PageIndex::new);
    pages
        .filter_map(|page| match state.word(page).decode() {
            Some(CopyLocation::InTier { tier: of, object: stored, .. }) if of == tier => {
                Some((page, data_at(stored.offset), u64::from(stored.len)))
            }
            _ => None,
        })
        .collect()
}

impl Disk {
    pub(super) fn new(world: &Rc<World>, medium: &Rc<RefCell<StoreMedium>>) -> Self {
        Self { world: Rc::clone(world), medium: Rc::clone(medium) }
    }

    /// Completes a random pending request.
    pub(super) fn complete_one(world: &World, medium: &Rc<RefCell<StoreMedium>>) {
        let request = {
            let mut medium = medium.borrow_mut();
            if medium.pending.is_empty() {
                return;
            }
            let index = world.below(medium.pending.len() as u64) as usize;
            medium.pending.swap_remove(index)
        };
        match request {
            Request::Write(segment, bytes) => {
                let fails = {
                    let medium = medium.borrow();
                    medium.is_dead || !medium.is_healed && world.chance(world.shape.write_failures_per_mille)
                };
                let mut medium = medium.borrow_mut();
                medium.put(
                    segment,
                    &bytes,
                    if fails { world.below(SEGMENT_BYTES as u64) as usize } else { SEGMENT_BYTES },
                );
                medium.writes += 1;
                let failed = fails.then(|| error(medium.tier, Operation::Write, segment.start(), SEGMENT_BYTES));
                world.log(|| format!("{:?} has written {segment:?}, failed: {fails}", medium.tier));
                medium.finished.push_back(StoreCompletion::Written { segment, bytes, failed });
            }
            Request::Read(start, len, mut bytes, ticket) => {
                let fails = !medium.borrow().is_healed && world.chance(world.shape.read_failures_per_mille);
                let tier = medium.borrow().tier;
                world.log(|| format!("{tier:?} has read {len} bytes at {start}, failed: {fails}"));
                if fails {
                    let failures = {
                        let mut medium = medium.borrow_mut();
                        let failures = medium.failures.entry((start, len)).or_default();
                        *failures += 1;
                        *failures
                    };
                    if failures >= 4 {
                        record_unreadable(world, tier, start, len);
                    }
                } else {
                    medium.borrow().get(start, &mut bytes[..len]);
                }
                let failed = fails.then(|| error(tier, Operation::Read, start, len));
                let read = StoreCompletion::Read { read_id: ticket, bytes, failed };
                medium.borrow_mut().finished.push_back(read);
            }
        }
    }

    /// Handles the death of the pager: each write in flight is complete, partial, or lost.
    pub(super) fn forget(world: &World, medium: &Rc<RefCell<StoreMedium>>) {
        let mut medium = medium.borrow_mut();
        for request in std::mem::take(&mut medium.pending) {
            if let Request::Write(segment, bytes) = request {
                let written = world.below(SEGMENT_BYTES as u64 + 1) as usize;
                medium.put(segment, &bytes, written);
            }
        }
        medium.finished.clear();
        medium.failures.clear();
    }
}

fn error(tier: Tier, operation: Operation, start: u64, len: usize) -> IoError {
    let name: Rc<str> = format!("{tier:?}").into();
    let failure = Failure::Os(libc::EIO);
    IoError::new(&name, operation, ByteRange::new(start, len as u64), failure)
}

/// Records that the pages in this range may be lost.
fn record_unreadable(world: &World, tier: Tier, start: u64, len: usize) {
    for (page, at, bytes) in stored_in(world, tier) {
        if at < start + len as u64 && start < at + bytes {
            world.process.borrow_mut().oracle.damaged(page);
        }
    }
}

impl StoreMedium {
    fn put(&mut self, segment: SegmentIndex, bytes: &AlignedBuf, len: usize) {
        let into = self.contents.entry(segment.get()).or_insert_with(|| vec![0; SEGMENT_BYTES].into_boxed_slice());
        into[..len].copy_from_slice(&bytes[..len]);
    }

    fn get(&self, start: u64, into: &mut [u8]) {
        let within = (start % SEGMENT_BYTES as u64) as usize;
        match self.contents.get(&((start / SEGMENT_BYTES as u64) as u32)) {
            Some(bytes) => into.copy_from_slice(&bytes[within..within + into.len()]),
            None => into.fill(0),
        }
    }
}

impl SegmentStore for Disk {
    fn name(&self) -> &str {
        "disk"
    }

    fn segments(&self) -> u32 {
        self.medium.borrow().segments
    }

    fn block_bytes(&self) -> usize {
        512
    }

    fn write(&self, segment: SegmentIndex, bytes: AlignedBuf) {
        self.world.point();
        let tier = self.medium.borrow().tier;
        self.world.log(|| format!("pager writes {segment:?} to {tier:?}"));
        let (from, to) = (segment.start(), segment.start() + SEGMENT_BYTES as u64);
        if let Some((page, ..)) = stored_in(&self.world, tier).iter().find(|(_, at, _)| (from..to).contains(at)) {
            self.world.fail(format!("{segment:?} of {tier:?} is overwritten, although it stores {page:?}"));
        }
        let mut medium = self.medium.borrow_mut();
        let overlaps = medium.pending.iter().any(|request| match request {
            Request::Write(of, _) => *of == segment,
            Request::Read(start, len, ..) => *start < to && from < *start + *len as u64,
        });
        if segment.get() >= medium.segments || overlaps {
            self.world.fail(format!("{segment:?} of {tier:?} is written while a request uses it, or does not exist"));
        }
        medium.pending.push(Request::Write(segment, bytes));
        drop(medium);
        self.world.point();
    }

    fn read(&self, start: u64, len: usize, bytes: AlignedBuf, ticket: ReadId) {
        self.world.point();
        let mut medium = self.medium.borrow_mut();
        let is_valid = start.is_multiple_of(512)
            && len.is_multiple_of(512)
            && len <= bytes.len()
            && start + len as u64 <= u64::from(medium.segments) * SEGMENT_BYTES as u64;
        if !is_valid {
            self.world.fail(format!("the read of {len} bytes at {start} is invalid"));
        }
        let is_written = medium.pending.iter().any(|request| match request {
            Request::Write(segment, _) => u64::from(segment.get()) == start / SEGMENT_BYTES as u64,
            Request::Read(..) => false,
        });
        if is_written {
            self.world.fail(format!("{len} bytes at {start} are read while they are written"));
        }
        medium.pending.push(Request::Read(start, len, bytes, ticket));
    }

    fn next_completion(&self) -> Option<StoreCompletion> {
        self.world.point();
        let finished = self.medium.borrow_mut().finished.pop_front();
        if finished.is_some() {
            self.world.comes(Moment::ToldOfDisk);
        }
        finished
    }
}
