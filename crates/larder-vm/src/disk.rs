//! A disk in service: a thread of its own, with its event loop, its stack of layers and its exports.

mod handle;
mod moving;
mod slot;
mod warming;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::signal::first_of;
use larder_block::{Geometry, Loop};
use larder_export::activity::Activity;
use larder_export::clients::Clients;
use larder_export::vhost_user::StopMode;
use tracing::span::EnteredSpan;

pub use handle::{CacheOperation, DiskChange, DiskChangeError, DiskHandle, DiskSettings};
use handle::{ControlRequests, RunningDisk};
pub use moving::DiskAction;
use moving::DiskMoveState;
use slot::DiskSlot;
pub use warming::{HOT_RANGES_MAX, format_hot_ranges, parse_hot_ranges};

use crate::control::trace::{DiskTrace, TraceRecording};
use crate::exports::{ExportAddresses, ExportError, ExportSockets, Exports, ExportsConfig};
use crate::image::{self, ChainPart, ImageAddress, ImageError, ImageOptions, OpenImage};
use crate::latch::Latch;
use crate::thread_result::ThreadResult;

/// Longest spin that a user may configure, in microseconds. A disk with a higher latency gains nothing from spinning.
pub const POLL_US_MAX: u64 = 10_000;

/// Longest wait for an NBD server that a user may configure, in seconds: one year.
pub const RECONNECT_SECONDS_MAX: u64 = 365 * 24 * 3600;

/// Stack size of a disk's thread, in bytes. A long chain of backing files is opened and read recursively, at about 40
/// KiB for each file. Only the pages that are used take memory.
const STACK_BYTES: usize = 32 << 20;

/// Longest wait of a stop for storage that does not answer: the device of a cache that is known to hang, or a file
/// that is being opened.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between checks whether a disk that is being opened has been cancelled.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Configuration of a disk: image and exports.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// Name of the disk in its VM.
    pub name: Option<String>,
    /// Address of the image.
    pub image: ImageAddress,
    /// Options for opening the image.
    pub options: ImageOptions,
    /// Exports of the disk.
    pub exports: ExportsConfig,
    /// Mobility of the disk between hosts, with its VM.
    pub mobility: Mobility,
    /// Longest time for which the thread spins for new work before it sleeps.
    pub poll_max: Duration,
    /// Set to cancel the start while the image is being opened; later it has no effect.
    pub cancel: Latch<()>,
    /// Callback with the files that were opened, before any client is served.
    pub on_open: OnOpen,
}

/// Callback that inspects the files of a disk. An error is the reason why the disk must not be served.
type InspectParts = dyn Fn(&[ChainPart]) -> Result<(), String> + Send + Sync;

/// Callback for the files of a disk, called before the disk is served.
#[derive(Clone)]
pub struct OnOpen(pub Arc<InspectParts>);

impl Default for OnOpen {
    fn default() -> Self {
        Self(Arc::new(|_| Ok(())))
    }
}

impl std::fmt::Debug for OnOpen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OnOpen")
    }
}

/// Mobility of a disk between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mobility {
    /// The disk never moves.
    #[default]
    Fixed,
    /// The disk is on this host, and may move away.
    Local,
    /// The disk is on another host, and may move here: its image is not open.
    Remote,
}

impl DiskConfig {
    /// Returns the configuration of a disk with default options and no exports.
    pub fn new(image: ImageAddress) -> Self {
        Self {
            name: None,
            image,
            options: ImageOptions::default(),
            exports: ExportsConfig::default(),
            mobility: Mobility::Fixed,
            poll_max: POLL_MAX_DEFAULT,
            cancel: Latch::default(),
            on_open: OnOpen::default(),
        }
    }
}

/// Reason why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DiskError {
    #[error("io_uring cannot be set up: {0}; Larder needs Linux 5.11 or later with kernel.io_uring_disabled=0")]
    Uring(std::io::Error),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error("stopped while the image was being opened")]
    Cancelled,
    #[error("{0}")]
    Refused(String),
    #[error("the last writes may not be on the disk: {0}")]
    Flush(String),
    #[error(
        "not all data of the write-back cache {cache} could be written to the disk: {error}; the data stays in the cache: \
         when the cause is removed, serve the disk with that cache, or run `larder disk cache flush {cache}`"
    )]
    StaysInCache { cache: String, error: String },
    #[error(
        "some requests still wait for the device of the disk's cache, which does not respond; all other data is on the disk"
    )]
    CacheHangs,
    #[error("cannot start the disk's thread: {0}")]
    Thread(std::io::Error),
    #[error("the disk's thread panicked; see the preceding messages")]
    ThreadDied,
}

/// A disk that is being served.
pub struct Disk {
    thread: DiskThread,
    stop: Latch<StopMode>,
    handle: DiskHandle,
    opened: DiskProperties,
}

/// Properties of a disk, known once it is open.
struct DiskProperties {
    geometry: Geometry,
    addresses: ExportAddresses,
}

/// A disk that listens on its sockets, and has acquired everything that needs privileges; its image has not been read
/// yet.
pub struct PreparedDisk {
    thread: DiskThread,
    stop: Latch<StopMode>,
    handle: DiskHandle,
    start: mpsc::Sender<()>,
    opened_receiver: mpsc::Receiver<DiskProperties>,
    cancel: Latch<()>,
}

impl PreparedDisk {
    /// Opens the image, and serves the disk.
    ///
    /// # Errors
    /// See [`Disk::start`].
    pub fn open(self) -> Result<Disk, DiskError> {
        // If the thread has ended, `wait_until_open` returns the reason.
        let _ = self.start.send(());
        Disk::wait_until_open(self.thread, self.stop, self.handle, &self.opened_receiver, &self.cancel)
    }
}

impl Disk {
    /// Opens the image, listens, and serves on a thread of its own. When this returns, clients can connect.
    ///
    /// # Errors
    /// The disk cannot be opened or exported, or [`DiskConfig::cancel`] is set; nothing is left behind then.
    pub fn start(config: DiskConfig) -> Result<Self, DiskError> {
        let stop = Latch::default();
        let thread_stop = stop.clone();
        let (handle, requests) = handle::channel(config.name.as_deref());
        let (opened_sender, opened_receiver) = mpsc::channel();
        let cancel = config.cancel.clone();
        let trace = Arc::clone(handle.trace());
        let thread = DiskThread::start(move || {
            let _recording = record_thread(&trace, &config);
            let on = Loop::new(config.poll_max).map_err(DiskError::Uring)?;
            serve(&on, config, None, &thread_stop, requests, &opened_sender)
        })?;
        Self::wait_until_open(thread, stop, handle, &opened_receiver, &cancel)
    }

    /// Creates the disk's thread and its ring, and listens, so that the process can be confined before the image is
    /// opened.
    ///
    /// # Errors
    /// The disk cannot be exported; nothing is left behind then.
    pub fn prepare(config: DiskConfig) -> Result<PreparedDisk, DiskError> {
        let stop = Latch::default();
        let thread_stop = stop.clone();
        let (handle, requests) = handle::channel(config.name.as_deref());
        let (opened_sender, opened_receiver) = mpsc::channel();
        let (prepared, is_prepared) = mpsc::channel();
        let (start, started) = mpsc::channel();
        let cancel = config.cancel.clone();
        let trace = Arc::clone(handle.trace());
        let thread = DiskThread::start(move || {
            let _recording = record_thread(&trace, &config);
            let on = Loop::new(config.poll_max).map_err(DiskError::Uring)?;
            let sockets = ExportSockets::bind(&config.exports)?;
            // The receiver may have given up; then it does not send `start` either.
            let _ = prepared.send(());
            drop(prepared);
            match started.recv() {
                Ok(()) => serve(&on, config, Some(sockets), &thread_stop, requests, &opened_sender),
                Err(mpsc::RecvError) => Ok(()),
            }
        })?;
        match is_prepared.recv() {
            Ok(()) => Ok(PreparedDisk { thread, stop, handle, start, opened_receiver, cancel }),
            Err(mpsc::RecvError) => Err(thread.failure()),
        }
    }

    fn wait_until_open(
        thread: DiskThread,
        stop: Latch<StopMode>,
        handle: DiskHandle,
        opened_receiver: &mpsc::Receiver<DiskProperties>,
        cancel: &Latch<()>,
    ) -> Result<Self, DiskError> {
        let mut cancelled: Option<Instant> = None;
        loop {
            match opened_receiver.recv_timeout(CANCEL_POLL_INTERVAL) {
                Ok(opened) => {
                    return Ok(Self { thread, stop, handle, opened });
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(thread.failure()),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            match cancelled {
                None => cancelled = cancel.get().map(|()| Instant::now()),
                // A file server does not answer the thread, which ends by itself once it does.
                Some(since) if since.elapsed() >= STOP_TIMEOUT => {
                    stop.set(StopMode::HandOver);
                    return Err(DiskError::Cancelled);
                }
                Some(_) => {}
            }
        }
    }

    /// Returns the disk's geometry at the time it was opened.
    pub fn geometry(&self) -> Geometry {
        self.opened.geometry
    }

    /// Returns the addresses at which the disk is served.
    pub fn addresses(&self) -> &ExportAddresses {
        &self.opened.addresses
    }

    /// Returns the latch that stops the disk. Its value decides what happens to a front-end's connection.
    pub fn stop_signal(&self) -> Latch<StopMode> {
        self.stop.clone()
    }

    /// Returns a handle for requests to the disk's thread, usable from any thread.
    pub fn handle(&self) -> DiskHandle {
        self.handle.clone()
    }

    /// Completes requests in flight, flushes, and closes everything.
    ///
    /// # Errors
    /// The export failed, or the thread died.
    pub fn stop(self) -> Result<(), DiskError> {
        self.stop.set(StopMode::HandOver);
        self.wait()
    }

    /// Waits until the disk is stopped.
    ///
    /// # Errors
    /// The export failed, or the thread died.
    pub fn wait(self) -> Result<(), DiskError> {
        self.thread.result()
    }
}

/// The thread of a disk, which has its own stack size and returns a result.
struct DiskThread(ThreadResult<Result<(), DiskError>>);

impl DiskThread {
    fn start(work: impl FnOnce() -> Result<(), DiskError> + Send + 'static) -> Result<Self, DiskError> {
        let thread = std::thread::Builder::new().name("larder-disk".to_owned()).stack_size(STACK_BYTES);
        ThreadResult::spawn(thread, work).map(Self).map_err(DiskError::Thread)
    }

    fn result(self) -> Result<(), DiskError> {
        self.0.wait().unwrap_or(Err(DiskError::ThreadDied))
    }

    /// Returns why the thread ended before it was ready.
    fn failure(self) -> DiskError {
        self.result().err().unwrap_or(DiskError::ThreadDied)
    }
}

/// Records the events of a disk's thread in the disk's trace, and names the disk in messages at level `debug`, until
/// the result is dropped.
fn record_thread(trace: &Arc<DiskTrace>, config: &DiskConfig) -> (TraceRecording, EnteredSpan) {
    let name = config.name.clone().unwrap_or_else(|| config.image.to_string());
    (trace.record_thread(), tracing::debug_span!("disk", %name).entered())
}

/// Opens the image, and serves it on `sockets`, or else on those in the configuration.
fn serve(
    on: &Loop,
    mut config: DiskConfig,
    sockets: Option<ExportSockets>,
    stop: &Latch<StopMode>,
    requests: ControlRequests,
    opened_sender: &mpsc::Sender<DiskProperties>,
) -> Result<(), DiskError> {
    // NBD clients may access any bytes. Guests' requests pass through the same layer, which serialises overlapping
    // writes of both.
    config.options.single_bytes = config.exports.nbd.is_some();
    on.block_on(async {
        let image = match config.mobility {
            Mobility::Remote => {
                tracing::debug!(event = "away", "{} is not open: its VM is on another host", config.image);
                None
            }
            _ => {
                tracing::debug!(event = "opening", "{} is being opened", config.image);
                let opening = image::open(on, &config.image, &config.options);
                // The tables of a crafted image can take long to check, and a file server may answer slowly.
                let opened = select(config.cancel.wait_until_set(), opening).await;
                let image = opened.ok_or(DiskError::Cancelled)??;
                config.on_open.0(&image.parts).map_err(DiskError::Refused)?;
                let (format, size) = (image.format.name(), image.device.geometry().size);
                tracing::debug!(event = "opened", "{} is open: {format}, {size}", config.image);
                Some(Rc::new(image))
            }
        };
        let (geometry, format) = match &image {
            Some(image) => (image.device.geometry(), image.format),
            None => image::read_geometry(on, &config.image, &config.options).await?,
        };
        let slot = (config.mobility != Mobility::Fixed)
            .then(|| DiskSlot::empty(on, &Rc::from(config.image.to_string()), geometry));
        let device = match (&slot, &image) {
            (Some(slot), image) => {
                if let Some(image) = image {
                    slot.attach(&image.device);
                    slot.resume();
                }
                slot.device()
            }
            (None, Some(image)) => Rc::clone(&image.device),
            (None, None) => unreachable!("a disk that starts on another host can move"),
        };
        let image = Rc::new(RefCell::new(image));
        let current_image = Rc::clone(&image);
        let clients = Clients::new(move || {
            let prefetch = current_image.borrow().as_ref().and_then(|image| image.prefetch.clone());
            if let Some(prefetch) = prefetch {
                prefetch.clients_disconnected();
            }
        });
        let activity = Activity::new(on);
        let sockets = match sockets {
            Some(sockets) => sockets,
            None => ExportSockets::bind(&config.exports)?,
        };
        let exports = Exports::start(on, &device, &config.exports, sockets, &clients, &activity)?;
        let exports = Rc::new(exports);
        if image.borrow().is_none() {
            exports.set_paused(true);
        }
        let addresses = exports.addresses();
        tracing::debug!(
            event = "serving",
            vhost_user_blk = addresses.vhost_user.as_deref(),
            nbd = addresses.nbd.as_deref(),
            "the exports are ready"
        );
        // The starter may have given up; then `stop` has been set.
        let _ = opened_sender.send(DiskProperties { geometry, addresses: exports.addresses().clone() });
        let served = Rc::new(RunningDisk {
            moving: slot.map(|slot| DiskMoveState::new(slot, format)),
            config,
            image,
            exports: Rc::clone(&exports),
            activity,
        });
        let answering_requests = handle::answer(on, requests, &served);
        let ended = select(stop.wait_until_set(), select(answering_requests, exports.ended())).await;
        // A step of a move that has begun is completed first.
        let _step_guard = match &served.moving {
            Some(moving) => {
                let alone = moving.lock_steps().await;
                moving.warming.stop().await;
                Some(alone)
            }
            None => None,
        };
        let stop_mode = stop.get().unwrap_or(StopMode::HandOver);
        tracing::debug!(event = "stopping", ?stop_mode, "the disk is being stopped");
        let Some(image) = served.open_image() else {
            if let Some(moving) = &served.moving {
                moving.fail_waiters();
            }
            exports.stop(on, stop_mode).await;
            return match ended.flatten() {
                Some(Err(error)) => Err(ExportError::Socket(error).into()),
                _ => Ok(()),
            };
        };
        // The guest keeps running during this, which shortens the pause until the next process serves it.
        tracing::debug!(event = "draining", "dirty data is being written to the disk");
        select(cache_hangs(on, &image), write_back(&image)).await;
        tracing::debug!(event = "draining", "requests in flight are being completed");
        let mut stopping = Box::pin(exports.stop(on, stop_mode));
        let is_stopped = select(cache_hangs(on, &image), stopping.as_mut()).await.is_some();
        if !is_stopped {
            // Dropping the requests in flight would wait for them. They are leaked, with their memory, as a kill
            // would leave them.
            std::mem::forget((stopping, Rc::clone(&exports), on.clone()));
        }
        tracing::debug!(event = "drained", is_stopped, "the image is being closed");
        if let Err(error) = image.device.close().await {
            let error = error.to_string();
            let cache = image.cache.as_ref().map(|cache| cache.current());
            let keeping = cache.filter(|cache| cache.layer.is_working() && cache.layer.is_recorded_dirty());
            return Err(match keeping.map(|cache| cache.file.to_string()) {
                Some(cache) => DiskError::StaysInCache { cache, error },
                None => DiskError::Flush(error),
            });
        }
        if let Some(cache) = &image.cache {
            cache.current().close_state_file();
        }
        tracing::debug!(event = "closed", "{} is closed", served.config.image);
        match ended.flatten() {
            _ if !is_stopped => Err(DiskError::CacheHangs),
            Some(Err(error)) => Err(ExportError::Socket(error).into()),
            _ => Ok(()),
        }
    })
}

/// Writes most of the dirty data in the cache and in other layers to the disk.
async fn write_back(image: &OpenImage) {
    // A failure is ignored here: the close below tries again, and reports it.
    if let Some(cache) = &image.cache {
        let _ = cache.current().layer.flush_most_dirty().await;
    }
    let _ = image.device.flush().await;
}

/// Completes when the device of the disk's cache has not answered for so long that a stop must not wait for it.
async fn cache_hangs(on: &Loop, image: &OpenImage) {
    let Some(cache) = &image.cache else {
        return std::future::pending().await;
    };
    let mut seconds = 0;
    while seconds < STOP_TIMEOUT.as_secs() {
        on.sleep(Duration::from_secs(1)).await;
        seconds = if cache.current().layer.is_hanging() { seconds + 1 } else { 0 };
    }
}

/// Returns the result of `other`, if it completes before `stop`.
async fn select<T>(stop: impl Future<Output = ()>, other: impl Future<Output = T>) -> Option<T> {
    let stop = async {
        stop.await;
        None
    };
    first_of(stop, async { Some(other.await) }).await
}
