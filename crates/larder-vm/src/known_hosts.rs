//! The directory in which `larder migrate` remembers the certificates of other hosts.
//!
//! Root's directory is separate: `/var/lib/larder-migrate`, because `/var/lib/larder` belongs to the user of the
//! services. A process that gives up root for another user has a subdirectory, which belongs to that user and is
//! created by root.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::AtFlags;
use rustix::process::geteuid;

use crate::image::state_directory;
use crate::runtime_directory::{check_exclusive_owner, create};
use crate::user::{self, UserError};

/// Root's directory.
const ROOT_DIRECTORY: &str = "/var/lib/larder-migrate";

/// Directory that does not belong to root alone.
const SERVICE_DIRECTORY: &str = "/var/lib/larder";

/// Reason why there is no such directory.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum KnownHostsError {
    #[error("no state directory is known: none of $STATE_DIRECTORY, $XDG_STATE_HOME and $HOME is set")]
    NoDirectory,
    #[error("{}: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error(transparent)]
    User(#[from] UserError),
}

/// Creates the directory, unless it exists, and returns it: that of this process's user, or for root that of the user
/// with this name, to whom the process is about to switch.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub fn known_hosts_directory(user: Option<&str>) -> Result<PathBuf, KnownHostsError> {
    let directory = default_directory().ok_or(KnownHostsError::NoDirectory)?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| KnownHostsError::Directory { path, source }
    };
    if let Some(parent) = directory.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.map_err(failed(parent))?;
    }
    create(&directory, 0o700).map_err(failed(&directory))?;
    // Another user may be able to write to a directory that existed before.
    check_exclusive_owner(&directory).map_err(failed(&directory))?;
    let user = user.map(user::find_user).transpose()?;
    match user.filter(|user| user.uid.as_raw() != geteuid().as_raw()) {
        None => Ok(directory),
        Some(user) => {
            // That user must be able to reach the subdirectory.
            fs::set_permissions(&directory, Permissions::from_mode(0o711)).map_err(failed(&directory))?;
            let user_directory = directory.join(format!("of-{}", user.uid));
            create_for_user(&user_directory, user.uid.as_raw(), user.gid.as_raw()).map_err(failed(&user_directory))?;
            Ok(user_directory)
        }
    }
}

/// Creates a directory for another user in one of root's.
fn create_for_user(directory: &Path, uid: u32, gid: u32) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = fs::symlink_metadata(directory)?;
            // A directory that still belongs to root was left by a process that was killed before the next step.
            let is_known = found.uid() == uid || found.uid() == geteuid().as_raw();
            if !found.is_dir() || !is_known || found.mode() & 0o022 != 0 {
                return Err(io::Error::other("it exists, and is not a directory that belongs to that user alone"));
            }
        }
        Err(error) => return Err(error),
    }
    let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
    let owned = rustix::fs::chownat(rustix::fs::CWD, directory, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW);
    owned.map_err(io::Error::from)
}

fn default_directory() -> Option<PathBuf> {
    match state_directory()? {
        service_directory if geteuid().is_root() && service_directory == Path::new(SERVICE_DIRECTORY) => {
            Some(PathBuf::from(ROOT_DIRECTORY))
        }
        state => Some(state.join("migrate")),
    }
}
