//! Guest memory that somebody else keeps within a budget while we use it, too: a *view* of managed memory.
//!
//! `larder memory` takes pages of a VM out of memory, and brings them back when they are touched. Faults in this process
//! are seen by it as those of QEMU are: it makes a userfaultfd here (by ptrace) and registers our mappings of the
//! guest's memory, so that a request that touches a page that is not there waits for it. Three things of it are ours:
//!
//! - **No byte of a mapping is touched before it is registered.** Whether memory is managed is told by a lock on its
//!   file, which QEMU holds for the pager ([`is_managed`]); so it is known also while no pager lives. A session that
//!   has mapped such memory says so ([`View::wants`]) and waits.
//! - **What devices do to memory by themselves is waited for.** A request whose data goes past the page tables (direct
//!   I/O into pinned pages) is counted while it is under way ([`UnderWay`]). The pager stops writes to a page, waits
//!   until all requests of before are over, and only then copies it.
//! - What is said about it lies in a memfd, `larder-view`, which the pager takes by its name. It is bound to this process,
//!   as the mappings are.
//!
//! ```text
//! larder-view, 16 KiB, sealed against shrinking
//!      0  "LARDVIEW"          8  version, 4 bytes     12  one more than the userfaultfd's number here (the pager's), 4
//!     64  mappings were made, and wait (ours)         72  which of them are registered (the pager's)
//!    128  epoch, 0 or 1 (the pager's), 4 bytes
//!  4 KiB  64 slots of 128 bytes: requests under way that began in epoch 0, 8 bytes at 0; in epoch 1, at 64
//! ```
//!
//! # Requests of before
//! A request counts itself under the epoch that it sees, and looks again: if the epoch has changed meanwhile it begins
//! anew. So whoever changes the epoch, and then waits until nothing is under way in the one before, has waited for all
//! requests that had begun; those that begin later find writes stopped. (Sleepable RCU's grace periods: P. McKenney,
//! "Sleepable RCU", 2006.)

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// What the memfd is called, as /proc shows it.
pub const VIEW_NAME: &str = "larder-view";
const VIEW_C_NAME: &CStr = c"larder-view";

const MAGIC: u64 = u64::from_le_bytes(*b"LARDVIEW");
const VERSION: u32 = 1;
const BYTES: usize = 16 << 10;
const USERFAULTFD_AT: usize = 12;
const WANTED_AT: usize = 64;
const SERVED_AT: usize = 72;
const EPOCH_AT: usize = 128;
const SLOTS_AT: usize = 4 << 10;
const SLOT_BYTES: usize = 128;
const SLOTS: usize = 64;
const _: () = assert!(SLOTS_AT + SLOTS * SLOT_BYTES <= BYTES);

/// The byte of a memory's file that is locked while it is managed: far behind all that a file can have.
pub const MARK_AT: i64 = 0x4c41_5244_4552_0000;

/// The byte of a memory's file that is locked by the one user of userfaultfd(2) that may register the memory: a pager, or a
/// QEMU that receives a VM by post-copy. The kernel lets one userfaultfd register a page, and fails the other's registration
/// when it is too late to do without.
pub const FAULT_HANDLER_AT: i64 = MARK_AT + 1;

/// What is said in `larder-view`: ours, or that of another process.
pub struct ViewMemory {
    base: NonNull<u8>,
}

// SAFETY: reached by atomics alone; the mapping is changed by Drop only.
unsafe impl Send for ViewMemory {}
// SAFETY: as above.
unsafe impl Sync for ViewMemory {}

impl ViewMemory {
    /// That of another process, whose descriptor of it this is.
    ///
    /// # Errors
    /// It is no view, or of another version; or of mmap(2).
    pub fn open(descriptor: BorrowedFd<'_>) -> io::Result<Self> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        // Else its end could be cut off under us, which would be the end of this process.
        let seals = rustix::fs::fcntl_get_seals(descriptor)?;
        let bytes = rustix::fs::fstat(descriptor)?.st_size;
        if !seals.contains(SealFlags::SHRINK) || bytes != BYTES as i64 {
            return Err(invalid("it is not larder's"));
        }
        let memory = Self::map(descriptor)?;
        if memory.word(0).load(Ordering::Relaxed) != MAGIC {
            return Err(invalid("it does not begin as one of larder's"));
        }
        match memory.half_word(8).load(Ordering::Relaxed) {
            VERSION => Ok(memory),
            other => Err(invalid(&format!(
                "it has version {other}, this program knows version {VERSION}"
            ))),
        }
    }

    fn map(descriptor: BorrowedFd<'_>) -> io::Result<Self> {
        let how = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), BYTES, how, MapFlags::SHARED, descriptor, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= BYTES);
        // SAFETY: in the mapping, aligned, valid for any value, and only ever used as an atomic; it lives as long as self.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).as_ptr().cast()) }
    }

    fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= BYTES);
        // SAFETY: as of `word`.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).as_ptr().cast()) }
    }

    fn under_way(&self, slot: usize, epoch: u32) -> &AtomicU64 {
        self.word(SLOTS_AT + slot * SLOT_BYTES + (epoch & 1) as usize * (SLOT_BYTES / 2))
    }

    /// The number of the pager's userfaultfd in the process, once it is there.
    pub fn userfaultfd_number(&self) -> Option<u32> {
        self.half_word(USERFAULTFD_AT).load(Ordering::Acquire).checked_sub(1)
    }

    /// Notes [`Self::userfaultfd_number`], or that there is none any more.
    pub fn set_userfaultfd_number(&self, number: Option<u32>) {
        let stored = number.map_or(0, |number| number + 1);
        self.half_word(USERFAULTFD_AT).store(stored, Ordering::Release);
    }

    /// How often mappings were made that wait, and up to which of them none does.
    pub fn wanted_and_served(&self) -> (u64, u64) {
        let wanted = self.word(WANTED_AT).load(Ordering::SeqCst);
        (wanted, self.word(SERVED_AT).load(Ordering::Acquire))
    }

    /// All mappings that there were when `wanted` was read are registered.
    pub fn serve(&self, wanted: u64) {
        self.word(SERVED_AT).fetch_max(wanted, Ordering::Release);
    }

    /// Requests that begin from now on count in the other epoch; the one in which those of before do.
    pub fn change_epoch(&self) -> u32 {
        self.half_word(EPOCH_AT).fetch_xor(1, Ordering::SeqCst) & 1
    }

    /// Whether nothing is under way that began in this epoch.
    pub fn is_over(&self, epoch: u32) -> bool {
        (0..SLOTS).all(|slot| self.under_way(slot, epoch).load(Ordering::SeqCst) == 0)
    }
}

impl Drop for ViewMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing that was lent of it outlives self.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), BYTES) };
    }
}

/// That of this process.
pub struct View {
    memory: ViewMemory,
    _descriptor: OwnedFd,
    next_slot: AtomicUsize,
}

impl View {
    /// The one of this process, made when it is first asked for.
    ///
    /// # Errors
    /// Of memfd_create(2), ftruncate(2), mmap(2).
    pub fn own() -> io::Result<&'static Self> {
        static OWN: OnceLock<Result<View, rustix::io::Errno>> = OnceLock::new();
        OWN.get_or_init(Self::create).as_ref().map_err(|errno| (*errno).into())
    }

    fn create() -> Result<Self, rustix::io::Errno> {
        let descriptor = rustix::fs::memfd_create(VIEW_C_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&descriptor, BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW)?;
        let memory = ViewMemory::map(descriptor.as_fd()).map_err(|_| rustix::io::Errno::NOMEM)?;
        memory.half_word(8).store(VERSION, Ordering::Relaxed);
        memory.word(0).store(MAGIC, Ordering::Release);
        Ok(Self {
            memory,
            _descriptor: descriptor,
            next_slot: AtomicUsize::new(0),
        })
    }

    /// Mappings were made that must be registered before they are touched: asks for it, and what [`Self::has`] is to be
    /// asked for.
    pub fn wants(&self, file: BorrowedFd<'_>) -> u64 {
        let wanted = self.memory.word(WANTED_AT).fetch_add(1, Ordering::SeqCst) + 1;
        // Whoever watches the file is told so at once. Where that is not allowed it is seen later.
        // SAFETY: no path and no times are passed: the file's own, and now.
        let rung = unsafe { libc::futimens(file.as_raw_fd(), std::ptr::null()) };
        if rung < 0 {
            tracing::debug!("guest memory cannot be touched: {}", io::Error::last_os_error());
        }
        wanted
    }

    /// Whether they are registered.
    pub fn has(&self, wanted: u64) -> bool {
        self.memory.wanted_and_served().1 >= wanted
    }

    /// A count of requests under way, for one thread. (More threads than slots share them.)
    pub fn under_way(&'static self) -> UnderWay {
        UnderWay {
            view: self,
            slot: self.next_slot.fetch_add(1, Ordering::Relaxed) % SLOTS,
        }
    }
}

/// Counts requests that are under way.
pub struct UnderWay {
    view: &'static View,
    slot: usize,
}

/// A request that is under way, to be ended once.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Begun(u32);

impl UnderWay {
    /// One begins: from here on it may touch guest memory.
    pub fn begin(&self) -> Begun {
        let memory = &self.view.memory;
        let epoch = memory.half_word(EPOCH_AT);
        loop {
            let now = epoch.load(Ordering::SeqCst);
            let count = memory.under_way(self.slot, now);
            count.fetch_add(1, Ordering::SeqCst);
            if epoch.load(Ordering::SeqCst) == now {
                return Begun(now);
            }
            count.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// It is over: nothing of it touches guest memory any more.
    pub fn end(&self, begun: Begun) {
        self.view
            .memory
            .under_way(self.slot, begun.0)
            .fetch_sub(1, Ordering::SeqCst);
    }
}

fn byte_lock(at: i64) -> libc::flock {
    // SAFETY: integers, of which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = at;
    lock.l_len = 1;
    lock
}

/// Whether the memory in `file` is managed: pages of it may not be there.
///
/// # Errors
/// Of fcntl(2).
pub fn is_managed(file: BorrowedFd<'_>) -> io::Result<bool> {
    let mut lock = byte_lock(MARK_AT);
    // SAFETY: the structure that this command takes, alive and writable for the call.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, std::ptr::from_mut(&mut lock)) };
    if asked < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

/// Says that the memory in `file` is managed, as long as that open file (not this descriptor alone) is; whether nobody
/// else has said so. It must be open for writing, and not have been opened by whoever asks.
///
/// # Errors
/// Of fcntl(2).
pub fn mark_managed(file: BorrowedFd<'_>) -> io::Result<bool> {
    try_lock(file, MARK_AT)
}

/// Claims the faults of the memory in `file` ([`FAULT_HANDLER_AT`]), as long as that open file (not this descriptor alone)
/// exists; false if another open file has claimed them. It must be open for writing.
///
/// # Errors
/// Of fcntl(2).
pub fn claim_faults(file: BorrowedFd<'_>) -> io::Result<bool> {
    try_lock(file, FAULT_HANDLER_AT)
}

fn try_lock(file: BorrowedFd<'_>, at: i64) -> io::Result<bool> {
    let lock = byte_lock(at);
    // SAFETY: the structure that this command takes, alive for the call.
    let locked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, std::ptr::from_ref(&lock)) };
    if locked == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_before_are_waited_for_and_those_of_later_are_not() {
        let view = View::own().expect("memory");
        let (one, other) = (view.under_way(), view.under_way());
        let theirs = ViewMemory::open(view._descriptor.as_fd()).expect("a view");
        let before = [one.begin(), one.begin(), other.begin()];
        let epoch = theirs.change_epoch();
        let later = one.begin();
        for (index, begun) in before.into_iter().enumerate() {
            assert!(!theirs.is_over(epoch), "{index}");
            if index < 2 {
                one.end(begun)
            } else {
                other.end(begun)
            };
        }
        assert!(theirs.is_over(epoch));
        let epoch = theirs.change_epoch();
        assert!(!theirs.is_over(epoch));
        one.end(later);
        assert!(theirs.is_over(epoch));
    }

    #[test]
    fn memory_is_marked_as_long_as_whoever_marked_it_has_it_open() {
        let ours = rustix::fs::memfd_create(c"guest", MemfdFlags::CLOEXEC).expect("memory");
        let open = || {
            let path = format!("/proc/self/fd/{}", ours.as_raw_fd());
            std::fs::File::options()
                .read(true)
                .write(true)
                .open(path)
                .expect("it is there")
        };
        assert!(!is_managed(ours.as_fd()).expect("asked"));
        let pager = open();
        assert!(mark_managed(pager.as_fd()).expect("marked"));
        assert!(is_managed(ours.as_fd()).expect("asked"));
        assert!(!mark_managed(open().as_fd()).expect("asked"), "there is one already");
        // QEMU has it, too.
        let qemus = pager.try_clone().expect("a descriptor");
        drop(pager);
        assert!(is_managed(ours.as_fd()).expect("asked"));
        drop(qemus);
        assert!(!is_managed(ours.as_fd()).expect("asked"));
    }

    #[test]
    fn what_is_no_view_is_refused() {
        let memory = rustix::fs::memfd_create(c"x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
        rustix::fs::ftruncate(&memory, BYTES as u64).expect("room");
        assert!(ViewMemory::open(memory.as_fd()).is_err(), "it can be cut off");
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK).expect("sealed");
        assert!(ViewMemory::open(memory.as_fd()).is_err(), "zeros");
    }
}
