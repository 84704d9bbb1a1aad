//! Read-ahead as a block filter: it finds reads that go on in a way that can be foreseen, however many streams run
//! interleaved, and has their data in RAM before they are made.
//!
//! A read looks up whether its blocks are in memory. If they are, it is a copy. If they are on their way, it waits for
//! them. Otherwise the layer below reads straight into the guest's memory, and the history ([`seen`]) says whether the
//! read belongs to a stream; then a fetch is set out for what comes next. Whenever a reader comes nearer to the end of
//! what was fetched for it, the next fetch is made ([`streams`] says how far ahead).
//!
//! What it never does:
//! - *Serve an old byte.* A write, discard or write-zeroes takes the blocks that it touches out of memory before it
//!   starts, and those that are on their way are not believed when they arrive; nothing of its range is fetched until it
//!   has ended. Where others may write past it, a byte is old for a few seconds at most ([`Prefetch::believe_for`]).
//! - *Show its errors.* Who waits for a fetch that fails reads for itself.
//! - *Hold more memory than it was given*, its tables included.
//! - *Go on with what is no use.* What is fetched and not read is counted ([`Statistics::wasted`]); the more of it there
//!   is, the more evidence a stream needs, and the less far ahead it goes.

mod belief;
mod cache;
mod device;
mod extents;
mod fetch;
mod interest;
mod pace;
mod read;
mod seen;
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

/// What may be fetched, and kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchOptions {
    /// All memory that is held, tables included.
    pub memory: ByteLen,
    /// Reads that are longer go past the cache: the copy would cost more than is gained. So do those of more than
    /// 64 KiB as long as two of them are under way: who asks for so much at a time needs nobody to ask in his stead.
    pub largest_read: ByteLen,
    /// No stream is read ahead of by more than this.
    pub ahead_max: ByteLen,
}

impl PrefetchOptions {
    /// Nothing is read ahead.
    pub const OFF: Self = Self {
        memory: ByteLen::ZERO,
        largest_read: ByteLen::ZERO,
        ahead_max: ByteLen::ZERO,
    };

    /// The least memory that is of any use.
    pub const MEMORY_MIN: ByteLen = ByteLen::kib(512);

    /// The most memory that is made use of, a little less than there are numbers for.
    pub const MEMORY_MAX: ByteLen = ByteLen::mib(128);

    /// The least that reading ahead by, or of, is of any use: a block.
    pub const LEN_MIN: ByteLen = ByteLen::new(BLOCK_LEN);
}

impl Default for PrefetchOptions {
    fn default() -> Self {
        Self {
            memory: ByteLen::mib(4),
            // What Linux reads ahead of its own accord.
            largest_read: ByteLen::kib(128),
            ahead_max: ByteLen::mib(1),
        }
    }
}

/// What has been done so far; bytes and numbers of reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes fetched.
    pub fetched: u64,
    /// Bytes of them that were read, each counted once.
    pub used: u64,
    /// Bytes of them that were dropped before anybody read them, for want of memory or because they were written.
    pub wasted: u64,
    /// Bytes of them that are in memory and were not read yet.
    pub unread: u64,
    /// Reads whose bytes were all in memory.
    pub hits: u64,
    /// Reads that had to wait for bytes on their way.
    pub waits: u64,
    /// Reads of which only a part was in memory, or on its way.
    pub partial_hits: u64,
    /// Reads of which nothing was in memory.
    pub misses: u64,
    /// Reads that were too long.
    pub bypassed: u64,
    /// Fetches that failed.
    pub errors: u64,
    /// Streams found that go forward.
    pub streams_forward: u64,
    /// Streams found that go backward.
    pub streams_backward: u64,
    /// Streams found that go by steps.
    pub streams_strided: u64,
    /// Streams for which there is something in memory.
    pub streams: u64,
    /// Bytes of memory taken, tables included.
    pub memory: u64,
}

impl fmt::Display for Statistics {
    /// In a line, for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "read ahead {}, of which {} were used and {} wasted; {} reads found all in memory, {} waited for it, {} found a part, {} nothing, {} were too long",
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

/// A device that reads ahead, over one that does not.
pub struct Prefetch {
    this: Weak<Self>,
    on: WeakLoop,
    lower: Rc<dyn BlockDevice>,
    options: Cell<PrefetchOptions>,
    /// There is no memory.
    is_off: Cell<bool>,
    /// Of the lower device; never changes.
    block_size: u64,
    state: RefCell<State>,
    /// Changes that are under way.
    writes: Writes,
    long_reads: LongReads,
    /// The change of size that the memory's content is of.
    generation: Cell<u64>,
    /// How long what was fetched is believed; `None` if nobody changes it but through here.
    believed_for: Cell<Option<Duration>>,
    /// A task looks for what is not believed any more.
    is_doubting: Cell<bool>,
    is_closed: Cell<bool>,
}

impl Prefetch {
    /// `lower`, read ahead of, on `on`. Memory below [`PrefetchOptions::MEMORY_MIN`] is for tests: there is hardly a stream
    /// that gets a share of it.
    ///
    /// # Panics
    /// If `lower` has blocks larger than 4 KiB.
    pub fn over(on: &Loop, lower: Rc<dyn BlockDevice>, options: PrefetchOptions) -> Rc<Self> {
        let generation = lower.size_changes().generation();
        let block_size = u64::from(lower.geometry().block_size);
        assert!(block_size <= BLOCK_LEN, "blocks of {block_size} bytes");
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
            believed_for: Cell::new(None),
            is_doubting: Cell::new(false),
            is_closed: Cell::new(false),
        })
    }

    /// What has been done so far.
    pub fn statistics(&self) -> Statistics {
        self.state.borrow().statistics()
    }

    /// What is fetched, and kept.
    pub fn options(&self) -> PrefetchOptions {
        self.options.get()
    }

    /// Goes on with other options, when the fetches that are under way have ended; what is in memory is dropped, and the
    /// history with it.
    pub async fn set_options(&self, options: PrefetchOptions) {
        loop {
            let running = {
                let mut state = self.state.borrow_mut();
                // Until there is another one.
                state.closing = true;
                state.running.first().copied()
            };
            match running {
                Some(fetch) => self.ended(fetch).await,
                None => break,
            }
        }
        if !self.is_closed.get() {
            self.options.set(options);
            self.is_off.set(options.memory == ByteLen::ZERO);
            let mut state = self.state.borrow_mut();
            let after = State::after(&mut state, options);
            *state = after;
        }
    }
}
