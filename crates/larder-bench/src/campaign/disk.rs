//! A disk served by Larder, from its image or from an NBD server, and the one of both that is killed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::ValueEnum;

use super::guest::LIMIT;
use super::process::Process;
use super::server::Server;

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// Larder, which serves the image
    Larder,
    /// nbdkit, whose client Larder is
    Nbdkit,
    /// nbdkit with a write-back cache of its own: what was not flushed dies with it
    NbdkitCache,
    /// qemu-nbd, whose client Larder is
    QemuNbd,
}

/// What the image is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The disk, byte for byte
    #[default]
    Raw,
    /// qcow2 with clusters of 4 KiB, so that most writes allocate
    Qcow2,
}

/// The target, and the larder to serve with.
#[derive(Clone, Copy)]
pub struct Victim<'a> {
    /// The program.
    pub larder: &'a Path,
    /// Who is killed.
    pub target: Target,
    /// What the image is.
    pub format: Format,
}

impl<'a> From<&'a Path> for Victim<'a> {
    /// Larder itself.
    fn from(larder: &'a Path) -> Self {
        Self {
            larder,
            target: Target::Larder,
            format: Format::Raw,
        }
    }
}

/// The servers of one disk.
pub struct Disk<'a> {
    victim: Victim<'a>,
    image: &'a Path,
    /// Where Larder listens for the front-end.
    pub socket: PathBuf,
    remote_socket: PathBuf,
    server: Server,
    remote: Option<Process>,
    /// Lines that Larder had said when the remote server was killed.
    said: usize,
}

impl<'a> Disk<'a> {
    /// Serves `image`, with sockets in `folder`, which should have a short path.
    ///
    /// # Errors
    /// A server does not start.
    pub fn start(victim: Victim<'a>, image: &'a Path, folder: &Path) -> anyhow::Result<Self> {
        let (socket, remote_socket) = (folder.join("socket"), folder.join("nbd"));
        let remote = start_remote(victim.target, image, &remote_socket)?;
        if let Some(remote) = &remote {
            wait_until_listening(remote, &remote_socket)?;
        }
        let server = start_larder(victim, image, &socket, &remote_socket)?;
        Ok(Self {
            victim,
            image,
            socket,
            remote_socket,
            server,
            remote,
            said: 0,
        })
    }

    /// What the image is.
    pub fn format(&self) -> Format {
        self.victim.format
    }

    /// Whether the one that dies is an NBD server behind Larder.
    pub fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// Kills the target. When this returns it is gone, and Larder knows that its remote server is.
    ///
    /// # Errors
    /// Larder does not notice.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        let Some(remote) = &mut self.remote else {
            self.server.process.kill();
            return Ok(());
        };
        self.said = self.server.process.lines();
        remote.kill();
        let lost = "the connection is lost";
        self.server.process.wait_for_after(self.said, lost, LIMIT)?;
        Ok(())
    }

    /// Starts the target again.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        match &mut self.remote {
            None => self.server = start_larder(self.victim, self.image, &self.socket, &self.remote_socket)?,
            Some(_) => {
                // nbdkit does not take over the socket of a dead one.
                std::fs::remove_file(&self.remote_socket)?;
                self.remote = start_remote(self.victim.target, self.image, &self.remote_socket)?;
            }
        }
        Ok(())
    }

    /// Waits until the new server has the client of the dead one: QEMU, or Larder with all repeated that may be lost.
    ///
    /// # Errors
    /// That does not happen.
    pub fn wait_until_connected(&self) -> anyhow::Result<()> {
        let connected = match self.remote {
            None => "front-end connected",
            Some(_) => "connected again",
        };
        self.server.process.wait_for_after(self.said, connected, LIMIT)?;
        Ok(())
    }

    /// Whether the last kill met requests in flight.
    pub fn was_interrupted(&self) -> bool {
        let said = self.server.process.output();
        match self.remote {
            None => said.contains("taking up requests"),
            Some(_) => said
                .lines()
                .rfind(|line| line.contains("the connection is lost"))
                .is_some_and(|line| !line.contains("unanswered=0 ")),
        }
    }

    /// Asks Larder to end.
    ///
    /// # Errors
    /// It does not, or says that it failed.
    pub fn stop(self) -> anyhow::Result<()> {
        let code = self.server.stop()?;
        ensure!(code == Some(0), "the server ended with {code:?}");
        Ok(())
    }
}

/// Makes a new image of `len` bytes.
///
/// # Errors
/// The host's, or `qemu-img` fails.
pub fn create(format: Format, image: &Path, len: u64) -> anyhow::Result<()> {
    match format {
        Format::Raw => std::fs::File::create(image)?.set_len(len)?,
        Format::Qcow2 => {
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"]);
            qemu_img(command.arg(image).arg(len.to_string()), &[0])?;
        }
    }
    Ok(())
}

/// The disk's bytes as QEMU reads them from a qcow2 image, which may be in use but at rest. Leaks are allowed, errors
/// are not.
///
/// # Errors
/// `qemu-img` finds errors.
pub fn qcow2_contents(image: &Path) -> anyhow::Result<Vec<u8>> {
    // 3: leaks, but no errors.
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
        "{command:?} ended with {code}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn start_larder(victim: Victim<'_>, image: &Path, socket: &Path, remote_socket: &Path) -> anyhow::Result<Server> {
    let uri = PathBuf::from(format!("nbd+unix:///?socket={}", remote_socket.display()));
    let image = match victim.target {
        Target::Larder => image,
        _ => &uri,
    };
    Server::start(victim.larder, image, socket, &[])
}

fn start_remote(target: Target, image: &Path, socket: &Path) -> anyhow::Result<Option<Process>> {
    let (program, options, image_words): (_, &[&str], &[&str]) = match target {
        Target::Larder => return Ok(None),
        Target::Nbdkit => ("nbdkit", &["-f", "-U"], &["file"]),
        Target::NbdkitCache => ("nbdkit", &["-f", "--filter=cache", "-U"], &["file"]),
        Target::QemuNbd => (
            "qemu-nbd",
            &["-f", "raw", "--persistent", "--cache=writeback", "-k"],
            &[],
        ),
    };
    let mut command = Command::new(program);
    command.args(options).arg(socket).args(image_words).arg(image);
    Process::start(command).map(Some)
}

/// Only the first start is waited for: Larder must not need it later.
fn wait_until_listening(remote: &Process, socket: &Path) -> anyhow::Result<()> {
    let give_up = Instant::now() + LIMIT;
    while let Err(error) = std::os::unix::net::UnixStream::connect(socket) {
        if Instant::now() > give_up {
            return Err(error).with_context(|| format!("no NBD server: {}", remote.output()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
