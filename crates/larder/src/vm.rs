//! `larder vm`.

use std::collections::HashSet;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use larder_block::{Loop, printable};
use larder_vm::control;
use larder_vm::control::ControlClientError;
use larder_vm::control::state::ServerState;
use larder_vm::disk::DiskError;
use larder_vm::image::{ChainPolicy, named_chain};
use larder_vm::inherited::Inherited;
use larder_vm::latch::Latch;
use larder_vm::opener;
use larder_vm::run::check::{advice, check_disks, check_served};
use larder_vm::run::plan::OptionSource;
use larder_vm::run::shell::command_line;
use larder_vm::vm::config::{VmConfig, VmDisk, vm_file_path};
use larder_vm::vm::inactive_marker::InactiveMarker;
use larder_vm::vm::problems::find_problems;
use larder_vm::vm::{MoveStep, Vm, VmError, VmHandle, VmProgress, check_socket_paths};

use crate::cli::VmArguments;
use crate::output::{print, print_stderr};
use crate::rates::is_not_served;
use crate::status::not_served;
use crate::systemd_notify::{Notifier, ServiceState, connect_manager};
use crate::vm_pin::pin;
use crate::{EXIT_ERROR, EXIT_NEGATIVE, report, signals};

pub(crate) fn run(arguments: VmArguments) -> anyhow::Result<ExitCode> {
    let path = vm_file_path(&arguments.name)?;
    if arguments.check {
        return check_config(&VmConfig::read(&path)?, &path, &arguments);
    }
    if arguments.pin {
        return pin(&path);
    }
    if arguments.reload {
        return reload(&VmConfig::read(&path)?, &path);
    }
    if arguments.take || arguments.expect {
        return move_manually(&path, &VmConfig::read(&path)?, arguments.take);
    }
    let inherited = inherited_sockets()?;
    if let Err(error) = ensure_opener(&arguments, &path) {
        return Ok(report_start_failure(&error, false));
    }
    let config = match VmConfig::read(&path) {
        Ok(config) => config,
        Err(error) => return Ok(report_start_failure(&error.into(), !inherited.has_connections())),
    };
    if config.disks.is_empty() {
        return Ok(report_start_failure(&VmError::no_disk(&path).into(), true));
    }
    // Signals are blocked first: a thread that was started before would receive them.
    let signals = signals::block()?;
    // Connected early, because a confined process cannot create sockets.
    let notifier = Notifier::new()?;
    let (cancel, reload) = (Latch::default(), Latch::default());
    let handle = Arc::new(OnceLock::<VmHandle>::new());
    let (cancel_start, stop_handle) = (cancel.clone(), Arc::clone(&handle));
    let (reload_requested, reload_handle) = (reload.clone(), Arc::clone(&handle));
    signals.on_stop_or(
        libc::SIGHUP,
        move || {
            // In this order, at least one of the two threads sees the other's update, so no reload is lost.
            reload_requested.set(());
            if let Some(handle) = reload_handle.get() {
                handle.reload();
            }
        },
        move || {
            cancel_start.set(());
            if let Some(handle) = stop_handle.get() {
                handle.stop();
            }
        },
    )?;
    let started = Vm::start(&path, config.clone(), inherited, arguments.confine, arguments.incoming, &cancel);
    let vm = match started {
        Ok(vm) => vm,
        Err(_) if cancel.get().is_some() => return Ok(ExitCode::SUCCESS),
        Err(error) => return Ok(report_start_failure(&with_advice(error, &config, &path), false)),
    };
    for (name, places) in vm.disk_addresses() {
        tracing::info!(
            disk = name,
            vhost_user_blk = places.vhost_user.as_ref().map(tracing::field::display),
            nbd = places.nbd.as_ref().map(tracing::field::display),
            "serving"
        );
    }
    tracing::info!(vm = config.name, control = %command_line(&[config.control.clone().into()]), "ready");
    if vm.is_inactive() {
        tracing::info!(
            "another host has its disks, or had them last: they are opened when the VM arrives from there (larder migrate), or \
             by `larder vm {} --take`, if no other host has them",
            command_argument(&config, &path)
        );
    }
    let handle = handle.get_or_init(|| vm.handle());
    // Signals may have come before `handle` was set.
    if reload.get().is_some() {
        handle.reload();
    }
    if cancel.get().is_some() {
        handle.stop();
    }
    let ended = vm.run(|progress| notifier.notify(service_state(progress)));
    notifier.finish();
    ended?;
    Ok(ExitCode::SUCCESS)
}

/// Connects this process to an opener for its files, if it will be confined.
fn ensure_opener(arguments: &VmArguments, path: &Path) -> anyhow::Result<()> {
    match (&arguments.opener, arguments.confine) {
        (_, false) => Ok(()),
        (None, true) => opener::start(path).context("the process that opens files for this server cannot be started"),
        (Some(socket), true) => opener::connect(socket).with_context(|| {
            format!(
                "{}: cannot connect to the opener that opens files for services; is larder-open.socket started?",
                socket.display()
            )
        }),
    }
}

/// Exit status if the file is invalid and no client waits for its disks: `EX_CONFIG` of sysexits(3), after which
/// systemd does not restart `larder@.service`.
const EXIT_CONFIG: u8 = 78;

/// Delay before a service that cannot start exits. systemd restarts the service at once, which a guest needs after a
/// kill; the delay limits how often that repeats.
const RESTART_DELAY: Duration = Duration::from_secs(3);

pub(crate) fn report_start_failure(error: &anyhow::Error, is_permanent: bool) -> ExitCode {
    report(error);
    match (std::env::var_os("NOTIFY_SOCKET"), is_permanent) {
        (None, _) => ExitCode::from(EXIT_ERROR),
        (Some(_), true) => ExitCode::from(EXIT_CONFIG),
        (Some(_), false) => {
            std::thread::sleep(RESTART_DELAY);
            ExitCode::from(EXIT_ERROR)
        }
    }
}

/// Interval between two attempts of a step that is not done yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Returns the VM's name, if it stands for the file at `path`, or else that path, as the argument of a command.
fn command_argument(config: &VmConfig, path: &Path) -> String {
    match vm_file_path(Path::new(&config.name)) {
        Ok(default_path) if default_path == path => config.name.clone(),
        _ => command_line(&[path.into()]),
    }
}

/// Checks that a server serves the VM that the file at `path` describes. Another VM's file may have the same name, or
/// name the same control socket.
fn check_serves_file(server: &ServerState, config: &VmConfig, path: &Path) -> anyhow::Result<()> {
    let path = std::path::absolute(path)?;
    let is_same = server.file.as_ref().is_some_and(|file| {
        let whole = |path: &Path| path.canonicalize().ok();
        *file == path.display().to_string() || whole(Path::new(file)).is_some_and(|file| Some(file) == whole(&path))
    });
    if is_same {
        return Ok(());
    }
    let served_vm = match &server.file {
        Some(file) => format!("the VM of {}", printable(file)),
        None => "no VM's file".to_owned(),
    };
    bail!(
        "the server that listens on {} serves {served_vm}, not that of {}; two VMs need files of different names, and sockets of their own",
        config.control.display(),
        path.display()
    )
}

/// Has the running server reread the VM's file, and prints the result.
fn reload(config: &VmConfig, path: &Path) -> anyhow::Result<ExitCode> {
    let server = control::fetch_server(&config.control).map_err(|error| {
        let called = command_argument(config, path);
        match is_not_served(&error) {
            true if called == config.name => {
                anyhow!("{}; a server reads its file when it starts", not_served(&config.name, &config.control))
            }
            true => anyhow!(
                "{called} is not served: no process listens on {}; `larder vm {called}` serves it",
                config.control.display()
            ),
            false => error.into(),
        }
    })?;
    check_serves_file(&server, config, path)?;
    let (_, done) = control::reload(&config.control)?;
    let mut text = String::new();
    let parts = [("changed", &done.changed), ("pending", &done.left), ("failed", &done.failed)];
    for (how, all) in parts {
        for what in all {
            text.push_str(&format!("{how:8}{what}\n"));
        }
    }
    if text.is_empty() {
        text = format!("{}: already as configured in its file\n", config.name);
    }
    print(&text)?;
    Ok(match (done.failed.is_empty(), done.left.is_empty()) {
        (false, _) => ExitCode::from(EXIT_ERROR),
        (true, false) => ExitCode::from(EXIT_NEGATIVE),
        (true, true) => ExitCode::SUCCESS,
    })
}

/// Moves the disks without movers: opens them on this host, or closes them until the VM arrives from another host.
fn move_manually(path: &Path, config: &VmConfig, take: bool) -> anyhow::Result<ExitCode> {
    let step = if take { MoveStep::Keep } else { MoveStep::Expect };
    if let Ok(server) = control::fetch_server(&config.control) {
        check_serves_file(&server, config, path)?;
    }
    let is_served = match move_until_done(&config.control, step) {
        Ok(()) => true,
        Err(error) if is_not_served(&error) => false,
        Err(error) => return Err(error.into()),
    };
    let marker = InactiveMarker::for_vm(path);
    let name = &config.name;
    if !is_served && take {
        marker.remove()?;
    } else if !is_served {
        marker.create("the VM is incoming from another host")?;
    }
    print(&match (take, is_served) {
        (true, true) => format!("{name}: its disks are open here\n"),
        (true, false) => format!("{name}: its server opens its disks when it is started\n"),
        (false, true) => format!("{name}: its disks are closed here until its VM arrives\n"),
        (false, false) => format!("{name}: its server will wait for its VM to arrive\n"),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Repeats a step until it is done.
fn move_until_done(control: &Path, step: MoveStep) -> Result<(), ControlClientError> {
    while !control::request_move_step(control, step)?.done {
        std::thread::sleep(RETRY_INTERVAL);
    }
    Ok(())
}

fn disks(count: usize) -> String {
    match count {
        1 => "1 disk".to_owned(),
        count => format!("{count} disks"),
    }
}

/// Checks whether all disks could be served. Disks that the VM's server already serves are in use: they are checked
/// without locks, as far as that is possible.
fn check_config(config: &VmConfig, path: &Path, arguments: &VmArguments) -> anyhow::Result<ExitCode> {
    check_socket_paths(config, &Inherited::default())?;
    let server = control::fetch_server(&config.control).ok();
    let server_check = server.map(|server| check_serves_file(&server, config, path));
    let images = match server_check {
        Some(Ok(())) => served_images(&config.control),
        _ => HashSet::new(),
    };
    let server_check = server_check.and_then(Result::err).map(|error| error.to_string());
    let is_served = |disk: &VmDisk| images.contains(&disk.spec.image.to_string());
    let (served, others): (Vec<&VmDisk>, Vec<&VmDisk>) = config.disks.iter().partition(|disk| is_served(disk));
    let served: Vec<_> = served.iter().map(|disk| &disk.spec).collect();
    let others: Vec<_> = others.iter().map(|disk| (&disk.spec, OptionSource::File)).collect();
    // A confined server's opener opens neither the memory's disks nor files that are yet to be added.
    let of_vm = find_problems(config, &is_served);
    let lines = missing_chain_lines(config, path);
    ensure_opener(arguments, path)?;
    let found = [check_served(&served), check_disks(&others)];
    let of_images = found.iter().flat_map(|found| &found.problems).map(ToString::to_string);
    let problems: Vec<String> = of_images.chain(of_vm).chain(server_check).collect();
    for problem in &problems {
        print_stderr(problem);
    }
    if !problems.is_empty() {
        print(&lines)?;
        return Ok(ExitCode::from(EXIT_ERROR));
    }
    let mut text = String::new();
    if !config.disks.is_empty() {
        text = format!("{}: {} can be served", config.name, disks(config.disks.len()));
        text.push_str(match served.len() {
            0 => "\n",
            count if count == config.disks.len() => ", and served already\n",
            _ => ", and some are already\n",
        });
    }
    if let Some(memory) = &config.memory {
        let budget = memory.spec.budget;
        text.push_str(&format!("{}: its memory can be managed, within {budget}\n", config.name));
    }
    for image in found.iter().flat_map(|found| &found.unchecked) {
        text.push_str(&format!(
            "{}: not all of {image} was checked, because NBD servers are not contacted here\n",
            config.name
        ));
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the lines that would have the VM's file allow the other files of its disks, where it does not yet.
fn missing_chain_lines(config: &VmConfig, path: &Path) -> String {
    let Ok(on) = Loop::new(Duration::ZERO) else {
        return String::new();
    };
    let mut text = String::new();
    for disk in &config.disks {
        let (ChainPolicy::Pinned { chain, .. }, Some(format)) = (&disk.spec.chain, disk.spec.format) else {
            continue;
        };
        // The reason why a file cannot be read is among the problems already.
        let Ok(named) = on.block_on(named_chain(&on, &disk.spec.image, format)) else {
            continue;
        };
        if !named.is_allowed_by(chain) {
            text.push_str(&format!(
                "disk {}: the headers of its images name these files; if they are the right ones, add them to {}:\n{}\n",
                disk.name,
                path.display(),
                named.lines()
            ));
        }
    }
    text
}

/// Returns the images that the server with this control socket serves.
fn served_images(control: &Path) -> HashSet<String> {
    let disks = control::fetch_disks(control).map_or_else(|_| Vec::new(), |(_, disks)| disks.disks);
    disks.into_iter().map(|disk| disk.image).collect()
}

/// Returns the sockets that systemd, or another service manager, has passed to this process.
fn inherited_sockets() -> anyhow::Result<Inherited> {
    let named = sd_notify::listen_fds_with_names().context("$LISTEN_FDS")?;
    let files = named.map(|(number, name)| {
        // SAFETY: $LISTEN_PID names this process, so the descriptors were passed to it; no other code here takes
        // them.
        (name, unsafe { OwnedFd::from_raw_fd(number) })
    });
    Inherited::new(files.collect(), connect_manager()).context("an inherited socket ($LISTEN_FDS)")
}

fn service_state(progress: VmProgress) -> ServiceState {
    match progress {
        VmProgress::Ready(count) => ServiceState::Ready(format!("serving {}", disks(count))),
        VmProgress::Reloading => ServiceState::Reloading,
        VmProgress::Stopping => ServiceState::Stopping,
    }
}

/// Adds advice for the user to an error.
fn with_advice(error: VmError, config: &VmConfig, path: &Path) -> anyhow::Error {
    match &error {
        VmError::Disk { disk, source: DiskError::Image(source) } => {
            let vm_disk = config.disks.iter().find(|it| it.name == *disk);
            // The advice names keys of the VM's file.
            let advice = vm_disk.map_or("", |it| advice(source, &it.spec, OptionSource::File));
            anyhow!("{error}{advice}")
        }
        VmError::Control(_) => match control::fetch_server(&config.control) {
            Ok(server) if server.vm.is_some() => match check_serves_file(&server, config, path) {
                Ok(()) => anyhow!(
                    "{} is served already, by process {}; `larder vm {} --reload` makes it reload its file",
                    config.name,
                    server.pid,
                    command_argument(config, path)
                ),
                Err(other) => other,
            },
            _ => error.into(),
        },
        _ => error.into(),
    }
}
