//! Who has an image locked, for messages.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

/// How many are named.
const NAMED_MAX: usize = 4;

/// The other processes that have locks on the open file, as `qemu-nbd, pid 4711`. Those of other users are seen by root
/// only, and a process that is being torn down by nobody, so the list may be empty although there is one.
pub fn holders(file: BorrowedFd<'_>) -> Vec<String> {
    let own_link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let (Ok(image), Ok(processes)) = (fs::metadata(own_link), fs::read_dir("/proc")) else {
        return Vec::new();
    };
    let others = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    others
        .filter(|pid| *pid != std::process::id())
        .filter(|pid| has_locked(*pid, (image.dev(), image.ino())))
        .map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{}, pid {pid}", name.trim_end())
        })
        .take(NAMED_MAX)
        .collect()
}

fn has_locked(pid: u32, image: (u64, u64)) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    let inode = format!(":{} ", image.1);
    descriptors.flatten().any(|descriptor| {
        let number = descriptor.file_name();
        let notes = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.to_string_lossy())).unwrap_or_default();
        // Only then is the file itself asked: one on a file server that is away would not answer.
        notes
            .lines()
            .any(|line| line.contains("OFDLCK") && line.contains(&inode))
            && fs::metadata(descriptor.path()).is_ok_and(|found| (found.dev(), found.ino()) == image)
    })
}
