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
//! The usual record, a page of the last record's block, takes a fast path ([`Records::common_record`]) that copies
//! nothing. All other records are held until they are complete.

use larder_codec::PAGE;

use super::blocks::{BlockId, Blocks};
use super::facts::{StreamFacts, StreamPhase};
use super::partial::{PartialStructure, UnknownFormat, be16, be32, be64};
use super::units::{PAGE_BYTES, PageIndex};
use super::wire::{PAGE_HEADER, ZERO_RECORD, flag};

/// State that all parts of a parser share.
pub(super) struct Context<'a> {
    pub(super) blocks: &'a Blocks,
    pub(super) facts: &'a mut StreamFacts,
    pub(super) partial: &'a mut PartialStructure,
    /// True if pages are reported, false if all bytes are passed as literals.
    pub(super) reports_pages: bool,
}

/// Result of a parser's step.
#[derive(Debug)]
pub(super) enum Flow {
    /// Reports the content of the first bytes of the data; none of them was taken as literal before.
    Report(PageReport),
    /// The taken bytes are literal; nothing more can be reported for now.
    Pause,
    /// Nothing was taken, and this many bytes are needed.
    NeedMore(usize),
    /// The records have ended.
    End,
    /// The taken bytes are literal, and the following ones are not understood.
    Lost,
}

/// Step without its slices; see [`ParseStep`](super::ParseStep).
#[derive(Debug)]
pub(super) enum PageReport {
    Page { block: BlockId, page: PageIndex },
    Packet { block: BlockId, from: usize, count: usize },
    Record { block: BlockId, page: PageIndex },
    Zeros { block: BlockId, first: PageIndex, count: u32 },
}

/// Block of records without a name.
#[derive(Clone, Copy, Debug)]
struct CurrentBlock {
    id: BlockId,
    /// Number of pages; offsets below it are valid.
    pages: u32,
}

#[derive(Clone, Copy, Debug)]
enum RecordState {
    /// Beginning of a record.
    Header,
    /// Content of a page. Its header has been carried.
    Page(PageIndex),
    /// This many literal bytes.
    Skip(usize),
    /// List of blocks.
    Block(BlockList),
    /// List of blocks, after a block's name and size, where an optional number may follow.
    AfterBlock(BlockList, Option<BlockId>),
}

/// Rest of the list of blocks.
#[derive(Clone, Copy, Debug)]
struct BlockList {
    bytes: u64,
    blocks: usize,
}

/// Parser of RAM records.
#[derive(Debug)]
pub(super) struct Records {
    at: RecordState,
    block: Option<CurrentBlock>,
    /// Block and page of the last record, for [`StreamFacts::passes`].
    last_place: u64,
}

impl Records {
    pub(super) const fn new() -> Self {
        Self { at: RecordState::Header, block: None, last_place: 0 }
    }

    /// Resets the parser after records were missed: the block of records without a name is unknown.
    pub(super) fn reset(&mut self) {
        self.at = RecordState::Header;
        self.block = None;
    }

    /// Parses `data`, whose first `taken` bytes are literal already, and increases `taken`.
    pub(super) fn step(&mut self, cx: &mut Context<'_>, data: &[u8], taken: &mut usize) -> Flow {
        loop {
            let rest = &data[*taken..];
            match self.at {
                RecordState::Header => {
                    if cx.reports_pages && cx.partial.is_empty() {
                        if *taken > 0 && is_common(rest) {
                            return Flow::Pause;
                        }
                        if *taken == 0
                            && let Some(flow) = self.common_record(cx.facts, rest)
                        {
                            return flow;
                        }
                    }
                    match cx.partial.complete(data, taken, header_bytes) {
                        Ok(true) => {}
                        Ok(false) => return Flow::Pause,
                        Err(UnknownFormat) => return Flow::Lost,
                    }
                    let end = self.header(cx);
                    cx.partial.clear();
                    match end {
                        Ok(false) => {}
                        Ok(true) => return Flow::End,
                        Err(UnknownFormat) => return Flow::Lost,
                    }
                }
                RecordState::Page(page) => match self.page(cx, page, rest, taken) {
                    Some(flow) => return flow,
                    None => continue,
                },
                RecordState::Skip(left) => {
                    let skip = left.min(rest.len());
                    *taken += skip;
                    if skip < left {
                        self.at = RecordState::Skip(left - skip);
                        return Flow::Pause;
                    }
                    self.at = RecordState::Header;
                }
                RecordState::Block(list) => {
                    match cx.partial.complete(data, taken, block_bytes) {
                        Ok(true) => {}
                        Ok(false) => return Flow::Pause,
                        Err(UnknownFormat) => return Flow::Lost,
                    }
                    let parsed = parse_block(cx, list);
                    cx.partial.clear();
                    match parsed {
                        Ok(at) => self.at = at,
                        Err(UnknownFormat) => return Flow::Lost,
                    }
                }
                RecordState::AfterBlock(list, block) => {
                    let has_address = cx.facts.ignore_shared;
                    let need = |partial: &[u8]| {
                        Ok(match partial.first() {
                            Some(&first) if first != 0 && !has_address => 1,
                            Some(_) => 8,
                            None => 1,
                        })
                    };
                    match cx.partial.complete(data, taken, need) {
                        Ok(true) => self.at = parse_block_extra(cx, list, block),
                        Ok(false) => return Flow::Pause,
                        Err(UnknownFormat) => return Flow::Lost,
                    }
                }
            }
        }
    }

    /// Parses the usual records, which nearly all are: a page or zero pages of the last record's block. Returns
    /// `None` for any other record.
    #[inline]
    fn common_record(&mut self, facts: &mut StreamFacts, data: &[u8]) -> Option<Flow> {
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
                self.track_pass(facts, block.id, page);
                facts.pages += 1;
                Some(Flow::Report(PageReport::Record { block: block.id, page }))
            }
            flag::NEXT_ZERO => {
                if data.len() < ZERO_RECORD {
                    return Some(Flow::NeedMore(ZERO_RECORD));
                }
                let count = count_zero_records(data, page, block.pages);
                if count == 0 {
                    return None;
                }
                self.track_pass(facts, block.id, page);
                self.last_place += u64::from(count - 1);
                facts.zero_pages += u64::from(count);
                Some(Flow::Report(PageReport::Zeros { block: block.id, first: page, count }))
            }
            _ => None,
        }
    }

    /// Parses a complete header. Returns true if the section ends.
    fn header(&mut self, cx: &mut Context<'_>) -> Result<bool, UnknownFormat> {
        let bytes = cx.partial.get();
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
                let list = BlockList { bytes: offset, blocks: Blocks::MAX };
                self.at = list.next();
                return Ok(false);
            }
            _ => {}
        }
        let mut tail = &bytes[8..];
        if word & flag::CONTINUE == 0 {
            let (name, rest) = tail[1..].split_at(usize::from(tail[0]));
            self.block = cx
                .blocks
                .get_or_add(name)
                .map(|found| CurrentBlock { id: found.id, pages: found.pages.unwrap_or(u32::MAX) });
            tail = rest;
        }
        let page = self.block.and_then(|block| PageIndex::at(offset, block.pages).map(|page| (block.id, page)));
        if let Some((id, page)) = page {
            self.track_pass(cx.facts, id, page);
        }
        self.at = match kind {
            flag::ZERO => {
                cx.facts.zero_pages += 1;
                RecordState::Header
            }
            flag::PAGE => match page {
                Some((_, page)) => RecordState::Page(page),
                None => {
                    cx.facts.pages_unreported += 1;
                    RecordState::Skip(PAGE)
                }
            },
            flag::XBZRLE => {
                cx.facts.encoded_pages += 1;
                let len = usize::from(be16(tail, 1));
                if tail[0] != 1 || len > PAGE {
                    return Err(UnknownFormat);
                }
                RecordState::Skip(len)
            }
            _ => {
                cx.facts.encoded_pages += 1;
                let len = be32(tail, 0) as usize;
                if len > COMPRESSED_BYTES_MAX {
                    return Err(UnknownFormat);
                }
                RecordState::Skip(len)
            }
        };
        Ok(false)
    }

    /// Reports a page's content.
    fn page(&mut self, cx: &mut Context<'_>, page: PageIndex, data: &[u8], taken: &mut usize) -> Option<Flow> {
        let block = self.block.map(|block| block.id);
        match block {
            Some(block) if cx.reports_pages => {
                if *taken > 0 {
                    return Some(Flow::Pause);
                }
                if data.len() < PAGE {
                    return Some(Flow::NeedMore(PAGE));
                }
                self.at = RecordState::Header;
                cx.facts.pages += 1;
                Some(Flow::Report(PageReport::Page { block, page }))
            }
            _ if data.is_empty() => Some(Flow::Pause),
            _ => {
                cx.facts.pages_unreported += 1;
                self.at = RecordState::Skip(PAGE);
                None
            }
        }
    }

    fn track_pass(&mut self, facts: &mut StreamFacts, block: BlockId, page: PageIndex) {
        let position = u64::from(block.get()) << 32 | u64::from(page.get());
        if position < self.last_place && facts.phase < StreamPhase::Postcopy {
            facts.passes += 1;
        }
        self.last_place = position;
    }
}

impl BlockList {
    /// Returns the state after a block of the list.
    fn next(self) -> RecordState {
        if self.bytes > 0 { RecordState::Block(self) } else { RecordState::Header }
    }
}

/// Maximum bytes of a page compressed by zlib: its `compressBound`, which QEMU 7.2 checks too.
const COMPRESSED_BYTES_MAX: usize = PAGE + (PAGE >> 12) + (PAGE >> 14) + (PAGE >> 25) + 13;

/// Returns true if a record is one of the usual ones, or too short to decide.
fn is_common(data: &[u8]) -> bool {
    word(data).is_none_or(|word| matches!(word & flag::MASK, flag::NEXT_PAGE | flag::NEXT_ZERO))
}

fn word(data: &[u8]) -> Option<u64> {
    data.first_chunk().map(|word| u64::from_be_bytes(*word))
}

/// Returns the number of records at the front of `data` that are the zero-page records of `first` and the pages after
/// it.
fn count_zero_records(data: &[u8], first: PageIndex, pages: u32) -> u32 {
    let word_of_first = first.byte_offset() | flag::NEXT_ZERO;
    let follows = |(record, index): (&[u8], u64)| {
        record[PAGE_HEADER] == 0 && word(record) == Some(word_of_first + index * PAGE_BYTES)
    };
    (data.chunks_exact(ZERO_RECORD).zip(0..u64::from(pages - first.get())))
        .take_while(|&record| follows(record))
        .count() as u32
}

/// Returns the length of a record up to its content, or [`UnknownFormat`].
fn header_bytes(partial: &[u8]) -> Result<usize, UnknownFormat> {
    if partial.len() < 8 {
        return Ok(8);
    }
    let word = be64(partial, 0);
    let tail = match word & flag::MASK & !flag::CONTINUE {
        flag::MEM_SIZE => return Ok(8),
        flag::EOS | flag::MULTIFD_FLUSH if word & !flag::EOS & !flag::MULTIFD_FLUSH == 0 => return Ok(8),
        flag::ZERO => 1,
        flag::PAGE => 0,
        flag::XBZRLE => 3,
        flag::COMPRESS_PAGE => 4,
        _ => return Err(UnknownFormat),
    };
    if word >> 32 >= PAGE_BYTES {
        // No block has that many pages.
        return Err(UnknownFormat);
    }
    if word & flag::CONTINUE != 0 {
        return Ok(8 + tail);
    }
    match partial.get(8) {
        None => Ok(9),
        Some(0) => Err(UnknownFormat),
        Some(&len) => Ok(9 + usize::from(len) + tail),
    }
}

/// Returns the length of a block's entry in the list.
fn block_bytes(partial: &[u8]) -> Result<usize, UnknownFormat> {
    match partial.first() {
        None => Ok(1),
        Some(0) => Err(UnknownFormat),
        Some(&len) => Ok(1 + usize::from(len) + 8),
    }
}

/// Parses a block's name and size.
fn parse_block(cx: &mut Context<'_>, list: BlockList) -> Result<RecordState, UnknownFormat> {
    let (name, size) = cx.partial.get()[1..].split_at(cx.partial.get().len() - 9);
    let len_bytes = be64(size, 0);
    if !len_bytes.is_multiple_of(PAGE_BYTES) || len_bytes > list.bytes || list.blocks == 0 {
        return Err(UnknownFormat);
    }
    let found = cx.blocks.set_size(name, len_bytes);
    cx.facts.count_change();
    let list = BlockList { bytes: list.bytes - len_bytes, blocks: list.blocks - 1 };
    Ok(RecordState::AfterBlock(list, found.map(|found| found.id)))
}

/// Parses the optional number after a block's size. If shared memory is not sent, it is the block's address.
/// Otherwise, for post-copy, it is the page size of the block's memory if that is not 4 KiB. If there is none, the
/// held bytes belong to what follows and stay held: a block's name begins with a non-zero byte, and a record has
/// flags, unlike either number.
fn parse_block_extra(cx: &mut Context<'_>, list: BlockList, block: Option<BlockId>) -> RecordState {
    let bytes = cx.partial.get();
    if bytes.len() == 8 {
        let number = be64(bytes, 0);
        let is_page_size = !cx.facts.ignore_shared && number & flag::MASK == 0;
        if let Some(block) = block
            && is_page_size
            && number.is_power_of_two()
        {
            cx.blocks.set_page_size(block, number);
        }
        if is_page_size || cx.facts.ignore_shared || list.bytes > 0 {
            cx.partial.clear();
        }
    }
    list.next()
}
