//! Requests from other threads to a disk's thread: for its state, and for changes while it is in use. They are
//! answered by one task on the disk's loop, so a disk that gets no such requests spends no time on them.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use larder_block::filter::throttle::{ThrottleLimitError, ThrottleLimits};
use larder_block::{ByteLen, ByteRange, Loop};
use larder_export::activity::Activity;
use larder_prefetch::PrefetchOptions;
use tokio::sync::{mpsc, oneshot};

use super::DiskConfig;
use super::moving::{DiskAction, DiskMoveState};
use super::warming::{HOT_RANGES_MAX, Warming};
use crate::control::state::{CacheState, DiskState, LimitsState, PrefetchState, RequestsState};
use crate::control::trace::DiskTrace;
use crate::exports::Exports;
use crate::image::{CacheMode, Format, ImageAddress, OpenImage, ReplaceOptions, cache_mode_long_name};

/// Maximum number of queued requests to a disk's thread; senders of further ones wait.
const QUEUED_REQUESTS_MAX: usize = 16;

/// Handle for requests to a disk's thread, usable from any thread.
#[derive(Clone)]
pub struct DiskHandle {
    name: Option<Arc<str>>,
    trace: Arc<DiskTrace>,
    sender: mpsc::Sender<ControlRequest>,
}

/// Receiving end of the requests, on the disk's loop.
pub(super) struct ControlRequests(mpsc::Receiver<ControlRequest>);

// The queue is short, and no request stays in it for long.
#[allow(clippy::large_enum_variant)]
enum ControlRequest {
    State(oneshot::Sender<DiskState>),
    Hot(oneshot::Sender<Vec<ByteRange>>),
    Change(DiskChange, oneshot::Sender<Result<DiskState, DiskChangeError>>),
}

/// A change to a disk in use.
#[derive(Clone, Debug, PartialEq)]
pub enum DiskChange {
    /// Change settings.
    Settings(DiskSettings),
    /// Perform an operation on the cache.
    Cache(CacheOperation),
    /// Perform a step of a move to or from another host.
    Move(DiskAction),
    /// Read these ranges, which were hot on another host, into the cache while the disk is idle; if its image is not
    /// open here, once it is.
    Warm(Vec<ByteRange>),
}

/// Settings of a disk; `None` leaves a setting unchanged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiskSettings {
    /// Throughput and request rate limits.
    pub limits: Option<ThrottleLimits>,
    /// Read-ahead options; [`PrefetchOptions::OFF`] turns read-ahead off.
    pub prefetch: Option<PrefetchOptions>,
    /// Limit for the bytes written to the cache per day; `Some(None)` removes it.
    pub cache_endurance: Option<Option<ByteLen>>,
    /// Write policy of the cache.
    pub cache_mode: Option<CacheMode>,
}

/// An operation on a disk's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheOperation {
    /// Write all dirty data to the disk.
    Flush,
    /// Replace the cache by another one, or by itself, opened again.
    Replace(ReplaceOptions),
}

/// Reason why a change to a disk failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DiskChangeError {
    #[error("{image} has no cache")]
    NoCache { image: String },
    #[error("the cache of {image} has failed, so it cannot be changed; see the server's messages")]
    CacheFailed { image: String },
    #[error("the cache of {image}: {why}")]
    CacheChange { image: String, why: String },
    #[error(
        "{image} is shared with other writers (share), so it has no read-ahead, which would not notice their writes"
    )]
    Shared { image: String },
    #[error("limits of {image}: {source}")]
    Limits { image: String, source: ThrottleLimitError },
    #[error("{image} is not open here: its VM is, or was, on another host, so the disk cannot be changed")]
    Remote { image: String },
    #[error("{image} cannot move: {why}")]
    MoveFailed { image: String, why: String },
}

/// Creates the two ends for requests to a disk.
pub(super) fn channel(name: Option<&str>) -> (DiskHandle, ControlRequests) {
    let (sender, receiver) = mpsc::channel(QUEUED_REQUESTS_MAX);
    let handle = DiskHandle { name: name.map(Arc::from), trace: Arc::default(), sender };
    (handle, ControlRequests(receiver))
}

impl DiskHandle {
    /// Returns the disk's name in its VM.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the disk's last events, which can be read and added without its thread.
    pub(crate) fn trace(&self) -> &Arc<DiskTrace> {
        &self.trace
    }

    /// Returns the disk's state; `None` if it is being closed.
    pub async fn state(&self) -> Option<DiskState> {
        let (reply, answer) = oneshot::channel();
        self.sender.send(ControlRequest::State(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Returns the disk's hot ranges, the hottest first, as far as its cache knows them; none without a cache. `None`
    /// if the disk is being closed.
    pub async fn hot_ranges(&self) -> Option<Vec<ByteRange>> {
        let (reply, answer) = oneshot::channel();
        self.sender.send(ControlRequest::Hot(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Changes the disk, which may take as long as writing back all dirty data of its cache. The change continues
    /// even if the caller stops waiting. Returns the state afterwards; `None` if the disk is being closed.
    pub async fn change(&self, change: DiskChange) -> Option<Result<DiskState, DiskChangeError>> {
        let (reply, answer) = oneshot::channel();
        self.sender.send(ControlRequest::Change(change, reply)).await.ok()?;
        answer.await.ok()
    }
}

/// A disk in service, as seen by the task that answers requests.
pub(super) struct RunningDisk {
    pub(super) config: DiskConfig,
    /// The open image; `None` while the disk is on another host.
    pub(super) image: Rc<RefCell<Option<Rc<OpenImage>>>>,
    /// State for moves, if the disk can move.
    pub(super) moving: Option<DiskMoveState>,
    pub(super) exports: Rc<Exports>,
    pub(super) activity: Rc<Activity>,
}

/// Answers requests; never completes. The sender of a request may have stopped waiting.
pub(super) async fn answer(on: &Loop, ControlRequests(mut requests): ControlRequests, served: &Rc<RunningDisk>) {
    while let Some(request) = requests.recv().await {
        match request {
            ControlRequest::State(reply) => {
                let _ = reply.send(served.state(on));
            }
            ControlRequest::Hot(reply) => {
                let served = Rc::clone(served);
                on.spawn(async move {
                    let _ = reply.send(served.hot_ranges().await);
                });
            }
            // The cache device may be slow, and other requests must be answered meanwhile.
            ControlRequest::Change(change, reply) => {
                let (running, served) = (on.clone(), Rc::clone(served));
                on.spawn(async move {
                    let changed = served.change(&running, change).await;
                    if let Err(error) = &changed {
                        tracing::debug!(event = "change-failed", "{error}");
                    }
                    let _ = reply.send(changed.map(|()| served.state(&running)));
                });
            }
        }
    }
    std::future::pending().await
}

impl RunningDisk {
    /// Returns the open image.
    pub(super) fn open_image(&self) -> Option<Rc<OpenImage>> {
        self.image.borrow().clone()
    }

    fn state(&self, on: &Loop) -> DiskState {
        let (config, image, moving) = (&self.config, self.open_image(), self.moving.as_ref());
        let image = image.as_ref();
        // A disk that is not open can move, so one of the two is there.
        let geometry = image.map(|image| image.device.geometry());
        let geometry = geometry.or_else(|| moving.map(DiskMoveState::geometry));
        let format = image.map(|image| image.format).or_else(|| moving.map(DiskMoveState::format));
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
            prefetch: image.and_then(|image| image.prefetch.as_ref()).map(|prefetch| PrefetchState::new(prefetch)),
            cache: image.and_then(|image| image.cache.as_ref()).map(CacheState::new),
        }
    }

    async fn hot_ranges(&self) -> Vec<ByteRange> {
        match self.open_image().as_ref().and_then(|image| image.cache.as_ref()) {
            Some(cache) => cache.current().layer.hot_ranges(HOT_RANGES_MAX).await,
            None => Vec::new(),
        }
    }

    async fn change(self: &Rc<Self>, on: &Loop, change: DiskChange) -> Result<(), DiskChangeError> {
        let image = || self.name().to_string();
        match (change, self.open_image()) {
            (DiskChange::Move(step), _) => match &self.moving {
                Some(moving) => moving
                    .apply(on, self, step)
                    .await
                    .map_err(|why| DiskChangeError::MoveFailed { image: image(), why }),
                None => Err(DiskChangeError::MoveFailed {
                    image: image(),
                    why: "its server serves a single disk, not the disks of a VM".to_owned(),
                }),
            },
            (DiskChange::Warm(ranges), _) => {
                if let Some(moving) = &self.moving {
                    moving.warming.add(ranges);
                    Warming::start(on, self);
                }
                Ok(())
            }
            (_, None) => Err(DiskChangeError::Remote { image: image() }),
            (DiskChange::Settings(settings), Some(open)) => self.apply_settings(&open, settings).await,
            (DiskChange::Cache(operation), Some(open)) => self.apply_cache_operation(on, &open, operation).await,
        }
    }

    pub(super) fn name(&self) -> &ImageAddress {
        &self.config.image
    }

    async fn apply_settings(&self, open: &OpenImage, settings: DiskSettings) -> Result<(), DiskChangeError> {
        let image = || self.name().to_string();
        // All checks come first, so that an invalid request changes nothing.
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
                "" => tracing::info!(event = "limits", disk = %self.name(), "limits removed"),
                limits => tracing::info!(event = "limits", disk = %self.name(), "limits set: {limits}"),
            }
        }
        if let Some((options, prefetch)) = prefetch {
            prefetch.set_options(options).await;
            match options {
                PrefetchOptions::OFF => {
                    tracing::info!(event = "read-ahead", disk = %self.name(), "read-ahead disabled")
                }
                options => tracing::info!(
                    event = "read-ahead", disk = %self.name(),
                    "read-ahead enabled, with {} of memory", options.memory
                ),
            }
        }
        let Some(cache) = &open.cache else {
            return Ok(());
        };
        if let Some(endurance) = settings.cache_endurance {
            cache.current().layer.set_endurance(endurance);
            match endurance {
                Some(bytes) => tracing::info!(
                    event = "cache-endurance", disk = %self.name(),
                    "writes to the cache limited to {bytes} per day"
                ),
                None => tracing::info!(
                    event = "cache-endurance", disk = %self.name(),
                    "limit of writes to the cache removed"
                ),
            }
        }
        if let Some(mode) = settings.cache_mode {
            if !cache.current().layer.is_working() {
                return Err(DiskChangeError::CacheFailed { image: image() });
            }
            tracing::debug!(event = "cache-mode", "the cache mode is being set to {}", cache_mode_long_name(mode));
            let set = cache.set_mode(mode).await;
            set.map_err(|why| DiskChangeError::CacheChange { image: image(), why })?;
            tracing::info!(
                event = "cache-mode", disk = %self.name(),
                "cache mode set to {}", cache_mode_long_name(mode)
            );
        }
        Ok(())
    }

    async fn apply_cache_operation(
        &self,
        on: &Loop,
        open: &OpenImage,
        operation: CacheOperation,
    ) -> Result<(), DiskChangeError> {
        let image = || self.name().to_string();
        let Some(cache) = &open.cache else {
            return Err(DiskChangeError::NoCache { image: image() });
        };
        if operation == CacheOperation::Flush && !cache.current().layer.is_working() {
            return Err(DiskChangeError::CacheFailed { image: image() });
        }
        let done = match &operation {
            CacheOperation::Flush => {
                tracing::debug!(event = "cache-flush", "all dirty data of the cache is being written to the disk");
                cache.flush().await
            }
            CacheOperation::Replace(by) => {
                tracing::debug!(event = "cache-replaced", "the cache on {} is being replaced", cache.current().file);
                cache.replace(on, by).await
            }
        };
        done.map_err(|why| DiskChangeError::CacheChange { image: image(), why })?;
        match operation {
            CacheOperation::Flush => tracing::info!(
                event = "cache-flush", disk = %self.name(),
                "all dirty data of the cache is written to the disk"
            ),
            CacheOperation::Replace(_) => tracing::info!(
                event = "cache-replaced", disk = %self.name(),
                "cache replaced; it is on {} now", cache.current().file
            ),
        }
        Ok(())
    }
}
