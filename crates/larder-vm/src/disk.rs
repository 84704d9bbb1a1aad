//! A disk at work: a thread of its own with its loop, its stack of layers, and its exports.

use std::pin::pin;
use std::rc::Rc;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::{Geometry, Loop};
use larder_export::clients::Clients;
use tokio::sync::{mpsc as inquiries, oneshot};

use crate::control::state::{CacheState, DiskState, PrefetchState};
use crate::exports::{ExportError, Exports, ExportsConfig, Places};
use crate::image::{self, CacheMode, ImageAddress, ImageError, ImageOptions, OpenImage, Replacement, cache_mode_words};

/// The longest spin that a user may ask for, in microseconds. A disk that takes longer gains nothing by it.
pub const POLL_US_MAX: u64 = 10_000;

/// The longest wait for an NBD server that a user may ask for, in seconds: a year.
pub const RECONNECT_SECONDS_MAX: u64 = 365 * 24 * 3600;

/// The stack of a disk's thread: a long chain of backing files is opened and read through file by file, each within the
/// one before, at some 40 KiB each. Only what is used takes memory.
const STACK_BYTES: usize = 32 << 20;

/// How long a stop waits for the device of a cache that is known to give no answer.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// Inquiries that wait for a disk's thread at most; further ones wait where they come from.
const INQUIRIES_MAX: usize = 16;

/// What to serve, and how.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// What its VM calls it.
    pub name: Option<String>,
    /// The image.
    pub image: ImageAddress,
    /// How to open it.
    pub options: ImageOptions,
    /// What to serve it as.
    pub exports: ExportsConfig,
    /// How long the thread spins for new work at most before it sleeps.
    pub poll_max: Duration,
}

impl DiskConfig {
    /// A disk with everything at its default, served nowhere.
    pub fn new(image: ImageAddress) -> Self {
        Self {
            name: None,
            image,
            options: ImageOptions::default(),
            exports: ExportsConfig::default(),
            poll_max: POLL_MAX_DEFAULT,
        }
    }
}

/// Why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DiskError {
    #[error("io_uring cannot be set up: {0}; Larder needs Linux 5.11 or later with kernel.io_uring_disabled=0")]
    Uring(std::io::Error),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error("what was written last may not be on the disk: {0}")]
    Flush(String),
    #[error(
        "requests are left that wait for the device of the disk's cache, which gives no answer; all else is on the disk"
    )]
    CacheHangs,
    #[error("cannot start the disk's thread: {0}")]
    Thread(std::io::Error),
    #[error("the disk's thread died; see the messages before this one")]
    Died,
}

/// A disk that is being served.
pub struct Disk {
    thread: JoinHandle<Result<(), DiskError>>,
    stop: StopSignal,
    inquiry: DiskInquiry,
    opened: Opened,
}

/// What a disk turned out to be.
struct Opened {
    geometry: Geometry,
    places: Places,
}

impl Disk {
    /// Opens the image, listens, and serves on a thread of its own. When this returns, clients can connect.
    ///
    /// # Errors
    /// Anything in the way; nothing is left behind then.
    pub fn start(config: DiskConfig) -> Result<Self, DiskError> {
        let stop = StopSignal::default();
        let theirs = stop.clone();
        let (inquiry, inquiries) = inquiries::channel(INQUIRIES_MAX);
        let (report, ready) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("larder-disk".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || serve(&config, &theirs, inquiries, &report))
            .map_err(DiskError::Thread)?;
        match ready.recv() {
            Ok(opened) => Ok(Self {
                thread,
                stop,
                inquiry: DiskInquiry(inquiry),
                opened,
            }),
            Err(mpsc::RecvError) => match thread.join() {
                Ok(Err(error)) => Err(error),
                Ok(Ok(())) | Err(_) => Err(DiskError::Died),
            },
        }
    }

    /// What the disk was like when it was opened.
    pub fn geometry(&self) -> Geometry {
        self.opened.geometry
    }

    /// Where it is served.
    pub fn places(&self) -> &Places {
        &self.opened.places
    }

    /// A handle to stop it with, for any thread.
    pub fn stop_signal(&self) -> StopSignal {
        self.stop.clone()
    }

    /// A handle to ask it with, for any thread.
    pub fn inquiry(&self) -> DiskInquiry {
        self.inquiry.clone()
    }

    /// Finishes what is under way, flushes, closes everything.
    ///
    /// # Errors
    /// The export had failed, or the thread had died.
    pub fn stop(self) -> Result<(), DiskError> {
        self.stop.raise();
        self.wait()
    }

    /// Waits for the disk to be stopped.
    ///
    /// # Errors
    /// The export failed, or the thread died.
    pub fn wait(self) -> Result<(), DiskError> {
        self.thread.join().unwrap_or(Err(DiskError::Died))
    }
}

/// Tells a disk's loop to stop, from any thread.
#[derive(Clone, Default)]
pub struct StopSignal(Arc<Mutex<StopState>>);

#[derive(Default)]
struct StopState {
    raised: bool,
    waker: Option<Waker>,
}

impl StopSignal {
    /// Raises it, for good.
    pub fn raise(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.raised = true;
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }

    async fn raised(&self) {
        std::future::poll_fn(|context| {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if state.raised {
                return Poll::Ready(());
            }
            state.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// Asks a disk's thread how the disk is, or for a change, from any thread. The answer is made on the disk's loop, as one
/// task among its others, so that a disk of which nobody asks does nothing for it.
#[derive(Clone)]
pub struct DiskInquiry(inquiries::Sender<Inquiry>);

enum Inquiry {
    State(oneshot::Sender<DiskState>),
    ChangeCache(CacheWork, oneshot::Sender<Result<DiskState, CacheChangeError>>),
}

/// What a disk's cache is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheWork {
    /// Something else with writes, from now on and when it is opened again.
    SetMode(CacheMode),
    /// Write to the disk what only the cache has.
    Flush,
    /// Give its place to another one, or to itself, opened again.
    Replace(Replacement),
}

/// Why a disk's cache has not done what it should.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CacheChangeError {
    #[error("{image} has no cache")]
    NoCache { image: String },
    #[error("the cache of {image} does not work any more, so nothing in it can be changed; see the server's messages")]
    Failed { image: String },
    #[error("the cache of {image}: {why}")]
    NotDone { image: String, why: String },
}

impl DiskInquiry {
    /// How the disk is now; `None` if it is being closed.
    pub async fn state(&self) -> Option<DiskState> {
        let (reply, answer) = oneshot::channel();
        self.0.send(Inquiry::State(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Has the disk's cache do something, which may take as long as all of it takes to be written to the disk; it is done
    /// also if nobody waits for it. How the disk is then; `None` if it is being closed.
    pub async fn change_cache(&self, work: CacheWork) -> Option<Result<DiskState, CacheChangeError>> {
        let (reply, answer) = oneshot::channel();
        self.0.send(Inquiry::ChangeCache(work, reply)).await.ok()?;
        answer.await.ok()
    }
}

fn serve(
    config: &DiskConfig,
    stop: &StopSignal,
    inquiries: inquiries::Receiver<Inquiry>,
    report: &mpsc::Sender<Opened>,
) -> Result<(), DiskError> {
    let on = Loop::new(config.poll_max).map_err(DiskError::Uring)?;
    on.block_on(async {
        let image = Rc::new(image::open(&on, &config.image, &config.options).await?);
        let device = &image.device;
        let prefetch = image.prefetch.clone();
        let clients = Clients::new(move || {
            if let Some(prefetch) = &prefetch {
                prefetch.clients_left();
            }
        });
        let mut exports = Exports::start(&on, device, &config.exports, &clients)?;
        // The starter may have given up; then `stop` has been raised.
        let _ = report.send(Opened {
            geometry: device.geometry(),
            places: exports.places().clone(),
        });
        let answering = answer(&on, inquiries, config, &image);
        let ended = select(stop.raised(), select(answering, exports.ended())).await;
        let mut stopping = Box::pin(exports.stop(&on));
        let is_stopped = select(hangs_for_long(&on, &image), stopping.as_mut()).await.is_some();
        if !is_stopped {
            // To drop what is under way would be to wait for it. It is left as a kill leaves it, with its memory.
            std::mem::forget((stopping, on.clone()));
        }
        if let Err(error) = device.close().await {
            return Err(DiskError::Flush(error.to_string()));
        }
        if let Some(cache) = &image.cache {
            cache.now().forget_note();
        }
        match ended.flatten() {
            _ if !is_stopped => Err(DiskError::CacheHangs),
            Some(Err(error)) => Err(ExportError::Socket(error).into()),
            _ => Ok(()),
        }
    })
}

/// Completes when the device of the disk's cache has given no answer for so long that it is not to be waited for at a stop.
async fn hangs_for_long(on: &Loop, image: &OpenImage) {
    let Some(cache) = &image.cache else {
        return std::future::pending().await;
    };
    let mut seconds = 0;
    while seconds < STOP_PATIENCE.as_secs() {
        on.sleep(Duration::from_secs(1)).await;
        seconds = if cache.now().layer.hangs() { seconds + 1 } else { 0 };
    }
}

/// Answers who asks; never ends. Who has asked may have gone.
async fn answer(on: &Loop, mut inquiries: inquiries::Receiver<Inquiry>, config: &DiskConfig, image: &Rc<OpenImage>) {
    while let Some(inquiry) = inquiries.recv().await {
        match inquiry {
            Inquiry::State(reply) => {
                let _ = reply.send(state_of(config, image));
            }
            // Its device may be slow, and others want to know something meanwhile.
            Inquiry::ChangeCache(work, reply) => {
                let (running, config, image) = (on.clone(), config.clone(), Rc::clone(image));
                on.spawn(async move {
                    let changed = change_cache(&running, &image, &config.image, work).await;
                    let _ = reply.send(changed.map(|()| state_of(&config, &image)));
                });
            }
        }
    }
    std::future::pending().await
}

async fn change_cache(
    on: &Loop,
    image: &OpenImage,
    name: &ImageAddress,
    work: CacheWork,
) -> Result<(), CacheChangeError> {
    let name = || name.to_string();
    let Some(cache) = &image.cache else {
        return Err(CacheChangeError::NoCache { image: name() });
    };
    if !matches!(work, CacheWork::Replace(_)) && !cache.now().layer.works() {
        return Err(CacheChangeError::Failed { image: name() });
    }
    let done = match &work {
        CacheWork::SetMode(mode) => cache.set_mode(*mode).await,
        CacheWork::Flush => cache.flush().await,
        CacheWork::Replace(by) => cache.replace(on, by).await,
    };
    done.map_err(|why| CacheChangeError::NotDone { image: name(), why })?;
    match work {
        CacheWork::SetMode(mode) => {
            tracing::info!("{}: its cache is {} from now on", name(), cache_mode_words(mode));
        }
        CacheWork::Flush => tracing::info!("{}: it has all that its cache had", name()),
        CacheWork::Replace(_) => tracing::info!("{}: its cache is on {} from now on", name(), cache.now().file),
    }
    Ok(())
}

fn state_of(config: &DiskConfig, image: &OpenImage) -> DiskState {
    let prefetch = config.options.prefetch.zip(image.prefetch.as_ref());
    DiskState::new(
        config.name.as_deref(),
        &config.image,
        image.format,
        image.device.geometry(),
        config.exports.vhost_user.block_size,
        prefetch.map(|(options, prefetch)| PrefetchState::new(options, prefetch.statistics())),
        image.cache.as_ref().map(CacheState::new),
    )
}

/// The other's result, if it ends before `stop` is raised.
async fn select<T>(stop: impl Future<Output = ()>, other: impl Future<Output = T>) -> Option<T> {
    let (mut stop, mut other) = (pin!(stop), pin!(other));
    std::future::poll_fn(|context| {
        if stop.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        other.as_mut().poll(context).map(Some)
    })
    .await
}
