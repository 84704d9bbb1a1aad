//! Erasure of pages on a disk that are no longer needed.
//!
//! It happens when the process or its management has ended. The data of a killed pager is erased once its process has
//! ended, before the disk is used again, even if that use is then refused. Only disks with a valid header of Larder's
//! are erased, and only while this process has claimed or locked them.
//!
//! - A file is truncated, so that its file system frees all of its blocks. A file that Larder created is then
//!   removed.
//! - Encrypted data on a device or an NBD export is discarded, if the device supports that. Nothing else is needed:
//!   the key ended with the process that owned the memory.
//! - Unencrypted data is zeroed as far as it was written, by unmapping where the device supports that (`PUNCH_HOLE`
//!   of fallocate(2), `NBD_CMD_WRITE_ZEROES`), otherwise by writing.
//!
//! The header is cleared last. A pager that is killed before that leaves a disk that its successor erases again.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use larder_block::backend::file::LockedFile;
use larder_block::{
    AlignedBuf, BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, IoResult, WriteBuf, WriteFlags, ZeroFlags,
};
use larder_memory::segment_log::{SEGMENT_BYTES, SegmentIndex};
use larder_memory::store::{BeforeWrite, PendingWrites};
use tokio::sync::Mutex;

use super::header::{HEADER_AND_MARK_BYTES, write_mark};

/// Step by which the mark moves, in segments, so that it is seldom written.
const MARK_STEP_SEGMENTS: u32 = 256;

/// Length from which the zeroing is logged.
const LOGGED_ZEROING_BYTES_MIN: ByteLen = ByteLen::new(1 << 30);

/// A log whose pages are no longer needed.
#[derive(Clone, Copy, Debug)]
pub(super) enum ErasableLog {
    /// Encrypted, with this many segments.
    Encrypted(u32),
    /// Not encrypted; this many segments may have been written.
    Plain(u32),
}

/// Erases a log on a device, but not its header.
pub(super) async fn erase(device: &Rc<dyn BlockDevice>, log: ErasableLog) -> IoResult {
    let range = |segments: u32| ByteRange::new(SEGMENT_BYTES as u64, u64::from(segments) * SEGMENT_BYTES as u64);
    match log {
        ErasableLog::Encrypted(0) | ErasableLog::Plain(0) => Ok(()),
        ErasableLog::Encrypted(segments) => device.discard(range(segments)).await,
        ErasableLog::Plain(segments) => {
            let range = range(segments);
            if range.len >= LOGGED_ZEROING_BYTES_MIN {
                tracing::info!("swap cache {}: zeroing its first {}", device.name(), range.len);
            }
            let flags = ZeroFlags { unmap: true, ..ZeroFlags::default() };
            device.write_zeroes(range, flags).await?;
            // The flush precedes clearing or rewriting the header.
            device.flush().await
        }
    }
}

/// High-water mark of writes to the log of an unencrypted disk.
pub(super) struct HighWaterMark {
    device: Rc<dyn BlockDevice>,
    uuid: [u8; 16],
    segments: u32,
    /// Number of segments before the mark on the disk.
    durable: Mutex<u32>,
    /// Number of segments that may have been written.
    written: Cell<u32>,
}

impl HighWaterMark {
    /// Returns the mark of a log of `segments`, which is at `written` on the disk.
    pub(super) fn new(device: &Rc<dyn BlockDevice>, uuid: [u8; 16], segments: u32, written: u32) -> Rc<Self> {
        Rc::new(Self {
            device: Rc::clone(device),
            uuid,
            segments,
            durable: Mutex::new(written),
            written: Cell::new(written),
        })
    }

    async fn advance(&self, count: u32) -> IoResult {
        let mut durable = self.durable.lock().await;
        if count > *durable {
            let next = count.next_multiple_of(MARK_STEP_SEGMENTS).min(self.segments);
            write_mark(&self.device, &self.uuid, next).await?;
            *durable = next;
        }
        self.written.set(self.written.get().max(count));
        Ok(())
    }
}

impl BeforeWrite for HighWaterMark {
    fn before_write(&self, segment: SegmentIndex) -> BoxFuture<'_, IoResult> {
        let count = segment.get() + 1;
        match count <= self.written.get() {
            true => Box::pin(std::future::ready(Ok(()))),
            false => Box::pin(self.advance(count)),
        }
    }
}

/// A disk whose pages are not needed once all writes to it have completed.
pub(in crate::memory) struct SwapRelease {
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) writes: PendingWrites,
    pub(super) kind: SwapKind,
}

/// Kind of disk, which determines how it is erased.
pub(super) enum SwapKind {
    /// A file that Larder created.
    CreatedFile(LockedFile),
    /// A file that existed before: it keeps its size.
    ExistingFile(LockedFile),
    /// A device or an export with an encrypted log of this many segments.
    Encrypted(u32),
    /// A device or an export with an unencrypted log.
    Plain(Rc<HighWaterMark>),
}

impl SwapRelease {
    /// Erases the disk.
    pub(in crate::memory) async fn release(self) {
        self.writes.drained().await;
        let released = match self.kind {
            SwapKind::CreatedFile(file) => {
                file.clear().and_then(|()| remove_if_unreplaced(&file)).map_err(|error| error.to_string())
            }
            SwapKind::ExistingFile(file) => file.clear().map_err(|error| error.to_string()),
            SwapKind::Encrypted(segments) => erase_with_header(&self.device, ErasableLog::Encrypted(segments)).await,
            SwapKind::Plain(mark) => erase_with_header(&self.device, ErasableLog::Plain(mark.written.get())).await,
        };
        if let Err(error) = released {
            let name = self.device.name();
            tracing::warn!("swap cache {name}: its data is not needed any more, and cannot be removed: {error}");
        }
    }
}

/// Erases the log, and then the header.
async fn erase_with_header(device: &Rc<dyn BlockDevice>, log: ErasableLog) -> Result<(), String> {
    let erased = erase(device, log).await;
    match (erased, log) {
        (Err(error), ErasableLog::Plain(_)) => return Err(format!("the pages on it are still readable: {error}")),
        (Err(error), ErasableLog::Encrypted(_)) => {
            tracing::debug!("swap cache {}: its encrypted pages are not discarded: {error}", device.name());
        }
        (Ok(()), _) => {}
    }
    let zeros = AlignedBuf::zeroed(HEADER_AND_MARK_BYTES);
    let written = device.write(ByteOffset::ZERO, WriteBuf::new(&zeros), WriteFlags::FUA);
    written.await.map_err(|error| error.to_string())
}

/// Removes the file, unless another file has its path by now.
fn remove_if_unreplaced(file: &LockedFile) -> io::Result<()> {
    match file.path_change()? {
        None => std::fs::remove_file(file.path()),
        Some(_) => {
            Err(io::Error::other("it was moved or replaced while it was in use; it is empty, and may be removed"))
        }
    }
}
