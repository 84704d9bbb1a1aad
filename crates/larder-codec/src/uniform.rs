//! Pages that one word tells.

use crate::PAGE;

const WORD: usize = size_of::<u64>();

/// The word that the page is made of all over, in the machine's byte order; 0 for a page of zeros.
///
/// A page that equals itself one word further on is such a page, and this comparison is the C library's `memcmp`: with
/// the widest vectors of the machine, and over at the first difference.
#[must_use]
pub fn uniform_word(page: &[u8; PAGE]) -> Option<u64> {
    let (first, rest) = page.split_first_chunk::<WORD>().expect("a page is longer than a word");
    (page[..PAGE - WORD] == *rest).then(|| u64::from_ne_bytes(*first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page_of(word: u64) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        for place in page.chunks_exact_mut(WORD) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        page
    }

    #[test]
    fn a_page_of_one_word_tells_it() {
        for word in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef, 0x0101_0101_0101_0101] {
            assert_eq!(uniform_word(&page_of(word)), Some(word));
        }
    }

    #[test]
    fn one_other_bit_anywhere_is_seen() {
        let mut page = page_of(0x5555_0000_ffff_1234);
        for bit in 0..PAGE * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(uniform_word(&page), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_period_other_than_a_word_is_seen() {
        for period in [3, 5, 7, 9, 16, 2048] {
            let page = std::array::from_fn(|at| (at % period % 251) as u8);
            assert_eq!(uniform_word(&page), None, "period {period}");
        }
    }
}
