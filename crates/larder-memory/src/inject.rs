//! Makes system calls in another, unmodified process, with one of its threads that is stopped by ptrace.
//!
//! # Guarantees to the other process
//! - Afterwards the thread's registers (vector registers included), its signal mask and the memory below its stack
//!   pointer are unchanged. An interrupted system call continues as after any stop by a debugger. Calls that the
//!   kernel restarts are restarted (`nanosleep`, `poll` and `futex` with their remaining time, `read`, `accept`); the
//!   few that the kernel ends at any stop end with EINTR (`epoll_wait`, `sigtimedwait`, `semop`, `io_uring_enter`,
//!   sockets with a timeout, `KVM_RUN`).
//! - The thread resumes immediately, unless this process is itself prevented from running: if it is stopped (SIGSTOP,
//!   a frozen cgroup) during the calls, the thread stays stopped as long.
//! - No signal is lost, duplicated, or handled during the calls. A process that is stopped by SIGSTOP stays stopped.
//! - **If this process is killed, at any instruction, the other one continues unharmed.** The kernel then resumes the
//!   thread with its current registers. These are always either its own, or those of a call with a *restore frame*
//!   under it: the call is made by a `syscall; ret` somewhere in the process, the return address on the stack is that
//!   of its libc's `rt_sigreturn`, and above it is a signal frame with all of the thread's own registers and its
//!   mask. So the thread completes the call and then restores itself, as after a signal handler. As after a signal
//!   handler, a call with a relative timeout then ends with EINTR (`nanosleep` with the remaining time in its second
//!   argument, `poll`), because `rt_sigreturn` discards the restart information. Effects of completed calls remain:
//!   at worst two sockets, and the descriptors that were given, stay open.
//!
//! # Requirements
//! - About 6 KiB (15 with AMX) of free stack of a thread, below the 128 bytes that its code may use. A signal needs
//!   the same. Programs whose threads have less stack, and handle signals on an alternate stack (Go), are not
//!   supported. QEMU's threads and coroutines have enough.
//! - The right to trace the process, and no other tracer.
//! - If the process is a child of this one: code that waits for its end must not mistake a stop for it. The kernel
//!   reports each stop of a traced child to all waiters for it, or for any child, whether they asked for stops or
//!   not.
//! - SIGCHLD, with which the kernel reports stops, must do no harm to this process.
//!
//! # Failures
//! All ptrace requests are made on a thread that is started for one attempt. When that thread ends, for whatever
//! reason, the kernel detaches it from the other process. A call that does not return in time is left to the restore
//! frame.

mod code;
mod descriptors;
mod error;
mod memory;
mod stopped;
mod threads;
mod tracee;

#[cfg_attr(target_arch = "x86_64", path = "inject/x86_64.rs")]
#[cfg_attr(not(target_arch = "x86_64"), path = "inject/no_arch.rs")]
mod arch;

use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;

pub use error::InjectError;
pub use stopped::{SCRATCH_BYTES, StoppedThread};

use crate::cgroup;
use threads::{Candidate, Refusal};

/// Time to wait for a thread at first before the next one is tried. A thread in any interruptible wait stops within a
/// scheduling delay. Each further round over all threads waits twice as long.
const STOP_TIMEOUT_MIN: Duration = Duration::from_millis(1);
const STOP_TIMEOUT_MAX: Duration = Duration::from_millis(5);

/// Result of trying one thread.
enum Attempt<T> {
    Done(T, Duration),
    Refused(Refusal),
}

/// Stops one thread of process `pid`, passes it to `work`, and resumes it unchanged. Returns the result of `work`,
/// and the maximum time that the thread was stopped.
///
/// Sleeping threads are preferred, and the main thread is avoided. All threads are tried, for `limit` in total or for
/// 1 ms each, whichever is longer. A system call made by `work` may take `limit`, too.
///
/// # Errors
/// If no thread could be stopped, or none is suitable; if the thread could not be restored (it then restores itself,
/// see the module documentation); or the error that `work` returns. A target that has ended is always reported as
/// such, whatever `work` returns.
///
/// # Panics
/// If `work` panics. The thread is resumed first.
pub fn with_stopped_thread<T: Send>(
    pid: Pid,
    limit: Duration,
    work: impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send,
) -> Result<(T, Duration), InjectError> {
    if !arch::IS_SUPPORTED {
        return Err(InjectError::UnsupportedArchitecture);
    }
    // A frozen thread makes no call. If it is also stopped by a signal, PTRACE_SEIZE would wait until the group is
    // thawed, and no signal but SIGKILL ends that wait.
    if let Some(group) = cgroup::freezing_cgroup(pid) {
        let group = group.display().to_string();
        return Err(InjectError::Frozen { pid, group });
    }
    let deadline = Instant::now() + limit;
    let mut work = Some(work);
    let mut doublings = 0;
    loop {
        let candidates = threads::candidates(pid)?;
        let count = u32::try_from(candidates.len()).unwrap_or(u32::MAX).max(1);
        let stop_timeout = (limit / (4 * count)).clamp(STOP_TIMEOUT_MIN, STOP_TIMEOUT_MAX) * (1 << doublings);
        let mut refusals = Vec::new();
        for candidate in &candidates {
            match attempt(candidate, stop_timeout, limit, &mut work)? {
                Attempt::Done(done, paused_for) => return Ok((done, paused_for)),
                Attempt::Refused(refusal) => refusals.push(refusal),
            }
            if doublings > 0 && Instant::now() > deadline {
                break;
            }
        }
        if Instant::now() > deadline || refusals.iter().all(|refusal| !refusal.is_temporary) {
            return Err(threads::combined_error(pid, limit, refusals));
        }
        doublings = (doublings + 1).min(8);
        // Yields the processor: most refusals are temporary, and end when other threads run.
        thread::yield_now();
    }
}

/// Tries one thread, from a new thread of this process: its end makes the kernel detach it from a thread that never
/// stopped.
fn attempt<T: Send>(
    candidate: &Candidate,
    stop_timeout: Duration,
    limit: Duration,
    work: &mut Option<impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send>,
) -> Result<Attempt<T>, InjectError> {
    if let Some(refusal) = candidate.refusal() {
        return Ok(Attempt::Refused(refusal));
    }
    let tracer = || -> Result<Attempt<T>, InjectError> {
        let mut stopped = match StoppedThread::stop(candidate, stop_timeout, limit) {
            Ok(Ok(stopped)) => stopped,
            Ok(Err(refusal)) => return Ok(Attempt::Refused(refusal)),
            // The error came too late to matter. Other threads of the process may be alive.
            Err(_) if candidate.has_ended() => {
                return Ok(Attempt::Refused(Refusal::temporary(InjectError::Exited { pid: candidate.pid })));
            }
            Err(error) => return Err(error),
        };
        let Some(work) = work.take() else {
            unreachable!("only the last attempt takes the work");
        };
        let done = work(&mut stopped);
        match (done, stopped.resume()) {
            (Err(failed), Err(error)) if !matches!(error, InjectError::Exited { .. }) => Err(failed),
            (done, resumed) => resumed.and_then(|paused_for| Ok(Attempt::Done(done?, paused_for))),
        }
    };
    thread::scope(|scope| {
        let tracer = thread::Builder::new().name("larder-inject".into()).spawn_scoped(scope, tracer);
        match tracer.map_err(InjectError::NoThread)?.join() {
            Ok(outcome) => outcome,
            Err(panic) => resume_unwind(panic),
        }
    })
}
