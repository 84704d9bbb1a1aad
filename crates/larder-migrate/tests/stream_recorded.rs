//! Recorded channels of QEMU 7.2.22 and 10.0.13: machines of 4 MiB in their BIOS, and the second channel of post-copy
//! of larger ones. Every page's content was replaced by its block's name and its number, repeated; compressed
//! contents were replaced by zeros. The expected counts are QEMU's own (`query-migrate`).

#[path = "stream/reader.rs"]
mod reader;
#[path = "stream/writer.rs"]
mod writer;

use std::fs;
use std::path::Path;

use larder_migrate::stream::{Blocks, ChannelKind, StreamFacts, StreamPhase};

use reader::{Cuts, Reading, Whole, read};
use writer::PAGE;

fn recorded(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/stream/{name}.zst"));
    let packed = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    zstd::decode_all(&packed[..]).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Pieces of a length that divides no structure.
struct Pieces;

impl Cuts for Pieces {
    fn arrive(&mut self) -> usize {
        4999
    }

    fn flush(&mut self) -> bool {
        false
    }
}

/// Parses a recorded channel in one piece and in many, and checks that both results agree and all pages have their
/// content.
fn told(blocks: &Blocks, name: &str) -> Reading {
    let bytes = recorded(name);
    let reading = read(blocks, &bytes, &mut Whole);
    for place in &reading.pages {
        let said = format!("{} {}\n", place.block, place.page);
        let content = &bytes[place.at..place.at + PAGE];
        let is_page = (content.iter().zip(said.bytes().cycle())).all(|(&has, says)| has == says);
        assert!(is_page, "{name}: {place:?} is not at {:#x}", place.at);
    }
    let pieces = read(&blocks.clone(), &bytes, &mut Pieces);
    assert_eq!((&pieces.pages, &pieces.facts), (&reading.pages, &reading.facts), "{name}");
    reading
}

/// Returns the sums of the pages sent, zero pages and encoded pages of several channels.
fn counts<'a>(readings: impl IntoIterator<Item = &'a Reading>) -> [u64; 3] {
    let of = |facts: &StreamFacts| {
        assert_eq!((facts.pages_unreported, facts.losses), (0, 0), "{facts:?}");
        [facts.pages, facts.zero_pages, facts.encoded_pages]
    };
    (readings.into_iter()).fold([0; 3], |sum, reading| {
        let more = of(&reading.facts);
        std::array::from_fn(|index| sum[index] + more[index])
    })
}

fn of_release(version: &str) -> (u16, u16) {
    let (major, minor) = version.split_once('.').expect("two numbers");
    (major.parse().expect("a number"), minor.parse().expect("a number"))
}

#[test]
fn recorded_main_channel_pages_are_reported() {
    for (version, expected) in [("7.2", [119, 1035, 0]), ("10.0", [121, 1033, 0])] {
        let blocks = Blocks::new();
        let reading = told(&blocks, &format!("{version}-single"));
        assert_eq!(counts([&reading]), expected);
        let facts = &reading.facts;
        assert_eq!((facts.channel, facts.phase), (ChannelKind::Main, StreamPhase::DeviceState));
        assert_eq!(facts.machine.name(), format!("pc-q35-{version}"));
        assert_eq!(facts.qemu_at_least(), Some(of_release(version)));
        assert_eq!(facts.switchover_start, version == "10.0");
        assert!(facts.ram_ended && !facts.return_path);
        let ram = blocks.list().into_iter().find(|block| &*block.name == b"ram").expect("RAM");
        assert_eq!(ram.len_bytes, Some(4 << 20));
    }
}

#[test]
fn recorded_multifd_pages_are_reported() {
    for (version, expected) in [("7.2", [123, 1035, 0]), ("10.0", [121, 1033, 0])] {
        let blocks = Blocks::new();
        let readings = [0, 1, 2].map(|index| told(&blocks, &format!("{version}-multifd-{index}")));
        assert_eq!(counts(&readings), expected);
        let mut ids = [1, 2].map(|index: usize| readings[index].facts.channel);
        ids.sort_by_key(|id| format!("{id:?}"));
        assert_eq!(ids, [ChannelKind::Multifd { id: 0 }, ChannelKind::Multifd { id: 1 }]);
        assert!(readings[1..].iter().all(|reading| reading.facts.multifd_syncs == 3));
        assert_eq!(readings[0].facts.multifd_flushes > 0, version == "10.0");
    }
}

#[test]
fn recorded_postcopy_pages_are_reported() {
    for (version, expected) in [("7.2", [121, 1035, 0]), ("10.0", [124, 1033, 0])] {
        let reading = told(&Blocks::new(), &format!("{version}-postcopy"));
        assert_eq!(counts([&reading]), expected);
        let facts = &reading.facts;
        assert_eq!((facts.phase, facts.page_sizes), (StreamPhase::Ended, 0x1000));
        assert!(facts.return_path && facts.postcopy_advised && facts.postcopy_listen && facts.postcopy_run);
    }
    for (version, expected) in [("7.2", [5, 0, 0]), ("10.0", [2, 0, 0])] {
        let reading = told(&Blocks::new(), &format!("{version}-preempt"));
        assert_eq!(counts([&reading]), expected);
        assert_eq!(reading.facts.channel, ChannelKind::Preempt);
    }
}

#[test]
fn recorded_compressed_pages_are_skipped() {
    let reading = told(&Blocks::new(), "7.2-compress");
    // QEMU counts 1095 zero pages; 1035 are in the stream.
    assert_eq!(counts([&reading]), [5, 1035, 118]);
    assert_eq!(reading.facts.phase, StreamPhase::DeviceState);
}
