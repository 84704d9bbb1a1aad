//! Guest memory as a front-end shares it: a memfd, mapped here too. Guest addresses begin at 0; user addresses are made
//! up, since nobody but the server's table ever sees them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

/// User address of guest address 0.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

/// A guest's memory.
pub struct Memory {
    file: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread; every access goes through raw pointers or atomics, as a guest's would.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory of small pages.
    pub fn new(bytes: usize) -> io::Result<Self> {
        Self::with_flags(bytes, MemfdFlags::CLOEXEC)
    }

    /// Memory of another kind, such as of huge pages.
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

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The file behind it.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where guest address `at` is mapped here.
    pub fn pointer(&self, at: u64, bytes: usize) -> *mut u8 {
        let inside = (at as usize).checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{bytes} bytes at {at:#x} of a guest of {} bytes", self.bytes);
        self.base.as_ptr().wrapping_add(at as usize)
    }

    /// Copies out.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        // SAFETY: inside the mapping; the server may write at the same time only to what a request was given.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer(at, into.len()), into.as_mut_ptr(), into.len()) };
    }

    /// Copies out.
    pub fn read_vec(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut copy = vec![0; bytes];
        self.read(at, &mut copy);
        copy
    }

    /// Copies in.
    pub fn write(&self, at: u64, from: &[u8]) {
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.pointer(at, from.len()), from.len()) };
    }

    /// A shared word.
    pub fn word16(&self, at: u64) -> &AtomicU16 {
        assert!(at.is_multiple_of(2));
        // SAFETY: inside the mapping, which is as aligned as `at`, and lives as long as `self`.
        unsafe { AtomicU16::from_ptr(self.pointer(at, 2).cast()) }
    }

    /// A shared word.
    pub fn word32(&self, at: u64) -> &AtomicU32 {
        assert!(at.is_multiple_of(4));
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.pointer(at, 4).cast()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `with_flags`; pointers into it do not outlive `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
