//! Guest memory: mappings of the regions that the front-end shares, and the log of pages written by this process.
//!
//! A [`GuestMemory`] is immutable; adding or removing a region makes a new one that shares the other mappings.
//! Requests in flight hold the one that they were translated with, so their memory stays mapped until they are done.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, Ordering};

use larder_block::IoVec;
use rustix::mm::{MapFlags, ProtFlags};

use super::message::RegionInfo;
use sigbus::Guard;
pub use sigbus::LossReason;
pub(super) use sigbus::any_lost;

mod sigbus;

/// Largest number of regions at a time, reported by GET_MAX_MEM_SLOTS. QEMU uses at most 509.
pub const SLOTS_MAX: usize = 509;

/// Number of regions that are scanned to find an address; a binary search is faster only for more of them.
const REGIONS_SCANNED_MAX: usize = 8;

/// Bytes of memory per bit of the dirty log.
const LOG_PAGE_BYTES: u64 = 4096;

/// Reason why memory cannot be used as the front-end requests.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum MemoryError {
    #[error("guest memory region {0:x?} wraps around or is empty")]
    Malformed(RegionInfo),
    #[error("guest memory region {0:x?} overlaps another one")]
    Overlaps(RegionInfo),
    #[error("guest memory region {info:x?} ends at byte {end:#x} of a file of {file_bytes:#x} bytes")]
    PastFileEnd { info: RegionInfo, end: u64, file_bytes: u64 },
    #[error("there is no guest memory region {0:x?}")]
    Unknown(RegionInfo),
    #[error("more than {SLOTS_MAX} guest memory regions")]
    TooMany,
    #[error("cannot map {what} of {bytes} bytes: {source}")]
    Map { what: &'static str, bytes: u64, source: std::io::Error },
    #[error("{what} at {address:#x} of {bytes} bytes is not in guest memory, or not aligned")]
    BadRing { what: &'static str, address: u64, bytes: u64 },
}

/// Guest address that is not in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guest address {address:#x}, {bytes} bytes, is not in guest memory")]
pub struct BadAddress {
    /// Address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Error for a mapping that is no longer shared with the front-end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} is lost: {loss}")]
pub struct LostMapping {
    /// Name of the mapping.
    pub what: &'static str,
    /// Reason of the loss.
    pub loss: LossReason,
}

/// Shared mapping of a part of a file.
pub struct Mapping {
    what: &'static str,
    /// Guard of the mapping, dropped before it.
    guard: Option<Guard>,
    base: NonNull<u8>,
    /// Start of the mapping, at a page boundary.
    mapped_base: NonNull<u8>,
    mapped_bytes: usize,
    bytes: usize,
}

impl Mapping {
    /// Maps `bytes` bytes of `file` from `offset` on, for reading and writing.
    ///
    /// # Errors
    /// The file is shorter than that, or cannot be mapped.
    pub fn new(file: &OwnedFd, offset: u64, bytes: u64, what: &'static str) -> Result<Self, MemoryError> {
        let failed = |source| MemoryError::Map { what, bytes, source };
        // An access to a mapping past the end of its file raises SIGBUS.
        let file_bytes = rustix::fs::fstat(file.as_fd()).map_err(|error| failed(error.into()))?;
        let end = offset.checked_add(bytes).filter(|end| *end <= file_bytes.st_size as u64);
        if end.is_none() || bytes == 0 {
            return Err(failed(std::io::Error::from_raw_os_error(libc::ENXIO)));
        }
        let page_bytes = page_bytes(file).map_err(|error| failed(error.into()))?;
        let lead = offset % page_bytes;
        let mapped_bytes = (bytes + lead)
            .checked_next_multiple_of(page_bytes)
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(|| failed(std::io::Error::from_raw_os_error(libc::ENOMEM)))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                offset - lead,
            )
        }
        .map_err(|error| failed(error.into()))?;
        let mapped_base =
            NonNull::new(base.cast::<u8>()).ok_or_else(|| failed(std::io::Error::from_raw_os_error(libc::ENOMEM)))?;
        let mut mapping = Self {
            what,
            guard: None,
            // SAFETY: `lead` is within the new mapping.
            base: unsafe { mapped_base.add(lead as usize) },
            mapped_base,
            mapped_bytes,
            bytes: bytes as usize,
        };
        // A core dump of this process must not contain the guest's memory; QEMU excludes it, too.
        // SAFETY: the range is the new mapping, and its contents stay unchanged.
        unsafe { rustix::mm::madvise(base, mapped_bytes, rustix::mm::Advice::LinuxDontDump) }
            .map_err(|error| failed(error.into()))?;
        mapping.guard = Some(Guard::new(mapped_base, mapped_bytes).map_err(failed)?);
        Ok(mapping)
    }

    /// Returns the address of the first byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the length, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Checks that the mapping still shares its contents with the front-end.
    ///
    /// # Errors
    /// The file was truncated, or its memory has failed: zeros are mapped in its place.
    pub fn check(&self) -> Result<(), LostMapping> {
        match self.guard.as_ref().filter(|_| sigbus::any_lost()).and_then(Guard::loss_reason) {
            None => Ok(()),
            Some(loss) => Err(LostMapping { what: self.what, loss }),
        }
    }
}

/// Returns the granularity with which `file` can be mapped, in bytes: the size of a huge page for hugetlbfs.
fn page_bytes(file: &OwnedFd) -> rustix::io::Result<u64> {
    let file_system = rustix::fs::fstatfs(file)?;
    let is_huge = file_system.f_type == libc::HUGETLBFS_MAGIC;
    Ok(if is_huge { file_system.f_bsize as u64 } else { 4096 })
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.guard.take());
        // SAFETY: mapped in `new`; users of pointers into it hold the mapping.
        let result = unsafe { rustix::mm::munmap(self.mapped_base.as_ptr().cast(), self.mapped_bytes) };
        debug_assert!(result.is_ok());
    }
}

#[derive(Clone)]
struct Region {
    info: RegionInfo,
    mapping: Rc<Mapping>,
}

impl Region {
    fn guest_end(&self) -> u64 {
        self.info.guest_address + self.info.len
    }

    #[inline]
    fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.info.guest_address) < self.info.len
    }
}

/// All memory regions of a guest, sorted by guest address.
#[derive(Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
}

impl GuestMemory {
    /// Returns the memory with one more region.
    ///
    /// # Errors
    /// The region is malformed, overlaps another, is larger than its file, or cannot be mapped.
    pub fn with(&self, info: RegionInfo, file: &OwnedFd) -> Result<Self, MemoryError> {
        let is_valid = info.len > 0
            && info.guest_address.checked_add(info.len).is_some()
            && info.user_address.checked_add(info.len).is_some();
        if !is_valid {
            return Err(MemoryError::Malformed(info));
        }
        if self.regions.len() >= SLOTS_MAX {
            return Err(MemoryError::TooMany);
        }
        let overlaps = |other: &Region| {
            info.guest_address < other.guest_end() && other.info.guest_address < info.guest_address + info.len
        };
        if self.regions.iter().any(overlaps) {
            return Err(MemoryError::Overlaps(info));
        }
        let mapping = Rc::new(Mapping::new(file, info.file_offset, info.len, "a guest memory region")?);
        let mut regions = self.regions.clone();
        regions.push(Region { info, mapping });
        regions.sort_by_key(|region| region.info.guest_address);
        Ok(Self { regions })
    }

    /// Returns the memory without a region.
    ///
    /// # Errors
    /// There is no such region.
    pub fn without(&self, info: RegionInfo) -> Result<Self, MemoryError> {
        let same = |region: &Region| {
            region.info.guest_address == info.guest_address
                && region.info.len == info.len
                && region.info.user_address == info.user_address
        };
        let mut regions = self.regions.clone();
        let index = regions.iter().position(same).ok_or(MemoryError::Unknown(info))?;
        regions.remove(index);
        Ok(Self { regions })
    }

    /// Appends to `pieces` the mapping of `bytes` bytes at guest address `address`; several pieces if they span
    /// regions.
    ///
    /// # Errors
    /// Some bytes are not in guest memory; `pieces` may have grown nevertheless.
    pub fn translate(&self, address: u64, bytes: u64, pieces: &mut Vec<IoVec>) -> Result<(), BadAddress> {
        let bad = BadAddress { address, bytes };
        let end = address.checked_add(bytes).ok_or(bad)?;
        let mut at = address;
        while at < end {
            let region = self.region_of(at).ok_or(bad)?;
            let offset = at - region.info.guest_address;
            let len = (region.info.len - offset).min(end - at);
            // In the mapping: `offset + len <= region.info.len`, which is the mapping's length.
            let base = region.mapping.base().wrapping_add(offset as usize);
            pieces.push(IoVec::new(base, len as usize));
            at += len;
        }
        Ok(())
    }

    /// Returns the mapping of `bytes` bytes at guest address `address`, all in one region.
    ///
    /// # Errors
    /// The bytes are not, or not all, in one region.
    pub fn contiguous(&self, address: u64, bytes: u64) -> Result<*mut u8, BadAddress> {
        let bad = BadAddress { address, bytes };
        let region = self.region_of(address).ok_or(bad)?;
        let end = address.checked_add(bytes).ok_or(bad)?;
        if end > region.guest_end() {
            return Err(bad);
        }
        Ok(region.mapping.base().wrapping_add((address - region.info.guest_address) as usize))
    }

    #[inline]
    fn region_of(&self, address: u64) -> Option<&Region> {
        match self.regions.len() {
            ..=REGIONS_SCANNED_MAX => self.regions.iter().find(|region| region.contains(address)),
            _ => self.search_region(address),
        }
    }

    #[cold]
    fn search_region(&self, address: u64) -> Option<&Region> {
        let after = self.regions.partition_point(|region| region.info.guest_address <= address);
        self.regions.get(after.checked_sub(1)?).filter(|region| region.contains(address))
    }

    /// Checks that no region is lost; see [`Mapping::check`].
    ///
    /// # Errors
    /// A region is lost.
    pub fn check(&self) -> Result<(), LostMapping> {
        match sigbus::any_lost() {
            false => Ok(()),
            true => self.regions.iter().try_for_each(|region| region.mapping.check()),
        }
    }

    /// Returns the mapping of a part of a ring: `bytes` bytes at the front-end's address `address`, all in one
    /// region.
    ///
    /// # Errors
    /// The part is not in guest memory, or not aligned to `alignment` (a power of two).
    pub fn ring_part(
        &self,
        what: &'static str,
        address: u64,
        bytes: u64,
        alignment: usize,
    ) -> Result<*mut u8, MemoryError> {
        let found = self.regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.info.user_address)?;
            let inside = offset.checked_add(bytes)? <= region.info.len;
            inside.then(|| region.mapping.base().wrapping_add(offset as usize))
        });
        found.filter(|base| base.addr() & (alignment - 1) == 0).ok_or(MemoryError::BadRing { what, address, bytes })
    }

    /// Returns the guest address of a byte that is mapped at `host`.
    fn guest_address(&self, host: *const u8) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = (host.addr()).checked_sub(region.mapping.base().addr())?;
            (offset < region.mapping.bytes()).then(|| region.info.guest_address + offset as u64)
        })
    }
}

/// Dirty log of the front-end, for migration: one bit for each 4 KiB of guest-physical memory, set atomically because
/// other processes set bits, too.
pub struct DirtyLog(Mapping);

impl DirtyLog {
    /// Maps the log.
    ///
    /// # Errors
    /// The file is too short or cannot be mapped.
    pub fn new(file: &OwnedFd, offset: u64, bytes: u64) -> Result<Self, MemoryError> {
        Mapping::new(file, offset, bytes, "the dirty log").map(Self)
    }

    /// Checks that the log is not lost; see [`Mapping::check`].
    ///
    /// # Errors
    /// The log is lost.
    pub fn check(&self) -> Result<(), LostMapping> {
        self.0.check()
    }

    /// Marks the pages of `piece`, a piece of `memory`.
    pub fn mark(&self, memory: &GuestMemory, piece: IoVec) {
        let Some(start) = memory.guest_address(piece.base()) else {
            return;
        };
        if piece.is_empty() {
            return;
        }
        let last = (start + piece.len() as u64 - 1) / LOG_PAGE_BYTES;
        for page in start / LOG_PAGE_BYTES..=last {
            let Some(index) = usize::try_from(page / 8).ok().filter(|index| *index < self.0.bytes()) else {
                return;
            };
            // SAFETY: inside the mapping, which lives as long as `self`; other processes access it atomically, too.
            let byte = unsafe { AtomicU8::from_ptr(self.0.base().add(index)) };
            byte.fetch_or(1 << (page % 8), Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// Addresses are found in few regions (scanned) and in many (searched), and not in the gaps between them.
    #[test]
    fn address_is_found_among_any_regions() {
        let file = rustix::fs::memfd_create(c"guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&file, PAGE).expect("truncates");
        for count in [1, REGIONS_SCANNED_MAX as u64, REGIONS_SCANNED_MAX as u64 + 1, 40] {
            let start_of = |index: u64| PAGE + 3 * PAGE * index;
            let mut memory = GuestMemory::default();
            for index in 0..count {
                let info = RegionInfo {
                    guest_address: start_of(index),
                    len: PAGE,
                    user_address: start_of(index),
                    file_offset: 0,
                };
                memory = memory.with(info, &file).expect("a region");
            }
            for index in 0..count {
                let start = start_of(index);
                let base = memory.contiguous(start, PAGE).expect("its first byte is found");
                let last = memory.contiguous(start + PAGE - 1, 1).expect("its last byte is found");
                assert_eq!(last.addr() - base.addr(), PAGE as usize - 1);
                assert!(memory.contiguous(start - 1, 1).is_err(), "region {index} of {count}");
                assert!(memory.contiguous(start + PAGE, 1).is_err(), "region {index} of {count}");
            }
            assert!(memory.contiguous(u64::MAX, 1).is_err());
        }
    }
}
