//! Files of memory: finds their kinds, and opens them.

use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, SealFlags, Stat};
use rustix::io::Errno;
use rustix::process::Pid;

use super::descriptors::Descriptors;
use super::maps::Mapping;
use super::{Obstacle, RamFiles, RamMapping};

/// `HUGETLBFS_MAGIC` of linux/magic.h.
const HUGETLBFS: u32 = 0x9584_58f6;
/// `TMPFS_MAGIC`, which applies to memfds too.
const TMPFS: u32 = 0x0102_1994;

/// Classified shared mappings.
#[derive(Default)]
pub(super) struct ClassifiedMappings {
    /// Memory that can be opened, in rising order of addresses.
    pub(super) memories: Vec<RamMapping>,
    /// Obstacles of some of these memories, and of memory that could not be opened.
    pub(super) refused: Vec<Obstacle>,
    /// Files of other file systems, and files that are known not to be RAM. They are usually no guest memory if there
    /// is other memory.
    pub(super) ignored: Vec<Obstacle>,
}

impl ClassifiedMappings {
    /// Classifies the mappings `candidates`, which are some of `mappings` of `pid`, and opens those that are memory.
    pub(super) fn classify(
        pid: Pid,
        candidates: &[&Mapping],
        mappings: &[Mapping],
        descriptors: &Descriptors,
        ram: Option<&RamFiles>,
    ) -> Self {
        let mut opened = Self::default();
        for mapping in candidates {
            if ram.is_some_and(|ram| !ram.contains(mapping)) {
                let (location, name) = (mapping.location(), mapping.name());
                opened.ignored.push(Obstacle::NotRam { location, name });
                continue;
            }
            match open_file_of(pid, mapping, descriptors).and_then(|(path, stat)| opened.add(mapping, &path, &stat)) {
                Ok(()) => {}
                Err(error) => opened.refused.push(Obstacle::NotOpened {
                    location: mapping.location(),
                    name: mapping.name(),
                    error: error.into(),
                }),
            }
        }
        for memory in &opened.memories {
            let other =
                |mapping: &&Mapping| mapping.location() != memory.location && mapping.overlaps(&memory.location);
            let second = mappings.iter().find(other);
            opened.refused.extend(second.map(|again| Obstacle::MappedTwice {
                location: memory.location,
                name: memory.name.clone(),
                second_address: again.range.start,
                permissions: String::from_utf8_lossy(&again.permissions).into_owned(),
            }));
        }
        opened
    }

    fn add(&mut self, mapping: &Mapping, path: &OwnedFd, stat: &Stat) -> Result<(), Errno> {
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        let location = mapping.location();
        let name = mapping.name();
        match rustix::fs::fstatfs(path)?.f_type as u32 {
            TMPFS => {}
            HUGETLBFS => {
                self.refused.push(Obstacle::Hugetlbfs { location, name });
                return Ok(());
            }
            _ => {
                self.ignored.push(Obstacle::OnDisk { location, name });
                return Ok(());
            }
        }
        // A new open file description has a file offset of its own.
        let proc_path = format!("/proc/self/fd/{}", path.as_raw_fd());
        let file = File::from(rustix::fs::open(proc_path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?);
        let file_bytes = u64::try_from(stat.st_size).unwrap_or_default();
        if file_bytes < location.offset + location.bytes {
            let name = name.clone();
            self.refused.push(Obstacle::PastEnd { location, name, file_bytes });
        }
        if let Some(seals) = forbidding_seal(&file) {
            let name = name.clone();
            self.refused.push(Obstacle::Sealed { location, name, seals });
        }
        self.memories.push(RamMapping { location, name, file });
        Ok(())
    }
}

/// Finds the file of `mapping`, as an `O_PATH` descriptor. Opening a device itself could have side effects.
fn open_file_of(pid: Pid, mapping: &Mapping, descriptors: &Descriptors) -> Result<(OwnedFd, Stat), Errno> {
    let first = &mapping.first_range;
    let by_map_files = open_if_same(&format!("/proc/{pid}/map_files/{:x}-{:x}", first.start, first.end), mapping);
    // Opening map_files needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN on the host, and the mapping may have been
    // split meanwhile.
    by_map_files.or_else(|error| {
        let file_descriptors = descriptors.all.iter().filter(|descriptor| descriptor.path.starts_with(b"/"));
        let mut found = file_descriptors.filter_map(|descriptor| {
            let link = format!("/proc/{pid}/fd/{}", descriptor.number);
            open_if_same(&link, mapping).ok()
        });
        found.next().ok_or(error)
    })
}

/// Opens the target of `link`, if it is the file of `mapping`.
fn open_if_same(link: &str, mapping: &Mapping) -> Result<(OwnedFd, Stat), Errno> {
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
fn forbidding_seal(file: &File) -> Option<&'static str> {
    // A file that does not support seals has none.
    let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    if seals.contains(SealFlags::WRITE) {
        return Some("F_SEAL_WRITE");
    }
    seals.contains(SealFlags::FUTURE_WRITE).then_some("F_SEAL_FUTURE_WRITE")
}
