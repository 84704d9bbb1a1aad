//! Selection of the encoding method for batches, based on earlier results for similar pages and for the same regions.
//!
//! A byte on the wire is worth a number of nanoseconds of encoding: its price. The price rises while the link delays
//! the sender, and falls while encoding does. The cost of a batch is the time of encoding it plus the value of the
//! remaining bytes; unencoded pages cost only their bytes. [`Selector::pick`] takes the method with the lowest
//! expected cost. The expectation is based on two properties that are known before the batch is encoded:
//!
//! - Its [`Class`], determined from a sample in 2 us. Each class has, for each method, averages of the remaining
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
//! selector suffices for all threads; [`Class::of`] is called before it is locked.
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
mod class;
mod evidence;
mod price;
mod region;
mod way;

pub use class::Class;
pub use evidence::{Chosen, Evidence, Made, Offer};
pub use way::Way;

use crate::PAGE;
use average::Average;
use price::{Load, Price};
use region::Regions;

/// Cost of a class's batches, in nanoseconds, that allows probes to cost one nanosecond more.
const PROBE_COST: f32 = 100.0;
/// Nanoseconds that an encoder takes for a page that is sent unencoded: a copy.
const AS_IT_IS_NS: f32 = 0.05 * PAGE as f32;
/// Remaining bytes of a page from which nothing counts as saved. Incompressible memory is not encoded for its last
/// per cent.
const WORTH_WHILE: f32 = PAGE as f32 * 31.0 / 32.0;
/// Factor by which another method's result must be shorter to justify a higher price.
const SHORTER: f32 = 0.98;
/// Smallest interval, in batches of a class, between two probes of the same way.
const PROBE_EVERY: u32 = 32;

/// Properties of a sender.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sender {
    /// Number of encoding threads.
    pub encoders: usize,
    /// Speed of the link, or the cap on it, as far as it is known; the selector soon measures it.
    pub link_bytes_per_second: u64,
}

impl Sender {
    /// Assumed speed of a link until it is measured: 10 Gbit/s, in bytes per second.
    const LINK_EXPECTED: u64 = 1_250_000_000;

    /// Creates a sender that has not sent anything yet.
    #[must_use]
    pub const fn of_unknown_link(encoders: usize) -> Self {
        Self {
            encoders,
            link_bytes_per_second: Self::LINK_EXPECTED,
        }
    }
}

/// Number of regions of a guest that are remembered: 16 GiB of them, of 1 MiB each.
pub const REGIONS_MAX: usize = 16 << 10;

/// Selector for one guest.
pub struct Selector {
    ways: Vec<Way>,
    classes: Vec<Candidates>,
    regions: Regions,
    price: Price,
    evidence: Evidence,
}

/// Results of all ways for one class.
#[derive(Clone)]
struct Candidates {
    averages: [Average; Way::COUNT],
    /// Index of the batch of the class at which each way was last picked.
    picked_at: [u32; Way::COUNT],
    /// Number of batches of the class.
    batches: u32,
    /// Additional cost that probes may have, in nanoseconds.
    credit_ns: f32,
}

impl Selector {
    /// Creates a selector that picks among `ways`, for a guest of `regions_max` regions (rounded up to a power of
    /// two). Further regions share slots, by the remainder of their number, and start anew each time. A slot takes 40
    /// bytes.
    #[must_use]
    pub fn new(ways: &[Way], sender: Sender, regions_max: usize) -> Self {
        let price = Price::of_link(sender.link_bytes_per_second, sender.encoders);
        Self {
            ways: ways.to_vec(),
            classes: Class::all().map(Candidates::expected).collect(),
            regions: Regions::new(regions_max),
            price,
            evidence: Evidence::new(),
        }
    }

    /// Picks the way for a batch of `pages` pages of `region`; `None` means to send them unencoded.
    pub fn pick(&mut self, region: u64, class: Class, pages: usize) -> Option<Way> {
        let region = self.regions.of(region);
        let candidates = &mut self.classes[class.index()];
        let offers = Offers {
            ways: &self.ways,
            bytes: std::array::from_fn(|way| {
                let bytes = region.bytes_of(way, candidates.averages[way].bytes);
                if bytes < WORTH_WHILE { bytes } else { PAGE as f32 }
            }),
            ns: candidates.averages.map(|average| average.ns),
        };
        let picked = candidates.picked(&offers, self.price.ns_per_byte(), pages as f32);
        self.price.picked(&offers.load(picked, pages as f32));
        if picked.is_none() {
            self.evidence.sent_as_they_are(pages);
        }
        picked
    }

    /// Records that the link took `ns` nanoseconds for `bytes` bytes, of one connection or of all together. The time
    /// counts while a connection accepted bytes, or blocked a thread that had some for it. If `n` connections carry
    /// the stream in parallel, each byte of one takes an `n`th. For a thread that alternates between encoding and
    /// writing, all the time since its last write counts if the write had to wait: the link was busy with the earlier
    /// bytes.
    pub fn sent(&mut self, bytes: u64, ns: u64) {
        self.price.sent(bytes, ns);
    }

    /// Records that an encoder spent `ns` nanoseconds on other work: reading pages, scanning them, writing, or
    /// encoding pages for which no way is picked here.
    pub fn besides(&mut self, ns: u64) {
        self.price.besides(ns);
    }

    /// Sets the number of concurrent encoders from now on. It is smaller than the number of threads, such as 0.5,
    /// where their CPU time is limited. Encoding then becomes more expensive.
    pub fn set_encoders(&mut self, encoders: f32) {
        self.price.set_encoders(encoders);
    }

    /// Records the result of a picked batch: its length, `None` if it did not fit and was sent unencoded, and the
    /// nanoseconds that encoding took in either case.
    pub fn record(&mut self, region: u64, class: Class, way: Way, pages: usize, encoded: Option<usize>, ns: u64) {
        let pages_count = pages.max(1) as f32;
        let bytes = encoded.map_or(PAGE as f32, |bytes| {
            (bytes as f32 / pages_count).clamp(1.0, PAGE as f32)
        });
        let average = &mut self.classes[class.index()].averages[way.index()];
        self.regions.of(region).record(way.index(), average.bytes, bytes);
        average.record(bytes, ns as f32 / pages_count);
        self.evidence.made(way, pages, encoded, ns);
    }

    /// Returns the nanoseconds that a byte takes on the link, as far as is known.
    #[must_use]
    pub fn link_ns_per_byte(&self) -> f32 {
        self.price.link_ns_per_byte()
    }

    /// Returns the statistics of the picks so far.
    #[must_use]
    pub fn evidence(&self) -> Evidence {
        let mut evidence = self.evidence.clone();
        evidence.ns_per_byte = self.price.ns_per_byte();
        evidence
    }

    /// Returns the present pick of each class that had a batch, with the results that it is based on.
    #[must_use]
    pub fn chosen(&self) -> Vec<Chosen> {
        let ns_per_byte = self.price.ns_per_byte();
        let seen = Class::all().zip(&self.classes).filter(|(_, it)| it.batches > 0);
        let chosen = seen.map(|(class, candidates)| {
            let averages = &candidates.averages;
            let offers = Offers {
                ways: &self.ways,
                bytes: averages.map(|average| {
                    if average.bytes < WORTH_WHILE {
                        average.bytes
                    } else {
                        PAGE as f32
                    }
                }),
                ns: averages.map(|average| average.ns),
            };
            let offer = |way: Option<Way>| Offer {
                way,
                bytes: way.map_or(PAGE as f32, |way| offers.bytes[way.index()]),
                ns: way.map_or(AS_IT_IS_NS, |way| offers.ns[way.index()]),
                cost_ns: offers.cost(way, ns_per_byte),
            };
            let ways = self.ways.iter().copied().map(Some);
            Chosen {
                class,
                batches: candidates.batches,
                way: offers.best(ns_per_byte),
                offers: [None].into_iter().chain(ways).map(offer).collect(),
            }
        });
        chosen.collect()
    }
}

/// Expected results of each way for a page, by [`Way::index`].
struct Offers<'a> {
    /// Ways that may be picked.
    ways: &'a [Way],
    bytes: [f32; Way::COUNT],
    ns: [f32; Way::COUNT],
}

impl Offers<'_> {
    /// Returns the cost of a page, in nanoseconds.
    fn cost(&self, way: Option<Way>, ns_per_byte: f32) -> f32 {
        match way {
            None => AS_IT_IS_NS + ns_per_byte * PAGE as f32,
            Some(way) => self.ns[way.index()] + ns_per_byte * self.bytes[way.index()],
        }
    }

    fn load(&self, way: Option<Way>, pages: f32) -> Load {
        let (bytes, ns) = way.map_or((PAGE as f32, AS_IT_IS_NS), |way| {
            (self.bytes[way.index()], self.ns[way.index()])
        });
        Load {
            bytes: bytes * pages,
            ns: ns * pages,
            could_be_shorter: self
                .ways
                .iter()
                .any(|other| self.bytes[other.index()] < bytes * SHORTER),
            could_be_sooner: way.is_some(),
        }
    }

    fn best(&self, ns_per_byte: f32) -> Option<Way> {
        let ways = [None].into_iter().chain(self.ways.iter().copied().map(Some));
        let cost = |way: &Option<Way>| self.cost(*way, ns_per_byte);
        ways.min_by(|a, b| cost(a).total_cmp(&cost(b))).flatten()
    }
}

impl Candidates {
    fn expected(class: Class) -> Self {
        Self {
            averages: std::array::from_fn(|way| Average::expected(class.expected(way))),
            picked_at: [0; Way::COUNT],
            batches: 0,
            credit_ns: 0.0,
        }
    }

    /// Picks the cheapest way, or the way that is to be probed instead.
    fn picked(&mut self, offers: &Offers<'_>, ns_per_byte: f32, pages: f32) -> Option<Way> {
        let best = offers.best(ns_per_byte);
        let best_ns = offers.cost(best, ns_per_byte) * pages;
        self.batches = self.batches.wrapping_add(1);
        self.credit_ns += best_ns / PROBE_COST;
        let age = |way: Way| self.batches.wrapping_sub(self.picked_at[way.index()]);
        let extra_ns = |way: Way| offers.cost(Some(way), ns_per_byte) * pages - best_ns;

        let others = offers.ways.iter().copied().filter(|&way| Some(way) != best);
        let oldest = others.max_by_key(|&way| age(way));
        let probe = oldest.filter(|&way| age(way) >= PROBE_EVERY && extra_ns(way) <= self.credit_ns);
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
