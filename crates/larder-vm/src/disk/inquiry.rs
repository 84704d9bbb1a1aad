//! What a disk's thread is asked for by others: how the disk is, and to change something while it is used. It answers on the
//! disk's loop, as one task among its others, so that a disk of which nobody asks does nothing for it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use larder_block::filter::throttle::{LimitError, Limits};
use larder_block::{ByteLen, ByteRange, Loop};
use larder_export::activity::Activity;
use larder_prefetch::PrefetchOptions;
use tokio::sync::{mpsc, oneshot};

use super::DiskConfig;
use super::hot::{HOT_RANGES_MAX, Warming};
use super::moving::{DiskMove, Moving};
use crate::control::state::{CacheState, DiskState, LimitsState, PrefetchState, RequestsState};
use crate::exports::Exports;
use crate::image::{CacheMode, Format, ImageAddress, OpenImage, Replacement, cache_mode_words};

/// Inquiries that wait for a disk's thread at most; further ones wait where they come from.
const WAITING_MAX: usize = 16;

/// Asks a disk's thread how the disk is, or for a change, from any thread.
#[derive(Clone)]
pub struct DiskInquiry {
    name: Option<Arc<str>>,
    sender: mpsc::Sender<Inquiry>,
}

/// The other end, on the disk's loop.
pub(super) struct Inquiries(mpsc::Receiver<Inquiry>);

// There are few, and none for long.
#[allow(clippy::large_enum_variant)]
enum Inquiry {
    State(oneshot::Sender<DiskState>),
    Hot(oneshot::Sender<Vec<ByteRange>>),
    Change(DiskChange, oneshot::Sender<Result<DiskState, DiskChangeError>>),
}

/// What can be changed of a disk that is used.
#[derive(Clone, Debug, PartialEq)]
pub enum DiskChange {
    /// What it is set to.
    Settings(DiskSettings),
    /// Its cache does something.
    Cache(CacheWork),
    /// It goes to another host, or comes.
    Move(DiskMove),
    /// These ranges were hot on another host, and are brought into its cache while nothing else is to be done; once it is
    /// here, if it is not.
    Warm(Vec<ByteRange>),
}

/// Settings of a disk; what is `None` stays as it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiskSettings {
    /// What it may do per second.
    pub limits: Option<Limits>,
    /// How it is read ahead of, [`PrefetchOptions::OFF`] if it is not.
    pub prefetch: Option<PrefetchOptions>,
    /// What may be written to its cache in a day, if that is limited.
    pub cache_endurance: Option<Option<ByteLen>>,
    /// What its cache does with writes.
    pub cache_mode: Option<CacheMode>,
}

/// What a disk's cache is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheWork {
    /// Write to the disk what only the cache has.
    Flush,
    /// Give its place to another one, or to itself, opened again.
    Replace(Replacement),
}

/// Why a disk has not changed as it should.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DiskChangeError {
    #[error("{image} has no cache")]
    NoCache { image: String },
    #[error("the cache of {image} does not work any more, so nothing in it can be changed; see the server's messages")]
    Failed { image: String },
    #[error("the cache of {image}: {why}")]
    NotDone { image: String, why: String },
    #[error(
        "{image} is shared with others who may write to it (share), and is not read ahead of: nobody would tell of their writes"
    )]
    Shared { image: String },
    #[error("limits of {image}: {source}")]
    Limits { image: String, source: LimitError },
    #[error("{image} is not open here: its VM is, or was, on another host, and nothing of it can be changed")]
    Away { image: String },
    #[error("{image} cannot move: {why}")]
    NotMoved { image: String, why: String },
}

/// A disk that can be asked, and who answers for it.
pub(super) fn channel(name: Option<&str>) -> (DiskInquiry, Inquiries) {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    let name = name.map(Arc::from);
    (DiskInquiry { name, sender }, Inquiries(receiver))
}

impl DiskInquiry {
    /// What its VM calls the disk.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// How the disk is now; `None` if it is being closed.
    pub async fn state(&self) -> Option<DiskState> {
        let (reply, answer) = oneshot::channel();
        self.sender.send(Inquiry::State(reply)).await.ok()?;
        answer.await.ok()
    }

    /// What of it is hot, the hottest first, as far as its cache knows; nothing if it has none. `None` if it is being closed.
    pub async fn hot(&self) -> Option<Vec<ByteRange>> {
        let (reply, answer) = oneshot::channel();
        self.sender.send(Inquiry::Hot(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Has the disk change, which may take as long as all of what only its cache has takes to be written to it; it is done
    /// also if nobody waits for it. How the disk is then; `None` if it is being closed.
    pub async fn change(&self, change: DiskChange) -> Option<Result<DiskState, DiskChangeError>> {
        let (reply, answer) = oneshot::channel();
        self.sender.send(Inquiry::Change(change, reply)).await.ok()?;
        answer.await.ok()
    }
}

/// A disk that is served, as those who ask see it.
pub(super) struct Served {
    pub(super) config: DiskConfig,
    /// `None` while it is not here.
    pub(super) image: Rc<RefCell<Option<Rc<OpenImage>>>>,
    /// If it can go, and come.
    pub(super) moving: Option<Moving>,
    pub(super) exports: Rc<Exports>,
    pub(super) activity: Rc<Activity>,
}

/// Answers who asks; never ends. Who has asked may have gone.
pub(super) async fn answer(on: &Loop, Inquiries(mut inquiries): Inquiries, served: &Rc<Served>) {
    while let Some(inquiry) = inquiries.recv().await {
        match inquiry {
            Inquiry::State(reply) => {
                let _ = reply.send(served.state(on));
            }
            Inquiry::Hot(reply) => {
                let served = Rc::clone(served);
                on.spawn(async move {
                    let _ = reply.send(served.hot().await);
                });
            }
            // Its device may be slow, and others want to know something meanwhile.
            Inquiry::Change(change, reply) => {
                let (running, served) = (on.clone(), Rc::clone(served));
                on.spawn(async move {
                    let changed = served.change(&running, change).await;
                    let _ = reply.send(changed.map(|()| served.state(&running)));
                });
            }
        }
    }
    std::future::pending().await
}

impl Served {
    /// What is open.
    pub(super) fn now(&self) -> Option<Rc<OpenImage>> {
        self.image.borrow().clone()
    }

    fn state(&self, on: &Loop) -> DiskState {
        let (config, image, moving) = (&self.config, self.now(), self.moving.as_ref());
        let image = image.as_ref();
        // It is open, or can move.
        let geometry = image.map(|image| image.device.geometry());
        let geometry = geometry.or_else(|| moving.map(Moving::geometry));
        let format = image.map(|image| image.format).or_else(|| moving.map(Moving::format));
        let limits = image.map_or(config.options.limits, |image| image.throttle.limits());
        DiskState {
            name: config.name.clone(),
            image: config.image.to_string(),
            format: format.unwrap_or(Format::Raw),
            size: geometry.map_or(0, |geometry| geometry.size.get()),
            block_size: config.exports.vhost_user.block_size,
            serial: config.exports.vhost_user.serial.to_string(),
            read_only: geometry.is_some_and(|geometry| geometry.read_only),
            shared: config.options.share,
            away: image.is_none(),
            time_ns: on.now().as_nanos(),
            exports: self.exports.state(),
            requests: RequestsState::new(&self.activity),
            limits: LimitsState::new(limits),
            prefetch: image
                .and_then(|image| image.prefetch.as_ref())
                .map(|prefetch| PrefetchState::new(prefetch)),
            cache: image.and_then(|image| image.cache.as_ref()).map(CacheState::new),
        }
    }

    async fn hot(&self) -> Vec<ByteRange> {
        match self.now().as_ref().and_then(|image| image.cache.as_ref()) {
            Some(cache) => cache.now().layer.hot(HOT_RANGES_MAX).await,
            None => Vec::new(),
        }
    }

    async fn change(self: &Rc<Self>, on: &Loop, change: DiskChange) -> Result<(), DiskChangeError> {
        let image = || self.name().to_string();
        match (change, self.now()) {
            (DiskChange::Move(step), _) => match &self.moving {
                Some(moving) => moving
                    .step(on, self, step)
                    .await
                    .map_err(|why| DiskChangeError::NotMoved { image: image(), why }),
                None => Err(DiskChangeError::NotMoved {
                    image: image(),
                    why: "its server serves one disk, and not those of a VM".to_owned(),
                }),
            },
            (DiskChange::Warm(ranges), _) => {
                if let Some(moving) = &self.moving {
                    moving.warming.add(ranges);
                    Warming::start(on, self);
                }
                Ok(())
            }
            (_, None) => Err(DiskChangeError::Away { image: image() }),
            (DiskChange::Settings(settings), Some(open)) => self.set(&open, settings).await,
            (DiskChange::Cache(work), Some(open)) => self.have_cache(on, &open, work).await,
        }
    }

    pub(super) fn name(&self) -> &ImageAddress {
        &self.config.image
    }

    async fn set(&self, open: &OpenImage, settings: DiskSettings) -> Result<(), DiskChangeError> {
        let image = || self.name().to_string();
        // What cannot be is told before anything is done.
        let prefetch = match (settings.prefetch, &open.prefetch) {
            (Some(_), None) => return Err(DiskChangeError::Shared { image: image() }),
            (options, layer) => options.zip(layer.as_ref()),
        };
        let is_for_cache = settings.cache_mode.is_some() || settings.cache_endurance.is_some();
        if is_for_cache && open.cache.is_none() {
            return Err(DiskChangeError::NoCache { image: image() });
        }
        if let Some(limits) = settings.limits {
            let set = open.throttle.set_limits(limits);
            set.map_err(|source| DiskChangeError::Limits { image: image(), source })?;
            match LimitsState::new(limits).to_string().as_str() {
                "" => tracing::info!(disk = %self.name(), "no limits from now on"),
                limits => tracing::info!(disk = %self.name(), "limits from now on: {limits}"),
            }
        }
        if let Some((options, prefetch)) = prefetch {
            prefetch.set_options(options).await;
            match options {
                PrefetchOptions::OFF => tracing::info!(disk = %self.name(), "nothing is read ahead from now on"),
                options => {
                    tracing::info!(disk = %self.name(), "read ahead with {} of memory from now on", options.memory)
                }
            }
        }
        let Some(cache) = &open.cache else {
            return Ok(());
        };
        if let Some(endurance) = settings.cache_endurance {
            cache.now().layer.set_endurance(endurance);
            match endurance {
                Some(bytes) => {
                    tracing::info!(disk = %self.name(), "its cache is written {bytes} a day at most from now on")
                }
                None => tracing::info!(disk = %self.name(), "its cache is written without a limit from now on"),
            }
        }
        if let Some(mode) = settings.cache_mode {
            if !cache.now().layer.works() {
                return Err(DiskChangeError::Failed { image: image() });
            }
            let set = cache.set_mode(mode).await;
            set.map_err(|why| DiskChangeError::NotDone { image: image(), why })?;
            tracing::info!(disk = %self.name(), "its cache is {} from now on", cache_mode_words(mode));
        }
        Ok(())
    }

    async fn have_cache(&self, on: &Loop, open: &OpenImage, work: CacheWork) -> Result<(), DiskChangeError> {
        let image = || self.name().to_string();
        let Some(cache) = &open.cache else {
            return Err(DiskChangeError::NoCache { image: image() });
        };
        if work == CacheWork::Flush && !cache.now().layer.works() {
            return Err(DiskChangeError::Failed { image: image() });
        }
        let done = match &work {
            CacheWork::Flush => cache.flush().await,
            CacheWork::Replace(by) => cache.replace(on, by).await,
        };
        done.map_err(|why| DiskChangeError::NotDone { image: image(), why })?;
        match work {
            CacheWork::Flush => tracing::info!(disk = %self.name(), "it has all that its cache had"),
            CacheWork::Replace(_) => {
                tracing::info!(disk = %self.name(), "its cache is on {} from now on", cache.now().file);
            }
        }
        Ok(())
    }
}
