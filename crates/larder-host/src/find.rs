//! Discovery of VMs: from their run records, from VM files, and from the sockets in the runtime directory.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use larder_vm::control::migration::Direction;
use larder_vm::vm::config::VmConfig;
use larder_vm::vm::find::{moved_of, noted_in};

/// Largest number of control sockets that are watched; the rest is counted in [`LeftOut`].
const PLACES_MAX: usize = 1024;

/// Largest number of VM files that are read, in the order of their names. A running VM is found without its file,
/// too.
const FILES_MAX: usize = 16_384;

/// Identity of a socket, which distinguishes a new socket at an old one's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SocketId {
    device: u64,
    inode: u64,
    made: (i64, i64),
}

/// Counts of control sockets beyond [`PLACES_MAX`], which are not watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftOut {
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
            made: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// Path at which a VM's server may listen.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// VM whose file names this path as its control socket.
    pub(crate) vm: Option<VmName>,
    /// VM whose memory, and nothing else, is managed by the process at this socket; derived from the socket's
    /// directory.
    pub(crate) memory_of: Option<String>,
    /// VM that the process at this socket migrates, and nothing else; derived from the socket's name.
    pub(crate) moved: Option<(String, Direction)>,
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
pub(crate) struct Found {
    /// Control sockets, by path.
    pub(crate) places: BTreeMap<PathBuf, Place>,
    /// Sockets of disks, according to the VM files.
    pub(crate) of_disks: HashSet<PathBuf>,
    /// Paths that are not watched.
    pub(crate) beyond: HashSet<PathBuf>,
    /// Counts of control sockets that are not watched.
    pub(crate) left_out: LeftOut,
}

impl Found {
    /// Keeps [`PLACES_MAX`] paths, the same at each discovery: running VMs before other sockets, those before stopped
    /// VMs, and equals by path.
    fn bound(&mut self) {
        if self.places.len() <= PLACES_MAX {
            return;
        }
        let rank = |place: &Place| match &place.socket {
            Some(_) if place.vm.is_some() || place.memory_of.is_some() || place.moved.is_some() => 0,
            Some(_) => 1,
            None => 2,
        };
        let mut ranked: Vec<(u8, &PathBuf)> = self.places.iter().map(|(path, place)| (rank(place), path)).collect();
        ranked.sort_unstable();
        let beyond: HashSet<PathBuf> = ranked.drain(PLACES_MAX..).map(|(_, path)| path.clone()).collect();
        for place in beyond.iter().filter_map(|path| self.places.remove(path)) {
            match place.socket {
                Some(_) => self.left_out.sockets += 1,
                None => self.left_out.stopped += 1,
            }
        }
        self.beyond = beyond;
    }
}

/// Finds VMs; caches parsed VM files until they change.
pub(crate) struct Finder {
    sockets: Vec<PathBuf>,
    /// Directories of the sockets of memory pagers.
    memories: Vec<PathBuf>,
    /// Directories of the sockets of migration processes.
    moves: Vec<PathBuf>,
    files: PathBuf,
    /// Socket to be ignored, because it belongs to no VM.
    left_out: Option<PathBuf>,
    read: HashMap<PathBuf, (Stamp, Option<VmConfig>)>,
    /// Counts that were last logged.
    logged: LeftOut,
}

type Stamp = (u64, u64, Option<SystemTime>);

impl Finder {
    /// Creates a finder. The arguments are the directories of control sockets, of memory sockets, of migration
    /// sockets, and of VM files.
    pub(crate) fn new(sockets: Vec<PathBuf>, memories: Vec<PathBuf>, moves: Vec<PathBuf>, files: PathBuf) -> Self {
        Self {
            sockets,
            memories,
            moves,
            files,
            left_out: None,
            read: HashMap::new(),
            logged: LeftOut::default(),
        }
    }

    /// Ignores the socket at `path`, on which this process itself listens.
    pub(crate) fn leave_out(&mut self, path: &Path) {
        self.left_out = Some(path.to_owned());
    }

    /// Returns the VMs that exist now.
    pub(crate) fn find(&mut self) -> Found {
        let mut found = Found::default();
        found.left_out.stopped = self.read_files();
        for config in self.read.values().filter_map(|(_, config)| config.as_ref()) {
            found
                .of_disks
                .extend(config.disks.iter().filter_map(|disk| disk.socket.clone()));
            let place = Place {
                memory_of: None,
                moved: None,
                socket: SocketId::at(&config.control),
                vm: Some(VmName {
                    name: config.name.clone(),
                    uuid: config.uuid.clone(),
                }),
            };
            found.places.insert(config.control.clone(), place);
        }
        for noted in self.sockets.iter().flat_map(|folder| noted_in(folder)) {
            let socket = SocketId::at(&noted.control);
            let name = noted.name;
            let vm = Some(VmName { name, uuid: None });
            found.places.entry(noted.control).or_insert(Place {
                vm,
                memory_of: None,
                moved: None,
                socket,
            });
        }
        for path in self.memories.iter().flat_map(|folder| paths(folder, "sock")) {
            let socket = SocketId::at(&path);
            let memory_of = Some(path.file_stem().unwrap_or_default().to_string_lossy().into_owned());
            if socket.is_some() {
                found.places.entry(path).or_insert(Place {
                    vm: None,
                    memory_of,
                    moved: None,
                    socket,
                });
            }
        }
        for path in self.moves.iter().flat_map(|folder| paths(folder, "sock")) {
            let (socket, moved) = (SocketId::at(&path), moved_of(&path));
            if socket.is_some() && moved.is_some() {
                found.places.entry(path).or_insert(Place {
                    vm: None,
                    memory_of: None,
                    moved,
                    socket,
                });
            }
        }
        for path in self.sockets.iter().flat_map(|folder| paths(folder, "sock")) {
            let socket = SocketId::at(&path);
            if socket.is_some() && !found.of_disks.contains(&path) && self.left_out.as_ref() != Some(&path) {
                found.places.entry(path).or_insert(Place {
                    vm: None,
                    memory_of: None,
                    moved: None,
                    socket,
                });
            }
        }
        found.bound();
        let left_out = found.left_out;
        if (left_out == LeftOut::default()) != (self.logged == LeftOut::default()) {
            self.logged = left_out;
            tracing::warn!(
                sockets = left_out.sockets,
                stopped = left_out.stopped,
                "some control sockets are not watched, because at most {PLACES_MAX} can be"
            );
        }
        found
    }

    /// Reads the files that have changed, and returns the number of files beyond the bound.
    fn read_files(&mut self) -> usize {
        let mut paths = paths(&self.files, "toml");
        let beyond = paths.iter().nth(FILES_MAX).cloned();
        let beyond = beyond.map_or(0, |first| paths.split_off(&first).len());
        self.read.retain(|path, _| paths.contains(path));
        for path in paths {
            let Ok(now) = fs::metadata(&path) else {
                self.read.remove(&path);
                continue;
            };
            let stamp = (now.ino(), now.len(), now.modified().ok());
            if self.read.get(&path).is_some_and(|(before, _)| *before == stamp) {
                continue;
            }
            // An invalid file is reported by its VM's server; a running server is found by its socket anyway.
            let config = VmConfig::read(&path).ok();
            self.read.insert(path, (stamp, config));
        }
        beyond
    }
}

/// Returns the entries of a directory with the given extension, or nothing if the directory cannot be read.
fn paths(folder: &Path, extension: &str) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths
        .filter(|path| path.extension().is_some_and(|it| it == extension))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Running VMs are watched before others, and each discovery chooses the same paths.
    #[test]
    fn running_vms_are_watched_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let file = |name: &str| format!("control = \"{name}.sock\"\n[[disk]]\nimage = \"/dev/null\"\n");
        // Sorted by name, the running VMs are last.
        let stopped = (0..PLACES_MAX + 100).map(|number| format!("a{number:05}"));
        let running: Vec<String> = (0..50).map(|number| format!("z{number}")).collect();
        for name in stopped.chain(running.iter().cloned()) {
            fs::write(path(&format!("{name}.toml")), file(&name)).expect("writes");
        }
        let control = |name: &String| path(&format!("{name}.sock"));
        let _sockets: Vec<_> = running
            .iter()
            .map(|name| UnixListener::bind(control(name)).expect("binds"))
            .collect();
        let _unknown = UnixListener::bind(path("unknown.sock")).expect("binds");
        let finder = || {
            Finder::new(
                vec![folder.path().to_owned()],
                Vec::new(),
                Vec::new(),
                folder.path().to_owned(),
            )
        };
        let (mut one, mut other) = (finder(), finder());
        let found = one.find();
        let watched = |found: &Found| found.places.keys().cloned().collect::<Vec<_>>();
        assert_eq!(found.places.len(), PLACES_MAX);
        assert!(running.iter().all(|name| found.places.contains_key(&control(name))));
        assert!(found.places.contains_key(&path("unknown.sock")));
        assert_eq!((found.left_out.sockets, found.left_out.stopped), (0, 151));
        assert_eq!(found.beyond.len(), 151);
        assert_eq!(watched(&one.find()), watched(&found));
        assert_eq!(watched(&other.find()), watched(&found));
    }

    /// VMs are found by sockets and by files, and a socket that a VM file names as a disk's is ignored.
    #[test]
    fn finder_ignores_disk_sockets() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let _sockets =
            ["web.sock", "web-vda.sock", "db.sock"].map(|name| UnixListener::bind(path(name)).expect("binds"));
        fs::write(path("plain.sock"), "").expect("writes");
        let memories = path("memory");
        fs::create_dir(&memories).expect("a folder");
        let _memory = UnixListener::bind(memories.join("web.sock")).expect("binds");
        let file = |name: &str| {
            format!("control = \"{name}.sock\"\n[[disk]]\nimage = \"/dev/null\"\nsocket = \"{name}-vda.sock\"\n")
        };
        fs::write(path("web.toml"), file("web")).expect("writes");
        fs::write(path("off.toml"), file("off")).expect("writes");
        fs::write(path("wrong.toml"), "disk = 7").expect("writes");
        let mut finder = Finder::new(
            vec![folder.path().to_owned()],
            vec![memories.clone()],
            Vec::new(),
            folder.path().to_owned(),
        );
        for _ in 0..2 {
            let found = finder.find();
            let told = found.places.iter().map(|(path, place)| {
                let name = path.file_name().expect("a name").to_string_lossy().into_owned();
                (
                    name,
                    place.vm.as_ref().map(|vm| vm.name.clone()).or(place.memory_of.clone()),
                    place.socket.is_some(),
                )
            });
            let told: Vec<_> = told.collect();
            let of = |name: &str| Some(name.to_owned());
            assert_eq!(
                told,
                [
                    ("db.sock".to_owned(), None, true),
                    ("web.sock".to_owned(), of("web"), true),
                    ("off.sock".to_owned(), of("off"), false),
                    ("web.sock".to_owned(), of("web"), true),
                ]
            );
        }
        fs::remove_file(path("web.toml")).expect("was there");
        let found = finder.find();
        assert!(
            found.places.contains_key(&path("web-vda.sock")),
            "no VM file names it any more"
        );
    }
}
