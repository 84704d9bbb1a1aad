//! Units of the block path: byte offsets, byte lengths and ranges of them, and sizes as users write them.
//!
//! All are 64 bits wide on any host, because they describe disks, not memory. Arithmetic that can overflow on values
//! from outside (a guest, an image, a peer) uses the `checked_` forms; the operators are for values that have been
//! checked against a device's size, and panic on overflow in debug builds like any integer.

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::str::FromStr;

/// An offset on a disk, in bytes from its start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteOffset(u64);

/// A length on a disk, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteLen(u64);

/// A range of `len` bytes from `start` on. It may be empty.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ByteRange {
    /// The first byte.
    pub start: ByteOffset,
    /// The number of bytes.
    pub len: ByteLen,
}

impl ByteOffset {
    /// The start of the disk.
    pub const ZERO: Self = Self(0);

    /// Returns the offset of `bytes` bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Returns the offset in bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns `self + len`, or `None` past 2^64.
    pub const fn checked_add(self, len: ByteLen) -> Option<Self> {
        match self.0.checked_add(len.0) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// Returns the nearest multiple of `unit` (a power of two) at or before this offset.
    pub const fn align_down(self, unit: u64) -> Self {
        debug_assert!(unit.is_power_of_two());
        Self(self.0 & !(unit - 1))
    }

    /// Returns the nearest multiple of `unit` (a power of two) at or after this offset; saturates at the last one.
    pub const fn align_up(self, unit: u64) -> Self {
        Self(self.0.saturating_add(unit - 1)).align_down(unit)
    }

    /// Returns true if this is a multiple of `unit` (a power of two).
    pub const fn is_aligned(self, unit: u64) -> bool {
        debug_assert!(unit.is_power_of_two());
        self.0 & (unit - 1) == 0
    }

    /// Returns the range of `len` bytes from this offset on.
    pub const fn range(self, len: ByteLen) -> ByteRange {
        ByteRange { start: self, len }
    }
}

impl ByteLen {
    /// The length zero.
    pub const ZERO: Self = Self(0);

    /// Returns a length of `bytes` bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Returns a length of `kib` KiB.
    pub const fn kib(kib: u64) -> Self {
        Self(kib << 10)
    }

    /// Returns a length of `mib` MiB.
    pub const fn mib(mib: u64) -> Self {
        Self(mib << 20)
    }

    /// Returns the length of a buffer in memory.
    pub const fn of_buffer(bytes: usize) -> Self {
        Self(bytes as u64)
    }

    /// Returns the length in bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the length as a size in memory. A request's length always fits; a disk's may not on a 32-bit host.
    pub const fn as_usize(self) -> usize {
        debug_assert!(self.0 <= usize::MAX as u64);
        self.0 as usize
    }

    /// Returns true if this is zero.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Returns true if this is a multiple of `unit` (a power of two).
    pub const fn is_aligned(self, unit: u64) -> bool {
        debug_assert!(unit.is_power_of_two());
        self.0 & (unit - 1) == 0
    }

    /// Returns the smaller of the two.
    pub fn min(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }
}

impl ByteRange {
    /// Returns the range of `len` bytes from `start` on.
    pub const fn new(start: u64, len: u64) -> Self {
        Self { start: ByteOffset(start), len: ByteLen(len) }
    }

    /// Returns the range from `start` up to, not including, `end`; empty if `end` is not after `start`.
    pub const fn between(start: ByteOffset, end: ByteOffset) -> Self {
        Self { start, len: ByteLen(end.0.saturating_sub(start.0)) }
    }

    /// Returns the offset just after the range.
    ///
    /// # Panics
    /// In debug builds, past 2^64: check values from outside with [`ByteRange::checked_end`] first.
    pub const fn end(self) -> ByteOffset {
        ByteOffset(self.start.0 + self.len.0)
    }

    /// Returns the offset just after the range, or `None` past 2^64.
    pub const fn checked_end(self) -> Option<ByteOffset> {
        self.start.checked_add(self.len)
    }

    /// Returns true if the range has no bytes.
    pub const fn is_empty(self) -> bool {
        self.len.0 == 0
    }

    /// Returns true if the two ranges share a byte.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start.0 < other.end().0 && other.start.0 < self.end().0
    }

    /// Returns true if every byte of `other` is in `self`.
    pub const fn contains(self, other: Self) -> bool {
        self.start.0 <= other.start.0 && other.end().0 <= self.end().0
    }

    /// Returns the range of bytes that are in both; empty if there are none.
    pub fn intersection(self, other: Self) -> Self {
        Self::between(self.start.max(other.start), ByteOffset(self.end().0.min(other.end().0)))
    }

    /// Returns the smallest range with both ends on multiples of `unit` that contains `self`.
    pub const fn widened(self, unit: u64) -> Self {
        Self::between(self.start.align_down(unit), self.end().align_up(unit))
    }

    /// Returns the largest range with both ends on multiples of `unit` inside `self`; may be empty.
    pub const fn narrowed(self, unit: u64) -> Self {
        Self::between(self.start.align_up(unit), self.end().align_down(unit))
    }

    /// Returns true if both ends are multiples of `unit` (a power of two).
    pub const fn is_aligned(self, unit: u64) -> bool {
        self.start.is_aligned(unit) && self.len.is_aligned(unit)
    }
}

impl Add<ByteLen> for ByteOffset {
    type Output = Self;
    fn add(self, len: ByteLen) -> Self {
        Self(self.0 + len.0)
    }
}

impl AddAssign<ByteLen> for ByteOffset {
    fn add_assign(&mut self, len: ByteLen) {
        self.0 += len.0;
    }
}

impl Sub for ByteOffset {
    type Output = ByteLen;
    fn sub(self, other: Self) -> ByteLen {
        ByteLen(self.0 - other.0)
    }
}

impl Add for ByteLen {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl Sub for ByteLen {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl AddAssign for ByteLen {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl SubAssign for ByteLen {
    fn sub_assign(&mut self, other: Self) {
        self.0 -= other.0;
    }
}

impl fmt::Debug for ByteOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for ByteOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for ByteLen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.start.0, self.len.0)
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.len.0, self.start.0)
    }
}

const BINARY_UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// Formats the size in the largest unit of which it is a whole multiple: `64 MiB`, `1537 KiB`, `513 B`.
impl fmt::Display for ByteLen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_multiple = |shift: u32| self.0 != 0 && self.0.trailing_zeros() >= shift;
        match BINARY_UNITS.iter().find(|(_, shift)| is_multiple(*shift)) {
            Some((unit, shift)) => write!(f, "{} {unit}", self.0 >> shift),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// The reason why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The text does not begin with a number.
    #[error("'{0}' is not a size: give a whole number and KiB, MiB, GiB or TiB, as in 64MiB")]
    NotANumber(String),
    /// The number has a fraction.
    #[error("'{0}' is not a whole number; write it in a smaller unit (1536MiB for 1.5GiB)")]
    Fraction(String),
    /// The unit is unknown.
    #[error("'{unit}' in '{text}' is not a unit of size: use KiB, MiB, GiB or TiB")]
    UnknownUnit {
        /// The whole text.
        text: String,
        /// The part after the number.
        unit: String,
    },
    /// The size is 2^63 bytes or more, larger than any file or device.
    #[error("'{0}' is larger than any disk can be (8388607 TiB)")]
    TooLarge(String),
}

/// Parses `4096`, `64KiB`, `64 KiB`, `64K`; `1.5` is refused: sizes are whole numbers.
impl FromStr for ByteLen {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::NotANumber(text.to_owned()));
        }
        if unit.starts_with(['.', ',']) {
            return Err(SizeError::Fraction(text.to_owned()));
        }
        let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            "t" | "tib" => 40,
            "p" | "pib" => 50,
            _ => {
                return Err(SizeError::UnknownUnit { text: text.to_owned(), unit: unit.trim().to_owned() });
            }
        };
        number
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(1 << shift))
            .filter(|bytes| *bytes <= i64::MAX as u64)
            .map(Self)
            .ok_or_else(|| SizeError::TooLarge(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("64KiB", 65536),
            ("64 KiB", 65536),
            ("4m", 4 << 20),
            ("2G", 2 << 30),
            ("16TiB", 16 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteLen::new(bytes)), "{text}");
        }
        assert!(matches!("".parse::<ByteLen>(), Err(SizeError::NotANumber(_))));
        assert!(matches!("-1".parse::<ByteLen>(), Err(SizeError::NotANumber(_))));
        assert!(matches!("1.5G".parse::<ByteLen>(), Err(SizeError::Fraction(_))));
        assert!(matches!("1XB".parse::<ByteLen>(), Err(SizeError::UnknownUnit { .. })));
        assert!(matches!("8388608TiB".parse::<ByteLen>(), Err(SizeError::TooLarge(_))));
        assert!(matches!("99999999999999999999".parse::<ByteLen>(), Err(SizeError::TooLarge(_))));
    }

    #[test]
    fn sizes_print_in_largest_whole_unit() {
        for (bytes, text) in
            [(0, "0 B"), (513, "513 B"), (1537 << 10, "1537 KiB"), (64 << 20, "64 MiB"), (1 << 40, "1 TiB")]
        {
            assert_eq!(ByteLen::new(bytes).to_string(), text);
        }
    }

    #[test]
    fn ranges_widen_and_narrow_to_units() {
        let range = ByteRange::new(700, 1000);
        assert_eq!(range.widened(512), ByteRange::new(512, 1536));
        assert_eq!(range.narrowed(512), ByteRange::new(1024, 512));
        assert!(ByteRange::new(10, 20).narrowed(512).is_empty());
        assert!(!ByteRange::new(0, 10).overlaps(ByteRange::new(10, 10)));
        assert_eq!(ByteRange::new(0, 10).intersection(ByteRange::new(5, 10)), ByteRange::new(5, 5));
    }
}
