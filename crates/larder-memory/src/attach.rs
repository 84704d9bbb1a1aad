//! Attaching to a process, taking over from an earlier pager, and detaching.
//!
//! # Descriptors in the process
//! The process holds a few descriptors, which it never uses:
//!
//! - a ring that holds the userfaultfd, or the userfaultfd itself where no ring is possible ([`crate::locked_ring`]).
//!   The userfaultfd must outlive the pager, because the kernel lets missing pages read as zeros when its last
//!   descriptor is closed;
//! - read-only descriptors of the state and of compressed RAM, which therefore live as long as the memory that they
//!   describe;
//! - for each file of its memory, a descriptor that holds a lock on it. The lock marks the memory as managed for the
//!   VM's disk servers, even while no pager runs ([`larder_export::view`]).
//!
//! # Other processes that map the memory
//! Faults of Larder's own disk servers are resolved like those of the process itself ([`crate::views`]). The pager
//! first marks the memory, and then searches for processes that map it. A process that maps it later sees the mark,
//! and waits.
//!
//! # A killed pager and its successor
//! The order of steps lets a successor find everything that was done: the state is handed over before the userfaultfd
//! is made, its descriptor number is recorded before memory is registered, and each region is recorded before it is
//! registered. A successor that finds a state without the number knows that nothing was registered, and attaches
//! anew.
//!
//! A running pager holds a lock on its state (flock(2)), which ends with the pager. So two pagers never manage the
//! same process.

mod handed;
mod left;
mod let_go;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Pid;

use self::handed::{Given, close, hand_marks, hand_over, marked_files, to_mark, undo, warn_unlocked};
use self::left::{Left, lock, open_left};
use crate::entry::Tier;
use crate::guest::{Files, GuestMemory as _, Process};
use crate::inject::{InjectError, with_stopped_thread};
use crate::locked_ring::{LockedRing, RingMemory};
use crate::log::SEGMENT;
use crate::pager::{self, Pager};
use crate::shared::SharedMemory;
use crate::state::{Region, State, StateError, SwapIdentity};
use crate::store::Store;
use crate::target::{Memory, Obstacle, Others, Place, Target, TargetError, Viewer, large_pages, marks, others_of};
use crate::units::{PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{self, NEEDED_ALL, Range, Userfaultfd, feature};
use crate::views::{Looked, View, ViewError};
use crate::worker::{Hands, Thread};

/// Maximum time for stopping a thread of the process, and for a system call in it.
pub(crate) const INJECT_LIMIT: Duration = Duration::from_secs(2);
/// Shorter maximum, for attempts that are retried later and during which no fault is resolved.
pub(crate) const RETRY_LIMIT: Duration = Duration::from_millis(50);

/// Number of table entries reserved for hotplugged memory: 64 GiB of it. Unused entries use no memory.
const PAGES_TO_COME: u32 = 16 << 20;

/// Error of attaching to a process.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AttachError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("process {pid} is already managed by another larder: detach or stop that one", pid = .pid.as_raw_pid())]
    Managed { pid: Pid },
    #[error("process {pid}: {source}", pid = .pid.as_raw_pid())]
    State { pid: Pid, source: StateError },
    #[error(
        "process {pid}: an earlier pager has left {what} that is not its own, so evicted memory cannot be paged in: \
        the guest continues as long as it does not touch evicted pages; restart it",
        pid = .pid.as_raw_pid()
    )]
    Foreign { pid: Pid, what: &'static str },
    #[error(
        "process {pid}: {pages} pages of its memory were lost when it was managed before, and cannot be read: it continues without \
        Larder, and can be managed again after a restart",
        pid = .pid.as_raw_pid()
    )]
    Lost { pid: Pid, pages: u32 },
    #[error("nothing was changed: {0}")]
    Inject(InjectError),
    #[error("cannot open /dev/userfaultfd: {0}: run as root or with access to it; Linux 6.1 or later is required")]
    NoDevice(io::Error),
    #[error("process {pid}: {what}: {source}", pid = .pid.as_raw_pid())]
    Failed {
        pid: Pid,
        what: &'static str,
        source: io::Error,
    },
    #[error(
        "process {pid}: its memory is already marked as managed on behalf of another process that maps it: end that process",
        pid = .pid.as_raw_pid()
    )]
    Marked { pid: Pid },
    #[error(
        "process {pid} cannot be managed, because other processes map its memory: {source}; nothing was changed",
        pid = .pid.as_raw_pid()
    )]
    View { pid: Pid, source: ViewError },
    #[error(
        "process {pid}: it is about to receive a VM by post-copy migration, and must handle its page faults itself: attach \
        after the migration has ended",
        pid = .pid.as_raw_pid()
    )]
    Claimed { pid: Pid },
    #[error(
        "process {pid}: its memory at {address:#x} is already registered with the userfaultfd of another pager or of QEMU itself \
        (post-copy migration, background snapshot)",
        pid = .pid.as_raw_pid()
    )]
    Busy { pid: Pid, address: u64 },
}

/// An attached process. The caller must run the pager, so that faults are resolved, from now on.
pub struct Attached {
    /// The process, for later inspections.
    pub target: Option<Target>,
    /// The pager of the process.
    pub pager: Pager<Process, Thread>,
    /// Maximum time that a thread of the process was stopped; `None` after a takeover from an earlier pager.
    pub stood_still: Option<Duration>,
    /// The files of the managed memory.
    pub files: Arc<Files>,
    pid: Pid,
    pidfd: OwnedFd,
    given: Given,
    state: Arc<State>,
}

/// A disk that stores pages.
pub struct Swap {
    /// The tier of the disk.
    pub tier: Tier,
    /// The identity of the disk.
    pub identity: SwapIdentity,
    /// The store on the disk.
    pub store: Box<dyn Store>,
}

/// A process that was inspected, and the data that an earlier pager has left in it. The lock on that data keeps other
/// pagers out.
pub struct Found {
    target: Target,
    left: Left,
}

impl Found {
    /// Finds and locks the data that an earlier pager has left.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn find(mut target: Target) -> Result<Self, AttachError> {
        let pid = target.pid();
        let left = match &target.left_state {
            None => Left::Nothing,
            Some(left) => open_left(&target, left)?,
        };
        let (obstacles, cautions) = match &left {
            // A managed region that cannot be opened still exists, and its stored pages are needed.
            Left::Managed { state, .. } => {
                let places: Vec<Place> = state.regions().iter().filter_map(place_of).collect();
                let is_needed = |obstacle: &Obstacle| matches!(obstacle, Obstacle::NotOpened { place, .. } if places.contains(place));
                target.obstacles.into_iter().partition(is_needed)
            }
            Left::Nothing => (target.obstacles, Vec::new()),
            // The inspection skips this check for a process that has a state.
            Left::Unused(..) => {
                target.obstacles.extend(large_pages(&target.memories));
                (target.obstacles, Vec::new())
            }
        };
        if !obstacles.is_empty() {
            // With the marks left in place, the VM's disk servers would wait for a pager that cannot attach.
            if let Left::Unused(numbers, _) = &left
                && let Err(error) = close_unused(pid, numbers)
            {
                tracing::warn!(
                    "descriptors of a killed pager cannot be closed in process {}: {error}",
                    pid.as_raw_pid()
                );
            }
            let name = target.name;
            return Err(TargetError::Obstacles { pid, name, obstacles }.into());
        }
        target.obstacles = cautions;
        Ok(Self { target, left })
    }

    /// Returns warnings, one sentence each. None of them prevents attaching.
    pub fn cautions(&self) -> Vec<String> {
        let of_first = |obstacle: &Obstacle| {
            format!("its memory stays managed, although a new attach would be refused: {obstacle}")
        };
        let all = self.target.cautions.iter().cloned();
        all.chain(self.target.obstacles.iter().map(of_first)).collect()
    }

    /// Returns the disk of this tier that stores pages of the process, and that the successor needs.
    pub fn swap(&self, tier: Tier) -> Option<SwapIdentity> {
        match &self.left {
            Left::Managed { state, .. } => state.swap(tier),
            Left::Nothing | Left::Unused(..) => None,
        }
    }

    /// Returns true if the earlier pager has encrypted its disks, or `None` if there was no such pager.
    pub fn is_encrypted(&self) -> Option<bool> {
        match &self.left {
            Left::Managed { state, .. } => Some(state.is_encrypted()),
            Left::Nothing | Left::Unused(..) => None,
        }
    }

    /// Returns true if an earlier pager has managed the process.
    pub fn was_managed(&self) -> bool {
        matches!(self.left, Left::Managed { .. })
    }

    /// Attaches to the process. `swaps` are in the order of their tiers, and include all that [`Self::swap`] returns.
    /// The disks are encrypted if `encrypt` is set, or, in a takeover, if they were encrypted before.
    ///
    /// # Errors
    /// See [`AttachError`]. As much is managed then as before.
    pub fn attach(self, options: pager::Options, swaps: Vec<Swap>, encrypt: bool) -> Result<Attached, AttachError> {
        let target = self.target;
        match self.left {
            Left::Nothing => begin(target, options, swaps, encrypt),
            Left::Managed {
                state,
                compressed,
                userfaultfd,
                given,
            } => take_over(target, options, swaps, state, compressed, userfaultfd, given),
            Left::Unused(numbers, locked) => {
                close_unused(target.pid(), &numbers).map_err(AttachError::Inject)?;
                drop(locked);
                begin(target, options, swaps, encrypt)
            }
        }
    }
}

/// Closes the descriptors of a pager that managed nothing: those in `numbers`, and its marks.
fn close_unused(pid: Pid, numbers: &[i32]) -> Result<(), InjectError> {
    // The state is closed last, because a successor finds the others only through it.
    let mut all = marks(pid).unwrap_or_default();
    all.extend(numbers);
    close(pid, &all).map(|_| ())
}

/// Records which disks are used, before they are.
fn note_swaps(pid: Pid, state: &State, swaps: Vec<Swap>) -> Result<Stores, AttachError> {
    let mut stores = Stores::new();
    for Swap { tier, identity, store } in swaps {
        if state.swap(tier).as_ref() != Some(&identity) {
            let noted = state.set_swap(tier, &identity);
            noted.map_err(|source| AttachError::State { pid, source })?;
        }
        stores.push((tier, store));
    }
    Ok(stores)
}

type Stores = Vec<(Tier, Box<dyn Store>)>;

fn take_over(
    mut target: Target,
    options: pager::Options,
    swaps: Vec<Swap>,
    state: Arc<State>,
    compressed: Arc<SharedMemory>,
    userfaultfd: Userfaultfd,
    given: Given,
) -> Result<Attached, AttachError> {
    let stores = note_swaps(target.pid(), &state, swaps)?;
    let files = Arc::new(Files::default());
    let mut memories = std::mem::take(&mut target.memories);
    let mut new = Vec::new();
    for region in state.regions() {
        let is_it = |memory: &Memory| place_of(&region).is_some_and(|place| place == memory.place);
        match memories.iter().position(is_it) {
            Some(index) => {
                files.add(region, memories.swap_remove(index).file);
                new.push(region);
            }
            // The region was unmapped while no pager was running.
            None => state.forget_region(region.first),
        }
    }
    for region in new {
        register(target.pid(), &userfaultfd, &region)?;
    }
    let large = large_pages(&memories);
    for obstacle in &large {
        tracing::warn!("hotplugged memory is not managed: {obstacle}");
    }
    let obstacles = target.obstacles.iter().chain(&large);
    let refused: Vec<Place> = obstacles.filter_map(Obstacle::place).collect();
    let mut attached = assemble(target, options, stores, state, compressed, userfaultfd, files, given)?;
    // Managed memory comes first, because the guest waits for it. The rest needs ptrace, which another tracer or a
    // freezer may prevent: the service retries it.
    memories.retain(|memory| !refused.contains(&memory.place));
    memories.sort_by_key(|memory| memory.place.address);
    for memory in memories {
        let place = memory.place;
        if let Err(error) = attached.add(memory, RETRY_LIMIT) {
            tracing::warn!("hotplugged memory is not managed yet: {error}");
            if let Some(target) = &mut attached.target {
                target.forget(place);
            }
        }
    }
    let others = others_of(attached.pid, attached.pager.regions());
    let mut is_complete = others.is_complete;
    for viewer in others.viewers {
        if let Err(error) = attached.add_view(viewer) {
            is_complete = false;
            tracing::warn!("a disk server of the VM is not registered yet, and its requests wait: {error}");
        }
    }
    // A server that the killed pager has served can write to pages in memory without a fault until it is served
    // again.
    attached.pager.pause_evictions(!is_complete);
    Ok(attached)
}

fn begin(
    mut target: Target,
    options: pager::Options,
    swaps: Vec<Swap>,
    encrypt: bool,
) -> Result<Attached, AttachError> {
    let pid = target.pid();
    let failed = |what| move |source| AttachError::Failed { pid, what, source };
    let device = userfaultfd::device().map_err(AttachError::NoDevice)?;
    let pages: u64 = target
        .memories
        .iter()
        .map(|memory| memory.place.bytes / PAGE_BYTES)
        .sum();
    let capacity = u32::try_from(pages)
        .ok()
        .and_then(|pages| pages.checked_add(PAGES_TO_COME.max(pages)))
        .unwrap_or(u32::MAX);
    let state = State::create(capacity, target.started()).map_err(failed("cannot create its state"))?;
    lock(pid, &state)?;
    if encrypt {
        state.make_key().map_err(failed("cannot create an encryption key"))?;
    }
    let stores = note_swaps(pid, &state, swaps)?;
    // Large enough for all pages that could ever be evicted. Unused memory costs nothing.
    let bytes = (u64::from(capacity) * PAGE_BYTES).next_multiple_of(SEGMENT as u64) + SEGMENT as u64;
    let compressed = usize::try_from(bytes)
        .map_err(|_| io::ErrorKind::OutOfMemory.into())
        .and_then(|bytes| SharedMemory::create(c"larder-compressed", bytes))
        .map_err(failed("cannot create the memory for compressed pages"))?;
    let read_only = |memory: &SharedMemory| memory.read_only().map_err(failed("cannot open its state read-only"));
    let descriptors = [read_only(state.memory())?, read_only(&compressed)?, device.into()];
    let (given, taken, stood_still) = hand_over(
        pid,
        &descriptors,
        &to_mark(&target.memories, &[]),
        &state,
        ring_for(pid, &state),
    )?;
    let userfaultfd = Userfaultfd::new(taken);
    if let Err(error) = enable(&userfaultfd).map_err(failed("cannot enable the userfaultfd's features")) {
        return Err(undo(pid, given, error));
    }
    if let Some(number) = given.ring_memory {
        state.set_ring_memory_number(number as u32);
    }
    // Stored last: a successor that finds the number takes over.
    state.set_userfaultfd_number(given.userfaultfd as u32);
    let state = Arc::new(state);
    let files = Arc::new(Files::default());
    let memories = std::mem::take(&mut target.memories);
    let mut attached = match assemble(
        target,
        options,
        stores,
        state,
        Arc::new(compressed),
        userfaultfd,
        files,
        given,
    ) {
        Ok(attached) => attached,
        Err(error) => return Err(undo(pid, given, error)),
    };
    for memory in memories {
        if let Err(error) = attached.add_marked(memory) {
            // Nothing has been evicted yet.
            attached.unregister();
            return Err(undo(pid, given, error));
        }
    }
    if let Err(error) = attached.add_views() {
        attached.pager.guest().views().let_go();
        attached.unregister();
        return Err(undo(pid, given, error));
    }
    attached.stood_still = Some(stood_still);
    Ok(attached)
}

/// Makes memory for a ring that holds the userfaultfd in the process. Returns `None`, and logs the reason, if no ring
/// is possible.
fn ring_for(pid: Pid, state: &State) -> Option<RingMemory> {
    if has_several_filters(pid) {
        warn_unlocked(
            pid,
            &"it has seccomp filters in addition to QEMU's own, which may kill it for such a call",
        );
        return None;
    }
    let ring = LockedRing::probe().and_then(|()| RingMemory::create());
    match ring {
        Ok(ring) => {
            state.allow_ring();
            Some(ring)
        }
        Err(error) => {
            warn_unlocked(pid, &error);
            None
        }
    }
}

/// Returns true if there are several seccomp filters. A service manager or container runtime has then added unknown
/// ones to that of QEMU.
fn has_several_filters(pid: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).unwrap_or_default();
    let count = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    count
        .and_then(|count| count.trim().parse().ok())
        .is_some_and(|count: u32| count > 1)
}

fn enable(userfaultfd: &Userfaultfd) -> io::Result<()> {
    let poison = userfaultfd::available()? & feature::POISON;
    userfaultfd.enable(NEEDED_ALL | poison)
}

fn register(pid: Pid, userfaultfd: &Userfaultfd, region: &Region) -> Result<(), AttachError> {
    let range = Range {
        start: region.address,
        len: region.bytes(),
    };
    userfaultfd
        .register(range)
        .map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY) => AttachError::Busy {
                pid,
                address: region.address,
            },
            _ => AttachError::Failed {
                pid,
                what: "cannot register its memory",
                source,
            },
        })
}

fn place_of(region: &Region) -> Option<Place> {
    (!region.is_gone()).then(|| Place::of(region))
}

#[allow(clippy::too_many_arguments)]
fn assemble(
    target: Target,
    options: pager::Options,
    stores: Stores,
    state: Arc<State>,
    compressed: Arc<SharedMemory>,
    userfaultfd: Userfaultfd,
    files: Arc<Files>,
    given: Given,
) -> Result<Attached, AttachError> {
    let pid = target.pid();
    let process = Process::new(userfaultfd, Arc::clone(&files)).map_err(|source| AttachError::Failed {
        pid,
        what: "cannot create an epoll descriptor for its userfaultfds",
        source,
    })?;
    let mut present = Vec::new();
    for region in state.regions().iter().filter(|region| !region.is_gone()) {
        look(&process, region, &mut present).map_err(|source| AttachError::Failed {
            pid,
            what: "cannot find its resident pages",
            source,
        })?;
    }
    let hands = Hands::new(Arc::clone(&files) as _, Arc::clone(&state), Arc::clone(&compressed));
    let thread = Thread::start(hands).map_err(|source| AttachError::Failed {
        pid,
        what: "cannot start a thread",
        source,
    })?;
    let pager = Pager::new(
        process,
        thread,
        Arc::clone(&state),
        compressed,
        stores,
        &present,
        options,
    );
    let pidfd = target
        .pidfd()
        .try_clone_to_owned()
        .map_err(|source| AttachError::Failed {
            pid,
            what: "cannot duplicate its pidfd",
            source,
        })?;
    Ok(Attached {
        target: Some(target),
        pid,
        pidfd,
        pager,
        stood_still: None,
        files,
        given,
        state,
    })
}

fn look(process: &Process, region: &Region, present: &mut Vec<PageRun>) -> io::Result<()> {
    let all = PageRun {
        first: region.first,
        count: region.pages,
    };
    process.present(all, &mut |run| present.push(run))
}

impl Attached {
    /// Manages memory that was hotplugged in the process. `limit` is the maximum time for stopping a thread.
    ///
    /// # Errors
    /// If the memory cannot be registered, or there are too many regions.
    pub fn add(&mut self, memory: Memory, limit: Duration) -> Result<(), AttachError> {
        let pid = self.pid;
        // A killed pager may have marked the file without recording the region.
        let marked: Vec<(u64, u64)> = marked_files(pid).into_iter().map(|(_, file)| file).collect();
        let files = to_mark(std::slice::from_ref(&memory), &marked);
        if !files.is_empty() {
            let given = with_stopped_thread(pid, limit, |thread| hand_marks(thread, pid, &files));
            let (marked, _) = given.map_err(AttachError::Inject)?;
            marked?;
        }
        self.add_marked(memory)
    }

    fn add_marked(&mut self, memory: Memory) -> Result<(), AttachError> {
        let pid = self.pid;
        let place = memory.place;
        let region = Region {
            first: PageIndex::new(self.pager.pages()),
            pages: u32::try_from(place.bytes / PAGE_BYTES).unwrap_or(u32::MAX),
            address: place.address,
            offset: place.offset,
            device: place.device,
            inode: place.inode,
        };
        self.state
            .add_region(&region)
            .map_err(|source| AttachError::State { pid, source })?;
        self.files.add(region, memory.file);
        // Servers that have mapped the memory already are registered before any of it can be evicted.
        let views = self.pager.guest().views();
        for of in views.to_look(true) {
            match Looked::now(of, &self.state.regions()) {
                Ok(looked) => views.looked(looked),
                Err(error) => tracing::debug!("a disk server of the VM has ended: {error}"),
            }
        }
        let mut present = Vec::new();
        let registered = register(pid, self.pager.guest().userfaultfd(), &region).and_then(|()| {
            look(self.pager.guest(), &region, &mut present).map_err(|source| AttachError::Failed {
                pid,
                what: "cannot find its resident pages",
                source,
            })
        });
        if registered.is_err() {
            self.state.forget_region(region.first);
            self.files.remove(region.first);
            let region = Region { address: 0, ..region };
            self.pager.add_region(region, &[]);
        } else {
            self.pager.add_region(region, &present);
        }
        registered
    }

    /// Returns true if the disks are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.state.is_encrypted()
    }

    /// Returns a pidfd of the process.
    ///
    /// # Errors
    /// If there are too many descriptors.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Returns a descriptor that is readable when a fault is pending, in the process or in a view.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.pager.guest().views().events()
    }

    /// Returns the PID of the process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Registers Larder's own processes that have the memory mapped.
    fn add_views(&mut self) -> Result<(), AttachError> {
        let pid = self.pid;
        let Others { viewers, obstacles, .. } = others_of(pid, self.pager.regions());
        if !obstacles.is_empty() {
            let name = self
                .target
                .as_ref()
                .map_or_else(String::new, |target| target.name.clone());
            return Err(TargetError::Obstacles { pid, name, obstacles }.into());
        }
        let mut viewers = viewers.into_iter();
        let added = viewers.try_for_each(|viewer| self.add_view(viewer));
        added.map_err(|source| AttachError::View { pid, source })
    }

    fn add_view(&self, viewer: Viewer) -> Result<(), ViewError> {
        let view = View::begin(viewer)?;
        let failed = |source| ViewError::Failed {
            pid: viewer.pid,
            what: "cannot register its mappings",
            source,
        };
        let looked = view.look(self.pager.regions()).map_err(failed)?;
        self.pager.guest().views().add(view, looked, true).map_err(failed)
    }

    /// Closes the marks of memory that the process has unmapped. While they are open, the host cannot free that
    /// memory.
    pub fn close_marks_of_gone(&self) {
        let regions = self.pager.regions().iter().filter(|region| !region.is_gone());
        let files: Vec<(u64, u64)> = regions.map(|region| (region.device, region.inode)).collect();
        let marked = marked_files(self.pid).into_iter();
        let gone: Vec<i32> = marked
            .filter(|(_, file)| !files.contains(file))
            .map(|(number, _)| number)
            .collect();
        if gone.is_empty() {
            return;
        }
        if let Err(error) = close(self.pid, &gone) {
            tracing::warn!("unplugged memory cannot be freed on the host: {error}");
        }
    }
}
