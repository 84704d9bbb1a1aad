//! Makes a cache, and opens one.

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

/// So many lines may be unsettled for each that fits: what a crash leaves cold.
const UNSETTLED_SHARE: u64 = 128;
const UNSETTLED_MIN: u64 = 64;
const UNSETTLED_MAX: u64 = 16 << 10;

/// The stamp of no disk: that of one that was used on when its cache was closed.
const LEFT: &[u8] = b"left";

/// How to make a cache.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// log2 of a line's bytes: 12 to 16.
    pub line_bits: u32,
    /// How writes go.
    pub mode: Mode,
    /// What no other cache has.
    pub uuid: [u8; 16],
    /// The disk that it is for.
    pub disk: DiskId,
    /// Bytes of the disk.
    pub disk_size: ByteLen,
}

/// How to open a cache.
pub struct OpenOptions {
    /// How writes go; as before if it is not said.
    pub mode: Option<Mode>,
    /// The disk that it is opened for, as it is now.
    pub disk: DiskId,
    /// Whether the disk is as the cache knows it.
    pub verdict: Verdict,
    /// The disk's stamp once it has been closed.
    pub stamp: Box<dyn Fn() -> Vec<u8>>,
    /// What a [`Witness`] has noted, if it has.
    pub detached: Option<Detached>,
    /// Where that is noted.
    pub witness: Box<dyn Witness>,
    /// What differs between two boots of the host, and is zero if that is not known: what was written and not flushed is
    /// there after a kill, and may not be after a loss of power.
    pub boot: [u8; 16],
    /// What may be written to the cache device in a day. What has to be is, all the same: dirty data, and that something
    /// is not to be believed any more.
    pub endurance: Option<ByteLen>,
    /// When dirty lines are cleaned.
    pub cleaning: CleanOptions,
    /// Take up everything in the background. Otherwise only what is needed.
    pub load_ahead: bool,
    /// When what has changed is written down.
    pub settling: SettleOptions,
}

/// When what has changed is written down: what is not is cold after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettleOptions {
    /// After this time at the latest.
    pub after: Duration,
    /// When so many lines wait; a 128th of all, and at most 16 Ki, if it is not said.
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

/// Why a cache cannot be made or opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OpenError {
    #[error("cache {cache}: {source}")]
    Superblock { cache: String, source: SuperblockError },
    #[error("cache {cache}: {size} is too small for a cache with lines of {line} KiB: the least is about {least}")]
    TooSmall {
        cache: String,
        size: ByteLen,
        line: u64,
        least: ByteLen,
    },
    #[error(
        "cache {cache}: it belongs to another disk, {other}; give that one, or drop the cache (larder disk cache drop) and begin anew"
    )]
    OtherDisk { cache: String, other: String },
    #[error(
        "cache {cache}: it has data that was never written to {disk}, and {disk} was changed without the cache since; only you can say which is right: take the disk as it is by dropping the cache (larder disk cache drop --lose-dirty), or write over it what the cache has (larder disk cache flush --force), if only the image's times are wrong, or once it is restored as it was"
    )]
    Diverged { cache: String, disk: String },
    #[error(
        "cache {cache}: its journal is damaged, and it may have data that was never written to {disk}; `larder disk cache drop --lose-dirty` gives that up"
    )]
    Damaged { cache: String, disk: String },
    #[error("cache {cache}: that it is to be believed again cannot be noted: {source}")]
    Witness { cache: String, source: std::io::Error },
    #[error("cache {cache}: {source}")]
    Io { cache: String, source: IoError },
}

/// Makes a cache on `fast`, of whose size it takes all. Whatever was there is lost.
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
    // What was a cache before is none until this one is whole.
    let gone = AlignedBuf::zeroed(SUPERBLOCK_LEN as usize * 2);
    fast.write(ByteOffset::ZERO, WriteBuf::new(&gone), WriteFlags::FUA)
        .await
        .map_err(io)?;
    wipe(fast, &shape).await.map_err(io)?;
    write_superblock(fast, &superblock).await.map_err(io)?;
    Ok(shape)
}

/// Forgets everything that was written down of lines, durably.
async fn wipe(fast: &Rc<dyn BlockDevice>, shape: &Shape) -> IoResult {
    let range = ByteRange::new(JOURNAL_AT, shape.journal_len + shape.pages_len());
    let flags = ZeroFlags {
        unmap: true,
        ..ZeroFlags::default()
    };
    fast.write_zeroes(range, flags).await?;
    fast.flush().await
}

/// Writes both copies, durably, one after the other.
pub(crate) async fn write_superblock(fast: &Rc<dyn BlockDevice>, superblock: &Superblock) -> IoResult {
    let bytes = bytes_of(superblock);
    for at in COPIES {
        fast.write(at, WriteBuf::new(&bytes), WriteFlags::FUA).await?;
    }
    Ok(())
}

/// Where the copies of the superblock are.
const COPIES: [ByteOffset; 2] = [ByteOffset::ZERO, ByteOffset::new(SUPERBLOCK_LEN)];

fn bytes_of(superblock: &Superblock) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed(SUPERBLOCK_LEN as usize);
    bytes.copy_from_slice(&superblock.encode());
    bytes
}

/// What a cache says of itself.
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
    /// `lower`, with the cache on `fast`, on `on`, which what is returned does not keep alive.
    ///
    /// # Errors
    /// See [`OpenError`].
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
                other: superblock.disk.name.clone(),
            });
        }
        let shape = superblock.shape;
        // Somebody else has written to the disk: to which state, nobody knows. Part of a disk may have no times, and times
        // can be put back.
        let is_other = options.verdict == Verdict::Changed
            || superblock.clean
                && (superblock.disk.stamp != options.disk.stamp
                    || !samples::are_there(&lower, &superblock.samples).await);
        if is_other && superblock.may_be_dirty && options.detached.is_none() {
            return Err(OpenError::Diverged { cache: cache(), disk });
        }
        // What only the cache has is right all the same; what the disk has, too, may have been changed there since.
        let is_changed = is_other || superblock.disk_size != size || options.detached.is_some();
        let is_detached = options.detached.is_some();
        let only_dirty = (is_changed && superblock.may_be_dirty).then(|| options.detached.unwrap_or_default());
        // What a killed process has written is there, but a loss of power may still take it away, and what follows from it
        // must not be the only thing that is left.
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
                    Ok(_) if is_detached => "what it has is not to be believed",
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
                    // Of the first sector, which is never written.
                    block: vec![0; SECTOR as usize],
                }
            }
        };
        // Before anything is accepted: a journal that goes on up to a damaged sector is taken for a damaged one.
        if !contents.mended.is_empty() {
            tracing::warn!(
                "{disk}: cache {}: its journal is damaged where nothing is needed of it, and is made anew there; something else has written to it, or its device fails",
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
        // What is not believed now must not be later.
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
            // If it fails, what is noted stays so.
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

    /// Leaves everything so that the next one finds it all.
    pub(crate) async fn close_steps(&self) -> IoResult {
        self.stop_background().await;
        // What a disk that is only read does not take stays in the cache.
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

    /// Closes the cache, and leaves the disk open for others; what it has will not be believed. No request is under way,
    /// and none that comes will use the cache. One that has failed does only what requests want from then on: it can be used as before. Of one that works
    /// the disk has everything already.
    ///
    /// # Errors
    /// The disk's; the cache is not closed then, and what it has may not be what the disk has.
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

    /// What goes on in the background must not do so over a disk that is somebody else's by then.
    async fn stop_background(&self) {
        self.fills.idle().await;
        self.stop_loading().await;
        self.comparing.stop().await;
        self.stop_settling().await;
    }

    async fn settle_all(&self) {
        if !self.has_failed() && self.settle().await.is_ok() {
            // What was opened or taken out meanwhile; nothing is changing any more.
            let _ = self.settle().await;
        }
    }

    /// Has the disk have everything before it is closed.
    async fn clean_at_last(&self) -> IoResult {
        let dirty = self.index.borrow().dirty.len() << self.shape.line_bits;
        if dirty > 0 {
            tracing::info!(
                "{}: {} that only its cache has are being written to it",
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

    /// Closes one that works, after its disk.
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
