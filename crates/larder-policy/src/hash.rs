//! Hash of line numbers, for sampling and for ghosts.

/// Mixes all bits of `number` into all bits of the result (MurmurHash3's 64-bit finalizer, with the constants of
/// SplitMix64's "variant 13": David Stafford, "Better Bit Mixing", 2011).
pub(crate) const fn mix(number: u64) -> u64 {
    let mut hash = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}
