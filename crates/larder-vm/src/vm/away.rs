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
use std::os::unix::fs::{DirBuilderExt, MetadataExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::process::geteuid;

use crate::image::{state_folder, write_whole};
use crate::opener::helper;

/// The folder of all these notes.
fn folder() -> Option<PathBuf> {
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
        if let Some(helper) = helper() {
            return helper.is_away();
        }
        self.path
            .as_ref()
            .map_or(Ok(false), |path| path.try_exists().map_err(|error| named(path, &error)))
    }

    /// Makes the folder that it is in, before this process can make none any more.
    pub(super) fn prepare(&self) -> io::Result<()> {
        if helper().is_some() {
            return Ok(());
        }
        let nowhere = || io::Error::other("neither $XDG_STATE_HOME nor $HOME says where to note that it has gone");
        let path = self.path.as_ref().ok_or_else(nowhere)?;
        let folder = path.parent().unwrap_or(path);
        make_for_owner_of_parent(folder).map_err(|error| named(folder, &error))
    }

    /// Makes it, durably.
    ///
    /// # Errors
    /// The host's; it may be there all the same.
    pub fn make(&self, why: &str) -> io::Result<()> {
        if let Some(helper) = helper() {
            return helper.set_away(Some(why));
        }
        self.prepare()?;
        let Some(path) = &self.path else { return Ok(()) };
        write_whole(path, &format!("{why}\n")).map_err(|error| named(path, &error))
    }

    /// Removes it, durably.
    ///
    /// # Errors
    /// The host's; it may be there still.
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

/// Makes a folder, unless it is there. Root's commands prepare what a service of another user reads, so root gives one that it has
/// made to whom the folder above belongs: it, and not what that user may have put in its place.
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
    /// The user of the services owns what the folder of notes is in.
    #[test]
    fn no_note_is_written_through_a_symbolic_link() {
        let state = tempfile::tempdir().expect("a folder");
        let elsewhere = tempfile::tempdir().expect("another one");
        let link = state.path().join("moves");
        std::os::unix::fs::symlink(elsewhere.path(), &link).expect("links");
        let note = AwayNote {
            path: Some(link.join("web")),
        };
        note.make("gone").expect_err("its folder is a link");
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
