//! Loaded by `LD_PRELOAD`, gives a program its memory out of one shared memfd, as QEMU gives a guest its RAM: so a pager
//! can manage it from outside, and the kernel's swap has the same pages to deal with.
//!
//! `LARDER_BENCH_RAM` says how many bytes the memfd has. It is called `larder-bench-ram`, mapped once, readable and
//! writable, and that mapping is never split, moved or protected. Private anonymous memory of 64 KiB and more that the
//! program maps is a part of it, found by [`ranges`]; what it unmaps, or advises not to need, is discarded as QEMU
//! discards what a balloon has taken: a hole is punched into the memfd, and then the mapping is told. Holes read as
//! zeros, which is what the program expects of memory that is new.
//!
//! What stays outside: what the C library maps for itself (`malloc`, stacks of threads), files, smaller mappings, and
//! all for which there is no room left. Protection is not kept: memory that is mapped without access can be accessed.
//!
//! A hole that cannot be punched ends the program, since what it would read later would be wrong. So does touching this
//! memory after a fork: children do not have it, or they would write to their parent's.

mod ranges;

use std::ffi::{c_int, c_long, c_void};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ranges::Ranges;

const PAGE: usize = 4096;
const LEAST: usize = 64 << 10;
/// Where the mapping begins is a multiple of this: huge pages are possible.
const ALIGNMENT: usize = 2 << 20;

static RAM: OnceLock<Option<Ram>> = OnceLock::new();

/// The memfd, and where it is mapped.
struct Ram {
    fd: c_int,
    start: usize,
    end: usize,
    ranges: Mutex<Ranges>,
}

impl Ram {
    fn get() -> Option<&'static Self> {
        RAM.get_or_init(|| {
            let size = std::env::var("LARDER_BENCH_RAM").ok()?;
            match size.parse::<usize>() {
                Ok(size) if size > 0 && size.is_multiple_of(ALIGNMENT) => Some(Self::new(size)),
                _ => fatal("LARDER_BENCH_RAM is no multiple of 2 MiB in bytes"),
            }
        })
        .as_ref()
    }

    fn new(size: usize) -> Self {
        // SAFETY: a C string, and no pointers of which the kernel keeps any.
        let fd = unsafe { libc::memfd_create(c"larder-bench-ram".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: a descriptor of ours.
        if fd < 0 || unsafe { libc::ftruncate(fd, size as libc::off_t) } != 0 {
            fatal("no memfd of this size can be had");
        }
        // SAFETY: a mapping of no access, at an address that the kernel chooses, is nobody else's memory.
        let room = unsafe {
            kernel_mmap(
                0,
                size + ALIGNMENT,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if room == libc::MAP_FAILED as usize {
            fatal("there is no room for the memfd");
        }
        let start = room.next_multiple_of(ALIGNMENT);
        // SAFETY: it replaces a part of the mapping above, which nobody has seen.
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
            fatal("the memfd cannot be mapped");
        }
        // SAFETY: the mapping above; the call changes none of what is in it.
        if unsafe { libc::syscall(libc::SYS_madvise, start, size, libc::MADV_DONTFORK) } != 0 {
            fatal("the memfd would be shared with children");
        }
        Self {
            fd,
            start,
            end: start + size,
            ranges: Mutex::new(Ranges::new(size)),
        }
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn part(&self, addr: usize, len: usize) -> Part {
        let end = addr.saturating_add(pages(len));
        if end <= self.start || self.end <= addr {
            Part::None
        } else if self.start <= addr && end <= self.end && addr.is_multiple_of(PAGE) {
            Part::All(addr - self.start..end - self.start)
        } else {
            Part::Some
        }
    }

    /// Memory of `len` bytes, at `hint` if that is free; full of zeros.
    fn take(&self, hint: usize, len: usize) -> Option<usize> {
        let mut ranges = self.ranges();
        if let Part::All(range) = self.part(hint, len)
            && ranges.take_at(&range)
        {
            return Some(hint);
        }
        ranges.take(pages(len)).map(|offset| self.start + offset)
    }

    fn give(&self, range: Range<usize>) {
        // Nobody may be given it before it is empty.
        self.discard(&range);
        self.ranges().give(range);
    }

    /// Makes it zeros, without memory.
    fn discard(&self, range: &Range<usize>) {
        let (offset, len) = (range.start as libc::off_t, range.len() as libc::off_t);
        let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        loop {
            // SAFETY: a descriptor of ours, and no pointers.
            if unsafe { libc::fallocate(self.fd, how, offset, len) } == 0 {
                break;
            }
            if errno() != libc::EINTR {
                fatal("no hole can be punched into the memfd");
            }
        }
        // What tells a userfaultfd. The file keeps what else there is, which is nothing.
        // SAFETY: a part of our mapping; the program gave it up.
        let told = unsafe {
            libc::syscall(
                libc::SYS_madvise,
                self.start + range.start,
                range.len(),
                libc::MADV_DONTNEED,
            )
        };
        if told != 0 {
            fatal("the memfd's mapping cannot be told of a hole");
        }
    }

    /// `mremap` of memory of ours.
    ///
    /// # Safety
    /// `old` belongs to the program.
    unsafe fn resize(&self, old: Range<usize>, new_len: usize, may_move: bool) -> Option<usize> {
        let new_len = pages(new_len);
        let addr = self.start + old.start;
        if new_len <= old.len() {
            if new_len < old.len() {
                self.give(old.start + new_len..old.end);
            }
            return Some(addr);
        }
        if self.ranges().take_at(&(old.end..old.start + new_len)) {
            return Some(addr);
        }
        let new = may_move.then(|| self.take(0, new_len)).flatten()?;
        // SAFETY: both are mapped, and they do not overlap: the new one was free.
        unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, new as *mut u8, old.len()) };
        self.give(old);
        Some(new)
    }
}

/// What of a range of addresses is in the memfd's mapping.
enum Part {
    None,
    /// Offsets in it.
    All(Range<usize>),
    /// Its ends, or addresses within pages: for which there is no use.
    Some,
}

fn pages(len: usize) -> usize {
    len.checked_next_multiple_of(PAGE).unwrap_or(len)
}

fn errno() -> c_int {
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() }
}

fn failed(errno: c_int) -> c_int {
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() = errno };
    -1
}

fn map_failed(errno: c_int) -> *mut c_void {
    failed(errno);
    libc::MAP_FAILED
}

fn fatal(what: &str) -> ! {
    eprintln!("larder-bench-preload: {what}: {}", std::io::Error::last_os_error());
    std::process::abort()
}

/// # Safety
/// That of `mmap`.
unsafe fn kernel_mmap(addr: usize, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: libc::off_t) -> usize {
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) as usize }
}

/// The C library's, of which it takes the place.
///
/// # Safety
/// That of `mmap`.
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
            match ram.part(addr as usize, len) {
                Part::None => {}
                Part::All(range) if anonymous => {
                    if flags & libc::MAP_FIXED_NOREPLACE != 0 {
                        return if ram.ranges().take_at(&range) {
                            addr
                        } else {
                            map_failed(libc::EEXIST)
                        };
                    }
                    // New memory in the place of old, as it may be of free.
                    ram.discard(&range);
                    let mut ranges = ram.ranges();
                    ranges.give(range.clone());
                    ranges.take_at(&range);
                    return addr;
                }
                _ => return map_failed(libc::EINVAL),
            }
        } else {
            let other = libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB;
            let private = flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
            if anonymous
                && private
                && flags & other == 0
                && prot & libc::PROT_EXEC == 0
                && len >= LEAST
                && let Some(addr) = ram.take(addr as usize, len)
            {
                return addr as *mut c_void;
            }
        }
    }
    // SAFETY: the caller's.
    unsafe { kernel_mmap(addr as usize, len, prot, flags, fd, offset) as *mut c_void }
}

/// The C library's other name for [`mmap`].
///
/// # Safety
/// That of `mmap`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: the caller's.
    unsafe { mmap(addr, len, prot, flags, fd, offset) }
}

/// What a call does with addresses of ours, or the kernel's answer if they are none.
fn ours_or(
    addr: *mut c_void,
    len: usize,
    ours: impl FnOnce(&Ram, Range<usize>),
    kernel: impl FnOnce() -> c_long,
) -> c_int {
    match Ram::get().map(|ram| (ram, ram.part(addr as usize, len))) {
        Some((ram, Part::All(range))) => {
            if !range.is_empty() {
                ours(ram, range);
            }
            0
        }
        Some((_, Part::Some)) => failed(libc::EINVAL),
        _ => kernel() as c_int,
    }
}

/// The C library's, of which it takes the place.
///
/// # Safety
/// That of `munmap`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller's.
    ours_or(addr, len, Ram::give, || unsafe {
        libc::syscall(libc::SYS_munmap, addr, len)
    })
}

/// The C library's, of which it takes the place: memory of ours stays readable and writable.
///
/// # Safety
/// That of `mprotect`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    // SAFETY: the caller's.
    ours_or(
        addr,
        len,
        |_, _| {},
        || unsafe { libc::syscall(libc::SYS_mprotect, addr, len, prot) },
    )
}

/// The C library's, of which it takes the place: of memory of ours only what discards it is done.
///
/// # Safety
/// That of `madvise`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    let ours = |ram: &Ram, range: Range<usize>| {
        if matches!(advice, libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_REMOVE) {
            ram.discard(&range);
        }
    };
    // SAFETY: the caller's.
    ours_or(addr, len, ours, || unsafe {
        libc::syscall(libc::SYS_madvise, addr, len, advice)
    })
}

/// The C library's, of which it takes the place. Nothing needs to be done for it.
///
/// # Safety
/// None.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_madvise(_addr: *mut c_void, _len: usize, _advice: c_int) -> c_int {
    0
}

/// The C library's, of which it takes the place. The last argument is optional there, which on these processors is an
/// argument that nobody looks at.
///
/// # Safety
/// That of `mremap`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mremap(
    addr: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    new_addr: *mut c_void,
) -> *mut c_void {
    match Ram::get().map(|ram| (ram, ram.part(addr as usize, old_len))) {
        Some((ram, Part::All(range))) if new_len > 0 && flags & !libc::MREMAP_MAYMOVE == 0 => {
            // SAFETY: the caller's.
            match unsafe { ram.resize(range, new_len, flags & libc::MREMAP_MAYMOVE != 0) } {
                Some(addr) => addr as *mut c_void,
                None => map_failed(libc::ENOMEM),
            }
        }
        Some((_, Part::All(_) | Part::Some)) => map_failed(libc::EINVAL),
        // SAFETY: the caller's.
        _ => unsafe { libc::syscall(libc::SYS_mremap, addr, old_len, new_len, flags, new_addr) as *mut c_void },
    }
}
