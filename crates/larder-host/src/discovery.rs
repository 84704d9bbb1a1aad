//! Discovery of VMs: from their run records, from VM files, and from the sockets in the runtime directory.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use larder_vm::control::migration::Direction;
use larder_vm::vm::config::VmConfig;
use larder_vm::vm::find::{parse_migration_socket, registered_in};

/// Largest number of control sockets that are watched; the rest is counted in [`UnwatchedCounts`].
const SOCKETS_MAX: usize = 1024;

/// Largest number of VM files that are read, in the order of their names. A running VM is found without its file,
/// too.
const VM_FILES_MAX: usize = 16_384;

/// Identity of a socket, which distinguishes a new socket at an old one's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SocketId {
    device: u64,
    inode: u64,
    ctime: (i64, i64),
}

/// Counts of control sockets beyond [`SOCKETS_MAX`], which are not watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnwatchedCounts {
    /// Paths with a socket: a server runs there, or was killed.
    pub(crate) sockets: usize,
    /// Paths without a socket, and VM files that are not read.
    pub(crate) stopped: usize,
}

impl SocketId {
    fn at(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        found.file_type().is_socket().then(|| Self {
            device: found.dev(),
            inode: found.ino(),
            ctime: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// Path at which a VM's server may listen.
#[derive(Clone, Debug)]
pub(crate) struct DiscoveredSocket {
    /// VM whose file names this path as its control socket.
    pub(crate) vm: Option<VmName>,
    /// VM whose memory, and nothing else, is managed by the process at this socket; derived from the socket's
    /// directory.
    pub(crate) memory_of: Option<String>,
    /// VM that the process at this socket migrates, and nothing else; derived from the socket's name.
    pub(crate) migration: Option<(String, Direction)>,
    /// Socket at the path, if there is one.
    pub(crate) socket: Option<SocketId>,
}

/// Name and UUID of a VM according to its file.
#[derive(Clone, Debug)]
pub(crate) struct VmName {
    pub(crate) name: String,
    pub(crate) uuid: Option<String>,
}

/// Result of one discovery.
#[derive(Default)]
pub(crate) struct Discovery {
    /// Control sockets, by path.
    pub(crate) sockets: BTreeMap<PathBuf, DiscoveredSocket>,
    /// Sockets of disks, according to the VM files.
    pub(crate) disk_sockets: HashSet<PathBuf>,
    /// Paths that are not watched.
    pub(crate) unwatched: HashSet<PathBuf>,
    /// Counts of control sockets that are not watched.
    pub(crate) unwatched_counts: UnwatchedCounts,
}

impl Discovery {
    /// Keeps [`SOCKETS_MAX`] paths, the same at each discovery: running VMs before other sockets, those before stopped
    /// VMs, and equals by path.
    fn limit_sockets(&mut self) {
        if self.sockets.len() <= SOCKETS_MAX {
            return;
        }
        let rank = |discovered: &DiscoveredSocket| match &discovered.socket {
            Some(_) if discovered.vm.is_some() || discovered.memory_of.is_some() || discovered.migration.is_some() => 0,
            Some(_) => 1,
            None => 2,
        };
        let mut ranked: Vec<(u8, &PathBuf)> =
            self.sockets.iter().map(|(path, discovered)| (rank(discovered), path)).collect();
        ranked.sort_unstable();
        let unwatched: HashSet<PathBuf> = ranked.drain(SOCKETS_MAX..).map(|(_, path)| path.clone()).collect();
        for discovered in unwatched.iter().filter_map(|path| self.sockets.remove(path)) {
            match discovered.socket {
                Some(_) => self.unwatched_counts.sockets += 1,
                None => self.unwatched_counts.stopped += 1,
            }
        }
        self.unwatched = unwatched;
    }
}

/// Finds VMs; caches parsed VM files until they change.
pub(crate) struct Finder {
    socket_directories: Vec<PathBuf>,
    /// Directories of the sockets of memory pagers.
    memory_directories: Vec<PathBuf>,
    /// Directories of the sockets of migration processes.
    migration_directories: Vec<PathBuf>,
    vm_file_directory: PathBuf,
    /// Socket to be ignored, because it belongs to no VM.
    ignored_socket: Option<PathBuf>,
    parsed_files: HashMap<PathBuf, (VmFileFingerprint, Option<VmConfig>)>,
    /// Counts that were last logged.
    logged: UnwatchedCounts,
}

type VmFileFingerprint = (u64, u64, Option<SystemTime>);

impl Finder {
    /// Creates a finder. The arguments are the directories of control sockets, of memory sockets, of migration
    /// sockets, and of VM files.
    pub(crate) fn new(
        sockets: Vec<PathBuf>,
        memory_directories: Vec<PathBuf>,
        migration_directories: Vec<PathBuf>,
        files: PathBuf,
    ) -> Self {
        Self {
            socket_directories: sockets,
            memory_directories,
            migration_directories,
            vm_file_directory: files,
            ignored_socket: None,
            parsed_files: HashMap::new(),
            logged: UnwatchedCounts::default(),
        }
    }

    /// Ignores the socket at `path`, on which this process itself listens.
    pub(crate) fn ignore_socket(&mut self, path: &Path) {
        self.ignored_socket = Some(path.to_owned());
    }

    /// Returns the VMs that exist now.
    pub(crate) fn find(&mut self) -> Discovery {
        let mut found = Discovery::default();
        found.unwatched_counts.stopped = self.read_files();
        for config in self.parsed_files.values().filter_map(|(_, config)| config.as_ref()) {
            found.disk_sockets.extend(config.disks.iter().filter_map(|disk| disk.socket.clone()));
            let discovered = DiscoveredSocket {
                memory_of: None,
                migration: None,
                socket: SocketId::at(&config.control),
                vm: Some(VmName { name: config.name.clone(), uuid: config.uuid.clone() }),
            };
            found.sockets.insert(config.control.clone(), discovered);
        }
        for registered in self.socket_directories.iter().flat_map(|directory| registered_in(directory)) {
            let socket = SocketId::at(&registered.control);
            let name = registered.name;
            let vm = Some(VmName { name, uuid: None });
            found.sockets.entry(registered.control).or_insert(DiscoveredSocket {
                vm,
                memory_of: None,
                migration: None,
                socket,
            });
        }
        for path in self.memory_directories.iter().flat_map(|directory| paths(directory, "sock")) {
            let socket = SocketId::at(&path);
            let memory_of = Some(path.file_stem().unwrap_or_default().to_string_lossy().into_owned());
            if socket.is_some() {
                found.sockets.entry(path).or_insert(DiscoveredSocket { vm: None, memory_of, migration: None, socket });
            }
        }
        for path in self.migration_directories.iter().flat_map(|directory| paths(directory, "sock")) {
            let (socket, migration) = (SocketId::at(&path), parse_migration_socket(&path));
            if socket.is_some() && migration.is_some() {
                found.sockets.entry(path).or_insert(DiscoveredSocket { vm: None, memory_of: None, migration, socket });
            }
        }
        for path in self.socket_directories.iter().flat_map(|directory| paths(directory, "sock")) {
            let socket = SocketId::at(&path);
            if socket.is_some() && !found.disk_sockets.contains(&path) && self.ignored_socket.as_ref() != Some(&path) {
                found.sockets.entry(path).or_insert(DiscoveredSocket {
                    vm: None,
                    memory_of: None,
                    migration: None,
                    socket,
                });
            }
        }
        found.limit_sockets();
        let unwatched = found.unwatched_counts;
        if (unwatched == UnwatchedCounts::default()) != (self.logged == UnwatchedCounts::default()) {
            self.logged = unwatched;
            tracing::warn!(
                sockets = unwatched.sockets,
                stopped = unwatched.stopped,
                "some control sockets are not watched, because at most {SOCKETS_MAX} can be"
            );
        }
        found
    }

    /// Reads the files that have changed, and returns the number of files beyond the bound.
    fn read_files(&mut self) -> usize {
        let mut paths = paths(&self.vm_file_directory, "toml");
        let excess = paths.iter().nth(VM_FILES_MAX).cloned();
        let beyond = excess.map_or(0, |first| paths.split_off(&first).len());
        self.parsed_files.retain(|path, _| paths.contains(path));
        for path in paths {
            let Ok(now) = fs::metadata(&path) else {
                self.parsed_files.remove(&path);
                continue;
            };
            let fingerprint = (now.ino(), now.len(), now.modified().ok());
            if self.parsed_files.get(&path).is_some_and(|(before, _)| *before == fingerprint) {
                continue;
            }
            // An invalid file is reported by its VM's server; a running server is found by its socket anyway.
            let config = VmConfig::read(&path).ok();
            self.parsed_files.insert(path, (fingerprint, config));
        }
        beyond
    }
}

/// Returns the entries of a directory with the given extension, or nothing if the directory cannot be read.
fn paths(directory: &Path, extension: &str) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|it| it == extension)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Running VMs are watched before others, and each discovery chooses the same paths.
    #[test]
    fn running_vms_are_watched_first() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = |name: &str| directory.path().join(name);
        let file = |name: &str| format!("control = \"{name}.sock\"\n[[disk]]\nimage = \"/dev/null\"\n");
        // Sorted by name, the running VMs are last.
        let stopped = (0..SOCKETS_MAX + 100).map(|number| format!("a{number:05}"));
        let running: Vec<String> = (0..50).map(|number| format!("z{number}")).collect();
        for name in stopped.chain(running.iter().cloned()) {
            fs::write(path(&format!("{name}.toml")), file(&name)).expect("writes");
        }
        let control = |name: &String| path(&format!("{name}.sock"));
        let _sockets: Vec<_> = running.iter().map(|name| UnixListener::bind(control(name)).expect("binds")).collect();
        let _unknown = UnixListener::bind(path("unknown.sock")).expect("binds");
        let finder =
            || Finder::new(vec![directory.path().to_owned()], Vec::new(), Vec::new(), directory.path().to_owned());
        let (mut one, mut other) = (finder(), finder());
        let found = one.find();
        let watched = |found: &Discovery| found.sockets.keys().cloned().collect::<Vec<_>>();
        assert_eq!(found.sockets.len(), SOCKETS_MAX);
        assert!(running.iter().all(|name| found.sockets.contains_key(&control(name))));
        assert!(found.sockets.contains_key(&path("unknown.sock")));
        assert_eq!((found.unwatched_counts.sockets, found.unwatched_counts.stopped), (0, 151));
        assert_eq!(found.unwatched.len(), 151);
        assert_eq!(watched(&one.find()), watched(&found));
        assert_eq!(watched(&other.find()), watched(&found));
    }

    /// VMs are found by sockets and by files, and a socket that a VM file names as a disk's is ignored.
    #[test]
    fn finder_ignores_disk_sockets() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = |name: &str| directory.path().join(name);
        let _sockets =
            ["web.sock", "web-vda.sock", "db.sock"].map(|name| UnixListener::bind(path(name)).expect("binds"));
        fs::write(path("plain.sock"), "").expect("writes");
        let memory_directories = path("memory");
        fs::create_dir(&memory_directories).expect("a folder");
        let _memory = UnixListener::bind(memory_directories.join("web.sock")).expect("binds");
        let file = |name: &str| {
            format!("control = \"{name}.sock\"\n[[disk]]\nimage = \"/dev/null\"\nsocket = \"{name}-vda.sock\"\n")
        };
        fs::write(path("web.toml"), file("web")).expect("writes");
        fs::write(path("off.toml"), file("off")).expect("writes");
        fs::write(path("wrong.toml"), "disk = 7").expect("writes");
        let mut finder = Finder::new(
            vec![directory.path().to_owned()],
            vec![memory_directories.clone()],
            Vec::new(),
            directory.path().to_owned(),
        );
        for _ in 0..2 {
            let found = finder.find();
            let rows = found.sockets.iter().map(|(path, discovered)| {
                let name = path.file_name().expect("a name").to_string_lossy().into_owned();
                (
                    name,
                    discovered.vm.as_ref().map(|vm| vm.name.clone()).or(discovered.memory_of.clone()),
                    discovered.socket.is_some(),
                )
            });
            let rows: Vec<_> = rows.collect();
            let named = |name: &str| Some(name.to_owned());
            assert_eq!(
                rows,
                [
                    ("db.sock".to_owned(), None, true),
                    ("web.sock".to_owned(), named("web"), true),
                    ("off.sock".to_owned(), named("off"), false),
                    ("web.sock".to_owned(), named("web"), true),
                ]
            );
        }
        fs::remove_file(path("web.toml")).expect("was there");
        let found = finder.find();
        assert!(found.sockets.contains_key(&path("web-vda.sock")), "no VM file names it any more");
    }
}
