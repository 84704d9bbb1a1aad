//! `larder vm`.

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use anyhow::{Context, anyhow};
use larder_vm::control;
use larder_vm::disk::DiskError;
use larder_vm::inherited::Inherited;
use larder_vm::run::check::{advice, check};
use larder_vm::run::plan::GivenBy;
use larder_vm::run::shell::command_line;
use larder_vm::vm::config::{VmConfig, path_of};
use larder_vm::vm::{Progress, Vm, VmError, check_places};
use sd_notify::NotifyState;

use crate::cli::VmArguments;
use crate::output::print;
use crate::signals;
use crate::{EXIT_ERROR, EXIT_NEGATIVE};

pub(crate) fn run(arguments: VmArguments) -> anyhow::Result<ExitCode> {
    let path = path_of(&arguments.name)?;
    let config = VmConfig::read(&path)?;
    if arguments.check {
        return look(&config);
    }
    if arguments.reload {
        return reload(&path, &config);
    }
    let signals = signals::block()?;
    let inherited = inherited()?;
    let vm = Vm::start(&path, config.clone(), inherited, arguments.confine);
    let vm = vm.map_err(|error| with_advice(error, &config))?;
    for (name, places) in vm.places() {
        tracing::info!(
            disk = name,
            vhost_user_blk = places.vhost_user.as_ref().map(tracing::field::display),
            nbd = places.nbd.as_ref().map(tracing::field::display),
            "serving"
        );
    }
    tracing::info!(vm = config.name, control = %command_line(&[config.control.clone().into()]), "ready");
    let orders = vm.orders();
    let to_reload = orders.clone();
    signals.stop_by_or(libc::SIGHUP, move || to_reload.reload(), move || orders.stop())?;
    let starter = Starter::new()?;
    let ended = vm.run(|progress| starter.tell(progress));
    starter.end();
    ended?;
    Ok(ExitCode::SUCCESS)
}

/// Has the server that runs read the file again, and says what has become of it.
fn reload(path: &Path, config: &VmConfig) -> anyhow::Result<ExitCode> {
    let is_confined = control::fetch_server(&config.control)?.confined;
    // It cannot read the file itself.
    let text = is_confined.then(|| std::fs::read_to_string(path)).transpose();
    let text = text.with_context(|| path.display().to_string())?;
    let (_, done) = control::reload(&config.control, text)?;
    let mut text = String::new();
    let parts = [
        ("changed", &done.changed),
        ("left", &done.left),
        ("failed", &done.failed),
    ];
    for (how, all) in parts {
        for what in all {
            text.push_str(&format!("{how:8}{what}\n"));
        }
    }
    if text.is_empty() {
        text = format!("{}: all is as its file says already\n", config.name);
    }
    print(&text)?;
    Ok(match (done.failed.is_empty(), done.left.is_empty()) {
        (false, _) => ExitCode::from(EXIT_ERROR),
        (true, false) => ExitCode::from(EXIT_NEGATIVE),
        (true, true) => ExitCode::SUCCESS,
    })
}

fn disks(count: usize) -> String {
    match count {
        1 => "1 disk".to_owned(),
        count => format!("{count} disks"),
    }
}

/// Says whether all of it could be served.
fn look(config: &VmConfig) -> anyhow::Result<ExitCode> {
    check_places(config, &Inherited::default())?;
    let wishes: Vec<_> = config.disks.iter().map(|disk| (&disk.wish, GivenBy::File)).collect();
    let found = check(&wishes);
    for problem in &found.problems {
        eprintln!("larder: {problem}");
    }
    if !found.problems.is_empty() {
        return Ok(ExitCode::from(EXIT_ERROR));
    }
    let mut text = format!("{}: {} can be served\n", config.name, disks(config.disks.len()));
    for image in &found.unchecked {
        text.push_str(&format!(
            "{}: not all of {image} was looked at, because NBD servers are not asked here\n",
            config.name
        ));
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// What systemd, or another one who starts services, has handed to this process.
fn inherited() -> anyhow::Result<Inherited> {
    let named = sd_notify::listen_fds_with_names().context("$LISTEN_FDS")?;
    let files = named.map(|(number, name)| {
        // SAFETY: they were handed over to this process, whose number is in $LISTEN_PID, and nothing else in it takes
        // them.
        (name, unsafe { OwnedFd::from_raw_fd(number) })
    });
    Inherited::new(files.collect(), manager()).context("a socket that was handed over ($LISTEN_FDS)")
}

/// A socket to whoever has started this service and keeps descriptors for it.
fn manager() -> Option<UnixDatagram> {
    let place = std::env::var_os("NOTIFY_SOCKET")?;
    let address = match place.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&place),
    };
    let connected = address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        Ok(socket)
    });
    connected
        .inspect_err(|error| tracing::warn!("$NOTIFY_SOCKET: {error}"))
        .ok()
}

/// How long whoever has started this service may take to hear the last word.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Whoever has started this service, if he wants to know how far it is. A thread tells him: he may not listen.
struct Starter {
    news: Sender<Progress>,
    ended: Receiver<()>,
}

impl Starter {
    fn new() -> std::io::Result<Self> {
        let (news, to_tell) = mpsc::channel();
        let (end, ended) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("larder-notify".to_owned());
        thread.spawn(move || {
            to_tell.iter().for_each(notify);
            let _ = end.send(());
        })?;
        Ok(Self { news, ended })
    }

    fn tell(&self, progress: Progress) {
        // The thread is there as long as this is.
        let _ = self.news.send(progress);
    }

    fn end(self) {
        drop(self.news);
        let _ = self.ended.recv_timeout(LAST_WORD);
    }
}

fn notify(progress: Progress) {
    let told = match progress {
        Progress::Ready(count) => sd_notify::notify(&[
            NotifyState::Ready,
            NotifyState::Status(&format!("serving {}", disks(count))),
        ]),
        Progress::Reloading => {
            NotifyState::monotonic_usec_now().and_then(|now| sd_notify::notify(&[NotifyState::Reloading, now]))
        }
        Progress::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
    };
    if let Err(error) = told {
        tracing::warn!("$NOTIFY_SOCKET: {error}");
    }
}

/// The error, and what the user can write into the file to have it otherwise.
fn with_advice(error: VmError, config: &VmConfig) -> anyhow::Error {
    let advice = match &error {
        VmError::Disk {
            disk,
            source: DiskError::Image(source),
        } => {
            let wish = config.disks.iter().find(|it| it.name == *disk);
            wish.map_or("", |it| advice(source, &it.wish, GivenBy::File))
        }
        _ => "",
    };
    match advice {
        "" => error.into(),
        advice => anyhow!("{error}{advice}"),
    }
}
