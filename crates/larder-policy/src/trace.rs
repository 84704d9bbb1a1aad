//! Reader of traces of disk requests.
//!
//! Formats, detected by the beginning of the file; each may be compressed with zstd:
//! - vscsi 1 (CloudPhysics, libCacheSim): little-endian records of 32 bytes, `number u32, length u32 (bytes),
//!   segments u32, command u16 (SCSI), version u16, block u64 (512 bytes), time u64 (microseconds)`.
//! - the ARC paper's format: lines of text, `first count ignored number`, each a read of `count` blocks from block
//!   `first`. The size of a block is not in the file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of a block of vscsi.
const SECTOR: u64 = 512;

/// Bytes of a record of vscsi; [`VSCSI_VERSION`] is the offset of its version.
const VSCSI_RECORD: usize = 32;
const VSCSI_VERSION: usize = 14;

/// SCSI commands READ with 6, 10, 12 and 16 bytes; [`WRITES`] has the commands WRITE.
const READS: [u16; 4] = [0x08, 0x28, 0xa8, 0x88];
const WRITES: [u16; 4] = [0x0a, 0x2a, 0xaa, 0x8a];

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The longest request in bytes; a longer one in a trace is an error.
const LENGTH_MAX: u64 = 1 << 30;

/// Request of a trace: a read or a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRequest {
    /// Set for a write, unset for a read.
    pub write: bool,
    /// Offset in bytes.
    pub start: u64,
    /// Length in bytes; not 0.
    pub len: u64,
    /// Time since an arbitrary moment; `None` if it is not in the trace.
    pub at: Option<Duration>,
}

/// Format of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceFormat {
    /// CloudPhysics' records.
    Vscsi,
    /// The ARC paper's lines.
    Arc,
}

/// Trace with its requests in order.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Format of the file.
    pub format: TraceFormat,
    /// Requests, at least one.
    pub requests: Vec<TraceRequest>,
}

/// Error of reading a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The operating system or the decompressor reported an error.
    #[error("cannot read the trace {path}: {source}")]
    Read {
        /// Path of the trace.
        path: PathBuf,
        /// Cause of the error.
        source: io::Error,
    },
    /// The trace has no requests.
    #[error("the trace {path} has no requests")]
    Empty {
        /// Path of the trace.
        path: PathBuf,
    },
    /// The beginning of the file fits no known format.
    #[error(
        "{path} is not in a known trace format: it begins neither with a record of vscsi 1 nor with a line \
         'first count ignored number'"
    )]
    UnknownFormat {
        /// Path of the trace.
        path: PathBuf,
    },
    /// A later part of the file does not fit its format.
    #[error("the trace {path} is damaged: {unit} {number} {what}")]
    Damaged {
        /// Path of the trace.
        path: PathBuf,
        /// Unit of the format: record or line.
        unit: &'static str,
        /// Number of the unit, from 1.
        number: usize,
        /// Description of the damage.
        what: String,
    },
}

/// Reads a trace. In the ARC paper's format a block is `block` bytes.
///
/// # Errors
/// The file cannot be read, is empty, is of another format, or damaged.
pub fn read(path: &Path, block: u64) -> Result<Trace, TraceError> {
    let failed = |source| TraceError::Read { path: path.to_owned(), source };
    let mut file = BufReader::new(File::open(path).map_err(failed)?);
    let is_compressed = file.fill_buf().map_err(failed)?.starts_with(&ZSTD_MAGIC);
    if is_compressed {
        let decompressed = zstd::Decoder::with_buffer(file).map_err(failed)?;
        parse(path, BufReader::new(decompressed), block)
    } else {
        parse(path, file, block)
    }
}

fn parse(path: &Path, mut from: impl BufRead, block: u64) -> Result<Trace, TraceError> {
    let failed = |source| TraceError::Read { path: path.to_owned(), source };
    let mut begin = Vec::new();
    from.by_ref().take(VSCSI_RECORD as u64).read_to_end(&mut begin).map_err(failed)?;
    if begin.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    let format = format_of(&begin).ok_or_else(|| TraceError::UnknownFormat { path: path.to_owned() })?;
    let all = begin.as_slice().chain(from);
    let requests = match format {
        TraceFormat::Vscsi => vscsi(path, all)?,
        TraceFormat::Arc => arc(path, all, block)?,
    };
    if requests.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    Ok(Trace { format, requests })
}

fn format_of(begin: &[u8]) -> Option<TraceFormat> {
    let line = begin.split(|byte| *byte == b'\n').next().unwrap_or(begin);
    let of_text = |byte: &u8| byte.is_ascii_digit() || byte.is_ascii_whitespace();
    if !line.is_empty() && line.iter().all(of_text) {
        return Some(TraceFormat::Arc);
    }
    let command = begin.get(12..14).map(|bytes| number(bytes) as u16)?;
    let known = READS.contains(&command) || WRITES.contains(&command);
    let version = begin.get(VSCSI_VERSION..VSCSI_VERSION + 2).map(number)?;
    // The version is the upper byte, as in libCacheSim.
    (known && version >> 8 == 1).then_some(TraceFormat::Vscsi)
}

/// Decodes a little-endian number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

fn vscsi(path: &Path, mut from: impl Read) -> Result<Vec<TraceRequest>, TraceError> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).map_err(|source| TraceError::Read { path: path.to_owned(), source })?;
    let request = |record: &[u8]| {
        if record.len() < VSCSI_RECORD {
            return Err(format!("has {} of {VSCSI_RECORD} bytes: the file ends early", record.len()));
        }
        let command = number(&record[12..14]) as u16;
        let write = WRITES.contains(&command);
        if !write && !READS.contains(&command) {
            return Err(format!("is neither a read nor a write: SCSI command {command:#x}"));
        }
        let (first, len) = (number(&record[16..24]), number(&record[4..8]));
        Ok(TraceRequest {
            write,
            start: byte_offset(first, SECTOR, len)?,
            len,
            at: Some(Duration::from_micros(number(&record[24..32]))),
        })
    };
    let requests = bytes.chunks(VSCSI_RECORD).enumerate().map(|(index, record)| {
        request(record).map_err(|what| TraceError::Damaged {
            path: path.to_owned(),
            unit: "record",
            number: index + 1,
            what,
        })
    });
    requests.collect()
}

fn arc(path: &Path, from: impl BufRead, block: u64) -> Result<Vec<TraceRequest>, TraceError> {
    let request = |line: &str| {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(first)), Some(Ok(count)), Some(Ok(_)), Some(Ok(_)), None) =
            (numbers.next(), numbers.next(), numbers.next(), numbers.next(), numbers.next())
        else {
            return Err(format!("is not four numbers: '{}'", line.escape_debug()));
        };
        let len = count.saturating_mul(block);
        Ok(TraceRequest { write: false, start: byte_offset(first, block, len)?, len, at: None })
    };
    let requests = from.split(b'\n').enumerate().map(|(index, line)| {
        let line = line.map_err(|source| TraceError::Read { path: path.to_owned(), source })?;
        request(&String::from_utf8_lossy(&line)).map_err(|what| TraceError::Damaged {
            path: path.to_owned(),
            unit: "line",
            number: index + 1,
            what,
        })
    });
    requests.collect()
}

/// Returns the offset of a block, if a request of this length can be there.
fn byte_offset(first: u64, block: u64, len: u64) -> Result<u64, String> {
    if len == 0 || len > LENGTH_MAX {
        return Err(format!("has {len} bytes; a request has 1 to {LENGTH_MAX}"));
    }
    let start = first.checked_mul(block).filter(|start| start.checked_add(len).is_some());
    start.ok_or_else(|| format!("is at block {first}, beyond the largest possible disk"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(command: u16, length: u32, block: u64, us: u64) -> [u8; VSCSI_RECORD] {
        let mut record = [0; VSCSI_RECORD];
        record[4..8].copy_from_slice(&length.to_le_bytes());
        record[12..14].copy_from_slice(&command.to_le_bytes());
        record[14..16].copy_from_slice(&0x100u16.to_le_bytes());
        record[16..24].copy_from_slice(&block.to_le_bytes());
        record[24..].copy_from_slice(&us.to_le_bytes());
        record
    }

    fn parsed(bytes: &[u8]) -> Result<Trace, TraceError> {
        parse(Path::new("a.trace"), bytes, 4096)
    }

    #[test]
    fn vscsi_record_becomes_timed_request() {
        let bytes = [record(0x8a, 8192, 5 << 32, 3_000_000), record(0x28, 512, 7, 3_000_001)].concat();
        let trace = parsed(&bytes).expect("a trace");
        assert_eq!(trace.format, TraceFormat::Vscsi);
        let expected = [
            TraceRequest { write: true, start: (5 << 32) * 512, len: 8192, at: Some(Duration::from_secs(3)) },
            TraceRequest { write: false, start: 7 * 512, len: 512, at: Some(Duration::from_micros(3_000_001)) },
        ];
        assert_eq!(trace.requests, expected);
    }

    #[test]
    fn arc_line_becomes_read() {
        let trace = parsed(b"110765 64 0 0\n7 1 0 1\n").expect("a trace");
        assert_eq!(trace.format, TraceFormat::Arc);
        let reads: Vec<(u64, u64)> = trace.requests.iter().map(|read| (read.start, read.len)).collect();
        assert_eq!(reads, [(110_765 * 4096, 64 * 4096), (7 * 4096, 4096)]);
        assert!(trace.requests.iter().all(|read| !read.write && read.at.is_none()));
    }

    #[test]
    fn compressed_trace_is_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("trace");
        let compressed = zstd::encode_all(&b"1 2 0 0\n"[..], 0).expect("packs");
        std::fs::write(&path, &compressed).expect("writes");
        assert_eq!(read(&path, 512).expect("a trace").requests.len(), 1);
        std::fs::write(&path, &compressed[..compressed.len() - 3]).expect("writes");
        assert!(matches!(read(&path, 512), Err(TraceError::Read { .. })));
    }

    /// Errors of every kind of damage name the place and the cause.
    #[test]
    fn trace_errors_name_the_damage() {
        let record_bytes = record(0x28, 512, 7, 0);
        let cases: [(&[u8], &str); 9] = [
            (b"", "a.trace has no requests"),
            (b"#!/bin/sh", "is not in a known trace format"),
            (&[0; 64], "is not in a known trace format"),
            (b"1 2 0 0\nx 2 0 0\n", "damaged: line 2 is not four numbers: 'x 2 0 0'"),
            (b"1 2 0\n", "damaged: line 1 is not four numbers"),
            (b"1 0 0 0\n", "damaged: line 1 has 0 bytes"),
            (b"18446744073709551615 1 0 0\n", "damaged: line 1 is at block 18446744073709551615"),
            (&[&record_bytes[..], &record(0x35, 512, 7, 0)].concat(), "record 2 is neither a read nor a write"),
            (&[&record_bytes[..], &record_bytes[..9]].concat(), "record 2 has 9 of 32 bytes: the file ends early"),
        ];
        for (bytes, expected) in cases {
            let error = parsed(bytes).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}, not {expected}");
        }
    }
}
