//! The note of a cache while it is used.

use std::fs;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_block::small_file::{self, STATE_BYTES_MAX};
use larder_block::{BoxFuture, ByteRange, Loop};
use larder_cache::{Cache, Witness};

use super::{Note, Noted, folder_of, new_of};
use crate::image::disk_id::{self, DiskFile, FileStamp};
use crate::runtime_folder;

/// How often it is looked whether the disk's files have changed.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Stamps are noted no sooner than so long after the last ones, because that costs a flush of the note's file system.
const NOTE_INTERVAL: Duration = Duration::from_secs(10);

/// A note that was made, unless it could not be. It is changed by the disk's thread, and by one that notes stamps.
#[derive(Clone)]
pub(in crate::image) struct Made {
    note: Note,
    /// What stands in it; `None` if there is none, or is to be none any more. Never held for long.
    noted: Arc<Mutex<Option<Noted>>>,
    /// Held while it is changed, which takes as long as a flush of its file system.
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

    /// There is one.
    pub(in crate::image) fn is_there(&self) -> bool {
        self.noted().is_some()
    }

    /// Changes what stands in it, if there is one.
    fn change(&self, change: impl FnOnce(&mut Noted)) -> io::Result<()> {
        let _alone = self.changing();
        let changed = self.noted().as_mut().map(|noted| {
            change(noted);
            noted.clone()
        });
        match (changed, &self.note.path) {
            (Some(changed), Some(path)) => changed.write(path),
            _ => Err(io::Error::new(io::ErrorKind::NotFound, "there is no note of it")),
        }
    }

    /// The note.
    pub(in crate::image) fn note(&self) -> &Note {
        &self.note
    }

    /// It is not changed any more: it stays as it is, or others change it.
    pub(in crate::image) fn end(&self) {
        self.pause();
    }

    /// The same, until [`Made::resume`] is called with what this returns.
    pub(in crate::image) fn pause(&self) -> Option<Noted> {
        let _alone = self.changing();
        self.noted().take()
    }

    /// Others have changed it, in vain: what they have come to is that there was one session more, or several.
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
                "{}: what of a failed cache is right cannot be noted, so it will not be believed: {error}",
                self.note.place()
            );
        }
        on.spawn(self.clone().keep(on.clone(), Rc::downgrade(cache)));
    }

    /// Notes whether the cache may have what the disk has not.
    pub(in crate::image) fn set_dirty(&self, dirty: bool) -> io::Result<()> {
        self.change(|noted| noted.is_dirty = dirty)
    }

    /// It says that the device has failed.
    pub(in crate::image) fn is_detached(&self) -> bool {
        self.noted().as_ref().is_some_and(|noted| noted.detached.is_some())
    }

    /// The disk is used from now on without the cache, which is not closed: see [`Other::is_used_without`]. It is not changed
    /// any more.
    pub(in crate::image) fn give_up(&self) -> io::Result<()> {
        if !self.is_there() {
            // One that could not be taken back before may say that all is well.
            return self.note.take_back();
        }
        let noted = self.change(|noted| noted.is_used = true);
        self.end();
        noted
    }

    /// The cache was closed, and has nothing that the disk has not. The note stays, for others to note in it that the disk is
    /// used without the cache. It is not changed any more.
    pub(in crate::image) fn close(&self) -> io::Result<()> {
        if !self.is_there() {
            return Ok(());
        }
        let noted = self.set_dirty(false);
        self.end();
        noted
    }

    /// See [`Note::place`].
    pub(in crate::image) fn place(&self) -> String {
        self.note.place()
    }

    /// See [`Note::take_back`]. Nothing makes it again.
    pub(in crate::image) fn take_back(&self) -> io::Result<()> {
        let _alone = self.changing();
        *self.noted() = None;
        self.note.take_back()
    }

    /// The cache was opened, and says so itself: there is no other session.
    pub(in crate::image) fn is_opened(&self) {
        if let Some(noted) = &mut *self.noted() {
            noted.drop_old_sessions();
        }
    }

    /// Notes stamps where that takes no time.
    fn say_lately(&self, stamps: Vec<FileStamp>) -> io::Result<()> {
        let Some(noted) = self.noted().clone() else {
            return Ok(());
        };
        let mut lately = noted;
        lately.set_stamps(stamps);
        let path = self.note.lately().ok_or(io::ErrorKind::NotFound)?;
        // Others may have something to look for in the upper one, sockets for instance.
        for (folder, mode) in [(folder_of(folder_of(&path)), 0o755), (folder_of(&path), 0o700)] {
            runtime_folder::make(folder, mode)?;
        }
        let new = new_of(&path);
        fs::write(&new, lately.text())?;
        fs::rename(&new, &path)
    }

    /// Notes the stamps of the disk's files when they change, as long as the cache is there.
    pub(in crate::image) async fn keep(self, on: Loop, cache: Weak<Cache>) {
        let mut noted = disk_id::stamps_of_all(&self.files);
        // By a thread, because it may take long, and requests do not wait for it.
        let mut writing: Option<JoinHandle<io::Result<()>>> = None;
        // What was changed when they were opened is noted at once.
        let mut again = on.now();
        let mut is_first = true;
        let mut is_told = false;
        while cache.upgrade().is_some() && self.is_there() {
            let stamps = disk_id::stamps_of_all(&self.files);
            // Each time, because its own time says that this server is alive. Without it a note that comes too late is all
            // that there is.
            let _ = self.say_lately(stamps.clone());
            if let Some(ended) = writing.take_if(|thread| thread.is_finished()) {
                match ended.join() {
                    Ok(Err(error)) => {
                        // It is tried again.
                        noted = Vec::new();
                        if !std::mem::replace(&mut is_told, true) {
                            tracing::warn!(
                                "{}: when the disk was changed cannot be noted, so after a kill or a crash its cache will not be believed: {error}",
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

/// Done in the call: writes wait for it anyway, and it happens when the cache device has failed.
impl Witness for Made {
    fn detach(&self) -> BoxFuture<'_, io::Result<()>> {
        let noted = self.change(|noted| {
            noted.detached.get_or_insert_default();
        });
        // What there is no note of is not believed either.
        let done = noted.or_else(|_| self.take_back());
        Box::pin(std::future::ready(done))
    }

    fn supersede(&self, range: ByteRange) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(std::future::ready(self.change(|noted| noted.supersede(range))))
    }

    fn attach(&self) -> BoxFuture<'_, io::Result<()>> {
        let attached = match self.is_there() {
            true => self.change(|noted| {
                noted.detached = None;
                noted.drop_old_sessions();
            }),
            // Then the last one says nothing of this session, and it need not be told otherwise.
            false => Ok(()),
        };
        Box::pin(std::future::ready(attached))
    }
}
