//! The result of a thread, available before the thread exits.
//!
//! The kernel delays a thread's exit until the workers of its io_uring instances have ended, and a worker that
//! flushes a device ends when the device answers. So a device that hangs would block a join of the thread.

use std::io;
use std::sync::mpsc;
use std::thread::Builder;

/// The future result of a thread.
pub(crate) struct ThreadResult<T>(mpsc::Receiver<T>);

impl<T: Send + 'static> ThreadResult<T> {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(crate) fn spawn(thread: Builder, work: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (report, receiver) = mpsc::channel();
        thread.spawn(move || {
            // The receiver may have been dropped.
            let _ = report.send(work());
        })?;
        Ok(Self(receiver))
    }

    /// Waits for the result, which the thread reports after it has dropped everything that it used; `None` if it has
    /// panicked.
    pub(crate) fn wait(self) -> Option<T> {
        self.0.recv().ok()
    }
}
