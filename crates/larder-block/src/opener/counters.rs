//! The kernel's counters of the writes to a block device, in sysfs.
//!
//! Invariant: a counter that is not reliable is never reported as reliable. The device is then `is_reliable: false`.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::{Access, DirectOpener, Opener, PathSource};

/// Names of devices to whose storage other hosts or programs can write, without a trace in the device's counters.
const REMOTE_NAMES: [&str; 5] = ["nbd", "rbd", "drbd", "ublkb", "etherd"];

/// Parts of the sysfs paths of devices that are reached by iSCSI, Fibre Channel, or NVMe over fabrics.
const REMOTE_PATHS: [&str; 3] = ["/session", "/rport-", "/nvme-fabrics/"];

/// The maximum depth of stacked devices that is followed (LVM on a RAID on dm-crypt is 3).
const DEPTH_MAX: u32 = 8;

/// The inode number, size and times of a file. Times are in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileTimes {
    /// The inode number.
    pub inode: u64,
    /// The size in bytes.
    pub size: u64,
    /// The time of the last modification of the content.
    pub mtime_ns: i64,
    /// The time of the last change of the content or the attributes.
    pub ctime_ns: i64,
}

impl FileTimes {
    /// Returns the later of the two times.
    pub fn latest_ns(&self) -> i64 {
        self.mtime_ns.max(self.ctime_ns)
    }
}

impl From<&fs::Metadata> for FileTimes {
    fn from(metadata: &fs::Metadata) -> Self {
        let ns = |seconds: i64, nanoseconds: i64| seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds);
        Self {
            inode: metadata.ino(),
            size: metadata.size(),
            mtime_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// The state of a block device, as far as the kernel counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// The sequence number of the disk, which no other disk gets until a reboot (`diskseq`); 0 if unknown.
    pub sequence: u64,
    /// Sectors of 512 bytes that were written or discarded through the device.
    pub written_sectors: u64,
    /// For a partition: sectors that were written through the whole disk's device.
    pub written_through_disk: u64,
    /// All writes to the storage are counted: the device is local, and statistics are enabled.
    pub is_reliable: bool,
    /// For a loop device: the state of its backing file.
    pub backing: Option<FileTimes>,
}

impl fmt::Display for DiskCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reliable = u8::from(self.is_reliable);
        write!(f, "{} {} {} {reliable}", self.sequence, self.written_sectors, self.written_through_disk)?;
        match &self.backing {
            None => Ok(()),
            Some(file) => write!(f, " {} {} {} {}", file.inode, file.size, file.mtime_ns, file.ctime_ns),
        }
    }
}

impl FromStr for DiskCounters {
    type Err = io::Error;

    fn from_str(text: &str) -> io::Result<Self> {
        let fields: Vec<&str> = text.split(' ').collect();
        let (counters, backing) = match fields.len() {
            4 => (&fields[..4], None),
            8 => (&fields[..4], Some(&fields[4..])),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        let backing = backing.map(|file| {
            Ok::<_, io::Error>(FileTimes {
                inode: parse_number(file[0])?,
                size: parse_number(file[1])?,
                mtime_ns: parse_number(file[2])?,
                ctime_ns: parse_number(file[3])?,
            })
        });
        Ok(Self {
            sequence: parse_number(counters[0])?,
            written_sectors: parse_number(counters[1])?,
            written_through_disk: parse_number(counters[2])?,
            is_reliable: parse_number::<u8>(counters[3])? == 1,
            backing: backing.transpose()?,
        })
    }
}

fn parse_number<T: FromStr>(text: &str) -> io::Result<T> {
    text.trim().parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// Reads the counters of `device`, to which `devices` (`/sys/dev/block`) has a link.
pub(super) fn read(devices: &Path, device: u64) -> io::Result<DiskCounters> {
    let name = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let sysfs_path = devices.join(name).canonicalize()?;
    let is_partition = sysfs_path.join("partition").exists();
    let disk = match is_partition {
        true => sysfs_path.parent().unwrap_or(&sysfs_path).to_owned(),
        false => sysfs_path.clone(),
    };
    let written_through_disk = match is_partition {
        true => {
            // The partitions are read first: concurrent writes make the difference larger, never negative.
            let by_partitions = written_by_partitions(&disk)?;
            written_sectors(&disk)?.saturating_sub(by_partitions)
        }
        false => 0,
    };
    let is_loop = disk.join("loop").is_dir();
    let backing = is_loop.then(|| backing_file(&disk)).flatten();
    let sequence = fs::read_to_string(disk.join("diskseq")).ok();
    let is_counted = fs::read_to_string(disk.join("queue/iostats")).is_ok_and(|text| text.trim() == "1");
    Ok(DiskCounters {
        sequence: sequence.map_or(Ok(0), |text| parse_number(&text))?,
        written_sectors: written_sectors(&sysfs_path)?,
        written_through_disk,
        is_reliable: is_counted && is_local(&disk, 0) && (!is_loop || backing.is_some()),
        backing,
    })
}

/// Returns the sectors written and discarded (Documentation/block/stat.rst).
fn written_sectors(sysfs_path: &Path) -> io::Result<u64> {
    const WRITTEN: usize = 6;
    const DISCARDED: usize = 13;
    let text = fs::read_to_string(sysfs_path.join("stat"))?;
    let fields: Vec<&str> = text.split_whitespace().collect();
    let written: u64 = parse_number(fields.get(WRITTEN).copied().unwrap_or_default())?;
    // Kernels before 4.18 do not count discards.
    let discarded: u64 = fields.get(DISCARDED).map_or(Ok(0), |text| parse_number(text))?;
    Ok(written.wrapping_add(discarded))
}

fn written_by_partitions(disk: &Path) -> io::Result<u64> {
    let mut sum = 0_u64;
    for entry in fs::read_dir(disk)? {
        let entry_path = entry?.path();
        if entry_path.join("partition").exists() {
            sum = sum.wrapping_add(written_sectors(&entry_path)?);
        }
    }
    Ok(sum)
}

/// Returns the state of a loop device's backing file; `None` if it has no path, or is on a server.
fn backing_file(disk: &Path) -> Option<FileTimes> {
    let text = fs::read_to_string(disk.join("loop/backing_file")).ok()?;
    let path = PathBuf::from(text.trim_end_matches('\n'));
    let file = DirectOpener.open(&path, Access::Inspect, PathSource::User).ok()?;
    let metadata = file.metadata().ok()?;
    let is_local = rustix::fs::fstatfs(&file).is_ok_and(|found| crate::boot::is_local_file_system(&found));
    (metadata.is_file() && is_local).then(|| FileTimes::from(&metadata))
}

/// Returns true if a disk and all devices below it are local to this host.
fn is_local(disk: &Path, depth: u32) -> bool {
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    let path = disk.to_string_lossy();
    if depth > DEPTH_MAX
        || REMOTE_NAMES.iter().any(|remote| name.starts_with(remote))
        || REMOTE_PATHS.iter().any(|remote| path.contains(remote))
    {
        return false;
    }
    let lower_devices = fs::read_dir(disk.join("slaves")).into_iter().flatten().flatten();
    lower_devices.map(|entry| entry.path().canonicalize()).all(|below| {
        below.is_ok_and(|below| {
            // The file below a loop device has no counters of its own.
            let is_file = below.join("loop").is_dir();
            let disk = match below.join("partition").exists() {
                true => below.parent().unwrap_or(&below).to_owned(),
                false => below,
            };
            !is_file && is_local(&disk, depth + 1)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_round_trip_as_text() {
        let file = FileTimes { inode: 5, size: u64::MAX, mtime_ns: -7, ctime_ns: i64::MAX };
        for backing in [None, Some(file)] {
            let counters = DiskCounters {
                sequence: 3086,
                written_sectors: u64::MAX,
                written_through_disk: 9,
                is_reliable: backing.is_none(),
                backing,
            };
            let text = counters.to_string();
            assert_eq!(text.parse::<DiskCounters>().expect("parses"), counters);
            assert!(format!("{text} 1").parse::<DiskCounters>().is_err());
        }
        assert!("".parse::<DiskCounters>().is_err());
    }

    #[test]
    fn partition_counters_come_from_sysfs() {
        let sys = tempfile::tempdir().expect("a directory");
        let at = |name: &str| sys.path().join(name);
        let stat = |written: u64, discarded: u64| format!("1 0 8 0 3 0 {written} 0 0 0 0 4 0 {discarded} 0 0 0\n");
        fs::create_dir_all(at("sda/queue")).expect("a directory");
        for (part, sectors) in [("sda/sda1", 100), ("sda/sda2", 7)] {
            fs::create_dir_all(at(part)).expect("a directory");
            fs::write(at(part).join("partition"), "1").expect("a file");
            fs::write(at(part).join("stat"), stat(sectors, 1)).expect("a file");
        }
        fs::write(at("sda/stat"), stat(110, 3)).expect("a file");
        fs::write(at("sda/diskseq"), "12\n").expect("a file");
        fs::write(at("sda/queue/iostats"), "1\n").expect("a file");
        std::os::unix::fs::symlink("sda/sda1", at("8:1")).expect("a link");
        let device = rustix::fs::makedev(8, 1);
        let expected = DiskCounters {
            sequence: 12,
            written_sectors: 101,
            written_through_disk: 4,
            is_reliable: true,
            backing: None,
        };
        assert_eq!(read(sys.path(), device).expect("is there"), expected);
        fs::write(at("sda/queue/iostats"), "0\n").expect("a file");
        assert!(!read(sys.path(), device).expect("is there").is_reliable);
        assert!(!is_local(Path::new("/sys/devices/platform/host3/session1/target3/block/sdb"), 0));
        assert!(!is_local(Path::new("/sys/devices/virtual/block/nbd3"), 0));
    }
}
