//! Starts, measures and stops the servers to compare.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
pub(crate) use larder_bench::campaign::process::killed_with_parent;

/// A server process, which is killed when this is dropped.
pub(crate) struct Server {
    child: Child,
    socket: PathBuf,
}

/// CPU time of a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuTime(pub(crate) Duration);

impl Server {
    /// Starts a command line, split at blanks, in which `{image}` and `{socket}` stand for the two paths.
    pub(crate) fn start(command: &str, image: &Path, socket: &Path) -> anyhow::Result<Self> {
        // The previous server's socket may still exist.
        let _ = fs::remove_file(socket);
        let substitute = |word: &str| {
            word.replace("{image}", &image.display().to_string()).replace("{socket}", &socket.display().to_string())
        };
        let mut arguments = command.split_whitespace().map(substitute);
        let program = arguments.next().context("the server command is empty")?;
        let mut command = killed_with_parent(&program);
        if std::env::var_os("LARDER_LOG").is_none() {
            command.env("LARDER_LOG", "warn");
        }
        let child = command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {program}"))?;
        let mut server = Self { child, socket: socket.to_owned() };
        server.wait_until_ready()?;
        Ok(server)
    }

    fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !self.socket.exists() {
            if let Some(status) = self.child.try_wait()? {
                bail!("the server exited before it listened: {status}");
            }
            if Instant::now() > deadline {
                bail!("the server does not listen on {}", self.socket.display());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Returns the server's anonymous memory in bytes, without files and the client's memory.
    pub(crate) fn memory_bytes(&self) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        Ok(kib.context("no RssAnon in the server's status")?.parse::<u64>()? << 10)
    }

    /// Returns the CPU time of all threads so far, to the nanosecond.
    pub(crate) fn cpu_time(&self) -> anyhow::Result<CpuTime> {
        let mut nanos = 0;
        for thread in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let text = fs::read_to_string(thread?.path().join("schedstat"))?;
            let first = text.split_whitespace().next().context("schedstat is empty")?;
            nanos += first.parse::<u64>()?;
        }
        Ok(CpuTime(Duration::from_nanos(nanos)))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have exited by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}
