//! Targets of random input, shared by the fuzzer (`fuzz/`) and a test. Each function must return, whatever its input.
#![allow(dead_code, unreachable_pub, reason = "each program uses a part of it")]

pub mod stream;
pub mod wire;

#[path = "../stream/reader.rs"]
pub mod reader;
#[path = "../stream/writer.rs"]
pub mod writer;

/// Reader of an input from its start. After the end, all bytes are 0.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        first
    }
}
