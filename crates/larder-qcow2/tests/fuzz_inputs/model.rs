//! A model of a disk: the number of the last write of each sector.

use std::collections::HashMap;

/// The length of a sector in bytes.
pub const SECTOR: u64 = 512;

/// The high half of every 8 bytes that the guest writes: no entry that Larder writes looks like it.
pub const STAMP: u64 = 0x4755_4553 << 32;

/// Fills `bytes` with the data of write `number`; zeros for 0.
pub fn fill(number: u32, bytes: &mut [u8]) {
    let word = match number {
        0 => 0,
        _ => STAMP | u64::from(number),
    };
    bytes.chunks_exact_mut(8).for_each(|out| out.copy_from_slice(&word.to_be_bytes()));
}

/// Returns the number of the write that wrote `bytes`.
fn number(bytes: &[u8]) -> Option<u32> {
    let word = u64::from_be_bytes(bytes[..8].try_into().ok()?);
    let number = word as u32;
    let mut expected = vec![0; bytes.len()];
    fill(number, &mut expected);
    (expected == bytes).then_some(number)
}

/// The permitted content of a disk. Sectors that were never written hold zeros.
#[derive(Default)]
pub struct Model {
    sectors: HashMap<u64, Sector>,
}

#[derive(Clone, Copy, Default)]
struct Sector {
    number: u32,
    /// The sector may have become zeros.
    discarded: bool,
}

impl Model {
    /// Records that write `number` has written the sectors from `start` on.
    pub fn write(&mut self, start: u64, len: u64, number: u32) {
        for sector in start / SECTOR..(start + len) / SECTOR {
            let to = Sector { number, discarded: false };
            self.sectors.insert(sector, to);
        }
    }

    /// Records that sectors may have become zeros.
    pub fn discard(&mut self, start: u64, len: u64) {
        for (sector, held) in &mut self.sectors {
            held.discarded |= (start / SECTOR..(start + len) / SECTOR).contains(sector);
        }
    }

    /// Compares bytes that were read with the model.
    pub fn see(&mut self, start: u64, bytes: &[u8]) {
        for (sector, bytes) in (start / SECTOR..).zip(bytes.chunks_exact(SECTOR as usize)) {
            let found = number(bytes);
            let held = self.sectors.entry(sector).or_default();
            assert!(
                found == Some(held.number) || (held.discarded && found == Some(0)),
                "sector {sector} has {found:?}, not {}",
                held.number
            );
            *held = Sector { number: found.unwrap_or_default(), discarded: false };
        }
    }
}
