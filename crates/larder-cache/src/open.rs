//! Creates, opens and closes caches.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::Verdict;
use larder_block::event_loop::WeakLoop;
use larder_block::filter::meter::metered;
use larder_block::range_lock::{RangeLockMode as DiskLocks, RangeLocks};
use larder_block::semaphore::Semaphore;
use larder_block::signal::Signal;
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, IoError, IoResult, Loop, ReadBuf, WriteBuf, WriteFlags,
    ZeroFlags,
};

use crate::change::DiskChanges;
use crate::clean::{CleanOptions, Cleaner};
use crate::commit::CommitQueue;
use crate::compare::Comparison;
use crate::fill::Fills;
use crate::flush_tracker::FlushTracker;
use crate::index::LineIndex;
use crate::journal;
use crate::layout::{COMMIT_UNIT, CacheLayout, JOURNAL_AT, SECTOR, SUPERBLOCK_LEN};
use crate::load::Loading;
use crate::read::FRAGMENTS_MAX;
use crate::samples::{self, ContentSample};
use crate::superblock::{DiskId, Superblock, SuperblockError};
use crate::usage::Usage;
use crate::watchdog::CacheDevice;
use crate::{Cache, CacheMode, DeviceState, FailureLog, FailureRecord};

/// Inverse share of the lines whose metadata may be unpersisted: they are cold after recovery.
const UNPERSISTED_SHARE: u64 = 128;
const UNPERSISTED_MIN: u64 = 64;
const UNPERSISTED_MAX: u64 = 16 << 10;

/// Stamp that no disk has, for a disk that stayed in use when its cache was closed.
const IN_USE_FINGERPRINT: &[u8] = b"left";

/// Options for the creation of a cache.
#[derive(Clone, Debug)]
pub struct CacheCreateOptions {
    /// log2 of a line's bytes: 12 to 16.
    pub line_bits: u32,
    /// Handling of writes.
    pub mode: CacheMode,
    /// Unique identity of the cache.
    pub uuid: [u8; 16],
    /// Disk that the cache belongs to.
    pub disk: DiskId,
    /// Size of the disk.
    pub disk_size: ByteLen,
}

/// Options for the opening of a cache.
pub struct CacheOpenOptions {
    /// Handling of writes; unset: as before.
    pub mode: Option<CacheMode>,
    /// Present identity of the disk.
    pub disk: DiskId,
    /// Result of the check whether another program has changed the disk.
    pub verdict: Verdict,
    /// Returns the disk's stamp after the disk was closed.
    pub fingerprint: Box<dyn Fn() -> Vec<u8>>,
    /// Record of a failure that the [`FailureLog`] has, if any.
    pub failure: Option<FailureRecord>,
    /// Storage for the record of a failure.
    pub failure_log: Box<dyn FailureLog>,
    /// Identity of the host's boot, which differs between two boots, or zero if unknown. Unflushed writes survive a
    /// kill, but perhaps not a power loss.
    pub boot: [u8; 16],
    /// Bytes that may be written to the cache device in a day. Necessary writes are not limited: dirty data, and
    /// records that make cached data invalid.
    pub endurance: Option<ByteLen>,
    /// Conditions under which dirty lines are cleaned.
    pub cleaning: CleanOptions,
    /// Load all metadata in the background; otherwise only on demand.
    pub load_ahead: bool,
    /// Conditions under which metadata is persisted.
    pub persist: PersistOptions,
}

/// Conditions under which changed metadata is persisted. Lines whose metadata is not persisted are cold after
/// recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistOptions {
    /// The longest delay.
    pub delay_max: Duration,
    /// Number of waiting lines that start it early; unset: a 128th of all lines, and at most 16 Ki.
    pub lines_max: Option<usize>,
}

impl Default for PersistOptions {
    fn default() -> Self {
        Self { delay_max: Duration::from_secs(5), lines_max: None }
    }
}

/// Error of creating or opening a cache.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CacheOpenError {
    #[error("cache {cache}: {source}")]
    Superblock { cache: String, source: SuperblockError },
    #[error("cache {cache}: {size} is too small for a cache with lines of {line} KiB: the minimum is about {least}")]
    TooSmall { cache: String, size: ByteLen, line: u64, least: ByteLen },
    #[error(
        "cache {cache}: it belongs to another disk, {other}{}; use it with that disk, or drop the cache (`larder disk cache drop {cache}`) and start with an empty one",
        if *is_renewed {
            ", that is, to an earlier file of this name, or to this file's disk in another format"
        } else {
            ""
        }
    )]
    OtherDisk {
        cache: String,
        /// Name of the cache's disk.
        other: String,
        /// The disk that was to use the cache has that name now.
        is_renewed: bool,
    },
    #[error(
        "cache {cache}: it has data that was never written to {disk}, and {disk} was changed without the cache since; decide which of them is right: drop the cache to keep the disk as it is (`larder disk cache drop --lose-dirty {cache}`), or overwrite the disk with the cache's data (`larder disk cache flush --force {cache}`) if only the image's timestamps are wrong, or once the image is restored to its earlier state"
    )]
    Diverged { cache: String, disk: String },
    #[error(
        "cache {cache}: its journal is damaged, and it may have data that was never written to {disk}; `larder disk cache drop --lose-dirty {cache}` discards that data"
    )]
    Damaged { cache: String, disk: String },
    #[error("cache {cache}: cannot record that it is valid again: {source}")]
    FailureLog { cache: String, source: std::io::Error },
    #[error("cache {cache}: {source}")]
    Io { cache: String, source: IoError },
}

/// Creates a cache on `fast`, of its whole size. All earlier content is lost.
///
/// # Errors
/// [`CacheOpenError::TooSmall`] and [`CacheOpenError::Io`].
pub async fn create(fast: &Rc<dyn BlockDevice>, options: &CacheCreateOptions) -> Result<CacheLayout, CacheOpenError> {
    let cache = || fast.name().to_string();
    let geometry = fast.geometry();
    let page_unit = u64::from(geometry.physical_block_size).clamp(512, COMMIT_UNIT);
    let Some(layout) = CacheLayout::for_size(geometry.size, options.line_bits, page_unit) else {
        return Err(CacheOpenError::TooSmall {
            cache: cache(),
            size: geometry.size,
            line: (1 << options.line_bits) >> 10,
            least: ByteLen::mib(1),
        });
    };
    let superblock = Superblock {
        sequence: 1,
        uuid: options.uuid,
        layout,
        mode: options.mode,
        clean: true,
        may_be_dirty: false,
        unproven: false,
        session: 0,
        journal_end: 1,
        boot: [0; 16],
        disk_size: options.disk_size,
        disk: options.disk.clone(),
        samples: Vec::new(),
    };
    let io = |source| CacheOpenError::Io { cache: cache(), source };
    // An older cache is invalidated until the new one is complete.
    let zeros = AlignedBuf::zeroed(SUPERBLOCK_LEN as usize * 2);
    fast.write(ByteOffset::ZERO, WriteBuf::new(&zeros), WriteFlags::FUA).await.map_err(io)?;
    wipe(fast, &layout).await.map_err(io)?;
    write_superblock(fast, &superblock).await.map_err(io)?;
    Ok(layout)
}

/// Erases journal and pages, durably.
async fn wipe(fast: &Rc<dyn BlockDevice>, layout: &CacheLayout) -> IoResult {
    let range = ByteRange::new(JOURNAL_AT, layout.journal_len + layout.pages_len());
    let flags = ZeroFlags { unmap: true, ..ZeroFlags::default() };
    fast.write_zeroes(range, flags).await?;
    fast.flush().await
}

/// Writes both copies of the superblock, durably, one after the other.
pub(crate) async fn write_superblock(fast: &Rc<dyn BlockDevice>, superblock: &Superblock) -> IoResult {
    let bytes = encode_superblock(superblock);
    for at in SUPERBLOCK_OFFSETS {
        fast.write(at, WriteBuf::new(&bytes), WriteFlags::FUA).await?;
    }
    Ok(())
}

/// Positions of the superblock's copies.
const SUPERBLOCK_OFFSETS: [ByteOffset; 2] = [ByteOffset::ZERO, ByteOffset::new(SUPERBLOCK_LEN)];

fn encode_superblock(superblock: &Superblock) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed(SUPERBLOCK_LEN as usize);
    bytes.copy_from_slice(&superblock.encode());
    bytes
}

/// Reads the superblock of a cache.
///
/// # Errors
/// [`CacheOpenError::Superblock`] and [`CacheOpenError::Io`].
pub async fn read_superblock(fast: &Rc<dyn BlockDevice>) -> Result<Superblock, CacheOpenError> {
    let cache = || fast.name().to_string();
    let size = fast.geometry().size;
    if size.get() < 2 * SUPERBLOCK_LEN {
        return Err(CacheOpenError::Superblock { cache: cache(), source: SuperblockError::NoMagic });
    }
    let mut bytes = AlignedBuf::zeroed(2 * SUPERBLOCK_LEN as usize);
    let read = fast.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await;
    read.map_err(|source| CacheOpenError::Io { cache: cache(), source })?;
    let (first, second) = bytes.split_at(SUPERBLOCK_LEN as usize);
    Superblock::choose(first, second, size).map_err(|source| CacheOpenError::Superblock { cache: cache(), source })
}

impl Cache {
    /// Opens the cache on `fast` as a filter over `lower`, on the loop `on`, which the result does not keep alive.
    ///
    /// # Errors
    /// The variants of [`CacheOpenError`].
    pub fn open(
        on: &Loop,
        lower: Rc<dyn BlockDevice>,
        fast: Rc<dyn BlockDevice>,
        options: CacheOpenOptions,
    ) -> impl Future<Output = Result<Rc<Self>, CacheOpenError>> + use<> {
        Self::open_steps(on.downgrade(), lower, fast, options)
    }

    async fn open_steps(
        on: WeakLoop,
        lower: Rc<dyn BlockDevice>,
        fast: Rc<dyn BlockDevice>,
        options: CacheOpenOptions,
    ) -> Result<Rc<Self>, CacheOpenError> {
        let name = fast.name().to_string();
        let cache = || name.clone();
        let io = |source| CacheOpenError::Io { cache: cache(), source };
        let mut superblock = read_superblock(&fast).await?;
        let generation = lower.size_changes().generation();
        let (disk, size) = (lower.name().to_string(), lower.geometry().size);
        if superblock.disk.identity != options.disk.identity {
            return Err(CacheOpenError::OtherDisk {
                cache: cache(),
                is_renewed: disk == superblock.disk.name,
                other: superblock.disk.name.clone(),
            });
        }
        let layout = superblock.layout;
        // Another program has written to the disk, which may now hold anything. The samples are compared because
        // parts of a disk may have no modification times, and times can be reset.
        let disk_changed = options.verdict == Verdict::Changed
            || superblock.clean
                && (superblock.disk.fingerprint != options.disk.fingerprint
                    || !samples::disk_matches(&lower, &superblock.samples).await);
        if disk_changed && superblock.may_be_dirty && options.failure.is_none() {
            return Err(CacheOpenError::Diverged { cache: cache(), disk });
        }
        // Dirty data is valid all the same; clean data may differ from the disk.
        let clean_is_stale = disk_changed || superblock.disk_size != size || options.failure.is_some();
        let has_failure = options.failure.is_some();
        let only_dirty = (clean_is_stale && superblock.may_be_dirty).then(|| options.failure.unwrap_or_default());
        // Writes of a killed process may be unflushed. They are made durable before anything is written that depends
        // on them: a power loss could leave the latter alone.
        fast.flush().await.map_err(io)?;
        let mut bytes = AlignedBuf::zeroed(layout.journal_len as usize);
        let read = fast.read(ByteOffset::new(JOURNAL_AT), ReadBuf::new(&mut bytes)).await;
        read.map_err(io)?;
        let stop_kind = superblock.stop_kind(options.boot);
        let mut is_unproven = superblock.unproven || options.verdict == Verdict::Unproven;
        let contents = match journal::read(&layout, superblock.seed(), bytes.to_vec(), stop_kind) {
            Err(journal::JournalDamaged) if superblock.may_be_dirty => {
                return Err(CacheOpenError::Damaged { cache: cache(), disk });
            }
            Ok(contents) if !clean_is_stale || only_dirty.is_some() => contents,
            found => {
                let why = match found {
                    Ok(_) if has_failure => "its content is invalid",
                    Ok(_) => "the disk was changed without it",
                    Err(_) => "its journal is damaged",
                };
                tracing::warn!("{disk}: cache {}: {why}; it starts empty", fast.name());
                wipe(&fast, &layout).await.map_err(io)?;
                is_unproven = false;
                journal::JournalRecords {
                    session: superblock.session,
                    tail: 1,
                    end: 1,
                    records: journal::Records::empty(&layout),
                    untrusted: Vec::new(),
                    repaired: Vec::new(),
                    // Sector 0, which is never written.
                    block: vec![0; SECTOR as usize],
                }
            }
        };
        // Written before any request is accepted: a journal that runs up to a damaged sector counts as damaged.
        if !contents.repaired.is_empty() {
            tracing::warn!(
                "{disk}: cache {}: its journal is damaged in a part that is not needed, and is repaired there; another program has written to it, or its device fails",
                fast.name()
            );
        }
        for (sector, block) in &contents.repaired {
            let at = ByteOffset::new(JOURNAL_AT + sector * SECTOR);
            let mut bytes = AlignedBuf::zeroed(block.len());
            bytes.copy_from_slice(block);
            fast.write(at, WriteBuf::new(&bytes), WriteFlags::NONE).await.map_err(io)?;
        }
        if !contents.repaired.is_empty() {
            fast.flush().await.map_err(io)?;
        }
        // Records that are discarded now must not be trusted later.
        for (sequence, sector) in &contents.untrusted {
            let at = ByteOffset::new(JOURNAL_AT + sequence % layout.journal_sectors() * SECTOR);
            let mut bytes = AlignedBuf::zeroed(SECTOR as usize);
            bytes.copy_from_slice(sector);
            fast.write(at, WriteBuf::new(&bytes), WriteFlags::FUA).await.map_err(io)?;
        }
        drop(bytes);
        let mode = options.mode.unwrap_or(superblock.mode);
        let was_dirty = superblock.may_be_dirty;
        superblock = Superblock {
            sequence: superblock.sequence + 1,
            mode,
            clean: false,
            unproven: is_unproven,
            session: contents.session.max(superblock.session) + 1,
            boot: options.boot,
            disk_size: size,
            disk: options.disk,
            ..superblock
        };
        write_superblock(&fast, &superblock).await.map_err(io)?;
        if is_unproven {
            tracing::info!(
                "{disk}: it is not known whether it was changed without its cache {}, so each line is compared with it before it is used",
                fast.name()
            );
        }
        let written = samples::RecentWrites::from_samples(&superblock.samples);
        let loading = Loading::new(contents.records, contents.tail);
        let mut index = LineIndex::new(layout, options.endurance.map(ByteLen::get));
        let (lower, disk_meter) = metered(lower);
        for set in loading.sets() {
            index.set_changed(set, 0, true);
        }
        let unpersisted_max = (layout.slots() / UNPERSISTED_SHARE).clamp(UNPERSISTED_MIN, UNPERSISTED_MAX);
        let opened = Rc::new_cyclic(|this| Self {
            this: this.clone(),
            on: on.clone(),
            lower,
            fast: CacheDevice::new(on, fast, this.clone()),
            usage: Usage::new(disk_meter, options.endurance),
            layout,
            seed: superblock.seed(),
            mode: Cell::new(mode),
            commits: CommitQueue::new(superblock.session, contents.tail, contents.end, contents.block),
            superblock: RefCell::new(superblock),
            superblock_lock: RangeLocks::default(),
            fingerprint: options.fingerprint,
            index: RefCell::new(index),
            ledger: RefCell::default(),
            pending_removals: RefCell::default(),
            dropped_dirty: RefCell::default(),
            loading,
            persister: crate::persist::MetadataPersister::default(),
            changes: DiskChanges::unflushed(),
            recent_writes: written,
            device_flush_tracker: FlushTracker::default(),
            cleaner: Cleaner::new(options.cleaning),
            comparison: Comparison::new(is_unproven),
            size: Cell::new(size.get()),
            content_end: Cell::new(size.get()),
            size_generation: Cell::new(generation),
            size_lock: RangeLocks::default(),
            fills: Fills::default(),
            fragments: Semaphore::new(FRAGMENTS_MAX),
            reader_done: Signal::default(),
            counts: RefCell::default(),
            bypass: crate::latency_bypass::LatencyBypass::default(),
            unpersisted_max: options.persist.lines_max.unwrap_or(unpersisted_max as usize),
            persist_delay_max: options.persist.delay_max,
            way_hint: Cell::new(0),
            was_dirty,
            may_be_dirty: Cell::new(was_dirty),
            only_dirty,
            superseded: RefCell::default(),
            state: Cell::new(DeviceState::Working),
            failure_log: options.failure_log,
            failure_recorded: Signal::default(),
        });
        opened.state_durable_end().await;
        if opened.only_dirty.is_some() {
            opened.load_all().await.map_err(io)?;
            // On failure the witness's record stays.
            let _ = opened.commit().await;
        }
        if has_failure && !opened.has_failed() {
            let cleared = opened.failure_log.clear().await;
            cleared.map_err(|source| CacheOpenError::FailureLog { cache: cache(), source })?;
        }
        if was_dirty || options.load_ahead || is_unproven {
            let weak = Rc::downgrade(&opened);
            opened.spawn(async move {
                let Some(cache) = weak.upgrade() else { return };
                match cache.load_ahead().await {
                    Ok(()) => cache.schedule_cleaning(),
                    Err(error) => cache.fail(&error),
                }
                drop(cache);
                if is_unproven {
                    Self::compare_all(weak).await;
                }
            });
        }
        Ok(opened)
    }

    /// Closes the cache so that the next opening finds all of it.
    pub(crate) async fn close_steps(&self) -> IoResult {
        self.stop_background().await;
        // Dirty data of a read-only disk stays in the cache.
        let cleaned = match self.may_be_dirty.get() && !self.lower.geometry().read_only {
            true => self.clean_before_close().await,
            false => Ok(()),
        };
        self.cleaner.stop().await;
        self.persist_all().await;
        let samples = self.take_samples().await;
        self.lower.close().await?;
        self.close_cache((self.fingerprint)(), samples).await;
        cleaned
    }

    /// Closes the cache, and leaves the disk open for other users; the next opening will discard the cache's content.
    /// No request may be under way, and later requests do not use the cache. A failed cache is not closed: it stays
    /// usable as before, and only does what requests need. A working cache must have no dirty data left.
    ///
    /// # Errors
    /// An error of the disk. The cache is not closed then, and its content may differ from the disk.
    pub async fn detach(&self) -> IoResult {
        self.failure_recorded.when(|| self.state.get() != DeviceState::Failing).await;
        self.stop_background().await;
        self.cleaner.stop().await;
        if self.has_failed() {
            return Ok(());
        }
        self.persist_all().await;
        self.lower.flush().await?;
        self.close_cache(IN_USE_FINGERPRINT.to_vec(), Vec::new()).await;
        Ok(())
    }

    /// Stops the background work, which must not touch a disk that has been handed over.
    async fn stop_background(&self) {
        self.fills.wait_idle().await;
        self.stop_loading().await;
        self.comparison.stop().await;
        self.stop_persist().await;
    }

    async fn persist_all(&self) {
        if !self.has_failed() && self.persist_metadata().await.is_ok() {
            // A second pass covers lines that were opened or removed during the first; no more changes come.
            let _ = self.persist_metadata().await;
        }
    }

    /// Writes all dirty data to the disk before it is closed.
    async fn clean_before_close(&self) -> IoResult {
        let dirty = self.index.borrow().dirty.len() << self.layout.line_bits;
        if dirty > 0 {
            tracing::info!("{}: writing to it {} that only its cache has", self.lower.name(), ByteLen::new(dirty));
        }
        self.clean().await
    }

    /// Changes the superblock, durably.
    pub(crate) async fn update_superblock(&self, change: impl FnOnce(&mut Superblock)) -> IoResult {
        let _exclusive = self.superblock_lock.lock(ByteRange::new(0, 1), DiskLocks::Exclusive).await;
        let superblock = {
            let mut superblock = self.superblock.borrow_mut();
            superblock.sequence += 1;
            change(&mut superblock);
            superblock.clone()
        };
        let bytes = Rc::new(encode_superblock(&superblock));
        for at in SUPERBLOCK_OFFSETS {
            let written = self.fast.write(at, Rc::clone(&bytes), 0..bytes.len(), WriteFlags::FUA);
            written.await?;
        }
        Ok(())
    }

    /// Closes a cache that works, after its disk.
    async fn close_cache(&self, fingerprint: Vec<u8>, samples: Vec<ContentSample>) {
        if !self.has_failed()
            && let Err(error) = self.close_cache_steps(fingerprint, samples).await
        {
            self.fail(&error);
        }
    }

    async fn close_cache_steps(&self, fingerprint: Vec<u8>, samples: Vec<ContentSample>) -> IoResult {
        self.checkpoint_all().await?;
        let end = self.commits.end();
        let may_be_dirty = self.may_be_dirty.get() && !self.is_known_clean();
        self.update_superblock(|superblock| {
            superblock.clean = true;
            superblock.may_be_dirty = may_be_dirty;
            superblock.journal_end = end;
            superblock.disk.fingerprint = fingerprint;
            superblock.samples = samples;
        })
        .await?;
        self.fast.close().await
    }
}
