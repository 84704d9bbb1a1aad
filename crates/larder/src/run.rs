//! `larder run`.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use larder_vm::run::check::{Findings, check};
use larder_vm::run::hold::Hold;
use larder_vm::run::lease::{Lease, Places};
use larder_vm::run::plan::{Plan, PlannedDisk, Setting, guest_name, plan, program};
use larder_vm::run::shell::command_line;
use larder_vm::run::supervise::{ServerProgram, supervise};
use larder_vm::run::version::QemuVersion;

use crate::EXIT_ERROR;
use crate::cli::RunArguments;
use crate::output::print;

/// This program, even if its file has been replaced since: a restarted server is of the version that the others are.
const OURSELVES: &str = "/proc/self/exe";

/// It would not work.
const EXIT_NEGATIVE: u8 = 1;

pub(crate) fn run(arguments: RunArguments) -> anyhow::Result<ExitCode> {
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
        };
        plan(&command, &arguments.disk, &setting)
    };
    let mut plan = planned(&[])?;
    let disks: Vec<_> = plan.disks.iter().map(PlannedDisk::to_check).collect();
    let mut found = match arguments.dry_run {
        true => check(&disks),
        // What the servers have to say of the images they say themselves.
        false => tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::new(), || check(&disks)),
    };
    if !found.left.is_empty() {
        plan = planned(&found.left)?;
        // QEMU locks what stays with it.
        let is_served = |hold: &Hold| plan.disks.iter().any(|planned| planned.disk.image == hold.image);
        found.holds.retain(is_served);
    }
    if arguments.dry_run {
        return dry_run(&plan, &places, &found);
    }
    for problem in &found.problems {
        say(&problem.to_string());
    }
    if !found.problems.is_empty() {
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
        say(&command_line(&plan.qemu));
    }
    let server = ServerProgram {
        path: PathBuf::from(OURSELVES),
        // Between the guest's console output only what went wrong is of interest.
        log: (!arguments.verbose && std::env::var_os("LARDER_LOG").is_none()).then(|| "warn".to_owned()),
    };
    Ok(ExitCode::from(supervise(&plan, &found.holds, &server, &say)?))
}

/// Prints commands that do by hand what a run does, and tells what would go wrong.
fn dry_run(plan: &Plan, places: &Places, found: &Findings) -> anyhow::Result<ExitCode> {
    for change in &plan.changes {
        say(change);
    }
    for image in &found.unchecked {
        say(&format!(
            "disk {image}: not checked to the end: its NBD server may take one client only"
        ));
    }
    let lease = Lease::check(plan).err().map(|error| error.to_string());
    let problems: Vec<String> = found.problems.iter().map(ToString::to_string).chain(lease).collect();
    for problem in &problems {
        say(problem);
    }
    if let (false, Some(name)) = (plan.disks.is_empty(), places.folder.file_name()) {
        say(&format!(
            "{} stands for a name that each run chooses anew, so that nobody has taken it before",
            name.display()
        ));
    }
    let mut lines = preparations(plan, &places.folder);
    lines.extend(
        server_commands(plan, PlannedDisk::serve_arguments)
            .into_iter()
            .map(|line| format!("{line} &")),
    );
    lines.push(command_line(&plan.qemu));
    print(&format!("{}\n", lines.join("\n")))?;
    Ok(match problems.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_NEGATIVE),
    })
}

/// What a run makes before it starts anything: the sockets' folder, and the RAM's files, for the user alone.
fn preparations(plan: &Plan, folder: &Path) -> Vec<String> {
    if plan.disks.is_empty() {
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

/// The command of each disk's server.
fn server_commands(plan: &Plan, arguments: fn(&PlannedDisk) -> Vec<OsString>) -> Vec<String> {
    let program = std::env::args_os().next().unwrap_or_else(|| "larder".into());
    let commands = plan.disks.iter().map(|planned| {
        let words: Vec<OsString> = std::iter::once(program.clone()).chain(arguments(planned)).collect();
        command_line(&words)
    });
    commands.collect()
}

/// Tells the user, in one write: the guest's console may be on the same terminal. If nobody listens any more, the guest
/// goes on.
fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("larder: {line}\n").as_bytes());
}

/// Adds to the complaint about a command line what is most likely meant.
pub(crate) fn explain(mut error: clap::Error) -> clap::Error {
    let mut words = std::env::args_os().skip(1);
    let is_run = words.next().is_some_and(|word| word == "run");
    let is_split = words.any(|word| word == "--");
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    if error.kind() == ErrorKind::UnknownArgument && is_run && !is_split && !word.starts_with('-') {
        let tip = format!("put -- before the QEMU command: larder run -- {word} ...");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}
