//! `larder disk serve`.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use larder_block::backend::file::{Caching, FileOpenError};
use larder_block::backend::image_lock::{LockError, LockMode};
use larder_block::backend::nbd::NbdOptions;
use larder_block::event_loop::SocketAddress;
use larder_block::filter::throttle::ThrottleLimits;
use larder_export::vhost_user::{Serial, StopMode, VhostUserOptions};
use larder_qcow2::OpenError as Qcow2Error;
use larder_qcow2::header::HeaderError;
use larder_vm::control::{ControlServer, Subject};
use larder_vm::disk::{Disk, DiskConfig, DiskError, OnOpen};
use larder_vm::exports::{ExportError, ExportsConfig, NbdExportConfig, VhostUserSource};
use larder_vm::image::{
    CacheSpec, ChainPart, ChainPolicy, Format, ImageAddress, ImageError, ImageOptions, PinnedBy, PinnedChain,
    PrefetchSpec, is_same_image,
};
use larder_vm::latch::Latch;
use larder_vm::listen::find_same_path;
use larder_vm::run::shell::command_line;
use larder_vm::vm::config::ChainFile;

use crate::cli::{BackingChain, DiscardPolicy, ServeArguments};
use crate::output::print;
use crate::pid_file;

/// The capabilities that vhost-user's conventions require of a back-end program (QEMU
/// `docs/interop/vhost-user.json`).
const CAPABILITIES: &str = r#"{"type": "block", "features": ["read-only", "blk-file"]}"#;

pub(crate) fn run(arguments: ServeArguments) -> anyhow::Result<ExitCode> {
    if arguments.print_capabilities {
        print(&format!("{CAPABILITIES}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let (pidfile, control) = (arguments.pidfile.clone(), arguments.control.clone());
    let serial_note = Serial::truncation_warning(&arguments.serial);
    let config = config_from_arguments(arguments)?;
    if config.exports.is_empty() {
        bail!("nothing to serve on: give --socket PATH (vhost-user-blk), --nbd URI, or both");
    }
    check_distinct_paths(&config, control.as_deref(), pidfile.as_deref())?;
    if let Some(note) = serial_note {
        tracing::info!("{note}");
    }
    let (cancel, stop) = (Latch::default(), Arc::new(OnceLock::<Latch<StopMode>>::new()));
    let (cancel_start, stop_disk) = (cancel.clone(), Arc::clone(&stop));
    crate::signals::block()?.on_stop(move || {
        cancel_start.set(());
        if let Some(stop) = stop_disk.get() {
            stop.set(StopMode::HandOver);
        }
    })?;
    let pidfile = pidfile.as_deref().map(pid_file::prepare).transpose()?;
    let (image, options) = (config.image.clone(), config.options.clone());
    let config = DiskConfig { cancel: cancel.clone(), ..config };
    let disk = match Disk::start(config) {
        Ok(disk) => disk,
        Err(DiskError::Cancelled) => return Ok(ExitCode::SUCCESS),
        Err(error) => return Err(with_advice(error, &options)),
    };
    let stop = stop.get_or_init(|| disk.stop_signal());
    if cancel.get().is_some() {
        stop.set(StopMode::HandOver);
    }
    let started = control
        .as_deref()
        .map(|path| ControlServer::start(path, Arc::new(Subject::disk(disk.handle()))))
        .transpose()
        .map_err(anyhow::Error::from)
        .and_then(|control| Ok((control, pidfile.map(pid_file::PreparedPidFile::publish).transpose()?)));
    let _until_it_ends = match started {
        Ok(started) => started,
        Err(error) => {
            disk.stop()?;
            return Err(error);
        }
    };
    let (geometry, addresses) = (disk.geometry(), disk.addresses().clone());
    tracing::info!(
        %image,
        vhost_user_blk = addresses.vhost_user.map(tracing::field::display),
        nbd = addresses.nbd.map(tracing::field::display),
        control = control.map(|path| tracing::field::display(command_line(&[path.into()]))),
        size = %geometry.size,
        read_only = geometry.read_only,
        "serving"
    );
    disk.wait()?;
    Ok(ExitCode::SUCCESS)
}

/// Logs the names of the image's other files, and writes them into the file of `--pin-chain` if that does not exist.
fn report_chain(parts: &[ChainPart], read_only: bool, write_to: Option<&Path>) -> Result<(), String> {
    let Some(chain) = ChainFile::from_parts(parts) else {
        return Ok(());
    };
    for line in chain.describe_files(read_only) {
        tracing::info!("{line}");
    }
    match write_to {
        Some(path) => chain.write(path).map_err(|error| format!("--pin-chain {}: {error}", path.display())),
        None => Ok(()),
    }
}

/// Other files that the image may have opened.
struct ServedChain {
    policy: ChainPolicy,
    /// The image's format, if a file of `--pin-chain` gives it.
    format: Option<Format>,
    /// The file of `--pin-chain`, if it does not exist and has to be written.
    write_to: Option<PathBuf>,
}

fn chain_from_arguments(arguments: &ServeArguments, image: &ImageAddress) -> anyhow::Result<ServedChain> {
    let pinned = |chain, by| ChainPolicy::Pinned { chain: Arc::new(chain), by };
    let found = match &arguments.pin_chain {
        Some(path) => Some((path, ChainFile::read(path).context("--pin-chain")?)),
        None => None,
    };
    let (policy, format, write_to) = match (found, arguments.backing_chain) {
        (Some((path, Some(found))), _) => {
            if !is_same_image(&found.image, image) {
                bail!(
                    "--pin-chain {}: it belongs to {}, not to {image}; give another file, or remove it",
                    path.display(),
                    found.image
                );
            }
            let by = PinnedBy::ChainFile(path.clone());
            (pinned(found.chain, by), Some(found.format), None)
        }
        (None, BackingChain::None) => (pinned(PinnedChain::default(), PinnedBy::NoChain), None, None),
        (missing, _) => {
            let follow = ChainPolicy::Follow { trust_image: arguments.trust_image };
            (follow, None, missing.map(|(path, _)| path.clone()))
        }
    };
    Ok(ServedChain { policy, format, write_to })
}

fn config_from_arguments(arguments: ServeArguments) -> anyhow::Result<DiskConfig> {
    let image = arguments.image.clone().or(arguments.blk_file.clone()).context("no image")?;
    let chain = chain_from_arguments(&arguments, &image)?;
    let format = arguments.format.map(Format::from);
    if let (Some(format), Some(pinned)) = (format, chain.format)
        && format != pinned
    {
        bail!(
            "--format {}: the file of --pin-chain gives the image's format as {}; omit one of them",
            format.name(),
            pinned.name()
        );
    }
    let vhost_user_at = match (arguments.socket, arguments.fd) {
        (Some(path), _) => Some(VhostUserSource::Path(path)),
        (None, Some(number)) => Some(VhostUserSource::Descriptor(Arc::new(inherited_descriptor(number)?))),
        (None, None) => None,
    };
    let caching = if arguments.buffered { Caching::Buffered } else { Caching::Auto };
    let prefetch = PrefetchSpec {
        memory: arguments.prefetch,
        ahead: arguments.prefetch_ahead,
        largest_read: arguments.prefetch_largest_read,
    };
    let prefetch = prefetch.options(arguments.share).map_err(|error| anyhow!("--{error}"))?;
    let cache = CacheSpec {
        file: arguments.cache,
        size: arguments.cache_size,
        line: arguments.cache_line,
        mode: arguments.cache_mode,
        endurance: arguments.cache_endurance,
        exclusive: arguments.cache_exclusive,
    };
    let cache = cache.options(arguments.share).map_err(|error| anyhow!("--{error}"))?;
    Ok(DiskConfig {
        options: ImageOptions {
            format: format.or(chain.format),
            chain: chain.policy,
            metadata_memory: arguments.metadata_memory,
            prefetch,
            cache,
            read_only: arguments.read_only,
            share: arguments.share,
            claim: match arguments.inherit_locks {
                true => LockMode::Inherited,
                false => LockMode::Direct,
            },
            caching,
            keep_space: arguments.discard == DiscardPolicy::Ignore,
            nbd: NbdOptions { reconnect: Duration::from_secs(arguments.nbd_reconnect), ..NbdOptions::default() },
            limits: arguments.throttle.unwrap_or(ThrottleLimits::NONE),
            ..ImageOptions::default()
        },
        exports: ExportsConfig {
            vhost_user_source: vhost_user_at,
            vhost_user: VhostUserOptions {
                queues: arguments.queues,
                queue_size: arguments.queue_size,
                serial: Serial::of(&arguments.serial),
                block_size: arguments.block_size,
            },
            nbd: arguments.nbd.map(|uri| NbdExportConfig {
                uri,
                insecure: arguments.nbd_insecure,
                description: arguments.nbd_description,
            }),
            ..ExportsConfig::default()
        },
        poll_max: Duration::from_micros(arguments.poll_us),
        on_open: OnOpen(Arc::new(move |parts| report_chain(parts, arguments.read_only, chain.write_to.as_deref()))),
        ..DiskConfig::new(image)
    })
}

/// Refuses two options that name the same path, since each creates its own file or socket there.
fn check_distinct_paths(config: &DiskConfig, control: Option<&Path>, pidfile: Option<&Path>) -> anyhow::Result<()> {
    let socket = match &config.exports.vhost_user_source {
        Some(VhostUserSource::Path(path)) => Some(path.as_path()),
        _ => None,
    };
    let nbd = config.exports.nbd.as_ref().and_then(|at| match &at.uri.address {
        SocketAddress::Unix(path) => Some(path.as_path()),
        SocketAddress::Tcp { .. } => None,
    });
    let options = [("--socket", socket), ("--nbd", nbd), ("--control", control), ("--pidfile", pidfile)];
    let options: Vec<(&str, &Path)> = options.into_iter().filter_map(|(name, path)| Some((name, path?))).collect();
    match find_same_path(&options) {
        Some((one, other)) => bail!("{one} and {other} are the same path; give each its own"),
        None => Ok(()),
    }
}

/// Takes ownership of an inherited descriptor.
fn inherited_descriptor(number: RawFd) -> anyhow::Result<OwnedFd> {
    if (0..=2).contains(&number) {
        bail!(
            "--fd {number}: 0 to 2 are standard input, output and error, which cannot carry a disk; pass the socket \
             as 3 or higher"
        );
    }
    // SAFETY: plain query of a descriptor by number.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        bail!("--fd {number}: no such descriptor was inherited");
    }
    // SAFETY: the descriptor is open, and no other code in this program owns or uses it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Adds to the error the option that would change the outcome.
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
        DiskError::Image(ImageError::Qcow2(Qcow2Error::Header { source: HeaderError::Magic(_), .. })) => {
            Some("without --format its format is detected")
        }
        DiskError::Image(ImageError::File(FileOpenError::Open { source, .. })) if !options.read_only => {
            match source.kind() {
                PermissionDenied | ReadOnlyFilesystem => Some("with --read-only Larder only reads it"),
                _ => None,
            }
        }
        DiskError::Image(ImageError::File(FileOpenError::Locked { source: LockError::InUse { .. }, .. })) => {
            Some(match options.share {
                true => "--share is not enough: the other process must share it too",
                false => "stop that first, or pass --share if both are meant to use it",
            })
        }
        DiskError::Export(ExportError::Insecure { .. }) => {
            Some("--nbd-insecure allows it, if the network itself is protected")
        }
        _ => None,
    }
}
