//! Detection of pages that repeat one word.

use crate::PAGE;

const WORD: usize = size_of::<u64>();

/// Returns the word that the page repeats, in native byte order; 0 for a page of zeros.
///
/// A page repeats a word if it equals itself shifted by one word. The comparison is the C library's `memcmp`, which
/// uses the widest vectors of the machine and ends at the first difference.
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
    fn uniform_page_returns_its_word() {
        for word in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef, 0x0101_0101_0101_0101] {
            assert_eq!(uniform_word(&page_of(word)), Some(word));
        }
    }

    #[test]
    fn any_changed_bit_is_detected() {
        let mut page = page_of(0x5555_0000_ffff_1234);
        for bit in 0..PAGE * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(uniform_word(&page), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn other_periods_are_not_uniform() {
        for period in [3, 5, 7, 9, 16, 2048] {
            let page = std::array::from_fn(|at| (at % period % 251) as u8);
            assert_eq!(uniform_word(&page), None, "period {period}");
        }
    }
}
