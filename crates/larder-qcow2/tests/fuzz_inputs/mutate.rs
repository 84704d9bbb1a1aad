//! Damage to the metadata of an image: its header, its tables, and their targets.

use larder_block::ByteOffset;
use larder_block::backend::simulated::SparseImage;

use super::Input;
use super::guard::Places;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The maximum number of bytes by which damage extends a file.
const ADDED_MAX: u64 = 256 << 10;

/// An image file that is being damaged.
pub struct Damage<'a> {
    pub bytes: &'a mut SparseImage,
    pub size: &'a mut u64,
    /// The locations before any damage.
    pub places: Places,
}

impl Damage<'_> {
    fn long(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.bytes.read(ByteOffset::new(at), &mut word);
        u64::from_be_bytes(word)
    }

    fn set(&mut self, at: u64, bytes: &[u8]) {
        // A file has no bytes past its end.
        if at + bytes.len() as u64 <= *self.size {
            self.bytes.write(ByteOffset::new(at), bytes);
        }
    }

    fn set_long(&mut self, at: u64, word: u64) {
        self.set(at, &word.to_be_bytes());
    }

    /// Returns the offset of a random L2 entry.
    fn l2_entry(&self, input: &mut Input<'_>) -> Option<u64> {
        let index = input.below(self.places.l1_entries.max(1));
        let table = self.long(self.places.l1 + index * 8) & OFFSET;
        let entry_len = if self.places.extended { 16 } else { 8 };
        let entry = input.below(self.places.cluster_len() / entry_len);
        (table != 0 && table < *self.size).then_some(table + entry * entry_len)
    }

    /// Returns a random word that may look like an entry.
    fn entry(&self, input: &mut Input<'_>) -> u64 {
        let clusters = *self.size >> self.places.cluster_bits;
        let flags = match input.byte() % 6 {
            0 => 0,
            1 | 2 => COPIED,
            3 => COPIED | 1,
            4 => 1,
            _ => u64::from(input.byte()),
        };
        let place = match input.byte() % 8 {
            0 => 0,
            1..=4 => input.below(clusters + 2) << self.places.cluster_bits,
            5 => (input.below(clusters) << self.places.cluster_bits) + 512,
            6 => u64::MAX - input.below(1 << 20),
            _ => input.long(),
        };
        place | flags
    }

    /// Makes one random change.
    pub fn one(&mut self, input: &mut Input<'_>) {
        let places = self.places;
        match input.byte() % 13 {
            0 => {
                let at = input.below(112);
                self.set(at, &[input.byte()]);
            }
            1 => {
                let at = [24, 40, 48, 64, 72, 80, 88, 8][input.below(8) as usize];
                let word = self.entry(input) & !input.below(2).wrapping_neg();
                self.set_long(at, word);
            }
            2 => {
                let at = [4, 16, 20, 32, 36, 56, 60, 96, 100][input.below(9) as usize];
                let word = match input.byte() % 2 {
                    0 => u32::from(input.byte()),
                    _ => input.long() as u32,
                };
                self.set(at, &word.to_be_bytes());
            }
            3 => {
                let at = places.l1 + 8 * input.below(places.l1_entries.max(1));
                let word = self.entry(input);
                self.set_long(at, word);
            }
            4 => {
                let word = self.entry(input);
                if let Some(at) = self.l2_entry(input) {
                    self.set_long(at, word);
                }
            }
            5 => {
                let word = input.long();
                if let Some(at) = self.l2_entry(input).filter(|_| places.extended) {
                    self.set_long(at + 8, word);
                }
            }
            6 => {
                let entries = places.refcount_table_clusters * places.cluster_len() / 8;
                let at = places.refcount_table + 8 * input.below(entries.clamp(1, 8));
                let word = self.entry(input);
                self.set_long(at, word);
            }
            7 => {
                // A few bytes of refcounts.
                let block = self.long(places.refcount_table);
                let at = block.saturating_add(input.below(places.cluster_len()));
                let (count, value) = (1 + input.below(16) as usize, input.byte());
                if at < *self.size {
                    self.set(at, &vec![value; count]);
                }
            }
            8 => {
                self.set(60, &u32::from(input.byte()).to_be_bytes());
                let at = self.entry(input) & OFFSET;
                self.set_long(64, at);
            }
            9 => self.compress(input),
            10 => {
                // Marked as shared with a snapshot.
                let at = match input.byte() & 1 {
                    0 => Some(places.l1 + 8 * input.below(places.l1_entries.max(1))),
                    _ => self.l2_entry(input),
                };
                if let Some(at) = at {
                    self.set_long(at, self.long(at) & !COPIED);
                }
            }
            11 => {
                let len = 1 + input.below(16) as usize;
                let at = input.below((*self.size).max(1));
                let bytes = input.bytes(len).to_vec();
                self.set(at, &bytes);
            }
            _ => {
                let size = (input.below(*self.size + ADDED_MAX) + 512) & !511;
                *self.size = size;
                self.bytes.zero(larder_block::ByteRange::new(size, (1 << 40) - size));
            }
        }
    }

    /// Makes a random cluster a compressed one: valid, or not.
    fn compress(&mut self, input: &mut Input<'_>) {
        let places = self.places;
        let offset_bits = 62 - (places.cluster_bits - 8);
        let Some(at) = self.l2_entry(input) else { return };
        let (offset, len) = match input.byte() % 3 {
            0 => (input.below(*self.size + 512), input.below(1 << 20)),
            1 => (input.long() & ((1 << offset_bits) - 1), input.long() >> 32),
            _ => {
                // A stored block of deflate, after all other data.
                let len = places.cluster_len().min(0xffff) as u16;
                let mut bytes = vec![1];
                bytes.extend(len.to_le_bytes());
                bytes.extend((!len).to_le_bytes());
                bytes.resize(bytes.len() + usize::from(len), input.byte());
                let offset = *self.size + input.below(512);
                *self.size = (offset + bytes.len() as u64).next_multiple_of(512);
                self.set(offset, &bytes);
                (offset, bytes.len() as u64)
            }
        };
        let sectors = (offset.saturating_add(len.max(1)) - 1) / 512 - offset / 512;
        let sectors = sectors & ((1 << (62 - offset_bits)) - 1);
        self.set_long(at, COMPRESSED | sectors << offset_bits | offset);
        if places.extended {
            self.set_long(at + 8, 0);
        }
    }
}
