//! Discards of a whole file without a server: the file system's own time, and the delay of concurrent requests.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::Context;
use larder_block::nbd::Command;
use larder_block::{AlignedBuf, ByteLen};
use rustix::fs::{FallocateFlags, fallocate};

use super::{BLOCK, NEW_BYTE, OLD, blocks};

/// Piece length of a long discard: Larder's longest pieces, without the shorter ones that it begins with.
const PIECE: ByteLen = ByteLen::mib(1 << 10);

/// Creates a sparse file of `size` bytes with blocks of old data. The file stays open: ext4 releases preallocated
/// space when the last writer closes the file; otherwise the first hole releases it.
pub(super) fn make(path: &Path, size: u64, count: u64) -> anyhow::Result<Disk> {
    File::create_new(path)?.set_len(size)?;
    let mut disk = Disk::open(path)?;
    disk.buffer.fill(OLD);
    for at in blocks(size, count) {
        disk.file.write_all_at(&disk.buffer, at)?;
    }
    disk.file.sync_data().context("flushing the file")?;
    Ok(disk)
}

/// The file, opened for direct I/O where possible.
pub(super) struct Disk {
    file: File,
    buffer: AlignedBuf,
}

impl Disk {
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let mut options = File::options();
        options.read(true).write(true);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(path);
        Ok(Self {
            // Some file systems have no direct I/O.
            file: direct.or_else(|_| options.open(path))?,
            buffer: AlignedBuf::zeroed(BLOCK as usize),
        })
    }

    /// Reads the block at `at`, or writes new data to it.
    pub(super) fn request(&mut self, command: Command, at: u64) -> anyhow::Result<()> {
        match command {
            Command::Write => {
                self.buffer.fill(NEW_BYTE);
                self.file.write_all_at(&self.buffer, at)?;
            }
            _ => self.file.read_exact_at(&mut self.buffer, at)?,
        }
        Ok(())
    }

    /// Discards the whole file.
    pub(super) fn clear(&self, size: u64) -> anyhow::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for at in (0..size).step_by(PIECE.get() as usize) {
            fallocate(&self.file, how, at, PIECE.get().min(size - at))?;
        }
        Ok(())
    }
}
