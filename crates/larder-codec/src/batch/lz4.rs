//! LZ4 blocks, by the C library.
//!
//! Single pages use `lz4_flex` (see `crate::lz4`), but over 256 KiB the C library 1.10 is clearly faster. In MB/s,
//! encoding and decoding, in one run on one core, `lz4_flex` 0.14 without and with its `unsafe`, and C:
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
//! Only the sequence decodes more slowly, and [`super::Method::WordsLz4`] is for such data. `LZ4_decompress_safe`
//! respects the ends of both buffers for every input, and is the function that the library's fuzzers test.

use std::ffi::c_int;

pub(super) const ACCELERATION: c_int = 1;
/// Acceleration of the fast method: about 1.2 to 1.6 times as fast, for 1.0 to 1.3 times the bytes.
pub(super) const ACCELERATION_FAST: c_int = 8;

/// Encodes a batch; see [`super::Encoder::encode`]. The state is 16 KiB of the stack, cleared for each batch, which
/// takes a hundredth of the time for a batch of 64 pages.
pub(super) fn encode(input: &[u8], out: &mut [u8], acceleration: c_int) -> Option<usize> {
    if out.is_empty() {
        return None;
    }
    // SAFETY: the library reads `input` and writes at most the given length of `out`; both slices have the given
    // lengths, and the library keeps neither.
    let len = unsafe {
        lz4_sys::LZ4_compress_fast(
            input.as_ptr().cast(),
            out.as_mut_ptr().cast(),
            len_of(input),
            len_of(out),
            acceleration,
        )
    };
    // 0 means that it does not fit.
    usize::try_from(len).ok().filter(|&len| len > 0)
}

/// Decodes `data` and returns the number of bytes, or an error if it is not an LZ4 block.
pub(super) fn decode(data: &[u8], out: &mut [u8]) -> Result<usize, &'static str> {
    // SAFETY: the library reads `data`, and reads and writes `out`; both slices have the given lengths, and the
    // library keeps neither. Without a dictionary it refuses matches from before `out`, and reads only those bytes of
    // `out` that it has written.
    let len = unsafe {
        lz4_sys::LZ4_decompress_safe(data.as_ptr().cast(), out.as_mut_ptr().cast(), len_of(data), len_of(out))
    };
    usize::try_from(len).map_err(|_| "the data is not an LZ4 block of at most the expected length")
}

/// Returns the length of a slice, of which no more than `c_int::MAX` bytes are used.
fn len_of(slice: &[u8]) -> c_int {
    c_int::try_from(slice.len()).unwrap_or(c_int::MAX)
}
