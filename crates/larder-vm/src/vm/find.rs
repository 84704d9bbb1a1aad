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
use crate::listen::is_dead;
use crate::runtime_folder::{self, runtime_folder};

/// A VM that is served or has a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found {
    /// Name of the VM.
    pub name: String,
    /// Control socket of its server, which may not be running.
    pub control: PathBuf,
    /// Mistake in the VM's file.
    pub mistake: Option<String>,
}

/// Returns all VMs that this user has a file for, or serves, sorted by name.
pub fn vms() -> Vec<Found> {
    let mut all = noted();
    for path in config::files() {
        let (name, control, mistake) = match VmConfig::read(&path) {
            Ok(config) => (config.name, config.control, None),
            Err(error) => {
                let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                (name.clone(), config::usual_control(&name), Some(error.to_string()))
            }
        };
        match all.iter_mut().find(|found| found.name == name) {
            Some(found) => found.mistake = mistake,
            None => all.push(Found { name, control, mistake }),
        }
    }
    all.sort();
    all
}

/// Returns whether a VM of this name has a file or is served.
pub fn is_vm(name: &str) -> bool {
    let has_file = config::path_of(Path::new(name)).is_ok_and(|path| path.exists());
    has_file || noted().iter().any(|found| found.name == name)
}

/// Returns the control socket of the VM `name`: the registered one, or the one in its file, or the default.
pub fn control_of(name: &str) -> PathBuf {
    let noted = noted().into_iter().find(|found| found.name == name);
    noted
        .map(|found| found.control)
        .or_else(|| {
            let path = config::path_of(Path::new(name)).ok()?;
            Some(VmConfig::read(&path).ok()?.control)
        })
        .unwrap_or_else(|| config::usual_control(name))
}

/// Returns the control socket of the process that manages the memory of the VM `name` (`larder memory attach --vm`).
/// The process listens there while there is memory to manage. The socket is not in the directory of the disks'
/// sockets: the user of the disks' servers can change that directory, and a disk or another VM may have `memory` in
/// its name.
pub fn memory_control_of(name: &str) -> PathBuf {
    runtime_folder::memory_folder().join(format!("{name}.sock"))
}

/// Returns the path at which a client connects to the process that manages the memory of the VM `name`: the first
/// existing socket in the directories that this user can use.
pub fn find_memory_control(name: &str) -> PathBuf {
    let folders = memory_folders().into_iter();
    let mut paths = folders.map(|folder| folder.join(format!("{name}.sock")));
    paths
        .find(|path| is_socket(path))
        .unwrap_or_else(|| memory_control_of(name))
}

/// Creates the directory of [`memory_control_of`], and returns the path.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub fn make_memory_control(name: &str) -> io::Result<PathBuf> {
    let folder = runtime_folder::memory_folder();
    if let Some(above) = folder.parent().filter(|above| *above == runtime_folder()) {
        runtime_folder::make(above, 0o755)?;
    }
    runtime_folder::make(&folder, 0o755)?;
    runtime_folder::let_others_list(&folder)?;
    Ok(memory_control_of(name))
}

/// Returns the control socket of the process that moves the VM `name` in this direction, which exists during the
/// move.
pub fn migration_control_of(name: &str, direction: Direction) -> PathBuf {
    runtime_folder::moves_folder().join(format!("{name}.{}.sock", direction.name()))
}

/// Creates the directory of [`migration_control_of`], and returns the path. Characters that cannot be in a file name
/// are replaced.
///
/// # Errors
/// The directory cannot be created, or other users can write to it.
pub fn make_migration_control(name: &str, direction: Direction) -> io::Result<PathBuf> {
    let folder = runtime_folder::moves_folder();
    if let Some(above) = folder.parent().filter(|above| *above == runtime_folder()) {
        runtime_folder::make(above, 0o755)?;
    }
    runtime_folder::make(&folder, 0o755)?;
    runtime_folder::let_others_list(&folder)?;
    Ok(migration_control_of(&name.replace('/', "_"), direction))
}

/// Returns the directories, among those that this user can use, of the sockets of processes that move VMs.
pub fn moves_folders() -> Vec<PathBuf> {
    runtime_folder::moves_folders()
}

/// Parses VM name and direction from the path of such a socket.
pub fn moved_of(path: &Path) -> Option<(String, Direction)> {
    let name = path.file_name()?.to_str()?.strip_suffix(".sock")?;
    let ways = [Direction::Leaving, Direction::Coming];
    ways.into_iter().find_map(|way| {
        let vm = name.strip_suffix(way.name())?.strip_suffix('.')?;
        Some((vm.to_owned(), way))
    })
}

/// Returns whether `path` is a socket, or a symbolic link to one.
pub fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Returns the sockets of the processes that are moving VMs, or did until they were killed.
pub fn moves() -> Vec<(String, Direction, PathBuf)> {
    let entries = moves_folders()
        .into_iter()
        .filter_map(|folder| std::fs::read_dir(folder).ok());
    let paths = entries.flatten().flatten().map(|entry| entry.path());
    let mut all: Vec<_> = paths
        .filter(|path| is_socket(path))
        .filter_map(|path| moved_of(&path).map(|(vm, way)| (vm, way, path)))
        .collect();
    all.sort();
    all
}

/// Name of the registry directory in the runtime directory.
const FOLDER: &str = "vms";

pub(super) fn folder() -> PathBuf {
    runtime_folder().join(FOLDER)
}

/// Returns the runtime directories with a registry of VMs that this user can use: the user's own, and for root and
/// members of the read group also that of the host's services.
pub fn folders() -> Vec<PathBuf> {
    runtime_folder::vm_folders()
}

/// Returns the directories, among those that this user can use, of the sockets of processes that only manage memory.
pub fn memory_folders() -> Vec<PathBuf> {
    runtime_folder::memory_folders()
}

/// Suffix of the name of such a socket in a directory with other sockets.
pub const OF_MEMORY: &str = "-memory";

/// Returns the processes that manage a VM's memory, by the VM's name: the sockets `NAME.sock` in their own
/// directories, and `NAME-memory.sock` in those of VMs. A socket of a disk, according to VMs' files or to `of_disks`,
/// is excluded.
pub fn memories(of_disks: &[PathBuf]) -> Vec<Found> {
    let sockets = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|it| it == "sock") && is_socket(path));
        paths.collect::<Vec<PathBuf>>()
    };
    let found = |name: &str, control: PathBuf| Found {
        name: name.to_owned(),
        control,
        mistake: None,
    };
    let name_of = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut all: Vec<Found> = Vec::new();
    for path in memory_folders().iter().flat_map(|folder| sockets(folder)) {
        all.push(found(&name_of(&path), path));
    }
    let configs = config::files()
        .into_iter()
        .filter_map(|path| VmConfig::read(&path).ok());
    let disks = configs.flat_map(|config| config.disks).filter_map(|disk| disk.socket);
    let of_disks: Vec<PathBuf> = disks.chain(of_disks.iter().cloned()).collect();
    for path in folders().iter().flat_map(|folder| sockets(folder)) {
        let name = name_of(&path);
        if let Some(name) = name.strip_suffix(OF_MEMORY).filter(|name| !name.is_empty())
            && !of_disks.contains(&path)
        {
            all.push(found(name, path));
        }
    }
    all.sort();
    all
}

/// Returns the registered VMs of this user, and those of the host's services if the user is root.
fn noted() -> Vec<Found> {
    let mut all: Vec<Found> = folders().iter().flat_map(|folder| noted_in(folder)).collect();
    all.sort();
    all.dedup_by(|one, other| one.name == other.name);
    all
}

/// Returns the VMs that are registered in this runtime directory. They are served, or were until their server was
/// killed.
pub fn noted_in(runtime_folder: &Path) -> Vec<Found> {
    let notes = std::fs::read_dir(runtime_folder.join(FOLDER));
    let notes = notes.into_iter().flatten().flatten();
    let found = notes.filter_map(|note| {
        let name = note.file_name().into_string().ok()?;
        // A temporary name: this link is being created.
        if name.starts_with('.') {
            return None;
        }
        let control = std::fs::read_link(note.path()).ok()?;
        Some(Found {
            name,
            control,
            mistake: None,
        })
    });
    found.collect()
}

/// The registration of a VM that is served.
pub(crate) struct Noted {
    path: PathBuf,
    control: PathBuf,
}

impl Noted {
    /// Registers the control socket of the VM `name`. If that fails, the VM cannot be found by its name.
    pub(crate) fn new(name: &str, control: &Path) -> Option<Self> {
        let noted = Self {
            path: folder().join(name),
            control: std::path::absolute(control).unwrap_or_else(|_| control.to_owned()),
        };
        let other = std::fs::read_link(&noted.path)
            .ok()
            .filter(|other| *other != noted.control);
        if let Some(other) = other.filter(|other| other.exists() && !is_dead(other)) {
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
        runtime_folder::make(&runtime_folder(), 0o755)?;
        runtime_folder::make(&folder(), 0o755)?;
        runtime_folder::let_others_list(&folder())?;
        // The rename is atomic: readers find the old link or the new one.
        let new = self.path.with_file_name(format!(".{}", std::process::id()));
        let _ = std::fs::remove_file(&new);
        symlink(&self.control, &new)?;
        std::fs::rename(&new, &self.path)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        // Another server may have replaced the link.
        if std::fs::read_link(&self.path).is_ok_and(|control| control == self.control) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
