//! Data that an earlier pager has left in the process.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use rustix::process::{Pid, PidfdGetfdFlags, pidfd_getfd};

use super::AttachError;
use super::donated_fds::DonatedFds;
use crate::entry::CopyLocation;
use crate::locked_ring::{LockedRing, RING_LINK};
use crate::shared::SharedMemory;
use crate::state::PagerState;
use crate::target::{OrphanedDescriptors, Target};
use crate::userfaultfd::{self, Userfaultfd};

/// Data that an earlier pager has left.
pub(super) enum OrphanedState {
    Absent,
    Managed {
        state: Arc<PagerState>,
        compressed: Arc<SharedMemory>,
        userfaultfd: Userfaultfd,
        donated: DonatedFds,
    },
    /// The earlier pager had not registered any memory. These descriptors are to be closed.
    Unregistered(Vec<i32>, PagerState),
}

pub(super) fn open_orphaned(target: &Target, descriptors: &OrphanedDescriptors) -> Result<OrphanedState, AttachError> {
    let pid = target.pid();
    let pages = open_orphaned_memory(target, descriptors.pages, "a state")?;
    let state = PagerState::open(pages, target.start_time()).map_err(|source| AttachError::State { pid, source })?;
    lock(pid, &state)?;
    let link_of = |number: i32| std::fs::read_link(format!("/proc/{}/fd/{number}", pid.as_raw_pid()));
    let numbers = || {
        let rings = descriptors.ring_memories.iter().copied();
        rings.chain(descriptors.compressed).chain([descriptors.pages])
    };
    let Some(userfaultfd) = state.userfaultfd_number() else {
        // The earlier pager may have been killed between making a userfaultfd and recording its number.
        let ring = state.ring_number().and_then(|number| i32::try_from(number).ok());
        let ring = ring.filter(|number| link_of(*number).is_ok_and(|is| is.as_os_str() == RING_LINK));
        let numbers = descriptors.unrecorded_userfaultfds.iter().copied().chain(ring).chain(numbers());
        return Ok(OrphanedState::Unregistered(numbers.collect(), state));
    };
    let ring_memory = state.ring_memory_number().map(i32::try_from).transpose();
    let foreign = |what| AttachError::Foreign { pid, what };
    let userfaultfd_number = i32::try_from(userfaultfd).map_err(|_| foreign("a userfaultfd"))?;
    let ring_memory = ring_memory.map_err(|_| foreign("the memory of a ring"))?;
    let found = link_of(userfaultfd_number);
    let link = match ring_memory {
        Some(_) => RING_LINK,
        None => userfaultfd::PROC_LINK,
    };
    let is_expected = found.as_ref().is_ok_and(|is| is.as_os_str() == link);
    if !is_expected && are_all_resident(&state) {
        // Only the entries distinguish lost pages from untouched ones, so they must not be discarded.
        if let pages @ 1.. = state.lost_pages() {
            return Err(AttachError::Lost { pid, pages });
        }
        // The earlier pager was killed while it detached.
        return Ok(OrphanedState::Unregistered(numbers().collect(), state));
    }
    if found.is_ok() && !is_expected {
        return Err(foreign("a userfaultfd"));
    }
    let compressed_number = descriptors.compressed.ok_or(foreign("compressed memory"))?;
    let compressed = open_orphaned_memory(target, compressed_number, "compressed memory")?;
    let userfaultfd = match ring_memory {
        None => fetch_fd(target, userfaultfd_number, "cannot fetch its userfaultfd")?,
        Some(memory) => {
            let memory = open_orphaned_memory(target, memory, "the memory of a ring")?;
            let ring = fetch_fd(target, userfaultfd_number, "cannot fetch its ring")?;
            let fetched = LockedRing::open(memory, ring).and_then(|ring| ring.fetch_userfaultfd());
            fetched.map_err(|source| AttachError::Failed {
                pid,
                what: "cannot fetch its userfaultfd from its ring",
                source,
            })?
        }
    };
    Ok(OrphanedState::Managed {
        state: Arc::new(state),
        compressed: Arc::new(compressed),
        userfaultfd: Userfaultfd::new(userfaultfd),
        donated: DonatedFds {
            pages: descriptors.pages,
            compressed: compressed_number,
            userfaultfd: userfaultfd_number,
            ring_memory,
        },
    })
}

/// Returns true if all stored pages are in memory too.
pub(super) fn are_all_resident(state: &PagerState) -> bool {
    let regions = state.regions();
    let regions = regions.iter().filter(|region| !region.is_unmapped());
    let mut pages = regions.flat_map(|region| (0..region.pages).map(|offset| region.first.plus(offset)));
    pages.all(|page| match state.word(page).decode() {
        Some(CopyLocation::NotStored | CopyLocation::Lost) => true,
        Some(CopyLocation::Uniform { clean } | CopyLocation::InTier { clean, .. }) => clean,
        None => false,
    })
}

/// Opens memory of the pager through a descriptor in the process. Memory of another user is refused, because its
/// content decides what is put into the process's memory.
pub(super) fn open_orphaned_memory(
    target: &Target,
    number: i32,
    what: &'static str,
) -> Result<SharedMemory, AttachError> {
    let pid = target.pid();
    let file = File::from(fetch_fd(target, number, "cannot fetch a descriptor that an earlier pager has left")?);
    let failed =
        |source| AttachError::Failed { pid, what: "cannot open memory that an earlier pager has left", source };
    if file.metadata().map_err(failed)?.uid() != rustix::process::geteuid().as_raw() {
        return Err(AttachError::Foreign { pid, what });
    }
    SharedMemory::open(file.as_fd()).map_err(failed)
}

pub(super) fn fetch_fd(target: &Target, number: i32, what: &'static str) -> Result<OwnedFd, AttachError> {
    pidfd_getfd(target.pidfd(), number, PidfdGetfdFlags::empty()).map_err(|errno| AttachError::Failed {
        pid: target.pid(),
        what,
        source: errno.into(),
    })
}

pub(super) fn lock(pid: Pid, state: &PagerState) -> Result<(), AttachError> {
    match state.memory().try_lock() {
        Ok(true) => Ok(()),
        Ok(false) => Err(AttachError::Managed { pid }),
        Err(source) => Err(AttachError::Failed { pid, what: "cannot lock its state", source }),
    }
}
