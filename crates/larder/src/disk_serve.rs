//! `larder disk serve`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use larder_block::backend::file::Caching;
use larder_export::vhost_user::VhostUserOptions;
use larder_vm::disk::{Disk, DiskConfig};

use crate::cli::ServeArguments;

pub(crate) fn run(arguments: ServeArguments) -> anyhow::Result<ExitCode> {
    if arguments.socket.is_none() {
        bail!("nothing to serve on: give --socket PATH (vhost-user-blk)");
    }
    let signals = crate::signals::block()?;
    let disk = Disk::start(DiskConfig {
        read_only: arguments.read_only,
        share: arguments.share,
        caching: if arguments.buffered { Caching::Buffered } else { Caching::Auto },
        socket: arguments.socket,
        vhost_user: VhostUserOptions {
            queues: arguments.queues,
            serial: arguments.serial,
        },
        poll_max: Duration::from_micros(arguments.poll_us),
        ..DiskConfig::new(arguments.image)
    })?;
    tracing::info!(size = %disk.geometry().size, "serving");
    let stop = disk.stop_signal();
    std::thread::Builder::new().name("larder-signals".to_owned()).spawn(move || {
        signals.wait();
        stop.raise();
    })?;
    disk.wait()?;
    Ok(ExitCode::SUCCESS)
}
