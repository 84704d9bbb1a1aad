//! What disks do in an interval, again and again, with the words of iostat.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use larder_vm::control::fetch_disks;
use larder_vm::control::state::DiskState;
use larder_vm::vm::find::{self, Found};
use serde_json::json;

use super::explain;
use crate::cli::Output;
use crate::output::print;
use crate::rates::{Sampler, ask_all, table};

/// Tells of one VM, or of all that there are, `every` so often, `count` times.
pub(crate) fn run(vm: Option<&Found>, every: Duration, count: Option<u64>, output: Output) -> anyhow::Result<ExitCode> {
    let mut sampler = Sampler::default();
    let begun = Instant::now();
    let mut round = 0;
    loop {
        let rates = sampler.sample(ask(vm)?).rates;
        match output {
            Output::Text if round > 0 => print(&format!("\n{}", table(&rates)))?,
            Output::Text => print(&table(&rates))?,
            Output::Json => print(&format!("{}\n", json!({"disks": rates})))?,
        }
        round += 1;
        if count.is_some_and(|count| round >= count) {
            return Ok(ExitCode::SUCCESS);
        }
        // What it takes to ask does not add up.
        let next = begun + every.mul_f64(round as f64);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// The disks of one VM, or of all that are served. That one is not there, or any more, is an error if it was asked for.
fn ask(vm: Option<&Found>) -> anyhow::Result<Vec<(String, Vec<DiskState>)>> {
    if let Some(vm) = vm {
        let (_, disks) = fetch_disks(&vm.control).map_err(|error| explain(error, vm))?;
        return Ok(vec![(vm.name.clone(), disks.disks)]);
    }
    let mut all = Vec::new();
    for (vm, asked) in ask_all(&find::vms()) {
        match asked {
            Ok(disks) => all.push((vm, disks)),
            Err(error) => eprintln!("larder: {vm}: {error}"),
        }
    }
    Ok(all)
}
