//! The number of a page in its RAM block.

use std::fmt;

use larder_codec::PAGE;

/// [`PAGE`] for addresses.
pub(super) const PAGE_BYTES: u64 = PAGE as u64;

/// A page of a RAM block, by its number there. 32 bits of it are 16 TiB; pages beyond are never told.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageIndex(u32);

impl PageIndex {
    /// Page number `index`.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Its number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Bytes from the start of the block.
    pub const fn byte_offset(self) -> u64 {
        self.0 as u64 * PAGE_BYTES
    }

    /// The page that begins `bytes` from the block's start, if one of the first `pages` does.
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
