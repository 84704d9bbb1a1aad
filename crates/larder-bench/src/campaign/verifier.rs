//! A program that uses memory and detects any byte that differs from its writes: the test load of a pager.
//!
//! Its memory is one shared memfd. Each thread owns a contiguous range of pages, and knows the expected content of
//! each. It reads and writes the pages, lets the kernel read and write them, and discards some. Some pages are zero,
//! some repeat one word, some compress well or less well, and some are incompressible.

use std::fs::File;
use std::io::{BufRead as _, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::Random;

/// Use memory, and report pages with wrong content; reads "report", "stop" and "hot PERCENT" (restricts further
/// accesses to that share of the memory) from standard input
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Amount of memory, in MiB
    #[arg(long, default_value_t = 128)]
    pub mib: usize,
    /// Number of threads
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Share of the memory that most accesses go to, in %
    #[arg(long, default_value_t = 25)]
    pub hot: u64,
    /// Omit pages that cannot be compressed
    #[arg(long)]
    pub compressible: bool,
    /// Use only pages that cannot be compressed
    #[arg(long, conflicts_with = "compressible")]
    pub incompressible: bool,
    /// Seed of all random choices
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

/// Duration above which an access is a stall.
const STALL_MIN: Duration = Duration::from_millis(1);

/// Results and controls that the threads share.
#[derive(Default)]
struct Findings {
    accesses: AtomicU64,
    mismatches: AtomicU64,
    stop: AtomicBool,
    /// Share of the memory that is accessed, in %; 0: all of it.
    only: AtomicU64,
    stalls: Mutex<Vec<Duration>>,
}

struct Memory {
    file: File,
    base: *mut u8,
}

// SAFETY: each thread accesses only its own pages.
unsafe impl Send for Memory {}
// SAFETY: each thread accesses only its own pages.
unsafe impl Sync for Memory {}

/// Runs until it receives "stop", then verifies every page once more.
///
/// # Errors
/// If a page has wrong content, or a system call fails.
pub fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let bytes = arguments.mib << 20;
    let memory = Arc::new(Memory::new(bytes)?);
    let findings = Arc::new(Findings::default());
    let pages = bytes / PAGE / arguments.threads;
    let ready = Arc::new(std::sync::Barrier::new(arguments.threads + 1));
    let threads: Vec<_> = (0..arguments.threads)
        .map(|index| {
            let mut worker = Worker {
                memory: Arc::clone(&memory),
                findings: Arc::clone(&findings),
                first: index * pages,
                generations: vec![1; pages],
                hot: (pages as u64 * arguments.hot / 100).max(1),
                random: Random::new(arguments.seed * 1000 + index as u64 + 1),
                compressible: arguments.compressible,
                incompressible: arguments.incompressible,
                expected: [0; WORDS],
                copied: File::from(rustix::fs::memfd_create("copied", MemfdFlags::CLOEXEC)?),
            };
            let ready = Arc::clone(&ready);
            std::thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
                (0..pages).for_each(|page| worker.write(page));
                ready.wait();
                worker.work()
            })
        })
        .collect::<Result<_, _>>()?;
    ready.wait();
    println!("\nready {}", std::process::id());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line == "stop" {
            break;
        }
        if let Some(percent) = line.strip_prefix("hot ").and_then(|percent| percent.parse().ok()) {
            findings.only.store(percent, Ordering::Relaxed);
            continue;
        }
        let stalls = std::mem::take(&mut *findings.stalls.lock().unwrap_or_else(PoisonError::into_inner));
        println!(
            "\nreport accesses={} mismatches={} stalls={} longest_us={}",
            findings.accesses.load(Ordering::Relaxed),
            findings.mismatches.load(Ordering::Relaxed),
            stalls.len(),
            stalls.iter().max().map_or(0, Duration::as_micros),
        );
        std::io::stdout().flush()?;
    }
    findings.stop.store(true, Ordering::Relaxed);
    for thread in threads {
        match thread.join() {
            Ok(worked) => worked?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    let mismatches = findings.mismatches.load(Ordering::Relaxed);
    println!("\nverified accesses={} mismatches={mismatches}", findings.accesses.load(Ordering::Relaxed));
    ensure!(mismatches == 0, "{mismatches} pages had wrong content");
    Ok(())
}

impl Memory {
    fn new(bytes: usize) -> anyhow::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("verified", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes as u64)?;
        // SAFETY: a new mapping, at an address that the kernel chooses; it lives as long as the process.
        let base = unsafe {
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, flags, &file, 0)?
        };
        Ok(Self { file, base: base.cast() })
    }

    /// Returns the page with this number.
    ///
    /// # Safety
    /// No other reference to the page may exist.
    #[allow(clippy::mut_from_ref)]
    unsafe fn page(&self, page: usize) -> &mut [u64; WORDS] {
        // SAFETY: within the mapping; not shared, by this function's contract.
        unsafe { &mut *self.base.add(page * PAGE).cast() }
    }
}

struct Worker {
    memory: Arc<Memory>,
    findings: Arc<Findings>,
    /// The worker's first page.
    first: usize,
    /// Generations of the worker's pages; 0: discarded, and reads as zeros.
    generations: Vec<u32>,
    hot: u64,
    random: Random,
    compressible: bool,
    incompressible: bool,
    expected: [u64; WORDS],
    /// File that the kernel copies pages from and to.
    copied: File,
}

impl Worker {
    /// Computes the expected content of a page.
    fn expect(&mut self, page: usize) {
        let page = self.first + page;
        let generation = self.generations[page - self.first];
        if generation == 0 {
            self.expected.fill(0);
            return;
        }
        let seed = (page as u64) << 24 ^ u64::from(generation);
        let mut random = Random::new(seed);
        let kinds = if self.compressible { 7 } else { 8 };
        // Number of random words in the page.
        let count = match (page as u64 + u64::from(generation)) % kinds {
            _ if self.incompressible => WORDS,
            0 => {
                self.expected.fill(random.below(u64::MAX));
                return;
            }
            1 => 0,
            2..=4 => WORDS / 8,
            5 | 6 => WORDS / 3,
            _ => WORDS,
        };
        self.expected.fill(0);
        for word in &mut self.expected[..count] {
            *word = random.below(u64::MAX);
        }
        if count > 0 {
            self.expected[WORDS - 1] = seed;
        }
    }

    #[allow(clippy::mut_from_ref)]
    fn page(&self, page: usize) -> &mut [u64; WORDS] {
        // SAFETY: each page belongs to one thread.
        unsafe { self.memory.page(self.first + page) }
    }

    fn write(&mut self, page: usize) {
        self.expect(page);
        *self.page(page) = self.expected;
    }

    fn verify(&mut self, page: usize) {
        self.expect(page);
        let found = self.page(page);
        if *found != self.expected {
            let word = found.iter().zip(&self.expected).position(|(one, other)| one != other);
            let word = word.unwrap_or_default();
            println!(
                "\nmismatch: page {:#x}, generation {}, word {word}: {:#x} instead of {:#x}",
                self.first + page,
                self.generations[page],
                found[word],
                self.expected[word]
            );
            self.findings.mismatches.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn work(&mut self) -> anyhow::Result<()> {
        while !self.findings.stop.load(Ordering::Relaxed) {
            let only = self.findings.only.load(Ordering::Relaxed);
            let page = match self.random.below(10) {
                _ if only > 0 => {
                    let pages = self.generations.len() as u64;
                    self.random.below((pages * only / 100).clamp(1, pages))
                }
                0..8 => self.random.below(self.hot),
                _ => self.random.below(self.generations.len() as u64),
            } as usize;
            let started = Instant::now();
            match self.random.below(100) {
                0..60 => self.verify(page),
                60..90 => {
                    self.verify(page);
                    self.generations[page] += 1;
                    self.write(page);
                }
                90..98 => {
                    self.verify(page);
                    self.generations[page] += 1;
                    self.expect(page);
                    let mut copied = &self.copied;
                    copied.seek(SeekFrom::Start(0))?;
                    // SAFETY: the bytes of an array of words.
                    copied.write_all(unsafe { &*self.expected.as_ptr().cast::<[u8; PAGE]>() })?;
                    copied.seek(SeekFrom::Start(0))?;
                    // SAFETY: the page belongs to this thread; any bytes are valid words.
                    copied.read_exact(unsafe { &mut *self.page(page).as_mut_ptr().cast::<[u8; PAGE]>() })?;
                }
                _ => self.give_up(page)?,
            }
            self.findings.accesses.fetch_add(1, Ordering::Relaxed);
            let elapsed = started.elapsed();
            if elapsed > STALL_MIN {
                let mut stalls = self.findings.stalls.lock().unwrap_or_else(PoisonError::into_inner);
                stalls.push(elapsed);
            }
        }
        (0..self.generations.len()).for_each(|page| self.verify(page));
        Ok(())
    }

    /// Discards some pages as QEMU does: punches a hole in the file, and calls madvise.
    fn give_up(&mut self, page: usize) -> anyhow::Result<()> {
        let count = (1 + self.random.below(16) as usize).min(self.generations.len() - page);
        let (at, bytes) = ((self.first + page) * PAGE, count * PAGE);
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.memory.file, how, at as u64, bytes as u64)
            .with_context(|| format!("discarding pages of descriptor {}", self.memory.file.as_raw_fd()))?;
        // SAFETY: pages of this thread's own, whose contents it discards.
        unsafe { rustix::mm::madvise(self.memory.base.add(at).cast(), bytes, Advice::LinuxDontNeed)? };
        self.generations[page..page + count].fill(0);
        Ok(())
    }
}
