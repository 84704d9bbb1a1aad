//! Activity of disks and memory at intervals, with iostat's column names.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use larder_vm::control::fetch_disks;
use larder_vm::control::memory::MemoryState;
use larder_vm::control::state::DiskState;
use larder_vm::vm::find::{self, KnownVm};
use serde_json::json;

use super::explain;
use crate::cli::Output;
use crate::memory_table::{self, MemorySampler, VmMemoryRates};
use crate::migration_table;
use crate::output::{print, print_stderr};
use crate::rates::{DiskSampler, is_not_served, query_disks};

/// Reports one VM, or all VMs, `count` times at the interval `every`.
pub(crate) fn run(
    vm: Option<&KnownVm>,
    every: Duration,
    count: Option<u64>,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let mut sampler = DiskSampler::default();
    let mut memory_sampler = MemorySampler::default();
    let started = Instant::now();
    let mut round = 0;
    loop {
        let (served, memories) = query(vm)?;
        let rates = sampler.sample(served).rates;
        let memories = memory_sampler.sample(memories).into_iter();
        let memories: Vec<VmMemoryRates> = memories.map(VmMemoryRates::from).collect();
        let mut tables = Vec::new();
        if !rates.is_empty() || memories.is_empty() {
            tables.push(crate::rates::rates_table(&rates));
        }
        if !memories.is_empty() {
            tables.push(memory_table::rates_table(&memories));
        }
        let move_lines: Vec<String> = match vm {
            Some(vm) => migration_table::find_by_vm(&vm.name)
                .iter()
                .map(|(_, state)| migration_table::format_line(state))
                .collect(),
            None => migration_table::format_lines(migration_table::query_all()),
        };
        if !move_lines.is_empty() {
            tables.push(format!("{}\n", move_lines.join("\n")));
        }
        match output {
            Output::Text if round > 0 => print(&format!("\n{}", tables.join("\n")))?,
            Output::Text => print(&tables.join("\n"))?,
            Output::Json => print(&format!("{}\n", json!({"disks": rates, "memories": memories})))?,
        }
        round += 1;
        if count.is_some_and(|count| round >= count) {
            return Ok(ExitCode::SUCCESS);
        }
        // The next time is computed from the start, so that the duration of the queries does not add up.
        let next = started + every.mul_f64(round as f64);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// Disks and memory states, both by VM.
type VmStates = (Vec<(String, Vec<DiskState>)>, Vec<(String, MemoryState)>);

/// Returns the disks and the memory of one VM, or of all served VMs.
///
/// # Errors
/// The requested VM is not served, or not any more.
fn query(vm: Option<&KnownVm>) -> anyhow::Result<VmStates> {
    if let Some(vm) = vm {
        let asked = fetch_disks(&vm.control);
        let disks = asked.as_ref().map_or(&[][..], |(_, disks)| &disks.disks[..]);
        let memory = memory_table::query_one(vm, disks).transpose()?;
        let disks = match (asked, &memory) {
            (Ok((_, disks)), _) => vec![(vm.name.clone(), disks.disks)],
            (Err(error), Some(_)) if is_not_served(&error) => Vec::new(),
            (Err(error), _) => return Err(explain(error, vm)),
        };
        let memory = memory.map(|(_, state)| (vm.name.clone(), state));
        return Ok((disks, memory.into_iter().collect()));
    }
    let mut all = Vec::new();
    let vms = find::known_vms();
    for (vm, asked) in query_disks(&vms) {
        match asked {
            Ok(disks) => all.push((vm, disks)),
            Err(error) => print_stderr(&format!("{vm}: {error}")),
        }
    }
    let mut memories = Vec::new();
    for (vm, asked) in memory_table::query_all(&vms, all.iter().flat_map(|(_, disks)| disks)) {
        match asked {
            Ok((_, state)) => memories.push((vm, state)),
            Err(error) => print_stderr(&format!("{vm}: its memory: {error}")),
        }
    }
    Ok((all, memories))
}
