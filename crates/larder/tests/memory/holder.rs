//! A program whose memory has pages that are known, incompressible, and recognisable on a disk. It reports which of
//! them are unchanged, and survives those that cannot be read.

use std::fs::File;
use std::io::{BufRead as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use larder_bench::campaign::Random;
use larder_bench::campaign::memory::Attach;
use larder_bench::campaign::process::Process;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::control_group::ControlGroup;
use crate::support::{TEST_TIMEOUT, larder_path};

pub(crate) const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
/// Number of pages: 48 MiB of them.
pub(crate) const PAGES: usize = 12 << 10;

/// Size of the memory that the program maps on request, and keeps no descriptor of.
const MORE_BYTES: usize = 16 << 20;

/// Result of a check without lost pages.
pub(crate) const NONE: [usize; 0] = [];

/// First bytes of every page; the page's number follows.
pub(crate) const MARK: &[u8; 24] = b"LARDER KNOWN PLAINTEXT #";

/// Variable that makes this test program act as this program.
const PROGRAM: &str = "LARDER_TEST_HOLDS";

/// Variable with the path of the file that is the program's memory; unset, the memory is a memfd.
const FILE: &str = "LARDER_TEST_HOLDS_FILE";

/// Variable that is set if the program maps the halves of its file separately, the second half first.
const HALVES: &str = "LARDER_TEST_HOLDS_HALVES";

/// Maps `pages` pages of `file` from page `from` on, at `at` or where the kernel chooses.
fn map(file: &File, at: Option<*mut u64>, from: usize, pages: usize) -> *mut u64 {
    let how = ProtFlags::READ | ProtFlags::WRITE;
    let flags = at.map_or(MapFlags::SHARED, |_| MapFlags::SHARED | MapFlags::FIXED);
    let at = at.unwrap_or(std::ptr::null_mut()).cast();
    // SAFETY: the kernel chooses the address, or `at` is in a mapping of the same size that is not used yet.
    let base = unsafe { rustix::mm::mmap(at, pages * PAGE, how, flags, file.as_fd(), (from * PAGE) as u64) };
    base.expect("a mapping").cast()
}

fn words(page: usize) -> impl Iterator<Item = u64> {
    let (mark, _) = MARK.as_chunks::<8>();
    let mark = mark.iter().map(|word| u64::from_le_bytes(*word));
    let mut random = Random::new(page as u64 + 1);
    mark.chain([page as u64]).chain(std::iter::repeat_with(move || random.below(u64::MAX))).take(WORDS)
}

/// Program whose memory is managed. It is no test: other tests start it.
#[test]
#[ignore = "started by other tests"]
fn holds() {
    if std::env::var_os(PROGRAM).is_none() {
        return;
    }
    let file = match std::env::var_os(FILE) {
        Some(path) => File::options().read(true).write(true).create_new(true).open(path).expect("a file"),
        None => File::from(rustix::fs::memfd_create("held", MemfdFlags::CLOEXEC).expect("a memfd")),
    };
    file.set_len((PAGES * PAGE) as u64).expect("room");
    let base = map(&file, None, 0, PAGES);
    if std::env::var_os(HALVES).is_some() {
        const HALF: usize = PAGES / 2;
        map(&file, Some(base), HALF, HALF);
        map(&file, Some(base.wrapping_add(HALF * WORDS)), 0, HALF);
    }
    for page in 0..PAGES {
        // SAFETY: the page is in the mapping, and no other reference to it exists.
        let into = unsafe { std::slice::from_raw_parts_mut(base.add(page * WORDS), WORDS) };
        into.iter_mut().zip(words(page)).for_each(|(word, is)| *word = is);
    }
    let copied = File::from(rustix::fs::memfd_create("copied", MemfdFlags::CLOEXEC).expect("a memfd"));
    println!("\nready {}", std::process::id());
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("what to do");
        if line == "stop" {
            break;
        }
        if line == "map more" {
            let more = File::from(rustix::fs::memfd_create("more", MemfdFlags::CLOEXEC).expect("a memfd"));
            more.set_len(MORE_BYTES as u64).expect("room");
            map(&more, None, 0, MORE_BYTES / PAGE);
            drop(more);
            println!("\nmapped");
            continue;
        }
        if let Some(page) = line.strip_prefix("touch ") {
            let page: usize = page.parse().expect("a number");
            assert!(page < PAGES);
            // SAFETY: the page is in the mapping. The read may end this process by a signal, which the test asks for.
            let word = unsafe { base.add(page * WORDS).read_volatile() };
            println!("\ntouched {word:#x}");
            continue;
        }
        let (mut lost, mut wrong) = (Vec::new(), 0);
        let mut content = vec![0; PAGE];
        for page in 0..PAGES {
            // The page is read by the kernel, so that an unreadable page is an error and not a signal. SAFETY: the
            // page is in the mapping, and pwrite fails if the page cannot be read.
            let written = unsafe { libc::pwrite(as_raw(&copied), base.add(page * WORDS).cast(), PAGE, 0) };
            if written != PAGE as isize {
                let error = std::io::Error::last_os_error();
                assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");
                lost.push(page.to_string());
                continue;
            }
            copied.read_exact_at(&mut content, 0).expect("what was copied");
            let (found, _) = content.as_chunks::<8>();
            let is = found.iter().map(|word| u64::from_le_bytes(*word)).eq(words(page));
            wrong += usize::from(!is);
        }
        println!("\nchecked wrong={wrong} lost={}", lost.join(","));
        std::io::stdout().flush().expect("it is heard");
    }
}

fn as_raw(file: &File) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(file)
}

/// A running instance of the program.
pub(crate) struct Holder {
    pub(crate) process: Process,
    pid: u32,
}

impl Holder {
    pub(crate) fn start() -> Self {
        Self::start_in(None)
    }

    /// Starts an instance whose memory is charged to that control group.
    pub(crate) fn start_in(group: Option<&ControlGroup>) -> Self {
        let command = Self::command();
        Self::start_by(group.map_or_else(Self::command, |group| group.with(&command)))
    }

    /// Starts an instance whose memory is a file at that path.
    pub(crate) fn start_at(path: &Path) -> Self {
        let mut command = Self::command();
        command.env(FILE, path);
        Self::start_by(command)
    }

    /// Starts an instance whose memory is two mappings of one file.
    pub(crate) fn start_in_halves() -> Self {
        let mut command = Self::command();
        command.env(HALVES, "1");
        Self::start_by(command)
    }

    /// Makes the program map memory that can be opened only through /proc/PID/map_files.
    pub(crate) fn map_more(&mut self) {
        let told = self.process.lines();
        self.process.say("map more").expect("it reads");
        self.process.wait_for_after(told, "mapped", TEST_TIMEOUT).expect("it has more");
    }

    fn command() -> Command {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--ignored", "--exact", "holder::holds", "--nocapture"]);
        command.env(PROGRAM, "1");
        command
    }

    fn start_by(command: Command) -> Self {
        let process = Process::start(command).expect("a program to manage");
        let said = process.wait_for("ready ", TEST_TIMEOUT).expect("it works");
        let pid = said.split_once("ready ").expect("its number").1.trim().parse();
        let pid = pid.expect("a number");
        Self { process, pid }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns a pager for the program, with a budget below its memory.
    pub(crate) fn attach(&self, folder: &Path, words: &[&str]) -> Attach {
        Attach::new(larder_path(), folder, self.pid, &[&["--budget", "20MiB", "--compressed", "2MiB"], words].concat())
    }

    /// Makes the program check every page, without waiting for the result.
    pub(crate) fn begin_check(&mut self) -> usize {
        let told = self.process.lines();
        self.process.say("check").expect("it reads");
        told
    }

    /// Waits for the check's result: the pages that cannot be read. Asserts that no page has changed.
    pub(crate) fn end_check(&mut self, told: usize) -> Vec<usize> {
        let line = self.process.wait_for_after(told, "checked ", TEST_TIMEOUT).expect("it goes on");
        let (_, found) = line.split_once("wrong=").expect("what was found");
        let (wrong, lost) = found.split_once(" lost=").expect("what was found");
        assert_eq!(wrong, "0", "pages are not as they were written");
        let lost = lost.trim().split(',').filter(|page| !page.is_empty());
        lost.map(|page| page.parse().expect("a number")).collect()
    }

    pub(crate) fn check(&mut self) -> Vec<usize> {
        let told = self.begin_check();
        self.end_check(told)
    }

    /// Makes the program touch a page that cannot be read, which ends it.
    pub(crate) fn touch(mut self, page: usize) -> ExitStatus {
        self.process.say(&format!("touch {page}")).expect("it reads");
        self.process.wait(TEST_TIMEOUT).expect("it ends")
    }

    pub(crate) fn stop(mut self) {
        self.process.say("stop").expect("it reads");
        let ended = self.process.wait(TEST_TIMEOUT).expect("it ends");
        assert!(ended.success(), "{ended}: {}", self.process.output());
    }

    /// Returns the path of the pager's memfd with this name, among the program's descriptors.
    pub(crate) fn memfd(&self, name: &str) -> PathBuf {
        let all = std::fs::read_dir(format!("/proc/{}/fd", self.pid)).expect("procfs");
        let mut all = all.flatten().map(|entry| entry.path());
        let is_it = |path: &PathBuf| {
            std::fs::read_link(path).is_ok_and(|link| link.to_string_lossy().starts_with(&format!("/memfd:{name} ")))
        };
        all.find(is_it).expect("a pager has attached")
    }
}

/// Finds known pages in a file: their numbers, and the offsets of their content.
pub(crate) fn readable(path: &Path) -> Vec<(usize, u64)> {
    let bytes = std::fs::read(path).expect("a file");
    let (words, _) = bytes.as_chunks::<8>();
    let (mark, _) = MARK.as_chunks::<8>();
    let marks = words.windows(4).enumerate().filter(|(_, found)| found[..3] == *mark);
    marks.map(|(index, found)| (u64::from_le_bytes(found[3]) as usize, index as u64 * 8)).collect()
}
