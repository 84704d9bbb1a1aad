//! The user's folder for what is of no use once the host has restarted: sockets and journals.
//!
//! Its name can be guessed, so it must be the user's own, and no other's to write to, before anything in it is trusted.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

/// Where it is, or will be: systemd's `$RUNTIME_DIRECTORY`, `/run/larder` for root (`/run/larder-root` where that is the services'), `$XDG_RUNTIME_DIR/larder`, or
/// `/dev/shm/larder-UID`; the first that is on tmpfs. All processes of a user find the same one. Nothing is made.
pub fn runtime_folder() -> PathBuf {
    // It may be a list, of which the first will do.
    let of_service = std::env::var("RUNTIME_DIRECTORY").ok();
    let of_service = of_service
        .as_deref()
        .and_then(|list| list.split(':').next())
        .map(PathBuf::from);
    if let Some(folder) = of_service.filter(|folder| is_ours_alone(folder).is_ok() && is_on_tmpfs(folder)) {
        return folder;
    }
    let of_root = geteuid().is_root().then(|| PathBuf::from("/run"));
    let of_user = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let of_user = of_user.filter(|folder| folder.is_absolute() && is_ours_alone(folder).is_ok());
    let found = of_root.into_iter().chain(of_user).find(|folder| is_on_tmpfs(folder));
    match found {
        Some(folder) => match folder.join("larder") {
            // Where root's would be is that of the services.
            theirs if is_of_services(&theirs) => folder.join("larder-root"),
            ours => ours,
        },
        None => PathBuf::from(format!("/dev/shm/larder-{}", geteuid().as_raw())),
    }
}

/// Where sockets are of which nothing is said: the user's own folder; for root that of the services which systemd runs as a
/// user of their own (`larder@.service`), if it is there: root asks them, and writes their files.
pub fn socket_folder() -> PathBuf {
    let of_services = PathBuf::from(OF_SERVICES);
    match is_of_services(&of_services) {
        true => of_services,
        false => runtime_folder(),
    }
}

const OF_SERVICES: &str = "/run/larder";

fn is_of_services(folder: &Path) -> bool {
    let is_theirs = |found: fs::Metadata| found.is_dir() && found.uid() != 0;
    geteuid().is_root() && folder == Path::new(OF_SERVICES) && fs::symlink_metadata(folder).is_ok_and(is_theirs)
}

/// Makes a folder, with `mode` less the umask, unless it is there. The one above it must exist.
///
/// # Errors
/// It cannot be made, or what is there is not this user's alone.
pub(crate) fn make(folder: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => is_ours_alone(folder),
        result => result,
    }
}

/// Whether a folder is this user's, and no other's to write to.
///
/// # Errors
/// It is not.
pub(crate) fn is_ours_alone(folder: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(folder)?;
    if !found.is_dir() {
        return Err(io::Error::other("it is there, and no folder"));
    }
    if found.uid() != geteuid().as_raw() {
        return Err(io::Error::other("it belongs to somebody else"));
    }
    if found.mode() & 0o022 != 0 {
        return Err(io::Error::other("others can write to it"));
    }
    Ok(())
}

/// Whether a folder is in the host's memory.
pub(crate) fn is_on_tmpfs(folder: &Path) -> bool {
    rustix::fs::statfs(folder).is_ok_and(|found| found.f_type == libc::TMPFS_MAGIC)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_folder_that_others_can_write_to_is_not_used() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = place.path().join("larder");
        make(&folder, 0o700).expect("makes it");
        make(&folder, 0o700).expect("is there");
        assert_eq!(fs::metadata(&folder).expect("is there").mode() & 0o777, 0o700);
        fs::set_permissions(&folder, Permissions::from_mode(0o777)).expect("ours");
        make(&folder, 0o700).expect_err("others can write to it");
        let link = place.path().join("link");
        std::os::unix::fs::symlink("/", &link).expect("links");
        make(&link, 0o700).expect_err("is a link");
    }
}
