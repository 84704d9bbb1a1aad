//! Raw deflate streams: by igzip if its library is available, otherwise by zlib-rs.
//!
//! Decoding batches of 64 pages, igzip reaches, in MB/s of one core: text 969, JSON 2392, heaps 760, base64 850,
//! mixed pages 911. zlib-rs 0.6 reaches 569, 1521, 595, 523 and 786. igzip is slower only on pages that are nearly
//! all zeros: 3501 against 9831.

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use crate::isal::{self, Deflate, Inflate};

pub(super) enum Encoder {
    Igzip(Deflate),
    /// zlib-rs at its fastest level, which is a tenth to a third as fast as igzip.
    Zlib(Compress),
}

impl Encoder {
    pub(super) fn new() -> Self {
        match isal::loaded() {
            Ok(isal) => Self::Igzip(Deflate::new(isal)),
            Err(_) => Self::Zlib(Compress::new(Compression::fast(), false)),
        }
    }

    pub(super) const fn is_igzip(&self) -> bool {
        matches!(self, Self::Igzip(_))
    }

    /// Encodes a batch; see [`super::Encoder::encode`].
    pub(super) fn encode(&mut self, input: &[u8], out: &mut [u8]) -> Option<usize> {
        match self {
            Self::Igzip(igzip) => igzip.encode(input, out),
            Self::Zlib(zlib) => {
                zlib.reset();
                if let Ok(Status::StreamEnd) = zlib.compress(input, out, FlushCompress::Finish) {
                    return Some(zlib.total_out() as usize);
                }
                // A reset leaves zlib-rs (0.6.8) at its position in the output that did not fit. After a few such
                // batches it would panic for lack of space after that position.
                *zlib = Compress::new(Compression::fast(), false);
                None
            }
        }
    }
}

pub(super) enum Decoder {
    Igzip(Inflate),
    Zlib(Decompress),
}

impl Decoder {
    pub(super) fn new() -> Self {
        match isal::loaded() {
            Ok(isal) => Self::Igzip(Inflate::new(isal)),
            Err(_) => Self::Zlib(Decompress::new(false)),
        }
    }

    /// Decodes `data` and returns the number of bytes, or an error if it is not a stream of at most the length of
    /// `out`.
    pub(super) fn decode(&mut self, data: &[u8], out: &mut [u8]) -> Result<usize, &'static str> {
        match self {
            Self::Igzip(igzip) => igzip.decode(data, out),
            Self::Zlib(zlib) => {
                zlib.reset(false);
                match zlib.decompress(data, out, FlushDecompress::Finish) {
                    Ok(Status::StreamEnd) if zlib.total_in() == data.len() as u64 => Ok(zlib.total_out() as usize),
                    Ok(Status::StreamEnd) => Err("the stream ends before the end of the data"),
                    Ok(Status::Ok | Status::BufError) => {
                        Err("the stream does not end at the end of the data and the pages")
                    }
                    Err(_) => Err("the data is not a deflate stream"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE;
    use crate::measure::MemoryContent;

    const PAGES: usize = 16;

    fn encoders() -> [Encoder; 2] {
        let igzip = Encoder::new();
        assert!(igzip.is_igzip(), "libisal.so.2 is not installed, or cannot be used");
        [igzip, Encoder::Zlib(Compress::new(Compression::fast(), false))]
    }

    fn decoders() -> [Decoder; 2] {
        [Decoder::new(), Decoder::Zlib(Decompress::new(false))]
    }

    /// A batch that does not fit leaves no state that affects the next batch.
    #[test]
    fn misfit_does_not_affect_next_batch() {
        let (random, text) =
            (MemoryContent::Random.generate(PAGES * PAGE, 3), MemoryContent::Text.generate(PAGES * PAGE, 3));
        for (mut encoder, mut fresh) in encoders().into_iter().zip(encoders()) {
            let mut expected = vec![0; text.len()];
            let expected_len = fresh.encode(&text, &mut expected).expect("there is room");
            let mut out = vec![0; random.len()];
            for short in 1..200 {
                assert_eq!(encoder.encode(&random, &mut out[..random.len() - short]), None);
            }
            assert_eq!(encoder.encode(&text, &mut out), Some(expected_len));
            assert!(out[..expected_len] == expected[..expected_len]);
        }
    }

    #[test]
    fn igzip_and_zlib_read_each_other() {
        for kind in MemoryContent::ALL {
            let batch = kind.generate(PAGES * PAGE, 3);
            for mut encoder in encoders() {
                let mut out = vec![0; batch.len() + batch.len() / 8];
                let len = encoder.encode(&batch, &mut out).expect("there is room");
                for mut decoder in decoders() {
                    let mut back = vec![0x5a; batch.len()];
                    assert_eq!(decoder.decode(&out[..len], &mut back), Ok(batch.len()));
                    assert!(back == batch, "{}", kind.name());
                    assert!(decoder.decode(&out[..len - 1], &mut back).is_err());
                    assert!(decoder.decode(&out[..len + 1], &mut back).is_err());
                    assert!(decoder.decode(&out[..len], &mut back[..PAGE]).is_err());
                }
            }
        }
    }
}
