//! Descriptors that the process is given, and that are closed when it is detached from. Those of its memory's files
//! mark the memory as managed.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use larder_export::external_mapping::{claim_faults, mark_managed};
use rustix::io::Errno;
use rustix::process::Pid;

use super::{AttachError, INJECT_LIMIT};
use crate::inject::{InjectError, StoppedThread, with_stopped_thread};
use crate::locked_ring::{LockedRing, RingMemory};
use crate::state::PagerState;
use crate::target::{RamMapping, marker_descriptors};
use crate::userfaultfd;

/// Descriptor numbers in the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DonatedFds {
    pub(super) pages: i32,
    pub(super) compressed: i32,
    /// The userfaultfd, or the ring that holds it.
    pub(super) userfaultfd: i32,
    /// The memory of that ring.
    pub(super) ring_memory: Option<i32>,
}

impl DonatedFds {
    /// Returns these descriptors and the marks, in the order in which they are to be closed. Without the userfaultfd
    /// nothing is managed any more, and without the state a successor would not look for the others.
    pub(super) fn all(self, pid: Pid) -> Vec<i32> {
        let mut all = vec![self.userfaultfd];
        all.extend(marker_descriptors(pid).unwrap_or_default());
        all.extend(self.ring_memory);
        all.extend([self.compressed, self.pages]);
        all
    }
}

/// Returns the marked files of the process: each with the number of its descriptor, the device and the inode.
pub(super) fn marked_files_of(pid: Pid) -> Vec<(i32, (u64, u64))> {
    let file_of = |number: i32| {
        let metadata = std::fs::metadata(format!("/proc/{}/fd/{number}", pid.as_raw_pid())).ok()?;
        Some((number, (metadata.dev(), metadata.ino())))
    };
    marker_descriptors(pid).unwrap_or_default().into_iter().filter_map(file_of).collect()
}

/// Returns each file of `memories` once, except those in `marked`.
pub(super) fn unmarked_files<'a>(memories: &'a [RamMapping], marked: &[(u64, u64)]) -> Vec<BorrowedFd<'a>> {
    let mut marked = marked.to_vec();
    let mut files = Vec::new();
    for memory in memories {
        let file = (memory.location.device, memory.location.inode);
        if !marked.contains(&file) {
            marked.push(file);
            files.push(memory.file.as_fd());
        }
    }
    files
}

/// Makes process `pid`, to which the thread belongs, hold these files, marks them as managed, and claims their page
/// faults. The files are locked only once the descriptors are in the process: a kill while they are in transit would
/// leave locks without a known owner.
pub(super) fn donate_markers(
    thread: &mut StoppedThread,
    pid: Pid,
    files: &[BorrowedFd<'_>],
) -> Result<Result<(), AttachError>, InjectError> {
    let numbers = thread.send_descriptors(files)?;
    let marked = files.iter().try_for_each(|file| mark_and_claim(pid, *file));
    if marked.is_err() {
        for number in numbers {
            thread.close(number)?;
        }
    }
    Ok(marked)
}

/// Marks one file, and claims its page faults. A kill in between leaves the mark, by which a successor finds the
/// descriptor and closes it; a claim without a mark would not be found.
fn mark_and_claim(pid: Pid, file: BorrowedFd<'_>) -> Result<(), AttachError> {
    let failed = |what| move |source| AttachError::Failed { pid, what, source };
    if !mark_managed(file).map_err(failed("cannot mark its memory as managed"))? {
        return Err(AttachError::Marked { pid });
    }
    if !claim_faults(file).map_err(failed("cannot claim its page faults"))? {
        return Err(AttachError::Claimed { pid });
    }
    Ok(())
}

/// Hands the descriptors over to the process, and makes a userfaultfd there with the last one, which is
/// /dev/userfaultfd. The process's memory, which is in `files`, is marked first. If a ring with the memory `ring` can
/// hold the userfaultfd, its descriptor in the process is closed.
pub(super) fn donate(
    pid: Pid,
    descriptors: &[OwnedFd; 3],
    files: &[BorrowedFd<'_>],
    state: &PagerState,
    ring: Option<RingMemory>,
) -> Result<(DonatedFds, OwnedFd, Duration), AttachError> {
    let donated = with_stopped_thread(pid, INJECT_LIMIT, |thread| {
        let numbers = thread.send_descriptors(&descriptors.each_ref().map(|it| it.as_fd()))?;
        let [pages, compressed, device] = numbers[..] else {
            unreachable!("one number for each descriptor");
        };
        // From here on no disk server uses the memory before the pager has registered it.
        if let Err(error) = donate_markers(thread, pid, files)? {
            for number in numbers.into_iter().rev() {
                thread.close(number)?;
            }
            return Ok(Err(error));
        }
        let made = userfaultfd::create_in(thread, device);
        let closed = thread.close(device);
        let made = made.and_then(|number| match thread.fetch_descriptor(number) {
            Ok(fetched) => Ok((number, fetched)),
            Err(error) => {
                thread.close(number)?;
                Err(error)
            }
        });
        match made {
            Ok((userfaultfd, taken)) => {
                closed?;
                let mut given = DonatedFds { pages, compressed, userfaultfd, ring_memory: None };
                if let Some(ring) = ring {
                    move_into_ring(thread, &mut given, taken.as_fd(), state, ring)?;
                }
                Ok(Ok((given, taken)))
            }
            Err(error) => {
                for number in marker_descriptors(pid).unwrap_or_default().into_iter().chain([compressed, pages]) {
                    thread.close(number)?;
                }
                Err(error)
            }
        }
    });
    match donated {
        Ok((Ok((given, userfaultfd)), paused_for)) => Ok((given, userfaultfd, paused_for)),
        Ok((Err(error), _)) => Err(error),
        Err(error) => Err(AttachError::Inject(error)),
    }
}

/// Moves the process's userfaultfd into a ring. If that is not possible, logs the reason, and the process keeps the
/// descriptor.
fn move_into_ring(
    thread: &mut StoppedThread,
    donated: &mut DonatedFds,
    userfaultfd: BorrowedFd<'_>,
    state: &PagerState,
    ring: RingMemory,
) -> Result<(), InjectError> {
    let pid = thread.pid();
    let memory_error = |error| InjectError::Request {
        pid,
        tid: pid,
        tried: "open the memory of its ring read-only",
        errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
    };
    let read_only = ring.memory().read_only().map_err(memory_error)?;
    let numbers = thread.send_descriptors(&[read_only.as_fd(), ring.memory().as_fd()])?;
    let [memory, writable] = numbers[..] else {
        unreachable!("one number for each descriptor");
    };
    let made = ring.create_in(thread, writable);
    thread.close(writable)?;
    let made = match made {
        Ok(made) => made,
        Err(error) => {
            thread.close(memory)?;
            warn_unlocked(pid, &error);
            // All errors but that of the system call itself concern the thread.
            return if error.errno().is_some() { Ok(()) } else { Err(error) };
        }
    };
    // A successor that finds only this number closes the ring.
    state.set_ring_number(Some(made.number as u32));
    let locked = thread.fetch_descriptor(made.number).map_err(|error| error.to_string());
    let locked = locked
        .and_then(|fetched| LockedRing::lock(ring, fetched, &made, userfaultfd).map_err(|error| error.to_string()));
    match locked {
        Ok(_) => {
            thread.close(donated.userfaultfd)?;
            donated.userfaultfd = made.number;
            donated.ring_memory = Some(memory);
        }
        Err(error) => {
            thread.close(made.number)?;
            state.set_ring_number(None);
            thread.close(memory)?;
            warn_unlocked(pid, &error);
        }
    }
    Ok(())
}

/// Logs why the process keeps a descriptor of its userfaultfd.
pub(super) fn warn_unlocked(pid: Pid, why: &dyn std::fmt::Display) {
    tracing::warn!(
        "process {} keeps a userfaultfd that it could use itself, because an io_uring cannot hold it ({why}): code that has taken \
        over the process can use it against the host's kernel (docs/guide/memory.md)",
        pid.as_raw_pid()
    );
}

/// Closes descriptors in the process.
pub(super) fn close_in_process(pid: Pid, numbers: &[i32]) -> Result<Duration, InjectError> {
    let closed =
        with_stopped_thread(pid, INJECT_LIMIT, |thread| numbers.iter().try_for_each(|number| thread.close(*number)));
    closed.map(|((), paused_for)| paused_for)
}

/// Closes the descriptors that were handed over, and returns `error`.
pub(super) fn roll_back(pid: Pid, donated: DonatedFds, error: AttachError) -> AttachError {
    if let Err(close_error) = close_in_process(pid, &donated.all(pid)) {
        tracing::warn!("unused descriptors stay open in the process: {close_error}");
    }
    error
}
