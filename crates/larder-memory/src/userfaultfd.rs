//! The kernel's userfaultfd: what it says and what it is told (ioctl_userfaultfd(2), linux/userfaultfd.h).
//!
//! Bound here and not by a crate because none has write-protection of shared memory, thread IDs and poison together.
//! All addresses are of the process whose memory it is, which is not ours: no call here can touch memory of this
//! process but the buffers that are passed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use crate::inject::{InjectError, StoppedThread};
use crate::units::{PAGE, PAGE_BYTES};

/// Features, as `UFFD_FEATURE_*`.
pub mod feature {
    /// Write-protection faults say so.
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    /// Removed ranges (`MADV_DONTNEED`, `MADV_REMOVE`) are told.
    pub const EVENT_REMOVE: u64 = 1 << 3;
    /// Missing pages of shared memory.
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// Unmapped ranges are told.
    pub const EVENT_UNMAP: u64 = 1 << 6;
    /// A fault says which thread it stopped.
    pub const THREAD_ID: u64 = 1 << 8;
    /// Pages of shared memory that are in its file, and not mapped, Linux 5.14.
    pub const MINOR_SHMEM: u64 = 1 << 10;
    /// Write-protection of shared memory, Linux 5.19.
    pub const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
    /// Pages can be poisoned, Linux 6.6.
    pub const POISON: u64 = 1 << 14;
}

/// Without these no memory can be managed; with the name of each, for messages.
pub const NEEDED: [(u64, &str); 7] = [
    (feature::PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP"),
    (feature::EVENT_REMOVE, "EVENT_REMOVE"),
    (feature::MISSING_SHMEM, "MISSING_SHMEM"),
    (feature::EVENT_UNMAP, "EVENT_UNMAP"),
    (feature::THREAD_ID, "THREAD_ID"),
    (feature::MINOR_SHMEM, "MINOR_SHMEM"),
    (feature::WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM"),
];

/// All of [`NEEDED`].
pub const NEEDED_ALL: u64 = {
    let (mut all, mut index) = (0, 0);
    while index < NEEDED.len() {
        all |= NEEDED[index].0;
        index += 1;
    }
    all
};

/// Without these a process that has managed memory mapped, too, cannot be served. It is not told what it unmaps, which
/// would have it wait.
pub const NEEDED_BY_VIEWS: u64 = feature::PAGEFAULT_FLAG_WP | feature::MISSING_SHMEM | feature::WP_HUGETLBFS_SHMEM;

const API: u64 = 0xaa;

const fn request(direction: u64, number: u64, size: usize) -> libc::c_ulong {
    (direction << 30 | (size as u64) << 16 | 0xaa << 8 | number) as libc::c_ulong
}

const READ: u64 = 2;
const READ_WRITE: u64 = 3;

const UFFDIO_API: libc::c_ulong = request(READ_WRITE, 0x3f, size_of::<Api>());
const UFFDIO_REGISTER: libc::c_ulong = request(READ_WRITE, 0x00, size_of::<Register>());
const UFFDIO_UNREGISTER: libc::c_ulong = request(READ, 0x01, size_of::<Range>());
const UFFDIO_WAKE: libc::c_ulong = request(READ, 0x02, size_of::<Range>());
const UFFDIO_COPY: libc::c_ulong = request(READ_WRITE, 0x03, size_of::<Copy>());
const UFFDIO_ZEROPAGE: libc::c_ulong = request(READ_WRITE, 0x04, size_of::<RangeMode>());
const UFFDIO_WRITEPROTECT: libc::c_ulong = request(READ_WRITE, 0x06, size_of::<WriteProtect>());
const UFFDIO_CONTINUE: libc::c_ulong = request(READ_WRITE, 0x07, size_of::<RangeMode>());
const UFFDIO_POISON: libc::c_ulong = request(READ_WRITE, 0x08, size_of::<RangeMode>());

/// Makes a userfaultfd of the caller of that ioctl on /dev/userfaultfd (`USERFAULTFD_IOC_NEW`, Linux 6.1).
const IOC_NEW: u64 = 0xaa00;

/// What userfaultfds of other processes are made of, which takes rights that they need not have.
///
/// # Errors
/// Of open(2).
pub fn device() -> io::Result<File> {
    File::options().read(true).write(true).open("/dev/userfaultfd")
}

/// Has a process make one of `device`, which it was given by that number; the number of what it has made.
///
/// # Errors
/// It may not, or has ended.
pub fn make_in(thread: &mut StoppedThread, device: RawFd) -> Result<RawFd, InjectError> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let made = thread.system_call(libc::SYS_ioctl, [device as u64, IOC_NEW, flags, 0, 0, 0]);
    Ok(made? as RawFd)
}

/// What the link in /proc of a descriptor of any userfaultfd is.
pub const LINK: &str = "anon_inode:[userfaultfd]";

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

/// Addresses in the process whose memory it is.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// First byte; page-aligned.
    pub start: u64,
    /// Bytes; whole pages.
    pub len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `uffdio_zeropage`, `uffdio_continue` and `uffdio_poison`, which are alike.
#[repr(C)]
struct RangeMode {
    range: Range,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// `struct uffd_msg`: 32 bytes, of which all values are valid.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct RawMessage {
    event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

/// Why a thread waits for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// It is not there.
    Missing,
    /// It is write-protected.
    Protected,
    /// It is in the file, and not mapped: what mapped it was taken away, or it was put there by another process.
    Minor,
}

/// What the kernel says of the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// A thread has touched a page and waits.
    Fault {
        /// Where, rounded down to a page.
        address: u64,
        /// It wants to write.
        write: bool,
        /// Why it waits.
        cause: Cause,
        /// Its number in the PID namespace in which the userfaultfd was made.
        thread: u32,
    },
    /// The process has given up what was in these pages (`MADV_DONTNEED`, `MADV_REMOVE`), and has gone on now that this
    /// has been read.
    Removed(Range),
    /// The process has unmapped these.
    Unmapped(Range),
    /// What was not asked for.
    Other(u8),
}

const EVENT_FAULT: u8 = 0x12;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;
const FLAG_WRITE: u64 = 1 << 0;
const FLAG_WP: u64 = 1 << 1;
const FLAG_MINOR: u64 = 1 << 2;

impl RawMessage {
    /// Of the bytes of a `struct uffd_msg`.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let [first, arguments @ ..] = [0, 1, 2, 3].map(|index| u64::from_le_bytes(words[index]));
        let [event, reserved @ ..] = first.to_le_bytes();
        Self {
            event,
            reserved,
            arguments,
        }
    }

    /// What it says, or `None` for a place in a buffer into which nothing was read.
    pub fn decode(&self) -> Option<Message> {
        let [first, second, third] = self.arguments;
        Some(match self.event {
            0 => return None,
            EVENT_FAULT => Message::Fault {
                write: first & FLAG_WRITE != 0,
                cause: match (first & FLAG_WP != 0, first & FLAG_MINOR != 0) {
                    (true, _) => Cause::Protected,
                    (false, true) => Cause::Minor,
                    (false, false) => Cause::Missing,
                },
                address: second & !(PAGE_BYTES - 1),
                thread: third as u32,
            },
            EVENT_REMOVE => Message::Removed(Range::between(first, second)),
            EVENT_UNMAP => Message::Unmapped(Range::between(first, second)),
            other => Message::Other(other),
        })
    }
}

impl From<Message> for RawMessage {
    /// As the kernel would say it.
    fn from(message: Message) -> Self {
        let raw = |event, arguments| Self {
            event,
            arguments,
            ..Self::default()
        };
        match message {
            Message::Fault {
                address,
                write,
                cause,
                thread,
            } => {
                let cause = match cause {
                    Cause::Missing => 0,
                    Cause::Protected => FLAG_WP,
                    Cause::Minor => FLAG_MINOR,
                };
                let write = if write { FLAG_WRITE } else { 0 };
                raw(EVENT_FAULT, [cause | write, address, u64::from(thread)])
            }
            Message::Removed(range) => raw(EVENT_REMOVE, [range.start, range.end(), 0]),
            Message::Unmapped(range) => raw(EVENT_UNMAP, [range.start, range.end(), 0]),
            Message::Other(event) => raw(event, [0; 3]),
        }
    }
}

impl Range {
    fn between(start: u64, end: u64) -> Self {
        Self {
            start,
            len: end.saturating_sub(start),
        }
    }

    /// The first address after it.
    pub const fn end(self) -> u64 {
        self.start + self.len
    }
}

/// How a page that was to be put in place ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Filled {
    /// It is there, and who waited for it goes on.
    Done,
    /// There was one already, which stays.
    Present,
    /// The process is changing its mappings, or gives pages up: what it says must be read first.
    Changing,
    /// The host, or the process's control group, has no page for it now.
    NoMemory,
    /// The memory is not mapped there any more, or the process has ended.
    Gone,
}

/// A userfaultfd in another process's memory.
pub struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// From a descriptor of one.
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

    /// Agrees with the kernel on `features`; all of them are on afterwards. One that has been agreed on earlier (by the
    /// pager before this one) stays as it is.
    ///
    /// # Errors
    /// The kernel lacks one of them (`EINVAL` as it is for one that was agreed on, so this looks first: [`available`]).
    pub fn enable(&self, features: u64) -> io::Result<()> {
        let mut api = Api {
            api: API,
            features,
            ioctls: 0,
        };
        match self.ioctl(UFFDIO_API, &mut api) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    }

    /// Missing pages, those that are not mapped, and writes to protected pages of `range` are told from now on. May be said
    /// again.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has it. `EINVAL`: memory of a kind that cannot be managed.
    pub fn register(&self, range: Range) -> io::Result<()> {
        self.register_for(range, REGISTER_MODE_MISSING | REGISTER_MODE_WP | REGISTER_MODE_MINOR)
    }

    /// The same, but for pages that are in the file and not mapped: they are found there as they are.
    ///
    /// # Errors
    /// As of [`Self::register`].
    pub fn register_missing(&self, range: Range) -> io::Result<()> {
        self.register_for(range, REGISTER_MODE_MISSING | REGISTER_MODE_WP)
    }

    fn register_for(&self, range: Range, mode: u64) -> io::Result<()> {
        let mut register = Register { range, mode, ioctls: 0 };
        self.ioctl(UFFDIO_REGISTER, &mut register)
    }

    /// `range` is the kernel's alone again; who waits goes on. Protection of its pages goes with it.
    ///
    /// # Errors
    /// The process has ended, or the range is not mapped.
    pub fn unregister(&self, mut range: Range) -> io::Result<()> {
        self.ioctl(UFFDIO_UNREGISTER, &mut range)
    }

    /// Lets threads that wait in `range` try again.
    ///
    /// # Errors
    /// None that matters to a process that lives.
    pub fn wake(&self, mut range: Range) -> io::Result<()> {
        self.ioctl(UFFDIO_WAKE, &mut range)
    }

    /// Puts pages in place, from the first on, until one cannot be: how many were, and why not the next.
    /// With `protect` a first write to them is told.
    ///
    /// # Panics
    /// `content` is not whole pages.
    pub fn copy(&self, address: u64, content: &[u8], protect: bool) -> (usize, Filled) {
        assert!(content.len().is_multiple_of(PAGE) && !content.is_empty());
        let mut copy = Copy {
            to: address,
            from: content.as_ptr() as u64,
            len: content.len() as u64,
            mode: if protect { COPY_MODE_WP } else { 0 },
            copied: 0,
        };
        match self.ioctl(UFFDIO_COPY, &mut copy) {
            Ok(()) => (content.len() / PAGE, Filled::Done),
            Err(error) => {
                let done = usize::try_from(copy.copied).map_or(0, |bytes| bytes / PAGE);
                // A part of it was copied: the next one says why it went no further.
                if done > 0 {
                    return (done, Filled::Done);
                }
                (0, Self::why_not_filled(&error))
            }
        }
    }

    /// Puts a page of zeros in place.
    pub fn zero(&self, address: u64) -> Filled {
        let mut zero = RangeMode {
            range: Range {
                start: address,
                len: PAGE_BYTES,
            },
            mode: 0,
            done: 0,
        };
        match self.ioctl(UFFDIO_ZEROPAGE, &mut zero) {
            Ok(()) => Filled::Done,
            Err(error) => Self::why_not_filled(&error),
        }
    }

    /// Maps a page that is in the file, unprotected, for who waits for it; who waits tries again in any case.
    pub fn map(&self, address: u64) {
        let range = Range {
            start: address,
            len: PAGE_BYTES,
        };
        let mut map = RangeMode {
            range,
            mode: 0,
            done: 0,
        };
        // It is not in the file any more, mapped already, or cannot be now: that is told again.
        if self.ioctl(UFFDIO_CONTINUE, &mut map).is_err() {
            let _ = self.wake(range);
        }
    }

    /// Whoever touches this missing page gets a memory error (SIGBUS; a guest, a machine check), as of RAM that failed.
    /// Gone: the kernel cannot (before Linux 6.6).
    pub fn poison(&self, address: u64) -> Filled {
        let range = Range {
            start: address,
            len: PAGE_BYTES,
        };
        let mut poison = RangeMode {
            range,
            mode: 0,
            done: 0,
        };
        // A mark that it was write-protected is in the way.
        let poisoned = self
            .unprotect(range)
            .and_then(|()| self.ioctl(UFFDIO_POISON, &mut poison));
        poisoned.map_or_else(|error| Self::why_not_filled(&error), |()| Filled::Done)
    }

    fn why_not_filled(error: &io::Error) -> Filled {
        match error.raw_os_error() {
            Some(libc::EEXIST) => Filled::Present,
            Some(libc::EAGAIN) => Filled::Changing,
            Some(libc::ENOMEM) => Filled::NoMemory,
            // ENOENT: not registered there (any more). ESRCH: the process has ended. EFAULT cannot be our buffer.
            _ => Filled::Gone,
        }
    }

    /// Writes to `range` are told and wait from now on.
    ///
    /// # Errors
    /// `ENOENT`: not registered; `EAGAIN`: mappings are changing; `ESRCH`: the process has ended.
    pub fn protect(&self, range: Range) -> io::Result<()> {
        self.ioctl(
            UFFDIO_WRITEPROTECT,
            &mut WriteProtect {
                range,
                mode: WRITEPROTECT_MODE_WP,
            },
        )
    }

    /// Writes to `range` are free again, and who waits for that goes on.
    ///
    /// # Errors
    /// As of [`Self::protect`].
    pub fn unprotect(&self, range: Range) -> io::Result<()> {
        self.ioctl(UFFDIO_WRITEPROTECT, &mut WriteProtect { range, mode: 0 })
    }

    /// Reads what the kernel has to say into `buffer`, whose places must be of zeros; how many messages. Faults come
    /// before what is told of mappings. Does not wait.
    ///
    /// The buffer may be memory that outlives this process: a message is there as soon as the kernel has forgotten it.
    ///
    /// # Errors
    /// The process has ended.
    pub fn receive(&self, buffer: &mut [RawMessage]) -> io::Result<usize> {
        // SAFETY: the buffer is valid for its length, and every value is one of RawMessage.
        let read = unsafe {
            libc::read(
                self.0.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                std::mem::size_of_val(buffer),
            )
        };
        if read < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(0),
                _ => Err(error),
            };
        }
        Ok(read as usize / size_of::<RawMessage>())
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What the kernel's userfaultfd can do, asked with one of this process's own.
///
/// # Errors
/// There is none, or this process may not have one.
pub fn available() -> io::Result<u64> {
    let userfaultfd = for_user_mode()?;
    let mut api = Api {
        api: API,
        features: 0,
        ioctls: 0,
    };
    userfaultfd.ioctl(UFFDIO_API, &mut api)?;
    Ok(api.features)
}

/// Makes a userfaultfd of this process's own, for faults in user mode.
///
/// # Errors
/// There is none, or this process may not have one.
pub fn for_user_mode() -> io::Result<Userfaultfd> {
    use std::os::fd::FromRawFd as _;
    // SAFETY: takes no pointers.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | 1) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else has.
    Ok(Userfaultfd(unsafe { OwnedFd::from_raw_fd(descriptor as i32) }))
}

const _: () = assert!(size_of::<RawMessage>() == 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_what_it_was_made_of() {
        let range = Range {
            start: 0x7000_0000_0000,
            len: 0x3000,
        };
        let mut messages = vec![Message::Removed(range), Message::Unmapped(range), Message::Other(0x13)];
        for cause in [Cause::Missing, Cause::Protected, Cause::Minor] {
            messages.extend([false, true].map(|write| Message::Fault {
                address: 0x7000_0000_1000,
                write,
                cause,
                thread: 7,
            }));
        }
        for message in messages {
            assert_eq!(RawMessage::from(message).decode(), Some(message));
        }
    }
}
