//! A folder for a socket that only this process and one QEMU use.

use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;

/// Removed when it is dropped.
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// A new one, for QEMU's user alone: root reaches it, too, and who is neither runs QEMU himself.
    ///
    /// # Errors
    /// It cannot be made, or not be given to that user.
    pub fn new(user: u32) -> io::Result<Self> {
        let mut random = [0; 8];
        ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut random)
            .map_err(|_| io::Error::other("there are no random numbers"))?;
        let path = std::env::temp_dir().join(format!("larder-{:016x}", u64::from_ne_bytes(random)));
        std::fs::create_dir(&path)?;
        let folder = Self { path };
        std::fs::set_permissions(&folder.path, PermissionsExt::from_mode(0o700))?;
        if user != rustix::process::geteuid().as_raw() {
            chown(&folder.path, Some(user), None)?;
        }
        Ok(folder)
    }

    /// Where the socket is, or will be.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path.join("migration")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
