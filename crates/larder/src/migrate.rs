//! `larder migrate`: moves a running VM to another host.

pub(crate) mod control_target;
mod disks;
mod fault_handlers;
mod move_monitor;
mod orchestrate;
mod peers;

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use larder_block::ByteLen;
use larder_block::tls::TlsError;
use larder_codec::batch::Method;
use larder_migrate::limits::{Limits, SharedLimits};
use larder_migrate::moving::available_memory;
use larder_migrate::moving::destination::{DestinationMover, NotReady};
use larder_migrate::moving::source::MoveError;
use larder_migrate::moving::watch::MigrationMonitor;
use larder_migrate::progress::{SenderProgress, SenderTotals};
use larder_migrate::qmp::QmpError;
use larder_migrate::receive;
use larder_migrate::send::{self, Accelerators, SendError, Sender, Steering};
use larder_migrate::tls::{PeerRecords, ReceiverTls, SenderTls};
use larder_vm::listen::SocketFile;
use larder_vm::runtime_directory::migration_state_directory;
use larder_vm::user::switch_user;
use serde_json::json;

use self::move_monitor::{MoveMonitor, MoveSource, cancel_by_flag, delivered_state, method_choice_state, sent_state};
use crate::cli::Output;
use crate::cli::address::ReceiverAddress;
use crate::cli::migrate::{
    AcceleratorsArgument, MigrateArguments, MigrateCommand, MigrateReceiveArguments, MigrateSendArguments,
    SendLimitArguments, TrustArguments,
};
use crate::disk_image::format_size;
use crate::migration_table;
use crate::output::{Lines, print};

/// By default, old pages may take this fraction (1/n) of the available memory.
const DELTA_MEMORY_SHARE: u64 = 8;
/// Upper bound of the default memory for old pages, in bytes.
const DELTA_MEMORY_MAX: u64 = 4 << 30;
/// Maximum number of lanes by default: four lanes saturate 10 Gbit/s.
const LANES_DEFAULT_MAX: usize = 4;
/// Bytes per channel that may wait for the destination's QEMU: it takes at most a hundred times as much per second.
const CHANNEL_WINDOW_BYTES: u32 = 32 << 20;

pub(crate) fn run(arguments: MigrateArguments) -> anyhow::Result<ExitCode> {
    let result = match arguments.command {
        None => orchestrate::run(&arguments.whole),
        Some(MigrateCommand::Send(arguments)) => send(&arguments),
        Some(MigrateCommand::Receive(arguments)) => receive(&arguments),
        Some(MigrateCommand::Status(arguments)) => control_target::status(&arguments),
        Some(MigrateCommand::Limit(arguments)) => control_target::limit(&arguments),
        Some(MigrateCommand::Cancel(arguments)) => control_target::cancel(&arguments),
    };
    result.map_err(explain_busy_qmp)
}

/// Explains a busy QMP socket whose one client is Larder, with the move that is running.
fn explain_busy_qmp(error: anyhow::Error) -> anyhow::Error {
    let qmp = match (error.downcast_ref(), error.downcast_ref()) {
        (Some(MoveError::Qmp(QmpError::Busy { path })), _) | (_, Some(NotReady::Qmp(QmpError::Busy { path }))) => path,
        _ => return error,
    };
    match migration_table::find_by_qemu(qmp) {
        Some(state) => anyhow!(
            "the virtual machine of the QEMU at {} is already being moved: {}; larder migrate status, limit and cancel apply to \
             that move",
            qmp.display(),
            migration_table::format_line(&state)
        ),
        None => error,
    }
}

/// Returns the options of a sender, once the trust options allow sending.
fn sender_options(
    address: &ReceiverAddress,
    trust: &TrustArguments,
    sending: &SendLimitArguments,
) -> anyhow::Result<send::Options> {
    let to = address.to_string();
    check_encrypted(trust, || {
        let mut addresses = to.to_socket_addrs().ok()?;
        Some(addresses.all(|address| address.ip().is_loopback()))
    })?;
    let tls = trust
        .tls
        .as_deref()
        .map(|folder| SenderTls::load(folder, address.host()).map_err(|error| with_required_files(&error, "client")))
        .transpose()?;
    let tls = match tls {
        None => None,
        Some(tls) => {
            let directory = peers::peer_directory(trust, None)?;
            let accepted = peers::accepted_peers(trust, directory.as_deref(), PeerRecords::of_receivers)?;
            Some(tls.with_peers(accepted))
        }
    };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(send::Options {
        to,
        tls,
        lanes: sending.lanes.unwrap_or(cpus.min(LANES_DEFAULT_MAX) as u16),
        delta_memory: delta_memory(sending.delta_memory),
        patience: Duration::from_secs(sending.patience),
        limits: Arc::new(SharedLimits::new(Limits {
            bandwidth: sending.bandwidth.map(ByteLen::get),
            processors: sending.cpu,
            ..Limits::default()
        })),
        accelerators: match sending.accelerators {
            AcceleratorsArgument::Devices => Accelerators::Devices,
            AcceleratorsArgument::None => Accelerators::None,
            AcceleratorsArgument::Software => Accelerators::Software,
        },
    })
}

fn send(arguments: &MigrateSendArguments) -> anyhow::Result<ExitCode> {
    let options = sender_options(&arguments.to, &arguments.trust, &arguments.sending)?;
    let steering = Arc::new(Steering::default());
    let stopped = Arc::clone(&steering);
    crate::signals::block()?.on_stop(move || stopped.stop.store(true, Ordering::Relaxed))?;
    let socket = SocketFile::bind(&arguments.listen)?;
    let listener = UnixListener::from(socket.descriptor()?);
    let progress = Arc::new(SenderProgress::new());
    let move_source =
        MoveSource::Sent { progress: Arc::clone(&progress), limits: Arc::clone(&options.limits), controls_qemu: false };
    let stopped = Arc::clone(&steering);
    let cancel = move || stopped.stop.store(true, Ordering::Relaxed);
    let monitor = MoveMonitor::new(None, &arguments.listen, Some(&options.to), move_source, cancel);
    let control = monitor.listen(arguments.control.as_deref())?;
    let result = carry(arguments, &options, &listener, &progress, &steering, &monitor);
    monitor.finish(result.as_ref().err().map(ToString::to_string), None);
    if result.is_ok() {
        print(&match arguments.output {
            Output::Text => format_summary(&progress),
            Output::Json => format!("{:#}\n", to_json(&progress)),
        })?;
    }
    monitor.wait_for_watchers();
    drop(control);
    result?;
    Ok(ExitCode::SUCCESS)
}

/// Connects to the receiver, and carries QEMU's stream.
fn carry(
    arguments: &MigrateSendArguments,
    options: &send::Options,
    listener: &UnixListener,
    progress: &SenderProgress,
    steering: &Steering,
    watched: &MoveMonitor,
) -> Result<(), SendError> {
    let sender = Sender::connect(options)?;
    let devices: Vec<&str> = sender.accelerators().collect();
    tracing::info!(
        "ready to send to {} over {} lanes{}, with up to {} of old pages: QEMU migrates to unix:{}",
        options.to,
        sender.lanes(),
        if devices.is_empty() { String::new() } else { format!(" and {}", devices.join(" and ")) },
        format_size(sender.delta_memory()),
        arguments.listen.display()
    );
    // This process does not know the guest or its migration rounds.
    let mut watch = MigrationMonitor::new(0);
    MoveMonitor::run_with_sampling(
        || watched.update(&watch.report(&serde_json::Value::Null, progress, progress.elapsed())),
        || sender.carry(listener, progress, steering),
    )
}

fn receive(arguments: &MigrateReceiveArguments) -> anyhow::Result<ExitCode> {
    let listen = arguments.listen.to_string();
    let addresses: Vec<SocketAddr> = listen
        .to_socket_addrs()
        .with_context(|| format!("--listen {listen}: this host has no such address"))?
        .collect();
    check_encrypted(&arguments.trust, || {
        Some(addresses.iter().map(SocketAddr::ip).all(|ip: IpAddr| ip.is_loopback()))
    })?;
    let directory = arguments.trust.tls.as_deref();
    let tls = directory
        .map(|directory| ReceiverTls::load(directory).map_err(|error| with_required_files(&error, "server")))
        .transpose()?;
    let stop = stop_flag_on_signal()?;
    let destination = match &arguments.qmp {
        Some(qmp) => {
            let records = migration_state_directory().context("the record of the move cannot be saved")?;
            let destination = DestinationMover::new(
                qmp,
                &records,
                Arc::new(disks::LocalDiskServers::default()),
                Arc::new(fault_handlers::Pagers),
            );
            Some(Arc::new(destination?))
        }
        None => None,
    };
    let connect = match (&destination, &arguments.connect) {
        (Some(destination), _) => destination.incoming(),
        (None, Some(path)) => path.clone(),
        (None, None) => bail!("no QEMU was selected: give --qmp or --connect"),
    };
    let listener = TcpListener::bind(&addresses[..]).with_context(|| format!("cannot listen on {listen}"))?;
    let port = receive::Port::new(listener).with_context(|| format!("cannot listen on {listen}"))?;
    // Opened as root, before root's rights may be given up below.
    let peers_directory = peers::peer_directory(&arguments.trust, arguments.user.as_deref())?;
    let user = match (&destination, &arguments.user) {
        (Some(destination), _) => Some(destination.user()),
        (None, Some(name)) => Some(switch_user(name)?),
        (None, None) => None,
    };
    let accepted = peers::accepted_peers(&arguments.trust, peers_directory.as_deref(), PeerRecords::of_senders)?;
    let tls = tls.map(|tls| tls.with_peers(accepted));
    let options = receive::Options {
        connect,
        user,
        tls,
        delta_memory: delta_memory(arguments.delta_memory),
        window: CHANNEL_WINDOW_BYTES,
        channels: arguments.channels,
        lanes: arguments.lanes,
        progress: Arc::default(),
    };
    let move_source =
        MoveSource::Received { incoming: Arc::clone(&options.progress), destination: destination.clone() };
    let qemu = arguments.qmp.as_ref().unwrap_or(&options.connect);
    let watched = MoveMonitor::new(None, qemu, None, move_source, cancel_by_flag(&stop));
    let control = watched.listen(arguments.control.as_deref())?;
    tracing::info!("ready to receive on {}", port.local_addr()?);
    let result = MoveMonitor::run_with_sampling(
        || watched.sample_delivered(),
        || match &destination {
            Some(destination) => orchestrate::receive(&port, &options, &stop, destination, arguments.output),
            None => receive_stream(&port, &options, &stop, arguments.output),
        },
    );
    let location = result.is_ok().then_some("here").filter(|_| arguments.qmp.is_some());
    watched.finish(result.as_ref().err().map(ToString::to_string), location);
    watched.wait_for_watchers();
    drop(control);
    result
}

/// Receives a sender's stream, and does nothing else.
fn receive_stream(
    port: &receive::Port,
    options: &receive::Options,
    stop: &AtomicBool,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let delivered = receive::receive(port, options, stop, None)?;
    print(&match output {
        Output::Text => format!(
            "delivered {} of QEMU's stream from {} on the link\n",
            format_size(delivered.raw),
            format_size(delivered.wire)
        ),
        Output::Json => format!("{:#}\n", json!(delivered_state(&delivered))),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Extends a TLS error with the files that `--tls` needs.
fn with_required_files(error: &TlsError, role: &str) -> anyhow::Error {
    anyhow!("{error}; --tls DIR must contain ca-cert.pem, {role}-cert.pem and {role}-key.pem")
}

/// Refuses to send a guest's memory unencrypted over a network, unless the user asked for it.
fn check_encrypted(trust: &TrustArguments, is_loopback: impl FnOnce() -> Option<bool>) -> anyhow::Result<()> {
    if trust.tls.is_some() || trust.insecure || is_loopback() != Some(false) {
        return Ok(());
    }
    bail!(
        "the memory would be sent over a network: give --tls DIR with certificates, or --insecure if everyone on that network may see \
        and change the guest's memory"
    );
}

fn stop_flag_on_signal() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    crate::signals::block()?.on_stop(move || stopped.store(true, Ordering::Relaxed))?;
    Ok(stop)
}

fn delta_memory(given: Option<ByteLen>) -> u64 {
    given.map_or_else(|| (available_memory().unwrap_or(0) / DELTA_MEMORY_SHARE).min(DELTA_MEMORY_MAX), ByteLen::get)
}

fn ratio(totals: &SenderTotals) -> f64 {
    totals.raw_bytes as f64 / totals.wire_bytes.max(1) as f64
}

fn format_summary(progress: &SenderProgress) -> String {
    let totals = progress.totals();
    let mut lines = Lines::default();
    lines.line("carried", format_size(totals.raw_bytes));
    lines.line("on the link", format!("{} ({:.1} times less)", format_size(totals.wire_bytes), ratio(&totals)));
    lines.line("zero pages", totals.zero_pages);
    lines.line("uniform pages", totals.same_pages);
    lines.line("deltas", format!("{} pages in {}", totals.delta_pages, format_size(totals.delta_bytes)));
    for method in Method::ALL {
        let pages = totals.encoded_pages[method.index()];
        if pages > 0 {
            let bytes = format_size(totals.encoded_bytes[method.index()]);
            lines.line(method.name(), format!("{pages} pages in {bytes}"));
        }
    }
    if totals.device_pages > 0 {
        lines.line("by a device", format!("{} pages of these", totals.device_pages));
    }
    lines.line("unencoded", format!("{} pages", totals.plain_pages));
    lines.line(
        "CPU time",
        format!("{:.2} s, of which encoding {:.2} s", totals.cpu_ns as f64 / 1e9, totals.encode_cpu_ns as f64 / 1e9),
    );
    lines.line("time", format!("{:.1} s", progress.elapsed().as_secs_f64()));
    lines.into_text()
}

/// Returns the statistics that the control socket reports, with the elapsed time.
fn to_json(progress: &SenderProgress) -> serde_json::Value {
    let mut sent = json!(sent_state(&progress.totals()));
    sent["seconds"] = progress.elapsed().as_secs_f64().into();
    sent["evidence"] = json!(method_choice_state(&progress.choice()));
    sent
}
