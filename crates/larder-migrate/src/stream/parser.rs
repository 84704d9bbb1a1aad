//! Parser of a channel of any kind.

use larder_codec::PAGE;

use super::blocks::{BlockId, Blocks};
use super::facts::{ChannelKind, StreamFacts, StreamPhase};
use super::main_channel::MainChannel;
use super::multifd::MultifdChannel;
use super::partial::{PartialStructure, be32};
use super::records::{Context, Flow, PageReport, Records};
use super::units::PageIndex;
use super::wire::{MAIN_MAGIC, PAGE_HEADER, ZERO_RECORD, multifd, section};

/// Content of the next bytes of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParseStep<'p> {
    /// Headers, device state, bytes that are not understood, incomplete pages.
    Literal {
        /// Number of bytes, not 0.
        len: usize,
    },
    /// Contents of pages, [`PAGE`] bytes each, one after the other.
    Pages {
        /// Block of the pages.
        block: BlockId,
        /// Page numbers, in the order of the contents; not empty. A packet of a multifd channel has up to 128.
        pages: &'p [PageIndex],
    },
    /// Header [`page_header`](super::page_header)`(page)`, then the page's content: [`PAGE_HEADER`] + [`PAGE`] bytes.
    Record {
        /// Block of the page.
        block: BlockId,
        /// Number of the page.
        page: PageIndex,
    },
    /// Records [`zero_record`](super::zero_record) of `first` and of the pages after it: [`ZERO_RECORD`] bytes each.
    Zeros {
        /// Block of the pages.
        block: BlockId,
        /// First page.
        first: PageIndex,
        /// Number of pages, not 0.
        count: u32,
    },
    /// No step can be reported yet; nothing was consumed.
    NeedMore {
        /// Total bytes needed before the next call; at most [`Parser::LOOKAHEAD`].
        at_least: usize,
    },
}

impl ParseStep<'_> {
    /// Returns the number of bytes of the step, which are consumed.
    #[allow(clippy::len_without_is_empty, reason = "a step is no collection")]
    pub const fn len(&self) -> usize {
        match self {
            ParseStep::Literal { len } => *len,
            ParseStep::Pages { pages, .. } => pages.len() * PAGE,
            ParseStep::Record { .. } => PAGE_HEADER + PAGE,
            ParseStep::Zeros { count, .. } => *count as usize * ZERO_RECORD,
            ParseStep::NeedMore { .. } => 0,
        }
    }
}

/// Parser of one channel's bytes, from the first to the last.
#[derive(Debug)]
pub struct Parser {
    blocks: Blocks,
    kind: ChannelParser,
    held: PartialStructure,
    facts: StreamFacts,
    /// Page of a step that has one page.
    one: [PageIndex; 1],
}

#[derive(Debug)]
enum ChannelParser {
    Undecided,
    Main(MainChannel),
    Preempt(Records),
    /// Boxed because of its size: it has a packet's page numbers.
    Multifd(Box<MultifdChannel>),
    Opaque,
}

/// Number of bytes that identify the kind of a channel.
const KIND_BYTES: usize = 4;

impl Parser {
    /// Maximum bytes that any step needs to be reported.
    pub const LOOKAHEAD: usize = PAGE_HEADER + PAGE;

    /// Creates the parser of another channel of the migration that `blocks` belong to.
    pub fn new(blocks: &Blocks) -> Self {
        Self {
            blocks: blocks.clone(),
            kind: ChannelParser::Undecided,
            held: PartialStructure::new(),
            facts: StreamFacts::default(),
            one: [PageIndex::default()],
        }
    }

    /// Parses the channel's next bytes. `data` begins with the first byte that was not consumed and has all bytes
    /// available. [`ParseStep::len`] bytes are consumed, unless the step is [`ParseStep::NeedMore`].
    pub fn next(&mut self, data: &[u8]) -> ParseStep<'_> {
        let mut taken = 0;
        let flow = self.step(data, &mut taken, true);
        let step = match flow {
            Flow::Report(PageReport::Page { block, page }) => {
                self.one = [page];
                ParseStep::Pages { block, pages: &self.one }
            }
            Flow::Report(PageReport::Packet { block, from, count }) => match &self.kind {
                ChannelParser::Multifd(channel) => {
                    ParseStep::Pages { block, pages: &channel.pages()[from..from + count] }
                }
                _ => ParseStep::NeedMore { at_least: 1 },
            },
            Flow::Report(PageReport::Record { block, page }) => ParseStep::Record { block, page },
            Flow::Report(PageReport::Zeros { block, first, count }) => ParseStep::Zeros { block, first, count },
            Flow::NeedMore(at_least) => ParseStep::NeedMore { at_least },
            _ if taken == 0 => ParseStep::NeedMore { at_least: 1 },
            _ => ParseStep::Literal { len: taken },
        };
        self.facts.bytes += step.len() as u64;
        step
    }

    /// Parses all of `data`, the channel's next bytes, which were carried as literals: there was no time to wait for
    /// the rest of a page or of a record. What follows is parsed as after [`Self::next`].
    pub fn pass(&mut self, data: &[u8]) {
        let mut from = 0;
        while from < data.len() {
            let mut taken = 0;
            self.step(&data[from..], &mut taken, false);
            debug_assert!(taken > 0, "each step consumes bytes, or this loop has no end");
            from += taken.max(1);
        }
        self.facts.bytes += data.len() as u64;
    }

    /// Returns the facts found so far.
    pub fn facts(&self) -> &StreamFacts {
        &self.facts
    }

    fn step(&mut self, data: &[u8], taken: &mut usize, reports_pages: bool) -> Flow {
        let mut cx = Context { blocks: &self.blocks, facts: &mut self.facts, partial: &mut self.held, reports_pages };
        loop {
            match &mut self.kind {
                ChannelParser::Undecided => match cx.partial.complete(data, taken, |_| Ok(KIND_BYTES)) {
                    Ok(true) => self.kind = detect_kind(&mut cx),
                    _ => return Flow::Pause,
                },
                ChannelParser::Main(channel) => return channel.step(&mut cx, data, taken),
                ChannelParser::Multifd(channel) => return channel.step(&mut cx, data, taken),
                ChannelParser::Preempt(records) => match records.step(&mut cx, data, taken) {
                    // The end is reported once, at the very end.
                    Flow::End => {}
                    Flow::Lost => {
                        cx.facts.losses += 1;
                        cx.facts.count_change();
                        cx.partial.clear();
                        self.kind = ChannelParser::Opaque;
                    }
                    flow => return flow,
                },
                ChannelParser::Opaque => {
                    *taken = data.len();
                    return Flow::Pause;
                }
            }
        }
    }
}

/// Determines the kind of a channel from its first bytes. They stay held if they belong to its first structure.
fn detect_kind(cx: &mut Context<'_>) -> ChannelParser {
    let bytes = cx.partial.get();
    let (kind, channel) = match be32(bytes, 0) {
        _ if bytes == MAIN_MAGIC => (ChannelParser::Main(MainChannel::new()), ChannelKind::Main),
        multifd::MAGIC => (ChannelParser::Multifd(Box::new(MultifdChannel::new())), ChannelKind::Multifd { id: 0 }),
        // These bytes are the upper half of an offset.
        0..0x1000 => (ChannelParser::Preempt(Records::new()), ChannelKind::Preempt),
        _ if bytes[..2] == [section::COMMAND, 0] => {
            (ChannelParser::Main(MainChannel::resumed(cx.blocks.ram_section())), ChannelKind::Resumed)
        }
        _ => (ChannelParser::Opaque, ChannelKind::Opaque),
    };
    if matches!(channel, ChannelKind::Resumed | ChannelKind::Preempt) {
        cx.facts.phase = StreamPhase::Postcopy;
    }
    if matches!(channel, ChannelKind::Main | ChannelKind::Opaque) {
        cx.partial.clear();
    }
    cx.facts.channel = channel;
    cx.facts.count_change();
    kind
}
