//! The outcome of a thread, without its exit.
//!
//! The kernel lets a thread exit once the workers of its io_uring instances have ended, and a worker that flushes a device ends when
//! the device answers. A device that hangs would hold up whatever joins the thread.

use std::io;
use std::sync::mpsc;
use std::thread::Builder;

/// What a thread comes to.
pub(crate) struct Outcome<T>(mpsc::Receiver<T>);

impl<T: Send + 'static> Outcome<T> {
    /// Starts the thread.
    ///
    /// # Errors
    /// The host's.
    pub(crate) fn of(thread: Builder, work: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (report, outcome) = mpsc::channel();
        thread.spawn(move || {
            // Nobody may wait for it any more.
            let _ = report.send(work());
        })?;
        Ok(Self(outcome))
    }

    /// Waits for the outcome, which the thread reports after it has dropped all that it used; `None` if it has panicked.
    pub(crate) fn wait(self) -> Option<T> {
        self.0.recv().ok()
    }
}
