//! Options of a simulated device, and the ways in which it stops.

use super::latency::LatencyDistribution;

/// The options of a simulated device.
#[derive(Clone, Debug)]
pub struct SimulatedOptions {
    /// The device's name, for messages.
    pub name: String,
    /// The seed of all random choices.
    pub seed: u64,
    /// The block size, as in [`block_size`](crate::Geometry::block_size); a multiple of the medium's sector size.
    pub block_size: u32,
    /// The alignment of memory, as in [`memory_alignment`](crate::Geometry::memory_alignment). Like direct I/O, the
    /// device refuses unaligned memory.
    pub memory_alignment: u32,
    /// Changes are refused, as in [`read_only`](crate::Geometry::read_only).
    pub read_only: bool,
    /// Writing zeroes is fast, as in [`fast_zeroes`](crate::Geometry::fast_zeroes).
    pub fast_zeroes: bool,
    /// The latency of requests.
    pub latency: LatencyDistribution,
    /// The number of requests in a thousand that fail with an I/O error, in addition to the injected faults.
    pub failures_per_mille: u32,
}

impl Default for SimulatedOptions {
    /// Returns options with blocks of 512 bytes, varied latencies, and no failures.
    fn default() -> Self {
        Self {
            name: "simulated".to_owned(),
            seed: 0,
            block_size: 512,
            memory_alignment: 1,
            read_only: false,
            fast_zeroes: true,
            latency: LatencyDistribution::VARIED,
            failures_per_mille: 0,
        }
    }
}

/// The way in which a device stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceStop {
    /// The host loses power: each unflushed sector is kept or lost.
    PowerLoss,
    /// The process is killed: written data stays, but is not durable yet.
    Kill,
    /// The process is killed and the host's memory is lost, like that of a removed container.
    KillAndClearMemory,
}
