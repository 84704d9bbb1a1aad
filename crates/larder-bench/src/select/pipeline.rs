//! A timing model of a sender's lanes and of the link.

use larder_codec::batch::BATCH_BYTES;

/// Time of a lane for QEMU's bytes in addition to encoding: reading, scanning and checksumming. Measured as CPU time
/// of `larder migrate` without that of encoding.
const READ_NS_PER_BYTE: f64 = 0.25;
/// Time of copying to the kernel.
const WRITE_NS_PER_BYTE: f64 = 0.15;
/// Bytes that a lane's connection accepts before it blocks the writer.
const SOCKET_BYTES: f64 = 1e6;

/// Returns a lane's time for a batch with this number of sent bytes, without its encoding.
pub(super) fn besides_ns(bytes: usize) -> u64 {
    (BATCH_BYTES as f64 * READ_NS_PER_BYTE + bytes as f64 * WRITE_NS_PER_BYTE) as u64
}

/// Lanes that each encode a batch and write it, one batch after the other, each to a connection of its own over the
/// same link.
pub(super) struct Pipeline {
    link_ns_per_byte: f64,
    /// QEMU's time to supply a batch.
    supply_ns: f64,
    /// Time at which QEMU has supplied the next batch.
    supplied_at: f64,
    socket_bytes: f64,
    /// Time at which each lane can begin its next batch, in nanoseconds.
    lanes: Vec<f64>,
    /// Time at which all written bytes have passed the link.
    sent_at: f64,
}

impl Pipeline {
    /// Creates a pipeline over a link of `link` Mbit/s, with a QEMU that supplies `supply` × 10^6 bytes per second.
    pub(super) fn new(lanes: usize, link: u64, supply: u64) -> Self {
        Self {
            link_ns_per_byte: 8000.0 / link as f64,
            supply_ns: BATCH_BYTES as f64 * 1000.0 / supply as f64,
            supplied_at: 0.0,
            socket_bytes: SOCKET_BYTES * lanes as f64,
            lanes: vec![0.0; lanes],
            sent_at: 0.0,
        }
    }

    /// Returns the lane that reads the next batch.
    pub(super) fn next(&self) -> usize {
        let lanes = self.lanes.iter().enumerate();
        lanes.min_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(lane, _)| lane)
    }

    /// Lets a lane read a batch, encode it for this time, and write this number of bytes. Returns the nanoseconds
    /// that the link seems to take for them: the time of the write if it does not block. A lane that blocks has kept
    /// the link busy since its last write.
    pub(super) fn send(&mut self, lane: usize, bytes: usize, encoding_ns: u64) -> u64 {
        let bytes = bytes as f64;
        self.supplied_at += self.supply_ns;
        let written_from =
            self.lanes[lane].max(self.supplied_at) + BATCH_BYTES as f64 * READ_NS_PER_BYTE + encoding_ns as f64;
        self.sent_at = self.sent_at.max(written_from) + bytes * self.link_ns_per_byte;
        // Bytes not yet sent must fit the sockets.
        let writable_at = self.sent_at - self.socket_bytes * self.link_ns_per_byte;
        let copied = written_from + bytes * WRITE_NS_PER_BYTE;
        let before = self.lanes[lane];
        self.lanes[lane] = writable_at.max(copied);
        let blocks = writable_at - copied > copied - written_from;
        (self.lanes[lane] - if blocks { before } else { written_from }) as u64
    }

    /// Returns the time until all bytes have passed the link.
    pub(super) fn seconds(&self) -> f64 {
        self.lanes.iter().copied().fold(self.sent_at, f64::max) / 1e9
    }
}
