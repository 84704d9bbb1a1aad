//! A server is killed at random moments under a client that keeps books of what it wrote and what it flushed. After
//! each kill the image itself is compared, and the next server must answer what was in flight.
//!
//! What the image may hold: for each sector the last write that had completed, or one that was under way. (The host
//! does not crash here, so more must be there than what was flushed; the books tell both apart.) If it is Larder that is
//! killed, the image is compared before the next one starts. A remote server may lose what was not flushed, and Larder
//! repeats it: the image is compared when all is answered and flushed. A qcow2 image shows what was flushed at once, and
//! the rest after the next server has flushed it; `qemu-img check` must find no error in it at either time.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::Random;
use super::disk::{self, Disk, Format, Victim};
use super::front_end::queue::Request;
use super::front_end::ring::Buffer;
use super::front_end::{FrontEnd, Options};
use super::pauses::Pauses;

const SECTOR: usize = 512;
const BLOCK: usize = 4096;
const BLOCKS: u64 = 4096;
/// Requests in flight on each queue.
const DEPTH: usize = 16;
const LIMIT: Duration = Duration::from_secs(60);

/// What the client knows of one block, in numbers of writes. Higher is later.
#[derive(Clone, Copy, Default)]
struct Book {
    completed: u64,
    flushed: u64,
    under_way: Option<u64>,
}

enum Task {
    Write {
        block: u64,
        number: u64,
        buffer: usize,
    },
    /// With each block's last completed write when the flush was sent.
    Flush {
        covered: Vec<(u64, u64)>,
    },
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Report {
    /// Servers killed.
    pub kills: u32,
    /// Writes acknowledged.
    pub writes: u64,
    /// Flushes acknowledged.
    pub flushes: u64,
    /// Requests that were in flight when a server was killed.
    pub interrupted: u64,
    /// From the kill to the first answer with the next server, its start included.
    pub pauses: Pauses,
}

impl Report {
    /// Both together.
    pub fn add(&mut self, other: Self) {
        self.kills += other.kills;
        self.writes += other.writes;
        self.flushes += other.flushes;
        self.interrupted += other.interrupted;
        self.pauses.add(other.pauses);
    }
}

struct Client {
    guest: FrontEnd,
    books: Vec<Book>,
    tasks: BTreeMap<(usize, u16), Task>,
    buffers: Vec<usize>,
    next_number: u64,
    since_flush: Vec<u64>,
    report: Report,
}

/// The bytes of a block as write `number` makes them: each sector says who made it.
fn contents(block: u64, number: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BLOCK);
    for sector in 0..(BLOCK / SECTOR) as u64 {
        let mut words = [block, number, sector].into_iter();
        let mut filler = block ^ number.rotate_left(17) ^ sector;
        for _ in 0..SECTOR / 8 {
            filler = filler
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            bytes.extend(words.next().unwrap_or(filler).to_le_bytes());
        }
    }
    bytes
}

impl Client {
    fn buffer_address(&self, buffer: usize) -> u64 {
        self.guest.data() + (buffer * BLOCK) as u64
    }

    /// Keeps every queue full: mostly writes, now and then a flush.
    fn submit(&mut self, random: &mut Random) {
        for queue in 0..self.guest.queues.len() {
            let mut busy = self.tasks.range((queue, 0)..=(queue, u16::MAX)).count();
            while busy < DEPTH {
                self.submit_one(queue, random);
                busy += 1;
            }
            self.guest.queues[queue].go();
        }
    }

    fn submit_one(&mut self, queue: usize, random: &mut Random) {
        if random.below(12) == 0 {
            self.submit_flush(queue);
            return;
        }
        let block = loop {
            let block = random.below(BLOCKS);
            // One write at a time to a block: the order of two is nobody's promise.
            if self.books[block as usize].under_way.is_none() {
                break block;
            }
        };
        let number = self.next_number;
        self.next_number += 1;
        self.books[block as usize].under_way = Some(number);
        let buffer = self.buffers.pop().expect("one for each request in flight");
        let address = self.buffer_address(buffer);
        self.guest.memory.write(address, &contents(block, number));
        let out = [Buffer {
            address,
            len: BLOCK as u32,
        }];
        let id = self.guest.queues[queue].add(&Request::write(block * (BLOCK / SECTOR) as u64, &out));
        self.tasks.insert((queue, id), Task::Write { block, number, buffer });
    }

    fn submit_flush(&mut self, queue: usize) {
        let changed = std::mem::take(&mut self.since_flush);
        let covered = changed
            .iter()
            .map(|block| (*block, self.books[*block as usize].completed))
            .collect();
        let id = self.guest.queues[queue].add(&Request::flush());
        self.tasks.insert((queue, id), Task::Flush { covered });
    }

    /// Takes what has been answered; whether there was anything.
    fn collect(&mut self) -> anyhow::Result<bool> {
        let mut any = false;
        for queue in 0..self.guest.queues.len() {
            while let Some(done) = self.guest.queues[queue].try_complete() {
                any = true;
                ensure!(done.status == 0, "a request failed with status {}", done.status);
                match self.tasks.remove(&(queue, done.id)).context("an answer to nothing")? {
                    Task::Write { block, number, buffer } => {
                        let book = &mut self.books[block as usize];
                        book.completed = number;
                        book.under_way = None;
                        self.buffers.push(buffer);
                        self.since_flush.push(block);
                        self.report.writes += 1;
                    }
                    Task::Flush { covered } => {
                        for (block, number) in covered {
                            let book = &mut self.books[block as usize];
                            book.flushed = book.flushed.max(number);
                        }
                        self.report.flushes += 1;
                    }
                }
            }
        }
        Ok(any)
    }

    /// Waits for any answer, by the interrupt of queue 0 or 1: a lost one is an error.
    fn wait(&mut self) -> anyhow::Result<()> {
        let give_up = Instant::now() + LIMIT;
        loop {
            for queue in &mut self.guest.queues {
                queue.ring.want_interrupt();
            }
            if self.collect()? {
                return Ok(());
            }
            let busy = (0..self.guest.queues.len())
                .find(|queue| self.tasks.range((*queue, 0)..=(*queue, u16::MAX)).count() > 0);
            let queue = busy.context("nothing is in flight")?;
            self.guest.queues[queue]
                .wait_for_interrupt(give_up)
                .context("an answer, or its interrupt, never came")?;
        }
    }

    /// Waits for all answers, and for a flush of all.
    fn settle(&mut self) -> anyhow::Result<()> {
        while !self.tasks.is_empty() {
            self.wait()?;
        }
        self.submit_flush(0);
        self.guest.queues[0].go();
        self.wait()
    }

    /// Compares what a killed server has left with the books.
    fn compare_after_kill(&self, format: Format, image: &Path) -> anyhow::Result<()> {
        let bytes = contents_of(format, image)?;
        match format {
            Format::Raw => self.compare(&bytes),
            Format::Qcow2 => self.compare_flushed(&bytes),
        }
    }

    /// Compares an image that has all that was flushed, and of what came later as much as it likes.
    fn compare_flushed(&self, bytes: &[u8]) -> anyhow::Result<()> {
        for (block, book) in (0..).zip(&self.books) {
            let at = block as usize * BLOCK;
            for (index, got) in bytes[at..at + BLOCK].chunks(SECTOR).enumerate() {
                let found = u64::from_le_bytes(got[8..16].try_into()?);
                let known = found <= book.completed || Some(found) == book.under_way;
                let whole = match found {
                    0 => got.iter().all(|byte| *byte == 0),
                    _ => contents(block, found)[index * SECTOR..][..SECTOR] == *got,
                };
                ensure!(
                    whole && known && found >= book.flushed,
                    "block {block}, sector {index} holds write {found}; flushed was {}, completed {}, under way {:?}",
                    book.flushed,
                    book.completed,
                    book.under_way
                );
            }
        }
        Ok(())
    }

    /// Compares the disk's bytes with the books.
    fn compare(&self, disk: &[u8]) -> anyhow::Result<()> {
        for (block, book) in (0..).zip(&self.books) {
            let bytes = &disk[block as usize * BLOCK..][..BLOCK];
            let allowed = [Some(book.completed), book.under_way];
            let wanted: Vec<Vec<u8>> = allowed
                .into_iter()
                .flatten()
                .map(|number| {
                    if number == 0 {
                        vec![0; BLOCK]
                    } else {
                        contents(block, number)
                    }
                })
                .collect();
            for (sector, got) in bytes.chunks(SECTOR).enumerate() {
                let at = sector * SECTOR;
                if wanted.iter().any(|wanted| &wanted[at..at + SECTOR] == got) {
                    continue;
                }
                let found = u64::from_le_bytes(got[8..16].try_into()?);
                bail!(
                    "block {block}, sector {sector} holds write {found}; flushed was {}, completed {}, under way {:?}",
                    book.flushed,
                    book.completed,
                    book.under_way
                );
            }
        }
        Ok(())
    }
}

/// The disk's bytes.
fn contents_of(format: Format, image: &Path) -> anyhow::Result<Vec<u8>> {
    match format {
        Format::Raw => Ok(std::fs::read(image)?),
        Format::Qcow2 => disk::qcow2_contents(image),
    }
}

/// Kills the victim `count` times.
///
/// # Errors
/// A write was lost, a request failed, an answer never came, or a server did not start.
pub fn run<'a>(
    victim: impl Into<Victim<'a>>,
    image: &'a Path,
    folder: &Path,
    options: Options,
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let victim = victim.into();
    disk::create(victim.format, image, BLOCKS * BLOCK as u64)?;
    let mut disk = Disk::start(victim, image, folder)?;
    let guest = FrontEnd::connect(&disk.socket, options)?;
    let mut client = Client {
        buffers: (0..DEPTH * guest.queues.len()).collect(),
        guest,
        books: vec![Book::default(); BLOCKS as usize],
        tasks: BTreeMap::new(),
        next_number: 1,
        since_flush: Vec::new(),
        report: Report::default(),
    };
    for _ in 0..count {
        let life = Instant::now() + Duration::from_micros(random.below(60_000));
        while Instant::now() < life {
            client.submit(random);
            client.wait()?;
        }
        client.submit(random);
        let killed = Instant::now();
        disk.kill()?;
        let begin = Instant::now();
        client.collect()?;
        client.report.interrupted += client.tasks.len() as u64;
        if !disk.is_remote() {
            client.compare_after_kill(disk.format(), image)?;
        }
        let compared = begin.elapsed();
        disk.restart()?;
        if disk.is_remote() {
            disk.wait_until_connected()?;
        } else {
            client.guest.reconnect(UnixStream::connect(&disk.socket)?)?;
        }
        if client.tasks.is_empty() {
            client.submit(random);
        }
        client.wait()?;
        // The comparison is ours, not part of the pause.
        client.report.pauses.push(killed.elapsed() - compared);
        client.report.kills += 1;
        // What is committed by a flush can be seen; before, only the next server knew of it.
        if disk.is_remote() || disk.format() == Format::Qcow2 {
            client.settle()?;
            client.compare(&contents_of(disk.format(), image)?)?;
        }
    }
    client.settle()?;
    client.compare(&contents_of(disk.format(), image)?)?;
    disk.stop()?;
    Ok(client.report)
}
