//! RAM records: the content of a section of RAM on the main channel, and the whole of post-copy's second channel.
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
//! The usual record, a page of the last record's block, takes a fast path ([`Records::usual`]) that copies nothing.
//! All other records are held until they are complete.

use larder_codec::PAGE;

use super::blocks::{BlockId, Blocks};
use super::facts::{Facts, Phase};
use super::held::{Held, Unknown, be16, be32, be64};
use super::units::{PAGE_BYTES, PageIndex};
use super::wire::{PAGE_HEADER, ZERO_RECORD, flag};

/// State that all parts of a parser share.
pub(super) struct Context<'a> {
    pub(super) blocks: &'a Blocks,
    pub(super) facts: &'a mut Facts,
    pub(super) held: &'a mut Held,
    /// True if pages are reported, false if all bytes are passed as literals.
    pub(super) tell: bool,
}

/// Result of a parser's step.
#[derive(Debug)]
pub(super) enum Flow {
    /// Reports the content of the first bytes of the data; none of them was taken as literal before.
    Tell(Told),
    /// The taken bytes are literal; nothing more can be reported for now.
    Pause,
    /// Nothing was taken, and this many bytes are needed.
    NeedMore(usize),
    /// The records have ended.
    End,
    /// The taken bytes are literal, and the following ones are not understood.
    Lost,
}

/// Step without its slices; see [`Step`](super::Step).
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

/// Block of records without a name.
#[derive(Clone, Copy, Debug)]
struct Current {
    id: BlockId,
    /// Number of pages; offsets below it are valid.
    pages: u32,
}

#[derive(Clone, Copy, Debug)]
enum At {
    /// Beginning of a record.
    Header,
    /// Content of a page. Its header has been carried.
    Page(PageIndex),
    /// This many literal bytes.
    Skip(usize),
    /// List of blocks.
    Block(List),
    /// List of blocks, after a block's name and size, where an optional number may follow.
    AfterBlock(List, Option<BlockId>),
}

/// Rest of the list of blocks.
#[derive(Clone, Copy, Debug)]
struct List {
    bytes: u64,
    blocks: usize,
}

/// Parser of RAM records.
#[derive(Debug)]
pub(super) struct Records {
    at: At,
    block: Option<Current>,
    /// Block and page of the last record, for [`Facts::passes`].
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

    /// Resets the parser after records were missed: the block of records without a name is unknown.
    pub(super) fn resynchronised(&mut self) {
        self.at = At::Header;
        self.block = None;
    }

    /// Parses `data`, whose first `taken` bytes are literal already, and increases `taken`.
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

    /// Parses the usual records, which nearly all are: a page or zero pages of the last record's block. Returns
    /// `None` for any other record.
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

    /// Parses a complete header. Returns true if the section ends.
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

    /// Reports a page's content.
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
    /// Returns the state after a block of the list.
    fn next(self) -> At {
        if self.bytes > 0 { At::Block(self) } else { At::Header }
    }
}

/// Maximum bytes of a page compressed by zlib: its `compressBound`, which QEMU 7.2 checks too.
const COMPRESSED_BYTES_MAX: usize = PAGE + (PAGE >> 12) + (PAGE >> 14) + (PAGE >> 25) + 13;

/// Returns true if a record is one of the usual ones, or too short to decide.
fn is_usual(data: &[u8]) -> bool {
    word(data).is_none_or(|word| matches!(word & flag::MASK, flag::NEXT_PAGE | flag::NEXT_ZERO))
}

fn word(data: &[u8]) -> Option<u64> {
    data.first_chunk().map(|word| u64::from_be_bytes(*word))
}

/// Returns the number of records at the front of `data` that are the zero-page records of `first` and the pages after
/// it.
fn zeros(data: &[u8], first: PageIndex, pages: u32) -> u32 {
    let word_of_first = first.byte_offset() | flag::NEXT_ZERO;
    let follows = |(record, index): (&[u8], u64)| {
        record[PAGE_HEADER] == 0 && word(record) == Some(word_of_first + index * PAGE_BYTES)
    };
    (data.chunks_exact(ZERO_RECORD).zip(0..u64::from(pages - first.get())))
        .take_while(|&record| follows(record))
        .count() as u32
}

/// Returns the length of a record up to its content, or [`Unknown`].
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

/// Returns the length of a block's entry in the list.
fn block_bytes(held: &[u8]) -> Result<usize, Unknown> {
    match held.first() {
        None => Ok(1),
        Some(0) => Err(Unknown),
        Some(&len) => Ok(1 + usize::from(len) + 8),
    }
}

/// Parses a block's name and size.
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

/// Parses the optional number after a block's size. If shared memory is not sent, it is the block's address.
/// Otherwise, for post-copy, it is the page size of the block's memory if that is not 4 KiB. If there is none, the
/// held bytes belong to what follows and stay held: a block's name begins with a non-zero byte, and a record has
/// flags, unlike either number.
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
