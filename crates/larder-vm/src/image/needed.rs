//! Files of Larder's own that are given as a disk. What is served is written, so one that somebody still needs is refused: a
//! cache that has data which its disk has not, and a swap cache with pages of a VM that runs.
//!
//! That is said by this host: a cache by its note, a swap cache by the process whose pages it has. A guest may itself use
//! Larder, with a cache or swap cache on its whole disk; that disk is served like any other. So is what a cache or swap
//! cache is used through, if that is an NBD server.

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, ReadBuf};
use larder_cache::read_superblock;

use super::cache_note::Note;
use super::{ImageAddress, ImageError};
use crate::memory::swap;

/// Bytes that tell: what every block size goes with.
const BEGINNING: u64 = 4096;

/// A raw image is about to be served or changed; whether it is only taken for a raw one.
///
/// # Errors
/// It is needed as it is.
pub(super) async fn refuse(
    image: &ImageAddress,
    device: &Rc<dyn BlockDevice>,
    is_guessed: bool,
) -> Result<(), ImageError> {
    if device.geometry().size.get() < BEGINNING {
        return Ok(());
    }
    let mut bytes = AlignedBuf::zeroed(BEGINNING as usize);
    // Whoever reads it next tells what is wrong.
    let Ok(()) = device.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await else {
        return Ok(());
    };
    if let Some(pid) = swap::pages_of(&mut bytes) {
        return Err(ImageError::IsSwap {
            image: image.to_string(),
            pid,
        });
    }
    // An error: it is no cache, or too damaged to be one.
    let Ok(superblock) = read_superblock(device).await else {
        return Ok(());
    };
    if superblock.may_be_dirty && Note::of(&superblock).says_dirty_at_a_path() {
        return Err(ImageError::IsCache {
            image: image.to_string(),
            disk: superblock.disk.name,
        });
    }
    if is_guessed {
        tracing::warn!(
            "{image}: it begins like a disk cache, that of {}; if it is to be served all the same, --format raw says so",
            superblock.disk.name
        );
    }
    Ok(())
}
