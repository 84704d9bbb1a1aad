//! Larder with and without read-ahead, and what it says about itself.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use larder_block::ByteLen;
use larder_prefetch::Statistics;
use serde_json::Value;

use super::place::Place;
use crate::vhost_user::larder;
use crate::vhost_user::server::Server;

/// The memory that Larder is given to read ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Prefetch {
    Off,
    /// As much as it takes if nothing is said.
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

/// How the disk is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Export {
    VhostUser,
    Nbd,
}

/// A `larder disk serve` that is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Serve<'a> {
    /// A path or an NBD URI. Direct I/O is what a file is read with where there is any.
    pub(crate) image: &'a str,
    pub(crate) format: &'a str,
    pub(crate) prefetch: Prefetch,
    pub(crate) export: Export,
    /// More options.
    pub(crate) options: &'a str,
}

impl Serve<'_> {
    /// Starts it, with its socket in `place`.
    pub(crate) fn start(&self, place: &Place) -> anyhow::Result<Larder> {
        let (socket, control) = (place.unused("socket"), place.unused("control"));
        let export = match self.export {
            Export::VhostUser => "--socket {socket}",
            Export::Nbd => "--nbd nbd+unix:///?socket={socket}",
        };
        let command = format!(
            "env STATE_DIRECTORY={} {} disk serve {{image}} --format {} {} {} --control {} {export}",
            text(&place.path().join("state"))?,
            larder()?.display(),
            self.format,
            self.options,
            self.prefetch.option(),
            text(&control)?,
        );
        let server = Server::start(&command, Path::new(self.image), &socket)?;
        Ok(Larder {
            server,
            socket,
            control,
        })
    }
}

/// A running `larder disk serve`, killed when this goes.
pub(crate) struct Larder {
    server: Server,
    socket: PathBuf,
    control: PathBuf,
}

impl Larder {
    /// Where it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// What `larder status` tells of it.
    ///
    /// # Errors
    /// The server does not answer.
    pub(crate) fn status(&self) -> anyhow::Result<Value> {
        let mut status = Command::new(larder()?);
        let output = status
            .args(["status", "--output", "json"])
            .arg(&self.control)
            .output()?;
        if !output.status.success() {
            bail!("larder status: {}", String::from_utf8_lossy(&output.stderr));
        }
        serde_json::from_slice(&output.stdout).context("the answer of larder status")
    }

    /// What read-ahead has done so far, as `larder status` tells it.
    ///
    /// # Errors
    /// It is off, or the server does not answer.
    pub(crate) fn statistics(&self) -> anyhow::Result<Statistics> {
        let answer = self.status()?;
        statistics(&answer).with_context(|| format!("larder status tells nothing of read-ahead: {answer}"))
    }

    /// The process, for its memory and its CPU time.
    pub(crate) fn server(&self) -> &Server {
        &self.server
    }
}

/// What read-ahead has done, out of the answer of a control socket.
fn statistics(answer: &Value) -> Option<Statistics> {
    let prefetch = &answer["disks"][0]["prefetch"];
    let of = |name: &str| prefetch[name].as_u64();
    let streams = |name: &str| prefetch["streams"][name].as_u64();
    Some(Statistics {
        fetched: of("fetched")?,
        used: of("used")?,
        wasted: of("wasted")?,
        unread: of("unread")?,
        hits: of("hits")?,
        waits: of("waits")?,
        partial_hits: of("partial_hits")?,
        misses: of("misses")?,
        bypassed: of("bypassed")?,
        errors: of("errors")?,
        streams_forward: streams("forward")?,
        streams_backward: streams("backward")?,
        streams_strided: streams("strided")?,
        streams: streams("now")?,
        memory: of("memory")?,
    })
}

/// A path as text, which commands and URIs have it as.
pub(crate) fn text(path: &Path) -> anyhow::Result<&str> {
    let text = path.to_str().context("a path that is not UTF-8")?;
    if text.contains(char::is_whitespace) {
        bail!("the path '{text}' has blanks in it, which these experiments cannot do with");
    }
    Ok(text)
}

/// nbdkit with `image`, which answers each read so much later than it would; what is written goes with it. And the URI
/// of its disk.
pub(crate) fn slow_nbd(place: &Place, image: &Path, latency: Duration) -> anyhow::Result<(Server, String)> {
    let socket = place.unused("nbd");
    let command = format!(
        "nbdkit --foreground --log=null --unix {{socket}} --threads 64 --filter=delay --filter=cow file {{image}} \
         rdelay={}ms",
        latency.as_millis()
    );
    let server = Server::start(&command, image, &socket)?;
    Ok((server, format!("nbd+unix:///?socket={}", text(&socket)?)))
}
