//! The processes that have an image locked, for messages.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;

/// The maximum number of processes named.
const LISTED_PROCESSES_MAX: usize = 4;

/// Returns the processes other than `excluded` that have locks on the open file, as `qemu-nbd, pid 4711`. Only root
/// sees processes of other users, and a process that is exiting is not visible at all, so the list may be empty
/// although the file is locked.
pub fn owners_except(excluded: &[u32], file: BorrowedFd<'_>) -> Vec<String> {
    let (Some(image), Ok(processes)) = (file_identity(file), fs::read_dir("/proc")) else {
        return Vec::new();
    };
    let others = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    others
        .filter(|pid| !excluded.contains(pid))
        .filter(|pid| holds_locks(*pid, image, None))
        .map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{}, pid {pid}", name.trim_end())
        })
        .take(LISTED_PROCESSES_MAX)
        .collect()
}

/// Returns true if this process has locks on the image through another of its open files.
pub(super) fn is_locked_by_this_process(file: BorrowedFd<'_>) -> bool {
    file_identity(file).is_some_and(|image| holds_locks(std::process::id(), image, Some(file.as_raw_fd())))
}

/// Returns the device and inode numbers.
fn file_identity(file: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let metadata = fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Returns true if the process has locks on the image through a descriptor other than `but`.
fn holds_locks(pid: u32, image: (u64, u64), except: Option<RawFd>) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    let inode = format!(":{} ", image.1);
    descriptors.flatten().any(|descriptor| {
        let number = descriptor.file_name();
        if except.is_some_and(|but| number.to_str() == Some(&but.to_string())) {
            return false;
        }
        let fdinfo = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.to_string_lossy())).unwrap_or_default();
        // The file itself is queried only after a match: a file on an unreachable server would not answer.
        fdinfo.lines().any(|line| line.contains("OFDLCK") && line.contains(&inode))
            && fs::metadata(descriptor.path()).is_ok_and(|found| (found.dev(), found.ino()) == image)
    })
}
