//! The protocol between sender and receiver, implemented from `docs/migration-wire.md` alone.

use std::io::{self, Read, Write};
use std::net::TcpStream;

pub(crate) const OPEN: u8 = 1;
pub(crate) const CLOSE: u8 = 2;
pub(crate) const DELIVERED: u8 = 3;
pub(crate) const RETURN: u8 = 4;
pub(crate) const CLOSED: u8 = 5;
pub(crate) const ALIVE: u8 = 6;
pub(crate) const FAILED: u8 = 7;
pub(crate) const NOTE: u8 = 8;
pub(crate) const END: u8 = 9;
pub(crate) const RECEIVED: u8 = 10;

pub(crate) const HELLO_BYTES: usize = 96;
pub(crate) const WELCOME_BYTES: usize = 72;
pub(crate) const FRAME_BYTES: usize = 64;
const MESSAGE_BYTES: usize = 24;

/// Computes CRC-32C (Castagnoli), bit by bit.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Sets the last four bytes to the checksum of those before.
pub(crate) fn seal(bytes: &mut [u8]) {
    let at = bytes.len() - 4;
    let crc = crc32c(&bytes[..at]);
    put(bytes, at, &crc.to_le_bytes());
}

/// Returns a sender's greeting: for a control connection without a session, for a lane with its session and number.
/// The sender does not reconnect after a loss.
pub(crate) fn hello(lane: Option<(u8, [u8; 16])>) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    put(&mut bytes, 0, b"LARDMIG\x01");
    bytes[8] = 1;
    if let Some((number, session)) = lane {
        bytes[10] = 1;
        bytes[42] = number;
        put(&mut bytes, 16, &session);
    }
    put(&mut bytes, 32, &(1_u64 << 20).to_le_bytes());
    bytes[40] = 2;
    seal(&mut bytes);
    bytes
}

/// Returns a receiver's answer to a greeting.
pub(crate) fn welcome() -> [u8; WELCOME_BYTES] {
    let mut bytes = [0; WELCOME_BYTES];
    put(&mut bytes, 0, b"LARDMIG\x02");
    bytes[8] = 1;
    put(&mut bytes, 16, &[7; 16]);
    put(&mut bytes, 40, &(1_u32 << 20).to_le_bytes());
    put(&mut bytes, 44, &[2, 0, 4, 0]);
    seal(&mut bytes);
    bytes
}

pub(crate) fn message(kind: u8, channel: u16, value: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; MESSAGE_BYTES];
    put(&mut bytes, 0, b"LM");
    bytes[2] = kind;
    put(&mut bytes, 4, &(body.len() as u32).to_le_bytes());
    put(&mut bytes, 8, &value.to_le_bytes());
    put(&mut bytes, 16, &channel.to_le_bytes());
    let crc = crc32c(&[&bytes[..20], body].concat());
    put(&mut bytes, 20, &crc.to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// A frame, whose fields can be changed before it is encoded.
#[derive(Clone)]
pub(crate) struct Frame {
    pub(crate) channel: u16,
    pub(crate) method: u8,
    pub(crate) number: u64,
    pub(crate) after: u64,
    pub(crate) offset: u64,
    pub(crate) raw: u32,
    pub(crate) raw_crc: u32,
    pub(crate) operations: Vec<u8>,
    pub(crate) literals: Vec<u8>,
    pub(crate) pages: Vec<u8>,
    pub(crate) deltas: Vec<u8>,
}

impl Frame {
    /// Creates a frame of fewer than 128 literal bytes.
    pub(crate) fn literal(number: u64, offset: u64, bytes: &[u8]) -> Self {
        Self {
            channel: 0,
            method: 0,
            number,
            after: 0,
            offset,
            raw: bytes.len() as u32,
            raw_crc: crc32c(bytes),
            operations: vec![1, bytes.len() as u8],
            literals: bytes.to_vec(),
            pages: Vec::new(),
            deltas: Vec::new(),
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let sections = [&self.operations, &self.literals, &self.pages, &self.deltas];
        let mut bytes = vec![0; FRAME_BYTES];
        put(&mut bytes, 0, b"LFRM");
        put(&mut bytes, 4, &self.channel.to_le_bytes());
        bytes[6] = self.method;
        put(&mut bytes, 8, &self.number.to_le_bytes());
        put(&mut bytes, 16, &self.after.to_le_bytes());
        put(&mut bytes, 24, &self.offset.to_le_bytes());
        put(&mut bytes, 32, &self.raw.to_le_bytes());
        for (section, at) in sections.iter().zip([36, 40, 44, 48]) {
            put(&mut bytes, at, &(section.len() as u32).to_le_bytes());
        }
        put(&mut bytes, 52, &self.raw_crc.to_le_bytes());
        seal(&mut bytes);
        for section in sections {
            bytes.extend_from_slice(section);
        }
        bytes
    }
}

/// Returns the number of bytes after a frame's header.
pub(crate) fn frame_body(header: &[u8]) -> usize {
    let field = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes")) as usize;
    [36, 40, 44, 48].into_iter().map(field).sum()
}

/// Returns the next message other than keepalives and acknowledgements: its kind, channel, value and body.
pub(crate) fn next_message(mut from: &TcpStream) -> io::Result<(u8, u16, u64, Vec<u8>)> {
    loop {
        let mut header = [0; MESSAGE_BYTES];
        from.read_exact(&mut header)?;
        let mut body = vec![0; u32::from_le_bytes(header[4..8].try_into().expect("4 bytes")) as usize];
        from.read_exact(&mut body)?;
        let channel = u16::from_le_bytes([header[16], header[17]]);
        let value = u64::from_le_bytes(header[8..16].try_into().expect("8 bytes"));
        assert_eq!(message(header[2], channel, value, &body), [&header[..], &body].concat());
        if ![ALIVE, RECEIVED].contains(&header[2]) {
            return Ok((header[2], channel, value, body));
        }
    }
}

/// Sends bytes, whether or not the other side still reads.
pub(crate) fn say(mut to: &TcpStream, bytes: &[u8]) {
    let _ = to.write_all(bytes);
}
