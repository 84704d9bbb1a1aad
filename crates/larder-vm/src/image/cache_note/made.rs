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

use super::{Note, Noted, folder_of, new_of};
use crate::image::disk_id::{self, DiskFile, FileStamp};
use crate::runtime_folder;

/// Interval at which the disk's files are checked for changes.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Minimum interval between two records of fingerprints, because each costs a flush of the state file's file system.
const NOTE_INTERVAL: Duration = Duration::from_secs(10);

/// State file of an open cache. Creating the file may have failed. The disk's thread changes it, and so does a thread
/// that records fingerprints.
#[derive(Clone)]
pub(in crate::image) struct Made {
    note: Note,
    /// Content of the file; `None` if it does not exist, or must not be written any more. The lock is never held for
    /// long.
    noted: Arc<Mutex<Option<Noted>>>,
    /// Held while the file is changed, which takes as long as a flush of its file system.
    changing: Arc<Mutex<()>>,
    files: Arc<[DiskFile]>,
}

impl Made {
    pub(super) fn new(note: Note, noted: Option<Noted>, files: &[DiskFile]) -> Self {
        Self {
            note,
            noted: Arc::new(Mutex::new(noted)),
            changing: Arc::default(),
            files: files.into(),
        }
    }

    fn noted(&self) -> MutexGuard<'_, Option<Noted>> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the state file exists and is kept up to date.
    pub(in crate::image) fn is_there(&self) -> bool {
        self.noted().is_some()
    }

    /// Changes the state file, if it exists.
    fn change(&self, change: impl FnOnce(&mut Noted)) -> io::Result<()> {
        let _alone = self.changing();
        let changed = self.noted().as_mut().map(|noted| {
            change(noted);
            noted.clone()
        });
        match (changed, &self.note.path) {
            (Some(changed), Some(path)) => changed.write(path),
            _ => Err(io::Error::new(io::ErrorKind::NotFound, "the cache has no state file")),
        }
    }

    /// Returns the file's location.
    pub(in crate::image) fn note(&self) -> &Note {
        &self.note
    }

    /// Ends all changes by this process: the file remains as it is, or other processes change it.
    pub(in crate::image) fn end(&self) {
        self.pause();
    }

    /// Ends all changes until [`Made::resume`] is called with the value that this returns.
    pub(in crate::image) fn pause(&self) -> Option<Noted> {
        let _alone = self.changing();
        self.noted().take()
    }

    /// Resumes changes after another opening of the cache has changed the file and failed. The only part of its
    /// changes that is kept is the session numbers that it used.
    pub(in crate::image) fn resume(&self, paused: Option<Noted>, on: &Loop, cache: &Rc<Cache>) {
        let (Some(mut ours), Some(path)) = (paused, &self.note.path) else {
            return;
        };
        let theirs = small_file::read_text(path, STATE_BYTES_MAX).ok();
        if let Some(theirs) = theirs.as_deref().and_then(Noted::parse) {
            ours.sessions.extend(theirs.sessions);
            ours.sessions.sort_unstable();
            ours.sessions.dedup();
        }
        *self.noted() = Some(ours);
        if let Err(error) = self.change(|_| {}) {
            tracing::warn!(
                "{}: cannot record which data of the failed cache is valid, so none of it will be trusted: {error}",
                self.note.place()
            );
        }
        on.spawn(self.clone().keep(on.clone(), Rc::downgrade(cache)));
    }

    /// Records whether the cache may be dirty.
    pub(in crate::image) fn set_dirty(&self, dirty: bool) -> io::Result<()> {
        self.change(|noted| noted.is_dirty = dirty)
    }

    /// Returns whether the file records that the device has failed.
    pub(in crate::image) fn is_detached(&self) -> bool {
        self.noted().as_ref().is_some_and(|noted| noted.detached.is_some())
    }

    /// Records that from now on the disk is used without the cache, which is not closed: see
    /// [`super::Other::is_used_without`]. The file is not changed any more.
    pub(in crate::image) fn give_up(&self) -> io::Result<()> {
        if !self.is_there() {
            // A file that could not be removed earlier may still say that the cache is valid.
            return self.note.take_back();
        }
        let noted = self.change(|noted| noted.is_used = true);
        self.end();
        noted
    }

    /// Records that the cache was closed and is clean. The file remains, so that other processes can mark in it that
    /// the disk is used without the cache. It is not changed any more.
    pub(in crate::image) fn close(&self) -> io::Result<()> {
        if !self.is_there() {
            return Ok(());
        }
        let noted = self.set_dirty(false);
        self.end();
        noted
    }

    /// Returns the path of the file for messages; see [`Note::place`].
    pub(in crate::image) fn place(&self) -> String {
        self.note.place()
    }

    /// Removes the file; see [`Note::take_back`]. It is not created again.
    pub(in crate::image) fn take_back(&self) -> io::Result<()> {
        let _alone = self.changing();
        *self.noted() = None;
        self.note.take_back()
    }

    /// Drops the previous session from the next write of the file: the opened cache records its session itself now.
    pub(in crate::image) fn is_opened(&self) {
        if let Some(noted) = &mut *self.noted() {
            noted.drop_old_sessions();
        }
    }

    /// Writes the fingerprints to the copy in memory, without waiting for a disk.
    fn say_lately(&self, stamps: Vec<FileStamp>) -> io::Result<()> {
        let Some(noted) = self.noted().clone() else {
            return Ok(());
        };
        let mut lately = noted;
        lately.set_stamps(stamps);
        let path = self.note.lately().ok_or(io::ErrorKind::NotFound)?;
        // The outer directory also has files for other users, such as sockets.
        for (folder, mode) in [(folder_of(folder_of(&path)), 0o755), (folder_of(&path), 0o700)] {
            runtime_folder::make(folder, mode)?;
        }
        let new = new_of(&path);
        fs::write(&new, lately.text())?;
        fs::rename(&new, &path)
    }

    /// Records the fingerprints of the disk's files when they change, until the cache is dropped.
    pub(in crate::image) async fn keep(self, on: Loop, cache: Weak<Cache>) {
        let mut noted = disk_id::stamps_of_all(&self.files);
        // A thread writes the file, because that may take long, and requests must not wait for it.
        let mut writing: Option<JoinHandle<io::Result<()>>> = None;
        // Changes made by opening the disk are recorded at once.
        let mut again = on.now();
        let mut is_first = true;
        let mut is_told = false;
        while cache.upgrade().is_some() && self.is_there() {
            let stamps = disk_id::stamps_of_all(&self.files);
            // The copy is written each time, because its timestamp shows that this server is alive. If that fails,
            // only the state file is left, which may be out of date.
            let _ = self.say_lately(stamps.clone());
            if let Some(ended) = writing.take_if(|thread| thread.is_finished()) {
                match ended.join() {
                    Ok(Err(error)) => {
                        // This makes the next check try again.
                        noted = Vec::new();
                        if !std::mem::replace(&mut is_told, true) {
                            tracing::warn!(
                                "{}: cannot record the timestamps of the disk, so its cache will not be trusted after a kill or a crash: {error}",
                                self.note.place()
                            );
                        }
                    }
                    _ => is_told = false,
                }
            }
            if (stamps != noted || is_first) && writing.is_none() && on.now() >= again {
                if !std::mem::take(&mut is_first) {
                    again = on.now().after(NOTE_INTERVAL);
                }
                noted.clone_from(&stamps);
                let made = self.clone();
                let thread = std::thread::Builder::new().name("larder-note".to_owned());
                let write = move || match made.is_there() {
                    true => made.change(|noted| noted.set_stamps(stamps)),
                    false => Ok(()),
                };
                writing = thread.spawn(write).ok();
            }
            on.sleep(LOOK_INTERVAL).await;
        }
    }
}

/// Writes the file before returning: guest writes wait for it anyway, and it happens only after the cache device has
/// failed.
impl FailureLog for Made {
    fn record_failed(&self) -> BoxFuture<'_, io::Result<()>> {
        let noted = self.change(|noted| {
            noted.detached.get_or_insert_default();
        });
        // Without a state file the cache is discarded, which is as safe.
        let done = noted.or_else(|_| self.take_back());
        Box::pin(std::future::ready(done))
    }

    fn record_superseded(&self, range: ByteRange) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(std::future::ready(self.change(|noted| noted.supersede(range))))
    }

    fn clear(&self) -> BoxFuture<'_, io::Result<()>> {
        let attached = match self.is_there() {
            true => self.change(|noted| {
                noted.detached = None;
                noted.drop_old_sessions();
            }),
            // The last file does not cover this session, so it need not be changed.
            false => Ok(()),
        };
        Box::pin(std::future::ready(attached))
    }
}
