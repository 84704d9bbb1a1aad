//! The servers to compare, as commands in which `{image}` and `{socket}` stand for paths.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use larder_block::ByteLen;
use larder_block::boot::is_tmpfs;

use crate::vhost_user::server::Server;
use crate::vhost_user::{debian13, larder};

/// A server on an image.
#[derive(Clone, Debug)]
pub(super) struct Contender {
    pub(super) name: String,
    pub(super) command: String,
    pub(super) image: PathBuf,
}

/// I/O mode of the servers for their image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    /// Through the page cache, so that the software is measured.
    Buffered,
    /// Direct I/O.
    Direct,
}

impl Access {
    /// Returns direct I/O where the file system supports it.
    pub(super) fn best_of(directory: &Path) -> anyhow::Result<Self> {
        Ok(match is_tmpfs(&rustix::fs::statfs(directory)?) {
            true => Self::Buffered,
            false => Self::Direct,
        })
    }
}

/// Size of QEMU's cache of L2 entries.
#[derive(Clone, Copy, Debug)]
pub(super) enum L2Cache {
    /// QEMU's default.
    Default,
    /// A fixed size in bytes.
    Of(u64),
    /// Size that `larder disk tune` recommends for the image.
    Advised { bytes: u64 },
    /// Default before QEMU 3.1: whole tables, max(1 MiB, 8 clusters) of them.
    Old { cluster_len: u64 },
}

impl L2Cache {
    /// Returns the recommended size for an image.
    pub(super) fn recommended(image: &Path) -> anyhow::Result<Self> {
        let mut tune = Command::new(larder()?);
        tune.args(["disk", "tune", "--output", "json"]).arg(image);
        let output = tune.output()?;
        if !output.status.success() {
            bail!("larder disk tune: {}", String::from_utf8_lossy(&output.stderr));
        }
        let advice: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let bytes = advice["l2-cache-size"].as_u64().context("larder disk tune reports no l2-cache-size")?;
        Ok(Self::Advised { bytes })
    }

    fn options(self) -> String {
        match self {
            Self::Default => String::new(),
            Self::Of(bytes) | Self::Advised { bytes } => format!(",l2-cache-size={bytes}"),
            Self::Old { cluster_len } => {
                format!(",l2-cache-size={},l2-cache-entry-size={cluster_len}", (8 * cluster_len).max(1 << 20))
            }
        }
    }
}

fn size(bytes: u64) -> String {
    ByteLen::new(bytes).to_string()
}

/// Returns Larder on a raw image.
pub(super) fn larder_raw(image: &Path, access: Access) -> anyhow::Result<Contender> {
    larder_with("Larder raw".to_owned(), image, access, "--format raw")
}

/// Returns Larder on a qcow2 image, with its default memory for metadata or this number of bytes.
pub(super) fn larder_qcow2(image: &Path, access: Access, memory: Option<u64>) -> anyhow::Result<Contender> {
    let (name, options) = match memory {
        None => ("Larder".to_owned(), "--format qcow2".to_owned()),
        Some(memory) => {
            (format!("Larder {}", size(memory)), format!("--format qcow2 --metadata-memory {}MiB", memory >> 20))
        }
    };
    larder_with(name, image, access, &options)
}

fn larder_with(name: String, image: &Path, access: Access, options: &str) -> anyhow::Result<Contender> {
    let buffered = if access == Access::Buffered { " --buffered" } else { "" };
    let larder = larder()?;
    Ok(Contender {
        name,
        command: format!("{} disk serve {{image}} {options}{buffered} --socket {{socket}}", larder.display()),
        image: image.to_owned(),
    })
}

/// Returns QEMU's storage daemon on a qcow2 image, with its I/O thread and adaptive polling.
pub(super) fn qemu(image: &Path, access: Access, cache: L2Cache) -> anyhow::Result<Contender> {
    let io_options = match access {
        Access::Buffered => "aio=threads",
        Access::Direct => "aio=io_uring,cache.direct=on",
    };
    let name = match cache {
        L2Cache::Default => "QEMU".to_owned(),
        L2Cache::Of(bytes) => format!("QEMU {}", size(bytes)),
        L2Cache::Advised { bytes } => format!("QEMU {}, as `disk tune` recommends", size(bytes)),
        L2Cache::Old { .. } => "QEMU, old default".to_owned(),
    };
    Ok(Contender {
        name,
        command: format!(
            "{} qemu-storage-daemon --object iothread,id=io,poll-max-ns=32768 \
             --blockdev driver=file,filename={{image}},node-name=file,{io_options} \
             --blockdev driver=qcow2,file=file,node-name=disk{} \
             --export vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={{socket}},iothread=io,writable=on",
            debian13()?.display(),
            cache.options()
        ),
        image: image.to_owned(),
    })
}

impl Contender {
    pub(super) fn start(&self, socket: &Path) -> anyhow::Result<Server> {
        Server::start(&self.command, &self.image, socket)
    }
}

/// Waits until the server is idle, with its background reads done. Returns how long it has been idle by then.
pub(super) fn wait_until_idle(server: &Server) -> anyhow::Result<Duration> {
    const LOOK_EVERY: Duration = Duration::from_millis(50);
    // An idle server may have a timer or two; one that reads from a slow disk uses hardly more CPU.
    const IDLE_CPU_MAX: Duration = Duration::from_micros(100);
    const IDLE_POLLS: u32 = 4;
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut before = server.cpu_time()?.0;
    let mut idle = 0;
    while idle < IDLE_POLLS {
        if Instant::now() > deadline {
            bail!("the server does not become idle");
        }
        std::thread::sleep(LOOK_EVERY);
        let now = server.cpu_time()?.0;
        idle = if now - before < IDLE_CPU_MAX { idle + 1 } else { 0 };
        before = now;
    }
    Ok(LOOK_EVERY * idle)
}
