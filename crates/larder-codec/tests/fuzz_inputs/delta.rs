//! Fuzz target: arbitrary bytes as deltas, and deltas of arbitrary pages.

use larder_codec::PAGE;
use larder_codec::delta::{DELTA_BYTES_MAX, apply, changed_words, encode};

use super::Input;

/// Applies `data` as a sequence of deltas, and encodes a delta between the first and the last page.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let fill = input.byte();
    let mut page = [fill; PAGE];
    for (place, byte) in page.iter_mut().zip(input.bytes(64)) {
        *place = *byte;
    }
    let first = page;
    while !input.0.is_empty() {
        let before = page;
        match apply(&mut page, input.0) {
            Ok(taken) => {
                assert!((1..=input.0.len()).contains(&taken));
                input.bytes(taken);
            }
            Err(_) => {
                assert!(page == before, "a delta that is refused has changed the page");
                input.byte();
            }
        }
    }
    let mut out = [0; DELTA_BYTES_MAX];
    let len = encode(&page, &first, &mut out).expect("there is room for any delta");
    assert_eq!(len == 1, changed_words(&page, &first) == 0);
    let mut again = first;
    assert_eq!(apply(&mut again, &out[..len]), Ok(len));
    assert!(again == page);
}
