//! Property tests: the parser of QEMU's migration stream finds the pages of an independent writer, however the stream
//! is cut.

#[path = "stream/reader.rs"]
mod reader;
#[path = "stream/script.rs"]
mod script;
#[path = "stream/writer.rs"]
mod writer;

use larder_migrate::stream::{Blocks, ChannelKind as Kind, StreamPhase};
use proptest::prelude::*;

use reader::{Cuts, Whole, read};
use script::{Act, act, block_name, check_all_told, check_cut_only, main_channel, multifd_channel, packets};
use writer::{Channel, content};

/// Cuts by a list of numbers, repeated.
#[derive(Clone, Debug)]
struct ObstacleList {
    arrive: Vec<u16>,
    flush: Vec<bool>,
    at: usize,
}

impl Cuts for ObstacleList {
    fn arrive(&mut self) -> usize {
        self.at += 1;
        usize::from(self.arrive[self.at % self.arrive.len()]) + 1
    }

    fn flush(&mut self) -> bool {
        self.at += 1;
        self.flush[self.at % self.flush.len()]
    }
}

/// Generates short and long pieces.
fn cuts(flush: bool) -> impl Strategy<Value = ObstacleList> {
    let arrive = prop_oneof![0u16..20, 0u16..5000, 0u16..60000];
    let flush = if flush { any::<bool>().boxed() } else { Just(false).boxed() };
    (prop::collection::vec(arrive, 1..9), prop::collection::vec(flush, 1..9)).prop_map(|(arrive, flush)| ObstacleList {
        arrive,
        flush,
        at: 0,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Every page of a main channel is reported, however the channel is cut.
    #[test]
    fn main_channel_pages_are_reported(
        flavour in 0u8..32,
        acts in prop::collection::vec(act(), 0..50),
        postcopy in prop::option::of(prop::collection::vec(act(), 0..20)),
        mut cuts in cuts(false),
    ) {
        let channel = main_channel(flavour, &acts, postcopy.as_deref());
        let whole = read(&Blocks::new(), &channel.bytes, &mut Whole);
        check_all_told(&channel, &whole);
        prop_assert_eq!(whole.facts.channel, Kind::Main);
        prop_assert_eq!(whole.facts.ignore_shared, flavour >> 1 & 3 == 2);
        prop_assert_eq!(whole.facts.postcopy_run, postcopy.is_some() || acts.iter().any(|act| matches!(act, Act::Command(5, _))));
        prop_assert_eq!(whole.facts.phase, if postcopy.is_some() { StreamPhase::Ended } else { StreamPhase::DeviceState });
        let cut = read(&Blocks::new(), &channel.bytes, &mut cuts);
        check_all_told(&channel, &cut);
        prop_assert_eq!(cut.facts, whole.facts);
    }

    /// A flush leaves only those pages unreported that it cuts.
    #[test]
    fn main_flush_costs_only_cut_pages(
        flavour in 0u8..32,
        acts in prop::collection::vec(act(), 0..50),
        postcopy in prop::option::of(prop::collection::vec(act(), 0..20)),
        mut cuts in cuts(true),
    ) {
        let channel = main_channel(flavour, &acts, postcopy.as_deref());
        let reading = read(&Blocks::new(), &channel.bytes, &mut cuts);
        check_cut_only(&channel, &reading);
    }

    /// Every page of a multifd channel is reported, however the channel is cut.
    #[test]
    fn multifd_channel_pages_are_reported(
        packets in packets(),
        mut cuts in cuts(false),
        told_before: bool,
    ) {
        let blocks = Blocks::new();
        if told_before {
            read(&blocks, &main_channel(0, &[], None).bytes, &mut Whole);
        }
        let channel = multifd_channel(&packets);
        let whole = read(&blocks, &channel.bytes, &mut Whole);
        check_all_told(&channel, &whole);
        prop_assert_eq!(whole.facts.channel, Kind::Multifd { id: 3 });
        prop_assert_eq!(whole.facts.packets, packets.len() as u64);
        let syncs = packets.iter().filter(|packet| matches!(packet.0, 0 | 1 | 4)).count();
        prop_assert_eq!(whole.facts.multifd_syncs, syncs as u64);
        check_all_told(&channel, &read(&blocks, &channel.bytes, &mut cuts));
    }

    /// A flush leaves only those pages unreported that it cuts.
    #[test]
    fn multifd_flush_costs_only_cut_pages(packets in packets(), mut cuts in cuts(true)) {
        let channel = multifd_channel(&packets);
        check_cut_only(&channel, &read(&Blocks::new(), &channel.bytes, &mut cuts));
    }

    #[test]
    fn preempt_channel_pages_are_reported(
        pages in prop::collection::vec((0u8..3, 0u32..40, any::<u64>()), 1..20),
        mut cuts in cuts(false),
    ) {
        let mut channel = Channel::new();
        for (block, page, seed) in pages {
            channel.page(block_name(block), page, &content(seed));
        }
        channel.eos();
        let reading = read(&Blocks::new(), &channel.bytes, &mut cuts);
        check_all_told(&channel, &reading);
        prop_assert_eq!(reading.facts.channel, Kind::Preempt);
    }
}
