//! The bytes of a disk, stored sparsely: only written pages take memory.

use std::collections::BTreeMap;

use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The unit of allocation, in bytes.
const PAGE_BYTES: u64 = 4096;

/// The bytes of a disk. Unwritten bytes read as zeros. Costs about 4 KiB for every 4 KiB that holds data.
#[derive(Clone, Default)]
pub struct SparseImage {
    pages: BTreeMap<u64, Box<[u8; PAGE_BYTES as usize]>>,
}

impl SparseImage {
    /// Fills `buffer` with the bytes from `start` on.
    pub fn read(&self, start: ByteOffset, buffer: &mut [u8]) {
        for (page, within, part) in parts(start, buffer.len()) {
            let into = &mut buffer[part];
            match self.pages.get(&page) {
                Some(bytes) => into.copy_from_slice(&bytes[within..within + into.len()]),
                None => into.fill(0),
            }
        }
    }

    /// Writes `bytes` from `start` on.
    pub fn write(&mut self, start: ByteOffset, bytes: &[u8]) {
        for (page, within, part) in parts(start, bytes.len()) {
            let from = &bytes[part];
            let into = self.pages.entry(page).or_insert_with(|| Box::new([0; PAGE_BYTES as usize]));
            into[within..within + from.len()].copy_from_slice(from);
        }
    }

    /// Zeroes the bytes of `range`, and frees the pages that are wholly inside.
    pub fn zero(&mut self, range: ByteRange) {
        let inside = range.narrowed(PAGE_BYTES);
        if inside.is_empty() {
            return self.zero_in_pages(range);
        }
        let (first, end) = (inside.start.get() / PAGE_BYTES, inside.end().get() / PAGE_BYTES);
        let mut tail = self.pages.split_off(&first);
        let mut after_range = tail.split_off(&end);
        self.pages.append(&mut after_range);
        self.zero_in_pages(ByteRange::between(range.start, inside.start));
        self.zero_in_pages(ByteRange::between(inside.end(), range.end()));
    }

    /// Zeroes bytes in pages that stay allocated; `range` is shorter than two pages.
    fn zero_in_pages(&mut self, range: ByteRange) {
        for (page, within, part) in parts(range.start, range.len.as_usize()) {
            if let Some(bytes) = self.pages.get_mut(&page) {
                bytes[within..within + part.len()].fill(0);
            }
        }
    }

    /// Returns the first part of `range` that takes memory; the bytes before it are zeros.
    pub fn next_data(&self, range: ByteRange) -> Option<ByteRange> {
        let first = range.start.get() / PAGE_BYTES;
        let (page, _) = self.pages.range(first..).next()?;
        let found = ByteRange::new(page * PAGE_BYTES, PAGE_BYTES).intersection(range);
        (!found.is_empty()).then_some(found)
    }

    /// Returns the bytes of memory that the data takes.
    pub fn allocated(&self) -> ByteLen {
        ByteLen::new(self.pages.len() as u64 * PAGE_BYTES)
    }
}

/// Splits `len` bytes from `start` on at page boundaries. Yields the page, the offset in it, and the part of the
/// whole.
fn parts(start: ByteOffset, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let offset = start.get() + done as u64;
        let within = (offset % PAGE_BYTES) as usize;
        let taken = (PAGE_BYTES as usize - within).min(len - done);
        let part = done..done + taken;
        done += taken;
        Some((offset / PAGE_BYTES, within, part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_image_costs_only_written_pages() {
        let mut image = SparseImage::default();
        let far = ByteOffset::new((50 << 40) + 100);
        image.write(far, &[7; 5000]);
        assert_eq!(image.allocated(), ByteLen::kib(8));
        let mut content = [1; 5100];
        image.read(ByteOffset::new(far.get() - 50), &mut content);
        assert!(content[..50].iter().chain(&content[5050..]).all(|byte| *byte == 0));
        assert!(content[50..5050].iter().all(|byte| *byte == 7));
        image.zero(ByteRange::new(0, 60 << 40));
        assert_eq!(image.allocated(), ByteLen::ZERO);
    }

    #[test]
    fn zeroing_keeps_neighbouring_bytes() {
        let mut image = SparseImage::default();
        image.write(ByteOffset::ZERO, &[9; 20000]);
        image.zero(ByteRange::new(100, 10000));
        let mut content = [0; 20000];
        image.read(ByteOffset::ZERO, &mut content);
        let nines = |range: &[u8]| range.iter().all(|byte| *byte == 9);
        assert!(nines(&content[..100]) && nines(&content[10100..]));
        assert!(content[100..10100].iter().all(|byte| *byte == 0));
        assert_eq!(image.allocated(), ByteLen::kib(16));
        let found = image.next_data(ByteRange::new(4096, 16384));
        assert_eq!(found, Some(ByteRange::new(8192, 4096)));
    }
}
