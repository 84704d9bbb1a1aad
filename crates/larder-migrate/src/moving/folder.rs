//! A folder for a socket that only this process and one QEMU use.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, chown, lchown};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use rustix::fs::{AtFlags, Mode, OFlags, open, unlinkat};
use rustix::process::geteuid;

const SOCKET: &str = "migration";

/// Removed when it is dropped.
pub struct Folder {
    path: PathBuf,
    /// It, whatever its user puts in its place.
    handle: OwnedFd,
}

impl Folder {
    /// A new one, of QEMU's user, who is to listen there; root reaches it, too, and who is neither runs QEMU himself.
    ///
    /// # Errors
    /// It cannot be made, or not be given to that user.
    pub fn for_listener(user: u32) -> io::Result<Self> {
        let folder = Self::new(0o700)?;
        if user != geteuid().as_raw() {
            chown(&folder.path, Some(user), None)?;
        }
        Ok(folder)
    }

    /// A new one of this process', with a socket that QEMU's user may connect to.
    ///
    /// # Errors
    /// It cannot be made, or the socket not be given to that user.
    pub fn with_listener(user: u32) -> io::Result<(Self, UnixListener)> {
        // Others may go to what they know to be there, and nobody else can put anything there.
        let folder = Self::new(0o711)?;
        let listener = UnixListener::bind(folder.socket())?;
        std::fs::set_permissions(folder.socket(), PermissionsExt::from_mode(0o600))?;
        if user != geteuid().as_raw() {
            lchown(folder.socket(), Some(user), None)?;
        }
        Ok((folder, listener))
    }

    fn new(mode: u32) -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("larder-{}", super::random_hex::<8>()?));
        std::fs::create_dir(&path)?;
        let handle = open(
            &path,
            OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode))?;
        Ok(Self { path, handle })
    }

    /// Removes a socket of before.
    pub fn clear(&self) {
        let _ = unlinkat(&self.handle, SOCKET, AtFlags::empty());
    }

    /// Where the socket is, or will be.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
