//! Erasing the pages on a disk that nothing needs any more.
//!
//! It is done when the process or its management has ended, and with what a killed pager has left, once its process has
//! ended, too: before the disk is used anew, also if it is refused then. Only disks whose header says that they are
//! Larder's are erased, and they are claimed or locked by this process.
//!
//! - A file is truncated, so that its file system frees all of its blocks. One that Larder made is removed after that.
//! - What is encrypted on a device or an NBD export is discarded, where the device has discards. Nothing else is needed: its
//!   key has ended with the memory that it was about.
//! - What is not encrypted is made zeros as far as it was written, by unmapping where the device can do that (`PUNCH_HOLE`
//!   of fallocate(2), `NBD_CMD_WRITE_ZEROES`), else by writing.
//!
//! The header is cleared last. A pager that is killed before leaves a disk that its successor erases again.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use larder_block::backend::file::HeldFile;
use larder_block::{
    AlignedBuf, BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, IoResult, WriteBuf, WriteFlags, ZeroFlags,
};
use larder_memory::log::{SEGMENT, SegmentIndex};
use larder_memory::store::{BeforeWrite, PendingWrites};
use tokio::sync::Mutex;

use super::header::{BOTH, write_mark};

/// The mark moves by so many segments, so that it is seldom written.
const MARK_STEP: u32 = 256;

/// From so much on the log reports that zeros are written.
const LONG: ByteLen = ByteLen::new(1 << 30);

/// A log whose pages nothing needs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unneeded {
    /// Encrypted, with as many segments.
    Encrypted(u32),
    /// Not encrypted. As many segments may have been written.
    Plain(u32),
}

/// Erases a log on a device. Its header stays.
pub(super) async fn erase(device: &Rc<dyn BlockDevice>, log: Unneeded) -> IoResult {
    let range = |segments: u32| ByteRange::new(SEGMENT as u64, u64::from(segments) * SEGMENT as u64);
    match log {
        Unneeded::Encrypted(0) | Unneeded::Plain(0) => Ok(()),
        Unneeded::Encrypted(segments) => device.discard(range(segments)).await,
        Unneeded::Plain(segments) => {
            let range = range(segments);
            if range.len >= LONG {
                tracing::info!("swap cache {}: its first {} are made zeros", device.name(), range.len);
            }
            let how = ZeroFlags {
                unmap: true,
                ..ZeroFlags::default()
            };
            device.write_zeroes(range, how).await?;
            // Before the header is cleared, or written anew.
            device.flush().await
        }
    }
}

/// How far the log of a disk that is not encrypted has been written.
pub(super) struct Mark {
    device: Rc<dyn BlockDevice>,
    uuid: [u8; 16],
    segments: u32,
    /// The number of segments before the mark on the disk.
    durable: Mutex<u32>,
    /// The number of segments that may have been written.
    written: Cell<u32>,
}

impl Mark {
    /// The mark of a log of `segments`, which is at `written` on the disk.
    pub(super) fn new(device: &Rc<dyn BlockDevice>, uuid: [u8; 16], segments: u32, written: u32) -> Rc<Self> {
        Rc::new(Self {
            device: Rc::clone(device),
            uuid,
            segments,
            durable: Mutex::new(written),
            written: Cell::new(written),
        })
    }

    async fn raise(&self, count: u32) -> IoResult {
        let mut durable = self.durable.lock().await;
        if count > *durable {
            let next = count.next_multiple_of(MARK_STEP).min(self.segments);
            write_mark(&self.device, &self.uuid, next).await?;
            *durable = next;
        }
        self.written.set(self.written.get().max(count));
        Ok(())
    }
}

impl BeforeWrite for Mark {
    fn before_write(&self, segment: SegmentIndex) -> BoxFuture<'_, IoResult> {
        let count = segment.get() + 1;
        match count <= self.written.get() {
            true => Box::pin(std::future::ready(Ok(()))),
            false => Box::pin(self.raise(count)),
        }
    }
}

/// A disk whose pages are not needed any more, once all writes to it have ended.
pub(in crate::memory) struct SwapRelease {
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) writes: PendingWrites,
    pub(super) kind: Kind,
}

/// The kinds of disks, by how they are erased.
pub(super) enum Kind {
    /// A file that Larder made.
    Made(HeldFile),
    /// A file that was there before: it keeps its size.
    Given(HeldFile),
    /// A device or an export with an encrypted log of as many segments.
    Encrypted(u32),
    /// A device or an export with a log that is not encrypted.
    Plain(Rc<Mark>),
}

impl SwapRelease {
    /// Erases all that is on the disk.
    pub(in crate::memory) async fn release(self) {
        self.writes.ended().await;
        let released = match self.kind {
            Kind::Made(file) => file
                .clear()
                .and_then(|()| remove(&file))
                .map_err(|error| error.to_string()),
            Kind::Given(file) => file.clear().map_err(|error| error.to_string()),
            Kind::Encrypted(segments) => clear(&self.device, Unneeded::Encrypted(segments)).await,
            Kind::Plain(mark) => clear(&self.device, Unneeded::Plain(mark.written.get())).await,
        };
        if let Err(error) = released {
            let name = self.device.name();
            tracing::warn!("swap cache {name}: what is left of it, which nothing needs, is not removed: {error}");
        }
    }
}

/// Erases the log, and then the header.
async fn clear(device: &Rc<dyn BlockDevice>, log: Unneeded) -> Result<(), String> {
    let erased = erase(device, log).await;
    match (erased, log) {
        (Err(error), Unneeded::Plain(_)) => return Err(format!("pages can be read on it: {error}")),
        (Err(error), Unneeded::Encrypted(_)) => {
            tracing::debug!(
                "swap cache {}: its encrypted pages are not discarded: {error}",
                device.name()
            );
        }
        (Ok(()), _) => {}
    }
    let zeros = AlignedBuf::zeroed(BOTH);
    let written = device.write(ByteOffset::ZERO, WriteBuf::new(&zeros), WriteFlags::FUA);
    written.await.map_err(|error| error.to_string())
}

/// Removes the file, unless another one has taken its path by now.
fn remove(file: &HeldFile) -> io::Result<()> {
    match file.displaced()? {
        None => std::fs::remove_file(file.path()),
        Some(_) => Err(io::Error::other(
            "it was moved or replaced while it was in use; it is empty, and may be removed",
        )),
    }
}
