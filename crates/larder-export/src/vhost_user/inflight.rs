//! In-flight region: shared memory that records the requests in flight, so that the successor of a killed server can
//! resubmit them. The front-end keeps it. Its format is that of QEMU `docs/interop/vhost-user.rst`, "Inflight I/O
//! tracking", for split and packed rings.
//!
//! Crash consistency: a request is recorded before it is started, and its record is removed after it was pushed as
//! used. A successor therefore repeats at most requests whose result the guest has not seen. In between, the used
//! index in the record shows whether the last request had been pushed. An orderly stop sets the version back to 0,
//! "not initialised", so that the next start takes the position from the front-end.

use std::fmt;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::fs::MemfdFlags;

use super::frontend_state::{FRONTEND_STATE_BYTES, FrontendState};
use super::memory::{GuestMemory, LostMapping, Mapping, MemoryError};
use super::message::InflightInfo;
use super::ring::{Cursor, DescriptorChain, Head, PackedRing, Ring, RingError, SplitRing};

const VERSION: u16 = 1;
const REGION_ALIGNMENT: usize = 64;

/// Byte offsets in a queue's region: the header that both layouts share, then each one's own.
mod offset {
    pub(super) const VERSION: usize = 8;
    pub(super) const COUNT: usize = 10;
    pub(super) const SPLIT_LAST_BATCH: usize = 12;
    pub(super) const SPLIT_USED: usize = 14;
    pub(super) const SPLIT_ENTRIES: usize = 16;
    pub(super) const PACKED_FREE: usize = 12;
    pub(super) const PACKED_OLD_FREE: usize = 14;
    pub(super) const PACKED_USED: usize = 16;
    pub(super) const PACKED_OLD_USED: usize = 18;
    pub(super) const PACKED_WRAP: usize = 20;
    pub(super) const PACKED_OLD_WRAP: usize = 21;
    pub(super) const PACKED_ENTRIES: usize = 32;
}

/// Byte offsets in a descriptor's entry.
mod entry {
    pub(super) const SPLIT_BYTES: usize = 16;
    pub(super) const SPLIT_NEXT: usize = 6;
    pub(super) const SPLIT_COUNTER: usize = 8;
    pub(super) const PACKED_BYTES: usize = 32;
    pub(super) const PACKED_NEXT: usize = 2;
    pub(super) const PACKED_LAST: usize = 4;
    pub(super) const PACKED_NUM: usize = 6;
    pub(super) const PACKED_COUNTER: usize = 8;
    pub(super) const PACKED_ID: usize = 16;
    pub(super) const PACKED_FLAGS: usize = 18;
    pub(super) const PACKED_LEN: usize = 20;
    pub(super) const PACKED_ADDRESS: usize = 24;
}

/// In-flight region of a disk: one part per queue.
pub struct InflightRegion {
    mapping: Rc<Mapping>,
    frontend_state: Option<FrontendState>,
    queues: u16,
    queue_size: u16,
    packed: bool,
}

impl fmt::Display for InflightRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = if self.packed { "packed" } else { "split" };
        write!(f, "{} {layout} queues of {}", self.queues, self.queue_size)
    }
}

fn queue_bytes(queue_size: u16, packed: bool) -> usize {
    let count = usize::from(queue_size);
    let bytes = if packed {
        offset::PACKED_ENTRIES + count * entry::PACKED_BYTES
    } else {
        offset::SPLIT_ENTRIES + count * entry::SPLIT_BYTES
    };
    bytes.next_multiple_of(REGION_ALIGNMENT)
}

impl InflightRegion {
    /// Creates a region that is not initialised, and returns the file for the front-end. Its memo records
    /// `write_cache` as the guest's write cache setting.
    ///
    /// # Errors
    /// The host is out of memory or descriptors.
    pub fn create(
        queues: u16,
        queue_size: u16,
        packed: bool,
        write_cache: bool,
    ) -> Result<(InflightInfo, OwnedFd), MemoryError> {
        let state_offset = (queue_bytes(queue_size, packed) * usize::from(queues)) as u64;
        let bytes = state_offset + FRONTEND_STATE_BYTES as u64;
        let failed =
            |error: rustix::io::Errno| MemoryError::Map { what: "the in-flight region", bytes, source: error.into() };
        let file = rustix::fs::memfd_create("larder-inflight", MemfdFlags::CLOEXEC).map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes).map_err(failed)?;
        rustix::io::pwrite(&file, &FrontendState::initial_bytes(write_cache), state_offset).map_err(failed)?;
        let info = InflightInfo { bytes, file_offset: 0, queues, queue_size };
        Ok((info, file))
    }

    /// Adopts the region that the front-end hands back.
    ///
    /// # Errors
    /// The region is too small for its queues, begins where its fields are not aligned, or cannot be mapped.
    pub fn adopt(info: &InflightInfo, file: &OwnedFd, packed: bool) -> Result<Self, MemoryError> {
        let bytes_for = |queue_size| (queue_bytes(queue_size, packed) * usize::from(info.queues)) as u64;
        // QEMU repeats the size that it requested, even if it got another one. The length of a region that Larder
        // created reveals the size that it was created for.
        let is_larder_size = |size: &u16| bytes_for(*size) + FRONTEND_STATE_BYTES as u64 == info.bytes;
        let mut larger = (0..15).map(|shift| 1 << shift).filter(|size| *size > info.queue_size);
        let queue_size = larger.find(is_larder_size).unwrap_or(info.queue_size);
        let needed = bytes_for(queue_size);
        if info.bytes < needed {
            return Err(MemoryError::Map {
                what: "the in-flight region",
                bytes: info.bytes,
                source: std::io::Error::other(format!("its queues need {needed} bytes")),
            });
        }
        if !info.file_offset.is_multiple_of(REGION_ALIGNMENT as u64) {
            return Err(MemoryError::Map {
                what: "the in-flight region",
                bytes: info.bytes,
                source: std::io::Error::other(format!(
                    "it begins at byte {} of its file, which is no multiple of {REGION_ALIGNMENT}",
                    info.file_offset
                )),
            });
        }
        let what = "the in-flight region";
        let mapping = Rc::new(Mapping::new(file, info.file_offset, info.bytes, what)?);
        Ok(Self {
            frontend_state: FrontendState::find(&mapping, needed as usize),
            mapping,
            queues: info.queues,
            queue_size,
            packed,
        })
    }

    /// Returns the memo that is stored after the records, if the region has one.
    pub fn frontend_state(&self) -> Option<&FrontendState> {
        self.frontend_state.as_ref()
    }

    /// Checks that the region is not lost; see [`Mapping::check`].
    ///
    /// # Errors
    /// The region is lost.
    pub fn check(&self) -> Result<(), LostMapping> {
        self.mapping.check()
    }

    /// Returns the part of queue `index`, whose ring has `ring_size` descriptors; `None` if the region has no room
    /// for it, or was created for the other ring layout, whose entries have another size.
    pub fn queue(self: &Rc<Self>, index: u16, ring_size: u16, packed: bool) -> Option<InflightQueue> {
        if index >= self.queues || ring_size > self.queue_size || packed != self.packed {
            return None;
        }
        let at = queue_bytes(self.queue_size, self.packed) * usize::from(index);
        Some(InflightQueue {
            base: self.mapping.base().wrapping_add(at),
            size: ring_size,
            counter: 0,
            packed: self.packed,
            region: Rc::clone(self),
        })
    }
}

/// In-flight record of one queue.
pub struct InflightQueue {
    base: *mut u8,
    size: u16,
    counter: u64,
    packed: bool,
    region: Rc<InflightRegion>,
}

/// Request that a previous server had started.
pub struct Resubmission {
    /// Head for pushing the request as used.
    pub head: Head,
    /// Index of its entry.
    pub entry_index: u16,
    order: u64,
}

impl InflightQueue {
    fn read<T: Copy>(&self, at: usize) -> T {
        debug_assert!(at + size_of::<T>() <= queue_bytes(self.size, self.packed));
        // SAFETY: inside the region, whose size `adopt` checked and which `region` keeps mapped; unaligned reads of
        // plain integers. Volatile: a successor relies on the order of accesses.
        unsafe { self.base.add(at).cast::<T>().read_volatile() }
    }

    fn write<T: Copy>(&self, at: usize, value: T) {
        #[cfg(test)]
        crash_tests::crash_if_due();
        debug_assert!(at + size_of::<T>() <= queue_bytes(self.size, self.packed));
        // SAFETY: as in `read`; all fields are aligned by the format, and the region begins at a multiple of 64 bytes
        // in a page.
        unsafe { self.base.add(at).cast::<T>().write_volatile(value) };
        compiler_fence(Ordering::SeqCst);
    }

    fn split_entry(index: u16) -> usize {
        offset::SPLIT_ENTRIES + usize::from(index) * entry::SPLIT_BYTES
    }

    fn packed_entry(index: u16) -> usize {
        offset::PACKED_ENTRIES + usize::from(index) * entry::PACKED_BYTES
    }

    /// Checks that the region is not lost; see [`Mapping::check`].
    ///
    /// # Errors
    /// The region is lost.
    pub fn check(&self) -> Result<(), LostMapping> {
        self.region.check()
    }

    /// Records a chain that was just popped, before it is processed. Returns the index of its entry.
    pub fn begin(&mut self, ring: &Ring, head: Head) -> u16 {
        self.counter += 1;
        match ring {
            Ring::Split(_) => {
                let at = Self::split_entry(head.id);
                self.write(at + entry::SPLIT_COUNTER, self.counter);
                self.write(at, 1u8);
                head.id
            }
            Ring::Packed(ring) => self.begin_packed(ring, head),
        }
    }

    fn begin_packed(&mut self, ring: &PackedRing, head: Head) -> u16 {
        let first: u16 = self.read(offset::PACKED_OLD_FREE);
        let first_at = Self::packed_entry(first % self.size);
        self.write(first_at + entry::PACKED_NUM, 0u16);
        self.write(first_at + entry::PACKED_COUNTER, self.counter);
        self.write(first_at, 1u8);
        let mut free = first;
        for (index, raw) in ring.last_popped(head.slots).enumerate() {
            let at = Self::packed_entry(free % self.size);
            let [a @ .., l0, l1, l2, l3, i0, i1, f0, f1] = raw;
            self.write(first_at + entry::PACKED_NUM, index as u16 + 1);
            self.write(at + entry::PACKED_ADDRESS, u64::from_le_bytes(a));
            self.write(at + entry::PACKED_LEN, u32::from_le_bytes([l0, l1, l2, l3]));
            self.write(at + entry::PACKED_ID, u16::from_le_bytes([i0, i1]));
            self.write(at + entry::PACKED_FLAGS, u16::from_le_bytes([f0, f1]));
            self.write(first_at + entry::PACKED_LAST, free);
            free = self.read(at + entry::PACKED_NEXT);
            self.write(offset::PACKED_FREE, free);
        }
        self.write(offset::PACKED_OLD_FREE, free);
        first
    }

    /// Prepares the record before a chain is pushed as used.
    pub fn before_push_used(&mut self, ring: &Ring, head: Head, entry_index: u16) {
        match ring {
            Ring::Split(_) => {
                let last: u16 = self.read(offset::SPLIT_LAST_BATCH);
                self.write(Self::split_entry(entry_index) + entry::SPLIT_NEXT, last);
                self.write(offset::SPLIT_LAST_BATCH, entry_index);
            }
            Ring::Packed(ring) => {
                let at = Self::packed_entry(entry_index % self.size);
                let last: u16 = self.read(at + entry::PACKED_LAST);
                let free: u16 = self.read(offset::PACKED_FREE);
                self.write(Self::packed_entry(last % self.size) + entry::PACKED_NEXT, free);
                self.write(offset::PACKED_FREE, entry_index);
                self.write_used(ring.used_cursor().advanced(head.slots, self.size));
            }
        }
    }

    /// Completes the record after a chain was pushed as used.
    pub fn after_push_used(&mut self, ring: &Ring, entry_index: u16) {
        match ring {
            Ring::Split(ring) => {
                self.write(Self::split_entry(entry_index), 0u8);
                self.write(offset::SPLIT_USED, ring.used_index());
            }
            Ring::Packed(_) => {
                self.write(Self::packed_entry(entry_index % self.size), 0u8);
                self.commit_packed();
            }
        }
    }

    fn write_used(&self, cursor: Cursor) {
        self.write(offset::PACKED_USED, cursor.0 & 0x7fff);
        self.write(offset::PACKED_WRAP, u8::from(cursor.0 & 0x8000 != 0));
    }

    /// Commits the present free list and used position, which a successor would otherwise roll back.
    fn commit_packed(&self) {
        self.write(offset::PACKED_OLD_FREE, self.read::<u16>(offset::PACKED_FREE));
        self.write(offset::PACKED_OLD_USED, self.read::<u16>(offset::PACKED_USED));
        self.write(offset::PACKED_OLD_WRAP, self.read::<u8>(offset::PACKED_WRAP));
    }

    /// Invalidates the record, when all requests are done and the front-end has received the ring's position: the
    /// next start takes the position from the front-end.
    pub fn invalidate(&mut self) {
        self.write(offset::VERSION, 0u16);
    }

    /// Recovers the record at the start of a queue: sets the ring's position and returns the requests in flight,
    /// oldest first. A region that is not initialised is initialised, and leaves the ring's position unchanged.
    pub fn recover(&mut self, ring: &mut Ring) -> Vec<Resubmission> {
        let is_initialised =
            self.read::<u16>(offset::VERSION) == VERSION && self.read::<u16>(offset::COUNT) == self.size;
        let mut found = match ring {
            Ring::Split(ring) if is_initialised => self.recover_split(ring),
            Ring::Packed(ring) if is_initialised => self.recover_packed(ring),
            _ => {
                self.initialise_record(ring);
                return Vec::new();
            }
        };
        found.sort_by_key(|request| request.order);
        self.counter = found.last().map_or(0, |request| request.order);
        found
    }

    fn initialise_record(&mut self, ring: &Ring) {
        match ring {
            Ring::Split(ring) => {
                for index in 0..self.size {
                    self.write(Self::split_entry(index), 0u8);
                }
                self.write(offset::SPLIT_USED, ring.used_index());
            }
            Ring::Packed(ring) => {
                for index in 0..self.size {
                    self.write(Self::packed_entry(index), 0u8);
                    self.write(Self::packed_entry(index) + entry::PACKED_NEXT, index + 1);
                }
                self.write(offset::PACKED_FREE, 0u16);
                self.write_used(ring.used_cursor());
                self.commit_packed();
            }
        }
        self.write(offset::COUNT, self.size);
        self.write(offset::VERSION, VERSION);
    }

    fn recover_split(&mut self, ring: &mut SplitRing) -> Vec<Resubmission> {
        let used = ring.used_index();
        let pushed = used.wrapping_sub(self.read::<u16>(offset::SPLIT_USED)).min(self.size);
        let mut index: u16 = self.read(offset::SPLIT_LAST_BATCH);
        for _ in 0..pushed {
            if index >= self.size {
                break;
            }
            self.write(Self::split_entry(index), 0u8);
            index = self.read(Self::split_entry(index) + entry::SPLIT_NEXT);
        }
        self.write(offset::SPLIT_USED, used);
        let found: Vec<_> = (0..self.size)
            .filter(|index| self.read::<u8>(Self::split_entry(*index)) != 0)
            .map(|index| Resubmission {
                head: Head { id: index, slots: 1 },
                entry_index: index,
                order: self.read(Self::split_entry(index) + entry::SPLIT_COUNTER),
            })
            .collect();
        ring.resume_after(found.len() as u16);
        found
    }

    fn recover_packed(&mut self, ring: &mut PackedRing) -> Vec<Resubmission> {
        let cursor = |index: u16, wrap: u8| Cursor((index % self.size) | if wrap != 0 { 0x8000 } else { 0 });
        let old = cursor(self.read(offset::PACKED_OLD_USED), self.read(offset::PACKED_OLD_WRAP));
        let new = cursor(self.read(offset::PACKED_USED), self.read(offset::PACKED_WRAP));
        if old != new && ring.was_pushed_used(old) {
            // The last chain had been pushed as used: the previous server was killed before it could record that.
            self.commit_packed();
        } else {
            self.write(offset::PACKED_FREE, self.read::<u16>(offset::PACKED_OLD_FREE));
            self.write_used(old);
        }
        let mut free: u16 = self.read(offset::PACKED_FREE);
        for _ in 0..self.size {
            if free >= self.size {
                break;
            }
            self.write(Self::packed_entry(free), 0u8);
            free = self.read(Self::packed_entry(free) + entry::PACKED_NEXT);
        }
        let found: Vec<_> = (0..self.size)
            .filter(|index| self.read::<u8>(Self::packed_entry(*index)) != 0)
            .map(|index| {
                let at = Self::packed_entry(index);
                let last: u16 = self.read(at + entry::PACKED_LAST);
                Resubmission {
                    head: Head {
                        // The buffer id is that of the chain's last descriptor.
                        id: self.read(Self::packed_entry(last % self.size) + entry::PACKED_ID),
                        slots: self.read::<u16>(at + entry::PACKED_NUM).min(self.size),
                    },
                    entry_index: index,
                    order: self.read(at + entry::PACKED_COUNTER),
                }
            })
            .collect();
        let popped_slots = found.iter().fold(0u16, |sum, request| sum.saturating_add(request.head.slots));
        let used = cursor(self.read(offset::PACKED_USED), self.read(offset::PACKED_WRAP));
        ring.resume_at(used, popped_slots.min(self.size));
        found
    }

    /// Fills `chain` with the descriptors of a request that was in flight.
    ///
    /// # Errors
    /// The descriptors are not, or no longer, a valid chain.
    pub fn read_chain(
        &self,
        ring: &Ring,
        memory: &GuestMemory,
        request: &Resubmission,
        chain: &mut DescriptorChain,
    ) -> Result<(), RingError> {
        match ring {
            Ring::Split(ring) => ring.follow(memory, request.head.id, chain),
            Ring::Packed(_) => {
                let mut index = request.entry_index;
                let copies = (0..request.head.slots).map(|_| {
                    let at = Self::packed_entry(index % self.size);
                    index = self.read(at + entry::PACKED_NEXT);
                    let mut raw = [0; 16];
                    raw[..8].copy_from_slice(&self.read::<u64>(at + entry::PACKED_ADDRESS).to_le_bytes());
                    raw[8..12].copy_from_slice(&self.read::<u32>(at + entry::PACKED_LEN).to_le_bytes());
                    raw[12..14].copy_from_slice(&self.read::<u16>(at + entry::PACKED_ID).to_le_bytes());
                    raw[14..].copy_from_slice(&self.read::<u16>(at + entry::PACKED_FLAGS).to_le_bytes());
                    raw
                });
                PackedRing::follow_copies(memory, copies, chain)
            }
        }
    }
}

#[cfg(test)]
#[path = "inflight_crash_tests.rs"]
mod crash_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misaligned_region_is_refused() {
        let (info, file) = InflightRegion::create(1, 128, false, true).expect("a region");
        assert!(InflightRegion::adopt(&info, &file, false).is_ok());
        let info = InflightInfo { file_offset: 4, ..info };
        let error = InflightRegion::adopt(&info, &file, false).err().expect("is refused");
        assert!(error.to_string().contains("no multiple of 64"), "{error}");
    }
}
