//! The servers of Larder that run on this host, and what they tell on their control sockets.
//!
//! VMs with a file are found as `larder status` finds them. `larder memory attach` and `larder disk serve` are found by
//! their command lines, which have the path of the socket, or the VM's name, by which that is known. A question changes nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use larder_vm::control::memory::MemoryState;
use larder_vm::control::state::DiskState;
use larder_vm::control::{FetchError, fetch_disks, fetch_memory};
use larder_vm::vm::find;

use crate::procfs::Procfs;

/// Our own program.
const PROGRAM: &str = "larder";

/// What one may tell of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Serves {
    /// `larder memory attach`.
    Memory,
    /// `larder disk serve`.
    Disk,
    /// `larder vm`.
    Vm,
}

/// A server.
#[derive(Clone, Debug)]
struct Server {
    serves: Serves,
    /// Whose process it is, if that is known.
    owner: Option<u32>,
    /// The VM's name, if it has a file.
    vm: Option<String>,
    /// Somebody wants it to be asked: that it is not there is worth telling.
    is_wanted: bool,
}

/// What a server told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    /// The VM's name, if it has a file.
    pub(crate) vm: Option<String>,
    /// Whose process it is, if that is known.
    pub(crate) owner: Option<u32>,
    /// The memory that it manages.
    pub(crate) memory: Option<MemoryState>,
    /// The disks that it serves.
    pub(crate) disks: Vec<DiskState>,
    /// Why it did not tell all.
    pub(crate) silence: Option<String>,
}

/// What all servers tell, by their sockets.
pub(crate) type AllTold = BTreeMap<PathBuf, Told>;

/// Asks all that there are, and those at `besides`, at once: one that is stuck holds up no other.
pub(crate) fn ask_all(procfs: &Procfs, besides: &[PathBuf]) -> AllTold {
    let servers = find_all(procfs, besides);
    std::thread::scope(|scope| {
        let threads: Vec<_> = servers
            .iter()
            .map(|(path, server)| (path, scope.spawn(move || ask(path, server))))
            .collect();
        // A panic ends the process.
        threads
            .into_iter()
            .filter_map(|(path, thread)| Some((path.clone(), thread.join().ok()??)))
            .collect()
    })
}

fn find_all(procfs: &Procfs, besides: &[PathBuf]) -> BTreeMap<PathBuf, Server> {
    let mut all = BTreeMap::new();
    for path in besides {
        let server = Server {
            serves: Serves::Vm,
            owner: None,
            vm: None,
            is_wanted: true,
        };
        all.insert(path.clone(), server);
    }
    for found in find::vms() {
        let server = Server {
            serves: Serves::Vm,
            owner: None,
            vm: Some(found.name),
            is_wanted: besides.contains(&found.control),
        };
        all.insert(found.control, server);
    }
    for pid in procfs.processes() {
        let Some((path, serves)) = control_of(procfs, pid) else {
            continue;
        };
        all.entry(path).or_insert(Server {
            serves,
            owner: procfs.owner(pid),
            vm: None,
            is_wanted: false,
        });
    }
    all
}

/// Where a process that is a server of ours listens.
fn control_of(procfs: &Procfs, pid: i32) -> Option<(PathBuf, Serves)> {
    let name = procfs.program(pid).or_else(|| procfs.name(pid).ok())?;
    if name != PROGRAM {
        return None;
    }
    let words = procfs.command_line(pid).ok()?;
    let words: Vec<String> = words.into_iter().filter_map(|word| word.into_string().ok()).collect();
    let (path, serves) = control_in(&words)?;
    // What is not absolute is so from where the server was started.
    match path.is_absolute() {
        true => Some((path, serves)),
        false => Some((procfs.directory(pid)?.join(path), serves)),
    }
}

/// The socket that a command line of ours gives.
fn control_in(words: &[String]) -> Option<(PathBuf, Serves)> {
    let serves = match words.get(1..3)? {
        [memory, attach] if memory == "memory" && attach == "attach" => Serves::Memory,
        [disk, serve] if disk == "disk" && serve == "serve" => Serves::Disk,
        _ => return None,
    };
    let words = &words[3..];
    if let Some(path) = value_of("--control", words) {
        return Some((path.into(), serves));
    }
    let file = value_of("--vm", words).filter(|_| serves == Serves::Memory)?;
    // A name, or the path of a file of that name.
    let name = Path::new(file).file_name()?.to_str()?;
    let name = match file.contains('/') {
        true => Path::new(name).file_stem()?.to_str()?,
        false => name,
    };
    Some((find::memory_control_of(name), serves))
}

/// What an option is given.
fn value_of<'a>(option: &str, words: &'a [String]) -> Option<&'a str> {
    let mut words = words.iter();
    loop {
        match words.next()?.strip_prefix(option) {
            Some("") => return Some(words.next()?),
            Some(rest) if let Some(value) = rest.strip_prefix('=') => return Some(value),
            _ => {}
        }
    }
}

/// What it says; `None` if there is nobody, which is as it may be.
fn ask(path: &Path, server: &Server) -> Option<Told> {
    let mut told = Told {
        vm: server.vm.clone(),
        owner: server.owner,
        ..Told::default()
    };
    if server.serves != Serves::Disk {
        match fetch_memory(path) {
            Ok((_, memory)) => told.memory = Some(memory),
            // It has no memory to manage.
            Err(FetchError::Refused { .. }) if server.serves == Serves::Vm => {}
            Err(error) if is_nobody(&error) && !server.is_wanted => return None,
            Err(error) => told.silence = Some(error.to_string()),
        }
    }
    if server.serves != Serves::Memory && told.silence.is_none() {
        match fetch_disks(path) {
            Ok((_, disks)) => told.disks = disks.disks,
            Err(FetchError::Refused { .. }) if told.memory.is_some() => {}
            Err(error) if is_nobody(&error) && !server.is_wanted => return None,
            Err(error) => told.silence = Some(error.to_string()),
        }
    }
    Some(told)
}

fn is_nobody(error: &FetchError) -> bool {
    matches!(error, FetchError::Missing { .. } | FetchError::Dead { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_found_by_their_command_lines() {
        let cases = [
            (
                "larder memory attach --pid 7 --budget 1G --control /run/m.sock",
                Some(("/run/m.sock", Serves::Memory)),
            ),
            (
                "larder memory attach --control=m.sock --pid 7",
                Some(("m.sock", Serves::Memory)),
            ),
            (
                "/usr/bin/larder disk serve a.raw --socket s --control c",
                Some(("c", Serves::Disk)),
            ),
            ("larder disk serve a.raw --socket s", None),
            ("larder disk serve a.raw --control", None),
            ("larder memory status --control /run/m.sock", None),
            ("larder advise --control /run/m.sock", None),
            ("larder vm web", None),
            ("larder disk serve a.raw --vm web", None),
            ("larder", None),
        ];
        for (line, expected) in cases {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let expected = expected.map(|(path, serves)| (PathBuf::from(path), serves));
            assert_eq!(control_in(&words), expected, "{line}");
        }
        for line in [
            "larder memory attach --vm web.1",
            "larder memory attach --vm=/etc/larder/vms/web.1.toml",
        ] {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let (path, serves) = control_in(&words).expect("it listens");
            assert_eq!(
                (path.file_name(), serves),
                (Some("web.1.sock".as_ref()), Serves::Memory),
                "{line}"
            );
        }
    }
}
