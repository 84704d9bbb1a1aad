//! The NBD protocol, as both sides need it: constants, and pure functions that encode and parse messages.
//!
//! The module follows the specification of the Network Block Device project (`doc/proto.md`, called "the spec" below)
//! and its `extension-ext-header` branch. All integers on the wire are big-endian. No function here does I/O or
//! trusts a length: parsers take received bytes and report their errors ([`Malformed`]). `docs/nbd.md` has the byte
//! diagrams and lists the supported parts of the protocol.
//!
//! The client is [`crate::backend::nbd`], the server is the crate `larder-export`.

use std::fmt;
use std::str::FromStr;

pub mod flags;
pub mod handshake;
pub mod stream_reader;
pub mod transmission;
pub mod uri;

pub use flags::{Command, CommandFlags, TransmissionFlags};
pub use stream_reader::StreamReader;
pub use uri::{NbdUri, NbdUriError};

/// The port that IANA has assigned to NBD.
pub const PORT: u16 = 10809;

/// The maximum length of a string (export name, description, error message) in the spec, in bytes.
pub const STRING_LEN_MAX: usize = 4096;

/// An export's description for human readers; empty for none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportDescription(String);

/// The reason to refuse a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExportDescriptionError {
    #[error("the description of an export may have at most {STRING_LEN_MAX} bytes; this one has {0}")]
    Long(usize),
    #[error("the description of an export must not contain a NUL")]
    Nul,
}

impl FromStr for ExportDescription {
    type Err = ExportDescriptionError;

    fn from_str(text: &str) -> Result<Self, ExportDescriptionError> {
        match text.len() {
            len if len > STRING_LEN_MAX => Err(ExportDescriptionError::Long(len)),
            _ if text.contains('\0') => Err(ExportDescriptionError::Nul),
            _ => Ok(Self(text.to_owned())),
        }
    }
}

impl fmt::Display for ExportDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The maximum payload that the spec lets a client assume if the server reports no other limit, in bytes.
pub const PAYLOAD_LEN_MAX: u32 = 32 << 20;

/// The metadata context that distinguishes data, zeros and holes.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Block status: not allocated (spec, "`base:allocation` metadata context").
pub const STATE_HOLE: u64 = 1 << 0;

/// Block status: reads as zeros.
pub const STATE_ZERO: u64 = 1 << 1;

/// The maximum number of descriptors in one block status reply (spec, `NBD_REPLY_TYPE_BLOCK_STATUS`).
pub const STATUS_DESCRIPTORS_MAX: u32 = 1 << 20;

/// A message that violates the spec.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Malformed {
    #[error("{what} begins with {found:#x} instead of {expected:#x}")]
    Magic { what: &'static str, expected: u64, found: u64 },
    #[error("{what} is {len} bytes long; {allowed} allowed")]
    Length { what: &'static str, len: u64, allowed: &'static str },
    #[error("{what} ends in the middle of {field}")]
    Truncated { what: &'static str, field: &'static str },
    #[error("{what} is not UTF-8")]
    NotUtf8 { what: &'static str },
    #[error("{what} contains a NUL")]
    Nul { what: &'static str },
}

/// A parser that takes big-endian fields off the front of a message.
pub(crate) struct Fields<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(what: &'static str, message: &'a [u8]) -> Self {
        Self { what, rest: message }
    }

    pub(crate) fn bytes(&mut self, len: usize, field: &'static str) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or(Malformed::Truncated { what: self.what, field })?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N, field)?);
        Ok(array)
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, Malformed> {
        Ok(u16::from_be_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, Malformed> {
        Ok(u64::from_be_bytes(self.array(field)?))
    }

    /// Takes a string of `len` bytes for human readers. Some servers end it with a NUL, which is removed.
    pub(crate) fn text(&mut self, len: usize, field: &'static str) -> Result<&'a str, Malformed> {
        let has_nul = len > 0 && self.rest.get(len - 1) == Some(&0);
        let text = self.string(len - usize::from(has_nul), field)?;
        self.bytes(usize::from(has_nul), field)?;
        Ok(text)
    }

    /// Takes a string of `len` bytes.
    pub(crate) fn string(&mut self, len: usize, field: &'static str) -> Result<&'a str, Malformed> {
        if len > STRING_LEN_MAX {
            return Err(Malformed::Length { what: field, len: len as u64, allowed: "4096 bytes are" });
        }
        let text = std::str::from_utf8(self.bytes(len, field)?).map_err(|_| Malformed::NotUtf8 { what: field })?;
        // Spec, "Conventions": no string contains a NUL.
        match text.contains('\0') {
            true => Err(Malformed::Nul { what: field }),
            false => Ok(text),
        }
    }

    /// Takes a string and its length in front of it (32 bits).
    pub(crate) fn counted_string(&mut self, field: &'static str) -> Result<&'a str, Malformed> {
        let len = self.u32(field)?;
        self.string(len as usize, field)
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Checks that no bytes are left.
    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(Malformed::Length {
            what: self.what,
            len: self.rest.len() as u64,
            allowed: "no bytes after its last field are",
        })
    }

    pub(crate) fn magic(&mut self, expected: u64) -> Result<(), Malformed> {
        let found = self.u64("magic")?;
        check_magic(self.what, expected, found)
    }
}

fn check_magic(what: &'static str, expected: u64, found: u64) -> Result<(), Malformed> {
    if expected == found {
        return Ok(());
    }
    Err(Malformed::Magic { what, expected, found })
}
