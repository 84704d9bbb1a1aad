//! State of the disk that the front-end knows and does not repeat when it reconnects, stored after the in-flight
//! records: whether the guest's write cache is on, and the size that was last reported to the guest. QEMU sends
//! neither to the successor of a killed server, nor after a reset of the device. A server that wrongly assumed a
//! write cache would acknowledge writes as durable that are not.
//!
//! ```text
//!   0        8             16              24
//!   +--------+-------------+---------------+
//!   | magic  | write cache | reported size |    u64 each, native byte order like the rest of the region
//!   +--------+-------------+---------------+
//! ```
//! The write cache is 0 (off) or 1; the size is in bytes, 0 if none was reported yet.
//!
//! Each field is one aligned 8-byte store, so a crash tears none. A region that another program created has no magic
//! there and is left alone.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_block::ByteLen;

use super::memory::Mapping;

const MAGIC: u64 = u64::from_le_bytes(*b"LARDERm1");

/// Size of the memo, in bytes.
pub const FRONTEND_STATE_BYTES: usize = 24;

/// Memo of one region.
pub struct FrontendState {
    mapping: Rc<Mapping>,
    /// Offset in the mapping, a multiple of 8.
    at: usize,
}

impl FrontendState {
    /// Returns the bytes of a new memo.
    pub fn initial_bytes(write_cache: bool) -> [u8; FRONTEND_STATE_BYTES] {
        let mut bytes = [0; FRONTEND_STATE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        bytes[8..16].copy_from_slice(&u64::from(write_cache).to_ne_bytes());
        bytes
    }

    /// Finds the memo at byte `at` of `mapping`, if there is one.
    pub fn find(mapping: &Rc<Mapping>, at: usize) -> Option<Self> {
        let fits = at.checked_add(FRONTEND_STATE_BYTES).is_some_and(|end| end <= mapping.bytes());
        let aligned = mapping.base().addr().checked_add(at)?.is_multiple_of(8);
        if !fits || !aligned {
            return None;
        }
        let state = Self { mapping: Rc::clone(mapping), at };
        (state.field(0).load(Ordering::Relaxed) == MAGIC).then_some(state)
    }

    fn field(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < FRONTEND_STATE_BYTES / 8);
        // SAFETY: `find` checked that the memo lies in the mapping and is aligned; the mapping lives as long as
        // `self`.
        unsafe { AtomicU64::from_ptr(self.mapping.base().add(self.at + 8 * index).cast()) }
    }

    /// Returns whether the guest assumes that its writes are cached.
    pub fn write_cache(&self) -> bool {
        self.field(1).load(Ordering::Relaxed) != 0
    }

    /// Records the state of the write cache that the guest was given.
    pub fn set_write_cache(&self, on: bool) {
        self.field(1).store(u64::from(on), Ordering::Relaxed);
    }

    /// Returns the size that was last reported to the guest.
    pub fn reported_size(&self) -> Option<ByteLen> {
        match self.field(2).load(Ordering::Relaxed) {
            0 => None,
            size => Some(ByteLen::new(size)),
        }
    }

    /// Records the size that was reported to the guest.
    pub fn set_reported_size(&self, size: ByteLen) {
        self.field(2).store(size.get(), Ordering::Relaxed);
    }
}
