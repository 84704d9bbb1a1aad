//! The note that a VM's disks are not this host's: its VM has gone to another host, or is to come from one. A server that
//! is started finds it, and opens no image until the VM comes; so it lies where it outlives the host's restart.
//!
//! ```text
//! STATE/moves/NAME-HASH      a line for people: what has become of the VM; the hash is of its file's path
//! ```

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use crate::image::{state_folder, write_whole};

/// The folder of all these notes.
pub(super) fn folder() -> Option<PathBuf> {
    state_folder().map(|folder| folder.join("moves"))
}

/// What the files are called that concern the VM which is described in `file`. Two of one name in different folders are two
/// VMs.
pub(super) fn mark_of(file: &Path) -> OsString {
    let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let mut name = file.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{:08x}", crc32c::crc32c(file.as_os_str().as_bytes())));
    name
}

/// That of a VM, whether it is there or not.
pub struct AwayNote {
    /// `None` if there is nowhere to have one.
    path: Option<PathBuf>,
}

impl AwayNote {
    /// Of the VM that is described in `file`.
    pub fn of(file: &Path) -> Self {
        Self {
            path: folder().map(|folder| folder.join(mark_of(file))),
        }
    }

    /// Whether it is there.
    ///
    /// # Errors
    /// Nobody can tell.
    pub fn is_there(&self) -> io::Result<bool> {
        self.path
            .as_ref()
            .map_or(Ok(false), |path| path.try_exists().map_err(|error| named(path, &error)))
    }

    /// Makes the folder that it is in, before this process can make none any more.
    pub(super) fn prepare(&self) -> io::Result<()> {
        let nowhere = || io::Error::other("neither $XDG_STATE_HOME nor $HOME says where to note that it has gone");
        let path = self.path.as_ref().ok_or_else(nowhere)?;
        let folder = path.parent().unwrap_or(path);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        // Root's commands prepare what a service of another user reads.
        let given = made.and_then(|()| {
            let whose = folder.parent().unwrap_or(folder).metadata()?;
            match geteuid().is_root() && whose.uid() != 0 {
                true => chown(folder, Some(whose.uid()), Some(whose.gid())),
                false => Ok(()),
            }
        });
        given.map_err(|error| named(folder, &error))
    }

    /// Makes it, durably.
    ///
    /// # Errors
    /// The host's; it may be there all the same.
    pub fn make(&self, why: &str) -> io::Result<()> {
        self.prepare()?;
        let Some(path) = &self.path else { return Ok(()) };
        write_whole(path, &format!("{why}\n")).map_err(|error| named(path, &error))
    }

    /// Removes it, durably.
    ///
    /// # Errors
    /// The host's; it may be there still.
    pub fn remove(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            removed => removed.map_err(|error| named(path, &error))?,
        }
        let folder = path.parent().unwrap_or(path);
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            // A process that is confined may not look at folders.
            .or_else(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => Ok(()),
                _ => Err(named(folder, &error)),
            })
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_there_until_it_is_removed() {
        let place = tempfile::tempdir().expect("a folder");
        let note = || AwayNote {
            path: Some(place.path().join("moves").join("web")),
        };
        assert!(!note().is_there().expect("can be told"));
        note().remove().expect("there is none");
        note().make("gone").expect("is made");
        note().make("gone again").expect("is made again");
        assert!(note().is_there().expect("can be told"));
        note().remove().expect("goes");
        assert!(!note().is_there().expect("can be told"));
        let [one, other] = ["/etc/larder/vms/web.toml", "/srv/web.toml"].map(|file| AwayNote::of(Path::new(file)).path);
        assert_ne!(one, other);
        let nowhere = AwayNote { path: None };
        nowhere.make("gone").expect_err("there is nowhere");
    }
}
