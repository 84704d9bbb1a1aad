//! Guest memory that a front-end shares: a memfd, which is mapped here, too. Guest addresses begin at 0. User
//! addresses are invented, because only the server's region table uses them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

/// User address of guest address 0.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

/// Memory of a guest.
pub struct Memory {
    file: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread; every access uses raw pointers or atomics, as a guest's would.
unsafe impl Send for Memory {}
// SAFETY: the reason for `Send` holds for shared access, too.
unsafe impl Sync for Memory {}

impl Memory {
    /// Creates memory of small pages.
    pub fn new(bytes: usize) -> io::Result<Self> {
        Self::with_flags(bytes, MemfdFlags::CLOEXEC)
    }

    /// Creates memory with other memfd flags, such as those for huge pages.
    pub fn with_flags(bytes: usize, flags: MemfdFlags) -> io::Result<Self> {
        let file = rustix::fs::memfd_create("guest", flags)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { file, base, bytes })
    }

    /// Returns the length, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the memfd.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the mapping of guest address `at`, after a check that `bytes` bytes are in memory.
    pub fn pointer(&self, at: u64, bytes: usize) -> *mut u8 {
        let inside = (at as usize).checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{bytes} bytes at {at:#x} of a guest of {} bytes", self.bytes);
        self.base.as_ptr().wrapping_add(at as usize)
    }

    /// Copies guest memory into a buffer.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        // SAFETY: inside the mapping; the server concurrently writes only to the memory of requests.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer(at, into.len()), into.as_mut_ptr(), into.len()) };
    }

    /// Copies guest memory into a vector.
    pub fn read_vec(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut copy = vec![0; bytes];
        self.read(at, &mut copy);
        copy
    }

    /// Copies a buffer into guest memory.
    pub fn write(&self, at: u64, from: &[u8]) {
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.pointer(at, from.len()), from.len()) };
    }

    /// Returns a shared 16-bit word.
    pub fn word16(&self, at: u64) -> &AtomicU16 {
        assert!(at.is_multiple_of(2));
        // SAFETY: inside the mapping, which is as aligned as `at`, and lives as long as `self`.
        unsafe { AtomicU16::from_ptr(self.pointer(at, 2).cast()) }
    }

    /// Returns a shared 32-bit word.
    pub fn word32(&self, at: u64) -> &AtomicU32 {
        assert!(at.is_multiple_of(4));
        // SAFETY: as in `word16`.
        unsafe { AtomicU32::from_ptr(self.pointer(at, 4).cast()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `with_flags`; pointers into it do not outlive `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
