//! The parser of a channel, whatever kind of channel it is.

use larder_codec::PAGE;

use super::blocks::{BlockId, Blocks};
use super::facts::{Channel, Facts, Phase};
use super::held::{Held, be32};
use super::main_channel::MainChannel;
use super::multifd::MultifdChannel;
use super::records::{Context, Flow, Records, Told};
use super::units::PageIndex;
use super::wire::{MAIN_MAGIC, PAGE_HEADER, ZERO_RECORD, multifd, section};

/// What the next bytes of a channel are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step<'p> {
    /// Headers, device state, what is not understood, what was cut.
    Literal {
        /// Bytes, not 0.
        len: usize,
    },
    /// The content of pages, [`PAGE`] bytes each, one after the other.
    Pages {
        /// Their block.
        block: BlockId,
        /// Their numbers, in the order of their content; not empty. A packet of a multifd channel has up to 128.
        pages: &'p [PageIndex],
    },
    /// [`page_header`](super::page_header)`(page)`, then the page's content: [`PAGE_HEADER`] + [`PAGE`] bytes.
    Record {
        /// Its block.
        block: BlockId,
        /// Its number.
        page: PageIndex,
    },
    /// [`zero_record`](super::zero_record) of `first` and of those after it: [`ZERO_RECORD`] bytes each.
    Zeros {
        /// Their block.
        block: BlockId,
        /// The first of them.
        first: PageIndex,
        /// How many pages, not 0.
        count: u32,
    },
    /// Nothing can be said yet, and nothing was consumed.
    NeedMore {
        /// How many bytes there must be in all before asking again; [`Parser::LOOKAHEAD`] at most.
        at_least: usize,
    },
}

impl Step<'_> {
    /// How many bytes it is about, which are consumed.
    #[allow(clippy::len_without_is_empty, reason = "a step is no collection")]
    pub const fn len(&self) -> usize {
        match self {
            Step::Literal { len } => *len,
            Step::Pages { pages, .. } => pages.len() * PAGE,
            Step::Record { .. } => PAGE_HEADER + PAGE,
            Step::Zeros { count, .. } => *count as usize * ZERO_RECORD,
            Step::NeedMore { .. } => 0,
        }
    }
}

/// The parser of one channel's bytes, from its first to its last.
#[derive(Debug)]
pub struct Parser {
    blocks: Blocks,
    kind: Kind,
    held: Held,
    facts: Facts,
    /// The page of a step that has one.
    one: [PageIndex; 1],
}

#[derive(Debug)]
enum Kind {
    Undecided,
    Main(MainChannel),
    Preempt(Records),
    /// In a box, for it has a packet's page numbers.
    Multifd(Box<MultifdChannel>),
    Opaque,
}

/// So many bytes tell what a channel is.
const KIND_BYTES: usize = 4;

impl Parser {
    /// No step needs more bytes than this to be told.
    pub const LOOKAHEAD: usize = PAGE_HEADER + PAGE;

    /// The parser of another channel of the migration that `blocks` are of.
    pub fn new(blocks: &Blocks) -> Self {
        Self {
            blocks: blocks.clone(),
            kind: Kind::Undecided,
            held: Held::new(),
            facts: Facts::default(),
            one: [PageIndex::default()],
        }
    }

    /// What the channel's next bytes are: `data`, from the first that was not consumed, as many as there are. Unless it
    /// needs more, [`Step::len`] of them are consumed.
    pub fn next(&mut self, data: &[u8]) -> Step<'_> {
        let mut taken = 0;
        let flow = self.step(data, &mut taken, true);
        let step = match flow {
            Flow::Tell(Told::Page { block, page }) => {
                self.one = [page];
                Step::Pages {
                    block,
                    pages: &self.one,
                }
            }
            Flow::Tell(Told::Packet { block, from, count }) => match &self.kind {
                Kind::Multifd(channel) => Step::Pages {
                    block,
                    pages: &channel.pages()[from..from + count],
                },
                _ => Step::NeedMore { at_least: 1 },
            },
            Flow::Tell(Told::Record { block, page }) => Step::Record { block, page },
            Flow::Tell(Told::Zeros { block, first, count }) => Step::Zeros { block, first, count },
            Flow::NeedMore(at_least) => Step::NeedMore { at_least },
            _ if taken == 0 => Step::NeedMore { at_least: 1 },
            _ => Step::Literal { len: taken },
        };
        self.facts.bytes += step.len() as u64;
        step
    }

    /// All of `data`, the channel's next bytes, has been carried as it is, whatever it is: there was no time to wait for
    /// the rest of a page or of a record. What follows is understood as if it had been told.
    pub fn pass(&mut self, data: &[u8]) {
        let mut from = 0;
        while from < data.len() {
            let mut taken = 0;
            self.step(&data[from..], &mut taken, false);
            debug_assert!(taken > 0, "bytes are passed, or there is no end");
            from += taken.max(1);
        }
        self.facts.bytes += data.len() as u64;
    }

    /// What it has come across so far.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    fn step(&mut self, data: &[u8], taken: &mut usize, tell: bool) -> Flow {
        let mut cx = Context {
            blocks: &self.blocks,
            facts: &mut self.facts,
            held: &mut self.held,
            tell,
        };
        loop {
            match &mut self.kind {
                Kind::Undecided => match cx.held.whole(data, taken, |_| Ok(KIND_BYTES)) {
                    Ok(true) => self.kind = kind(&mut cx),
                    _ => return Flow::Pause,
                },
                Kind::Main(channel) => return channel.step(&mut cx, data, taken),
                Kind::Multifd(channel) => return channel.step(&mut cx, data, taken),
                Kind::Preempt(records) => match records.step(&mut cx, data, taken) {
                    // It is told once, at the very end.
                    Flow::End => {}
                    Flow::Lost => {
                        cx.facts.losses += 1;
                        cx.facts.changed();
                        cx.held.clear();
                        self.kind = Kind::Opaque;
                    }
                    flow => return flow,
                },
                Kind::Opaque => {
                    *taken = data.len();
                    return Flow::Pause;
                }
            }
        }
    }
}

/// What a channel is, by its first bytes. They stay held if they belong to its first structure.
fn kind(cx: &mut Context<'_>) -> Kind {
    let bytes = cx.held.get();
    let (kind, channel) = match be32(bytes, 0) {
        _ if bytes == MAIN_MAGIC => (Kind::Main(MainChannel::new()), Channel::Main),
        multifd::MAGIC => (
            Kind::Multifd(Box::new(MultifdChannel::new())),
            Channel::Multifd { id: 0 },
        ),
        // The upper half of an offset.
        0..0x1000 => (Kind::Preempt(Records::new()), Channel::Preempt),
        _ if bytes[..2] == [section::COMMAND, 0] => (
            Kind::Main(MainChannel::resumed(cx.blocks.ram_section())),
            Channel::Resumed,
        ),
        _ => (Kind::Opaque, Channel::Opaque),
    };
    if matches!(channel, Channel::Resumed | Channel::Preempt) {
        cx.facts.phase = Phase::Postcopy;
    }
    if matches!(channel, Channel::Main | Channel::Opaque) {
        cx.held.clear();
    }
    cx.facts.channel = channel;
    cx.facts.changed();
    kind
}
