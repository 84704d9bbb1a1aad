//! `larder disk serve`.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use larder_block::backend::file::Caching;
use larder_block::backend::nbd::NbdOptions;
use larder_block::filter::throttle::Limits;
use larder_export::vhost_user::VhostUserOptions;
use larder_vm::disk::{Disk, DiskConfig};
use larder_vm::exports::{ExportsConfig, NbdAt, VhostUserAt};
use larder_vm::image::{Format, ImageOptions};

use crate::cli::{DiscardPolicy, FormatName, ServeArguments};

/// What vhost-user's conventions want a back-end program to say of itself (QEMU `docs/interop/vhost-user.json`).
const CAPABILITIES: &str = r#"{"type": "block", "features": ["read-only", "blk-file"]}"#;

pub(crate) fn run(arguments: ServeArguments) -> anyhow::Result<ExitCode> {
    if arguments.print_capabilities {
        println!("{CAPABILITIES}");
        return Ok(ExitCode::SUCCESS);
    }
    let pidfile = arguments.pidfile.clone();
    let config = config_of(arguments)?;
    if config.exports.is_empty() {
        bail!("nothing to serve on: give --socket PATH (vhost-user-blk), --nbd URI, or both");
    }
    let signals = crate::signals::block()?;
    let image = config.image.clone();
    let disk = Disk::start(config)?;
    let _pidfile = pidfile.as_deref().map(PidFile::write).transpose()?;
    let geometry = disk.geometry();
    tracing::info!(%image, size = %geometry.size, read_only = geometry.read_only, "serving");
    let stop = disk.stop_signal();
    std::thread::Builder::new()
        .name("larder-signals".to_owned())
        .spawn(move || {
            signals.wait();
            stop.raise();
            tracing::info!("stopping: finishing what is under way; a second signal gives up");
            signals.wait();
            tracing::error!("given up: what was written last may not be on the disk");
            std::process::exit(2);
        })?;
    disk.wait()?;
    Ok(ExitCode::SUCCESS)
}

fn config_of(arguments: ServeArguments) -> anyhow::Result<DiskConfig> {
    let image = arguments.image.or(arguments.blk_file).context("no image")?;
    let vhost_user_at = match (arguments.socket, arguments.fd) {
        (Some(path), _) => Some(VhostUserAt::Path(path)),
        (None, Some(number)) => Some(VhostUserAt::Descriptor(Arc::new(inherited(number)?))),
        (None, None) => None,
    };
    let caching = if arguments.buffered {
        Caching::Buffered
    } else {
        Caching::Auto
    };
    Ok(DiskConfig {
        options: ImageOptions {
            format: arguments.format.map(|FormatName::Raw| Format::Raw),
            read_only: arguments.read_only,
            share: arguments.share,
            caching,
            keep_space: arguments.discard == DiscardPolicy::Ignore,
            nbd: NbdOptions {
                reconnect: Duration::from_secs(arguments.nbd_reconnect),
                ..NbdOptions::default()
            },
            limits: arguments.throttle.unwrap_or(Limits::NONE),
        },
        exports: ExportsConfig {
            vhost_user_at,
            vhost_user: VhostUserOptions {
                queues: arguments.queues,
                queue_size: arguments.queue_size,
                serial: arguments.serial,
                block_size: arguments.block_size,
            },
            nbd: arguments.nbd.map(|uri| NbdAt {
                uri,
                insecure: arguments.nbd_insecure,
            }),
        },
        poll_max: Duration::from_micros(arguments.poll_us),
        ..DiskConfig::new(image)
    })
}

/// Takes over an inherited descriptor.
fn inherited(number: RawFd) -> anyhow::Result<OwnedFd> {
    // SAFETY: plain query of a descriptor by number.
    if number <= 2 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        bail!("--fd {number}: no such descriptor was inherited");
    }
    // SAFETY: it is open, and nothing else in this program knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A file with this process's number, removed when this is dropped.
struct PidFile<'a>(&'a Path);

impl<'a> PidFile<'a> {
    fn write(path: &'a Path) -> anyhow::Result<Self> {
        std::fs::write(path, format!("{}\n", std::process::id()))
            .with_context(|| format!("cannot write --pidfile {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for PidFile<'_> {
    fn drop(&mut self) {
        // Somebody may have tidied up already.
        let _ = std::fs::remove_file(self.0);
    }
}
