//! Units of guest memory: pages and runs of pages.
//!
//! All regions of a process share one page numbering, in the order in which the regions were found, so a page has the
//! same number everywhere. The number has 32 bits, which covers 16 TiB.

use std::fmt;

/// Size of a page, in bytes. Larger pages (hugetlbfs) are refused when a process is attached to.
pub const PAGE: usize = larder_codec::PAGE;

/// [`PAGE`] as a `u64`, for offsets and addresses.
pub const PAGE_BYTES: u64 = PAGE as u64;

/// Number of a page of the managed memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(u32);

impl PageIndex {
    /// Makes the page number `index`.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Returns the page number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the page number as an index into per-page tables.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// Returns the page `count` pages after this one.
    ///
    /// # Panics
    /// If the result exceeds the last page number.
    pub fn plus(self, count: u32) -> Self {
        match self.0.checked_add(count) {
            Some(index) => Self(index),
            None => panic!("page {} plus {count} exceeds the last page number", self.0),
        }
    }
}

impl fmt::Debug for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

/// Consecutive pages, at least one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRun {
    /// The first page.
    pub first: PageIndex,
    /// Number of pages, at least 1.
    pub count: u32,
}

impl PageRun {
    /// Makes the run that has only `page`.
    pub const fn one(page: PageIndex) -> Self {
        Self { first: page, count: 1 }
    }

    /// Returns the page after the last one of the run.
    pub fn end(self) -> PageIndex {
        self.first.plus(self.count)
    }

    /// Returns the pages of the run in rising order.
    pub fn pages(self) -> impl ExactSizeIterator<Item = PageIndex> {
        let first = self.first.0;
        (0..self.count).map(move |offset| PageIndex(first + offset))
    }

    /// Returns the length of the run in bytes.
    pub const fn bytes(self) -> u64 {
        self.count as u64 * PAGE_BYTES
    }
}

/// Groups `pages`, which must be in rising order, into runs of consecutive pages.
pub fn runs(pages: impl IntoIterator<Item = PageIndex>) -> impl Iterator<Item = PageRun> {
    let mut pages = pages.into_iter().peekable();
    std::iter::from_fn(move || {
        let mut run = PageRun::one(pages.next()?);
        while let Some(next) = pages.next_if(|page| *page == run.end()) {
            debug_assert!(next >= run.first);
            run.count += 1;
        }
        Some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_pages_form_runs() {
        let pages = [3, 4, 5, 9, 11, 12].map(PageIndex::new);
        let found: Vec<(u32, u32)> = runs(pages).map(|run| (run.first.get(), run.count)).collect();
        assert_eq!(found, [(3, 3), (9, 1), (11, 2)]);
    }
}
