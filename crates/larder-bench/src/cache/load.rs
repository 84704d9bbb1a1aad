//! The load of the published experiment: random 4 KiB requests over the whole disk, seven reads to three writes.

use super::drive::{BLOCK, mixed};

/// Writes in ten requests.
const WRITES_PER_TEN_REQUESTS: u64 = 3;

/// Request stream of one VM, the same in every run.
#[derive(Clone, Debug)]
pub(super) struct Requests {
    seed: u64,
    count: u64,
    /// Blocks of the disk.
    blocks: u64,
}

impl Requests {
    /// Creates the request stream of VM `number` on a disk of `disk` bytes.
    pub(super) fn of(number: usize, disk: u64) -> Self {
        Self { seed: mixed(number as u64), count: 0, blocks: disk / BLOCK }
    }

    /// Returns the next request: whether it is a write, and its block.
    pub(super) fn next_request(&mut self) -> (bool, u64) {
        self.count += 1;
        let random = mixed(self.seed.wrapping_add(self.count));
        let write = random % 10 < WRITES_PER_TEN_REQUESTS;
        (write, mixed(random) % self.blocks)
    }
}
