//! `larder migrate`: moves a running VM to another host.

pub(crate) mod at;
mod disks;
mod fault_handlers;
mod peers;
mod watched;
mod whole;

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
use larder_migrate::limits::{InForce, Limits};
use larder_migrate::moving::available_memory;
use larder_migrate::moving::destination::{Destination, NotReady};
use larder_migrate::moving::source::MoveError;
use larder_migrate::moving::watch::Watch;
use larder_migrate::progress::{Progress, Totals};
use larder_migrate::qmp::QmpError;
use larder_migrate::receive;
use larder_migrate::send::{self, Accelerators, SendError, Sender, Steering};
use larder_migrate::tls::{PeerRecords, ReceiverTls, SenderTls};
use larder_vm::listen::SocketFile;
use larder_vm::runtime_folder::migration_folder;
use larder_vm::user::become_user;
use serde_json::json;

use self::watched::{Moved, Watched, by, delivered_state, evidence_state, sent_state};
use crate::cli::Output;
use crate::cli::address::Address;
use crate::cli::migrate::{
    AcceleratorsArgument, MigrateArguments, MigrateCommand, MigrateReceiveArguments, MigrateSendArguments,
    SendingArguments, TrustArguments,
};
use crate::disk_image::human;
use crate::moves;
use crate::output::{Lines, print};

/// By default, old pages may take this fraction (1/n) of the available memory.
const DELTA_MEMORY_SHARE: u64 = 8;
/// Upper bound of the default memory for old pages, in bytes.
const DELTA_MEMORY_MAX: u64 = 4 << 30;
/// Maximum number of lanes by default: four lanes saturate 10 Gbit/s.
const LANES_MAX: usize = 4;
/// Bytes per channel that may wait for the destination's QEMU: it takes at most a hundred times as much per second.
const WINDOW: u32 = 32 << 20;

pub(crate) fn run(arguments: MigrateArguments) -> anyhow::Result<ExitCode> {
    let result = match arguments.command {
        None => whole::run(&arguments.whole),
        Some(MigrateCommand::Send(arguments)) => send(&arguments),
        Some(MigrateCommand::Receive(arguments)) => receive(&arguments),
        Some(MigrateCommand::Status(arguments)) => at::status(&arguments),
        Some(MigrateCommand::Limit(arguments)) => at::limit(&arguments),
        Some(MigrateCommand::Cancel(arguments)) => at::cancel(&arguments),
    };
    result.map_err(name_its_mover)
}

/// Explains a busy QMP socket whose one client is Larder, with the move that is running.
fn name_its_mover(error: anyhow::Error) -> anyhow::Error {
    let qmp = match (error.downcast_ref(), error.downcast_ref()) {
        (Some(MoveError::Qmp(QmpError::Busy { path })), _) | (_, Some(NotReady::Qmp(QmpError::Busy { path }))) => path,
        _ => return error,
    };
    match moves::of_qemu(qmp) {
        Some(state) => anyhow!(
            "the virtual machine of the QEMU at {} is already being moved: {}; larder migrate status, limit and cancel apply to \
             that move",
            qmp.display(),
            moves::line(&state)
        ),
        None => error,
    }
}

/// Returns the options of a sender, once the trust options allow sending.
fn sending(address: &Address, trust: &TrustArguments, sending: &SendingArguments) -> anyhow::Result<send::Options> {
    let to = address.to_string();
    trusts(trust, || {
        let mut addresses = to.to_socket_addrs().ok()?;
        Some(addresses.all(|address| address.ip().is_loopback()))
    })?;
    let tls = trust
        .tls
        .as_deref()
        .map(|folder| SenderTls::load(folder, address.host()).map_err(|error| without_files(&error, "client")))
        .transpose()?;
    let tls = match tls {
        None => None,
        Some(tls) => {
            let directory = peers::directory(trust, None)?;
            let accepted = peers::accepted(trust, directory.as_deref(), PeerRecords::of_receivers)?;
            Some(tls.with_peers(accepted))
        }
    };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(send::Options {
        to,
        tls,
        lanes: sending.lanes.unwrap_or(cpus.min(LANES_MAX) as u16),
        delta_memory: delta_memory(sending.delta_memory),
        patience: Duration::from_secs(sending.patience),
        limits: Arc::new(InForce::new(Limits {
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
    let options = sending(&arguments.to, &arguments.trust, &arguments.sending)?;
    let steering = Arc::new(Steering::default());
    let stopped = Arc::clone(&steering);
    crate::signals::block()?.stop_by(move || stopped.stop.store(true, Ordering::Relaxed))?;
    let socket = SocketFile::bind(&arguments.listen)?;
    let listener = UnixListener::from(socket.descriptor()?);
    let progress = Arc::new(Progress::new());
    let moved = Moved::Sent {
        progress: Arc::clone(&progress),
        limits: Arc::clone(&options.limits),
        whole: false,
    };
    let stopped = Arc::clone(&steering);
    let cancel = move || stopped.stop.store(true, Ordering::Relaxed);
    let watched = Watched::new(None, &arguments.listen, Some(&options.to), moved, cancel);
    let control = watched.listen(arguments.control.as_deref())?;
    let result = carry(arguments, &options, &listener, &progress, &steering, &watched);
    watched.is_over(result.as_ref().err().map(ToString::to_string), None);
    if result.is_ok() {
        print(&match arguments.output {
            Output::Text => summary(&progress),
            Output::Json => format!("{:#}\n", json_of(&progress)),
        })?;
    }
    watched.is_heard();
    drop(control);
    result?;
    Ok(ExitCode::SUCCESS)
}

/// Connects to the receiver, and carries QEMU's stream.
fn carry(
    arguments: &MigrateSendArguments,
    options: &send::Options,
    listener: &UnixListener,
    progress: &Progress,
    steering: &Steering,
    watched: &Watched,
) -> Result<(), SendError> {
    let sender = Sender::connect(options)?;
    let devices: Vec<&str> = sender.accelerators().collect();
    tracing::info!(
        "ready to send to {} over {} lanes{}, with up to {} of old pages: QEMU migrates to unix:{}",
        options.to,
        sender.lanes(),
        if devices.is_empty() {
            String::new()
        } else {
            format!(" and {}", devices.join(" and "))
        },
        human(sender.delta_memory()),
        arguments.listen.display()
    );
    // This process does not know the guest or its migration rounds.
    let mut watch = Watch::new(0);
    Watched::while_seen(
        || watched.see(&watch.report(&serde_json::Value::Null, progress, progress.elapsed())),
        || sender.carry(listener, progress, steering),
    )
}

fn receive(arguments: &MigrateReceiveArguments) -> anyhow::Result<ExitCode> {
    let listen = arguments.listen.to_string();
    let addresses: Vec<SocketAddr> = listen
        .to_socket_addrs()
        .with_context(|| format!("--listen {listen}: this host has no such address"))?
        .collect();
    trusts(&arguments.trust, || {
        Some(addresses.iter().map(SocketAddr::ip).all(|ip: IpAddr| ip.is_loopback()))
    })?;
    let folder = arguments.trust.tls.as_deref();
    let tls = folder
        .map(|folder| ReceiverTls::load(folder).map_err(|error| without_files(&error, "server")))
        .transpose()?;
    let stop = stop_by_signal()?;
    let destination = match &arguments.qmp {
        Some(qmp) => {
            let records = migration_folder().context("the record of the move cannot be saved")?;
            let destination = Destination::new(
                qmp,
                &records,
                Arc::new(disks::LocalServers::default()),
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
    let peers_directory = peers::directory(&arguments.trust, arguments.user.as_deref())?;
    let user = match (&destination, &arguments.user) {
        (Some(destination), _) => Some(destination.user()),
        (None, Some(name)) => Some(become_user(name)?),
        (None, None) => None,
    };
    let accepted = peers::accepted(&arguments.trust, peers_directory.as_deref(), PeerRecords::of_senders)?;
    let tls = tls.map(|tls| tls.with_peers(accepted));
    let options = receive::Options {
        connect,
        user,
        tls,
        delta_memory: delta_memory(arguments.delta_memory),
        window: WINDOW,
        channels: arguments.channels,
        lanes: arguments.lanes,
        watched: Arc::default(),
    };
    let moved = Moved::Received {
        watched: Arc::clone(&options.watched),
        destination: destination.clone(),
    };
    let qemu = arguments.qmp.as_ref().unwrap_or(&options.connect);
    let watched = Watched::new(None, qemu, None, moved, by(&stop));
    let control = watched.listen(arguments.control.as_deref())?;
    tracing::info!("ready to receive on {}", port.local_addr()?);
    let result = Watched::while_seen(
        || watched.see_what_came(),
        || match &destination {
            Some(destination) => whole::receive(&port, &options, &stop, destination, arguments.output),
            None => receive_stream(&port, &options, &stop, arguments.output),
        },
    );
    let place = result.is_ok().then_some("here").filter(|_| arguments.qmp.is_some());
    watched.is_over(result.as_ref().err().map(ToString::to_string), place);
    watched.is_heard();
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
            human(delivered.raw),
            human(delivered.wire)
        ),
        Output::Json => format!("{:#}\n", json!(delivered_state(&delivered))),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Extends a TLS error with the files that `--tls` needs.
fn without_files(error: &TlsError, whose: &str) -> anyhow::Error {
    anyhow!("{error}; --tls DIR must contain ca-cert.pem, {whose}-cert.pem and {whose}-key.pem")
}

/// Refuses to send a guest's memory unencrypted over a network, unless the user asked for it.
fn trusts(trust: &TrustArguments, is_loopback: impl FnOnce() -> Option<bool>) -> anyhow::Result<()> {
    if trust.tls.is_some() || trust.insecure || is_loopback() != Some(false) {
        return Ok(());
    }
    bail!(
        "the memory would be sent over a network: give --tls DIR with certificates, or --insecure if everyone on that network may see \
        and change the guest's memory"
    );
}

fn stop_by_signal() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    crate::signals::block()?.stop_by(move || stopped.store(true, Ordering::Relaxed))?;
    Ok(stop)
}

fn delta_memory(given: Option<ByteLen>) -> u64 {
    given.map_or_else(
        || (available_memory().unwrap_or(0) / DELTA_MEMORY_SHARE).min(DELTA_MEMORY_MAX),
        ByteLen::get,
    )
}

fn ratio(totals: &Totals) -> f64 {
    totals.raw_bytes as f64 / totals.wire_bytes.max(1) as f64
}

fn summary(progress: &Progress) -> String {
    let totals = progress.totals();
    let mut lines = Lines::default();
    lines.line("carried", human(totals.raw_bytes));
    lines.line(
        "on the link",
        format!("{} ({:.1} times less)", human(totals.wire_bytes), ratio(&totals)),
    );
    lines.line("zero pages", totals.zero_pages);
    lines.line("uniform pages", totals.same_pages);
    lines.line(
        "deltas",
        format!("{} pages in {}", totals.delta_pages, human(totals.delta_bytes)),
    );
    for method in Method::ALL {
        let pages = totals.encoded_pages[method.index()];
        if pages > 0 {
            let bytes = human(totals.encoded_bytes[method.index()]);
            lines.line(method.name(), format!("{pages} pages in {bytes}"));
        }
    }
    if totals.device_pages > 0 {
        lines.line("by a device", format!("{} pages of these", totals.device_pages));
    }
    lines.line("unencoded", format!("{} pages", totals.plain_pages));
    lines.line(
        "CPU time",
        format!(
            "{:.2} s, of which encoding {:.2} s",
            totals.cpu_ns as f64 / 1e9,
            totals.encode_cpu_ns as f64 / 1e9
        ),
    );
    lines.line("time", format!("{:.1} s", progress.elapsed().as_secs_f64()));
    lines.into_text()
}

/// Returns the statistics that the control socket reports, with the elapsed time.
fn json_of(progress: &Progress) -> serde_json::Value {
    let mut sent = json!(sent_state(&progress.totals()));
    sent["seconds"] = progress.elapsed().as_secs_f64().into();
    sent["evidence"] = json!(evidence_state(&progress.choice()));
    sent
}
