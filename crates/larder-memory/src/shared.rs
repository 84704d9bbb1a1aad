//! Memory that outlives this process: a memfd of which the managed process holds a descriptor too.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// A mapped memfd. Pages that were never written use no memory.
pub struct SharedMemory {
    descriptor: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: threads share the memory only through atomics and through the raw pointers of `ptr_at`, whose users are
// responsible for them; only Drop changes the mapping itself.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes new memory of `bytes` bytes, all zero. Another process that holds a descriptor can reopen it for writing
    /// only as the same user.
    ///
    /// # Errors
    /// Errors of memfd_create(2), ftruncate(2) and mmap(2).
    pub fn create(name: &CStr, bytes: usize) -> io::Result<Self> {
        let descriptor = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::fchmod(&descriptor, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&descriptor, bytes as u64)?;
        // The seal keeps processes that have a descriptor from shrinking the file under the mapping.
        rustix::fs::fcntl_add_seals(&descriptor, SealFlags::SHRINK)?;
        Self::map(descriptor, bytes)
    }

    /// Maps the memory that another pager has left. `descriptor` may be read-only, since the memfd is opened again.
    ///
    /// # Errors
    /// If the memory was not made by a pager, belongs to another user, or cannot be mapped.
    pub fn open(descriptor: BorrowedFd<'_>) -> io::Result<Self> {
        use std::os::fd::AsRawFd as _;
        // Only a memfd has seals. So this opens neither a device, where opening may have side effects, nor a file
        // that only has the right name.
        let seals = rustix::fs::fcntl_get_seals(descriptor);
        if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the memory was not created by a pager"));
        }
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let descriptor = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let bytes = rustix::fs::fstat(&descriptor)?.st_size;
        let bytes = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        Self::map(descriptor, bytes)
    }

    fn map(descriptor: OwnedFd, bytes: usize) -> io::Result<Self> {
        if bytes == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &descriptor,
                0,
            )?
        };
        // Keys and the guest's data must not be in core dumps.
        // SAFETY: the mapping was just made, and its content is not changed.
        let _ = unsafe { rustix::mm::madvise(base, bytes, rustix::mm::Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { descriptor, base, bytes })
    }

    /// Makes a descriptor for another process, which can read the memory with it but not change it.
    ///
    /// # Errors
    /// Errors of open(2).
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        use std::os::fd::AsRawFd as _;
        let path = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns true if the length is zero, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns a pointer to bytes `offset..offset + len`, for raw access.
    ///
    /// # Panics
    /// If the range is not in the memory.
    pub fn ptr_at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.bytes),
            "{offset} + {len} is past the end ({})",
            self.bytes
        );
        // SAFETY: within the mapping, by the assertion.
        unsafe { self.base.add(offset) }
    }

    /// Returns the 64-bit word at `offset`.
    ///
    /// # Panics
    /// If the word is not in the memory, or not aligned.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        // SAFETY: in the mapping, aligned, valid for any value, and only ever used as an atomic; it lives as long as
        // self.
        unsafe { AtomicU64::from_ptr(self.ptr_at(offset, 8).as_ptr().cast()) }
    }

    /// Returns the 32-bit word at `offset`.
    ///
    /// # Panics
    /// If the word is not in the memory, or not aligned.
    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        // SAFETY: as of `word`.
        unsafe { AtomicU32::from_ptr(self.ptr_at(offset, 4).as_ptr().cast()) }
    }

    /// Frees the memory of a range of whole pages, which read as zeros then.
    ///
    /// # Errors
    /// Errors of fallocate(2).
    pub fn release(&self, offset: usize, len: usize) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.descriptor, flags, offset as u64, len as u64)?)
    }

    /// Returns true if any page of the range is allocated.
    ///
    /// # Errors
    /// Errors of lseek(2).
    pub fn is_allocated(&self, offset: usize, len: usize) -> io::Result<bool> {
        match rustix::fs::seek(&self.descriptor, SeekFrom::Data(offset as u64)) {
            Ok(data) => Ok(data < (offset + len) as u64),
            Err(Errno::NXIO) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Locks the memory for this process until it ends. Returns false if another process holds the lock.
    ///
    /// # Errors
    /// Errors of flock(2).
    pub fn try_lock(&self) -> io::Result<bool> {
        match rustix::fs::flock(&self.descriptor, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to self, and no borrow of it outlives self.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_descriptors_are_rejected() {
        let memory = SharedMemory::create(c"larder-test", 4096).expect("memory");
        let descriptor = memory.read_only().expect("a descriptor");
        assert!(SharedMemory::open(descriptor.as_fd()).is_ok());
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4096).expect("room");
        let unsealed = rustix::fs::memfd_create("larder-pages", MemfdFlags::CLOEXEC).expect("memory");
        let device = std::fs::File::open("/dev/zero").expect("is there");
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let path = rustix::fs::open("/dev/null", flags, Mode::empty()).expect("is there");
        for other in [file.as_fd(), unsealed.as_fd(), device.as_fd(), path.as_fd()] {
            let error = SharedMemory::open(other).err().expect("is refused");
            assert!(error.to_string().contains("not created by a pager"), "{error}");
        }
    }
}
