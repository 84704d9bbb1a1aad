//! Steps of a disk's move to or from another host with its VM. The purpose of each step, and which host has the image
//! between them, is described in [`crate::vm`]'s `moving`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::{Geometry, Loop};
use tokio::sync::{Mutex, MutexGuard};

use super::berth::Berth;
use super::hot::Warming;
use super::inquiry::Served;
use crate::image::{self, CacheMode, Format, ImageOptions};

/// Longest time that a front-end may take to stop its queues once its guest is stopped, or to reconnect and start the
/// queues at the positions that it assumes.
const REST_MAX: Duration = Duration::from_secs(5);
/// Interval between checks for that.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// A step of a move. Each step is idempotent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskMove {
    /// The VM is about to leave: the cache's dirty data is written to the disk, and the cache becomes write-through.
    Settle,
    /// The move is aborted: the cache returns to its mode from before [`DiskMove::Settle`].
    Stay,
    /// The guest is stopped, and no request is processed until [`DiskMove::Serve`]. If the guest continues elsewhere
    /// (`goes_on`), with the queue positions that its front-end knows, these must be the true ones; otherwise the
    /// step is refused, and the queues resume.
    Rest {
        /// The guest's state moves to the other host.
        goes_on: bool,
    },
    /// After [`DiskMove::Rest`]: the image gets all data, durably, and the cached data becomes stale for ever. The
    /// image remains locked.
    Part,
    /// Closes the image and releases its locks.
    Close,
    /// Opens and locks the image, as one that was in use elsewhere; requests are still held.
    Open,
    /// Resumes requests.
    Serve,
}

/// State of a disk that can move.
pub(super) struct Moving {
    berth: Berth,
    format: Cell<Format>,
    /// Mode of the cache before it was made write-through.
    mode: Cell<Option<CacheMode>>,
    /// Options of the last opening, if they differ from the configuration.
    options: RefCell<Option<ImageOptions>>,
    /// Ranges that were hot on the host that the VM came from.
    pub(super) warming: Warming,
    /// Serialises the steps.
    step: Mutex<()>,
}

impl Moving {
    pub(super) fn new(berth: Berth, format: Format) -> Self {
        Self {
            berth,
            format: Cell::new(format),
            mode: Cell::new(None),
            options: RefCell::default(),
            warming: Warming::default(),
            step: Mutex::default(),
        }
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.berth.geometry()
    }

    pub(super) fn format(&self) -> Format {
        self.format.get()
    }

    /// Returns a guard that keeps other steps from starting.
    pub(super) async fn alone(&self) -> MutexGuard<'_, ()> {
        self.step.lock().await
    }

    /// Fails all requests that wait for the image.
    pub(super) fn give_up(&self) {
        self.berth.give_up();
    }

    /// Performs a step.
    ///
    /// # Errors
    /// A message for the user.
    pub(super) async fn step(&self, on: &Loop, served: &Rc<Served>, step: DiskMove) -> Result<(), String> {
        let _alone = self.alone().await;
        match step {
            DiskMove::Settle => self.settle(served).await,
            DiskMove::Stay => self.stay(served).await,
            DiskMove::Rest { goes_on } => rest(on, served, goes_on).await,
            DiskMove::Part => self.part(on, served).await,
            DiskMove::Close => self.close(served).await,
            DiskMove::Open => self.open(on, served).await,
            DiskMove::Serve => {
                self.berth.serve();
                served.exports.rest(false);
                Warming::start(on, served);
                Ok(())
            }
        }
    }

    async fn settle(&self, served: &Served) -> Result<(), String> {
        let Some(image) = served.now() else { return Ok(()) };
        let Some(cache) = &image.cache else { return Ok(()) };
        let now = cache.now();
        if now.layer.is_working() && now.layer.mode() == CacheMode::WriteBack {
            self.mode.set(Some(CacheMode::WriteBack));
            cache.set_mode(CacheMode::WriteThrough).await?;
        }
        Ok(())
    }

    async fn stay(&self, served: &Served) -> Result<(), String> {
        let Some(image) = served.now() else { return Ok(()) };
        let (Some(cache), Some(mode)) = (&image.cache, self.mode.take()) else {
            return Ok(());
        };
        match cache.now().layer.mode() == CacheMode::WriteThrough {
            true => cache.set_mode(mode).await,
            // The mode was changed by a client since.
            false => Ok(()),
        }
    }

    async fn part(&self, on: &Loop, served: &Served) -> Result<(), String> {
        let Some(image) = served.now() else { return Ok(()) };
        served.exports.rest(true);
        self.warming.stop().await;
        let parted = async {
            self.berth.rest().await;
            if !image.device.geometry().read_only {
                image.device.flush().await.map_err(|error| error.to_string())?;
            }
            match &image.cache {
                Some(cache) => cache.part(on, self.mode.get()).await,
                None => Ok(()),
            }
        };
        let parted = parted.await;
        if parted.is_err() {
            self.berth.serve();
            served.exports.rest(false);
        }
        parted
    }

    async fn close(&self, served: &Served) -> Result<(), String> {
        let Some(image) = served.now() else { return Ok(()) };
        served.exports.rest(true);
        self.warming.stop().await;
        self.berth.rest().await;
        let mut options = self.options.take().unwrap_or_else(|| served.config.options.clone());
        options.limits = image.throttle.limits();
        self.options.replace(Some(options));
        self.berth.clear();
        served.image.replace(None);
        // This also closes the cache, which is still attached if the image was opened in vain, without a
        // [`DiskMove::Part`].
        let closed = image.device.close().await;
        closed.map_err(|error| error.to_string())?;
        if let Some(cache) = &image.cache {
            cache.now().forget_note();
        }
        tracing::info!(disk = %served.name(), "its image is closed, and may be opened on another host");
        Ok(())
    }

    async fn open(&self, on: &Loop, served: &Served) -> Result<(), String> {
        if served.now().is_some() {
            return Ok(());
        }
        let options = self.options.borrow().clone();
        let mut options = options.unwrap_or_else(|| served.config.options.clone());
        options.comes = true;
        if let (Some(mode), Some(cache)) = (self.mode.get(), &mut options.cache) {
            cache.mode = Some(mode);
        }
        let opened = image::open(on, &served.config.image, &options).await;
        let image = Rc::new(opened.map_err(|error| error.to_string())?);
        let (was, is) = (self.berth.geometry(), image.device.geometry());
        let alike = |of: Geometry| (of.read_only, of.discard_granularity > 0);
        if alike(was) != alike(is) || was.block_size < is.block_size {
            if let Err(error) = image.device.close().await {
                tracing::warn!(disk = %served.name(), "the image does not match, and could not be closed again: {error}");
            }
            return Err(format!(
                "the image does not match what was reported to the guest: {was:?}, and now {is:?}"
            ));
        }
        self.mode.set(None);
        self.format.set(image.format);
        self.berth.fill(&image.device);
        served.image.replace(Some(image));
        tracing::info!(disk = %served.name(), "its image is open");
        Ok(())
    }
}

/// Waits until the guest's queues are idle.
async fn rest(on: &Loop, served: &Served, goes_on: bool) -> Result<(), String> {
    let exports = &served.exports;
    // A front-end that reconnects for a paused guest starts its queues all the same.
    exports.rest(goes_on);
    let moves = || {
        if goes_on {
            exports.not_taken_back().is_some()
        } else {
            exports.is_at_work()
        }
    };
    let stopped = async {
        while moves() {
            on.sleep(LOOK_INTERVAL).await;
        }
    };
    let rests = on.timeout(REST_MAX, stopped).await.is_some();
    exports.rest(rests);
    match exports.not_taken_back().filter(|_| goes_on) {
        _ if rests => Ok(()),
        Some(queue) => Err(format!(
            "QEMU does not know the position of its queue {queue}: its server was killed while the guest ran, and the guest \
             stopped before QEMU had connected to the next server, or this happened while the guest was paused. With QEMU's guess the \
             guest would lose requests on the other host; here they are repeated: resume it (QEMU's cont), and move it again"
        )),
        None => Err("its guest is running: stop the VM first (QEMU's stop)".to_owned()),
    }
}
