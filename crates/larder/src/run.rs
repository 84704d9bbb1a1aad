//! `larder run`.

use std::path::PathBuf;
use std::process::ExitCode;

use larder_vm::run::lease::{Lease, Places};
use larder_vm::run::plan::{Setting, guest_name, plan, program};
use larder_vm::run::shell::command_line;
use larder_vm::run::supervise::{ServerProgram, supervise};
use larder_vm::run::version::QemuVersion;

use crate::cli::RunArguments;

/// This program, even if its file has been replaced since: a restarted server is of the version that the others are.
const OURSELVES: &str = "/proc/self/exe";

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let command = arguments.qemu;
    let places = Places::choose(&guest_name(&command))?;
    let setting = Setting {
        version: QemuVersion::probe(program(&command)?)?,
        sockets: &places.folder,
        ram: &places.ram,
    };
    let plan = plan(&command, &arguments.disk, &setting)?;
    for change in &plan.changes {
        eprintln!("larder: {change}");
    }
    if arguments.dry_run {
        println!("{}", command_line(&plan.qemu));
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.verbose {
        eprintln!("larder: {}", command_line(&plan.qemu));
    }
    let _lease = Lease::take(&places, &plan)?;
    let server = ServerProgram {
        path: PathBuf::from(OURSELVES),
        // Between the guest's console output only what went wrong is of interest.
        log: (!arguments.verbose && std::env::var_os("LARDER_LOG").is_none()).then(|| "warn".to_owned()),
    };
    Ok(ExitCode::from(supervise(&plan, &server)?))
}
