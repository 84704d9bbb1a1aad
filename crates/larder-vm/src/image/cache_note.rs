//! The note that a cache is to be believed although it was not closed: it is made when a cache is opened, and taken back
//! when its device fails, which then cannot be told itself.
//!
//! It also has the stamps of the disk's files, and new ones soon after the server has changed them ([`Note::keep`]): so
//! it is found out if others have written to the disk since the server was killed, such as a server without the cache.
//!
//! Whatever becomes of the note, a cache that has failed is not believed. Where it is lost, or belongs to another user or
//! host, a cache that was not closed begins anew, and that is all.
//!
//! Its text: a line of the sessions of the cache that it speaks for, and for each file a line of its stamp.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::rc::Weak;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use larder_block::{BoxFuture, ByteRange, Loop};
use larder_cache::{Cache, Superblock, Witness};
use rustix::process::geteuid;

use super::disk_id::{self, DiskFile};

/// The note of a cache, whether it is there or not.
#[derive(Clone, Debug)]
pub(super) struct Note {
    /// `None` if there is nowhere to have one.
    path: Option<PathBuf>,
}

impl Note {
    /// That of the cache with this superblock.
    pub(super) fn of(superblock: &Superblock) -> Self {
        let name: String = superblock.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            path: state_folder().map(|folder| folder.join("caches").join(name)),
        }
    }

    /// What it says of the cache since it was last used, for a disk of these files.
    pub(super) fn says(&self, superblock: &Superblock, files: &[DiskFile]) -> Says {
        let text = self.path.as_ref().and_then(|path| fs::read_to_string(path).ok());
        let text = text.unwrap_or_default();
        let mut lines = text.lines();
        let session = superblock.session.to_string();
        if !lines
            .next()
            .is_some_and(|sessions| sessions.split(' ').any(|one| one == session))
        {
            return Says::Nothing;
        }
        let stamps: Option<Vec<Vec<u8>>> = lines.map(from_hex).collect();
        match stamps.is_some_and(|stamps| disk_id::are_only_ours_since(files, &stamps)) {
            true => Says::Believe,
            false => Says::Changed,
        }
    }

    /// Makes it, durably, for the session that is about to begin, and if the cache `is_believed` for the last one.
    ///
    /// # Errors
    /// The host's; there is none then.
    pub(super) fn make(&self, superblock: &Superblock, is_believed: bool, files: &[DiskFile]) -> io::Result<Made> {
        let nowhere = || io::Error::other("neither $XDG_STATE_HOME nor $HOME says where");
        let path = self.path.as_ref().ok_or_else(nowhere)?;
        let folder = folder_of(path);
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let next = superblock.session.wrapping_add(1);
        let sessions = match is_believed {
            true => format!("{} {next}\n", superblock.session),
            false => format!("{next}\n"),
        };
        let new = path.with_extension("new");
        let made = Made {
            file: Arc::new(File::create(&new)?),
            sessions,
            files: files.to_vec(),
        };
        made.write(&disk_id::stamps_of_all(files))?;
        fs::rename(&new, path)?;
        File::open(folder)?.sync_all()?;
        Ok(made)
    }

    /// Takes it back, durably.
    ///
    /// # Errors
    /// The host's; it may still be there.
    pub(super) fn take_back(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let gone = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        };
        fs::remove_file(path).or_else(gone)?;
        File::open(folder_of(path))
            .and_then(|folder| folder.sync_all())
            .or_else(gone)
    }

    /// Where it is looked for, for messages.
    pub(super) fn place(&self) -> String {
        match &self.path {
            Some(path) => path.display().to_string(),
            None => "nowhere, for want of $XDG_STATE_HOME and $HOME".to_owned(),
        }
    }
}

/// What a note says of a cache that was not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Says {
    /// It worked to its end, and nobody else has written to the disk since.
    Believe,
    /// Somebody has.
    Changed,
    /// There is no note, or it is of another time.
    Nothing,
}

/// How often it is looked whether the disk's files have changed.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Stamps are noted no sooner than so long after the last ones, because that costs a flush of the note's file system.
const NOTE_INTERVAL: Duration = Duration::from_secs(10);

/// A note that was made.
#[derive(Clone)]
pub(super) struct Made {
    /// Its file, which is written in place: once it was taken back it stays so.
    file: Arc<File>,
    sessions: String,
    files: Vec<DiskFile>,
}

impl Made {
    fn write(&self, stamps: &[Vec<u8>]) -> io::Result<()> {
        let mut text = self.sessions.clone();
        for stamp in stamps {
            text.extend(stamp.iter().map(|byte| format!("{byte:02x}")));
            text.push('\n');
        }
        self.file.write_all_at(text.as_bytes(), 0)?;
        self.file.set_len(text.len() as u64)?;
        self.file.sync_all()
    }

    /// Notes the stamps of the disk's files when they change, as long as the cache is there.
    pub(super) async fn keep(self, on: Loop, cache: Weak<Cache>) {
        let mut noted = disk_id::stamps_of_all(&self.files);
        // By a thread, because it may take long, and requests do not wait for it.
        let mut writing: Option<JoinHandle<()>> = None;
        // What was changed when they were opened is noted at once.
        let mut again = on.now();
        let mut is_first = true;
        while cache.upgrade().is_some_and(|cache| cache.works()) {
            let stamps = disk_id::stamps_of_all(&self.files);
            let is_idle = writing.as_ref().is_none_or(JoinHandle::is_finished);
            if (stamps != noted || is_first) && is_idle && on.now() >= again {
                if !std::mem::take(&mut is_first) {
                    again = on.now().after(NOTE_INTERVAL);
                }
                noted.clone_from(&stamps);
                let note = self.clone();
                let thread = std::thread::Builder::new().name("larder-note".to_owned());
                // Without it the cache begins anew after a kill, which is no harm.
                writing = thread.spawn(move || drop(note.write(&stamps))).ok();
            }
            on.sleep(LOOK_INTERVAL).await;
        }
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    digits.map(byte).collect()
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

impl Witness for Note {
    fn detach(&self) -> BoxFuture<'_, io::Result<()>> {
        // In the call: it happens once, and writes wait for it anyway.
        Box::pin(std::future::ready(self.take_back()))
    }

    fn supersede(&self, range: ByteRange) -> BoxFuture<'_, io::Result<()>> {
        let why = format!("what only a cache has of {range:?} is not noted here: no disk is written back");
        Box::pin(std::future::ready(Err(io::Error::new(io::ErrorKind::Unsupported, why))))
    }

    /// It was made for the session before the cache was opened.
    fn attach(&self) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// What outlives the host's restarts: systemd's `$STATE_DIRECTORY`, `/var/lib/larder` for root, `$XDG_STATE_HOME/larder`
/// or `~/.local/state/larder`.
fn state_folder() -> Option<PathBuf> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    // It may be a list, of which the first will do.
    let of_systemd = std::env::var("STATE_DIRECTORY").ok();
    let of_systemd = of_systemd
        .as_deref()
        .and_then(|list| list.split(':').next())
        .map(PathBuf::from);
    if let Some(folder) = of_systemd.filter(|folder| folder.is_absolute()) {
        return Some(folder);
    }
    if geteuid().is_root() {
        return Some(PathBuf::from("/var/lib/larder"));
    }
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    state.map(|state| state.join("larder"))
}
