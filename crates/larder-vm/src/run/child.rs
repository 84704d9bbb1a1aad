//! The child processes of `larder run`, none of which outlives it.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use super::memory::PlannedMemory;
use super::plan::{PlannedDisk, RunPlan};
use super::supervise::ServerProgram;

/// Starts the server of a disk, detached from the terminal, whose input is for QEMU.
pub(super) fn start_server(program: &ServerProgram, planned: &PlannedDisk) -> io::Result<Child> {
    let mut words = planned.proxied_serve_arguments();
    // Only this process may pass the option, because only its servers share its locks.
    words.push("--inherit-locks".into());
    start_larder(program, words)
}

/// Starts the pager of QEMU, detached from the terminal.
pub(super) fn start_pager(program: &ServerProgram, planned: &PlannedMemory, qemu: u32) -> io::Result<Child> {
    start_larder(program, planned.attach_arguments(&qemu.to_string()))
}

fn start_larder(program: &ServerProgram, words: Vec<OsString>) -> io::Result<Child> {
    let mut command = Command::new(&program.path);
    command.arg0("larder").args(words).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
    if let Some(level) = &program.log {
        command.env("LARDER_LOG", level);
    }
    // SIGTERM lets the child write back or page in its data.
    signal_on_parent_death(&mut command, libc::SIGTERM);
    // SAFETY: both system calls are allowed between fork and exec, and touch no memory of the parent.
    unsafe {
        command.pre_exec(|| {
            // Otherwise its messages would stop it on a terminal set to `stty tostop`.
            libc::signal(libc::SIGTTOU, libc::SIG_IGN);
            // Inherited descriptors belong to QEMU: a tap device held open here would outlive it. A kernel without
            // the call leaves them open.
            libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
            Ok(())
        })
    };
    command.spawn()
}

/// Starts QEMU in the foreground, with all inherited descriptors.
pub(super) fn start_qemu(plan: &RunPlan) -> io::Result<Child> {
    let Some((program, arguments)) = plan.qemu.split_first() else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let mut command = Command::new(program);
    command.args(arguments);
    // Without this process the disks have no servers, and the guest would wait for them for ever.
    signal_on_parent_death(&mut command, libc::SIGTERM);
    command.spawn()
}

/// Makes the process receive `signal` when the thread that starts it ends. Unlike this process, it starts with no
/// signal blocked.
fn signal_on_parent_death(command: &mut Command, signal: libc::c_int) {
    let parent = std::process::id();
    // SAFETY: prctl, getppid and sigprocmask are allowed between fork and exec, and touch no memory of the parent. A
    // zeroed set is a valid place for sigemptyset, which makes it a valid set.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before the call.
            if u32::try_from(libc::getppid()).ok() != Some(parent) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let mut empty_set = std::mem::zeroed();
            libc::sigemptyset(&raw mut empty_set);
            match libc::sigprocmask(libc::SIG_SETMASK, &raw const empty_set, std::ptr::null_mut()) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        })
    };
}

/// A process that is killed when this is dropped before it has ended.
pub(super) struct ChildGuard {
    child: Child,
    exit_status: Option<ExitStatus>,
}

impl ChildGuard {
    pub(super) fn new(child: Child) -> Self {
        Self { child, exit_status: None }
    }

    /// Returns the process ID.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the exit status, if the process has ended.
    pub(super) fn exit_status(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.exit_status.is_none() {
            self.exit_status = self.child.try_wait()?;
        }
        Ok(self.exit_status)
    }

    /// Sends a signal, unless the process has ended.
    pub(super) fn send_signal(&mut self, signal: rustix::process::Signal) {
        if let Ok(None) = self.exit_status() {
            // The process ID is still valid: only `exit_status` reaps the process.
            let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal);
        }
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        if let Ok(None) = self.exit_status() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
