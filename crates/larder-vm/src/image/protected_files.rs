//! Protection of Larder's own files against being served as a disk. A served disk is written, so two kinds of file
//! are refused: a cache with data that its disk does not have yet, and a swap cache with pages of a running VM.
//!
//! Only this host's own records count: the state file of a cache, or the process whose pages a swap cache has. A
//! guest may itself use Larder, with a cache or swap cache on its whole disk; that disk is served like any other. So
//! is an export through which a cache or swap cache is used, when Larder is its NBD server.

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, ReadBuf};
use larder_cache::read_superblock;

use super::cache_state::StateFile;
use super::{ImageAddress, ImageError};
use crate::memory::swap;

/// Number of bytes read for the check, which is a multiple of every block size.
const HEAD_BYTES: u64 = 4096;

/// Refuses an image, which is about to be served or changed, if it is still needed as it is. `is_probed` means that
/// the image was probed as raw.
///
/// # Errors
/// The image is needed as it is.
pub(super) async fn refuse_protected(
    image: &ImageAddress,
    device: &Rc<dyn BlockDevice>,
    is_probed: bool,
) -> Result<(), ImageError> {
    if device.geometry().size.get() < HEAD_BYTES {
        return Ok(());
    }
    let mut bytes = AlignedBuf::zeroed(HEAD_BYTES as usize);
    // The next read by the caller reports the error.
    let Ok(()) = device.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await else {
        return Ok(());
    };
    if let Some(pid) = swap::live_owner_pid(&mut bytes) {
        return Err(ImageError::IsSwap { image: image.to_string(), pid });
    }
    // An error means that it is no cache, or too damaged to be one.
    let Ok(superblock) = read_superblock(device).await else {
        return Ok(());
    };
    if superblock.may_be_dirty && StateFile::for_cache(&superblock).records_dirty_local_cache() {
        return Err(ImageError::IsCache { image: image.to_string(), disk: superblock.disk.name });
    }
    if is_probed {
        tracing::warn!(
            "{image}: it looks like the disk cache of {}; to serve it as a disk all the same, give --format raw",
            superblock.disk.name
        );
    }
    Ok(())
}
