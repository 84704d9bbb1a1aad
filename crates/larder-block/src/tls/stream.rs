//! A stream socket that may be encrypted, used by calls that never wait.
//!
//! rustls does the cryptography and no I/O; the calls here move records between it and the socket. Reads and writes
//! may be in flight at the same time in different tasks: a call borrows the session only while it runs. Records that
//! TLS sends by itself (tickets, key updates, alerts) go out with the next write, or at once if the socket accepts
//! them.

use std::cell::{OnceCell, RefCell};
use std::io::{self, BufRead, Write};

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};

use super::{ClientTls, ServerTls, TlsError};
use crate::buffer::{ReadBuf, WriteBuf};
use crate::event_loop::Socket;

/// The maximum amount of plaintext that rustls buffers in encrypted form for the socket, in bytes.
const SEND_BUFFER_LEN_MAX: usize = 128 << 10;

/// The amount of plaintext that is copied from a request's memory at a time, in bytes: one TLS record.
const RECORD_LEN: usize = 16 << 10;

/// A connected stream, plain or encrypted.
pub struct MaybeTlsStream {
    socket: Socket,
    session: OnceCell<Box<RefCell<Connection>>>,
}

impl MaybeTlsStream {
    /// Creates an unencrypted stream.
    pub fn plain(socket: Socket) -> Self {
        Self { socket, session: OnceCell::new() }
    }

    /// Encrypts all further data, as the client.
    ///
    /// # Errors
    /// The handshake failed: the connection broke, or one side does not trust the other. The stream is unusable then.
    pub async fn start_client(&self, tls: &ClientTls) -> Result<(), TlsError> {
        let server: ServerName<'static> = tls.server.clone();
        let session = ClientConnection::new(tls.config.clone(), server).map_err(TlsError::Setup)?;
        self.encrypt(session.into()).await
    }

    /// Encrypts all further data, as the server.
    ///
    /// # Errors
    /// See [`MaybeTlsStream::start_client`].
    pub async fn start_server(&self, tls: &ServerTls) -> Result<(), TlsError> {
        let session = ServerConnection::new(tls.config.clone()).map_err(TlsError::Setup)?;
        self.encrypt(session.into()).await
    }

    async fn encrypt(&self, mut session: Connection) -> Result<(), TlsError> {
        session.set_buffer_limit(Some(SEND_BUFFER_LEN_MAX));
        let session = self.session.get_or_init(|| Box::new(RefCell::new(session)));
        self.handshake(session).await.map_err(TlsError::Handshake)
    }

    async fn handshake(&self, session: &RefCell<Connection>) -> io::Result<()> {
        while session.borrow().is_handshaking() {
            self.flush().await?;
            if !session.borrow().is_handshaking() {
                break;
            }
            let received = receive_records(&self.socket, &mut session.borrow_mut());
            match received {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.socket.readable().await?;
                }
                Err(error) => return Err(error),
            }
        }
        self.flush().await
    }

    /// Returns true if the stream is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.session.get().is_some()
    }

    /// Waits until the socket is readable. Call this only after [`MaybeTlsStream::try_read`] found no data: data that
    /// has been decrypted already does not make the socket readable.
    ///
    /// # Errors
    /// The kernel refuses to watch the socket.
    pub async fn readable(&self) -> io::Result<()> {
        self.socket.readable().await
    }

    /// Waits until the socket is writable.
    ///
    /// # Errors
    /// The kernel refuses to watch the socket.
    pub async fn writable(&self) -> io::Result<()> {
        self.socket.writable().await
    }

    /// Reads the available data; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` if no data is available; otherwise the connection broke, or the data cannot be decrypted.
    pub fn try_read(&self, into: ReadBuf<'_>) -> io::Result<usize> {
        let Some(session) = self.session.get() else {
            return self.socket.try_read(into);
        };
        let session = &mut session.borrow_mut();
        loop {
            match copy_plaintext(session, into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            receive_records(&self.socket, session)?;
        }
    }

    /// Writes as much of `head` followed by `body` as the stream accepts, and returns the number of bytes.
    ///
    /// # Errors
    /// `WouldBlock` if the stream accepts nothing now; otherwise the connection broke.
    pub fn try_write(&self, head: &[u8], body: WriteBuf<'_>) -> io::Result<usize> {
        let Some(session) = self.session.get() else {
            return self.socket.try_write(head, body);
        };
        let session = &mut session.borrow_mut();
        send_records(&self.socket, session)?;
        let taken = accept_plaintext(session, head, body)?;
        match send_records(&self.socket, session) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(taken),
        }
    }

    /// Waits until the socket has accepted all written data.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn flush(&self) -> io::Result<()> {
        let Some(session) = self.session.get() else {
            return Ok(());
        };
        loop {
            let sent = send_records(&self.socket, &mut session.borrow_mut());
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                done => return done,
            }
        }
    }

    /// Writes all of `bytes`, and waits until the socket has accepted them.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.try_write(&bytes[done..], WriteBuf::new(&[])) {
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                Err(error) => return Err(error),
            }
        }
        self.flush().await
    }

    /// Closes both directions, after a close notification to the peer if the stream is encrypted. Does not wait.
    pub fn shutdown(&self) {
        if let Some(session) = self.session.get()
            && let Ok(mut session) = session.try_borrow_mut()
        {
            session.send_close_notify();
            // The connection is closed even if the notification cannot be sent.
            let _ = send_records(&self.socket, &mut session);
        }
        self.socket.shutdown();
    }
}

/// Copies decrypted data to `into`; 0 once the peer has closed the stream.
fn copy_plaintext(session: &mut Connection, into: ReadBuf<'_>) -> io::Result<usize> {
    let mut moved = 0;
    let mut reader = session.reader();
    while moved < into.len() {
        let plain = match reader.fill_buf() {
            Ok([]) => break,
            Ok(plain) => plain,
            Err(_) if moved > 0 => break,
            Err(error) => return Err(error),
        };
        let count = plain.len().min(into.len() - moved);
        into.skip(moved).copy_from_slice(&plain[..count]);
        reader.consume(count);
        moved += count;
    }
    Ok(moved)
}

/// Encrypts as much data as fits into the session's buffer, and returns the number of bytes.
fn accept_plaintext(session: &mut Connection, head: &[u8], body: WriteBuf<'_>) -> io::Result<usize> {
    let mut taken = session.writer().write(head)?;
    if taken < head.len() {
        return Ok(taken);
    }
    let mut record = [0; RECORD_LEN];
    let mut rest = body;
    while !rest.is_empty() {
        let chunk = &mut record[..rest.len().min(RECORD_LEN)];
        rest.copy_to_slice(chunk);
        let count = session.writer().write(chunk)?;
        if count == 0 {
            break;
        }
        taken += count;
        rest = rest.skip(count);
    }
    Ok(taken)
}

/// Passes received records from the socket to the session; 0 at the end of the stream, which the session then
/// reports.
fn receive_records(socket: &Socket, session: &mut Connection) -> io::Result<usize> {
    let count = session.read_tls(&mut SocketReader(socket))?;
    let state = session.process_new_packets();
    // Answers to the received records, or an alert. If the socket does not accept them now, the next write sends
    // them.
    let sent = send_records(socket, session);
    state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    match sent {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(count),
    }
}

fn send_records(socket: &Socket, session: &mut Connection) -> io::Result<()> {
    while session.wants_write() {
        session.write_tls(&mut SocketWriter(socket))?;
    }
    Ok(())
}

struct SocketReader<'a>(&'a Socket);

impl io::Read for SocketReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(ReadBuf::new(buffer))
    }
}

struct SocketWriter<'a>(&'a Socket);

impl Write for SocketWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes, WriteBuf::new(&[]))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
