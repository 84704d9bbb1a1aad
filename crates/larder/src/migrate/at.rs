//! `larder migrate status`, `limit` and `cancel`: control a move that another process performs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use larder_block::ByteLen;
use larder_vm::control::migration::{Direction, MigrationPatch, MigrationState};
use larder_vm::control::{FetchError, cancel_migration, fetch_migration, limit_migration};
use larder_vm::vm::find::{migration_control_of, moves};

use super::watched::limits_text;
use crate::cli::Output;
use crate::cli::migrate::{MigrateAtArguments, MigrateCancelArguments, MigrateLimitArguments, MigrateStatusArguments};
use crate::disk_image::{human, percent};
use crate::output::{Lines, print};
use crate::rates::is_not_served;

/// Control socket of a move, and the VM's name for the error message if no process listens there.
struct At {
    control: PathBuf,
    vm: Option<String>,
}

impl At {
    /// Finds the move of a VM. In a move between two QEMUs of this host, the outgoing side is chosen.
    fn of(arguments: &MigrateAtArguments) -> anyhow::Result<Self> {
        let word = arguments.vm.to_string_lossy();
        if word.contains('/') {
            return Ok(Self {
                control: Path::new(&arguments.vm).to_owned(),
                vm: None,
            });
        }
        if word.is_empty() {
            bail!("no virtual machine was selected: give its NAME");
        }
        let there = moves()
            .into_iter()
            .find(|(vm, ..)| *vm == word)
            .map(|(_, _, path)| path);
        Ok(Self {
            control: there.unwrap_or_else(|| migration_control_of(&word, Direction::Leaving)),
            vm: Some(word.into_owned()),
        })
    }

    fn explain(&self, error: FetchError) -> anyhow::Error {
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
    let at = At::of(&arguments.at)?;
    let (said, state) = fetch_migration(&at.control).map_err(|error| at.explain(error))?;
    print(&match arguments.output {
        Output::Text => text(&state),
        Output::Json => format!("{said:#}\n"),
    })?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn limit(arguments: &MigrateLimitArguments) -> anyhow::Result<ExitCode> {
    let at = At::of(&arguments.at)?;
    let patch = MigrationPatch {
        bandwidth: arguments.bandwidth.map(ByteLen::get),
        processors: arguments.cpu,
        downtime_ms: arguments.downtime,
        timeout_s: arguments.timeout,
    };
    let state = limit_migration(&at.control, patch).map_err(|error| at.explain(error))?;
    let limits = state.limits.unwrap_or_default();
    print(&format!("limits: {}\n", limits_text(&limits)))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn cancel(arguments: &MigrateCancelArguments) -> anyhow::Result<ExitCode> {
    let at = At::of(&arguments.at)?;
    cancel_migration(&at.control).map_err(|error| at.explain(error))?;
    print("cancelling: the process that moves it reports the result\n")?;
    Ok(ExitCode::SUCCESS)
}

/// Formats the whole state of a move, for people.
pub(crate) fn text(state: &MigrationState) -> String {
    let mut said = Lines::default();
    let peer = state.peer.as_deref().unwrap_or("an unknown host");
    said.line(
        "move",
        match state.direction {
            Direction::Leaving => format!("{} to {peer}", state.vm),
            Direction::Coming => format!("{} from {peer}", state.vm),
        },
    );
    said.line("QEMU", &state.qemu);
    said.line("state", state.words());
    if let Some(reason) = &state.reason {
        // The text may come from the other host.
        said.line("because", reason);
    }
    if let Some(course) = &state.course {
        said.line(
            "remaining",
            format!(
                "{} of {}{}",
                human(course.remaining_bytes),
                human(course.total_bytes),
                percent(course.remaining_bytes, course.total_bytes)
            ),
        );
        said.line("dirty rate", format!("{}/s", human(course.dirty_bytes_per_s)));
        if let Some(seconds) = course.expected_seconds {
            said.line("time left", format!("{seconds:.0} s"));
        }
        if let Some(ms) = course.expected_downtime_ms {
            said.line("downtime", format!("{ms} ms expected"));
        }
        if let Some(verdict) = &course.verdict {
            said.line("verdict", verdict);
        }
    }
    if let Some(ms) = state.downtime_ms {
        said.line("paused for", format!("{ms} ms"));
    }
    let work = match state.direction {
        Direction::Leaving => "encoding",
        Direction::Coming => "decoding",
    };
    if let Some(rates) = &state.rates {
        let waiting = rates
            .waiting
            .map(|lanes| format!("; {lanes:.1} lanes wait for the link"));
        said.line(
            "transfer",
            format!(
                "{}/s in {}/s; {:.2} CPUs, of which {work} {:.2}{}",
                human(rates.stream_bytes_per_s),
                human(rates.wire_bytes_per_s),
                rates.processors,
                rates.encoding,
                waiting.unwrap_or_default()
            ),
        );
    }
    if state.link.losses > 0 {
        said.line(
            "link",
            match state.link.losses {
                1 => "was lost once".to_owned(),
                losses => format!("was lost {losses} times"),
            },
        );
    }
    if let Some(limits) = &state.limits {
        said.line("limits", limits_text(limits));
    }
    let cpu = |all: f64, of_it: f64| format!("{all:.2} s, of which {work} {of_it:.2} s");
    let ratio = state
        .ratio()
        .map_or_else(String::new, |ratio| format!(" ({ratio:.2} times less)"));
    if let Some(sent) = &state.sent {
        said.line(
            "sent",
            format!("{} in {}{ratio}", human(sent.raw_bytes), human(sent.wire_bytes)),
        );
        said.line("CPU time", cpu(sent.cpu_seconds, sent.encode_cpu_seconds));
        said.line("pages", "");
        for way in sent.methods.iter().filter(|way| way.pages > 0) {
            said.row(format!("{:<12}{:>10} in {}", way.method, way.pages, human(way.bytes)));
        }
    } else if let Some(delivered) = &state.delivered {
        said.line(
            "delivered",
            format!(
                "{} from {}{ratio}",
                human(delivered.raw_bytes),
                human(delivered.wire_bytes)
            ),
        );
        said.line("CPU time", cpu(delivered.cpu_seconds, delivered.decode_cpu_seconds));
    }
    if let Some(evidence) = state.evidence.as_ref().filter(|evidence| !evidence.classes.is_empty()) {
        said.line(
            "methods",
            format!("a byte on the link is worth {:.2} ns of encoding", evidence.ns_per_byte),
        );
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
            said.row(format!(
                "{}, {} batches: {}",
                class.class,
                class.batches,
                offers.collect::<Vec<_>>().join("; ")
            ));
        }
    }
    said.into_text()
}
