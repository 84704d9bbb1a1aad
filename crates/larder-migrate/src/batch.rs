//! A piece of a channel, read and looked through, that becomes a frame.

use std::sync::Arc;

use larder_codec::accelerator::Buffer;
use larder_codec::{PAGE, uniform_word};

use crate::base::PageKey;
use crate::stream::{BlockId, PAGE_HEADER, PageIndex, Parser, Step, ZERO_RECORD, zero_record};
use crate::wire::{FRAME_OPERATIONS_MAX, FRAME_PAGES_MAX, FRAME_RAW_MAX};

/// What was found in the bytes of a channel, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Bytes that are no page.
    Literal {
        /// How many.
        len: u32,
    },
    /// Records for pages of zeros.
    Zeros {
        /// The first 8 bytes of the first.
        header: [u8; 8],
        /// How many.
        count: u32,
    },
    /// A page's bytes.
    Page {
        /// Which page, if it is one of the guest's and not merely 4 KiB of something.
        key: Option<PageKey>,
        /// The word that it is made of all over.
        same: Option<[u8; 8]>,
    },
}

/// Records for pages of zeros that lie side by side; fewer are shorter as they are.
const ZEROS_MIN: u32 = 2;
/// What is found in a batch at most, but for a packet of pages more: with [`OPERATION_LEN_MAX`] for each, a frame has room
/// for them.
const FOUND_MAX: usize = 4096;
/// Bytes of an operation: a number, a count, and a word.
const OPERATION_LEN_MAX: usize = 1 + 5 + 8;
const _: () = assert!((FOUND_MAX + 2 * FRAME_PAGES_MAX) * OPERATION_LEN_MAX <= FRAME_OPERATIONS_MAX);

/// Bytes of one channel that go into one frame.
pub struct Batch {
    /// On a page's bound, for devices, which share it until they have read it.
    buffer: Arc<Buffer>,
    /// Read so far; those beyond [`Self::len`] belong to the next batch.
    filled: usize,
    len: usize,
    found: Vec<Found>,
    pages: usize,
    zeros: u32,
}

impl Batch {
    /// Without bytes.
    #[must_use]
    pub fn new() -> Self {
        Self {
            buffer: Arc::new(Buffer::new(FRAME_RAW_MAX.div_ceil(PAGE))),
            filled: 0,
            len: 0,
            found: Vec::new(),
            pages: 0,
            zeros: 0,
        }
    }

    /// Begins with what the last batch of the channel left over.
    pub fn begin(&mut self, left_over: &mut Vec<u8>) {
        self.found.clear();
        self.pages = 0;
        self.zeros = 0;
        self.len = 0;
        self.filled = left_over.len();
        let len = self.filled;
        self.bytes_mut()[..len].copy_from_slice(left_over);
        left_over.clear();
    }

    /// # Panics
    /// A device has the bytes that are there.
    fn bytes_mut(&mut self) -> &mut [u8] {
        let buffer = Arc::get_mut(&mut self.buffer).expect("no device has it");
        &mut buffer[..FRAME_RAW_MAX]
    }

    /// Where the next bytes of the channel go; empty when it is full.
    pub fn room(&mut self) -> &mut [u8] {
        let filled = self.filled;
        &mut self.bytes_mut()[filled..]
    }

    /// So many bytes were put there.
    pub fn fill(&mut self, len: usize) {
        self.filled += len;
        assert!(self.filled <= FRAME_RAW_MAX, "more was read than there was room for");
    }

    /// Whether all that fits a frame is there.
    #[must_use]
    pub fn is_full(&self) -> bool {
        !self.fits_more() || self.filled == FRAME_RAW_MAX
    }

    const fn fits_more(&self) -> bool {
        self.pages < FRAME_PAGES_MAX && self.found.len() < FOUND_MAX
    }

    /// Looks through what was read since, as far as it is understood and fits the frame. Returns whether something is left
    /// that needs more bytes to be understood.
    pub fn look(&mut self, parser: &mut Parser) -> bool {
        while self.len < self.filled && self.fits_more() {
            // So much holds no more pages than the frame has room for, with 8 bytes before each or without.
            let room = (FRAME_PAGES_MAX - self.pages) * PAGE + PAGE_HEADER;
            let end = self.filled.min(self.len + room);
            let step = parser.next(&self.buffer[self.len..end]);
            let len = step.len();
            let data = &self.buffer[self.len..self.len + len];
            match step {
                // More is there, but not in this frame.
                Step::NeedMore { .. } if end < self.filled => {
                    self.pages = FRAME_PAGES_MAX;
                    return false;
                }
                Step::NeedMore { .. } => return true,
                Step::Literal { .. } => self.pages += add_literal(&mut self.found, data),
                Step::Zeros { first, count, .. } => {
                    self.zeros += count;
                    if count < ZEROS_MIN {
                        add_literal(&mut self.found, data);
                    } else {
                        self.found.push(Found::Zeros {
                            header: page_header_of(&zero_record(first)),
                            count,
                        });
                    }
                }
                Step::Record { block, page } => {
                    self.pages += add_literal(&mut self.found, &data[..PAGE_HEADER]);
                    self.pages += 1;
                    self.found.push(page_found(block, page, &data[PAGE_HEADER..]));
                }
                Step::Pages { block, pages } => {
                    self.pages += pages.len();
                    let contents = data.chunks_exact(PAGE);
                    self.found.extend(
                        pages
                            .iter()
                            .zip(contents)
                            .map(|(page, content)| page_found(block, *page, content)),
                    );
                }
            }
            self.len += len;
        }
        false
    }

    /// All that was read becomes part of this frame, understood or not, as far as it fits.
    pub fn flush(&mut self, parser: &mut Parser) {
        if !self.fits_more() {
            return;
        }
        let rest = &self.buffer[self.len..self.filled];
        if !rest.is_empty() {
            parser.pass(rest);
            self.pages += add_literal(&mut self.found, rest);
            self.len = self.filled;
        }
    }

    /// Leaves what is not part of this frame to the next one of the channel.
    pub fn end(&mut self, left_over: &mut Vec<u8>) {
        left_over.clear();
        left_over.extend_from_slice(&self.buffer[self.len..self.filled]);
    }

    /// The frame's bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    /// The same, for devices: [`Self::bytes`] lie at its beginning.
    #[must_use]
    pub const fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// Pages of zeros that QEMU tells as such.
    #[must_use]
    pub const fn zeros(&self) -> u32 {
        self.zeros
    }

    /// What they are.
    #[must_use]
    pub fn found(&self) -> &[Found] {
        &self.found
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

/// What is no page is cut into pieces of one page that can be encoded like pages, and a rest. Returns how many pages.
fn add_literal(found: &mut Vec<Found>, data: &[u8]) -> usize {
    let pages = data.chunks_exact(PAGE);
    let rest = pages.remainder().len() as u32;
    let count = pages.len();
    found.extend(pages.map(|content| Found::Page {
        key: None,
        same: same_word(content),
    }));
    if rest > 0 {
        match found.last_mut() {
            Some(Found::Literal { len }) => *len += rest,
            _ => found.push(Found::Literal { len: rest }),
        }
    }
    count
}

fn page_found(block: BlockId, page: PageIndex, content: &[u8]) -> Found {
    Found::Page {
        key: PageKey::new(block.get().into(), page.get().into()),
        same: same_word(content),
    }
}

fn same_word(content: &[u8]) -> Option<[u8; 8]> {
    let page = content.try_into().expect("one page");
    uniform_word(page).map(u64::to_ne_bytes)
}

fn page_header_of(record: &[u8; ZERO_RECORD]) -> [u8; PAGE_HEADER] {
    *record.first_chunk().expect("a record is longer")
}
