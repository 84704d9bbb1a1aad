//! A connection between the two hosts, plain or encrypted.
//!
//! Sockets are blocking while a connection is set up, with [`SETUP_TIMEOUT`] for each step, and as the user of a link
//! sets them afterwards. Everything else about TCP that matters here is set in `set_up`.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustls::{ClientConnection, ServerConnection, StreamOwned};
use thiserror::Error;

use crate::tls::{ReceiverTls, SenderTls, WrongPeer};

/// For connecting, and for each step of the greetings.
pub const SETUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Unsent bytes that the kernel takes for a connection before it makes the writer wait. Little, since what lies there is
/// time that QEMU does not know of; enough to keep a link busy while a thread is woken.
const UNSENT_MAX: u32 = 128 << 10;

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum LinkError {
    /// The name leads nowhere.
    #[error("{address}: no such host: {source}")]
    Name {
        /// As it was given.
        address: String,
        /// As the resolver says it.
        source: io::Error,
    },
    /// Nobody answers there.
    #[error(
        "cannot connect to {address}: {source}; does 'larder migrate receive' listen there, and does a firewall let it?"
    )]
    Connect {
        /// As it was given.
        address: String,
        /// Of the last address tried.
        source: io::Error,
    },
    /// The socket cannot be set up.
    #[error("cannot set up the connection: {0}")]
    Socket(io::Error),
    /// The two do not trust one another.
    #[error("the TLS handshake failed: {0}")]
    Handshake(io::Error),
    /// TLS cannot begin.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// Pinned to somebody else.
    #[error(transparent)]
    Peer(#[from] WrongPeer),
}

/// One connection.
pub enum Link {
    /// In the clear.
    Plain(TcpStream),
    /// Encrypted, of a sender's.
    Sender(Box<StreamOwned<ClientConnection, TcpStream>>),
    /// Encrypted, of a receiver's.
    Receiver(Box<StreamOwned<ServerConnection, TcpStream>>),
}

/// Does the same with whatever a link is.
macro_rules! each {
    ($link:expr, $stream:ident => $does:expr) => {
        match $link {
            Link::Plain($stream) => $does,
            Link::Sender($stream) => $does,
            Link::Receiver($stream) => $does,
        }
    };
}

/// Plaintext that rustls holds encrypted for the socket at most, in bytes.
const ENCRYPTED_MAX: usize = 256 << 10;

impl Link {
    /// Connects to `HOST:PORT`, trying each of the host's addresses.
    ///
    /// # Errors
    /// There is no such host, nobody answers, or the certificates are not accepted.
    pub fn connect(address: &str, tls: Option<&SenderTls>) -> Result<Self, LinkError> {
        let addresses: Vec<SocketAddr> = address
            .to_socket_addrs()
            .map_err(|source| LinkError::Name {
                address: address.to_owned(),
                source,
            })?
            .collect();
        let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for candidate in addresses {
            match TcpStream::connect_timeout(&candidate, SETUP_TIMEOUT) {
                Ok(socket) => return Self::of_sender(socket, tls),
                Err(error) => failed = error,
            }
        }
        Err(LinkError::Connect {
            address: address.to_owned(),
            source: failed,
        })
    }

    fn of_sender(mut socket: TcpStream, tls: Option<&SenderTls>) -> Result<Self, LinkError> {
        set_up(&socket).map_err(LinkError::Socket)?;
        let Some(tls) = tls else {
            return Ok(Self::Plain(socket));
        };
        let mut session = ClientConnection::new(tls.config(), tls.server())?;
        while session.is_handshaking() || session.wants_write() {
            session.complete_io(&mut socket).map_err(LinkError::Handshake)?;
        }
        tls.check(session.peer_certificates())?;
        session.set_buffer_limit(Some(ENCRYPTED_MAX));
        Ok(Self::Sender(Box::new(StreamOwned::new(session, socket))))
    }

    /// Takes in a connection.
    ///
    /// # Errors
    /// The certificates are not accepted, or the other side breaks off.
    pub fn accept(mut socket: TcpStream, tls: Option<&ReceiverTls>) -> Result<Self, LinkError> {
        set_up(&socket).map_err(LinkError::Socket)?;
        let Some(tls) = tls else {
            return Ok(Self::Plain(socket));
        };
        let mut session = ServerConnection::new(tls.config())?;
        while session.is_handshaking() || session.wants_write() {
            session.complete_io(&mut socket).map_err(LinkError::Handshake)?;
        }
        tls.check(session.peer_certificates())?;
        session.set_buffer_limit(Some(ENCRYPTED_MAX));
        Ok(Self::Receiver(Box::new(StreamOwned::new(session, socket))))
    }

    const fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Sender(stream) => &stream.sock,
            Self::Receiver(stream) => &stream.sock,
        }
    }

    /// Ends the set-up: from here on reads and writes wait without end.
    ///
    /// # Errors
    /// The socket is of no use.
    pub fn ready(&self) -> io::Result<()> {
        self.socket().set_read_timeout(None)?;
        self.socket().set_write_timeout(None)
    }

    /// As [`Self::ready`], but no call waits.
    ///
    /// # Errors
    /// The socket is of no use.
    pub fn ready_nonblocking(&self) -> io::Result<()> {
        self.socket().set_nonblocking(true)
    }

    /// Another handle of the socket, to shut it down from another thread.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn handle(&self) -> io::Result<TcpStream> {
        self.socket().try_clone()
    }

    /// Whether something encrypted still has to go out.
    #[must_use]
    pub fn wants_write(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Sender(stream) => stream.conn.wants_write(),
            Self::Receiver(stream) => stream.conn.wants_write(),
        }
    }

    /// Writes all of several slices.
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

fn set_up(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(SETUP_TIMEOUT))?;
    socket.set_write_timeout(Some(SETUP_TIMEOUT))?;
    set_unsent_max(socket, UNSENT_MAX)
}

/// `TCP_NOTSENT_LOWAT`, tcp(7).
fn set_unsent_max(socket: &TcpStream, bytes: u32) -> io::Result<()> {
    // SAFETY: the option takes an unsigned int, which lives through the call, of the length that is said.
    let result = unsafe {
        libc::setsockopt(
            std::os::fd::AsRawFd::as_raw_fd(socket),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const bytes).cast(),
            size_of::<u32>() as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
