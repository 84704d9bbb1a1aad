//! Slot of the cache in a disk's stack of layers: operations on the cache while the disk is in use.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::filter::switch::{LayerSwitch, RequestPause};
use larder_block::{BlockDevice, ByteLen, Loop};
use larder_cache::CacheMode;
use tokio::sync::oneshot;

use super::cache::{self, CacheError, Cached};
use super::cache_wish::{CACHE_LINE_DEFAULT, CacheOptions};
use super::open_cache::OpenCache;
use super::{ImageAddress, ImageOptions, is_same, replaced};

/// Longest time for which new requests of the guest are held until those in flight have completed.
const DRAIN_MAX: Duration = Duration::from_secs(5);

/// Longest time for each step while requests are held: writing the rest of the dirty data, and opening the new cache.
const STEP_MAX: Duration = Duration::from_secs(10);

/// Options for replacing a cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replacement {
    /// File, device or export of the new cache; if unset, the old cache is opened again, whose device has returned.
    pub file: Option<ImageAddress>,
    /// Size of a new file; if unset, that of the old cache.
    pub size: Option<ByteLen>,
    /// Replace the cache even if its dirty data is lost.
    pub lose_dirty: bool,
}

/// The slot of a cache in a disk's stack.
pub struct CachePlace {
    switch: Rc<LayerSwitch>,
    now: RefCell<Rc<OpenCache>>,
    disk: Cached,
    options: ImageOptions,
    /// Operations that a client has requested.
    pub(crate) work: Work,
}

impl CachePlace {
    /// Opens the cache of a disk, and creates it if it does not exist.
    pub(super) async fn open(
        on: &Loop,
        disk: Cached,
        wish: &CacheOptions,
        options: &ImageOptions,
    ) -> Result<Self, CacheError> {
        let prepared = cache::prepare(on, &disk, wish, options, CACHE_LINE_DEFAULT).await?;
        let opened = prepared.open(on, &disk, None).await?;
        opened.allocate(&disk.image).await;
        let switch = LayerSwitch::new(Rc::clone(&disk.device), Rc::clone(&opened.layer) as Rc<dyn BlockDevice>);
        Ok(Self {
            switch: Rc::new(switch),
            now: RefCell::new(Rc::new(opened)),
            disk,
            options: options.clone(),
            work: Work::default(),
        })
    }

    /// Returns the disk with its cache.
    pub(super) fn device(&self) -> Rc<dyn BlockDevice> {
        Rc::clone(&self.switch) as Rc<dyn BlockDevice>
    }

    /// Returns the current cache.
    pub fn now(&self) -> Rc<OpenCache> {
        Rc::clone(&self.now.borrow())
    }

    /// Changes the write policy; see [`larder_cache::Cache::set_mode`].
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) async fn set_mode(&self, mode: CacheMode) -> Result<(), String> {
        let work = self.work.begin(false)?;
        work.ended(self.now().set_mode(mode).await)
    }

    /// Writes all dirty data to the disk.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) async fn flush(&self) -> Result<(), String> {
        let work = self.work.begin(false)?;
        work.ended(self.now().flush().await)
    }

    /// Replaces this cache by another one, or opens it again after its device had failed. The guest's requests are
    /// held for a moment.
    ///
    /// # Errors
    /// A message for the user; the cache is unchanged then.
    pub(crate) async fn replace(&self, on: &Loop, by: &Replacement) -> Result<(), String> {
        let work = self.work.begin(true)?;
        work.ended(self.replace_steps(on, by).await)
    }

    async fn replace_steps(&self, on: &Loop, by: &Replacement) -> Result<(), String> {
        let old = self.now();
        let file = by.file.as_ref().unwrap_or(&old.file);
        let is_same = is_same(file, &old.file);
        let wish = CacheOptions {
            file: file.clone(),
            size: by.size.or_else(|| cache::is_empty(file).then_some(old.size)),
            line: None,
            mode: Some(old.layer.mode()),
            endurance: old.layer.endurance(),
            exclusive: false,
            force: false,
            exactly: true,
        };
        match is_same {
            true => self.replace_by_itself(on, &old, &wish).await,
            false => self.replace_by_other(on, &old, &wish, by.lose_dirty).await,
        }
    }

    /// Reopens the cache that has failed.
    async fn replace_by_itself(&self, on: &Loop, old: &Rc<OpenCache>, wish: &CacheOptions) -> Result<(), String> {
        if old.layer.is_working() {
            return Err("it works; to replace it, name the new cache (--with)".to_owned());
        }
        if old.layer.is_hanging() {
            return Err("its device has still not answered earlier requests; if it never will, replace the cache by another one (--with)".to_owned());
        }
        let held = self.switch.pause().ok_or_else(being_closed)?;
        in_time(on, DRAIN_MAX, held.drain(&on.downgrade()), UNDER_WAY).await?;
        in_time(on, STEP_MAX, old.layer.detach(), NO_REST)
            .await?
            .map_err(text)?;
        // Closing releases the locks. If it fails, the cache is reopened all the same.
        if let Err(error) = in_time(on, STEP_MAX, old.fast.close(), NO_REST)
            .await
            .and_then(|closed| closed.map_err(text))
        {
            tracing::warn!("{}: the failed cache could not be closed: {error}", old.file);
        }
        old.lock.take();
        let disk = self.disk.again();
        let (spawned, wish, options) = (on.clone(), wish.clone(), self.options.clone());
        let opening = async move {
            let prepared = cache::prepare(&spawned, &disk, &wish, &options, CACHE_LINE_DEFAULT).await?;
            prepared.open(&spawned, &disk, None).await
        };
        // Both openings of the cache have the same state file.
        let noted = old.note.pause();
        let (spawned, again) = (on.clone(), Rc::clone(old));
        let failed = move |_| again.note.resume(noted, &spawned, &again.layer);
        let new = open_in_time(on, opening, failed).await?;
        self.exchange(new, held).await;
        Ok(())
    }

    /// Replaces the old cache by another one, after all its dirty data was written to the disk.
    async fn replace_by_other(
        &self,
        on: &Loop,
        old: &Rc<OpenCache>,
        wish: &CacheOptions,
        lose_dirty: bool,
    ) -> Result<(), String> {
        let line = ByteLen::new(old.layer.layout().line_len());
        let disk = self.disk.again();
        let prepared = cache::prepare(on, &disk, wish, &self.options, line).await;
        let prepared = prepared.map_err(text)?;
        let (held, is_lost) = match self.leave(on, old, lose_dirty).await {
            Ok(left) => left,
            Err(why) => {
                prepared.undo();
                return Err(why);
            }
        };
        let (spawned, instead) = (on.clone(), Rc::clone(old));
        let opening = async move { prepared.open(&spawned, &disk, Some(&instead)).await };
        let failed = |late: Option<OpenCache>| {
            if let Some(late) = late
                && let Err(error) = late.note.take_back()
            {
                tracing::warn!(
                    "{}: the state file of a cache that was opened too late cannot be removed: {error}",
                    late.file
                );
            }
        };
        let new = open_in_time(on, opening, failed).await?;
        if let Err(error) = replaced::note(&self.disk.identity, &old.file, &new) {
            let why = format!("cannot record that {} has replaced it: {error}", new.file);
            if new.layer.mode() == CacheMode::WriteBack {
                if let Err(error) = new.layer.detach().await {
                    tracing::warn!("{}: the new cache could not be closed: {error}", new.file);
                }
                new.forget_note();
                return Err(why);
            }
            tracing::warn!(
                "{}: {why}; from now on, start its server with the new cache",
                self.disk.image
            );
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
    pub(crate) async fn part(&self, on: &Loop, mode: Option<CacheMode>) -> Result<(), String> {
        let work = self.work.begin(true)?;
        work.ended(self.part_steps(on, mode).await)
    }

    async fn part_steps(&self, on: &Loop, mode: Option<CacheMode>) -> Result<(), String> {
        let old = self.now();
        let (held, _) = self.leave(on, &old, false).await?;
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
        Ok(())
    }

    /// Writes all dirty data of `old` to the disk, and holds requests; returns whether some of it is lost.
    async fn leave(&self, on: &Loop, old: &OpenCache, lose_dirty: bool) -> Result<(RequestPause<'_>, bool), String> {
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
        let held = self.switch.pause().ok_or_else(being_closed)?;
        in_time(on, DRAIN_MAX, held.drain(&on.downgrade()), UNDER_WAY).await?;
        // Data was written in between, and the cache's device may have failed as well.
        let rest = async {
            old.layer.flush_dirty().await.map_err(text)?;
            match old.layer.disk_has_all_data().await {
                true => Ok(()),
                false => Err("part of its data is damaged".to_owned()),
            }
        };
        let rest = in_time(on, STEP_MAX, rest, "the disk does not accept the dirty data").await?;
        if let (Err(error), false) = (&rest, lose_dirty) {
            return Err(cannot_hand_over(error));
        }
        if !old.layer.is_working() {
            in_time(on, STEP_MAX, old.layer.detach(), NO_REST)
                .await?
                .map_err(text)?;
        }
        Ok((held, rest.is_err()))
    }

    async fn exchange(&self, new: OpenCache, held: RequestPause<'_>) {
        self.now().layer.inactivate().await;
        held.replace_layer(Rc::clone(&new.layer) as Rc<dyn BlockDevice>);
        let new = Rc::new(new);
        self.now.replace(Rc::clone(&new));
        drop(held);
        new.allocate(&self.disk.image).await;
    }
}

fn cannot_hand_over(error: impl std::fmt::Display) -> String {
    format!(
        "it may have data that was never written to the disk, and cannot be written now: {error}; make its device available again and reopen the cache (without --with), or discard that data (--lose-dirty)"
    )
}

const UNDER_WAY: &str = "requests in flight do not complete; try again";
const NO_REST: &str = "its background work does not finish; try again";

fn being_closed() -> String {
    "the disk is being closed".to_owned()
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Returns the result, if there is one in time.
async fn in_time<T>(on: &Loop, limit: Duration, work: impl Future<Output = T>, why: &str) -> Result<T, String> {
    let done = on.timeout(limit, work).await;
    done.ok_or_else(|| format!("{why} ({} s)", limit.as_secs()))
}

/// Returns the cache once it is open, unless that takes too long. An opening cannot be cancelled half-way, so it
/// continues in the background then; `failed` is called when it ends in vain, with the cache that was opened too
/// late, if any.
async fn open_in_time(
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
    let opened = in_time(on, STEP_MAX, receiver, "the new cache does not open in time").await?;
    match opened {
        Ok(opened) => opened.map_err(text),
        Err(_) => Err(being_closed()),
    }
}

/// Operations on a cache that a client has requested.
#[derive(Default)]
pub(crate) struct Work {
    running: Cell<u32>,
    /// The running operation must be the only one.
    is_alone: Cell<bool>,
    error: RefCell<Option<String>>,
}

struct Begun<'a>(&'a Work);

impl Work {
    fn begin(&self, alone: bool) -> Result<Begun<'_>, String> {
        if self.is_alone.get() {
            return Err("it is being replaced".to_owned());
        }
        if alone && self.is_running() {
            return Err("another operation on it is running; wait until that has finished".to_owned());
        }
        self.is_alone.set(alone);
        self.running.set(self.running.get() + 1);
        Ok(Begun(self))
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

impl Begun<'_> {
    fn ended(self, result: Result<(), String>) -> Result<(), String> {
        *self.0.error.borrow_mut() = result.as_ref().err().cloned();
        result
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.0.running.set(self.0.running.get() - 1);
        self.0.is_alone.set(false);
    }
}
