//! Signals that ask the program to end, taken by a thread instead of a handler.

use std::io;

/// SIGINT, SIGTERM and SIGHUP, blocked in every thread that is started from now on.
pub(crate) struct Signals(libc::sigset_t);

/// Blocks the signals. Call it before any thread is started.
pub(crate) fn block() -> io::Result<Signals> {
    // SAFETY: a zeroed set is a valid place for sigemptyset, which makes it a valid set; the rest only fill it.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
            0 => Ok(Signals(set)),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

impl Signals {
    /// Waits for one of them, and says which.
    pub(crate) fn wait(&self) -> i32 {
        let mut signal = 0;
        // SAFETY: the set is valid and `signal` a place for the answer. It fails only for an invalid set.
        unsafe { libc::sigwait(&raw const self.0, &raw mut signal) };
        signal
    }
}
