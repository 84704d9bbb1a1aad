//! Guest memory that a pager manages while this process maps it, too: an external mapping of managed memory.
//!
//! `larder memory` evicts pages of a VM, and pages them in when they are touched. It handles faults in this process
//! as it handles QEMU's: it creates a userfaultfd here (by ptrace) and registers this process's mappings of the
//! guest's memory, so that a request that touches a missing page waits for it. This process has three duties:
//!
//! - **No byte of a mapping is touched before it is registered.** A lock on the memory's file, which QEMU holds on
//!   behalf of the pager, shows whether the memory is managed ([`is_managed`]), even while no pager runs. A session
//!   that has mapped such memory announces it ([`PagerClient::request_registration`]) and waits.
//! - **Device accesses that bypass the page tables are counted.** A request whose data is transferred by direct I/O
//!   into pinned pages is counted while it is in flight ([`InFlightCounter`]). The pager write-protects a page, waits
//!   until all earlier requests have ended, and only then copies it.
//! - **The shared state is in a memfd**, `larder-view`, which the pager finds by its name. It is bound to this
//!   process, as the mappings are.
//!
//! ```text
//! larder-view, 16 KiB, sealed against shrinking
//!      0  "LARDVIEW"
//!      8  version, 4 bytes
//!     12  number of the pager's userfaultfd in this process plus 1, 4 bytes (set by the pager)
//!     64  count of mapping requests, 8 bytes (set by this process)
//!     72  count up to which mappings are registered, 8 bytes (set by the pager)
//!    128  epoch, 0 or 1, 4 bytes (set by the pager)
//!  4 KiB  64 slots of 128 bytes: requests in flight that began in epoch 0, 8 bytes at 0; in epoch 1, at 64
//! ```
//!
//! # Waiting for earlier requests
//! A request counts itself under the epoch that it reads, and rereads the epoch: if it has changed, the request
//! starts over. A pager that changes the epoch, and then waits until no request of the previous epoch is in flight,
//! has therefore waited for all requests that had begun. Requests that begin later find the page write-protected.
//! (Grace periods of sleepable RCU: P. McKenney, "Sleepable RCU", 2006.)

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Name of the memfd, as /proc shows it.
pub const MEMFD_NAME: &str = "larder-view";
const MEMFD_C_NAME: &CStr = c"larder-view";

const MAGIC: u64 = u64::from_le_bytes(*b"LARDVIEW");
const VERSION: u32 = 1;
const STATE_BYTES: usize = 16 << 10;
const USERFAULTFD_OFFSET: usize = 12;
const REQUESTED_OFFSET: usize = 64;
const REGISTERED_OFFSET: usize = 72;
const EPOCH_OFFSET: usize = 128;
const SLOTS_OFFSET: usize = 4 << 10;
const SLOT_BYTES: usize = 128;
const SLOTS: usize = 64;
const _: () = assert!(SLOTS_OFFSET + SLOTS * SLOT_BYTES <= STATE_BYTES);

/// Byte of a memory's file that is locked while the memory is managed; far past the end of any file.
pub const MANAGED_LOCK_OFFSET: i64 = 0x4c41_5244_4552_0000;

/// Byte of a memory's file that is locked by the one user of userfaultfd(2) that may register the memory: a pager, or
/// a QEMU that receives a VM by post-copy. The kernel lets only one userfaultfd register a page. A second
/// registration would fail at a point where its owner cannot continue without it.
pub const FAULT_LOCK_OFFSET: i64 = MANAGED_LOCK_OFFSET + 1;

/// Mapping of a `larder-view` memfd, of this process or of another one.
pub struct ExternalMappingState {
    base: NonNull<u8>,
}

// SAFETY: the memory is accessed only through atomics, and only Drop unmaps it.
unsafe impl Send for ExternalMappingState {}
// SAFETY: the reason for `Send` holds for shared access, too.
unsafe impl Sync for ExternalMappingState {}

impl ExternalMappingState {
    /// Maps the memfd of another process, given a descriptor of it.
    ///
    /// # Errors
    /// The file is not a view, or has another version; or mmap(2) failed.
    pub fn open(descriptor: BorrowedFd<'_>) -> io::Result<Self> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        // Without this seal the other process could truncate the file, and an access would kill this process.
        let seals = rustix::fs::fcntl_get_seals(descriptor)?;
        let bytes = rustix::fs::fstat(descriptor)?.st_size;
        if !seals.contains(SealFlags::SHRINK) || bytes != STATE_BYTES as i64 {
            return Err(invalid("it is not a memfd of a Larder disk server"));
        }
        let memory = Self::map(descriptor)?;
        if memory.word(0).load(Ordering::Relaxed) != MAGIC {
            return Err(invalid("it does not begin with the magic number"));
        }
        match memory.half_word(8).load(Ordering::Relaxed) {
            VERSION => Ok(memory),
            other => Err(invalid(&format!("it has version {other}; this program supports version {VERSION}"))),
        }
    }

    fn map(descriptor: BorrowedFd<'_>) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), STATE_BYTES, protection, MapFlags::SHARED, descriptor, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= STATE_BYTES);
        // SAFETY: the word is in the mapping and aligned, any value is valid, and it is only accessed atomically; the
        // mapping lives as long as self.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).as_ptr().cast()) }
    }

    fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= STATE_BYTES);
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(self.base.add(offset).as_ptr().cast()) }
    }

    fn in_flight(&self, slot: usize, epoch: u32) -> &AtomicU64 {
        self.word(SLOTS_OFFSET + slot * SLOT_BYTES + (epoch & 1) as usize * (SLOT_BYTES / 2))
    }

    /// Returns the number of the pager's userfaultfd in the process, once it exists.
    pub fn userfaultfd_number(&self) -> Option<u32> {
        self.half_word(USERFAULTFD_OFFSET).load(Ordering::Acquire).checked_sub(1)
    }

    /// Stores the number that [`Self::userfaultfd_number`] returns; `None` if there is no userfaultfd any more.
    pub fn set_userfaultfd_number(&self, number: Option<u32>) {
        let stored = number.map_or(0, |number| number + 1);
        self.half_word(USERFAULTFD_OFFSET).store(stored, Ordering::Release);
    }

    /// Returns the count of mapping requests, and the count up to which mappings are registered.
    pub fn requested_and_registered(&self) -> (u64, u64) {
        let requested = self.word(REQUESTED_OFFSET).load(Ordering::SeqCst);
        (requested, self.word(REGISTERED_OFFSET).load(Ordering::Acquire))
    }

    /// Records that all mappings that existed when `requested` was read are registered.
    pub fn set_registered(&self, requested: u64) {
        self.word(REGISTERED_OFFSET).fetch_max(requested, Ordering::Release);
    }

    /// Switches the epoch for requests that begin from now on, and returns the epoch of the earlier requests.
    pub fn next_epoch(&self) -> u32 {
        self.half_word(EPOCH_OFFSET).fetch_xor(1, Ordering::SeqCst) & 1
    }

    /// Returns whether no request that began in this epoch is in flight.
    pub fn is_drained(&self, epoch: u32) -> bool {
        (0..SLOTS).all(|slot| self.in_flight(slot, epoch).load(Ordering::SeqCst) == 0)
    }
}

impl Drop for ExternalMappingState {
    fn drop(&mut self) {
        // SAFETY: the mapping is owned by self, and no reference into it outlives self.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), STATE_BYTES) };
    }
}

/// View of this process, which other processes can open.
pub struct PagerClient {
    memory: ExternalMappingState,
    _descriptor: OwnedFd,
    next_slot: AtomicUsize,
}

impl PagerClient {
    /// Returns the view of this process, which is created by the first call.
    ///
    /// # Errors
    /// memfd_create(2), ftruncate(2) or mmap(2) failed.
    pub fn instance() -> io::Result<&'static Self> {
        static INSTANCE: OnceLock<Result<PagerClient, rustix::io::Errno>> = OnceLock::new();
        INSTANCE.get_or_init(Self::create).as_ref().map_err(|errno| (*errno).into())
    }

    fn create() -> Result<Self, rustix::io::Errno> {
        let descriptor = rustix::fs::memfd_create(MEMFD_C_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&descriptor, STATE_BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW)?;
        let memory = ExternalMappingState::map(descriptor.as_fd()).map_err(|_| rustix::io::Errno::NOMEM)?;
        memory.half_word(8).store(VERSION, Ordering::Relaxed);
        memory.word(0).store(MAGIC, Ordering::Release);
        Ok(Self { memory, _descriptor: descriptor, next_slot: AtomicUsize::new(0) })
    }

    /// Requests the registration of new mappings, which must not be touched before; returns the argument for
    /// [`Self::is_registered`].
    pub fn request_registration(&self, file: BorrowedFd<'_>) -> u64 {
        let requested = self.memory.word(REQUESTED_OFFSET).fetch_add(1, Ordering::SeqCst) + 1;
        // The change of the file's times notifies the pager, which watches the file. Where that is not permitted the
        // pager notices the request later.
        // SAFETY: a null pointer for the times means the present time, and no path is passed.
        let touched = unsafe { libc::futimens(file.as_raw_fd(), std::ptr::null()) };
        if touched < 0 {
            tracing::debug!(
                "cannot notify the pager by the times of the guest memory's file: {}",
                io::Error::last_os_error()
            );
        }
        requested
    }

    /// Returns whether the mappings of a request are registered.
    pub fn is_registered(&self, requested: u64) -> bool {
        self.memory.requested_and_registered().1 >= requested
    }

    /// Returns a counter of requests in flight, for one thread. (Threads beyond the number of slots share them.)
    pub fn request_counter(&'static self) -> InFlightCounter {
        InFlightCounter { client: self, slot: self.next_slot.fetch_add(1, Ordering::Relaxed) % SLOTS }
    }
}

/// Counter of requests in flight.
pub struct InFlightCounter {
    client: &'static PagerClient,
    slot: usize,
}

/// Token of a request in flight, to be passed to [`InFlightCounter::end_request`] once.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct InFlightToken(u32);

impl InFlightCounter {
    /// Begins a request, which may touch guest memory from now on.
    pub fn begin_request(&self) -> InFlightToken {
        let memory = &self.client.memory;
        let epoch = memory.half_word(EPOCH_OFFSET);
        loop {
            let now = epoch.load(Ordering::SeqCst);
            let count = memory.in_flight(self.slot, now);
            count.fetch_add(1, Ordering::SeqCst);
            if epoch.load(Ordering::SeqCst) == now {
                return InFlightToken(now);
            }
            count.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Ends a request, which no longer touches guest memory.
    pub fn end_request(&self, token: InFlightToken) {
        self.client.memory.in_flight(self.slot, token.0).fetch_sub(1, Ordering::SeqCst);
    }
}

fn byte_lock(at: i64) -> libc::flock {
    // SAFETY: the structure consists of integers, for which zero is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = at;
    lock.l_len = 1;
    lock
}

/// Returns whether the memory in `file` is managed, so that pages of it may be missing.
///
/// # Errors
/// fcntl(2) failed.
pub fn is_managed(file: BorrowedFd<'_>) -> io::Result<bool> {
    let mut lock = byte_lock(MANAGED_LOCK_OFFSET);
    // SAFETY: the pointer is to the structure that this command expects, alive and writable for the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, std::ptr::from_mut(&mut lock)) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

/// Marks the memory in `file` as managed, for as long as that open file description (not this descriptor alone)
/// exists. Returns false if another one has marked it. The file must be open for writing, and through another open
/// file description than the one that is queried.
///
/// # Errors
/// fcntl(2) failed.
pub fn mark_managed(file: BorrowedFd<'_>) -> io::Result<bool> {
    try_lock(file, MANAGED_LOCK_OFFSET)
}

/// Claims the faults of the memory in `file` ([`FAULT_LOCK_OFFSET`]), for as long as that open file description (not
/// this descriptor alone) exists; returns false if another one has claimed them. The file must be open for writing.
///
/// # Errors
/// fcntl(2) failed.
pub fn claim_faults(file: BorrowedFd<'_>) -> io::Result<bool> {
    try_lock(file, FAULT_LOCK_OFFSET)
}

fn try_lock(file: BorrowedFd<'_>, at: i64) -> io::Result<bool> {
    let lock = byte_lock(at);
    // SAFETY: the pointer is to the structure that this command expects, alive for the call.
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

    /// A change of the epoch waits for requests that began before it, and not for later ones.
    #[test]
    fn epoch_waits_for_earlier_requests_only() {
        let client = PagerClient::instance().expect("memory");
        let (one, other) = (client.request_counter(), client.request_counter());
        let state = ExternalMappingState::open(client._descriptor.as_fd()).expect("a view");
        let before = [one.begin_request(), one.begin_request(), other.begin_request()];
        let epoch = state.next_epoch();
        let later = one.begin_request();
        for (index, token) in before.into_iter().enumerate() {
            assert!(!state.is_drained(epoch), "{index}");
            if index < 2 {
                one.end_request(token)
            } else {
                other.end_request(token)
            };
        }
        assert!(state.is_drained(epoch));
        let epoch = state.next_epoch();
        assert!(!state.is_drained(epoch));
        one.end_request(later);
        assert!(state.is_drained(epoch));
    }

    /// Memory stays marked while any descriptor of the marking open file exists.
    #[test]
    fn managed_lock_lives_with_open_file() {
        let guest = rustix::fs::memfd_create(c"guest", MemfdFlags::CLOEXEC).expect("memory");
        let open = || {
            let path = format!("/proc/self/fd/{}", guest.as_raw_fd());
            std::fs::File::options().read(true).write(true).open(path).expect("the file opens")
        };
        assert!(!is_managed(guest.as_fd()).expect("asked"));
        let pager = open();
        assert!(mark_managed(pager.as_fd()).expect("marked"));
        assert!(is_managed(guest.as_fd()).expect("asked"));
        assert!(!mark_managed(open().as_fd()).expect("asked"), "it is managed already");
        // QEMU holds a descriptor of the same open file.
        let duplicate = pager.try_clone().expect("a descriptor");
        drop(pager);
        assert!(is_managed(guest.as_fd()).expect("asked"));
        drop(duplicate);
        assert!(!is_managed(guest.as_fd()).expect("asked"));
    }

    #[test]
    fn file_without_state_is_refused() {
        let memory = rustix::fs::memfd_create(c"x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
        rustix::fs::ftruncate(&memory, STATE_BYTES as u64).expect("room");
        assert!(ExternalMappingState::open(memory.as_fd()).is_err(), "it can be truncated");
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK).expect("sealed");
        assert!(ExternalMappingState::open(memory.as_fd()).is_err(), "zeros");
    }
}
