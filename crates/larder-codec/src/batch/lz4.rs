//! LZ4 blocks, by the C library.
//!
//! Pages on their own are left to `lz4_flex` (see `crate::lz4`), but over 256 KiB the C library 1.10 is clearly faster. In
//! MB/s, encoding and decoding, in one run on one core, `lz4_flex` 0.14 without and with its `unsafe`, and C:
//!
//! ```text
//!            flex          flex, unsafe    C
//! text       736   3660    794   3979      810   5254
//! programs   726   2886    794   3156      815   4661
//! heap       523   2196    562   2851      571   3091
//! sequence   812   2054    889   2273      957   1372
//! sparse    6645   2028   7419   1993     7616  18488
//! ```
//!
//! Only the sequence decodes more slowly, and [`super::Method::WordsLz4`] is for such. `LZ4_decompress_safe` is bounded at
//! both buffers' ends whatever the bytes are, and is what the fuzzers of the library feed.

use std::ffi::c_int;

pub(super) const ACCELERATION: c_int = 1;
/// Some 1.2 to 1.6 times as fast, for 1.0 to 1.3 times the bytes.
pub(super) const ACCELERATION_FAST: c_int = 8;

/// See [`super::Encoder::encode`]. The state is 16 KiB of the stack, cleared for each batch: a hundredth of the time that
/// a batch of 64 pages takes.
pub(super) fn encode(input: &[u8], out: &mut [u8], acceleration: c_int) -> Option<usize> {
    if out.is_empty() {
        return None;
    }
    // SAFETY: the library reads `input` and writes at most the given length of `out`, both slices as long as it is told;
    // neither is kept.
    let len = unsafe {
        lz4_sys::LZ4_compress_fast(
            input.as_ptr().cast(),
            out.as_mut_ptr().cast(),
            len_of(input),
            len_of(out),
            acceleration,
        )
    };
    // 0: does not fit.
    usize::try_from(len).ok().filter(|&len| len > 0)
}

/// Bytes of `out` that `data` made, or why it is no block.
pub(super) fn decode(data: &[u8], out: &mut [u8]) -> Result<usize, &'static str> {
    // SAFETY: the library reads `data`, reads and writes `out`, both slices as long as it is told; neither is kept. Without
    // a dictionary it refuses matches from before `out`, and reads nothing of `out` that it has not written.
    let len = unsafe {
        lz4_sys::LZ4_decompress_safe(data.as_ptr().cast(), out.as_mut_ptr().cast(), len_of(data), len_of(out))
    };
    usize::try_from(len).map_err(|_| "it is no block of at most that length")
}

/// A longer slice is used no further than this.
fn len_of(slice: &[u8]) -> c_int {
    c_int::try_from(slice.len()).unwrap_or(c_int::MAX)
}
