//! Data that an earlier pager has left in the process.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use rustix::process::{Pid, PidfdGetfdFlags, pidfd_getfd};

use super::AttachError;
use super::handed::Given;
use crate::entry::Location;
use crate::locked_ring::{LockedRing, RING_LINK};
use crate::shared::SharedMemory;
use crate::state::State;
use crate::target::{LeftState, Target};
use crate::userfaultfd::{self, Userfaultfd};

/// Data that an earlier pager has left.
pub(super) enum Left {
    Nothing,
    Managed {
        state: Arc<State>,
        compressed: Arc<SharedMemory>,
        userfaultfd: Userfaultfd,
        given: Given,
    },
    /// The earlier pager had not registered any memory. These descriptors are to be closed.
    Unused(Vec<i32>, State),
}

pub(super) fn open_left(target: &Target, left: &LeftState) -> Result<Left, AttachError> {
    let pid = target.pid();
    let pages = left_memory(target, left.pages, "a state")?;
    let state = State::open(pages, target.started()).map_err(|source| AttachError::State { pid, source })?;
    lock(pid, &state)?;
    let link_of = |number: i32| std::fs::read_link(format!("/proc/{}/fd/{number}", pid.as_raw_pid()));
    let numbers = || {
        let rings = left.ring_memories.iter().copied();
        rings.chain(left.compressed).chain([left.pages])
    };
    let Some(userfaultfd) = state.userfaultfd_number() else {
        // The earlier pager may have been killed between making a userfaultfd and recording its number.
        let ring = state.ring_number().and_then(|number| i32::try_from(number).ok());
        let ring = ring.filter(|number| link_of(*number).is_ok_and(|is| is.as_os_str() == RING_LINK));
        let numbers = left.unnoted.iter().copied().chain(ring).chain(numbers());
        return Ok(Left::Unused(numbers.collect(), state));
    };
    let ring_memory = state.ring_memory_number().map(i32::try_from).transpose();
    let foreign = |what| AttachError::Foreign { pid, what };
    let userfaultfd_number = i32::try_from(userfaultfd).map_err(|_| foreign("a userfaultfd"))?;
    let ring_memory = ring_memory.map_err(|_| foreign("the memory of a ring"))?;
    let found = link_of(userfaultfd_number);
    let link = match ring_memory {
        Some(_) => RING_LINK,
        None => userfaultfd::LINK,
    };
    let is_there = found.as_ref().is_ok_and(|is| is.as_os_str() == link);
    if !is_there && is_all_back(&state) {
        // Only the entries distinguish lost pages from untouched ones, so they must not be discarded.
        if let pages @ 1.. = state.lost_pages() {
            return Err(AttachError::Lost { pid, pages });
        }
        // The earlier pager was killed while it detached.
        return Ok(Left::Unused(numbers().collect(), state));
    }
    if found.is_ok() && !is_there {
        return Err(foreign("a userfaultfd"));
    }
    let compressed_number = left.compressed.ok_or(foreign("compressed memory"))?;
    let compressed = left_memory(target, compressed_number, "compressed memory")?;
    let userfaultfd = match ring_memory {
        None => take(target, userfaultfd_number, "cannot fetch its userfaultfd")?,
        Some(memory) => {
            let memory = left_memory(target, memory, "the memory of a ring")?;
            let ring = take(target, userfaultfd_number, "cannot fetch its ring")?;
            let taken = LockedRing::open(memory, ring).and_then(|ring| ring.take());
            taken.map_err(|source| AttachError::Failed {
                pid,
                what: "cannot fetch its userfaultfd from its ring",
                source,
            })?
        }
    };
    Ok(Left::Managed {
        state: Arc::new(state),
        compressed: Arc::new(compressed),
        userfaultfd: Userfaultfd::new(userfaultfd),
        given: Given {
            pages: left.pages,
            compressed: compressed_number,
            userfaultfd: userfaultfd_number,
            ring_memory,
        },
    })
}

/// Returns true if all stored pages are in memory too.
pub(super) fn is_all_back(state: &State) -> bool {
    let regions = state.regions();
    let regions = regions.iter().filter(|region| !region.is_gone());
    let mut pages = regions.flat_map(|region| (0..region.pages).map(|offset| region.first.plus(offset)));
    pages.all(|page| match state.word(page).decode() {
        Some(Location::Nowhere | Location::Lost) => true,
        Some(Location::Uniform { clean } | Location::In { clean, .. }) => clean,
        None => false,
    })
}

/// Opens memory of the pager through a descriptor in the process. Memory of another user is refused, because its
/// content decides what is put into the process's memory.
pub(super) fn left_memory(target: &Target, number: i32, what: &'static str) -> Result<SharedMemory, AttachError> {
    let pid = target.pid();
    let file = File::from(take(
        target,
        number,
        "cannot fetch a descriptor that an earlier pager has left",
    )?);
    let failed = |source| AttachError::Failed {
        pid,
        what: "cannot open memory that an earlier pager has left",
        source,
    };
    if file.metadata().map_err(failed)?.uid() != rustix::process::geteuid().as_raw() {
        return Err(AttachError::Foreign { pid, what });
    }
    SharedMemory::open(file.as_fd()).map_err(failed)
}

pub(super) fn take(target: &Target, number: i32, what: &'static str) -> Result<OwnedFd, AttachError> {
    pidfd_getfd(target.pidfd(), number, PidfdGetfdFlags::empty()).map_err(|errno| AttachError::Failed {
        pid: target.pid(),
        what,
        source: errno.into(),
    })
}

pub(super) fn lock(pid: Pid, state: &State) -> Result<(), AttachError> {
    match state.memory().try_lock() {
        Ok(true) => Ok(()),
        Ok(false) => Err(AttachError::Managed { pid }),
        Err(source) => Err(AttachError::Failed {
            pid,
            what: "cannot lock its state",
            source,
        }),
    }
}
