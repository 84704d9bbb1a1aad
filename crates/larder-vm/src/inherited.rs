//! Descriptors inherited from the service manager, usually systemd: sockets on which it listens for this process, and
//! front-ends' connections that the previous process has left ([`larder_export::vhost_user::handover`]).

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_block::opener::opener;
use larder_export::descriptor_store::{DescriptorStore, STORED_NAME_PREFIX};
use larder_export::vhost_user::handover::HandoverOptions;
use rustix::net::SocketAddrUnix;

use crate::image::ImageAddress;
use crate::listen::resolve_directory;

/// The inherited descriptors.
#[derive(Clone, Debug, Default)]
pub struct Inherited {
    /// Listening sockets, by path.
    sockets: Arc<Vec<(PathBuf, OwnedFd)>>,
    store: Option<Arc<DescriptorStore>>,
    /// The previous process has left at least one descriptor.
    has_stored_connections: bool,
}

impl Inherited {
    /// Takes over `files`, each with its name in `$LISTEN_FDNAMES`. The `manager` of this service, a socket connected
    /// to `$NOTIFY_SOCKET`, stores connections for the next process.
    ///
    /// # Errors
    /// A file is neither a descriptor from a previous process, nor a unix socket that listens on a path.
    pub fn new(files: Vec<(String, OwnedFd)>, manager: Option<UnixDatagram>) -> io::Result<Self> {
        let (mut sockets, mut stored) = (Vec::new(), Vec::new());
        for (name, file) in files {
            match name.strip_prefix(STORED_NAME_PREFIX) {
                Some(name) => stored.push((name.to_owned(), file)),
                None => sockets.push((path_of(&file)?, file)),
            }
        }
        let has_stored_connections = !stored.is_empty();
        let store = manager.map(|manager| DescriptorStore::new(manager, stored)).transpose()?;
        Ok(Self { sockets: Arc::new(sockets), store: store.map(Arc::new), has_stored_connections })
    }

    /// Returns whether the previous process has left a front-end's connection: a guest is waiting for its disk.
    pub fn has_connections(&self) -> bool {
        self.has_stored_connections
    }

    /// Returns the socket that listens on `path`.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn socket_on(&self, path: &Path) -> io::Result<Option<OwnedFd>> {
        let path = resolve_directory(path);
        let found = self.sockets.iter().find(|(socket_path, _)| resolve_directory(socket_path) == path);
        found.map(|(_, socket)| socket.try_clone()).transpose()
    }

    /// Returns whether a socket listens on `path`.
    pub fn has_socket_on(&self, path: &Path) -> bool {
        let path = resolve_directory(path);
        self.sockets.iter().any(|(socket_path, _)| resolve_directory(socket_path) == path)
    }

    /// Returns the paths of the sockets.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.sockets.iter().map(|(path, _)| path.as_path())
    }

    /// Returns where the connection of this disk, with this image, is stored; `None` if there is no service manager,
    /// or the name is too long for systemd.
    pub fn stored_connection(&self, disk: &str, image: &ImageAddress) -> Option<HandoverOptions> {
        const NAME_BYTES_MAX: usize = 200;
        let store = self.store.as_ref().filter(|_| disk.len() <= NAME_BYTES_MAX)?;
        let image = match image {
            ImageAddress::Path(path) => {
                opener().canonicalize(path).unwrap_or_else(|_| path.clone()).display().to_string()
            }
            other => other.to_string(),
        };
        Some(HandoverOptions { store: Arc::clone(store), disk: disk.to_owned(), image })
    }

    /// Closes the connections of disks that no longer exist.
    pub fn close_unclaimed(&self) {
        let names = self.store.as_ref().map(|store| store.remove_unclaimed());
        for name in names.unwrap_or_default() {
            if let Some(disk) = name.strip_suffix("/connection") {
                tracing::warn!(disk, "the disk no longer exists; its front-end's connection is closed");
            }
        }
    }
}

fn path_of(socket: &OwnedFd) -> io::Result<PathBuf> {
    let no_path = || io::Error::other("not a unix socket that listens on a path");
    let address = rustix::net::getsockname(socket).map_err(|_| no_path())?;
    let address = SocketAddrUnix::try_from(address).map_err(|_| no_path())?;
    let path = address.path().ok_or_else(no_path)?;
    let path = PathBuf::from(OsStr::from_bytes(path.to_bytes()));
    match rustix::net::sockopt::socket_acceptconn(socket) {
        Ok(true) => Ok(path),
        _ => Err(no_path()),
    }
}
