//! Dies amid making calls in another process, before a certain request to the kernel.
//!
//! What the linker finds here takes the place of the C library's: every request about another process comes by.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

static REQUESTS: AtomicU64 = AtomicU64::new(0);
/// Before which request to die; 0 for none.
static AT: AtomicU64 = AtomicU64::new(0);
/// What to send before, to whom, and with what.
static LAST_WORDS: [AtomicU64; 3] = [AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)];

/// From here on, dies before the request of this number, the first one being 1, having sent a signal with a value.
pub(crate) fn at(request: u64, pid: i32, signal: i32, value: u64) {
    for (word, content) in LAST_WORDS.iter().zip([pid as u64, signal as u64, value]) {
        word.store(content, Ordering::SeqCst);
    }
    AT.store(request, Ordering::SeqCst);
}

fn step() {
    let number = REQUESTS.fetch_add(1, Ordering::SeqCst) + 1;
    if number != AT.load(Ordering::SeqCst) {
        return;
    }
    let [pid, signal, value] = [0, 1, 2].map(|word: usize| LAST_WORDS[word].load(Ordering::SeqCst));
    let value = libc::sigval {
        sival_ptr: value as *mut c_void,
    };
    // SAFETY: these take no pointers, but a number in the place of one.
    unsafe {
        assert_eq!(libc::sigqueue(pid as i32, signal as i32, value), 0);
        libc::kill(libc::getpid(), libc::SIGKILL);
    }
    // Other threads of ours may still run.
    loop {
        std::hint::spin_loop();
    }
}

#[unsafe(no_mangle)]
extern "C" fn ptrace(request: libc::c_uint, pid: libc::pid_t, address: *mut c_void, data: *mut c_void) -> i64 {
    // It is asked time and again whether the process has stopped.
    if request != libc::PTRACE_GETSIGINFO as libc::c_uint {
        step();
    }
    // SAFETY: as the C library does, for requests that return no value.
    unsafe { libc::syscall(libc::SYS_ptrace, u64::from(request), pid as i64, address, data) }
}

#[unsafe(no_mangle)]
extern "C" fn process_vm_writev(
    pid: libc::pid_t,
    local: *const libc::iovec,
    local_count: u64,
    remote: *const libc::iovec,
    remote_count: u64,
    flags: u64,
) -> isize {
    step();
    // SAFETY: as the C library does.
    let done = unsafe {
        let pid = pid as i64;
        libc::syscall(
            libc::SYS_process_vm_writev,
            pid,
            local,
            local_count,
            remote,
            remote_count,
            flags,
        )
    };
    done as isize
}
