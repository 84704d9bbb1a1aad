//! An io_uring in the managed process that holds the pager's userfaultfd, and that only a pager can use.
//!
//! The userfaultfd must exist as long as the process does: if its last descriptor is closed while memory is managed,
//! the kernel fills missing pages with zeros. A descriptor of the process has exactly that lifetime. But a
//! userfaultfd for faults in the kernel is a tool for code that has taken over the process: it can stop a system call
//! in the middle for any length of time. So the process holds an io_uring whose only registered file is the
//! userfaultfd, and no descriptor of the userfaultfd itself.
//!
//! # Access to the userfaultfd
//! The queues of the ring are in memory of the pager (`IORING_SETUP_NO_MMAP`). The process has a read-only descriptor
//! of that memory, as it has of the state, and cannot map the ring. So only the pager's user can queue a request. The
//! ring's restrictions (io_uring_register(2)) permanently forbid all registrations, and all requests but two.
//!
//! Two attacks by the process determine how [`LockedRing::fetch_userfaultfd`] works:
//!
//! - **The process submits requests that a pager has queued.** Any process that has a ring may call `io_uring_enter`,
//!   and a request takes effect in the caller. So the pager never queues the request that installs the userfaultfd
//!   (`IORING_OP_FIXED_FD_INSTALL`). It queues an `IORING_OP_RECV`, followed by an empty request. The first request
//!   receives the install request from a socket of the pager, over the empty one: its target is an address that is
//!   the queue only in the pager. The kernel executes both in one call, under the ring's lock. If the process submits
//!   them, the first request names a socket and an address of the process, which cannot write to the queue; the
//!   second request is empty, and refused.
//! - **The process substitutes a ring of its own**, so that a pager executes the process's requests with the rights
//!   of root. So the ring's inode and its time of creation are in memory that the process cannot write to, and are
//!   compared before anything else is done with a ring. Each ring has an inode of its own, and no process can choose
//!   its number and a time in the past.
//!
//! The process can still destroy the ring: it may close it, or send another file into it (`IORING_OP_MSG_RING`). That
//! harms only its own memory, as closing the userfaultfd does.
//!
//! ```text
//! "larder-ring"
//!      0  queues     heads and tails, completions (`struct io_rings`)
//!  4 KiB  requests   `struct io_uring_sqe`
//!  8 KiB  header     magic, the ring's device, inode and time of creation, offsets in the queues
//! ```
//!
//! The ring needs Linux 6.8. Missing features are detected when a ring is made ([`LockedRing::probe`],
//! [`LockedRing::lock`]): the userfaultfd is taken out once, as a successor does it, before anything depends on that.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

use crate::inject::{InjectError, StoppedThread};
use crate::shared::SharedMemory;
use crate::userfaultfd;

/// Name of the memfd with the queues, as /proc shows it.
pub const RING_NAME: &str = "larder-ring";
/// Target of the /proc link of a ring's descriptor.
pub const RING_LINK: &str = "anon_inode:[io_uring]";

const PAGE: usize = 4096;
const REQUESTS_AT: usize = PAGE;
const HEADER_AT: usize = 2 * PAGE;
const MEMORY_BYTES: usize = 3 * PAGE;
/// Bytes of the memory that the kernel uses.
const QUEUES_BYTES: u64 = 2 * PAGE as u64;

/// Number of requests: one that fetches, and the fetched one.
const REQUEST_COUNT: u32 = 2;
const REQUEST_BYTES: usize = 64;
const COMPLETION_BYTES: usize = 16;

const MAGIC: u64 = u64::from_le_bytes(*b"LARDRING");
const IDENTITY_AT: usize = HEADER_AT + 8;
const OFFSETS_AT: usize = HEADER_AT + 40;

/// Maximum number of attempts. An attempt fails if the process takes the request away, or if its completions are in
/// the way.
const ATTEMPTS_MAX: u32 = 1000;

/// Field `user_data` of the request that installs the userfaultfd.
const INSTALL_USER_DATA: u64 = u64::from_le_bytes(*b"LARDUFFD");

// Constants of linux/io_uring.h; libc and rustix lack some of them.
const SETUP_R_DISABLED: u32 = 1 << 6;
/// Since Linux 6.5.
const SETUP_NO_MMAP: u32 = 1 << 14;
/// Since Linux 6.6.
const SETUP_NO_SQARRAY: u32 = 1 << 16;
const REGISTER_FILES: u32 = 2;
const REGISTER_RESTRICTIONS: u32 = 11;
const REGISTER_ENABLE_RINGS: u32 = 12;
const RESTRICTION_SQE_OP: u16 = 1;
const RESTRICTION_SQE_FLAGS_ALLOWED: u16 = 2;
const OP_RECV: u8 = 27;
/// Since Linux 6.8.
const OP_FIXED_FD_INSTALL: u8 = 54;
const SQE_FIXED_FILE: u8 = 1 << 0;

/// `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    reserved: [u32; 3],
    /// Offsets of head, tail, mask, entries, flags, dropped, array, reserved.
    sq: [u32; 8],
    sq_address: u64,
    /// Offsets of head, tail, mask, entries, overflow, cqes, flags, reserved.
    cq: [u32; 8],
    cq_address: u64,
}

const PARAMS_BYTES: usize = 120;
const _: () = assert!(size_of::<Params>() == PARAMS_BYTES);

/// `struct io_uring_restriction`.
#[repr(C)]
struct Restriction {
    opcode: u16,
    what: u8,
    reserved: [u8; 13],
}

/// Identity of a ring: device, inode, time of creation in seconds and nanoseconds.
type Identity = [u64; 4];

/// Offsets in the queues, in bytes.
#[derive(Clone, Copy)]
struct Offsets {
    sq_head: usize,
    sq_tail: usize,
    sq_mask: usize,
    cq_head: usize,
    cq_tail: usize,
    cq_mask: usize,
    completions: usize,
}

impl Params {
    /// Makes the parameters of a ring whose queues are mapped at `address`.
    fn new(address: u64) -> Self {
        Self {
            flags: SETUP_R_DISABLED | SETUP_NO_MMAP | SETUP_NO_SQARRAY,
            cq_address: address,
            sq_address: address + REQUESTS_AT as u64,
            ..Self::default()
        }
    }

    fn to_bytes(&self) -> [u8; PARAMS_BYTES] {
        // SAFETY: integers without padding, by the assertion on the size.
        unsafe { std::mem::transmute_copy(self) }
    }

    fn from_bytes(bytes: [u8; PARAMS_BYTES]) -> Self {
        // SAFETY: as above, and every value is valid.
        unsafe { std::mem::transmute(bytes) }
    }

    fn offsets(&self) -> [u32; 7] {
        let (sq, cq) = (&self.sq, &self.cq);
        [sq[0], sq[1], sq[2], cq[0], cq[1], cq[2], cq[5]]
    }
}

/// Memory for the queues of a new ring.
pub struct RingMemory(SharedMemory);

/// A ring that was made in the process, and holds nothing yet.
pub struct NewRing {
    /// Descriptor number in the process.
    pub number: RawFd,
    offsets: [u32; 7],
}

/// A ring that holds a userfaultfd.
pub struct LockedRing {
    memory: SharedMemory,
    ring: OwnedFd,
    offsets: Offsets,
}

impl RingMemory {
    /// Makes the memory.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn create() -> io::Result<Self> {
        SharedMemory::create(c"larder-ring", MEMORY_BYTES).map(Self)
    }

    /// Returns the memory.
    pub fn memory(&self) -> &SharedMemory {
        &self.0
    }

    /// Makes a ring in the process of `thread`. `memory` is the number of a writable descriptor of this memory there.
    /// A kill in here leaves that descriptor, a mapping of this memory, and a ring without any file.
    ///
    /// # Errors
    /// If the kernel cannot make the ring or forbids it to the process, or the process has ended.
    pub fn create_in(&self, thread: &mut StoppedThread, memory: RawFd) -> Result<NewRing, InjectError> {
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let kind = libc::MAP_SHARED as u64;
        let mapped = thread.system_call(libc::SYS_mmap, [0, QUEUES_BYTES, protection, kind, memory as u64, 0])?;
        thread.write_scratch(0, &Params::new(mapped).to_bytes())?;
        let at = thread.scratch();
        let made = thread.system_call(libc::SYS_io_uring_setup, [REQUEST_COUNT.into(), at, 0, 0, 0, 0]);
        let unmapped = thread.system_call(libc::SYS_munmap, [mapped, QUEUES_BYTES, 0, 0, 0, 0]);
        let number = made? as RawFd;
        unmapped?;
        let mut params = [0; PARAMS_BYTES];
        thread.read_scratch(0, &mut params)?;
        let offsets = Params::from_bytes(params).offsets();
        Ok(NewRing { number, offsets })
    }

    /// Makes a ring in this process.
    fn create_local(&self) -> io::Result<(OwnedFd, [u32; 7])> {
        let mut params = Params::new(self.0.ptr_at(0, QUEUES_BYTES as usize).as_ptr() as u64);
        // SAFETY: `params` is alive and writable for the call. The kernel writes to the memory only as to queues, for
        // as long as the ring exists; it is accessed only through atomics and raw pointers.
        let made = unsafe { libc::syscall(libc::SYS_io_uring_setup, REQUEST_COUNT, &raw mut params) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that has no other owner.
        let ring = unsafe { OwnedFd::from_raw_fd(made as RawFd) };
        Ok((ring, params.offsets()))
    }
}

impl LockedRing {
    /// Checks in this process that the kernel supports all that a ring needs.
    ///
    /// # Errors
    /// If the kernel does not, or forbids it to this process.
    pub fn probe() -> io::Result<()> {
        let memory = RingMemory::create()?;
        let (ring, offsets) = memory.create_local()?;
        let userfaultfd = userfaultfd::create_for_user_mode()?;
        Self::new(memory, ring, offsets, userfaultfd.as_fd()).map(drop)
    }

    /// Makes `ring`, the descriptor of `made`, hold this userfaultfd permanently.
    ///
    /// # Errors
    /// If the kernel does not support it, or forbids it to this process. The caller must close the ring then.
    pub fn lock(memory: RingMemory, ring: OwnedFd, made: &NewRing, userfaultfd: BorrowedFd<'_>) -> io::Result<Self> {
        Self::new(memory, ring, made.offsets, userfaultfd)
    }

    fn new(memory: RingMemory, ring: OwnedFd, offsets: [u32; 7], userfaultfd: BorrowedFd<'_>) -> io::Result<Self> {
        let identity = identity_of(ring.as_fd())?;
        // Other anonymous files share one inode, as rings once did.
        if identity[1] == rustix::fs::fstat(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?)?.st_ino {
            return Err(unsupported("the kernel's io_urings have no separate inodes"));
        }
        let mut files = [userfaultfd.as_raw_fd()];
        register(ring.as_fd(), REGISTER_FILES, files.as_mut_ptr().cast(), 1)?;
        let restriction = |opcode, what| Restriction { opcode, what, reserved: [0; 13] };
        let mut restrictions = [
            restriction(RESTRICTION_SQE_OP, OP_RECV),
            restriction(RESTRICTION_SQE_OP, OP_FIXED_FD_INSTALL),
            restriction(RESTRICTION_SQE_FLAGS_ALLOWED, SQE_FIXED_FILE),
        ];
        let count = restrictions.len() as u32;
        register(ring.as_fd(), REGISTER_RESTRICTIONS, restrictions.as_mut_ptr().cast(), count)?;
        register(ring.as_fd(), REGISTER_ENABLE_RINGS, std::ptr::null_mut(), 0)?;
        let memory = memory.0;
        for (index, word) in identity.into_iter().enumerate() {
            memory.word(IDENTITY_AT + index * 8).store(word, Ordering::Relaxed);
        }
        for (index, offset) in offsets.into_iter().enumerate() {
            memory.half_word(OFFSETS_AT + index * 4).store(offset, Ordering::Relaxed);
        }
        memory.word(HEADER_AT).store(MAGIC, Ordering::Release);
        let ring = Self::open(memory, ring)?;
        let taken = ring.fetch_except(Some(userfaultfd.as_raw_fd()))?;
        if identity_of(taken.as_fd())? != identity_of(userfaultfd)? {
            return Err(unsupported("the io_uring returned a different file than was registered"));
        }
        Ok(ring)
    }

    /// Opens a ring that a pager has left. `memory` and `ring` are from the process. A ring with another identity is
    /// refused before it is used.
    ///
    /// # Errors
    /// If they were not made by a pager.
    pub fn open(memory: SharedMemory, ring: OwnedFd) -> io::Result<Self> {
        let foreign = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        if memory.len() != MEMORY_BYTES || memory.word(HEADER_AT).load(Ordering::Acquire) != MAGIC {
            return Err(foreign("the memory of its ring was not created by a pager"));
        }
        let identity = [0, 1, 2, 3].map(|index| memory.word(IDENTITY_AT + index * 8).load(Ordering::Relaxed));
        if link_of(ring.as_fd())? != RING_LINK || identity_of(ring.as_fd())? != identity {
            return Err(foreign("its ring was not created by a pager"));
        }
        let offset = |index: usize| memory.half_word(OFFSETS_AT + index * 4).load(Ordering::Relaxed) as usize;
        let offsets = Offsets {
            sq_head: offset(0),
            sq_tail: offset(1),
            sq_mask: offset(2),
            cq_head: offset(3),
            cq_tail: offset(4),
            cq_mask: offset(5),
            completions: offset(6),
        };
        let is_valid = |index: usize| offset(index) < PAGE - 8 && offset(index).is_multiple_of(4);
        if !(0..7).all(is_valid) || !offsets.completions.is_multiple_of(8) {
            return Err(foreign("the memory of its ring is damaged"));
        }
        Ok(Self { memory, ring, offsets })
    }

    /// Makes another descriptor of the userfaultfd, in this process. The ring still holds the userfaultfd.
    ///
    /// # Errors
    /// If the kernel forbids it to this process, or the managed process interferes.
    pub fn fetch_userfaultfd(&self) -> io::Result<OwnedFd> {
        self.fetch_except(None)
    }

    /// Makes a descriptor like [`Self::fetch_userfaultfd`]. Its number is never `except`, an open descriptor of the
    /// same userfaultfd.
    fn fetch_except(&self, except: Option<RawFd>) -> io::Result<OwnedFd> {
        // A separate thread, because the kernel's data of a task that has used a ring ends with the task.
        thread::scope(|scope| {
            let builder = thread::Builder::new().name("larder-ring".into());
            let taken = builder.spawn_scoped(scope, || self.fetch_on_this_thread(except))?.join();
            taken.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn fetch_on_this_thread(&self, except: Option<RawFd>) -> io::Result<OwnedFd> {
        for _ in 0..ATTEMPTS_MAX {
            let submitted = self.submit();
            // A request that installs the userfaultfd must not stay where a later submission would find it.
            self.clear_requests();
            submitted?;
            match self.install_result() {
                None => {}
                Some(Err(error)) => return Err(error),
                Some(Ok(number)) => return adopt_userfaultfd(number, except),
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "the process is using its ring concurrently"))
    }

    /// Queues the request that fetches the install request, and submits both.
    fn submit(&self) -> io::Result<()> {
        self.clear_requests();
        self.discard_completions();
        let (receiving, sending) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::net::send(&sending, &words_to_bytes(install_request()), SendFlags::NOSIGNAL)?;
        let head = self.counter(self.offsets.sq_head).load(Ordering::Acquire);
        let fetch = recv_request(receiving.as_fd(), self.request_at(head.wrapping_add(1)));
        for (index, word) in fetch.into_iter().enumerate() {
            self.request_word(head, index).store(word, Ordering::Relaxed);
        }
        let tail = self.counter(self.offsets.sq_tail);
        tail.store(head.wrapping_add(REQUEST_COUNT), Ordering::Release);
        let ring = self.ring.as_raw_fd();
        // SAFETY: the request writes to the queue, which is accessed only through atomics and lives as long as
        // `self`.
        let entered =
            unsafe { libc::syscall(libc::SYS_io_uring_enter, ring, REQUEST_COUNT, 0, 1, std::ptr::null::<u8>(), 0) };
        match entered {
            0.. => Ok(()),
            _ => match io::Error::last_os_error() {
                // EBUSY: the process has filled the completion queue.
                error if [libc::EINTR, libc::EAGAIN, libc::EBUSY].contains(&error.raw_os_error().unwrap_or(0)) => {
                    Ok(())
                }
                error => Err(error),
            },
        }
    }

    /// Returns the result of the install request, a descriptor number here, or `None` if the kernel has not executed
    /// it.
    fn install_result(&self) -> Option<io::Result<RawFd>> {
        let head = self.counter(self.offsets.cq_head).load(Ordering::Relaxed);
        let tail = self.counter(self.offsets.cq_tail).load(Ordering::Acquire);
        let mask = self.counter(self.offsets.cq_mask).load(Ordering::Relaxed) & 0xff;
        let completions = (0..tail.wrapping_sub(head).min(mask + 1)).map(|index| {
            let slot = (head.wrapping_add(index) & mask) as usize;
            let at = (self.offsets.completions + slot * COMPLETION_BYTES).min(PAGE - COMPLETION_BYTES);
            (self.memory.word(at), self.memory.half_word(at + 8))
        });
        let mut installs = completions.filter(|(user_data, _)| user_data.load(Ordering::Relaxed) == INSTALL_USER_DATA);
        let (_, result) = installs.next_back()?;
        match result.load(Ordering::Relaxed) as i32 {
            number @ 0.. => Some(Ok(number)),
            errno => Some(Err(io::Error::from_raw_os_error(-errno))),
        }
    }

    /// Discards completions that the process has caused (`IORING_OP_MSG_RING`), or that a killed pager has left.
    fn discard_completions(&self) {
        let tail = self.counter(self.offsets.cq_tail).load(Ordering::Acquire);
        self.counter(self.offsets.cq_head).store(tail, Ordering::Release);
    }

    fn clear_requests(&self) {
        for at in (0..REQUEST_COUNT as usize * REQUEST_BYTES).step_by(8) {
            self.memory.word(REQUESTS_AT + at).store(0, Ordering::Release);
        }
    }

    fn counter(&self, offset: usize) -> &AtomicU32 {
        self.memory.half_word(offset)
    }

    fn request_offset(&self, index: u32) -> usize {
        let mask = self.counter(self.offsets.sq_mask).load(Ordering::Relaxed) & (REQUEST_COUNT - 1);
        REQUESTS_AT + (index & mask) as usize * REQUEST_BYTES
    }

    fn request_word(&self, index: u32, word: usize) -> &AtomicU64 {
        self.memory.word(self.request_offset(index) + word * 8)
    }

    /// Returns the address of a request in this process.
    fn request_at(&self, index: u32) -> u64 {
        self.memory.ptr_at(self.request_offset(index), REQUEST_BYTES).as_ptr() as u64
    }
}

/// `struct io_uring_sqe`, in words: operation, flags, priority, descriptor; offset; address; length, flags of the
/// operation; user data; the rest.
type Request = [u64; REQUEST_BYTES / 8];

fn sqe_head(operation: u8, flags: u8, descriptor: RawFd) -> u64 {
    u64::from(operation) | u64::from(flags) << 8 | u64::from(descriptor as u32) << 32
}

/// Encodes a request that receives from `socket` to address `to`.
fn recv_request(socket: BorrowedFd<'_>, to: u64) -> Request {
    let operation = sqe_head(OP_RECV, 0, socket.as_raw_fd());
    [operation, 0, to, REQUEST_BYTES as u64, 0, 0, 0, 0]
}

/// Encodes a request that installs the first file of the ring.
fn install_request() -> Request {
    [sqe_head(OP_FIXED_FD_INSTALL, SQE_FIXED_FILE, 0), 0, 0, 0, INSTALL_USER_DATA, 0, 0, 0]
}

fn words_to_bytes(words: Request) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Takes ownership of the descriptor that the kernel has installed. The process may have forged its completion, so a
/// descriptor that is no userfaultfd, or is `except`, is refused and left open.
fn adopt_userfaultfd(number: RawFd, except: Option<RawFd>) -> io::Result<OwnedFd> {
    let link = std::fs::read_link(format!("/proc/self/fd/{number}"))?;
    if link.as_os_str() != userfaultfd::PROC_LINK || except == Some(number) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("its ring holds no userfaultfd, but {}", link.display()),
        ));
    }
    // SAFETY: it is open, as just checked, and has no other owner: when this process takes a userfaultfd out of a
    // ring, it has no other one but `except`.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn register(ring: BorrowedFd<'_>, what: u32, argument: *mut libc::c_void, count: u32) -> io::Result<()> {
    // SAFETY: each operation is called with `count` of the elements that it is defined with, alive for the call.
    let done = unsafe { libc::syscall(libc::SYS_io_uring_register, ring.as_raw_fd(), what, argument, count) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn identity_of(file: BorrowedFd<'_>) -> io::Result<Identity> {
    let stat = rustix::fs::fstat(file)?;
    Ok([stat.st_dev, stat.st_ino, stat.st_ctime as u64, stat.st_ctime_nsec as u64])
}

fn link_of(file: BorrowedFd<'_>) -> io::Result<String> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok(link.to_string_lossy().into_owned())
}

fn unsupported(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, what)
}
