//! Inspection of a process whose memory is to be managed: finds that memory, and all obstacles to managing it.
//!
//! The inspection is read-only. It changes nothing in the process, stops no thread of it, and opens only the files of
//! its memory. So obstacles are reported before anything has happened, and all that can be found are reported
//! together.
//!
//! Managed memory consists of the shared, writable mappings of memfds and of files in tmpfs, from
//! [`InspectOptions::bytes_min`] on. Larder's own memfds, named `larder-...`, are excluded.
//!
//! # Assumptions and failures
//! - Everything is read from /proc (proc(5)) under a PID that may be reused at any time. A pidfd identifies the
//!   process, and the results count only if it has not ended by the end of the inspection.
//! - Descriptors, mappings, threads and other processes may change meanwhile. Those that have disappeared are
//!   skipped; later ones are not seen. The result describes the past, not the future. A device that is added later
//!   (VFIO) is found by another inspection.
//! - Page tables are not walked, as `smaps` does, because that blocks changes of the process's mappings. So a
//!   userfaultfd that was passed to another process is not found here, but fails the registration of the memory
//!   (`EBUSY`).

mod descriptors;
mod error;
mod external_mappers;
mod files;
mod kernel;
mod maps;
mod postcopy;
mod process;
mod qmp;

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::process::Pid;

use crate::locked_ring::RING_NAME;
use crate::state::{COMPRESSED_NAME, PAGES_NAME, Region};

pub use error::{DmaDevice, Obstacle, TargetError};
pub use external_mappers::ExternalMappers;
pub use postcopy::{FaultClaim, FaultClaimError, claim_faults_for_postcopy};
pub use process::is_alive;
pub use qmp::{QmpError, pid_of_qmp};

use descriptors::Descriptors;
use error::Size;
use files::ClassifiedMappings;
use maps::Mapping;
use process::{TargetProcess, failed};

/// Parses `bytes` as a table of mappings and as a table of sockets, for fuzzing.
#[doc(hidden)]
pub fn parse_tables(bytes: &[u8]) {
    for mapping in maps::parse(bytes) {
        let (name, location) = (mapping.name(), mapping.location());
        assert!(
            location.bytes > 0 && location.offset.checked_add(location.bytes).is_some() && !name.contains('\u{1b}')
        );
        assert!(mapping.overlaps(&location));
    }
    for at in qmp::parse_listening(bytes).values() {
        assert!(!at.is_empty());
    }
}

/// Private memory below this size is ignored if there is shared memory: the arenas of malloc(3) have up to 64 MiB.
const PRIVATE_BYTES_MIN: u64 = 128 << 20;

/// Options of an inspection.
#[derive(Clone, Copy, Debug)]
pub struct InspectOptions {
    /// Minimum size of memory to manage, in bytes; 16 MiB by default.
    pub bytes_min: u64,
    /// Finds the files of a process's shared memory that are guest RAM. `None` means unknown, and all of them count
    /// as RAM; this is the default.
    pub ram_of: fn(Pid) -> Option<RamFiles>,
}

/// Files that are guest RAM, among all shared mappings of a process.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct RamFiles {
    /// Device and inode of files that are known to be RAM, with or without a path.
    pub named: Vec<(u64, u64)>,
    /// Name of the memfds that are RAM, if other files without a path come from another process. `None` takes all
    /// files without a path for RAM. A file with a path can be mapped by any program.
    pub memfd: Option<&'static str>,
}

impl RamFiles {
    fn contains(&self, mapping: &Mapping) -> bool {
        let is_named = self.named.contains(&(mapping.device, mapping.inode));
        // A memfd never has a path.
        let has_path = !mapping.path.ends_with(b" (deleted)");
        is_named || !has_path && self.memfd.is_none_or(|name| mapping.is_memfd(name))
    }
}

impl Default for InspectOptions {
    fn default() -> Self {
        Self { bytes_min: 16 << 20, ram_of: |_| None }
    }
}

/// Location of memory, in bytes, as multiples of the page size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MappingLocation {
    /// Address in the process.
    pub address: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
    /// Device number of the file's file system, as in fstat(2).
    pub device: u64,
    /// Inode number of the file.
    pub inode: u64,
}

impl MappingLocation {
    /// Returns the location of a region.
    pub fn of(region: &Region) -> Self {
        Self {
            address: region.address,
            offset: region.offset,
            bytes: region.bytes(),
            device: region.device,
            inode: region.inode,
        }
    }
}

/// Memory of the process.
#[derive(Debug)]
pub struct RamMapping {
    /// Location of the memory.
    pub location: MappingLocation,
    /// Name of the memfd or path of the file, for messages.
    pub name: String,
    /// The file, opened by this process for reading and writing.
    pub file: File,
}

/// Returns the descriptors with which the process holds its memory marked as managed
/// ([`larder_export::external_mapping`]).
///
/// # Errors
/// If the process has ended, or cannot be inspected.
pub fn marker_descriptors(pid: Pid) -> std::io::Result<Vec<i32>> {
    Ok(Descriptors::read(pid)?.markers())
}

/// Descriptors of an earlier pager that the process holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OrphanedDescriptors {
    /// Number of the descriptor of [`crate::state::PAGES_NAME`].
    pub pages: i32,
    /// Number of the descriptor of [`crate::state::COMPRESSED_NAME`].
    pub compressed: Option<i32>,
    /// Numbers of userfaultfds that a pager may have made.
    pub unrecorded_userfaultfds: Vec<i32>,
    /// Numbers of the descriptors of [`crate::locked_ring::RING_NAME`].
    pub ring_memories: Vec<i32>,
}

/// A disk server of Larder that has memory of the process mapped too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskServerProcess {
    /// PID of the server.
    pub pid: Pid,
    /// Number of the server's descriptor of its view memory ([`larder_export::external_mapping`]).
    pub descriptor: i32,
}

/// Changes of the memory since the last inspection.
#[derive(Default, Debug)]
pub struct MemoryChanges {
    /// New memory, in rising order of addresses.
    pub added: Vec<RamMapping>,
    /// Memory that was unmapped or changed, refused memory included.
    pub unmapped: Vec<MappingLocation>,
    /// Reasons why new memory cannot be managed. Each is reported once.
    pub refused: Vec<Obstacle>,
    /// Warnings about the new memory.
    pub warnings: Vec<String>,
}

/// A process that can be attached to.
#[derive(Debug)]
pub struct Target {
    /// Name of the process, for messages.
    pub name: String,
    /// Memory of the process, in rising order of addresses. Never empty at first.
    pub ram_mappings: Vec<RamMapping>,
    /// The process has files open for direct I/O, which may write to memory long after it was write-protected.
    pub uses_direct_io: bool,
    /// Descriptors that an earlier pager has left.
    pub orphaned: Option<OrphanedDescriptors>,
    /// Warnings, one sentence each. None of them prevents attaching.
    pub warnings: Vec<String>,
    /// Obstacles to a first attach. Only a process with [`Self::orphaned`] can have any: the successor of a pager
    /// attaches in spite of them.
    pub obstacles: Vec<Obstacle>,
    /// Memory found by the last inspection, refused memory included.
    known: Vec<MappingLocation>,
    process: TargetProcess,
}

impl Target {
    /// Inspects process `pid`.
    ///
    /// # Errors
    /// If the process cannot be read, or if there are obstacles: the error lists all of them. If a pager has left its
    /// state, only obstacles to its successor are errors ([`Self::obstacles`] has the others).
    pub fn inspect(pid: Pid, options: &InspectOptions) -> Result<Self, TargetError> {
        let process = TargetProcess::open(pid)?;
        let mut warnings = Vec::new();
        let mut obstacles = kernel::obstacles(&mut warnings);
        let mappings = read_maps(pid)?;
        let descriptors = read_descriptors(pid)?;
        obstacles.extend(process::obstacles(pid, options.bytes_min, &mut warnings)?);
        obstacles.extend(descriptors.obstacles(&mut warnings));

        let candidates = candidate_mappings(&mappings, options);
        let ram = ram_of(pid, options, &descriptors);
        let opened = ClassifiedMappings::classify(pid, &candidates, &mappings, &descriptors, ram.as_ref());
        let private = largest_private(&mappings);
        let has_none = opened.memories.is_empty();
        if has_none && opened.refused.is_empty() && opened.ignored.is_empty() {
            let bytes_min = options.bytes_min;
            let private = private.filter(|mapping| mapping.bytes() >= bytes_min);
            obstacles.push(private.map_or(Obstacle::NoMemory { bytes_min }, private_obstacle));
        } else if let Some(private) = private.filter(|mapping| mapping.bytes() >= PRIVATE_BYTES_MIN) {
            if has_none {
                obstacles.push(private_obstacle(private));
            } else {
                let (bytes, at) = (Size(private.bytes()), private.range.start);
                warnings.push(format!(
                    "{bytes} of private memory at {at:#x} are not managed, whether they belong to the guest or not"
                ));
            }
        }
        if has_none {
            obstacles.extend(opened.ignored);
        } else {
            warnings.extend(opened.ignored.iter().map(ignored_warning));
        }
        obstacles.extend(opened.refused);
        let others = external_mappers::find(pid, &locations_of(&opened.memories), &mut warnings);
        obstacles.extend(others.obstacles);

        let orphaned = descriptors.orphaned();
        // Managed memory is filled with small pages only, so a successor needs no check.
        if orphaned.is_none() {
            obstacles.extend(kernel::huge_page_obstacles(&opened.memories));
        }

        let name = process::name(pid.as_raw_pid());
        let direct_io = descriptors.uses_direct_io();
        process.check()?;
        let is_forbidden = match &orphaned {
            None => !obstacles.is_empty(),
            Some(_) => obstacles.iter().any(Obstacle::forbids_successor),
        };
        if is_forbidden {
            return Err(TargetError::Obstacles { pid, name, obstacles });
        }
        Ok(Self {
            name,
            ram_mappings: opened.memories,
            uses_direct_io: direct_io,
            orphaned,
            warnings,
            obstacles,
            known: candidates.into_iter().map(Mapping::location).collect(),
            process,
        })
    }

    /// Returns the PID.
    pub fn pid(&self) -> Pid {
        self.process.pid
    }

    /// Forgets memory that was found but is not managed. The next [`Self::rescan`] reports it as new again.
    pub fn report_again(&mut self, location: MappingLocation) {
        self.known.retain(|seen| *seen != location);
    }

    /// Returns the number of threads that do the process's work: QEMU's vCPUs if they have names (`-name
    /// debug-threads=on`, which libvirt sets), else all threads.
    pub fn guest_threads(&self) -> usize {
        let task_directory = format!("/proc/{}/task", self.pid().as_raw_pid());
        let threads = std::fs::read_dir(task_directory).into_iter().flatten().flatten();
        let names = threads.filter_map(|thread| std::fs::read(thread.path().join("comm")).ok());
        let names: Vec<Vec<u8>> = names.collect();
        match names.iter().filter(|name| name.starts_with(b"CPU ")).count() {
            0 => names.len(),
            vcpus => vcpus,
        }
    }

    /// Returns the pidfd, which identifies the process even if its PID is reused.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd.as_fd()
    }

    /// Returns the start time of the process, in clock ticks after the host's boot (field 22 of /proc/PID/stat).
    pub fn start_time(&self) -> u64 {
        self.process.start_time
    }

    /// Inspects the memory again, and returns the memory that was hotplugged or unmapped. Does not change
    /// [`Self::ram_mappings`]. Reads the process's mappings, and those of all other processes if there is new memory.
    ///
    /// # Errors
    /// If the process has ended, or cannot be inspected any more.
    pub fn rescan(&mut self, options: &InspectOptions) -> Result<MemoryChanges, TargetError> {
        let pid = self.pid();
        let mappings = read_maps(pid)?;
        let all = candidate_mappings(&mappings, options);
        let added = all.iter().copied().filter(|mapping| !self.known.contains(&mapping.location()));
        let new: Vec<&Mapping> = added.collect();
        let mut known: Vec<MappingLocation> = all.into_iter().map(Mapping::location).collect();
        let mut changes = MemoryChanges::default();
        if !new.is_empty() {
            let descriptors = read_descriptors(pid)?;
            let ram = ram_of(pid, options, &descriptors);
            let opened = ClassifiedMappings::classify(pid, &new, &mappings, &descriptors, ram.as_ref());
            changes.added = opened.memories;
            // A mapping that may have disappeared is inspected again the next time, if it is there then.
            let (vanished, refused): (Vec<_>, Vec<_>) =
                opened.refused.into_iter().partition(Obstacle::may_have_vanished);
            known.retain(|place| !vanished.iter().any(|why| why.location() == Some(*place)));
            changes.refused = refused;
            changes.warnings.extend(opened.ignored.iter().map(ignored_warning));
            let others = external_mappers::find(pid, &locations_of(&changes.added), &mut changes.warnings);
            changes.refused.extend(others.obstacles);
            changes.refused.extend(kernel::huge_page_obstacles(&changes.added));
            let is_refused =
                |memory: &RamMapping| changes.refused.iter().any(|why| why.location() == Some(memory.location));
            changes.added.retain(|memory| !is_refused(memory));
        }
        self.process.check()?;
        let before = std::mem::replace(&mut self.known, known);
        changes.unmapped = before.into_iter().filter(|place| !self.known.contains(place)).collect();
        Ok(changes)
    }
}

/// Finds the other processes that have any of these regions of process `pid` mapped: servers of Larder, and processes
/// whose faults are not reported. Reads the mappings of all processes.
pub fn external_mappers_of(pid: Pid, regions: &[Region]) -> ExternalMappers {
    let regions = regions.iter().filter(|region| !region.is_unmapped());
    let locations: Vec<(MappingLocation, &str)> =
        regions.map(|region| (MappingLocation::of(region), "guest memory")).collect();
    external_mappers::find(pid, &locations, &mut Vec::new())
}

/// Finds memory in huge pages, or in file systems that allow them: it must not be managed, unless it is already.
pub(crate) fn huge_page_setting(memories: &[RamMapping]) -> Vec<Obstacle> {
    kernel::huge_page_obstacles(memories)
}

/// Returns the shared mappings in process `pid` of any part of `region`'s file that belongs to the region.
///
/// # Errors
/// If the process has ended, or cannot be inspected.
pub fn mappings_of_region(pid: Pid, region: &Region) -> std::io::Result<Vec<MappingLocation>> {
    let location = MappingLocation::of(region);
    let found = maps::read(pid)?;
    let found = found.iter().filter(|mapping| mapping.is_shared() && mapping.overlaps(&location));
    Ok(found.map(Mapping::location).collect())
}

fn locations_of(memories: &[RamMapping]) -> Vec<(MappingLocation, &str)> {
    let location = |memory| {
        let RamMapping { location: place, name, .. }: &RamMapping = memory;
        (*place, name.as_str())
    };
    memories.iter().map(location).collect()
}

fn read_maps(pid: Pid) -> Result<Vec<Mapping>, TargetError> {
    let mappings = maps::read(pid).map_err(|error| failed(pid, "read its mappings", error))?;
    // An exiting process frees its memory before its PID disappears.
    if mappings.is_empty() {
        return Err(TargetError::Ended { pid });
    }
    Ok(mappings)
}

fn read_descriptors(pid: Pid) -> Result<Descriptors, TargetError> {
    Descriptors::read(pid).map_err(|error| failed(pid, "read its descriptors", error))
}

/// Returns the files that are RAM, and those that a pager has marked as managed: a successor needs all that has
/// evicted pages.
fn ram_of(pid: Pid, options: &InspectOptions, descriptors: &Descriptors) -> Option<RamFiles> {
    let mut ram = (options.ram_of)(pid)?;
    let markers = descriptors.markers().into_iter();
    let marked = markers.filter_map(|number| rustix::fs::stat(format!("/proc/{pid}/fd/{number}")).ok());
    ram.named.extend(marked.map(|found| (found.st_dev, found.st_ino)));
    Some(ram)
}

/// Returns the mappings that may be memory to manage, before their files are inspected.
fn candidate_mappings<'a>(mappings: &'a [Mapping], options: &InspectOptions) -> Vec<&'a Mapping> {
    let is_candidate = |mapping: &&Mapping| {
        mapping.is_shared()
            && mapping.is_writable()
            && mapping.bytes() >= options.bytes_min
            && mapping.path.starts_with(b"/")
            && ![PAGES_NAME, COMPRESSED_NAME, RING_NAME].iter().any(|own_memfd| mapping.is_memfd(own_memfd))
    };
    mappings.iter().filter(is_candidate).collect()
}

fn largest_private(mappings: &[Mapping]) -> Option<&Mapping> {
    let private = mappings.iter().filter(|mapping| mapping.may_be_private_memory());
    private.max_by_key(|mapping| mapping.bytes())
}

fn private_obstacle(mapping: &Mapping) -> Obstacle {
    Obstacle::Private { location: mapping.location(), name: mapping.name() }
}

fn ignored_warning(obstacle: &Obstacle) -> String {
    format!("not managed: {obstacle}")
}

/// Makes bytes that another process has chosen printable on one line of a terminal or log.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
