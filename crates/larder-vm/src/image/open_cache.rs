//! An open cache of a disk.

use std::cell::RefCell;
use std::rc::Rc;

use larder_block::{BlockDevice, ByteLen};
use larder_cache::{Cache, CacheMode};

use super::ImageAddress;
use super::cache::{check_write_back, state_file_required};
use super::cache_spec::cache_mode_long_name;
use super::cache_state::{CacheLock, StateFileWriter};
use crate::data_limit::MemoryShare;

/// A cache that is open.
pub struct OpenCache {
    /// Cache layer of the disk's stack.
    pub layer: Rc<Cache>,
    /// File, device or export that the cache is on.
    pub file: ImageAddress,
    /// Size of the cache's device.
    pub size: ByteLen,
    /// The server's memory allowance for this cache.
    pub(super) _memory: MemoryShare,
    pub(super) fast: Rc<dyn BlockDevice>,
    pub(super) state_file: StateFileWriter,
    /// The state file remains when the cache is closed, so that a server or command that uses the disk without the
    /// cache can record that. It is needed if part of the disk is on a device or an export, where nothing else would
    /// show the change.
    pub(super) keeps_state_file: bool,
    /// Lock against other users of the cache, while it is held.
    pub(super) lock: RefCell<Option<CacheLock>>,
}

impl OpenCache {
    /// Logs that the disk uses the cache.
    pub(super) fn log_opened(&self) {
        let mode = cache_mode_long_name(self.layer.mode());
        tracing::debug!(event = "cache-opened", "the cache on {} is in use: {}, {mode}", self.file, self.size);
    }

    /// Removes the cache's state file after the disk and the cache were closed. The file remains if the cache could
    /// not be closed, if it has dirty data, or if nothing else would show that the disk was used without it.
    pub(crate) fn close_state_file(&self) {
        if !self.layer.is_working() || self.layer.is_recorded_dirty() {
            return;
        }
        // A state file that remains describes only this session, which has ended, and errs towards discarding.
        let _ = match self.keeps_state_file {
            true => self.state_file.close(),
            false => self.state_file.remove(),
        };
    }

    /// Retires a cache that is being replaced: its data becomes stale. If the cache has failed and `loses_dirty` is
    /// set, dirty data in it is discarded.
    ///
    /// # Errors
    /// A message for the user; the cache's data may then still count as valid.
    pub(super) async fn retire(&self, loses_dirty: bool) -> Result<(), String> {
        let closed = match self.layer.is_working() {
            true => self.layer.detach().await,
            false => Ok(()),
        };
        // A cache that has failed, perhaps just now, records all its data as superseded.
        let is_handed_over = !loses_dirty && !self.layer.is_working() && self.layer.flush_dirty().await.is_ok();
        let recorded = match &closed {
            Ok(()) if self.layer.is_working() && !self.layer.is_recorded_dirty() => self.state_file.remove(),
            Ok(()) if is_handed_over && self.state_file.is_detached() => {
                let recorded = self.state_file.set_dirty(false);
                self.state_file.stop_updates();
                recorded
            }
            _ => self.state_file.mark_used(),
        };
        closed.map_err(|error| error.to_string())?;
        recorded.map_err(|error| error.to_string())
    }

    /// Changes the write policy; see [`Cache::set_mode`].
    ///
    /// # Errors
    /// A message for the user.
    pub(super) async fn set_mode(&self, mode: CacheMode) -> Result<(), String> {
        if mode == CacheMode::WriteBack {
            check_write_back(&self.file).map_err(|error| error.to_string())?;
            if !self.state_file.exists() {
                return Err(state_file_required(self.state_file.display_path()));
            }
            let recorded = self.state_file.set_dirty(true);
            recorded
                .map_err(|error| state_file_required(format_args!("{}: {error}", self.state_file.display_path())))?;
        }
        self.layer.set_mode(mode).await.map_err(|error| error.to_string())?;
        if !self.layer.may_be_dirty() && self.state_file.exists() {
            // If this fails, the state file still says dirty, which is safe.
            let _ = self.state_file.set_dirty(false);
        }
        Ok(())
    }

    /// Writes all dirty data to the disk.
    ///
    /// # Errors
    /// A message for the user.
    pub(super) async fn flush(&self) -> Result<(), String> {
        self.layer.clean().await.map_err(|error| error.to_string())
    }
}
