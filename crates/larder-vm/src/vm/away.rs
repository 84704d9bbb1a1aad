//! Marker that a VM's disks belong to another host: the VM has moved there, or is to come from there. A server that
//! finds the marker opens no image until the VM arrives. So the marker is kept where it survives a reboot.
//!
//! ```text
//! STATE/moves/NAME-HASH      a line for the user: the reason; the hash is that of the path of the VM's file
//! ```

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::process::geteuid;

use crate::image::{state_folder, write_whole};
use crate::opener::helper;

/// Returns the directory of all markers.
fn folder() -> Option<PathBuf> {
    state_folder().map(|folder| folder.join("moves"))
}

/// Returns the name under which state of the VM described in `file` is stored. VMs of the same name in different
/// directories are different VMs.
pub(super) fn mark_of(file: &Path) -> OsString {
    let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let mut name = file.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{:08x}", crc32c::crc32c(file.as_os_str().as_bytes())));
    name
}

/// The marker of a VM, which may or may not exist.
pub struct AwayNote {
    /// Path of the marker; `None` if no directory for it is known.
    path: Option<PathBuf>,
}

impl AwayNote {
    /// Returns the marker of the VM described in `file`.
    pub fn of(file: &Path) -> Self {
        Self {
            path: folder().map(|folder| folder.join(mark_of(file))),
        }
    }

    /// Returns whether the marker exists.
    ///
    /// # Errors
    /// The file system does not answer that.
    pub fn is_there(&self) -> io::Result<bool> {
        if let Some(helper) = helper() {
            return helper.is_away();
        }
        self.path
            .as_ref()
            .map_or(Ok(false), |path| path.try_exists().map_err(|error| named(path, &error)))
    }

    /// Creates the marker's directory, while this process still can.
    pub(super) fn prepare(&self) -> io::Result<()> {
        if helper().is_some() {
            return Ok(());
        }
        let nowhere = || {
            io::Error::other(
                "neither $XDG_STATE_HOME nor $HOME gives a directory for the marker that the VM is on another host",
            )
        };
        let path = self.path.as_ref().ok_or_else(nowhere)?;
        let folder = path.parent().unwrap_or(path);
        make_for_owner_of_parent(folder).map_err(|error| named(folder, &error))
    }

    /// Creates the marker, durably.
    ///
    /// # Errors
    /// Writing fails; the marker may exist all the same.
    pub fn make(&self, why: &str) -> io::Result<()> {
        if let Some(helper) = helper() {
            return helper.set_away(Some(why));
        }
        self.prepare()?;
        let Some(path) = &self.path else { return Ok(()) };
        write_whole(path, &format!("{why}\n")).map_err(|error| named(path, &error))
    }

    /// Removes the marker, durably.
    ///
    /// # Errors
    /// Removal fails; the marker may still exist.
    pub fn remove(&self) -> io::Result<()> {
        if let Some(helper) = helper() {
            return helper.set_away(None);
        }
        let Some(path) = &self.path else { return Ok(()) };
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            removed => removed.map_err(|error| named(path, &error))?,
        }
        let folder = path.parent().unwrap_or(path);
        let flushed = File::open(folder).and_then(|folder| folder.sync_all());
        flushed.map_err(|error| named(folder, &error))
    }
}

/// Creates a directory, unless it exists. Root's commands prepare files that a service of another user reads, so root
/// changes the owner of a directory that it has created to that of the parent. The change applies to that directory,
/// never to one that the user may have put in its place.
fn make_for_owner_of_parent(folder: &Path) -> io::Result<()> {
    let above = folder.parent().unwrap_or(folder);
    DirBuilder::new().recursive(true).mode(0o700).create(above)?;
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        made => made?,
    }
    let whose = above.metadata()?;
    if geteuid().is_root() && whose.uid() != 0 {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = File::from(rustix::fs::open(folder, flags, Mode::empty())?);
        fchown(&made, Some(whose.uid()), Some(whose.gid()))?;
    }
    Ok(())
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    /// The user of the services owns the directory in which the markers' directory is, and so could put a link there.
    #[test]
    fn marker_is_not_written_through_symlink() {
        let state = tempfile::tempdir().expect("a directory");
        let elsewhere = tempfile::tempdir().expect("another one");
        let link = state.path().join("moves");
        std::os::unix::fs::symlink(elsewhere.path(), &link).expect("links");
        let note = AwayNote {
            path: Some(link.join("web")),
        };
        note.make("gone").expect_err("its directory is a link");
        fs::remove_file(&link).expect("is ours");
        fs::create_dir(&link).expect("is ours");
        let victim = elsewhere.path().join("victim");
        fs::write(&victim, "ours").expect("writes");
        std::os::unix::fs::symlink(&victim, link.join("web.new")).expect("links");
        note.make("gone").expect("the link is replaced");
        assert_eq!(fs::read_to_string(&victim).expect("is there"), "ours");
        assert_eq!(fs::read_to_string(link.join("web")).expect("is there"), "gone\n");
    }

    use super::*;

    #[test]
    fn marker_exists_until_it_is_removed() {
        let place = tempfile::tempdir().expect("a directory");
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
