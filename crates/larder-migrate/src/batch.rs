//! Batch: a piece of a channel that is read, parsed, and made into one frame.

use std::sync::Arc;

use larder_codec::accelerator::PageBuffer;
use larder_codec::{PAGE, uniform_word};

use crate::base::PageKey;
use crate::stream::{BlockId, PAGE_HEADER, PageIndex, ParseStep, Parser, ZERO_RECORD, zero_record};
use crate::wire::{FRAME_OPERATIONS_MAX, FRAME_PAGES_MAX, FRAME_RAW_MAX};

/// Item found in the bytes of a channel. Items are in the order of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchItem {
    /// Bytes that belong to no page.
    Literal {
        /// Number of bytes.
        len: u32,
    },
    /// Consecutive zero-page records.
    Zeros {
        /// First 8 bytes of the first record.
        header: [u8; 8],
        /// Number of records.
        count: u32,
    },
    /// Bytes of a page.
    Page {
        /// Page's key, if it is a page of the guest and not merely 4 KiB of other bytes.
        key: Option<PageKey>,
        /// Word that fills the whole page, if it is uniform.
        same: Option<[u8; 8]>,
    },
}

/// Minimum run of zero-page records that is encoded as one; a single record is shorter as a literal.
const ZEROS_MIN: u32 = 2;
/// Maximum items of a batch, except that one packet of pages may exceed it. At [`OPERATION_LEN_MAX`] each, a frame
/// has room for them.
const ITEMS_MAX: usize = 4096;
/// Maximum bytes of an operation: a number, a count, and a word.
const OPERATION_LEN_MAX: usize = 1 + 5 + 8;
const _: () = assert!((ITEMS_MAX + 2 * FRAME_PAGES_MAX) * OPERATION_LEN_MAX <= FRAME_OPERATIONS_MAX);

/// Bytes of one channel that go into one frame.
pub struct Batch {
    /// Page-aligned buffer for devices, which share it until they have read it.
    buffer: Arc<PageBuffer>,
    /// Bytes read so far; those beyond [`Self::len`] belong to the next batch.
    filled: usize,
    len: usize,
    items: Vec<BatchItem>,
    pages: usize,
    zeros: u32,
}

impl Batch {
    /// Creates an empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self {
            buffer: Arc::new(PageBuffer::new(FRAME_RAW_MAX.div_ceil(PAGE))),
            filled: 0,
            len: 0,
            items: Vec::new(),
            pages: 0,
            zeros: 0,
        }
    }

    /// Starts a batch with the bytes that the channel's last batch left over.
    pub fn begin(&mut self, left_over: &mut Vec<u8>) {
        self.items.clear();
        self.pages = 0;
        self.zeros = 0;
        self.len = 0;
        self.filled = left_over.len();
        let len = self.filled;
        self.bytes_mut()[..len].copy_from_slice(left_over);
        left_over.clear();
    }

    /// # Panics
    /// A device still holds the buffer.
    fn bytes_mut(&mut self) -> &mut [u8] {
        let buffer = Arc::get_mut(&mut self.buffer).expect("no device has it");
        &mut buffer[..FRAME_RAW_MAX]
    }

    /// Returns the space for the channel's next bytes; it is empty when the batch is full.
    pub fn room(&mut self) -> &mut [u8] {
        let filled = self.filled;
        &mut self.bytes_mut()[filled..]
    }

    /// Adds `len` bytes that were read into [`Self::room`].
    pub fn fill(&mut self, len: usize) {
        self.filled += len;
        assert!(self.filled <= FRAME_RAW_MAX, "more was read than there was room for");
    }

    /// Returns true if the batch has all that fits in a frame.
    #[must_use]
    pub fn is_full(&self) -> bool {
        !self.has_room() || self.filled == FRAME_RAW_MAX
    }

    const fn has_room(&self) -> bool {
        self.pages < FRAME_PAGES_MAX && self.items.len() < ITEMS_MAX
    }

    /// Parses the bytes that were read, as far as the parser understands them and they fit in the frame. Returns true
    /// if the parser needs more bytes for the rest.
    pub fn parse(&mut self, parser: &mut Parser) -> bool {
        while self.len < self.filled && self.has_room() {
            // This many bytes hold no more pages than the frame has room for, with or without 8 bytes before each.
            let room = (FRAME_PAGES_MAX - self.pages) * PAGE + PAGE_HEADER;
            let end = self.filled.min(self.len + room);
            let step = parser.next(&self.buffer[self.len..end]);
            let len = step.len();
            let data = &self.buffer[self.len..self.len + len];
            match step {
                // More bytes are there, but they do not fit in this frame.
                ParseStep::NeedMore { .. } if end < self.filled => {
                    self.pages = FRAME_PAGES_MAX;
                    return false;
                }
                ParseStep::NeedMore { .. } => return true,
                ParseStep::Literal { .. } => self.pages += add_literal(&mut self.items, data),
                ParseStep::Zeros { first, count, .. } => {
                    self.zeros += count;
                    if count < ZEROS_MIN {
                        add_literal(&mut self.items, data);
                    } else {
                        self.items.push(BatchItem::Zeros { header: page_header_of(&zero_record(first)), count });
                    }
                }
                ParseStep::Record { block, page } => {
                    self.pages += add_literal(&mut self.items, &data[..PAGE_HEADER]);
                    self.pages += 1;
                    self.items.push(page_item(block, page, &data[PAGE_HEADER..]));
                }
                ParseStep::Pages { block, pages } => {
                    self.pages += pages.len();
                    let contents = data.chunks_exact(PAGE);
                    self.items
                        .extend(pages.iter().zip(contents).map(|(page, content)| page_item(block, *page, content)));
                }
            }
            self.len += len;
        }
        false
    }

    /// Adds all that was read to this frame, parsed or not, as far as it fits.
    pub fn flush(&mut self, parser: &mut Parser) {
        if !self.has_room() {
            return;
        }
        let rest = &self.buffer[self.len..self.filled];
        if !rest.is_empty() {
            parser.pass(rest);
            self.pages += add_literal(&mut self.items, rest);
            self.len = self.filled;
        }
    }

    /// Moves the bytes that are not part of this frame to `left_over`, for the channel's next batch.
    pub fn end(&mut self, left_over: &mut Vec<u8>) {
        left_over.clear();
        left_over.extend_from_slice(&self.buffer[self.len..self.filled]);
    }

    /// Returns the frame's bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    /// Returns the buffer whose beginning is [`Self::bytes`], for devices.
    #[must_use]
    pub const fn buffer(&self) -> &Arc<PageBuffer> {
        &self.buffer
    }

    /// Returns the number of zero pages that QEMU sent as zero-page records.
    #[must_use]
    pub const fn zeros(&self) -> u32 {
        self.zeros
    }

    /// Returns the items found in the frame's bytes.
    #[must_use]
    pub fn items(&self) -> &[BatchItem] {
        &self.items
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

/// Splits bytes that belong to no page into page-sized pieces, which are encoded like pages, and a rest. Returns the
/// number of pieces.
fn add_literal(items: &mut Vec<BatchItem>, data: &[u8]) -> usize {
    let pages = data.chunks_exact(PAGE);
    let tail_len = pages.remainder().len() as u32;
    let count = pages.len();
    items.extend(pages.map(|content| BatchItem::Page { key: None, same: same_word(content) }));
    if tail_len > 0 {
        match items.last_mut() {
            Some(BatchItem::Literal { len }) => *len += tail_len,
            _ => items.push(BatchItem::Literal { len: tail_len }),
        }
    }
    count
}

fn page_item(block: BlockId, page: PageIndex, content: &[u8]) -> BatchItem {
    BatchItem::Page { key: PageKey::new(block.get().into(), page.get().into()), same: same_word(content) }
}

fn same_word(content: &[u8]) -> Option<[u8; 8]> {
    let page = content.try_into().expect("one page");
    uniform_word(page).map(u64::to_ne_bytes)
}

fn page_header_of(record: &[u8; ZERO_RECORD]) -> [u8; PAGE_HEADER] {
    *record.first_chunk().expect("a record is longer")
}
