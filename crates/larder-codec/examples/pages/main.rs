//! Measures the time and the output size of the codecs on pages of this machine's files, and on generated ones; pages
//! of other files by name:
//!
//! `cargo run --release -p larder-codec --example pages [FILE...]`
//!
//! Each time is the smallest of several passes over all pages of a kind, so that each page comes from memory and is
//! new to the branch predictor, as in a pager.

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use corpus::Corpus;
use larder_codec::{Codec, CodecGoal, CodecSelector, Decoder, Encoder, PAGE, uniform_word};

mod corpus;

const PASSES: usize = 7;
/// Limit of an encoded page: one that saves less than a quarter is stored unencoded.
const LIMIT: usize = PAGE * 3 / 4;

fn main() {
    let mut corpora = vec![
        corpus::of_files("text", Path::new("/usr/share"), corpus::is_text),
        corpus::of_files("binaries", Path::new("/usr/bin"), |_| true),
        corpus::heap(),
        corpus::json(),
        corpus::sparse(),
        corpus::sequence(),
        corpus::random(),
    ];
    corpora.extend(std::env::args().skip(1).map(|path| corpus::of_files(&path, Path::new(&path), |_| true)));

    println!(
        "ns a page; bytes that are left of 100, pages that do not save a quarter counted as they are; what does not fit"
    );
    println!("{:10} {:8} {:>7} {:>7} {:>6} {:>6}", "pages", "", "encode", "decode", "left", "raw");
    for corpus in corpora.iter().filter(|corpus| !corpus.pages.is_empty()) {
        plain(corpus);
        for codec in Codec::ALL {
            encoded(corpus, codec);
        }
        for goal in [CodecGoal::Speed, CodecGoal::Size] {
            chosen(corpus, goal);
        }
    }
}

/// Returns the nanoseconds for a page, of the fastest pass.
fn ns_a_page(corpus: &Corpus, mut each: impl FnMut(usize, &[u8; PAGE])) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..PASSES {
        let start = Instant::now();
        for (index, page) in corpus.pages.iter().enumerate() {
            each(index, page);
        }
        best = best.min(start.elapsed().as_nanos() as f64 / corpus.pages.len() as f64);
    }
    best
}

/// Measures operations without a codec: a copy, and the detection of one word, in these pages and in as many zero
/// pages.
fn plain(corpus: &Corpus) {
    let mut to = [0; PAGE];
    let copy = ns_a_page(corpus, |_, page| black_box(&mut to).copy_from_slice(page));
    let look = ns_a_page(corpus, |_, page| {
        black_box(uniform_word(page));
    });
    // The pages are written once, because otherwise all of them would map the kernel's single zero page.
    let zeros = Corpus { name: String::new(), pages: corpus.pages.iter().map(|_| [black_box(0); PAGE]).collect() };
    let look_at_zeros = ns_a_page(&zeros, |_, page| {
        black_box(uniform_word(page));
    });
    let word = u64::from_ne_bytes(*zeros.pages[0].first_chunk().expect("a page"));
    let cached = ns_a_page(&zeros, |_, _| {
        black_box(uniform_word(black_box(&zeros.pages[0])));
    });
    println!(
        "{:10} memcpy {copy:.0}; uniform_word {look:.0}, of pages of {word} {look_at_zeros:.0}, of one in the cache {cached:.0}",
        corpus.name
    );
}

fn encoded(corpus: &Corpus, codec: Codec) {
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
    let mut out = vec![[0; LIMIT]; corpus.pages.len()];
    let mut lens = vec![None; corpus.pages.len()];
    let encode = ns_a_page(corpus, |index, page| lens[index] = encoder.encode(codec, page, &mut out[index]));

    let mut page = [0; PAGE];
    for (index, original) in corpus.pages.iter().enumerate() {
        if let Some(len) = lens[index] {
            decoder.decode(codec, &out[index][..len], &mut page).expect("decodes");
            assert_eq!(&page, original);
        }
    }
    let decode = ns_a_page(corpus, |index, original| match lens[index] {
        Some(len) => decoder.decode(codec, &out[index][..len], black_box(&mut page)).expect("decodes"),
        None => black_box(&mut page).copy_from_slice(original),
    });
    let left: usize = lens.iter().map(|len| len.unwrap_or(PAGE)).sum();
    let raw = lens.iter().filter(|len| len.is_none()).count();
    line(corpus, &codec.to_string(), encode, Some(decode), left, raw);
}

/// Measures the choice as a pager uses it: with a record for each page.
fn chosen(corpus: &Corpus, goal: CodecGoal) {
    let mut encoder = Encoder::new();
    let mut out = [0; LIMIT];
    let mut choice = CodecSelector::new(goal);
    let (mut left, mut raw) = (0, 0);
    let encode = ns_a_page(corpus, |index, page| {
        if index == 0 {
            (left, raw) = (0, 0);
        }
        let len = choice.pick().and_then(|codec| {
            let start = Instant::now();
            let len = encoder.encode(codec, page, &mut out);
            choice.record(codec, len, start.elapsed().as_nanos() as u64);
            len
        });
        left += len.unwrap_or(PAGE);
        raw += usize::from(len.is_none());
    });
    line(corpus, &format!("{goal:?}").to_lowercase(), encode, None, left, raw);
}

fn line(corpus: &Corpus, how: &str, encode: f64, decode: Option<f64>, left: usize, raw: usize) {
    let pages = corpus.pages.len();
    println!(
        "{:10} {how:8} {encode:7.0} {:>7} {:5.1}% {:5.1}%",
        corpus.name,
        decode.map_or(String::new(), |ns| format!("{ns:.0}")),
        100.0 * left as f64 / (pages * PAGE) as f64,
        100.0 * raw as f64 / pages as f64,
    );
}
