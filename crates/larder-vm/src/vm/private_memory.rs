//! Limit of the private memory of a VM's server ([`crate::data_limit`]).
//!
//! The figures are bounds that no working server reaches, not estimates: a mapping counts in full from its creation,
//! and a limit that is too low costs more than one that is too high.

use larder_prefetch::PrefetchOptions;
use larder_qcow2::check::CHECK_MEMORY_DEFAULT;

use super::config::{VmConfig, VmDisk};
use crate::image::{ChainPolicy, Format};

/// Bytes for the control socket with its clients and threads, the log, the program itself, and heap fragmentation.
const SERVER_BYTES: u64 = 1 << 30;

/// Bytes for a disk's thread with its stack, the requests in flight in all queues of a front-end, copies for
/// alignment, its last events, and data that is read from a file while it is opened, such as its list of bitmaps.
const DISK_BYTES: u64 = 640 << 20;

/// Bytes for NBD clients: their requests in flight, buffers and connections.
const NBD_BYTES: u64 = 512 << 20;

/// Bytes for each file of a disk: requests in flight, decompressor, free-space map, and writes that an NBD server has
/// not flushed.
const FILE_BYTES: u64 = 64 << 20;

/// Returns the limit of a server for `config`, in bytes, without the caches: these add their shares when they are
/// opened.
pub(super) fn limit_bytes(config: &VmConfig) -> u64 {
    config.disks.iter().map(disk_bytes).fold(SERVER_BYTES, u64::saturating_add)
}

fn disk_bytes(disk: &VmDisk) -> u64 {
    let spec = &disk.spec;
    let mut files = 1;
    let mut is_qcow2 = spec.format != Some(Format::Raw);
    if let ChainPolicy::Pinned { chain, .. } = &spec.chain {
        files += u64::from(chain.data_file.is_some());
        for image in &chain.backing {
            files += 1 + u64::from(image.data_file.is_some());
            is_qcow2 |= image.format == Format::Qcow2;
        }
    }
    // The limit covers every value that this setting can get while the disk is in use.
    let prefetch = PrefetchOptions::MEMORY_MAX.get();
    let mut bytes = DISK_BYTES + prefetch + files * FILE_BYTES;
    if disk.nbd.is_some() {
        bytes += NBD_BYTES;
    }
    if is_qcow2 {
        // Tables grow into new memory before the old memory is freed. A dirty image is checked when it is opened, one
        // at a time.
        let tables = spec.image_options().unwrap_or_default().metadata_memory.get();
        bytes = bytes.saturating_add(tables.saturating_mul(2));
        bytes = bytes.saturating_add(tables.max(CHECK_MEMORY_DEFAULT.get()));
    }
    bytes
}
