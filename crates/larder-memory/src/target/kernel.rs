//! Requirements on the kernel: features that it must have, and huge pages that memory must not be in.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::ptr;

use rustix::fs::SeekFrom;

use super::{Obstacle, RamMapping};
use crate::units::PAGE_BYTES;
use crate::userfaultfd;

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong =
    (3 << 30 | size_of::<ScanArgument>() << 16 | (b'f' as usize) << 8 | 16) as libc::c_ulong;

/// Returns missing features as obstacles, and missing optional features as warnings.
pub(super) fn obstacles(warnings: &mut Vec<String>) -> Vec<Obstacle> {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = kernel.trim_end().to_owned();
    if !has_pagemap_scan() {
        warnings.push(format!(
            "Linux {kernel} lacks PAGEMAP_SCAN (6.7 or later has it): writes to pages are not tracked, and \
             cold pages are found by evicting some"
        ));
    }
    let mut found = Vec::new();
    // SAFETY: takes no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    if page != PAGE_BYTES {
        found.push(Obstacle::PageSize { bytes: page });
    }
    match userfaultfd::available_features() {
        Ok(features) => {
            found.extend(missing_features(features).map(|missing| Obstacle::KernelLacks { kernel, missing }))
        }
        Err(error) => found.push(Obstacle::NoUserfaultfd { kernel, error }),
    }
    found.extend(large_pages());
    found
}

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage";

/// Finds a setting that allows new shared memory in pages larger than 4 KiB. To remove a part of such a page, the
/// kernel has to split it. The split fails while the page is pinned, and the part then reads as zeros.
fn large_pages() -> Option<Obstacle> {
    let mut files = vec![format!("{HUGE_PAGES}/shmem_enabled")];
    let sizes = fs::read_dir(HUGE_PAGES).into_iter().flatten().flatten();
    files.extend(sizes.map(|size| format!("{}/shmem_enabled", size.path().display())));
    let mode = |path: &String| selected_mode(&fs::read_to_string(path).ok()?);
    let allowed = files.iter().find_map(|path| match mode(path)?.as_str() {
        // The setting of a page size may be `inherit`: then the first file applies.
        "never" | "deny" | "inherit" => None,
        mode => Some((path.clone(), mode.to_owned())),
    });
    allowed.map(|(path, mode)| Obstacle::HugePagesAllowed { path, mode })
}

/// Finds memory in huge pages, and memory in file systems that allow them.
pub(super) fn huge_page_obstacles(memories: &[RamMapping]) -> Vec<Obstacle> {
    let mut found = Vec::new();
    // This saves the scan if the host has no huge pages at all.
    let has_any = huge_bytes_of_host() != Some(0);
    for RamMapping { location: place, name, file } in memories {
        let (location, name) = (*place, name.clone());
        if let Some((at, mode)) = huge_mode_of_device(location.device) {
            found.push(Obstacle::HugePagesAllowedByMount { location, name, mount_point: at, mode });
        } else if has_any {
            match huge_bytes(file, location.offset, location.bytes) {
                Ok(0) => {}
                Ok(bytes) => found.push(Obstacle::HugePagesInUse { location, name, bytes }),
                Err(error) => found.push(Obstacle::NotOpened { location, name, error }),
            }
        }
    }
    found
}

fn huge_bytes_of_host() -> Option<u64> {
    bytes_of_key(&fs::read_to_string("/proc/meminfo").ok()?, "ShmemHugePages:")
}

/// Returns the number on the first line with this key, in bytes.
fn bytes_of_key(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib << 10)
}

/// Returns the mount point of the tmpfs with this device number and its `huge` option, if that allows huge pages.
fn huge_mode_of_device(device: u64) -> Option<(String, String)> {
    let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    mode_of(&fs::read_to_string("/proc/self/mountinfo").ok()?, &numbers)
}

fn mode_of(mounts: &str, device: &str) -> Option<(String, String)> {
    mounts.lines().find_map(|line| {
        let (of_mount, fs_fields) = line.split_once(" - ")?;
        let mut mount_fields = of_mount.split(' ').skip(2);
        let (number, at) = (mount_fields.next()?, mount_fields.nth(1)?);
        let mut options = fs_fields.split(' ').nth(2)?.split(',');
        let mode = options.find_map(|option| option.strip_prefix("huge="))?;
        (number == device && mode != "never").then(|| (at.to_owned(), mode.to_owned()))
    })
}

const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Bytes that are mapped at a time. Their page tables use 2 MiB.
const WINDOW_BYTES: u64 = 1 << 30;

/// Returns the bytes of this part of a tmpfs file that are in huge pages. The part is mapped in this process for a
/// moment: the kernel maps huge pages as such, and reports them.
fn huge_bytes(file: &File, offset: u64, bytes: u64) -> io::Result<u64> {
    let end = offset + bytes;
    let mut found = 0;
    let mut from = offset / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    while from < end {
        let to = (from + WINDOW_BYTES).min(end);
        found += MappedWindow::map(file, from, to - from)?.huge_bytes(file)?;
        from = to;
    }
    Ok(found)
}

/// A part of a file, mapped at an address that is aligned for huge pages.
struct MappedWindow {
    /// The whole reserved range, which is `HUGE_PAGE_BYTES` longer.
    reserved: *mut libc::c_void,
    at: *mut libc::c_void,
    offset: u64,
    bytes: usize,
}

impl MappedWindow {
    fn map(file: &File, offset: u64, bytes: u64) -> io::Result<Self> {
        let too_large = |_| io::Error::from(io::ErrorKind::OutOfMemory);
        let (from, bytes) = (i64::try_from(offset).map_err(too_large)?, usize::try_from(bytes).map_err(too_large)?);
        let all = bytes + HUGE_PAGE_BYTES as usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let reserved = unsafe { libc::mmap(ptr::null_mut(), all, libc::PROT_NONE, flags, -1, 0) };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = reserved.map_addr(|address| address.next_multiple_of(HUGE_PAGE_BYTES as usize));
        // From here on, dropping the window unmaps the range.
        let window = Self { reserved, at, offset, bytes };
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: it replaces a part of the mapping above, which nothing else uses.
        let mapped = unsafe { libc::mmap(at, bytes, libc::PROT_READ, flags, file.as_raw_fd(), from) };
        match mapped == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(window),
        }
    }

    fn huge_bytes(&self, file: &File) -> io::Result<u64> {
        let end = self.offset + self.bytes as u64;
        let mut from = self.offset;
        // Holes are skipped, because reading one would allocate a page.
        while from < end {
            let start = match rustix::fs::seek(file, SeekFrom::Data(from)) {
                Ok(start) if start < end => start,
                Ok(_) | Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            from = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(end);
            self.map_resident(start - self.offset, from - self.offset)?;
        }
        let smaps = fs::read_to_string("/proc/self/smaps")?;
        Ok(parse_huge_bytes(&smaps, self.at.addr() as u64))
    }
}

impl MappedWindow {
    /// Maps the 2 MiB parts, from byte `start` to `end` of the window, whose pages are all resident, as those of a
    /// huge page are. Mapping other parts would read pages from the kernel's swap.
    fn map_resident(&self, start: u64, end: u64) -> io::Result<()> {
        let mut resident = [0_u8; (HUGE_PAGE_BYTES / PAGE_BYTES) as usize];
        for part in (start / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES..end).step_by(HUGE_PAGE_BYTES as usize) {
            let bytes = (self.bytes as u64 - part).min(HUGE_PAGE_BYTES) as usize;
            let at = self.at.wrapping_byte_add(part as usize);
            // SAFETY: within the mapping; the kernel writes one byte for each page of it, which fit in the buffer.
            if unsafe { libc::mincore(at, bytes, resident.as_mut_ptr()) } < 0 {
                return Err(io::Error::last_os_error());
            }
            let pages = bytes.div_ceil(PAGE_BYTES as usize);
            if resident[..pages].iter().all(|page| page & 1 != 0) {
                // SAFETY: within the mapping; nothing is written.
                let _ = unsafe { libc::madvise(at, bytes, libc::MADV_POPULATE_READ) };
            }
        }
        Ok(())
    }
}

impl Drop for MappedWindow {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this window, and nothing refers to it.
        unsafe { libc::munmap(self.reserved, self.bytes + HUGE_PAGE_BYTES as usize) };
    }
}

/// Returns the bytes of the mapping at `at` that are in huge pages (proc_pid_smaps(5)).
fn parse_huge_bytes(smaps: &str, at: u64) -> u64 {
    let start = format!("{at:x}-");
    let lines = smaps.lines().skip_while(|line| !line.starts_with(&start)).skip(1);
    // The first line of a mapping begins with its addresses, and each other line with a key and a colon.
    let lines = lines.take_while(|line| line.split(' ').next().is_some_and(|key| key.ends_with(':')));
    let lines: Vec<&str> = lines.collect();
    let text = lines.join("\n");
    let keys = ["ShmemPmdMapped:", "FilePmdMapped:"];
    keys.iter().filter_map(|key| bytes_of_key(&text, key)).sum()
}

/// Returns the word in brackets.
fn selected_mode(modes: &str) -> Option<String> {
    let (_, rest) = modes.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// Returns the names of the required features that `features` lacks, if any.
fn missing_features(features: u64) -> Option<String> {
    let missing = userfaultfd::REQUIRED_FEATURES.iter().filter(|(bit, _)| features & bit == 0);
    let missing: Vec<&str> = missing.map(|(_, name)| *name).collect();
    (!missing.is_empty()).then(|| missing.join(", "))
}

fn has_pagemap_scan() -> bool {
    let Ok(pagemap) = File::open("/proc/self/pagemap") else {
        return false;
    };
    // An empty range, so the scan does nothing.
    let mut argument = ScanArgument { size: size_of::<ScanArgument>() as u64, ..ScanArgument::default() };
    // SAFETY: the structure that the request is defined with, alive and writable for the call; it has no buffer.
    unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, std::ptr::from_mut(&mut argument)) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::userfaultfd::feature;

    #[test]
    fn selected_mode_is_in_brackets() {
        let modes = "always within_size [advise] never deny force\n";
        assert_eq!(selected_mode(modes).as_deref(), Some("advise"));
        assert_eq!(selected_mode("never"), None);
    }

    #[test]
    fn huge_mount_option_is_found() {
        let mounts = "30 24 0:26 / /dev/shm rw - tmpfs tmpfs rw,size=1k,huge=within_size\n\
            31 24 0:27 / /run rw shared:4 - tmpfs tmpfs rw\n\
            32 24 0:28 / /mnt rw - tmpfs tmpfs rw,huge=never\n";
        let of_shm = ("/dev/shm".to_owned(), "within_size".to_owned());
        assert_eq!(mode_of(mounts, "0:26"), Some(of_shm));
        assert_eq!(mode_of(mounts, "0:27"), None);
        assert_eq!(mode_of(mounts, "0:28"), None);
        assert_eq!(mode_of("nonsense", "0:26"), None);
    }

    #[test]
    fn huge_mappings_are_read_from_smaps() {
        let smaps = "7f00-8000 r--s 0 00:01 3 /memfd:m\nRss: 9 kB\nShmemPmdMapped:     2048 kB\nFilePmdMapped: 0 kB\n\
            9000-a000 r--s 0 00:01 3 /x\nShmemPmdMapped: 4096 kB\n";
        assert_eq!(parse_huge_bytes(smaps, 0x7f00), 2 << 20);
        assert_eq!(parse_huge_bytes(smaps, 0x9000), 4 << 20);
        assert_eq!(parse_huge_bytes(smaps, 0x1000), 0);
    }

    #[test]
    fn small_pages_are_not_counted_huge() {
        let memory = rustix::fs::memfd_create("small", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let file = File::from(memory);
        file.set_len(8 << 20).expect("room");
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], 5 << 20).expect("writes");
        let before = std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("a file"));
        assert_eq!(huge_bytes(&file, 4096, (8 << 20) - 4096).expect("looks"), 0);
        let after = std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("a file"));
        assert_eq!(after, before, "holes were filled");
    }

    #[test]
    fn missing_features_are_named() {
        let all = userfaultfd::REQUIRED_FEATURES.iter().fold(0, |all, (bit, _)| all | bit);
        assert_eq!(missing_features(all | feature::POISON), None);
        let without = all & !feature::THREAD_ID & !feature::WP_HUGETLBFS_SHMEM;
        assert_eq!(missing_features(without).as_deref(), Some("THREAD_ID, WP_HUGETLBFS_SHMEM"));
    }

    #[test]
    /// Detection by trial agrees with the kernel's version.
    fn pagemap_scan_is_detected_by_version() {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
        let version: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
        assert_eq!(has_pagemap_scan(), version >= (6, 7), "Linux {release}");
    }
}
