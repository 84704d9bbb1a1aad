//! What whoever starts this process hands to it, systemd as a rule: sockets that it listens on for us, and front-ends'
//! connections that the process before this one has left ([`larder_export::vhost_user::takeover`]).

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use larder_block::Loop;
use larder_export::vhost_user::takeover::{Left, Store, parse_name};
use rustix::net::{SendFlags, SocketAddrUnix};

use crate::listen::resolve;

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Inherited(Arc<Parts>);

#[derive(Debug, Default)]
struct Parts {
    /// Listening sockets, by their paths.
    sockets: Vec<(PathBuf, OwnedFd)>,
    /// A socket that is connected to `$NOTIFY_SOCKET`.
    manager: Option<OwnedFd>,
    /// By disk.
    left: Mutex<HashMap<String, Left>>,
}

/// What is kept of one disk's front-end for the next process.
#[derive(Clone, Debug)]
pub struct KeptDisk {
    parts: Arc<Parts>,
    disk: String,
}

impl Inherited {
    /// Takes over `files`, each with its name in `$LISTEN_FDNAMES`. Connections are kept for the next process by the
    /// `manager` of this service, a socket connected to `$NOTIFY_SOCKET`.
    ///
    /// # Errors
    /// One of them is neither what a process before this one has left, nor a unix socket that listens on a path.
    pub fn new(files: Vec<(String, OwnedFd)>, manager: Option<OwnedFd>) -> io::Result<Self> {
        let mut parts = Parts {
            manager,
            ..Parts::default()
        };
        let mut left: HashMap<String, Left> = HashMap::new();
        for (name, file) in files {
            match parse_name(&name) {
                Some((disk, what)) => left.entry(disk.to_owned()).or_default().add(what, file),
                None => parts.sockets.push((path_of(&file)?, file)),
            }
        }
        parts.left = Mutex::new(left);
        Ok(Self(Arc::new(parts)))
    }

    /// The socket that listens on `path`.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn at(&self, path: &Path) -> io::Result<Option<OwnedFd>> {
        let path = resolve(path);
        let found = self.0.sockets.iter().find(|(at, _)| resolve(at) == path);
        found.map(|(_, socket)| socket.try_clone()).transpose()
    }

    /// Whether one listens on `path`.
    pub fn has(&self, path: &Path) -> bool {
        let path = resolve(path);
        self.0.sockets.iter().any(|(at, _)| resolve(at) == path)
    }

    /// Where sockets listen.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.sockets.iter().map(|(path, _)| path.as_path())
    }

    /// What is kept of the disk of this name; `None` if nobody keeps anything.
    pub fn kept(&self, disk: &str) -> Option<KeptDisk> {
        self.0.manager.as_ref()?;
        Some(KeptDisk {
            parts: Arc::clone(&self.0),
            disk: disk.to_owned(),
        })
    }

    /// Lets go what was left of disks that are not there any more.
    pub fn forget_rest(&self) {
        let Some(manager) = &self.0.manager else { return };
        let rest = std::mem::take(&mut *self.0.left.lock().unwrap_or_else(PoisonError::into_inner));
        for (disk, left) in rest {
            tracing::warn!(
                disk,
                "there is no such disk any more: its front-end's connection is closed"
            );
            for what in left.names() {
                let text = format!("FDSTOREREMOVE=1\nFDNAME=larder/{disk}/{what}");
                // What is not taken at once is let go with the service.
                let _ = rustix::net::send(manager, text.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            }
        }
    }
}

impl KeptDisk {
    /// Where it is kept, and what the process before this one has left, which is given once.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub(crate) fn open(&self, on: &Loop) -> io::Result<Option<(Store, Option<Left>)>> {
        let Some(manager) = &self.parts.manager else {
            return Ok(None);
        };
        let store = Store::new(on, manager.try_clone()?, &self.disk)?;
        let mut left = self.parts.left.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Some((store, left.remove(&self.disk))))
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
