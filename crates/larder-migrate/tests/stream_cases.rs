//! What the parser of QEMU's migration stream makes of particular channels: of what is rare in them, and of what is wrong.

#[path = "stream/reader.rs"]
mod reader;
#[path = "stream/script.rs"]
mod script;
#[path = "stream/writer.rs"]
mod writer;

use larder_migrate::stream::{Blocks, Channel as Kind, Parser, Phase, Step};

use reader::{Cuts, Whole, read};
use script::{Act, RAM, at, blocks, check_all_told, check_facts, main_channel, sections};
use writer::{Block, Channel, PAGE, Packet, content};

/// A main channel up to RAM's first section.
fn set_up(blocks: &[Block]) -> Channel {
    let mut channel = Channel::new();
    channel.magic().configuration("pc-q35-7.2").ram(RAM, blocks);
    channel
}

#[test]
fn blocks_and_their_sizes_are_known_from_the_beginning_of_the_main_channel() {
    let mut list = blocks();
    list[1].number = Some(0x20_0000);
    let mut channel = Channel::new();
    channel.magic().configuration("pc-q35-10.0");
    channel.command(3, &[0, 0, 0, 0, 0, 0x20, 0x10, 0, 0, 0, 0, 0, 0, 0, 0x10, 0]);
    channel.ram(RAM, &list);
    let blocks = Blocks::new();
    let reading = read(&blocks, &channel.bytes, &mut Whole);
    let told: Vec<_> = (blocks.list().into_iter())
        .map(|block| {
            (
                String::from_utf8_lossy(&block.name).into_owned(),
                block.len_bytes,
                block.page_bytes,
            )
        })
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
    assert_eq!(
        (facts.phase, facts.page_sizes, facts.postcopy_advised),
        (Phase::Setup, 0x20_1000, true)
    );
    assert_eq!(
        (facts.machine.name(), facts.qemu_at_least()),
        ("pc-q35-10.0", Some((10, 0)))
    );
}

#[test]
fn a_header_that_was_passed_byte_by_byte_counts_as_if_it_had_been_read() {
    struct EachByte;
    impl Cuts for EachByte {
        fn arrive(&mut self) -> usize {
            1
        }

        fn flush(&mut self) -> bool {
            true
        }
    }
    let acts = [
        Act::Zeros(0, 3, 9),
        Act::Page(1, 5, 1),
        Act::NextSection,
        Act::Page(1, 6, 2),
    ];
    let channel = main_channel(4, &acts, None);
    let reading = read(&Blocks::new(), &channel.bytes, &mut EachByte);
    check_facts(&channel, &reading);
    assert_eq!((reading.facts.pages_untold, reading.literal), (2, channel.bytes.len()));
}

#[test]
fn a_page_whose_header_was_passed_is_told() {
    /// All up to the content of the first page, then all.
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
fn zero_pages_in_order_are_one_step() {
    let mut channel = set_up(&blocks());
    channel.next(2, RAM);
    for page in 0..30 {
        channel.zero("pc.ram", page);
    }
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    // The first names its block.
    assert_eq!(at(&reading.zeros), at(&channel.zeros[1..]));
    assert_eq!(reading.facts.zero_pages, 30);
}

#[test]
fn the_passes_over_memory_are_counted() {
    let mut channel = set_up(&blocks());
    channel.next(2, RAM);
    for _ in 0..4 {
        channel
            .page("pc.ram", 3, &content(1))
            .zero("pc.ram", 4)
            .zero("pc.ram", 5);
        channel.eos().footer(RAM).next(2, RAM).page("b", 2, &content(1));
    }
    channel.eos().footer(RAM);
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    assert_eq!((reading.facts.passes, reading.facts.ram_sections), (3, 6));
    // In post-copy the destination says what is next.
    let asked = [Act::Page(0, 9, 1), Act::Page(0, 2, 1), Act::Page(0, 1, 1)];
    let channel = main_channel(6, &[Act::Page(0, 20, 1)], Some(&asked));
    assert_eq!(read(&Blocks::new(), &channel.bytes, &mut Whole).facts.passes, 0);
}

#[test]
fn a_page_outside_of_its_block_is_literal_and_what_follows_is_told() {
    let mut channel = set_up(&blocks());
    channel.next(2, RAM).page("b", 40, &content(1));
    let outside = channel.pages.len();
    channel
        .page("b", 39, &content(2))
        .page("b", 1000, &content(3))
        .page("pc.ram", 63, &content(4));
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    assert_eq!(outside, 1);
    let told: Vec<_> = reading.pages.iter().map(|page| page.page).collect();
    assert_eq!(
        (told, reading.facts.pages_untold, reading.facts.losses),
        (vec![39, 63], 2, 0)
    );
}

#[test]
fn a_multifd_packet_of_pages_outside_of_their_block_is_literal() {
    let blocks_of_main = Blocks::new();
    read(&blocks_of_main, &main_channel(0, &[], None).bytes, &mut Whole);
    let mut channel = Channel::new();
    channel.multifd(0).packet(Packet::default(), "b", &[3, 40], &[], 1);
    channel.packet(Packet::default(), "b", &[3, 39], &[], 1);
    let reading = read(&blocks_of_main, &channel.bytes, &mut Whole);
    let told: Vec<_> = reading.pages.iter().map(|page| page.page).collect();
    assert_eq!(
        (told, reading.facts.pages_untold, reading.facts.losses),
        (vec![3, 39], 2, 0)
    );
}

#[test]
fn a_multifd_channel_learns_the_size_of_a_block_when_the_main_channel_tells_it() {
    let blocks = Blocks::new();
    let mut channel = Channel::new();
    channel.multifd(0).packet(Packet::default(), "b", &[40], &[], 1);
    let cut = channel.bytes.len();
    channel.packet(Packet::default(), "b", &[41], &[], 1);
    let mut parser = Parser::new(&blocks);
    parser.pass(&channel.bytes[..cut - PAGE]);
    assert!(matches!(
        parser.next(&channel.bytes[cut - PAGE..cut]),
        Step::Pages { .. }
    ));
    read(&blocks, &main_channel(0, &[], None).bytes, &mut Whole);
    assert_eq!(
        parser.next(&channel.bytes[cut..]),
        Step::Literal {
            len: channel.bytes.len() - cut
        }
    );
}

#[test]
fn blocks_have_the_same_numbers_on_all_channels() {
    let blocks = Blocks::new();
    let mut multifd = Channel::new();
    multifd.multifd(0).packet(Packet::default(), "b", &[3], &[], 1);
    read(&blocks, &multifd.bytes, &mut Whole);
    read(&blocks, &main_channel(0, &[Act::Page(2, 5, 1)], None).bytes, &mut Whole);
    let names: Vec<_> = blocks.list().into_iter().map(|block| block.name).collect();
    assert_eq!(names, [&b"b"[..], b"pc.ram", b"/rom@etc/acpi/tables"].map(Box::from));
    assert_eq!(blocks.list()[0].len_bytes, Some(40 * PAGE as u64));
}

#[test]
fn what_looks_like_the_end_of_an_unknown_section_does_not_mislead() {
    let mut channel = set_up(&blocks());
    channel
        .first(1, 7, "dirty-bitmap", 1)
        .put(b"\x7e\0\0\0\x07\xff")
        .put(b"\x7e\0\0\0\x07\x04\0\0\0\x09\x03\x01\x02\x03");
    channel
        .put(&[0; 30])
        .put(b"\x7e\0\0\0\x07\x08\xff\xff\0\0")
        .put(b"\x7e\0\0\0\x07\x7e\0\0\0\x07\x02\x99\x99\0\0");
    channel
        .footer(7)
        .command(2, &[0; 4])
        .next(2, RAM)
        .page("b", 1, &content(1))
        .eos()
        .footer(RAM);
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    check_all_told(&channel, &reading);
}

#[test]
fn an_unknown_part_of_the_configuration_is_passed_over() {
    let mut channel = Channel::new();
    channel
        .magic()
        .configuration("pc-q35-12.0")
        .subsection("configuration/news", &content(1)[..77]);
    channel
        .ram(RAM, &blocks())
        .next(2, RAM)
        .page("b", 1, &content(1))
        .eos()
        .footer(RAM);
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    assert_eq!(at(&reading.pages), at(&channel.pages));
    assert_eq!((reading.facts.losses, reading.facts.phase), (1, Phase::Ram));
}

#[test]
fn after_a_record_that_is_not_known_the_next_section_is() {
    let (hook, out_of_any_block) = ([0, 0, 0, 0, 0, 0, 0x10, 0x80], [0, 0x10, 0, 0, 0, 0, 0x10, 0x08]);
    for unknown in [
        hook,
        [0, 0, 0, 0, 0, 0, 0x14, 0],
        [0, 0, 0, 0, 0, 0, 0, 0x30],
        out_of_any_block,
    ] {
        let mut channel = set_up(&blocks());
        channel.next(2, RAM).page("b", 1, &content(7));
        channel.put(&unknown).put(&content(6)).eos().footer(RAM);
        channel.next(2, RAM).page("b", 2, &content(7));
        channel.forget_block().page("b", 3, &content(7)).eos().footer(RAM);
        let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
        // The block of the second page was told in what was not understood, for all that is known.
        let known = [channel.pages[0].clone(), channel.pages[2].clone()];
        assert_eq!(at(&reading.pages), at(&known));
        assert_eq!((reading.facts.losses, reading.facts.pages_untold), (1, 1));
    }
}

#[test]
fn a_record_of_a_page_that_is_another_byte_all_over_is_literal() {
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
fn device_state_is_literal_to_the_end() {
    let mut channel = main_channel(0, &[Act::Page(0, 1, 1)], None);
    let pages = channel.pages.clone();
    channel.footer(RAM).next(2, RAM).page("b", 1, &content(1)).eos();
    let reading = read(&Blocks::new(), &channel.bytes, &mut Whole);
    assert_eq!(at(&reading.pages), at(&pages));
    assert!(reading.facts.ram_ended);
}

#[test]
fn post_copy_that_was_interrupted_goes_on_over_another_channel() {
    let blocks = Blocks::new();
    let mut first = main_channel(6, &[Act::Page(0, 1, 1)], Some(&[Act::Page(0, 2, 3)]));
    let cut = first.pages[1].at + 100;
    first.bytes.truncate(cut);
    let reading = read(&blocks, &first.bytes, &mut Whole);
    assert_eq!((reading.facts.phase, reading.facts.pages_untold), (Phase::Postcopy, 1));
    let mut second = Channel::new();
    second.command(10, b"\x06pc.ram").command(9, &[]);
    second.next(2, 7).put(b"bitmap").footer(7);
    sections(
        &mut second,
        &[Act::Page(0, 2, 3), Act::Zeros(0, 3, 4), Act::Page(1, 2, 3)],
        true,
    );
    second.eof();
    let reading = read(&blocks, &second.bytes, &mut Whole);
    check_all_told(&second, &reading);
    let facts = &reading.facts;
    assert_eq!(
        (facts.channel, facts.phase, facts.postcopy_resumed),
        (Kind::Resumed, Phase::Ended, true)
    );
}

#[test]
fn what_is_no_channel_of_qemu_is_literal() {
    for bytes in [
        &b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03"[..],
        b"GET / HTTP/1.1\r\n\r\n",
        b"QEV",
        &[0xff; 9000],
    ] {
        let reading = read(&Blocks::new(), bytes, &mut Whole);
        assert_eq!(reading.literal, bytes.len());
        let expected = if bytes.len() < 4 { Kind::Undecided } else { Kind::Opaque };
        assert_eq!(reading.facts.channel, expected);
    }
}

#[test]
fn a_list_of_more_blocks_than_are_kept_is_not_kept() {
    let many: Vec<_> = (0..2 * Blocks::MAX)
        .map(|index| Block::new(&format!("block {index}"), 1))
        .collect();
    let mut channel = set_up(&many);
    channel.next(2, RAM).page("block 7", 0, &content(1));
    let blocks = Blocks::new();
    read(&blocks, &channel.bytes, &mut Whole);
    assert_eq!(blocks.len(), Blocks::MAX);
}
