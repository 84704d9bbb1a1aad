//! Every thread drops its capabilities and applies the Landlock restrictions to itself.
//!
//! A thread can do that only for itself, and some threads sleep in the kernel for ever. So a signal handler does it,
//! as libpsx does for libcap. The handler only makes system calls and uses atomics, so the interrupted code is not
//! affected.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::gettid;

use super::ConfineError;

/// Longest time for a thread to respond. A thread that waits for a device in the kernel handles no signal meanwhile.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between checks for the response.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Value for no ruleset, no thread or no error.
const NONE: i32 = -1;

/// Landlock ruleset for the threads.
static RULESET: AtomicI32 = AtomicI32::new(NONE);
/// ID of the last thread that has responded.
static LAST_RESPONDER: AtomicI32 = AtomicI32::new(NONE);
/// Index in [`STEPS`] of a step that has failed in a thread; `FAILED_ERRNO` is its error number.
static FAILED_STEP: AtomicI32 = AtomicI32::new(NONE);
static FAILED_ERRNO: AtomicI32 = AtomicI32::new(0);

/// Steps of a thread, in order: without the first one the others need a capability, which the last one drops.
const STEPS: [&str; 4] = [
    "no_new_privs cannot be set",
    "ambient capabilities cannot be dropped",
    "Landlock's restrictions are refused",
    "capabilities cannot be dropped",
];

/// Upper bound of capability numbers: a set has 64 bits.
const CAPABILITY_COUNT_MAX: libc::c_ulong = 64;

/// Makes all threads give up their rights, the calling thread last.
pub(super) fn drop_rights(ruleset: Option<&OwnedFd>) -> Result<(), ConfineError> {
    let ruleset = ruleset.map_or(NONE, AsRawFd::as_raw_fd);
    RULESET.store(ruleset, Ordering::SeqCst);
    let others = {
        let _handler = InstalledHandler::new().map_err(ConfineError::Threads)?;
        restrict_other_threads()
    };
    others?;
    match drop_own_rights(ruleset) {
        Ok(()) => Ok(()),
        Err((step, error)) => Err(step_error(step, error, "main".to_owned())),
    }
}

/// Signals threads until a round finds no new one. Threads that are started meanwhile by a restricted thread inherit
/// the restrictions.
fn restrict_other_threads() -> Result<(), ConfineError> {
    let current = gettid().as_raw_nonzero().get();
    let mut done = HashSet::from([current]);
    loop {
        let mut is_complete = true;
        for entry in fs::read_dir("/proc/self/task").map_err(ConfineError::Threads)? {
            let name = entry.map_err(ConfineError::Threads)?.file_name();
            let Some(thread) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if done.insert(thread) && !is_io_uring_worker(thread) {
                is_complete = false;
                restrict_thread(thread)?;
            }
        }
        if is_complete {
            return Ok(());
        }
    }
}

/// A worker of io_uring handles no signals and makes no system calls.
fn is_io_uring_worker(thread: i32) -> bool {
    let name = thread_name(thread);
    name.starts_with("iou-")
}

fn thread_name(thread: i32) -> String {
    let name = fs::read_to_string(format!("/proc/self/task/{thread}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

fn restrict_thread(thread: i32) -> Result<(), ConfineError> {
    let since = Instant::now();
    loop {
        // SAFETY: this sends a signal to a thread of this process, whose handler is installed.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, libc::SIGRTMAX()) };
        let error = io::Error::last_os_error();
        match (sent, error.raw_os_error()) {
            (0, _) => break,
            // The thread has ended.
            (_, Some(libc::ESRCH)) => return Ok(()),
            // The user's queue of pending signals is full.
            (_, Some(libc::EAGAIN)) if since.elapsed() < RESPONSE_TIMEOUT => std::thread::sleep(POLL_INTERVAL),
            _ => {
                return Err(ConfineError::Thread {
                    step: "sending a signal",
                    thread: thread_name(thread),
                    source: error,
                });
            }
        }
    }
    // The thread may end while it is awaited. A thread that has just started may turn out to be a kernel worker only
    // now, once it has its name.
    while !is_io_uring_worker(thread) && LAST_RESPONDER.load(Ordering::SeqCst) != thread && thread_exists(thread) {
        if since.elapsed() > RESPONSE_TIMEOUT {
            return Err(ConfineError::Unresponsive {
                thread: thread_name(thread),
                seconds: RESPONSE_TIMEOUT.as_secs(),
            });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    match usize::try_from(FAILED_STEP.load(Ordering::SeqCst)) {
        Ok(step) => {
            let error = io::Error::from_raw_os_error(FAILED_ERRNO.load(Ordering::SeqCst));
            Err(step_error(step, error, thread_name(thread)))
        }
        Err(_) => Ok(()),
    }
}

fn thread_exists(thread: i32) -> bool {
    fs::exists(format!("/proc/self/task/{thread}")).unwrap_or(true)
}

fn step_error(step: usize, source: io::Error, thread: String) -> ConfineError {
    let step = STEPS[step];
    ConfineError::Thread { step, thread, source }
}

/// The installed signal handler, removed on drop. Nothing else in the process uses this signal.
struct InstalledHandler(libc::sigaction);

impl InstalledHandler {
    fn new() -> io::Result<Self> {
        // SAFETY: zeros are a valid sigaction without flags and with an empty mask; the handler has the required
        // signature.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            let mut before = std::mem::zeroed();
            match libc::sigaction(libc::SIGRTMAX(), &raw const action, &raw mut before) {
                0 => Ok(Self(before)),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }
}

impl Drop for InstalledHandler {
    fn drop(&mut self) {
        // SAFETY: this restores the previous action.
        unsafe { libc::sigaction(libc::SIGRTMAX(), &raw const self.0, std::ptr::null_mut()) };
    }
}

extern "C" fn handler(_: libc::c_int) {
    // SAFETY: this is the address of the thread's errno, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    if let Err((step, error)) = drop_own_rights(RULESET.load(Ordering::SeqCst)) {
        FAILED_ERRNO.store(error.raw_os_error().unwrap_or(0), Ordering::SeqCst);
        FAILED_STEP.store(step as i32, Ordering::SeqCst);
    }
    // SAFETY: this call has no arguments, and cannot fail.
    let current = unsafe { libc::syscall(libc::SYS_gettid) };
    LAST_RESPONDER.store(current as i32, Ordering::SeqCst);
    // SAFETY: this writes to the address of the thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Header for `_LINUX_CAPABILITY_VERSION_3`, with thread 0 for the calling one.
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    thread: i32,
}

/// Drops the rights of the calling thread; the error has the failed step. It may run in a signal handler, so it
/// allocates nothing.
fn drop_own_rights(ruleset: i32) -> Result<(), (usize, io::Error)> {
    let step = |number: usize, result: libc::c_long| match result {
        0 => Ok(()),
        _ => Err((number, io::Error::last_os_error())),
    };
    let zero: libc::c_ulong = 0;
    let one: libc::c_ulong = 1;
    // SAFETY: the calls take numbers, and the last one pointers to two structures in the kernel's layout.
    unsafe {
        step(0, libc::syscall(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, one, zero, zero, zero))?;
        let clear = libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong;
        step(1, libc::syscall(libc::SYS_prctl, libc::PR_CAP_AMBIENT, clear, zero, zero, zero))?;
        for capability in 0..CAPABILITY_COUNT_MAX {
            // This requires CAP_SETPCAP. Without capabilities and with no_new_privs, the bounding set has no effect
            // any more.
            libc::syscall(libc::SYS_prctl, libc::PR_CAPBSET_DROP, capability, zero, zero, zero);
        }
        if ruleset != NONE {
            step(2, libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0u32))?;
        }
        let header = CapabilityHeader { version: 0x2008_0522, thread: 0 };
        let none = [0u32; 6];
        step(3, libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()))
    }
}
