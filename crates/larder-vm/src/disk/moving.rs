//! A disk that goes to another host with its VM, and comes from there, step by step. What the steps are for, and who has
//! the image between them, is in [`crate::vm`]'s `moving`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::{Geometry, Loop};
use tokio::sync::{Mutex, MutexGuard};

use super::berth::Berth;
use super::hot::Warming;
use super::inquiry::Served;
use crate::image::{self, CacheMode, Format, ImageOptions};

/// How long a front-end may take to stop its queues once its guest has been stopped, or to come back and start them where it
/// thinks that they are.
const REST_MAX: Duration = Duration::from_secs(5);
/// How often it is looked whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// A step. Each may be taken again, and does nothing then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskMove {
    /// Its VM is about to go: what only its cache has is written to the disk, and nothing more gets there.
    Settle,
    /// Its VM stays after all: the cache is used as before [`DiskMove::Settle`].
    Stay,
    /// The guest has stopped, and no request is carried out until [`DiskMove::Serve`]. If it `goes_on` elsewhere, with what its
    /// front-end knows of its queues, they are where that thinks; else this is refused, and they go on.
    Rest {
        /// The guest's state goes along.
        goes_on: bool,
    },
    /// After [`DiskMove::Rest`]: the image has everything, durably, and of its cache nothing will be believed. It is still
    /// locked.
    Part,
    /// The image is closed, and its locks are gone.
    Close,
    /// The image is opened, as one that was used elsewhere, and locked; no request is carried out.
    Open,
    /// Requests are carried out.
    Serve,
}

/// What a disk needs to move.
pub(super) struct Moving {
    berth: Berth,
    format: Cell<Format>,
    /// What its cache did with writes before it was told to have none of them.
    mode: Cell<Option<CacheMode>>,
    /// With what it was opened last, as far as that has changed since.
    options: RefCell<Option<ImageOptions>>,
    /// What was hot where its VM came from.
    pub(super) warming: Warming,
    /// One step at a time.
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

    /// Until what is returned goes no step is taken.
    pub(super) async fn alone(&self) -> MutexGuard<'_, ()> {
        self.step.lock().await
    }

    /// Whoever waits for the image to come is told that it does not.
    pub(super) fn give_up(&self) {
        self.berth.give_up();
    }

    /// # Errors
    /// As a text for people.
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
        if now.layer.works() && now.layer.mode() == CacheMode::WriteBack {
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
            // Somebody has wished otherwise.
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
        // Of one that was opened in vain, and not parted from.
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
                tracing::warn!(disk = %served.name(), "it was opened in vain, and could not be closed: {error}");
            }
            return Err(format!(
                "it is otherwise than the guest was told: {was:?}, and now {is:?}"
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

/// Until the guest's queues rest.
async fn rest(on: &Loop, served: &Served, goes_on: bool) -> Result<(), String> {
    let exports = &served.exports;
    // A front-end that comes back to a guest that stands still starts its queues all the same.
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
            "QEMU does not know how far its queue {queue} is: its server was killed while the guest worked, and the guest \
             stopped before QEMU had connected to the next one, or that happened while it stood still. With QEMU's guess the \
             guest would lose requests elsewhere; here they are repeated: let it run (QEMU's cont), and move it again"
        )),
        None => Err("its guest is at work: stop the VM first (QEMU's stop)".to_owned()),
    }
}
