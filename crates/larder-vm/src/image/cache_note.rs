//! The note that a cache is to be believed although it was not closed: it is made when a cache is opened, and taken back
//! when its device fails, which then cannot be told itself.
//!
//! So whatever becomes of the note, a cache that has failed is not believed. Where it is lost, or belongs to another user
//! or host, a cache that was not closed begins anew, and that is all.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use larder_block::BoxFuture;
use larder_cache::{Superblock, Witness};
use rustix::process::geteuid;

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

    /// Whether it says that nothing was wrong when the cache was last used.
    pub(super) fn speaks_for(&self, superblock: &Superblock) -> bool {
        let text = self.path.as_ref().and_then(|path| fs::read_to_string(path).ok());
        let session = superblock.session.to_string();
        text.is_some_and(|text| text.lines().any(|line| line == session))
    }

    /// Makes it, durably, for the session that is about to begin, and if the cache `is_believed` for the last one.
    ///
    /// # Errors
    /// The host's; there is none then.
    pub(super) fn make(&self, superblock: &Superblock, is_believed: bool) -> io::Result<()> {
        let nowhere = || io::Error::other("neither $XDG_STATE_HOME nor $HOME says where");
        let path = self.path.as_ref().ok_or_else(nowhere)?;
        let folder = folder_of(path);
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let next = superblock.session.wrapping_add(1);
        let text = match is_believed {
            true => format!("{}\n{next}\n", superblock.session),
            false => format!("{next}\n"),
        };
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        File::open(folder)?.sync_all()
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

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

impl Witness for Note {
    fn detach(&self) -> BoxFuture<'_, io::Result<()>> {
        // In the call: it happens once, and writes wait for it anyway.
        Box::pin(std::future::ready(self.take_back()))
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
