//! Fuzz targets, used by the fuzzer (`fuzz/`) and by a test with random inputs. Each function must return for every
//! input.
#![allow(dead_code, unreachable_pub, reason = "each program uses a part of it")]

pub mod batch;
pub mod delta;

/// Reader of an input. Past its end everything is 0.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        first
    }
}
