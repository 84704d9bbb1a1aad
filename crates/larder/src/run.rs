//! `larder run`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use larder_vm::image::{ChainPolicy, ImageAddress};
use larder_vm::memory::spec::MemorySpec;
use larder_vm::memory::{SwapConfig, check_swap_disk};
use larder_vm::run::check::{DiskCheckReport, check_disks};
use larder_vm::run::disk_locks::DiskLocks;
use larder_vm::run::lease::{Lease, LeasePaths};
use larder_vm::run::memory::PlannedMemory;
use larder_vm::run::plan::{PlanEnvironment, PlanError, PlannedDisk, RunPlan, guest_name, plan, program};
use larder_vm::run::shell::command_line;
use larder_vm::run::supervise::{ServerProgram, supervise};
use larder_vm::run::version::QemuVersion;

use crate::EXIT_ERROR;
use crate::cli::RunArguments;
use crate::cli::memory::Switch;
use crate::output::{print, print_stderr};

/// Path of this program, even if its file has been replaced: a restarted server then has the same version as the
/// others.
const PROGRAM_PATH: &str = "/proc/self/exe";

/// Exit status of a dry run that found problems.
const EXIT_NEGATIVE: u8 = 1;

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let memory = memory_spec(&arguments);
    let command = arguments.qemu;
    let guest = guest_name(&command);
    let paths = match arguments.dry_run {
        true => LeasePaths::for_commands(&guest)?,
        false => LeasePaths::for_run(&guest)?,
    };
    let version = QemuVersion::probe(program(&command)?)?;
    let plan_with = |left: &[_]| {
        let setting = PlanEnvironment {
            version,
            sockets: &paths.directory,
            ram: &paths.ram,
            left_to_qemu: left,
            memory: memory.as_ref(),
        };
        let mut plan_with = plan(&command, &arguments.disk, &setting)?;
        for plan_with in &mut plan_with.disks {
            plan_with.disk.chain = ChainPolicy::Follow { trust_image: arguments.trust_image };
        }
        Ok::<_, PlanError>(plan_with)
    };
    let mut plan = plan_with(&[])?;
    let disks: Vec<_> = plan.disks.iter().map(PlannedDisk::check_input).collect();
    let mut found = match arguments.dry_run {
        true => check_disks(&disks),
        // The servers log messages about the images themselves, so this check does not.
        false => tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::new(), || check_disks(&disks)),
    };
    if !found.left_to_qemu.is_empty() {
        plan = plan_with(&found.left_to_qemu)?;
        // QEMU itself locks the images that it keeps.
        let is_served = |hold: &DiskLocks| plan.disks.iter().any(|plan_with| plan_with.disk.image == hold.image);
        found.disk_locks.retain(is_served);
    }
    if arguments.dry_run {
        return dry_run(&plan, &paths, &found);
    }
    let of_memory = memory_problems(&plan);
    for problem in found.problems.iter().map(ToString::to_string).chain(of_memory.clone()) {
        show_message(&problem);
    }
    if !found.problems.is_empty() || !of_memory.is_empty() {
        return Ok(ExitCode::from(EXIT_ERROR));
    }
    let _lease = Lease::acquire(&paths, &plan)?;
    for change in &plan.changes {
        show_message(change);
    }
    if arguments.verbose {
        for line in server_commands(&plan, PlannedDisk::proxied_serve_arguments) {
            show_message(&line);
        }
        if let Some(memory) = &plan.memory {
            show_message(&command_line(&pager_command(memory, "PID")));
        }
        show_message(&command_line(&plan.qemu));
    }
    let server = ServerProgram {
        path: PathBuf::from(PROGRAM_PATH),
        // Amid the guest's console output only warnings and errors are of interest.
        log: (!arguments.verbose && std::env::var_os("LARDER_LOG").is_none()).then(|| "warn".to_owned()),
    };
    Ok(ExitCode::from(supervise(&plan, &found.disk_locks, &server, &show_message)?))
}

/// Returns the options of memory management, if it is requested.
fn memory_spec(arguments: &RunArguments) -> Option<MemorySpec> {
    let disk = |address: &Option<ImageAddress>, size| {
        let address = address.clone()?;
        Some(SwapConfig { address, size })
    };
    Some(MemorySpec {
        compressed: arguments.memory_compressed,
        swap: disk(&arguments.memory_swap_cache, arguments.memory_swap_size),
        slow: disk(&arguments.memory_slow_store, arguments.memory_slow_size),
        encrypt: arguments.memory_encrypt.map(|switch| switch == Switch::On),
        ..MemorySpec::new(arguments.memory_budget?)
    })
}

/// Prints commands that do by hand what a run does, and reports problems that the run would have.
fn dry_run(plan: &RunPlan, places: &LeasePaths, found: &DiskCheckReport) -> anyhow::Result<ExitCode> {
    for change in &plan.changes {
        show_message(change);
    }
    for image in &found.unchecked {
        show_message(&format!("disk {image}: not checked completely: its NBD server may accept one client only"));
    }
    let lease = Lease::check(plan).err().map(|error| error.to_string());
    let of_disks = found.problems.iter().map(ToString::to_string);
    let problems: Vec<String> = of_disks.chain(memory_problems(plan)).chain(lease).collect();
    for problem in &problems {
        show_message(problem);
    }
    if let (false, Some(name)) = (needs_no_resources(plan), places.directory.file_name()) {
        show_message(&format!(
            "{} stands for a name that each run chooses at random, so that no other user can create it first",
            name.display()
        ));
    }
    let mut lines = preparation_commands(plan, &places.directory);
    lines.extend(server_commands(plan, PlannedDisk::serve_arguments).into_iter().map(|line| format!("{line} &")));
    lines.push(qemu_command(plan));
    print(&format!("{}\n", lines.join("\n")))?;
    Ok(match problems.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_NEGATIVE),
    })
}

/// Returns commands that create, for this user alone, the directory of the sockets and the files of the RAM, as a run
/// does.
fn preparation_commands(plan: &RunPlan, directory: &Path) -> Vec<String> {
    if needs_no_resources(plan) {
        return Vec::new();
    }
    let words = |words: &[&OsStr]| command_line(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
    let directory = words(&["mkdir".as_ref(), "-p".as_ref(), "-m".as_ref(), "700".as_ref(), directory.as_ref()]);
    let directory = format!("(umask 022; {directory})");
    let files = plan.ram.iter().map(|file| {
        let size = file.bytes.to_string();
        let file = words(&["truncate".as_ref(), "-s".as_ref(), size.as_ref(), file.path.as_os_str()]);
        format!("(umask 077; {file})")
    });
    std::iter::once(directory).chain(files).collect()
}

fn needs_no_resources(plan: &RunPlan) -> bool {
    plan.disks.is_empty() && plan.memory.is_none()
}

/// Returns the problems of the disks for evicted pages.
fn memory_problems(plan: &RunPlan) -> Vec<String> {
    let spec = plan.memory.as_ref().map(|memory| &memory.spec);
    let disks = spec.into_iter().flat_map(|spec| [&spec.swap, &spec.slow]).flatten();
    disks.filter_map(|disk| Some(format!("memory: {}", check_swap_disk(disk).err()?))).collect()
}

/// Returns QEMU's command. The pager, which needs QEMU's PID, is started by a shell that becomes QEMU by `exec`.
fn qemu_command(plan: &RunPlan) -> String {
    let qemu = command_line(&plan.qemu);
    let Some(memory) = &plan.memory else {
        return qemu;
    };
    // `$$` must stay unquoted for the shell, while all other words are quoted.
    let pager = command_line(&pager_command(memory, "PID")).replacen("--pid PID", "--pid $$", 1);
    command_line(&["sh".into(), "-c".into(), format!("{pager} & exec {qemu}").into()])
}

fn pager_command(memory: &PlannedMemory, pid: &str) -> Vec<OsString> {
    let program = std::env::args_os().next().unwrap_or_else(|| "larder".into());
    std::iter::once(program).chain(memory.attach_arguments(pid)).collect()
}

/// Returns the command of each disk's server.
fn server_commands(plan: &RunPlan, arguments: fn(&PlannedDisk) -> Vec<OsString>) -> Vec<String> {
    let program = std::env::args_os().next().unwrap_or_else(|| "larder".into());
    let commands = plan.disks.iter().map(|planned| {
        let words: Vec<OsString> = std::iter::once(program.clone()).chain(arguments(planned)).collect();
        command_line(&words)
    });
    commands.collect()
}

/// Reports a message; the guest continues without a reader.
fn show_message(line: &str) {
    print_stderr(line);
}

/// Adds a tip to a command line error where the likely mistake is known.
pub(crate) fn explain_usage_error(mut error: clap::Error) -> clap::Error {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let is_command = |command: &str| words.first().is_some_and(|word| word == command);
    let has_separator = words.iter().any(|word| word == "--");
    let tip = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(word)))
            if is_command("run") && !has_separator && !word.starts_with('-') =>
        {
            format!("put -- before the QEMU command: larder run -- {word} ...")
        }
        // clap took the word for the name of a virtual machine.
        (ErrorKind::ArgumentConflict, _)
            if is_command("migrate") && error.get(ContextKind::InvalidSubcommand).is_some() =>
        {
            "the subcommands are send, receive, status, limit and cancel".to_owned()
        }
        _ => return error,
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    error
}
