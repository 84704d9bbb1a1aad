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
//!   VM's disk servers, even while no pager runs ([`larder_export::external_mapping`]).
//!
//! # Other processes that map the memory
//! Faults of Larder's own disk servers are resolved like those of the process itself ([`crate::external_mappings`]).
//! The pager first marks the memory, and then searches for processes that map it. A process that maps it later sees the
//! mark, and waits.
//!
//! # A killed pager and its successor
//! The order of steps lets a successor find everything that was done: the state is handed over before the userfaultfd
//! is made, its descriptor number is recorded before memory is registered, and each region is recorded before it is
//! registered. A successor that finds a state without the number knows that nothing was registered, and attaches
//! anew.
//!
//! A running pager holds a lock on its state (flock(2)), which ends with the pager. So two pagers never manage the
//! same process.

mod detach;
mod donated_fds;
mod orphaned_state;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Pid;

use self::donated_fds::{
    DonatedFds, close_in_process, donate, donate_markers, marked_files_of, roll_back, unmarked_files, warn_unlocked,
};
use self::orphaned_state::{OrphanedState, lock, open_orphaned};
use crate::entry::Tier;
use crate::external_mappings::{ExternalMapping, ExternalMappingError, MappingScan};
use crate::guest::{GuestMemory as _, ProcessMemory, RegionFiles};
use crate::inject::{InjectError, with_stopped_thread};
use crate::locked_ring::{LockedRing, RingMemory};
use crate::pager::{self, Pager};
use crate::segment_log::SEGMENT_BYTES;
use crate::shared::SharedMemory;
use crate::state::{PagerState, Region, StateError, SwapIdentity};
use crate::store::SegmentStore;
use crate::target::{
    DiskServerProcess, ExternalMappers, MappingLocation, Obstacle, RamMapping, Target, TargetError,
    external_mappers_of, huge_page_setting, marker_descriptors,
};
use crate::units::{PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{self, AddressRange, REQUIRED_FEATURE_BITS, Userfaultfd, feature};
use crate::worker::{WorkerState, WorkerThread};

/// Maximum time for stopping a thread of the process, and for a system call in it.
pub(crate) const INJECT_LIMIT: Duration = Duration::from_secs(2);
/// Shorter maximum, for attempts that are retried later and during which no fault is resolved.
pub(crate) const RETRY_LIMIT: Duration = Duration::from_millis(50);

/// Number of table entries reserved for hotplugged memory: 64 GiB of it. Unused entries use no memory.
const HOTPLUG_PAGES_RESERVED: u32 = 16 << 20;

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
    Failed { pid: Pid, what: &'static str, source: io::Error },
    #[error(
        "process {pid}: its memory is already marked as managed on behalf of another process that maps it: end that process",
        pid = .pid.as_raw_pid()
    )]
    Marked { pid: Pid },
    #[error(
        "process {pid} cannot be managed, because other processes map its memory: {source}; nothing was changed",
        pid = .pid.as_raw_pid()
    )]
    ExternalMapping { pid: Pid, source: ExternalMappingError },
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
    pub pager: Pager<ProcessMemory, WorkerThread>,
    /// Maximum time that a thread of the process was stopped; `None` after a takeover from an earlier pager.
    pub paused_for: Option<Duration>,
    /// The files of the managed memory.
    pub files: Arc<RegionFiles>,
    pid: Pid,
    pidfd: OwnedFd,
    donated: DonatedFds,
    state: Arc<PagerState>,
}

/// A disk that stores pages.
pub struct SwapStore {
    /// The tier of the disk.
    pub tier: Tier,
    /// The identity of the disk.
    pub identity: SwapIdentity,
    /// The store on the disk.
    pub store: Box<dyn SegmentStore>,
}

/// A process that was inspected, and the data that an earlier pager has left in it. The lock on that data keeps other
/// pagers out.
pub struct AttachCandidate {
    target: Target,
    orphaned: OrphanedState,
}

impl AttachCandidate {
    /// Finds and locks the data that an earlier pager has left.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn open(mut target: Target) -> Result<Self, AttachError> {
        let pid = target.pid();
        let orphaned = match &target.orphaned {
            None => OrphanedState::Absent,
            Some(left) => open_orphaned(&target, left)?,
        };
        let (obstacles, warnings) = match &orphaned {
            // A managed region that cannot be opened still exists, and its stored pages are needed.
            OrphanedState::Managed { state, .. } => {
                let locations: Vec<MappingLocation> = state.regions().iter().filter_map(location_of).collect();
                let is_of_managed_memory = |obstacle: &Obstacle| matches!(obstacle, Obstacle::NotOpened { location, .. } if locations.contains(location));
                target.obstacles.into_iter().partition(is_of_managed_memory)
            }
            OrphanedState::Absent => (target.obstacles, Vec::new()),
            // The inspection skips this check for a process that has a state.
            OrphanedState::Unregistered(..) => {
                target.obstacles.extend(huge_page_setting(&target.ram_mappings));
                (target.obstacles, Vec::new())
            }
        };
        if !obstacles.is_empty() {
            // With the marks left in place, the VM's disk servers would wait for a pager that cannot attach.
            if let OrphanedState::Unregistered(numbers, _) = &orphaned
                && let Err(error) = close_unregistered(pid, numbers)
            {
                tracing::warn!(
                    "descriptors of a killed pager cannot be closed in process {}: {error}",
                    pid.as_raw_pid()
                );
            }
            let name = target.name;
            return Err(TargetError::Obstacles { pid, name, obstacles }.into());
        }
        target.obstacles = warnings;
        Ok(Self { target, orphaned })
    }

    /// Returns warnings, one sentence each. None of them prevents attaching.
    pub fn warnings(&self) -> Vec<String> {
        let warn_reattach = |obstacle: &Obstacle| {
            format!("its memory stays managed, although a new attach would be refused: {obstacle}")
        };
        let all = self.target.warnings.iter().cloned();
        all.chain(self.target.obstacles.iter().map(warn_reattach)).collect()
    }

    /// Returns the disk of this tier that stores pages of the process, and that the successor needs.
    pub fn swap(&self, tier: Tier) -> Option<SwapIdentity> {
        match &self.orphaned {
            OrphanedState::Managed { state, .. } => state.swap(tier),
            OrphanedState::Absent | OrphanedState::Unregistered(..) => None,
        }
    }

    /// Returns true if the earlier pager has encrypted its disks, or `None` if there was no such pager.
    pub fn is_encrypted(&self) -> Option<bool> {
        match &self.orphaned {
            OrphanedState::Managed { state, .. } => Some(state.is_encrypted()),
            OrphanedState::Absent | OrphanedState::Unregistered(..) => None,
        }
    }

    /// Returns true if an earlier pager has managed the process.
    pub fn was_managed(&self) -> bool {
        matches!(self.orphaned, OrphanedState::Managed { .. })
    }

    /// Attaches to the process. `swaps` are in the order of their tiers, and include all that [`Self::swap`] returns.
    /// The disks are encrypted if `encrypt` is set, or, in a takeover, if they were encrypted before.
    ///
    /// # Errors
    /// See [`AttachError`]. As much is managed then as before.
    pub fn attach(
        self,
        options: pager::PagerOptions,
        swaps: Vec<SwapStore>,
        encrypt: bool,
    ) -> Result<Attached, AttachError> {
        let target = self.target;
        match self.orphaned {
            OrphanedState::Absent => attach_new(target, options, swaps, encrypt),
            OrphanedState::Managed { state, compressed, userfaultfd, donated: given } => {
                take_over(target, options, swaps, state, compressed, userfaultfd, given)
            }
            OrphanedState::Unregistered(numbers, locked) => {
                close_unregistered(target.pid(), &numbers).map_err(AttachError::Inject)?;
                drop(locked);
                attach_new(target, options, swaps, encrypt)
            }
        }
    }
}

/// Closes the descriptors of a pager that managed nothing: those in `numbers`, and its marks.
fn close_unregistered(pid: Pid, numbers: &[i32]) -> Result<(), InjectError> {
    // The state is closed last, because a successor finds the others only through it.
    let mut all = marker_descriptors(pid).unwrap_or_default();
    all.extend(numbers);
    close_in_process(pid, &all).map(|_| ())
}

/// Records which disks are used, before they are.
fn record_swaps(pid: Pid, state: &PagerState, swaps: Vec<SwapStore>) -> Result<Stores, AttachError> {
    let mut stores = Stores::new();
    for SwapStore { tier, identity, store } in swaps {
        if state.swap(tier).as_ref() != Some(&identity) {
            let recorded = state.set_swap(tier, &identity);
            recorded.map_err(|source| AttachError::State { pid, source })?;
        }
        stores.push((tier, store));
    }
    Ok(stores)
}

type Stores = Vec<(Tier, Box<dyn SegmentStore>)>;

fn take_over(
    mut target: Target,
    options: pager::PagerOptions,
    swaps: Vec<SwapStore>,
    state: Arc<PagerState>,
    compressed: Arc<SharedMemory>,
    userfaultfd: Userfaultfd,
    donated: DonatedFds,
) -> Result<Attached, AttachError> {
    let stores = record_swaps(target.pid(), &state, swaps)?;
    let files = Arc::new(RegionFiles::default());
    let mut memories = std::mem::take(&mut target.ram_mappings);
    let mut found = Vec::new();
    for region in state.regions() {
        let is_region = |memory: &RamMapping| location_of(&region).is_some_and(|location| location == memory.location);
        match memories.iter().position(is_region) {
            Some(index) => {
                files.add(region, memories.swap_remove(index).file);
                found.push(region);
            }
            // The region was unmapped while no pager was running.
            None => state.mark_unmapped(region.first),
        }
    }
    for region in found {
        register(target.pid(), &userfaultfd, &region)?;
    }
    let huge_page_obstacles = huge_page_setting(&memories);
    for obstacle in &huge_page_obstacles {
        tracing::warn!("hotplugged memory is not managed: {obstacle}");
    }
    let obstacles = target.obstacles.iter().chain(&huge_page_obstacles);
    let refused: Vec<MappingLocation> = obstacles.filter_map(Obstacle::location).collect();
    let mut attached = assemble(target, options, stores, state, compressed, userfaultfd, files, donated)?;
    // Managed memory comes first, because the guest waits for it. The rest needs ptrace, which another tracer or a
    // freezer may prevent: the service retries it.
    memories.retain(|memory| !refused.contains(&memory.location));
    memories.sort_by_key(|memory| memory.location.address);
    for memory in memories {
        let location = memory.location;
        if let Err(error) = attached.add_memory(memory, RETRY_LIMIT) {
            tracing::warn!("hotplugged memory is not managed yet: {error}");
            if let Some(target) = &mut attached.target {
                target.report_again(location);
            }
        }
    }
    let mappers = external_mappers_of(attached.pid, attached.pager.regions());
    let mut is_complete = mappers.is_complete;
    for server in mappers.servers {
        if let Err(error) = attached.add_disk_server(server) {
            is_complete = false;
            tracing::warn!("a disk server of the VM is not registered yet, and its requests wait: {error}");
        }
    }
    // A server that the killed pager has served can write to pages in memory without a fault until it is served
    // again.
    attached.pager.pause_evictions(!is_complete);
    Ok(attached)
}

fn attach_new(
    mut target: Target,
    options: pager::PagerOptions,
    swaps: Vec<SwapStore>,
    encrypt: bool,
) -> Result<Attached, AttachError> {
    let pid = target.pid();
    let failed = |what| move |source| AttachError::Failed { pid, what, source };
    let device = userfaultfd::open_device().map_err(AttachError::NoDevice)?;
    let pages: u64 = target.ram_mappings.iter().map(|memory| memory.location.bytes / PAGE_BYTES).sum();
    let capacity = u32::try_from(pages)
        .ok()
        .and_then(|pages| pages.checked_add(HOTPLUG_PAGES_RESERVED.max(pages)))
        .unwrap_or(u32::MAX);
    let state = PagerState::create(capacity, target.start_time()).map_err(failed("cannot create its state"))?;
    lock(pid, &state)?;
    if encrypt {
        state.generate_key().map_err(failed("cannot create an encryption key"))?;
    }
    let stores = record_swaps(pid, &state, swaps)?;
    // Large enough for all pages that could ever be evicted. Unused memory costs nothing.
    let bytes = (u64::from(capacity) * PAGE_BYTES).next_multiple_of(SEGMENT_BYTES as u64) + SEGMENT_BYTES as u64;
    let compressed = usize::try_from(bytes)
        .map_err(|_| io::ErrorKind::OutOfMemory.into())
        .and_then(|bytes| SharedMemory::create(c"larder-compressed", bytes))
        .map_err(failed("cannot create the memory for compressed pages"))?;
    let read_only = |memory: &SharedMemory| memory.read_only().map_err(failed("cannot open its state read-only"));
    let descriptors = [read_only(state.memory())?, read_only(&compressed)?, device.into()];
    let (donated, userfaultfd_fd, paused_for) =
        donate(pid, &descriptors, &unmarked_files(&target.ram_mappings, &[]), &state, create_ring(pid, &state))?;
    let userfaultfd = Userfaultfd::new(userfaultfd_fd);
    if let Err(error) = enable(&userfaultfd).map_err(failed("cannot enable the userfaultfd's features")) {
        return Err(roll_back(pid, donated, error));
    }
    if let Some(number) = donated.ring_memory {
        state.set_ring_memory_number(number as u32);
    }
    // Stored last: a successor that finds the number takes over.
    state.set_userfaultfd_number(donated.userfaultfd as u32);
    let state = Arc::new(state);
    let files = Arc::new(RegionFiles::default());
    let memories = std::mem::take(&mut target.ram_mappings);
    let mut attached = match assemble(target, options, stores, state, Arc::new(compressed), userfaultfd, files, donated)
    {
        Ok(attached) => attached,
        Err(error) => return Err(roll_back(pid, donated, error)),
    };
    for memory in memories {
        if let Err(error) = attached.register_memory(memory) {
            // Nothing has been evicted yet.
            attached.unregister();
            return Err(roll_back(pid, donated, error));
        }
    }
    if let Err(error) = attached.add_disk_servers() {
        attached.pager.guest().external_mappings().detach_all();
        attached.unregister();
        return Err(roll_back(pid, donated, error));
    }
    attached.paused_for = Some(paused_for);
    Ok(attached)
}

/// Makes memory for a ring that holds the userfaultfd in the process. Returns `None`, and logs the reason, if no ring
/// is possible.
fn create_ring(pid: Pid, state: &PagerState) -> Option<RingMemory> {
    if has_several_filters(pid) {
        warn_unlocked(pid, &"it has seccomp filters in addition to QEMU's own, which may kill it for such a call");
        return None;
    }
    let ring = LockedRing::probe().and_then(|()| RingMemory::create());
    match ring {
        Ok(ring) => {
            state.require_ring_support();
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
    count.and_then(|count| count.trim().parse().ok()).is_some_and(|count: u32| count > 1)
}

fn enable(userfaultfd: &Userfaultfd) -> io::Result<()> {
    let poison = userfaultfd::available_features()? & feature::POISON;
    userfaultfd.enable(REQUIRED_FEATURE_BITS | poison)
}

fn register(pid: Pid, userfaultfd: &Userfaultfd, region: &Region) -> Result<(), AttachError> {
    let range = AddressRange { start: region.address, len: region.bytes() };
    userfaultfd.register(range).map_err(|source| match source.raw_os_error() {
        Some(libc::EBUSY) => AttachError::Busy { pid, address: region.address },
        _ => AttachError::Failed { pid, what: "cannot register its memory", source },
    })
}

fn location_of(region: &Region) -> Option<MappingLocation> {
    (!region.is_unmapped()).then(|| MappingLocation::of(region))
}

#[allow(clippy::too_many_arguments)]
fn assemble(
    target: Target,
    options: pager::PagerOptions,
    stores: Stores,
    state: Arc<PagerState>,
    compressed: Arc<SharedMemory>,
    userfaultfd: Userfaultfd,
    files: Arc<RegionFiles>,
    donated: DonatedFds,
) -> Result<Attached, AttachError> {
    let pid = target.pid();
    let process = ProcessMemory::new(userfaultfd, Arc::clone(&files)).map_err(|source| AttachError::Failed {
        pid,
        what: "cannot create an epoll descriptor for its userfaultfds",
        source,
    })?;
    let mut present = Vec::new();
    for region in state.regions().iter().filter(|region| !region.is_unmapped()) {
        find_resident(&process, region, &mut present).map_err(|source| AttachError::Failed {
            pid,
            what: "cannot find its resident pages",
            source,
        })?;
    }
    let worker_state = WorkerState::new(Arc::clone(&files) as _, Arc::clone(&state), Arc::clone(&compressed));
    let thread = WorkerThread::start(worker_state).map_err(|source| AttachError::Failed {
        pid,
        what: "cannot start a thread",
        source,
    })?;
    let pager = Pager::new(process, thread, Arc::clone(&state), compressed, stores, &present, options);
    let pidfd = target.pidfd().try_clone_to_owned().map_err(|source| AttachError::Failed {
        pid,
        what: "cannot duplicate its pidfd",
        source,
    })?;
    Ok(Attached { target: Some(target), pid, pidfd, pager, paused_for: None, files, donated, state })
}

fn find_resident(process: &ProcessMemory, region: &Region, present: &mut Vec<PageRun>) -> io::Result<()> {
    let all = PageRun { first: region.first, count: region.pages };
    process.visit_resident(all, &mut |run| present.push(run))
}

impl Attached {
    /// Manages memory that was hotplugged in the process. `limit` is the maximum time for stopping a thread.
    ///
    /// # Errors
    /// If the memory cannot be registered, or there are too many regions.
    pub fn add_memory(&mut self, memory: RamMapping, limit: Duration) -> Result<(), AttachError> {
        let pid = self.pid;
        // A killed pager may have marked the file without recording the region.
        let marked: Vec<(u64, u64)> = marked_files_of(pid).into_iter().map(|(_, file)| file).collect();
        let files = unmarked_files(std::slice::from_ref(&memory), &marked);
        if !files.is_empty() {
            let donated = with_stopped_thread(pid, limit, |thread| donate_markers(thread, pid, &files));
            let (marked, _) = donated.map_err(AttachError::Inject)?;
            marked?;
        }
        self.register_memory(memory)
    }

    fn register_memory(&mut self, memory: RamMapping) -> Result<(), AttachError> {
        let pid = self.pid;
        let location = memory.location;
        let region = Region {
            first: PageIndex::new(self.pager.pages()),
            pages: u32::try_from(location.bytes / PAGE_BYTES).unwrap_or(u32::MAX),
            address: location.address,
            offset: location.offset,
            device: location.device,
            inode: location.inode,
        };
        self.state.add_region(&region).map_err(|source| AttachError::State { pid, source })?;
        self.files.add(region, memory.file);
        // Servers that have mapped the memory already are registered before any of it can be evicted.
        let mappings = self.pager.guest().external_mappings();
        for of in mappings.scan_requests(true) {
            match MappingScan::perform(of, &self.state.regions()) {
                Ok(scan) => mappings.register_scan(scan),
                Err(error) => tracing::debug!("a disk server of the VM has ended: {error}"),
            }
        }
        let mut present = Vec::new();
        let registered = register(pid, self.pager.guest().userfaultfd(), &region).and_then(|()| {
            find_resident(self.pager.guest(), &region, &mut present).map_err(|source| AttachError::Failed {
                pid,
                what: "cannot find its resident pages",
                source,
            })
        });
        if registered.is_err() {
            self.state.mark_unmapped(region.first);
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
        self.pager.guest().external_mappings().events()
    }

    /// Returns the PID of the process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Registers Larder's own processes that have the memory mapped.
    fn add_disk_servers(&mut self) -> Result<(), AttachError> {
        let pid = self.pid;
        let ExternalMappers { servers: viewers, obstacles, .. } = external_mappers_of(pid, self.pager.regions());
        if !obstacles.is_empty() {
            let name = self.target.as_ref().map_or_else(String::new, |target| target.name.clone());
            return Err(TargetError::Obstacles { pid, name, obstacles }.into());
        }
        let mut servers = viewers.into_iter();
        let added = servers.try_for_each(|server| self.add_disk_server(server));
        added.map_err(|source| AttachError::ExternalMapping { pid, source })
    }

    fn add_disk_server(&self, server: DiskServerProcess) -> Result<(), ExternalMappingError> {
        let mapping = ExternalMapping::attach(server)?;
        let failed =
            |source| ExternalMappingError::Failed { pid: server.pid, what: "cannot register its mappings", source };
        let scan = mapping.scan(self.pager.regions()).map_err(failed)?;
        self.pager.guest().external_mappings().add(mapping, scan, true).map_err(failed)
    }

    /// Closes the marks of memory that the process has unmapped. While they are open, the host cannot free that
    /// memory.
    pub fn close_markers_of_unmapped(&self) {
        let regions = self.pager.regions().iter().filter(|region| !region.is_unmapped());
        let files: Vec<(u64, u64)> = regions.map(|region| (region.device, region.inode)).collect();
        let marked = marked_files_of(self.pid).into_iter();
        let unmapped_markers: Vec<i32> =
            marked.filter(|(_, file)| !files.contains(file)).map(|(number, _)| number).collect();
        if unmapped_markers.is_empty() {
            return;
        }
        if let Err(error) = close_in_process(self.pid, &unmapped_markers) {
            tracing::warn!("unplugged memory cannot be freed on the host: {error}");
        }
    }
}
