//! Errors of system calls in another process.

use std::fmt;
use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Pid;

/// Error of an injection. The other process's threads resume in any case.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// The processor architecture is not supported.
    #[error("system calls in another process are supported only on x86_64, and this is {}", std::env::consts::ARCH)]
    UnsupportedArchitecture,
    /// The process has ended, or is exiting.
    #[error("process {pid} has ended", pid = .pid.as_raw_pid())]
    Exited {
        /// The process.
        pid: Pid,
    },
    /// A control group prevents all of its threads from running.
    #[error("process {pid} is frozen by the control group {group}: thaw it", pid = .pid.as_raw_pid())]
    Frozen {
        /// The process.
        pid: Pid,
        /// Directory of the group.
        group: String,
    },
    /// Another process traces all suitable threads.
    #[error("process {pid}, thread {tid}: {tracer_name} (pid {tracer_pid}) traces it: detach that first",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    Traced {
        /// The process.
        pid: Pid,
        /// The first such thread.
        tid: Pid,
        /// Name of the tracer.
        tracer_name: String,
        /// PID of the tracer.
        tracer_pid: i32,
    },
    /// The kernel denies access.
    #[error("process {pid}, thread {tid}: no permission to {tried}: this requires {required}",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    PermissionDenied {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// The step that was denied.
        tried: &'static str,
        /// The missing rights.
        required: String,
    },
    /// No thread has stopped in time.
    #[error("process {pid}: none of its {threads} threads could be stopped within {limit:?}: each is in an \
        uninterruptible wait (state D in /proc/{pid}/task/*/stat), or gets no CPU time: try again",
        pid = .pid.as_raw_pid())]
    NotStopped {
        /// The process.
        pid: Pid,
        /// Number of its threads.
        threads: usize,
        /// Time for which it was tried.
        limit: Duration,
    },
    /// The program is for another processor mode than this one.
    #[error("process {pid} is a 32-bit program: only 64-bit ones are supported", pid = .pid.as_raw_pid())]
    Not64Bit {
        /// The process.
        pid: Pid,
    },
    /// A system-call filter might kill the process for an unexpected call.
    #[error("process {pid}, thread {tid}: {program} filters its system calls (seccomp), and may be killed for a call that \
        its filter forbids: calls are made only in QEMU and in Larder's own processes, whose filters are known. Start it without the filter",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    Filtered {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// Name of the program.
        program: String,
    },
    /// The thread has a shadow stack, so it could not restore itself after a kill of this process.
    #[error("process {pid}, thread {tid} has a shadow stack (CET), which is not supported: start it with \
        GLIBC_TUNABLES=glibc.cpu.x86_shstk=off", pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    ShadowStack {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
    },
    /// Machine code is missing, without which the thread could not make a call, or not restore itself.
    #[error("process {pid}: {what} was not found in its code (usually it is in its libc)", pid = .pid.as_raw_pid())]
    NoInstruction {
        /// The process.
        pid: Pid,
        /// The missing instructions.
        what: &'static str,
    },
    /// The thread's stack has too little space, or its mapping is unsuitable.
    #[error("process {pid}, thread {tid}: there are no {bytes} bytes of private writable memory below its stack pointer {at:#x}",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    NoStack {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// Its stack pointer.
        at: u64,
        /// Bytes that are needed.
        bytes: u64,
    },
    /// The thread was in a restartable sequence, which must not be interrupted, at each attempt.
    #[error("process {pid}, thread {tid} was in a restartable sequence (rseq) each time: try again",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    InRseq {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
    },
    /// The call was made in the other process, and failed.
    #[error("process {pid}, thread {tid}: injected call {call} failed: {errno}",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    SystemCall {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// The system call.
        call: CallName,
        /// Error of the call.
        errno: Errno,
    },
    /// The call has not returned. It is interrupted if possible; if not, the thread restores itself afterwards.
    #[error("process {pid}, thread {tid}: injected call {call} has not returned within {limit:?} (is the process frozen by \
        a cgroup?); the thread continues by itself once it does", pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    CallTimedOut {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// The system call.
        call: CallName,
        /// Time limit of the call.
        limit: Duration,
    },
    /// The code that makes the call has changed.
    #[error("process {pid}, thread {tid}: signal {signal} instead of the injected call {call}: its code has changed",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    Fault {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// The system call.
        call: CallName,
        /// Number of the signal, which was not delivered to the thread.
        signal: i32,
    },
    /// Not all descriptors were received. Those that were have been closed again.
    #[error("process {pid}, thread {tid} received {received} of {sent} descriptors: it may have reached its limit (see \
        \"Max open files\" in /proc/{pid}/limits), or a security module (SELinux, AppArmor) forbids them",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    DescriptorsNotReceived {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// Number of descriptors sent.
        sent: usize,
        /// Number of descriptors received.
        received: usize,
    },
    /// There are more descriptors than the kernel transfers at once.
    #[error("{count} descriptors are too many to send at once; the kernel accepts up to {max}")]
    TooManyDescriptors {
        /// Number of descriptors.
        count: usize,
        /// Maximum number.
        max: usize,
    },
    /// Memory of the other process could not be read or written.
    #[error("process {pid}: {bytes} bytes of its memory at {at:#x} could not be {done}: {errno}",
        pid = .pid.as_raw_pid())]
    Memory {
        /// The process.
        pid: Pid,
        /// "read" or "written".
        done: &'static str,
        /// Address of the memory.
        at: u64,
        /// Length in bytes.
        bytes: usize,
        /// The error.
        errno: Errno,
    },
    /// Another request about the process failed.
    #[error("process {pid}, thread {tid}: {tried}: {errno}", pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    Request {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// The step that failed.
        tried: &'static str,
        /// The error.
        errno: Errno,
    },
    /// A file of the process in /proc could not be read.
    #[error("{path}: {error}")]
    Unreadable {
        /// The file.
        path: String,
        /// The error.
        error: io::Error,
    },
    /// The tracing thread could not be started.
    #[error("a thread could not be started: {0}")]
    NoThread(io::Error),
}

impl InjectError {
    /// Returns the error number of the call made in the other process, if the error is of that kind.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::SystemCall { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

/// A system call, displayed by its name if that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallName(pub i64);

impl fmt::Display for CallName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            libc::SYS_close => "close",
            libc::SYS_fallocate => "fallocate",
            libc::SYS_ioctl => "ioctl",
            libc::SYS_madvise => "madvise",
            libc::SYS_mmap => "mmap",
            libc::SYS_munmap => "munmap",
            libc::SYS_recvmsg => "recvmsg",
            libc::SYS_socketpair => "socketpair",
            libc::SYS_userfaultfd => "userfaultfd",
            number => return write!(f, "system call {number}"),
        };
        f.write_str(name)
    }
}
