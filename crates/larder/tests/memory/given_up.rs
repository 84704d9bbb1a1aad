//! Pages that a process discards while the pager prefetches pages around them.

use std::fs::File;
use std::io::{BufRead as _, Write as _};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder_bench::campaign::Random;
use larder_bench::campaign::memory::Attach;
use larder_bench::campaign::process::Process;
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::support::{TEST_TIMEOUT, larder_path, temp_dir_on_tmpfs};

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
const PAGES: usize = 8192;

/// Number of pages that are read sequentially.
const WALK: usize = 64;
/// Number of pages among them that are discarded meanwhile.
const GIVEN_UP: usize = 3;

/// Variable that makes this test program act as the managed program.
const PROGRAM: &str = "LARDER_TEST_GIVES_UP";

/// Program that discards pages, and expects zeros there, and its own data everywhere else. It is no test: other tests
/// start it.
#[test]
#[ignore = "started by other tests"]
fn gives_up() {
    if std::env::var_os(PROGRAM).is_none() {
        return;
    }
    let memory = Memory::new();
    let stop = Arc::new(AtomicBool::new(false));
    println!("\nready {}", std::process::id());
    std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let _ = std::io::stdin().lock().lines().next();
            stop.store(true, Ordering::Relaxed);
        }
    });
    let mut random = Random::new(5);
    let mut generations = vec![1_u64; PAGES];
    let (mut rounds, mut raced) = (0, 0);
    while !stop.load(Ordering::Relaxed) {
        let first = random.below((PAGES - WALK) as u64) as usize;
        let given_up = first + WALK / 2..first + WALK / 2 + GIVEN_UP;
        memory.take_out(given_up.start, given_up.len());
        // The pager, which prefetches, does not know about the discard yet.
        memory.verify_all(first..given_up.start, &generations);
        raced += memory.present(given_up.start, given_up.len());
        memory.say_so(given_up.start, given_up.len());
        for page in given_up.clone() {
            assert_eq!(memory.page(page)[..], [0; WORDS], "page {page} is not of zeros");
            generations[page] += 1;
            memory.write(page, generations[page]);
        }
        memory.verify_all(given_up.end..first + WALK, &generations);
        rounds += 1;
    }
    memory.verify_all(0..PAGES, &generations);
    println!("\ngone through {rounds} times, {raced} pages were there again");
    let _ = std::io::stdout().flush();
}

/// Program that punches a hole for an evicted page when told to, and reports that a while after the pager has put the
/// page in place again. It is no test: another test starts it.
#[test]
#[ignore = "started by another test"]
fn reports_late() {
    if std::env::var_os(PROGRAM).is_none() {
        return;
    }
    let memory = Memory::new();
    println!("\nready {}", std::process::id());
    let _ = std::io::stdin().lock().lines().next();
    let page = (0..PAGES).rev().find(|page| memory.present(*page, 1) == 0);
    let page = page.expect("a page was evicted");
    memory.take_out(page, 1);
    println!("\npunched");
    while memory.present(page, 1) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(300));
    memory.say_so(page, 1);
    assert_eq!(memory.page(page)[..], [0; WORDS], "page {page} is not of zeros");
    // The detach ends while this process runs.
    let _ = std::io::stdin().lock().lines().next();
}

/// Shared memory with known content.
struct Memory {
    file: File,
    base: *mut u64,
}

impl Memory {
    fn new() -> Self {
        let file = File::from(rustix::fs::memfd_create("given-up", MemfdFlags::CLOEXEC).expect("a memfd"));
        file.set_len((PAGES * PAGE) as u64).expect("room");
        let how = ProtFlags::READ | ProtFlags::WRITE;
        let size = PAGES * PAGE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, how, MapFlags::SHARED, file.as_fd(), 0) };
        let memory = Self { file, base: base.expect("a mapping").cast() };
        (0..PAGES).for_each(|page| memory.write(page, 1));
        memory
    }

    fn page(&self, page: usize) -> &[u64] {
        assert!(page < PAGES);
        // SAFETY: the page is in the mapping, which no other code changes.
        unsafe { std::slice::from_raw_parts(self.base.add(page * WORDS), WORDS) }
    }

    /// Returns words that identify the page and its version, and hardly compress.
    fn words(page: usize, generation: u64) -> impl Iterator<Item = u64> {
        let mut random = Random::new(page as u64 * 1_000_003 + generation);
        (0..WORDS).map(move |_| random.below(u64::MAX))
    }

    fn write(&self, page: usize, generation: u64) {
        assert!(page < PAGES);
        // SAFETY: the page is in the mapping, and no other reference to it exists.
        let words = unsafe { std::slice::from_raw_parts_mut(self.base.add(page * WORDS), WORDS) };
        words.iter_mut().zip(Self::words(page, generation)).for_each(|(word, is)| *word = is);
    }

    fn verify_all(&self, pages: Range<usize>, generations: &[u64]) {
        for (page, generation) in pages.clone().zip(&generations[pages]) {
            assert!(
                self.page(page).iter().copied().eq(Self::words(page, *generation)),
                "page {page} is not as it was written"
            );
        }
    }

    fn take_out(&self, first: usize, count: usize) {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (at, len) = ((first * PAGE) as u64, (count * PAGE) as u64);
        rustix::fs::fallocate(&self.file, how, at, len).expect("a hole");
    }

    fn say_so(&self, first: usize, count: usize) {
        // SAFETY: the pages are in the mapping, and their content is not used any more.
        let said =
            unsafe { rustix::mm::madvise(self.base.add(first * WORDS).cast(), count * PAGE, Advice::LinuxDontNeed) };
        said.expect("it is told");
    }

    /// Returns how many of these pages are in memory.
    fn present(&self, first: usize, count: usize) -> usize {
        let mut there = vec![0_u8; count];
        // SAFETY: the pages are in the mapping, and `there` has a byte for each of them.
        let looked =
            unsafe { libc::mincore(self.base.add(first * WORDS).cast(), count * PAGE, there.as_mut_ptr().cast()) };
        assert_eq!(looked, 0);
        there.iter().filter(|byte| **byte & 1 != 0).count()
    }
}

/// Starts `program` of this test program, lets `meanwhile` manage it, and returns its output once it has ended.
fn go_through(program: &str, meanwhile: impl FnOnce(&Attach, &mut Process)) -> String {
    let folder = temp_dir_on_tmpfs();
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let swap = disk.path().join("swap");
    let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
    command.args(["--ignored", "--exact", program, "--nocapture"]).env(PROGRAM, "1");
    let mut program = Process::start(command).expect("a program to manage");
    let said = program.wait_for("ready ", TEST_TIMEOUT).expect("it works");
    let pid = said.split_once("ready ").expect("its number").1.trim().parse().expect("a number");
    let swap = swap.display().to_string();
    let words = ["--budget", "20MiB", "--swap-cache", &swap, "--swap-size", "128MiB"];
    meanwhile(&Attach::new(larder_path(), folder.path(), pid, &words), &mut program);
    let ended = program.wait(TEST_TIMEOUT).expect("it ends");
    let said = program.output();
    assert!(ended.success(), "{ended}: {said}");
    said
}

/// Lets `meanwhile` manage the program that discards pages all the time.
fn gives_up_meanwhile(meanwhile: impl FnOnce(&Attach)) {
    let said = go_through("given_up::gives_up", |attach, program| {
        meanwhile(attach);
        program.say("stop").expect("it reads");
    });
    let raced = said.split_once(" times, ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<u64>().ok());
    assert!(raced.is_some_and(|raced| raced > 0), "nothing came between: {said}");
}

/// Pages that are prefetched between their removal from the file and the report of the discard read as zeros.
#[test]
fn prefetched_discarded_pages_are_zero() {
    gives_up_meanwhile(|attach| {
        let mut pager = attach.start().expect("it attaches");
        std::thread::sleep(Duration::from_secs(6));
        let state = pager.state().expect("it answers");
        assert!(state.ahead_pages > 0 && state.given_up_pages > 0, "{state:#?}");
        pager.detach().expect("lets go");
    });
}

/// Discarded pages also read as zeros if the pager is killed in between.
#[test]
fn discarded_pages_survive_pager_kills() {
    gives_up_meanwhile(|attach| {
        let mut random = Random::new(9);
        for _ in 0..20 {
            let mut pager = attach.start().expect("it attaches");
            std::thread::sleep(Duration::from_millis(100 + random.below(200)));
            pager.process.kill();
        }
        attach.start().expect("it attaches").detach().expect("lets go");
    });
}

/// A page that the detach pages in between its removal from the file and the report reads as zeros.
#[test]
fn detach_waits_for_report_of_discard() {
    go_through("given_up::reports_late", |attach, program| {
        let mut pager = attach.start().expect("it attaches");
        pager.wait_for_budget().expect("it evicts");
        program.say("punch").expect("it reads");
        program.wait_for("punched", TEST_TIMEOUT).expect("a page was evicted");
        pager.detach().expect("lets go");
        program.say("end").expect("it reads");
    });
}
