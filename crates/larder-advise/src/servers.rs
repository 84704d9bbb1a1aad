//! Larder's servers on this host, and the state that they report on their control sockets.
//!
//! VMs with a VM file are found as `larder status` finds them. `larder memory attach` and `larder disk serve` are
//! found by their command lines, which contain the path of the socket, or the VM's name, from which it is derived. A
//! query changes nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use larder_vm::control::memory::MemoryState;
use larder_vm::control::state::DiskState;
use larder_vm::control::{ControlClientError, fetch_disks, fetch_memory};
use larder_vm::vm::find;

use crate::procfs::Procfs;

/// Name of Larder's program.
const PROGRAM: &str = "larder";

/// Kind of server, which determines the contents of its report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerKind {
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
    kind: ServerKind,
    /// User ID of the process, if it is known.
    owner: Option<u32>,
    /// Name of the VM, if it has a VM file.
    vm: Option<String>,
    /// True if the user asked for this server by name; it is then reported if it is missing.
    is_requested: bool,
}

/// State that a server reported.
#[derive(Clone, Debug, Default)]
pub(crate) struct Telemetry {
    /// Name of the VM, if it has a VM file.
    pub(crate) vm: Option<String>,
    /// User ID of the process, if it is known.
    pub(crate) owner: Option<u32>,
    /// Memory that the server manages.
    pub(crate) memory: Option<MemoryState>,
    /// Disks that the server serves.
    pub(crate) disks: Vec<DiskState>,
    /// Reason why the report is incomplete.
    pub(crate) incomplete_reason: Option<String>,
}

/// Reports of all servers, by their sockets.
pub(crate) type TelemetryBySocket = BTreeMap<PathBuf, Telemetry>;

/// Queries all servers that are found, and those at `extra_sockets`, concurrently: a stuck server delays no other.
pub(crate) fn query_all(procfs: &Procfs, extra_sockets: &[PathBuf]) -> TelemetryBySocket {
    let servers = find_all(procfs, extra_sockets);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            servers.iter().map(|(path, server)| (path, scope.spawn(move || query(path, server)))).collect();
        // A query that panicked is left out.
        threads.into_iter().filter_map(|(path, thread)| Some((path.clone(), thread.join().ok()??))).collect()
    })
}

fn find_all(procfs: &Procfs, extra_sockets: &[PathBuf]) -> BTreeMap<PathBuf, Server> {
    let mut all = BTreeMap::new();
    for path in extra_sockets {
        let server = Server { kind: ServerKind::Vm, owner: None, vm: None, is_requested: true };
        all.insert(path.clone(), server);
    }
    for found in find::known_vms() {
        let server = Server {
            kind: ServerKind::Vm,
            owner: None,
            vm: Some(found.name),
            is_requested: extra_sockets.contains(&found.control),
        };
        all.insert(found.control, server);
    }
    for pid in procfs.processes() {
        let Some((path, kind)) = control_socket_of(procfs, pid) else {
            continue;
        };
        all.entry(path).or_insert(Server { kind, owner: procfs.owner(pid), vm: None, is_requested: false });
    }
    all
}

/// Returns the control socket of a process, if the process is one of Larder's servers.
fn control_socket_of(procfs: &Procfs, pid: i32) -> Option<(PathBuf, ServerKind)> {
    let name = procfs.program(pid).or_else(|| procfs.name(pid).ok())?;
    if name != PROGRAM {
        return None;
    }
    let arguments = procfs.command_line(pid).ok()?;
    let arguments: Vec<String> = arguments.into_iter().filter_map(|argument| argument.into_string().ok()).collect();
    let (path, kind) = parse_control_socket(&arguments)?;
    // A relative path is relative to the directory in which the server was started.
    match path.is_absolute() {
        true => Some((path, kind)),
        false => Some((procfs.working_directory(pid)?.join(path), kind)),
    }
}

/// Returns the control socket that a Larder command line names.
fn parse_control_socket(arguments: &[String]) -> Option<(PathBuf, ServerKind)> {
    let kind = match arguments.get(1..3)? {
        [memory, attach] if memory == "memory" && attach == "attach" => ServerKind::Memory,
        [disk, serve] if disk == "disk" && serve == "serve" => ServerKind::Disk,
        _ => return None,
    };
    let arguments = &arguments[3..];
    if let Some(path) = option_value("--control", arguments) {
        return Some((path.into(), kind));
    }
    let file = option_value("--vm", arguments).filter(|_| kind == ServerKind::Memory)?;
    // The option takes a VM name, or the path of the VM file of that name.
    let name = Path::new(file).file_name()?.to_str()?;
    let name = match file.contains('/') {
        true => Path::new(name).file_stem()?.to_str()?,
        false => name,
    };
    Some((find::memory_control_path(name), kind))
}

/// Returns the value of an option.
fn option_value<'a>(option: &str, arguments: &'a [String]) -> Option<&'a str> {
    let mut arguments = arguments.iter();
    loop {
        match arguments.next()?.strip_prefix(option) {
            Some("") => return Some(arguments.next()?),
            Some(rest) if let Some(value) = rest.strip_prefix('=') => return Some(value),
            _ => {}
        }
    }
}

/// Queries a server; returns `None` if it is not running, unless the user asked for it.
fn query(path: &Path, server: &Server) -> Option<Telemetry> {
    let mut telemetry = Telemetry { vm: server.vm.clone(), owner: server.owner, ..Telemetry::default() };
    if server.kind != ServerKind::Disk {
        match fetch_memory(path) {
            Ok((_, memory)) => telemetry.memory = Some(memory),
            // The server manages no memory.
            Err(ControlClientError::Refused { .. }) if server.kind == ServerKind::Vm => {}
            Err(error) if is_not_running(&error) && !server.is_requested => return None,
            Err(error) => telemetry.incomplete_reason = Some(error.to_string()),
        }
    }
    if server.kind != ServerKind::Memory && telemetry.incomplete_reason.is_none() {
        match fetch_disks(path) {
            Ok((_, disks)) => telemetry.disks = disks.disks,
            Err(ControlClientError::Refused { .. }) if telemetry.memory.is_some() => {}
            Err(error) if is_not_running(&error) && !server.is_requested => return None,
            Err(error) => telemetry.incomplete_reason = Some(error.to_string()),
        }
    }
    Some(telemetry)
}

fn is_not_running(error: &ControlClientError) -> bool {
    matches!(error, ControlClientError::Missing { .. } | ControlClientError::NoListener { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_found_by_command_line() {
        let cases = [
            (
                "larder memory attach --pid 7 --budget 1G --control /run/m.sock",
                Some(("/run/m.sock", ServerKind::Memory)),
            ),
            ("larder memory attach --control=m.sock --pid 7", Some(("m.sock", ServerKind::Memory))),
            ("/usr/bin/larder disk serve a.raw --socket s --control c", Some(("c", ServerKind::Disk))),
            ("larder disk serve a.raw --socket s", None),
            ("larder disk serve a.raw --control", None),
            ("larder memory status --control /run/m.sock", None),
            ("larder advise --control /run/m.sock", None),
            ("larder vm web", None),
            ("larder disk serve a.raw --vm web", None),
            ("larder", None),
        ];
        for (line, expected) in cases {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let expected = expected.map(|(path, kind)| (PathBuf::from(path), kind));
            assert_eq!(parse_control_socket(&arguments), expected, "{line}");
        }
        for line in ["larder memory attach --vm web.1", "larder memory attach --vm=/etc/larder/vms/web.1.toml"] {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let (path, kind) = parse_control_socket(&arguments).expect("it listens");
            assert_eq!((path.file_name(), kind), (Some("web.1.sock".as_ref()), ServerKind::Memory), "{line}");
        }
    }
}
