//! The state file of a cache while the cache is in use.

use std::fs;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_block::small_file::{self, STATE_BYTES_MAX};
use larder_block::{BoxFuture, ByteRange, Loop};
use larder_cache::{Cache, FailureLog};

use super::{StateFile, StateRecord, parent_directory, temporary_path};
use crate::image::disk_id::{self, DiskFile, FileFingerprint};
use crate::runtime_directory;

/// Interval at which the disk's files are checked for changes.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Minimum interval between two records of fingerprints, because each costs a flush of the state file's file system.
const RECORD_INTERVAL_MIN: Duration = Duration::from_secs(10);

/// State file of an open cache. Creating the file may have failed. The disk's thread changes it, and so does a thread
/// that records fingerprints.
#[derive(Clone)]
pub(in crate::image) struct StateFileWriter {
    state_file: StateFile,
    /// Content of the file; `None` if it does not exist, or must not be written any more. The lock is never held for
    /// long.
    record: Arc<Mutex<Option<StateRecord>>>,
    /// Held while the file is changed, which takes as long as a flush of its file system.
    write_lock: Arc<Mutex<()>>,
    files: Arc<[DiskFile]>,
}

impl StateFileWriter {
    pub(super) fn new(state_file: StateFile, record: Option<StateRecord>, files: &[DiskFile]) -> Self {
        Self { state_file, record: Arc::new(Mutex::new(record)), write_lock: Arc::default(), files: files.into() }
    }

    fn lock_record(&self) -> MutexGuard<'_, Option<StateRecord>> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_for_write(&self) -> MutexGuard<'_, ()> {
        self.write_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the state file exists and is kept up to date.
    pub(in crate::image) fn exists(&self) -> bool {
        self.lock_record().is_some()
    }

    /// Changes the state file, if it exists.
    fn update(&self, change: impl FnOnce(&mut StateRecord)) -> io::Result<()> {
        let _write_guard = self.lock_for_write();
        let changed = self.lock_record().as_mut().map(|record| {
            change(record);
            record.clone()
        });
        match (changed, &self.state_file.path) {
            (Some(changed), Some(path)) => changed.write(path),
            _ => Err(io::Error::new(io::ErrorKind::NotFound, "the cache has no state file")),
        }
    }

    /// Returns the file's location.
    pub(in crate::image) fn state_file(&self) -> &StateFile {
        &self.state_file
    }

    /// Ends all changes by this process: the file remains as it is, or other processes change it.
    pub(in crate::image) fn stop_updates(&self) {
        self.pause();
    }

    /// Ends all changes until [`StateFileWriter::resume`] is called with the value that this returns.
    pub(in crate::image) fn pause(&self) -> Option<StateRecord> {
        let _write_guard = self.lock_for_write();
        self.lock_record().take()
    }

    /// Resumes changes after another opening of the cache has changed the file and failed. The only part of its
    /// changes that is kept is the session numbers that it used.
    pub(in crate::image) fn resume(&self, paused: Option<StateRecord>, on: &Loop, cache: &Rc<Cache>) {
        let (Some(mut paused_record), Some(path)) = (paused, &self.state_file.path) else {
            return;
        };
        let file_record = small_file::read_text(path, STATE_BYTES_MAX).ok();
        if let Some(file_record) = file_record.as_deref().and_then(StateRecord::parse) {
            paused_record.sessions.extend(file_record.sessions);
            paused_record.sessions.sort_unstable();
            paused_record.sessions.dedup();
        }
        *self.lock_record() = Some(paused_record);
        if let Err(error) = self.update(|_| {}) {
            tracing::warn!(
                "{}: cannot record which data of the failed cache is valid, so none of it will be trusted: {error}",
                self.state_file.display_path()
            );
        }
        on.spawn(self.clone().track_changes(on.clone(), Rc::downgrade(cache)));
    }

    /// Records whether the cache may be dirty.
    pub(in crate::image) fn set_dirty(&self, dirty: bool) -> io::Result<()> {
        self.update(|record| record.is_dirty = dirty)
    }

    /// Returns whether the file records that the device has failed.
    pub(in crate::image) fn is_detached(&self) -> bool {
        self.lock_record().as_ref().is_some_and(|record| record.detached.is_some())
    }

    /// Records that from now on the disk is used without the cache, which is not closed: see
    /// [`super::OtherCache::mark_used`]. The file is not changed any more.
    pub(in crate::image) fn mark_used(&self) -> io::Result<()> {
        if !self.exists() {
            // A file that could not be removed earlier may still say that the cache is valid.
            return self.state_file.remove();
        }
        let recorded = self.update(|noted| noted.used_without_cache = true);
        self.stop_updates();
        recorded
    }

    /// Records that the cache was closed and is clean. The file remains, so that other processes can mark in it that
    /// the disk is used without the cache. It is not changed any more.
    pub(in crate::image) fn close(&self) -> io::Result<()> {
        if !self.exists() {
            return Ok(());
        }
        let recorded = self.set_dirty(false);
        self.stop_updates();
        recorded
    }

    /// Returns the path of the file for messages; see [`StateFile::display_path`].
    pub(in crate::image) fn display_path(&self) -> String {
        self.state_file.display_path()
    }

    /// Removes the file; see [`StateFile::remove`]. It is not created again.
    pub(in crate::image) fn remove(&self) -> io::Result<()> {
        let _write_guard = self.lock_for_write();
        *self.lock_record() = None;
        self.state_file.remove()
    }

    /// Drops the previous session from the next write of the file: the opened cache records its session itself now.
    pub(in crate::image) fn drop_previous_session(&self) {
        if let Some(record) = &mut *self.lock_record() {
            record.drop_old_sessions();
        }
    }

    /// Writes the fingerprints to the copy in memory, without waiting for a disk.
    fn write_memory_copy(&self, fingerprints: Vec<FileFingerprint>) -> io::Result<()> {
        let Some(record) = self.lock_record().clone() else {
            return Ok(());
        };
        let mut memory_copy = record;
        memory_copy.set_fingerprints(fingerprints);
        let path = self.state_file.memory_copy_path().ok_or(io::ErrorKind::NotFound)?;
        // The outer directory also has files for other users, such as sockets.
        for (directory, mode) in [(parent_directory(parent_directory(&path)), 0o755), (parent_directory(&path), 0o700)]
        {
            runtime_directory::create(directory, mode)?;
        }
        let new = temporary_path(&path);
        fs::write(&new, memory_copy.text())?;
        fs::rename(&new, &path)
    }

    /// Records the fingerprints of the disk's files when they change, until the cache is dropped.
    pub(in crate::image) async fn track_changes(self, on: Loop, cache: Weak<Cache>) {
        let mut recorded = disk_id::current_fingerprints(&self.files);
        // A thread writes the file, because that may take long, and requests must not wait for it.
        let mut writing: Option<JoinHandle<io::Result<()>>> = None;
        // Changes made by opening the disk are recorded at once.
        let mut next_write = on.now();
        let mut is_first = true;
        let mut warned = false;
        while cache.upgrade().is_some() && self.exists() {
            let fingerprints = disk_id::current_fingerprints(&self.files);
            // The copy is written each time, because its timestamp shows that this server is alive. If that fails,
            // only the state file is left, which may be out of date.
            let _ = self.write_memory_copy(fingerprints.clone());
            if let Some(ended) = writing.take_if(|thread| thread.is_finished()) {
                match ended.join() {
                    Ok(Err(error)) => {
                        // This makes the next check try again.
                        recorded = Vec::new();
                        if !std::mem::replace(&mut warned, true) {
                            tracing::warn!(
                                "{}: cannot record the timestamps of the disk, so its cache will not be trusted after a kill or a crash: {error}",
                                self.state_file.display_path()
                            );
                        }
                    }
                    _ => warned = false,
                }
            }
            if (fingerprints != recorded || is_first) && writing.is_none() && on.now() >= next_write {
                if !std::mem::take(&mut is_first) {
                    next_write = on.now().after(RECORD_INTERVAL_MIN);
                }
                recorded.clone_from(&fingerprints);
                let writer = self.clone();
                let thread = std::thread::Builder::new().name("larder-note".to_owned());
                let write = move || match writer.exists() {
                    true => writer.update(|record| record.set_fingerprints(fingerprints)),
                    false => Ok(()),
                };
                writing = thread.spawn(write).ok();
            }
            on.sleep(POLL_INTERVAL).await;
        }
    }
}

/// Writes the file before returning: guest writes wait for it anyway, and it happens only after the cache device has
/// failed.
impl FailureLog for StateFileWriter {
    fn record_failed(&self) -> BoxFuture<'_, io::Result<()>> {
        let recorded = self.update(|record| {
            record.detached.get_or_insert_default();
        });
        // Without a state file the cache is discarded, which is as safe.
        let done = recorded.or_else(|_| self.remove());
        Box::pin(std::future::ready(done))
    }

    fn record_superseded(&self, range: ByteRange) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(std::future::ready(self.update(|record| record.supersede(range))))
    }

    fn clear(&self) -> BoxFuture<'_, io::Result<()>> {
        let attached = match self.exists() {
            true => self.update(|record| {
                record.detached = None;
                record.drop_old_sessions();
            }),
            // The last file does not cover this session, so it need not be changed.
            false => Ok(()),
        };
        Box::pin(std::future::ready(attached))
    }
}
