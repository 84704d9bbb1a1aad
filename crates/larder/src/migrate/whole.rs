//! `larder migrate VM --to HOST` and `larder migrate receive --qmp`: a complete move, with both QEMUs.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use larder_migrate::limits::Limits;
use larder_migrate::moving::destination::{Destination, State};
use larder_migrate::moving::messages::ToSource;
use larder_migrate::moving::source::{self, Done, MoveError};
use larder_migrate::moving::watch::Report;
use larder_migrate::progress::Progress;
use larder_migrate::receive::{self, ReceiveError};
use larder_vm::runtime_folder::migration_folder;
use larder_vm::vm::config::{QemuAt, VmConfig, path_of};
use serde_json::json;

use super::disks::LocalServers;
use super::watched::{Moved, Watched, by, delivered_state, limits_state};
use super::{json_of, ratio, sending, stop_by_signal, summary};
use crate::EXIT_NEGATIVE;
use crate::cli::Output;
use crate::cli::migrate::MoveArguments;
use crate::disk_image::human;
use crate::output::{Lines, print};

/// Time that a receiver keeps running while its source may not know where the VM runs. A receiver that is started
/// later also answers the source.
const ASKED_MAX: Duration = Duration::from_secs(300);
/// The same time for a receiver that is started when the VM runs here already; shorter, because it occupies QEMU's
/// monitor.
const ASKED_AGAIN_MAX: Duration = Duration::from_secs(60);
/// Interval at which the stop flag is checked.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Interval at which QEMU's state is checked.
const LOOK_AT_QEMU_EVERY: Duration = Duration::from_secs(1);
/// Interval between two progress lines.
const SHOW_EVERY: Duration = Duration::from_secs(1);

pub(super) fn run(arguments: &MoveArguments) -> anyhow::Result<ExitCode> {
    let qmp = qmp_of(arguments)?;
    let records = migration_folder().context("the record of the move cannot be saved")?;
    if arguments.take_back {
        return take_back(&qmp, &records, arguments.output);
    }
    let to = arguments.to.as_ref().context("--to is missing")?;
    let options = source::Options {
        qmp,
        records,
        servers: Arc::new(LocalServers::default()),
        send: sending(to, &arguments.trust, &arguments.sending)?,
        multifd_channels: arguments.channels,
        postcopy: arguments.postcopy,
        throttle: arguments.throttle,
        keep: arguments.keep,
    };
    options.send.limits.change(|limits| {
        limits.downtime_ms = arguments.downtime;
        limits.timeout = arguments.timeout.map(Duration::from_secs);
    });
    let cancel = stop_by_signal()?;
    let progress = Arc::new(Progress::new());
    let moved = Moved::Sent {
        progress: Arc::clone(&progress),
        limits: Arc::clone(&options.send.limits),
        whole: true,
    };
    let to = Some(options.send.to.as_str());
    let watched = Watched::new(arguments.vm.as_deref(), &options.qmp, to, moved, by(&cancel));
    let control = watched.listen(arguments.control.as_deref())?;
    let mut shown = Shown::default();
    let result = source::run(&options, &progress, &cancel, &mut |report| {
        watched.see(report);
        shown.show(report);
    });
    shown.end();
    let failed = result.as_ref().err();
    watched.is_over(failed.map(ToString::to_string), Some(failed.map_or("there", place)));
    let ended = tell(result, &progress, &options.send.limits.now(), arguments.output);
    watched.is_heard();
    drop(control);
    ended
}

/// Returns where the VM is after a failed move.
const fn place(error: &MoveError) -> &'static str {
    match error {
        MoveError::Preflight(_) | MoveError::Here { .. } | MoveError::Cancelled => "here",
        MoveError::InDoubt { .. } => "in doubt",
        MoveError::Broken { .. } => "between",
        MoveError::Lost { .. } | MoveError::ShutDown { .. } => "lost",
        MoveError::Qmp(_) | MoveError::Unsettled(_) | MoveError::Unclear(_) => "unknown",
    }
}

/// Reports the result of a move.
fn tell(
    result: Result<Done, MoveError>,
    progress: &Progress,
    limits: &Limits,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let limits = limits_state(limits, true);
    let error = match result {
        Ok(done) => {
            print(&match output {
                Output::Text => told(&done, progress),
                Output::Json => format!(
                    "{:#}\n",
                    json!({"moved": done, "sent": json_of(progress), "limits": limits})
                ),
            })?;
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => error,
    };
    if matches!(output, Output::Json) {
        print(&format!(
            "{:#}\n",
            json!({"failed": error.to_string(), "vm": place(&error), "sent": json_of(progress), "limits": limits})
        ))?;
    }
    match error {
        // The command worked, and its answer is negative.
        MoveError::Here { .. } | MoveError::Cancelled | MoveError::Preflight(_) => {
            crate::report(&error.into());
            Ok(ExitCode::from(EXIT_NEGATIVE))
        }
        error => Err(error.into()),
    }
}

fn take_back(qmp: &Path, records: &Path, output: Output) -> anyhow::Result<ExitCode> {
    match source::take_back(qmp, records, &LocalServers::default()) {
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
fn qmp_of(arguments: &MoveArguments) -> anyhow::Result<PathBuf> {
    if let Some(path) = &arguments.qmp {
        return Ok(path.clone());
    }
    let Some(name) = &arguments.vm else {
        bail!("no virtual machine was selected: give its name, or --qmp");
    };
    let path = path_of(name)?;
    match VmConfig::read(&path)?.memory.map(|memory| memory.qemu) {
        Some(QemuAt::Qmp(path)) => Ok(path),
        _ => bail!(
            "{}: it does not give qmp = \"/path/of/its/QMP/socket\" in [memory]; give --qmp instead of a name",
            path.display()
        ),
    }
}

/// Progress display: one line that is overwritten on a terminal, or successive lines elsewhere.
#[derive(Default)]
struct Shown {
    last: Option<Instant>,
    open_line: bool,
    verdict: Option<String>,
}

impl Shown {
    fn show(&mut self, report: &Report) {
        if report.verdict.is_some() && report.verdict != self.verdict {
            self.end();
            tracing::warn!("{}", report.verdict.as_deref().unwrap_or_default());
            self.verdict.clone_from(&report.verdict);
        }
        if report.total_bytes == 0 || self.last.is_some_and(|last| last.elapsed() < SHOW_EVERY) {
            return;
        }
        self.last = Some(Instant::now());
        let rate = |bytes: u64| format!("{}/s", human(bytes));
        let mut text = format!(
            "{:.0} s, round {}: {} of {} remaining; dirty rate {}; {} sent in {} ({:.1}x, {:.1} CPUs)",
            report.seconds,
            report.round,
            human(report.remaining_bytes),
            human(report.total_bytes),
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
            self.open_line = true;
            write!(stderr, "\r\x1b[K{text}").and_then(|()| stderr.flush())
        } else {
            writeln!(stderr, "{text}")
        };
    }

    fn end(&mut self) {
        if std::mem::take(&mut self.open_line) {
            let _ = writeln!(std::io::stderr());
        }
    }
}

fn told(done: &Done, progress: &Progress) -> String {
    let mut lines = Lines::default();
    lines.line("moved", format!("in {:.1} s, {} rounds", done.seconds, done.rounds));
    if let Some(downtime) = done.downtime_ms {
        lines.line("paused for", format!("{downtime} ms"));
    }
    if done.postcopy {
        lines.line("by", "post-copy");
    }
    format!("{}{}", lines.into_text(), summary(progress))
}

/// Receives one VM, over as many sessions as its source needs.
pub(super) fn receive(
    port: &receive::Port,
    options: &receive::Options,
    stop: &AtomicBool,
    destination: &Destination,
    output: Output,
) -> anyhow::Result<ExitCode> {
    // Time since which the VM's fate is decided here, though the source may not know it.
    let mut settled = None;
    let mut asked_max = ASKED_MAX;
    if destination.look_now() == (State::Running { whole: true }) {
        settled = Some(Instant::now());
        asked_max = ASKED_AGAIN_MAX;
        tracing::warn!(
            "the QEMU here has the virtual machine of an earlier move, and accepts no other: waiting {} s for that move's \
             source, in case it does not know that the virtual machine runs here; for another move start a new QEMU with '-incoming defer'",
            asked_max.as_secs()
        );
    }
    let (state, result) = loop {
        let give_up = settled.map(|since| since + asked_max);
        let result = one_session(port, options, stop, destination, give_up);
        let state = destination.look_now();
        let may_ask = match state {
            State::Running { whole: true } => true,
            State::Never { .. } => {
                destination.was_loaded() || matches!(destination.told(), Some(ToSource::NotRunning { .. }))
            }
            State::Ended => break (state, result),
            State::Waiting | State::Coming | State::Running { whole: false } => {
                settled = None;
                if stop.load(Ordering::Relaxed) {
                    break (state, result);
                }
                if let Err(error) = result {
                    tracing::warn!("{error}; waiting for the source to reconnect");
                }
                continue;
            }
        };
        let since = *settled.get_or_insert_with(Instant::now);
        if result.is_ok() || !may_ask || since.elapsed() > asked_max || stop.load(Ordering::Relaxed) {
            break (state, result);
        }
        tracing::warn!(
            "the virtual machine {} here, and its source may not know that: waiting {} s for it to ask",
            if state == (State::Running { whole: true }) {
                "runs"
            } else {
                "does not run"
            },
            asked_max.as_secs()
        );
    };
    let qemu = "the QEMU here was not changed";
    match state {
        State::Running { whole: true } => {}
        State::Running { whole: false } => {
            bail!("stopped in the middle of post-copy; {qemu}, and waits for memory: restart this command at once")
        }
        State::Ended => bail!("the virtual machine was started here, and its QEMU has ended since"),
        State::Never { reason } => {
            let why = result.err().map_or_else(String::new, |error| format!(" ({error})"));
            port.refuse_next(
                "the QEMU there had begun to receive the VM when the previous receiver was lost, and cannot be used for another \
                 move: start a new one, and a receiver for it, and run the same command again",
            );
            bail!("the virtual machine did not arrive{why}; its source has it, if its QEMU still runs: {reason}");
        }
        State::Waiting => bail!("stopped; {qemu}, and waits for a virtual machine"),
        State::Coming => bail!(
            "stopped; {qemu}, and has or had an incoming virtual machine: its source resumes it, or, if all of it has arrived, \
            asks for it until this command is restarted"
        ),
    }
    let delivered = delivered_state(&options.watched.delivered());
    print(&match output {
        Output::Text if delivered.wire_bytes == 0 => {
            "the virtual machine ran here already, and nothing was received\n".to_owned()
        }
        Output::Text => format!(
            "the virtual machine runs here; {} received\n",
            human(delivered.wire_bytes)
        ),
        Output::Json => {
            let mut told = json!(delivered);
            told["running"] = true.into();
            format!("{told:#}\n")
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Waits for a source, and receives its stream, until the session ends, the user stops it, or waiting has no point
/// any more.
fn one_session(
    port: &receive::Port,
    options: &receive::Options,
    stop: &AtomicBool,
    destination: &Destination,
    give_up: Option<Instant>,
) -> Result<receive::Delivered, ReceiveError> {
    let (ended, stop_session) = (AtomicBool::new(false), AtomicBool::new(false));
    let is_in_vain = || match give_up {
        Some(give_up) => Instant::now() > give_up,
        // No other code would detect that QEMU has exited.
        None => matches!(destination.look(), Some(State::Never { .. } | State::Ended)),
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut looked = Instant::now();
            while !ended.load(Ordering::Relaxed) {
                let is_time = looked.elapsed() > LOOK_AT_QEMU_EVERY && !destination.is_in_session();
                if is_time {
                    looked = Instant::now();
                }
                if stop.load(Ordering::Relaxed) || is_time && is_in_vain() {
                    stop_session.store(true, Ordering::Relaxed);
                }
                std::thread::sleep(LOOK_EVERY);
            }
        });
        let agent = |notes| destination.answer(&notes);
        let result = receive::receive(port, options, &stop_session, Some(&agent));
        ended.store(true, Ordering::Relaxed);
        result
    })
}
