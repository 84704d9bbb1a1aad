//! Fuzz targets for any bytes: for the fuzzer (`fuzz/`), and for a test with random ones. Each function must return
//! for every input.
#![allow(dead_code, unreachable_pub, reason = "each program uses a part of it")]

pub mod guard;
pub mod header;
pub mod image;
pub mod model;
pub mod mutate;

/// A parser that takes an input apart from its start on. After the end of the input it returns zeros.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub fn long(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let got = self.bytes(8);
        bytes[..got.len()].copy_from_slice(got);
        u64::from_le_bytes(bytes)
    }

    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        first
    }

    /// Returns a number below `count`.
    pub fn below(&mut self, count: u64) -> u64 {
        match count {
            0..=256 => u64::from(self.byte()) % count.max(1),
            257..=65536 => u64::from(self.word()) % count,
            _ => self.long() % count,
        }
    }
}
