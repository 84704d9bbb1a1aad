//! `larder migrate send` and `larder migrate receive`.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;

use super::super::process::{Process, mortal};
use super::LIMIT;

/// How long a side may take to end when the other one is gone: it gives up after 10 s of silence.
pub const END_LIMIT: Duration = Duration::from_secs(240);

/// Either side, running; killed when this is dropped.
pub struct Side {
    /// It.
    pub process: Process,
    /// Where a receiver listens.
    pub address: Option<SocketAddr>,
}

/// A side of a move by TLS remembers other hosts beside its certificates, and not where this host does.
fn remembering(mut command: Command, words: &[&str]) -> Command {
    if let Some([_, folder]) = words.windows(2).find(|pair| pair[0] == "--tls") {
        command.env("STATE_DIRECTORY", Path::new(folder).join("state"));
    }
    command
}

/// `larder migrate receive` for the QEMU that waits at `connect`, with further words.
pub fn receive_command(larder: &Path, listen: &str, connect: &Path, words: &[&str]) -> Command {
    let mut command = mortal(larder.to_str().expect("UTF-8"));
    command
        .args(["migrate", "receive", "--listen", listen, "--connect"])
        .arg(connect)
        .args(words);
    remembering(command, words)
}

/// `larder migrate send` for the QEMU that migrates to `listen`, with further words.
pub fn send_command(larder: &Path, listen: &Path, to: &str, words: &[&str]) -> Command {
    let mut command = mortal(larder.to_str().expect("UTF-8"));
    command
        .args(["migrate", "send", "--to", to, "--listen"])
        .arg(listen)
        .args(words);
    remembering(command, words)
}

/// `larder migrate --qmp`, the whole move, to a receiver at `to`.
pub fn move_command(larder: &Path, qmp: &Path, to: &str, words: &[&str]) -> Command {
    let mut command = mortal(larder.to_str().expect("UTF-8"));
    command
        .args(["migrate", "--to", to, "--output", "json", "--qmp"])
        .arg(qmp)
        .args(words);
    remembering(command, words)
}

/// `larder migrate receive` for the whole move to the QEMU with this monitor.
pub fn receive_whole_command(larder: &Path, listen: &str, qmp: &Path, words: &[&str]) -> Command {
    let mut command = mortal(larder.to_str().expect("UTF-8"));
    command
        .args(["migrate", "receive", "--listen", listen, "--qmp"])
        .arg(qmp)
        .args(words);
    remembering(command, words)
}

/// `larder migrate --take-back` for the QEMU with this monitor.
pub fn take_back_command(larder: &Path, qmp: &Path) -> Command {
    let mut command = mortal(larder.to_str().expect("UTF-8"));
    command.args(["migrate", "--take-back", "--qmp"]).arg(qmp);
    command
}

/// What `larder migrate` says in the end with `--output json`; `None` if it was killed, or never came to that.
pub fn verdict(said: &str) -> Option<Value> {
    // It says other things besides, perhaps between two lines of this.
    let lines = said.lines().filter(|line| line.starts_with([' ', '{', '}']));
    serde_json::from_str(&lines.collect::<String>()).ok()
}

impl Side {
    /// Runs either command of a receiver, and waits until it listens.
    ///
    /// # Errors
    /// It does not, with what it said.
    pub fn listening(command: Command) -> anyhow::Result<Self> {
        let process = Process::start(command)?;
        let said = process.wait_for("ready to receive on ", LIMIT)?;
        let address = said.rsplit(' ').next().and_then(|word| word.parse().ok());
        Ok(Self {
            process,
            address: Some(address.with_context(|| format!("no address in '{said}'"))?),
        })
    }

    /// Starts a receiver on a port of its own, and waits until it listens.
    ///
    /// # Errors
    /// It does not, with what it said.
    pub fn receiver(larder: &Path, connect: &Path, words: &[&str]) -> anyhow::Result<Self> {
        Self::listening(receive_command(larder, "127.0.0.1:0", connect, words))
    }

    /// Starts a sender, and waits until it is connected and QEMU may migrate.
    ///
    /// # Errors
    /// It does not get that far, with what it said.
    pub fn sender(larder: &Path, listen: &Path, to: SocketAddr, words: &[&str]) -> anyhow::Result<Self> {
        let process = Process::start(send_command(larder, listen, &to.to_string(), words))?;
        process.wait_for("ready to send to ", LIMIT)?;
        Ok(Self { process, address: None })
    }

    /// A receiver's address.
    ///
    /// # Panics
    /// It is a sender.
    pub fn address(&self) -> SocketAddr {
        self.address.expect("a receiver")
    }

    /// Waits for its end: its exit code (none if it was killed), and all that it has said.
    ///
    /// # Errors
    /// It does not end.
    pub fn end(&mut self) -> anyhow::Result<(Option<i32>, String)> {
        let status = self.process.wait(END_LIMIT)?;
        Ok((status.code(), self.process.output()))
    }
}
