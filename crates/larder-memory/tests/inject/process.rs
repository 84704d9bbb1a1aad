//! Starts and observes the programs of the tests.

use std::fs::{self, File};
use std::io::{self, PipeWriter, Write as _};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::process::Pid;

use super::target::{self, Page, ROLE};

/// Aborts a test that hangs, together with all its processes.
pub(crate) struct Watchdog(#[expect(dead_code, reason = "its end is what is waited for")] mpsc::Sender<()>);

impl Watchdog {
    pub(crate) fn new() -> Self {
        const LIMIT: Duration = Duration::from_secs(600);
        let (test, ended) = mpsc::channel();
        let name = thread::current().name().unwrap_or_default().to_owned();
        thread::spawn(move || {
            if ended.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                // Not with eprintln, whose output the test runner holds back until the test ends.
                let _ = writeln!(io::stderr(), "{name} has not ended within {LIMIT:?}");
                std::process::abort();
            }
        });
        Self(test)
    }
}

/// A process that is killed when this is dropped.
pub(crate) struct Target {
    pub(crate) child: Child,
    pub(crate) page: &'static Page,
    input: Input,
    /// Number of inputs that the process was given, one for each round.
    pub(crate) fed: u64,
}

/// Source from which the program reads.
enum Input {
    Pipe(PipeWriter),
    Socket(tempfile::TempDir),
}

impl Target {
    /// Starts a process in a role, and waits until it is ready.
    pub(crate) fn start(role: &str) -> Self {
        let (command, page) = command(role);
        Self::of(command, page, role)
    }

    /// Starts a process in a PID namespace of its own. The direct child is `unshare`.
    pub(crate) fn start_in_namespace(role: &str) -> Self {
        let (command, page) = command_by(Command::new("unshare"), role, &["--pid", "--fork", "--kill-child"]);
        Self::of(command, page, role)
    }

    /// Returns the process that the direct child has started.
    pub(crate) fn grandchild(&self) -> Pid {
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        Pid::from_raw(children.trim().parse().unwrap()).unwrap()
    }

    /// Starts a process in a role that only prints something, and returns the output.
    pub(crate) fn start_and_read(role: &str) -> String {
        let (mut command, _) = command(role);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    fn of(mut command: Command, page: &'static Page, role: &str) -> Self {
        let (theirs, input): (OwnedFd, Input) = if role.starts_with("accept") {
            let folder = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
            (listener.into(), Input::Socket(folder))
        } else {
            let (reader, writer) = io::pipe().unwrap();
            (reader.into(), Input::Pipe(writer))
        };
        hand(&mut command, &theirs, target::INPUT);
        let mut target = Self { child: command.spawn().unwrap(), page, input, fed: 0 };
        while target.page.ready.load(Ordering::SeqCst) == 0 {
            target.assert_lives();
            pause();
        }
        target
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn assert_lives(&mut self) {
        assert_ne!(self.status("State").as_bytes()[0], b'Z', "the target has ended");
    }

    pub(crate) fn rounds(&self) -> u64 {
        self.page.rounds.load(Ordering::SeqCst)
    }

    /// Gives the process the input that its next round waits for, if it waits for any.
    pub(crate) fn feed(&mut self, role: &str) {
        let rounds = self.rounds();
        if rounds < self.fed {
            return;
        }
        let byte = [self.fed as u8];
        let is_to_end = self.page.stop.load(Ordering::SeqCst) != 0;
        let told = |done: io::Result<()>| assert!(done.is_ok() || is_to_end, "{done:?}");
        match (role.split(' ').next().unwrap(), &mut self.input) {
            ("futex", _) => {
                self.page.word.fetch_add(1, Ordering::SeqCst);
                let word = self.page.word.as_ptr();
                // SAFETY: the word is alive.
                unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, 1) };
            }
            ("read" | "epoll_wait" | "vfork", Input::Pipe(pipe)) => told(pipe.write_all(&byte)),
            ("accept", Input::Socket(folder)) => {
                let stream = UnixStream::connect(folder.path().join("socket"));
                told(stream.and_then(|mut stream| stream.write_all(&byte)));
            }
            ("sigsuspend", _) => self.send(target::WAKE, 0),
            ("sigwaitinfo", _) => self.send(target::queued(), self.fed),
            _ => return,
        }
        self.fed += 1;
    }

    /// Sends a signal that carries a number.
    pub(crate) fn send(&self, signal: i32, value: u64) {
        let value = libc::sigval { sival_ptr: value as *mut libc::c_void };
        // SAFETY: takes no pointers, but a number in the place of one.
        while unsafe { libc::sigqueue(self.child.id() as i32, signal, value) } != 0 {
            // The user's limit of queued signals is reached.
            let error = io::Error::last_os_error();
            assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}");
            pause();
        }
    }

    /// Returns the value of a line of `/proc/PID/status`.
    pub(crate) fn status(&self, key: &str) -> String {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(":\t"));
        line.unwrap().to_owned()
    }

    pub(crate) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Waits until the process has finished `count` more rounds.
    pub(crate) fn wait_for_rounds(&mut self, role: &str, count: u64) {
        let goal = self.rounds() + count;
        while self.rounds() < goal {
            self.feed(role);
            self.assert_lives();
            pause();
        }
    }

    /// Makes the process end by itself, and checks that it has found nothing wrong.
    pub(crate) fn finish(&mut self, role: &str) {
        self.page.stop.store(1, Ordering::SeqCst);
        while self.status("State").as_bytes()[0] != b'Z' {
            self.feed(role);
            pause();
        }
        let ended = self.child.wait().unwrap();
        assert!(ended.success(), "the target has ended: {ended:?}");
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a command that runs this program in a role, and the page shared with it.
pub(crate) fn command(role: &str) -> (Command, &'static Page) {
    command_by(Command::new(std::env::current_exe().unwrap()), role, &[])
}

/// Returns such a command, started through another program that gets these arguments.
fn command_by(mut command: Command, role: &str, arguments: &[&str]) -> (Command, &'static Page) {
    // SAFETY: the name is a terminated string.
    let number = unsafe { libc::memfd_create(c"larder test".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(number >= 0);
    // SAFETY: just made.
    let memfd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::fs::ftruncate(&memfd, 4096).unwrap();
    let page = target::page(memfd.as_raw_fd());
    if !arguments.is_empty() {
        command.args(arguments).arg(std::env::current_exe().unwrap());
    }
    command.env(ROLE, role).stdin(Stdio::null());
    hand(&mut command, &memfd, target::PAGE);
    (command, page)
}

/// Passes a descriptor to a new program, with this number.
fn hand(command: &mut Command, descriptor: &OwnedFd, number: i32) {
    let ours = descriptor.try_clone().unwrap();
    let dup = move || {
        // SAFETY: takes no pointers.
        let done = unsafe { libc::dup2(ours.as_raw_fd(), number) };
        if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: dup2 may be called between fork and exec.
    unsafe { command.pre_exec(dup) };
}

/// A process in a role, which is killed sooner or later.
pub(crate) struct Killed {
    child: Child,
    pub(crate) page: &'static Page,
}

impl Killed {
    pub(crate) fn start(role: &str) -> Self {
        let (mut command, page) = command(role);
        let mut child = command.spawn().unwrap();
        while page.ready.load(Ordering::SeqCst) == 0 {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{role} has ended: {ended:?}");
            pause();
        }
        Self { child, page }
    }

    /// Waits until the process has ended by itself.
    pub(crate) fn wait(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Kills the process, which must not have been killed before.
    pub(crate) fn kill(mut self) -> ExitStatus {
        self.child.kill().unwrap();
        self.child.wait().unwrap()
    }
}

/// Returns true if both descriptors refer to the same file.
pub(crate) fn is_same_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    let key = |file: BorrowedFd<'_>| rustix::fs::fstat(file).map(|stat| (stat.st_dev, stat.st_ino)).unwrap();
    key(one) == key(other)
}

/// Gives other processes time before the next check.
pub(crate) fn pause() {
    thread::sleep(Duration::from_micros(200));
}

/// Pseudo-random numbers.
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new() -> Self {
        let mut seed = [0; 8];
        io::Read::read_exact(&mut File::open("/dev/urandom").unwrap(), &mut seed).unwrap();
        Self(u64::from_ne_bytes(seed) | 1)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
