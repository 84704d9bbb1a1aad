//! The common memory limit for the metadata of a disk's images: an image with a long chain of backing files must not
//! take the full memory for each of them.

use std::cell::Cell;
use std::rc::Rc;

use larder_block::ByteLen;

/// The limit, in bytes, that top-level tables may always use: enough for the largest L1 and refcount tables of one
/// image.
const TABLES_MIN: u64 = 48 << 20;

/// The limit for a disk, which its images share equally.
#[derive(Debug)]
pub struct MetadataMemory {
    limit: u64,
    images: Cell<u64>,
    /// The length in bytes of the top-level tables of all images, which are always loaded completely.
    tables: Cell<u64>,
}

/// The top-level tables of another image do not fit into the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitExceeded {
    pub(crate) allowed: u64,
}

impl MetadataMemory {
    /// Creates a limit of `limit` bytes.
    pub fn new(limit: ByteLen) -> Rc<Self> {
        Rc::new(Self { limit: limit.get(), images: Cell::new(0), tables: Cell::new(0) })
    }

    /// Returns the whole limit, in bytes.
    pub fn limit(&self) -> ByteLen {
        ByteLen::new(self.limit)
    }

    /// Counts an image whose top-level tables take `tables` bytes, until the share is dropped.
    ///
    /// # Errors
    /// The tables do not fit into the limit.
    pub(crate) fn share(self: &Rc<Self>, tables: u64) -> Result<MetadataShare, LimitExceeded> {
        let allowed = self.limit.max(TABLES_MIN);
        let total = self.tables.get().saturating_add(tables);
        if total > allowed {
            return Err(LimitExceeded { allowed });
        }
        self.tables.set(total);
        self.images.set(self.images.get() + 1);
        Ok(MetadataShare { pool: Rc::clone(self), tables })
    }
}

/// The share of one image.
#[derive(Debug)]
pub(crate) struct MetadataShare {
    pool: Rc<MetadataMemory>,
    tables: u64,
}

impl MetadataShare {
    /// Returns the memory limit of the image's map, in bytes.
    pub(crate) fn map_bytes(&self) -> usize {
        let for_maps = self.pool.limit.saturating_sub(self.pool.tables.get());
        usize::try_from(for_maps / self.pool.images.get().max(1)).unwrap_or(usize::MAX)
    }
}

impl Drop for MetadataShare {
    fn drop(&mut self) {
        self.pool.tables.set(self.pool.tables.get() - self.tables);
        self.pool.images.set(self.pool.images.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_share_the_limit() {
        let memory = MetadataMemory::new(ByteLen::mib(100));
        let one = memory.share(20 << 20).expect("room");
        assert_eq!(one.map_bytes(), 80 << 20);
        let two = memory.share(40 << 20).expect("room");
        assert_eq!((one.map_bytes(), two.map_bytes()), (20 << 20, 20 << 20));
        assert_eq!(memory.share(41 << 20).expect_err("no room").allowed, 100 << 20);
        drop(one);
        assert_eq!(two.map_bytes(), 60 << 20);
        // At least one image can always be opened.
        let none = MetadataMemory::new(ByteLen::ZERO);
        assert_eq!(none.share(40 << 20).expect("room").map_bytes(), 0);
    }
}
