//! Signals that ask the program to end, received by a thread instead of a handler.

use std::io;
use std::time::{Duration, Instant};

/// Signals within this time of the first one belong to the same request: `timeout` signals a process and its group,
/// and a signal from a terminal may be forwarded as well.
const DUPLICATE_SIGNAL_WINDOW: Duration = Duration::from_secs(1);

/// Makes a write past the limit of a file's size (RLIMIT_FSIZE) fail with EFBIG, which is reported like any other
/// error, instead of ending the process by SIGXFSZ. An empty handler does that, because child programs do not inherit
/// it; they would inherit an ignored signal.
pub(crate) fn fail_writes_past_size_limit() {
    extern "C" fn ignore_signal(_: libc::c_int) {}
    // SAFETY: a zeroed sigaction is valid, with an empty mask; the handler does nothing, so it may interrupt any
    // code.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore_signal as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGXFSZ, &raw const action, std::ptr::null_mut())
    };
    debug_assert_eq!(done, 0, "there is such a signal");
}

/// SIGINT, SIGTERM and SIGHUP, blocked in every thread that is started after [`block`].
pub(crate) struct Signals(libc::sigset_t);

/// Blocks the signals. It must be called before any thread is started.
pub(crate) fn block() -> io::Result<Signals> {
    // SAFETY: sigemptyset accepts any memory of a sigset_t, such as zeroed one, and makes it a valid set for the
    // other calls.
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
    /// Starts a thread that calls `stop` at the first signal, and ends the process at a later one.
    pub(crate) fn on_stop(self, stop: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.spawn_handler(None, || {}, stop)
    }

    /// Starts a thread that calls `stop` at the first signal, ends the process at a later one, and calls `act` at
    /// every signal `other`.
    pub(crate) fn on_stop_or(
        self,
        other: i32,
        act: impl Fn() + Send + 'static,
        stop: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        self.spawn_handler(Some(other), act, stop)
    }

    fn spawn_handler(
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
            tracing::info!("stopping: completing requests in flight; another signal after one second or more ends this process at once");
            loop {
                wait();
                if stopping.elapsed() >= DUPLICATE_SIGNAL_WINDOW {
                    break;
                }
            }
            tracing::error!("ended at once: the last writes may not be on the disk; dirty data of a write-back cache remains in the cache");
            std::process::exit(2);
        })?;
        Ok(())
    }

    /// Waits up to `timeout` for one of the signals, and returns it.
    pub(crate) fn wait_timeout(&self, timeout: Duration) -> Option<i32> {
        let timeout = libc::timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos() as _ };
        // SAFETY: the set and the time are valid, and the null pointer has no information stored.
        let signal = unsafe { libc::sigtimedwait(&raw const self.0, std::ptr::null_mut(), &raw const timeout) };
        (signal > 0).then_some(signal)
    }

    /// Waits for one of the signals, and returns it.
    pub(crate) fn wait(&self) -> i32 {
        let mut signal = 0;
        // SAFETY: the set is valid, and `signal` can be written. sigwait fails only for an invalid set.
        unsafe { libc::sigwait(&raw const self.0, &raw mut signal) };
        signal
    }
}
