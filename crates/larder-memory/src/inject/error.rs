//! What can go wrong with a system call in another process.

use std::fmt;
use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Pid;

/// Why nothing, or not all, was done in another process. Its threads go on in any case.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// There is no code for this processor.
    #[error(
        "system calls in another process are made on x86_64 only, this is {}",
        std::env::consts::ARCH
    )]
    NotOnThisArchitecture,
    /// It has ended, or is about to.
    #[error("process {pid} is gone", pid = .pid.as_raw_pid())]
    Gone {
        /// The process.
        pid: Pid,
    },
    /// A control group keeps all of its threads from running.
    #[error("process {pid} is frozen by the control group {group}: thaw it", pid = .pid.as_raw_pid())]
    Frozen {
        /// The process.
        pid: Pid,
        /// The group's folder.
        group: String,
    },
    /// Someone else traces all threads that could be taken.
    #[error("process {pid}, thread {tid}: {by} (pid {by_pid}) traces it: detach that first",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    Traced {
        /// The process.
        pid: Pid,
        /// The first such thread.
        tid: Pid,
        /// The name of the tracer.
        by: String,
        /// Its pid.
        by_pid: i32,
    },
    /// The kernel does not let us.
    #[error("process {pid}, thread {tid}: no right to {tried}: this takes {takes}",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    NoRights {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// What was tried.
        tried: &'static str,
        /// What is missing.
        takes: String,
    },
    /// No thread has stopped in time.
    #[error("process {pid}: none of its {threads} threads could be stopped within {limit:?}: each is in a wait that \
        cannot be interrupted (state D in /proc/{pid}/task/*/stat), or has no processor: try again",
        pid = .pid.as_raw_pid())]
    NotStopped {
        /// The process.
        pid: Pid,
        /// How many threads it has.
        threads: usize,
        /// How long that was tried.
        limit: Duration,
    },
    /// The code is for another kind of processor than ours.
    #[error("process {pid} is a 32-bit program: only 64-bit ones are supported", pid = .pid.as_raw_pid())]
    NotSixtyFourBit {
        /// The process.
        pid: Pid,
    },
    /// A strange call might be the end of it.
    #[error("process {pid}, thread {tid}: {program} filters its system calls (seccomp), and may be killed for one that \
        it does not expect: this is done to QEMU and to Larder's own only, whose filters are known. Start it without the filter",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    Filtered {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// The program that it runs.
        program: String,
    },
    /// It could not restore itself if we were killed.
    #[error("process {pid}, thread {tid} has a shadow stack (CET), which is not supported: start it with \
        GLIBC_TUNABLES=glibc.cpu.x86_shstk=off", pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    ShadowStack {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
    },
    /// It could not make a call, or not restore itself if we were killed.
    #[error("process {pid}: {what} was not found in its code (in its libc, as a rule)", pid = .pid.as_raw_pid())]
    NoInstruction {
        /// The process.
        pid: Pid,
        /// Which instructions.
        what: &'static str,
    },
    /// A thread's stack ends too soon, or its memory is not what it seems.
    #[error("process {pid}, thread {tid}: no {bytes} bytes of private memory to write below its stack pointer {at:#x}",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    NoStack {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// Where its stack pointer is.
        at: u64,
        /// How much is needed.
        bytes: u64,
    },
    /// The thread is amid code that must not be interrupted (a restartable sequence), each time anew.
    #[error("process {pid}, thread {tid} was in a restartable sequence (rseq) each time: try again",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    InSequence {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
    },
    /// The call was made in the other process, and failed.
    #[error("process {pid}, thread {tid}: {call} made in it: {errno}",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    SystemCall {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// Which call.
        call: CallName,
        /// Its error.
        errno: Errno,
    },
    /// The call has not returned. It is interrupted if that is possible; if not, the thread restores itself afterwards.
    #[error("process {pid}, thread {tid}: {call} made in it has not returned within {limit:?} (is the process frozen by \
        a cgroup?); the thread goes on by itself when it does", pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    Hangs {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// Which call.
        call: CallName,
        /// How long it was waited for.
        limit: Duration,
    },
    /// The code that makes the call was not there any more.
    #[error("process {pid}, thread {tid}: signal {signal} instead of {call}: its code has changed",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    Fault {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// Which call.
        call: CallName,
        /// The number of the signal, which was kept from the thread.
        signal: i32,
    },
    /// Descriptors were not, or not all, received; those that were are closed again.
    #[error("process {pid}, thread {tid} received {received} of {given} descriptors: it may have no more open (see \
        \"Max open files\" in /proc/{pid}/limits), or a security module (SELinux, AppArmor) forbids them",
        pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    NotReceived {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// How many were sent.
        given: usize,
        /// How many arrived.
        received: usize,
    },
    /// More than the kernel hands over at once.
    #[error("{given} descriptors to give at once; the kernel takes up to {max}")]
    TooMany {
        /// How many.
        given: usize,
        /// How many can be.
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
        /// Where.
        at: u64,
        /// How many.
        bytes: usize,
        /// Why.
        errno: Errno,
    },
    /// Another request about the process failed.
    #[error("process {pid}, thread {tid}: {tried}: {errno}", pid = .pid.as_raw_pid(), tid = .tid.as_raw_pid())]
    Request {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// What was tried.
        tried: &'static str,
        /// Why it failed.
        errno: Errno,
    },
    /// Something that the kernel tells of the process could not be read.
    #[error("{path}: {error}")]
    Unreadable {
        /// The file.
        path: String,
        /// Why.
        error: io::Error,
    },
    /// No thread to trace from.
    #[error("a thread could not be started: {0}")]
    NoThread(io::Error),
}

impl InjectError {
    /// With what the call made in the other process failed, if that is what it is.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::SystemCall { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

/// A system call by its name, where that is known.
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
