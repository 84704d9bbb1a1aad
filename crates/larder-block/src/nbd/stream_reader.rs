//! Reads messages from a stream: headers through a small buffer, payloads straight into their destination.

use std::io;
use std::rc::Rc;

use smallvec::SmallVec;

use crate::buffer::{IoVec, ReadBuf};
use crate::tls::MaybeTlsStream;

/// The length of the buffer, in bytes. Many headers fit, and one system call reads the tail of one payload together
/// with the headers after it.
const BUFFER_LEN: usize = 8 << 10;

/// The receiving side of a stream.
pub struct StreamReader {
    stream: Rc<MaybeTlsStream>,
    buffer: Box<[u8]>,
    /// The received, unread bytes are `buffer[start..end]`.
    start: usize,
    end: usize,
    received: u64,
}

impl StreamReader {
    /// Creates the receiving side of `stream`.
    pub fn new(stream: Rc<MaybeTlsStream>) -> Self {
        Self { stream, buffer: vec![0; BUFFER_LEN].into_boxed_slice(), start: 0, end: 0, received: 0 }
    }

    /// Returns the number of bytes received so far.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns the received, unread bytes.
    pub fn buffered(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Waits until at least `len` bytes have arrived, and returns them without consuming them. `len` is the length of
    /// a header, a few dozen bytes.
    ///
    /// # Errors
    /// The connection broke or ended (`UnexpectedEof`) before.
    pub async fn peek(&mut self, len: usize) -> io::Result<&[u8]> {
        debug_assert!(len <= BUFFER_LEN);
        while self.end - self.start < len {
            if self.fill_now()? == 0 {
                self.stream.readable().await?;
            }
        }
        Ok(&self.buffer[self.start..self.start + len])
    }

    /// Waits for `N` bytes and consumes them.
    ///
    /// # Errors
    /// See [`StreamReader::peek`].
    pub async fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut taken = [0; N];
        taken.copy_from_slice(self.peek(N).await?);
        self.start += N;
        Ok(taken)
    }

    /// Consumes `len` bytes that were peeked at.
    pub fn consume(&mut self, len: usize) {
        debug_assert!(len <= self.end - self.start);
        self.start += len;
    }

    /// Fills `into`.
    ///
    /// # Errors
    /// See [`StreamReader::peek`].
    pub async fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        let into = ReadBuf::new(into);
        let mut done = 0;
        while done < into.len() {
            match self.try_payload(into.skip(done))? {
                0 => self.stream.readable().await?,
                moved => done += moved,
            }
        }
        Ok(())
    }

    /// Discards the next `len` bytes, waiting for them.
    ///
    /// # Errors
    /// See [`StreamReader::peek`].
    pub async fn skip(&mut self, len: u64) -> io::Result<()> {
        let mut remaining = len;
        while remaining > 0 {
            let chunk = remaining.min(BUFFER_LEN as u64 / 2) as usize;
            let available = self.peek(1).await?.len();
            debug_assert_eq!(available, 1);
            let taken = chunk.min(self.end - self.start);
            self.start += taken;
            remaining -= taken as u64;
        }
        Ok(())
    }

    /// Waits until more bytes may have arrived.
    ///
    /// # Errors
    /// The kernel refuses to watch the socket.
    pub async fn readable(&self) -> io::Result<()> {
        self.stream.readable().await
    }

    /// Moves available bytes to `into`, without waiting. Returns their number, or 0 if none are available.
    ///
    /// # Errors
    /// The connection broke or ended (`UnexpectedEof`).
    pub fn try_payload(&mut self, into: ReadBuf<'_>) -> io::Result<usize> {
        let buffered = into.len().min(self.end - self.start);
        if buffered > 0 {
            into.copy_from_slice(&self.buffer[self.start..self.start + buffered]);
            self.start += buffered;
            return Ok(buffered);
        }
        self.start = 0;
        self.end = 0;
        let mut pieces: SmallVec<[IoVec; 16]> = into.pieces().take(PIECES_MAX).collect();
        let wanted: usize = pieces.iter().map(|piece| piece.len()).sum();
        pieces.push(IoVec::new(self.buffer.as_mut_ptr(), self.buffer.len()));
        // SAFETY: the pieces of `into` are valid by its own contract until this call returns, and the last one is
        // this object's buffer, to which no reference exists meanwhile.
        let target = unsafe { ReadBuf::from_pieces(&pieces) };
        let count = receive(&self.stream, target)?;
        self.received += count as u64;
        let moved = count.min(wanted);
        self.end = count - moved;
        Ok(moved)
    }

    /// Reads into the free part of the buffer, without waiting. Returns the number of bytes.
    fn fill_now(&mut self) -> io::Result<usize> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let count = receive(&self.stream, ReadBuf::new(&mut self.buffer[self.end..]))?;
        self.received += count as u64;
        self.end += count;
        Ok(count)
    }
}

/// Reads available bytes; 0 if there are none yet.
fn receive(stream: &MaybeTlsStream, into: ReadBuf<'_>) -> io::Result<usize> {
    loop {
        match stream.try_read(into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) => return Err(error),
        }
    }
}

/// The maximum number of pieces of a payload that one call fills, in addition to the buffer.
const PIECES_MAX: usize = 60;
