//! Creates, opens and closes caches.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::Verdict;
use larder_block::budget::Budget;
use larder_block::event_loop::WeakLoop;
use larder_block::filter::meter::metered;
use larder_block::range_lock::{Mode as Hold, Ranges};
use larder_block::signal::Signal;
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, IoError, IoResult, Loop, ReadBuf, WriteBuf, WriteFlags,
    ZeroFlags,
};

use crate::change::Changes;
use crate::clean::{CleanOptions, Cleaning};
use crate::commit::Commits;
use crate::compare::Comparing;
use crate::fill::Fills;
use crate::flushing::Flushing;
use crate::index::Index;
use crate::journal;
use crate::load::Loading;
use crate::read::FRAGMENTS_MAX;
use crate::samples::{self, Sample};
use crate::shape::{COMMIT_UNIT, JOURNAL_AT, SECTOR, SUPERBLOCK_LEN, Shape};
use crate::superblock::{DiskId, Superblock, SuperblockError};
use crate::usage::Usage;
use crate::watch::Fast;
use crate::{Cache, Detached, Mode, State, Witness};

/// Inverse share of the lines whose metadata may be unpersisted: they are cold after recovery.
const UNSETTLED_SHARE: u64 = 128;
const UNSETTLED_MIN: u64 = 64;
const UNSETTLED_MAX: u64 = 16 << 10;

/// Stamp that no disk has, for a disk that stayed in use when its cache was closed.
const LEFT: &[u8] = b"left";

/// Options for the creation of a cache.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// log2 of a line's bytes: 12 to 16.
    pub line_bits: u32,
    /// Handling of writes.
    pub mode: Mode,
    /// Unique identity of the cache.
    pub uuid: [u8; 16],
    /// Disk that the cache belongs to.
    pub disk: DiskId,
    /// Size of the disk.
    pub disk_size: ByteLen,
}

/// Options for the opening of a cache.
pub struct OpenOptions {
    /// Handling of writes; unset: as before.
    pub mode: Option<Mode>,
    /// Present identity of the disk.
    pub disk: DiskId,
    /// Result of the check whether another program has changed the disk.
    pub verdict: Verdict,
    /// Returns the disk's stamp after the disk was closed.
    pub stamp: Box<dyn Fn() -> Vec<u8>>,
    /// Record of a failure that the [`Witness`] has, if any.
    pub detached: Option<Detached>,
    /// Storage for the record of a failure.
    pub witness: Box<dyn Witness>,
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
    pub settling: SettleOptions,
}

/// Conditions under which changed metadata is persisted. Lines whose metadata is not persisted are cold after
/// recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettleOptions {
    /// The longest delay.
    pub after: Duration,
    /// Number of waiting lines that start it early; unset: a 128th of all lines, and at most 16 Ki.
    pub lines_max: Option<usize>,
}

impl Default for SettleOptions {
    fn default() -> Self {
        Self {
            after: Duration::from_secs(5),
            lines_max: None,
        }
    }
}

/// Error of creating or opening a cache.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OpenError {
    #[error("cache {cache}: {source}")]
    Superblock { cache: String, source: SuperblockError },
    #[error("cache {cache}: {size} is too small for a cache with lines of {line} KiB: the minimum is about {least}")]
    TooSmall {
        cache: String,
        size: ByteLen,
        line: u64,
        least: ByteLen,
    },
    #[error(
        "cache {cache}: it belongs to another disk, {other}{}; use it with that disk, or drop the cache (`larder disk cache drop {cache}`) and begin anew",
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
    Witness { cache: String, source: std::io::Error },
    #[error("cache {cache}: {source}")]
    Io { cache: String, source: IoError },
}

/// Creates a cache on `fast`, of its whole size. All earlier content is lost.
///
/// # Errors
/// [`OpenError::TooSmall`] and [`OpenError::Io`].
pub async fn create(fast: &Rc<dyn BlockDevice>, options: &CreateOptions) -> Result<Shape, OpenError> {
    let cache = || fast.name().to_string();
    let geometry = fast.geometry();
    let page_unit = u64::from(geometry.physical_block_size).clamp(512, COMMIT_UNIT);
    let Some(shape) = Shape::for_size(geometry.size, options.line_bits, page_unit) else {
        return Err(OpenError::TooSmall {
            cache: cache(),
            size: geometry.size,
            line: (1 << options.line_bits) >> 10,
            least: ByteLen::mib(1),
        });
    };
    let superblock = Superblock {
        sequence: 1,
        uuid: options.uuid,
        shape,
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
    let io = |source| OpenError::Io { cache: cache(), source };
    // An older cache is invalidated until the new one is complete.
    let gone = AlignedBuf::zeroed(SUPERBLOCK_LEN as usize * 2);
    fast.write(ByteOffset::ZERO, WriteBuf::new(&gone), WriteFlags::FUA)
        .await
        .map_err(io)?;
    wipe(fast, &shape).await.map_err(io)?;
    write_superblock(fast, &superblock).await.map_err(io)?;
    Ok(shape)
}

/// Erases journal and pages, durably.
async fn wipe(fast: &Rc<dyn BlockDevice>, shape: &Shape) -> IoResult {
    let range = ByteRange::new(JOURNAL_AT, shape.journal_len + shape.pages_len());
    let flags = ZeroFlags {
        unmap: true,
        ..ZeroFlags::default()
    };
    fast.write_zeroes(range, flags).await?;
    fast.flush().await
}

/// Writes both copies of the superblock, durably, one after the other.
pub(crate) async fn write_superblock(fast: &Rc<dyn BlockDevice>, superblock: &Superblock) -> IoResult {
    let bytes = bytes_of(superblock);
    for at in COPIES {
        fast.write(at, WriteBuf::new(&bytes), WriteFlags::FUA).await?;
    }
    Ok(())
}

/// Positions of the superblock's copies.
const COPIES: [ByteOffset; 2] = [ByteOffset::ZERO, ByteOffset::new(SUPERBLOCK_LEN)];

fn bytes_of(superblock: &Superblock) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed(SUPERBLOCK_LEN as usize);
    bytes.copy_from_slice(&superblock.encode());
    bytes
}

/// Reads the superblock of a cache.
///
/// # Errors
/// [`OpenError::Superblock`] and [`OpenError::Io`].
pub async fn read_superblock(fast: &Rc<dyn BlockDevice>) -> Result<Superblock, OpenError> {
    let cache = || fast.name().to_string();
    let size = fast.geometry().size;
    if size.get() < 2 * SUPERBLOCK_LEN {
        return Err(OpenError::Superblock {
            cache: cache(),
            source: SuperblockError::NoMagic,
        });
    }
    let mut bytes = AlignedBuf::zeroed(2 * SUPERBLOCK_LEN as usize);
    let read = fast.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await;
    read.map_err(|source| OpenError::Io { cache: cache(), source })?;
    let (first, second) = bytes.split_at(SUPERBLOCK_LEN as usize);
    Superblock::choose(first, second, size).map_err(|source| OpenError::Superblock { cache: cache(), source })
}

impl Cache {
    /// Opens the cache on `fast` as a filter over `lower`, on the loop `on`, which the result does not keep alive.
    ///
    /// # Errors
    /// The variants of [`OpenError`].
    pub fn open(
        on: &Loop,
        lower: Rc<dyn BlockDevice>,
        fast: Rc<dyn BlockDevice>,
        options: OpenOptions,
    ) -> impl Future<Output = Result<Rc<Self>, OpenError>> + use<> {
        Self::open_steps(on.downgrade(), lower, fast, options)
    }

    async fn open_steps(
        on: WeakLoop,
        lower: Rc<dyn BlockDevice>,
        fast: Rc<dyn BlockDevice>,
        options: OpenOptions,
    ) -> Result<Rc<Self>, OpenError> {
        let name = fast.name().to_string();
        let cache = || name.clone();
        let io = |source| OpenError::Io { cache: cache(), source };
        let mut superblock = read_superblock(&fast).await?;
        let generation = lower.size_changes().generation();
        let (disk, size) = (lower.name().to_string(), lower.geometry().size);
        if superblock.disk.identity != options.disk.identity {
            return Err(OpenError::OtherDisk {
                cache: cache(),
                is_renewed: disk == superblock.disk.name,
                other: superblock.disk.name.clone(),
            });
        }
        let shape = superblock.shape;
        // Another program has written to the disk, which may now hold anything. The samples are compared because
        // parts of a disk may have no modification times, and times can be reset.
        let is_other = options.verdict == Verdict::Changed
            || superblock.clean
                && (superblock.disk.stamp != options.disk.stamp
                    || !samples::are_there(&lower, &superblock.samples).await);
        if is_other && superblock.may_be_dirty && options.detached.is_none() {
            return Err(OpenError::Diverged { cache: cache(), disk });
        }
        // Dirty data is valid all the same; clean data may differ from the disk.
        let is_changed = is_other || superblock.disk_size != size || options.detached.is_some();
        let is_detached = options.detached.is_some();
        let only_dirty = (is_changed && superblock.may_be_dirty).then(|| options.detached.unwrap_or_default());
        // Writes of a killed process may be unflushed. They are made durable before anything is written that depends
        // on them: a power loss could leave the latter alone.
        fast.flush().await.map_err(io)?;
        let mut bytes = AlignedBuf::zeroed(shape.journal_len as usize);
        let read = fast.read(ByteOffset::new(JOURNAL_AT), ReadBuf::new(&mut bytes)).await;
        read.map_err(io)?;
        let was_left = superblock.was_left(options.boot);
        let mut is_unproven = superblock.unproven || options.verdict == Verdict::Unproven;
        let contents = match journal::read(&shape, superblock.seed(), bytes.to_vec(), was_left) {
            Err(journal::Damaged) if superblock.may_be_dirty => {
                return Err(OpenError::Damaged { cache: cache(), disk });
            }
            Ok(contents) if !is_changed || only_dirty.is_some() => contents,
            found => {
                let why = match found {
                    Ok(_) if is_detached => "its content is invalid",
                    Ok(_) => "the disk was changed without it",
                    Err(_) => "its journal is damaged",
                };
                tracing::warn!("{disk}: cache {}: {why}; it begins anew, empty", fast.name());
                wipe(&fast, &shape).await.map_err(io)?;
                is_unproven = false;
                journal::Contents {
                    session: superblock.session,
                    tail: 1,
                    end: 1,
                    records: journal::Records::none(&shape),
                    disbelieved: Vec::new(),
                    mended: Vec::new(),
                    // Sector 0, which is never written.
                    block: vec![0; SECTOR as usize],
                }
            }
        };
        // Written before any request is accepted: a journal that runs up to a damaged sector counts as damaged.
        if !contents.mended.is_empty() {
            tracing::warn!(
                "{disk}: cache {}: its journal is damaged in a part that is not needed, and is repaired there; another program has written to it, or its device fails",
                fast.name()
            );
        }
        for (sector, block) in &contents.mended {
            let at = ByteOffset::new(JOURNAL_AT + sector * SECTOR);
            let mut bytes = AlignedBuf::zeroed(block.len());
            bytes.copy_from_slice(block);
            fast.write(at, WriteBuf::new(&bytes), WriteFlags::NONE)
                .await
                .map_err(io)?;
        }
        if !contents.mended.is_empty() {
            fast.flush().await.map_err(io)?;
        }
        // Records that are discarded now must not be trusted later.
        for (sequence, sector) in &contents.disbelieved {
            let at = ByteOffset::new(JOURNAL_AT + sequence % shape.journal_sectors() * SECTOR);
            let mut bytes = AlignedBuf::zeroed(SECTOR as usize);
            bytes.copy_from_slice(sector);
            fast.write(at, WriteBuf::new(&bytes), WriteFlags::FUA)
                .await
                .map_err(io)?;
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
        let written = samples::Written::before(&superblock.samples);
        let loading = Loading::new(contents.records, contents.tail);
        let mut index = Index::new(shape, options.endurance.map(ByteLen::get));
        let (lower, disk_meter) = metered(lower);
        for set in loading.sets() {
            index.set_changed(set, 0, true);
        }
        let unsettled_max = (shape.slots() / UNSETTLED_SHARE).clamp(UNSETTLED_MIN, UNSETTLED_MAX);
        let opened = Rc::new_cyclic(|this| Self {
            this: this.clone(),
            on: on.clone(),
            lower,
            fast: Fast::new(on, fast, this.clone()),
            usage: Usage::new(disk_meter, options.endurance),
            shape,
            seed: superblock.seed(),
            mode: Cell::new(mode),
            commits: Commits::new(superblock.session, contents.tail, contents.end, contents.block),
            superblock: RefCell::new(superblock),
            noting: Ranges::default(),
            stamp: options.stamp,
            index: RefCell::new(index),
            ledger: RefCell::default(),
            leaving: RefCell::default(),
            undoing: RefCell::default(),
            loading,
            settling: crate::settle::Settling::default(),
            changes: Changes::unflushed(),
            written,
            kept: Flushing::default(),
            cleaning: Cleaning::new(options.cleaning),
            comparing: Comparing::new(is_unproven),
            size: Cell::new(size.get()),
            reach: Cell::new(size.get()),
            size_generation: Cell::new(generation),
            sizing: Ranges::default(),
            fills: Fills::default(),
            fragments: Budget::new(FRAGMENTS_MAX),
            readers: Signal::default(),
            counts: RefCell::default(),
            pace: crate::pace::Pace::default(),
            unsettled_max: options.settling.lines_max.unwrap_or(unsettled_max as usize),
            settle_after: options.settling.after,
            way_hint: Cell::new(0),
            was_dirty,
            may_be_dirty: Cell::new(was_dirty),
            only_dirty,
            superseded: RefCell::default(),
            state: Cell::new(State::Works),
            witness: options.witness,
            detaching: Signal::default(),
        });
        opened.tell_all().await;
        if opened.only_dirty.is_some() {
            opened.load_all().await.map_err(io)?;
            // On failure the witness's record stays.
            let _ = opened.commit().await;
        }
        if is_detached && !opened.has_failed() {
            let attached = opened.witness.attach().await;
            attached.map_err(|source| OpenError::Witness { cache: cache(), source })?;
        }
        if was_dirty || options.load_ahead || is_unproven {
            let loads = Rc::downgrade(&opened);
            opened.spawn(async move {
                let Some(cache) = loads.upgrade() else { return };
                match cache.load_ahead().await {
                    Ok(()) => cache.clean_in_time(),
                    Err(error) => cache.fail(&error),
                }
                drop(cache);
                if is_unproven {
                    Self::compare_all(loads).await;
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
            true => self.clean_at_last().await,
            false => Ok(()),
        };
        self.cleaning.stop().await;
        self.settle_all().await;
        let samples = self.samples().await;
        self.lower.close().await?;
        self.close_cache((self.stamp)(), samples).await;
        cleaned
    }

    /// Closes the cache, and leaves the disk open for other users; the next opening will discard the cache's content.
    /// No request may be under way, and later requests do not use the cache. A failed cache is not closed: it stays
    /// usable as before, and only does what requests need. A working cache must have no dirty data left.
    ///
    /// # Errors
    /// An error of the disk. The cache is not closed then, and its content may differ from the disk.
    pub async fn leave(&self) -> IoResult {
        self.detaching.when(|| self.state.get() != State::Failing).await;
        self.stop_background().await;
        self.cleaning.stop().await;
        if self.has_failed() {
            return Ok(());
        }
        self.settle_all().await;
        self.lower.flush().await?;
        self.close_cache(LEFT.to_vec(), Vec::new()).await;
        Ok(())
    }

    /// Stops the background work, which must not touch a disk that has been handed over.
    async fn stop_background(&self) {
        self.fills.idle().await;
        self.stop_loading().await;
        self.comparing.stop().await;
        self.stop_settling().await;
    }

    async fn settle_all(&self) {
        if !self.has_failed() && self.settle().await.is_ok() {
            // A second pass covers lines that were opened or removed during the first; no more changes come.
            let _ = self.settle().await;
        }
    }

    /// Writes all dirty data to the disk before it is closed.
    async fn clean_at_last(&self) -> IoResult {
        let dirty = self.index.borrow().dirty.len() << self.shape.line_bits;
        if dirty > 0 {
            tracing::info!(
                "{}: writing to it {} that only its cache has",
                self.lower.name(),
                ByteLen::new(dirty)
            );
        }
        self.clean().await
    }

    /// Changes the superblock, durably.
    pub(crate) async fn note(&self, change: impl FnOnce(&mut Superblock)) -> IoResult {
        let _alone = self.noting.enter(ByteRange::new(0, 1), Hold::Exclusive).await;
        let superblock = {
            let mut superblock = self.superblock.borrow_mut();
            superblock.sequence += 1;
            change(&mut superblock);
            superblock.clone()
        };
        let bytes = Rc::new(bytes_of(&superblock));
        for at in COPIES {
            let written = self.fast.write(at, Rc::clone(&bytes), 0..bytes.len(), WriteFlags::FUA);
            written.await?;
        }
        Ok(())
    }

    /// Closes a cache that works, after its disk.
    async fn close_cache(&self, stamp: Vec<u8>, samples: Vec<Sample>) {
        if !self.has_failed()
            && let Err(error) = self.close_cache_steps(stamp, samples).await
        {
            self.fail(&error);
        }
    }

    async fn close_cache_steps(&self, stamp: Vec<u8>, samples: Vec<Sample>) -> IoResult {
        self.checkpoint_all().await?;
        let end = self.commits.end();
        let may_be_dirty = self.may_be_dirty.get() && !self.is_known_clean();
        self.note(|superblock| {
            superblock.clean = true;
            superblock.may_be_dirty = may_be_dirty;
            superblock.journal_end = end;
            superblock.disk.stamp = stamp;
            superblock.samples = samples;
        })
        .await?;
        self.fast.close().await
    }
}
