//! Stream sockets on the loop: unix and TCP, with descriptor passing.
//!
//! Data moves by non-blocking calls from the loop's own thread; io_uring only reports when a socket is ready. So
//! memory passed to a read or write is never accessed after the call's future was dropped.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, sockopt,
};

use super::{Loop, Ring};
use crate::buffer::{ReadBuf, WriteBuf};
use crate::opener::opener;

/// The address to connect to or to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketAddress {
    /// A unix stream socket.
    Unix(PathBuf),
    /// A TCP port; the host is a name or an address without brackets.
    Tcp {
        /// The name or address.
        host: String,
        /// The port.
        port: u16,
    },
}

impl fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// A connected stream socket.
pub struct Socket {
    descriptor: OwnedFd,
    ring: Ring,
}

/// A listening stream socket.
pub struct Listener {
    descriptor: OwnedFd,
    ring: Ring,
}

/// The maximum number of descriptors in one message (vhost-user: eight memory regions).
const DESCRIPTORS_MAX: usize = 8;

fn would_block(error: Errno) -> bool {
    error == Errno::AGAIN || error == Errno::WOULDBLOCK
}

impl Loop {
    fn ring(&self) -> io::Result<&Ring> {
        self.0.ring.as_ref().ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "a simulated loop cannot use io_uring or sockets")
        })
    }

    /// Returns the ring of this loop, for backends.
    ///
    /// # Panics
    /// If the loop is simulated: a backend that needs the kernel runs on it.
    pub(crate) fn ring_or_panic(&self) -> Ring {
        match self.ring() {
            Ok(ring) => ring.clone(),
            Err(error) => panic!("{error}"),
        }
    }

    /// Completes once `descriptor` is readable, at its end, or broken.
    ///
    /// # Errors
    /// The loop is simulated, or the kernel refuses to watch the descriptor.
    pub async fn readable(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let result = self.ring()?.poll_readable(descriptor.as_raw_fd()).await;
        if result < 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        Ok(())
    }

    /// Runs `work` on a separate thread and returns its result, for calls that have no non-blocking form.
    ///
    /// # Errors
    /// No thread can be started.
    pub async fn run_blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        struct State<T> {
            value: Option<T>,
            waker: Option<Waker>,
        }
        let shared = Arc::new(Mutex::new(State::<T> { value: None, waker: None }));
        let thread_state = Arc::clone(&shared);
        std::thread::Builder::new().name("larder-blocking".to_owned()).spawn(move || {
            let value = work();
            let mut state = thread_state.lock().unwrap_or_else(PoisonError::into_inner);
            state.value = Some(value);
            if let Some(waker) = state.waker.take() {
                waker.wake();
            }
        })?;
        let value = std::future::poll_fn(|context| {
            let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
            match state.value.take() {
                Some(value) => Poll::Ready(value),
                None => {
                    state.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        });
        Ok(value.await)
    }
}

/// The silence of a TCP peer after which the kernel sends keepalive probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);

/// The interval of keepalive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// The time after which a TCP peer counts as lost, if it acknowledges nothing, or none of the waiting data can be
/// sent: tcp(7) includes a peer that has no buffer space left.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(300);

/// Sends written data at once, and closes the connection of a peer whose host is lost.
fn configure_tcp(socket: &OwnedFd) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_user_timeout(socket, TCP_USER_TIMEOUT.as_millis() as u32)
}

fn stream_flags() -> SocketFlags {
    SocketFlags::CLOEXEC | SocketFlags::NONBLOCK
}

impl Socket {
    /// Connects to `address`.
    ///
    /// # Errors
    /// No server listens there, the name does not resolve, or the path is too long.
    pub async fn connect(on: &Loop, address: &SocketAddress) -> io::Result<Self> {
        match address {
            SocketAddress::Unix(path) => {
                // A full backlog is EAGAIN: the listener is alive but slow to accept.
                let descriptor = loop {
                    match opener().connect(path) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            on.sleep(Duration::from_millis(5)).await;
                        }
                        connected => break connected?,
                    }
                };
                Self::from_descriptor(on, descriptor)
            }
            SocketAddress::Tcp { host, port } => {
                let (host, port) = (host.clone(), *port);
                let addresses = on
                    .run_blocking(move || {
                        (host.as_str(), port).to_socket_addrs().map(|found| found.collect::<Vec<_>>())
                    })
                    .await??;
                let mut last_error = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
                for target in addresses {
                    match Self::connect_tcp(on, target).await {
                        Ok(socket) => return Ok(socket),
                        Err(error) => last_error = error,
                    }
                }
                Err(last_error)
            }
        }
    }

    async fn connect_tcp(on: &Loop, target: std::net::SocketAddr) -> io::Result<Self> {
        let family = if target.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let descriptor = rustix::net::socket_with(family, SocketType::STREAM, stream_flags(), None)?;
        match rustix::net::connect(&descriptor, &target) {
            Ok(()) => {}
            Err(Errno::INPROGRESS) => {
                on.ring()?.poll_writable(descriptor.as_raw_fd()).await;
                sockopt::socket_error(&descriptor)??;
            }
            Err(error) => return Err(error.into()),
        }
        sockopt::set_tcp_nodelay(&descriptor, true)?;
        Self::from_descriptor(on, descriptor)
    }

    /// Takes over a connected stream socket.
    ///
    /// # Errors
    /// The loop is simulated, or the descriptor cannot be made non-blocking.
    pub fn from_descriptor(on: &Loop, descriptor: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&descriptor, true)?;
        Ok(Self { descriptor, ring: on.ring()?.clone() })
    }

    async fn wait_ready(&self, writable: bool) -> io::Result<()> {
        let descriptor = self.descriptor.as_raw_fd();
        let result = if writable {
            self.ring.poll_writable(descriptor).await
        } else {
            self.ring.poll_readable(descriptor).await
        };
        if result < 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        Ok(())
    }

    /// Waits until data can be read, or the other side has closed the connection.
    ///
    /// # Errors
    /// The kernel refuses to watch the socket.
    pub async fn readable(&self) -> io::Result<()> {
        self.wait_ready(false).await
    }

    /// Waits until data can be written, or the connection has broken.
    ///
    /// # Errors
    /// The kernel refuses to watch the socket.
    pub async fn writable(&self) -> io::Result<()> {
        self.wait_ready(true).await
    }

    /// Reads the available data; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` if no data is available, `Interrupted`, or the connection broke.
    pub fn try_read(&self, into: ReadBuf<'_>) -> io::Result<usize> {
        self.try_read_pieces(into)
    }

    /// Writes as much of `head` followed by `body` as the socket accepts, and returns the number of bytes.
    ///
    /// # Errors
    /// `WouldBlock` if the socket accepts nothing now, `Interrupted`, or the connection broke.
    pub fn try_write(&self, head: &[u8], body: WriteBuf<'_>) -> io::Result<usize> {
        self.try_write_pieces(head, body)
    }

    /// Reads the available data, at least one byte; 0 at the end of the stream. Dropping the future loses no data.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::net::recv(&self.descriptor, &mut *buffer, RecvFlags::empty()) {
                Ok((count, _)) => return Ok(count),
                Err(Errno::INTR) => {}
                Err(error) if would_block(error) => self.wait_ready(false).await?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Fills `buffer`.
    ///
    /// # Errors
    /// The connection broke, or ended first (`UnexpectedEof`).
    pub async fn read_exact(&self, buffer: &mut [u8]) -> io::Result<()> {
        self.read_exact_into(ReadBuf::new(buffer)).await
    }

    /// Fills `buffer`, which may be in pieces and in guest memory.
    ///
    /// # Errors
    /// The connection broke, or ended first (`UnexpectedEof`).
    pub async fn read_exact_into(&self, buffer: ReadBuf<'_>) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.try_read_pieces(buffer.skip(done)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_ready(false).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn try_read_pieces(&self, buffer: ReadBuf<'_>) -> io::Result<usize> {
        let pieces: smallvec::SmallVec<[crate::buffer::IoVec; 16]> = buffer.pieces().take(64).collect();
        // SAFETY: the pieces are valid for writes by `ReadBuf`'s contract; `IoVec` is a `struct iovec`.
        let count = unsafe { libc::readv(self.descriptor.as_raw_fd(), pieces.as_ptr().cast(), pieces.len() as i32) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        self.write_all_from(bytes, WriteBuf::new(&[])).await
    }

    /// Writes all of `head`, then all of `body`, which may be in pieces and in guest memory.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn write_all_from(&self, head: &[u8], body: WriteBuf<'_>) -> io::Result<()> {
        let mut done = 0;
        let total = head.len() + body.len();
        while done < total {
            match self.try_write_pieces(head.get(done..).unwrap_or(&[]), body.skip(done.saturating_sub(head.len()))) {
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_ready(true).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn try_write_pieces(&self, head: &[u8], body: WriteBuf<'_>) -> io::Result<usize> {
        let mut pieces: smallvec::SmallVec<[crate::buffer::IoVec; 16]> = smallvec::SmallVec::new();
        if !head.is_empty() {
            pieces.push(crate::buffer::IoVec::new(head.as_ptr().cast_mut(), head.len()));
        }
        pieces.extend(body.pieces().take(63));
        // SAFETY: a zeroed msghdr is valid: no name, no pieces, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr().cast();
        message.msg_iovlen = pieces.len() as _;
        // SAFETY: the pieces are valid for reads by `WriteBuf`'s contract; `IoVec` is a `struct iovec`.
        let count = unsafe { libc::sendmsg(self.descriptor.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Reads the available data, with the descriptors sent along; 0 bytes at the end of the stream. The kernel closes
    /// descriptors beyond the maximum of a message.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn read_with_descriptors(&self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::net::recvmsg(
                &self.descriptor,
                &mut [IoSliceMut::new(buffer)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            );
            match received {
                Ok(message) => {
                    let mut descriptors = Vec::new();
                    for item in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = item {
                            descriptors.extend(rights);
                        }
                    }
                    return Ok((message.bytes, descriptors));
                }
                Err(Errno::INTR) => {}
                Err(error) if would_block(error) => self.wait_ready(false).await?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes all of `bytes`, sending `descriptors` with the first bytes.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn write_with_descriptors(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if done == 0 && !descriptors.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            let pieces = [IoSlice::new(&bytes[done..])];
            match rustix::net::sendmsg(&self.descriptor, &pieces, &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) if would_block(error) => self.wait_ready(true).await?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Returns the process at the other end of a unix socket as `qemu-nbd, pid 4711`; of a socket pair, the process
    /// that made it. Returns `None` if the kernel does not report it: the process is on another host, or in another
    /// PID namespace.
    pub fn peer_process(&self) -> Option<String> {
        let pid = self.peer_pid()?;
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        Some(format!("{}, pid {pid}", name.trim_end()))
    }

    /// Returns the IP address at the other end of a TCP socket.
    pub fn peer_address(&self) -> Option<IpAddr> {
        let address = rustix::net::getpeername(&self.descriptor).ok()??;
        SocketAddr::try_from(address).ok().map(|address| address.ip())
    }

    /// Returns the process ID at the other end of a unix socket, see [`Socket::peer_process`].
    pub fn peer_pid(&self) -> Option<i32> {
        let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the kernel writes no more than `bytes` bytes to `credentials`, for which any bytes are valid.
        let result = unsafe {
            libc::getsockopt(
                self.descriptor.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut credentials).cast(),
                &raw mut bytes,
            )
        };
        // The pid is 0 for a process in another PID namespace, and for a TCP socket.
        (result == 0 && credentials.pid > 0).then_some(credentials.pid)
    }

    /// Closes both directions; reads and writes in flight fail.
    pub fn shutdown(&self) {
        // The connection may be closed already.
        let _ = rustix::net::shutdown(&self.descriptor, rustix::net::Shutdown::Both);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Listener {
    /// Completes once a connection waits to be accepted.
    ///
    /// # Errors
    /// The kernel refuses to watch the socket.
    pub async fn readable(&self) -> io::Result<()> {
        let result = self.ring.poll_readable(self.descriptor.as_raw_fd()).await;
        match result {
            0.. => Ok(()),
            errno => Err(io::Error::from_raw_os_error(-errno)),
        }
    }

    /// Takes over a listening socket, such as one that systemd passed or that
    /// [`bind`](std::os::unix::net::UnixListener::bind) created.
    ///
    /// # Errors
    /// The loop is simulated, or the descriptor cannot be made non-blocking.
    pub fn from_descriptor(on: &Loop, descriptor: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&descriptor, true)?;
        Ok(Self { descriptor, ring: on.ring()?.clone() })
    }

    /// Waits for the next connection. Dropping the future loses no connection.
    ///
    /// # Errors
    /// The socket is broken. Running out of descriptors is not an error: the call waits until there are some.
    pub async fn accept(&self, on: &Loop) -> io::Result<Socket> {
        loop {
            match rustix::net::accept_with(&self.descriptor, stream_flags()) {
                Ok(descriptor) => {
                    // Unix sockets have none of these options, and need none.
                    let _ = configure_tcp(&descriptor);
                    return Socket::from_descriptor(on, descriptor);
                }
                // accept(2): network errors of the new connection are passed on, and should be treated like EAGAIN.
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::PROTO
                    | Errno::NETDOWN
                    | Errno::NOPROTOOPT
                    | Errno::HOSTDOWN
                    | Errno::NONET
                    | Errno::HOSTUNREACH
                    | Errno::NETUNREACH
                    | Errno::TIMEDOUT,
                ) => {}
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    on.sleep(Duration::from_millis(100)).await;
                }
                Err(error) if would_block(error) => {
                    let result = pin!(self.ring.poll_readable(self.descriptor.as_raw_fd())).await;
                    if result < 0 {
                        return Err(io::Error::from_raw_os_error(-result));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
