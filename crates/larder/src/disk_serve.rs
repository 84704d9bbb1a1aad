//! `larder disk serve`.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use larder_block::backend::file::{Caching, OpenError};
use larder_block::backend::image_lock::{Claim, LockError};
use larder_block::backend::nbd::NbdOptions;
use larder_block::event_loop::SocketAddress;
use larder_block::filter::throttle::Limits;
use larder_export::vhost_user::{Serial, Stop, VhostUserOptions};
use larder_qcow2::OpenError as Qcow2Error;
use larder_qcow2::header::HeaderError;
use larder_vm::control::{ControlServer, Subject};
use larder_vm::disk::{Disk, DiskConfig, DiskError};
use larder_vm::exports::{ExportError, ExportsConfig, NbdAt, VhostUserAt};
use larder_vm::image::{CacheWish, Format, ImageError, ImageOptions, PrefetchWish};
use larder_vm::latch::Latch;
use larder_vm::listen::same_place;
use larder_vm::run::shell::command_line;

use crate::cli::{DiscardPolicy, FormatName, ServeArguments};
use crate::output::print;
use crate::pid_file;

/// What vhost-user's conventions want a back-end program to say of itself (QEMU `docs/interop/vhost-user.json`).
const CAPABILITIES: &str = r#"{"type": "block", "features": ["read-only", "blk-file"]}"#;

pub(crate) fn run(arguments: ServeArguments) -> anyhow::Result<ExitCode> {
    if arguments.print_capabilities {
        print(&format!("{CAPABILITIES}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let (pidfile, control) = (arguments.pidfile.clone(), arguments.control.clone());
    let serial_note = Serial::note_on(&arguments.serial);
    let config = config_of(arguments)?;
    if config.exports.is_empty() {
        bail!("nothing to serve on: give --socket PATH (vhost-user-blk), --nbd URI, or both");
    }
    refuse_same_places(&config, control.as_deref(), pidfile.as_deref())?;
    if let Some(note) = serial_note {
        tracing::info!("{note}");
    }
    let (cancel, stop) = (Latch::default(), Arc::new(OnceLock::<Latch<Stop>>::new()));
    let (to_cancel, to_stop) = (cancel.clone(), Arc::clone(&stop));
    crate::signals::block()?.stop_by(move || {
        to_cancel.set(());
        if let Some(stop) = to_stop.get() {
            stop.set(Stop::Leave);
        }
    })?;
    let pidfile = pidfile.as_deref().map(pid_file::prepare).transpose()?;
    let (image, options) = (config.image.clone(), config.options.clone());
    let config = DiskConfig {
        cancel: cancel.clone(),
        ..config
    };
    let disk = match Disk::start(config) {
        Ok(disk) => disk,
        Err(DiskError::Cancelled) => return Ok(ExitCode::SUCCESS),
        Err(error) => return Err(with_advice(error, &options)),
    };
    let stop = stop.get_or_init(|| disk.stop_signal());
    if cancel.get().is_some() {
        stop.set(Stop::Leave);
    }
    let started = control
        .as_deref()
        .map(|path| ControlServer::start(path, Arc::new(Subject::disk(disk.inquiry()))))
        .transpose()
        .map_err(anyhow::Error::from)
        .and_then(|control| Ok((control, pidfile.map(pid_file::Prepared::publish).transpose()?)));
    let _until_it_ends = match started {
        Ok(started) => started,
        Err(error) => {
            disk.stop()?;
            return Err(error);
        }
    };
    let (geometry, places) = (disk.geometry(), disk.places().clone());
    tracing::info!(
        %image,
        vhost_user_blk = places.vhost_user.map(tracing::field::display),
        nbd = places.nbd.map(tracing::field::display),
        control = control.map(|path| tracing::field::display(command_line(&[path.into()]))),
        size = %geometry.size,
        read_only = geometry.read_only,
        "serving"
    );
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
    let prefetch = PrefetchWish {
        memory: arguments.prefetch,
        ahead: arguments.prefetch_ahead,
        largest_read: arguments.prefetch_largest_read,
    };
    let prefetch = prefetch
        .options(arguments.share)
        .map_err(|error| anyhow!("--{error}"))?;
    let cache = CacheWish {
        file: arguments.cache,
        size: arguments.cache_size,
        line: arguments.cache_line,
        mode: arguments.cache_mode,
        endurance: arguments.cache_endurance,
    };
    let cache = cache.options(arguments.share).map_err(|error| anyhow!("--{error}"))?;
    Ok(DiskConfig {
        options: ImageOptions {
            format: arguments.format.map(|name| match name {
                FormatName::Raw => Format::Raw,
                FormatName::Qcow2 => Format::Qcow2,
            }),
            metadata_memory: arguments.metadata_memory,
            prefetch,
            cache,
            read_only: arguments.read_only,
            share: arguments.share,
            claim: match arguments.inherit_locks {
                true => Claim::Inherited,
                false => Claim::Own,
            },
            caching,
            keep_space: arguments.discard == DiscardPolicy::Ignore,
            nbd: NbdOptions {
                reconnect: Duration::from_secs(arguments.nbd_reconnect),
                ..NbdOptions::default()
            },
            limits: arguments.throttle.unwrap_or(Limits::NONE),
            ..ImageOptions::default()
        },
        exports: ExportsConfig {
            vhost_user_at,
            vhost_user: VhostUserOptions {
                queues: arguments.queues,
                queue_size: arguments.queue_size,
                serial: Serial::of(&arguments.serial),
                block_size: arguments.block_size,
            },
            nbd: arguments.nbd.map(|uri| NbdAt {
                uri,
                insecure: arguments.nbd_insecure,
                description: arguments.nbd_description,
            }),
            ..ExportsConfig::default()
        },
        poll_max: Duration::from_micros(arguments.poll_us),
        ..DiskConfig::new(image)
    })
}

/// What is made in the file system needs a path of its own each.
fn refuse_same_places(config: &DiskConfig, control: Option<&Path>, pidfile: Option<&Path>) -> anyhow::Result<()> {
    let socket = match &config.exports.vhost_user_at {
        Some(VhostUserAt::Path(path)) => Some(path.as_path()),
        _ => None,
    };
    let nbd = config.exports.nbd.as_ref().and_then(|at| match &at.uri.address {
        SocketAddress::Unix(path) => Some(path.as_path()),
        SocketAddress::Tcp { .. } => None,
    });
    let places = [
        ("--socket", socket),
        ("--nbd", nbd),
        ("--control", control),
        ("--pidfile", pidfile),
    ];
    let places: Vec<(&str, &Path)> = places
        .into_iter()
        .filter_map(|(name, path)| Some((name, path?)))
        .collect();
    match same_place(&places) {
        Some((one, other)) => bail!("{one} and {other} are the same path; give each its own"),
        None => Ok(()),
    }
}

/// Takes over an inherited descriptor.
fn inherited(number: RawFd) -> anyhow::Result<OwnedFd> {
    if (0..=2).contains(&number) {
        bail!(
            "--fd {number}: 0 to 2 are standard input, output and error, which are no place for a disk; hand the socket \
             over as 3 or higher"
        );
    }
    // SAFETY: plain query of a descriptor by number.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        bail!("--fd {number}: no such descriptor was inherited");
    }
    // SAFETY: it is open, and nothing else in this program knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The error, and what the user can write to have it otherwise.
fn with_advice(error: DiskError, options: &ImageOptions) -> anyhow::Error {
    let advice = advice(&error, options);
    let error = anyhow::Error::from(error);
    match advice {
        Some(advice) => anyhow::anyhow!("{error}; {advice}"),
        None => error,
    }
}

fn advice(error: &DiskError, options: &ImageOptions) -> Option<&'static str> {
    use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    match error {
        DiskError::Image(ImageError::OtherFormat { .. }) => Some("--format raw serves its bytes as they are"),
        DiskError::Image(ImageError::Qcow2(Qcow2Error::Header {
            source: HeaderError::Magic(_),
            ..
        })) => Some("without --format it is served as what it begins like"),
        DiskError::Image(ImageError::File(OpenError::Open { source, .. })) if !options.read_only => match source.kind()
        {
            PermissionDenied | ReadOnlyFilesystem => Some("with --read-only it is only read"),
            _ => None,
        },
        DiskError::Image(ImageError::File(OpenError::Locked {
            source: LockError::InUse { .. },
            ..
        })) => Some(match options.share {
            true => "--share is not enough: the other process must let others use it too",
            false => "stop that first, or pass --share if both are meant to use it",
        }),
        DiskError::Export(ExportError::Insecure { .. }) => {
            Some("--nbd-insecure allows it, if the network itself is protected")
        }
        _ => None,
    }
}
