//! A single move, by QEMU or by Larder, until it ends or exceeds its time limit.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use larder_bench::campaign::migration::LIMIT;
use larder_bench::campaign::migration::larder::{self, END_LIMIT, verdict, whole_move_command, whole_receive_command};
use larder_bench::campaign::migration::vm::{Vm, prefix_command};
use larder_bench::campaign::process::Process;
use serde_json::{Value, json};

use super::Bench;
use super::cpu;
use super::link::Side;
use super::method::Method;

/// Port on which QEMU listens; no other program uses the namespaces.
const PORT: u16 = 4445;
/// Poll interval of a move's status.
const LOOK: Duration = Duration::from_millis(50);
/// Text in Larder's output for a move that exceeded its `--timeout`.
const TIMED_OUT: &str = "it did not end in ";

/// Outcome of a move.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Moved,
    /// The move was cancelled, and the guest continued at the source.
    DidNotEnd,
    /// The move completed although it was cancelled.
    TooLate,
    /// The move failed, and the guest continued at the source.
    Failed(String),
}

impl Outcome {
    /// Returns whether the guest runs at the destination.
    pub(super) fn is_there(&self) -> bool {
        matches!(self, Self::Moved | Self::TooLate)
    }
}

/// Result of a move.
pub(super) struct Carried {
    pub(super) outcome: Outcome,
    /// Last informative answer of the source's QEMU about the migration.
    pub(super) info: Value,
    /// CPU seconds of Larder at the source, and at the destination.
    pub(super) larder_cpu_s: [f64; 2],
}

/// A prepared method.
pub(super) enum Carrier {
    Qemu { uri: String },
    Larder { receiver: larder::Side },
}

impl Carrier {
    /// Prepares a move; the destination then waits for the guest.
    pub(super) fn ready(bench: &Bench<'_>, method: Method, destination: &mut Vm, to: Side) -> anyhow::Result<Self> {
        let address = bench.link.address(to);
        if method == Method::Larder {
            let listen = format!("{address}:0");
            let qmp = destination.external_qmp();
            let command = whole_receive_command(&bench.larder, &listen, qmp, &["--insecure"]);
            let receiver = larder::Side::listening(prefix_command(&bench.link.enter(to), command))?;
            return Ok(Self::Larder { receiver });
        }
        let uri = format!("tcp:{address}:{PORT}");
        destination.ask("migrate-incoming", &json!({"uri": uri}))?;
        Ok(Self::Qemu { uri })
    }

    /// Moves the guest.
    pub(super) fn carry(self, bench: &Bench<'_>, source: &mut Vm, from: Side) -> anyhow::Result<Carried> {
        match self {
            Self::Qemu { uri } => by_qemu(&uri, source, Duration::from_secs(bench.arguments.limit)),
            Self::Larder { receiver } => move_by_larder(bench, receiver, source, from),
        }
    }
}

/// Queries the migration's status. Keeps the last answer with statistics in `last`.
fn look(source: &mut Vm, last: &mut Value) -> anyhow::Result<String> {
    let info = source.ask("query-migrate", &json!({}))?;
    let status = info["status"].as_str().unwrap_or("none").to_owned();
    if info["ram"].is_object() {
        *last = info;
    } else {
        // After a failure the answer has nothing but its reason.
        last["error-desc"] = info["error-desc"].clone();
    }
    Ok(status)
}

fn by_qemu(uri: &str, source: &mut Vm, limit: Duration) -> anyhow::Result<Carried> {
    let mut info = json!({});
    let started = Instant::now();
    source.ask("migrate", &json!({"uri": uri}))?;
    let mut cancelled = false;
    let outcome = loop {
        let status = look(source, &mut info)?;
        match status.as_str() {
            "completed" if cancelled => break Outcome::TooLate,
            "completed" => break Outcome::Moved,
            "cancelled" | "failed" if cancelled => break Outcome::DidNotEnd,
            "cancelled" | "failed" => {
                let reason = info["error-desc"].as_str().unwrap_or("QEMU reports no reason");
                break Outcome::Failed(format!("{status}: {reason}"));
            }
            _ => {}
        }
        if !cancelled && started.elapsed() > limit {
            source.ask("migrate_cancel", &json!({}))?;
            cancelled = true;
        }
        ensure!(started.elapsed() < limit + LIMIT, "the migration remains {status}");
        std::thread::sleep(LOOK);
    };
    Ok(Carried { outcome, info, larder_cpu_s: [0.0; 2] })
}

fn move_by_larder(bench: &Bench<'_>, receiver: larder::Side, source: &mut Vm, from: Side) -> anyhow::Result<Carried> {
    let arguments = bench.arguments;
    let mut receiver = receiver;
    let to = receiver.address().to_string();
    let (downtime, limit) = (arguments.downtime.to_string(), arguments.limit.to_string());
    let mut options = vec!["--insecure", "--keep", "--downtime", &downtime, "--timeout", &limit];
    options.extend(arguments.larder_words.iter().map(String::as_str));
    let command = whole_move_command(&bench.larder, source.external_qmp(), &to, &options);
    let mut mover = Process::start(prefix_command(&bench.link.enter(from), command))?;
    let mut info = json!({});
    let deadline = Instant::now() + Duration::from_secs(arguments.limit) + LIMIT;
    while !mover.has_ended() {
        look(source, &mut info)?;
        ensure!(Instant::now() < deadline, "larder does not exit:\n{}", mover.output());
        std::thread::sleep(LOOK);
    }
    look(source, &mut info)?;
    let source_s = end(&mut mover)?;
    let destination_s = end(&mut receiver.process)?;
    let output = mover.output();
    let result = verdict(&output).with_context(|| format!("unexpected output of larder:\n{output}"))?;
    let failed = result["failed"].as_str().unwrap_or_default();
    let outcome = match result["vm"].as_str() {
        None if result["moved"].is_object() => Outcome::Moved,
        Some("here") if failed.contains(TIMED_OUT) => Outcome::DidNotEnd,
        Some("here") => Outcome::Failed(failed.to_owned()),
        _ => bail!("unexpected output of larder:\n{output}\nat the destination:\n{}", receiver.process.output()),
    };
    Ok(Carried { outcome, info, larder_cpu_s: [source_s, destination_s] })
}

/// Waits for a process to exit. Returns its CPU seconds.
fn end(process: &mut Process) -> anyhow::Result<f64> {
    let deadline = Instant::now() + END_LIMIT;
    while !process.has_ended() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let seconds = cpu::of_process(process.id())?;
    if process.has_ended() {
        process.wait(END_LIMIT)?;
    } else {
        process.kill();
    }
    Ok(seconds)
}
