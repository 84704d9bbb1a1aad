//! `larder run`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use larder_vm::image::{ChainPolicy, ImageAddress};
use larder_vm::memory::wish::MemoryWish;
use larder_vm::memory::{SwapConfig, look_at_disk};
use larder_vm::run::check::{Findings, check};
use larder_vm::run::hold::Hold;
use larder_vm::run::lease::{Lease, Places};
use larder_vm::run::memory::PlannedMemory;
use larder_vm::run::plan::{Plan, PlanError, PlannedDisk, Setting, guest_name, plan, program};
use larder_vm::run::shell::command_line;
use larder_vm::run::supervise::{ServerProgram, supervise};
use larder_vm::run::version::QemuVersion;

use crate::EXIT_ERROR;
use crate::cli::RunArguments;
use crate::cli::memory::Switch;
use crate::output::{complain, print};

/// Path of this program, even if its file has been replaced: a restarted server then has the same version as the
/// others.
const OURSELVES: &str = "/proc/self/exe";

/// Exit status of a dry run that found problems.
const EXIT_NEGATIVE: u8 = 1;

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let memory = memory_of(&arguments);
    let command = arguments.qemu;
    let guest = guest_name(&command);
    let places = match arguments.dry_run {
        true => Places::for_commands(&guest)?,
        false => Places::choose(&guest)?,
    };
    let version = QemuVersion::probe(program(&command)?)?;
    let planned = |left: &[_]| {
        let setting = Setting {
            version,
            sockets: &places.folder,
            ram: &places.ram,
            left,
            memory: memory.as_ref(),
        };
        let mut planned = plan(&command, &arguments.disk, &setting)?;
        for planned in &mut planned.disks {
            planned.disk.chain = ChainPolicy::Follow {
                trust_image: arguments.trust_image,
            };
        }
        Ok::<_, PlanError>(planned)
    };
    let mut plan = planned(&[])?;
    let disks: Vec<_> = plan.disks.iter().map(PlannedDisk::to_check).collect();
    let mut found = match arguments.dry_run {
        true => check(&disks),
        // The servers log messages about the images themselves, so this check does not.
        false => tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::new(), || check(&disks)),
    };
    if !found.left.is_empty() {
        plan = planned(&found.left)?;
        // QEMU itself locks the images that it keeps.
        let is_served = |hold: &Hold| plan.disks.iter().any(|planned| planned.disk.image == hold.image);
        found.holds.retain(is_served);
    }
    if arguments.dry_run {
        return dry_run(&plan, &places, &found);
    }
    let of_memory = memory_problems(&plan);
    for problem in found.problems.iter().map(ToString::to_string).chain(of_memory.clone()) {
        say(&problem);
    }
    if !found.problems.is_empty() || !of_memory.is_empty() {
        return Ok(ExitCode::from(EXIT_ERROR));
    }
    let _lease = Lease::take(&places, &plan)?;
    for change in &plan.changes {
        say(change);
    }
    if arguments.verbose {
        for line in server_commands(&plan, PlannedDisk::kept_serve_arguments) {
            say(&line);
        }
        if let Some(memory) = &plan.memory {
            say(&command_line(&pager_words(memory, "PID")));
        }
        say(&command_line(&plan.qemu));
    }
    let server = ServerProgram {
        path: PathBuf::from(OURSELVES),
        // Amid the guest's console output only warnings and errors are of interest.
        log: (!arguments.verbose && std::env::var_os("LARDER_LOG").is_none()).then(|| "warn".to_owned()),
    };
    Ok(ExitCode::from(supervise(&plan, &found.holds, &server, &say)?))
}

/// Returns the options of memory management, if it is requested.
fn memory_of(arguments: &RunArguments) -> Option<MemoryWish> {
    let disk = |address: &Option<ImageAddress>, size| {
        let address = address.clone()?;
        Some(SwapConfig { address, size })
    };
    Some(MemoryWish {
        compressed: arguments.memory_compressed,
        swap: disk(&arguments.memory_swap_cache, arguments.memory_swap_size),
        slow: disk(&arguments.memory_slow_store, arguments.memory_slow_size),
        encrypt: arguments.memory_encrypt.map(|switch| switch == Switch::On),
        ..MemoryWish::new(arguments.memory_budget?)
    })
}

/// Prints commands that do by hand what a run does, and reports problems that the run would have.
fn dry_run(plan: &Plan, places: &Places, found: &Findings) -> anyhow::Result<ExitCode> {
    for change in &plan.changes {
        say(change);
    }
    for image in &found.unchecked {
        say(&format!(
            "disk {image}: not checked completely: its NBD server may accept one client only"
        ));
    }
    let lease = Lease::check(plan).err().map(|error| error.to_string());
    let of_disks = found.problems.iter().map(ToString::to_string);
    let problems: Vec<String> = of_disks.chain(memory_problems(plan)).chain(lease).collect();
    for problem in &problems {
        say(problem);
    }
    if let (false, Some(name)) = (needs_nothing(plan), places.folder.file_name()) {
        say(&format!(
            "{} stands for a name that each run chooses at random, so that no other user can create it first",
            name.display()
        ));
    }
    let mut lines = preparations(plan, &places.folder);
    lines.extend(
        server_commands(plan, PlannedDisk::serve_arguments)
            .into_iter()
            .map(|line| format!("{line} &")),
    );
    lines.push(qemu_command(plan));
    print(&format!("{}\n", lines.join("\n")))?;
    Ok(match problems.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_NEGATIVE),
    })
}

/// Returns commands that create, for this user alone, the directory of the sockets and the files of the RAM, as a run
/// does.
fn preparations(plan: &Plan, folder: &Path) -> Vec<String> {
    if needs_nothing(plan) {
        return Vec::new();
    }
    let words = |words: &[&OsStr]| command_line(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
    let folder = words(&[
        "mkdir".as_ref(),
        "-p".as_ref(),
        "-m".as_ref(),
        "700".as_ref(),
        folder.as_ref(),
    ]);
    let folder = format!("(umask 022; {folder})");
    let files = plan.ram.iter().map(|file| {
        let size = file.bytes.to_string();
        let file = words(&["truncate".as_ref(), "-s".as_ref(), size.as_ref(), file.path.as_os_str()]);
        format!("(umask 077; {file})")
    });
    std::iter::once(folder).chain(files).collect()
}

fn needs_nothing(plan: &Plan) -> bool {
    plan.disks.is_empty() && plan.memory.is_none()
}

/// Returns the problems of the disks for evicted pages.
fn memory_problems(plan: &Plan) -> Vec<String> {
    let wish = plan.memory.as_ref().map(|memory| &memory.wish);
    let disks = wish.into_iter().flat_map(|wish| [&wish.swap, &wish.slow]).flatten();
    disks
        .filter_map(|disk| Some(format!("memory: {}", look_at_disk(disk).err()?)))
        .collect()
}

/// Returns QEMU's command. The pager, which needs QEMU's PID, is started by a shell that becomes QEMU by `exec`.
fn qemu_command(plan: &Plan) -> String {
    let qemu = command_line(&plan.qemu);
    let Some(memory) = &plan.memory else {
        return qemu;
    };
    // `$$` must stay unquoted for the shell, while all other words are quoted.
    let pager = command_line(&pager_words(memory, "PID")).replacen("--pid PID", "--pid $$", 1);
    command_line(&["sh".into(), "-c".into(), format!("{pager} & exec {qemu}").into()])
}

fn pager_words(memory: &PlannedMemory, pid: &str) -> Vec<OsString> {
    let program = std::env::args_os().next().unwrap_or_else(|| "larder".into());
    std::iter::once(program).chain(memory.attach_arguments(pid)).collect()
}

/// Returns the command of each disk's server.
fn server_commands(plan: &Plan, arguments: fn(&PlannedDisk) -> Vec<OsString>) -> Vec<String> {
    let program = std::env::args_os().next().unwrap_or_else(|| "larder".into());
    let commands = plan.disks.iter().map(|planned| {
        let words: Vec<OsString> = std::iter::once(program.clone()).chain(arguments(planned)).collect();
        command_line(&words)
    });
    commands.collect()
}

/// Reports a message; the guest continues without a reader.
fn say(line: &str) {
    complain(line);
}

/// Adds a tip to a command line error where the likely mistake is known.
pub(crate) fn explain(mut error: clap::Error) -> clap::Error {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let is_of = |command: &str| words.first().is_some_and(|word| word == command);
    let is_split = words.iter().any(|word| word == "--");
    let tip = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(word)))
            if is_of("run") && !is_split && !word.starts_with('-') =>
        {
            format!("put -- before the QEMU command: larder run -- {word} ...")
        }
        // clap took the word for the name of a virtual machine.
        (ErrorKind::ArgumentConflict, _) if is_of("migrate") && error.get(ContextKind::InvalidSubcommand).is_some() => {
            "the subcommands are send, receive, status, limit and cancel".to_owned()
        }
        _ => return error,
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    error
}
