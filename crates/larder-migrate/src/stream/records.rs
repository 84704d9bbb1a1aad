//! RAM records: what a section of RAM on the main channel is made of, and the whole of post-copy's second channel.
//!
//! ```text
//! be64  offset in the block | flags
//!       unless CONTINUE: u8 length, name of the block
//! ZERO           u8  0
//! PAGE           4096 bytes
//! XBZRLE         u8  1, be16 length, as many bytes
//! COMPRESS_PAGE  be32 length, as many bytes
//! MEM_SIZE       the blocks, until their sizes add up to the offset:
//!                u8 length, name, be64 size, [be64 page size of its memory, or its address]
//! EOS            the section ends
//! MULTIFD_FLUSH
//! ```
//!
//! The usual record, of a page whose block is the last one's, takes the short way ([`Records::usual`]): nothing of it is
//! copied. All others are held until they are whole.

use larder_codec::PAGE;

use super::blocks::{BlockId, Blocks};
use super::facts::{Facts, Phase};
use super::held::{Held, Unknown, be16, be32, be64};
use super::units::{PAGE_BYTES, PageIndex};
use super::wire::{PAGE_HEADER, ZERO_RECORD, flag};

/// What all parts of a parser share.
pub(super) struct Context<'a> {
    pub(super) blocks: &'a Blocks,
    pub(super) facts: &'a mut Facts,
    pub(super) held: &'a mut Held,
    /// Whether pages are told, or all is passed on as literal.
    pub(super) tell: bool,
}

/// How a part of a parser goes on.
#[derive(Debug)]
pub(super) enum Flow {
    /// What the first bytes of the data are; none was taken as literal before.
    Tell(Told),
    /// What was taken is literal, and all that can be said for now.
    Pause,
    /// Nothing was taken, and so many bytes are needed.
    NeedMore(usize),
    /// The records have ended.
    End,
    /// What was taken is literal, and what follows is not understood.
    Lost,
}

/// See [`Step`](super::Step).
#[derive(Debug)]
pub(super) enum Told {
    Page {
        block: BlockId,
        page: PageIndex,
    },
    Packet {
        block: BlockId,
        from: usize,
        count: usize,
    },
    Record {
        block: BlockId,
        page: PageIndex,
    },
    Zeros {
        block: BlockId,
        first: PageIndex,
        count: u32,
    },
}

/// The block that records without a name are of.
#[derive(Clone, Copy, Debug)]
struct Current {
    id: BlockId,
    /// Offsets up to this one are pages of it.
    pages: u32,
}

#[derive(Clone, Copy, Debug)]
enum At {
    /// The beginning of a record.
    Header,
    /// A page's content. Its header has been carried.
    Page(PageIndex),
    /// So many bytes that are literal.
    Skip(usize),
    /// The list of blocks.
    Block(List),
    /// The same, after a block's name and size, where there may be another number.
    AfterBlock(List, Option<BlockId>),
}

/// What is left of the list of blocks.
#[derive(Clone, Copy, Debug)]
struct List {
    bytes: u64,
    blocks: usize,
}

/// A parser of RAM records.
#[derive(Debug)]
pub(super) struct Records {
    at: At,
    block: Option<Current>,
    /// Block and page of the last record; see [`Facts::passes`].
    last_place: u64,
}

impl Records {
    pub(super) const fn new() -> Self {
        Self {
            at: At::Header,
            block: None,
            last_place: 0,
        }
    }

    /// Records have been missed: which block those without a name are of is not known.
    pub(super) fn resynchronised(&mut self) {
        self.at = At::Header;
        self.block = None;
    }

    /// Looks at `data`, of which `taken` bytes are literal already, and takes more.
    pub(super) fn step(&mut self, cx: &mut Context<'_>, data: &[u8], taken: &mut usize) -> Flow {
        loop {
            let rest = &data[*taken..];
            match self.at {
                At::Header => {
                    if cx.tell && cx.held.is_empty() {
                        if *taken > 0 && is_usual(rest) {
                            return Flow::Pause;
                        }
                        if *taken == 0
                            && let Some(flow) = self.usual(cx.facts, rest)
                        {
                            return flow;
                        }
                    }
                    match cx.held.whole(data, taken, header_bytes) {
                        Ok(true) => {}
                        Ok(false) => return Flow::Pause,
                        Err(Unknown) => return Flow::Lost,
                    }
                    let end = self.header(cx);
                    cx.held.clear();
                    match end {
                        Ok(false) => {}
                        Ok(true) => return Flow::End,
                        Err(Unknown) => return Flow::Lost,
                    }
                }
                At::Page(page) => match self.page(cx, page, rest, taken) {
                    Some(flow) => return flow,
                    None => continue,
                },
                At::Skip(left) => {
                    let skip = left.min(rest.len());
                    *taken += skip;
                    if skip < left {
                        self.at = At::Skip(left - skip);
                        return Flow::Pause;
                    }
                    self.at = At::Header;
                }
                At::Block(list) => {
                    match cx.held.whole(data, taken, block_bytes) {
                        Ok(true) => {}
                        Ok(false) => return Flow::Pause,
                        Err(Unknown) => return Flow::Lost,
                    }
                    let listed = listed(cx, list);
                    cx.held.clear();
                    match listed {
                        Ok(at) => self.at = at,
                        Err(Unknown) => return Flow::Lost,
                    }
                }
                At::AfterBlock(list, block) => {
                    let always = cx.facts.ignore_shared;
                    let need = |held: &[u8]| {
                        Ok(match held.first() {
                            Some(&first) if first != 0 && !always => 1,
                            Some(_) => 8,
                            None => 1,
                        })
                    };
                    match cx.held.whole(data, taken, need) {
                        Ok(true) => self.at = after_block(cx, list, block),
                        Ok(false) => return Flow::Pause,
                        Err(Unknown) => return Flow::Lost,
                    }
                }
            }
        }
    }

    /// Records of the last one's block, of a page or of zero pages: what nearly all are. None: it is another.
    #[inline]
    fn usual(&mut self, facts: &mut Facts, data: &[u8]) -> Option<Flow> {
        let Some(word) = word(data) else {
            return Some(Flow::NeedMore(PAGE_HEADER));
        };
        let block = self.block?;
        let page = PageIndex::at(word & !flag::MASK, block.pages)?;
        match word & flag::MASK {
            flag::NEXT_PAGE => {
                if data.len() < PAGE_HEADER + PAGE {
                    return Some(Flow::NeedMore(PAGE_HEADER + PAGE));
                }
                self.met(facts, block.id, page);
                facts.pages += 1;
                Some(Flow::Tell(Told::Record { block: block.id, page }))
            }
            flag::NEXT_ZERO => {
                if data.len() < ZERO_RECORD {
                    return Some(Flow::NeedMore(ZERO_RECORD));
                }
                let count = zeros(data, page, block.pages);
                if count == 0 {
                    return None;
                }
                self.met(facts, block.id, page);
                self.last_place += u64::from(count - 1);
                facts.zero_pages += u64::from(count);
                Some(Flow::Tell(Told::Zeros {
                    block: block.id,
                    first: page,
                    count,
                }))
            }
            _ => None,
        }
    }

    /// A header that is whole. Whether the section ends.
    fn header(&mut self, cx: &mut Context<'_>) -> Result<bool, Unknown> {
        let bytes = cx.held.get();
        let word = be64(bytes, 0);
        let (offset, kind) = (word & !flag::MASK, word & flag::MASK & !flag::CONTINUE);
        match kind {
            flag::EOS => {
                cx.facts.ram_sections += 1;
                return Ok(true);
            }
            flag::MULTIFD_FLUSH => {
                cx.facts.multifd_flushes += 1;
                return Ok(false);
            }
            flag::MEM_SIZE => {
                let list = List {
                    bytes: offset,
                    blocks: Blocks::MAX,
                };
                self.at = list.next();
                return Ok(false);
            }
            _ => {}
        }
        let mut tail = &bytes[8..];
        if word & flag::CONTINUE == 0 {
            let (name, rest) = tail[1..].split_at(usize::from(tail[0]));
            self.block = cx.blocks.named(name).map(|found| Current {
                id: found.id,
                pages: found.pages.unwrap_or(u32::MAX),
            });
            tail = rest;
        }
        let page = self
            .block
            .and_then(|block| PageIndex::at(offset, block.pages).map(|page| (block.id, page)));
        if let Some((id, page)) = page {
            self.met(cx.facts, id, page);
        }
        self.at = match kind {
            flag::ZERO => {
                cx.facts.zero_pages += 1;
                At::Header
            }
            flag::PAGE => match page {
                Some((_, page)) => At::Page(page),
                None => {
                    cx.facts.pages_untold += 1;
                    At::Skip(PAGE)
                }
            },
            flag::XBZRLE => {
                cx.facts.encoded_pages += 1;
                let len = usize::from(be16(tail, 1));
                if tail[0] != 1 || len > PAGE {
                    return Err(Unknown);
                }
                At::Skip(len)
            }
            _ => {
                cx.facts.encoded_pages += 1;
                let len = be32(tail, 0) as usize;
                if len > COMPRESSED_BYTES_MAX {
                    return Err(Unknown);
                }
                At::Skip(len)
            }
        };
        Ok(false)
    }

    /// A page's content.
    fn page(&mut self, cx: &mut Context<'_>, page: PageIndex, data: &[u8], taken: &mut usize) -> Option<Flow> {
        let block = self.block.map(|block| block.id);
        match block {
            Some(block) if cx.tell => {
                if *taken > 0 {
                    return Some(Flow::Pause);
                }
                if data.len() < PAGE {
                    return Some(Flow::NeedMore(PAGE));
                }
                self.at = At::Header;
                cx.facts.pages += 1;
                Some(Flow::Tell(Told::Page { block, page }))
            }
            _ if data.is_empty() => Some(Flow::Pause),
            _ => {
                cx.facts.pages_untold += 1;
                self.at = At::Skip(PAGE);
                None
            }
        }
    }

    fn met(&mut self, facts: &mut Facts, block: BlockId, page: PageIndex) {
        let place = u64::from(block.get()) << 32 | u64::from(page.get());
        if place < self.last_place && facts.phase < Phase::Postcopy {
            facts.passes += 1;
        }
        self.last_place = place;
    }
}

impl List {
    /// What follows when a block is done with.
    fn next(self) -> At {
        if self.bytes > 0 { At::Block(self) } else { At::Header }
    }
}

/// What zlib makes of a page at most: its `compressBound`, which QEMU 7.2 checks too.
const COMPRESSED_BYTES_MAX: usize = PAGE + (PAGE >> 12) + (PAGE >> 14) + (PAGE >> 25) + 13;

/// Whether a record is one of those that are told, or too short to know.
fn is_usual(data: &[u8]) -> bool {
    word(data).is_none_or(|word| matches!(word & flag::MASK, flag::NEXT_PAGE | flag::NEXT_ZERO))
}

fn word(data: &[u8]) -> Option<u64> {
    data.first_chunk().map(|word| u64::from_be_bytes(*word))
}

/// How many records from the front of `data` say that `first` and the pages after it are zero.
fn zeros(data: &[u8], first: PageIndex, pages: u32) -> u32 {
    let word_of_first = first.byte_offset() | flag::NEXT_ZERO;
    let follows = |(record, index): (&[u8], u64)| {
        record[PAGE_HEADER] == 0 && word(record) == Some(word_of_first + index * PAGE_BYTES)
    };
    (data.chunks_exact(ZERO_RECORD).zip(0..u64::from(pages - first.get())))
        .take_while(|&record| follows(record))
        .count() as u32
}

/// How long a record is, up to its content, or none that is known.
fn header_bytes(held: &[u8]) -> Result<usize, Unknown> {
    if held.len() < 8 {
        return Ok(8);
    }
    let word = be64(held, 0);
    let tail = match word & flag::MASK & !flag::CONTINUE {
        flag::MEM_SIZE => return Ok(8),
        flag::EOS | flag::MULTIFD_FLUSH if word & !flag::EOS & !flag::MULTIFD_FLUSH == 0 => return Ok(8),
        flag::ZERO => 1,
        flag::PAGE => 0,
        flag::XBZRLE => 3,
        flag::COMPRESS_PAGE => 4,
        _ => return Err(Unknown),
    };
    if word >> 32 >= PAGE_BYTES {
        // No block has that many pages.
        return Err(Unknown);
    }
    if word & flag::CONTINUE != 0 {
        return Ok(8 + tail);
    }
    match held.get(8) {
        None => Ok(9),
        Some(0) => Err(Unknown),
        Some(&len) => Ok(9 + usize::from(len) + tail),
    }
}

/// How long a block's entry in the list is.
fn block_bytes(held: &[u8]) -> Result<usize, Unknown> {
    match held.first() {
        None => Ok(1),
        Some(0) => Err(Unknown),
        Some(&len) => Ok(1 + usize::from(len) + 8),
    }
}

/// A block's name and size.
fn listed(cx: &mut Context<'_>, list: List) -> Result<At, Unknown> {
    let (name, size) = cx.held.get()[1..].split_at(cx.held.get().len() - 9);
    let len_bytes = be64(size, 0);
    if !len_bytes.is_multiple_of(PAGE_BYTES) || len_bytes > list.bytes || list.blocks == 0 {
        return Err(Unknown);
    }
    let found = cx.blocks.sized(name, len_bytes);
    cx.facts.changed();
    let list = List {
        bytes: list.bytes - len_bytes,
        blocks: list.blocks - 1,
    };
    Ok(At::AfterBlock(list, found.map(|found| found.id)))
}

/// After a block's size there is its address if shared memory is not sent; or else, for post-copy, the page size of its
/// memory if that is not 4 KiB; or else what follows. That begins with a byte other than zero if it is another block's
/// name, and has flags if it is a record, as neither number does. What is held stays held if it belongs to what follows.
fn after_block(cx: &mut Context<'_>, list: List, block: Option<BlockId>) -> At {
    let held = cx.held.get();
    if held.len() == 8 {
        let number = be64(held, 0);
        let is_page_size = !cx.facts.ignore_shared && number & flag::MASK == 0;
        if let Some(block) = block
            && is_page_size
            && number.is_power_of_two()
        {
            cx.blocks.page_size(block, number);
        }
        if is_page_size || cx.facts.ignore_shared || list.bytes > 0 {
            cx.held.clear();
        }
    }
    list.next()
}
