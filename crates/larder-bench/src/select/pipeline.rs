//! A sender's lanes and the link, as far as time goes.

use larder_codec::batch::BATCH_BYTES;

/// What a lane does with the bytes of QEMU besides encoding them: it reads them, looks through them and sums them up.
/// Measured of `larder migrate`, as its CPU time without that of encoding.
const READ_NS_PER_BYTE: f64 = 0.25;
/// Of a copy into the kernel.
const WRITE_NS_PER_BYTE: f64 = 0.15;
/// That a lane's connection takes before it keeps a writer waiting.
const SOCKET_BYTES: f64 = 1e6;

/// What a lane works for a batch that is sent with so many bytes, besides encoding it.
pub(super) fn besides_ns(bytes: usize) -> u64 {
    (BATCH_BYTES as f64 * READ_NS_PER_BYTE + bytes as f64 * WRITE_NS_PER_BYTE) as u64
}

/// Lanes that encode a batch and write it, one after the other, each to a connection of its own over the same link.
pub(super) struct Pipeline {
    link_ns_per_byte: f64,
    /// What QEMU takes for a batch.
    supply_ns: f64,
    /// When it has the next.
    supplied_at: f64,
    socket_bytes: f64,
    /// When each lane can begin with its next batch, in nanoseconds.
    lanes: Vec<f64>,
    /// When all that was written is over the link.
    sent_at: f64,
}

impl Pipeline {
    /// Over a link of so many Mbit/s, of a QEMU that hands over so many 10^6 bytes in a second.
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

    /// The lane that reads the next batch.
    pub(super) fn next(&self) -> usize {
        let lanes = self.lanes.iter().enumerate();
        lanes.min_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(lane, _)| lane)
    }

    /// A lane reads a batch, encodes it for so long, and writes so many bytes: how many nanoseconds the link seems to take for
    /// them. That is what the write takes, if it need not wait; a lane that waits has kept the link busy since its last one.
    pub(super) fn send(&mut self, lane: usize, bytes: usize, encoding_ns: u64) -> u64 {
        let bytes = bytes as f64;
        self.supplied_at += self.supply_ns;
        let begun = self.lanes[lane].max(self.supplied_at) + BATCH_BYTES as f64 * READ_NS_PER_BYTE + encoding_ns as f64;
        self.sent_at = self.sent_at.max(begun) + bytes * self.link_ns_per_byte;
        // What has not gone yet must fit the sockets.
        let room_at = self.sent_at - self.socket_bytes * self.link_ns_per_byte;
        let copied = begun + bytes * WRITE_NS_PER_BYTE;
        let before = self.lanes[lane];
        self.lanes[lane] = room_at.max(copied);
        let waits = room_at - copied > copied - begun;
        (self.lanes[lane] - if waits { before } else { begun }) as u64
    }

    /// Until all is over.
    pub(super) fn seconds(&self) -> f64 {
        self.lanes.iter().copied().fold(self.sent_at, f64::max) / 1e9
    }
}
