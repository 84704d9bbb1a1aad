//! Page table entry of the pager: 16 bytes for each page, which outlive the pager and locate an evicted page.
//!
//! ```text
//! word 0   bits  0-3    location: 0 nowhere, 1 uniform, 2 compressed RAM, 3 swap cache, 4 slow store, 5 lost
//!          bit   4      clean: the page is in the process's memory too, write-protected and equal to the copy;
//!                       for a lost page: it was given up since, and reads as zeros
//!          bits  8-11   codec
//!          bits 12-23   length of the stored bytes, minus one
//!          bits 24-63   offset in the tier's log, in units of 16 bytes
//! word 1   uniform: the word that the whole page repeats
//!          else, bits 0-31: CRC32C of the page's number (8 bytes) and its 4096 bytes; bits 32-63: time of its eviction
//! ```
//!
//! A page whose location is *nowhere* is in the process's memory, or has never been there and reads as zeros.
//!
//! Word 1 is written before word 0, and only while word 0 is *nowhere*. So a pager that is killed in between leaves
//! no entry with a wrong checksum. Moving a copy from tier to tier changes word 0 alone, with one store.

use larder_codec::Codec;

use crate::units::{PAGE, PageIndex};

/// Offset in a tier's log, in units of [`LogOffset::UNIT_BYTES`]; 40 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LogOffset(u64);

impl LogOffset {
    /// Alignment of objects in a log, in bytes.
    pub const UNIT_BYTES: u64 = 16;

    /// Makes the location `bytes` bytes from the start of the log.
    ///
    /// # Panics
    /// If `bytes` is not a multiple of [`Self::UNIT_BYTES`], or is 2^44 or more.
    pub fn from_bytes(bytes: u64) -> Self {
        assert!(bytes.is_multiple_of(Self::UNIT_BYTES) && bytes < Self::UNIT_BYTES << 40);
        Self(bytes / Self::UNIT_BYTES)
    }

    /// Returns the offset from the start of the log, in bytes.
    pub const fn bytes(self) -> u64 {
        self.0 * Self::UNIT_BYTES
    }
}

/// Location and encoding of a stored page in a tier's log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredObject {
    /// Offset of the object's header. The data follow it.
    pub offset: LogOffset,
    /// Length of the data, from 1 to [`PAGE`] bytes.
    pub len: u16,
    /// Encoding of the data.
    pub encoding: PageEncoding,
}

/// Encoding of a stored page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageEncoding {
    /// Uncompressed.
    Raw,
    /// Compressed with this codec.
    Codec(Codec),
}

/// Tier that stores pages in a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    /// Compressed RAM.
    Ram,
    /// The swap cache on an SSD.
    Ssd,
    /// The slow store.
    Slow,
}

/// Location of the copy of a page, as decoded from word 0 of its entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyLocation {
    /// There is no copy: the page is in the process's memory, or is untouched and reads as zeros.
    NotStored,
    /// The page repeats the word in word 1.
    Uniform {
        /// The page is in the process's memory too, and equal.
        clean: bool,
    },
    /// The copy is in a tier.
    InTier {
        /// The tier.
        tier: Tier,
        /// The location in the tier.
        object: StoredObject,
        /// The page is in the process's memory too, write-protected and equal to the copy.
        clean: bool,
    },
    /// The page could not be read back. A thread that touches it gets a memory error.
    Lost,
}

/// Word 0 of an entry. Equal words mean equal locations, so comparing words detects a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EntryWord(pub u64);

const CLEAN_BIT: u64 = 1 << 4;

impl EntryWord {
    /// The word of a page that has no copy.
    pub const NOT_STORED: Self = Self(0);

    /// Encodes `location`.
    pub fn encode(location: CopyLocation) -> Self {
        let clean_bit = |clean: bool| if clean { CLEAN_BIT } else { 0 };
        Self(match location {
            CopyLocation::NotStored => 0,
            CopyLocation::Uniform { clean } => 1 | clean_bit(clean),
            CopyLocation::InTier { tier, object: stored, clean } => {
                let tier = match tier {
                    Tier::Ram => 2,
                    Tier::Ssd => 3,
                    Tier::Slow => 4,
                };
                let codec = match stored.encoding {
                    PageEncoding::Raw => 0,
                    PageEncoding::Codec(codec) => u64::from(codec.number()),
                };
                assert!((1..=PAGE).contains(&usize::from(stored.len)));
                tier | clean_bit(clean) | codec << 8 | (u64::from(stored.len) - 1) << 12 | stored.offset.0 << 24
            }
            CopyLocation::Lost => 5,
        })
    }

    /// Decodes the location, or returns `None` if the word is invalid.
    pub fn decode(self) -> Option<CopyLocation> {
        let clean = self.0 & CLEAN_BIT != 0;
        let tier = match self.0 & 0xf {
            0 => return (self.0 == 0).then_some(CopyLocation::NotStored),
            1 => return Some(CopyLocation::Uniform { clean }),
            2 => Tier::Ram,
            3 => Tier::Ssd,
            4 => Tier::Slow,
            5 => return Some(CopyLocation::Lost),
            _ => return None,
        };
        let encoding = match (self.0 >> 8 & 0xf) as u8 {
            0 => PageEncoding::Raw,
            number => PageEncoding::Codec(Codec::try_from(number).ok()?),
        };
        Some(CopyLocation::InTier {
            tier,
            object: StoredObject { offset: LogOffset(self.0 >> 24), len: (self.0 >> 12 & 0xfff) as u16 + 1, encoding },
            clean,
        })
    }

    /// Returns the word with its *clean* bit set or unset.
    pub fn with_clean(self, clean: bool) -> Self {
        Self(if clean { self.0 | CLEAN_BIT } else { self.0 & !CLEAN_BIT })
    }

    /// Returns true if the page could not be read back.
    pub fn is_lost(self) -> bool {
        matches!(self.decode(), Some(CopyLocation::Lost))
    }

    /// Returns true if the *clean* bit is set: the page is in the process's memory too, or, if lost, was given up.
    pub fn is_clean(self) -> bool {
        self.0 & CLEAN_BIT != 0
    }
}

/// Word 1 of a page that is stored in a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EvictionRecord {
    /// Checksum of the page; see [`checksum`].
    pub checksum: u32,
    /// Lower 32 bits of the pager's count of evicted pages when this page was evicted.
    pub evicted_at: u32,
}

impl EvictionRecord {
    /// Encodes the proof as a word.
    pub fn to_word(self) -> u64 {
        u64::from(self.checksum) | u64::from(self.evicted_at) << 32
    }

    /// Decodes a word.
    pub fn from_word(word: u64) -> Self {
        Self { checksum: word as u32, evicted_at: (word >> 32) as u32 }
    }
}

/// Returns the CRC32C of the page's number and its content. A copy of another page or of another time has a different
/// checksum.
pub fn checksum(page: PageIndex, content: &[u8; PAGE]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&u64::from(page.get()).to_le_bytes()), content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entry_word_round_trips(units in 0u64..1 << 40, len in 1u16..=4096, tier in 0u8..3, codec in 0u8..3, clean: bool) {
            let location = CopyLocation::InTier {
                tier: [Tier::Ram, Tier::Ssd, Tier::Slow][usize::from(tier)],
                object: StoredObject {
                    offset: LogOffset::from_bytes(units * LogOffset::UNIT_BYTES),
                    len,
                    encoding: match codec { 0 => PageEncoding::Raw, number => PageEncoding::Codec(Codec::try_from(number).unwrap()) },
                },
                clean,
            };
            let word = EntryWord::encode(location);
            prop_assert_eq!(word.decode(), Some(location));
            prop_assert_eq!(word.is_clean(), clean);
            prop_assert_eq!(word.with_clean(!clean).with_clean(clean), word);
        }

        #[test]
        fn arbitrary_word_decodes_or_is_rejected(word: u64) {
            if let Some(location) = EntryWord(word).decode() {
                // A decoded location can be encoded again, except for bits without a meaning.
                prop_assert_eq!(EntryWord::encode(location).decode(), Some(location));
            }
        }
    }

    #[test]
    fn checksum_depends_on_page_number() {
        let content = [7; PAGE];
        assert_ne!(checksum(PageIndex::new(1), &content), checksum(PageIndex::new(2), &content));
    }
}
