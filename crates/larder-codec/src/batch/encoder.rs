//! Encoder of batches.

use super::{BATCH_BYTES, Method, deflate, lz4, words, zstd};
use crate::PAGE;

/// State of all encoding methods, for one thread at a time, reused from batch to batch: about 800 KiB, and the memory
/// of zstd's tables once it is used.
pub struct Encoder {
    /// Buffer in which scattered pages are gathered, and words sorted.
    gathered: Box<[u8]>,
    zstd_fast: zstd::Encoder,
    zstd: zstd::Encoder,
    deflate: deflate::Encoder,
}

impl Encoder {
    /// Creates the state.
    #[must_use]
    pub fn new() -> Self {
        Self {
            gathered: vec![0; BATCH_BYTES].into(),
            zstd_fast: zstd::Encoder::new(zstd::LEVEL_FAST),
            zstd: zstd::Encoder::new(zstd::LEVEL),
            deflate: deflate::Encoder::new(),
        }
    }

    /// Returns whether `method` is worth choosing on this machine: deflate is not, without igzip.
    #[must_use]
    pub fn is_fast(&self, method: Method) -> bool {
        method != Method::Deflate || self.deflate.is_igzip()
    }

    /// Encodes the pages of `runs`, one after another, into the front of `out` and returns the length of the result,
    /// at least 1. Returns `None` if it does not fit; `out` then has no meaningful contents. A caller that rejects
    /// batches which save less than an eighth passes 7/8 of the input length.
    ///
    /// A run is any number of adjacent whole pages. Pages in one run are read in place; those of several runs are
    /// gathered first (except for [`Method::WordsLz4`], which needs no copy in either case).
    ///
    /// # Panics
    /// There is no page, there are more than [`super::BATCH_PAGES`], or a run is not of whole pages.
    pub fn encode<R: AsRef<[u8]>>(&mut self, method: Method, runs: &[R], out: &mut [u8]) -> Option<usize> {
        let bytes = bytes_of(runs);
        if method == Method::WordsLz4 {
            let shuffled = &mut self.gathered[..bytes];
            words::shuffle(runs, shuffled);
            return lz4::encode(shuffled, out, lz4::ACCELERATION);
        }
        let input = match runs {
            [run] => run.as_ref(),
            _ => gather(runs, &mut self.gathered[..bytes]),
        };
        match method {
            Method::Lz4 | Method::WordsLz4 => lz4::encode(input, out, lz4::ACCELERATION),
            Method::Lz4Fast => lz4::encode(input, out, lz4::ACCELERATION_FAST),
            Method::ZstdFast => self.zstd_fast.encode(input, out),
            Method::Zstd => self.zstd.encode(input, out),
            Method::Deflate => self.deflate.encode(input, out),
        }
    }
}

impl Default for Encoder {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the length of all runs together.
///
/// # Panics
/// See [`Encoder::encode`].
fn bytes_of<R: AsRef<[u8]>>(runs: &[R]) -> usize {
    let bytes = runs.iter().map(|run| run.as_ref().len()).sum();
    assert!((PAGE..=BATCH_BYTES).contains(&bytes), "invalid batch length: {bytes} bytes");
    let are_whole_pages = runs.iter().all(|run| run.as_ref().len().is_multiple_of(PAGE));
    assert!(are_whole_pages, "a run does not consist of whole pages");
    bytes
}

fn gather<'a, R: AsRef<[u8]>>(runs: &[R], to: &'a mut [u8]) -> &'a [u8] {
    let mut end = 0;
    for run in runs.iter().map(AsRef::as_ref) {
        to[end..end + run.len()].copy_from_slice(run);
        end += run.len();
    }
    to
}
