//! Persistent dirty bitmaps, as the image's bitmap directory lists them.
//!
//! Layout: `docs/interop/qcow2.txt` of QEMU, "Bitmaps".

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteLen, ByteOffset, ReadBuf};

use crate::header::{BitmapDirectory, TableLocation};
use crate::open::OpenError;

const ENTRY_FIXED_BYTES: usize = 24;
/// The maximum length of a directory that QEMU accepts, in bytes (65535 bitmaps with long names).
const DIRECTORY_BYTES_MAX: u64 = 128 << 20;
const FLAG_IN_USE: u32 = 1 << 0;
const FLAG_AUTO: u32 = 1 << 1;

/// A persistent dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// The location of the bitmap's table, which lists its clusters.
    pub table: TableLocation,
    /// The bitmap was not stored properly: its content is invalid.
    pub in_use: bool,
    /// Recording continues whenever the image is open.
    pub auto: bool,
    /// The number of bytes of the disk that a bit represents.
    pub granularity: u64,
    /// The bitmap's name.
    pub name: String,
}

/// Reads the bitmap directory of an image. The second value is the reason why it could not be read to its end.
///
/// # Errors
/// The file cannot be read.
pub async fn read_bitmaps(
    file: &Rc<dyn BlockDevice>,
    at: BitmapDirectory,
) -> Result<(Vec<Bitmap>, Option<String>), OpenError> {
    let size = file.geometry().size.get();
    let is_in_file = at.directory_len <= DIRECTORY_BYTES_MAX
        && at.directory_offset.is_multiple_of(512)
        && at.directory_offset.saturating_add(at.directory_len) <= size;
    if !is_in_file {
        let damage =
            format!("the directory, {} bytes at {:#x}, is not in the file", at.directory_len, at.directory_offset);
        return Ok((Vec::new(), Some(damage)));
    }
    let mut bytes = AlignedBuf::zeroed(ByteLen::new(at.directory_len.next_multiple_of(512)).as_usize());
    if !bytes.is_empty() {
        file.read(ByteOffset::new(at.directory_offset), ReadBuf::new(&mut bytes)).await?;
    }
    let mut found = Vec::new();
    let mut rest = &bytes[..at.directory_len as usize];
    for index in 0..at.count {
        let Some((bitmap, len)) = parse_entry(rest) else {
            return Ok((found, Some(format!("entry {index} of the directory is invalid"))));
        };
        found.push(bitmap);
        rest = &rest[len.min(rest.len())..];
    }
    Ok((found, None))
}

/// Parses the first entry, and returns its length in bytes with it.
fn parse_entry(bytes: &[u8]) -> Option<(Bitmap, usize)> {
    let u32_at = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let offset = u64::from_be_bytes(bytes.get(..8)?.try_into().ok()?);
    let flags = u32_at(12)?;
    let granularity_bits = *bytes.get(17)?;
    let name_len = usize::from(u16::from_be_bytes(bytes.get(18..20)?.try_into().ok()?));
    let name_at = ENTRY_FIXED_BYTES.checked_add(u32_at(20)? as usize)?;
    let name = bytes.get(name_at..name_at + name_len)?;
    let bitmap = Bitmap {
        table: TableLocation { offset, entries: u32_at(8)?.into() },
        in_use: flags & FLAG_IN_USE != 0,
        auto: flags & FLAG_AUTO != 0,
        granularity: 1u64.checked_shl(granularity_bits.into())?,
        name: String::from_utf8_lossy(name).into_owned(),
    };
    Some((bitmap, (name_at + name_len).next_multiple_of(8)))
}
