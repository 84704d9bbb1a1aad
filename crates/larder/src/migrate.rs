//! `larder migrate`: a running VM to another host.

pub(crate) mod at;
mod disks;
mod watched;
mod whole;

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use larder_block::ByteLen;
use larder_codec::batch::Method;
use larder_migrate::limits::{InForce, Limits};
use larder_migrate::moving::destination::Destination;
use larder_migrate::moving::watch::Watch;
use larder_migrate::progress::{Progress, Totals};
use larder_migrate::receive;
use larder_migrate::send::{self, Accelerators, SendError, Sender, Steering};
use larder_migrate::tls::{ReceiverTls, SenderTls};
use larder_vm::listen::SocketFile;
use larder_vm::runtime_folder::migration_folder;
use serde_json::json;

use self::watched::{Moved, Watched, by, evidence_state};
use crate::cli::Output;
use crate::cli::migrate::{
    AcceleratorsArgument, MigrateArguments, MigrateCommand, MigrateReceiveArguments, MigrateSendArguments,
    SendingArguments, TrustArguments,
};
use crate::disk_image::human;
use crate::output::{Lines, print};

/// Where a receiver waits unless it is said.
const PORT: u16 = 4446;
/// Of what is available, what old pages may take by default.
const DELTA_MEMORY_SHARE: u64 = 8;
/// And at most.
const DELTA_MEMORY_MAX: u64 = 4 << 30;
/// Lanes by default, at most: four keep 10 Gbit/s busy.
const LANES_MAX: usize = 4;
/// Between two looks at how it goes.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Bytes of a channel that may wait for the destination's QEMU: a hundredth of a second of what it takes at most.
const WINDOW: u32 = 32 << 20;

pub(crate) fn run(arguments: MigrateArguments) -> anyhow::Result<ExitCode> {
    match arguments.command {
        None => whole::run(&arguments.whole),
        Some(MigrateCommand::Send(arguments)) => send(&arguments),
        Some(MigrateCommand::Receive(arguments)) => receive(&arguments),
        Some(MigrateCommand::Status(arguments)) => at::status(&arguments),
        Some(MigrateCommand::Limit(arguments)) => at::limit(&arguments),
        Some(MigrateCommand::Cancel(arguments)) => at::cancel(&arguments),
    }
}

/// `HOST`, `HOST:PORT`, `ADDRESS` or `[ADDRESS]:PORT`, with the port, and the host alone.
fn with_port(to: &str) -> (String, &str) {
    let bare = to.trim_start_matches('[').trim_end_matches(']');
    match to.rsplit_once(':') {
        _ if bare.parse::<IpAddr>().is_ok_and(|address| address.is_ipv6()) => (format!("[{bare}]:{PORT}"), bare),
        Some((host, _)) => (to.to_owned(), host.trim_start_matches('[').trim_end_matches(']')),
        None => (format!("{to}:{PORT}"), to),
    }
}

/// What a sender is to do, once it is clear that it may.
fn sending(to: &str, trust: &TrustArguments, sending: &SendingArguments) -> anyhow::Result<send::Options> {
    let (to, host) = with_port(to);
    trusts(trust, || {
        let mut addresses = to.to_socket_addrs().ok()?;
        Some(addresses.all(|address| address.ip().is_loopback()))
    })?;
    let tls = trust
        .tls
        .as_deref()
        .map(|folder| SenderTls::load(folder, host, trust.peer.clone()))
        .transpose()?;
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

/// Connects, and carries what QEMU says.
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
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Of the guest and its rounds nobody here knows.
            let mut watch = Watch::new(0);
            while !ended.load(Ordering::Relaxed) {
                watched.see(&watch.report(&serde_json::Value::Null, progress, progress.elapsed()));
                std::thread::sleep(LOOK_EVERY);
            }
        });
        let result = sender.carry(listener, progress, steering);
        ended.store(true, Ordering::Relaxed);
        result
    })
}

fn receive(arguments: &MigrateReceiveArguments) -> anyhow::Result<ExitCode> {
    let (listen, _) = with_port(&arguments.listen);
    let addresses: Vec<SocketAddr> = listen
        .to_socket_addrs()
        .with_context(|| format!("--listen {listen}: ADDRESS:PORT is wanted, such as 0.0.0.0:{PORT}"))?
        .collect();
    trusts(&arguments.trust, || {
        Some(addresses.iter().map(SocketAddr::ip).all(|ip: IpAddr| ip.is_loopback()))
    })?;
    let folder = arguments.trust.tls.as_deref();
    let tls = folder
        .map(|folder| ReceiverTls::load(folder, arguments.trust.peer.clone()))
        .transpose()?;
    let stop = stop_by_signal()?;
    let destination = match &arguments.qmp {
        Some(qmp) => {
            let records = migration_folder().context("no record of the move can be kept")?;
            Some(
                Destination::new(qmp, &records, Arc::new(disks::LocalServers::default()))
                    .map_err(anyhow::Error::msg)?,
            )
        }
        None => None,
    };
    let connect = match (&destination, &arguments.connect) {
        (Some(destination), _) => destination.incoming(),
        (None, Some(path)) => path.clone(),
        (None, None) => bail!("where does QEMU wait? give --qmp or --connect"),
    };
    let listener = TcpListener::bind(&addresses[..]).with_context(|| format!("cannot listen on {listen}"))?;
    let port = receive::Port::new(listener).with_context(|| format!("cannot listen on {listen}"))?;
    tracing::info!("ready to receive on {}", port.local_addr()?);
    let user = destination.as_ref().map(Destination::user);
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
        whole: destination.is_some(),
    };
    let qemu = arguments.qmp.as_ref().unwrap_or(&options.connect);
    let watched = Watched::new(None, qemu, None, moved, by(&stop));
    let control = watched.listen(arguments.control.as_deref())?;
    let result = match destination {
        Some(destination) => whole::receive(&port, &options, &stop, &destination, arguments.output),
        None => receive_stream(&port, &options, &stop, arguments.output),
    };
    let place = result.is_ok().then_some("here").filter(|_| arguments.qmp.is_some());
    watched.is_over(result.as_ref().err().map(ToString::to_string), place);
    watched.is_heard();
    drop(control);
    result
}

/// Takes in what a sender carries, and nothing else.
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
        Output::Json => format!(
            "{:#}\n",
            json!({"raw_bytes": delivered.raw, "wire_bytes": delivered.wire, "frames": delivered.frames})
        ),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Nobody sends a guest's memory over a network in the clear without having said so.
fn trusts(trust: &TrustArguments, is_loopback: impl FnOnce() -> Option<bool>) -> anyhow::Result<()> {
    if trust.tls.is_some() || trust.insecure || is_loopback() != Some(false) {
        return Ok(());
    }
    bail!(
        "this goes over a network: give --tls DIR with certificates, or --insecure if whoever can listen there may see \
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
        || (available().unwrap_or(0) / DELTA_MEMORY_SHARE).min(DELTA_MEMORY_MAX),
        ByteLen::get,
    )
}

/// Bytes of memory that this host has left (proc(5), `MemAvailable`).
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
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
    lines.line("of one word", totals.same_pages);
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
    lines.line("as they are", format!("{} pages", totals.plain_pages));
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

fn json_of(progress: &Progress) -> serde_json::Value {
    let totals = progress.totals();
    let methods: serde_json::Map<String, serde_json::Value> = Method::ALL
        .into_iter()
        .map(|method| {
            let pages = totals.encoded_pages[method.index()];
            let bytes = totals.encoded_bytes[method.index()];
            (method.name().to_owned(), json!({"pages": pages, "bytes": bytes}))
        })
        .collect();
    json!({
        "raw_bytes": totals.raw_bytes,
        "wire_bytes": totals.wire_bytes,
        "delivered_bytes": totals.delivered_bytes,
        "frames": totals.frames,
        "zero_pages": totals.zero_pages,
        "same_pages": totals.same_pages,
        "delta_pages": totals.delta_pages,
        "delta_bytes": totals.delta_bytes,
        "plain_pages": totals.plain_pages,
        "methods": methods,
        "device_pages": totals.device_pages,
        "encode_seconds": totals.encode_ns as f64 / 1e9,
        "cpu_seconds": totals.cpu_ns as f64 / 1e9,
        "encode_cpu_seconds": totals.encode_cpu_ns as f64 / 1e9,
        "write_seconds": totals.write_ns as f64 / 1e9,
        "seconds": progress.elapsed().as_secs_f64(),
        "evidence": evidence_state(&progress.choice()),
    })
}
