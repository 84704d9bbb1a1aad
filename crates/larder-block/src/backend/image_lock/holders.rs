//! The processes that have an image locked, for messages.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;

/// The maximum number of processes named.
const NAMED_MAX: usize = 4;

/// Returns the processes other than `known` that have locks on the open file, as `qemu-nbd, pid 4711`. Only root sees
/// processes of other users, and a process that is exiting is not visible at all, so the list may be empty although
/// the file is locked.
pub fn holders_but(known: &[u32], file: BorrowedFd<'_>) -> Vec<String> {
    let (Some(image), Ok(processes)) = (identity(file), fs::read_dir("/proc")) else {
        return Vec::new();
    };
    let others = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    others
        .filter(|pid| !known.contains(pid))
        .filter(|pid| has_locked(*pid, image, None))
        .map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{}, pid {pid}", name.trim_end())
        })
        .take(NAMED_MAX)
        .collect()
}

/// Returns true if this process has locks on the image through another of its open files.
pub(super) fn is_held_here(file: BorrowedFd<'_>) -> bool {
    identity(file).is_some_and(|image| has_locked(std::process::id(), image, Some(file.as_raw_fd())))
}

/// Returns the device and inode numbers.
fn identity(file: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let found = fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    Some((found.dev(), found.ino()))
}

/// Returns true if the process has locks on the image through a descriptor other than `but`.
fn has_locked(pid: u32, image: (u64, u64), but: Option<RawFd>) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    let inode = format!(":{} ", image.1);
    descriptors.flatten().any(|descriptor| {
        let number = descriptor.file_name();
        if but.is_some_and(|but| number.to_str() == Some(&but.to_string())) {
            return false;
        }
        let notes = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.to_string_lossy())).unwrap_or_default();
        // The file itself is queried only after a match: a file on an unreachable server would not answer.
        notes
            .lines()
            .any(|line| line.contains("OFDLCK") && line.contains(&inode))
            && fs::metadata(descriptor.path()).is_ok_and(|found| (found.dev(), found.ino()) == image)
    })
}
