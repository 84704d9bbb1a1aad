//! The header of an image: parsed, checked, and changed in place.
//!
//! Layout: `docs/interop/qcow2.txt` of QEMU, "Header". All numbers are big-endian. Only a few fields ever change,
//! each by a write of the first sector, which a crash leaves old or new.

use crate::shape::Shape;

/// The first bytes of an image.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";

/// The length in bytes of the header's first sector, which holds every field that changes.
pub const HEADER_SECTOR_BYTES: usize = 512;

/// The maximum lengths in bytes that QEMU accepts for the active L1 table, and for the refcount table.
pub const L1_BYTES_MAX: u64 = 32 << 20;
const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
/// The maximum length in bytes of a backing file's name.
const BACKING_NAME_BYTES_MAX: u32 = 1023;
const SNAPSHOTS_MAX: u32 = 65536;
/// The maximum length in bytes of the first cluster's part that is read for extensions.
pub const HEADER_AREA_BYTES_MAX: u64 = 2 << 20;

const INCOMPATIBLE_DIRTY: u64 = 1 << 0;
const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
const INCOMPATIBLE_KNOWN: u64 = (1 << 5) - 1;
const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1 << 0;
/// Persistent bitmaps are consistent.
pub const AUTOCLEAR_BITMAPS: u64 = 1 << 0;
/// The external data file is a raw image of the disk.
pub const AUTOCLEAR_RAW_DATA: u64 = 1 << 1;

/// Larder's own bits: the number of the session that writes the image, or that was cut off, and of its last commit.
/// See [`crate::journal`].
pub const AUTOCLEAR_SESSION: u64 = !0xff;

const EXTENSION_END: u32 = 0;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;
const EXTENSION_BITMAPS: u32 = 0x2385_2875;
const EXTENSION_ENCRYPTION: u32 = 0x0537_be77;
const EXTENSION_DATA_FILE: u32 = 0x4441_5441;

const OFFSET_SIZE: usize = 24;
const OFFSET_L1_SIZE: usize = 36;
const OFFSET_SNAPSHOTS: usize = 60;
const OFFSET_SNAPSHOTS_TABLE: usize = 64;
const OFFSET_L1: usize = 40;
const OFFSET_REFCOUNT_TABLE: usize = 48;
const OFFSET_INCOMPATIBLE: usize = 72;
const OFFSET_AUTOCLEAR: usize = 88;

/// The compression type of clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Compression {
    Zlib,
    Zstd,
}

impl Compression {
    /// Returns the type's name in QEMU.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

/// The location of a table in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLocation {
    /// The offset of the first byte.
    pub offset: u64,
    /// The number of entries, of 8 bytes each.
    pub entries: u64,
}

/// The location of persistent bitmaps, from the header extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapDirectory {
    /// The number of bitmaps.
    pub count: u32,
    /// The length in bytes of the bitmap directory.
    pub directory_len: u64,
    /// The offset of the bitmap directory.
    pub directory_offset: u64,
}

/// The content of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The cluster size and other parameters of the format.
    pub shape: Shape,
    /// The size of the disk in bytes.
    pub size: u64,
    /// The active L1 table.
    pub l1: TableLocation,
    /// The refcount table.
    pub refcount_table: TableLocation,
    /// The number of internal snapshots.
    pub snapshots: u32,
    /// The offset of the snapshot table; any value if there are no snapshots.
    pub snapshots_offset: u64,
    /// The compression type of clusters.
    pub compression: Compression,
    /// The refcounts may be wrong, because they are written lazily.
    pub dirty: bool,
    /// A program has found the image corrupt and marked it so.
    pub corrupt: bool,
    /// Refcounts are to be written lazily.
    pub lazy_refcounts: bool,
    /// Feature bits that a program which does not know them must clear before it writes.
    pub autoclear: u64,
    /// The backing file's name as stored in the image.
    pub backing_file: Option<String>,
    /// The backing file's format as stored in the image.
    pub backing_format: Option<String>,
    /// The external data file's name as stored in the image.
    pub data_file: Option<String>,
    /// The location of persistent bitmaps.
    pub bitmaps: Option<BitmapDirectory>,
}

/// Describes the first bytes of a file in words.
fn describe_magic(bytes: [u8; 4]) -> String {
    match bytes {
        [0, 0, 0, 0] => "zeros".to_owned(),
        _ if bytes.iter().all(u8::is_ascii_graphic) => {
            format!("'{}'", bytes.map(char::from).iter().collect::<String>())
        }
        [a, b, c, d] => format!("the bytes {a:02x} {b:02x} {c:02x} {d:02x}"),
    }
}

/// The reason why a header is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum HeaderError {
    #[error("it is not a qcow2 image (it begins with {})", describe_magic(*.0))]
    Magic([u8; 4]),
    #[error("it ends within the header ({0} bytes)")]
    Truncated(u64),
    #[error("qcow2 version {0} is not supported (2 and 3 are)")]
    Version(u32),
    #[error("{field} is {value}, but must be {expected}")]
    Field { field: &'static str, value: u64, expected: String },
    #[error("it is encrypted ({0}); Larder does not decrypt, and would serve ciphertext")]
    Encrypted(&'static str),
    #[error(
        "it uses incompatible features that this version of Larder does not support: {0}; only a program that supports them may open it"
    )]
    Incompatible(String),
    #[error(
        "it is marked as corrupt: a program found its metadata damaged; copy it, then repair it with `larder disk check --repair`, or open it read-only"
    )]
    Corrupt,
    #[error("a header extension of type {kind:#010x} at {offset:#x} has {len} bytes and does not fit the header")]
    Extension { kind: u32, offset: u64, len: u32 },
    #[error("its {0} is not valid UTF-8")]
    Text(&'static str),
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(word)
}

impl Header {
    /// Returns the number of bytes of the image that [`Header::parse`] needs, according to its first sector.
    ///
    /// # Errors
    /// The sector does not begin like an image.
    pub fn area_len(sector: &[u8]) -> Result<u64, HeaderError> {
        if sector.len() < 72 {
            return Err(HeaderError::Truncated(sector.len() as u64));
        }
        if sector[..4] != MAGIC {
            return Err(HeaderError::Magic([sector[0], sector[1], sector[2], sector[3]]));
        }
        Ok(1 << parse_cluster_bits(sector)?)
    }

    /// Parses a header from the first cluster of an image (or the existing part of it).
    ///
    /// # Errors
    /// See [`HeaderError`].
    pub fn parse(area: &[u8]) -> Result<Self, HeaderError> {
        Self::area_len(area)?;
        let cluster_bits = parse_cluster_bits(area)?;
        let version = u32_at(area, 4);
        if !(2..=3).contains(&version) {
            return Err(HeaderError::Version(version));
        }
        let is_version_3 = version == 3;
        if is_version_3 && area.len() < 104 {
            return Err(HeaderError::Truncated(area.len() as u64));
        }
        let (incompatible, compatible, autoclear) = match is_version_3 {
            true => (u64_at(area, OFFSET_INCOMPATIBLE), u64_at(area, 80), u64_at(area, OFFSET_AUTOCLEAR)),
            false => (0, 0, 0),
        };
        let (refcount_order, header_len) = match is_version_3 {
            true => (u32_at(area, 96), u32_at(area, 100)),
            false => (4, 72),
        };
        let within = |field, value: u64, from: u64, to: u64| {
            if (from..=to).contains(&value) {
                return Ok(value);
            }
            Err(HeaderError::Field { field, value, expected: format!("from {from} to {to}") })
        };
        let cluster_len = 1u64 << cluster_bits;
        if is_version_3 {
            within("the header length", header_len.into(), 104, cluster_len.min(area.len() as u64))?;
        }
        let extensions = Extensions::parse(area, header_len as usize)?;
        if incompatible & !INCOMPATIBLE_KNOWN != 0 {
            return Err(HeaderError::Incompatible(extensions.feature_names(incompatible & !INCOMPATIBLE_KNOWN)));
        }
        match u32_at(area, 32) {
            0 => {}
            1 => return Err(HeaderError::Encrypted("AES")),
            2 => return Err(HeaderError::Encrypted("LUKS")),
            method => {
                within("the encryption method", method.into(), 0, 2)?;
            }
        }
        within("the refcount order", refcount_order.into(), 0, 6)?;
        let extended = incompatible & INCOMPATIBLE_EXTENDED_L2 != 0;
        if extended {
            within("log2 of the cluster size, with extended L2 entries,", cluster_bits.into(), 14, 21)?;
        }
        let compression = match incompatible & INCOMPATIBLE_COMPRESSION != 0 && header_len > 104 {
            true => match area[104] {
                0 => Compression::Zlib,
                1 => Compression::Zstd,
                other => {
                    within("the compression type", other.into(), 0, 1)?;
                    Compression::Zlib
                }
            },
            false => Compression::Zlib,
        };
        let shape = Shape {
            cluster_bits,
            extended,
            refcount_order,
            version,
            data_file: incompatible & INCOMPATIBLE_DATA_FILE != 0,
        };
        let size = within("the disk's size", u64_at(area, OFFSET_SIZE), 0, shape.size_max())?;
        let aligned = |field, offset: u64| {
            if offset & (cluster_len - 1) == 0 && offset <= i64::MAX as u64 {
                return Ok(offset);
            }
            Err(HeaderError::Field {
                field,
                value: offset,
                expected: format!("a multiple of the cluster size, {cluster_len}"),
            })
        };
        let l1 = TableLocation {
            offset: aligned("the L1 table's offset", u64_at(area, OFFSET_L1))?,
            entries: within(
                "the number of L1 entries",
                u32_at(area, OFFSET_L1_SIZE).into(),
                shape.l1_entries(size),
                L1_BYTES_MAX / 8,
            )?,
        };
        let refcount_clusters = within(
            "the number of refcount table clusters",
            u32_at(area, 56).into(),
            1,
            (REFCOUNT_TABLE_BYTES_MAX >> cluster_bits).max(1),
        )?;
        let refcount_table = TableLocation {
            offset: aligned("the refcount table's offset", u64_at(area, OFFSET_REFCOUNT_TABLE))?,
            entries: refcount_clusters << (cluster_bits - 3),
        };
        let snapshots = u32_at(area, OFFSET_SNAPSHOTS);
        within("the number of snapshots", snapshots.into(), 0, SNAPSHOTS_MAX.into())?;
        let snapshots_offset = match snapshots {
            // There is no table; a check reports an invalid offset.
            0 => u64_at(area, OFFSET_SNAPSHOTS_TABLE),
            _ => aligned("the snapshot table's offset", u64_at(area, OFFSET_SNAPSHOTS_TABLE))?,
        };
        Ok(Self {
            shape,
            size,
            l1,
            refcount_table,
            snapshots,
            snapshots_offset,
            compression,
            dirty: incompatible & INCOMPATIBLE_DIRTY != 0,
            corrupt: incompatible & INCOMPATIBLE_CORRUPT != 0,
            lazy_refcounts: compatible & COMPATIBLE_LAZY_REFCOUNTS != 0,
            autoclear,
            backing_file: parse_backing_file(area, cluster_len)?,
            backing_format: extensions.text(EXTENSION_BACKING_FORMAT, "backing file's format")?,
            data_file: extensions.text(EXTENSION_DATA_FILE, "data file's name")?,
            bitmaps: extensions.bitmaps(),
        })
    }
}

/// Sets the disk size in a header's first sector.
pub fn set_size(sector: &mut [u8], size: u64) {
    sector[OFFSET_SIZE..OFFSET_SIZE + 8].copy_from_slice(&size.to_be_bytes());
}

/// Returns the number of snapshots in a header's first sector.
pub fn snapshots(sector: &[u8]) -> u32 {
    u32_at(sector, OFFSET_SNAPSHOTS)
}

/// Clears the snapshot table's offset in the first header sector of an image without snapshots.
pub fn clear_snapshots_offset(sector: &mut [u8]) {
    sector[OFFSET_SNAPSHOTS_TABLE..OFFSET_SNAPSHOTS_TABLE + 8].fill(0);
}

/// Sets the active L1 table's location in a header's first sector.
pub fn set_l1(sector: &mut [u8], table: TableLocation) {
    sector[OFFSET_L1_SIZE..OFFSET_L1_SIZE + 4].copy_from_slice(&(table.entries as u32).to_be_bytes());
    sector[OFFSET_L1..OFFSET_L1 + 8].copy_from_slice(&table.offset.to_be_bytes());
}

/// Sets the refcount table's location in a header's first sector.
pub fn set_refcount_table(sector: &mut [u8], offset: u64, clusters: u32) {
    sector[OFFSET_REFCOUNT_TABLE..OFFSET_REFCOUNT_TABLE + 8].copy_from_slice(&offset.to_be_bytes());
    sector[56..60].copy_from_slice(&clusters.to_be_bytes());
}

/// Returns the autoclear bits in a header's first sector; 0 in version 2, which has none.
pub fn autoclear(sector: &[u8]) -> u64 {
    match u32_at(sector, 4) {
        ..3 => 0,
        _ => u64_at(sector, OFFSET_AUTOCLEAR),
    }
}

/// Sets the autoclear bits in a version 3 header's first sector.
pub fn set_autoclear(sector: &mut [u8], bits: u64) {
    sector[OFFSET_AUTOCLEAR..OFFSET_AUTOCLEAR + 8].copy_from_slice(&bits.to_be_bytes());
}

/// Sets or clears the dirty and corrupt bits in a version 3 header's first sector.
pub fn set_state(sector: &mut [u8], dirty: bool, corrupt: bool) {
    let mut bits = u64_at(sector, OFFSET_INCOMPATIBLE) & !(INCOMPATIBLE_DIRTY | INCOMPATIBLE_CORRUPT);
    if dirty {
        bits |= INCOMPATIBLE_DIRTY;
    }
    if corrupt {
        bits |= INCOMPATIBLE_CORRUPT;
    }
    sector[OFFSET_INCOMPATIBLE..OFFSET_INCOMPATIBLE + 8].copy_from_slice(&bits.to_be_bytes());
}

fn parse_cluster_bits(sector: &[u8]) -> Result<u32, HeaderError> {
    let bits = u32_at(sector, 20);
    if (9..=21).contains(&bits) {
        return Ok(bits);
    }
    Err(HeaderError::Field {
        field: "log2 of the cluster size",
        value: bits.into(),
        expected: "from 9 to 21".to_owned(),
    })
}

fn parse_backing_file(area: &[u8], cluster_len: u64) -> Result<Option<String>, HeaderError> {
    let (offset, len) = (u64_at(area, 8), u32_at(area, 16));
    // Checked without a name too, because the header extensions end at this offset.
    if offset > cluster_len {
        return Err(HeaderError::Field {
            field: "the offset of the backing file's name",
            value: offset,
            expected: format!("0 (no backing file) or within the first cluster, of {cluster_len} bytes"),
        });
    }
    if offset == 0 || len == 0 {
        return Ok(None);
    }
    let end = offset.saturating_add(len.into());
    if len > BACKING_NAME_BYTES_MAX || end > cluster_len.min(area.len() as u64) {
        return Err(HeaderError::Field {
            field: "the length of the backing file's name",
            value: len.into(),
            expected: format!("at most {BACKING_NAME_BYTES_MAX}, and the name must lie within the first cluster"),
        });
    }
    decode_text(&area[offset as usize..end as usize], "backing file's name")
}

/// Decodes a name in a header. A zero byte ends it, as in QEMU. An empty name counts as none.
fn decode_text(bytes: &[u8], what: &'static str) -> Result<Option<String>, HeaderError> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let text = std::str::from_utf8(&bytes[..end]).map_err(|_| HeaderError::Text(what))?;
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

/// Header extensions, by type.
struct Extensions<'a>(Vec<(u32, &'a [u8])>);

impl<'a> Extensions<'a> {
    fn parse(area: &'a [u8], from: usize) -> Result<Self, HeaderError> {
        let mut found = Vec::new();
        // The backing file's name begins at the end of the extensions.
        let name_at = u64_at(area, 8);
        let end = match name_at {
            0 => area.len(),
            _ => area.len().min(usize::try_from(name_at).unwrap_or(usize::MAX)),
        };
        let mut at = from;
        while at + 8 <= end {
            let (kind, len) = (u32_at(area, at), u32_at(area, at + 4));
            if kind == EXTENSION_END {
                break;
            }
            let body = at + 8;
            if len as usize > end - body {
                return Err(HeaderError::Extension { kind, offset: at as u64, len });
            }
            found.push((kind, &area[body..body + len as usize]));
            at = body + (len as usize).next_multiple_of(8);
        }
        if found.iter().any(|(kind, _)| *kind == EXTENSION_ENCRYPTION) {
            return Err(HeaderError::Encrypted("LUKS"));
        }
        Ok(Self(found))
    }

    fn find(&self, kind: u32) -> Option<&'a [u8]> {
        self.0.iter().find(|(found, _)| *found == kind).map(|(_, body)| *body)
    }

    fn text(&self, kind: u32, what: &'static str) -> Result<Option<String>, HeaderError> {
        decode_text(self.find(kind).unwrap_or_default(), what)
    }

    fn bitmaps(&self) -> Option<BitmapDirectory> {
        let body = self.find(EXTENSION_BITMAPS)?;
        (body.len() >= 24).then(|| BitmapDirectory {
            count: u32_at(body, 0),
            directory_len: u64_at(body, 8),
            directory_offset: u64_at(body, 16),
        })
    }

    /// Returns the names of the incompatible features `bits` in the image's feature name table.
    fn feature_names(&self, bits: u64) -> String {
        let table = self.find(EXTENSION_FEATURE_NAMES).unwrap_or_default();
        let name_of = |bit: u32| {
            let row = table.chunks_exact(48).find(|row| row[0] == 0 && u32::from(row[1]) == bit);
            match row {
                Some(row) => {
                    let name: Vec<u8> = row[2..].iter().copied().take_while(|byte| *byte != 0).collect();
                    format!("bit {bit} ({})", String::from_utf8_lossy(&name).escape_debug())
                }
                None => format!("bit {bit}"),
            }
        };
        let names: Vec<String> = (0..64).filter(|bit| bits >> bit & 1 != 0).map(name_of).collect();
        names.join(", ")
    }
}
