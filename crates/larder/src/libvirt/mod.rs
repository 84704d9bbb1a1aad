//! `larder libvirt`: a domain of libvirt's whose disks Larder serves.

mod apparmor;
mod attach;
mod detach;
mod hook;
mod kept;
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

/// The lines in which two texts differ, with some around.
fn difference(before: &str, after: &str, names: (&str, &str)) -> String {
    let lines = similar::TextDiff::from_lines(before, after);
    lines
        .unified_diff()
        .context_radius(3)
        .header(names.0, names.1)
        .to_string()
}

/// `1 disk`, `2 disks`.
fn disks(names: &[&str]) -> String {
    match names {
        [name] => format!("disk {name}"),
        names => format!("disks {}", names.join(", ")),
    }
}
