//! Channels built from lists of acts, and checks that the parser reports what was written.
#![allow(dead_code, unreachable_pub, reason = "each program uses a part of it")]

use proptest::prelude::*;

use super::reader::Reading;
use super::writer::{Block, Channel, PAGE, Packet, Place, content};

pub const RAM: u32 = 2;

/// Element of a channel, between its beginning and its end.
#[derive(Clone, Debug)]
pub enum Act {
    Page(u8, u32, u64),
    Zeros(u8, u32, u8),
    Xbzrle(u8, u32, u16),
    Compressed(u8, u32, u16),
    MultifdFlush,
    ForgetBlock,
    NextSection,
    Command(u16, u8),
    OtherSection(Vec<u8>),
}

pub fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (0u8..3, 0u32..40, any::<u64>()).prop_map(|(block, page, seed)| Act::Page(block, page, seed)),
        4 => (0u8..3, 0u32..30, 1u8..12).prop_map(|(block, page, count)| Act::Zeros(block, page, count)),
        1 => (0u8..3, 0u32..40, 0u16..=4096).prop_map(|(block, page, len)| Act::Xbzrle(block, page, len)),
        1 => (0u8..3, 0u32..40, 0u16..=4100).prop_map(|(block, page, len)| Act::Compressed(block, page, len)),
        1 => Just(Act::MultifdFlush),
        1 => Just(Act::ForgetBlock),
        3 => Just(Act::NextSection),
        1 => (1u16..12, 0u8..40).prop_filter("not a package", |(number, _)| *number != 7)
                .prop_map(|(number, len)| Act::Command(number, len)),
        1 => prop::collection::vec(any::<u8>().prop_filter("no footer", |&byte| byte != 0x7e), 0..600)
                .prop_map(Act::OtherSection),
    ]
}

pub fn blocks() -> [Block; 3] {
    [Block::new("pc.ram", 64), Block::new("/rom@etc/acpi/tables", 41), Block::new("b", 40)]
}

pub fn block_name(index: u8) -> &'static str {
    ["pc.ram", "/rom@etc/acpi/tables", "b"][usize::from(index)]
}

/// Writes the acts into sections of RAM; with `last`, adds RAM's last section.
pub fn sections(channel: &mut Channel, acts: &[Act], last: bool) {
    channel.next(2, RAM);
    for act in acts {
        write(channel, act);
    }
    channel.eos().footer(RAM);
    if last {
        channel.next(3, RAM).eos().footer(RAM);
    }
}

pub fn write(channel: &mut Channel, act: &Act) {
    let body = [0x5a; 5000];
    match *act {
        Act::Page(block, page, seed) => channel.page(block_name(block), page, &content(seed)),
        Act::Zeros(block, first, count) => {
            for page in (first..40).take(count.into()) {
                channel.zero(block_name(block), page);
            }
            channel
        }
        Act::Xbzrle(block, page, len) => channel.xbzrle(block_name(block), page, &body[..len.into()]),
        Act::Compressed(block, page, len) => channel.compressed(block_name(block), page, &body[..len.into()]),
        Act::MultifdFlush => channel.multifd_flush(),
        Act::ForgetBlock => channel.forget_block(),
        Act::NextSection => channel.eos().footer(RAM).next(2, RAM),
        Act::Command(number, len) => {
            channel.eos().footer(RAM);
            channel.command(number, &body[..len.into()]).next(2, RAM)
        }
        Act::OtherSection(ref body) => {
            channel.eos().footer(RAM);
            channel.next(2, 7).put(body).footer(7).next(2, RAM)
        }
    };
}

/// Builds a main channel whose beginning `flavour` selects.
pub fn main_channel(flavour: u8, acts: &[Act], postcopy: Option<&[Act]>) -> Channel {
    let mut blocks = blocks();
    let mut channel = Channel::new();
    channel.magic().configuration(if flavour & 1 == 0 { "pc-q35-7.2" } else { "pc-i440fx-10.0" });
    match flavour >> 1 & 3 {
        0 => {}
        1 => {
            channel.subsection("configuration/uuid", &[7; 16]);
        }
        2 => {
            channel.capabilities(&["x-ignore-shared", "another"]).subsection("configuration/uuid", &[5; 16]);
            for (block, number) in blocks.iter_mut().zip([0, 0xfffc_0000, 0x1_0000_0123]) {
                block.number = Some(number);
            }
        }
        _ => {
            channel.subsection("configuration/target-page-bits", &12u32.to_be_bytes());
            channel.command(1, &[]).command(2, &[0, 0, 0, 1]);
            channel.command(3, &[0, 0, 0, 0, 0, 0x20, 0x10, 0, 0, 0, 0, 0, 0, 0, 0x10, 0]);
            blocks[0].number = Some(0x20_0000);
            blocks[2].number = Some(0x20_0000);
        }
    }
    if flavour & 8 != 0 {
        channel.first(1, 7, "dirty-bitmap", 1).put(b"node").footer(7);
    }
    channel.ram(RAM, &blocks);
    if flavour & 16 != 0 {
        channel.first(4, 9, "0000:00:03.0/virtio-mem-device-early", 1).put(&[1; 52]).footer(9);
    }
    let before = channel.clone();
    sections(&mut channel, acts, postcopy.is_none());
    assert!(channel.bytes.len() > before.bytes.len());
    match postcopy {
        None => {
            channel.first(4, 0, "timer", 2).put(&content(3)).footer(0).eof();
            channel.description(b"{}");
        }
        Some(acts) => {
            let mut package = Channel::new();
            package.command(4, &[]).first(4, 0, "timer", 2).put(&content(1)[..999]).footer(0).command(5, &[]);
            channel.command(6, &[1; 99]).package(&package.bytes).command(2, &[0; 4]);
            sections(&mut channel, acts, true);
            channel.eof();
        }
    }
    channel
}

/// Builds a multifd channel.
pub fn multifd_channel(packets: &[(u8, Vec<u32>, Vec<u32>, u8)]) -> Channel {
    let mut channel = Channel::new();
    channel.multifd(3);
    for (index, (kind, pages, zeros, block)) in packets.iter().enumerate() {
        let (block, seed) = (block_name(*block), index as u64 * 17);
        match kind {
            0 => channel.packet(Packet { flags: 1, ..Packet::default() }, block, &[], &[], seed),
            1 => channel.packet(Packet { flags: 1, stale: true, ..Packet::default() }, block, &[], &[], seed),
            2 => {
                let packet = Packet { flags: 2 << 1, encoded: Some(pages.len() as u32 * 99), stale: false };
                channel.packet(packet, block, pages, zeros, seed)
            }
            3 => channel.device_packet("0000:00:05.0/vfio", &content(seed)),
            4 => channel.packet(Packet { flags: 1, ..Packet::default() }, block, pages, &[], seed),
            _ => channel.packet(Packet::default(), block, pages, zeros, seed),
        };
    }
    channel
}

pub fn packets() -> impl Strategy<Value = Vec<(u8, Vec<u32>, Vec<u32>, u8)>> {
    let pages = || prop::collection::vec(0u32..40, 0..40);
    prop::collection::vec((0u8..9, pages(), pages(), 0u8..3), 0..12)
}

pub fn at(places: &[Place]) -> Vec<(usize, &str, u32)> {
    places.iter().map(|place| (place.at, place.block.as_str(), place.page)).collect()
}

/// Checks that everything that was written is reported.
pub fn check_all_told(channel: &Channel, reading: &Reading) {
    assert_eq!(at(&reading.pages), at(&channel.pages));
    check_facts(channel, reading);
    assert_eq!(reading.facts.pages_unreported, 0);
}

/// Checks the facts that hold with flushes too.
pub fn check_facts(channel: &Channel, reading: &Reading) {
    let facts = &reading.facts;
    assert_eq!(facts.losses, 0);
    assert_eq!(facts.pages, reading.pages.len() as u64);
    assert_eq!(facts.pages + facts.pages_unreported, channel.pages.len() as u64);
    assert_eq!(facts.zero_pages, channel.zeros.len() as u64);
    assert_eq!(facts.encoded_pages, channel.encoded);
    let zeros = at(&channel.zeros);
    for zero in at(&reading.zeros) {
        assert!(zeros.contains(&zero), "{zero:?} is none of {zeros:?}");
    }
}

/// Checks that only pages cut by a flush are unreported.
pub fn check_cut_only(channel: &Channel, reading: &Reading) {
    check_facts(channel, reading);
    let told = at(&reading.pages);
    for page in &channel.pages {
        let was_cut = (reading.passed.iter()).any(|passed| passed.start < page.at + PAGE && page.from < passed.end);
        let was_told = told.contains(&(page.at, &page.block, page.page));
        assert!(was_told || was_cut, "{page:?} was neither told nor cut");
    }
    for page in &told {
        assert!(at(&channel.pages).contains(page), "{page:?} is no page");
    }
}
