//! Who has an image locked, for messages.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;

/// How many are named.
const NAMED_MAX: usize = 4;

/// The processes but for `known` that have locks on the open file, as `qemu-nbd, pid 4711`. Those of other users are seen by
/// root only, and a process that is being torn down by nobody, so the list may be empty although there is one.
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

/// Whether this process has locks on the image by another of its open files.
pub(super) fn is_held_here(file: BorrowedFd<'_>) -> bool {
    identity(file).is_some_and(|image| has_locked(std::process::id(), image, Some(file.as_raw_fd())))
}

/// Device and inode.
fn identity(file: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let found = fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    Some((found.dev(), found.ino()))
}

/// Whether the process has locks on the image by a descriptor other than `but`.
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
        // Only then is the file itself asked: one on a file server that is away would not answer.
        notes
            .lines()
            .any(|line| line.contains("OFDLCK") && line.contains(&inode))
            && fs::metadata(descriptor.path()).is_ok_and(|found| (found.dev(), found.ino()) == image)
    })
}
