//! Tests of the guarantees for a pager: pages are restored exactly, and arbitrary stored bytes do no harm.

use larder_codec::{Codec, DecodeError, Decoder, Encoder, PAGE, uniform_word};
use proptest::collection::vec;
use proptest::prelude::*;

type Page = Box<[u8; PAGE]>;

/// Size of a buffer for an incompressible page, in either format.
const ROOM: usize = PAGE + 64;
/// Bytes that a codec may require beyond its output.
const TO_SPARE: usize = 32;

fn page_of(bytes: &[u8]) -> Page {
    Box::new(std::array::from_fn(|at| bytes[at % bytes.len()]))
}

/// Generates pages from uniform to random: a repeated piece, several kinds of pieces, words that differ little.
fn pages() -> impl Strategy<Value = Page> {
    let piece = prop_oneof![
        vec(any::<u8>(), 1..64),
        vec(prop_oneof![Just(b'a'), Just(b'b'), Just(b' ')], 1..200),
        (any::<u8>(), 1..600_usize).prop_map(|(byte, len)| vec![byte; len]),
        vec(0..1000_u64, 1..60).prop_map(|words| words.iter().flat_map(|word| word.to_le_bytes()).collect()),
    ];
    prop_oneof![
        vec(any::<u8>(), 1..40).prop_map(|bytes| page_of(&bytes)),
        vec(piece, 1..40).prop_map(|pieces| page_of(&pieces.concat())),
        vec(any::<u8>(), PAGE).prop_map(|bytes| page_of(&bytes)),
    ]
}

fn codecs() -> impl Strategy<Value = Codec> {
    prop::sample::select(&Codec::ALL[..])
}

fn encoded(codec: Codec, page: &[u8; PAGE]) -> Vec<u8> {
    let mut out = vec![0; ROOM];
    let len = Encoder::new().encode(codec, page, &mut out).expect("there is room for any page");
    out.truncate(len);
    out
}

/// Decodes into pages of different contents. The results must be equal, data or error, and must not contain earlier
/// contents of the page.
fn decoded(decoder: &mut Decoder, codec: Codec, data: &[u8]) -> Result<Page, DecodeError> {
    let [mut one, mut other] = [Box::new([0x55; PAGE]), Box::new([0xaa; PAGE])];
    let (first, second) = (decoder.decode(codec, data, &mut one), decoder.decode(codec, data, &mut other));
    assert_eq!(first, second, "decoding depends on what was decoded before");
    first.map(|()| {
        assert!(one == other, "a page shows what lay there before");
        one
    })
}

proptest! {
    #[test]
    fn pages_decode_to_original(pages in vec((pages(), codecs()), 1..8)) {
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
        let mut out = [0; ROOM];
        for (page, codec) in pages {
            let len = encoder.encode(codec, &page, &mut out).expect("there is room for any page");
            prop_assert!(len > 0);
            prop_assert_eq!(&out[..len], &encoded(codec, &page), "what is made of a page depends on those before");
            prop_assert!(decoded(&mut decoder, codec, &out[..len]).expect("decodes") == page);
        }
    }

    /// A page is encoded if it fits, and refused otherwise, without writing past the limit.
    #[test]
    fn page_respects_output_limit(
        page in pages(),
        codec in codecs(),
        anywhere in 0..ROOM,
        nearby in -10..40_isize,
    ) {
        let mut encoder = Encoder::new();
        let whole = encoded(codec, &page);
        for room in [anywhere, whole.len().saturating_add_signed(nearby).min(ROOM)] {
            // The buffer extends past the limit, so that a write there is detected.
            let mut out = vec![0x5a; ROOM];
            match encoder.encode(codec, &page, &mut out[..room]) {
                Some(len) => prop_assert!(decoded(&mut Decoder::new(), codec, &out[..len]).expect("decodes") == page),
                None => prop_assert!(room < whole.len() + TO_SPARE, "{} bytes do not fit into {}", whole.len(), room),
            }
            prop_assert!(out[room..].iter().all(|&byte| byte == 0x5a));
        }
        // The encoder still works.
        let mut out = vec![0; ROOM];
        let len = encoder.encode(codec, &page, &mut out).expect("there is room for any page");
        prop_assert_eq!(&out[..len], &whole);
    }

    #[test]
    fn random_bytes_do_no_harm(data in vec(any::<u8>(), 0..2 * PAGE), codec in codecs()) {
        let _ = decoded(&mut Decoder::new(), codec, &data);
    }

    #[test]
    fn damaged_pages_do_no_harm(
        page in pages(),
        codec in codecs(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
        more in vec(any::<u8>(), 0..40),
    ) {
        let mut decoder = Decoder::new();
        let whole = encoded(codec, &page);

        let mut data = whole.clone();
        for (at, byte) in damage {
            let at = at.index(data.len());
            data[at] = byte;
        }
        let _ = decoded(&mut decoder, codec, &data);

        let cut = &whole[..cut.index(whole.len())];
        prop_assert!(decoded(&mut decoder, codec, cut).is_err(), "{} of {} bytes decode", cut.len(), whole.len());

        let _ = decoded(&mut decoder, codec, &[&whole[..], &more].concat());
        // The decoder still works.
        prop_assert!(decoded(&mut decoder, codec, &whole).expect("decodes") == page);
    }

    #[test]
    fn uniform_word_is_detected(page in pages(), word in any::<u64>()) {
        let mut words = page.chunks_exact(8);
        let first = words.next().expect("a page has words");
        let expected = words.all(|next| next == first).then(|| u64::from_ne_bytes(first.try_into().expect("8 bytes")));
        prop_assert_eq!(uniform_word(&page), expected);
        prop_assert_eq!(uniform_word(&page_of(&word.to_ne_bytes())), Some(word));
    }
}

/// Inverts each bit of the encodings of a few pages, which reaches other paths than random damage.
#[test]
fn single_bit_errors_do_no_harm() {
    let mut decoder = Decoder::new();
    let mixed: Page = Box::new(std::array::from_fn(|at| match at / 1024 {
        0 => (at * at / 7) as u8,
        1 => 0,
        2 => b"of letters, of letters and of words. "[at % 37],
        _ => (at % 8 == 0) as u8 * (at / 8) as u8,
    }));
    for page in [mixed, page_of(b"Larder keeps its pages. "), page_of(&[0])] {
        for codec in Codec::ALL {
            let mut data = encoded(codec, &page);
            for bit in 0..data.len() * 8 {
                data[bit / 8] ^= 1 << (bit % 8);
                let _ = decoded(&mut decoder, codec, &data);
                data[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }
}

/// Bytes of 255 announce a long match or literal in LZ4; a zstd frame may announce a window or content of any size.
#[test]
fn excessive_lengths_are_refused() {
    let mut decoder = Decoder::new();
    for first in [0xf0, 0x0f, 0xff] {
        let data = [&[first][..], &[255; 5000]].concat();
        assert!(decoded(&mut decoder, Codec::Lz4, &data).is_err());
    }
    let window_of_terabytes = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xff, 0x03, 0x00, 0x02, 0x00];
    let content_of_exabytes = [&[0x28, 0xb5, 0x2f, 0xfd, 0xe0][..], &[0xff; 8], &[0x03, 0x00, 0x02, 0x00]].concat();
    for data in [&window_of_terabytes[..], &content_of_exabytes] {
        assert!(decoded(&mut decoder, Codec::Zstd, data).is_err());
    }
}

#[test]
fn wrong_page_length_is_refused() {
    let mut decoder = Decoder::new();
    // Only literals, five bytes of a block; and an empty frame.
    let five = [0x50, 1, 2, 3, 4, 5];
    let short = DecodeError::Short { codec: Codec::Lz4, len: 6, decoded: 5 };
    assert_eq!(short.to_string(), "lz4: the 6 stored bytes decode to 5 bytes instead of a page of 4096");
    assert_eq!(decoded(&mut decoder, Codec::Lz4, &five), Err(short));
    for codec in Codec::ALL {
        assert!(decoded(&mut decoder, codec, &[]).is_err());
        let page = page_of(b"pages and pages");
        let twice = [encoded(codec, &page), encoded(codec, &page)].concat();
        assert!(decoded(&mut decoder, codec, &twice).is_err());
    }
}

/// Data made by the command lines of lz4 1.9 and zstd 1.5: stored data stays readable with every version of the
/// libraries.
#[test]
fn data_of_other_encoders_decodes() {
    let lz4 = [&b"\xff\x09Larder keeps its pages. \x18\x00"[..], &[0xff; 15], &b"\xdf\x50s its"[..]].concat();
    let zstd = b"\x28\xb5\x2f\xfd\x60\x00\x0f\x05\x01\x00\xc0Larder keeps its pages. \x01\x00\x94\x7f\xfd\x39\x06";
    let page = page_of(b"Larder keeps its pages. ");
    let mut decoder = Decoder::new();
    assert_eq!(decoded(&mut decoder, Codec::Lz4, &lz4), Ok(page.clone()));
    assert_eq!(decoded(&mut decoder, Codec::Zstd, zstd), Ok(page));
}

#[test]
fn coders_are_send() {
    fn moves<T: Send>() {}
    moves::<Encoder>();
    moves::<Decoder>();
}
