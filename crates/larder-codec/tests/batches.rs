//! Tests of the guarantees for a migration: batches are restored exactly, and arbitrary input does no harm.

use larder_codec::PAGE;
use larder_codec::batch::{BATCH_BYTES, BATCH_PAGES, DecodeError, Decoder, Encoder, Method};
use proptest::collection::vec;
use proptest::prelude::*;

/// Size of a buffer for an incompressible batch, in any format.
const ROOM: usize = BATCH_BYTES + BATCH_BYTES / 128 + 1024;
/// Bytes that a method may require beyond its output: deflate as much as a stored block, zstd its bound.
const TO_SPARE: usize = 2048;

/// Generates data for pages, from uniform to random: a repeated piece, concatenated pieces, words that grow.
fn pieces() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        vec(any::<u8>(), 1..64),
        vec(prop_oneof![Just(b'a'), Just(b'b'), Just(b' ')], 1..200),
        (any::<u8>(), 1..600_usize).prop_map(|(byte, len)| vec![byte; len]),
        (any::<u64>(), vec(0..1000_u64, 1..200)).prop_map(|(mut word, steps)| {
            let grown = steps.into_iter().map(|step| {
                word = word.wrapping_add(step);
                word.to_le_bytes()
            });
            grown.flatten().collect()
        }),
        vec(any::<u8>(), PAGE),
    ];
    vec(piece, 1..20).prop_map(|pieces| pieces.concat())
}

fn batches() -> impl Strategy<Value = Vec<u8>> {
    let pages = prop_oneof![3 => 1..=8_usize, 1 => Just(BATCH_PAGES), 1 => 1..=BATCH_PAGES];
    (pieces(), pages).prop_map(|(bytes, pages)| bytes.into_iter().cycle().take(pages * PAGE).collect())
}

fn methods() -> impl Strategy<Value = Method> {
    prop::sample::select(&Method::ALL[..])
}

fn encoded(method: Method, batch: &[u8]) -> Vec<u8> {
    let mut out = vec![0; ROOM];
    let len = Encoder::new().encode(method, &[batch], &mut out).expect("there is room for any batch");
    out.truncate(len);
    out
}

/// Decodes into buffers of different contents, between bytes that must not change. The results must be equal, data or
/// error, and must not contain earlier contents of the buffer.
fn decoded(decoder: &mut Decoder, method: Method, data: &[u8], pages: usize) -> Result<Vec<u8>, DecodeError> {
    let mut decode = |fill: u8| {
        let mut place = vec![fill; (pages + 2) * PAGE];
        let decoded = decoder.decode(method, data, &mut place[PAGE..][..pages * PAGE]);
        let around = place[..PAGE].iter().chain(&place[(pages + 1) * PAGE..]);
        assert!(around.copied().all(|byte| byte == fill), "written outside");
        (decoded, place[PAGE..][..pages * PAGE].to_vec())
    };
    let (first, second) = (decode(0x55), decode(0xaa));
    assert_eq!(first.0, second.0, "decoding depends on what was decoded before");
    first.0.map(|()| {
        assert!(first.1 == second.1, "a batch shows what lay there before");
        first.1
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Batches decode to the original, independently of earlier batches and of runs.
    #[test]
    fn batches_decode_to_original(batches in vec((batches(), methods(), 1..9_usize), 1..6)) {
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
        let mut out = vec![0; ROOM];
        for (batch, method, run) in batches {
            let runs: Vec<&[u8]> = batch.chunks(run * PAGE).collect();
            let len = encoder.encode(method, &runs, &mut out).expect("there is room for any batch");
            prop_assert!(len > 0);
            prop_assert!(out[..len] == encoded(method, &batch), "{}: depends on the batches before or on runs", method);
            let back = decoded(&mut decoder, method, &out[..len], batch.len() / PAGE).expect("decodes");
            prop_assert!(back == batch, "{}", method);
        }
    }

    /// A batch is encoded if it fits, and refused otherwise, without writing past the limit.
    #[test]
    fn batch_respects_output_limit(
        some in batches(),
        method in methods(),
        anywhere in any::<prop::sample::Index>(),
        nearby in -10..40_isize,
    ) {
        let mut encoder = Encoder::new();
        let whole = encoded(method, &some);
        for room in [anywhere.index(some.len()), whole.len().saturating_add_signed(nearby).min(ROOM)] {
            let mut out = vec![0x5a; ROOM];
            match encoder.encode(method, &[&some[..]], &mut out[..room]) {
                Some(len) => {
                    let back = decoded(&mut Decoder::new(), method, &out[..len], some.len() / PAGE);
                    prop_assert!(back.expect("decodes") == some);
                }
                None => prop_assert!(room < whole.len() + TO_SPARE, "{}: {} in {}", method, whole.len(), room),
            }
            prop_assert!(out[room..].iter().all(|&byte| byte == 0x5a));
        }
        // The encoder still works.
        let mut out = vec![0; ROOM];
        let len = encoder.encode(method, &[&some[..]], &mut out).expect("there is room for any batch");
        prop_assert!(out[..len] == whole);
    }

    #[test]
    fn random_bytes_do_no_harm(data in vec(any::<u8>(), 0..3 * PAGE), method in methods(), pages in 1..=BATCH_PAGES) {
        let _ = decoded(&mut Decoder::new(), method, &data, pages);
    }

    #[test]
    fn damaged_batches_do_no_harm(
        batch in batches(),
        method in methods(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
        more in vec(any::<u8>(), 1..40),
        other_pages in 1..=BATCH_PAGES,
    ) {
        let mut decoder = Decoder::new();
        let pages = batch.len() / PAGE;
        let whole = encoded(method, &batch);

        let mut data = whole.clone();
        for (at, byte) in damage {
            let at = at.index(data.len());
            data[at] = byte;
        }
        let _ = decoded(&mut decoder, method, &data, pages);

        let cut = &whole[..cut.index(whole.len())];
        prop_assert!(decoded(&mut decoder, method, cut, pages).is_err(), "{} of {} bytes decode", cut.len(), whole.len());
        let longer = [&whole[..], &more].concat();
        prop_assert!(decoded(&mut decoder, method, &longer, pages).is_err(), "{}: more bytes decode", method);
        if other_pages != pages {
            prop_assert!(decoded(&mut decoder, method, &whole, other_pages).is_err());
        }
        // The decoder still works.
        prop_assert!(decoded(&mut decoder, method, &whole, pages).expect("decodes") == batch);
    }
}

/// Inverts each bit of an encoding of two pages, which reaches other paths than random damage.
#[test]
fn single_bit_errors_do_no_harm() {
    let mut decoder = Decoder::new();
    let mixed: Vec<u8> = (0..2 * PAGE)
        .map(|at| match at / 2048 {
            0 => (at * at / 7) as u8,
            1 => 0,
            2 => b"of letters, of letters and of words. "[at % 37],
            _ => u8::from(at % 8 == 0) * (at / 8) as u8,
        })
        .collect();
    for method in Method::ALL {
        let mut data = encoded(method, &mixed);
        for bit in 0..data.len() * 8 {
            data[bit / 8] ^= 1 << (bit % 8);
            let _ = decoded(&mut decoder, method, &data, 2);
            data[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn counters_compress_well_as_words() {
    for step in [1, 8, 4096, 1 << 40] {
        let batch: Vec<u8> = (0..BATCH_BYTES as u64 / 8).flat_map(|at| (77 + at * step).to_le_bytes()).collect();
        assert!(encoded(Method::WordsLz4, &batch).len() < BATCH_BYTES / 150);
    }
}

/// Data made by lz4 1.9, zstd 1.5 and zlib 1.2: sent data stays readable with every version of the libraries.
#[test]
fn data_of_other_encoders_decodes() {
    let batch: Vec<u8> = b"Larder keeps its pages. ".iter().copied().cycle().take(PAGE).collect();
    let lz4 = [&b"\xff\x09Larder keeps its pages. \x18\x00"[..], &[0xff; 15], &b"\xdf\x50s its"[..]].concat();
    let zstd = b"\x28\xb5\x2f\xfd\x60\x00\x0f\x05\x01\x00\xc0Larder keeps its pages. \x01\x00\x94\x7f\xfd\x39\x06";
    let deflate = b"\xed\xc8\xc1\x09\x00\x20\x0c\x04\xc1\x56\xae\x02\x2b\x49\x13\x01\x83\x88\x9f\x90\xd8\x3f\xf6\x21\x3b\xcf\x31\xaf\x19\xa5\x13\x91\xad\x7d\x5b\xe9\x2b\x7a\xc8\x78\x9e\xe7\x79\x9e\xe7\x79\x9e\xe7\x79\x9e\xff\xe6\x1f";
    let mut decoder = Decoder::new();
    let cases = [
        (Method::Lz4, &lz4[..]),
        (Method::Lz4Fast, &lz4),
        (Method::Zstd, zstd),
        (Method::ZstdFast, zstd),
        (Method::Deflate, deflate),
    ];
    for (method, data) in cases {
        assert!(decoded(&mut decoder, method, data, 1).expect("decodes") == batch, "{method}");
    }
}

/// A counter that starts at 5 with a step of 2, by its definition: the lowest bytes of the differences are 5, then
/// 511 times 2; all others are 0.
#[test]
fn first_version_sorted_words_decode() {
    let batch: Vec<u8> = (0..PAGE as u64 / 8).flat_map(|at| (5 + 2 * at).to_le_bytes()).collect();
    let sorted = [&[5][..], &[2; 511], &[0; PAGE - 512]].concat();
    let block = encoded(Method::Lz4, &sorted);
    assert!(decoded(&mut Decoder::new(), Method::WordsLz4, &block, 1).expect("decodes") == batch);
    assert!(encoded(Method::WordsLz4, &batch) == block);
}

#[test]
fn excessive_lengths_are_refused() {
    let mut decoder = Decoder::new();
    for first in [0xf0, 0x0f, 0xff] {
        let data = [&[first][..], &[255; 5000]].concat();
        for method in [Method::Lz4, Method::WordsLz4] {
            assert!(decoded(&mut decoder, method, &data, 1).is_err());
        }
    }
    let window_of_terabytes = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xff, 0x03, 0x00, 0x02, 0x00];
    let content_of_exabytes = [&[0x28, 0xb5, 0x2f, 0xfd, 0xe0][..], &[0xff; 8], &[0x03, 0x00, 0x02, 0x00]].concat();
    for data in [&window_of_terabytes[..], &content_of_exabytes] {
        assert!(decoded(&mut decoder, Method::Zstd, data, 1).is_err());
    }
}

#[test]
fn short_data_is_refused_with_reason() {
    // Only literals: five bytes of a block.
    let short = DecodeError::Short { method: Method::Lz4, len: 6, expected: 2 * PAGE, decoded: 5 };
    assert_eq!(short.to_string(), "lz4: 6 encoded bytes decode to 5 bytes instead of the 8192 of the batch");
    let mut decoder = Decoder::new();
    assert_eq!(decoded(&mut decoder, Method::Lz4, &[0x50, 1, 2, 3, 4, 5], 2), Err(short));
    for method in Method::ALL {
        assert!(decoded(&mut decoder, method, &[], 1).is_err());
    }
}

#[test]
fn coders_are_send() {
    fn moves<T: Send>() {}
    moves::<Encoder>();
    moves::<Decoder>();
}
