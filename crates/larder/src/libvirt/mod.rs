//! `larder libvirt`: has Larder serve the disks of a libvirt domain.

mod apparmor;
mod attach;
mod backup;
mod detach;
mod hook;
mod service;
mod virsh;

use std::process::ExitCode;

use crate::cli::LibvirtCommand;

pub(crate) fn run(command: LibvirtCommand) -> anyhow::Result<ExitCode> {
    match command {
        LibvirtCommand::Attach(arguments) => attach::run(arguments),
        LibvirtCommand::Detach(arguments) => detach::run(arguments),
        LibvirtCommand::Hook(arguments) => hook::run(&arguments),
    }
}

/// Returns a unified diff of two texts, with three lines of context.
fn unified_diff(before: &str, after: &str, names: (&str, &str)) -> String {
    let lines = similar::TextDiff::from_lines(before, after);
    lines.unified_diff().context_radius(3).header(names.0, names.1).to_string()
}

/// Returns `disk NAME`, or `disks NAME, NAME`.
fn disk_list(names: &[&str]) -> String {
    match names {
        [name] => format!("disk {name}"),
        names => format!("disks {}", names.join(", ")),
    }
}
