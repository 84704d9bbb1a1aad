//! Slot of the cache in a disk's stack of layers: operations on the cache while the disk is in use.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::filter::switch::{LayerSwitch, RequestPause};
use larder_block::{BlockDevice, ByteLen, Loop};
use larder_cache::CacheMode;
use tokio::sync::oneshot;

use super::cache::{self, CacheError, CachedDisk};
use super::cache_spec::{CACHE_LINE_DEFAULT, CacheOptions};
use super::open_cache::OpenCache;
use super::{ImageAddress, ImageOptions, cache_replacement, is_same_image};

/// Longest time for which new requests of the guest are held until those in flight have completed.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(5);

/// Longest time for each step while requests are held: writing the rest of the dirty data, and opening the new cache.
const STEP_TIME_MAX: Duration = Duration::from_secs(10);

/// Options for replacing a cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplaceOptions {
    /// File, device or export of the new cache; if unset, the old cache is opened again, whose device has returned.
    pub file: Option<ImageAddress>,
    /// Size of a new file; if unset, that of the old cache.
    pub size: Option<ByteLen>,
    /// Replace the cache even if its dirty data is lost.
    pub lose_dirty: bool,
}

/// The slot of a cache in a disk's stack.
pub struct CacheSlot {
    switch: Rc<LayerSwitch>,
    current: RefCell<Rc<OpenCache>>,
    disk: CachedDisk,
    options: ImageOptions,
    /// Operations that a client has requested.
    pub(crate) operations: OperationTracker,
}

impl CacheSlot {
    /// Opens the cache of a disk, and creates it if it does not exist.
    pub(super) async fn open(
        on: &Loop,
        disk: CachedDisk,
        cache_options: &CacheOptions,
        options: &ImageOptions,
    ) -> Result<Self, CacheError> {
        let prepared = cache::prepare(on, &disk, cache_options, options, CACHE_LINE_DEFAULT).await?;
        let opened = prepared.open(on, &disk, None).await?;
        opened.allocate(&disk.image).await;
        opened.log_opened();
        let switch = LayerSwitch::new(Rc::clone(&disk.device), Rc::clone(&opened.layer) as Rc<dyn BlockDevice>);
        Ok(Self {
            switch: Rc::new(switch),
            current: RefCell::new(Rc::new(opened)),
            disk,
            options: options.clone(),
            operations: OperationTracker::default(),
        })
    }

    /// Returns the disk with its cache.
    pub(super) fn device(&self) -> Rc<dyn BlockDevice> {
        Rc::clone(&self.switch) as Rc<dyn BlockDevice>
    }

    /// Returns the current cache.
    pub fn current(&self) -> Rc<OpenCache> {
        Rc::clone(&self.current.borrow())
    }

    /// Changes the write policy; see [`larder_cache::Cache::set_mode`].
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) async fn set_mode(&self, mode: CacheMode) -> Result<(), String> {
        let operation = self.operations.begin(false)?;
        operation.finish(self.current().set_mode(mode).await)
    }

    /// Writes all dirty data to the disk.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) async fn flush(&self) -> Result<(), String> {
        let operation = self.operations.begin(false)?;
        operation.finish(self.current().flush().await)
    }

    /// Replaces this cache by another one, or opens it again after its device had failed. The guest's requests are
    /// held for a moment.
    ///
    /// # Errors
    /// A message for the user; the cache is unchanged then.
    pub(crate) async fn replace(&self, on: &Loop, options: &ReplaceOptions) -> Result<(), String> {
        let operation = self.operations.begin(true)?;
        operation.finish(self.replace_steps(on, options).await)
    }

    async fn replace_steps(&self, on: &Loop, options: &ReplaceOptions) -> Result<(), String> {
        let old = self.current();
        let file = options.file.as_ref().unwrap_or(&old.file);
        let is_same = is_same_image(file, &old.file);
        let cache_options = CacheOptions {
            file: file.clone(),
            size: options.size.or_else(|| cache::would_be_created(file).then_some(old.size)),
            line: None,
            mode: Some(old.layer.mode()),
            endurance: old.layer.endurance(),
            exclusive: false,
            force: false,
            ignores_replacement: true,
        };
        match is_same {
            true => self.reopen_failed(on, &old, &cache_options).await,
            false => self.replace_with_new(on, &old, &cache_options, options.lose_dirty).await,
        }
    }

    /// Reopens the cache that has failed.
    async fn reopen_failed(&self, on: &Loop, old: &Rc<OpenCache>, cache_options: &CacheOptions) -> Result<(), String> {
        if old.layer.is_working() {
            return Err("it works; to replace it, name the new cache (--with)".to_owned());
        }
        if old.layer.is_hanging() {
            return Err("its device has still not answered earlier requests; if it never will, replace the cache by another one (--with)".to_owned());
        }
        let held = self.switch.pause().ok_or_else(closing_error)?;
        with_deadline(on, DRAIN_TIME_MAX, held.drain(&on.downgrade()), IN_FLIGHT_STUCK).await?;
        with_deadline(on, STEP_TIME_MAX, old.layer.detach(), BACKGROUND_STUCK).await?.map_err(text)?;
        // Closing releases the locks. If it fails, the cache is reopened all the same.
        if let Err(error) = with_deadline(on, STEP_TIME_MAX, old.fast.close(), BACKGROUND_STUCK)
            .await
            .and_then(|closed| closed.map_err(text))
        {
            tracing::warn!("{}: the failed cache could not be closed: {error}", old.file);
        }
        old.lock.take();
        let disk = self.disk.refreshed();
        let (spawned, cache_options, options) = (on.clone(), cache_options.clone(), self.options.clone());
        let opening = async move {
            let prepared = cache::prepare(&spawned, &disk, &cache_options, &options, CACHE_LINE_DEFAULT).await?;
            prepared.open(&spawned, &disk, None).await
        };
        // Both openings of the cache have the same state file.
        let paused_record = old.state_file.pause();
        let (spawned, reopened) = (on.clone(), Rc::clone(old));
        let failed = move |_| reopened.state_file.resume(paused_record, &spawned, &reopened.layer);
        let new = open_with_deadline(on, opening, failed).await?;
        self.exchange(new, held).await;
        Ok(())
    }

    /// Replaces the old cache by another one, after all its dirty data was written to the disk.
    async fn replace_with_new(
        &self,
        on: &Loop,
        old: &Rc<OpenCache>,
        cache_options: &CacheOptions,
        lose_dirty: bool,
    ) -> Result<(), String> {
        let line = ByteLen::new(old.layer.layout().line_len());
        let disk = self.disk.refreshed();
        let prepared = cache::prepare(on, &disk, cache_options, &self.options, line).await;
        let prepared = prepared.map_err(text)?;
        let (held, is_lost) = match self.flush_and_hold(on, old, lose_dirty).await {
            Ok(held_and_lost) => held_and_lost,
            Err(why) => {
                prepared.undo_creation();
                return Err(why);
            }
        };
        let (spawned, instead) = (on.clone(), Rc::clone(old));
        let opening = async move { prepared.open(&spawned, &disk, Some(&instead)).await };
        let failed = |late: Option<OpenCache>| {
            if let Some(late) = late
                && let Err(error) = late.state_file.remove()
            {
                tracing::warn!(
                    "{}: the state file of a cache that was opened too late cannot be removed: {error}",
                    late.file
                );
            }
        };
        let new = open_with_deadline(on, opening, failed).await?;
        if let Err(error) = cache_replacement::record(&self.disk.identity, &old.file, &new) {
            let why = format!("cannot record that {} has replaced it: {error}", new.file);
            if new.layer.mode() == CacheMode::WriteBack {
                if let Err(error) = new.layer.detach().await {
                    tracing::warn!("{}: the new cache could not be closed: {error}", new.file);
                }
                new.close_state_file();
                return Err(why);
            }
            tracing::warn!("{}: {why}; from now on, start its server with the new cache", self.disk.image);
        }
        if let Err(error) = old.retire(is_lost).await {
            tracing::warn!(
                "{}: its old cache {} could not be closed: {error}; drop it before it is used again (larder disk cache drop)",
                self.disk.image,
                old.file
            );
        }
        self.exchange(new, held).await;
        Ok(())
    }

    /// Detaches the cache because the disk moves to another host: writes all dirty data to the disk, which then runs
    /// without a cache until it is closed. From before this returns, the cached data is stale for ever. `mode`, if
    /// given, becomes the cache's write policy from its next opening on.
    ///
    /// # Errors
    /// A message for the user; the cache is unchanged then, unless retiring it was the step that failed.
    pub(crate) async fn release(&self, on: &Loop, mode: Option<CacheMode>) -> Result<(), String> {
        let operation = self.operations.begin(true)?;
        operation.finish(self.release_steps(on, mode).await)
    }

    async fn release_steps(&self, on: &Loop, mode: Option<CacheMode>) -> Result<(), String> {
        let old = self.current();
        let (held, _) = self.flush_and_hold(on, &old, false).await?;
        if let Some(mode) = mode.filter(|_| old.layer.is_working()) {
            // The cache is clean, so nothing more is written to it.
            if let Err(error) = old.layer.set_mode(mode).await {
                tracing::warn!("{}: the mode of the cache is unchanged: {error}", old.file);
            }
        }
        // After a crash before this step completes, the server still has the disk; after a crash later, the cache
        // fits no disk.
        old.retire(false).await?;
        old.layer.inactivate().await;
        held.replace_layer(Rc::clone(&self.disk.device));
        tracing::debug!(event = "cache-dropped", "the disk runs without its cache on {}", old.file);
        Ok(())
    }

    /// Writes all dirty data of `old` to the disk, and holds requests; returns whether some of it is lost.
    async fn flush_and_hold(
        &self,
        on: &Loop,
        old: &OpenCache,
        lose_dirty: bool,
    ) -> Result<(RequestPause<'_>, bool), String> {
        // All data that can be written is written, even if the rest may be lost.
        let mut handed_over = old.layer.flush_most_dirty().await;
        let dirty = || old.layer.statistics().dirty_lines;
        while handed_over.is_err() && lose_dirty {
            let before = dirty();
            handed_over = old.layer.flush_most_dirty().await;
            if dirty() >= before {
                break;
            }
        }
        if let (Err(error), false) = (&handed_over, lose_dirty) {
            return Err(cannot_hand_over(error));
        }
        let held = self.switch.pause().ok_or_else(closing_error)?;
        with_deadline(on, DRAIN_TIME_MAX, held.drain(&on.downgrade()), IN_FLIGHT_STUCK).await?;
        // Data was written in between, and the cache's device may have failed as well.
        let last_flush = async {
            old.layer.flush_dirty().await.map_err(text)?;
            match old.layer.disk_has_all_data().await {
                true => Ok(()),
                false => Err("part of its data is damaged".to_owned()),
            }
        };
        let last_flush =
            with_deadline(on, STEP_TIME_MAX, last_flush, "the disk does not accept the dirty data").await?;
        if let (Err(error), false) = (&last_flush, lose_dirty) {
            return Err(cannot_hand_over(error));
        }
        if !old.layer.is_working() {
            with_deadline(on, STEP_TIME_MAX, old.layer.detach(), BACKGROUND_STUCK).await?.map_err(text)?;
        }
        Ok((held, last_flush.is_err()))
    }

    async fn exchange(&self, new: OpenCache, held: RequestPause<'_>) {
        self.current().layer.inactivate().await;
        held.replace_layer(Rc::clone(&new.layer) as Rc<dyn BlockDevice>);
        let new = Rc::new(new);
        self.current.replace(Rc::clone(&new));
        drop(held);
        new.log_opened();
        new.allocate(&self.disk.image).await;
    }
}

fn cannot_hand_over(error: impl std::fmt::Display) -> String {
    format!(
        "it may have data that was never written to the disk, and cannot be written now: {error}; make its device available again and reopen the cache (without --with), or discard that data (--lose-dirty)"
    )
}

const IN_FLIGHT_STUCK: &str = "requests in flight do not complete; try again";
const BACKGROUND_STUCK: &str = "its background work does not finish; try again";

fn closing_error() -> String {
    "the disk is being closed".to_owned()
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Returns the result, if there is one in time.
async fn with_deadline<T>(on: &Loop, limit: Duration, work: impl Future<Output = T>, why: &str) -> Result<T, String> {
    let done = on.timeout(limit, work).await;
    done.ok_or_else(|| format!("{why} ({} s)", limit.as_secs()))
}

/// Returns the cache once it is open, unless that takes too long. An opening cannot be cancelled half-way, so it
/// continues in the background then; `failed` is called when it ends in vain, with the cache that was opened too
/// late, if any.
async fn open_with_deadline(
    on: &Loop,
    opening: impl Future<Output = Result<OpenCache, CacheError>> + 'static,
    failed: impl FnOnce(Option<OpenCache>) + 'static,
) -> Result<OpenCache, String> {
    let (sender, receiver) = oneshot::channel();
    on.spawn(async move {
        match opening.await {
            Ok(opened) => {
                if let Err(Ok(late)) = sender.send(Ok(opened)) {
                    failed(Some(late));
                }
            }
            Err(error) => {
                failed(None);
                // This fails only if the receiver has given up.
                let _ = sender.send(Err(error));
            }
        }
    });
    let opened = with_deadline(on, STEP_TIME_MAX, receiver, "the new cache does not open in time").await?;
    match opened {
        Ok(opened) => opened.map_err(text),
        Err(_) => Err(closing_error()),
    }
}

/// Operations on a cache that a client has requested.
#[derive(Default)]
pub(crate) struct OperationTracker {
    running: Cell<u32>,
    /// The running operation must be the only one.
    is_exclusive: Cell<bool>,
    error: RefCell<Option<String>>,
}

struct RunningOperation<'a>(&'a OperationTracker);

impl OperationTracker {
    fn begin(&self, exclusive: bool) -> Result<RunningOperation<'_>, String> {
        if self.is_exclusive.get() {
            return Err("it is being replaced".to_owned());
        }
        if exclusive && self.is_running() {
            return Err("another operation on it is running; wait until that has finished".to_owned());
        }
        self.is_exclusive.set(exclusive);
        self.running.set(self.running.get() + 1);
        Ok(RunningOperation(self))
    }

    /// Returns whether an operation is running.
    pub(crate) fn is_running(&self) -> bool {
        self.running.get() > 0
    }

    /// Returns the error of the operation that ended last.
    pub(crate) fn error(&self) -> Option<String> {
        self.error.borrow().clone()
    }
}

impl RunningOperation<'_> {
    fn finish(self, result: Result<(), String>) -> Result<(), String> {
        *self.0.error.borrow_mut() = result.as_ref().err().cloned();
        result
    }
}

impl Drop for RunningOperation<'_> {
    fn drop(&mut self) {
        self.0.running.set(self.0.running.get() - 1);
        self.0.is_exclusive.set(false);
    }
}
