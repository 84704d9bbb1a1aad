//! Connecting to the destination's QEMU.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, socket_with};

/// How long QEMU may leave connections waiting that it has not taken up, so that there is no room for another one.
const ROOM_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two looks whether there is room.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Connects to where QEMU waits. `pause` waits for so long, and says whether it is still worth while: without it there is no
/// connection. With `of` the socket must be that user's: the path is in a folder that is his, and may lead anywhere.
pub(super) fn connect(
    path: &Path,
    of: Option<u32>,
    pause: impl Fn(Duration) -> bool,
) -> io::Result<Option<UnixStream>> {
    let address = SocketAddrUnix::new(path)?;
    // A connection that waits for room could be ended by nobody (unix(7) knows no way).
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let begun = Instant::now();
    loop {
        match connect_to(&socket, &address) {
            Ok(()) => {
                let peer = rustix::net::sockopt::socket_peercred(&socket)?;
                if of.is_some_and(|user| user != peer.uid.as_raw()) {
                    return Err(io::Error::other("somebody else than QEMU's user listens there"));
                }
                let socket = UnixStream::from(socket);
                socket.set_nonblocking(false)?;
                return Ok(Some(socket));
            }
            Err(rustix::io::Errno::AGAIN) if begun.elapsed() < ROOM_TIMEOUT => {
                if !pause(LOOK_EVERY) {
                    return Ok(None);
                }
            }
            Err(rustix::io::Errno::AGAIN) => {
                let text = format!("it has taken up no connection for {} s", ROOM_TIMEOUT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
