//! A disk's cache at work.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use larder_block::{ByteLen, IoResult};
use larder_cache::{Cache, Mode};

use super::ImageAddress;
use super::cache::{may_write_back, no_note};
use super::cache_note::Made;

/// A cache that is open.
pub struct OpenCache {
    /// The layer of the disk's stack.
    pub layer: Rc<Cache>,
    /// What it is on.
    pub file: ImageAddress,
    /// How large that is.
    pub size: ByteLen,
    /// What may be written to it in a day.
    pub endurance: Option<ByteLen>,
    /// What is written to the disk because somebody wants it there.
    pub(crate) flush: Flush,
    pub(super) note: Made,
}

impl OpenCache {
    /// After the disk was closed, and the cache with it: its note is of no use any more, unless it could not be closed.
    pub(crate) fn forget_note(&self) {
        if self.layer.works() {
            // One that stays speaks for this session only, which has ended.
            let _ = self.note.take_back();
        }
    }

    /// Has writes go another way; see [`Cache::set_mode`].
    ///
    /// # Errors
    /// As a text for people.
    pub(crate) async fn set_mode(&self, mode: Mode) -> Result<(), String> {
        if mode == Mode::WriteBack {
            may_write_back(&self.file).map_err(|error| error.to_string())?;
            if !self.note.is_there() {
                return Err(no_note(self.note.place()));
            }
        }
        let changed = self.flush.during(self.layer.set_mode(mode)).await;
        changed.map_err(|error| error.to_string())
    }

    /// Has the disk have all that only the cache has.
    ///
    /// # Errors
    /// As a text for people.
    pub(crate) async fn flush(&self) -> Result<(), String> {
        let flushed = self.flush.during(self.layer.clean()).await;
        flushed.map_err(|error| error.to_string())
    }
}

/// What is being written to the disk because somebody wants it there.
#[derive(Default)]
pub(crate) struct Flush {
    running: Cell<u32>,
    error: RefCell<Option<String>>,
}

impl Flush {
    async fn during(&self, work: impl Future<Output = IoResult>) -> IoResult {
        self.running.set(self.running.get() + 1);
        let done = work.await;
        self.running.set(self.running.get() - 1);
        *self.error.borrow_mut() = done.as_ref().err().map(ToString::to_string);
        done
    }

    /// It has not ended.
    pub(crate) fn is_running(&self) -> bool {
        self.running.get() > 0
    }

    /// Why the last one that has ended could not be done.
    pub(crate) fn error(&self) -> Option<String> {
        self.error.borrow().clone()
    }
}
