//! Unix sockets to listen on, made and removed with care.

mod acl;
mod words;

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

pub use words::{group_of, mode_of, user_of};

use crate::opener::helper;

/// The longest path of a unix socket, in bytes (`sun_path` less its final zero).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Clients of a private socket that wait to be taken.
const BACKLOG: i32 = 128;

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
    #[error(transparent)]
    Opener(io::Error),
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

/// Who may connect to a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The mode of its file, whatever the umask; 0777 less the umask if not given.
    pub mode: Option<u32>,
    /// The user whose it becomes.
    pub owner: Option<u32>,
    /// The group.
    pub group: Option<u32>,
    /// A further group whose members may connect; the process that listens restricts their requests.
    pub readers: Option<u32>,
}

impl Access {
    /// Whom the umask lets.
    pub const UMASK: Self = Self {
        mode: None,
        owner: None,
        group: None,
        readers: None,
    };

    /// The user that made it, and root.
    pub const OWNER: Self = Self {
        mode: Some(0o600),
        ..Self::UMASK
    };

    /// Returns the same access with a group of readers added.
    #[must_use]
    pub fn with_readers(self, readers: Option<u32>) -> Self {
        Self { readers, ..self }
    }

    /// Gives the file of a socket that is bound, and that only its maker may connect to yet, to whom it is for. Where the
    /// maker may not give it away, it stays his, and the others may connect.
    ///
    /// Another user may own the folder, and put a link to a file of ours there at any time: what is given away is the file
    /// that was opened, and only a socket that this process has made.
    fn apply(self, of_socket: &Path) -> io::Result<()> {
        if self == Self::UMASK {
            return Ok(());
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(of_socket, flags, Mode::empty())?);
        let found = file.metadata()?;
        if !found.file_type().is_socket() || found.uid() != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other("another process has put something else there"));
        }
        // The name of the file itself, wherever it is by now.
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        if self.owner.is_some() || self.group.is_some() {
            match std::os::unix::fs::chown(&path, self.owner, self.group) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return acl::give(&path, self),
                given => given?,
            }
        }
        if let Some(mode) = self.mode {
            fs::set_permissions(&path, Permissions::from_mode(mode))?;
        }
        if self.readers.is_some() {
            let readers_only = Self {
                owner: None,
                group: None,
                ..self
            };
            if let Err(error) = acl::give(&path, readers_only) {
                // All other users have their access.
                tracing::warn!(
                    "{}: cannot grant access to the group of readers: {error}",
                    of_socket.display()
                );
            }
        }
        Ok(())
    }
}

fn listen(path: &Path, access: Access) -> io::Result<UnixListener> {
    let given = |socket| match access.apply(path) {
        Ok(()) => Ok(socket),
        Err(error) => {
            let _ = fs::remove_file(path);
            Err(error)
        }
    };
    let Some(mode) = access.mode else {
        return given(UnixListener::bind(path)?);
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The file gets the mode that the socket has when it is bound, less the umask: nobody else can connect at any time.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode & 0o600))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    given(socket.into())
}

/// Two paths that are one, if there are any among `places`: each is a path with what it is for.
///
/// What stands for a folder is resolved where the folder exists.
pub fn same_place<'a, T>(places: &'a [(T, &Path)]) -> Option<(&'a T, &'a T)> {
    let resolved: Vec<PathBuf> = places.iter().map(|(_, path)| resolve(path)).collect();
    (1..places.len()).find_map(|later| {
        let earlier = (0..later).find(|earlier| resolved[*earlier] == resolved[later])?;
        Some((&places[earlier].0, &places[later].0))
    })
}

pub(crate) fn resolve(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match (path.parent().map(Path::canonicalize), path.file_name()) {
        (Some(Ok(folder)), Some(name)) => folder.join(name),
        _ => path,
    }
}

/// A unix socket that this process listens on.
pub struct Listening {
    /// The socket, for the loop.
    pub descriptor: OwnedFd,
    /// Its file goes with this.
    pub file: ListeningFile,
}

/// The file of a socket that is listened on, which goes when this is dropped.
pub enum ListeningFile {
    /// Of this process's own.
    Own(SocketFile),
    /// The opener has made it.
    Openers(OpenersFile),
}

/// The file of a socket that the opener has made.
pub struct OpenersFile(PathBuf);

impl Drop for OpenersFile {
    fn drop(&mut self) {
        // It goes with the opener in any case.
        let _ = helper().map(|helper| helper.stop_listening(&self.0));
    }
}

impl Listening {
    /// Listens on `path`, by the opener if this process has one.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn on(path: &Path, access: Access) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Os {
            path: path.to_owned(),
            source,
        };
        if let Some(helper) = helper() {
            let descriptor = helper.listen(path).map_err(ListenError::Opener)?;
            return Ok(Self {
                descriptor,
                file: ListeningFile::Openers(OpenersFile(path.to_owned())),
            });
        }
        let file = SocketFile::bind_for(path, access)?;
        Ok(Self {
            descriptor: file.descriptor().map_err(failed)?,
            file: ListeningFile::Own(file),
        })
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
    /// Listens on `path`, for whom the umask lets. A socket file that a dead process left there is replaced.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        Self::bind_for(path, Access::UMASK)
    }

    /// The same, for others.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn bind_for(path: &Path, access: Access) -> Result<Self, ListenError> {
        let path = path.to_owned();
        if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            return Err(ListenError::TooLong { path });
        }
        let _turn = Turn::take(&path)?;
        if let Ok(found) = fs::symlink_metadata(&path) {
            if !found.file_type().is_socket() {
                return Err(ListenError::NotASocket { path });
            }
            if !is_dead(&path) {
                return Err(ListenError::Taken { path });
            }
            // It is our turn to replace it.
            let _ = fs::remove_file(&path);
        }
        match listen(&path, access) {
            Ok(listener) => {
                let inode = fs::symlink_metadata(&path).ok().map(|found| inode_of(&found));
                Ok(Self { listener, path, inode })
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(ListenError::Taken { path }),
            Err(source) => Err(ListenError::Os { path, source }),
        }
    }

    /// Removes a socket's file whose maker is dead, if it has been there for longer than `kept`.
    pub fn remove_dead(path: &Path, kept: Duration) {
        let is_old = fs::symlink_metadata(path).is_ok_and(|found| {
            let age = found.modified().ok().and_then(|made| made.elapsed().ok());
            found.file_type().is_socket() && age.is_some_and(|age| age > kept)
        });
        // Another may have come by the time of the second look.
        if is_old
            && is_dead(path)
            && let Ok(_turn) = Turn::take(path)
            && is_dead(path)
        {
            // It may be somebody else's, who removes it.
            let _ = fs::remove_file(path);
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

/// Whether nobody listens on the socket there any more: its maker is dead. One that lets others wait is alive, and is not
/// waited for.
pub(crate) fn is_dead(path: &Path) -> bool {
    let connected = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?).map(|()| UnixStream::from(socket))
    };
    match connected() {
        Ok(stream) => listener_has_ended(&stream),
        Err(error) => error == Errno::CONNREFUSED,
    }
}

/// Held by the one process that looks at a socket's path, replaces what is stale there, and listens: two that found the
/// same stale socket would otherwise remove each other's. It is a locked file beside the socket, gone with this.
struct Turn {
    path: PathBuf,
    /// The lock goes when it is closed, after the file has gone.
    _file: File,
}

/// How long another process' turn may last.
const TURN_MAX: Duration = Duration::from_secs(5);

impl Turn {
    fn take(socket: &Path) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Os {
            path: socket.to_owned(),
            source,
        };
        let mut name = OsString::from(".");
        name.push(socket.file_name().unwrap_or_default());
        name.push(".lock");
        let path = socket.with_file_name(name);
        let give_up = Instant::now() + TURN_MAX;
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
                // Whoever had it before us has removed it; then somebody else may have made and locked another one.
                Ok(()) if is_at(&file, &path) => return Ok(Self { path, _file: file }),
                Ok(()) => {}
                Err(_) if Instant::now() > give_up => {
                    let why = format!("{} is locked by another process", path.display());
                    return Err(failed(io::Error::new(io::ErrorKind::TimedOut, why)));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(ours), Ok(there)) = (file.metadata(), fs::symlink_metadata(path)) else {
        return false;
    };
    (ours.dev(), ours.ino()) == (there.dev(), there.ino())
}

impl Drop for Turn {
    fn drop(&mut self) {
        // One that stays is in nobody's way.
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether the process that listens, or listened, at the other end has ended. Its socket may outlive it for a moment:
/// the kernel takes a killed process' io_uring apart in the background, and the ring's wait for connections holds the
/// socket.
pub(crate) fn listener_has_ended(stream: &UnixStream) -> bool {
    let Ok(peer) = rustix::net::sockopt::socket_peercred(stream) else {
        return false;
    };
    match fs::read_to_string(format!("/proc/{}/stat", peer.pid)) {
        // "PID (NAME) STATE ...": killed, and not waited for yet.
        Ok(stat) => stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| matches!(rest.trim_start().chars().next(), Some('Z' | 'X'))),
        // Those of other users may not be shown (ProtectProc=).
        Err(error) => {
            let is_gone = rustix::process::test_kill_process(peer.pid) == Err(rustix::io::Errno::SRCH);
            is_gone && error.kind() == io::ErrorKind::NotFound && Path::new("/proc/self/stat").exists()
        }
    }
}

fn inode_of(found: &fs::Metadata) -> u64 {
    found.ino()
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Without it a successor's could be removed, if it comes between the look and the removal.
        let _turn = Turn::take(&self.path);
        let ours = fs::symlink_metadata(&self.path).ok().map(|found| inode_of(&found)) == self.inode;
        if ours && self.inode.is_some() {
            // It may be gone already.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// Whoever owns the folder may swap what is in it while a socket is given away.
    #[test]
    fn nothing_but_the_socket_is_given_away() {
        use std::sync::atomic::{AtomicBool, Ordering};

        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let (socket, victim, link) = (at("s"), at("victim"), at("link"));
        fs::write(&victim, "ours").expect("writes");
        fs::set_permissions(&victim, Permissions::from_mode(0o600)).expect("is ours");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    // Either may not be there at the time.
                    let _ = std::os::unix::fs::symlink(&victim, &link);
                    let _ = fs::rename(&link, &socket);
                }
            });
            let access = Access {
                mode: Some(0o666),
                ..Access::default()
            };
            for _ in 0..2000 {
                let _ = fs::remove_file(&socket);
                drop(SocketFile::bind_for(&socket, access));
            }
            done.store(true, Ordering::Relaxed);
        });
        let mode = fs::metadata(&victim).expect("is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

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
    fn only_sockets_of_the_dead_that_are_old_enough_are_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let [dead, live, file] = ["dead", "live", "file"].map(|name| folder.path().join(name));
        drop(UnixListener::bind(&dead).expect("binds"));
        let _live = SocketFile::bind(&live).expect("binds");
        fs::write(&file, "").expect("a file");
        SocketFile::remove_dead(&dead, Duration::from_secs(3600));
        assert!(dead.exists());
        for path in [&dead, &live, &file, &folder.path().join("none")] {
            SocketFile::remove_dead(path, Duration::ZERO);
        }
        let left = fs::read_dir(folder.path()).expect("is there").count();
        assert!(!dead.exists() && live.exists() && file.exists() && left == 2);
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
        assert!(matches!(
            SocketFile::bind(folder.path()),
            Err(ListenError::NotASocket { .. })
        ));
        let nowhere = folder.path().join("no/such/folder");
        assert!(matches!(SocketFile::bind(&nowhere), Err(ListenError::Os { .. })));
    }

    #[test]
    fn of_many_that_find_a_stale_socket_one_replaces_it_and_the_others_leave_it_alone() {
        const MANY: usize = 8;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
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
            let taken = |result: &&Result<SocketFile, ListenError>| matches!(result, Err(ListenError::Taken { .. }));
            assert_eq!(all.iter().filter(taken).count(), MANY - 1, "round {round}");
            let _client = UnixStream::connect(&path).expect("somebody listens there");
            served[0].listener.set_nonblocking(true).expect("can be set");
            assert!(served[0].listener.accept().is_ok(), "round {round}: it is another one");
            drop(all);
            assert_eq!(
                fs::read_dir(folder.path()).expect("a folder").count(),
                0,
                "nothing is left behind"
            );
        }
    }
}
