//! The identity of the host's present boot. Unflushed writes of a process survive its exit, but not a reboot of the
//! host.

use std::io;
use std::sync::OnceLock;

/// Returns the boot ID of the host: a number that each boot generates anew (`random(4)`, `boot_id`). It is cached, so
/// that a process that may not read files any more can still get it.
///
/// # Errors
/// The kernel does not report it.
pub fn boot_id() -> io::Result<u128> {
    static CACHED: OnceLock<u128> = OnceLock::new();
    match CACHED.get() {
        Some(cached) => Ok(*cached),
        None => read_boot_id().map(|read| *CACHED.get_or_init(|| read)),
    }
}

/// Returns the number of processors that this process may use at once. It is cached, because a confined process
/// cannot determine it.
pub fn processors() -> usize {
    static CACHED: OnceLock<usize> = OnceLock::new();
    *CACHED.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Caches this module's facts, for a process that may not read files later.
pub fn cache_host_facts() {
    // A caller that needs the boot ID gets the error from `boot_id`.
    let _ = boot_id();
    processors();
}

fn read_boot_id() -> io::Result<u128> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// Returns true if a file system is in the host's memory: its content was written since the host was booted.
pub fn is_tmpfs(file_system: &rustix::fs::StatFs) -> bool {
    file_system.f_type == libc::TMPFS_MAGIC
}

/// File systems whose times come from this host's clock and to whose files other hosts cannot write: ext2 to ext4,
/// XFS, btrfs, tmpfs, F2FS, bcachefs (`linux/magic.h`).
const LOCAL_FILE_SYSTEMS: [i64; 6] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010, 0xca45_1a4e];

/// Returns true if a file system is known to be local to this host, so that all writes to its files get times of this
/// host's clock.
pub fn is_local_file_system(file_system: &rustix::fs::StatFs) -> bool {
    LOCAL_FILE_SYSTEMS.contains(&file_system.f_type)
}
