//! All VMs of the host: a line for each disk, for each VM whose memory is managed, and for each move.

use std::process::ExitCode;

use larder_vm::control::state::{CacheHealth, CacheState, DiskList, DiskState, ServerState};
use larder_vm::control::{ControlClientError, fetch_disks, fetch_server};
use larder_vm::vm::config;
use larder_vm::vm::find::{self, KnownVm};
use serde_json::{Value, json};

use crate::EXIT_NEGATIVE;
use crate::cli::Output;
use crate::concurrent::query_each;
use crate::disk_image::format_size;
use crate::output::{Table, print};
use crate::rates::is_not_served;
use crate::{memory_table, migration_table};

/// Result of querying a VM.
type VmQuery = Result<(ServerState, Value, DiskList), ControlClientError>;

pub(super) fn run(output: Output) -> anyhow::Result<ExitCode> {
    let vms = find::known_vms();
    let asked = query_all(&vms);
    let disks = asked.iter().flatten().flat_map(|(_, _, disks)| &disks.disks);
    let memories = memory_table::query_all(&vms, disks);
    let moves = migration_table::query_all();
    let text = match output {
        Output::Json => format_json(&vms, &asked, &memories, &moves),
        Output::Text if vms.is_empty() && memories.is_empty() && moves.is_empty() => no_vm_message(),
        Output::Text => format_text(&vms, &asked, &memories, &moves),
    };
    print(&text)?;
    let all_answered = memories.iter().all(|(_, asked)| asked.is_ok()) && moves.iter().all(|(_, asked)| asked.is_ok());
    let all_healthy = all_answered
        && vms.iter().zip(&asked).all(|(vm, asked)| match asked {
            Ok(_) => true,
            Err(error) => is_not_served(error) && vm.mistake.is_none(),
        });
    Ok(match all_healthy {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_NEGATIVE),
    })
}

/// Returns the message for a host without VMs.
fn no_vm_message() -> String {
    let directory = config::vms_directory();
    let host_hint = match rustix::process::geteuid().is_root() {
        true => "",
        false => "; the VMs that the host serves are shown to root: sudo larder status",
    };
    format!("this user has no VM: none has a file in {}, and none is served{host_hint}\n", directory.display())
}

/// Queries all VMs concurrently.
fn query_all(vms: &[KnownVm]) -> Vec<VmQuery> {
    query_each(vms, |vm| {
        let server = fetch_server(&vm.control)?;
        let (json, disks) = fetch_disks(&vm.control)?;
        Ok((server, json, disks))
    })
}

fn format_text(
    vms: &[KnownVm],
    asked: &[VmQuery],
    memories: &[memory_table::MemoryQuery],
    moves: &[migration_table::MigrationQuery],
) -> String {
    let mut table = Table::new(["vm", "disk", "size", "used by", "cache", "image"]);
    let mut errors = String::new();
    for (vm, asked) in vms.iter().zip(asked) {
        match asked {
            Ok((_, _, disks)) => {
                for (index, disk) in disks.disks.iter().enumerate() {
                    let vm = if index == 0 { vm.name.clone() } else { String::new() };
                    table.row(disk_row(vm, index, disk));
                }
            }
            Err(error) => {
                let how = match (is_not_served(error), &vm.mistake) {
                    (false, _) => "no answer",
                    (true, None) => "not served",
                    (true, Some(_)) => "invalid file",
                };
                table.row([vm.name.clone(), "-".into(), "-".into(), how.into(), "-".into(), "-".into()]);
                match &vm.mistake {
                    _ if !is_not_served(error) => errors.push_str(&format!("{}: {error}\n", vm.name)),
                    Some(mistake) => errors.push_str(&format!("{mistake}\n")),
                    None => {}
                }
            }
        }
    }
    let mut states = Vec::new();
    for (vm, asked) in memories {
        match asked {
            Ok((_, state)) => states.push((vm.clone(), state.clone())),
            Err(error) => errors.push_str(&format!("{vm}: its memory: {error}\n")),
        }
    }
    let mut moves_text = String::new();
    for (vm, asked) in moves {
        match asked {
            Ok((_, state)) => moves_text.push_str(&format!("{}\n", migration_table::format_line(state))),
            Err(error) => errors.push_str(&format!("{}\n", migration_table::format_error(vm, error))),
        }
    }
    let mut parts = Vec::new();
    if !vms.is_empty() {
        parts.push(table.into_text());
    }
    if !states.is_empty() {
        parts.push(memory_table::state_table(&states));
    }
    if !moves_text.is_empty() {
        parts.push(moves_text);
    }
    if !errors.is_empty() {
        parts.push(errors);
    }
    parts.join("\n")
}

fn disk_row(vm: String, index: usize, disk: &DiskState) -> [String; 6] {
    let clients = disk.exports.nbd.as_ref().map_or(0, |nbd| nbd.clients);
    let guest = disk.exports.vhost_user.as_ref().is_some_and(|server| server.connected);
    let used_by = match (guest, clients) {
        (true, 0) => "guest".to_owned(),
        (true, _) => "guest, NBD".to_owned(),
        (false, 0) => "no client".to_owned(),
        (false, _) => "NBD".to_owned(),
    };
    [
        vm,
        disk.name.clone().unwrap_or_else(|| index.to_string()),
        format_size(disk.size),
        used_by,
        disk.cache.as_ref().map_or_else(|| "-".to_owned(), cache_text),
        disk.image.clone(),
    ]
}

fn cache_text(cache: &CacheState) -> String {
    let dirty = match cache.dirty {
        0 => String::new(),
        dirty => format!(", {} dirty", format_size(dirty)),
    };
    match cache.state {
        CacheHealth::Failed => format!("failed{dirty}"),
        CacheHealth::Works => {
            let full = 100.0 * cache.occupancy as f64 / cache.capacity.max(1) as f64;
            format!("{} {}, {full:.0} % full{dirty}", cache.mode, format_size(cache.size))
        }
    }
}

fn format_json(
    vms: &[KnownVm],
    asked: &[VmQuery],
    memories: &[memory_table::MemoryQuery],
    moves: &[migration_table::MigrationQuery],
) -> String {
    let memory_of = |name: &str| {
        let mut all = memories.iter();
        let asked = all.find(|(vm, _)| vm == name).map(|(_, asked)| asked);
        asked.and_then(|asked| asked.as_ref().ok()).map(|(said, _)| said.clone())
    };
    let all = vms.iter().zip(asked).map(|(vm, asked)| {
        let control = vm.control.display().to_string();
        match asked {
            Ok((server, said, _)) => json!({
                "name": vm.name, "control": control, "server": server, "disks": said["disks"],
                "memory": memory_of(&vm.name), "error": null,
            }),
            Err(error) => json!({
                "name": vm.name, "control": control, "server": null, "disks": [],
                "memory": memory_of(&vm.name), "error": vm.mistake.clone().unwrap_or_else(|| error.to_string()),
            }),
        }
    });
    let memory_only = memories.iter().filter(|(name, _)| !vms.iter().any(|vm| vm.name == *name));
    let memory_only = memory_only.map(|(name, asked)| {
        let (memory, error) = match asked {
            Ok((said, _)) => (Some(said), None),
            Err(error) => (None, Some(error.to_string())),
        };
        json!({"name": name, "control": null, "server": null, "disks": [], "memory": memory, "error": error})
    });
    let all: Vec<Value> = all.chain(memory_only).collect();
    let moves = moves.iter().map(|(name, asked)| match asked {
        Ok((said, _)) => json!({"name": name, "migration": said, "error": null}),
        Err(error) => json!({"name": name, "migration": null, "error": error.to_string()}),
    });
    let moves: Vec<Value> = moves.collect();
    format!("{:#}\n", json!({"vms": all, "moves": moves}))
}
