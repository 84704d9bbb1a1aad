//! `larder memory`: keeps a running VM's memory within a budget.

mod service;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use larder_block::ByteLen;
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_memory::service::DetachError;
use larder_vm::control::memory::{BudgetRange, MemoryPatch, MemoryState, SwapState, SwapTier};
use larder_vm::control::state::Latency;
use larder_vm::control::{
    ControlClientError, ControlServer, Subject, cancel_detach, detach_memory, fetch_memory, limit_memory,
};
use larder_vm::image::ImageAddress;
use larder_vm::memory::attach_retry::{QemuProcess, qmp_listener};
use larder_vm::memory::spec::MemorySpec;
use larder_vm::memory::{ManagedMemory, MemoryConfig, SwapConfig, log_end};
use larder_vm::vm::config::vm_file_path;
use larder_vm::vm::find::find_memory_control;
use rustix::process::Pid;

use crate::EXIT_NEGATIVE;
use crate::cli::Output;
use crate::cli::memory::{
    MemoryAttachArguments, MemoryCommand, MemoryDetachArguments, MemoryLimitArguments, MemoryStatusArguments,
    MemoryTargetArguments, Switch,
};
use crate::disk_image::{format_percent, format_size};
use crate::output::{Lines, print, print_stderr};
use crate::pid_file;
use crate::rates::is_not_served;
use crate::signals::Signals;

pub(crate) fn run(command: MemoryCommand) -> anyhow::Result<ExitCode> {
    match command {
        MemoryCommand::Attach(arguments) => attach(*arguments),
        MemoryCommand::Status(arguments) => status(&arguments),
        MemoryCommand::Limit(arguments) => limit(&arguments),
        MemoryCommand::Detach(arguments) => detach(&arguments),
    }
}

/// Error message if no option selects a process.
const NO_PROCESS_GIVEN: &str = "no process was selected: give --pid PID, --qmp PATH or --vm NAME";

fn parse_pid(number: u32) -> anyhow::Result<Pid> {
    let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
    pid.context("--pid: not a PID")
}

/// Returns the memory options of the command line.
fn spec_from_arguments(arguments: &MemoryAttachArguments) -> anyhow::Result<MemorySpec> {
    let disk = |address: &Option<ImageAddress>, size| {
        let address = address.clone()?;
        Some(SwapConfig { address, size })
    };
    let spec = MemorySpec {
        compressed: arguments.compressed,
        swap: disk(&arguments.swap_cache, arguments.swap_size),
        slow: disk(&arguments.slow_store, arguments.slow_size),
        quarantine: arguments.quarantine_ms.map(Duration::from_millis),
        prefetch: arguments.prefetch == Switch::On,
        encrypt: arguments.encrypt.map(|switch| switch == Switch::On),
        range: arguments.range.override_bounds(BudgetRange::default()),
        ..MemorySpec::new(arguments.budget.context("--budget is missing")?)
    };
    Ok(spec)
}

fn attach(arguments: MemoryAttachArguments) -> anyhow::Result<ExitCode> {
    if let Some(name) = &arguments.vm {
        return service::attach_vm(name, &arguments);
    }
    let spec = spec_from_arguments(&arguments)?;
    if spec.encrypt == Some(true) && spec.swap.is_none() && spec.slow.is_none() {
        bail!("--encrypt on: there is nothing to encrypt without --swap-cache or --slow-store");
    }
    if arguments.wait {
        spec.check()?;
        return service::attach_one(arguments, spec);
    }
    let (pid, started) = match (arguments.pid, &arguments.qmp) {
        (Some(pid), _) => (parse_pid(pid)?, None),
        (None, Some(path)) => match qmp_listener(path)? {
            Some(process) => (process.pid, Some(process.started())),
            None => bail!("{}: the process that listened there has just ended", path.display()),
        },
        (None, None) => bail!(NO_PROCESS_GIVEN),
    };
    let signals = crate::signals::block()?;
    let pidfile = arguments.pidfile.as_deref().map(pid_file::prepare).transpose()?;
    let config = MemoryConfig {
        started,
        poll_max: arguments.poll_us.map_or(POLL_MAX_DEFAULT, Duration::from_micros),
        ..spec.config(pid)
    };
    let managed = ManagedMemory::start(config)?;
    let handle = managed.handle();
    let started = arguments
        .control
        .as_deref()
        .map(|path| ControlServer::start(path, Arc::new(Subject::memory(handle.clone()))))
        .transpose()
        .map_err(anyhow::Error::from)
        .and_then(|control| Ok((control, pidfile.map(pid_file::PreparedPidFile::publish).transpose()?)));
    let (control, _pidfile) = match started {
        Ok(started) => started,
        Err(error) => {
            let _ = handle.detach_blocking();
            managed.wait()?;
            return Err(error);
        }
    };
    managed.summary().log(pid, spec.budget);
    detach_on_signals(signals, managed.handle())?;
    let end = managed.wait()?;
    if let Some(control) = control {
        control.shut_down_gracefully();
    }
    log_end(end);
    Ok(ExitCode::SUCCESS)
}

/// Signals within this time of the first one are ignored: a shell and `timeout` send one to a process and to its
/// group.
const DUPLICATE_SIGNAL_WINDOW: Duration = Duration::from_secs(1);

/// Detaches at the first signal, and cancels the detach at a later SIGINT. If this process is killed, the guest waits
/// for the next pager.
fn detach_on_signals(signals: Signals, memory: larder_vm::memory::MemoryHandle) -> anyhow::Result<()> {
    let thread = std::thread::Builder::new().name("larder-signals".to_owned());
    let detach_started: Arc<Mutex<Option<Instant>>> = Arc::default();
    thread.spawn(move || {
        loop {
            let signal = signals.wait();
            let since = *lock(&detach_started);
            match since {
                Some(since) if signal == libc::SIGINT && since.elapsed() >= DUPLICATE_SIGNAL_WINDOW => {
                    memory.cancel_detach_blocking();
                }
                Some(since) if since.elapsed() >= DUPLICATE_SIGNAL_WINDOW => tracing::warn!(
                    "a detach is already running (SIGINT cancels it); if this process is killed meanwhile, the guest blocks \
                     until larder memory attach is started again"
                ),
                Some(_) => {}
                None => {
                    *lock(&detach_started) = Some(Instant::now());
                    let (memory, detach_started) = (memory.clone(), Arc::clone(&detach_started));
                    // The detach runs in its own thread, so that further signals are handled meanwhile.
                    std::thread::spawn(move || {
                        let ended = memory.detach_blocking();
                        *lock(&detach_started) = None;
                        match ended {
                            Some(Err(DetachError::InProgress)) => tracing::warn!("a detach is already running"),
                            Some(Err(error)) => tracing::error!("not detached, and the memory is still managed: {error}"),
                            Some(Ok(())) | None => {}
                        }
                    });
                }
            }
        }
    })?;
    Ok(())
}

fn lock(began: &Mutex<Option<Instant>>) -> std::sync::MutexGuard<'_, Option<Instant>> {
    began.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Control socket of a pager, and the VM's name for the error message if no process listens there.
struct PagerTarget {
    control: PathBuf,
    vm: Option<String>,
}

impl PagerTarget {
    fn from_arguments(arguments: &MemoryTargetArguments) -> anyhow::Result<Self> {
        let MemoryTargetArguments { vm, control } = arguments;
        let argument = vm.as_ref().map(|argument| (argument, argument.to_string_lossy().into_owned()));
        Ok(match (control, argument) {
            (Some(path), _) => Self { control: path.clone(), vm: None },
            (None, Some((argument, text))) if text.contains('/') => Self { control: argument.into(), vm: None },
            (None, Some((argument, text))) => {
                // Checks that the word is a valid name of a VM.
                vm_file_path(Path::new(argument))?;
                Self { control: find_memory_control(&text), vm: Some(text) }
            }
            (None, None) => bail!("no memory was selected: give a virtual machine's NAME, or --control PATH"),
        })
    }

    fn explain(&self, error: ControlClientError) -> anyhow::Error {
        match &self.vm {
            Some(vm) if is_not_served(&error) => anyhow!(
                "the memory of {vm} is not managed: no process listens on {}; is its QEMU running, and `larder memory attach --vm \
                 {vm}` (systemctl status larder-memory@{vm})?",
                self.control.display()
            ),
            _ => error.into(),
        }
    }
}

fn status(arguments: &MemoryStatusArguments) -> anyhow::Result<ExitCode> {
    let at = PagerTarget::from_arguments(&arguments.at)?;
    let (json, state) = fetch_memory(&at.control).map_err(|error| at.explain(error))?;
    print(&match arguments.output {
        Output::Text => format_text(&state),
        Output::Json => format!("{json:#}\n"),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn limit(arguments: &MemoryLimitArguments) -> anyhow::Result<ExitCode> {
    let at = PagerTarget::from_arguments(&arguments.at)?;
    let range = match (arguments.budget_fixed, arguments.range.override_bounds(BudgetRange::default())) {
        (true, _) => Some(BudgetRange::default()),
        (false, none) if !none.is_set() => None,
        // Bounds that the command line does not give stay as they are.
        (false, _) => {
            let before = fetch_memory(&at.control).map_err(|error| at.explain(error))?;
            Some(arguments.range.override_bounds(before.1.range.unwrap_or_default()))
        }
    };
    let state = limit_memory(
        &at.control,
        MemoryPatch {
            budget: arguments.budget.map(ByteLen::get),
            compressed: arguments.compressed.map(ByteLen::get),
            range,
        },
    )
    .map_err(|error| at.explain(error))?;
    print(&format!(
        "budget {}, of which up to {} for compressed pages; {} in use{}\n",
        format_size(state.budget),
        format_size(state.compressed.limit),
        format_size(state.used),
        format_range(&state).map_or_else(String::new, |range| format!("; the budget moves: {range}"))
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn detach(arguments: &MemoryDetachArguments) -> anyhow::Result<ExitCode> {
    let at = PagerTarget::from_arguments(&arguments.at)?;
    if arguments.cancel {
        cancel_detach(&at.control).map_err(|error| at.explain(error))?;
        return wait_until_cancelled(&at, ExitCode::SUCCESS);
    }
    // Blocked before the detach begins, so that a signal from then on cancels it.
    let signals = crate::signals::block()?;
    let pid = fetch_memory(&at.control).map_err(|error| at.explain(error))?.1.pid;
    let process = Pid::from_raw(pid).and_then(QemuProcess::find_alive);
    let mut detached = detach_memory(&at.control)?.detached;
    let mut reported_problem = None;
    while !detached {
        let answer = fetch_memory(&at.control);
        let is_unanswered = answer.is_err();
        match answer {
            Ok((_, state)) if state.detaching => {
                if state.detach_problem != reported_problem {
                    if let Some(problem) = &state.detach_problem {
                        print_stderr(&format!("process {pid}: {problem}; Ctrl-C stops the detach"));
                    }
                    reported_problem = state.detach_problem;
                }
            }
            Ok(_) => return wait_until_cancelled(&at, ExitCode::from(EXIT_NEGATIVE)),
            Err(error) => {
                detached = is_detached(process.as_ref(), &error)?;
            }
        }
        if !detached && signals.wait_timeout(Duration::from_millis(100)).is_some() {
            // The pager may have exited just now; but if it did not answer before either, the error is reported.
            match cancel_detach(&at.control) {
                Err(error) if is_unanswered => return Err(at.explain(error)),
                _ => {}
            }
        }
    }
    print(&format!("process {pid} is no longer managed\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns true if the process is not managed any more. `error` is what its pager answered.
///
/// # Errors
/// The pager has exited, and its process waits for the next one.
fn is_detached(process: Option<&QemuProcess>, error: &ControlClientError) -> anyhow::Result<bool> {
    let Some(process) = process.filter(|process| process.is_alive()) else {
        return Ok(true);
    };
    let pid = process.pid.as_raw_pid();
    let is_managed = process.is_managed();
    match is_managed.with_context(|| format!("cannot determine whether process {pid} is still managed ({error})"))? {
        false => Ok(true),
        true if is_not_served(error) => bail!(
            "process {pid} was not detached from: its pager has ended, and the guest waits for the next one: start larder memory \
             attach"
        ),
        true => Ok(false),
    }
}

/// Waits until a cancelled detach has stopped, and reports the reason. Returns `code`, the command's exit status.
fn wait_until_cancelled(at: &PagerTarget, code: ExitCode) -> anyhow::Result<ExitCode> {
    loop {
        let state = fetch_memory(&at.control).map_err(|error| at.explain(error))?.1;
        if !state.detaching {
            let why = state.detach_problem.map_or_else(String::new, |why| format!(": {why}"));
            print(&format!("process {} is still managed{why}\n", state.pid))?;
            return Ok(code);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Formats the bounds of the budget; `None` if it may not be moved.
fn format_range(state: &MemoryState) -> Option<String> {
    let bounds = state.range?.bounds(state.size);
    let all = [("min", bounds.min), ("low", bounds.low), ("high", bounds.high), ("max", bounds.max)];
    Some(all.map(|(name, bytes)| format!("{name} {}", format_size(bytes))).join(", "))
}

/// Formats the whole state of managed memory, for people.
pub(crate) fn format_text(state: &MemoryState) -> String {
    let mut output = Lines::default();
    output.line("process", format!("{} ({})", state.process, state.pid));
    output.line("memory", format_size(state.size));
    output.line("resident", format!("{}{}", format_size(state.resident), format_percent(state.resident, state.size)));
    output.line(
        "budget",
        format!(
            "{}, used {}{}",
            format_size(state.budget),
            format_size(state.used),
            format_percent(state.used, state.budget)
        ),
    );
    if let Some(range) = format_range(state) {
        output.line("  bounds", range);
    }
    let compressed = &state.compressed;
    let ratio = state.compression_ratio().map_or_else(String::new, |ratio| format!(", {ratio:.2} to 1"));
    output.line(
        "compressed",
        format!(
            "{} in {} of at most {}{ratio}",
            format_size(compressed.pages * 4096),
            format_size(compressed.used),
            format_size(compressed.limit)
        ),
    );
    for disk in &state.disks {
        output.line(
            match disk.tier {
                SwapTier::SwapCache => "swap cache",
                SwapTier::SlowStore => "slow store",
            },
            format!(
                "{} in {} of at most {} ({}{}){}",
                format_size(disk.pages * 4096),
                format_size(disk.live),
                format_size(disk.limit),
                disk.name,
                if disk.encrypted { ", encrypted" } else { "" },
                match disk {
                    SwapState { failed: true, .. } => ", cannot be written to",
                    SwapState { unreachable: true, .. } => ", cannot be reached: faults on its pages wait",
                    _ => "",
                }
            ),
        );
        output.line(
            "  written",
            format!(
                "{} so far, {} a day",
                format_size(disk.written_bytes),
                format_size(per_day(disk.written_bytes, state.time_ns))
            ),
        );
    }
    output.line("uniform", format_size(state.uniform_pages * 4096));
    if state.lost_pages > 0 {
        output.line("lost", format!("{} pages", state.lost_pages));
    }
    output.line("evicted", format!("{} pages, {} refaults", state.evicted_pages, state.refaults));
    for (name, lost) in [("some", &state.pressure.some), ("full", &state.pressure.full)] {
        output.line(
            &format!("pressure, {name}"),
            format!(
                "{:.2} % of 10 s, {:.2} % of 60 s, {:.2} % of 300 s; {:.1?} in all",
                lost.avg10,
                lost.avg60,
                lost.avg300,
                Duration::from_micros(lost.total_us)
            ),
        );
    }
    let faults = [
        ("zero", &state.faults.zero),
        ("uniform", &state.faults.uniform),
        ("compressed", &state.faults.compressed),
        ("disk", &state.faults.disk),
        ("write", &state.faults.write),
    ];
    output.line("faults", "");
    for (name, latency) in faults {
        output.row(format!("{name:<12}{}", format_latency(latency)));
    }
    if state.stalled > 0 {
        output.line(
            "stalled",
            format!(
                "{} for a page that cannot be provided now",
                match state.stalled {
                    1 => "a thread waits".to_owned(),
                    threads => format!("{threads} threads wait"),
                }
            ),
        );
    }
    if let Some(problem) = state.problem {
        output.line("problem", format!("{}: the budget is exceeded", problem.description()));
    }
    if state.detaching {
        output.line("state", "detaching");
    }
    if let Some(why) = &state.detach_problem {
        output.line("detach", why);
    }
    output.into_text()
}

/// Returns the daily rate of bytes that were written in `time_ns` nanoseconds.
fn per_day(bytes: u64, time_ns: u64) -> u64 {
    (bytes as f64 * 86_400e9 / time_ns.max(1) as f64) as u64
}

fn format_latency(latency: &Latency) -> String {
    let micros = |share| match latency.quantile(share) {
        Some(time) => format!("{:.0} us", time.as_nanos() as f64 / 1000.0),
        None => "-".to_owned(),
    };
    format!("{:>10}, P50 {}, P99 {}", latency.count, micros(0.5), micros(0.99))
}
