//! fio as a client of NBD servers, and on files.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, bail};

use super::servers::text;
use crate::vhost_user::server::killed_with_parent;

/// An fio job: reads of one size, for a set time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) random: bool,
    /// Bytes of a read.
    pub(super) block: u64,
    /// Reads in flight of each thread.
    pub(super) depth: u32,
    /// Threads, each with a connection and a part of the disk of its own.
    pub(super) jobs: u32,
    pub(super) seconds: f64,
    /// Bytes of the disk.
    pub(super) size: u64,
}

/// Measurements of fio, summed over all threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    /// Number of reads.
    pub(super) reads: u64,
    pub(super) iops: f64,
    pub(super) bytes_per_second: f64,
}

impl Job {
    /// Runs the job on the NBD server at `socket`.
    pub(super) fn run_nbd(&self, socket: &Path) -> anyhow::Result<Measured> {
        let uri = format!("--uri=nbd+unix:///?socket={}", text(socket)?);
        self.run(&["--ioengine=nbd", &uri])
    }

    /// Runs the job on a file with direct I/O.
    pub(super) fn run_file(&self, path: &Path) -> anyhow::Result<Measured> {
        let name = format!("--filename={}", text(path)?);
        self.run(&["--ioengine=io_uring", "--direct=1", &name])
    }

    fn run(&self, target: &[&str]) -> anyhow::Result<Measured> {
        let bytes_per_thread = self.size / u64::from(self.jobs);
        let mut command = killed_with_parent("fio");
        command.args(["--name=job", "--output-format=json", "--thread", "--group_reporting"]);
        command.args(["--time_based", "--norandommap"]);
        command.args([
            format!("--rw={}", if self.random { "randread" } else { "read" }),
            format!("--bs={}", self.block),
            format!("--iodepth={}", self.depth),
            format!("--numjobs={}", self.jobs),
            format!("--runtime={}ms", (self.seconds * 1e3) as u64),
            format!("--size={bytes_per_thread}"),
            format!("--offset_increment={bytes_per_thread}"),
        ]);
        let output = command.args(target).stdin(Stdio::null()).output()?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            bail!("fio: {}{stdout}", String::from_utf8_lossy(&output.stderr));
        }
        // Messages may precede the JSON.
        let json = stdout.find('{').map_or("", |start| &stdout[start..]);
        let report: serde_json::Value =
            serde_json::from_str(json).with_context(|| format!("fio's report: {stdout}"))?;
        let read = &report["jobs"][0]["read"];
        let number = |name: &str| {
            let value = read[name].as_f64();
            value.with_context(|| format!("fio's report has no '{name}': {stdout}"))
        };
        Ok(Measured {
            reads: number("total_ios")? as u64,
            iops: number("iops")?,
            bytes_per_second: number("bw_bytes")?,
        })
    }
}
