//! Units of guest memory: pages and runs of pages.
//!
//! The pages of all regions of a process have one numbering, in the order in which the regions were found, so that a
//! page is one number everywhere. 32 bits of it are 16 TiB.

use std::fmt;

/// Bytes of a page. Larger pages (hugetlbfs) are refused when a process is attached to.
pub const PAGE: usize = larder_codec::PAGE;

/// [`PAGE`] for offsets and addresses.
pub const PAGE_BYTES: u64 = PAGE as u64;

/// A page of the managed memory, by its number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

    /// Its number, to index tables of pages with.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// The page `count` pages further on.
    ///
    /// # Panics
    /// Past the last number.
    pub fn plus(self, count: u32) -> Self {
        match self.0.checked_add(count) {
            Some(index) => Self(index),
            None => panic!("page {} and {count} more", self.0),
        }
    }
}

impl fmt::Debug for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

/// Pages one after the other. Never empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRun {
    /// The first.
    pub first: PageIndex,
    /// How many.
    pub count: u32,
}

impl PageRun {
    /// `page` alone.
    pub const fn one(page: PageIndex) -> Self {
        Self { first: page, count: 1 }
    }

    /// The page after the last.
    pub fn end(self) -> PageIndex {
        self.first.plus(self.count)
    }

    /// Its pages in order.
    pub fn pages(self) -> impl ExactSizeIterator<Item = PageIndex> {
        let first = self.first.0;
        (0..self.count).map(move |offset| PageIndex(first + offset))
    }

    /// How many bytes it has.
    pub const fn bytes(self) -> u64 {
        self.count as u64 * PAGE_BYTES
    }
}

/// The runs that `pages`, in rising order, are made of.
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
    fn pages_in_order_are_grouped_into_runs() {
        let pages = [3, 4, 5, 9, 11, 12].map(PageIndex::new);
        let found: Vec<(u32, u32)> = runs(pages).map(|run| (run.first.get(), run.count)).collect();
        assert_eq!(found, [(3, 3), (9, 1), (11, 2)]);
    }
}
