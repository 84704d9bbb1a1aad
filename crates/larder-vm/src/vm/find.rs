//! Discovery of the VMs of this host.
//!
//! A VM that is served registers its control socket, as a symbolic link in `vms` in the runtime directory, so that
//! clients never connect to unknown sockets. Its server removes the link at its end. A server that is killed leaves
//! the link behind, and the next server of that VM replaces it.

use std::io;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};

use super::config::{self, VmConfig};
use crate::control::migration::Direction;
use crate::listen::is_stale;
use crate::runtime_directory::{self, runtime_directory};

/// A VM that is served or has a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KnownVm {
    /// Name of the VM.
    pub name: String,
    /// Control socket of its server, which may not be running.
    pub control: PathBuf,
    /// Mistake in the VM's file.
    pub mistake: Option<String>,
}

/// Returns all VMs that this user has a file for, or serves, sorted by name.
pub fn known_vms() -> Vec<KnownVm> {
    let mut all = registered_vms();
    for path in config::vm_files() {
        let (name, control, mistake) = match VmConfig::read(&path) {
            Ok(config) => (config.name, config.control, None),
            Err(error) => {
                let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                (name.clone(), config::default_control_path(&name), Some(error.to_string()))
            }
        };
        match all.iter_mut().find(|found| found.name == name) {
            Some(found) => found.mistake = mistake,
            None => all.push(KnownVm { name, control, mistake }),
        }
    }
    all.sort();
    all
}

/// Returns whether a VM of this name has a file or is served.
pub fn is_vm(name: &str) -> bool {
    let has_file = config::vm_file_path(Path::new(name)).is_ok_and(|path| path.exists());
    has_file || registered_vms().iter().any(|found| found.name == name)
}

/// Returns the control socket of the VM `name`: the registered one, or the one in its file, or the default.
pub fn control_path(name: &str) -> PathBuf {
    let noted = registered_vms().into_iter().find(|found| found.name == name);
    noted
        .map(|found| found.control)
        .or_else(|| {
            let path = config::vm_file_path(Path::new(name)).ok()?;
            Some(VmConfig::read(&path).ok()?.control)
        })
        .unwrap_or_else(|| config::default_control_path(name))
}

/// Returns the control socket of the process that manages the memory of the VM `name` (`larder memory attach --vm`).
/// The process listens there while there is memory to manage. The socket is not in the directory of the disks'
/// sockets: the user of the disks' servers can change that directory, and a disk or another VM may have `memory` in
/// its name.
pub fn memory_control_path(name: &str) -> PathBuf {
    runtime_directory::memory_socket_directory().join(format!("{name}.sock"))
}

/// Returns the path at which a client connects to the process that manages the memory of the VM `name`: the first
/// existing socket in the directories that this user can use.
pub fn find_memory_control(name: &str) -> PathBuf {
    let directories = memory_directories().into_iter();
    let mut paths = directories.map(|directory| directory.join(format!("{name}.sock")));
    paths.find(|path| is_socket(path)).unwrap_or_else(|| memory_control_path(name))
}

/// Creates the directory of [`memory_control_path`], and returns the path.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub fn create_memory_control_directory(name: &str) -> io::Result<PathBuf> {
    let directory = runtime_directory::memory_socket_directory();
    if let Some(parent) = directory.parent().filter(|parent| *parent == runtime_directory()) {
        runtime_directory::create(parent, 0o755)?;
    }
    runtime_directory::create(&directory, 0o755)?;
    runtime_directory::allow_listing(&directory)?;
    Ok(memory_control_path(name))
}

/// Returns the control socket of the process that moves the VM `name` in this direction, which exists during the
/// move.
pub fn migration_control_path(name: &str, direction: Direction) -> PathBuf {
    runtime_directory::migration_socket_directory().join(format!("{name}.{}.sock", direction.name()))
}

/// Creates the directory of [`migration_control_path`], and returns the path. Characters that cannot be in a file name
/// are replaced.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub fn create_migration_control_directory(name: &str, direction: Direction) -> io::Result<PathBuf> {
    let directory = runtime_directory::migration_socket_directory();
    if let Some(above) = directory.parent().filter(|above| *above == runtime_directory()) {
        runtime_directory::create(above, 0o755)?;
    }
    runtime_directory::create(&directory, 0o755)?;
    runtime_directory::allow_listing(&directory)?;
    Ok(migration_control_path(&name.replace('/', "_"), direction))
}

/// Returns the directories, among those that this user can use, of the sockets of processes that move VMs.
pub fn migration_directories() -> Vec<PathBuf> {
    runtime_directory::migration_socket_directories()
}

/// Parses VM name and direction from the path of such a socket.
pub fn parse_migration_socket(path: &Path) -> Option<(String, Direction)> {
    let name = path.file_name()?.to_str()?.strip_suffix(".sock")?;
    let directions = [Direction::Leaving, Direction::Coming];
    directions.into_iter().find_map(|direction| {
        let vm = name.strip_suffix(direction.name())?.strip_suffix('.')?;
        Some((vm.to_owned(), direction))
    })
}

/// Returns whether `path` is a socket, or a symbolic link to one.
pub fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Returns the sockets of the processes that are moving VMs, or did until they were killed.
pub fn migration_sockets() -> Vec<(String, Direction, PathBuf)> {
    let entries = migration_directories().into_iter().filter_map(|directory| std::fs::read_dir(directory).ok());
    let paths = entries.flatten().flatten().map(|entry| entry.path());
    let mut all: Vec<_> = paths
        .filter(|path| is_socket(path))
        .filter_map(|path| parse_migration_socket(&path).map(|(vm, way)| (vm, way, path)))
        .collect();
    all.sort();
    all
}

/// Name of the registry directory in the runtime directory.
const REGISTRY_DIRECTORY: &str = "vms";

pub(super) fn registry_directory() -> PathBuf {
    runtime_directory().join(REGISTRY_DIRECTORY)
}

/// Returns the runtime directories with a registry of VMs that this user can use: the user's own, and for root and
/// members of the read group also that of the host's services.
pub fn registry_runtime_directories() -> Vec<PathBuf> {
    runtime_directory::vm_directories()
}

/// Returns the directories, among those that this user can use, of the sockets of processes that only manage memory.
pub fn memory_directories() -> Vec<PathBuf> {
    runtime_directory::memory_socket_directories()
}

/// Suffix of the name of such a socket in a directory with other sockets.
pub const MEMORY_SOCKET_SUFFIX: &str = "-memory";

/// Returns the processes that manage a VM's memory, by the VM's name: the sockets `NAME.sock` in their own
/// directories, and `NAME-memory.sock` in those of VMs. A socket of a disk, according to VMs' files or to
/// `disk_sockets`, is excluded.
pub fn memory_services(disk_sockets: &[PathBuf]) -> Vec<KnownVm> {
    let sockets = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|it| it == "sock") && is_socket(path));
        paths.collect::<Vec<PathBuf>>()
    };
    let found = |name: &str, control: PathBuf| KnownVm { name: name.to_owned(), control, mistake: None };
    let name_of = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut all: Vec<KnownVm> = Vec::new();
    for path in memory_directories().iter().flat_map(|folder| sockets(folder)) {
        all.push(found(&name_of(&path), path));
    }
    let configs = config::vm_files().into_iter().filter_map(|path| VmConfig::read(&path).ok());
    let disks = configs.flat_map(|config| config.disks).filter_map(|disk| disk.socket);
    let disk_sockets: Vec<PathBuf> = disks.chain(disk_sockets.iter().cloned()).collect();
    for path in registry_runtime_directories().iter().flat_map(|folder| sockets(folder)) {
        let name = name_of(&path);
        if let Some(name) = name.strip_suffix(MEMORY_SOCKET_SUFFIX).filter(|name| !name.is_empty())
            && !disk_sockets.contains(&path)
        {
            all.push(found(name, path));
        }
    }
    all.sort();
    all
}

/// Returns the registered VMs of this user, and those of the host's services if the user is root.
fn registered_vms() -> Vec<KnownVm> {
    let mut all: Vec<KnownVm> =
        registry_runtime_directories().iter().flat_map(|directory| registered_in(directory)).collect();
    all.sort();
    all.dedup_by(|one, other| one.name == other.name);
    all
}

/// Returns the VMs that are registered in this runtime directory. They are served, or were until their server was
/// killed.
pub fn registered_in(runtime_folder: &Path) -> Vec<KnownVm> {
    let notes = std::fs::read_dir(runtime_folder.join(REGISTRY_DIRECTORY));
    let notes = notes.into_iter().flatten().flatten();
    let found = notes.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        // A temporary name: this link is being created.
        if name.starts_with('.') {
            return None;
        }
        let control = std::fs::read_link(entry.path()).ok()?;
        Some(KnownVm { name, control, mistake: None })
    });
    found.collect()
}

/// The registration of a VM that is served.
pub(crate) struct Registration {
    path: PathBuf,
    control: PathBuf,
}

impl Registration {
    /// Registers the control socket of the VM `name`. If that fails, the VM cannot be found by its name.
    pub(crate) fn new(name: &str, control: &Path) -> Option<Self> {
        let noted = Self {
            path: registry_directory().join(name),
            control: std::path::absolute(control).unwrap_or_else(|_| control.to_owned()),
        };
        let other = std::fs::read_link(&noted.path).ok().filter(|other| *other != noted.control);
        if let Some(other) = other.filter(|other| other.exists() && !is_stale(other)) {
            tracing::warn!(
                "another `larder vm` serves a VM of this name, at {}: from now on the name refers to this one, also for \
                 `larder migrate`, and not to the other; give one of them another name",
                other.display()
            );
        }
        match noted.write() {
            Ok(()) => Some(noted),
            Err(error) => {
                tracing::warn!(
                    "{}: {error}; `larder status` and `larder host` cannot find this VM by its name",
                    noted.path.display()
                );
                None
            }
        }
    }

    fn write(&self) -> io::Result<()> {
        runtime_directory::create(&runtime_directory(), 0o755)?;
        runtime_directory::create(&registry_directory(), 0o755)?;
        runtime_directory::allow_listing(&registry_directory())?;
        // The rename is atomic: readers find the old link or the new one.
        let new = self.path.with_file_name(format!(".{}", std::process::id()));
        let _ = std::fs::remove_file(&new);
        symlink(&self.control, &new)?;
        std::fs::rename(&new, &self.path)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Another server may have replaced the link.
        if std::fs::read_link(&self.path).is_ok_and(|control| control == self.control) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
