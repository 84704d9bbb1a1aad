//! What whoever starts this process hands to it, systemd as a rule: sockets that it listens on for us, and front-ends'
//! connections that the process before this one has left ([`larder_export::vhost_user::takeover`]).

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

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Inherited {
    /// Listening sockets, by their paths.
    sockets: Arc<Vec<(PathBuf, OwnedFd)>>,
    store: Option<Arc<Store>>,
    /// The process before this one has left something.
    has_left: bool,
}

impl Inherited {
    /// Takes over `files`, each with its name in `$LISTEN_FDNAMES`. Connections are kept for the next process by the
    /// `manager` of this service, a socket connected to `$NOTIFY_SOCKET`.
    ///
    /// # Errors
    /// One of them is neither what a process before this one has left, nor a unix socket that listens on a path.
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

    /// Whether the process before this one has left a front-end's connection: a guest waits for its disk.
    pub fn has_connections(&self) -> bool {
        self.has_left
    }

    /// The socket that listens on `path`.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn at(&self, path: &Path) -> io::Result<Option<OwnedFd>> {
        let path = resolve(path);
        let found = self.sockets.iter().find(|(at, _)| resolve(at) == path);
        found.map(|(_, socket)| socket.try_clone()).transpose()
    }

    /// Whether one listens on `path`.
    pub fn has(&self, path: &Path) -> bool {
        let path = resolve(path);
        self.sockets.iter().any(|(at, _)| resolve(at) == path)
    }

    /// Where sockets listen.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.sockets.iter().map(|(path, _)| path.as_path())
    }

    /// Where the connection of the disk of this name, with this image, is kept; `None` if nobody keeps anything, or the
    /// name is longer than systemd has them.
    pub fn kept(&self, disk: &str, image: &ImageAddress) -> Option<Keeping> {
        const NAME_BYTES_MAX: usize = 200;
        let store = self.store.as_ref().filter(|_| disk.len() <= NAME_BYTES_MAX)?;
        let image = match image {
            ImageAddress::Path(path) => opener()
                .canonical(path)
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

    /// Lets go what was left of disks that are not there any more.
    pub fn forget_rest(&self) {
        let names = self.store.as_ref().map(|store| store.forget_rest());
        for name in names.unwrap_or_default() {
            if let Some(disk) = name.strip_suffix("/connection") {
                tracing::warn!(
                    disk,
                    "there is no such disk any more: its front-end's connection is closed"
                );
            }
        }
    }
}

fn path_of(socket: &OwnedFd) -> io::Result<PathBuf> {
    let no_path = || io::Error::other("it is no unix socket that listens on a path");
    let address = rustix::net::getsockname(socket).map_err(|_| no_path())?;
    let address = SocketAddrUnix::try_from(address).map_err(|_| no_path())?;
    let path = address.path().ok_or_else(no_path)?;
    let path = PathBuf::from(OsStr::from_bytes(path.to_bytes()));
    match rustix::net::sockopt::socket_acceptconn(socket) {
        Ok(true) => Ok(path),
        _ => Err(no_path()),
    }
}
