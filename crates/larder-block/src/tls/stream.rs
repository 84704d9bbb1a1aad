//! A stream socket that may be encrypted, moved by calls that never wait.
//!
//! rustls does the cryptography and no I/O; records go between it and the socket inside the calls here. Reads and
//! writes may be under way at the same time in different tasks: a call borrows the session only while it runs. What TLS
//! wants to send of its own accord (tickets, key updates, alerts) leaves with the next write, or at once if the socket
//! takes it.

use std::cell::{OnceCell, RefCell};
use std::io::{self, BufRead, Write};

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};

use super::{ClientTls, ServerTls, TlsError};
use crate::buffer::{ReadBuf, WriteBuf};
use crate::event_loop::Socket;

/// Plaintext that rustls holds encrypted for the socket at most, in bytes.
const SEND_BUFFER_LEN_MAX: usize = 128 << 10;

/// Plaintext that is copied out of a request's memory at a time, in bytes: one TLS record.
const RECORD_LEN: usize = 16 << 10;

/// A connected stream, plain or encrypted.
pub struct Stream {
    socket: Socket,
    session: OnceCell<Box<RefCell<Connection>>>,
}

impl Stream {
    /// An unencrypted stream.
    pub fn plain(socket: Socket) -> Self {
        Self {
            socket,
            session: OnceCell::new(),
        }
    }

    /// Encrypts everything from here on, as the client.
    ///
    /// # Errors
    /// The handshake failed: the connection broke, or one side does not trust the other. The stream is of no more use.
    pub async fn start_client(&self, tls: &ClientTls) -> Result<(), TlsError> {
        let server: ServerName<'static> = tls.server.clone();
        let session = ClientConnection::new(tls.config.clone(), server).map_err(TlsError::Setup)?;
        self.encrypt(session.into()).await
    }

    /// Encrypts everything from here on, as the server.
    ///
    /// # Errors
    /// As [`Stream::start_client`].
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

    /// Whether it is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.session.get().is_some()
    }

    /// Waits until the socket brings something. Call it only after [`Stream::try_read`] found nothing: what has been
    /// decrypted already does not show on the socket.
    ///
    /// # Errors
    /// The kernel refuses to watch the socket.
    pub async fn readable(&self) -> io::Result<()> {
        self.socket.readable().await
    }

    /// Waits until the socket takes more.
    ///
    /// # Errors
    /// The kernel refuses to watch the socket.
    pub async fn writable(&self) -> io::Result<()> {
        self.socket.writable().await
    }

    /// Reads what is there; 0 at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` if nothing is there yet; otherwise the connection broke, or what came cannot be decrypted.
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

    /// Writes what the socket takes of `head` followed by `body`; how many bytes.
    ///
    /// # Errors
    /// `WouldBlock` if it takes nothing now; otherwise the connection broke.
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

    /// Waits until the socket has taken everything that was written.
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

    /// Writes all of `bytes`, and waits until the socket has taken them.
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

    /// Ends both directions, after telling the other side so if it is encrypted. Does not wait.
    pub fn shutdown(&self) {
        if let Some(session) = self.session.get()
            && let Ok(mut session) = session.try_borrow_mut()
        {
            session.send_close_notify();
            // The connection ends in any case.
            let _ = send_records(&self.socket, &mut session);
        }
        self.socket.shutdown();
    }
}

/// Moves what has been decrypted; 0 once the other side has said that it is done.
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

/// Encrypts what fits into the session's buffer; how many bytes.
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

/// Takes what the socket has for the session; 0 at the end of the stream, which the session then reports.
fn receive_records(socket: &Socket, session: &mut Connection) -> io::Result<usize> {
    let count = session.read_tls(&mut FromSocket(socket))?;
    let state = session.process_new_packets();
    // Answers to what just came, or an alert. If the socket does not take them now, the next write sends them.
    let sent = send_records(socket, session);
    state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    match sent {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(count),
    }
}

fn send_records(socket: &Socket, session: &mut Connection) -> io::Result<()> {
    while session.wants_write() {
        session.write_tls(&mut ToSocket(socket))?;
    }
    Ok(())
}

struct FromSocket<'a>(&'a Socket);

impl io::Read for FromSocket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(ReadBuf::new(buffer))
    }
}

struct ToSocket<'a>(&'a Socket);

impl Write for ToSocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes, WriteBuf::new(&[]))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
