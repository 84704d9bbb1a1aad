//! Larder servers with and without read-ahead, and their statistics.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use larder_block::ByteLen;
use larder_prefetch::PrefetchStatistics;
use serde_json::Value;

use super::place::Place;
use crate::vhost_user::larder;
use crate::vhost_user::server::Server;

/// Memory for Larder's read-ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Prefetch {
    Off,
    /// Larder's default.
    Default,
    Of(ByteLen),
}

impl Prefetch {
    fn option(self) -> String {
        match self {
            Self::Off => "--prefetch off".to_owned(),
            Self::Default => String::new(),
            Self::Of(len) => format!("--prefetch {}", len.get()),
        }
    }
}

/// Export protocol of the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Export {
    VhostUser,
    Nbd,
}

/// Configuration of a `larder disk serve`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Serve<'a> {
    /// A path or an NBD URI. Files are read with direct I/O where possible.
    pub(crate) image: &'a str,
    pub(crate) format: &'a str,
    pub(crate) prefetch: Prefetch,
    pub(crate) export: Export,
    /// Further options.
    pub(crate) options: &'a str,
}

impl Serve<'_> {
    /// Starts the server, with its socket in `scratch`.
    pub(crate) fn start(&self, scratch: &Place) -> anyhow::Result<Larder> {
        let (socket, control) = (scratch.unused("socket"), scratch.unused("control"));
        let export = match self.export {
            Export::VhostUser => "--socket {socket}",
            Export::Nbd => "--nbd nbd+unix:///?socket={socket}",
        };
        let command = format!(
            "env STATE_DIRECTORY={} {} disk serve {{image}} --format {} {} {} --control {} {export}",
            text(&scratch.path().join("state"))?,
            larder()?.display(),
            self.format,
            self.options,
            self.prefetch.option(),
            text(&control)?,
        );
        let server = Server::start(&command, Path::new(self.image), &socket)?;
        Ok(Larder { server, socket, control })
    }
}

/// A running `larder disk serve`, killed when this is dropped.
pub(crate) struct Larder {
    server: Server,
    socket: PathBuf,
    control: PathBuf,
}

impl Larder {
    /// Returns the path of its socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the output of `larder status` for this server.
    ///
    /// # Errors
    /// If the server does not answer.
    pub(crate) fn status(&self) -> anyhow::Result<Value> {
        let mut status = Command::new(larder()?);
        let output = status.args(["status", "--output", "json"]).arg(&self.control).output()?;
        if !output.status.success() {
            bail!("larder status: {}", String::from_utf8_lossy(&output.stderr));
        }
        serde_json::from_slice(&output.stdout).context("parsing the output of larder status")
    }

    /// Returns the read-ahead statistics from `larder status`.
    ///
    /// # Errors
    /// If read-ahead is off, or the server does not answer.
    pub(crate) fn statistics(&self) -> anyhow::Result<PrefetchStatistics> {
        let answer = self.status()?;
        statistics(&answer).with_context(|| format!("larder status does not report read-ahead: {answer}"))
    }

    /// Returns the process, for its memory and its CPU time.
    pub(crate) fn server(&self) -> &Server {
        &self.server
    }
}

/// Extracts the read-ahead statistics from a control socket's answer.
fn statistics(answer: &Value) -> Option<PrefetchStatistics> {
    let prefetch = &answer["disks"][0]["prefetch"];
    let counter = |name: &str| prefetch[name].as_u64();
    let streams = |name: &str| prefetch["streams"][name].as_u64();
    Some(PrefetchStatistics {
        fetched: counter("fetched")?,
        used: counter("used")?,
        wasted: counter("wasted")?,
        unread: counter("unread")?,
        hits: counter("hits")?,
        waits: counter("waits")?,
        partial_hits: counter("partial_hits")?,
        misses: counter("misses")?,
        bypassed: counter("bypassed")?,
        errors: counter("errors")?,
        streams_forward: streams("forward")?,
        streams_backward: streams("backward")?,
        streams_strided: streams("strided")?,
        streams: streams("now")?,
        memory: counter("memory")?,
    })
}

/// Returns a path as text for commands and URIs, which must have no blanks.
pub(crate) fn text(path: &Path) -> anyhow::Result<&str> {
    let text = path.to_str().context("a path that is not UTF-8")?;
    if text.contains(char::is_whitespace) {
        bail!("the path '{text}' contains blanks, which these experiments do not support");
    }
    Ok(text)
}

/// Starts nbdkit with `image` and the additional latency `latency` for each read; writes go to a temporary overlay.
/// Returns the server and the URI of its disk.
pub(crate) fn slow_nbd(scratch: &Place, image: &Path, latency: Duration) -> anyhow::Result<(Server, String)> {
    let socket = scratch.unused("nbd");
    let command = format!(
        "nbdkit --foreground --log=null --unix {{socket}} --threads 64 --filter=delay --filter=cow file {{image}} \
         rdelay={}ms",
        latency.as_millis()
    );
    let server = Server::start(&command, image, &socket)?;
    Ok((server, format!("nbd+unix:///?socket={}", text(&socket)?)))
}
