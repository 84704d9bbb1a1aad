//! Activity of disks and memory at intervals, with iostat's column names.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use larder_vm::control::fetch_disks;
use larder_vm::control::memory::MemoryState;
use larder_vm::control::state::DiskState;
use larder_vm::vm::find::{self, Found};
use serde_json::json;

use super::explain;
use crate::cli::Output;
use crate::memories::{self, MemorySampler, VmMemoryRates, rates_table};
use crate::moves;
use crate::output::{complain, print};
use crate::rates::{Sampler, ask_all, is_not_served, table};

/// Reports one VM, or all VMs, `count` times at the interval `every`.
pub(crate) fn run(vm: Option<&Found>, every: Duration, count: Option<u64>, output: Output) -> anyhow::Result<ExitCode> {
    let mut sampler = Sampler::default();
    let mut memory_sampler = MemorySampler::default();
    let begun = Instant::now();
    let mut round = 0;
    loop {
        let (served, memories) = ask(vm)?;
        let rates = sampler.sample(served).rates;
        let memories = memory_sampler.sample(memories).into_iter();
        let memories: Vec<VmMemoryRates> = memories.map(VmMemoryRates::from).collect();
        let mut tables = Vec::new();
        if !rates.is_empty() || memories.is_empty() {
            tables.push(table(&rates));
        }
        if !memories.is_empty() {
            tables.push(rates_table(&memories));
        }
        let moving: Vec<String> = match vm {
            Some(vm) => moves::of_vm(&vm.name)
                .iter()
                .map(|(_, state)| moves::line(state))
                .collect(),
            None => moves::lines(moves::ask_all()),
        };
        if !moving.is_empty() {
            tables.push(format!("{}\n", moving.join("\n")));
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
        let next = begun + every.mul_f64(round as f64);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// Disks and memory states, both by VM.
type Told = (Vec<(String, Vec<DiskState>)>, Vec<(String, MemoryState)>);

/// Returns the disks and the memory of one VM, or of all served VMs.
///
/// # Errors
/// The requested VM is not served, or not any more.
fn ask(vm: Option<&Found>) -> anyhow::Result<Told> {
    if let Some(vm) = vm {
        let asked = fetch_disks(&vm.control);
        let disks = asked.as_ref().map_or(&[][..], |(_, disks)| &disks.disks[..]);
        let memory = memories::ask_one(vm, disks).transpose()?;
        let disks = match (asked, &memory) {
            (Ok((_, disks)), _) => vec![(vm.name.clone(), disks.disks)],
            (Err(error), Some(_)) if is_not_served(&error) => Vec::new(),
            (Err(error), _) => return Err(explain(error, vm)),
        };
        let memory = memory.map(|(_, state)| (vm.name.clone(), state));
        return Ok((disks, memory.into_iter().collect()));
    }
    let mut all = Vec::new();
    let vms = find::vms();
    for (vm, asked) in ask_all(&vms) {
        match asked {
            Ok(disks) => all.push((vm, disks)),
            Err(error) => complain(&format!("{vm}: {error}")),
        }
    }
    let mut memories = Vec::new();
    for (vm, asked) in memories::ask_all(&vms, all.iter().flat_map(|(_, disks)| disks)) {
        match asked {
            Ok((_, state)) => memories.push((vm, state)),
            Err(error) => complain(&format!("{vm}: its memory: {error}")),
        }
    }
    Ok((all, memories))
}
