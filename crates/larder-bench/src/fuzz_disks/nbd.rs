//! An NBD client over a unix socket, written from the protocol's specification (`doc/proto.md` of the NBD project)
//! without Larder's code. It supports structured replies, `base:allocation`, and several requests in flight.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Time limit of one answer, for busy machines.
const PATIENCE: Duration = Duration::from_secs(120);

const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;

const OPT_GO: u32 = 7;
const OPT_STRUCTURED: u32 = 8;
const OPT_SET_CONTEXT: u32 = 10;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_CONTEXT: u32 = 4;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISCONNECT: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const BLOCK_STATUS: u16 = 7;

pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;
pub(crate) const REQ_ONE: u16 = 8;

/// Extent flag of `base:allocation`: the extent reads as zeros.
const STATE_ZERO: u32 = 2;

/// A connection to one export.
pub(crate) struct Client {
    stream: UnixStream,
    next_cookie: u64,
    pub(crate) size: u64,
    pub(crate) is_read_only: bool,
    /// Minimum alignment of requests, in bytes.
    pub(crate) block_min: u32,
}

/// An answer.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    pub(crate) cookie: u64,
    /// 0 if the request succeeded.
    pub(crate) error: u32,
    pub(crate) message: String,
    /// Data of a read, by offset.
    pub(crate) pieces: Vec<(u64, Vec<u8>)>,
    /// Extents of a block status: length and flags.
    pub(crate) extents: Vec<(u64, u32)>,
}

fn protocol(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn word16(bytes: &[u8]) -> u16 {
    bytes.try_into().map_or(0, u16::from_be_bytes)
}

fn word32(bytes: &[u8]) -> u32 {
    bytes.try_into().map_or(0, u32::from_be_bytes)
}

fn be_u64(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_be_bytes)
}

impl Client {
    /// Connects to the export of this name.
    pub(crate) fn connect(socket: &Path, export: &str) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut client = Self { stream, next_cookie: 1, size: 0, is_read_only: false, block_min: 1 };
        client.shake_hands(export)?;
        Ok(client)
    }

    fn take(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn shake_hands(&mut self, export: &str) -> io::Result<()> {
        let greeting = self.take(18)?;
        if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
            return Err(protocol("not an NBD server"));
        }
        self.stream.write_all(&3u32.to_be_bytes())?;
        self.option(OPT_STRUCTURED, &[])?;
        let mut name = (export.len() as u32).to_be_bytes().to_vec();
        name.extend(export.as_bytes());
        let mut context = name.clone();
        context.extend(1u32.to_be_bytes());
        context.extend(15u32.to_be_bytes());
        context.extend(b"base:allocation");
        let replies = self.option(OPT_SET_CONTEXT, &context)?;
        if !replies.iter().any(|(kind, _)| *kind == REP_CONTEXT) {
            return Err(protocol("the server does not offer base:allocation"));
        }
        name.extend(1u16.to_be_bytes());
        name.extend(INFO_BLOCK_SIZE.to_be_bytes());
        for (kind, info) in self.option(OPT_GO, &name)? {
            if kind != REP_INFO || info.len() < 12 {
                continue;
            }
            match word16(&info[..2]) {
                INFO_EXPORT => {
                    self.size = be_u64(&info[2..10]);
                    self.is_read_only = word16(&info[10..12]) & 2 != 0;
                }
                INFO_BLOCK_SIZE => self.block_min = word32(&info[2..6]),
                _ => {}
            }
        }
        Ok(())
    }

    /// Sends an option, and collects its replies up to the acknowledgement.
    fn option(&mut self, option: u32, data: &[u8]) -> io::Result<Vec<(u32, Vec<u8>)>> {
        let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
        message.extend(option.to_be_bytes());
        message.extend((data.len() as u32).to_be_bytes());
        message.extend(data);
        self.stream.write_all(&message)?;
        let mut replies = Vec::new();
        loop {
            let head = self.take(20)?;
            if be_u64(&head[..8]) != REPLY_MAGIC || word32(&head[8..12]) != option {
                return Err(protocol("a reply to another option"));
            }
            let kind = word32(&head[12..16]);
            let data = self.take(word32(&head[16..]) as usize)?;
            match kind {
                REP_ACK => return Ok(replies),
                kind if kind >> 31 != 0 => {
                    let text = String::from_utf8_lossy(&data);
                    return Err(protocol(format!("option {option} is refused ({kind:#x}): {text}")));
                }
                kind => replies.push((kind, data)),
            }
        }
    }

    /// Sends a request. Returns its cookie.
    pub(crate) fn send(&mut self, kind: u16, flags: u16, range: &Range<u64>, data: &[u8]) -> io::Result<u64> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut message = REQUEST_MAGIC.to_be_bytes().to_vec();
        message.extend(flags.to_be_bytes());
        message.extend(kind.to_be_bytes());
        message.extend(cookie.to_be_bytes());
        message.extend(range.start.to_be_bytes());
        message.extend(((range.end - range.start) as u32).to_be_bytes());
        message.extend(data);
        self.stream.write_all(&message)?;
        Ok(cookie)
    }

    /// Waits for all chunks of the next reply.
    pub(crate) fn receive(&mut self) -> io::Result<Reply> {
        let mut reply = Reply::default();
        loop {
            let magic = word32(&self.take(4)?);
            if magic == SIMPLE_MAGIC {
                let head = self.take(12)?;
                (reply.error, reply.cookie) = (word32(&head[..4]), be_u64(&head[4..]));
                return Ok(reply);
            }
            if magic != CHUNK_MAGIC {
                return Err(protocol(format!("a reply with the unknown magic {magic:#x}")));
            }
            let head = self.take(16)?;
            let (flags, kind, len) = (word16(&head[..2]), word16(&head[2..4]), word32(&head[12..]));
            let cookie = be_u64(&head[4..12]);
            if reply.cookie != 0 && reply.cookie != cookie {
                return Err(protocol("chunks of two replies are interleaved, which this client does not support"));
            }
            reply.cookie = cookie;
            let payload = self.take(len as usize)?;
            reply.chunk(kind, &payload)?;
            if flags & 1 != 0 {
                return Ok(reply);
            }
        }
    }

    /// Ends the connection.
    pub(crate) fn disconnect(mut self) {
        // The server may have exited already.
        let _ = self.send(DISCONNECT, 0, &(0..0), &[]);
    }
}

impl Reply {
    fn chunk(&mut self, kind: u16, payload: &[u8]) -> io::Result<()> {
        match kind {
            0 => {}
            1 if payload.len() >= 8 => self.pieces.push((be_u64(&payload[..8]), payload[8..].to_vec())),
            2 if payload.len() == 12 => {
                let zeros = vec![0; word32(&payload[8..]) as usize];
                self.pieces.push((be_u64(&payload[..8]), zeros));
            }
            5 if payload.len() >= 4 => {
                let extents = payload[4..].chunks_exact(8);
                self.extents.extend(extents.map(|extent| (u64::from(word32(&extent[..4])), word32(&extent[4..]))));
            }
            kind if kind >> 15 != 0 && payload.len() >= 6 => {
                self.error = word32(&payload[..4]);
                self.message = String::from_utf8_lossy(&payload[6..]).into_owned();
            }
            kind => return Err(protocol(format!("a chunk of kind {kind} with {} bytes", payload.len()))),
        }
        Ok(())
    }

    /// Returns the data of a read, which must have every byte of the range exactly once.
    pub(crate) fn data(&self, range: &Range<u64>) -> Result<Vec<u8>, String> {
        let mut pieces: Vec<_> = self.pieces.iter().collect();
        pieces.sort_by_key(|(start, _)| *start);
        let mut data = Vec::with_capacity((range.end - range.start) as usize);
        for (start, bytes) in pieces {
            if *start != range.start + data.len() as u64 {
                return Err(format!(
                    "a chunk of a read begins at {start:#x}, expected {:#x}",
                    range.start + data.len() as u64
                ));
            }
            data.extend(bytes);
        }
        match data.len() as u64 == range.end - range.start {
            true => Ok(data),
            false => Err(format!("a read of {:#x} bytes returned {:#x} bytes", range.end - range.start, data.len())),
        }
    }

    /// Returns the ranges with the flag for zeros.
    pub(crate) fn zeros(&self, range: &Range<u64>, single_extent: bool) -> Result<Vec<Range<u64>>, String> {
        let mut zeros = Vec::new();
        let mut at = range.start;
        if self.extents.is_empty() || (single_extent && self.extents.len() > 1) {
            return Err(format!("the reply has {} extents", self.extents.len()));
        }
        for (index, (len, flags)) in self.extents.iter().enumerate() {
            if *len == 0 || at >= range.end {
                return Err(format!("extent {index} is empty or past the end of the range"));
            }
            let end = (at + len).min(range.end);
            if flags & STATE_ZERO != 0 {
                zeros.push(at..end);
            }
            at += len;
        }
        match single_extent && at > range.end {
            true => Err("the extent reaches past the end of the range although REQ_ONE was set".to_owned()),
            false => Ok(zeros),
        }
    }
}
