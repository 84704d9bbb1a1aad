//! Which codec pays, by what it did with the pages before.
//!
//! A byte that need not be stored is worth so many nanoseconds of encoding ([`Goal`]). A page then costs what encoding it
//! took and what the bytes that remain are worth. [`Choice`] keeps, for each codec, moving averages of both over its last
//! 16 pages or so, and takes the codec that costs least. One page of 31 goes to the other one, so that its averages
//! follow when pages change.
//!
//! Once 16 pages running did not fit the caller's limit, pages are kept as they are, but for one of 7 that is tried, with
//! either codec in turn; the first that fits ends this. Pages that fit now and then among others are so never given up.
//!
//! 31 and 7 are odd since pages come in patterns of even lengths. The same records lead to the same picks:
//! there is no clock and no randomness here. Records may come late, in any order and from several threads' pages, or not
//! at all.

use crate::{Codec, PAGE};

/// What counts. What a byte is worth goes by what zstd takes for each byte that it saves over LZ4, on the machine of the
/// measurements in `examples/pages`: 5 ns on a column of numbers, 9-19 ns on text, programs and heaps, 130 ns on pages
/// that are nearly all zeros. Decoding takes a quarter to a third of encoding and goes along with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Compressed memory: a guest waits for the decoding. LZ4, but where zstd stores less than half as much, and where many
    /// pages fit with zstd alone.
    Speed,
    /// The SSD, which takes longer than any codec: zstd, but for pages of which LZ4 leaves nearly nothing too.
    Size,
}

impl Goal {
    const fn ns_per_byte(self) -> u64 {
        match self {
            Self::Speed => 6,
            Self::Size => 40,
        }
    }
}

/// Pages from one that the other codec gets to the next.
const PROBE_EVERY: u32 = 31;
/// Pages running that did not fit, after which pages are kept as they are.
const MISFITS_MAX: u32 = 16;
/// Pages from one that is tried all the same to the next.
const RETRY_EVERY: u32 = 7;

/// The next codec to use on pages of one kind: one for each kind that compresses in its own way, such as a VM.
#[derive(Clone, Debug)]
pub struct Choice {
    goal: Goal,
    lz4: Average,
    zstd: Average,
    /// Since a probe or a retry.
    pages: u32,
    /// What the next retry takes.
    retry: Codec,
    /// Running, up to [`MISFITS_MAX`].
    misfits: u32,
}

impl Choice {
    /// That has seen no page: it begins with what pays on most, [`Codec::Lz4`] for [`Goal::Speed`] and [`Codec::Zstd`] for
    /// [`Goal::Size`].
    #[must_use]
    pub const fn new(goal: Goal) -> Self {
        Self {
            goal,
            lz4: Average::new(2000, 6000),
            zstd: Average::new(1400, 13_000),
            pages: 0,
            retry: Codec::Lz4,
            misfits: 0,
        }
    }

    /// What to encode the next page with; `None`: keep it as it is. Not for pages that [`crate::uniform_word`] tells.
    pub fn pick(&mut self) -> Option<Codec> {
        let kept = self.misfits == MISFITS_MAX;
        let best = self.best();
        self.pages += 1;
        if self.pages < if kept { RETRY_EVERY } else { PROBE_EVERY } {
            return (!kept).then_some(best);
        }
        self.pages = 0;
        if kept {
            let retry = self.retry;
            self.retry = other(retry);
            Some(retry)
        } else {
            Some(other(best))
        }
    }

    /// Hears what became of a page: the bytes it takes, `None` if it did not fit, and the nanoseconds that encoding took,
    /// in either case.
    pub fn record(&mut self, codec: Codec, encoded: Option<usize>, ns: u64) {
        self.misfits = if encoded.is_some() {
            0
        } else {
            (self.misfits + 1).min(MISFITS_MAX)
        };
        let bytes = encoded.unwrap_or(PAGE).min(PAGE) as u64;
        match codec {
            Codec::Lz4 => self.lz4.record(bytes, ns),
            Codec::Zstd => self.zstd.record(bytes, ns),
        }
    }

    /// What costs least; of equals, what is decoded sooner.
    fn best(&self) -> Codec {
        let ns_per_byte = self.goal.ns_per_byte();
        if self.zstd.cost_ns(ns_per_byte) < self.lz4.cost_ns(ns_per_byte) {
            Codec::Zstd
        } else {
            Codec::Lz4
        }
    }
}

const fn other(codec: Codec) -> Codec {
    match codec {
        Codec::Lz4 => Codec::Zstd,
        Codec::Zstd => Codec::Lz4,
    }
}

/// Moving averages of one codec's pages, each as the sum that [`Self::PAGES`] pages like it would have.
#[derive(Clone, Debug)]
struct Average {
    bytes_sum: u64,
    ns_sum: u64,
}

impl Average {
    const PAGES: u64 = 16;
    /// Of one page; no sum overflows.
    const NS_MAX: u64 = 1_000_000;

    const fn new(bytes: u64, ns: u64) -> Self {
        Self {
            bytes_sum: bytes * Self::PAGES,
            ns_sum: ns * Self::PAGES,
        }
    }

    fn record(&mut self, bytes: u64, ns: u64) {
        // A thread that lost its CPU meanwhile says nothing about the codec.
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

    /// Bytes and nanoseconds of LZ4 and zstd, as measured.
    struct Kind {
        lz4: (Option<usize>, u64),
        zstd: (Option<usize>, u64),
    }

    const TEXT: Kind = Kind {
        lz4: (Some(1870), 6200),
        zstd: (Some(1325), 12_700),
    };
    const SEQUENCE: Kind = Kind {
        lz4: (Some(2133), 5200),
        zstd: (Some(752), 11_500),
    };
    const SPARSE: Kind = Kind {
        lz4: (Some(133), 600),
        zstd: (Some(110), 3600),
    };
    const RANDOM: Kind = Kind {
        lz4: (None, 1100),
        zstd: (None, 2700),
    };
    /// Of few letters without repetition: only the coding of letters helps.
    const BASE64: Kind = Kind {
        lz4: (None, 1300),
        zstd: (Some(3060), 6000),
    };

    /// How many of `pages` of a kind went to no codec, to LZ4 and to zstd.
    fn feed(choice: &mut Choice, kind: &Kind, pages: usize) -> [usize; 3] {
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

    /// As [`feed`], once the averages have settled.
    fn settled(goal: Goal, kind: &Kind) -> [usize; 3] {
        let mut choice = Choice::new(goal);
        feed(&mut choice, kind, 4000);
        feed(&mut choice, kind, 3100)
    }

    #[test]
    fn memory_takes_lz4_but_where_zstd_stores_less_than_half() {
        assert_eq!(Choice::new(Goal::Speed).pick(), Some(Codec::Lz4));
        assert_eq!(settled(Goal::Speed, &TEXT), [0, 3000, 100]);
        assert_eq!(settled(Goal::Speed, &SPARSE), [0, 3000, 100]);
        assert_eq!(settled(Goal::Speed, &SEQUENCE), [0, 100, 3000]);
    }

    #[test]
    fn the_ssd_takes_zstd_but_where_lz4_leaves_nothing() {
        assert_eq!(Choice::new(Goal::Size).pick(), Some(Codec::Zstd));
        assert_eq!(settled(Goal::Size, &TEXT), [0, 100, 3000]);
        assert_eq!(settled(Goal::Size, &SEQUENCE), [0, 100, 3000]);
        assert_eq!(settled(Goal::Size, &SPARSE), [0, 3000, 100]);
    }

    #[test]
    fn what_does_not_compress_is_left_alone_and_probed() {
        for goal in [Goal::Speed, Goal::Size] {
            let mut choice = Choice::new(goal);
            feed(&mut choice, &RANDOM, 100);
            assert_eq!(feed(&mut choice, &RANDOM, 3500), [3000, 250, 250], "{goal:?}");
        }
        let mut choice = Choice::new(Goal::Speed);
        assert_eq!(feed(&mut choice, &RANDOM, 16)[0], 0);
        assert_eq!(feed(&mut choice, &RANDOM, 70)[0], 60);
    }

    #[test]
    fn pages_that_fit_now_and_then_are_not_given_up() {
        let mut choice = Choice::new(Goal::Speed);
        for _ in 0..500 {
            assert_eq!(feed(&mut choice, &RANDOM, 15)[0], 0);
            assert_eq!(feed(&mut choice, &TEXT, 1)[0], 0);
        }
    }

    #[test]
    fn what_only_one_codec_compresses_gets_it() {
        for goal in [Goal::Speed, Goal::Size] {
            assert_eq!(settled(goal, &BASE64), [0, 100, 3000], "{goal:?}");
        }
    }

    #[test]
    fn a_stream_that_begins_to_compress_is_soon_compressed() {
        for goal in [Goal::Speed, Goal::Size] {
            let mut choice = Choice::new(goal);
            feed(&mut choice, &RANDOM, 10_000);
            feed(&mut choice, &TEXT, 7);
            assert_eq!(feed(&mut choice, &TEXT, 1000)[0], 0, "{goal:?}");
        }
    }

    #[test]
    fn an_interruption_does_not_change_the_codec() {
        let mut choice = Choice::new(Goal::Speed);
        feed(&mut choice, &TEXT, 1000);
        choice.record(Codec::Lz4, TEXT.lz4.0, 50_000_000);
        assert_eq!(choice.best(), Codec::Lz4);
    }

    #[test]
    fn no_record_is_too_much() {
        let mut choice = Choice::new(Goal::Size);
        for _ in 0..1000 {
            choice.record(Codec::Zstd, Some(usize::MAX), u64::MAX);
            choice.record(Codec::Lz4, Some(0), 0);
        }
        assert_eq!(choice.best(), Codec::Lz4);
    }
}
