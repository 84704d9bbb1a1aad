//! A process whose memory is to be managed: which memory that is, and everything that is in the way.
//!
//! This only looks. Nothing in the process changes, nothing of it is stopped, and of its files only those are opened
//! that are its memory. So an obstacle is told before anything has happened, and all that can be found are told at once.
//!
//! Memory is what the process has mapped shared and writable of a memfd or of a file in tmpfs, of at least
//! [`Options::bytes_min`]; Larder's own (memfds named `larder-...`) is not.
//!
//! # What it relies on, and how it fails
//! - All is read from /proc (proc(5)), under a PID that may be given to another process at any time: the process is held
//!   by a pidfd, and what was read counts only if it has not ended by then.
//! - Descriptors, mappings, threads and other processes come and go meanwhile. What is gone is left out; what comes
//!   later is not seen: the examination tells how things were, not how they will stay. A device that is added later
//!   (VFIO) is found by another one.
//! - Page tables are not walked, as `smaps` does, because that keeps the process from changing its mappings: so a
//!   userfaultfd that was handed to another process is not seen here, but when memory is registered with ours (`EBUSY`).

mod descriptors;
mod error;
mod files;
mod kernel;
mod maps;
mod others;
mod postcopy;
mod process;
mod qmp;

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::process::Pid;

use crate::locked_ring::RING_NAME;
use crate::state::{COMPRESSED_NAME, PAGES_NAME, Region};

pub use error::{Device, Obstacle, TargetError};
pub use others::Others;
pub use postcopy::{FaultClaim, FaultClaimError, claim_faults_for_postcopy};
pub use process::is_alive;
pub use qmp::{QmpError, pid_of_qmp};

use descriptors::Descriptors;
use error::Size;
use files::Opened;
use maps::Mapping;
use process::{Process, failed};

/// Reads `bytes` as a table of mappings and as one of sockets, for fuzzing.
#[doc(hidden)]
pub fn read_tables(bytes: &[u8]) {
    for mapping in maps::parse(bytes) {
        let (name, place) = (mapping.name(), mapping.place());
        assert!(place.bytes > 0 && place.offset.checked_add(place.bytes).is_some() && !name.contains('\u{1b}'));
        assert!(mapping.has_of(&place));
    }
    for at in qmp::listening(bytes).values() {
        assert!(!at.is_empty());
    }
}

/// Private memory of less is nothing to speak of beside shared memory: malloc(3)'s arenas have up to 64 MiB.
const PRIVATE_BYTES_MIN: u64 = 128 << 20;

/// What to look for.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Smaller memory is left alone, in bytes: 16 MiB unless told otherwise.
    pub bytes_min: u64,
    /// Finds the files of a process's shared memory that are guest RAM. `None` means unknown, and takes all of them for RAM;
    /// the default.
    pub ram_of: fn(Pid) -> Option<RamFiles>,
}

/// The files that are guest RAM, among all that a process has mapped shared.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct RamFiles {
    /// Device and inode of those that are, whether they have a path or not.
    pub named: Vec<(u64, u64)>,
    /// The name of RAM's memfds, if other files without a path come from another process; `None` takes all files without a
    /// path for RAM. Any program can map a file that has one.
    pub memfd: Option<&'static str>,
}

impl RamFiles {
    fn has(&self, mapping: &Mapping) -> bool {
        let is_named = self.named.contains(&(mapping.device, mapping.inode));
        // A memfd never has a path.
        let has_path = !mapping.path.ends_with(b" (deleted)");
        is_named || !has_path && self.memfd.is_none_or(|name| mapping.is_memfd(name))
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bytes_min: 16 << 20,
            ram_of: |_| None,
        }
    }
}

/// Where memory is. In bytes, all of them whole pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    /// Where the process has it.
    pub address: u64,
    /// Where it begins in its file.
    pub offset: u64,
    /// How much.
    pub bytes: u64,
    /// The device of the file's file system, as of fstat(2).
    pub device: u64,
    /// The file's number there.
    pub inode: u64,
}

impl Place {
    /// Where a region is.
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
pub struct Memory {
    /// Where.
    pub place: Place,
    /// For messages: that of the memfd, or the path of the file.
    pub name: String,
    /// Opened by us, for reading and writing.
    pub file: File,
}

/// Descriptors by which the process holds its memory marked as managed ([`larder_export::view`]).
///
/// # Errors
/// It has ended, or may not be looked at.
pub fn marks(pid: Pid) -> std::io::Result<Vec<i32>> {
    Ok(Descriptors::read(pid)?.marks())
}

/// Descriptors that the process holds of a pager that went away.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeftState {
    /// The number of [`crate::state::PAGES_NAME`].
    pub pages: i32,
    /// The number of [`crate::state::COMPRESSED_NAME`].
    pub compressed: Option<i32>,
    /// The numbers of userfaultfds that can be of a pager.
    pub unnoted: Vec<i32>,
    /// The numbers of [`crate::locked_ring::RING_NAME`].
    pub ring_memories: Vec<i32>,
}

/// A server of Larder's, which has memory of the process mapped, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Viewer {
    /// Its process.
    pub pid: Pid,
    /// The number there of what it says of itself ([`larder_export::view`]).
    pub descriptor: i32,
}

/// What has become of the memory since it was last looked at.
#[derive(Default, Debug)]
pub struct Changes {
    /// Memory that is new, in rising order of addresses.
    pub new: Vec<Memory>,
    /// Where there was memory that is not there any more, or not as it was; refused memory included.
    pub gone: Vec<Place>,
    /// Why memory that is new cannot be managed. Each is told once.
    pub refused: Vec<Obstacle>,
    /// What to know about it.
    pub cautions: Vec<String>,
}

/// A process that can be attached to.
#[derive(Debug)]
pub struct Target {
    /// What it calls itself, for messages.
    pub name: String,
    /// Its memory, in rising order of addresses. Never empty at first.
    pub memories: Vec<Memory>,
    /// Whether it has files open for direct I/O, which may take long between a write-protection and the write.
    pub direct_io: bool,
    /// What a pager that went away has left.
    pub left_state: Option<LeftState>,
    /// What to know, one sentence each. Nothing of it is in the way.
    pub cautions: Vec<String>,
    /// Obstacles to a first attach. There can be any only for a process with [`Self::left_state`]: the successor of a pager
    /// attaches in spite of them.
    pub obstacles: Vec<Obstacle>,
    /// What was there when it was last looked at, refused memory included.
    seen: Vec<Place>,
    process: Process,
}

impl Target {
    /// Looks at process `pid`.
    ///
    /// # Errors
    /// The process cannot be read, or there are obstacles: the error lists all of them. Where a pager has left its state,
    /// only obstacles to its successor are errors ([`Self::obstacles`] has the rest).
    pub fn examine(pid: Pid, options: &Options) -> Result<Self, TargetError> {
        let process = Process::open(pid)?;
        let mut cautions = Vec::new();
        let mut obstacles = kernel::obstacles(&mut cautions);
        let mappings = read_maps(pid)?;
        let descriptors = read_descriptors(pid)?;
        obstacles.extend(process::obstacles(pid, options.bytes_min, &mut cautions)?);
        obstacles.extend(descriptors.obstacles(&mut cautions));

        let wanted = wanted(&mappings, options);
        let ram = ram_of(pid, options, &descriptors);
        let opened = Opened::of(pid, &wanted, &mappings, &descriptors, ram.as_ref());
        let private = largest_private(&mappings);
        let has_none = opened.memories.is_empty();
        if has_none && opened.refused.is_empty() && opened.left_alone.is_empty() {
            let bytes_min = options.bytes_min;
            let private = private.filter(|mapping| mapping.bytes() >= bytes_min);
            obstacles.push(private.map_or(Obstacle::NoMemory { bytes_min }, is_private));
        } else if let Some(private) = private.filter(|mapping| mapping.bytes() >= PRIVATE_BYTES_MIN) {
            if has_none {
                obstacles.push(is_private(private));
            } else {
                let (bytes, at) = (Size(private.bytes()), private.range.start);
                cautions.push(format!(
                    "{bytes} of private memory at {at:#x} are left alone, the guest's or not"
                ));
            }
        }
        if has_none {
            obstacles.extend(opened.left_alone);
        } else {
            cautions.extend(opened.left_alone.iter().map(left_alone));
        }
        obstacles.extend(opened.refused);
        let others = others::find(pid, &places_of(&opened.memories), &mut cautions);
        obstacles.extend(others.obstacles);

        let left_state = descriptors.left_state();
        // Managed memory is filled in small pages only.
        if left_state.is_none() {
            obstacles.extend(kernel::large_pages_of(&opened.memories));
        }

        let name = process::name(pid.as_raw_pid());
        let direct_io = descriptors.direct_io();
        process.check()?;
        let is_forbidden = match &left_state {
            None => !obstacles.is_empty(),
            Some(_) => obstacles.iter().any(Obstacle::forbids_successor),
        };
        if is_forbidden {
            return Err(TargetError::Obstacles { pid, name, obstacles });
        }
        Ok(Self {
            name,
            memories: opened.memories,
            direct_io,
            left_state,
            cautions,
            obstacles,
            seen: wanted.into_iter().map(Mapping::place).collect(),
            process,
        })
    }

    /// Its PID.
    pub fn pid(&self) -> Pid {
        self.process.pid
    }

    /// Memory that is not managed, though it was found: the next [`Self::memories_now`] has it as new again.
    pub fn forget(&mut self, place: Place) {
        self.seen.retain(|seen| *seen != place);
    }

    /// How many threads do its work: QEMU's vCPUs (it names them so if it is told `-name debug-threads=on`, as libvirt does),
    /// else all of them.
    pub fn workers(&self) -> usize {
        let folder = format!("/proc/{}/task", self.pid().as_raw_pid());
        let threads = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let names = threads.filter_map(|thread| std::fs::read(thread.path().join("comm")).ok());
        let names: Vec<Vec<u8>> = names.collect();
        match names.iter().filter(|name| name.starts_with(b"CPU ")).count() {
            0 => names.len(),
            vcpus => vcpus,
        }
    }

    /// The process itself, whatever becomes of the number.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd.as_fd()
    }

    /// When it was started: clock ticks since the host was (field 22 of /proc/PID/stat).
    pub fn started(&self) -> u64 {
        self.process.started
    }

    /// Looks at its memory again: what is new (memory that was plugged in), what has gone. Of [`Self::memories`] nothing
    /// is changed. Costs one read of the process's mappings, and of those of all others if there is anything new.
    ///
    /// # Errors
    /// The process has ended, or can no longer be looked at.
    pub fn memories_now(&mut self, options: &Options) -> Result<Changes, TargetError> {
        let pid = self.pid();
        let mappings = read_maps(pid)?;
        let all = wanted(&mappings, options);
        let new = all
            .iter()
            .copied()
            .filter(|mapping| !self.seen.contains(&mapping.place()));
        let new: Vec<&Mapping> = new.collect();
        let mut seen: Vec<Place> = all.into_iter().map(Mapping::place).collect();
        let mut changes = Changes::default();
        if !new.is_empty() {
            let descriptors = read_descriptors(pid)?;
            let ram = ram_of(pid, options, &descriptors);
            let opened = Opened::of(pid, &new, &mappings, &descriptors, ram.as_ref());
            changes.new = opened.memories;
            // What may have gone is looked for again at the next look, if it is there then.
            let (gone, refused): (Vec<_>, Vec<_>) = opened.refused.into_iter().partition(Obstacle::may_have_gone);
            seen.retain(|place| !gone.iter().any(|why| why.place() == Some(*place)));
            changes.refused = refused;
            changes.cautions.extend(opened.left_alone.iter().map(left_alone));
            let others = others::find(pid, &places_of(&changes.new), &mut changes.cautions);
            changes.refused.extend(others.obstacles);
            changes.refused.extend(kernel::large_pages_of(&changes.new));
            let is_refused = |memory: &Memory| changes.refused.iter().any(|why| why.place() == Some(memory.place));
            changes.new.retain(|memory| !is_refused(memory));
        }
        self.process.check()?;
        let before = std::mem::replace(&mut self.seen, seen);
        changes.gone = before.into_iter().filter(|place| !self.seen.contains(place)).collect();
        Ok(changes)
    }
}

/// Who has any of these regions of process `pid` mapped, apart from that: servers of Larder's, and others, whose faults go
/// unseen. Costs one read of the mappings of all processes.
pub fn others_of(pid: Pid, regions: &[Region]) -> Others {
    let regions = regions.iter().filter(|region| !region.is_gone());
    let places: Vec<(Place, &str)> = regions.map(|region| (Place::of(region), "guest memory")).collect();
    others::find(pid, &places, &mut Vec::new())
}

/// Finds memory in huge pages, or in file systems that allow them: it must not be managed, unless it is already.
pub(crate) fn large_pages(memories: &[Memory]) -> Vec<Obstacle> {
    kernel::large_pages_of(memories)
}

/// Where process `pid` has any of `region`'s file mapped, shared, that is of the region.
///
/// # Errors
/// It has ended, or may not be looked at.
pub fn mapped_by(pid: Pid, region: &Region) -> std::io::Result<Vec<Place>> {
    let place = Place::of(region);
    let found = maps::read(pid)?;
    let found = found
        .iter()
        .filter(|mapping| mapping.is_shared() && mapping.has_of(&place));
    Ok(found.map(Mapping::place).collect())
}

fn places_of(memories: &[Memory]) -> Vec<(Place, &str)> {
    let place = |memory| {
        let Memory { place, name, .. }: &Memory = memory;
        (*place, name.as_str())
    };
    memories.iter().map(place).collect()
}

fn read_maps(pid: Pid) -> Result<Vec<Mapping>, TargetError> {
    let mappings = maps::read(pid).map_err(|error| failed(pid, "read what it has mapped", error))?;
    // It gives up its memory before it is gone.
    if mappings.is_empty() {
        return Err(TargetError::Ended { pid });
    }
    Ok(mappings)
}

fn read_descriptors(pid: Pid) -> Result<Descriptors, TargetError> {
    Descriptors::read(pid).map_err(|error| failed(pid, "read what it has open", error))
}

/// The files that are RAM, and those that a pager has marked as managed: a successor must have all that is evicted.
fn ram_of(pid: Pid, options: &Options, descriptors: &Descriptors) -> Option<RamFiles> {
    let mut ram = (options.ram_of)(pid)?;
    let marks = descriptors.marks().into_iter();
    let marked = marks.filter_map(|number| rustix::fs::stat(format!("/proc/{pid}/fd/{number}")).ok());
    ram.named.extend(marked.map(|found| (found.st_dev, found.st_ino)));
    Some(ram)
}

/// The mappings that can be memory to manage, as far as can be told without a look at their files.
fn wanted<'a>(mappings: &'a [Mapping], options: &Options) -> Vec<&'a Mapping> {
    let is_wanted = |mapping: &&Mapping| {
        mapping.is_shared()
            && mapping.is_writable()
            && mapping.bytes() >= options.bytes_min
            && mapping.path.starts_with(b"/")
            && ![PAGES_NAME, COMPRESSED_NAME, RING_NAME]
                .iter()
                .any(|ours| mapping.is_memfd(ours))
    };
    mappings.iter().filter(is_wanted).collect()
}

fn largest_private(mappings: &[Mapping]) -> Option<&Mapping> {
    let private = mappings.iter().filter(|mapping| mapping.may_be_private_memory());
    private.max_by_key(|mapping| mapping.bytes())
}

fn is_private(mapping: &Mapping) -> Obstacle {
    Obstacle::Private {
        place: mapping.place(),
        name: mapping.name(),
    }
}

fn left_alone(obstacle: &Obstacle) -> String {
    format!("left alone: {obstacle}")
}

/// Bytes that another process has chosen, so that a terminal and a log show them on one line.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}
