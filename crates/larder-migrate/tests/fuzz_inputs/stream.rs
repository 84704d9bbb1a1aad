//! Channels of QEMU's migration stream with random bytes.

use larder_migrate::stream::{Blocks, StreamFacts};

use super::Input;
use super::reader::{Cuts, Reading, Whole, read};
use super::writer::{Block, Channel, PAGE, Packet};

/// Parses `data` as a channel, after a prefix that leads into one of the formats: in one piece, and cut and flushed
/// as `data` selects. The reported pages must not depend on that.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let kind = input.byte();
    let cut = usize::from(input.word());
    let bytes = channel(kind, input.0);

    let (blocks, whole) = fresh(kind, &bytes, &mut Whole);
    let again = fresh(kind, &bytes, &mut Drawn::new(data, cut, false));
    assert_eq!(again.1.pages, whole.pages);
    assert_eq!(again.1.facts, whole.facts);
    assert_eq!(again.0.list(), blocks.list());

    let (flushed_blocks, flushed) = fresh(kind, &bytes, &mut Drawn::new(data, cut, true));
    assert!(flushed.pages.iter().all(|page| whole.pages.contains(page)));
    assert_eq!(all_pages(&flushed.facts), all_pages(&whole.facts));
    assert_eq!(flushed_blocks.list(), blocks.list());
    assert!(blocks.len() <= Blocks::MAX);
}

/// Parses a channel with a new list of blocks.
fn fresh(kind: u8, bytes: &[u8], cuts: &mut impl Cuts) -> (Blocks, Reading) {
    let blocks = Blocks::new();
    if kind & 0x10 != 0 {
        read(&blocks, &beginning(Block::new("b", 3)).bytes, &mut Whole);
    }
    let reading = read(&blocks, bytes, cuts);
    (blocks, reading)
}

/// Merges the page counts, the only facts that depend on flushes.
fn all_pages(facts: &StreamFacts) -> StreamFacts {
    StreamFacts { pages: facts.pages + facts.pages_unreported, pages_unreported: 0, ..facts.clone() }
}

fn beginning(block: Block) -> Channel {
    let mut channel = Channel::new();
    channel.magic().configuration("pc-q35-7.2").ram(2, &[Block::new("pc.ram", 300), block]);
    channel
}

/// Returns `data` after a prefix.
fn channel(kind: u8, data: &[u8]) -> Vec<u8> {
    let mut channel = Channel::new();
    match kind & 7 {
        0 => {}
        1 => {
            channel.magic();
        }
        2 => {
            channel.magic().configuration("pc-q35-7.2").first(1, 2, "ram", 4);
        }
        3 => {
            channel = beginning(Block::new("b", 3));
        }
        4 => {
            channel = beginning(Block::new("b", 3));
            channel.next(2, 2).page("pc.ram", 1, &[7; PAGE]);
        }
        5 => {
            channel = beginning(Block::new("b", 3));
            channel.first(1, 7, "dirty-bitmap", 1);
        }
        6 => {
            channel.multifd(1);
        }
        _ => {
            channel.multifd(1).packet(Packet::default(), "b", &[1, 0], &[2], 1);
        }
    }
    channel.put(data);
    channel.bytes
}

/// Cuts drawn from the input.
struct Drawn<'a> {
    data: &'a [u8],
    at: usize,
    most: usize,
    flush: bool,
}

impl<'a> Drawn<'a> {
    fn new(data: &'a [u8], most: usize, flush: bool) -> Self {
        Self { data, at: 0, most, flush }
    }

    fn draw(&mut self) -> usize {
        self.at += 1;
        let byte = |at: usize| self.data.get(at % self.data.len().max(1)).copied().unwrap_or(1);
        usize::from(byte(self.at)) * 251 + usize::from(byte(self.at * 7))
    }
}

impl Cuts for Drawn<'_> {
    fn arrive(&mut self) -> usize {
        1 + self.draw() % (1 + self.most)
    }

    fn flush(&mut self) -> bool {
        self.flush && self.draw().is_multiple_of(3)
    }
}
