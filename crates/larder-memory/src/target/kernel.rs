//! What the kernel must be able to do.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;

use super::Obstacle;
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

/// What is missing; what can be done without, as a caution.
pub(super) fn obstacles(cautions: &mut Vec<String>) -> Vec<Obstacle> {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = kernel.trim_end().to_owned();
    if !has_pagemap_scan() {
        cautions.push(format!(
            "Linux {kernel} lacks PAGEMAP_SCAN (6.7 or later has it): which pages are written to is not tracked, and \
             cold pages are found by taking some out"
        ));
    }
    let mut found = Vec::new();
    // SAFETY: takes no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    if page != PAGE_BYTES {
        found.push(Obstacle::PageSize { bytes: page });
    }
    match userfaultfd::available() {
        Ok(features) => found.extend(lacking(features).map(|missing| Obstacle::KernelLacks { kernel, missing })),
        Err(error) => found.push(Obstacle::NoUserfaultfd { kernel, error }),
    }
    found.extend(large_pages());
    found
}

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage";

/// Whether shared memory may be in pages larger than 4 KiB. To take a part of one out the kernel has to split it, which
/// fails while anybody has it pinned; then the part reads as zeros.
fn large_pages() -> Option<Obstacle> {
    let mut files = vec![format!("{HUGE_PAGES}/shmem_enabled")];
    let sizes = fs::read_dir(HUGE_PAGES).into_iter().flatten().flatten();
    files.extend(sizes.map(|size| format!("{}/shmem_enabled", size.path().display())));
    let mode = |path: &String| chosen(&fs::read_to_string(path).ok()?);
    let allowed = files.iter().find_map(|path| match mode(path)?.as_str() {
        // Those of a size, too, may say that the first one counts.
        "never" | "deny" | "inherit" => None,
        mode => Some((path.clone(), mode.to_owned())),
    });
    if let Some((path, mode)) = allowed {
        return Some(Obstacle::LargePages { path, mode });
    }
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let in_use = memory.lines().find_map(|line| line.strip_prefix("ShmemHugePages:"));
    let kib: u64 = in_use?.trim().trim_end_matches(" kB").parse().ok()?;
    (kib > 0).then_some(Obstacle::LargePagesInUse { bytes: kib << 10 })
}

/// The word in brackets.
fn chosen(modes: &str) -> Option<String> {
    let (_, rest) = modes.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// The names of the features that are not among `features`, if any.
fn lacking(features: u64) -> Option<String> {
    let missing = userfaultfd::NEEDED.iter().filter(|(bit, _)| features & bit == 0);
    let missing: Vec<&str> = missing.map(|(_, name)| *name).collect();
    (!missing.is_empty()).then(|| missing.join(", "))
}

fn has_pagemap_scan() -> bool {
    let Ok(pagemap) = File::open("/proc/self/pagemap") else {
        return false;
    };
    // No pages at all, which is nothing to do.
    let mut argument = ScanArgument {
        size: size_of::<ScanArgument>() as u64,
        ..ScanArgument::default()
    };
    // SAFETY: the structure that the request is defined with, alive and writable for the call; it has no buffer.
    unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, std::ptr::from_mut(&mut argument)) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::userfaultfd::feature;

    #[test]
    fn the_mode_that_is_chosen_is_in_brackets() {
        let modes = "always within_size [advise] never deny force\n";
        assert_eq!(chosen(modes).as_deref(), Some("advise"));
        assert_eq!(chosen("never"), None);
    }

    #[test]
    fn features_that_are_missing_are_named() {
        let all = userfaultfd::NEEDED.iter().fold(0, |all, (bit, _)| all | bit);
        assert_eq!(lacking(all | feature::POISON), None);
        let without = all & !feature::THREAD_ID & !feature::WP_HUGETLBFS_SHMEM;
        assert_eq!(lacking(without).as_deref(), Some("THREAD_ID, WP_HUGETLBFS_SHMEM"));
    }

    #[test]
    fn pagemap_scan_is_found_on_a_kernel_that_has_it() {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release
            .split(|c: char| !c.is_ascii_digit())
            .map(|number| number.parse().unwrap_or(0));
        let version: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
        assert_eq!(has_pagemap_scan(), version >= (6, 7), "Linux {release}");
    }
}
