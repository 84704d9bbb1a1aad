//! `larder migrate status`, `limit` and `cancel`: control a move that another process performs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use larder_block::ByteLen;
use larder_vm::control::migration::{Direction, MigrationPatch, MigrationState};
use larder_vm::control::{ControlClientError, cancel_migration, fetch_migration, limit_migration};
use larder_vm::vm::find::{migration_control_path, migration_sockets};

use super::move_monitor::format_limits;
use crate::cli::Output;
use crate::cli::migrate::{
    MigrateCancelArguments, MigrateLimitArguments, MigrateStatusArguments, MigrateTargetArguments,
};
use crate::disk_image::{format_percent, format_size};
use crate::output::{Lines, print};
use crate::rates::is_not_served;

/// Control socket of a move, and the VM's name for the error message if no process listens there.
struct MoveTarget {
    control: PathBuf,
    vm: Option<String>,
}

impl MoveTarget {
    /// Finds the move of a VM. In a move between two QEMUs of this host, the outgoing side is chosen.
    fn from_arguments(arguments: &MigrateTargetArguments) -> anyhow::Result<Self> {
        let argument = arguments.vm.to_string_lossy();
        if argument.contains('/') {
            return Ok(Self { control: Path::new(&arguments.vm).to_owned(), vm: None });
        }
        if argument.is_empty() {
            bail!("no virtual machine was selected: give its NAME");
        }
        let found = migration_sockets().into_iter().find(|(vm, ..)| *vm == argument).map(|(_, _, path)| path);
        Ok(Self {
            control: found.unwrap_or_else(|| migration_control_path(&argument, Direction::Leaving)),
            vm: Some(argument.into_owned()),
        })
    }

    fn explain(&self, error: ControlClientError) -> anyhow::Error {
        match &self.vm {
            Some(vm) if is_not_served(&error) => anyhow!(
                "{vm} is not being moved by this user on this host: no process listens on {}; `larder status` lists all moves",
                self.control.display()
            ),
            _ => error.into(),
        }
    }
}

pub(super) fn status(arguments: &MigrateStatusArguments) -> anyhow::Result<ExitCode> {
    let at = MoveTarget::from_arguments(&arguments.at)?;
    let (json, state) = fetch_migration(&at.control).map_err(|error| at.explain(error))?;
    print(&match arguments.output {
        Output::Text => format_text(&state),
        Output::Json => format!("{json:#}\n"),
    })?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn limit(arguments: &MigrateLimitArguments) -> anyhow::Result<ExitCode> {
    let at = MoveTarget::from_arguments(&arguments.at)?;
    let patch = MigrationPatch {
        bandwidth: arguments.bandwidth.map(ByteLen::get),
        processors: arguments.cpu,
        downtime_ms: arguments.downtime,
        timeout_s: arguments.timeout,
    };
    let state = limit_migration(&at.control, patch).map_err(|error| at.explain(error))?;
    let limits = state.limits.unwrap_or_default();
    print(&format!("limits: {}\n", format_limits(&limits)))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn cancel(arguments: &MigrateCancelArguments) -> anyhow::Result<ExitCode> {
    let at = MoveTarget::from_arguments(&arguments.at)?;
    cancel_migration(&at.control).map_err(|error| at.explain(error))?;
    print("cancelling: the process that moves it reports the result\n")?;
    Ok(ExitCode::SUCCESS)
}

/// Formats the whole state of a move, for people.
pub(crate) fn format_text(state: &MigrationState) -> String {
    let mut output = Lines::default();
    let peer = state.peer.as_deref().unwrap_or("an unknown host");
    output.line(
        "move",
        match state.direction {
            Direction::Leaving => format!("{} to {peer}", state.vm),
            Direction::Coming => format!("{} from {peer}", state.vm),
        },
    );
    output.line("QEMU", &state.qemu);
    output.line("state", state.summary());
    if let Some(reason) = &state.reason {
        // The text may come from the other host.
        output.line("because", reason);
    }
    if let Some(course) = &state.course {
        output.line(
            "remaining",
            format!(
                "{} of {}{}",
                format_size(course.remaining_bytes),
                format_size(course.total_bytes),
                format_percent(course.remaining_bytes, course.total_bytes)
            ),
        );
        output.line("dirty rate", format!("{}/s", format_size(course.dirty_bytes_per_s)));
        if let Some(seconds) = course.expected_seconds {
            output.line("time left", format!("{seconds:.0} s"));
        }
        if let Some(ms) = course.expected_downtime_ms {
            output.line("downtime", format!("{ms} ms expected"));
        }
        if let Some(verdict) = &course.verdict {
            output.line("verdict", verdict);
        }
    }
    if let Some(ms) = state.downtime_ms {
        output.line("paused for", format!("{ms} ms"));
    }
    let work = match state.direction {
        Direction::Leaving => "encoding",
        Direction::Coming => "decoding",
    };
    if let Some(rates) = &state.rates {
        let waiting = rates.waiting.map(|lanes| format!("; {lanes:.1} lanes wait for the link"));
        output.line(
            "transfer",
            format!(
                "{}/s in {}/s; {:.2} CPUs, of which {work} {:.2}{}",
                format_size(rates.stream_bytes_per_s),
                format_size(rates.wire_bytes_per_s),
                rates.processors,
                rates.encoding,
                waiting.unwrap_or_default()
            ),
        );
    }
    if state.link.losses > 0 {
        output.line(
            "link",
            match state.link.losses {
                1 => "was lost once".to_owned(),
                losses => format!("was lost {losses} times"),
            },
        );
    }
    if let Some(limits) = &state.limits {
        output.line("limits", format_limits(limits));
    }
    let cpu = |all: f64, part: f64| format!("{all:.2} s, of which {work} {part:.2} s");
    let ratio = state.ratio().map_or_else(String::new, |ratio| format!(" ({ratio:.2} times less)"));
    if let Some(sent) = &state.sent {
        output.line("sent", format!("{} in {}{ratio}", format_size(sent.raw_bytes), format_size(sent.wire_bytes)));
        output.line("CPU time", cpu(sent.cpu_seconds, sent.encode_cpu_seconds));
        output.line("pages", "");
        for method in sent.methods.iter().filter(|method| method.pages > 0) {
            output.row(format!("{:<12}{:>10} in {}", method.method, method.pages, format_size(method.bytes)));
        }
    } else if let Some(delivered) = &state.delivered {
        output.line(
            "delivered",
            format!("{} from {}{ratio}", format_size(delivered.raw_bytes), format_size(delivered.wire_bytes)),
        );
        output.line("CPU time", cpu(delivered.cpu_seconds, delivered.decode_cpu_seconds));
    }
    if let Some(evidence) = state.evidence.as_ref().filter(|evidence| !evidence.classes.is_empty()) {
        output.line("methods", format!("a byte on the link is worth {:.2} ns of encoding", evidence.ns_per_byte));
        for class in &evidence.classes {
            let mut offers: Vec<_> = class.offers.iter().collect();
            offers.sort_by(|a, b| a.cost_ns.total_cmp(&b.cost_ns));
            let offers = offers.iter().take(3).map(|offer| {
                format!(
                    "{} {:.1}x, {:.1} us, costs {:.1} us",
                    offer.method,
                    offer.ratio,
                    offer.ns / 1e3,
                    offer.cost_ns / 1e3
                )
            });
            output.row(format!(
                "{}, {} batches: {}",
                class.class,
                class.batches,
                offers.collect::<Vec<_>>().join("; ")
            ));
        }
    }
    output.into_text()
}
