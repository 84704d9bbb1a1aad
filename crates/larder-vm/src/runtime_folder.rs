//! The user's runtime directory, for files that are useless after a reboot: sockets and journals.
//!
//! Its name can be guessed, so it must belong to the user, and be writable by no other, before anything in it is
//! trusted.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::opener::helper;
use larder_block::boot::is_tmpfs;
use rustix::process::geteuid;

use crate::read_group::is_reader;

/// Returns the path of the runtime directory: systemd's `$RUNTIME_DIRECTORY`, `/run/larder` for root
/// (`/run/larder-root` if the services own that), `$XDG_RUNTIME_DIR/larder`, or `/dev/shm/larder-UID`; the first that
/// is on tmpfs. All processes of a user get the same one. It is not created.
pub fn runtime_folder() -> PathBuf {
    // The variable may be a list; its first entry is used.
    let of_service = std::env::var("RUNTIME_DIRECTORY").ok();
    let of_service = of_service
        .as_deref()
        .and_then(|list| list.split(':').next())
        .map(PathBuf::from);
    if let Some(folder) = of_service.filter(|folder| is_ours_alone(folder).is_ok() && is_on_tmpfs(folder)) {
        return folder;
    }
    if geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        return PathBuf::from(match is_of_services() {
            true => OF_ROOT_BESIDE,
            false => OF_SYSTEM,
        });
    }
    let of_user = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let is_good = |folder: &Path| folder.is_absolute() && is_ours_alone(folder).is_ok() && is_on_tmpfs(folder);
    match of_user.filter(|folder| is_good(folder)) {
        Some(folder) => folder.join("larder"),
        None => PathBuf::from(format!("/dev/shm/larder-{}", geteuid().as_raw())),
    }
}

/// Returns the default directory of sockets: the user's own runtime directory. For root it is that of the services
/// that systemd runs with a user of their own (`larder@.service`), if it exists, because root sends requests to them
/// and writes their files.
pub fn socket_folder() -> PathBuf {
    let is_service = helper().is_some_and(|helper| helper.is_of_service);
    match is_service || geteuid().is_root() && is_of_services() {
        true => PathBuf::from(OF_SYSTEM),
        false => runtime_folder(),
    }
}

/// Returns the runtime directories of the host's services that have a user of their own: VM name, directory and
/// owner.
pub(crate) fn of_vms() -> Vec<(String, PathBuf, u32)> {
    let entries = fs::read_dir(OF_VMS).into_iter().flatten().flatten();
    let folder = |entry: fs::DirEntry| {
        let path = entry.path();
        let user = fs::metadata(&path).ok()?.uid();
        Some((entry.file_name().into_string().ok()?, path, user))
    };
    entries.filter_map(folder).collect()
}

/// Returns the directory for sockets of processes that manage the memory of VMs, which is separate:
/// `/run/larder-memory` for root.
pub(crate) fn memory_folder() -> PathBuf {
    match geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        true => PathBuf::from(OF_MEMORY),
        false => runtime_folder().join("memory"),
    }
}

/// Returns the directory in which pagers reserve memory while they detach, and creates it if necessary.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub(crate) fn detach_ledger_folder() -> io::Result<PathBuf> {
    let memory = memory_folder();
    if let Some(above) = memory.parent().filter(|above| *above == runtime_folder()) {
        make(above, 0o755)?;
    }
    make(&memory, 0o755)?;
    let folder = memory.join("detaching");
    make(&folder, 0o700)?;
    Ok(folder)
}

/// Returns the directory for sockets of processes that move VMs, which is separate: `/run/larder-moves` for root.
pub(crate) fn moves_folder() -> PathBuf {
    match geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        true => PathBuf::from(OF_MOVES),
        false => runtime_folder().join("moves"),
    }
}

/// Returns the directory in which libvirt's hook records the processes that it has started, and creates it if
/// necessary. No other user can write to it; it is `/run/larder-hook` for root.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub fn hook_folder() -> io::Result<PathBuf> {
    let folder = match geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        true => PathBuf::from(OF_HOOK),
        false => {
            let above = runtime_folder();
            make(&above, 0o755)?;
            above.join("hook")
        }
    };
    make(&folder, 0o700)?;
    Ok(folder)
}

/// Returns the directories, among those that this user can use, of the sockets of processes that move VMs.
pub(crate) fn moves_folders() -> Vec<PathBuf> {
    with_the_host_s(moves_folder(), OF_MOVES)
}

/// Returns the user's own directory; for the user of the host's services and for members of the read group also
/// root's.
fn with_the_host_s(own: PathBuf, of_root: &str) -> Vec<PathBuf> {
    let is_concerned = !geteuid().is_root() && (runtime_folder() == Path::new(OF_SYSTEM) || is_reader());
    let other = is_concerned.then(|| PathBuf::from(of_root));
    let other = other.filter(|other| *other != own);
    std::iter::once(own).chain(other).collect()
}

/// Returns the directory in which movers keep state for their successors, and creates it if necessary.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub fn migration_folder() -> io::Result<PathBuf> {
    let above = runtime_folder();
    let named = |path: &Path, error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    make(&above, 0o755).map_err(|error| named(&above, error))?;
    let folder = above.join("migrations");
    make(&folder, 0o700).map_err(|error| named(&folder, error))?;
    Ok(folder)
}

/// Returns the existing runtime directories of the host, with their owners. The owner is root, or the user as whom
/// root runs services.
pub(crate) fn of_the_host() -> impl Iterator<Item = (PathBuf, u32)> {
    let whose = |path: &'static str| Some((PathBuf::from(path), user_of(path)?));
    [OF_SYSTEM, OF_ROOT_BESIDE].into_iter().filter_map(whose)
}

/// Returns the directory in which the services of version 0.1 kept their journals, and their common user. It is in a
/// directory that now belongs to root, so no other user can have created it.
pub(crate) fn of_former_services() -> Option<(PathBuf, u32)> {
    let of_journals = format!("{OF_SYSTEM}/journals");
    let user = user_of(&of_journals).filter(|user| *user != 0)?;
    (user_of(OF_SYSTEM) == Some(0)).then(|| (PathBuf::from(OF_SYSTEM), user))
}

/// Returns the directories of the sockets of processes that manage memory: the user's own, and root's for the user of
/// the host's services and for members of the read group.
pub(crate) fn memory_folders() -> Vec<PathBuf> {
    with_the_host_s(memory_folder(), OF_MEMORY)
}

/// Returns the runtime directories with registered VMs that this user can use: the user's own, and for root and
/// members of the read group those of the host.
pub(crate) fn vm_folders() -> Vec<PathBuf> {
    let of_the_host = [OF_SYSTEM, OF_ROOT_BESIDE].into_iter().filter(|_| is_reader());
    let own = [socket_folder(), runtime_folder()].into_iter();
    let mut all: Vec<PathBuf> = own.chain(of_the_host.map(PathBuf::from)).collect();
    all.dedup();
    all
}

/// Directory with the runtime directories of the services that have a user of their own.
const OF_VMS: &str = "/run/larder-vm";

/// Lets every user list a directory of the host in `/run`, so that members of the read group find the sockets. A
/// service may have created the directory with a strict umask. The files in the directory keep their modes.
///
/// # Errors
/// The directory belongs to another user.
pub(crate) fn let_others_list(folder: &Path) -> io::Result<()> {
    let of_the_host = [OF_SYSTEM, OF_ROOT_BESIDE, OF_MEMORY, OF_MOVES];
    match of_the_host.iter().any(|above| folder.starts_with(above)) {
        true => fs::set_permissions(folder, fs::Permissions::from_mode(0o755)),
        false => Ok(()),
    }
}

/// Runtime directory of root, or of the services.
pub(crate) const OF_SYSTEM: &str = "/run/larder";

/// Directory for the sockets of processes that manage memory, which run as root.
const OF_MEMORY: &str = "/run/larder-memory";

/// Directory for the sockets of processes that move VMs, which run as root.
const OF_MOVES: &str = "/run/larder-moves";

/// Directory of libvirt's hook, which runs as root.
const OF_HOOK: &str = "/run/larder-hook";

/// Runtime directory of root if the services own the other one.
const OF_ROOT_BESIDE: &str = "/run/larder-root";

fn is_of_services() -> bool {
    user_of(OF_SYSTEM).is_some_and(|user| user != 0)
}

fn user_of(folder: &str) -> Option<u32> {
    let found = fs::symlink_metadata(folder).ok()?;
    found.is_dir().then(|| found.uid())
}

/// Creates a directory, with `mode` less the umask, unless it exists. Its parent must exist.
///
/// # Errors
/// The directory cannot be created, or other users can write to the existing one.
pub(crate) fn make(folder: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => is_ours_alone(folder),
        result => result,
    }
}

/// Checks that a directory belongs to this user, and that no other user can write to it.
///
/// # Errors
/// The directory belongs to another user, or others can write to it.
pub fn is_ours_alone(folder: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(folder)?;
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
pub(crate) fn is_on_tmpfs(folder: &Path) -> bool {
    rustix::fs::statfs(folder).is_ok_and(|found| is_tmpfs(&found))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    #[test]
    fn directory_writable_by_others_is_refused() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = place.path().join("larder");
        make(&folder, 0o700).expect("makes it");
        make(&folder, 0o700).expect("is there");
        assert_eq!(fs::metadata(&folder).expect("is there").mode() & 0o777, 0o700);
        fs::set_permissions(&folder, Permissions::from_mode(0o777)).expect("ours");
        make(&folder, 0o700).expect_err("others can write to it");
        let link = place.path().join("link");
        std::os::unix::fs::symlink("/", &link).expect("links");
        make(&link, 0o700).expect_err("is a link");
    }
}
