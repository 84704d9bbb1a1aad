//! A program that accesses pages of its memory and reports the latency of each access: the load of `memory --part
//! faults`.

use std::io::{BufRead as _, Write as _};
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use larder_memory::userfaultfd::{
    AddressRange, FillResult, REQUIRED_FEATURE_BITS, RawUffdMessage, UffdMessage, Userfaultfd,
};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::campaign::Random;

/// Access pages as told on standard input ("floor COUNT", "random COUNT", "sequential COUNT"), and report latencies
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Amount of memory, in MiB
    #[arg(long, default_value_t = 256)]
    mib: usize,
}

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

/// Shared memory.
pub(super) struct Memory {
    base: *mut u64,
    pages: usize,
    _file: OwnedFd,
}

// SAFETY: only the thread that owns the value reads and writes the memory.
unsafe impl Send for Memory {}

impl Memory {
    pub(super) fn new(name: &str, pages: usize) -> anyhow::Result<Self> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, (pages * PAGE) as u64)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), pages * PAGE, protection, MapFlags::SHARED, file.as_fd(), 0)
        }?;
        Ok(Self { base: base.cast(), pages, _file: file })
    }

    /// Returns the number of pages.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    /// Writes a page that compresses to about half: its number, then words of which every other one is random.
    fn write(&self, page: usize, random: &mut Random) {
        self.write_words(page, random, 2);
    }

    /// Writes a page as in a VM: of eight pages two are nearly all zeros, four compress to about a third, and two are
    /// incompressible.
    pub(super) fn write_vm_like_page(&self, page: usize, random: &mut Random) {
        self.write_words(page, random, [WORDS, WORDS, 3, 3, 3, 3, 1, 1][page / 64 % 8]);
    }

    /// Writes a page: its number, then words of which one in `every` is random and the others are zero.
    fn write_words(&self, page: usize, random: &mut Random, every: usize) {
        // SAFETY: the page lies within the mapping, and no other reference to it exists.
        let words = unsafe { std::slice::from_raw_parts_mut(self.base.add(page * WORDS), WORDS) };
        for (index, word) in words.iter_mut().enumerate() {
            *word = match index {
                0 => page as u64,
                _ if index % every == 0 => random.below(u64::MAX),
                _ => 0,
            };
        }
    }

    /// Reads a page's first word. Returns the word and the latency.
    fn touch(&self, page: usize) -> (u64, Duration) {
        let started = Instant::now();
        // SAFETY: the address lies within the mapping.
        let word = unsafe { self.base.add(page * WORDS).read_volatile() };
        (word, started.elapsed())
    }

    /// Reads a page's first word, after writing to the page if `write` is set. Returns the word and the latency.
    pub(super) fn access_page(&self, page: usize, write: bool) -> (u64, Duration) {
        let started = Instant::now();
        // SAFETY: the addresses lie within the mapping.
        unsafe {
            let at = self.base.add(page * WORDS);
            if write {
                at.add(WORDS - 1).write_volatile(1);
            }
            (at.read_volatile(), started.elapsed())
        }
    }

    /// Returns the pages that are not in memory (mincore(2)).
    fn missing(&self) -> anyhow::Result<Vec<usize>> {
        let mut resident = vec![0_u8; self.pages];
        // SAFETY: the mapping, and a byte for each of its pages.
        let result = unsafe { libc::mincore(self.base.cast(), self.pages * PAGE, resident.as_mut_ptr()) };
        ensure!(result == 0, "mincore: {}", std::io::Error::last_os_error());
        Ok((0..self.pages).filter(|page| resident[*page] & 1 == 0).collect())
    }
}

pub(crate) fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let memory = Memory::new("touched", (arguments.mib << 20) / PAGE)?;
    let mut random = Random::new(1);
    (0..memory.pages).for_each(|page| memory.write(page, &mut random));
    println!("\nready {}", std::process::id());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (pattern, count) = line.split_once(' ').context("a command is a pattern and a number of pages")?;
        let count: usize = count.parse()?;
        let (mut times, elapsed) = match pattern {
            "floor" => floor(count, &mut random)?,
            "random" | "sequential" => {
                let mut missing = memory.missing()?;
                if pattern == "random" {
                    shuffle(&mut missing, &mut random);
                }
                missing.truncate(count);
                read_pages(&memory, &missing)?
            }
            _ => bail!("unknown pattern '{pattern}': floor, random or sequential"),
        };
        times.sort_unstable();
        let at = |share: usize| times.get(times.len() * share / 100).map_or(0, Duration::as_nanos);
        println!("\ntouched pages={} p50_ns={} p99_ns={} took_us={}", times.len(), at(50), at(99), elapsed.as_micros());
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn shuffle(pages: &mut [usize], random: &mut Random) {
    for index in (1..pages.len()).rev() {
        pages.swap(index, random.below(index as u64 + 1) as usize);
    }
}

fn read_pages(memory: &Memory, pages: &[usize]) -> anyhow::Result<(Vec<Duration>, Duration)> {
    let mut times = Vec::with_capacity(pages.len());
    let started = Instant::now();
    for page in pages {
        let (word, elapsed) = memory.touch(*page);
        ensure!(word == *page as u64, "page {page} has wrong content");
        times.push(elapsed);
    }
    Ok((times, started.elapsed()))
}

/// Accesses pages whose faults are served by a thread that does nothing but poll for them, and has every page ready.
fn floor(count: usize, random: &mut Random) -> anyhow::Result<(Vec<Duration>, Duration)> {
    let memory = Memory::new("floor", count)?;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: takes no pointers.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    ensure!(descriptor >= 0, "userfaultfd: {}", std::io::Error::last_os_error());
    // SAFETY: a new descriptor, which nothing else owns.
    let userfaultfd = Userfaultfd::new(unsafe { OwnedFd::from_raw_fd(descriptor as i32) });
    userfaultfd.enable(REQUIRED_FEATURE_BITS)?;
    userfaultfd.register(AddressRange { start: memory.base as u64, len: (count * PAGE) as u64 })?;
    let stop = Arc::new(AtomicBool::new(false));
    let base = memory.base as u64;
    let fault_thread = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || -> std::io::Result<()> {
            let mut page = vec![0_u64; WORDS];
            let mut messages = [RawUffdMessage::default(); 8];
            while !stop.load(Ordering::Relaxed) {
                let read = userfaultfd.receive(&mut messages)?;
                for message in &mut messages[..read] {
                    if let Some(UffdMessage::Fault { address, .. }) = message.decode() {
                        page[0] = (address - base) / PAGE as u64;
                        // SAFETY: the bytes of an array of words.
                        let bytes = unsafe { std::slice::from_raw_parts(page.as_ptr().cast(), PAGE) };
                        while userfaultfd.copy(address, bytes, false).1 == FillResult::MappingChanged {}
                    }
                    *message = RawUffdMessage::default();
                }
            }
            Ok(())
        }
    });
    let mut pages: Vec<usize> = (0..count).collect();
    shuffle(&mut pages, random);
    let touched = read_pages(&memory, &pages);
    stop.store(true, Ordering::Relaxed);
    match fault_thread.join() {
        Ok(answered) => answered?,
        Err(_) => bail!("the thread that serves the faults panicked"),
    }
    touched
}
