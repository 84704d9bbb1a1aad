//! Index of a page in its RAM block.

use std::fmt;

use larder_codec::PAGE;

/// Bytes of a page, [`PAGE`], as an address.
pub(super) const PAGE_BYTES: u64 = PAGE as u64;

/// Index of a page in its RAM block. 32 bits address 16 TiB; pages beyond are never reported.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageIndex(u32);

impl PageIndex {
    /// Creates the index `index`.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Returns the index as a number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the page's offset in bytes from the start of the block.
    pub const fn byte_offset(self) -> u64 {
        self.0 as u64 * PAGE_BYTES
    }

    /// Returns the page that begins `bytes` from the block's start, if it is one of the first `pages` pages.
    pub(super) fn at(bytes: u64, pages: u32) -> Option<Self> {
        let index = u32::try_from(bytes / PAGE_BYTES).ok()?;
        (bytes.is_multiple_of(PAGE_BYTES) && index < pages).then_some(Self(index))
    }
}

impl fmt::Debug for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}
