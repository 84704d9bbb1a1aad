//! LZ4 blocks, by `lz4_flex` without `unsafe`.
//!
//! It encodes as fast as the C library 1.10, both measured on the pages of `examples/pages`. It decodes text,
//! programs and heaps 5-30 % slower, columns of numbers in two thirds of the time, and long repetitions of short
//! pieces several times slower: 2 us for a page that is nearly all zeros, instead of 0.3 us. No kind of page took it
//! more than 2.5 us. In return no input can lead its decoder out of bounds.
//!
//! The C library clears 16 KiB of hash table for each page of 4 KiB, even with its "fast reset" (`LZ4_prepareTable`:
//! `inputSize >= 4 KB`), and is slower without that (`LZ4_compress_fast_continue`). The table used here has 8 KiB.

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

use crate::PAGE;

/// Output size that the library requires before it encodes a page, regardless of the result.
const ENCODED_MAX: usize = get_maximum_output_size(PAGE);

pub(crate) struct Encoder {
    table: CompressTable,
    /// Output buffer. It is needed because the library does not support a limit.
    encoded: Box<[u8; ENCODED_MAX]>,
}

impl Encoder {
    pub(crate) fn new() -> Self {
        Self { table: CompressTable::small(), encoded: Box::new([0; ENCODED_MAX]) }
    }

    /// Encodes a page; see [`crate::Encoder::encode`].
    pub(crate) fn encode(&mut self, page: &[u8; PAGE], out: &mut [u8]) -> Option<usize> {
        let len = compress_into_with_table(page, &mut self.encoded[..], &mut self.table).ok()?;
        out.get_mut(..len)?.copy_from_slice(&self.encoded[..len]);
        Some(len)
    }
}

/// Decodes `data` and returns the number of bytes, or an error if it is not an LZ4 block.
pub(crate) fn decode(data: &[u8], page: &mut [u8; PAGE]) -> Result<usize, String> {
    decompress_into(data, page).map_err(|why| why.to_string())
}
