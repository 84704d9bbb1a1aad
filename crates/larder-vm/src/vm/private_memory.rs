//! The private memory that a VM's server may use ([`crate::data_limit`]).
//!
//! These are bounds that no server at work reaches, not estimates: mappings count whole from the moment they are made, and a
//! limit that is too low costs more than one that is too high.

use larder_prefetch::PrefetchOptions;
use larder_qcow2::check::CHECK_MEMORY_DEFAULT;

use super::config::{VmConfig, VmDisk};
use crate::image::{ChainPolicy, Format};

/// The control socket with its clients and threads, the log, the program itself, and the heap's own losses.
const SERVER_BYTES: u64 = 1 << 30;

/// A disk's thread with its stack, the requests under way in all queues of a front-end, copies for alignment, and what is read
/// of a file while it is opened, such as its list of bitmaps.
const DISK_BYTES: u64 = 640 << 20;

/// What clients of NBD have under way and what is kept for them, and their connections.
const NBD_BYTES: u64 = 512 << 20;

/// A file of a disk: requests on their way through it, its decompressor, what is known of its free space, and what is kept of
/// writes that an NBD server has not flushed.
const FILE_BYTES: u64 = 64 << 20;

/// The limit of a server that serves `config`, in bytes, without its caches: those take their shares when they are opened.
pub(super) fn of(config: &VmConfig) -> u64 {
    config.disks.iter().map(of_disk).fold(SERVER_BYTES, u64::saturating_add)
}

fn of_disk(disk: &VmDisk) -> u64 {
    let wish = &disk.wish;
    let mut files = 1;
    let mut is_qcow2 = wish.format != Some(Format::Raw);
    if let ChainPolicy::Pinned { chain, .. } = &wish.chain {
        files += u64::from(chain.data_file.is_some());
        for image in &chain.backing {
            files += 1 + u64::from(image.data_file.is_some());
            is_qcow2 |= image.format == Format::Qcow2;
        }
    }
    // Any setting of it that can be made while the disk is used.
    let prefetch = PrefetchOptions::MEMORY_MAX.get();
    let mut bytes = DISK_BYTES + prefetch + files * FILE_BYTES;
    if disk.nbd.is_some() {
        bytes += NBD_BYTES;
    }
    if is_qcow2 {
        // Tables grow into new memory before the old is freed. A dirty image is checked when it is opened, one at a time.
        let tables = wish.image_options().unwrap_or_default().metadata_memory.get();
        bytes = bytes.saturating_add(tables.saturating_mul(2));
        bytes = bytes.saturating_add(tables.max(CHECK_MEMORY_DEFAULT.get()));
    }
    bytes
}
