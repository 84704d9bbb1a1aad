//! Library for `LD_PRELOAD` that gives a program its memory from one shared memfd, as QEMU gives a guest its RAM. A
//! pager can then manage the memory from outside, and the kernel's swap handles the same pages.
//!
//! `LARDER_BENCH_RAM` is the size of the memfd, in bytes. The memfd is named `larder-bench-ram`, and mapped once,
//! readable and writable; that mapping is never split, moved or protected. Private anonymous memory of 64 KiB and
//! more that the program maps is allocated from it by [`ranges`]. Memory that the program unmaps, or marks as not
//! needed with `madvise`, is discarded as QEMU discards the memory of a balloon: a hole is punched into the memfd,
//! and then the mapping is discarded, too. Holes read as zeros, which the program expects of new memory.
//!
//! Other memory stays outside: mappings of the C library itself (`malloc`, thread stacks), files, smaller mappings,
//! and all mappings for which no space is left. Protection is not implemented: memory that is mapped without access
//! can be accessed.
//!
//! If a hole cannot be punched, the program is aborted, because later reads would return wrong data. An access to
//! this memory after a fork kills the child: children do not inherit the mapping, because they would write to their
//! parent's memory.

mod ranges;

use std::ffi::{c_int, c_long, c_void};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ranges::FreeRanges;

const PAGE_BYTES: usize = 4096;
const ALLOCATION_BYTES_MIN: usize = 64 << 10;
/// Alignment of the mapping, which makes huge pages possible.
const ALIGNMENT: usize = 2 << 20;

static RAM: OnceLock<Option<Ram>> = OnceLock::new();

/// The memfd, and its mapping.
struct Ram {
    fd: c_int,
    start: usize,
    end: usize,
    ranges: Mutex<FreeRanges>,
}

impl Ram {
    fn get() -> Option<&'static Self> {
        RAM.get_or_init(|| {
            let size = std::env::var("LARDER_BENCH_RAM").ok()?;
            match size.parse::<usize>() {
                Ok(size) if size > 0 && size.is_multiple_of(ALIGNMENT) => Some(Self::new(size)),
                _ => fatal("LARDER_BENCH_RAM must be a positive multiple of 2 MiB, in bytes"),
            }
        })
        .as_ref()
    }

    fn new(size: usize) -> Self {
        // SAFETY: a valid C string, and no pointers that the kernel retains.
        let fd = unsafe { libc::memfd_create(c"larder-bench-ram".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: the descriptor belongs to this function.
        if fd < 0 || unsafe { libc::ftruncate(fd, size as libc::off_t) } != 0 {
            fatal("cannot create a memfd of this size");
        }
        // SAFETY: a mapping without access at an address that the kernel chooses affects no existing memory.
        let reservation = unsafe {
            kernel_mmap(
                0,
                size + ALIGNMENT,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reservation == libc::MAP_FAILED as usize {
            fatal("cannot reserve address space for the memfd");
        }
        let start = reservation.next_multiple_of(ALIGNMENT);
        // SAFETY: it replaces a part of the mapping above, which no other code knows.
        let mapped = unsafe {
            kernel_mmap(
                start,
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED,
                fd,
                0,
            )
        };
        if mapped != start {
            fatal("cannot map the memfd");
        }
        // SAFETY: the range is the mapping above; the call does not change its contents.
        if unsafe { libc::syscall(libc::SYS_madvise, start, size, libc::MADV_DONTFORK) } != 0 {
            fatal("cannot exclude the memfd's mapping from child processes");
        }
        Self { fd, start, end: start + size, ranges: Mutex::new(FreeRanges::new(size)) }
    }

    fn ranges(&self) -> MutexGuard<'_, FreeRanges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn overlap(&self, addr: usize, len: usize) -> Overlap {
        let end = addr.saturating_add(pages(len));
        if end <= self.start || self.end <= addr {
            Overlap::Outside
        } else if self.start <= addr && end <= self.end && addr.is_multiple_of(PAGE_BYTES) {
            Overlap::Inside(addr - self.start..end - self.start)
        } else {
            Overlap::Partial
        }
    }

    /// Allocates `len` bytes of zeros, at `hint` if that is free.
    fn allocate(&self, hint: usize, len: usize) -> Option<usize> {
        let mut ranges = self.ranges();
        if let Overlap::Inside(range) = self.overlap(hint, len)
            && ranges.allocate_at(&range)
        {
            return Some(hint);
        }
        ranges.allocate(pages(len)).map(|offset| self.start + offset)
    }

    fn release(&self, range: Range<usize>) {
        // The range must be empty before another call can allocate it.
        self.discard(&range);
        self.ranges().release(range);
    }

    /// Discards the contents of a range, which reads as zeros afterwards.
    fn discard(&self, range: &Range<usize>) {
        let (offset, len) = (range.start as libc::off_t, range.len() as libc::off_t);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        loop {
            // SAFETY: the descriptor belongs to self, and no pointers are passed.
            if unsafe { libc::fallocate(self.fd, mode, offset, len) } == 0 {
                break;
            }
            if errno() != libc::EINTR {
                fatal("cannot punch a hole into the memfd");
            }
        }
        // This call notifies a userfaultfd. The memfd's contents are not affected, because the hole has none.
        // SAFETY: the range is a part of self's mapping, and the program has released it.
        let result =
            unsafe { libc::syscall(libc::SYS_madvise, self.start + range.start, range.len(), libc::MADV_DONTNEED) };
        if result != 0 {
            fatal("cannot discard a hole in the memfd's mapping");
        }
    }

    /// Implements `mremap` for memory of the memfd.
    ///
    /// # Safety
    /// `old` belongs to the program.
    unsafe fn resize(&self, old: Range<usize>, new_len: usize, may_move: bool) -> Option<usize> {
        let new_len = pages(new_len);
        let addr = self.start + old.start;
        if new_len <= old.len() {
            if new_len < old.len() {
                self.release(old.start + new_len..old.end);
            }
            return Some(addr);
        }
        if self.ranges().allocate_at(&(old.end..old.start + new_len)) {
            return Some(addr);
        }
        let new = may_move.then(|| self.allocate(0, new_len)).flatten()?;
        // SAFETY: both ranges are mapped and do not overlap, because the new one was free.
        unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, new as *mut u8, old.len()) };
        self.release(old);
        Some(new)
    }
}

/// Part of an address range that lies in the memfd's mapping.
enum Overlap {
    Outside,
    /// The whole range, as offsets in the memfd.
    Inside(Range<usize>),
    /// Only a part of the range, or addresses within pages; not supported.
    Partial,
}

fn pages(len: usize) -> usize {
    len.checked_next_multiple_of(PAGE_BYTES).unwrap_or(len)
}

fn errno() -> c_int {
    // SAFETY: errno is this thread's own.
    unsafe { *libc::__errno_location() }
}

fn set_errno(errno: c_int) -> c_int {
    // SAFETY: errno is this thread's own.
    unsafe { *libc::__errno_location() = errno };
    -1
}

fn mmap_error(errno: c_int) -> *mut c_void {
    set_errno(errno);
    libc::MAP_FAILED
}

fn fatal(what: &str) -> ! {
    eprintln!("larder-bench-preload: {what}: {}", std::io::Error::last_os_error());
    std::process::abort()
}

/// Calls the kernel's `mmap`.
///
/// # Safety
/// As for `mmap`.
unsafe fn kernel_mmap(addr: usize, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: libc::off_t) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) as usize }
}

/// Replaces the C library's `mmap`.
///
/// # Safety
/// As for `mmap`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let anonymous = flags & libc::MAP_ANONYMOUS != 0;
    if let Some(ram) = Ram::get() {
        if flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
            match ram.overlap(addr as usize, len) {
                Overlap::Outside => {}
                Overlap::Inside(range) if anonymous => {
                    if flags & libc::MAP_FIXED_NOREPLACE != 0 {
                        return if ram.ranges().allocate_at(&range) { addr } else { mmap_error(libc::EEXIST) };
                    }
                    // The range may be free or in use; in either case it becomes new memory.
                    ram.discard(&range);
                    let mut ranges = ram.ranges();
                    ranges.release(range.clone());
                    ranges.allocate_at(&range);
                    return addr;
                }
                _ => return mmap_error(libc::EINVAL),
            }
        } else {
            let excluded_flags = libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB;
            let private = flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
            if anonymous
                && private
                && flags & excluded_flags == 0
                && prot & libc::PROT_EXEC == 0
                && len >= ALLOCATION_BYTES_MIN
                && let Some(addr) = ram.allocate(addr as usize, len)
            {
                return addr as *mut c_void;
            }
        }
    }
    // SAFETY: the caller guarantees it.
    unsafe { kernel_mmap(addr as usize, len, prot, flags, fd, offset) as *mut c_void }
}

/// Replaces the C library's `mmap64`, which is another name for [`mmap`].
///
/// # Safety
/// As for `mmap`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: the caller guarantees it.
    unsafe { mmap(addr, len, prot, flags, fd, offset) }
}

/// Calls `ours` for addresses in the memfd's mapping, and `kernel` for others.
fn managed_or_kernel(
    addr: *mut c_void,
    len: usize,
    on_managed: impl FnOnce(&Ram, Range<usize>),
    on_other: impl FnOnce() -> c_long,
) -> c_int {
    match Ram::get().map(|ram| (ram, ram.overlap(addr as usize, len))) {
        Some((ram, Overlap::Inside(range))) => {
            if !range.is_empty() {
                on_managed(ram, range);
            }
            0
        }
        Some((_, Overlap::Partial)) => set_errno(libc::EINVAL),
        _ => on_other() as c_int,
    }
}

/// Replaces the C library's `munmap`.
///
/// # Safety
/// As for `munmap`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller guarantees it.
    managed_or_kernel(addr, len, Ram::release, || unsafe { libc::syscall(libc::SYS_munmap, addr, len) })
}

/// Replaces the C library's `mprotect`; memory of the memfd stays readable and writable.
///
/// # Safety
/// As for `mprotect`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    // SAFETY: the caller guarantees it.
    managed_or_kernel(addr, len, |_, _| {}, || unsafe { libc::syscall(libc::SYS_mprotect, addr, len, prot) })
}

/// Replaces the C library's `madvise`; for memory of the memfd, only advice that discards it has an effect.
///
/// # Safety
/// As for `madvise`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    let discard_if_advised = |ram: &Ram, range: Range<usize>| {
        if matches!(advice, libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_REMOVE) {
            ram.discard(&range);
        }
    };
    // SAFETY: the caller guarantees it.
    managed_or_kernel(addr, len, discard_if_advised, || unsafe { libc::syscall(libc::SYS_madvise, addr, len, advice) })
}

/// Replaces the C library's `posix_madvise`, and does nothing.
///
/// # Safety
/// There are no requirements.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_madvise(_addr: *mut c_void, _len: usize, _advice: c_int) -> c_int {
    0
}

/// Replaces the C library's `mremap`. The last argument is optional there; on the supported CPUs a missing one is an
/// argument with an undefined value, which is not used.
///
/// # Safety
/// As for `mremap`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mremap(
    addr: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    new_addr: *mut c_void,
) -> *mut c_void {
    match Ram::get().map(|ram| (ram, ram.overlap(addr as usize, old_len))) {
        Some((ram, Overlap::Inside(range))) if new_len > 0 && flags & !libc::MREMAP_MAYMOVE == 0 => {
            // SAFETY: the caller guarantees it.
            match unsafe { ram.resize(range, new_len, flags & libc::MREMAP_MAYMOVE != 0) } {
                Some(addr) => addr as *mut c_void,
                None => mmap_error(libc::ENOMEM),
            }
        }
        Some((_, Overlap::Inside(_) | Overlap::Partial)) => mmap_error(libc::EINVAL),
        // SAFETY: the caller guarantees it.
        _ => unsafe { libc::syscall(libc::SYS_mremap, addr, old_len, new_len, flags, new_addr) as *mut c_void },
    }
}
