//! All VMs of the host: a line for each disk, for each VM whose memory is managed, and for each move.

use std::process::ExitCode;

use larder_vm::control::state::{CacheHealth, CacheState, DiskState, Disks, ServerState};
use larder_vm::control::{FetchError, fetch_disks, fetch_server};
use larder_vm::vm::config;
use larder_vm::vm::find::{self, Found};
use serde_json::{Value, json};

use crate::EXIT_NEGATIVE;
use crate::cli::Output;
use crate::disk_image::human;
use crate::output::{Table, print};
use crate::rates::is_not_served;
use crate::{memories, moves};

/// Result of querying a VM.
type Asked = Result<(ServerState, Value, Disks), FetchError>;

pub(super) fn run(output: Output) -> anyhow::Result<ExitCode> {
    let vms = find::vms();
    let asked = ask_all(&vms);
    let disks = asked.iter().flatten().flat_map(|(_, _, disks)| &disks.disks);
    let memories = memories::ask_all(&vms, disks);
    let moves = moves::ask_all();
    let text = match output {
        Output::Json => json_text(&vms, &asked, &memories, &moves),
        Output::Text if vms.is_empty() && memories.is_empty() && moves.is_empty() => no_vm(),
        Output::Text => text(&vms, &asked, &memories, &moves),
    };
    print(&text)?;
    let do_all_answer = memories.iter().all(|(_, asked)| asked.is_ok()) && moves.iter().all(|(_, asked)| asked.is_ok());
    let are_all_well = do_all_answer
        && vms.iter().zip(&asked).all(|(vm, asked)| match asked {
            Ok(_) => true,
            Err(error) => is_not_served(error) && vm.mistake.is_none(),
        });
    Ok(match are_all_well {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_NEGATIVE),
    })
}

/// Returns the message for a host without VMs.
fn no_vm() -> String {
    let folder = config::folder();
    let of_host = match rustix::process::geteuid().is_root() {
        true => "",
        false => "; the VMs that the host serves are shown to root: sudo larder status",
    };
    format!(
        "this user has no VM: none has a file in {}, and none is served{of_host}\n",
        folder.display()
    )
}

/// Queries all VMs concurrently, so that one that hangs does not delay the others.
fn ask_all(vms: &[Found]) -> Vec<Asked> {
    let ask = |vm: &Found| {
        let server = fetch_server(&vm.control)?;
        let (said, disks) = fetch_disks(&vm.control)?;
        Ok((server, said, disks))
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = vms.iter().map(|vm| scope.spawn(move || ask(vm))).collect();
        // A panic in a thread aborts the process, so `join` does not fail.
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    })
}

fn text(vms: &[Found], asked: &[Asked], memories: &[memories::Asked], moves: &[moves::Asked]) -> String {
    let mut table = Table::new(["vm", "disk", "size", "used by", "cache", "image"]);
    let mut troubles = String::new();
    for (vm, asked) in vms.iter().zip(asked) {
        match asked {
            Ok((_, _, disks)) => {
                for (place, disk) in disks.disks.iter().enumerate() {
                    let vm = if place == 0 { vm.name.clone() } else { String::new() };
                    table.row(disk_row(vm, place, disk));
                }
            }
            Err(error) => {
                let how = match (is_not_served(error), &vm.mistake) {
                    (false, _) => "no answer",
                    (true, None) => "not served",
                    (true, Some(_)) => "invalid file",
                };
                table.row([
                    vm.name.clone(),
                    "-".into(),
                    "-".into(),
                    how.into(),
                    "-".into(),
                    "-".into(),
                ]);
                match &vm.mistake {
                    _ if !is_not_served(error) => troubles.push_str(&format!("{}: {error}\n", vm.name)),
                    Some(mistake) => troubles.push_str(&format!("{mistake}\n")),
                    None => {}
                }
            }
        }
    }
    let mut told = Vec::new();
    for (vm, asked) in memories {
        match asked {
            Ok((_, state)) => told.push((vm.clone(), state.clone())),
            Err(error) => troubles.push_str(&format!("{vm}: its memory: {error}\n")),
        }
    }
    let mut moving = String::new();
    for (vm, asked) in moves {
        match asked {
            Ok((_, state)) => moving.push_str(&format!("{}\n", moves::line(state))),
            Err(error) => troubles.push_str(&format!("{}\n", moves::trouble(vm, error))),
        }
    }
    let mut parts = Vec::new();
    if !vms.is_empty() {
        parts.push(table.into_text());
    }
    if !told.is_empty() {
        parts.push(memories::state_table(&told));
    }
    if !moving.is_empty() {
        parts.push(moving);
    }
    if !troubles.is_empty() {
        parts.push(troubles);
    }
    parts.join("\n")
}

fn disk_row(vm: String, place: usize, disk: &DiskState) -> [String; 6] {
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
        disk.name.clone().unwrap_or_else(|| place.to_string()),
        human(disk.size),
        used_by,
        disk.cache.as_ref().map_or_else(|| "-".to_owned(), cache_text),
        disk.image.clone(),
    ]
}

fn cache_text(cache: &CacheState) -> String {
    let dirty = match cache.dirty {
        0 => String::new(),
        dirty => format!(", {} dirty", human(dirty)),
    };
    match cache.state {
        CacheHealth::Failed => format!("failed{dirty}"),
        CacheHealth::Works => {
            let full = 100.0 * cache.occupancy as f64 / cache.capacity.max(1) as f64;
            format!("{} {}, {full:.0} % full{dirty}", cache.mode, human(cache.size))
        }
    }
}

fn json_text(vms: &[Found], asked: &[Asked], memories: &[memories::Asked], moves: &[moves::Asked]) -> String {
    let memory_of = |name: &str| {
        let mut all = memories.iter();
        let asked = all.find(|(vm, _)| vm == name).map(|(_, asked)| asked);
        asked
            .and_then(|asked| asked.as_ref().ok())
            .map(|(said, _)| said.clone())
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
    let alone = memories
        .iter()
        .filter(|(name, _)| !vms.iter().any(|vm| vm.name == *name));
    let alone = alone.map(|(name, asked)| {
        let (memory, error) = match asked {
            Ok((said, _)) => (Some(said), None),
            Err(error) => (None, Some(error.to_string())),
        };
        json!({"name": name, "control": null, "server": null, "disks": [], "memory": memory, "error": error})
    });
    let all: Vec<Value> = all.chain(alone).collect();
    let moves = moves.iter().map(|(name, asked)| match asked {
        Ok((said, _)) => json!({"name": name, "migration": said, "error": null}),
        Err(error) => json!({"name": name, "migration": null, "error": error.to_string()}),
    });
    let moves: Vec<Value> = moves.collect();
    format!("{:#}\n", json!({"vms": all, "moves": moves}))
}
