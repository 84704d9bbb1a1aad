//! What is known of a page that is not in the process's memory, in 16 bytes that outlive the pager.
//!
//! ```text
//! word 0   bits  0-3    where: 0 nowhere, 1 uniform, 2 compressed RAM, 3 swap cache, 4 slow store, 5 lost
//!          bit   4      clean: the page is in the process's memory too, write-protected and equal to the copy;
//!                       of a lost page: it was given up since, and is of zeros
//!          bits  8-11   codec
//!          bits 12-23   length of the stored bytes, less one
//!          bits 24-63   place, in units of 16 bytes
//! word 1   uniform: the word of which the whole page is made
//!          else, bits 0-31: CRC32C of the page's number (8 bytes) and its 4096 bytes; bits 32-63: when it was evicted
//! ```
//!
//! A page that is *nowhere* here is in the process's memory, or has never been there and reads as zeros.
//!
//! Word 1 is written before word 0, and only while word 0 says *nowhere*: so a pager that is killed in between leaves
//! no entry with another's checksum. A copy that moves from tier to tier changes word 0 alone, by one store.

use larder_codec::Codec;

use crate::units::{PAGE, PageIndex};

/// A place in a tier's log, in units of [`Place::UNIT`] bytes; 40 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Place(u64);

impl Place {
    /// What places are multiples of.
    pub const UNIT: u64 = 16;

    /// The place `bytes` bytes from the start of the log.
    ///
    /// # Panics
    /// Not a multiple of [`Self::UNIT`], or beyond 2^44.
    pub fn of_bytes(bytes: u64) -> Self {
        assert!(bytes.is_multiple_of(Self::UNIT) && bytes < Self::UNIT << 40);
        Self(bytes / Self::UNIT)
    }

    /// Bytes from the start of the log.
    pub const fn bytes(self) -> u64 {
        self.0 * Self::UNIT
    }
}

/// The bytes in which a page is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stored {
    /// Where its object's data begins.
    pub place: Place,
    /// How many bytes, from 1 to [`PAGE`].
    pub len: u16,
    /// How they are encoded.
    pub encoding: Encoding,
}

/// How a page's bytes are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Encoding {
    /// As they are.
    Raw,
    /// Compressed.
    Codec(Codec),
}

/// Which of the logs has a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    /// Compressed RAM.
    Ram,
    /// The swap cache on an SSD.
    Ssd,
    /// The slow store.
    Slow,
}

/// Where a copy of a page is. What word 0 says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Location {
    /// There is none: the page is in the process's memory, or of zeros and never touched.
    Nowhere,
    /// The page is one word all over, which word 1 has.
    Uniform {
        /// See the module's description.
        clean: bool,
    },
    /// In a tier.
    In {
        /// Which.
        tier: Tier,
        /// Where in it.
        stored: Stored,
        /// See the module's description.
        clean: bool,
    },
    /// It could not be read back: whoever touches it gets a memory error.
    Lost,
}

/// Word 0 of an entry. Equal words are equal locations, so that a change can be seen by comparing them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Word(pub u64);

const CLEAN: u64 = 1 << 4;

impl Word {
    /// The word that says nothing is stored.
    pub const NOWHERE: Self = Self(0);

    /// The word for `location`.
    pub fn of(location: Location) -> Self {
        let clean_bit = |clean: bool| if clean { CLEAN } else { 0 };
        Self(match location {
            Location::Nowhere => 0,
            Location::Uniform { clean } => 1 | clean_bit(clean),
            Location::In { tier, stored, clean } => {
                let tier = match tier {
                    Tier::Ram => 2,
                    Tier::Ssd => 3,
                    Tier::Slow => 4,
                };
                let codec = match stored.encoding {
                    Encoding::Raw => 0,
                    Encoding::Codec(codec) => u64::from(codec.number()),
                };
                assert!((1..=PAGE).contains(&usize::from(stored.len)));
                tier | clean_bit(clean) | codec << 8 | (u64::from(stored.len) - 1) << 12 | stored.place.0 << 24
            }
            Location::Lost => 5,
        })
    }

    /// What it says, or `None` if it says nothing that is known.
    pub fn decode(self) -> Option<Location> {
        let clean = self.0 & CLEAN != 0;
        let tier = match self.0 & 0xf {
            0 => return (self.0 == 0).then_some(Location::Nowhere),
            1 => return Some(Location::Uniform { clean }),
            2 => Tier::Ram,
            3 => Tier::Ssd,
            4 => Tier::Slow,
            5 => return Some(Location::Lost),
            _ => return None,
        };
        let encoding = match (self.0 >> 8 & 0xf) as u8 {
            0 => Encoding::Raw,
            number => Encoding::Codec(Codec::try_from(number).ok()?),
        };
        Some(Location::In {
            tier,
            stored: Stored {
                place: Place(self.0 >> 24),
                len: (self.0 >> 12 & 0xfff) as u16 + 1,
                encoding,
            },
            clean,
        })
    }

    /// The same, clean or not.
    pub fn with_clean(self, clean: bool) -> Self {
        Self(if clean { self.0 | CLEAN } else { self.0 & !CLEAN })
    }

    /// Whether the page could not be read back.
    pub fn is_lost(self) -> bool {
        matches!(self.decode(), Some(Location::Lost))
    }

    /// Whether the page is in the process's memory too.
    pub fn is_clean(self) -> bool {
        self.0 & CLEAN != 0
    }
}

/// Word 1 of a page that is stored in a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proof {
    /// See [`checksum`].
    pub checksum: u32,
    /// The pager's count of evicted pages, its lower 32 bits, when this one was evicted.
    pub evicted_at: u32,
}

impl Proof {
    /// As a word.
    pub fn word(self) -> u64 {
        u64::from(self.checksum) | u64::from(self.evicted_at) << 32
    }

    /// Of a word.
    pub fn of_word(word: u64) -> Self {
        Self {
            checksum: word as u32,
            evicted_at: (word >> 32) as u32,
        }
    }
}

/// What proves that `content` is what was evicted from `page`: a copy of another page, or of another time, does not
/// have it.
pub fn checksum(page: PageIndex, content: &[u8; PAGE]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&u64::from(page.get()).to_le_bytes()), content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_says_what_it_was_made_of(units in 0u64..1 << 40, len in 1u16..=4096, tier in 0u8..3, codec in 0u8..3, clean: bool) {
            let location = Location::In {
                tier: [Tier::Ram, Tier::Ssd, Tier::Slow][usize::from(tier)],
                stored: Stored {
                    place: Place::of_bytes(units * Place::UNIT),
                    len,
                    encoding: match codec { 0 => Encoding::Raw, number => Encoding::Codec(Codec::try_from(number).unwrap()) },
                },
                clean,
            };
            let word = Word::of(location);
            prop_assert_eq!(word.decode(), Some(location));
            prop_assert_eq!(word.is_clean(), clean);
            prop_assert_eq!(word.with_clean(!clean).with_clean(clean), word);
        }

        #[test]
        fn any_word_is_understood_or_refused(word: u64) {
            if let Some(location) = Word(word).decode() {
                // What is understood can be said again, but for bits without a meaning.
                prop_assert_eq!(Word::of(location).decode(), Some(location));
            }
        }
    }

    #[test]
    fn a_page_of_another_number_has_another_checksum() {
        let content = [7; PAGE];
        assert_ne!(
            checksum(PageIndex::new(1), &content),
            checksum(PageIndex::new(2), &content)
        );
    }
}
