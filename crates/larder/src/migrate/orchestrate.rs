//! `larder migrate VM --to HOST` and `larder migrate receive --qmp`: a complete move, with both QEMUs.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use larder_migrate::limits::Limits;
use larder_migrate::moving::destination::{DestinationMover, IncomingState};
use larder_migrate::moving::messages::ToSource;
use larder_migrate::moving::source::{self, CompletedMove, MoveError};
use larder_migrate::moving::watch::MigrationReport;
use larder_migrate::progress::SenderProgress;
use larder_migrate::receive::{self, ReceiveError};
use larder_vm::runtime_directory::migration_state_directory;
use larder_vm::vm::config::{QemuLocation, VmConfig, vm_file_path};
use serde_json::json;

use super::disks::LocalDiskServers;
use super::move_monitor::{MoveMonitor, MoveSource, cancel_by_flag, delivered_state, limits_state};
use super::{format_summary, ratio, sender_options, stop_flag_on_signal, to_json};
use crate::EXIT_NEGATIVE;
use crate::cli::Output;
use crate::cli::migrate::MoveArguments;
use crate::disk_image::format_size;
use crate::output::{Lines, print};

/// Time that a receiver keeps running while its source may not know where the VM runs. A receiver that is started
/// later also answers the source.
const SOURCE_QUERY_WAIT_MAX: Duration = Duration::from_secs(300);
/// The same time for a receiver that is started when the VM runs here already; shorter, because it occupies QEMU's
/// monitor.
const SOURCE_QUERY_WAIT_MAX_RESTARTED: Duration = Duration::from_secs(60);
/// Interval at which the stop flag is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval at which QEMU's state is checked.
const QEMU_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn run(arguments: &MoveArguments) -> anyhow::Result<ExitCode> {
    let qmp = qmp_path(arguments)?;
    let records = migration_state_directory().context("the record of the move cannot be saved")?;
    if arguments.take_back {
        return take_back(&qmp, &records, arguments.output);
    }
    let to = arguments.to.as_ref().context("--to is missing")?;
    let options = source::Options {
        qmp,
        records,
        servers: Arc::new(LocalDiskServers::default()),
        send: sender_options(to, &arguments.trust, &arguments.sending)?,
        multifd_channels: arguments.channels,
        postcopy: arguments.postcopy,
        throttle: arguments.throttle,
        keep_qemu: arguments.keep,
    };
    options.send.limits.update(|limits| {
        limits.downtime_ms = arguments.downtime;
        limits.timeout = arguments.timeout.map(Duration::from_secs);
    });
    let cancel = stop_flag_on_signal()?;
    let progress = Arc::new(SenderProgress::new());
    let move_source = MoveSource::Sent {
        progress: Arc::clone(&progress),
        limits: Arc::clone(&options.send.limits),
        controls_qemu: true,
    };
    let to = Some(options.send.to.as_str());
    let monitor = MoveMonitor::new(arguments.vm.as_deref(), &options.qmp, to, move_source, cancel_by_flag(&cancel));
    let control = monitor.listen(arguments.control.as_deref())?;
    let mut display = ProgressDisplay::default();
    let result = source::run(&options, &progress, &cancel, &mut |report| {
        monitor.update(report);
        display.show(report);
    });
    display.end();
    let failed = result.as_ref().err();
    monitor.finish(failed.map(ToString::to_string), Some(failed.map_or("there", vm_location)));
    let ended = report_result(result, &progress, &options.send.limits.get(), arguments.output);
    monitor.wait_for_watchers();
    drop(control);
    ended
}

/// Returns where the VM is after a failed move.
const fn vm_location(error: &MoveError) -> &'static str {
    match error {
        MoveError::Preflight(_) | MoveError::NotMoved { .. } | MoveError::Cancelled => "here",
        MoveError::OutcomeUnknown { .. } => "in doubt",
        MoveError::PostcopyBroken { .. } => "between",
        MoveError::VmLost { .. } | MoveError::ShutDown { .. } => "lost",
        MoveError::Qmp(_) | MoveError::Unresolved(_) | MoveError::OwnerUnknown(_) => "unknown",
    }
}

/// Reports the result of a move.
fn report_result(
    result: Result<CompletedMove, MoveError>,
    progress: &SenderProgress,
    limits: &Limits,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let limits = limits_state(limits, true);
    let error = match result {
        Ok(done) => {
            print(&match output {
                Output::Text => format_result(&done, progress),
                Output::Json => format!("{:#}\n", json!({"moved": done, "sent": to_json(progress), "limits": limits})),
            })?;
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => error,
    };
    if matches!(output, Output::Json) {
        print(&format!(
            "{:#}\n",
            json!({"failed": error.to_string(), "vm": vm_location(&error), "sent": to_json(progress), "limits": limits})
        ))?;
    }
    match error {
        // The command worked, and its answer is negative.
        MoveError::NotMoved { .. } | MoveError::Cancelled | MoveError::Preflight(_) => {
            crate::report(&error.into());
            Ok(ExitCode::from(EXIT_NEGATIVE))
        }
        error => Err(error.into()),
    }
}

fn take_back(qmp: &Path, records: &Path, output: Output) -> anyhow::Result<ExitCode> {
    match source::take_back(qmp, records, &LocalDiskServers::default()) {
        Ok(()) => {
            print(&match output {
                Output::Text => "the virtual machine continues here\n".to_owned(),
                Output::Json => format!("{:#}\n", json!({"vm": "here"})),
            })?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error @ MoveError::Preflight(_)) => {
            crate::report(&error.into());
            Ok(ExitCode::from(EXIT_NEGATIVE))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the path of the QMP socket of the VM's QEMU.
fn qmp_path(arguments: &MoveArguments) -> anyhow::Result<PathBuf> {
    if let Some(path) = &arguments.qmp {
        return Ok(path.clone());
    }
    let Some(name) = &arguments.vm else {
        bail!("no virtual machine was selected: give its name, or --qmp");
    };
    let path = vm_file_path(name)?;
    match VmConfig::read(&path)?.memory.map(|memory| memory.qemu) {
        Some(QemuLocation::Qmp(path)) => Ok(path),
        _ => bail!(
            "{}: it does not give qmp = \"/path/of/its/QMP/socket\" in [memory]; give --qmp instead of a name",
            path.display()
        ),
    }
}

/// Progress display: one line that is overwritten on a terminal, or successive lines elsewhere.
#[derive(Default)]
struct ProgressDisplay {
    last: Option<Instant>,
    has_open_line: bool,
    verdict: Option<String>,
}

impl ProgressDisplay {
    fn show(&mut self, report: &MigrationReport) {
        if report.verdict.is_some() && report.verdict != self.verdict {
            self.end();
            tracing::warn!("{}", report.verdict.as_deref().unwrap_or_default());
            self.verdict.clone_from(&report.verdict);
        }
        if report.total_bytes == 0 || self.last.is_some_and(|last| last.elapsed() < PROGRESS_INTERVAL) {
            return;
        }
        self.last = Some(Instant::now());
        let rate = |bytes: u64| format!("{}/s", format_size(bytes));
        let mut text = format!(
            "{:.0} s, round {}: {} of {} remaining; dirty rate {}; {} sent in {} ({:.1}x, {:.1} CPUs)",
            report.seconds,
            report.round,
            format_size(report.remaining_bytes),
            format_size(report.total_bytes),
            rate(report.dirty_bytes_per_s),
            rate(report.stream_bytes_per_s),
            rate(report.wire_bytes_per_s),
            ratio(&report.totals),
            report.processors,
        );
        // Estimates from the first second are unreliable.
        if let Some(seconds) = report.expected_seconds.filter(|_| report.seconds >= 1.0) {
            text = format!("{text}; {seconds:.0} s left");
        }
        let mut stderr = std::io::stderr().lock();
        // A failed write to stderr must not fail the move.
        let _ = if stderr.is_terminal() {
            self.has_open_line = true;
            write!(stderr, "\r\x1b[K{text}").and_then(|()| stderr.flush())
        } else {
            writeln!(stderr, "{text}")
        };
    }

    fn end(&mut self) {
        if std::mem::take(&mut self.has_open_line) {
            let _ = writeln!(std::io::stderr());
        }
    }
}

fn format_result(done: &CompletedMove, progress: &SenderProgress) -> String {
    let mut lines = Lines::default();
    lines.line("moved", format!("in {:.1} s, {} rounds", done.seconds, done.rounds));
    if let Some(downtime) = done.downtime_ms {
        lines.line("paused for", format!("{downtime} ms"));
    }
    if done.postcopy {
        lines.line("by", "post-copy");
    }
    format!("{}{}", lines.into_text(), format_summary(progress))
}

/// Receives one VM, over as many sessions as its source needs.
pub(super) fn receive(
    port: &receive::Port,
    options: &receive::Options,
    stop: &AtomicBool,
    destination: &DestinationMover,
    output: Output,
) -> anyhow::Result<ExitCode> {
    // Time since which the VM's fate is decided here, though the source may not know it.
    let mut decided_since = None;
    let mut query_wait_max = SOURCE_QUERY_WAIT_MAX;
    if destination.state() == (IncomingState::Running { has_all_memory: true }) {
        decided_since = Some(Instant::now());
        query_wait_max = SOURCE_QUERY_WAIT_MAX_RESTARTED;
        tracing::warn!(
            "the QEMU here has the virtual machine of an earlier move, and accepts no other: waiting {} s for that move's \
             source, in case it does not know that the virtual machine runs here; for another move start a new QEMU with '-incoming defer'",
            query_wait_max.as_secs()
        );
    }
    let (state, result) = loop {
        let deadline = decided_since.map(|since| since + query_wait_max);
        let result = run_session(port, options, stop, destination, deadline);
        let state = destination.state();
        let source_may_ask = match state {
            IncomingState::Running { has_all_memory: true } => true,
            IncomingState::NeverRan { .. } => {
                destination.is_loaded() || matches!(destination.last_answer(), Some(ToSource::NotRunning { .. }))
            }
            IncomingState::Exited => break (state, result),
            IncomingState::Waiting | IncomingState::Incoming | IncomingState::Running { has_all_memory: false } => {
                decided_since = None;
                if stop.load(Ordering::Relaxed) {
                    break (state, result);
                }
                if let Err(error) = result {
                    tracing::warn!("{error}; waiting for the source to reconnect");
                }
                continue;
            }
        };
        let since = *decided_since.get_or_insert_with(Instant::now);
        if result.is_ok() || !source_may_ask || since.elapsed() > query_wait_max || stop.load(Ordering::Relaxed) {
            break (state, result);
        }
        tracing::warn!(
            "the virtual machine {} here, and its source may not know that: waiting {} s for it to ask",
            if state == (IncomingState::Running { has_all_memory: true }) { "runs" } else { "does not run" },
            query_wait_max.as_secs()
        );
    };
    let qemu = "the QEMU here was not changed";
    match state {
        IncomingState::Running { has_all_memory: true } => {}
        IncomingState::Running { has_all_memory: false } => {
            bail!("stopped in the middle of post-copy; {qemu}, and waits for memory: restart this command at once")
        }
        IncomingState::Exited => bail!("the virtual machine was started here, and its QEMU has ended since"),
        IncomingState::NeverRan { reason } => {
            let why = result.err().map_or_else(String::new, |error| format!(" ({error})"));
            port.refuse_next(
                "the QEMU there had begun to receive the VM when the previous receiver was lost, and cannot be used for another \
                 move: start a new one, and a receiver for it, and run the same command again",
            );
            bail!("the virtual machine did not arrive{why}; its source has it, if its QEMU still runs: {reason}");
        }
        IncomingState::Waiting => bail!("stopped; {qemu}, and waits for a virtual machine"),
        IncomingState::Incoming => bail!(
            "stopped; {qemu}, and has or had an incoming virtual machine: its source resumes it, or, if all of it has arrived, \
            asks for it until this command is restarted"
        ),
    }
    let delivered = delivered_state(&options.progress.delivered());
    print(&match output {
        Output::Text if delivered.wire_bytes == 0 => {
            "the virtual machine ran here already, and nothing was received\n".to_owned()
        }
        Output::Text => format!("the virtual machine runs here; {} received\n", format_size(delivered.wire_bytes)),
        Output::Json => {
            let mut object = json!(delivered);
            object["running"] = true.into();
            format!("{object:#}\n")
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Waits for a source, and receives its stream, until the session ends, the user stops it, or waiting has no point
/// any more.
fn run_session(
    port: &receive::Port,
    options: &receive::Options,
    stop: &AtomicBool,
    destination: &DestinationMover,
    give_up: Option<Instant>,
) -> Result<receive::Delivered, ReceiveError> {
    let (ended, stop_session) = (AtomicBool::new(false), AtomicBool::new(false));
    let is_pointless = || match give_up {
        Some(give_up) => Instant::now() > give_up,
        // No other code would detect that QEMU has exited.
        None => matches!(destination.try_state(), Some(IncomingState::NeverRan { .. } | IncomingState::Exited)),
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut last_poll = Instant::now();
            while !ended.load(Ordering::Relaxed) {
                let is_time = last_poll.elapsed() > QEMU_POLL_INTERVAL && !destination.is_in_session();
                if is_time {
                    last_poll = Instant::now();
                }
                if stop.load(Ordering::Relaxed) || is_time && is_pointless() {
                    stop_session.store(true, Ordering::Relaxed);
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        });
        let agent = |notes| destination.answer_notes(&notes);
        let result = receive::receive(port, options, &stop_session, Some(&agent));
        ended.store(true, Ordering::Relaxed);
        result
    })
}
