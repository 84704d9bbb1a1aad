//! A guest without QEMU that checks its data: it writes, reads and flushes as much as its queues accept, and tracks
//! the expected state of each sector.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::Random;
use super::books::{Completed, ExpectedDisk, SECTOR, contents};
use super::front_end::FrontEnd;
use super::front_end::queue::Request;
use super::front_end::ring::Buffer;

/// Bytes of the disk.
pub const DISK: u64 = 16 << 20;
const SECTORS: u64 = DISK / SECTOR as u64;
/// Sectors at the disk's beginning that are accessed more often than the rest.
const HOT: u64 = SECTORS / 8;
/// Sectors of the most frequent request, and of the longest.
const BLOCK: u64 = 8;
const LONGEST: u64 = 128;
const BUFFER: usize = LONGEST as usize * SECTOR;
/// Requests in flight on each queue.
const DEPTH: usize = 16;
const LIMIT: Duration = Duration::from_secs(240);

enum Task {
    Write {
        sectors: Range<u64>,
        number: u64,
        buffer: usize,
    },
    Read {
        before: Completed,
        buffer: usize,
    },
    /// `covered` has each changed sector's last completed write at the time when the flush was sent.
    Flush {
        covered: Completed,
    },
}

/// A guest that tracks the expected state of its disk.
pub(super) struct Client {
    pub(super) guest: FrontEnd,
    pub(super) books: ExpectedDisk,
    tasks: BTreeMap<(usize, u16), Task>,
    buffers: Vec<usize>,
    next_number: u64,
    since_flush: BTreeSet<u64>,
    pub(super) done: Done,
}

/// Counts of completed requests.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) writes: u64,
    pub(super) reads: u64,
    pub(super) flushes: u64,
}

impl Client {
    /// Creates a client of a zeroed disk.
    pub(super) fn new(guest: FrontEnd) -> Self {
        Self {
            buffers: (0..DEPTH * guest.queues.len()).collect(),
            guest,
            books: ExpectedDisk::new(SECTORS),
            tasks: BTreeMap::new(),
            next_number: 1,
            since_flush: BTreeSet::new(),
            done: Done::default(),
        }
    }

    /// Number of requests in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.tasks.len()
    }

    fn buffer_address(&self, buffer: usize) -> u64 {
        self.guest.data() + (buffer * BUFFER) as u64
    }

    fn busy(&self, queue: usize) -> usize {
        self.tasks.range((queue, 0)..=(queue, u16::MAX)).count()
    }

    /// Fills every queue: mostly with writes, some reads, and an occasional flush.
    pub(super) fn submit(&mut self, random: &mut Random) {
        for queue in 0..self.guest.queues.len() {
            for _ in self.busy(queue)..DEPTH {
                match random.below(12) {
                    0 => self.submit_flush(queue),
                    1..4 => self.submit_read(queue, random_sectors(random)),
                    _ => self.submit_write(queue, random),
                }
            }
            self.guest.queues[queue].go();
        }
    }

    fn submit_write(&mut self, queue: usize, random: &mut Random) {
        let sectors = loop {
            let sectors = random_sectors(random);
            // Only one write at a time goes to a sector: the order of two concurrent ones is undefined.
            if !self.books.has_writes_in_flight(&sectors) {
                break sectors;
            }
        };
        let number = self.next_number;
        self.next_number += 1;
        self.books.begin(&sectors, number);
        let buffer = self.buffers.pop().expect("a buffer for each request in flight");
        let address = self.buffer_address(buffer);
        let bytes = contents(&sectors, number);
        self.guest.memory.write(address, &bytes);
        let len = bytes.len() as u32;
        let out = [Buffer { address, len }];
        let id = self.guest.queues[queue].add(&Request::write(sectors.start, &out));
        let task = Task::Write { sectors, number, buffer };
        self.tasks.insert((queue, id), task);
    }

    fn submit_read(&mut self, queue: usize, sectors: Range<u64>) {
        let buffer = self.buffers.pop().expect("a buffer for each request in flight");
        let (address, len) = (self.buffer_address(buffer), (sectors.end - sectors.start) as u32 * SECTOR as u32);
        let into = [Buffer { address, len }];
        let id = self.guest.queues[queue].add(&Request::read(sectors.start, &into));
        let before = self.books.completed(sectors);
        self.tasks.insert((queue, id), Task::Read { before, buffer });
    }

    fn submit_flush(&mut self, queue: usize) {
        let changed = std::mem::take(&mut self.since_flush);
        let covered = self.books.completed(changed.into_iter());
        let id = self.guest.queues[queue].add(&Request::flush());
        self.tasks.insert((queue, id), Task::Flush { covered });
    }

    /// Processes all completed requests. Returns whether there were any.
    pub(super) fn collect(&mut self) -> anyhow::Result<bool> {
        let mut any = false;
        for queue in 0..self.guest.queues.len() {
            while let Some(completion) = self.guest.queues[queue].try_complete() {
                any = true;
                ensure!(completion.status == 0, "a request failed with status {}", completion.status);
                let task = self.tasks.remove(&(queue, completion.id));
                self.complete(task.context("a completion of an unknown request")?)?;
            }
        }
        Ok(any)
    }

    fn complete(&mut self, task: Task) -> anyhow::Result<()> {
        match task {
            Task::Write { sectors, number, buffer } => {
                self.books.complete(&sectors, number);
                self.buffers.push(buffer);
                self.since_flush.extend(sectors);
                self.done.writes += 1;
            }
            Task::Read { before, buffer } => {
                let address = self.buffer_address(buffer);
                let bytes = self.guest.memory.read_vec(address, before.len() * SECTOR);
                self.books.compare_read(&before, &bytes)?;
                self.buffers.push(buffer);
                self.done.reads += 1;
            }
            Task::Flush { covered } => {
                self.books.flush(covered);
                self.done.flushes += 1;
            }
        }
        Ok(())
    }

    /// Waits for a completion, with interrupts enabled on all queues. A lost interrupt is an error.
    pub(super) fn wait(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            for queue in &mut self.guest.queues {
                queue.ring.want_interrupt();
            }
            if self.collect()? {
                return Ok(());
            }
            let busy = (0..self.guest.queues.len()).find(|queue| self.busy(*queue) > 0);
            let queue = busy.context("nothing is in flight")?;
            self.guest.queues[queue]
                .wait_for_interrupt(deadline)
                .context("no completion or interrupt arrived in time")?;
        }
    }

    /// Keeps the queues full for the duration `duration`, and leaves requests in flight.
    pub(super) fn work(&mut self, duration: Duration, random: &mut Random) -> anyhow::Result<()> {
        let end = Instant::now() + duration;
        while Instant::now() < end {
            self.submit(random);
            self.wait()?;
        }
        Ok(())
    }

    /// Waits until all requests have completed.
    pub(super) fn finish(&mut self) -> anyhow::Result<()> {
        while !self.tasks.is_empty() {
            self.wait()?;
        }
        Ok(())
    }

    /// Waits until all requests have completed, then flushes.
    pub(super) fn settle(&mut self) -> anyhow::Result<()> {
        self.finish()?;
        self.submit_flush(0);
        self.guest.queues[0].go();
        self.wait()
    }

    /// Reads the whole disk, block by block in a random order, with no writes in flight.
    pub(super) fn read_all(&mut self, random: &mut Random) -> anyhow::Result<()> {
        self.finish()?;
        let mut blocks: Vec<u64> = (0..SECTORS / BLOCK).collect();
        for index in (1..blocks.len()).rev() {
            blocks.swap(index, random.below(index as u64 + 1) as usize);
        }
        for block in blocks {
            while self.busy(0) >= DEPTH {
                self.guest.queues[0].go();
                self.wait()?;
            }
            self.submit_read(0, block * BLOCK..(block + 1) * BLOCK);
        }
        self.guest.queues[0].go();
        self.finish()
    }
}

/// Returns random sectors for a request: mostly one block, half of the time in the hot area.
fn random_sectors(random: &mut Random) -> Range<u64> {
    let area_sectors = [HOT, SECTORS][random.below(2) as usize];
    match random.below(4) {
        0 => {
            let count = 1 + random.below(LONGEST);
            let start = random.below(area_sectors - count + 1);
            start..start + count
        }
        _ => {
            let start = random.below(area_sectors / BLOCK) * BLOCK;
            start..start + BLOCK
        }
    }
}
