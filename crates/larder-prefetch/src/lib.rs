//! Read-ahead as a block filter: detects predictable reads, however many streams are interleaved, and has their data
//! in RAM before they are made.
//!
//! Each read looks up whether its blocks are in memory. If they are, it is a copy. If they are being fetched, it
//! waits for them. Otherwise the layer below reads straight into the guest's memory, and the history ([`history`])
//! determines whether the read belongs to a stream; if so, a fetch of the following blocks is started. Whenever a
//! reader approaches the end of the data that was fetched for it, the next fetch is made ([`streams`] decides how far
//! ahead).
//!
//! Guarantees:
//! - *No stale bytes.* A write, discard or write-zeroes removes the blocks that it touches from memory before it
//!   starts. Blocks of its range that are being fetched are discarded when they arrive, and no fetch of its range
//!   starts until it has ended. Where other programs may write to the device, a byte is stale for a few seconds at
//!   most ([`Prefetch::set_max_age`]).
//! - *No errors of its own.* When a fetch fails, each read that waits for it reads from the layer below itself.
//! - *Bounded memory*, tables included.
//! - *Bounded waste.* Fetched bytes that are not read are counted ([`PrefetchStatistics::wasted`]). The more there are,
//!   the
//!   more evidence a stream needs, and the less far ahead it is fetched.

mod cache;
mod device;
mod expiry;
mod extents;
mod fetch;
mod fetch_limit;
mod history;
mod random_detector;
mod read;
mod state;
mod streams;
mod units;
mod writes;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::time::Duration;

use larder_block::event_loop::WeakLoop;
use larder_block::{BlockDevice, ByteLen, Loop};

use read::LongReads;
use state::State;
pub use streams::Pattern;
use units::BLOCK_LEN;
use writes::Writes;

/// Limits of read-ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchOptions {
    /// All memory that is used, tables included.
    pub memory: ByteLen,
    /// Length of the longest read that uses the cache: for longer ones the copy costs more than it saves. Reads of
    /// more than 64 KiB also bypass the cache while two of them are in flight: such a reader needs no read-ahead.
    pub largest_read: ByteLen,
    /// The longest distance by which a stream is read ahead.
    pub ahead_max: ByteLen,
}

impl PrefetchOptions {
    /// Options that disable read-ahead.
    pub const OFF: Self = Self { memory: ByteLen::ZERO, largest_read: ByteLen::ZERO, ahead_max: ByteLen::ZERO };

    /// The least memory that is useful.
    pub const MEMORY_MIN: ByteLen = ByteLen::kib(512);

    /// The most memory that is used, a little less than slots can be numbered for.
    pub const MEMORY_MAX: ByteLen = ByteLen::mib(128);

    /// The least useful value of [`Self::largest_read`] and [`Self::ahead_max`]: a block.
    pub const LEN_MIN: ByteLen = ByteLen::new(BLOCK_LEN);
}

impl Default for PrefetchOptions {
    fn default() -> Self {
        Self {
            memory: ByteLen::mib(4),
            // Linux's default read-ahead.
            largest_read: ByteLen::kib(128),
            ahead_max: ByteLen::mib(1),
        }
    }
}

/// Counters since the start, in bytes or numbers of reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchStatistics {
    /// Bytes fetched.
    pub fetched: u64,
    /// Fetched bytes that were read, each counted once.
    pub used: u64,
    /// Fetched bytes that were dropped unread, for want of memory or because they were written.
    pub wasted: u64,
    /// Fetched bytes that are in memory and were not read yet.
    pub unread: u64,
    /// Reads served entirely from memory.
    pub hits: u64,
    /// Reads that had to wait for bytes that were being fetched.
    pub waits: u64,
    /// Reads of which only a part was in memory or being fetched.
    pub partial_hits: u64,
    /// Reads of which nothing was in memory.
    pub misses: u64,
    /// Reads that bypassed the cache because of their length.
    pub bypassed: u64,
    /// Fetches that failed.
    pub errors: u64,
    /// Forward streams detected.
    pub streams_forward: u64,
    /// Backward streams detected.
    pub streams_backward: u64,
    /// Strided streams detected.
    pub streams_strided: u64,
    /// Streams with data in memory.
    pub streams: u64,
    /// Bytes of memory used, tables included.
    pub memory: u64,
}

impl fmt::Display for PrefetchStatistics {
    /// Writes one line for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "read ahead {}, of which {} were used and {} wasted; {} reads were served from memory, {} waited for a fetch, {} were partly in memory, {} were not, {} were too long",
            ByteLen::new(self.fetched),
            ByteLen::new(self.used),
            ByteLen::new(self.wasted),
            self.hits,
            self.waits,
            self.partial_hits,
            self.misses,
            self.bypassed
        )
    }
}

/// Device that reads ahead of the requests to the device below it.
pub struct Prefetch {
    this: Weak<Self>,
    on: WeakLoop,
    lower: Rc<dyn BlockDevice>,
    options: Cell<PrefetchOptions>,
    /// Set if there is no memory, so that read-ahead is off.
    is_off: Cell<bool>,
    /// Block size of the lower device; never changes.
    block_size: u64,
    state: RefCell<State>,
    /// Changes of the disk that are under way.
    writes: Writes,
    long_reads: LongReads,
    /// Size change of the lower device that the data in memory belongs to.
    generation: Cell<u64>,
    /// Maximum age of fetched data; `None` if only this layer changes the device.
    max_age: Cell<Option<Duration>>,
    /// Set while the expiry task runs.
    expiry_running: Cell<bool>,
    is_closed: Cell<bool>,
}

impl Prefetch {
    /// Creates read-ahead over `lower`, on the loop `on`. Memory below [`PrefetchOptions::MEMORY_MIN`] is for tests:
    /// hardly any stream gets a share of it.
    ///
    /// # Panics
    /// `lower` has blocks larger than 4 KiB.
    pub fn new(on: &Loop, lower: Rc<dyn BlockDevice>, options: PrefetchOptions) -> Rc<Self> {
        let generation = lower.size_changes().generation();
        let block_size = u64::from(lower.geometry().block_size);
        assert!(block_size <= BLOCK_LEN, "the lower device has blocks of {block_size} bytes, more than 4 KiB");
        Rc::new_cyclic(|this| Self {
            this: this.clone(),
            on: on.downgrade(),
            lower,
            options: Cell::new(options),
            is_off: Cell::new(options.memory == ByteLen::ZERO),
            block_size,
            state: RefCell::new(State::new(options)),
            writes: Writes::default(),
            long_reads: LongReads::default(),
            generation: Cell::new(generation),
            max_age: Cell::new(None),
            expiry_running: Cell::new(false),
            is_closed: Cell::new(false),
        })
    }

    /// Returns the counters since the start.
    pub fn statistics(&self) -> PrefetchStatistics {
        self.state.borrow().statistics()
    }

    /// Returns the present options.
    pub fn options(&self) -> PrefetchOptions {
        self.options.get()
    }

    /// Applies other options once all fetches in flight have ended; data in memory and the history are dropped.
    pub async fn set_options(&self, options: PrefetchOptions) {
        loop {
            let running = {
                let mut state = self.state.borrow_mut();
                // No fetch may start until the state is replaced below.
                state.closing = true;
                state.running.first().copied()
            };
            match running {
                Some(fetch) => self.wait_fetch(fetch).await,
                None => break,
            }
        }
        if !self.is_closed.get() {
            self.options.set(options);
            self.is_off.set(options.memory == ByteLen::ZERO);
            let mut state = self.state.borrow_mut();
            let reset = State::reset_from(&mut state, options);
            *state = reset;
        }
    }
}
