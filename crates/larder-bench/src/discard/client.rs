//! An NBD client with extended headers: one request at a time, of any length.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use larder_block::nbd::handshake::{
    FIXED_NEWSTYLE, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, infos, options, replies,
};
use larder_block::nbd::transmission::{Framing, ReplyHeader, RequestHeader, chunks};
use larder_block::nbd::{Command, CommandFlags};

/// Length of the greeting: two magic numbers and flags.
const GREETING_LEN: usize = 18;

const FRAMING: Framing = Framing::Extended;

/// Time that a server may take from creating its socket to listening.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum payload of a reply chunk, in bytes.
const PAYLOAD_MAX: u64 = 1 << 20;

/// A connection.
pub(crate) struct Client {
    stream: UnixStream,
    cookie: u64,
    /// Bytes of the export.
    pub(crate) size: u64,
}

impl Client {
    pub(crate) fn connect(socket: &Path) -> anyhow::Result<Self> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let stream = loop {
            match UnixStream::connect(socket) {
                // The socket exists before its server listens.
                Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(1));
                }
                connected => break connected.with_context(|| format!("connecting to {}", socket.display()))?,
            }
        };
        let mut client = Self { stream, cookie: 0, size: 0 };
        client.bytes::<GREETING_LEN>()?;
        let flags = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
        client.stream.write_all(&flags.to_be_bytes())?;
        client.option(options::EXTENDED_HEADERS, &[])?;
        // Requests the unnamed export, and no further information.
        client.option(options::GO, &[0; 6])?;
        ensure!(client.size > 0, "the server does not report the size of its export");
        Ok(client)
    }

    fn bytes<const N: usize>(&mut self) -> anyhow::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn payload(&mut self, len: u64) -> anyhow::Result<Vec<u8>> {
        ensure!(len <= PAYLOAD_MAX, "a reply's payload of {len} bytes is too long");
        let mut bytes = vec![0; len as usize];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn skip(&mut self, len: u64) -> anyhow::Result<()> {
        self.payload(len).map(drop)
    }

    fn option(&mut self, option: u32, data: &[u8]) -> anyhow::Result<()> {
        let mut request = OPTION_MAGIC.to_be_bytes().to_vec();
        request.extend(option.to_be_bytes());
        request.extend((data.len() as u32).to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request)?;
        loop {
            ensure!(u64::from_be_bytes(self.bytes()?) == OPTION_REPLY_MAGIC, "not an option reply");
            ensure!(u32::from_be_bytes(self.bytes()?) == option, "a reply to another option");
            let kind = u32::from_be_bytes(self.bytes()?);
            let len = u64::from(u32::from_be_bytes(self.bytes()?));
            match kind {
                replies::ACK => return self.skip(len),
                replies::INFO if len >= 10 => {
                    let info = u16::from_be_bytes(self.bytes()?);
                    let size = u64::from_be_bytes(self.bytes()?);
                    if info == infos::EXPORT {
                        self.size = size;
                    }
                    self.skip(len - 10)?;
                }
                error if error & replies::ERROR != 0 => bail!("the server rejected option {option}: {error:#x}"),
                _ => self.skip(len)?,
            }
        }
    }

    /// Sends a request and waits for its reply. A write sends `data`, whose length is `len`. Returns the data that
    /// was read, without holes.
    pub(crate) fn request(&mut self, command: Command, start: u64, len: u64, data: &[u8]) -> anyhow::Result<Vec<u8>> {
        self.cookie += 1;
        let mut request = Vec::with_capacity(FRAMING.request_header_len() + data.len());
        let header = RequestHeader {
            flags: CommandFlags::NONE,
            command: command.code(),
            cookie: self.cookie,
            offset: start,
            len,
        };
        header.push(FRAMING, &mut request);
        request.extend(data);
        self.stream.write_all(&request)?;
        let mut found = Vec::new();
        loop {
            let header = self.bytes::<{ FRAMING.chunk_header_len() }>()?;
            let ReplyHeader::Chunk { done, kind, cookie, offset: Some(_), len: payload_len } =
                ReplyHeader::parse(&header)?
            else {
                bail!("not an extended reply");
            };
            ensure!(cookie == self.cookie, "a reply to another request");
            let is_error = kind & chunks::ERROR_BIT != 0;
            ensure!(!is_error, "{command:?} of {len} bytes at {start} failed");
            let payload = self.payload(payload_len)?;
            if kind == chunks::OFFSET_DATA {
                // The chunk begins with an 8-byte offset.
                found.extend(payload.iter().skip(8));
            }
            if done {
                return Ok(found);
            }
        }
    }
}
