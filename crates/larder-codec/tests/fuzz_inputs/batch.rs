//! Fuzz target: arbitrary bytes as encoded batches, and batches of arbitrary pages.

use std::cell::RefCell;

use larder_codec::PAGE;
use larder_codec::batch::{BATCH_PAGES, Decoder, Encoder, Method};

use super::Input;

thread_local! {
    /// Reused, so that each input starts from the state that the previous one has left.
    static CODERS: RefCell<(Encoder, Decoder)> = RefCell::new((Encoder::new(), Decoder::new()));
}

/// Decodes `data` as a batch with each method, and encodes pages made of it.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let pages = 1 + usize::from(input.byte()) % BATCH_PAGES;
    let runs = 1 + usize::from(input.byte()) % pages;
    CODERS.with_borrow_mut(|(encoder, decoder)| {
        decode(decoder, input.0, pages);
        there_and_back(encoder, decoder, input.0, pages.min(4), runs);
    });
}

fn decode(decoder: &mut Decoder, data: &[u8], pages: usize) {
    for method in Method::ALL {
        let mut decode = |fill| {
            let mut out = vec![fill; pages * PAGE];
            decoder.decode(method, data, &mut out).is_ok().then_some(out)
        };
        // A decoded batch contains none of the buffer's earlier contents.
        let (first, second) = (decode(0), decode(0xff));
        assert!(first == second, "{method} leaves some of the batch as it was");
    }
}

fn there_and_back(encoder: &mut Encoder, decoder: &mut Decoder, data: &[u8], pages: usize, run_pages: usize) {
    let filled = if data.is_empty() { &[0] } else { data };
    let batch: Vec<u8> = filled.iter().copied().cycle().take(pages * PAGE).collect();
    let runs: Vec<&[u8]> = batch.chunks(run_pages * PAGE).collect();
    let mut out = vec![0; batch.len()];
    let mut back = vec![0; batch.len()];
    for method in Method::ALL {
        if let Some(len) = encoder.encode(method, &runs, &mut out) {
            decoder.decode(method, &out[..len], &mut back).expect("decodes");
            assert!(back == batch, "{method} does not give the batch back");
        }
    }
}
