//! The resources of a run on this host: a private directory for its sockets, and files of RAM. Their names cannot be
//! guessed, so no other user can create them first.
//!
//! Each is locked (flock) as long as its run lives. The remains of a killed run are recognised by their name, by the
//! process ID in it, and by the free lock; the next run removes them.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use larder_block::ByteLen;

use super::disks::longest_socket_path;
use super::plan::RunPlan;
use super::ram::RamFile;
use crate::listen::SOCKET_PATH_BYTES_MAX;
use crate::runtime_directory::{self, runtime_directory};

/// Directory of guests' RAM: the tmpfs that every Linux has.
const SHARED_MEMORY: &str = "/dev/shm";

/// Reason why a run cannot get its resources.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LeaseError {
    #[error("cannot create {}: {source}", path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error("no random number for names: /dev/urandom: {0}")]
    Random(io::Error),
    #[error("{} is too long a path for sockets; set XDG_RUNTIME_DIR to a shorter directory", path.display())]
    SocketPathTooLong { path: PathBuf },
    #[error(
        "the guest's RAM of {needed} does not fit in {}, which has {free} left; stop other users of it, \
         give the guest less (-m), make it larger (mount -o remount,size=SIZE {}), or give QEMU memory that is not a \
         file (-object memory-backend-memfd,id=ram,size={},share=on -machine memory-backend=ram)",
        directory.display(), directory.display(), needed.get()
    )]
    NoSpace { needed: ByteLen, free: ByteLen, directory: PathBuf },
    #[error(
        "the guest's RAM is a private mapping of {}, which is not a directory; sharing it would write to \
         it: add share=on (and no share=off) to its -object memory-backend-file if that is intended, or omit the file",
        path.display()
    )]
    PrivateFile { path: PathBuf },
}

/// Paths of a run's resources, before they are created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeasePaths {
    /// Private directory for the sockets.
    pub directory: PathBuf,
    /// Path of the first file of RAM.
    pub ram: PathBuf,
}

impl LeasePaths {
    /// Chooses paths for commands that the user starts manually; no run cleans them up.
    ///
    /// # Errors
    /// There are no random numbers, or the directory's path is too long for sockets.
    pub fn for_commands(guest: &str) -> Result<Self, LeaseError> {
        Self::with_name(&format!("larder-{guest}-{}", random()?))
    }

    /// Chooses paths for a guest of this name, run by this process.
    ///
    /// # Errors
    /// There are no random numbers, or the directory's path is too long for sockets.
    pub fn for_run(guest: &str) -> Result<Self, LeaseError> {
        let pid = std::process::id();
        Self::with_name(&format!("larder-{guest}-{pid}-{}", random()?))
    }

    fn with_name(name: &str) -> Result<Self, LeaseError> {
        let directory = runtime_directory().join(name);
        if longest_socket_path(&directory).as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            return Err(LeaseError::SocketPathTooLong { path: directory });
        }
        Ok(Self { directory, ram: Path::new(SHARED_MEMORY).join(name) })
    }
}

/// Returns eight random hexadecimal digits.
fn random() -> Result<String, LeaseError> {
    let mut bytes = [0; 4];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(LeaseError::Random)?;
    Ok(format!("{:08x}", u32::from_ne_bytes(bytes)))
}

/// The resources of a run, which are removed when this is dropped.
#[derive(Debug)]
pub struct Lease {
    _directory: LockedPath,
    _ram: Vec<LockedPath>,
}

impl Lease {
    /// Creates the directory and the files, after removing the remains of dead runs next to them.
    ///
    /// # Errors
    /// See [`LeaseError`]; nothing is left behind then.
    pub fn acquire(places: &LeasePaths, plan: &RunPlan) -> Result<Self, LeaseError> {
        for path in [&places.directory, &places.ram] {
            path.parent().into_iter().for_each(remove_stale);
        }
        Self::check(plan)?;
        let folder = LockedPath::create_directory(&places.directory)?;
        let ram = plan.ram.iter().map(LockedPath::create_file).collect::<Result<_, _>>()?;
        Ok(Self { _directory: folder, _ram: ram })
    }

    /// Checks the requirements of a plan, without creating anything.
    ///
    /// # Errors
    /// A requirement is not met.
    pub fn check(plan: &RunPlan) -> Result<(), LeaseError> {
        for path in &plan.directories {
            if !path.is_dir() {
                return Err(LeaseError::PrivateFile { path: path.clone() });
            }
        }
        check_space(&plan.ram)
    }
}

/// Checks that the RAM fits into the space that is free now. Other guests may still claim space that they have not
/// touched.
fn check_space(files: &[RamFile]) -> Result<(), LeaseError> {
    let needed = files.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    let Some(folder) = files.first().and_then(|file| file.path.parent()) else {
        return Ok(());
    };
    let fs_stat = rustix::fs::statvfs(folder)
        .map_err(|error| LeaseError::Create { path: folder.to_owned(), source: error.into() })?;
    let free = fs_stat.f_bavail.saturating_mul(fs_stat.f_frsize);
    if needed > free {
        return Err(LeaseError::NoSpace {
            needed: ByteLen::new(needed),
            // Rounded down for the message; the needed size exceeds the rounded value as well.
            free: ByteLen::new(free & !((1 << 20) - 1)),
            directory: folder.to_owned(),
        });
    }
    Ok(())
}

/// A file or directory that is locked, and removed when this is dropped.
#[derive(Debug)]
struct LockedPath {
    path: PathBuf,
    lock: File,
}

impl LockedPath {
    /// Creates a directory that only this user can enter.
    fn create_directory(path: &Path) -> Result<Self, LeaseError> {
        let create = || {
            if let Some(parent) = path.parent() {
                runtime_directory::create(parent, 0o755)
                    .map_err(|error| io::Error::other(format!("{}: {error}", parent.display())))?;
            }
            DirBuilder::new().mode(0o700).create(path)?;
            lock_path(path, File::open(path))
        };
        create().map_err(|source| LeaseError::Create { path: path.to_owned(), source })
    }

    /// Creates a file that only this user can open, of full size but without allocated memory.
    fn create_file(file: &RamFile) -> Result<Self, LeaseError> {
        let make = || {
            let opened = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&file.path)?;
            let held = lock_path(&file.path, Ok(opened))?;
            held.lock.set_len(file.bytes)?;
            Ok(held)
        };
        make().map_err(|source| LeaseError::Create { path: file.path.clone(), source })
    }

    fn remove(&self) -> io::Result<()> {
        match self.lock.metadata()?.is_dir() {
            true => fs::remove_dir_all(&self.path),
            false => fs::remove_file(&self.path),
        }
    }
}

/// Locks the file opened at `path`, unless another process has locked it.
fn lock_path(path: &Path, opened: io::Result<File>) -> io::Result<LockedPath> {
    let lock = opened?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    Ok(LockedPath { path: path.to_owned(), lock })
}

impl Drop for LockedPath {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Removes the remains of dead runs in `folder`.
fn remove_stale(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_dead = name.to_str().and_then(parse_pid).is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        if !is_dead || !is_owned_by_user(&entry.path()) {
            continue;
        }
        // A run in another PID namespace may be alive: then it has the lock. Otherwise dropping the lock removes the
        // file.
        drop(lock_path(&entry.path(), File::open(entry.path())));
    }
}

/// Returns the process ID in a name of a run's resource: `larder-NAME-PID-RANDOM`, `larder-NAME-PID-RANDOM.2`.
fn parse_pid(name: &str) -> Option<u32> {
    let parts: Vec<&str> = name.split('-').collect();
    let ["larder", _, pid, random] = parts[..] else {
        return None;
    };
    let (random, number) = random.split_once('.').unwrap_or((random, "0"));
    number.parse::<u32>().ok()?;
    u32::from_str_radix(random, 16).ok()?;
    pid.parse().ok()
}

/// Returns whether the path is a file or directory of this user's, and not a symbolic link.
fn is_owned_by_user(path: &Path) -> bool {
    let Ok(found) = fs::symlink_metadata(path) else {
        return false;
    };
    (found.is_file() || found.is_dir()) && found.uid() == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(ram: Vec<RamFile>, directories: Vec<PathBuf>) -> RunPlan {
        RunPlan { qemu: Vec::new(), disks: Vec::new(), memory: None, ram, directories, changes: Vec::new() }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("lists").flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn dropped_lease_removes_its_resources() {
        let folder = tempfile::tempdir().expect("a directory");
        let places =
            LeasePaths { directory: folder.path().join("run/larder-run-1"), ram: folder.path().join("larder-vm-1") };
        let ram = vec![RamFile { path: places.ram.clone(), bytes: 1 << 20 }];
        let lease = Lease::acquire(&places, &plan(ram.clone(), Vec::new())).expect("there is room");
        let made = fs::metadata(&places.ram).expect("is there");
        assert_eq!((made.len(), made.mode() & 0o777, made.blocks()), (1 << 20, 0o600, 0));
        assert_eq!(fs::metadata(&places.directory).expect("is there").mode() & 0o777, 0o700);
        assert!(matches!(Lease::acquire(&places, &plan(ram, Vec::new())), Err(LeaseError::Create { .. })));
        assert!(places.ram.exists(), "a second run must not remove the first one's");
        fs::write(places.directory.join("disk-0.sock"), "").expect("writes");
        drop(lease);
        assert_eq!(names(folder.path()), ["run"]);
        assert_eq!(names(&folder.path().join("run")), [""; 0]);
    }

    #[test]
    fn only_dead_runs_are_cleaned_up() {
        let directory = tempfile::tempdir().expect("a directory");
        // Larger than every process ID.
        let dead = 1_u32 << 30;
        let alive = std::process::id();
        let keep = [
            "larder",
            "larder-notes",
            &format!("larder-vm-{alive}-0123abcd"),
            &format!("larder-vm-{dead}"),
            &format!("larder-{dead}-0123abcd"),
            &format!("other-vm-{dead}-0123abcd"),
            &format!("larder-held-{dead}-0123abcd"),
        ];
        for name in keep
            .iter()
            .map(|name| (*name).to_owned())
            .chain([format!("larder-vm-{dead}-0123abcd"), format!("larder-vm-{dead}-0123abcd.1")])
        {
            fs::write(directory.path().join(name), "").expect("writes");
        }
        let run = directory.path().join(format!("larder-run-{dead}-0123abcd"));
        fs::create_dir(&run).expect("makes it");
        fs::write(run.join("disk-0.sock"), "").expect("writes");
        std::os::unix::fs::symlink("/etc", directory.path().join(format!("larder-link-{dead}-0123abcd")))
            .expect("links");
        let held = directory.path().join(format!("larder-held-{dead}-0123abcd"));
        let held = lock_path(&held, File::open(&held)).expect("locks");

        remove_stale(directory.path());
        let mut expected = keep.map(str::to_owned).to_vec();
        expected.push(format!("larder-link-{dead}-0123abcd"));
        expected.sort();
        assert_eq!(names(directory.path()), expected);
        drop(held);
    }

    /// Lack of space and private files are reported before anything is created.
    #[test]
    fn lease_checks_before_it_creates_anything() {
        let folder = tempfile::tempdir().expect("a directory");
        let places =
            LeasePaths { directory: folder.path().join("larder-run-1"), ram: folder.path().join("larder-vm-1") };
        let huge = vec![RamFile { path: places.ram.clone(), bytes: 1 << 62 }];
        let error = Lease::acquire(&places, &plan(huge, Vec::new())).expect_err("is too much").to_string();
        assert!(error.contains("does not fit") && error.contains("remount"), "{error}");
        let file = folder.path().join("precious");
        fs::write(&file, "mine").expect("writes");
        let error = Lease::acquire(&places, &plan(Vec::new(), vec![file])).expect_err("is a file");
        assert!(matches!(error, LeaseError::PrivateFile { .. }), "{error}");
        assert_eq!(names(folder.path()), ["precious"]);
    }
}
