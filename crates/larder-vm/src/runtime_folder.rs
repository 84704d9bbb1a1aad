//! The user's folder for what is of no use once the host has restarted: sockets and journals.
//!
//! Its name can be guessed, so it must be the user's own, and no other's to write to, before anything in it is trusted.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::opener::helper;
use larder_block::boot::is_tmpfs;
use rustix::process::geteuid;

use crate::read_group::is_reader;

/// Where it is, or will be: systemd's `$RUNTIME_DIRECTORY`, `/run/larder` for root (`/run/larder-root` where that is the
/// services'), `$XDG_RUNTIME_DIR/larder`, or `/dev/shm/larder-UID`; the first that is on tmpfs. All processes of a user find the same one. Nothing is made.
pub fn runtime_folder() -> PathBuf {
    // It may be a list, of which the first will do.
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

/// Where sockets are of which nothing is said: the user's own folder; for root that of the services which systemd runs as a
/// user of their own (`larder@.service`), if it is there: root asks them, and writes their files.
pub fn socket_folder() -> PathBuf {
    let is_service = helper().is_some_and(|helper| helper.is_of_service);
    match is_service || geteuid().is_root() && is_of_services() {
        true => PathBuf::from(OF_SYSTEM),
        false => runtime_folder(),
    }
}

/// The runtime folders of the host's services that are a user of their own each: the VM's name, the folder, and whose it is.
pub(crate) fn of_vms() -> Vec<(String, PathBuf, u32)> {
    let entries = fs::read_dir(OF_VMS).into_iter().flatten().flatten();
    let folder = |entry: fs::DirEntry| {
        let path = entry.path();
        let user = fs::metadata(&path).ok()?.uid();
        Some((entry.file_name().into_string().ok()?, path, user))
    };
    entries.filter_map(folder).collect()
}

/// Where the sockets are of the processes that manage the memory of VMs: a folder of its own, `/run/larder-memory` for root.
pub(crate) fn memory_folder() -> PathBuf {
    match geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        true => PathBuf::from(OF_MEMORY),
        false => runtime_folder().join("memory"),
    }
}

/// The folder in which pagers claim memory while they detach. It is made if it is not there.
///
/// # Errors
/// It cannot be made, or is not this user's alone.
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

/// Where the sockets are of the processes that move VMs: a folder of its own, `/run/larder-moves` for root.
pub(crate) fn moves_folder() -> PathBuf {
    match geteuid().is_root() && is_on_tmpfs(Path::new("/run")) {
        true => PathBuf::from(OF_MOVES),
        false => runtime_folder().join("moves"),
    }
}

/// Where libvirt's hook notes what it has started: a folder that nobody else can write to, `/run/larder-hook` for root. It is
/// made if it is not there.
///
/// # Errors
/// It cannot be made, or is not this user's alone.
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

/// The folders of such sockets that concern this user, as of those of memory.
pub(crate) fn moves_folders() -> Vec<PathBuf> {
    with_the_host_s(moves_folder(), OF_MOVES)
}

/// Returns the user's own folder, and root's too for the user of the host's services and for members of the read group.
fn with_the_host_s(own: PathBuf, of_root: &str) -> Vec<PathBuf> {
    let is_concerned = !geteuid().is_root() && (runtime_folder() == Path::new(OF_SYSTEM) || is_reader());
    let other = is_concerned.then(|| PathBuf::from(of_root));
    let other = other.filter(|other| *other != own);
    std::iter::once(own).chain(other).collect()
}

/// Where those that move VMs keep what one that comes after them must know; it is made if it is not there.
///
/// # Errors
/// It cannot be made, or is not this user's alone.
pub fn migration_folder() -> io::Result<PathBuf> {
    let above = runtime_folder();
    let named = |path: &Path, error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    make(&above, 0o755).map_err(|error| named(&above, error))?;
    let folder = above.join("migrations");
    make(&folder, 0o700).map_err(|error| named(&folder, error))?;
    Ok(folder)
}

/// Those that are the host's and not an ordinary user's, as far as they are there, and whose they are: root's, or that
/// user's whom root lets run services.
pub(crate) fn of_the_host() -> impl Iterator<Item = (PathBuf, u32)> {
    let whose = |path: &'static str| Some((PathBuf::from(path), user_of(path)?));
    [OF_SYSTEM, OF_ROOT_BESIDE].into_iter().filter_map(whose)
}

/// Returns where the services of version 0.1 kept their journals, which were one user, and that user; in a folder that is root's
/// now nobody else has made it.
pub(crate) fn of_former_services() -> Option<(PathBuf, u32)> {
    let of_journals = format!("{OF_SYSTEM}/journals");
    let user = user_of(&of_journals).filter(|user| *user != 0)?;
    (user_of(OF_SYSTEM) == Some(0)).then(|| (PathBuf::from(OF_SYSTEM), user))
}

/// The folders of such sockets that concern this user: the user's own, and root's for the user of the host's services and
/// for members of the read group.
pub(crate) fn memory_folders() -> Vec<PathBuf> {
    with_the_host_s(memory_folder(), OF_MEMORY)
}

/// The folders in which VMs are noted that concern this user: the user's own, and for root and members of the read group
/// those of the host.
pub(crate) fn vm_folders() -> Vec<PathBuf> {
    let of_the_host = [OF_SYSTEM, OF_ROOT_BESIDE].into_iter().filter(|_| is_reader());
    let own = [socket_folder(), runtime_folder()].into_iter();
    let mut all: Vec<PathBuf> = own.chain(of_the_host.map(PathBuf::from)).collect();
    all.dedup();
    all
}

/// In it each service that is a user of its own has its runtime folder.
const OF_VMS: &str = "/run/larder-vm";

/// Lets every user list a folder of the host in `/run`, so that members of the read group find the sockets. A service may
/// have created the folder with a strict umask. The files in the folder keep their modes.
///
/// # Errors
/// The folder belongs to another user.
pub(crate) fn let_others_list(folder: &Path) -> io::Result<()> {
    let of_the_host = [OF_SYSTEM, OF_ROOT_BESIDE, OF_MEMORY, OF_MOVES];
    match of_the_host.iter().any(|above| folder.starts_with(above)) {
        true => fs::set_permissions(folder, fs::Permissions::from_mode(0o755)),
        false => Ok(()),
    }
}

/// Root's, or that of the services.
pub(crate) const OF_SYSTEM: &str = "/run/larder";

/// Of the processes that manage memory, which are root's.
const OF_MEMORY: &str = "/run/larder-memory";

/// Of the processes that move VMs, likewise.
const OF_MOVES: &str = "/run/larder-moves";

/// Of libvirt's hook, which is root's.
const OF_HOOK: &str = "/run/larder-hook";

/// Root's where that one is the services'.
const OF_ROOT_BESIDE: &str = "/run/larder-root";

fn is_of_services() -> bool {
    user_of(OF_SYSTEM).is_some_and(|user| user != 0)
}

fn user_of(folder: &str) -> Option<u32> {
    let found = fs::symlink_metadata(folder).ok()?;
    found.is_dir().then(|| found.uid())
}

/// Makes a folder, with `mode` less the umask, unless it is there. The one above it must exist.
///
/// # Errors
/// It cannot be made, or what is there is not this user's alone.
pub(crate) fn make(folder: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => is_ours_alone(folder),
        result => result,
    }
}

/// Whether a folder is this user's, and no other's to write to.
///
/// # Errors
/// It is not.
pub fn is_ours_alone(folder: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(folder)?;
    if !found.is_dir() {
        return Err(io::Error::other("it is there, and no folder"));
    }
    if found.uid() != geteuid().as_raw() {
        return Err(io::Error::other("it belongs to somebody else"));
    }
    if found.mode() & 0o022 != 0 {
        return Err(io::Error::other("others can write to it"));
    }
    Ok(())
}

/// Whether a folder is in the host's memory.
pub(crate) fn is_on_tmpfs(folder: &Path) -> bool {
    rustix::fs::statfs(folder).is_ok_and(|found| is_tmpfs(&found))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    #[test]
    fn a_folder_that_others_can_write_to_is_not_used() {
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
