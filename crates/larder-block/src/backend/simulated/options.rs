//! How a simulated device is to be, and how it ends.

use super::latency::Latency;

/// What a simulated device is like.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its name, for messages.
    pub name: String,
    /// Where all its choices come from.
    pub seed: u64,
    /// As in [`block_size`](crate::Geometry::block_size); a multiple of the medium's sector.
    pub block_size: u32,
    /// As in [`memory_alignment`](crate::Geometry::memory_alignment). Like direct I/O, the device refuses other memory.
    pub memory_alignment: u32,
    /// As in [`read_only`](crate::Geometry::read_only).
    pub read_only: bool,
    /// As in [`fast_zeroes`](crate::Geometry::fast_zeroes).
    pub fast_zeroes: bool,
    /// How long requests take.
    pub latency: Latency,
    /// How many requests in a thousand fail with an I/O error, beside the faults that are set.
    pub failures_per_mille: u32,
}

impl Default for Options {
    /// Blocks of 512 bytes, varied latencies, no failures.
    fn default() -> Self {
        Self {
            name: "simulated".to_owned(),
            seed: 0,
            block_size: 512,
            memory_alignment: 1,
            read_only: false,
            fast_zeroes: true,
            latency: Latency::VARIED,
            failures_per_mille: 0,
        }
    }
}

/// How a device comes to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The host loses power: of what was not flushed, each sector is kept or lost.
    PowerLoss,
    /// The process is killed: what was written stays, but is no more durable than it was.
    Kill,
    /// The same, and what was in the host's memory is lost, as that of a container that is gone.
    KillAndForget,
}
