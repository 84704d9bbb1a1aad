//! `larder disk serve` as a child process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::process::Process;

/// A server that listens.
pub struct Server {
    /// The process.
    pub process: Process,
    /// Path of the server's socket.
    pub socket: PathBuf,
}

const LIMIT: Duration = Duration::from_secs(240);

impl Server {
    /// Starts a server, and waits until it listens.
    ///
    /// # Errors
    /// If the server exits instead; with its output.
    pub fn start(binary: &Path, image: &Path, socket: &Path, options: &[&str]) -> anyhow::Result<Self> {
        let mut command = Command::new(binary);
        command.args(["disk", "serve"]).arg(image).arg("--socket").arg(socket).args(options);
        Self::from_command(command, socket)
    }

    /// Starts a command that listens at `socket`, and waits until it does.
    ///
    /// # Errors
    /// As in [`Server::start`].
    pub fn from_command(command: Command, socket: &Path) -> anyhow::Result<Self> {
        let process = Process::start(command)?;
        process.wait_for("serving", LIMIT)?;
        Ok(Self { process, socket: socket.to_owned() })
    }

    /// Stops the server. Returns its exit code.
    ///
    /// # Errors
    /// If it does not exit.
    pub fn stop(mut self) -> anyhow::Result<Option<i32>> {
        self.ask_to_end()
    }

    /// Stops the server without consuming it, so that it can be replaced later. Returns its exit code.
    ///
    /// # Errors
    /// As in [`Server::stop`].
    pub fn ask_to_end(&mut self) -> anyhow::Result<Option<i32>> {
        self.process.signal(libc::SIGTERM);
        Ok(self.process.wait(LIMIT)?.code())
    }
}
