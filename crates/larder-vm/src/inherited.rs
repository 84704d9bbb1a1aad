//! Descriptors inherited from the service manager, usually systemd: sockets on which it listens for this process, and
//! front-ends' connections that the previous process has left ([`larder_export::vhost_user::takeover`]).

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_block::opener::opener;
use larder_export::descriptor_store::{PREFIX, Store};
use larder_export::vhost_user::takeover::Keeping;
use rustix::net::SocketAddrUnix;

use crate::image::ImageAddress;
use crate::listen::resolve;

/// The inherited descriptors.
#[derive(Clone, Debug, Default)]
pub struct Inherited {
    /// Listening sockets, by path.
    sockets: Arc<Vec<(PathBuf, OwnedFd)>>,
    store: Option<Arc<Store>>,
    /// The previous process has left at least one descriptor.
    has_left: bool,
}

impl Inherited {
    /// Takes over `files`, each with its name in `$LISTEN_FDNAMES`. The `manager` of this service, a socket connected
    /// to `$NOTIFY_SOCKET`, stores connections for the next process.
    ///
    /// # Errors
    /// A file is neither a descriptor from a previous process, nor a unix socket that listens on a path.
    pub fn new(files: Vec<(String, OwnedFd)>, manager: Option<UnixDatagram>) -> io::Result<Self> {
        let (mut sockets, mut left) = (Vec::new(), Vec::new());
        for (name, file) in files {
            match name.strip_prefix(PREFIX) {
                Some(name) => left.push((name.to_owned(), file)),
                None => sockets.push((path_of(&file)?, file)),
            }
        }
        let has_left = !left.is_empty();
        let store = manager.map(|manager| Store::new(manager, left)).transpose()?;
        Ok(Self {
            sockets: Arc::new(sockets),
            store: store.map(Arc::new),
            has_left,
        })
    }

    /// Returns whether the previous process has left a front-end's connection: a guest is waiting for its disk.
    pub fn has_connections(&self) -> bool {
        self.has_left
    }

    /// Returns the socket that listens on `path`.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn at(&self, path: &Path) -> io::Result<Option<OwnedFd>> {
        let path = resolve(path);
        let found = self.sockets.iter().find(|(at, _)| resolve(at) == path);
        found.map(|(_, socket)| socket.try_clone()).transpose()
    }

    /// Returns whether a socket listens on `path`.
    pub fn has(&self, path: &Path) -> bool {
        let path = resolve(path);
        self.sockets.iter().any(|(at, _)| resolve(at) == path)
    }

    /// Returns the paths of the sockets.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.sockets.iter().map(|(path, _)| path.as_path())
    }

    /// Returns where the connection of this disk, with this image, is stored; `None` if there is no service manager,
    /// or the name is too long for systemd.
    pub fn kept(&self, disk: &str, image: &ImageAddress) -> Option<Keeping> {
        const NAME_BYTES_MAX: usize = 200;
        let store = self.store.as_ref().filter(|_| disk.len() <= NAME_BYTES_MAX)?;
        let image = match image {
            ImageAddress::Path(path) => opener()
                .canonicalize(path)
                .unwrap_or_else(|_| path.clone())
                .display()
                .to_string(),
            other => other.to_string(),
        };
        Some(Keeping {
            store: Arc::clone(store),
            disk: disk.to_owned(),
            image,
        })
    }

    /// Closes the connections of disks that no longer exist.
    pub fn forget_rest(&self) {
        let names = self.store.as_ref().map(|store| store.forget_rest());
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
