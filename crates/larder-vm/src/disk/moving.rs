//! Steps of a disk's move to or from another host with its VM. The purpose of each step, and which host has the image
//! between them, is described in [`crate::vm`]'s `moving`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::{Geometry, Loop};
use tokio::sync::{Mutex, MutexGuard};

use super::handle::RunningDisk;
use super::slot::DiskSlot;
use super::warming::Warming;
use crate::image::{self, CacheMode, Format, ImageOptions};

/// Longest time that a front-end may take to stop its queues once its guest is stopped, or to reconnect and start the
/// queues at the positions that it assumes.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between checks for that.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A step of a move. Each step is idempotent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskAction {
    /// The VM is about to leave: the cache's dirty data is written to the disk, and the cache becomes write-through.
    FlushCache,
    /// The move is aborted: the cache returns to its mode from before [`DiskAction::FlushCache`].
    RestoreCache,
    /// The guest is stopped, and no request is processed until [`DiskAction::Resume`]. If the guest continues elsewhere
    /// (`migrates_state`), with the queue positions that its front-end knows, these must be the true ones; otherwise
    /// the step is refused, and the queues resume.
    Quiesce {
        /// The guest's state moves to the other host.
        migrates_state: bool,
    },
    /// After [`DiskAction::Quiesce`]: the image gets all data, durably, and the cached data becomes stale for ever. The
    /// image remains locked.
    Release,
    /// Closes the image and releases its locks.
    Close,
    /// Opens and locks the image, as one that was in use elsewhere; requests are still held.
    Open,
    /// Resumes requests.
    Resume,
}

/// State of a disk that can move.
pub(super) struct DiskMoveState {
    slot: DiskSlot,
    format: Cell<Format>,
    /// Mode of the cache before it was made write-through.
    saved_mode: Cell<Option<CacheMode>>,
    /// Options of the last opening, if they differ from the configuration.
    options: RefCell<Option<ImageOptions>>,
    /// Ranges that were hot on the host that the VM came from.
    pub(super) warming: Warming,
    /// Serialises the steps.
    step_lock: Mutex<()>,
}

impl DiskMoveState {
    pub(super) fn new(slot: DiskSlot, format: Format) -> Self {
        Self {
            slot,
            format: Cell::new(format),
            saved_mode: Cell::new(None),
            options: RefCell::default(),
            warming: Warming::default(),
            step_lock: Mutex::default(),
        }
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.slot.geometry()
    }

    pub(super) fn format(&self) -> Format {
        self.format.get()
    }

    /// Returns a guard that keeps other steps from starting.
    pub(super) async fn lock_steps(&self) -> MutexGuard<'_, ()> {
        self.step_lock.lock().await
    }

    /// Fails all requests that wait for the image.
    pub(super) fn fail_waiters(&self) {
        self.slot.fail_waiters();
    }

    /// Performs a step.
    ///
    /// # Errors
    /// A message for the user.
    pub(super) async fn apply(&self, on: &Loop, served: &Rc<RunningDisk>, action: DiskAction) -> Result<(), String> {
        let _guard = self.lock_steps().await;
        tracing::debug!(event = "move", "step {action:?} begins");
        let result = self.apply_locked(on, served, action).await;
        match &result {
            Ok(()) => tracing::debug!(event = "move", "step {action:?} is complete"),
            Err(why) => tracing::debug!(event = "move", "step {action:?} failed: {why}"),
        }
        result
    }

    /// Applies a step. The caller has the lock of the steps.
    async fn apply_locked(&self, on: &Loop, served: &Rc<RunningDisk>, action: DiskAction) -> Result<(), String> {
        match action {
            DiskAction::FlushCache => self.flush_cache(served).await,
            DiskAction::RestoreCache => self.restore_cache(served).await,
            DiskAction::Quiesce { migrates_state } => quiesce(on, served, migrates_state).await,
            DiskAction::Release => self.release(on, served).await,
            DiskAction::Close => self.close(served).await,
            DiskAction::Open => self.open(on, served).await,
            DiskAction::Resume => {
                self.slot.resume();
                served.exports.set_paused(false);
                Warming::start(on, served);
                Ok(())
            }
        }
    }

    async fn flush_cache(&self, served: &RunningDisk) -> Result<(), String> {
        let Some(image) = served.open_image() else {
            return Ok(());
        };
        let Some(cache) = &image.cache else { return Ok(()) };
        let now = cache.current();
        if now.layer.is_working() && now.layer.mode() == CacheMode::WriteBack {
            self.saved_mode.set(Some(CacheMode::WriteBack));
            cache.set_mode(CacheMode::WriteThrough).await?;
        }
        Ok(())
    }

    async fn restore_cache(&self, served: &RunningDisk) -> Result<(), String> {
        let Some(image) = served.open_image() else {
            return Ok(());
        };
        let (Some(cache), Some(mode)) = (&image.cache, self.saved_mode.take()) else {
            return Ok(());
        };
        match cache.current().layer.mode() == CacheMode::WriteThrough {
            true => cache.set_mode(mode).await,
            // The mode was changed by a client since.
            false => Ok(()),
        }
    }

    async fn release(&self, on: &Loop, served: &RunningDisk) -> Result<(), String> {
        let Some(image) = served.open_image() else {
            return Ok(());
        };
        served.exports.set_paused(true);
        self.warming.stop().await;
        let released = async {
            self.slot.quiesce().await;
            if !image.device.geometry().read_only {
                image.device.flush().await.map_err(|error| error.to_string())?;
            }
            match &image.cache {
                Some(cache) => cache.release(on, self.saved_mode.get()).await,
                None => Ok(()),
            }
        };
        let released = released.await;
        if released.is_err() {
            self.slot.resume();
            served.exports.set_paused(false);
        }
        released
    }

    async fn close(&self, served: &RunningDisk) -> Result<(), String> {
        let Some(image) = served.open_image() else {
            return Ok(());
        };
        served.exports.set_paused(true);
        self.warming.stop().await;
        self.slot.quiesce().await;
        let mut options = self.options.take().unwrap_or_else(|| served.config.options.clone());
        options.limits = image.throttle.limits();
        self.options.replace(Some(options));
        self.slot.detach();
        served.image.replace(None);
        // This also closes the cache, which is still attached if the image was opened in vain, without a
        // [`DiskAction::Release`].
        let closed = image.device.close().await;
        closed.map_err(|error| error.to_string())?;
        if let Some(cache) = &image.cache {
            cache.current().close_state_file();
        }
        tracing::info!(
            event = "closed", disk = %served.name(),
            "its image is closed, and may be opened on another host"
        );
        Ok(())
    }

    async fn open(&self, on: &Loop, served: &RunningDisk) -> Result<(), String> {
        if served.open_image().is_some() {
            return Ok(());
        }
        let options = self.options.borrow().clone();
        let mut options = options.unwrap_or_else(|| served.config.options.clone());
        options.used_elsewhere = true;
        if let (Some(mode), Some(cache)) = (self.saved_mode.get(), &mut options.cache) {
            cache.mode = Some(mode);
        }
        let opened = image::open(on, &served.config.image, &options).await;
        let image = Rc::new(opened.map_err(|error| error.to_string())?);
        let (was, is) = (self.slot.geometry(), image.device.geometry());
        let features = |of: Geometry| (of.read_only, of.discard_granularity > 0);
        if features(was) != features(is) || was.block_size < is.block_size {
            if let Err(error) = image.device.close().await {
                tracing::warn!(disk = %served.name(), "the image does not match, and could not be closed again: {error}");
            }
            return Err(format!("the image does not match what was reported to the guest: {was:?}, and now {is:?}"));
        }
        self.saved_mode.set(None);
        self.format.set(image.format);
        self.slot.attach(&image.device);
        served.image.replace(Some(image));
        tracing::info!(event = "opened", disk = %served.name(), "its image is open");
        Ok(())
    }
}

/// Waits until the guest's queues are idle.
async fn quiesce(on: &Loop, served: &RunningDisk, migrates_state: bool) -> Result<(), String> {
    let exports = &served.exports;
    // A front-end that reconnects for a paused guest starts its queues all the same.
    exports.set_paused(migrates_state);
    let is_busy = || {
        if migrates_state { exports.diverged_queue().is_some() } else { exports.has_running_queues() }
    };
    let stopped = async {
        while is_busy() {
            on.sleep(POLL_INTERVAL).await;
        }
    };
    let quiesced = on.timeout(QUIESCE_TIMEOUT, stopped).await.is_some();
    exports.set_paused(quiesced);
    match exports.diverged_queue().filter(|_| migrates_state) {
        _ if quiesced => Ok(()),
        Some(queue) => Err(format!(
            "QEMU does not know the position of its queue {queue}: its server was killed while the guest ran, and the guest \
             stopped before QEMU had connected to the next server, or this happened while the guest was paused. With QEMU's guess the \
             guest would lose requests on the other host; here they are repeated: resume it (QEMU's cont), and move it again"
        )),
        None => Err("its guest is running: stop the VM first (QEMU's stop)".to_owned()),
    }
}
