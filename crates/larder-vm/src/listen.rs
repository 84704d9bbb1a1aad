//! Unix sockets to listen on, made and removed with care.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The longest path of a unix socket, in bytes (`sun_path` less its final zero).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ListenError {
    #[error("socket path {} is {} bytes long; the kernel takes at most {SOCKET_PATH_BYTES_MAX}: choose a shorter one, for example in /run/larder", path.display(), path.as_os_str().len())]
    TooLong { path: PathBuf },
    #[error("socket {} is taken: another process listens on it; choose another path, or stop that process", path.display())]
    Taken { path: PathBuf },
    #[error("{} exists and is no socket; it is left alone: choose another path", path.display())]
    NotASocket { path: PathBuf },
    #[error("cannot listen on {}: {source}{}", path.display(), folder_hint(source))]
    Os { path: PathBuf, source: io::Error },
}

fn folder_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; its folder does not exist",
        io::ErrorKind::PermissionDenied => "; the user that runs larder may not write to its folder",
        _ => "",
    }
}

/// A listening unix socket whose file goes when this is dropped.
pub struct SocketFile {
    listener: UnixListener,
    path: PathBuf,
    /// Which file it is, lest a successor's is removed.
    inode: Option<u64>,
}

impl SocketFile {
    /// Listens on `path`. A socket file that a dead process left there is replaced.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        let path = path.to_owned();
        if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            return Err(ListenError::TooLong { path });
        }
        if let Ok(found) = fs::symlink_metadata(&path) {
            if !found.file_type().is_socket() {
                return Err(ListenError::NotASocket { path });
            }
            match UnixStream::connect(&path) {
                Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => {
                    return Err(ListenError::Taken { path });
                }
                Ok(stream) if !listener_is_dead(&stream) => return Err(ListenError::Taken { path }),
                _ => {
                    // Nobody listens: its maker is dead. If another process is faster than us, bind fails below.
                    let _ = fs::remove_file(&path);
                }
            }
        }
        match UnixListener::bind(&path) {
            Ok(listener) => {
                let inode = fs::symlink_metadata(&path).ok().map(|found| inode_of(&found));
                Ok(Self { listener, path, inode })
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(ListenError::Taken { path }),
            Err(source) => Err(ListenError::Os { path, source }),
        }
    }

    /// The listening descriptor, for the loop.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.listener.try_clone()?.into())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether the process that listens has ended. Its socket may outlive it for a moment: the kernel takes a killed
/// process' io_uring apart in the background, and the ring's wait for connections holds the socket.
fn listener_is_dead(stream: &UnixStream) -> bool {
    let Ok(peer) = rustix::net::sockopt::socket_peercred(stream) else {
        return false;
    };
    match fs::read_to_string(format!("/proc/{}/stat", peer.pid)) {
        // "PID (NAME) STATE ...": killed, and not waited for yet.
        Ok(stat) => stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| matches!(rest.trim_start().chars().next(), Some('Z' | 'X'))),
        Err(error) => error.kind() == io::ErrorKind::NotFound && Path::new("/proc/self/stat").exists(),
    }
}

fn inode_of(found: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(found)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path).ok().map(|found| inode_of(&found)) == self.inode;
        if ours && self.inode.is_some() {
            // It may be gone already.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).expect("binds"));
        assert!(path.exists());
        let live = SocketFile::bind(&path).expect("replaces the stale one");
        assert!(matches!(SocketFile::bind(&path), Err(ListenError::Taken { .. })));
        drop(live);
        assert!(!path.exists());
    }

    #[test]
    fn other_files_and_long_paths_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        fs::write(&path, "mine").expect("writes");
        assert!(matches!(SocketFile::bind(&path), Err(ListenError::NotASocket { .. })));
        assert_eq!(fs::read(&path).expect("is there"), b"mine");
        let long = folder.path().join("x".repeat(120));
        assert!(matches!(SocketFile::bind(&long), Err(ListenError::TooLong { .. })));
        let nowhere = folder.path().join("no/such/folder");
        assert!(matches!(SocketFile::bind(&nowhere), Err(ListenError::Os { .. })));
    }
}
