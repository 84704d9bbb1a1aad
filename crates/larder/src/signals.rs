//! Signals that ask the program to end, taken by a thread instead of a handler.

use std::io;
use std::time::{Duration, Instant};

/// Signals that come this soon after the first mean the same stop: `timeout` signals a process and its group, and a
/// signal from a terminal may be passed on besides.
const SAME_STOP: Duration = Duration::from_secs(1);

/// Has a write past the size that a file of this process may have (RLIMIT_FSIZE) fail with EFBIG, which is reported as any
/// other error, instead of ending the process by SIGXFSZ. It is a handler, which programs that this one starts do not
/// inherit, as they would that the signal is ignored.
pub(crate) fn fail_writes_past_size_limit() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: a zeroed sigaction is valid, with an empty mask; the handler does nothing, which any code may be interrupted by.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGXFSZ, &raw const action, std::ptr::null_mut())
    };
    debug_assert_eq!(done, 0, "there is such a signal");
}

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
    /// Has a thread call `stop` at the first signal, and end the process at a later one.
    pub(crate) fn stop_by(self, stop: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.stop_by_all_but(None, || {}, stop)
    }

    /// The same, but whenever `other` comes it calls `act`.
    pub(crate) fn stop_by_or(
        self,
        other: i32,
        act: impl Fn() + Send + 'static,
        stop: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        self.stop_by_all_but(Some(other), act, stop)
    }

    fn stop_by_all_but(
        self,
        other: Option<i32>,
        act: impl Fn() + Send + 'static,
        stop: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let thread = std::thread::Builder::new().name("larder-signals".to_owned());
        thread.spawn(move || {
            let wait = || {
                while Some(self.wait()) == other {
                    act();
                }
            };
            wait();
            stop();
            let stopping = Instant::now();
            tracing::info!("stopping: finishing what is under way; another signal in a second or later gives up");
            loop {
                wait();
                if stopping.elapsed() >= SAME_STOP {
                    break;
                }
            }
            tracing::error!("given up: what was written last may not be on the disk; what only a cache in write-back has stays in that");
            std::process::exit(2);
        })?;
        Ok(())
    }

    /// Waits for one of them for so long, and says which.
    pub(crate) fn wait_for(&self, limit: Duration) -> Option<i32> {
        let limit = libc::timespec {
            tv_sec: limit.as_secs() as _,
            tv_nsec: limit.subsec_nanos() as _,
        };
        // SAFETY: the set and the time are valid; nothing is written.
        let signal = unsafe { libc::sigtimedwait(&raw const self.0, std::ptr::null_mut(), &raw const limit) };
        (signal > 0).then_some(signal)
    }

    /// Waits for one of them, and says which.
    pub(crate) fn wait(&self) -> i32 {
        let mut signal = 0;
        // SAFETY: the set is valid and `signal` a place for the answer. It fails only for an invalid set.
        unsafe { libc::sigwait(&raw const self.0, &raw mut signal) };
        signal
    }
}
