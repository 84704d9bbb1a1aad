//! Processes to inspect: this test program itself, which executes commands, and QEMU.

use std::ffi::CString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use larder_memory::target::{InspectOptions, Target};
use rustix::process::Pid;

/// A process that executes commands until it is dropped.
pub(crate) struct Helper {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Helper {
    /// Starts a process, which executes `commands`.
    pub(crate) fn new(commands: &[&str]) -> Self {
        Self::start(Command::new(std::env::current_exe().unwrap()), commands)
    }

    /// Starts a process without root's rights.
    pub(crate) fn unprivileged(commands: &[&str]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        if rustix::process::geteuid().is_root() {
            command.uid(65534).gid(65534);
        }
        Self::start(command, commands)
    }

    fn start(mut command: Command, commands: &[&str]) -> Self {
        command.args(["--ignored", "--exact", "helper", "--nocapture"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        let mut helper = Self { child, to, from };
        for command in commands {
            helper.tell(command);
        }
        helper
    }

    /// Executes a command in the process, and returns its answer.
    pub(crate) fn tell(&mut self, command: &str) -> String {
        writeln!(self.to, "{command}").unwrap();
        loop {
            let mut line = String::new();
            assert_ne!(self.from.read_line(&mut line).unwrap(), 0, "the helper has ended at {command:?}");
            if let Some(answer) = line.strip_prefix("done: ") {
                return answer.trim_end().into();
            }
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Kills the process without waiting for it, so that it is a zombie.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    pub(crate) fn wait(&mut self) {
        self.child.wait().unwrap();
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Executes commands until the test closes the pipe.
pub(crate) fn obey() {
    let mut held = Held::default();
    for command in std::io::stdin().lines() {
        let answer = held.obey(&command.unwrap());
        // The test runner has written a part of a line.
        println!("\ndone: {answer}");
    }
}

#[derive(Default)]
struct Held {
    descriptors: Vec<OwnedFd>,
    mappings: Vec<(usize, usize)>,
}

impl Held {
    fn obey(&mut self, command: &str) -> String {
        let words: Vec<&str> = command.split(' ').collect();
        match words[..] {
            ["memfd", name, mib] => self.memfd(name, mib, libc::MFD_ALLOW_SEALING),
            ["huge", mib] => self.memfd("huge", mib, libc::MFD_HUGETLB),
            // A path may contain blanks.
            ["open", ..] => self.open(&command["open ".len()..], 0),
            ["direct", ..] => self.open(&command["direct ".len()..], libc::O_DIRECT),
            // Maps the file that was opened last.
            ["map", mib] => self.map(bytes(mib), 0, libc::MAP_SHARED),
            ["map", mib, "from", offset] => self.map(bytes(mib), bytes(offset), libc::MAP_SHARED),
            ["copy", mib] => self.map(bytes(mib), 0, libc::MAP_PRIVATE),
            ["private", mib] => {
                // SAFETY: new memory where the kernel chooses.
                let at = unsafe {
                    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                    libc::mmap(std::ptr::null_mut(), bytes(mib), prot, flags, -1, 0)
                };
                assert_ne!(at, libc::MAP_FAILED);
            }
            ["unmap"] => {
                let (at, bytes) = self.mappings.pop().unwrap();
                // SAFETY: no code uses it.
                assert_eq!(unsafe { libc::munmap(at as *mut _, bytes) }, 0);
            }
            ["close"] => drop(self.descriptors.pop().unwrap()),
            ["lock"] => {
                let (at, bytes) = self.mappings[0];
                // SAFETY: it is mapped.
                assert_eq!(unsafe { libc::mlock(at as *const _, bytes) }, 0, "{}", last_error());
            }
            // Changes a flag of the second half, at which the kernel splits the mapping.
            ["split"] => {
                let (at, bytes) = self.mappings[0];
                // SAFETY: it is mapped, and its contents do not change.
                let done = unsafe { libc::madvise((at + bytes / 2) as *mut _, bytes / 2, libc::MADV_DONTFORK) };
                assert_eq!(done, 0);
            }
            ["seal"] => {
                let memfd = self.descriptors.last().unwrap();
                rustix::fs::fcntl_add_seals(memfd, rustix::fs::SealFlags::FUTURE_WRITE).unwrap();
            }
            ["shorten", mib] => rustix::fs::ftruncate(self.descriptors.last().unwrap(), bytes(mib) as u64).unwrap(),
            ["io_uring"] => self.io_uring(),
            ["register"] => self.register(),
            ["userfaultfd"] => {
                // SAFETY: takes no pointers.
                let number = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) };
                self.hold(number);
            }
            ["name", name] => std::fs::write("/proc/self/comm", name).unwrap(),
            ["examine", pid] => {
                let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
                return match Target::inspect(pid, &InspectOptions::default()) {
                    Ok(target) => format!("{} memories, {:?}", target.ram_mappings.len(), target.warnings),
                    Err(error) => error.to_string().replace('\n', " "),
                };
            }
            _ => panic!("{command}?"),
        }
        self.descriptors.last().map_or(-1, AsRawFd::as_raw_fd).to_string()
    }

    fn open(&mut self, path: &str, flags: i32) {
        let file = File::options().read(true).write(true).custom_flags(flags).open(path);
        self.descriptors.push(file.unwrap().into());
    }

    fn hold(&mut self, number: i64) {
        assert!(number >= 0, "{}", last_error());
        // SAFETY: just made.
        self.descriptors.push(unsafe { OwnedFd::from_raw_fd(number as i32) });
    }

    fn memfd(&mut self, name: &str, mib: &str, flags: libc::c_uint) {
        let name = CString::new(name).unwrap();
        // SAFETY: the name is a terminated string.
        let number = unsafe { libc::memfd_create(name.as_ptr(), flags | libc::MFD_CLOEXEC) };
        self.hold(number.into());
        rustix::fs::ftruncate(self.descriptors.last().unwrap(), bytes(mib) as u64).unwrap();
        self.map(bytes(mib), 0, libc::MAP_SHARED);
    }

    fn map(&mut self, bytes: usize, offset: usize, kind: i32) {
        let file = self.descriptors.last().unwrap().as_raw_fd();
        // SAFETY: new memory where the kernel chooses, which no code touches.
        let at = unsafe {
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, kind | libc::MAP_NORESERVE);
            libc::mmap(std::ptr::null_mut(), bytes, prot, flags, file, offset as i64)
        };
        assert_ne!(at, libc::MAP_FAILED, "{}", last_error());
        self.mappings.push((at as usize, bytes));
    }

    fn io_uring(&mut self) {
        let mut params = [0u64; 15];
        // SAFETY: struct io_uring_params, of 120 bytes, all zero, is a valid request.
        let number = unsafe { libc::syscall(libc::SYS_io_uring_setup, 8, params.as_mut_ptr()) };
        self.hold(number);
    }

    /// Registers one page of memory with the io_uring that was made last (`IORING_REGISTER_BUFFERS`).
    fn register(&mut self) {
        let ring = self.descriptors.last().unwrap().as_raw_fd();
        let page = Box::leak(Box::new([0u8; 4096]));
        let buffer = libc::iovec { iov_base: page.as_mut_ptr().cast(), iov_len: page.len() };
        // SAFETY: one buffer of memory that is never freed, described by an iovec that lives for the call.
        let done = unsafe { libc::syscall(libc::SYS_io_uring_register, ring, 0, &raw const buffer, 1) };
        assert_eq!(done, 0, "{}", last_error());
    }
}

fn bytes(mib: &str) -> usize {
    mib.parse::<usize>().unwrap() << 20
}

fn last_error() -> std::io::Error {
    std::io::Error::last_os_error()
}

/// QEMU without a guest, ready to run one.
pub(crate) struct Qemu {
    child: Child,
    _monitor: BufReader<ChildStdout>,
}

impl Qemu {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::by(Command::new("qemu-system-x86_64"), arguments)
    }

    /// Starts `command`, which becomes QEMU.
    pub(crate) fn by(mut command: Command, arguments: &[&str]) -> Self {
        command.args("-accel tcg -S -display none -nodefaults -qmp stdio".split(' ')).args(arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut monitor = BufReader::new(child.stdout.take().unwrap());
        // The greeting comes from a thread of the monitor, at any time before or after the machine exists. The answer
        // comes from the main loop, which runs when the machine is complete.
        let mut input = child.stdin.as_ref().unwrap();
        input.write_all(b"{\"execute\": \"qmp_capabilities\"}\n").unwrap();
        for what in ["QMP", "return"] {
            let mut line = String::new();
            monitor.read_line(&mut line).unwrap();
            assert!(line.contains(what), "{line:?} of QEMU, not its {what:?}");
        }
        Self { child, _monitor: monitor }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
