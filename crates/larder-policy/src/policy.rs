//! The policy of Larder's disk cache, as the cache uses it.
//!
//! The cache owns the memory: for each set [`Policy::set_bytes`] bytes, zero at first, which are handed to every call
//! about that set. What is not of a set is in [`Policy`]. Lines are named by their number on the disk (offset divided
//! by the line's size), the place of one in its set by its way.
//!
//! - A hit: [`Policy::touch`].
//! - A miss: [`Policy::admit`]; if the line is to be brought in and no way is free, [`Policy::victim`] and, once that
//!   line has been given up, [`Policy::evict`]; then [`Policy::insert`].
//! - A line that was dropped for another reason, as a discard: [`Policy::remove`].
//!
//! Invariant: a way is in the set's order from its `insert` (or `load`) to its `evict` or `remove`. Calls about a way
//! that is not are ignored, one about a way that the set does not have panics.

use std::time::Duration;

use crate::hash::mix;
use crate::set::{self, Set};

/// What a guest wants of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// All or some of it is read.
    Read,
    /// All or some of it is written.
    Write,
}

/// The circumstances of an access.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// What is wanted.
    pub access: Access,
    /// Bytes of the whole request that wants it.
    pub request_bytes: u64,
    /// Time since any one moment, the same for all calls.
    pub now: Duration,
}

/// How a cache's policy is set up.
#[derive(Clone, Copy, Debug)]
pub struct PolicyOptions {
    /// Ways of each set, 1 to 256.
    pub ways: usize,
    /// Lines of the cache, all sets together.
    pub lines: u64,
    /// Bytes of a line.
    pub line_bytes: u32,
    /// What may be written to the SSD in a day, in bytes; `None` if that does not matter.
    pub budget: Option<u64>,
}

/// What a cache keeps. See the [module](self).
pub struct Policy {
    options: PolicyOptions,
}

impl Policy {
    /// A policy for a cache that is empty.
    ///
    /// # Panics
    /// No set has no ways or more than 256.
    pub fn new(options: PolicyOptions) -> Self {
        assert!(
            (1..=crate::geometry::WAYS_MAX).contains(&options.ways),
            "a set has 1 to 256 ways"
        );
        Self { options }
    }

    /// Bytes of the state of a set; all zero is a set without lines.
    pub fn set_bytes(&self) -> usize {
        set::bytes(self.options.ways)
    }

    fn set<'a>(&self, state: &'a mut [u8]) -> Set<'a> {
        Set::new(state, self.options.ways)
    }

    /// `line`, in `way`, was hit.
    pub fn touch(&mut self, set: &mut [u8], way: u8, line: u64, context: Context) {
        let _ = (line, context);
        self.set(set).touch(way);
    }

    /// Whether `line`, which is not in its set, shall be brought in. To be asked once for each miss.
    pub fn admit(&mut self, set: &mut [u8], line: u64, context: Context) -> bool {
        let _ = (set, line, context);
        true
    }

    /// The way that shall become free: of those that may (`may_evict` says no to dirty or busy ones) the one that is
    /// worth least. It stays in the set's order until [`Self::evict`].
    pub fn victim(&mut self, set: &mut [u8], may_evict: impl FnMut(u8) -> bool) -> Option<u8> {
        self.set(set).victim(may_evict)
    }

    /// `line` has left `way` to make room.
    pub fn evict(&mut self, set: &mut [u8], way: u8, line: u64) {
        let mut set = self.set(set);
        set.remove(way);
        set.remember(fingerprint(line));
    }

    /// `line` is in `way` now, which was free; `context` is that of the access which brought it in.
    pub fn insert(&mut self, set: &mut [u8], way: u8, line: u64, context: Context) {
        let _ = context;
        self.set(set).insert(way, fingerprint(line));
    }

    /// What was in `way` is not any more, whatever it was worth.
    pub fn remove(&mut self, set: &mut [u8], way: u8) {
        self.set(set).remove(way);
    }

    /// So many bytes were written to the SSD, of lines and whatever else: they count against the budget.
    pub fn written(&mut self, bytes: u64, now: Duration) {
        let _ = (bytes, now);
    }

    /// What is worth saving about `way`, for [`Self::load`] after a restart.
    pub fn save(&self, set: &mut [u8], way: u8) -> u8 {
        self.set(set).save(way)
    }

    /// Fills a set that has no lines with those that were found after a restart: ways and what was saved about each.
    pub fn load(&mut self, set: &mut [u8], ways: impl IntoIterator<Item = (u8, u8)>) {
        let mut set = self.set(set);
        for (way, saved) in ways {
            set.load(way, saved);
        }
    }
}

/// What a ghost remembers of a line; never 0.
fn fingerprint(line: u64) -> u16 {
    (mix(line) >> 48) as u16 | 1
}
