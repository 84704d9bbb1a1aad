//! Private directory for a socket that only this process and one QEMU use.
//!
//! The directory is locked while it is used. A directory left by a killed process is removed when another one is
//! created, once it is an hour old.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, open, unlinkat};
use rustix::process::geteuid;

const SOCKET_NAME: &str = "migration";
/// Prefix of the directories' names; random hexadecimal digits follow.
const NAME_PREFIX: &str = "larder-";
const NAME_DIGITS: usize = 16;
/// Minimum age of a leftover directory. An unlocked one may be new, and about to be locked.
const LEFTOVER_AGE_MIN: Duration = Duration::from_secs(3600);

/// Directory, which is removed when it is dropped.
pub struct SocketDir {
    path: PathBuf,
    /// Handle of the directory itself, in case its owner replaces the path.
    handle: OwnedFd,
}

impl SocketDir {
    /// Creates a directory owned by QEMU's user, in which QEMU is to listen. This process can use it too: it is root,
    /// or runs as that user itself.
    ///
    /// # Errors
    /// The directory cannot be created, or not be given to that user.
    pub fn for_listener(user: u32) -> io::Result<Self> {
        let dir = Self::new(0o700)?;
        if user != geteuid().as_raw() {
            chown(&dir.path, Some(user), None)?;
        }
        Ok(dir)
    }

    /// Creates a directory owned by this process, with a socket that QEMU's user may connect to.
    ///
    /// # Errors
    /// The directory cannot be created, or the socket not be given to that user.
    pub fn with_listener(user: u32) -> io::Result<(Self, UnixListener)> {
        // Others may open names that they know, but only the owner can create any.
        let dir = Self::new(0o711)?;
        let listener = UnixListener::bind(dir.socket())?;
        std::fs::set_permissions(dir.socket(), PermissionsExt::from_mode(0o600))?;
        if user != geteuid().as_raw() {
            lchown(dir.socket(), Some(user), None)?;
        }
        Ok((dir, listener))
    }

    fn new(mode: u32) -> io::Result<Self> {
        let parent = std::env::temp_dir();
        remove_leftovers(&parent);
        let path = parent.join(format!("{NAME_PREFIX}{}", super::random_hex::<{ NAME_DIGITS / 2 }>()?));
        std::fs::create_dir(&path)?;
        let handle = open_dir(&path)?;
        flock(&handle, FlockOperation::NonBlockingLockExclusive)?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode))?;
        Ok(Self { path, handle })
    }

    /// Removes the socket of an earlier use.
    pub fn clear(&self) {
        let _ = unlinkat(&self.handle, SOCKET_NAME, AtFlags::empty());
    }

    /// Returns the path of the socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path.join(SOCKET_NAME)
    }
}

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(open(path, flags, Mode::empty())?)
}

/// Removes directories left by killed processes. Their content is not trusted: only the socket's name in the
/// directory is removed, and then the directory, if it is empty.
fn remove_leftovers(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(NAME_PREFIX));
        let has_valid_name =
            digits.is_some_and(|it| it.len() == NAME_DIGITS && it.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let path = entry.path();
        if let Some(handle) = has_valid_name.then(|| open_dir(&path).ok()).flatten()
            && is_leftover(&handle)
        {
            let _ = unlinkat(&handle, SOCKET_NAME, AtFlags::empty());
            let _ = std::fs::remove_dir(&path);
        }
    }
}

/// Returns true if the directory is old and no process uses it; it is then locked.
fn is_leftover(handle: &OwnedFd) -> bool {
    let found = handle.try_clone().and_then(|handle| File::from(handle).metadata());
    let is_removable = found.is_ok_and(|it| {
        let is_owner = geteuid().is_root() || it.uid() == geteuid().as_raw();
        let age = it.modified().ok().and_then(|changed| changed.elapsed().ok());
        is_owner && age.is_some_and(|age| age > LEFTOVER_AGE_MIN)
    });
    is_removable && flock(handle, FlockOperation::NonBlockingLockExclusive).is_ok()
}

impl Drop for SocketDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    /// A directory left by a killed process is removed; one that is locked, new, or not Larder's stays.
    #[test]
    fn sweep_removes_only_leftover_directories() {
        let parent = tempfile::tempdir().expect("a folder");
        let long_ago = SystemTime::now() - 2 * LEFTOVER_AGE_MIN;
        let make = |name: &str, changed: SystemTime| {
            let path = parent.path().join(name);
            std::fs::create_dir(&path).expect("a folder");
            drop(UnixListener::bind(path.join(SOCKET_NAME)).expect("a socket"));
            let dir = File::open(&path).expect("a folder");
            dir.set_modified(changed).expect("ours");
            (path, dir)
        };
        let (leftover, _) = make("larder-0123456789abcdef", long_ago);
        let (used, dir) = make("larder-1123456789abcdef", long_ago);
        flock(&dir, FlockOperation::LockExclusive).expect("nobody has it");
        let (new, _) = make("larder-2123456789abcdef", SystemTime::now());
        let (other, _) = make("larder-of-somebody-else", long_ago);
        remove_leftovers(parent.path());
        assert!(!leftover.exists() && used.exists() && new.exists() && other.exists());
    }
}
