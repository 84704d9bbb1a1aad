//! Open descriptors of a process (`/proc/PID/fd`, `/proc/PID/fdinfo`, proc(5)).

use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::time::Duration;

use larder_export::external_mapping::{MANAGED_LOCK_OFFSET, MEMFD_NAME};
use rustix::process::Pid;

use super::error::DmaDevice;
use super::{Obstacle, OrphanedDescriptors, printable};
use crate::locked_ring::{RING_LINK, RING_NAME};
use crate::state::{COMPRESSED_NAME, PAGES_NAME};
use crate::userfaultfd;

/// An open descriptor.
#[derive(Debug)]
pub(super) struct Descriptor {
    pub(super) number: i32,
    /// Target of the /proc link: a path, or the kernel's name of a file without one. Any bytes.
    pub(super) path: Vec<u8>,
}

/// Descriptors of one process, by number.
#[derive(Debug)]
pub(super) struct Descriptors {
    pid: Pid,
    pub(super) all: Vec<Descriptor>,
}

impl Descriptors {
    /// Reads the descriptors of `pid`. Those that are closed meanwhile are skipped.
    ///
    /// # Errors
    /// Errors of opening the directory: `EACCES` without permission, `ENOENT` if the process has ended.
    pub(super) fn read(pid: Pid) -> io::Result<Self> {
        let entries = fs::read_dir(format!("/proc/{pid}/fd"))?;
        let mut all: Vec<Descriptor> = entries
            .flatten()
            .filter_map(|entry| {
                let number = entry.file_name().to_str()?.parse().ok()?;
                let path = fs::read_link(entry.path()).ok()?.into_os_string().into_vec();
                Some(Descriptor { number, path })
            })
            .collect();
        all.sort_by_key(|descriptor| descriptor.number);
        Ok(Self { pid, all })
    }

    fn info(&self, number: i32) -> Option<String> {
        let text = fs::read(format!("/proc/{}/fdinfo/{number}", self.pid)).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    /// Returns true if a file is open for direct I/O, in which the device accesses memory itself.
    pub(super) fn uses_direct_io(&self) -> bool {
        let files = self.all.iter().filter(|descriptor| descriptor.path.starts_with(b"/"));
        files.filter_map(|file| open_flags(&self.info(file.number)?)).any(|flags| flags & libc::O_DIRECT as u32 != 0)
    }

    fn first(&self, matches: impl Fn(&[u8]) -> bool) -> Option<i32> {
        let found = self.all.iter().find(|descriptor| matches(&descriptor.path));
        found.map(|descriptor| descriptor.number)
    }

    /// Returns the descriptors that an earlier pager has left.
    pub(super) fn orphaned(&self) -> Option<OrphanedDescriptors> {
        let memfd = |name: &str| self.first(|path| path == format!("/memfd:{name} (deleted)").as_bytes());
        Some(OrphanedDescriptors {
            pages: memfd(PAGES_NAME)?,
            compressed: memfd(COMPRESSED_NAME),
            unrecorded_userfaultfds: self.userfaultfds().filter(|number| self.may_be_from_pager(*number)).collect(),
            ring_memories: self.ring_memories().collect(),
        })
    }

    /// Returns the descriptor of the view memory, if the process is a disk server of Larder.
    pub(super) fn view_memory(&self) -> Option<i32> {
        self.first(|path| path == format!("/memfd:{MEMFD_NAME} (deleted)").as_bytes())
    }

    /// Returns the descriptors that mark memory as managed.
    pub(super) fn markers(&self) -> Vec<i32> {
        let is_marker = |number: &i32| self.info(*number).is_some_and(|info| has_marker_lock(&info));
        let numbers = self.all.iter().filter(|descriptor| descriptor.path.starts_with(b"/"));
        numbers.map(|descriptor| descriptor.number).filter(is_marker).collect()
    }

    pub(super) fn userfaultfds(&self) -> impl Iterator<Item = i32> {
        self.numbers_with_path(userfaultfd::PROC_LINK.to_owned())
    }

    fn ring_memories(&self) -> impl Iterator<Item = i32> {
        self.numbers_with_path(format!("/memfd:{RING_NAME} (deleted)"))
    }

    fn numbers_with_path(&self, path: String) -> impl Iterator<Item = i32> {
        let is_one = move |descriptor: &&Descriptor| descriptor.path == path.as_bytes();
        self.all.iter().filter(is_one).map(|descriptor| descriptor.number)
    }

    /// Returns true if there is a userfaultfd, or the memory of a pager's ring: a pager manages the memory, or has
    /// started to.
    pub(super) fn has_userfaultfd(&self) -> bool {
        self.userfaultfds().next().is_some() || self.ring_memories().next().is_some()
    }

    /// Returns true if a pager may have made the userfaultfd: it has exactly the features that a pager enables, or
    /// none yet.
    fn may_be_from_pager(&self, number: i32) -> bool {
        self.info(number).as_deref().and_then(enabled_features).is_some_and(|features| {
            features == 0
                || features & !(userfaultfd::feature::POISON | FEATURE_INITIALIZED)
                    == userfaultfd::REQUIRED_FEATURE_BITS
        })
    }

    /// Returns the descriptors that are obstacles.
    pub(super) fn obstacles(&self, warnings: &mut Vec<String>) -> Vec<Obstacle> {
        let mut found = Vec::new();
        for Descriptor { number, path } in &self.all {
            let descriptor = *number;
            if let Some(device) = dma_device(path) {
                let path = printable(path);
                found.push(Obstacle::Device { descriptor, path, device });
            }
            if path == RING_LINK.as_bytes() {
                match self.registered_buffers(descriptor) {
                    Some(0) => {}
                    Some(count) => found.push(Obstacle::RegisteredBuffers { descriptor, count }),
                    None => warnings.push(format!(
                        "descriptor {descriptor} is an io_uring, and the kernel does not report whether it has \
                         registered buffers (UserBufs): it must have none (QEMU itself has none)"
                    )),
                }
            }
        }
        let userfaultfd = self.userfaultfds().next();
        match self.orphaned() {
            None => found.extend(userfaultfd.map(|descriptor| Obstacle::Userfaultfd { descriptor })),
            Some(left) if !self.has_userfaultfd() => warnings.push(format!(
                "an earlier pager has left its state (descriptor {}) but no userfaultfd: it ended during the attach, or \
                 the userfaultfd was closed",
                left.pages
            )),
            Some(_) => {}
        }
        found
    }

    /// Returns the number of registered buffers of a ring, or `None` if it is closed or the kernel does not report
    /// it.
    fn registered_buffers(&self, number: i32) -> Option<u64> {
        // The kernel omits the line while the ring is in use.
        for _ in 0..50 {
            if let Some(count) = user_buffers(&self.info(number)?) {
                return Some(count);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }
}

/// Flag of the kernel for an initialized userfaultfd (`UFFD_FEATURE_INITIALIZED`).
const FEATURE_INITIALIZED: u64 = 1 << 31;

/// Returns the enabled features of a userfaultfd: the second number of the line `API`, in hexadecimal digits.
fn enabled_features(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("API:"))?;
    u64::from_str_radix(line.trim().split(':').nth(1)?, 16).ok()
}

/// Returns the open flags, as of open(2), written in octal digits.
fn open_flags(info: &str) -> Option<u32> {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
    u32::from_str_radix(flags.trim(), 8).ok()
}

/// Returns true if the open file holds the lock that marks memory as managed: a line such as `lock:  1: OFDLCK
/// ADVISORY  WRITE -1 00:01:1037 5492683083379965952 5492683083379965952`.
fn has_marker_lock(info: &str) -> bool {
    let locks = info.lines().filter_map(|line| line.strip_prefix("lock:"));
    let mut locks = locks.filter(|lock| lock.contains("OFDLCK"));
    locks.any(|lock| {
        let start = lock.split_whitespace().rev().nth(1);
        start.and_then(|start| start.parse().ok()) == Some(MANAGED_LOCK_OFFSET)
    })
}

fn user_buffers(info: &str) -> Option<u64> {
    let count = info.lines().find_map(|line| line.strip_prefix("UserBufs:"))?;
    count.trim().parse().ok()
}

/// Returns the kind of device behind `path`, if it accesses memory without page faults.
fn dma_device(path: &[u8]) -> Option<DmaDevice> {
    let kinds: [(&[u8], DmaDevice); 9] = [
        (b"/dev/vfio/", DmaDevice::Vfio),
        (b"/dev/iommu", DmaDevice::Vfio),
        (b"anon_inode:[vfio", DmaDevice::Vfio),
        (b"/dev/vhost-vdpa-", DmaDevice::Vdpa),
        (b"/dev/infiniband/", DmaDevice::Rdma),
        (b"/dev/udmabuf", DmaDevice::Udmabuf),
        (b"/dev/sev", DmaDevice::Sev),
        (b"anon_inode:[kvm-gmem]", DmaDevice::GuestMemfd),
        (b"/[guest_memfd]", DmaDevice::GuestMemfd),
    ];
    let kind = kinds.iter().find(|(start, _)| path.starts_with(start));
    kind.map(|(_, device)| *device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dma_devices_are_recognized_by_path() {
        assert_eq!(dma_device(b"/dev/vfio/vfio"), Some(DmaDevice::Vfio));
        assert_eq!(dma_device(b"/dev/vfio/devices/vfio0"), Some(DmaDevice::Vfio));
        assert_eq!(dma_device(b"anon_inode:[vfio-device]"), Some(DmaDevice::Vfio));
        assert_eq!(dma_device(b"/dev/vhost-vdpa-0"), Some(DmaDevice::Vdpa));
        assert_eq!(dma_device(b"/dev/infiniband/uverbs0"), Some(DmaDevice::Rdma));
        for harmless in [&b"/dev/vhost-net"[..], b"/dev/kvm", b"anon_inode:kvm-vm", b"/srv/dev/vfio/1"] {
            assert_eq!(dma_device(harmless), None);
        }
    }

    #[test]
    fn fdinfo_flags_and_buffers_are_parsed() {
        let info = "pos:\t0\nflags:\t02140002\nmnt_id:\t17\nUserFiles:\t3\nUserBufs:\t2\n    0: 0x7f73a7b39000/8192\n";
        assert_eq!(open_flags(info), Some(0o2140002));
        assert_eq!(user_buffers(info), Some(2));
        assert_eq!(user_buffers("pos:\t0\nflags:\t02\n"), None);
    }
}
