//! Which method pays, by what each did with pages like these, in these regions, before.
//!
//! A byte on the wire is worth so many nanoseconds of encoding: its price, which goes up while the link holds the sender up,
//! and down while encoding does. A batch then costs what encoding it takes and what the bytes that remain are worth, and
//! pages as they are cost their bytes alone. [`Selector::pick`] takes what should cost least, by two things that are known
//! before the batch is encoded:
//!
//! - its [`Class`], told from a sample in 2 us: each has averages, for each method, of the bytes that are left of a page
//!   and of the time it takes. They begin with those of the machine of `examples/batches`, and a guest's regions all
//!   teach them; so a region that is sent for the first time, which is most of a migration, needs no trials.
//! - its region, some MiB of guest addresses: by how much its batches came out longer or shorter than their class would
//!   have it, by any method and by each one. A region that is new starts from the one before it.
//!
//! What does not win is tried now and then all the same, the longest untried first, as soon as what was spent on all else
//! of the class is 100 times what the trial costs more. So steady memory loses at most that part to trials,
//! what does not compress nearly nothing, as what no method makes shorter is tried with cheap ones often and with dear ones
//! seldom; and a trial that pays becomes the rule.
//!
//! The same picks and records lead to the same picks: there is no clock and no randomness here. Records may come late, in
//! any order and from several threads, or not at all. Where a device makes deflate, deflate is there twice, and what a
//! thread spends on it with the device says which of both it is. Each call takes some 100 ns and allocates nothing, so one mutex
//! around it does for all threads; [`Class::of`] goes before it.
//!
//! What is not seen here is what decoding takes. A receiver that cannot keep up looks like a slow link, and gets more
//! that was made by the methods that leave least; all but deflate of nearly nothing decode faster than they encode.
//!
//! `tests/select.rs` has a sender of two stages send memory of 11 kinds and mixes of them, by what each method was
//! measured to take, over links of 0.1 to 100 Gbit/s with 1 to 8 encoders: choosing never sends less than 95 % of what the
//! best method for the whole image does in the same time (93 % in other draws of one mix, four fifths of which do not
//! compress), and often more.

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

/// What a class's batches cost, for each nanosecond that trials of other methods may cost more.
const PROBE_COST: f32 = 100.0;
/// What an encoder does for a page that is sent as it is: a copy.
const AS_IT_IS_NS: f32 = 0.05 * PAGE as f32;
/// Bytes of a page from which on nothing counts as saved: what does not compress is not tried for its last per cent.
const WORTH_WHILE: f32 = PAGE as f32 * 31.0 / 32.0;
/// Fewer bytes than this of another method's are worth a higher price.
const SHORTER: f32 = 0.98;
/// Batches of a class from the trial of a way to the next of the same, at least.
const PROBE_EVERY: u32 = 32;

/// What a sender knows about itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sender {
    /// Threads that encode.
    pub encoders: usize,
    /// Of the link, or the cap on it, as far as known; what is right is found out soon.
    pub link_bytes_per_second: u64,
}

impl Sender {
    /// Bytes per second that a link is taken to carry until it is known: 10 Gbit/s.
    const LINK_EXPECTED: u64 = 1_250_000_000;

    /// One that has not sent anything yet.
    #[must_use]
    pub const fn of_unknown_link(encoders: usize) -> Self {
        Self {
            encoders,
            link_bytes_per_second: Self::LINK_EXPECTED,
        }
    }
}

/// Regions that are remembered of a guest: 16 GiB of them, of a MiB each.
pub const REGIONS_MAX: usize = 16 << 10;

/// Chooses for one guest.
pub struct Selector {
    ways: Vec<Way>,
    classes: Vec<Candidates>,
    regions: Regions,
    price: Price,
    evidence: Evidence,
}

/// What is known of one class.
#[derive(Clone)]
struct Candidates {
    averages: [Average; Way::COUNT],
    /// Batch of the class with which each way was last picked.
    picked_at: [u32; Way::COUNT],
    /// Batches of the class.
    batches: u32,
    /// What trials may cost more.
    credit_ns: f32,
}

impl Selector {
    /// That picks among `ways`, for a guest of `regions_max` regions (the next power of two): of more, those of one
    /// remainder take turns in a place, and begin again each time. A place takes 40 bytes.
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

    /// The way for a batch of `pages` pages of `region`; `None`: send them as they are.
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

    /// Hears that the link took this long for so many bytes, one connection's as well as all of theirs: while a connection
    /// took bytes, or kept a thread waiting that had some for it. If `n` carry the stream side by side, each byte of one
    /// takes an `n`th. Of a thread that encodes and writes in turn all the time since its last write counts, if the write had
    /// to wait: the link was busy with what was written before.
    pub fn sent(&mut self, bytes: u64, ns: u64) {
        self.price.sent(bytes, ns);
    }

    /// Hears that an encoder had something else to do for so long: to read what it encodes, to look through it, to write it,
    /// or to make of pages what is not picked here.
    pub fn besides(&mut self, ns: u64) {
        self.price.besides(ns);
    }

    /// Hears how many encoders work at a time from now on, as far as they are let: fewer than there are threads, such as 0.5,
    /// where they may take so many processors' time. Encoding is dearer then.
    pub fn set_encoders(&mut self, encoders: f32) {
        self.price.set_encoders(encoders);
    }

    /// Hears what became of a batch that was picked for: the bytes it takes, `None` if it did not fit and was sent as it
    /// is, and the nanoseconds that encoding took, in either case.
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

    /// What a byte takes on the link, in nanoseconds, as far as is known.
    #[must_use]
    pub fn link_ns_per_byte(&self) -> f32 {
        self.price.link_ns_per_byte()
    }

    /// What was picked so far, and what came of it.
    #[must_use]
    pub fn evidence(&self) -> Evidence {
        let mut evidence = self.evidence.clone();
        evidence.ns_per_byte = self.price.ns_per_byte();
        evidence
    }

    /// What is picked for each class now that there was a batch of, and what that is taken from.
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

/// What each way would make of a page, by [`Way::index`].
struct Offers<'a> {
    /// Those that may be picked.
    ways: &'a [Way],
    bytes: [f32; Way::COUNT],
    ns: [f32; Way::COUNT],
}

impl Offers<'_> {
    /// In nanoseconds.
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

    /// What costs least, or the way that is to be tried instead.
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
