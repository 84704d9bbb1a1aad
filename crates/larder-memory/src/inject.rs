//! System calls made in another, unmodified process by one of its threads, while that is stopped (ptrace).
//!
//! # What the other process may rely on
//! - Afterwards the thread's registers (vector registers included), its signal mask and the memory below its stack
//!   pointer are as they were. A system call that it was in goes on as after any stop by a debugger: what the kernel
//!   restarts is restarted (`nanosleep`, `poll`, `futex` with what is left of their time, `read`, `accept`), the few
//!   that the kernel ends at any stop end with EINTR (`epoll_wait`, `sigtimedwait`, `semop`, `io_uring_enter`, sockets
//!   with a timeout, `KVM_RUN`).
//! - It goes on at once, unless we are kept from going on: if our process is stopped (SIGSTOP, a frozen cgroup) amid it,
//!   the thread stands still for as long.
//! - No signal is lost, doubled, or handled in the middle. A process that is stopped by SIGSTOP stays so.
//! - **If we are killed, at whatever instruction, it goes on unharmed.** The kernel then lets the thread run with the
//!   registers that it has. They are always either its own, or those of a call with the *net* under it: the call is
//!   made by a `syscall; ret` that the process has somewhere, the return address on its stack is that of its libc's
//!   `rt_sigreturn`, and above that lies a signal frame with all of the thread's own registers and its mask. So the
//!   thread makes that call and then restores itself, exactly as after a signal handler. As after one, a call with a
//!   relative timeout ends with EINTR then (`nanosleep` with what is left in its second argument, `poll`), because
//!   `rt_sigreturn` forgets how it was to go on. What the calls made until then have done remains: at worst two
//!   sockets, and the descriptors given, stay open.
//!
//! # What it takes
//! - Room of some 6 KiB (with AMX 15) on the stack of a thread, below the 128 bytes that its code may use: what a
//!   signal takes. Programs whose threads have no such room, and take signals on a stack of their own instead (Go), are
//!   not for this module. QEMU's threads and coroutines have it.
//! - The rights to trace the process, and that nobody else does.
//! - If the process is a child of ours: that whoever waits for its end does not take a stop for it. Of each stop of a
//!   traced child the kernel tells all that wait for it, or for any child, whether they want to know of stops or not.
//! - That SIGCHLD, by which the kernel tells our process of stops, does no harm to it.
//!
//! # How it fails
//! All that is of ptrace happens on a thread of our own made for one attempt: when that ends, however it does, the
//! kernel detaches it from the other process. A call that does not return in time is left to the net.

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

use crate::group;
use threads::{Candidate, Refusal};

/// How long a thread is waited for at first before the next one is tried. A thread in any wait that can be interrupted
/// stops within a scheduling delay; each further round over all threads waits twice as long.
const PATIENCE_MIN: Duration = Duration::from_millis(1);
const PATIENCE_MAX: Duration = Duration::from_millis(5);

/// What came of trying one thread.
enum Attempt<T> {
    Done(T, Duration),
    Refused(Refusal),
}

/// Stops one thread of process `pid`, hands it to `work`, and lets it go on as if nothing had been. Returns what `work`
/// does, and for how long the thread stood still at most.
///
/// A thread is taken that sleeps, rather not the main one. All are tried, for `limit` in all or for 1 ms each, whichever
/// is longer. A system call made by `work` may take `limit`, too.
///
/// # Errors
/// No thread could be stopped, or is fit for it; the thread could not be brought back by us (but by the net, see
/// the module); what `work` returns. A target that has ended meanwhile is told as such, whatever `work` says.
///
/// # Panics
/// If `work` does, once the thread goes on.
pub fn with_stopped_thread<T: Send>(
    pid: Pid,
    limit: Duration,
    work: impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send,
) -> Result<(T, Duration), InjectError> {
    if !arch::IS_SUPPORTED {
        return Err(InjectError::NotOnThisArchitecture);
    }
    // Such a thread makes no call; and one that is stopped by a signal besides would have PTRACE_SEIZE wait for the thaw,
    // which no signal but SIGKILL ends.
    if let Some(group) = group::frozen(pid) {
        let group = group.display().to_string();
        return Err(InjectError::Frozen { pid, group });
    }
    let deadline = Instant::now() + limit;
    let mut work = Some(work);
    let mut doublings = 0;
    loop {
        let candidates = threads::candidates(pid)?;
        let count = u32::try_from(candidates.len()).unwrap_or(u32::MAX).max(1);
        let patience = (limit / (4 * count)).clamp(PATIENCE_MIN, PATIENCE_MAX) * (1 << doublings);
        let mut refusals = Vec::new();
        for candidate in &candidates {
            match attempt(candidate, patience, limit, &mut work)? {
                Attempt::Done(done, stood_still) => return Ok((done, stood_still)),
                Attempt::Refused(refusal) => refusals.push(refusal),
            }
            if doublings > 0 && Instant::now() > deadline {
                break;
            }
        }
        if Instant::now() > deadline || refusals.iter().all(|refusal| !refusal.passes) {
            return Err(threads::worst(pid, limit, refusals));
        }
        doublings = (doublings + 1).min(8);
        // Others have the processor meanwhile: what refuses now passes by their doing.
        thread::yield_now();
    }
}

/// Tries one thread, on a thread of our own: its end is what makes the kernel detach it from a thread that never stopped.
fn attempt<T: Send>(
    candidate: &Candidate,
    patience: Duration,
    limit: Duration,
    work: &mut Option<impl FnOnce(&mut StoppedThread) -> Result<T, InjectError> + Send>,
) -> Result<Attempt<T>, InjectError> {
    if let Some(refusal) = candidate.refusal() {
        return Ok(Attempt::Refused(refusal));
    }
    let tracer = || -> Result<Attempt<T>, InjectError> {
        let mut stopped = match StoppedThread::stop(candidate, patience, limit) {
            Ok(Ok(stopped)) => stopped,
            Ok(Err(refusal)) => return Ok(Attempt::Refused(refusal)),
            // Whatever was tried, it was too late. Others of its process may live.
            Err(_) if candidate.has_ended() => {
                return Ok(Attempt::Refused(Refusal::for_now(InjectError::Gone {
                    pid: candidate.pid,
                })));
            }
            Err(error) => return Err(error),
        };
        let Some(work) = work.take() else {
            unreachable!("the work is taken once, by the attempt that is the last one");
        };
        let done = work(&mut stopped);
        match (done, stopped.let_go()) {
            (Err(failed), Err(error)) if !matches!(error, InjectError::Gone { .. }) => Err(failed),
            (done, let_go) => let_go.and_then(|stood_still| Ok(Attempt::Done(done?, stood_still))),
        }
    };
    thread::scope(|scope| {
        let tracer = thread::Builder::new()
            .name("larder-inject".into())
            .spawn_scoped(scope, tracer);
        match tracer.map_err(InjectError::NoThread)?.join() {
            Ok(outcome) => outcome,
            Err(panic) => resume_unwind(panic),
        }
    })
}
