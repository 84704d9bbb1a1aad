//! The seed's requests: 4 KiB anywhere on the disk, seven reads to three writes.

use super::drive::{BLOCK, mixed};

/// Of ten requests so many are writes.
const WRITES_OF_TEN: u64 = 3;

/// The requests of one VM, the same in every run.
#[derive(Clone, Debug)]
pub(super) struct Requests {
    seed: u64,
    count: u64,
    /// Of the disk.
    blocks: u64,
}

impl Requests {
    /// Those of the VM with this number, on a disk of `disk` bytes.
    pub(super) fn of(number: usize, disk: u64) -> Self {
        Self {
            seed: mixed(number as u64),
            count: 0,
            blocks: disk / BLOCK,
        }
    }

    /// Whether the next one is a write, and its block.
    pub(super) fn next_one(&mut self) -> (bool, u64) {
        self.count += 1;
        let random = mixed(self.seed.wrapping_add(self.count));
        let write = random % 10 < WRITES_OF_TEN;
        (write, mixed(random) % self.blocks)
    }
}
