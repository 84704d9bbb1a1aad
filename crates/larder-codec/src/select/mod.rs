//! Selection of the encoding method for batches, based on earlier results for similar pages and for the same regions.
//!
//! A byte on the wire is worth a number of nanoseconds of encoding: its price. The price rises while the link delays
//! the sender, and falls while encoding does. The cost of a batch is the time of encoding it plus the value of the
//! remaining bytes; unencoded pages cost only their bytes. [`Selector::pick`] takes the method with the lowest
//! expected cost. The expectation is based on two properties that are known before the batch is encoded:
//!
//! - Its [`BatchClass`], determined from a sample in 2 us. Each class has, for each method, averages of the remaining
//!   bytes of a page and of the time. They begin with those of the machine of `examples/batches`, and are updated by
//!   all regions of a guest. A region that is sent for the first time, as in most of a migration, therefore needs no
//!   probes.
//! - Its region, some MiB of guest addresses: how much its batches deviate from their class, by any method and by
//!   each one. A new region starts from the one before it.
//!
//! Methods that are not the cheapest are probed now and then, the longest unprobed first. A probe is due as soon as
//! the other batches of the class have cost 100 times its additional cost. Steady memory thus loses at most that
//! share to probes. Incompressible memory loses nearly nothing, because cheap methods are probed often and expensive
//! ones seldom. A probe that pays off makes its method the regular one.
//!
//! The selection is deterministic: it uses neither a clock nor randomness. Records may arrive late, in any order and
//! from several threads, or not at all. Where a device makes deflate, deflate is present twice, and the time that a
//! thread spends distinguishes the two. Each call takes about 100 ns and allocates nothing, so one mutex around the
//! selector suffices for all threads; [`BatchClass::of`] is called before it is locked.
//!
//! The time of decoding is not considered. A receiver that cannot keep up looks like a slow link, and receives more
//! batches from the methods that leave least. All methods decode faster than they encode, except deflate on data that
//! compresses to nearly nothing.
//!
//! `tests/select.rs` simulates a sender of two stages with memory of 11 kinds and mixes of them, using measured times
//! of each method, over links of 0.1 to 100 Gbit/s with 1 to 8 encoders. The selection always reaches at least 95 % of
//! the throughput of the best single method for the whole image (93 % in other random sequences of one mix, of which
//! four fifths are incompressible), and often exceeds it.

mod average;
mod batch_encoding;
mod class;
mod price;
mod region;
mod statistics;

pub use batch_encoding::BatchEncoding;
pub use class::BatchClass;
pub use statistics::{ClassPick, EncodingStatistics, ExpectedResult, SelectorStatistics};

use crate::PAGE;
use average::Average;
use price::{Load, Price};
use region::RegionTable;

/// Cost of a class's batches, in nanoseconds, that allows probes to cost one nanosecond more.
const PROBE_COST_RATIO: f32 = 100.0;
/// Nanoseconds that an encoder takes for a page that is sent unencoded: a copy.
const UNENCODED_PAGE_NS: f32 = 0.05 * PAGE as f32;
/// Remaining bytes of a page from which nothing counts as saved. Incompressible memory is not encoded for its last
/// per cent.
const USEFUL_BYTES_MAX: f32 = PAGE as f32 * 31.0 / 32.0;
/// Factor by which another method's result must be shorter to justify a higher price.
const SHORTER_FACTOR: f32 = 0.98;
/// Smallest interval, in batches of a class, between two probes of the same way.
const PROBE_INTERVAL_BATCHES: u32 = 32;

/// Properties of a sender.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SenderProfile {
    /// Number of encoding threads.
    pub encoders: usize,
    /// Speed of the link, or the cap on it, as far as it is known; the selector soon measures it.
    pub link_bytes_per_second: u64,
}

impl SenderProfile {
    /// Assumed speed of a link until it is measured: 10 Gbit/s, in bytes per second.
    const LINK_BYTES_PER_SECOND_EXPECTED: u64 = 1_250_000_000;

    /// Creates a sender that has not sent anything yet.
    #[must_use]
    pub const fn with_unknown_link(encoders: usize) -> Self {
        Self { encoders, link_bytes_per_second: Self::LINK_BYTES_PER_SECOND_EXPECTED }
    }
}

/// Number of regions of a guest that are remembered: 16 GiB of them, of 1 MiB each.
pub const REGIONS_MAX: usize = 16 << 10;

/// Selector for one guest.
pub struct Selector {
    encodings: Vec<BatchEncoding>,
    classes: Vec<ClassResults>,
    regions: RegionTable,
    price: Price,
    statistics: SelectorStatistics,
}

/// Results of all ways for one class.
#[derive(Clone)]
struct ClassResults {
    averages: [Average; BatchEncoding::COUNT],
    /// Index of the batch of the class at which each way was last picked.
    picked_at: [u32; BatchEncoding::COUNT],
    /// Number of batches of the class.
    batches: u32,
    /// Additional cost that probes may have, in nanoseconds.
    credit_ns: f32,
}

impl Selector {
    /// Creates a selector that picks among `encodings`, for a guest of `regions_max` regions (rounded up to a power of
    /// two). Further regions share slots, by the remainder of their number, and start anew each time. A slot takes 40
    /// bytes.
    #[must_use]
    pub fn new(encodings: &[BatchEncoding], sender: SenderProfile, regions_max: usize) -> Self {
        let price = Price::from_link(sender.link_bytes_per_second, sender.encoders);
        Self {
            encodings: encodings.to_vec(),
            classes: BatchClass::all().map(ClassResults::from_expectation).collect(),
            regions: RegionTable::new(regions_max),
            price,
            statistics: SelectorStatistics::new(),
        }
    }

    /// Picks the way for a batch of `pages` pages of `region`; `None` means to send them unencoded.
    pub fn pick(&mut self, region: u64, class: BatchClass, pages: usize) -> Option<BatchEncoding> {
        let region = self.regions.get_or_insert(region);
        let candidates = &mut self.classes[class.index()];
        let offers = ExpectedResults {
            encodings: &self.encodings,
            bytes: std::array::from_fn(|encoding| {
                let bytes = region.expected_bytes(encoding, candidates.averages[encoding].bytes);
                if bytes < USEFUL_BYTES_MAX { bytes } else { PAGE as f32 }
            }),
            ns: candidates.averages.map(|average| average.ns),
        };
        let picked = candidates.pick(&offers, self.price.ns_per_byte(), pages as f32);
        self.price.record_pick(&offers.load(picked, pages as f32));
        if picked.is_none() {
            self.statistics.record_unencoded(pages);
        }
        picked
    }

    /// Records that the link took `ns` nanoseconds for `bytes` bytes, of one connection or of all together. The time
    /// counts while a connection accepted bytes, or blocked a thread that had some for it. If `n` connections carry
    /// the stream in parallel, each byte of one takes an `n`th. For a thread that alternates between encoding and
    /// writing, all the time since its last write counts if the write had to wait: the link was busy with the earlier
    /// bytes.
    pub fn record_sent(&mut self, bytes: u64, ns: u64) {
        self.price.record_sent(bytes, ns);
    }

    /// Records that an encoder spent `ns` nanoseconds on other work: reading pages, scanning them, writing, or
    /// encoding pages for which no way is picked here.
    pub fn record_other_work(&mut self, ns: u64) {
        self.price.record_other_work(ns);
    }

    /// Sets the number of concurrent encoders from now on. It is smaller than the number of threads, such as 0.5,
    /// where their CPU time is limited. Encoding then becomes more expensive.
    pub fn set_encoders(&mut self, encoders: f32) {
        self.price.set_encoders(encoders);
    }

    /// Records the result of a picked batch: its length, `None` if it did not fit and was sent unencoded, and the
    /// nanoseconds that encoding took in either case.
    pub fn record(
        &mut self,
        region: u64,
        class: BatchClass,
        encoding: BatchEncoding,
        pages: usize,
        encoded: Option<usize>,
        ns: u64,
    ) {
        let pages_count = pages.max(1) as f32;
        let bytes = encoded.map_or(PAGE as f32, |bytes| (bytes as f32 / pages_count).clamp(1.0, PAGE as f32));
        let average = &mut self.classes[class.index()].averages[encoding.index()];
        self.regions.get_or_insert(region).record(encoding.index(), average.bytes, bytes);
        average.record(bytes, ns as f32 / pages_count);
        self.statistics.record_encoded(encoding, pages, encoded, ns);
    }

    /// Returns the nanoseconds that a byte takes on the link, as far as is known.
    #[must_use]
    pub fn link_ns_per_byte(&self) -> f32 {
        self.price.link_ns_per_byte()
    }

    /// Returns the statistics of the picks so far.
    #[must_use]
    pub fn statistics(&self) -> SelectorStatistics {
        let mut statistics = self.statistics.clone();
        statistics.ns_per_byte = self.price.ns_per_byte();
        statistics
    }

    /// Returns the present pick of each class that had a batch, with the results that it is based on.
    #[must_use]
    pub fn picks(&self) -> Vec<ClassPick> {
        let ns_per_byte = self.price.ns_per_byte();
        let used_classes = BatchClass::all().zip(&self.classes).filter(|(_, it)| it.batches > 0);
        let chosen = used_classes.map(|(class, candidates)| {
            let averages = &candidates.averages;
            let expected = ExpectedResults {
                encodings: &self.encodings,
                bytes: averages.map(
                    |average| {
                        if average.bytes < USEFUL_BYTES_MAX { average.bytes } else { PAGE as f32 }
                    },
                ),
                ns: averages.map(|average| average.ns),
            };
            let expected_result = |way: Option<BatchEncoding>| ExpectedResult {
                encoding: way,
                bytes: way.map_or(PAGE as f32, |way| expected.bytes[way.index()]),
                ns: way.map_or(UNENCODED_PAGE_NS, |way| expected.ns[way.index()]),
                cost_ns: expected.cost(way, ns_per_byte),
            };
            let encodings = self.encodings.iter().copied().map(Some);
            ClassPick {
                class,
                batches: candidates.batches,
                encoding: expected.best(ns_per_byte),
                expected_results: [None].into_iter().chain(encodings).map(expected_result).collect(),
            }
        });
        chosen.collect()
    }
}

/// Expected results of each way for a page, by [`BatchEncoding::index`].
struct ExpectedResults<'a> {
    /// Ways that may be picked.
    encodings: &'a [BatchEncoding],
    bytes: [f32; BatchEncoding::COUNT],
    ns: [f32; BatchEncoding::COUNT],
}

impl ExpectedResults<'_> {
    /// Returns the cost of a page, in nanoseconds.
    fn cost(&self, encoding: Option<BatchEncoding>, ns_per_byte: f32) -> f32 {
        match encoding {
            None => UNENCODED_PAGE_NS + ns_per_byte * PAGE as f32,
            Some(way) => self.ns[way.index()] + ns_per_byte * self.bytes[way.index()],
        }
    }

    fn load(&self, encoding: Option<BatchEncoding>, pages: f32) -> Load {
        let (bytes, ns) =
            encoding.map_or((PAGE as f32, UNENCODED_PAGE_NS), |way| (self.bytes[way.index()], self.ns[way.index()]));
        Load {
            bytes: bytes * pages,
            ns: ns * pages,
            has_shorter_alternative: self
                .encodings
                .iter()
                .any(|other| self.bytes[other.index()] < bytes * SHORTER_FACTOR),
            has_faster_alternative: encoding.is_some(),
        }
    }

    fn best(&self, ns_per_byte: f32) -> Option<BatchEncoding> {
        let encodings = [None].into_iter().chain(self.encodings.iter().copied().map(Some));
        let cost = |way: &Option<BatchEncoding>| self.cost(*way, ns_per_byte);
        encodings.min_by(|a, b| cost(a).total_cmp(&cost(b))).flatten()
    }
}

impl ClassResults {
    fn from_expectation(class: BatchClass) -> Self {
        Self {
            averages: std::array::from_fn(|way| Average::from_expectation(class.expected_result(way))),
            picked_at: [0; BatchEncoding::COUNT],
            batches: 0,
            credit_ns: 0.0,
        }
    }

    /// Picks the cheapest way, or the way that is to be probed instead.
    fn pick(&mut self, expected: &ExpectedResults<'_>, ns_per_byte: f32, pages: f32) -> Option<BatchEncoding> {
        let best = expected.best(ns_per_byte);
        let best_ns = expected.cost(best, ns_per_byte) * pages;
        self.batches = self.batches.wrapping_add(1);
        self.credit_ns += best_ns / PROBE_COST_RATIO;
        let age = |way: BatchEncoding| self.batches.wrapping_sub(self.picked_at[way.index()]);
        let extra_ns = |way: BatchEncoding| expected.cost(Some(way), ns_per_byte) * pages - best_ns;

        let others = expected.encodings.iter().copied().filter(|&way| Some(way) != best);
        let oldest = others.max_by_key(|&way| age(way));
        let probe = oldest.filter(|&way| age(way) >= PROBE_INTERVAL_BATCHES && extra_ns(way) <= self.credit_ns);
        if let Some(way) = probe {
            self.credit_ns -= extra_ns(way);
        }
        let picked = probe.or(best);
        if let Some(way) = picked {
            self.picked_at[way.index()] = self.batches;
        }
        picked
    }
}
