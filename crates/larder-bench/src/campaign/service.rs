//! A program started as a service, by a service manager that stores descriptors for it as systemd does (sd_notify(3),
//! sd_listen_fds(3)).

use std::ffi::OsString;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use super::process::Process;

const LIMIT: Duration = Duration::from_secs(240);

/// Interval at which the program's exit is polled.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Maximum number of descriptors in one message, as for systemd.
const DESCRIPTORS_MAX: usize = 253;

/// A running service, and its descriptor store.
pub struct Service {
    words: Vec<OsString>,
    inbox: Arc<Inbox>,
    notify: PathBuf,
    /// The program.
    pub process: Process,
}

#[derive(Default)]
struct Inbox {
    heard: Mutex<Heard>,
    changed: Condvar,
}

#[derive(Default)]
struct Heard {
    kept: Vec<(String, OwnedFd)>,
    /// Number of READY messages received.
    ready: u32,
    /// Last MARK number received, which the manager sends to itself.
    marks: u64,
}

impl Service {
    /// Starts the program and its arguments, `command_line`, and waits until it is ready. `notify` becomes its
    /// `$NOTIFY_SOCKET`.
    ///
    /// # Errors
    /// If it exits, or is not ready in time; with its output.
    pub fn start(command_line: &[OsString], notify: &Path) -> anyhow::Result<Self> {
        let socket = UnixDatagram::bind(notify)?;
        let inbox = Arc::new(Inbox::default());
        let weak_inbox = Arc::downgrade(&inbox);
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        std::thread::spawn(move || {
            while let Some(inbox) = weak_inbox.upgrade() {
                if let Some((text, files)) = receive(&socket) {
                    inbox.hear(&text, files);
                }
            }
        });
        let process = launch(command_line, notify, &[])?;
        let this = Self { words: command_line.to_vec(), inbox, notify: notify.to_owned(), process };
        this.wait_until_ready(1)?;
        Ok(this)
    }

    /// Ends the service by a signal, and starts it again with the stored descriptors. Returns the time from the
    /// signal until it was ready.
    ///
    /// # Errors
    /// As in [`Service::start`].
    pub fn restart(&mut self, signal: i32) -> anyhow::Result<Duration> {
        let started = Instant::now();
        self.end(signal)?;
        self.launch()?;
        Ok(started.elapsed())
    }

    /// Starts the service again with the stored descriptors, and waits until it is ready.
    ///
    /// # Errors
    /// As in [`Service::start`].
    pub fn launch(&mut self) -> anyhow::Result<()> {
        let state = self.inbox.lock();
        let ready = state.ready;
        self.process = launch(&self.words, &self.notify, &state.kept)?;
        drop(state);
        self.wait_until_ready(ready + 1)
    }

    /// Ends the service by a signal.
    ///
    /// # Errors
    /// If it does not exit.
    pub fn end(&mut self, signal: i32) -> anyhow::Result<ExitStatus> {
        self.process.signal(signal);
        let status = self.process.wait(LIMIT)?;
        self.hear_all()?;
        Ok(status)
    }

    /// Drops the stored descriptors, as for a service that will not be started again.
    pub fn let_go(&self) {
        self.inbox.lock().kept.clear();
    }

    /// Returns the names of the stored descriptors, sorted.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn kept(&self) -> anyhow::Result<Vec<String>> {
        self.hear_all()?;
        let mut names: Vec<String> = self.inbox.lock().kept.iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        Ok(names)
    }

    /// Changes the descriptor store, to test the program's reaction.
    pub fn tamper(&self, with: impl FnOnce(&mut Vec<(String, OwnedFd)>)) {
        with(&mut self.inbox.lock().kept);
    }

    /// Waits until all messages that the service has sent are processed.
    fn hear_all(&self) -> anyhow::Result<()> {
        let mark = self.inbox.lock().marks + 1;
        let sender = UnixDatagram::unbound()?;
        sender.send_to(format!("MARK={mark}").as_bytes(), &self.notify)?;
        self.inbox.wait(|heard| heard.marks >= mark)
    }

    fn wait_until_ready(&self, times: u32) -> anyhow::Result<()> {
        let finished = |heard: &Heard| heard.ready >= times || self.process.has_ended();
        let waited = self.inbox.wait(finished);
        let is_ready = waited.is_ok() && self.inbox.lock().ready >= times;
        ensure!(is_ready, "the service is not ready:\n{}", self.process.output());
        Ok(())
    }
}

impl Inbox {
    fn lock(&self) -> std::sync::MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, condition: impl Fn(&Heard) -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + LIMIT;
        let mut heard = self.lock();
        while !condition(&heard) {
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "the expected messages did not arrive within {LIMIT:?}");
            heard = self.changed.wait_timeout(heard, left.min(LOOK_AGAIN)).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn hear(&self, text: &str, files: Vec<OwnedFd>) {
        let value_of = |what: &str| text.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix('='));
        let mut heard = self.lock();
        let name = value_of("FDNAME").unwrap_or("stored");
        if value_of("FDSTORE").is_some() {
            for file in files {
                // systemd too ignores a descriptor that it already stores.
                if heard.kept.iter().all(|(_, kept)| !is_same(kept, &file)) {
                    heard.kept.push((name.to_owned(), file));
                }
            }
        }
        if value_of("FDSTOREREMOVE").is_some() {
            heard.kept.retain(|(kept, _)| kept != name);
        }
        if value_of("READY").is_some() {
            heard.ready += 1;
        }
        if let Some(mark) = value_of("MARK").and_then(|mark| mark.parse().ok()) {
            heard.marks = mark;
        }
        self.changed.notify_all();
    }
}

/// Returns whether both descriptors refer to the same open file description.
fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    let (pid, files) = (std::process::id(), [one, other].map(|file| file.as_raw_fd()));
    // SAFETY: only numbers are passed, and nothing is written. 0 is KCMP_FILE.
    unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, 0, files[0], files[1]) == 0 }
}

fn receive(socket: &UnixDatagram) -> Option<(String, Vec<OwnedFd>)> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut bytes)];
    let received = rustix::net::recvmsg(socket, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    let rights = control.drain().filter_map(|item| match item {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let files = rights.flatten().collect();
    Some((String::from_utf8_lossy(&bytes[..received.bytes]).into_owned(), files))
}

/// Starts a program that receives the stored descriptors as numbers 3 and up.
fn launch(command_line: &[OsString], notify: &Path, kept: &[(String, OwnedFd)]) -> anyhow::Result<Process> {
    let Some((program, arguments)) = command_line.split_first() else {
        bail!("the command line is empty");
    };
    // A shell moves the descriptors to their numbers, and its PID becomes $LISTEN_PID.
    let mut script = String::new();
    for (number, (_, file)) in (3..).zip(kept) {
        script.push_str(&format!("exec {number}<&{0} {0}<&-\n", file.as_raw_fd() + FD_OFFSET));
    }
    script.push_str("LISTEN_PID=$$ exec \"$0\" \"$@\"");
    let names: Vec<&str> = kept.iter().map(|(name, _)| name.as_str()).collect();
    let mut command = Command::new("bash");
    command.args(["-c", &script]).arg(program).args(arguments);
    command
        .env("NOTIFY_SOCKET", notify)
        .env("LISTEN_FDS", kept.len().to_string())
        .env("LISTEN_FDNAMES", names.join(":"));
    if kept.is_empty() {
        command.env_remove("LISTEN_FDNAMES");
    }
    let files: Vec<i32> = kept.iter().map(|(_, file)| file.as_raw_fd()).collect();
    // SAFETY: dup2 is async-signal-safe. No other descriptor of the child has such a high number.
    unsafe {
        command.pre_exec(move || {
            for file in &files {
                if libc::dup2(*file, file + FD_OFFSET) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    Process::start(command)
}

/// Offset added to a descriptor's number to pass it to the child.
const FD_OFFSET: i32 = 500;
