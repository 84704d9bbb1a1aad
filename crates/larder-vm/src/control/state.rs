//! What the control socket tells; the fields of its JSON are named as these are. Sizes are in bytes. Numbers of what has
//! been done count from the start of the server.

use larder_block::Geometry;
use larder_prefetch::{PrefetchOptions, Statistics};
use serde::{Deserialize, Serialize};

use crate::image::{Format, ImageAddress};

/// The answer to `GET /v1/disks`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disks {
    /// All that the process serves.
    pub disks: Vec<DiskState>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskState {
    /// The image, as the server was told; what is no text in a path is replaced.
    pub image: String,
    /// What its bytes mean.
    pub format: Format,
    /// The disk's size now.
    pub size: u64,
    /// The sector size that a guest sees.
    pub block_size: u32,
    /// Whether changes are refused.
    pub read_only: bool,
    /// What read-ahead has done; `None` if nothing is read ahead.
    pub prefetch: Option<PrefetchState>,
}

impl DiskState {
    pub(crate) fn new(
        image: &ImageAddress,
        format: Format,
        geometry: Geometry,
        block_size: u32,
        prefetch: Option<PrefetchState>,
    ) -> Self {
        Self {
            image: image.to_string(),
            format,
            size: geometry.size.get(),
            block_size,
            read_only: geometry.read_only,
            prefetch,
        }
    }
}

/// What read-ahead has done, and holds; see [`Statistics`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefetchState {
    /// Bytes of memory taken, tables included.
    pub memory: u64,
    /// Bytes of memory that it may take.
    pub memory_limit: u64,
    /// Bytes fetched.
    pub fetched: u64,
    /// Bytes of them that were read, each counted once.
    pub used: u64,
    /// Bytes of them that were dropped before anybody read them.
    pub wasted: u64,
    /// Bytes of them that are in memory, and not read yet.
    pub unread: u64,
    /// Reads whose bytes were all in memory.
    pub hits: u64,
    /// Reads of which only a part was in memory, or on its way.
    pub partial_hits: u64,
    /// Reads that waited for bytes on their way.
    pub waits: u64,
    /// Reads of which nothing was in memory.
    pub misses: u64,
    /// Reads that were too long to be read ahead of.
    pub bypassed: u64,
    /// Fetches that failed.
    pub errors: u64,
    /// The streams that it has found.
    pub streams: StreamCounts,
}

/// Numbers of streams: readers that can be foreseen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamCounts {
    /// Those for which there is something in memory.
    pub now: u64,
    /// Found so far that go forward.
    pub forward: u64,
    /// Found so far that go backward.
    pub backward: u64,
    /// Found so far that go by steps.
    pub strided: u64,
}

impl PrefetchState {
    pub(crate) fn new(options: PrefetchOptions, done: Statistics) -> Self {
        Self {
            memory: done.memory,
            memory_limit: options.memory.get(),
            fetched: done.fetched,
            used: done.used,
            wasted: done.wasted,
            unread: done.unread,
            hits: done.hits,
            partial_hits: done.partial_hits,
            waits: done.waits,
            misses: done.misses,
            bypassed: done.bypassed,
            errors: done.errors,
            streams: StreamCounts {
                now: done.streams,
                forward: done.streams_forward,
                backward: done.streams_backward,
                strided: done.streams_strided,
            },
        }
    }
}
