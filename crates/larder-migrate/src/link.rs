//! Connection between the two hosts, plain or encrypted.
//!
//! Sockets are blocking while a connection is set up. The whole set-up is limited to [`SETUP_TIMEOUT`], however
//! slowly the other side sends. Afterwards the user of a link chooses the mode. All other TCP options are set in
//! `set_up`.

use std::io::{self, IoSlice, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use thiserror::Error;

use crate::tls::{PeerError, ReceiverTls, SenderTls};

/// Time limit for connecting, and again for the TLS handshake and the greetings together.
pub const SETUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the TLS handshake and the greetings of one of several attempts.
const RETRY_SETUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for connecting in one of several attempts; a lost packet is sent again after 1 s.
const RETRY_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Time after which the kernel gives up a connection whose other side does not acknowledge data or answer
/// keep-alives. The control connection notices long before; lanes then end with it.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle time before the kernel sends a TCP keep-alive probe.
const TCP_KEEPIDLE: Duration = Duration::from_secs(10);
/// Interval of keep-alive probes.
const TCP_KEEPINTVL: Duration = Duration::from_secs(5);

/// Maximum unsent bytes in the kernel before it makes the writer wait. Small, because QEMU does not know of the delay
/// of these bytes; enough to keep a link busy while a thread is woken.
const NOTSENT_LOWAT_BYTES: u32 = 128 << 10;

/// Reasons why there is no connection.
#[derive(Debug, Error)]
pub enum LinkError {
    /// The host name cannot be resolved.
    #[error("{address}: no such host: {source}")]
    Resolve {
        /// Address as given by the user.
        address: String,
        /// Error of the resolver.
        source: io::Error,
    },
    /// The host does not accept a connection.
    #[error(
        "cannot connect to {address}: {source}; is 'larder migrate receive' listening there, and does a firewall allow the connection?"
    )]
    Connect {
        /// Address as given by the user.
        address: String,
        /// Error of the last address tried.
        source: io::Error,
    },
    /// The socket cannot be set up.
    #[error("cannot set up the connection: {0}")]
    Socket(io::Error),
    /// A side rejects the other's certificate, or the handshake fails otherwise.
    #[error("the TLS handshake failed: {0}")]
    Handshake(io::Error),
    /// The receiver closed the connection during the handshake.
    #[error("the TLS handshake failed: {0}; does the receiver have --tls?")]
    HandshakeAborted(io::Error),
    /// The receiver got bytes that are not TLS.
    #[error("the TLS handshake failed: the sender does not speak TLS; does it have --tls?")]
    NotTls,
    /// The receiver refused the sender's certificate, which TLS 1.3 reports only after the handshake.
    #[error("the receiver does not accept this sender's certificate (client-cert.pem): {0:?}")]
    CertificateRefused(rustls::AlertDescription),
    /// TLS cannot start.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The peer has another certificate than the one it is pinned to.
    #[error(transparent)]
    Peer(#[from] PeerError),
}

/// One connection.
pub enum Link {
    /// Unencrypted connection.
    Plain(Socket),
    /// Encrypted connection, sender's end.
    Sender(Box<StreamOwned<ClientConnection, Socket>>),
    /// Encrypted connection, receiver's end.
    Receiver(Box<StreamOwned<ServerConnection, Socket>>),
}

/// Socket of a link. During set-up, no call waits beyond a deadline.
pub struct Socket {
    stream: TcpStream,
    setup: Duration,
    deadline: Option<Instant>,
}

impl Socket {
    fn new(stream: TcpStream, setup: Duration) -> Result<Self, LinkError> {
        set_up(&stream).map_err(LinkError::Socket)?;
        Ok(Self { stream, setup, deadline: Some(Instant::now() + setup) })
    }

    /// Performs an operation within the time that is left.
    fn within_deadline(
        &mut self,
        limit: fn(&TcpStream, Option<Duration>) -> io::Result<()>,
        operation: impl FnOnce(&mut TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let Some(deadline) = self.deadline else {
            return operation(&mut self.stream);
        };
        let seconds = self.setup.as_secs();
        let timed_out = || {
            let text = format!("the other side did not complete the connection set-up within {seconds} s");
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(timed_out());
        }
        limit(&self.stream, Some(left))?;
        operation(&mut self.stream).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => timed_out(),
            _ => error,
        })
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.within_deadline(TcpStream::set_read_timeout, |stream| stream.read(buffer))
    }
}

impl Write for Socket {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.within_deadline(TcpStream::set_write_timeout, |stream| stream.write(buffer))
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        self.within_deadline(TcpStream::set_write_timeout, |stream| stream.write_vectored(buffers))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Applies the same expression to each variant of a link.
macro_rules! each {
    ($link:expr, $stream:ident => $does:expr) => {
        match $link {
            Link::Plain($stream) => $does,
            Link::Sender($stream) => $does,
            Link::Receiver($stream) => $does,
        }
    };
}

/// Maximum bytes of plaintext that rustls holds, encrypted, for the socket.
const TLS_BUFFER_BYTES_MAX: usize = 256 << 10;

impl Link {
    /// Connects to `HOST:PORT`, trying each of the host's addresses.
    ///
    /// # Errors
    /// There is no such host, it does not answer, or a certificate is rejected.
    pub fn connect(address: &str, tls: Option<&SenderTls>) -> Result<Self, LinkError> {
        let addresses: Vec<SocketAddr> = address
            .to_socket_addrs()
            .map_err(|source| LinkError::Resolve { address: address.to_owned(), source })?
            .collect();
        let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for candidate in addresses {
            match TcpStream::connect_timeout(&candidate, SETUP_TIMEOUT) {
                Ok(socket) => return Self::set_up_sender(socket, tls, SETUP_TIMEOUT),
                Err(error) => failed = error,
            }
        }
        Err(LinkError::Connect { address: address.to_owned(), source: failed })
    }

    /// Connects again to the address of an earlier link, with shorter time limits, because a failed attempt is
    /// repeated.
    ///
    /// # Errors
    /// Same as [`Self::connect`].
    pub fn reconnect(address: SocketAddr, tls: Option<&SenderTls>) -> Result<Self, LinkError> {
        let socket = TcpStream::connect_timeout(&address, RETRY_CONNECT_TIMEOUT)
            .map_err(|source| LinkError::Connect { address: address.to_string(), source })?;
        Self::set_up_sender(socket, tls, RETRY_SETUP_TIMEOUT)
    }

    fn set_up_sender(socket: TcpStream, tls: Option<&SenderTls>, setup: Duration) -> Result<Self, LinkError> {
        let mut socket = Socket::new(socket, setup)?;
        let Some(tls) = tls else {
            return Ok(Self::Plain(socket));
        };
        let mut session = ClientConnection::new(tls.config(), tls.server())?;
        while session.is_handshaking() || session.wants_write() {
            session.complete_io(&mut socket).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => LinkError::HandshakeAborted(error),
                _ => LinkError::Handshake(error),
            })?;
        }
        tls.check(session.peer_certificates())?;
        session.set_buffer_limit(Some(TLS_BUFFER_BYTES_MAX));
        Ok(Self::Sender(Box::new(StreamOwned::new(session, socket))))
    }

    /// Accepts a connection. The caller must then verify the peer with [`Self::check_peer`].
    ///
    /// # Errors
    /// The certificate is not signed by a trusted authority, or the other side breaks off.
    pub fn accept(socket: TcpStream, tls: Option<&ReceiverTls>) -> Result<Self, LinkError> {
        let mut socket = Socket::new(socket, SETUP_TIMEOUT)?;
        let Some(tls) = tls else {
            return Ok(Self::Plain(socket));
        };
        let mut session = ServerConnection::new(tls.config())?;
        while session.is_handshaking() || session.wants_write() {
            if let Err(error) = session.complete_io(&mut socket) {
                drain(&mut socket);
                return Err(match error.get_ref().and_then(|error| error.downcast_ref()) {
                    Some(rustls::Error::InvalidMessage(_)) => LinkError::NotTls,
                    _ => LinkError::Handshake(error),
                });
            }
        }
        session.set_buffer_limit(Some(TLS_BUFFER_BYTES_MAX));
        Ok(Self::Receiver(Box::new(StreamOwned::new(session, socket))))
    }

    /// Checks that a receiver accepts this sender, which has connected from this address.
    ///
    /// # Errors
    /// The sender is not accepted.
    pub fn check_peer(&self, from: IpAddr, tls: Option<&ReceiverTls>) -> Result<(), PeerError> {
        match (self, tls) {
            (Self::Receiver(stream), Some(tls)) => tls.check(from, stream.conn.peer_certificates()),
            _ => Ok(()),
        }
    }

    const fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => &socket.stream,
            Self::Sender(stream) => &stream.sock.stream,
            Self::Receiver(stream) => &stream.sock.stream,
        }
    }

    /// Ends the set-up: from here on, reads and writes wait without a time limit.
    ///
    /// # Errors
    /// The socket option cannot be set.
    pub fn finish_setup(&mut self) -> io::Result<()> {
        let socket = match self {
            Self::Plain(socket) => socket,
            Self::Sender(stream) => &mut stream.sock,
            Self::Receiver(stream) => &mut stream.sock,
        };
        socket.deadline = None;
        socket.stream.set_read_timeout(None)?;
        socket.stream.set_write_timeout(None)
    }

    /// Ends the set-up like [`Self::finish_setup`], but makes all calls non-blocking.
    ///
    /// # Errors
    /// The socket option cannot be set.
    pub fn finish_setup_nonblocking(&mut self) -> io::Result<()> {
        self.finish_setup()?;
        self.socket().set_nonblocking(true)
    }

    /// Queues TLS's close_notify, for [`Self::flush`] to send: it marks an orderly end of the connection.
    pub fn queue_close_notify(&mut self) {
        match self {
            Self::Plain(_) => {}
            Self::Sender(stream) => stream.conn.send_close_notify(),
            Self::Receiver(stream) => stream.conn.send_close_notify(),
        }
    }

    /// Shuts down the write direction. Bytes in flight still arrive, and the read direction stays open.
    pub fn shut_down_write(&self) {
        // It fails if the other side has closed the connection; the next read reports that.
        let _ = self.socket().shutdown(Shutdown::Write);
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// The other side has reset the connection.
    pub fn peer(&self) -> io::Result<SocketAddr> {
        self.socket().peer_addr()
    }

    /// Returns another handle of the socket, to shut it down from another thread.
    ///
    /// # Errors
    /// The process has too many open files.
    pub fn handle(&self) -> io::Result<TcpStream> {
        self.socket().try_clone()
    }

    /// Returns true if encrypted bytes are still to be written.
    #[must_use]
    pub fn wants_write(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Sender(stream) => stream.conn.wants_write(),
            Self::Receiver(stream) => stream.conn.wants_write(),
        }
    }

    /// Writes all bytes of several slices.
    ///
    /// # Errors
    /// The connection broke.
    pub fn write_all_vectored(&mut self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match self.write_vectored(&slices[..slices.len().min(1024)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => IoSlice::advance_slices(&mut slices, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.flush()
    }
}

impl Read for Link {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        each!(self, stream => stream.read(buffer))
    }
}

impl Write for Link {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        each!(self, stream => stream.write(buffer))
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        each!(self, stream => stream.write_vectored(buffers))
    }

    fn flush(&mut self) -> io::Result<()> {
        each!(self, stream => stream.flush())
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }
}

impl LinkError {
    /// Returns true if another attempt may succeed: the network is down, and the peer has not refused.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Connect { source, .. } => source.kind() != io::ErrorKind::ConnectionRefused,
            Self::Handshake(error) | Self::HandshakeAborted(error) => is_transient(error),
            _ => false,
        }
    }
}

/// Returns true if a connection broke, or was too slow, and the other side gave no reason.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    let is_tls = error.get_ref().is_some_and(|error| error.is::<rustls::Error>());
    !is_tls
        && (is_disconnect(error) || !matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput))
}

/// Returns true if a connection is broken because the other side has closed it: without TLS's close_notify, with
/// bytes unread, or before a write.
pub(crate) fn is_disconnect(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Lets the other side read the reason of a refusal: if bytes from it were left unread, the kernel would reset the
/// connection and discard the reason.
fn drain(socket: &mut Socket) {
    const BYTES_MAX: usize = 64 << 10;
    let _ = socket.stream.shutdown(Shutdown::Write);
    let mut piece = [0; 4096];
    let mut left = BYTES_MAX;
    while let Ok(len @ 1..) = socket.read(&mut piece) {
        match left.checked_sub(len) {
            Some(less) => left = less,
            None => return,
        }
    }
}

fn set_up(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    sockopt::set_tcp_user_timeout(socket, TCP_USER_TIMEOUT.as_millis() as u32)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, TCP_KEEPIDLE)?;
    sockopt::set_tcp_keepintvl(socket, TCP_KEEPINTVL)?;
    set_notsent_lowat(socket, NOTSENT_LOWAT_BYTES)
}

/// Sets `TCP_NOTSENT_LOWAT`, tcp(7).
fn set_notsent_lowat(socket: &TcpStream, bytes: u32) -> io::Result<()> {
    // SAFETY: the option takes an unsigned int, which lives through the call, and its length is passed.
    let result = unsafe {
        libc::setsockopt(
            std::os::fd::AsRawFd::as_raw_fd(socket),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const bytes).cast(),
            size_of::<u32>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let here = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        [here, listener.accept().expect("it does").0]
    }

    #[test]
    /// Sockets of a link have the TCP timeouts that let the kernel close a dead connection.
    fn kernel_times_out_dead_peer() {
        let [here, there] = pair();
        let links = [Link::set_up_sender(here, None, SETUP_TIMEOUT), Link::accept(there, None)];
        for link in links.map(|link| link.expect("a link")) {
            assert_eq!(sockopt::tcp_user_timeout(&link).expect("is set"), 30_000);
            assert!(sockopt::socket_keepalive(&link).expect("is set"));
            assert_eq!(sockopt::tcp_keepidle(&link).expect("is set"), TCP_KEEPIDLE);
            assert_eq!(sockopt::tcp_keepintvl(&link).expect("is set"), TCP_KEEPINTVL);
        }
    }

    #[test]
    /// A peer that sends slowly gets no more time for the set-up than a silent one.
    fn slow_peer_exhausts_setup_deadline() {
        let [here, mut there] = pair();
        let mut socket = Socket::new(here, Duration::from_millis(300)).expect("a socket");
        let started = Instant::now();
        let error = loop {
            // One byte at a time: no single read is late.
            there.write_all(&[1]).expect("writes");
            std::thread::sleep(Duration::from_millis(20));
            if let Err(error) = socket.read(&mut [0]) {
                break error;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "it waits for ever");
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let mut link = Link::Plain(socket);
        link.finish_setup().expect("a socket");
        assert_eq!(link.read(&mut [0]).expect("there is time again"), 1);
    }
}
