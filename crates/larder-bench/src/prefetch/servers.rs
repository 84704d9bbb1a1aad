//! Larder with and without read-ahead, and what it says about itself.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use larder_block::ByteLen;

use super::place::Place;
use crate::vhost_user::larder;
use crate::vhost_user::server::Server;

/// The memory that Larder is given to read ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Prefetch {
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
pub(super) enum Export {
    VhostUser,
    Nbd,
}

/// A `larder disk serve` that is to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Serve<'a> {
    /// A path or an NBD URI. Direct I/O is what a file is read with where there is any.
    pub(super) image: &'a str,
    pub(super) format: &'a str,
    pub(super) prefetch: Prefetch,
    pub(super) export: Export,
    /// More options.
    pub(super) options: &'a str,
}

impl Serve<'_> {
    /// Starts it, with its socket in `place`.
    pub(super) fn start(&self, place: &Place) -> anyhow::Result<Larder> {
        let socket = place.unused("socket");
        let export = match self.export {
            Export::VhostUser => "--socket {socket}",
            Export::Nbd => "--nbd nbd+unix:///?socket={socket}",
        };
        let command = format!(
            "{} disk serve {{image}} --format {} {} {} {export}",
            larder()?.display(),
            self.format,
            self.options,
            self.prefetch.option(),
        );
        let server = Server::start(&command, Path::new(self.image), &socket)?;
        Ok(Larder { server, socket })
    }
}

/// A running `larder disk serve`, killed when this goes.
pub(super) struct Larder {
    server: Server,
    socket: PathBuf,
}

impl Larder {
    /// Where it listens.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The process, for its memory and its CPU time.
    pub(super) fn server(&self) -> &Server {
        &self.server
    }
}

/// A path as text, which commands and URIs have it as.
pub(super) fn text(path: &Path) -> anyhow::Result<&str> {
    let text = path.to_str().context("a path that is not UTF-8")?;
    if text.contains(char::is_whitespace) {
        bail!("the path '{text}' has blanks in it, which these experiments cannot do with");
    }
    Ok(text)
}
