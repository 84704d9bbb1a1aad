//! Every thread gives up its capabilities and takes the Landlock restrictions upon itself.
//!
//! A thread can do that for itself only, and some sleep in the kernel for ever. So a handler of a signal does it, as libpsx
//! does for libcap. It makes system calls and touches atomics; nothing that it interrupts is changed.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::gettid;

use super::ConfineError;

/// How long a thread may take. One that waits for a device in the kernel takes no signal meanwhile.
const PATIENCE: Duration = Duration::from_secs(30);

/// The pause between looks whether it has.
const PAUSE: Duration = Duration::from_micros(100);

/// No ruleset, no thread, no error.
const NONE: i32 = -1;

/// What the threads take upon themselves.
static RULESET: AtomicI32 = AtomicI32::new(NONE);
/// The last one that has.
static ANSWERED: AtomicI32 = AtomicI32::new(NONE);
/// What has failed there: a place in [`STEPS`], and the error's number.
static FAILED_STEP: AtomicI32 = AtomicI32::new(NONE);
static FAILED_WITH: AtomicI32 = AtomicI32::new(0);

/// What a thread does, in this order: without the first the others need a capability, which the last gives up.
const STEPS: [&str; 4] = [
    "no_new_privs cannot be set",
    "ambient capabilities cannot be dropped",
    "Landlock's restrictions are refused",
    "capabilities cannot be dropped",
];

/// Capabilities that there may ever be: a set has 64 bits.
const CAPABILITIES: libc::c_ulong = 64;

/// Has all threads give up their rights, this one last.
pub(super) fn give_up(ruleset: Option<&OwnedFd>) -> Result<(), ConfineError> {
    let ruleset = ruleset.map_or(NONE, AsRawFd::as_raw_fd);
    RULESET.store(ruleset, Ordering::SeqCst);
    let others = {
        let _taken = Taken::new().map_err(ConfineError::Threads)?;
        have_others()
    };
    others?;
    match give_up_here(ruleset) {
        Ok(()) => Ok(()),
        Err((step, error)) => Err(failed(step, error, "main".to_owned())),
    }
}

/// Until a round finds none that has not. Those that are started in between by one that has inherit it.
fn have_others() -> Result<(), ConfineError> {
    let own = gettid().as_raw_nonzero().get();
    let mut done = HashSet::from([own]);
    loop {
        let mut is_complete = true;
        for entry in fs::read_dir("/proc/self/task").map_err(ConfineError::Threads)? {
            let name = entry.map_err(ConfineError::Threads)?.file_name();
            let Some(thread) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if done.insert(thread) && !is_kernels(thread) {
                is_complete = false;
                have(thread)?;
            }
        }
        if is_complete {
            return Ok(());
        }
    }
}

/// A worker of io_uring takes no signals and makes no system calls.
fn is_kernels(thread: i32) -> bool {
    let name = name_of(thread);
    name.starts_with("iou-")
}

fn name_of(thread: i32) -> String {
    let name = fs::read_to_string(format!("/proc/self/task/{thread}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

fn have(thread: i32) -> Result<(), ConfineError> {
    let since = Instant::now();
    loop {
        // SAFETY: a signal to a thread of this process, whose handler is there.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, libc::SIGRTMAX()) };
        let error = io::Error::last_os_error();
        match (sent, error.raw_os_error()) {
            (0, _) => break,
            // It has ended.
            (_, Some(libc::ESRCH)) => return Ok(()),
            // Too many signals of this user's wait.
            (_, Some(libc::EAGAIN)) if since.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
            _ => {
                return Err(ConfineError::Thread {
                    step: "a signal",
                    thread: name_of(thread),
                    source: error,
                });
            }
        }
    }
    // It may end now; one that was just started is only now known for the kernel's.
    while !is_kernels(thread) && ANSWERED.load(Ordering::SeqCst) != thread && is_there(thread) {
        if since.elapsed() > PATIENCE {
            return Err(ConfineError::Silent {
                thread: name_of(thread),
                seconds: PATIENCE.as_secs(),
            });
        }
        std::thread::sleep(PAUSE);
    }
    match usize::try_from(FAILED_STEP.load(Ordering::SeqCst)) {
        Ok(step) => {
            let error = io::Error::from_raw_os_error(FAILED_WITH.load(Ordering::SeqCst));
            Err(failed(step, error, name_of(thread)))
        }
        Err(_) => Ok(()),
    }
}

fn is_there(thread: i32) -> bool {
    fs::exists(format!("/proc/self/task/{thread}")).unwrap_or(true)
}

fn failed(step: usize, source: io::Error, thread: String) -> ConfineError {
    let step = STEPS[step];
    ConfineError::Thread { step, thread, source }
}

/// The signal is taken, as long as this is there. Nobody else uses it.
struct Taken(libc::sigaction);

impl Taken {
    fn new() -> io::Result<Self> {
        // SAFETY: zeros are a valid sigaction without flags and with an empty mask; the handler is one of this signature.
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

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: it is what was there before.
        unsafe { libc::sigaction(libc::SIGRTMAX(), &raw const self.0, std::ptr::null_mut()) };
    }
}

extern "C" fn handler(_: libc::c_int) {
    // SAFETY: the place of this thread's errno, which what is interrupted may be about to look at.
    let errno = unsafe { *libc::__errno_location() };
    if let Err((step, error)) = give_up_here(RULESET.load(Ordering::SeqCst)) {
        FAILED_WITH.store(error.raw_os_error().unwrap_or(0), Ordering::SeqCst);
        FAILED_STEP.store(step as i32, Ordering::SeqCst);
    }
    // SAFETY: it has no arguments, and cannot fail.
    let own = unsafe { libc::syscall(libc::SYS_gettid) };
    ANSWERED.store(own as i32, Ordering::SeqCst);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// `_LINUX_CAPABILITY_VERSION_3`, and this thread.
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    thread: i32,
}

/// Of the calling thread; where it failed, and with what. It may run in a handler, so it allocates nothing.
fn give_up_here(ruleset: i32) -> Result<(), (usize, io::Error)> {
    let step = |number: usize, result: libc::c_long| match result {
        0 => Ok(()),
        _ => Err((number, io::Error::last_os_error())),
    };
    let zero: libc::c_ulong = 0;
    let one: libc::c_ulong = 1;
    // SAFETY: each gets numbers, and the last one two structures that are as the kernel has them.
    unsafe {
        step(
            0,
            libc::syscall(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, one, zero, zero, zero),
        )?;
        let clear = libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong;
        step(
            1,
            libc::syscall(libc::SYS_prctl, libc::PR_CAP_AMBIENT, clear, zero, zero, zero),
        )?;
        for capability in 0..CAPABILITIES {
            // Only who has CAP_SETPCAP can. Without capabilities and with no_new_privs it bounds nothing any more.
            libc::syscall(libc::SYS_prctl, libc::PR_CAPBSET_DROP, capability, zero, zero, zero);
        }
        if ruleset != NONE {
            step(2, libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0u32))?;
        }
        let header = CapabilityHeader {
            version: 0x2008_0522,
            thread: 0,
        };
        let none = [0u32; 6];
        step(3, libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()))
    }
}
