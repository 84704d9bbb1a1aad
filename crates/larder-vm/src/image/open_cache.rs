//! A disk's cache at work.

use std::cell::RefCell;
use std::rc::Rc;

use larder_block::{BlockDevice, ByteLen};
use larder_cache::{Cache, Mode};

use super::ImageAddress;
use super::cache::{may_write_back, no_note};
use super::cache_note::{Lock, Made};
use crate::data_limit::Share;

/// A cache that is open.
pub struct OpenCache {
    /// The layer of the disk's stack.
    pub layer: Rc<Cache>,
    /// What it is on.
    pub file: ImageAddress,
    /// How large that is.
    pub size: ByteLen,
    /// Room for what the server keeps of it in memory.
    pub(super) _memory: Share,
    pub(super) fast: Rc<dyn BlockDevice>,
    pub(super) note: Made,
    /// The note stays when the cache is closed, for a server or command that uses the disk without it: part of the disk is
    /// on a device or an export, and nothing else tells that it was changed.
    pub(super) keeps_note: bool,
    /// As long as nobody else may use it.
    pub(super) lock: RefCell<Option<Lock>>,
}

impl OpenCache {
    /// After the disk was closed, and the cache with it: its note is of no use any more, unless it could not be closed, or
    /// has what the disk has not, or nothing else tells that the disk was used without it.
    pub(crate) fn forget_note(&self) {
        if !self.layer.works() || self.layer.is_noted_dirty() {
            return;
        }
        // If it fails, what stays speaks for this session only, which has ended; and it may say too much.
        let _ = match self.keeps_note {
            true => self.note.close(),
            false => self.note.take_back(),
        };
    }

    /// Another one takes its place: nobody believes of it what may not be so any more. What only one has that has failed is
    /// given up, if it `is_lost`.
    ///
    /// # Errors
    /// As a text for people; it may be believed.
    pub(super) async fn retire(&self, is_lost: bool) -> Result<(), String> {
        let closed = match self.layer.works() {
            true => self.layer.leave().await,
            false => Ok(()),
        };
        // One that has failed, perhaps just now, notes that all is superseded.
        let is_given = !is_lost && !self.layer.works() && self.layer.hand_over().await.is_ok();
        let noted = match &closed {
            Ok(()) if self.layer.works() && !self.layer.is_noted_dirty() => self.note.take_back(),
            Ok(()) if is_given && self.note.is_detached() => {
                let noted = self.note.set_dirty(false);
                self.note.end();
                noted
            }
            _ => self.note.give_up(),
        };
        closed.map_err(|error| error.to_string())?;
        noted.map_err(|error| error.to_string())
    }

    /// Has writes go another way; see [`Cache::set_mode`].
    ///
    /// # Errors
    /// As a text for people.
    pub(super) async fn set_mode(&self, mode: Mode) -> Result<(), String> {
        if mode == Mode::WriteBack {
            may_write_back(&self.file).map_err(|error| error.to_string())?;
            if !self.note.is_there() {
                return Err(no_note(self.note.place()));
            }
            let noted = self.note.set_dirty(true);
            noted.map_err(|error| no_note(format_args!("{}: {error}", self.note.place())))?;
        }
        self.layer.set_mode(mode).await.map_err(|error| error.to_string())?;
        if !self.layer.may_be_dirty() && self.note.is_there() {
            // If it fails, it says too much.
            let _ = self.note.set_dirty(false);
        }
        Ok(())
    }

    /// Has the disk have all that only the cache has.
    ///
    /// # Errors
    /// As a text for people.
    pub(super) async fn flush(&self) -> Result<(), String> {
        self.layer.clean().await.map_err(|error| error.to_string())
    }
}
