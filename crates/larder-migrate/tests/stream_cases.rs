//! Particular channels for the parser of QEMU's migration stream: rare and invalid content.

#[path = "stream/reader.rs"]
mod reader;
#[path = "stream/script.rs"]
mod script;
#[path = "stream/writer.rs"]
mod writer;

use larder_migrate::stream::{Blocks, ChannelKind as Kind, ParseStep, Parser, StreamPhase};

use reader::{Cuts, Whole, read};
use script::{Act, RAM, at, blocks, check_all_told, check_facts, main_channel, sections};
use writer::{Block, Channel, PAGE, Packet, content};

/// Returns a main channel up to RAM's first section.
fn set_up(blocks: &[Block]) -> Channel {
    let mut channel = Channel::new();
    channel.magic().configuration("pc-q35-7.2").ram(RAM, blocks);
    channel
}

/// The beginning of a main channel yields the blocks with their sizes, page sizes, and the machine type.
#[test]
fn main_channel_start_yields_block_sizes() {
    let mut list = blocks();
    list[1].number = Some(0x20_0000);
    let mut channel = Channel::new();
    channel.magic().configuration("pc-q35-10.0");
    channel.command(3, &[0, 0, 0, 0, 0, 0x20, 0x10, 0, 0, 0, 0, 0, 0, 0, 0x10, 0]);
    channel.ram(RAM, &list);
    let blocks = Blocks::new();
    let reading = read(&blocks, &channel.bytes, &mut Whole);
    let told: Vec<_> = (blocks.list().into_iter())
        .map(|block| (String::from_utf8_lossy(&block.name).into_owned(), block.len_bytes, block.page_bytes))
        .collect();
    let pages = |pages: u64| Some(pages * PAGE as u64);
    assert_eq!(
        told,
        [
            ("pc.ram".into(), pages(64), None),
            ("/rom@etc/acpi/tables".into(), pages(41), Some(0x20_0000)),
            ("b".into(), pages(40), None)
        ]
    );
    let facts = reading.facts;
    assert_eq!((facts.phase, facts.page_sizes, facts.postcopy_advised), (StreamPhase::Setup, 0x20_1000, true));
    assert_eq!((facts.machine.name(), facts.qemu_at_least()), ("pc-q35-10.0", Some((10, 0))));
}

/// Headers that were passed byte by byte advance the parser as if `next` had parsed them.
#[test]
fn passed_headers_count_as_parsed() {
    struct EachByte;
    impl Cuts for EachByte {
        fn arrive(&mut self) -> usize {
            1
        }

        fn flush(&mut self) -> bool {
            true
        }
    }
    let acts = [Act::Zeros(0, 3, 9), Act::Page(1, 5, 1), Act::NextSection, Act::Page(1, 6, 2)];
    let channel = main_channel(4, &acts, None);
    let reading = read(&Blocks::new(), &channel.bytes, &mut EachByte);
    check_facts(&channel, &reading);
    assert_eq!((reading.facts.pages_unreported, reading.literal), (2, channel.bytes.len()));
}

/// A page whose header was passed is still reported.
#[test]
fn page_after_passed_header_is_reported() {
    /// Delivers all bytes up to the content of the first page, then the rest.
    struct Once(usize, bool);
    impl Cuts for Once {
        fn arrive(&mut self) -> usize {
            std::mem::replace(&mut self.0, usize::MAX)
        }

        fn flush(&mut self) -> bool {
            std::mem::replace(&mut self.1, false)
        }
    }
    let main = main_channel(0, &[Act::Zeros(0, 3, 1), Act::Page(0, 5, 1)], None);
    let first = main.pages[0].at;
    let reading = read(&Blocks::new(), &main.bytes, &mut Once(first, true));
    assert_eq!(reading.passed[0], first - 8..first);
    check_all_told(&main, &reading);

    let mut multifd = Channel::new();
    multifd.multifd(0).packet(Packet::default(), "b", &[3, 4], &[], 1);
    let mut parser = Parser::new(&Blocks::new());
    let first = multifd.pages[0].at;
    parser.pass(&multifd.bytes[..first]);
    assert_eq!(parser.next(&multifd.bytes[first..]).len(), 2 * PAGE);
}

#[test]
fn zero_page_run_is_one_step() {
    let mut channel = set_up(&blocks());
    channel.next(2, RAM);
    for page in 0..30 {
        channel.zero("pc.ram", page);
    }
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    // The first record names its block, so it is not one of the usual records.
    assert_eq!(at(&reading.zeros), at(&channel.zeros[1..]));
    assert_eq!(reading.facts.zero_pages, 30);
}

#[test]
fn memory_passes_are_counted() {
    let mut channel = set_up(&blocks());
    channel.next(2, RAM);
    for _ in 0..4 {
        channel.page("pc.ram", 3, &content(1)).zero("pc.ram", 4).zero("pc.ram", 5);
        channel.eos().footer(RAM).next(2, RAM).page("b", 2, &content(1));
    }
    channel.eos().footer(RAM);
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    assert_eq!((reading.facts.passes, reading.facts.ram_sections), (3, 6));
    // In post-copy the destination requests pages in any order.
    let asked = [Act::Page(0, 9, 1), Act::Page(0, 2, 1), Act::Page(0, 1, 1)];
    let channel = main_channel(6, &[Act::Page(0, 20, 1)], Some(&asked));
    assert_eq!(read(&Blocks::new(), &channel.bytes, &mut Whole).facts.passes, 0);
}

/// A page outside its block is literal, and the pages after it are reported.
#[test]
fn page_outside_its_block_is_literal() {
    let mut channel = set_up(&blocks());
    channel.next(2, RAM).page("b", 40, &content(1));
    let outside = channel.pages.len();
    channel.page("b", 39, &content(2)).page("b", 1000, &content(3)).page("pc.ram", 63, &content(4));
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    assert_eq!(outside, 1);
    let told: Vec<_> = reading.pages.iter().map(|page| page.page).collect();
    assert_eq!((told, reading.facts.pages_unreported, reading.facts.losses), (vec![39, 63], 2, 0));
}

#[test]
fn multifd_packet_outside_block_is_literal() {
    let blocks_of_main = Blocks::new();
    read(&blocks_of_main, &main_channel(0, &[], None).bytes, &mut Whole);
    let mut channel = Channel::new();
    channel.multifd(0).packet(Packet::default(), "b", &[3, 40], &[], 1);
    channel.packet(Packet::default(), "b", &[3, 39], &[], 1);
    let reading = read(&blocks_of_main, &channel.bytes, &mut Whole);
    let told: Vec<_> = reading.pages.iter().map(|page| page.page).collect();
    assert_eq!((told, reading.facts.pages_unreported, reading.facts.losses), (vec![3, 39], 2, 0));
}

/// A multifd packet outside its block is recognised once the main channel has sent the block's size.
#[test]
fn multifd_channel_learns_block_size() {
    let blocks = Blocks::new();
    let mut channel = Channel::new();
    channel.multifd(0).packet(Packet::default(), "b", &[40], &[], 1);
    let cut = channel.bytes.len();
    channel.packet(Packet::default(), "b", &[41], &[], 1);
    let mut parser = Parser::new(&blocks);
    parser.pass(&channel.bytes[..cut - PAGE]);
    assert!(matches!(parser.next(&channel.bytes[cut - PAGE..cut]), ParseStep::Pages { .. }));
    read(&blocks, &main_channel(0, &[], None).bytes, &mut Whole);
    assert_eq!(parser.next(&channel.bytes[cut..]), ParseStep::Literal { len: channel.bytes.len() - cut });
}

#[test]
fn channels_share_block_numbers() {
    let blocks = Blocks::new();
    let mut multifd = Channel::new();
    multifd.multifd(0).packet(Packet::default(), "b", &[3], &[], 1);
    read(&blocks, &multifd.bytes, &mut Whole);
    read(&blocks, &main_channel(0, &[Act::Page(2, 5, 1)], None).bytes, &mut Whole);
    let names: Vec<_> = blocks.list().into_iter().map(|block| block.name).collect();
    assert_eq!(names, [&b"b"[..], b"pc.ram", b"/rom@etc/acpi/tables"].map(Box::from));
    assert_eq!(blocks.list()[0].len_bytes, Some(40 * PAGE as u64));
}

/// Bytes that look like the end of an unknown section do not end it.
#[test]
fn false_section_end_is_recognised() {
    let mut channel = set_up(&blocks());
    channel
        .first(1, 7, "dirty-bitmap", 1)
        .put(b"\x7e\0\0\0\x07\xff")
        .put(b"\x7e\0\0\0\x07\x04\0\0\0\x09\x03\x01\x02\x03");
    channel.put(&[0; 30]).put(b"\x7e\0\0\0\x07\x08\xff\xff\0\0").put(b"\x7e\0\0\0\x07\x7e\0\0\0\x07\x02\x99\x99\0\0");
    channel.footer(7).command(2, &[0; 4]).next(2, RAM).page("b", 1, &content(1)).eos().footer(RAM);
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    check_all_told(&channel, &reading);
}

#[test]
fn unknown_configuration_part_is_skipped() {
    let mut channel = Channel::new();
    channel.magic().configuration("pc-q35-12.0").subsection("configuration/news", &content(1)[..77]);
    channel.ram(RAM, &blocks()).next(2, RAM).page("b", 1, &content(1)).eos().footer(RAM);
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    assert_eq!(at(&reading.pages), at(&channel.pages));
    assert_eq!((reading.facts.losses, reading.facts.phase), (1, StreamPhase::Ram));
}

/// After an unknown record, pages are reported again from the next section on.
#[test]
fn parser_resumes_after_unknown_record() {
    let (hook, out_of_any_block) = ([0, 0, 0, 0, 0, 0, 0x10, 0x80], [0, 0x10, 0, 0, 0, 0, 0x10, 0x08]);
    for unknown in [hook, [0, 0, 0, 0, 0, 0, 0x14, 0], [0, 0, 0, 0, 0, 0, 0, 0x30], out_of_any_block] {
        let mut channel = set_up(&blocks());
        channel.next(2, RAM).page("b", 1, &content(7));
        channel.put(&unknown).put(&content(6)).eos().footer(RAM);
        channel.next(2, RAM).page("b", 2, &content(7));
        channel.forget_block().page("b", 3, &content(7)).eos().footer(RAM);
        let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
        // The record that named the second page's block may be in the unknown bytes.
        let known = [channel.pages[0].clone(), channel.pages[2].clone()];
        assert_eq!(at(&reading.pages), at(&known));
        assert_eq!((reading.facts.losses, reading.facts.pages_unreported), (1, 1));
    }
}

/// A zero-page record with another fill byte is literal.
#[test]
fn nonzero_fill_record_is_literal() {
    let mut channel = set_up(&blocks());
    channel.next(2, RAM);
    for page in 0..6 {
        channel.zero("pc.ram", page);
    }
    let last = channel.bytes.len() - 9 - 1;
    channel.bytes[last] = 1;
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    let told: Vec<_> = reading.zeros.iter().map(|zero| zero.page).collect();
    assert_eq!((told, reading.facts.zero_pages), (vec![1, 2, 3, 5], 6));
}

#[test]
fn device_state_is_literal() {
    let mut channel = main_channel(0, &[Act::Page(0, 1, 1)], None);
    let pages = channel.pages.clone();
    channel.footer(RAM).next(2, RAM).page("b", 1, &content(1)).eos();
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    assert_eq!(at(&reading.pages), at(&pages));
    assert!(reading.facts.ram_ended);
}

#[test]
fn interrupted_postcopy_resumes_on_new_channel() {
    let blocks = Blocks::new();
    let mut first = main_channel(6, &[Act::Page(0, 1, 1)], Some(&[Act::Page(0, 2, 3)]));
    let cut = first.pages[1].at + 100;
    first.bytes.truncate(cut);
    let reading = read(&blocks, &first.bytes, &mut Whole);
    assert_eq!((reading.facts.phase, reading.facts.pages_unreported), (StreamPhase::Postcopy, 1));
    let mut second = Channel::new();
    second.command(10, b"\x06pc.ram").command(9, &[]);
    second.next(2, 7).put(b"bitmap").footer(7);
    sections(&mut second, &[Act::Page(0, 2, 3), Act::Zeros(0, 3, 4), Act::Page(1, 2, 3)], true);
    second.eof();
    let reading = read(&blocks, &second.bytes, &mut Whole);
    check_all_told(&second, &reading);
    let facts = &reading.facts;
    assert_eq!((facts.channel, facts.phase, facts.postcopy_resumed), (Kind::Resumed, StreamPhase::Ended, true));
}

#[test]
fn foreign_bytes_are_literal() {
    for bytes in [&b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03"[..], b"GET / HTTP/1.1\r\n\r\n", b"QEV", &[0xff; 9000]] {
        let reading = read(&Blocks::new(), bytes, &mut Whole);
        assert_eq!(reading.literal, bytes.len());
        let expected = if bytes.len() < 4 { Kind::Undecided } else { Kind::Opaque };
        assert_eq!(reading.facts.channel, expected);
    }
}

#[test]
fn block_list_is_bounded() {
    let many: Vec<_> = (0..2 * Blocks::MAX).map(|index| Block::new(&format!("block {index}"), 1)).collect();
    let mut channel = set_up(&many);
    channel.next(2, RAM).page("block 7", 0, &content(1));
    let blocks = Blocks::new();
    read(&blocks, &channel.bytes, &mut Whole);
    assert_eq!(blocks.len(), Blocks::MAX);
}
