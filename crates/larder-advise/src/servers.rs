//! Larder's servers on this host, and the state that they report on their control sockets.
//!
//! VMs with a VM file are found as `larder status` finds them. `larder memory attach` and `larder disk serve` are
//! found by their command lines, which contain the path of the socket, or the VM's name, from which it is derived. A
//! query changes nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use larder_vm::control::memory::MemoryState;
use larder_vm::control::state::DiskState;
use larder_vm::control::{FetchError, fetch_disks, fetch_memory};
use larder_vm::vm::find;

use crate::procfs::Procfs;

/// Name of Larder's program.
const PROGRAM: &str = "larder";

/// Kind of server, which determines the contents of its report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Serves {
    /// `larder memory attach`.
    Memory,
    /// `larder disk serve`.
    Disk,
    /// `larder vm`.
    Vm,
}

/// Server that was found.
#[derive(Clone, Debug)]
struct Server {
    serves: Serves,
    /// User ID of the process, if it is known.
    owner: Option<u32>,
    /// Name of the VM, if it has a VM file.
    vm: Option<String>,
    /// True if the user asked for this server by name; it is then reported if it is missing.
    is_wanted: bool,
}

/// State that a server reported.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    /// Name of the VM, if it has a VM file.
    pub(crate) vm: Option<String>,
    /// User ID of the process, if it is known.
    pub(crate) owner: Option<u32>,
    /// Memory that the server manages.
    pub(crate) memory: Option<MemoryState>,
    /// Disks that the server serves.
    pub(crate) disks: Vec<DiskState>,
    /// Reason why the report is incomplete.
    pub(crate) silence: Option<String>,
}

/// Reports of all servers, by their sockets.
pub(crate) type AllTold = BTreeMap<PathBuf, Told>;

/// Queries all servers that are found, and those at `besides`, concurrently: a stuck server delays no other.
pub(crate) fn ask_all(procfs: &Procfs, besides: &[PathBuf]) -> AllTold {
    let servers = find_all(procfs, besides);
    std::thread::scope(|scope| {
        let threads: Vec<_> = servers
            .iter()
            .map(|(path, server)| (path, scope.spawn(move || ask(path, server))))
            .collect();
        // A query that panicked is left out.
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

/// Returns the control socket of a process, if the process is one of Larder's servers.
fn control_of(procfs: &Procfs, pid: i32) -> Option<(PathBuf, Serves)> {
    let name = procfs.program(pid).or_else(|| procfs.name(pid).ok())?;
    if name != PROGRAM {
        return None;
    }
    let words = procfs.command_line(pid).ok()?;
    let words: Vec<String> = words.into_iter().filter_map(|word| word.into_string().ok()).collect();
    let (path, serves) = control_in(&words)?;
    // A relative path is relative to the directory in which the server was started.
    match path.is_absolute() {
        true => Some((path, serves)),
        false => Some((procfs.directory(pid)?.join(path), serves)),
    }
}

/// Returns the control socket that a Larder command line names.
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
    // The option takes a VM name, or the path of the VM file of that name.
    let name = Path::new(file).file_name()?.to_str()?;
    let name = match file.contains('/') {
        true => Path::new(name).file_stem()?.to_str()?,
        false => name,
    };
    Some((find::memory_control_of(name), serves))
}

/// Returns the value of an option.
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

/// Queries a server; returns `None` if it is not running, unless the user asked for it.
fn ask(path: &Path, server: &Server) -> Option<Told> {
    let mut told = Told {
        vm: server.vm.clone(),
        owner: server.owner,
        ..Told::default()
    };
    if server.serves != Serves::Disk {
        match fetch_memory(path) {
            Ok((_, memory)) => told.memory = Some(memory),
            // The server manages no memory.
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
    fn servers_are_found_by_command_line() {
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
