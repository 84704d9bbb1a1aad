//! Kills this process before a chosen request to the kernel, while it makes calls in another process.
//!
//! The linker prefers the functions of this file to those of the C library, so every request about another process
//! passes through here.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

static REQUESTS: AtomicU64 = AtomicU64::new(0);
/// Number of the request before which the process dies; 0 for none.
static AT: AtomicU64 = AtomicU64::new(0);
/// Signal to send before that: PID, signal number, and value.
static LAST_WORDS: [AtomicU64; 3] = [AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)];

/// Makes this process die before request number `request`, counted from 1. Just before, it sends `signal` with
/// `value` to `pid`.
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
    let value = libc::sigval { sival_ptr: value as *mut c_void };
    // SAFETY: these take no pointers, but a number in the place of one.
    unsafe {
        assert_eq!(libc::sigqueue(pid as i32, signal as i32, value), 0);
        libc::kill(libc::getpid(), libc::SIGKILL);
    }
    // Other threads of this process may still run.
    loop {
        std::hint::spin_loop();
    }
}

#[unsafe(no_mangle)]
extern "C" fn ptrace(request: libc::c_uint, pid: libc::pid_t, address: *mut c_void, data: *mut c_void) -> i64 {
    // Not counted, because it polls whether the process has stopped.
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
        libc::syscall(libc::SYS_process_vm_writev, pid, local, local_count, remote, remote_count, flags)
    };
    done as isize
}
