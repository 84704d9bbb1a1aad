//! The user's runtime directory, for files that are useless after a reboot: sockets and journals.
//!
//! Its name can be guessed, so it must belong to the user, and be writable by no other, before anything in it is
//! trusted.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::opener::opener_client;
use larder_block::boot::is_tmpfs;
use rustix::process::geteuid;

use crate::read_group::is_reader;

/// Returns the path of the runtime directory: systemd's `$RUNTIME_DIRECTORY`, `/run/larder` for root
/// (`/run/larder-root` if the services own that), `$XDG_RUNTIME_DIR/larder`, or `/dev/shm/larder-UID`; the first that
/// is on tmpfs. All processes of a user get the same one. It is not created.
pub fn runtime_directory() -> PathBuf {
    // The variable may be a list; its first entry is used.
    let service_directory = std::env::var("RUNTIME_DIRECTORY").ok();
    let service_directory = service_directory.as_deref().and_then(|list| list.split(':').next()).map(PathBuf::from);
    if let Some(directory) =
        service_directory.filter(|folder| check_exclusive_owner(folder).is_ok() && is_on_tmpfs(folder))
    {
        return directory;
    }
    if geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        return PathBuf::from(match services_own_system_directory() {
            true => ROOT_FALLBACK_DIRECTORY,
            false => SYSTEM_DIRECTORY,
        });
    }
    let user_directory = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let is_usable = |directory: &Path| {
        directory.is_absolute() && check_exclusive_owner(directory).is_ok() && is_on_tmpfs(directory)
    };
    match user_directory.filter(|directory| is_usable(directory)) {
        Some(directory) => directory.join("larder"),
        None => PathBuf::from(format!("/dev/shm/larder-{}", geteuid().as_raw())),
    }
}

/// Returns the default directory of sockets: the user's own runtime directory. For root it is that of the services
/// that systemd runs with a user of their own (`larder@.service`), if it exists, because root sends requests to them
/// and writes their files.
pub fn socket_directory() -> PathBuf {
    let is_service = opener_client().is_some_and(|helper| helper.is_host_opener);
    match is_service || geteuid().is_root() && services_own_system_directory() {
        true => PathBuf::from(SYSTEM_DIRECTORY),
        false => runtime_directory(),
    }
}

/// Returns the runtime directories of the host's services that have a user of their own: VM name, directory and
/// owner.
pub(crate) fn vm_runtime_directories() -> Vec<(String, PathBuf, u32)> {
    let entries = fs::read_dir(VM_RUNTIME_ROOT).into_iter().flatten().flatten();
    let directory = |entry: fs::DirEntry| {
        let path = entry.path();
        let user = fs::metadata(&path).ok()?.uid();
        Some((entry.file_name().into_string().ok()?, path, user))
    };
    entries.filter_map(directory).collect()
}

/// Returns the directory for sockets of processes that manage the memory of VMs, which is separate:
/// `/run/larder-memory` for root.
pub(crate) fn memory_socket_directory() -> PathBuf {
    match geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        true => PathBuf::from(MEMORY_SOCKET_DIRECTORY),
        false => runtime_directory().join("memory"),
    }
}

/// Returns the directory in which pagers reserve memory while they detach, and creates it if necessary.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub(crate) fn detach_ledger_directory() -> io::Result<PathBuf> {
    let memory = memory_socket_directory();
    if let Some(parent) = memory.parent().filter(|above| *above == runtime_directory()) {
        create(parent, 0o755)?;
    }
    create(&memory, 0o755)?;
    let directory = memory.join("detaching");
    create(&directory, 0o700)?;
    Ok(directory)
}

/// Returns the directory for sockets of processes that move VMs, which is separate: `/run/larder-moves` for root.
pub(crate) fn migration_socket_directory() -> PathBuf {
    match geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        true => PathBuf::from(MIGRATION_SOCKET_DIRECTORY),
        false => runtime_directory().join("moves"),
    }
}

/// Returns the directory in which libvirt's hook records the processes that it has started, and creates it if
/// necessary. No other user can write to it; it is `/run/larder-hook` for root.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub fn hook_directory() -> io::Result<PathBuf> {
    let directory = match geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        true => PathBuf::from(HOOK_DIRECTORY),
        false => {
            let parent = runtime_directory();
            create(&parent, 0o755)?;
            parent.join("hook")
        }
    };
    create(&directory, 0o700)?;
    Ok(directory)
}

/// Returns the directories, among those that this user can use, of the sockets of processes that move VMs.
pub(crate) fn migration_socket_directories() -> Vec<PathBuf> {
    with_root_directory(migration_socket_directory(), MIGRATION_SOCKET_DIRECTORY)
}

/// Returns the user's own directory; for the user of the host's services and for members of the read group also
/// root's.
fn with_root_directory(user_directory: PathBuf, root_directory: &str) -> Vec<PathBuf> {
    let may_use_root_directory =
        !geteuid().is_root() && (runtime_directory() == Path::new(SYSTEM_DIRECTORY) || is_reader());
    let root_directory = may_use_root_directory.then(|| PathBuf::from(root_directory));
    let root_directory = root_directory.filter(|other| *other != user_directory);
    std::iter::once(user_directory).chain(root_directory).collect()
}

/// Returns the directory in which movers keep state for their successors, and creates it if necessary.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub fn migration_state_directory() -> io::Result<PathBuf> {
    let parent = runtime_directory();
    let with_path =
        |path: &Path, error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    create(&parent, 0o755).map_err(|error| with_path(&parent, error))?;
    let directory = parent.join("migrations");
    create(&directory, 0o700).map_err(|error| with_path(&directory, error))?;
    Ok(directory)
}

/// Returns the existing runtime directories of the host, with their owners. The owner is root, or the user as whom
/// root runs services.
pub(crate) fn host_runtime_directories() -> impl Iterator<Item = (PathBuf, u32)> {
    let with_owner = |path: &'static str| Some((PathBuf::from(path), owner_of(path)?));
    [SYSTEM_DIRECTORY, ROOT_FALLBACK_DIRECTORY].into_iter().filter_map(with_owner)
}

/// Returns the directory in which the services of version 0.1 kept their journals, and their common user. It is in a
/// directory that now belongs to root, so no other user can have created it.
pub(crate) fn legacy_service_directory() -> Option<(PathBuf, u32)> {
    let journal_directory = format!("{SYSTEM_DIRECTORY}/journals");
    let user = owner_of(&journal_directory).filter(|user| *user != 0)?;
    (owner_of(SYSTEM_DIRECTORY) == Some(0)).then(|| (PathBuf::from(SYSTEM_DIRECTORY), user))
}

/// Returns the directories of the sockets of processes that manage memory: the user's own, and root's for the user of
/// the host's services and for members of the read group.
pub(crate) fn memory_socket_directories() -> Vec<PathBuf> {
    with_root_directory(memory_socket_directory(), MEMORY_SOCKET_DIRECTORY)
}

/// Returns the runtime directories with registered VMs that this user can use: the user's own, and for root and
/// members of the read group those of the host.
pub(crate) fn vm_directories() -> Vec<PathBuf> {
    let host_directories = [SYSTEM_DIRECTORY, ROOT_FALLBACK_DIRECTORY].into_iter().filter(|_| is_reader());
    let user_directories = [socket_directory(), runtime_directory()].into_iter();
    let mut all: Vec<PathBuf> = user_directories.chain(host_directories.map(PathBuf::from)).collect();
    all.dedup();
    all
}

/// Directory with the runtime directories of the services that have a user of their own.
const VM_RUNTIME_ROOT: &str = "/run/larder-vm";

/// Lets every user list a directory of the host in `/run`, so that members of the read group find the sockets. A
/// service may have created the directory with a strict umask. The files in the directory keep their modes.
///
/// # Errors
/// The directory belongs to another user.
pub(crate) fn allow_listing(directory: &Path) -> io::Result<()> {
    let host_directories =
        [SYSTEM_DIRECTORY, ROOT_FALLBACK_DIRECTORY, MEMORY_SOCKET_DIRECTORY, MIGRATION_SOCKET_DIRECTORY];
    match host_directories.iter().any(|parent| directory.starts_with(parent)) {
        true => fs::set_permissions(directory, fs::Permissions::from_mode(0o755)),
        false => Ok(()),
    }
}

/// Runtime directory of root, or of the services.
pub(crate) const SYSTEM_DIRECTORY: &str = "/run/larder";

/// Directory for the sockets of processes that manage memory, which run as root.
const MEMORY_SOCKET_DIRECTORY: &str = "/run/larder-memory";

/// Directory for the sockets of processes that move VMs, which run as root.
const MIGRATION_SOCKET_DIRECTORY: &str = "/run/larder-moves";

/// Directory of libvirt's hook, which runs as root.
const HOOK_DIRECTORY: &str = "/run/larder-hook";

/// Runtime directory of root if the services own the other one.
const ROOT_FALLBACK_DIRECTORY: &str = "/run/larder-root";

fn services_own_system_directory() -> bool {
    owner_of(SYSTEM_DIRECTORY).is_some_and(|user| user != 0)
}

fn owner_of(directory: &str) -> Option<u32> {
    let found = fs::symlink_metadata(directory).ok()?;
    found.is_dir().then(|| found.uid())
}

/// Creates a directory, with `mode` less the umask, unless it exists. Its parent must exist.
///
/// # Errors
/// The directory cannot be created, or other users can write to the existing one.
pub(crate) fn create(directory: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => check_exclusive_owner(directory),
        result => result,
    }
}

/// Checks that a directory belongs to this user, and that no other user can write to it.
///
/// # Errors
/// The directory belongs to another user, or others can write to it.
pub fn check_exclusive_owner(directory: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(directory)?;
    if !found.is_dir() {
        return Err(io::Error::other("it exists, and is not a directory"));
    }
    if found.uid() != geteuid().as_raw() {
        return Err(io::Error::other("it belongs to another user"));
    }
    if found.mode() & 0o022 != 0 {
        return Err(io::Error::other("others can write to it"));
    }
    Ok(())
}

/// Returns whether a directory is in the host's memory.
pub(crate) fn is_on_tmpfs(directory: &Path) -> bool {
    rustix::fs::statfs(directory).is_ok_and(|found| is_tmpfs(&found))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    #[test]
    fn directory_writable_by_others_is_refused() {
        let temporary = tempfile::tempdir().expect("a folder");
        let directory = temporary.path().join("larder");
        create(&directory, 0o700).expect("makes it");
        create(&directory, 0o700).expect("is there");
        assert_eq!(fs::metadata(&directory).expect("is there").mode() & 0o777, 0o700);
        fs::set_permissions(&directory, Permissions::from_mode(0o777)).expect("ours");
        create(&directory, 0o700).expect_err("others can write to it");
        let link = temporary.path().join("link");
        std::os::unix::fs::symlink("/", &link).expect("links");
        create(&link, 0o700).expect_err("is a link");
    }
}
