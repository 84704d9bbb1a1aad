//! Protection against mapped files that another process truncates.
//!
//! An access past the end of a mapped file raises SIGBUS, which would kill this process, and with it every disk of
//! the VM. The same happens for a page with a memory error, and for a huge page that the host cannot provide.
//! [`handle_sigbus`] replaces the affected mapping by anonymous memory, so that the access continues with zeros, and
//! marks the mapping as lost. Users of a mapping call [`Mapping::check`](super::Mapping::check) before they act on
//! data read from it, or acknowledge data written to it.
//!
//! The handler may run in any thread, between any two instructions: it only accesses atomics, and calls mmap(2).

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Largest number of guarded mappings of a process: those of 32 disks with the most regions.
const MAPPINGS_MAX: usize = 16 * 1024;

/// Guarded mapping; `bytes` is 0 in a free slot.
#[derive(Debug)]
struct Slot {
    /// Version, odd while the other fields are being changed.
    version: AtomicUsize,
    start: AtomicUsize,
    bytes: AtomicUsize,
    /// `si_code` of the SIGBUS by which the mapping was lost; 0 if it was not.
    lost: AtomicI32,
}

static SLOTS: [Slot; MAPPINGS_MAX] = [const {
    Slot {
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
        lost: AtomicI32::new(0),
    }
}; MAPPINGS_MAX];

/// Value of `start` in a slot that is being set; no page begins at this address.
const RESERVED: usize = 1;

/// Number of slots that were ever used; all later ones are free.
static SLOTS_USED: AtomicUsize = AtomicUsize::new(0);

/// Number of lost mappings that are not unmapped yet.
static LOST_MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// Reason why a mapping was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum LossReason {
    #[error(
        "the front-end has truncated its file while it was mapped, or there is no memory for the file: no free huge pages, \
         or its tmpfs is full"
    )]
    Truncated,
    #[error("a page of it has a memory error")]
    MemoryError,
}

impl Slot {
    /// Changes the slot so that [`Slot::range`] never sees it half changed.
    fn set(&self, start: usize, bytes: usize) {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.start.store(start, Ordering::Release);
        self.bytes.store(bytes, Ordering::Release);
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the start and length of the mapping; `None` while the slot is being changed, when the mapping is not
    /// in use.
    fn range(&self) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::Acquire);
        let range = (self.start.load(Ordering::Acquire), self.bytes.load(Ordering::Acquire));
        (version.is_multiple_of(2) && self.version.load(Ordering::Acquire) == version).then_some(range)
    }
}

/// Guard of a mapping, active until it is dropped.
#[derive(Debug)]
pub(super) struct Guard(&'static Slot);

impl Guard {
    /// Guards `bytes` bytes from `start` on, which the caller has mapped, and keeps mapped until it has dropped the
    /// guard.
    ///
    /// # Errors
    /// There are too many guarded mappings, or the handler cannot be installed.
    pub(super) fn new(start: NonNull<u8>, bytes: usize) -> io::Result<Self> {
        install_handler()?;
        let is_free = |slot: &Slot| {
            let claimed = slot.start.compare_exchange(0, RESERVED, Ordering::AcqRel, Ordering::Relaxed);
            claimed.is_ok()
        };
        let index = SLOTS.iter().position(is_free);
        let index = index.ok_or_else(|| io::Error::other(format!("at most {MAPPINGS_MAX} mappings can be guarded")))?;
        SLOTS_USED.fetch_max(index + 1, Ordering::AcqRel);
        let slot = &SLOTS[index];
        slot.lost.store(0, Ordering::Relaxed);
        slot.set(start.as_ptr().addr(), bytes);
        Ok(Self(slot))
    }

    /// Returns the reason why the mapping was lost, if it was.
    pub(super) fn loss_reason(&self) -> Option<LossReason> {
        match self.0.lost.load(Ordering::Acquire) {
            0 => None,
            libc::BUS_MCEERR_AR | libc::BUS_MCEERR_AO => Some(LossReason::MemoryError),
            _ => Some(LossReason::Truncated),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.set(RESERVED, 0);
        if self.0.lost.load(Ordering::Acquire) != 0 {
            LOST_MAPPINGS.fetch_sub(1, Ordering::AcqRel);
        }
        self.0.start.store(0, Ordering::Release);
    }
}

/// Returns whether any mapping of this process is lost; cheap enough for every request.
pub(crate) fn any_lost() -> bool {
    LOST_MAPPINGS.load(Ordering::Acquire) != 0
}

/// Installs the handler of SIGBUS, once in a process.
fn install_handler() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*installed {
        // SAFETY: a zeroed sigaction is valid, with an empty mask; the handler has the signature that SA_SIGINFO
        // requires, and its operations are safe between any two instructions.
        let done = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        *installed = true;
    }
    Ok(())
}

/// Maps anonymous memory over the guarded mapping that was accessed. A SIGBUS at another address, or one that a
/// process sent, ends the process as without a handler.
extern "C" fn handle_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo; a signal sent by kill(2) has a code of 0 or less, and no address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if code > 0 && replace_mapping(address, code) {
        return;
    }
    // The access is repeated, and the signal then has its default action. A signal that a process sent is raised
    // again.
    // SAFETY: both calls are async-signal-safe (signal-safety(7)).
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        if code <= 0 {
            libc::raise(signal);
        }
    }
}

/// Replaces the mapping that contains `address` by zeros; returns whether there is one.
fn replace_mapping(address: usize, code: i32) -> bool {
    let used = SLOTS_USED.load(Ordering::Acquire).min(MAPPINGS_MAX);
    let found = SLOTS[..used].iter().find_map(|slot| {
        let (start, bytes) = slot.range()?;
        (address.wrapping_sub(start) < bytes).then_some((slot, start, bytes))
    });
    let Some((slot, start, bytes)) = found else {
        return false;
    };
    // SAFETY: errno is the thread's own value, which may be read and written at any time.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the range is a mapping that a guard's owner made and keeps. It is only accessed by atomics and by
    // volatile and raw copies, as memory that other processes change must be.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::with_exposed_provenance_mut(start),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    // SAFETY: as for the read above.
    unsafe { *libc::__errno_location() = errno };
    if mapped == libc::MAP_FAILED {
        return false;
    }
    if slot.lost.swap(code, Ordering::AcqRel) == 0 {
        LOST_MAPPINGS.fetch_add(1, Ordering::AcqRel);
    }
    true
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::MemfdFlags;

    use super::super::Mapping;
    use super::*;

    fn file(bytes: u64) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("a file");
        rustix::fs::ftruncate(&file, bytes).expect("it grows");
        file
    }

    /// An access past the end of a truncated file reads zeros and marks only that mapping as lost.
    #[test]
    fn truncated_mapping_becomes_zeros_and_lost() {
        let (one, other) = (file(1 << 20), file(1 << 20));
        let lost = Mapping::new(&one, 0, 1 << 20, "a file").expect("mapped");
        let intact = Mapping::new(&other, 4096, 8192, "another file").expect("mapped");
        let byte = |mapping: &Mapping, at: usize| {
            // SAFETY: within the mapping.
            unsafe { mapping.base().add(at).read_volatile() }
        };
        // SAFETY: within the mapping.
        unsafe { lost.base().write_volatile(7) };
        assert_eq!((byte(&lost, 0), lost.check()), (7, Ok(())));
        rustix::fs::ftruncate(&one, 4096).expect("it shrinks");
        assert_eq!(lost.check(), Ok(()), "nothing was accessed");
        assert_eq!(byte(&lost, 4096), 0);
        let error = lost.check().expect_err("it is lost");
        assert_eq!((error.what, error.loss), ("a file", LossReason::Truncated));
        assert!(any_lost());
        assert_eq!((byte(&intact, 0), intact.check()), (0, Ok(())));
        drop(lost);
        assert!(!any_lost());
        let again = Mapping::new(&other, 0, 4096, "a file").expect("mapped");
        assert_eq!(again.check(), Ok(()), "a slot that is used again");
    }
}
