//! Detection of foreign data on a file, device or export that is about to become a cache, a swap cache or a slow
//! store.
//!
//! Larder overwrites all of it, so it is refused unless both checks succeed, before the first write:
//!
//! 1. Its first MiB is zeros.
//! 2. `blkid` of util-linux finds no label anywhere on it. Members of md 1.0, ZFS pools, DRBD and some RAID
//!    controllers have their labels at the end, and the backup of a partition table is there as well.
//!
//! A block device is claimed before that (`FileOptions::exclusive`), so no other program begins to use it meanwhile.
//! If a check cannot be performed, the device is refused. A file that was just created, or has only holes, needs no
//! check. A file that becomes a swap cache or a slow store has to be zeros as a whole ([`check_zeros`]).

use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;

use larder_block::opener::{Access, PathSource, opener};
use larder_block::{AlignedBuf, BlockDevice, ByteOffset, IoError, Loop, ReadBuf};
use rustix::fs::{MemfdFlags, SeekFrom};
use rustix::io::Errno;

use crate::image::ImageAddress;

/// Number of bytes at the beginning that must be zeros.
pub(crate) const HEAD_BYTES: u64 = 1 << 20;

/// Number of bytes of each end of an export that `blkid` examines: no label that it knows is farther inside.
const END_BYTES: u64 = 4 << 20;

/// Reason why a device must not be written to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForeignData {
    /// Data of an unknown format.
    #[error("its first MiB is not empty")]
    Data,
    /// Data at this offset of a file.
    #[error("it has data at byte {0}")]
    DataAt(u64),
    /// A label that `blkid` recognises.
    #[error("{0} is on it")]
    Label(String),
    /// The check failed, so there may be data.
    #[error("whether it contains foreign data cannot be determined: {0}")]
    Unknown(String),
}

impl ForeignData {
    pub(crate) fn unknown(error: impl std::fmt::Display) -> Self {
        Self::Unknown(error.to_string())
    }
}

/// Checks an open device.
///
/// # Errors
/// The device must not be overwritten.
pub(crate) async fn check(on: &Loop, device: &Rc<dyn BlockDevice>, address: &ImageAddress) -> Result<(), ForeignData> {
    if !begins_with_zeros(device).await.map_err(ForeignData::unknown)? {
        return Err(ForeignData::Data);
    }
    let file = match address {
        ImageAddress::Path(path) => {
            let opened = opener().open(path, Access::Read, PathSource::User);
            opened.map_err(ForeignData::unknown)?
        }
        ImageAddress::Nbd(_) => copy_ends(device).await?,
    };
    let probed = on.run_blocking(move || probe(&file)).await;
    probed.map_err(ForeignData::unknown)?
}

/// Returns whether the first MiB, or all of a smaller device, is zeros.
///
/// # Errors
/// The device cannot be read.
pub(crate) async fn begins_with_zeros(device: &Rc<dyn BlockDevice>) -> Result<bool, IoError> {
    let len = device.geometry().size.get().min(HEAD_BYTES);
    Ok(is_zero(&read(device, 0, len).await?))
}

/// Returns how a user can clear the file or device, so that it can be used.
pub(crate) fn clear_instructions(is_file: bool) -> &'static str {
    match is_file {
        true => "remove it",
        false => "wipefs -a, then make its beginning zero: blkdiscard -z, or dd if=/dev/zero bs=1M count=1",
    }
}

/// Checks a file or block device that is not open as a disk.
///
/// # Errors
/// The file must not be overwritten.
pub(crate) fn check_file(file: File) -> Result<(), ForeignData> {
    let mut head = vec![0; HEAD_BYTES as usize];
    let mut filled = 0;
    while filled < head.len() {
        match file.read_at(&mut head[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ForeignData::unknown(error)),
        }
    }
    match is_zero(&head) {
        true => probe(&file),
        false => Err(ForeignData::Data),
    }
}

/// Checks that all of a file is zeros. Holes are not read.
///
/// # Errors
/// The file must not be overwritten.
pub(crate) fn check_zeros(file: &File) -> Result<(), ForeignData> {
    let mut bytes = vec![0; HEAD_BYTES as usize];
    let mut offset = 0;
    loop {
        offset = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(()),
            // The file system does not report holes.
            Err(Errno::INVAL) => offset,
            Err(error) => return Err(ForeignData::unknown(error)),
        };
        let count = match file.read_at(&mut bytes, offset) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(ForeignData::unknown(error)),
        };
        if let Some(first) = bytes[..count].iter().position(|byte| *byte != 0) {
            return Err(ForeignData::DataAt(offset + first as u64));
        }
        offset += count as u64;
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

async fn read(device: &Rc<dyn BlockDevice>, offset: u64, len: u64) -> Result<AlignedBuf, IoError> {
    // The length is at most a few MiB, so it fits.
    let mut bytes = AlignedBuf::zeroed(len as usize);
    device.read(ByteOffset::new(offset), ReadBuf::new(&mut bytes)).await?;
    Ok(bytes)
}

/// Returns a sparse file in memory with the ends of an export, as far as labels reach, at their offsets.
async fn copy_ends(device: &Rc<dyn BlockDevice>) -> Result<File, ForeignData> {
    let size = device.geometry().size.get();
    let file = rustix::fs::memfd_create("larder-ends", MemfdFlags::CLOEXEC);
    let mut file = File::from(file.map_err(ForeignData::unknown)?);
    file.set_len(size).map_err(ForeignData::unknown)?;
    // This offset is a multiple of every block size.
    let end = size.saturating_sub(END_BYTES) / END_BYTES * END_BYTES;
    for (offset, len) in [(0, size.min(END_BYTES)), (end, size - end)] {
        let bytes = read(device, offset, len).await.map_err(ForeignData::unknown)?;
        let written = file.seek(io::SeekFrom::Start(offset)).and_then(|_| file.write_all(&bytes));
        written.map_err(ForeignData::unknown)?;
    }
    Ok(file)
}

/// Runs `blkid` on a file.
fn probe(file: &File) -> Result<(), ForeignData> {
    let answer = opener().blkid(file).map_err(ForeignData::unknown)?;
    match answer.status {
        Some(0) => labels(&answer.stdout).map_or(Ok(()), |label| Err(ForeignData::Label(label))),
        Some(2) if answer.stderr.is_empty() => Ok(()),
        Some(8) => Err(ForeignData::Label("data that blkid recognises as several formats at once".to_owned())),
        status => Err(ForeignData::unknown(format_args!(
            "blkid of util-linux is needed, but it exited with {status:?}: {}",
            answer.stderr.trim_end()
        ))),
    }
}

/// Returns the labels in the output of `blkid`. For an empty partition it reports only the partition's own entry.
fn labels(output: &str) -> Option<String> {
    let value = |key: &str| {
        let mut lines = output.lines().filter_map(|line| line.split_once('='));
        lines.find(|(name, _)| *name == key).map(|(_, value)| value)
    };
    let label_suffix = value("LABEL").map_or_else(String::new, |label| format!(" \"{label}\""));
    match (value("TYPE"), value("PTTYPE")) {
        (Some(kind), _) => Some(format!("{kind}{label_suffix}")),
        (None, Some(kind)) => Some(format!("a partition table ({kind})")),
        (None, None) => value("USAGE").map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partition_without_label_is_free() {
        let partition = "DEVNAME=/proc/self/fd/0\nPART_ENTRY_SCHEME=gpt\nPART_ENTRY_TYPE=0fc63daf\n";
        assert_eq!(labels(partition), None);
        let member = format!("{partition}LABEL=tank\nTYPE=zfs_member\nUSAGE=filesystem\n");
        assert_eq!(labels(&member).as_deref(), Some("zfs_member \"tank\""));
        assert_eq!(labels("PTTYPE=gpt\n").as_deref(), Some("a partition table (gpt)"));
    }
}
