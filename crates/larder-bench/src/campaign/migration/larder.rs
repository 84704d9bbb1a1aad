//! Commands and processes of `larder migrate send` and `larder migrate receive`.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;

use super::super::process::{Process, killed_with_parent};
use super::LIMIT;

/// Limit for a side's exit after the other one has died: it gives up after 10 s of silence.
pub const END_LIMIT: Duration = Duration::from_secs(240);

/// A running sender or receiver; killed when this is dropped.
pub struct Side {
    /// The process.
    pub process: Process,
    /// Address on which a receiver listens.
    pub address: Option<SocketAddr>,
}

/// Keeps the state of a side that uses TLS, such as known hosts, beside its certificates instead of in this host's
/// state directory.
fn with_state_directory(mut command: Command, arguments: &[&str]) -> Command {
    if let Some([_, directory]) = arguments.windows(2).find(|pair| pair[0] == "--tls") {
        command.env("STATE_DIRECTORY", Path::new(directory).join("state"));
    }
    command
}

/// Returns the `larder migrate receive` command for the incoming QEMU at `connect`, with further arguments.
pub fn receive_command(larder: &Path, listen: &str, connect: &Path, arguments: &[&str]) -> Command {
    let mut command = killed_with_parent(larder.to_str().expect("UTF-8"));
    command.args(["migrate", "receive", "--listen", listen, "--connect"]).arg(connect).args(arguments);
    with_state_directory(command, arguments)
}

/// Returns the `larder migrate send` command for the QEMU that migrates to `listen`, with further arguments.
pub fn send_command(larder: &Path, listen: &Path, to: &str, arguments: &[&str]) -> Command {
    let mut command = killed_with_parent(larder.to_str().expect("UTF-8"));
    command.args(["migrate", "send", "--to", to, "--listen"]).arg(listen).args(arguments);
    with_state_directory(command, arguments)
}

/// Returns the `larder migrate --qmp` command for a whole move to a receiver at `to`.
pub fn whole_move_command(larder: &Path, qmp: &Path, to: &str, arguments: &[&str]) -> Command {
    let mut command = killed_with_parent(larder.to_str().expect("UTF-8"));
    command.args(["migrate", "--to", to, "--output", "json", "--qmp"]).arg(qmp).args(arguments);
    with_state_directory(command, arguments)
}

/// Returns the `larder migrate receive` command for a whole move to the QEMU with this monitor.
pub fn whole_receive_command(larder: &Path, listen: &str, qmp: &Path, arguments: &[&str]) -> Command {
    let mut command = killed_with_parent(larder.to_str().expect("UTF-8"));
    command.args(["migrate", "receive", "--listen", listen, "--qmp"]).arg(qmp).args(arguments);
    with_state_directory(command, arguments)
}

/// Returns the `larder migrate --take-back` command for the QEMU with this monitor.
pub fn take_back_command(larder: &Path, qmp: &Path) -> Command {
    let mut command = killed_with_parent(larder.to_str().expect("UTF-8"));
    command.args(["migrate", "--take-back", "--qmp"]).arg(qmp);
    command
}

/// Parses the final result of `larder migrate --output json`; `None` if there is none, because it was killed or
/// failed early.
pub fn verdict(output: &str) -> Option<Value> {
    // Log lines may stand between the lines of the JSON.
    let lines = output.lines().filter(|line| line.starts_with([' ', '{', '}']));
    serde_json::from_str(&lines.collect::<String>()).ok()
}

impl Side {
    /// Runs a receiver's command, and waits until it listens.
    ///
    /// # Errors
    /// If it does not, with its output.
    pub fn listening(command: Command) -> anyhow::Result<Self> {
        let process = Process::start(command)?;
        let text = process.wait_for("ready to receive on ", LIMIT)?;
        let address = text.rsplit(' ').next().and_then(|word| word.parse().ok());
        Ok(Self {
            process,
            address: Some(address.with_context(|| format!("no address in the receiver's line '{text}'"))?),
        })
    }

    /// Starts a receiver on a free port, and waits until it listens.
    ///
    /// # Errors
    /// If it does not, with its output.
    pub fn receiver(larder: &Path, connect: &Path, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::listening(receive_command(larder, "127.0.0.1:0", connect, arguments))
    }

    /// Starts a sender, and waits until it is connected and QEMU may migrate.
    ///
    /// # Errors
    /// If the sender does not get that far, with its output.
    pub fn sender(larder: &Path, listen: &Path, to: SocketAddr, arguments: &[&str]) -> anyhow::Result<Self> {
        let process = Process::start(send_command(larder, listen, &to.to_string(), arguments))?;
        process.wait_for("ready to send to ", LIMIT)?;
        Ok(Self { process, address: None })
    }

    /// Returns a receiver's address.
    ///
    /// # Panics
    /// If this is a sender.
    pub fn address(&self) -> SocketAddr {
        self.address.expect("a receiver")
    }

    /// Waits for the process to exit. Returns its exit code (`None` if it was killed) and its output.
    ///
    /// # Errors
    /// If it does not exit.
    pub fn end(&mut self) -> anyhow::Result<(Option<i32>, String)> {
        let status = self.process.wait(END_LIMIT)?;
        Ok((status.code(), self.process.output()))
    }
}
