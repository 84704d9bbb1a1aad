//! A running server: `larder disk serve`, and the NBD server below it.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::fault::Fault;
use super::guest::Guest;
use super::nbd;
use super::shape::Shape;
use super::steps::Serve;
use crate::campaign::process::{Process, killed_with_parent};

const PATIENCE: Duration = Duration::from_secs(180);
const EXPORT: &str = "disk";
/// Size of a cache in bytes: less than most disks, so that it evicts.
const CACHE_BYTES: u64 = 1 << 20;

/// Paths of a case.
pub(super) struct Paths {
    pub(super) image: PathBuf,
    pub(super) cache: PathBuf,
    state: PathBuf,
    nbd: PathBuf,
    vhost: PathBuf,
    store: PathBuf,
}

impl Paths {
    pub(super) fn new(directory: &Path, image: &Path) -> Self {
        Self {
            image: image.to_owned(),
            cache: directory.join("cache"),
            state: directory.join("state"),
            nbd: directory.join("nbd"),
            vhost: directory.join("vhost"),
            store: directory.join("store"),
        }
    }

    /// Returns a command of larder's, with the case's own state directory.
    pub(super) fn command(&self, larder: &Path, arguments: &[&str]) -> Command {
        let mut command = killed_with_parent(&larder.to_string_lossy());
        command.args(arguments).env("STATE_DIRECTORY", &self.state);
        command
    }
}

/// A running server with its clients.
pub(super) struct RunningServer {
    server: Process,
    store: Option<Process>,
    pub(super) nbd: Option<nbd::Client>,
    pub(super) guest: Option<Guest>,
    pub(super) serve: Serve,
    nbd_socket: PathBuf,
    vhost_socket: PathBuf,
    seed: u64,
}

impl RunningServer {
    /// Starts a server, and the NBD server below it. The inner `Err` has the output of a server that has refused to
    /// serve.
    pub(super) fn start(
        larder: &Path,
        paths: &Paths,
        shape: &Shape,
        serve: &Serve,
        seed: u64,
    ) -> Result<Result<Self, String>, Fault> {
        let store = if shape.device { Some(start_store(paths)?) } else { None };
        let _ = std::fs::remove_file(&paths.nbd);
        let _ = std::fs::remove_file(&paths.vhost);
        let command = command(larder, paths, shape, serve, store.is_some());
        let server = Process::start(command).map_err(|error| Fault::new("set-up", format!("{error:#}")))?;
        match server.wait_for("serving", PATIENCE) {
            Ok(_) => Ok(Ok(Self {
                server,
                store,
                nbd: None,
                guest: None,
                serve: serve.clone(),
                nbd_socket: paths.nbd.clone(),
                vhost_socket: paths.vhost.clone(),
                seed,
            })),
            Err(_) if server.has_ended() => Ok(Err(server.output())),
            Err(error) => Err(Fault::new("hang", format!("the server does not start to serve: {error:#}"))),
        }
    }

    /// Returns the NBD client, which connects when it is first used.
    pub(super) fn nbd(&mut self) -> Result<&mut nbd::Client, Fault> {
        if self.nbd.is_none() {
            let client = nbd::Client::connect(&self.nbd_socket, EXPORT);
            let client = client.map_err(|error| self.died("connecting over NBD", &error.to_string()))?;
            if client.is_read_only != self.serve.read_only {
                return Err(Fault::new("protocol", "the export's flag READ_ONLY does not match --read-only"));
            }
            self.nbd = Some(client);
        }
        Ok(self.nbd.as_mut().expect("just connected"))
    }

    /// Returns the guest, which connects when it is first used.
    pub(super) fn guest(&mut self) -> Result<&mut Guest, Fault> {
        if self.guest.is_none() {
            let Serve { packed, indirect, .. } = self.serve;
            let guest = Guest::connect(&self.vhost_socket, packed, indirect, self.seed);
            self.guest = Some(guest.map_err(|error| self.died("connecting over vhost-user", &format!("{error:#}")))?);
        }
        Ok(self.guest.as_mut().expect("just connected"))
    }

    /// Connects the guest of a killed server to this one.
    pub(super) fn adopt(&mut self, mut guest: Guest) -> Result<(), Fault> {
        let result = guest.reconnect(&self.vhost_socket);
        self.guest = Some(guest);
        result.map_err(|error| self.died("reconnecting over vhost-user", &format!("{error:#}")))
    }

    /// Returns a connection's fault, with the server's output.
    pub(super) fn died(&self, what: &str, error: &str) -> Fault {
        Fault::new("request", format!("{what}: {error}; the server's output: {}", last_lines(&self.server.output())))
    }

    /// Kills the server. Returns its guest, for the next server.
    pub(super) fn kill(mut self) -> Result<Option<Guest>, Fault> {
        self.server.kill();
        self.stop_store()?;
        Ok(self.guest.take())
    }

    /// Stops the server by SIGTERM. Returns its exit code and output.
    pub(super) fn stop(mut self) -> Result<(Option<i32>, String), Fault> {
        if let Some(nbd) = self.nbd.take() {
            nbd.disconnect();
        }
        self.guest = None;
        self.server.signal(libc::SIGTERM);
        let status = self.server.wait(PATIENCE);
        let status = status.map_err(|error| Fault::new("hang", format!("the server does not exit: {error:#}")))?;
        let output = self.server.output();
        self.stop_store()?;
        Ok((status.code(), output))
    }

    fn stop_store(&mut self) -> Result<(), Fault> {
        if let Some(mut store) = self.store.take() {
            store.signal(libc::SIGTERM);
            let ended = store.wait(PATIENCE);
            ended.map_err(|error| Fault::new("set-up", format!("qemu-nbd: {error:#}")))?;
        }
        Ok(())
    }
}

/// Returns the last lines of a program's output.
pub(super) fn last_lines(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(4)..].join(" | ")
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///{EXPORT}?socket={}", socket.display())
}

fn command(larder: &Path, paths: &Paths, shape: &Shape, serve: &Serve, has_store: bool) -> Command {
    let mut command = paths.command(larder, &["disk", "serve", "--trust-image"]);
    match has_store {
        true => command.arg(uri(&paths.store)).args(["--format", "qcow2"]),
        false => command.arg(&paths.image),
    };
    command.arg("--nbd").arg(uri(&paths.nbd));
    command.arg("--socket").arg(&paths.vhost);
    if let Some(mode) = serve.cache {
        command.arg("--cache").arg(&paths.cache).args(["--cache-mode", mode.word()]);
        if !paths.cache.exists() {
            command.args(["--cache-size", &CACHE_BYTES.to_string()]);
            let line = 4096u64 << (shape.size / 512 % 5);
            command.args(["--cache-line", &line.to_string()]);
        }
    }
    let flags: [(bool, &[&str]); 5] = [
        (serve.read_only, &["--read-only"]),
        (serve.ignore_discards, &["--discard", "ignore"]),
        (serve.no_prefetch, &["--prefetch", "off"]),
        (serve.little_memory, &["--metadata-memory", "64KiB"]),
        (serve.buffered && !has_store, &["--buffered"]),
    ];
    for (is_set, options) in flags {
        if is_set {
            command.args(options);
        }
    }
    command
}

/// Starts qemu-nbd to export the image's file, which cannot grow then.
fn start_store(paths: &Paths) -> Result<Process, Fault> {
    let mut command = killed_with_parent("qemu-nbd");
    command.args(["-f", "raw", "--persistent", "--cache=writeback", "--discard=unmap"]);
    command.args(["-x", EXPORT, "-k"]).arg(&paths.store).arg(&paths.image);
    let _ = std::fs::remove_file(&paths.store);
    let store = Process::start(command).map_err(|error| Fault::new("set-up", format!("{error:#}")))?;
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = UnixStream::connect(&paths.store) {
        if Instant::now() > deadline || store.has_ended() {
            return Err(Fault::new("set-up", format!("qemu-nbd: {error}; {}", store.output())));
        }
        std::thread::sleep(Duration::from_micros(300));
    }
    Ok(store)
}
