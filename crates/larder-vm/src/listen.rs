//! Listening unix sockets, with safe creation and removal of their files.

mod acl;
mod parse;

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

pub use parse::{parse_group, parse_huge_mode, parse_user};

use crate::opener::opener_client;

/// The longest path of a unix socket, in bytes (`sun_path` without its final zero).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Backlog of a private socket.
const BACKLOG: i32 = 128;

/// Reason why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ListenError {
    #[error("socket path {} is {} bytes long; the kernel accepts at most {SOCKET_PATH_BYTES_MAX}: choose a shorter one, for example in /run/larder", path.display(), path.as_os_str().len())]
    TooLong { path: PathBuf },
    #[error("socket {} is in use: another process listens on it; choose another path, or stop that process", path.display())]
    InUse { path: PathBuf },
    #[error("{} exists and is not a socket; it was not changed: choose another path", path.display())]
    NotASocket { path: PathBuf },
    #[error(transparent)]
    Opener(io::Error),
    #[error("cannot listen on {}: {source}{}", path.display(), directory_hint(source))]
    Os { path: PathBuf, source: io::Error },
}

fn directory_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; its directory does not exist",
        io::ErrorKind::PermissionDenied => "; the user that runs larder may not write to its directory",
        _ => "",
    }
}

/// Permissions of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Mode of its file, independent of the umask; if unset, 0777 less the umask.
    pub mode: Option<u32>,
    /// User who becomes the owner.
    pub owner: Option<u32>,
    /// Group of the file.
    pub group: Option<u32>,
    /// A further group whose members may connect; the listening process restricts their requests.
    pub readers: Option<u32>,
}

impl Access {
    /// Permissions according to the umask.
    pub const UMASK: Self = Self { mode: None, owner: None, group: None, readers: None };

    /// Permissions for the creating user and root.
    pub const OWNER: Self = Self { mode: Some(0o600), ..Self::UMASK };

    /// Returns the same permissions with a group of readers added.
    #[must_use]
    pub fn with_readers(self, readers: Option<u32>) -> Self {
        Self { readers, ..self }
    }

    /// Applies the permissions to the file of a bound socket, to which only its creator can connect so far. If the
    /// process may not change the owner, the owner remains, and an access control list lets the others connect.
    ///
    /// Another user may own the directory, and replace the file by a link to one of our files at any time. So the
    /// change applies to the file that was opened, and only if it is a socket that this process has created.
    fn apply(self, socket_path: &Path) -> io::Result<()> {
        if self == Self::UMASK {
            return Ok(());
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(socket_path, flags, Mode::empty())?);
        let found = file.metadata()?;
        if !found.file_type().is_socket() || found.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other("another process has replaced the socket's file"));
        }
        // This path leads to the open file itself, even after a rename.
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        if self.owner.is_some() || self.group.is_some() {
            match std::os::unix::fs::chown(&path, self.owner, self.group) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return acl::grant(&path, self),
                result => result?,
            }
        }
        if let Some(mode) = self.mode {
            fs::set_permissions(&path, Permissions::from_mode(mode))?;
        }
        if self.readers.is_some() {
            let readers_only = Self { owner: None, group: None, ..self };
            if let Err(error) = acl::grant(&path, readers_only) {
                // All other users have their access already.
                tracing::warn!("{}: cannot grant access to the group of readers: {error}", socket_path.display());
            }
        }
        Ok(())
    }
}

fn bind_listener(path: &Path, access: Access) -> io::Result<UnixListener> {
    let with_access = |socket| match access.apply(path) {
        Ok(()) => Ok(socket),
        Err(error) => {
            let _ = fs::remove_file(path);
            Err(error)
        }
    };
    let Some(mode) = access.mode else {
        return with_access(UnixListener::bind(path)?);
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The file gets the mode of the socket at the time of bind, less the umask: no other user can connect at any
    // time.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode & 0o600))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    with_access(socket.into())
}

/// Returns two of the `paths` that have the same path, if there are any. Each place is a path and its purpose.
///
/// Symbolic links in the directory of a path are resolved if the directory exists.
pub fn find_same_path<'a, T>(paths: &'a [(T, &Path)]) -> Option<(&'a T, &'a T)> {
    let resolved: Vec<PathBuf> = paths.iter().map(|(_, path)| resolve_directory(path)).collect();
    (1..paths.len()).find_map(|later| {
        let earlier = (0..later).find(|earlier| resolved[*earlier] == resolved[later])?;
        Some((&paths[earlier].0, &paths[later].0))
    })
}

pub(crate) fn resolve_directory(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match (path.parent().map(Path::canonicalize), path.file_name()) {
        (Some(Ok(directory)), Some(name)) => directory.join(name),
        _ => path,
    }
}

/// A unix socket on which this process listens.
pub struct ListeningSocket {
    /// The socket, for the event loop.
    pub descriptor: OwnedFd,
    /// Its file, which is removed when this is dropped.
    pub file: ListeningSocketFile,
}

/// The file of a listening socket, which is removed when this is dropped.
pub enum ListeningSocketFile {
    /// A file created by this process.
    Bound(SocketFile),
    /// A file created by the opener.
    Opener(OpenerSocketFile),
}

/// The file of a socket that the opener has created.
pub struct OpenerSocketFile(PathBuf);

impl Drop for OpenerSocketFile {
    fn drop(&mut self) {
        // The opener removes the file at its own end in any case.
        let _ = opener_client().map(|helper| helper.stop_listening(&self.0));
    }
}

impl ListeningSocket {
    /// Listens on `path`, through the opener if this process has one.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn bind(path: &Path, access: Access) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Os { path: path.to_owned(), source };
        if let Some(helper) = opener_client() {
            let descriptor = helper.listen(path).map_err(ListenError::Opener)?;
            return Ok(Self { descriptor, file: ListeningSocketFile::Opener(OpenerSocketFile(path.to_owned())) });
        }
        let file = SocketFile::bind_with_access(path, access)?;
        Ok(Self { descriptor: file.descriptor().map_err(failed)?, file: ListeningSocketFile::Bound(file) })
    }
}

/// A listening unix socket whose file is removed when this is dropped.
pub struct SocketFile {
    listener: UnixListener,
    path: PathBuf,
    /// Inode of the file, so that a successor's file is not removed.
    inode: Option<u64>,
}

impl SocketFile {
    /// Listens on `path`, with permissions according to the umask. A socket file that a dead process left there is
    /// replaced.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        Self::bind_with_access(path, Access::UMASK)
    }

    /// Listens on `path` with the permissions `access`. A socket file that a dead process left there is replaced.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn bind_with_access(path: &Path, access: Access) -> Result<Self, ListenError> {
        let path = path.to_owned();
        if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            return Err(ListenError::TooLong { path });
        }
        let _lock = PathLock::acquire(&path)?;
        if let Ok(found) = fs::symlink_metadata(&path) {
            if !found.file_type().is_socket() {
                return Err(ListenError::NotASocket { path });
            }
            if !is_stale(&path) {
                return Err(ListenError::InUse { path });
            }
            // The turn is held, so no other process replaces it at the same time.
            let _ = fs::remove_file(&path);
        }
        match bind_listener(&path, access) {
            Ok(listener) => {
                let inode = fs::symlink_metadata(&path).ok().map(|found| inode_of(&found));
                Ok(Self { listener, path, inode })
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(ListenError::InUse { path }),
            Err(source) => Err(ListenError::Os { path, source }),
        }
    }

    /// Removes the socket file of a dead process, if it is older than `max_age`.
    pub fn remove_stale(path: &Path, max_age: Duration) {
        let is_expired = fs::symlink_metadata(path).is_ok_and(|found| {
            let age = found.modified().ok().and_then(|made| made.elapsed().ok());
            found.file_type().is_socket() && age.is_some_and(|age| age > max_age)
        });
        // Another process may have replaced the file before the second check.
        if is_expired
            && is_stale(path)
            && let Ok(_lock) = PathLock::acquire(path)
            && is_stale(path)
        {
            // The removal fails if another user has created the new file, and then removes it.
            let _ = fs::remove_file(path);
        }
    }

    /// Returns a duplicate of the listening descriptor, for the event loop.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.listener.try_clone()?.into())
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns whether the listener of a socket is dead. A listener with a full backlog is alive, and this call does not
/// wait for it.
pub(crate) fn is_stale(path: &Path) -> bool {
    let connected = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?).map(|()| UnixStream::from(socket))
    };
    match connected() {
        Ok(stream) => listener_exited(&stream),
        Err(error) => error == Errno::CONNREFUSED,
    }
}

/// Exclusive right to inspect a socket's path, replace a stale file there, and listen: two processes that found the
/// same stale socket would otherwise remove each other's. It is a lock file next to the socket, removed when this is
/// dropped.
struct PathLock {
    path: PathBuf,
    /// The lock is released when this is closed, after the file was removed.
    _file: File,
}

/// Longest wait for another process's turn.
const PATH_LOCK_TIMEOUT: Duration = Duration::from_secs(5);

impl PathLock {
    fn acquire(socket: &Path) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Os { path: socket.to_owned(), source };
        let mut name = OsString::from(".");
        name.push(socket.file_name().unwrap_or_default());
        name.push(".lock");
        let path = socket.with_file_name(name);
        let deadline = Instant::now() + PATH_LOCK_TIMEOUT;
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(&path)
                .map_err(failed)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // The previous holder may have removed the file; then another process may have created and locked a
                // new one.
                Ok(()) if is_file_at(&file, &path) => return Ok(Self { path, _file: file }),
                Ok(()) => {}
                Err(_) if Instant::now() > deadline => {
                    let why = format!("{} is locked by another process", path.display());
                    return Err(failed(io::Error::new(io::ErrorKind::TimedOut, why)));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
}

fn is_file_at(file: &File, path: &Path) -> bool {
    let (Ok(opened), Ok(current)) = (file.metadata(), fs::symlink_metadata(path)) else {
        return false;
    };
    (opened.dev(), opened.ino()) == (current.dev(), current.ino())
}

impl Drop for PathLock {
    fn drop(&mut self) {
        // A lock file that remains does no harm.
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns whether the process that listens, or listened, at the other end has ended. Its socket may exist for a
/// moment longer: the kernel tears down a killed process's io_uring in the background, and the ring's pending accept
/// holds the socket.
pub(crate) fn listener_exited(stream: &UnixStream) -> bool {
    let Ok(peer) = rustix::net::sockopt::socket_peercred(stream) else {
        return false;
    };
    match fs::read_to_string(format!("/proc/{}/stat", peer.pid)) {
        // "PID (NAME) STATE ...": a killed process that is not reaped yet.
        Ok(stat) => {
            stat.rsplit(')').next().is_some_and(|rest| matches!(rest.trim_start().chars().next(), Some('Z' | 'X')))
        }
        // Processes of other users may be hidden (ProtectProc=).
        Err(error) => {
            let is_exited = rustix::process::test_kill_process(peer.pid) == Err(rustix::io::Errno::SRCH);
            is_exited && error.kind() == io::ErrorKind::NotFound && Path::new("/proc/self/stat").exists()
        }
    }
}

fn inode_of(metadata: &fs::Metadata) -> u64 {
    metadata.ino()
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Without the turn, a successor's file could be removed, if it is created between the check and the removal.
        let _lock = PathLock::acquire(&self.path);
        let is_same_file = fs::symlink_metadata(&self.path).ok().map(|found| inode_of(&found)) == self.inode;
        if is_same_file && self.inode.is_some() {
            // The file may not exist any more.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// The owner of the directory may replace its entries while the permissions of a socket are changed.
    #[test]
    fn permissions_change_only_on_socket() {
        use std::sync::atomic::{AtomicBool, Ordering};

        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let (socket, victim, link) = (at("s"), at("victim"), at("link"));
        fs::write(&victim, "ours").expect("writes");
        fs::set_permissions(&victim, Permissions::from_mode(0o600)).expect("is ours");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    // Either file may be missing at this time.
                    let _ = std::os::unix::fs::symlink(&victim, &link);
                    let _ = fs::rename(&link, &socket);
                }
            });
            let access = Access { mode: Some(0o666), ..Access::default() };
            for _ in 0..2000 {
                let _ = fs::remove_file(&socket);
                drop(SocketFile::bind_with_access(&socket, access));
            }
            done.store(true, Ordering::Relaxed);
        });
        let mode = fs::metadata(&victim).expect("is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn only_stale_socket_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).expect("binds"));
        assert!(path.exists());
        let live = SocketFile::bind(&path).expect("replaces the stale one");
        assert!(matches!(SocketFile::bind(&path), Err(ListenError::InUse { .. })));
        drop(live);
        assert!(!path.exists());
    }

    #[test]
    fn only_old_dead_sockets_are_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let [dead, live, file] = ["dead", "live", "file"].map(|name| directory.path().join(name));
        drop(UnixListener::bind(&dead).expect("binds"));
        let _live = SocketFile::bind(&live).expect("binds");
        fs::write(&file, "").expect("a file");
        SocketFile::remove_stale(&dead, Duration::from_secs(3600));
        assert!(dead.exists());
        for path in [&dead, &live, &file, &directory.path().join("none")] {
            SocketFile::remove_stale(path, Duration::ZERO);
        }
        let left = fs::read_dir(directory.path()).expect("is there").count();
        assert!(!dead.exists() && live.exists() && file.exists() && left == 2);
    }

    #[test]
    fn invalid_socket_paths_are_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        fs::write(&path, "mine").expect("writes");
        assert!(matches!(SocketFile::bind(&path), Err(ListenError::NotASocket { .. })));
        assert_eq!(fs::read(&path).expect("is there"), b"mine");
        let long = directory.path().join("x".repeat(120));
        assert!(matches!(SocketFile::bind(&long), Err(ListenError::TooLong { .. })));
        assert!(matches!(SocketFile::bind(directory.path()), Err(ListenError::NotASocket { .. })));
        let nowhere = directory.path().join("no/such/folder");
        assert!(matches!(SocketFile::bind(&nowhere), Err(ListenError::Os { .. })));
    }

    /// Exactly one of many processes that find a stale socket replaces it.
    #[test]
    fn one_process_replaces_stale_socket() {
        const MANY: usize = 8;
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        for round in 0..100 {
            drop(UnixListener::bind(&path).expect("a stale socket"));
            let start = Barrier::new(MANY);
            let all: Vec<_> = std::thread::scope(|scope| {
                let one = || {
                    start.wait();
                    SocketFile::bind(&path)
                };
                let threads: Vec<_> = (0..MANY).map(|_| scope.spawn(one)).collect();
                threads.into_iter().map(|thread| thread.join().expect("ends")).collect()
            });
            let served: Vec<&SocketFile> = all.iter().flatten().collect();
            assert_eq!(served.len(), 1, "round {round}");
            let taken = |result: &&Result<SocketFile, ListenError>| matches!(result, Err(ListenError::InUse { .. }));
            assert_eq!(all.iter().filter(taken).count(), MANY - 1, "round {round}");
            let _client = UnixStream::connect(&path).expect("a process listens there");
            served[0].listener.set_nonblocking(true).expect("can be set");
            assert!(served[0].listener.accept().is_ok(), "round {round}: it is another one");
            drop(all);
            assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 0, "nothing is left behind");
        }
    }
}
