//! Files of memory: finds their kinds, and opens them.

use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, SealFlags, Stat};
use rustix::io::Errno;
use rustix::process::Pid;

use super::descriptors::Descriptors;
use super::maps::Mapping;
use super::{Memory, Obstacle, RamFiles};

/// `HUGETLBFS_MAGIC` of linux/magic.h.
const HUGETLBFS: u32 = 0x9584_58f6;
/// `TMPFS_MAGIC`, which applies to memfds too.
const TMPFS: u32 = 0x0102_1994;

/// Classified shared mappings.
#[derive(Default)]
pub(super) struct Opened {
    /// Memory that can be opened, in rising order of addresses.
    pub(super) memories: Vec<Memory>,
    /// Obstacles of some of these memories, and of memory that could not be opened.
    pub(super) refused: Vec<Obstacle>,
    /// Files of other file systems, and files that are known not to be RAM. They are usually no guest memory if there
    /// is other memory.
    pub(super) left_alone: Vec<Obstacle>,
}

impl Opened {
    /// Classifies the mappings `wanted`, which are some of `mappings` of `pid`, and opens those that are memory.
    pub(super) fn of(
        pid: Pid,
        wanted: &[&Mapping],
        mappings: &[Mapping],
        descriptors: &Descriptors,
        ram: Option<&RamFiles>,
    ) -> Self {
        let mut opened = Self::default();
        for mapping in wanted {
            if ram.is_some_and(|ram| !ram.has(mapping)) {
                let (place, name) = (mapping.place(), mapping.name());
                opened.left_alone.push(Obstacle::NotRam { place, name });
                continue;
            }
            match find(pid, mapping, descriptors).and_then(|(path, stat)| opened.add(mapping, &path, &stat)) {
                Ok(()) => {}
                Err(error) => opened.refused.push(Obstacle::NotOpened {
                    place: mapping.place(),
                    name: mapping.name(),
                    error: error.into(),
                }),
            }
        }
        for memory in &opened.memories {
            let other = |mapping: &&Mapping| mapping.place() != memory.place && mapping.has_of(&memory.place);
            let again = mappings.iter().find(other);
            opened.refused.extend(again.map(|again| Obstacle::MappedTwice {
                place: memory.place,
                name: memory.name.clone(),
                again: again.range.start,
                rights: String::from_utf8_lossy(&again.rights).into_owned(),
            }));
        }
        opened
    }

    fn add(&mut self, mapping: &Mapping, path: &OwnedFd, stat: &Stat) -> Result<(), Errno> {
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        let place = mapping.place();
        let name = mapping.name();
        match rustix::fs::fstatfs(path)?.f_type as u32 {
            TMPFS => {}
            HUGETLBFS => {
                self.refused.push(Obstacle::HugePages { place, name });
                return Ok(());
            }
            _ => {
                self.left_alone.push(Obstacle::OnDisk { place, name });
                return Ok(());
            }
        }
        // A new open file description has a file offset of its own.
        let again = format!("/proc/self/fd/{}", path.as_raw_fd());
        let file = File::from(rustix::fs::open(again, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?);
        let file_bytes = u64::try_from(stat.st_size).unwrap_or_default();
        if file_bytes < place.offset + place.bytes {
            let name = name.clone();
            self.refused.push(Obstacle::PastEnd {
                place,
                name,
                file_bytes,
            });
        }
        if let Some(seals) = seals(&file) {
            let name = name.clone();
            self.refused.push(Obstacle::Sealed { place, name, seals });
        }
        self.memories.push(Memory { place, name, file });
        Ok(())
    }
}

/// Finds the file of `mapping`, as an `O_PATH` descriptor. Opening a device itself could have side effects.
fn find(pid: Pid, mapping: &Mapping, descriptors: &Descriptors) -> Result<(OwnedFd, Stat), Errno> {
    let first = &mapping.first;
    let by_address = path(
        &format!("/proc/{pid}/map_files/{:x}-{:x}", first.start, first.end),
        mapping,
    );
    // Opening map_files needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN on the host, and the mapping may have been
    // split meanwhile.
    by_address.or_else(|error| {
        let of_files = descriptors
            .all
            .iter()
            .filter(|descriptor| descriptor.path.starts_with(b"/"));
        let mut found = of_files.filter_map(|descriptor| {
            let path_of = format!("/proc/{pid}/fd/{}", descriptor.number);
            path(&path_of, mapping).ok()
        });
        found.next().ok_or(error)
    })
}

/// Opens the target of `link`, if it is the file of `mapping`.
fn path(link: &str, mapping: &Mapping) -> Result<(OwnedFd, Stat), Errno> {
    let path = rustix::fs::open(link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&path)?;
    // A file system with several devices (btrfs, overlayfs) reports another device here. It is no memory.
    let is_same = stat.st_ino == mapping.inode
        && (stat.st_dev == mapping.device
            || rustix::fs::fstatfs(&path).is_ok_and(|system| ![TMPFS, HUGETLBFS].contains(&(system.f_type as u32))));
    if !is_same {
        return Err(Errno::STALE);
    }
    Ok((path, stat))
}

/// Returns the name of a seal that forbids removing pages (memfd_create(2), fcntl(2)).
fn seals(file: &File) -> Option<&'static str> {
    // A file that does not support seals has none.
    let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    if seals.contains(SealFlags::WRITE) {
        return Some("F_SEAL_WRITE");
    }
    seals.contains(SealFlags::FUTURE_WRITE).then_some("F_SEAL_FUTURE_WRITE")
}
