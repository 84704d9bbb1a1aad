//! Binding of the kernel's userfaultfd (ioctl_userfaultfd(2), linux/userfaultfd.h).
//!
//! No crate supports write-protection of shared memory, thread IDs and poisoning together. All addresses belong to
//! the process whose memory is managed, so no call here can touch memory of this process except the buffers that are
//! passed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use crate::inject::{InjectError, StoppedThread};
use crate::units::{PAGE, PAGE_BYTES};

/// Features, as `UFFD_FEATURE_*`.
pub mod feature {
    /// Faults have a flag for write-protection.
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    /// Removed ranges (`MADV_DONTNEED`, `MADV_REMOVE`) are reported.
    pub const EVENT_REMOVE: u64 = 1 << 3;
    /// Faults on missing pages of shared memory.
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// Unmapped ranges are reported.
    pub const EVENT_UNMAP: u64 = 1 << 6;
    /// Faults contain the thread ID.
    pub const THREAD_ID: u64 = 1 << 8;
    /// Faults on pages of shared memory that are in the file but not mapped, Linux 5.14.
    pub const MINOR_SHMEM: u64 = 1 << 10;
    /// Write-protection of shared memory, Linux 5.19.
    pub const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
    /// Pages can be poisoned, Linux 6.6.
    pub const POISON: u64 = 1 << 14;
}

/// Features that managing memory requires, with the name of each for messages.
pub const REQUIRED_FEATURES: [(u64, &str); 7] = [
    (feature::PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP"),
    (feature::EVENT_REMOVE, "EVENT_REMOVE"),
    (feature::MISSING_SHMEM, "MISSING_SHMEM"),
    (feature::EVENT_UNMAP, "EVENT_UNMAP"),
    (feature::THREAD_ID, "THREAD_ID"),
    (feature::MINOR_SHMEM, "MINOR_SHMEM"),
    (feature::WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM"),
];

/// All features of [`REQUIRED_FEATURES`].
pub const REQUIRED_FEATURE_BITS: u64 = {
    let (mut all, mut index) = (0, 0);
    while index < REQUIRED_FEATURES.len() {
        all |= REQUIRED_FEATURES[index].0;
        index += 1;
    }
    all
};

/// Features required for a process that has managed memory mapped externally. Unmap events are not among them,
/// because the process would have to wait for the pager to read them.
pub const EXTERNAL_FEATURE_BITS: u64 =
    feature::PAGEFAULT_FLAG_WP | feature::MISSING_SHMEM | feature::WP_HUGETLBFS_SHMEM;

const API: u64 = 0xaa;

const fn ioctl_number(direction: u64, number: u64, size: usize) -> libc::c_ulong {
    (direction << 30 | (size as u64) << 16 | 0xaa << 8 | number) as libc::c_ulong
}

const DIR_READ: u64 = 2;
const DIR_READ_WRITE: u64 = 3;

const UFFDIO_API: libc::c_ulong = ioctl_number(DIR_READ_WRITE, 0x3f, size_of::<Api>());
const UFFDIO_REGISTER: libc::c_ulong = ioctl_number(DIR_READ_WRITE, 0x00, size_of::<RegisterRequest>());
const UFFDIO_UNREGISTER: libc::c_ulong = ioctl_number(DIR_READ, 0x01, size_of::<AddressRange>());
const UFFDIO_WAKE: libc::c_ulong = ioctl_number(DIR_READ, 0x02, size_of::<AddressRange>());
const UFFDIO_COPY: libc::c_ulong = ioctl_number(DIR_READ_WRITE, 0x03, size_of::<CopyRequest>());
const UFFDIO_ZEROPAGE: libc::c_ulong = ioctl_number(DIR_READ_WRITE, 0x04, size_of::<RangeMode>());
const UFFDIO_WRITEPROTECT: libc::c_ulong = ioctl_number(DIR_READ_WRITE, 0x06, size_of::<WriteProtectRequest>());
const UFFDIO_CONTINUE: libc::c_ulong = ioctl_number(DIR_READ_WRITE, 0x07, size_of::<RangeMode>());
const UFFDIO_POISON: libc::c_ulong = ioctl_number(DIR_READ_WRITE, 0x08, size_of::<RangeMode>());

/// Ioctl on /dev/userfaultfd that makes a userfaultfd of its caller (`USERFAULTFD_IOC_NEW`, Linux 6.1).
const IOC_NEW: u64 = 0xaa00;

/// Opens /dev/userfaultfd. A process that receives the descriptor can make userfaultfds without rights of its own.
///
/// # Errors
/// Errors of open(2).
pub fn open_device() -> io::Result<File> {
    File::options().read(true).write(true).open("/dev/userfaultfd")
}

/// Makes a userfaultfd in another process from `device`, the process's descriptor of /dev/userfaultfd. Returns the
/// new descriptor number there.
///
/// # Errors
/// If the process is not permitted to, or has ended.
pub fn create_in(thread: &mut StoppedThread, device: RawFd) -> Result<RawFd, InjectError> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let made = thread.system_call(libc::SYS_ioctl, [device as u64, IOC_NEW, flags, 0, 0, 0]);
    Ok(made? as RawFd)
}

/// Target of the /proc link of a userfaultfd's descriptor.
pub const PROC_LINK: &str = "anon_inode:[userfaultfd]";

const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_WP: u64 = 1 << 1;
const REGISTER_MODE_MINOR: u64 = 1 << 2;
const COPY_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// Address range in the managed process.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressRange {
    /// Address of the first byte, page-aligned.
    pub start: u64,
    /// Length in bytes, whole pages.
    pub len: u64,
}

#[repr(C)]
struct RegisterRequest {
    range: AddressRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct CopyRequest {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `uffdio_zeropage`, `uffdio_continue` and `uffdio_poison`, which have the same layout.
#[repr(C)]
struct RangeMode {
    range: AddressRange,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct WriteProtectRequest {
    range: AddressRange,
    mode: u64,
}

/// `struct uffd_msg`: 32 bytes, of which all values are valid.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct RawUffdMessage {
    event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

/// Reason why a thread waits for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultCause {
    /// The page is missing.
    Missing,
    /// The page is write-protected.
    Protected,
    /// The page is in the file but not mapped: its mapping was removed, or another process has put the page there.
    Minor,
}

/// Message of the kernel about the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UffdMessage {
    /// A thread has touched a page and waits.
    Fault {
        /// The address, rounded down to a page.
        address: u64,
        /// The thread wants to write.
        write: bool,
        /// The reason for the wait.
        cause: FaultCause,
        /// The thread ID in the PID namespace in which the userfaultfd was made.
        thread: u32,
    },
    /// The process has given up the content of these pages (`MADV_DONTNEED`, `MADV_REMOVE`). It continues once this
    /// message is read.
    Removed(AddressRange),
    /// The process has unmapped these pages.
    Unmapped(AddressRange),
    /// An event that was not requested.
    Unknown(u8),
}

const EVENT_FAULT: u8 = 0x12;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;
const FLAG_WRITE: u64 = 1 << 0;
const FLAG_WP: u64 = 1 << 1;
const FLAG_MINOR: u64 = 1 << 2;

impl RawUffdMessage {
    /// Makes a message from the bytes of a `struct uffd_msg`.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let [first, arguments @ ..] = [0, 1, 2, 3].map(|index| u64::from_le_bytes(words[index]));
        let [event, reserved @ ..] = first.to_le_bytes();
        Self { event, reserved, arguments }
    }

    /// Decodes the message. Returns `None` for an unused slot of a buffer.
    pub fn decode(&self) -> Option<UffdMessage> {
        let [first, second, third] = self.arguments;
        Some(match self.event {
            0 => return None,
            EVENT_FAULT => UffdMessage::Fault {
                write: first & FLAG_WRITE != 0,
                cause: match (first & FLAG_WP != 0, first & FLAG_MINOR != 0) {
                    (true, _) => FaultCause::Protected,
                    (false, true) => FaultCause::Minor,
                    (false, false) => FaultCause::Missing,
                },
                address: second & !(PAGE_BYTES - 1),
                thread: third as u32,
            },
            EVENT_REMOVE => UffdMessage::Removed(AddressRange::between(first, second)),
            EVENT_UNMAP => UffdMessage::Unmapped(AddressRange::between(first, second)),
            other => UffdMessage::Unknown(other),
        })
    }
}

impl From<UffdMessage> for RawUffdMessage {
    /// Encodes a message in the kernel's format.
    fn from(message: UffdMessage) -> Self {
        let raw = |event, arguments| Self { event, arguments, ..Self::default() };
        match message {
            UffdMessage::Fault { address, write, cause, thread } => {
                let cause = match cause {
                    FaultCause::Missing => 0,
                    FaultCause::Protected => FLAG_WP,
                    FaultCause::Minor => FLAG_MINOR,
                };
                let write = if write { FLAG_WRITE } else { 0 };
                raw(EVENT_FAULT, [cause | write, address, u64::from(thread)])
            }
            UffdMessage::Removed(range) => raw(EVENT_REMOVE, [range.start, range.end(), 0]),
            UffdMessage::Unmapped(range) => raw(EVENT_UNMAP, [range.start, range.end(), 0]),
            UffdMessage::Unknown(event) => raw(event, [0; 3]),
        }
    }
}

impl AddressRange {
    fn between(start: u64, end: u64) -> Self {
        Self { start, len: end.saturating_sub(start) }
    }

    /// Returns the first address after the range.
    pub const fn end(self) -> u64 {
        self.start + self.len
    }
}

/// Result of putting a page in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillResult {
    /// The page is in place, and threads that waited for it continue.
    Done,
    /// There was a page already, which stays.
    AlreadyPresent,
    /// The process is changing its mappings, or giving pages up. Its messages must be read first.
    MappingChanged,
    /// The host, or the process's control group, has no free memory for the page.
    NoMemory,
    /// The memory is not mapped any more, or the process has ended.
    Unmapped,
}

/// A userfaultfd for another process's memory.
pub struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Wraps a descriptor of a userfaultfd.
    pub fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is called with the structure that it is defined with (see the constants), which is
        // alive and writable for the call.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request, std::ptr::from_mut(argument)) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Enables `features`. A userfaultfd whose features were enabled earlier, by an earlier pager, stays as it is.
    ///
    /// # Errors
    /// If the ioctl fails, except with `EINVAL`. The kernel returns `EINVAL` both for a missing feature and for a
    /// userfaultfd that is enabled already, so callers check [`available_features`] first.
    pub fn enable(&self, features: u64) -> io::Result<()> {
        let mut api = Api { api: API, features, ioctls: 0 };
        match self.ioctl(UFFDIO_API, &mut api) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    }

    /// Registers `range`: missing pages, unmapped pages and writes to protected pages are reported from now on. May
    /// be repeated.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has the range. `EINVAL`: the memory is of a kind that cannot be managed.
    pub fn register(&self, range: AddressRange) -> io::Result<()> {
        self.register_with_mode(range, REGISTER_MODE_MISSING | REGISTER_MODE_WP | REGISTER_MODE_MINOR)
    }

    /// Registers `range` like [`Self::register`], except for unmapped pages that are in the file. The kernel maps
    /// those by itself.
    ///
    /// # Errors
    /// The same as for [`Self::register`].
    pub fn register_missing(&self, range: AddressRange) -> io::Result<()> {
        self.register_with_mode(range, REGISTER_MODE_MISSING | REGISTER_MODE_WP)
    }

    fn register_with_mode(&self, range: AddressRange, mode: u64) -> io::Result<()> {
        let mut register = RegisterRequest { range, mode, ioctls: 0 };
        self.ioctl(UFFDIO_REGISTER, &mut register)
    }

    /// Unregisters `range` and wakes all threads that wait there. The write-protection of its pages is removed too.
    ///
    /// # Errors
    /// If the process has ended, or the range is not mapped.
    pub fn unregister(&self, mut range: AddressRange) -> io::Result<()> {
        self.ioctl(UFFDIO_UNREGISTER, &mut range)
    }

    /// Wakes threads that wait in `range`. They retry.
    ///
    /// # Errors
    /// None that matters to a live process.
    pub fn wake(&self, mut range: AddressRange) -> io::Result<()> {
        self.ioctl(UFFDIO_WAKE, &mut range)
    }

    /// Puts pages in place, from the first on, until one fails. Returns the number of pages put in place, and
    /// [`FillResult::Done`] if there is at least one, else the reason of the failure. With `protect` the pages are
    /// write-protected.
    ///
    /// # Panics
    /// If `content` is not whole pages.
    pub fn copy(&self, address: u64, content: &[u8], protect: bool) -> (usize, FillResult) {
        assert!(content.len().is_multiple_of(PAGE) && !content.is_empty());
        let mut copy = CopyRequest {
            to: address,
            from: content.as_ptr() as u64,
            len: content.len() as u64,
            mode: if protect { COPY_MODE_WP } else { 0 },
            copied: 0,
        };
        match self.ioctl(UFFDIO_COPY, &mut copy) {
            Ok(()) => (content.len() / PAGE, FillResult::Done),
            Err(error) => {
                let done = usize::try_from(copy.copied).map_or(0, |bytes| bytes / PAGE);
                // After a partial copy, the next call reports why it went no further.
                if done > 0 {
                    return (done, FillResult::Done);
                }
                (0, Self::fill_error(&error))
            }
        }
    }

    /// Puts a page of zeros in place.
    pub fn zero(&self, address: u64) -> FillResult {
        let mut zero = RangeMode { range: AddressRange { start: address, len: PAGE_BYTES }, mode: 0, done: 0 };
        match self.ioctl(UFFDIO_ZEROPAGE, &mut zero) {
            Ok(()) => FillResult::Done,
            Err(error) => Self::fill_error(&error),
        }
    }

    /// Maps a page that is in the file, unprotected. Threads that wait for it retry in any case.
    pub fn map(&self, address: u64) {
        let range = AddressRange { start: address, len: PAGE_BYTES };
        let mut map = RangeMode { range, mode: 0, done: 0 };
        // On an error the page is not in the file any more, is mapped already, or cannot be mapped now: the thread
        // faults again.
        if self.ioctl(UFFDIO_CONTINUE, &mut map).is_err() {
            let _ = self.wake(range);
        }
    }

    /// Poisons a missing page: a thread that touches it gets a memory error (SIGBUS; in a guest a machine check),
    /// like for failed RAM. Returns [`FillResult::Unmapped`] if the kernel does not support it (before Linux 6.6).
    pub fn poison(&self, address: u64) -> FillResult {
        let range = AddressRange { start: address, len: PAGE_BYTES };
        let mut poison = RangeMode { range, mode: 0, done: 0 };
        // A marker of write-protection would be in the way.
        let poisoned = self.unprotect(range).and_then(|()| self.ioctl(UFFDIO_POISON, &mut poison));
        poisoned.map_or_else(|error| Self::fill_error(&error), |()| FillResult::Done)
    }

    fn fill_error(error: &io::Error) -> FillResult {
        match error.raw_os_error() {
            Some(libc::EEXIST) => FillResult::AlreadyPresent,
            Some(libc::EAGAIN) => FillResult::MappingChanged,
            Some(libc::ENOMEM) => FillResult::NoMemory,
            // ENOENT: not registered there (any more). ESRCH: the process has ended. EFAULT cannot be our buffer.
            _ => FillResult::Unmapped,
        }
    }

    /// Write-protects `range`: from now on writes to it fault and wait.
    ///
    /// # Errors
    /// `ENOENT`: not registered; `EAGAIN`: mappings are changing; `ESRCH`: the process has ended.
    pub fn protect(&self, range: AddressRange) -> io::Result<()> {
        self.ioctl(UFFDIO_WRITEPROTECT, &mut WriteProtectRequest { range, mode: WRITEPROTECT_MODE_WP })
    }

    /// Removes the write-protection of `range`, and wakes threads that wait to write.
    ///
    /// # Errors
    /// The same as for [`Self::protect`].
    pub fn unprotect(&self, range: AddressRange) -> io::Result<()> {
        self.ioctl(UFFDIO_WRITEPROTECT, &mut WriteProtectRequest { range, mode: 0 })
    }

    /// Reads the kernel's messages into `buffer`, which must be zeros, without waiting. Returns the number of
    /// messages. Faults come before events about mappings.
    ///
    /// The buffer may be memory that outlives this process: a message is there before the kernel forgets it.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn receive(&self, buffer: &mut [RawUffdMessage]) -> io::Result<usize> {
        // SAFETY: the buffer is valid for its length, and every value is one of `RawUffdMessage`.
        let read = unsafe { libc::read(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), std::mem::size_of_val(buffer)) };
        if read < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(0),
                _ => Err(error),
            };
        }
        Ok(read as usize / size_of::<RawUffdMessage>())
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the features of the kernel's userfaultfd, queried with a userfaultfd of this process.
///
/// # Errors
/// If the kernel has no userfaultfd, or this process is not permitted to use it.
pub fn available_features() -> io::Result<u64> {
    let userfaultfd = create_for_user_mode()?;
    let mut api = Api { api: API, features: 0, ioctls: 0 };
    userfaultfd.ioctl(UFFDIO_API, &mut api)?;
    Ok(api.features)
}

/// Makes a userfaultfd of this process, for faults in user mode.
///
/// # Errors
/// If the kernel has no userfaultfd, or this process is not permitted to use it.
pub fn create_for_user_mode() -> io::Result<Userfaultfd> {
    use std::os::fd::FromRawFd as _;
    // SAFETY: takes no pointers.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | 1) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that has no other owner.
    Ok(Userfaultfd(unsafe { OwnedFd::from_raw_fd(descriptor as i32) }))
}

const _: () = assert!(size_of::<RawUffdMessage>() == 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_message_round_trips() {
        let range = AddressRange { start: 0x7000_0000_0000, len: 0x3000 };
        let mut messages = vec![UffdMessage::Removed(range), UffdMessage::Unmapped(range), UffdMessage::Unknown(0x13)];
        for cause in [FaultCause::Missing, FaultCause::Protected, FaultCause::Minor] {
            messages.extend([false, true].map(|write| UffdMessage::Fault {
                address: 0x7000_0000_1000,
                write,
                cause,
                thread: 7,
            }));
        }
        for message in messages {
            assert_eq!(RawUffdMessage::from(message).decode(), Some(message));
        }
    }
}
