//! Internal snapshots, as the image's snapshot table lists them.
//!
//! Layout: `docs/interop/qcow2.txt` of QEMU, "Snapshots".

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteLen, ByteOffset, ReadBuf};

use crate::header::{Header, TableLocation};
use crate::open::OpenError;

/// The length in bytes of an entry before its extra data.
const ENTRY_FIXED_BYTES: usize = 40;
/// The maximum lengths in bytes that QEMU accepts for extra data, and for the table.
const EXTRA_BYTES_MAX: usize = 1024;
const TABLE_BYTES_MAX: u64 = 64 << 20;
/// The length in bytes of the extra data that version 3 requires: the VM state's size in 64 bits and the disk's size.
const EXTRA_BYTES_REQUIRED: usize = 16;

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The location of the L1 table.
    pub l1: TableLocation,
    /// The unique ID, usually a number.
    pub id: String,
    /// The name.
    pub name: String,
    /// The time of the snapshot in seconds since 1970.
    pub date_seconds: u32,
    /// The nanoseconds of the time of the snapshot.
    pub date_nanos: u32,
    /// The time for which the guest had run, in nanoseconds.
    pub vm_clock_nanos: u64,
    /// The size of the VM's state in bytes; 0 if the snapshot has only the disk.
    pub vm_state_size: u64,
    /// The size of the disk in bytes; `None` if it is not stored.
    pub disk_size: Option<u64>,
}

/// A snapshot table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotTable {
    /// The snapshots, in the order in which they were taken.
    pub snapshots: Vec<Snapshot>,
    /// The length of the table in bytes.
    pub len: u64,
    /// Entries without the extra data that version 3 requires.
    pub incomplete: Vec<usize>,
    /// The reason why the table could not be read to its end.
    pub damage: Option<String>,
    /// The table is damaged because the file ends before.
    pub is_truncated: bool,
}

/// Reads the snapshot table of an image. Damage is described in [`SnapshotTable::damage`]; the snapshots before it
/// are listed.
///
/// # Errors
/// The file cannot be read.
pub async fn read_snapshots(file: &Rc<dyn BlockDevice>, header: &Header) -> Result<SnapshotTable, OpenError> {
    if header.snapshots == 0 {
        return Ok(SnapshotTable::default());
    }
    let size = file.geometry().size.get();
    let mut parser = Parser::default();
    // An ever larger part of the table is read until it suffices, because each entry determines its own length.
    let mut wanted_len = 64 << 10;
    loop {
        let read_len = size.saturating_sub(header.snapshots_offset).min(wanted_len);
        let mut bytes = AlignedBuf::zeroed(ByteLen::new(read_len).as_usize());
        if read_len > 0 {
            file.read(ByteOffset::new(header.snapshots_offset), ReadBuf::new(&mut bytes)).await?;
        }
        match parser.parse(header, &bytes) {
            Ok(table) => return Ok(table),
            Err(ParseError::Damaged(damage)) => return Ok(parser.into_damaged(damage)),
            Err(ParseError::Incomplete) if read_len < wanted_len || wanted_len >= TABLE_BYTES_MAX => {
                let damage = format!("it ends within entry {}", parser.table.snapshots.len());
                return Ok(SnapshotTable { is_truncated: read_len < wanted_len, ..parser.into_damaged(damage) });
            }
            Err(ParseError::Incomplete) => wanted_len = (wanted_len * 4).min(TABLE_BYTES_MAX),
        }
    }
}

enum ParseError {
    Incomplete,
    Damaged(String),
}

#[derive(Default)]
struct Parser {
    table: SnapshotTable,
    at: usize,
}

impl Parser {
    fn into_damaged(self, damage: String) -> SnapshotTable {
        SnapshotTable { damage: Some(damage), ..self.table }
    }

    /// Continues with the unparsed part of `bytes`, which begin at the start of the table.
    fn parse(&mut self, header: &Header, bytes: &[u8]) -> Result<SnapshotTable, ParseError> {
        while self.table.snapshots.len() < header.snapshots as usize {
            let index = self.table.snapshots.len();
            let at = self.at.next_multiple_of(8);
            let fixed = bytes.get(at..at + ENTRY_FIXED_BYTES).ok_or(ParseError::Incomplete)?;
            let u16_at = |at: usize| u16::from_be_bytes([fixed[at], fixed[at + 1]]);
            let u32_at = |at: usize| u32::from(u16_at(at)) << 16 | u32::from(u16_at(at + 2));
            let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));
            let (id_len, name_len) = (u16_at(12) as usize, u16_at(14) as usize);
            let extra_len = u32_at(36) as usize;
            if extra_len > EXTRA_BYTES_MAX {
                return Err(ParseError::Damaged(format!("entry {index} has {extra_len} bytes of extra data")));
            }
            let end = at + ENTRY_FIXED_BYTES + extra_len + id_len + name_len;
            let rest = bytes.get(at + ENTRY_FIXED_BYTES..end).ok_or(ParseError::Incomplete)?;
            let (extra, names) = rest.split_at(extra_len);
            let extra_at = |at: usize| {
                let word = extra.get(at..at + 8)?.try_into().ok()?;
                Some(u64::from_be_bytes(word))
            };
            if header.shape.version >= 3 && extra_len < EXTRA_BYTES_REQUIRED {
                self.table.incomplete.push(index);
            }
            self.table.snapshots.push(Snapshot {
                l1: TableLocation { offset: u64_at(0), entries: u32_at(8).into() },
                id: String::from_utf8_lossy(&names[..id_len]).into_owned(),
                name: String::from_utf8_lossy(&names[id_len..]).into_owned(),
                date_seconds: u32_at(16),
                date_nanos: u32_at(20),
                vm_clock_nanos: u64_at(24),
                vm_state_size: extra_at(0).unwrap_or(u32_at(32).into()),
                disk_size: extra_at(8),
            });
            self.at = end;
            self.table.len = end as u64;
        }
        Ok(std::mem::take(&mut self.table))
    }
}
