//! `larder status`: the activity of running servers, as their control sockets report it.

mod all;
mod detail;
pub(crate) mod rates;
mod trace;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{anyhow, bail};
use larder_vm::control::state::DiskList;
use larder_vm::control::{ControlClientError, fetch_disks};
use larder_vm::vm::config::{SYSTEM_VMS_DIRECTORY, VmConfig, vm_file_path, vms_directory};
use larder_vm::vm::find::{self, KnownVm};

use serde_json::json;

use crate::cli::Output;
use crate::cli::watch::StatusArguments;
use crate::output::print;
use crate::rates::is_not_served;
use crate::{memory, memory_table, migrate, migration_table};

/// Maximum interval.
const INTERVAL_MAX: Duration = Duration::from_secs(24 * 3600);

pub(crate) fn run(arguments: StatusArguments) -> anyhow::Result<ExitCode> {
    let StatusArguments { vm, interval, count, trace, output } = arguments;
    let request = StatusRequest::parse([vm, interval, count])?;
    match (request.vm, request.interval) {
        (_, Some(_)) if trace => bail!("--trace prints the stored events once: give no interval"),
        (vm, None) if trace => trace::run(vm.as_ref(), output),
        (vm, Some(every)) => rates::run(vm.as_ref(), every, request.count, output),
        (None, None) => all::run(output),
        (Some(vm), None) => {
            print_one(&vm, output)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Prints one VM's disks, its memory if that is managed, and its moves.
fn print_one(vm: &KnownVm, output: Output) -> anyhow::Result<()> {
    let asked = fetch_disks(&vm.control);
    let disks = asked.as_ref().map_or(&[][..], |(_, disks)| &disks.disks[..]);
    let memory = match &asked {
        Err(error) if !is_not_served(error) => None,
        _ => memory_table::query_one(vm, disks),
    };
    let moves = migration_table::find_by_vm(&vm.name);
    let (mut said, disks) = match (asked, &memory) {
        (Ok(told), _) => told,
        // The VM is only moved.
        (Err(error), None) if is_not_served(&error) && !moves.is_empty() => {
            (json!({"disks": []}), DiskList { disks: Vec::new() })
        }
        // Only the VM's memory is managed by Larder.
        (Err(error), Some(_)) if is_not_served(&error) => (json!({"disks": []}), DiskList { disks: Vec::new() }),
        (Err(error), _) => return Err(explain(error, vm)),
    };
    let memory = memory.transpose()?;
    match output {
        Output::Text => {
            let of_memory = memory.map(|(_, state)| memory::format_text(&state));
            let of_disks = (!disks.disks.is_empty()).then(|| detail::format_text(&disks));
            let of_moves = moves.iter().map(|(_, state)| migrate::control_target::format_text(state));
            let parts: Vec<String> = [of_disks, of_memory].into_iter().flatten().chain(of_moves).collect();
            print(&parts.join("\n"))
        }
        Output::Json => {
            if let (Some(fields), Some((memory, _))) = (said.as_object_mut(), memory) {
                fields.insert("memory".to_owned(), memory);
            }
            let moves: Vec<serde_json::Value> = moves.into_iter().map(|(said, _)| said).collect();
            if let Some(fields) = said.as_object_mut().filter(|_| !moves.is_empty()) {
                fields.insert("migrations".to_owned(), moves.into());
            }
            print(&format!("{said:#}\n"))
        }
    }
}

/// Parsed arguments.
struct StatusRequest {
    vm: Option<KnownVm>,
    interval: Option<Duration>,
    count: Option<u64>,
}

impl StatusRequest {
    /// Tells the words apart by their form: `larder status 1 10` is about all VMs, unless there is a VM called `1`.
    fn parse(words: [Option<OsString>; 3]) -> anyhow::Result<Self> {
        let is_number =
            |word: &OsString| word.to_str().is_some_and(|word| word.parse::<f64>().is_ok() && !find::is_vm(word));
        let (vm, every, count) = match words {
            [Some(every), count, more] if is_number(&every) => {
                if let Some(more) = more {
                    bail!("unexpected argument '{}': give [VM] [INTERVAL] [COUNT]", more.to_string_lossy());
                }
                (None, Some(every), count)
            }
            [vm, every, count] => (vm, every, count),
        };
        Ok(Self {
            vm: vm.map(|vm| find_vm(&vm)),
            interval: every.map(|every| parse_interval(&every)).transpose()?,
            count: count.map(|count| parse_count(&count)).transpose()?,
        })
    }
}

/// Explains why a requested VM has no state to show.
fn explain(error: ControlClientError, vm: &KnownVm) -> anyhow::Error {
    match vm.name.contains('/') || !is_not_served(&error) {
        true => error.into(),
        false => anyhow!("{}", not_served(&vm.name, &vm.control)),
    }
}

/// Returns the message for a VM that is not served, with advice.
pub(crate) fn not_served(name: &str, control: &Path) -> String {
    let why = format!("{name} is not served: no process listens on {}", control.display());
    let file = vm_file_path(Path::new(name)).ok();
    let hint = "`larder status` lists all that are";
    match file.filter(|path| path.exists()) {
        Some(path) => match VmConfig::read(&path) {
            Err(error) => format!("{why}; its file is invalid: {error}"),
            Ok(_) => format!("{why}; {}, and {hint}", serve_hint(name)),
        },
        None if find::is_socket(Path::new(name)) => {
            format!("{why}; for the socket of that name in this directory give ./{name}")
        }
        None if is_host_vm(name) => format!("{why}; root can query what the host serves: sudo larder status {name}"),
        None => format!("{why}; it has no file in {} either; {hint}", vms_directory().display()),
    }
}

/// Returns the command that serves a VM of this user.
fn serve_hint(name: &str) -> String {
    match rustix::process::geteuid().is_root() && Path::new("/run/systemd/system").exists() {
        true => format!("`systemctl start larder@{name}` serves it"),
        false => format!("`larder vm {name}` serves it"),
    }
}

/// Returns true if the host has a VM of that name that this user may not inspect.
fn is_host_vm(name: &str) -> bool {
    let file = Path::new(SYSTEM_VMS_DIRECTORY).join(format!("{name}.toml"));
    !rustix::process::geteuid().is_root() && file.exists()
}

/// Returns the VM of that name, or the server at that path.
fn find_vm(word: &OsString) -> KnownVm {
    let name = word.to_string_lossy().into_owned();
    let control = match name.contains('/') {
        true => PathBuf::from(word),
        false => find::control_path(&name),
    };
    let mistake = None;
    KnownVm { name, control, mistake }
}

fn parse_interval(word: &OsString) -> anyhow::Result<Duration> {
    let text = word.to_string_lossy();
    let Ok(seconds) = text.parse::<f64>() else {
        bail!("'{text}' is not an interval in seconds, such as 1 or 0.5");
    };
    match Duration::try_from_secs_f64(seconds) {
        Ok(every) if !every.is_zero() && every <= INTERVAL_MAX => Ok(every),
        _ => bail!("an interval of {text} s: give more than 0 s, and at most {} s", INTERVAL_MAX.as_secs()),
    }
}

fn parse_count(word: &OsString) -> anyhow::Result<u64> {
    let text = word.to_string_lossy();
    match text.parse() {
        Ok(count) if count > 0 => Ok(count),
        _ => bail!("'{text}' is not a count: give a number from 1"),
    }
}
