//! A disk that Larder serves, from its image or from an NBD server, with or without a cache, and the server to kill.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;

use super::cached::{CacheMode, CacheRetention, Holds, TestCacheOptions};
use super::guest::LIMIT;
use super::process::Process;
use super::server::Server;

/// Server to kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// Larder, which serves the image
    Larder,
    /// nbdkit, of which Larder is a client
    Nbdkit,
    /// nbdkit with a write-back cache of its own: a kill loses unflushed data
    NbdkitCache,
    /// qemu-nbd, of which Larder is a client
    QemuNbd,
}

/// Format of the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Raw: the disk, byte for byte
    #[default]
    Raw,
    /// qcow2 with clusters of 4 KiB, so that most writes allocate
    Qcow2,
}

/// Server to kill, and the disk's configuration.
#[derive(Clone, Copy)]
pub struct Victim<'a> {
    /// Path of the `larder` program.
    pub larder: &'a Path,
    /// Server to kill.
    pub target: Target,
    /// Format of the image.
    pub format: Format,
    /// Options of the disk's cache, if it has one.
    pub cache: Option<TestCacheOptions>,
    /// True if all layers are stacked: read-ahead over the cache over qcow2 over NBD.
    pub whole: bool,
}

impl<'a> From<&'a Path> for Victim<'a> {
    /// Kills Larder itself, without a cache.
    fn from(larder: &'a Path) -> Self {
        Self { larder, target: Target::Larder, format: Format::Raw, cache: None, whole: false }
    }
}

impl Victim<'_> {
    /// Returns the NBD server that Larder reads the image from, if any.
    fn store(&self) -> Option<Target> {
        match self.target {
            // Not nbdkit: version 1.32 may die with its client, when one thread closes the connection and another one
            // replies on it.
            Target::Larder => self.whole.then_some(Target::QemuNbd),
            store => Some(store),
        }
    }

    /// Returns whether flushed writes are on the image, whatever layers are above it.
    pub fn image_has_flushed_data(&self) -> bool {
        !self.cache.is_some_and(|cache| cache.mode.keeps_dirty())
    }
}

/// Export protocol of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// vhost-user, to one front-end.
    VhostUser,
    /// NBD, to changing clients.
    Nbd,
}

/// Paths of all files and sockets of the disk.
struct Places<'a> {
    image: &'a Path,
    socket: PathBuf,
    control: PathBuf,
    store: PathBuf,
    cache: PathBuf,
    state: PathBuf,
}

/// Larder's error message while another server's locks exist.
const IN_USE: &str = "in use by another process";

/// The servers of one disk.
pub struct Disk<'a> {
    victim: Victim<'a>,
    places: Places<'a>,
    export: Export,
    /// Cache options for the next server.
    cache: Option<TestCacheOptions>,
    server: Server,
    store: Option<Process>,
    /// Number of output lines of Larder when the store was killed.
    said: usize,
    /// Cache statistics before the last kill.
    before: Option<Holds>,
    /// Cache survival over the kills so far.
    pub warmth: CacheRetention,
}

impl<'a> Disk<'a> {
    /// Serves `image` to a front-end, with sockets in `directory`, whose path should be short. Removes what an earlier
    /// image's disk has left there.
    ///
    /// # Errors
    /// If a server does not start.
    pub fn start(victim: Victim<'a>, image: &'a Path, directory: &Path) -> anyhow::Result<Self> {
        Self::export(victim, image, directory, Export::VhostUser)
    }

    /// Serves `image` over the given protocol; otherwise as [`Disk::start`].
    ///
    /// # Errors
    /// As in [`Disk::start`].
    pub fn export(victim: Victim<'a>, image: &'a Path, directory: &Path, export: Export) -> anyhow::Result<Self> {
        let places = Places {
            image,
            socket: directory.join("socket"),
            control: directory.join("control"),
            store: directory.join("nbd"),
            cache: image.with_extension("cache"),
            state: image.with_extension("state"),
        };
        for stale_file in [&places.cache, &places.store] {
            if stale_file.exists() {
                std::fs::remove_file(stale_file)?;
            }
        }
        let store = start_store(&victim, &places)?;
        if let Some(store) = &store {
            wait_until_listening(store, &places.store)?;
        }
        let server = Server::from_command(serve(&victim, &places, export, victim.cache), &places.socket)?;
        Ok(Self {
            victim,
            places,
            export,
            cache: victim.cache,
            server,
            store,
            said: 0,
            before: None,
            warmth: CacheRetention::default(),
        })
    }

    /// Path of the socket on which Larder listens.
    pub fn socket(&self) -> &Path {
        &self.places.socket
    }

    /// URI under which Larder serves NBD clients.
    pub fn uri(&self) -> String {
        nbd_uri(&self.places.socket)
    }

    /// Path of the disk's image.
    pub fn image(&self) -> &'a Path {
        self.places.image
    }

    /// Server to kill, and the disk's configuration.
    pub fn victim(&self) -> &Victim<'a> {
        &self.victim
    }

    /// Format of the image.
    pub fn format(&self) -> Format {
        self.victim.format
    }

    /// Returns whether the server to kill is an NBD server behind Larder.
    pub fn is_remote(&self) -> bool {
        self.victim.target != Target::Larder
    }

    /// Returns whether an NBD server behind Larder is running.
    pub fn has_store(&self) -> bool {
        self.store.is_some()
    }

    /// Returns whether reads of the disk may bypass the cache: in pass-through mode, or with read-ahead above the
    /// cache.
    pub fn may_bypass_cache(&self) -> bool {
        self.victim.whole || self.cache.is_some_and(|cache| cache.mode == CacheMode::Pt)
    }

    /// Reads the cache's statistics, if the server has a cache now.
    ///
    /// # Errors
    /// If the cache does not work.
    pub fn holds(&self) -> anyhow::Result<Option<Holds>> {
        self.cache.map(|_| Holds::ask(&self.places.control)).transpose()
    }

    /// Records the cache's statistics, for a comparison with the next server's.
    ///
    /// # Errors
    /// If the cache does not work.
    pub fn record_cache_stats(&mut self) -> anyhow::Result<Option<Holds>> {
        self.before = match self.is_remote() {
            true => None,
            false => self.holds()?,
        };
        Ok(self.before)
    }

    /// Kills the target. On return it has exited, and Larder has noticed the loss of its store, if that was the
    /// target.
    ///
    /// # Errors
    /// If Larder does not notice.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if !self.is_remote() {
            self.server.process.kill();
            return Ok(());
        }
        let store = self.store.as_mut().context("the disk has no NBD server behind it")?;
        self.said = self.server.process.lines();
        store.kill();
        let connection_lost = "the connection is lost";
        self.server.process.wait_for_after(self.said, connection_lost, LIMIT)?;
        Ok(())
    }

    /// Kills the store of a dead Larder, so that no outstanding request still takes effect.
    pub fn kill_nbd_server(&mut self) {
        if let Some(store) = &mut self.store {
            store.kill();
        }
        self.store = None;
    }

    /// Stops Larder, which can be started again.
    ///
    /// # Errors
    /// If it does not exit, or exits with an error.
    pub fn end(&mut self) -> anyhow::Result<()> {
        self.before = None;
        let code = self.server.ask_to_end()?;
        let output = self.server.process.output();
        ensure!(code == Some(0), "the server exited with {code:?}: {output}");
        Ok(())
    }

    /// Writes the dirty lines of a killed server's cache to the disk.
    ///
    /// # Errors
    /// If `larder disk cache flush` fails, with its message.
    pub fn flush_cache(&self) -> anyhow::Result<()> {
        let mut command = Command::new(self.victim.larder);
        command.args(["disk", "cache", "flush"]).arg(&self.places.cache);
        let output = command.env("STATE_DIRECTORY", &self.places.state).output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the cache was not flushed: {stderr}");
        Ok(())
    }

    /// Starts the target again with the same configuration.
    ///
    /// # Errors
    /// If it does not start.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.restart_with(self.victim.cache)
    }

    /// Starts the target again with a cache of this mode.
    ///
    /// # Errors
    /// If it does not start.
    pub fn restart_with_mode(&mut self, mode: CacheMode) -> anyhow::Result<()> {
        self.restart_with(self.victim.cache.map(|cache| TestCacheOptions { mode, ..cache }))
    }

    /// Starts Larder again without its cache, whose content is stale from then on.
    ///
    /// # Errors
    /// If it does not start.
    pub fn restart_without_cache(&mut self) -> anyhow::Result<()> {
        self.before = None;
        self.restart_with(None)
    }

    fn restart_with(&mut self, cache: Option<TestCacheOptions>) -> anyhow::Result<()> {
        if self.is_remote() || (self.victim.store().is_some() && self.store.is_none()) {
            // nbdkit does not reuse the socket of a dead server.
            std::fs::remove_file(&self.places.store)?;
            self.store = start_store(&self.victim, &self.places)?;
        }
        if self.is_remote() {
            return Ok(());
        }
        if let Some(store) = &self.store {
            wait_until_listening(store, &self.places.store)?;
        }
        self.cache = cache;
        let deadline = Instant::now() + LIMIT;
        loop {
            let command = serve(&self.victim, &self.places, self.export, cache);
            match Server::from_command(command, &self.places.socket) {
                // A dead server's locks stay until its last I/O has ended, which can take long on a slow disk.
                Err(error) if error.to_string().contains(IN_USE) && Instant::now() < deadline => {}
                started => break self.server = started?,
            }
        }
        Ok(())
    }

    /// Waits until the cache is loaded, and records how much of it survived the kill.
    ///
    /// # Errors
    /// If the cache does not work.
    pub fn record_retention(&mut self) -> anyhow::Result<()> {
        if let (Some(before), Some(_)) = (self.before.take(), self.cache) {
            let after = Holds::loaded(&self.places.control, before)?;
            self.warmth.killed(before, after);
        }
        Ok(())
    }

    /// Asserts that Larder refuses to start with its cache, with a message that contains `reason`.
    ///
    /// # Errors
    /// If it starts, or fails with another message.
    pub fn is_refused(&self, reason: &str) -> anyhow::Result<()> {
        let command = serve(&self.victim, &self.places, self.export, self.victim.cache);
        match Server::from_command(command, &self.places.socket) {
            Ok(_) => bail!("the disk was served although {reason}"),
            Err(error) => {
                let text = format!("{error:#}");
                ensure!(text.contains(reason), "the error should say that {reason}: {text}");
                Ok(())
            }
        }
    }

    /// Asserts that the running server has logged one of these texts.
    ///
    /// # Errors
    /// If it has not, with its output.
    pub fn assert_logged_any(&self, texts: &[&str]) -> anyhow::Result<()> {
        let output = self.server.process.output();
        let found = texts.iter().any(|text| output.contains(text));
        ensure!(found, "none of {texts:?} is in: {output}");
        Ok(())
    }

    /// Returns the image's modification time.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn modified(&self) -> anyhow::Result<SystemTime> {
        Ok(std::fs::metadata(self.places.image)?.modified()?)
    }

    /// Sets the image's modification time.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn set_image_mtime(&self, time: SystemTime) -> anyhow::Result<()> {
        let file = std::fs::File::options().write(true).open(self.places.image)?;
        Ok(file.set_modified(time)?)
    }

    /// Sets the image's modification time to now plus `offset`.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn shift_image_mtime(&self, offset: Duration) -> anyhow::Result<()> {
        self.set_image_mtime(SystemTime::now() + offset)
    }

    /// Waits until the restarted target has its client back: QEMU's front-end, or Larder after it has repeated all
    /// requests that may be lost.
    ///
    /// # Errors
    /// If the client does not reconnect.
    pub fn wait_until_connected(&self) -> anyhow::Result<()> {
        let connected_text = match self.is_remote() {
            false => "front-end connected",
            true => "reconnected",
        };
        self.server.process.wait_for_after(self.said, connected_text, LIMIT)?;
        Ok(())
    }

    /// Returns whether requests were in flight at the last kill.
    pub fn was_interrupted(&self) -> bool {
        let output = self.server.process.output();
        match self.is_remote() {
            false => output.contains("resubmitting requests"),
            true => output
                .lines()
                .rfind(|line| line.contains("the connection is lost"))
                .is_some_and(|line| !line.contains("unanswered=0 ")),
        }
    }

    /// Stops Larder for good.
    ///
    /// # Errors
    /// As in [`Disk::end`].
    pub fn stop(mut self) -> anyhow::Result<()> {
        self.end()
    }
}

/// Creates a new image of a disk of `len` bytes.
///
/// # Errors
/// If a system call or `qemu-img` fails.
pub fn create(victim: &Victim<'_>, image: &Path, len: u64) -> anyhow::Result<()> {
    match victim.format {
        Format::Raw => std::fs::File::create(image)?.set_len(len)?,
        Format::Qcow2 => {
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"]);
            qemu_img(command.arg(image).arg(len.to_string()), &[0])?;
            if victim.store().is_some() {
                // An export cannot grow.
                std::fs::File::options().write(true).open(image)?.set_len(len * 2)?;
            }
        }
    }
    Ok(())
}

/// Returns the disk's bytes as QEMU reads them from a qcow2 image, which may be open in an idle server. Leaks are
/// allowed, errors are not.
///
/// # Errors
/// If `qemu-img` finds errors.
pub fn qcow2_contents(image: &Path) -> anyhow::Result<Vec<u8>> {
    // Exit code 3: leaks, but no errors.
    qemu_img(Command::new("qemu-img").args(["check", "-U"]).arg(image), &[0, 3])?;
    let raw = image.with_extension("contents");
    let mut command = Command::new("qemu-img");
    qemu_img(command.args(["convert", "-U", "-O", "raw"]).arg(image).arg(&raw), &[0])?;
    Ok(std::fs::read(raw)?)
}

fn qemu_img(command: &mut Command, codes: &[i32]) -> anyhow::Result<()> {
    let output = command.output().context("qemu-img")?;
    let code = output.status.code().unwrap_or(-1);
    ensure!(
        codes.contains(&code),
        "{command:?} exited with {code}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn nbd_uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

/// Returns the `larder disk serve` command with this cache, or none.
fn serve(victim: &Victim<'_>, places: &Places<'_>, export: Export, cache: Option<TestCacheOptions>) -> Command {
    let mut command = Command::new(victim.larder);
    command.args(["disk", "serve"]);
    match (victim.store(), victim.format) {
        (None, _) => command.arg(places.image),
        (Some(_), Format::Raw) => command.arg(nbd_uri(&places.store)),
        (Some(_), Format::Qcow2) => command.arg(nbd_uri(&places.store)).args(["--format", "qcow2"]),
    };
    match export {
        Export::VhostUser => command.arg("--socket").arg(&places.socket),
        Export::Nbd => command.arg("--nbd").arg(nbd_uri(&places.socket)),
    };
    if let Some(TestCacheOptions { mode, size }) = cache {
        command.arg("--control").arg(&places.control);
        command.arg("--cache").arg(&places.cache);
        command.args(["--cache-size", &size.to_string(), "--cache-mode", mode.word()]);
        if !victim.whole {
            // Without read-ahead every read reaches the cache.
            command.args(["--prefetch", "off"]);
        }
        command.env("STATE_DIRECTORY", &places.state);
    }
    command
}

fn start_store(victim: &Victim<'_>, places: &Places<'_>) -> anyhow::Result<Option<Process>> {
    let Some(store) = victim.store() else { return Ok(None) };
    let (program, options, image_arguments): (_, &[&str], &[&str]) = match store {
        Target::Larder => return Ok(None),
        Target::Nbdkit => ("nbdkit", &["-f", "-U"], &["file"]),
        Target::NbdkitCache => ("nbdkit", &["-f", "--filter=cache", "-U"], &["file"]),
        Target::QemuNbd => ("qemu-nbd", &["-f", "raw", "--persistent", "--cache=writeback", "-k"], &[]),
    };
    let mut command = Command::new(program);
    command.args(options).arg(&places.store).args(image_arguments).arg(places.image);
    Process::start(command).map(Some)
}

/// Waits until the NBD server listens. A starting Larder needs that; a running one must reconnect by itself.
fn wait_until_listening(store: &Process, socket: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    while let Err(error) = std::os::unix::net::UnixStream::connect(socket) {
        if Instant::now() > deadline {
            return Err(error).with_context(|| format!("the NBD server does not listen: {}", store.output()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
