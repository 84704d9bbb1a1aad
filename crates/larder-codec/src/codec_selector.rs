//! Choice of the codec for single pages, based on the results for earlier pages.
//!
//! A byte that need not be stored is worth a number of nanoseconds of encoding ([`CodecGoal`]). The cost of a page is
//! the time of encoding it plus the value of the remaining bytes. [`CodecSelector`] keeps moving averages of both for
//! each codec, over about its last 16 pages, and takes the cheaper codec. One page of 31 is given to the other codec (a
//! probe), so that its averages follow when pages change.
//!
//! After 16 consecutive pages that did not fit the caller's limit, pages are stored unencoded, except for one of 7,
//! which is tried with either codec in turn. The first that fits ends this. Pages of which some fit now and then are
//! therefore always encoded.
//!
//! 31 and 7 are odd because pages arrive in patterns of even lengths. The choice is deterministic: it uses neither a
//! clock nor randomness. Records may arrive late, in any order and for pages of several threads, or not at all.

use crate::{Codec, PAGE};

/// Goal of the choice, which sets the value of a byte. The values follow from the time that zstd takes for each byte
/// that it saves over LZ4, on the machine of the measurements in `examples/pages`: 5 ns on a column of numbers, 9-19
/// ns on text, programs and heaps, 130 ns on pages that are nearly all zeros. Decoding takes a quarter to a third of
/// encoding, in proportion to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodecGoal {
    /// Compressed memory, whose decoding a guest waits for. Chooses LZ4, except where zstd stores less than half as
    /// much, or where many pages fit with zstd alone.
    Speed,
    /// SSD, which takes longer than any codec. Chooses zstd, except for pages that LZ4 reduces to nearly nothing,
    /// too.
    Size,
}

impl CodecGoal {
    const fn ns_per_byte(self) -> u64 {
        match self {
            Self::Speed => 6,
            Self::Size => 40,
        }
    }
}

/// Interval, in pages, at which the other codec is probed.
const PROBE_INTERVAL_PAGES: u32 = 31;
/// Consecutive pages that did not fit, after which pages are stored unencoded.
const INCOMPRESSIBLE_STREAK_MAX: u32 = 16;
/// Interval, in pages, at which encoding is retried while pages are stored unencoded.
const RETRY_INTERVAL_PAGES: u32 = 7;

/// Choice for pages of one kind. A separate one is needed for each kind that compresses differently, such as for each
/// VM.
#[derive(Clone, Debug)]
pub struct CodecSelector {
    goal: CodecGoal,
    lz4: CodecAverage,
    zstd: CodecAverage,
    /// Pages since a probe or a retry.
    pages_since_probe: u32,
    /// Codec of the next retry.
    next_retry: Codec,
    /// Consecutive pages that did not fit, up to [`INCOMPRESSIBLE_STREAK_MAX`].
    incompressible_streak: u32,
}

impl CodecSelector {
    /// Creates a choice without results. It begins with the codec that pays off for most pages: [`Codec::Lz4`] for
    /// [`CodecGoal::Speed`] and [`Codec::Zstd`] for [`CodecGoal::Size`].
    #[must_use]
    pub const fn new(goal: CodecGoal) -> Self {
        Self {
            goal,
            lz4: CodecAverage::new(2000, 6000),
            zstd: CodecAverage::new(1400, 13_000),
            pages_since_probe: 0,
            next_retry: Codec::Lz4,
            incompressible_streak: 0,
        }
    }

    /// Returns the codec for the next page, or `None` if it is to be stored unencoded. Not meant for pages that
    /// [`crate::uniform_word`] handles.
    pub fn pick(&mut self) -> Option<Codec> {
        let is_bypassed = self.incompressible_streak == INCOMPRESSIBLE_STREAK_MAX;
        let best = self.best();
        self.pages_since_probe += 1;
        if self.pages_since_probe < if is_bypassed { RETRY_INTERVAL_PAGES } else { PROBE_INTERVAL_PAGES } {
            return (!is_bypassed).then_some(best);
        }
        self.pages_since_probe = 0;
        if is_bypassed {
            let retry = self.next_retry;
            self.next_retry = other_codec(retry);
            Some(retry)
        } else {
            Some(other_codec(best))
        }
    }

    /// Records the result for a page: its length, `None` if it did not fit, and the nanoseconds that encoding took in
    /// either case.
    pub fn record(&mut self, codec: Codec, encoded: Option<usize>, ns: u64) {
        self.incompressible_streak =
            if encoded.is_some() { 0 } else { (self.incompressible_streak + 1).min(INCOMPRESSIBLE_STREAK_MAX) };
        let bytes = encoded.unwrap_or(PAGE).min(PAGE) as u64;
        match codec {
            Codec::Lz4 => self.lz4.record(bytes, ns),
            Codec::Zstd => self.zstd.record(bytes, ns),
        }
    }

    /// Returns the cheapest codec; of equals, the one that decodes faster.
    fn best(&self) -> Codec {
        let ns_per_byte = self.goal.ns_per_byte();
        if self.zstd.cost_ns(ns_per_byte) < self.lz4.cost_ns(ns_per_byte) { Codec::Zstd } else { Codec::Lz4 }
    }
}

const fn other_codec(codec: Codec) -> Codec {
    match codec {
        Codec::Lz4 => Codec::Zstd,
        Codec::Zstd => Codec::Lz4,
    }
}

/// Moving averages of one codec's pages, each stored as the sum over [`Self::PAGES`] pages.
#[derive(Clone, Debug)]
struct CodecAverage {
    bytes_sum: u64,
    ns_sum: u64,
}

impl CodecAverage {
    const PAGES: u64 = 16;
    /// Upper bound of the time of a page, so that no sum overflows.
    const NS_MAX: u64 = 1_000_000;

    const fn new(bytes: u64, ns: u64) -> Self {
        Self { bytes_sum: bytes * Self::PAGES, ns_sum: ns * Self::PAGES }
    }

    fn record(&mut self, bytes: u64, ns: u64) {
        // The thread may have lost its CPU meanwhile, which must not count for the codec.
        let ns = ns.min(4 * self.ns_sum / Self::PAGES).clamp(1, Self::NS_MAX);
        self.bytes_sum = self.bytes_sum - self.bytes_sum / Self::PAGES + bytes;
        self.ns_sum = self.ns_sum - self.ns_sum / Self::PAGES + ns;
    }

    fn cost_ns(&self, ns_per_byte: u64) -> u64 {
        (self.bytes_sum * ns_per_byte + self.ns_sum) / Self::PAGES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Length and nanoseconds with LZ4 and with zstd, as measured.
    struct Kind {
        lz4: (Option<usize>, u64),
        zstd: (Option<usize>, u64),
    }

    const TEXT: Kind = Kind { lz4: (Some(1870), 6200), zstd: (Some(1325), 12_700) };
    const SEQUENCE: Kind = Kind { lz4: (Some(2133), 5200), zstd: (Some(752), 11_500) };
    const SPARSE: Kind = Kind { lz4: (Some(133), 600), zstd: (Some(110), 3600) };
    const RANDOM: Kind = Kind { lz4: (None, 1100), zstd: (None, 2700) };
    /// Few distinct letters without repetition: only entropy coding helps.
    const BASE64: Kind = Kind { lz4: (None, 1300), zstd: (Some(3060), 6000) };

    /// Encodes `pages` pages of a kind; returns how many were left unencoded, used LZ4, and used zstd.
    fn feed(choice: &mut CodecSelector, kind: &Kind, pages: usize) -> [usize; 3] {
        let mut picks = [0; 3];
        for _ in 0..pages {
            match choice.pick() {
                None => picks[0] += 1,
                Some(codec @ Codec::Lz4) => {
                    choice.record(codec, kind.lz4.0, kind.lz4.1);
                    picks[1] += 1;
                }
                Some(codec @ Codec::Zstd) => {
                    choice.record(codec, kind.zstd.0, kind.zstd.1);
                    picks[2] += 1;
                }
            }
        }
        picks
    }

    /// Returns the result of [`feed`] once the averages are stable.
    fn steady_state(goal: CodecGoal, kind: &Kind) -> [usize; 3] {
        let mut choice = CodecSelector::new(goal);
        feed(&mut choice, kind, 4000);
        feed(&mut choice, kind, 3100)
    }

    /// Compressed memory uses LZ4, except where zstd stores less than half as much.
    #[test]
    fn memory_prefers_lz4() {
        assert_eq!(CodecSelector::new(CodecGoal::Speed).pick(), Some(Codec::Lz4));
        assert_eq!(steady_state(CodecGoal::Speed, &TEXT), [0, 3000, 100]);
        assert_eq!(steady_state(CodecGoal::Speed, &SPARSE), [0, 3000, 100]);
        assert_eq!(steady_state(CodecGoal::Speed, &SEQUENCE), [0, 100, 3000]);
    }

    /// The SSD uses zstd, except where LZ4 leaves nearly nothing, too.
    #[test]
    fn ssd_prefers_zstd() {
        assert_eq!(CodecSelector::new(CodecGoal::Size).pick(), Some(Codec::Zstd));
        assert_eq!(steady_state(CodecGoal::Size, &TEXT), [0, 100, 3000]);
        assert_eq!(steady_state(CodecGoal::Size, &SEQUENCE), [0, 100, 3000]);
        assert_eq!(steady_state(CodecGoal::Size, &SPARSE), [0, 3000, 100]);
    }

    #[test]
    fn incompressible_pages_are_only_probed() {
        for goal in [CodecGoal::Speed, CodecGoal::Size] {
            let mut choice = CodecSelector::new(goal);
            feed(&mut choice, &RANDOM, 100);
            assert_eq!(feed(&mut choice, &RANDOM, 3500), [3000, 250, 250], "{goal:?}");
        }
        let mut choice = CodecSelector::new(CodecGoal::Speed);
        assert_eq!(feed(&mut choice, &RANDOM, 16)[0], 0);
        assert_eq!(feed(&mut choice, &RANDOM, 70)[0], 60);
    }

    #[test]
    fn occasionally_fitting_pages_stay_encoded() {
        let mut choice = CodecSelector::new(CodecGoal::Speed);
        for _ in 0..500 {
            assert_eq!(feed(&mut choice, &RANDOM, 15)[0], 0);
            assert_eq!(feed(&mut choice, &TEXT, 1)[0], 0);
        }
    }

    #[test]
    fn only_compressing_codec_is_chosen() {
        for goal in [CodecGoal::Speed, CodecGoal::Size] {
            assert_eq!(steady_state(goal, &BASE64), [0, 100, 3000], "{goal:?}");
        }
    }

    #[test]
    fn newly_compressible_stream_is_compressed() {
        for goal in [CodecGoal::Speed, CodecGoal::Size] {
            let mut choice = CodecSelector::new(goal);
            feed(&mut choice, &RANDOM, 10_000);
            feed(&mut choice, &TEXT, 7);
            assert_eq!(feed(&mut choice, &TEXT, 1000)[0], 0, "{goal:?}");
        }
    }

    #[test]
    fn interruption_does_not_change_codec() {
        let mut choice = CodecSelector::new(CodecGoal::Speed);
        feed(&mut choice, &TEXT, 1000);
        choice.record(Codec::Lz4, TEXT.lz4.0, 50_000_000);
        assert_eq!(choice.best(), Codec::Lz4);
    }

    #[test]
    fn extreme_records_are_tolerated() {
        let mut choice = CodecSelector::new(CodecGoal::Size);
        for _ in 0..1000 {
            choice.record(Codec::Zstd, Some(usize::MAX), u64::MAX);
            choice.record(Codec::Lz4, Some(0), 0);
        }
        assert_eq!(choice.best(), Codec::Lz4);
    }
}
