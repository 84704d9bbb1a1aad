//! Which start of the host this is: what a process has written and not flushed outlives the process, and not the host.

use std::io;
use std::sync::OnceLock;

/// A number that each start of the host has anew (`random(4)`, `boot_id`). A process that was told once can be told again
/// when it may not read files any more.
///
/// # Errors
/// The kernel does not say.
pub fn boot_id() -> io::Result<u128> {
    static KNOWN: OnceLock<u128> = OnceLock::new();
    match KNOWN.get() {
        Some(known) => Ok(*known),
        None => read_boot_id().map(|read| *KNOWN.get_or_init(|| read)),
    }
}

/// Returns how many processors this process may use at once. It is found out once: a confined process cannot.
pub fn processors() -> usize {
    static KNOWN: OnceLock<usize> = OnceLock::new();
    *KNOWN.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Finds out what this module tells, for a process that may not read files any more.
pub fn learn() {
    // Whoever needs it says that it cannot be had.
    let _ = boot_id();
    processors();
}

fn read_boot_id() -> io::Result<u128> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// Whether a file system is in the host's memory: what it holds was written since the host was started.
pub fn is_tmpfs(found: &rustix::fs::StatFs) -> bool {
    found.f_type == libc::TMPFS_MAGIC
}

/// File systems whose times this host's clock makes and whose files other hosts cannot write to: ext2 to ext4, XFS, btrfs, tmpfs,
/// F2FS, bcachefs (`linux/magic.h`).
const LOCAL_FILE_SYSTEMS: [i64; 6] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010, 0xca45_1a4e];

/// Whether a file system is known to be of this host alone, so that all writes to its files get times of this host's clock.
pub fn is_local(found: &rustix::fs::StatFs) -> bool {
    LOCAL_FILE_SYSTEMS.contains(&found.f_type)
}
