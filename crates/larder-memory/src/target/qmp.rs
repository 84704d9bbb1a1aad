//! Finds the process behind a QMP socket without connecting, because the socket accepts only one client at a time.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat};
use rustix::process::Pid;

use super::descriptors::Descriptors;
use super::process;

/// Error of finding the process.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The path does not exist, or cannot be accessed.
    #[error("{path}: {error}: give the path that QEMU has with -qmp unix:PATH,server=on,wait=off")]
    NoFile {
        /// The path, as given.
        path: PathBuf,
        /// Error of stat(2).
        error: io::Error,
    },
    /// The path is not a socket.
    #[error("{path} is not a UNIX socket: give the path that QEMU has with -qmp unix:PATH,server=on,wait=off")]
    NoSocket {
        /// The path, as given.
        path: PathBuf,
    },
    /// The socket is stale, or its process cannot be inspected by this user.
    #[error(
        "{path}: no process listens on it ({unreadable} processes could not be inspected, which requires root or \
        CAP_SYS_PTRACE): has QEMU ended, or does it connect instead (server=on is missing)?"
    )]
    NoListener {
        /// The path, as given.
        path: PathBuf,
        /// Number of processes that could not be inspected.
        unreadable: usize,
    },
    /// Several processes hold the socket, and not exactly one of them is QEMU.
    #[error(
        "{path}: several processes hold the listening socket: {listeners}: give the one that runs the VM with --pid"
    )]
    SeveralListeners {
        /// The path, as given.
        path: PathBuf,
        /// PIDs and names.
        listeners: String,
    },
}

/// Returns the process that listens on the UNIX socket `path`. If several processes hold the socket (libvirt does
/// too), returns QEMU.
///
/// # Errors
/// See [`QmpError`].
pub fn pid_of_qmp(path: &Path) -> Result<Pid, QmpError> {
    let stat = rustix::fs::stat(path).map_err(|error| QmpError::NoFile { path: path.into(), error: error.into() })?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(QmpError::NoSocket { path: path.into() });
    }
    let own_sockets = fs::read("/proc/self/net/unix").map(|table| parse_listening(&table)).unwrap_or_default();
    let mut listeners = Vec::new();
    let mut unreadable = 0;
    for pid in process::all() {
        match Descriptors::read(pid) {
            Ok(descriptors) => {
                if has_listener(pid, &descriptors, &own_sockets, &stat) {
                    listeners.push(pid);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => unreadable += 1,
            // The process has ended.
            Err(_) => {}
        }
    }
    let qemus: Vec<Pid> = listeners.iter().copied().filter(|pid| is_qemu(*pid)).collect();
    match (&listeners[..], &qemus[..]) {
        ([only], _) | (_, [only]) => Ok(*only),
        ([], _) => Err(QmpError::NoListener { path: path.into(), unreadable }),
        _ => {
            let names = listeners.iter().map(|pid| format!("{pid} ({})", process::name(pid.as_raw_pid())));
            Err(QmpError::SeveralListeners { path: path.into(), listeners: names.collect::<Vec<_>>().join(", ") })
        }
    }
}

/// Returns true if `pid` has a socket that listens at the file of `socket_stat`. `own_sockets` are the sockets of this
/// network namespace.
fn has_listener(pid: Pid, descriptors: &Descriptors, own_sockets: &BTreeMap<u64, Vec<u8>>, socket_stat: &Stat) -> bool {
    let sockets: Vec<u64> = descriptors.all.iter().filter_map(|descriptor| socket_inode(&descriptor.path)).collect();
    if sockets.iter().any(|inode| own_sockets.get(inode).is_some_and(|at| resolves_to(pid, at, socket_stat))) {
        return true;
    }
    // Sockets of another network namespace are only in the table of that namespace.
    if sockets.is_empty() || !is_qemu(pid) {
        return false;
    }
    let process_sockets =
        fs::read(format!("/proc/{pid}/net/unix")).map(|table| parse_listening(&table)).unwrap_or_default();
    sockets.iter().any(|inode| process_sockets.get(inode).is_some_and(|at| resolves_to(pid, at, socket_stat)))
}

/// Returns true if `at`, to which a socket of `pid` was bound, is the file of `socket_stat`. The path is resolved as
/// that process sees it (it may have its own directory or mount namespace), and as this process does.
fn resolves_to(pid: Pid, at: &[u8], socket_stat: &Stat) -> bool {
    let at = OsStr::from_bytes(at);
    let candidates = match Path::new(at).strip_prefix("/") {
        Ok(below_root) => [Path::new(&format!("/proc/{pid}/root")).join(below_root), at.into()],
        Err(_) => [Path::new(&format!("/proc/{pid}/cwd")).join(at), at.into()],
    };
    candidates.iter().any(|path| {
        rustix::fs::stat(path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (socket_stat.st_dev, socket_stat.st_ino))
    })
}

/// Returns the inode number of the socket that a descriptor refers to.
fn socket_inode(path: &[u8]) -> Option<u64> {
    let number = path.strip_prefix(b"socket:[")?.strip_suffix(b"]")?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// Returns true if the process is QEMU, by the name of its program, or else by its own name.
fn is_qemu(pid: Pid) -> bool {
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let program = program.file_name().is_some_and(|name| name.as_bytes().starts_with(b"qemu"));
    program || process::name(pid.as_raw_pid()).starts_with("qemu")
}

/// Parses `/proc/net/unix`, and returns the listening sockets with their paths (unix(7), proc_pid_net(5)). Skips
/// sockets without a path.
pub(super) fn parse_listening(table: &[u8]) -> BTreeMap<u64, Vec<u8>> {
    /// `__SO_ACCEPTCON` of linux/net.h.
    const LISTENS: u64 = 1 << 16;
    let lines = table.split(|byte| *byte == b'\n').skip(1);
    lines
        .filter_map(|line| {
            // Fields: number, count, protocol, flags, type, state, inode (padded on the left), and path.
            let mut rest = line;
            let mut word = || {
                rest = rest.trim_ascii_start();
                let end = rest.iter().position(|byte| *byte == b' ').unwrap_or(rest.len());
                let (word, after) = rest.split_at(end);
                rest = after;
                std::str::from_utf8(word).ok()
            };
            let flags = u64::from_str_radix([word()?, word()?, word()?, word()?][3], 16).ok()?;
            let inode = [word()?, word()?, word()?][2].parse().ok()?;
            let path = rest.strip_prefix(b" ")?;
            // The name of a socket without a file begins with @. A relative path may begin so, too.
            (flags & LISTENS != 0 && !path.is_empty()).then(|| (inode, path.to_vec()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_sockets_are_parsed() {
        let table = b"Num       RefCount Protocol Flags    Type St Inode Path\n\
            000000001ca45a0e: 00000002 00000000 00010000 0001 01 499203 /tmp/a b \xff.sock\n\
            0000000037a4050c: 00000003 00000000 00000000 0001 03   574\n\
            0000000037a4050c: 00000003 00000000 00000000 0001 03   575 /tmp/a b.sock\n\
            0000000037a4050d: 00000002 00000000 00010000 0001 01     7 @hidden\n\
            nonsense\n";
        let found = parse_listening(table);
        assert_eq!(found.get(&499203).unwrap(), b"/tmp/a b \xff.sock");
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [7, 499203]);
    }
}
