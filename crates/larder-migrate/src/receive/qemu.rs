//! Connection to the destination's QEMU.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as add_nbd_server, socket_with};

/// Time limit for QEMU to accept a pending connection and so make room in its backlog for another.
const BACKLOG_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which the connection is retried.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Connects to the socket where QEMU waits. `pause` waits for a time and returns whether to continue; if it returns
/// false, there is no connection. With `of`, the peer must run as that user: the path is in a directory of that user,
/// and may lead to any socket.
pub(super) fn connect(
    path: &Path,
    expected_user: Option<u32>,
    pause: impl Fn(Duration) -> bool,
) -> io::Result<Option<UnixStream>> {
    let address = SocketAddrUnix::new(path)?;
    // A blocking connect that waits for room in the backlog could not be interrupted (unix(7) has no way).
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let started = Instant::now();
    loop {
        match add_nbd_server(&socket, &address) {
            Ok(()) => {
                let peer = rustix::net::sockopt::socket_peercred(&socket)?;
                if expected_user.is_some_and(|user| user != peer.uid.as_raw()) {
                    return Err(io::Error::other("a process of a user other than QEMU's listens there"));
                }
                let socket = UnixStream::from(socket);
                socket.set_nonblocking(false)?;
                return Ok(Some(socket));
            }
            Err(rustix::io::Errno::AGAIN) if started.elapsed() < BACKLOG_TIMEOUT => {
                if !pause(RETRY_INTERVAL) {
                    return Ok(None);
                }
            }
            Err(rustix::io::Errno::AGAIN) => {
                let text = format!("it has accepted no connection for {} s", BACKLOG_TIMEOUT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
