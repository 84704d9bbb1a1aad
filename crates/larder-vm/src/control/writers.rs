//! The clients that may change something at a control socket. Every other client that can connect may only read.
//!
//! Invariants:
//! - The decision uses the user and the groups that the kernel recorded when the client connected.
//! - A client whose user the kernel does not report may only read.
//! - Owner and mode of the socket's file are read from the file that existed when the server started to listen,
//!   whatever its name is now. A file that replaces it has no effect.
//! - Membership in [`READ_GROUP`] alone never permits a change.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::geteuid;
use tokio::net::UnixStream;

use crate::listen::Access;
#[cfg(doc)]
use crate::read_group::READ_GROUP;

/// The kernel's limit of groups of a process (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;

/// Number of groups for which the first call has room.
const GROUPS_CAPACITY_INITIAL: usize = 64;

/// The users and groups whose processes may change something.
#[derive(Debug)]
pub(super) struct Writers {
    /// Rights from the VM's file and from the server's user.
    fixed: Rights,
    /// The socket's file. Its owner and mode are read for each client, because root can change them at any time.
    file: Option<File>,
    /// The file has an access control list, so the group bits of its mode are the list's mask.
    has_acl: bool,
    /// The group whose members may read, which never permits a change.
    readers: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Rights {
    users: Vec<u32>,
    groups: Vec<u32>,
    everyone: bool,
}

impl Writers {
    /// Grants writing to root, to the user of this process, and to the owner and the group of `access` as far as its
    /// mode permits. The same applies to owner and group of the socket's file at `path`, which this process created.
    pub(super) fn for_bound(path: &Path, access: Access) -> Self {
        let mut writers = Self::from_access(access);
        // In a directory of another user, that user may have replaced the file since the socket was bound.
        let is_trusted_owner =
            |file: &File| file.metadata().is_ok_and(|found| writers.fixed.users.contains(&found.uid()));
        let file = open_socket_file(path).filter(is_trusted_owner);
        writers.has_acl = file.as_ref().is_some_and(has_acl);
        writers.file = file;
        writers
    }

    /// Grants the same rights as [`Writers::for_bound`] for a socket's file that another process created.
    pub(super) fn for_inherited(path: &Path, access: Access) -> Self {
        let file = open_socket_file(path);
        Self { has_acl: file.as_ref().is_some_and(has_acl), file, ..Self::from_access(access) }
    }

    fn from_access(access: Access) -> Self {
        let mode = access.mode.unwrap_or_default();
        let users = [0, geteuid().as_raw()].into_iter().chain(access.owner);
        Self {
            fixed: Rights {
                users: users.collect(),
                groups: access.group.filter(|_| mode & 0o020 != 0).into_iter().collect(),
                everyone: mode & 0o002 != 0,
            },
            file: None,
            has_acl: false,
            readers: access.readers,
        }
    }

    /// Returns the current rights.
    fn current_rights(&self) -> Rights {
        let mut rights = self.fixed.clone();
        if let Some(metadata) = self.file.as_ref().and_then(|file| file.metadata().ok()) {
            let may_write = |bit: u32| metadata.permissions().mode() & bit != 0;
            rights.users.push(metadata.uid());
            rights.everyone |= may_write(0o002);
            rights.groups.extend(Some(metadata.gid()).filter(|_| may_write(0o020) && !self.has_acl));
        }
        rights.groups.retain(|group| Some(*group) != self.readers);
        rights
    }

    /// Returns whether the process at the other end of a connection may change something.
    pub(super) fn permits(&self, client: &UnixStream) -> bool {
        let rights = self.current_rights();
        if rights.everyone {
            return true;
        }
        let Ok(peer) = client.peer_cred() else {
            return false;
        };
        let is_granted = |groups: &[u32]| groups.iter().any(|group| rights.groups.contains(group));
        rights.users.contains(&peer.uid())
            || !rights.groups.is_empty()
                && (is_granted(&[peer.gid()]) || peer_groups(client).is_ok_and(|all| is_granted(&all)))
    }
}

/// Opens the socket's file, so that its owner and mode can be read even after a rename.
fn open_socket_file(path: &Path) -> Option<File> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let is_socket = file.metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
    is_socket.then_some(file)
}

fn has_acl(file: &File) -> bool {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut empty: [u8; 0] = [];
    let result = rustix::fs::getxattr(path, "system.posix_acl_access", &mut empty);
    !matches!(result, Err(Errno::NODATA | Errno::NOTSUP))
}

/// Returns the supplementary groups that the client's process had when it connected (`SO_PEERGROUPS`, unix(7)).
fn peer_groups(client: &impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; GROUPS_CAPACITY_INITIAL];
    loop {
        let mut bytes = libc::socklen_t::try_from(size_of_val(groups.as_slice())).unwrap_or(libc::socklen_t::MAX);
        // SAFETY: the descriptor is open while `client` is borrowed. `groups` owns `bytes` writable bytes, and any
        // bytes are valid as u32. `bytes` is a local socklen_t. The kernel writes nothing else and keeps neither
        // pointer.
        let result = unsafe {
            libc::getsockopt(
                client.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = usize::try_from(bytes).unwrap_or_default() / size_of::<u32>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // The kernel has stored the required size in `bytes`.
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() || count > GROUPS_MAX {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::listen::SocketFile;

    const NOBODY: u32 = 65_534;
    const READERS: u32 = 4_242;

    fn access(mode: u32, owner: Option<u32>, group: Option<u32>) -> Access {
        Access { mode: Some(mode), owner, group, readers: Some(READERS) }
    }

    /// A group may write only if the mode permits it, and readers never by their group.
    #[test]
    fn writers_follow_mode_owner_and_group() {
        for (access, groups, everyone) in [
            (access(0o600, None, None), &[][..], false),
            (access(0o660, None, Some(7)), &[7], false),
            (access(0o600, None, Some(7)), &[], false),
            (access(0o640, None, Some(7)), &[], false),
            (access(0o660, None, Some(READERS)), &[], false),
            (access(0o666, None, None), &[], true),
        ] {
            let rights = Writers::from_access(access).current_rights();
            assert_eq!((&*rights.groups, rights.everyone), (groups, everyone), "{access:?}");
        }
        let users = Writers::from_access(access(0o600, Some(NOBODY), None)).current_rights().users;
        assert!(users.contains(&NOBODY) && users.contains(&0));
    }

    /// A later change of the file's mode takes effect; with an access control list the group bits do not count.
    #[test]
    fn current_mode_of_file_is_used() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let set = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("ours");
        let listener = UnixListener::bind(&path).expect("binds");
        set(0o600);
        let group = path.metadata().expect("is there").gid();
        for writers in [
            Writers::for_inherited(&path, access(0o600, None, None)),
            Writers::for_bound(&path, access(0o600, None, None)),
        ] {
            for (mode, groups, everyone) in [(0o600, vec![], false), (0o660, vec![group], false), (0o606, vec![], true)]
            {
                set(mode);
                let rights = writers.current_rights();
                assert_eq!((rights.groups, rights.everyone), (groups, everyone), "{mode:o}");
            }
        }
        drop(listener);
        let _socket = SocketFile::bind_with_access(&path, access(0o600, None, None)).expect("replaces it");
        let mode = path.metadata().expect("is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o660, "the mask of the list lets readers in");
        for writers in [
            Writers::for_inherited(&path, access(0o600, None, None)),
            Writers::for_bound(&path, access(0o600, None, None)),
        ] {
            assert_eq!((writers.current_rights().groups, writers.current_rights().everyone), (vec![], false));
        }
    }

    /// A file that replaces the socket grants no rights.
    #[test]
    fn replacement_of_socket_file_grants_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let _listener = UnixListener::bind(&path).expect("binds");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("ours");
        let writers = Writers::for_bound(&path, access(0o600, None, None));
        std::fs::rename(&path, directory.path().join("moved")).expect("ours");
        std::fs::write(&path, "").expect("writes");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).expect("ours");
        assert!(!writers.current_rights().everyone);
        assert!(Writers::for_bound(&path, access(0o600, None, None)).file.is_none());
    }

    /// The reported groups of a client are those of its process.
    #[test]
    fn client_groups_match_its_process() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let mut reported = peer_groups(&one).expect("the kernel reports them");
        let mut ours: Vec<u32> =
            rustix::process::getgroups().expect("we have some").into_iter().map(rustix::process::Gid::as_raw).collect();
        reported.sort_unstable();
        ours.sort_unstable();
        assert_eq!(reported, ours);
    }
}
