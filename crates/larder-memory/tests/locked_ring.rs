//! A ring that holds a userfaultfd in another process: operations of pagers, and of that process.

// Other architectures are not supported yet.
#![cfg(target_arch = "x86_64")]

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use larder_memory::inject::with_stopped_thread;
use larder_memory::locked_ring::{LockedRing, RING_LINK, RingMemory};
use larder_memory::shared::SharedMemory;
use larder_memory::userfaultfd::{self, Userfaultfd};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

const LIMIT: Duration = Duration::from_secs(60);

/// A process in which a ring was made.
struct Held {
    process: Child,
    pidfd: OwnedFd,
    ring: RawFd,
    memory: RawFd,
}

impl Held {
    /// Starts `cat`, which gets the ring and a read-only descriptor of its memory, and no other descriptor of
    /// `userfaultfd`.
    fn new(userfaultfd: &Userfaultfd) -> Self {
        let mut process = Command::new("cat");
        let process = process.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let process = process.expect("cat starts");
        let pid = Pid::from_child(&process);
        let memory = RingMemory::create().expect("memory");
        let mut memory = Some(memory);
        let ((ring, number), _) = with_stopped_thread(pid, LIMIT, |thread| {
            let memory = memory.take().expect("the work is done once");
            let read_only = memory.memory().read_only().expect("a descriptor");
            let numbers = thread.send_descriptors(&[read_only.as_fd(), memory.memory().as_fd()])?;
            let made = memory.create_in(thread, numbers[1])?;
            thread.close(numbers[1])?;
            let ring = thread.fetch_descriptor(made.number)?;
            LockedRing::lock(memory, ring, &made, userfaultfd.as_fd()).expect("Linux 6.8 and io_uring are needed");
            Ok((made.number, numbers[0]))
        })
        .expect("a ring is made");
        Self { pidfd: pidfd_open(pid, PidfdFlags::empty()).expect("a pidfd"), process, ring, memory: number }
    }

    fn descriptor(&self, number: RawFd) -> OwnedFd {
        pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty()).expect("it is open there")
    }

    /// Opens the ring as a successor does.
    fn open(&self, ring: OwnedFd) -> io::Result<LockedRing> {
        LockedRing::open(SharedMemory::open(self.descriptor(self.memory).as_fd())?, ring)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn inode(file: &impl std::os::fd::AsFd) -> u64 {
    rustix::fs::fstat(file.as_fd()).expect("fstat").st_ino
}

/// The descriptor is closed here and was never open there: only the ring keeps the userfaultfd.
#[test]
fn userfaultfd_outlives_its_descriptors_in_ring() {
    let userfaultfd = userfaultfd::create_for_user_mode().expect("a userfaultfd");
    let wanted = inode(&userfaultfd);
    let held = Held::new(&userfaultfd);
    drop(userfaultfd);
    let links = fs::read_dir(format!("/proc/{}/fd", held.process.id())).expect("procfs").flatten();
    let links: Vec<String> =
        links.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.display().to_string())).collect();
    assert!(!links.iter().any(|link| link == userfaultfd::PROC_LINK), "{links:?}");
    assert_eq!(links.iter().filter(|link| *link == RING_LINK).count(), 1, "{links:?}");
    for _ in 0..3 {
        let ring = held.open(held.descriptor(held.ring)).expect("it is the ring");
        assert_eq!(inode(&ring.fetch_userfaultfd().expect("it is taken out")), wanted);
    }
}

/// The process replaces its ring, so that a pager would execute its requests.
#[test]
fn another_ring_is_refused() {
    let userfaultfd = userfaultfd::create_for_user_mode().expect("a userfaultfd");
    let (held, other) = (Held::new(&userfaultfd), Held::new(&userfaultfd));
    let error = held.open(other.descriptor(other.ring)).err().expect("it is refused");
    assert!(error.to_string().contains("its ring was not created by a pager"), "{error}");
    assert!(held.open(userfaultfd.as_fd().try_clone_to_owned().expect("a copy")).is_err());
}

/// The descriptors that the process has, of the ring and, read-only, of its memory, permit no operation.
#[test]
fn ring_allows_its_process_nothing() {
    let userfaultfd = userfaultfd::create_for_user_mode().expect("a userfaultfd");
    let held = Held::new(&userfaultfd);
    let ring = held.descriptor(held.ring);
    let buffer = [0_u8; 4096];
    // Up to IORING_REGISTER_ENABLE_RINGS, which all kernels know that have such rings.
    for operation in 0..=12 {
        for (argument, count) in [(buffer.as_ptr(), 1), (std::ptr::null(), 0)] {
            // SAFETY: the kernel reads at most 4096 bytes of the argument once.
            let done =
                unsafe { libc::syscall(libc::SYS_io_uring_register, ring.as_raw_fd(), operation, argument, count) };
            let error = io::Error::last_os_error();
            assert_eq!((done, error.raw_os_error()), (-1, Some(libc::EACCES)), "{operation}: {error}");
        }
    }
    // The submission queue, the completion queue, and the requests.
    for offset in [0, 0x800_0000, 0x1000_0000] {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let mapped = unsafe {
            let how = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), 4096, how, rustix::mm::MapFlags::SHARED, &ring, offset)
        };
        assert!(mapped.is_err(), "the ring is mapped at {offset:#x}");
    }
    let memory = held.descriptor(held.memory);
    // SAFETY: as above.
    let mapped = unsafe {
        let how = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        rustix::mm::mmap(std::ptr::null_mut(), 4096, how, rustix::mm::MapFlags::SHARED, &memory, 0)
    };
    assert!(mapped.is_err(), "its memory is mapped for writing");
    let mode = rustix::fs::fstat(&memory).expect("fstat").st_mode & 0o777;
    assert_eq!(mode, 0o600, "others may open it for writing");
}

/// Gives this thread a descriptor table of its own, in which it closes all descriptors but one.
fn keep_only(number: RawFd) {
    // SAFETY: the descriptors are closed in this thread alone, which uses none of them.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_FILES), 0, "{}", io::Error::last_os_error());
        assert_eq!(libc::close_range(3, number as u32 - 1, 0), 0);
        assert_eq!(libc::close_range(number as u32 + 1, u32::MAX, 0), 0);
    }
}

/// Threads constantly submit all queued requests, as code that has taken over the process could: a request takes
/// effect in the caller. The threads have descriptor tables of their own, like another process.
#[test]
fn constant_submission_steals_no_userfaultfd() {
    let userfaultfd = userfaultfd::create_for_user_mode().expect("a userfaultfd");
    let wanted = inode(&userfaultfd);
    let held = Held::new(&userfaultfd);
    let kept = held.descriptor(held.ring);
    drop(userfaultfd);
    let (stop, submitted) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let thieves: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    keep_only(kept.as_raw_fd());
                    while !stop.load(Ordering::Relaxed) {
                        for count in [1, 2] {
                            // SAFETY: takes no pointers.
                            let done = unsafe {
                                libc::syscall(libc::SYS_io_uring_enter, kept.as_raw_fd(), count, 0, 0, 0_usize, 0)
                            };
                            submitted.fetch_add(u64::try_from(done).unwrap_or(0), Ordering::Relaxed);
                        }
                    }
                    let links = fs::read_dir("/proc/thread-self/fd").expect("procfs").flatten();
                    let mut links = links.filter_map(|entry| fs::read_link(entry.path()).ok());
                    links.any(|link| link.as_os_str() == userfaultfd::PROC_LINK)
                })
            })
            .collect();
        let has_enough = |taken| taken >= 200 && (taken >= 20_000 || submitted.load(Ordering::Relaxed) >= 20);
        let (mut taken, mut refused, mut failed) = (0, 0, None);
        while !has_enough(taken) && refused < 10_000 && failed.is_none() {
            let ring = held.descriptor(held.ring);
            match held.open(ring).and_then(|ring| ring.fetch_userfaultfd()) {
                Ok(found) if inode(&found) == wanted => taken += 1,
                Ok(_) => failed = Some("another one was taken out".to_owned()),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => refused += 1,
                Err(error) => failed = Some(error.to_string()),
            }
        }
        stop.store(true, Ordering::Relaxed);
        let stolen = thieves.into_iter().any(|thief| thief.join().expect("it ends"));
        assert!(!stolen, "the userfaultfd was installed in the process");
        assert_eq!(failed, None);
        assert!(has_enough(taken), "{taken} taken out, {refused} refused");
    });
}
