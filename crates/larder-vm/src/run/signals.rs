//! Signals as events that the supervisor's only thread can wait for.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

/// Signals that end QEMU, and are forwarded to it.
const FORWARDED_SIGNALS: [libc::c_int; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// A signal that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SignalEvent {
    /// One or more children have ended.
    Child,
    /// A request to end.
    Terminate {
        signal: Signal,
        /// The terminal sent the signal, so QEMU has received it too.
        from_terminal: bool,
    },
}

/// Signals that are blocked, and read from a signalfd.
pub(super) struct SignalFd(OwnedFd);

impl SignalFd {
    pub(super) fn block_signals() -> io::Result<Self> {
        // SAFETY: a zeroed set is a valid place for sigemptyset, which makes it a valid set; the other calls only
        // read or fill it. The descriptor is new, and has no other owner.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in FORWARDED_SIGNALS.into_iter().chain([libc::SIGCHLD]) {
                libc::sigaddset(&raw mut set, signal);
            }
            // If our parent ignores SIGCHLD, that is inherited, and ended children would be reaped without their exit
            // codes.
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
                0 => {}
                error => return Err(io::Error::from_raw_os_error(error)),
            }
            match libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
                -1 => Err(io::Error::last_os_error()),
                descriptor => Ok(Self(OwnedFd::from_raw_fd(descriptor))),
            }
        }
    }

    /// Waits for a signal, at most for `timeout`; `None` if none arrived.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> io::Result<Option<SignalEvent>> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], timeout.as_ref()) {
            Ok(0) => return Ok(None),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.read_signal()
    }

    fn read_signal(&self) -> io::Result<Option<SignalEvent>> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: `info` has room for `size` bytes.
        let count = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), size) };
        if count < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        // SAFETY: a signalfd returns whole structures only, so this one has been filled.
        let info = unsafe { info.assume_init() };
        let Some(signal) = i32::try_from(info.ssi_signo).ok().and_then(Signal::from_named_raw) else {
            return Ok(None);
        };
        Ok(Some(match signal {
            Signal::CHILD => SignalEvent::Child,
            signal => SignalEvent::Terminate { signal, from_terminal: info.ssi_code == libc::SI_KERNEL },
        }))
    }
}
