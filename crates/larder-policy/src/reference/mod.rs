//! The policies that Larder's own is compared with, as their papers have them: of the whole cache, not of sets, and
//! without regard to what a line costs in memory.
//!
//! Keys are small numbers, from 0 to one less than the number of keys that a policy is made for; larger ones panic.

mod arc;
mod larc;
mod list;
mod lru;
mod s3_fifo;
mod sieve;
mod w_tiny_lfu;

pub use arc::Arc;
pub use larc::Larc;
pub use lru::Lru;
pub use s3_fifo::S3Fifo;
pub use sieve::Sieve;
pub use w_tiny_lfu::WTinyLfu;

/// What is asked of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Which line.
    pub key: u32,
    /// How many lines the request wants that this one is part of.
    pub request_lines: u32,
    /// It is to be written; or else read.
    pub write: bool,
    /// When, in milliseconds from the first one; 0 if that is not known.
    pub at_ms: u32,
}

/// What became of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The key was in the cache.
    Hit,
    /// It was not, and is now: its line was written to the SSD.
    Filled,
    /// It was not, and was not let in.
    Bypassed,
}

/// A cache that says for each access what becomes of it.
pub trait Cache {
    /// A key is asked for.
    fn access(&mut self, ask: Ask) -> Outcome;
}

#[cfg(test)]
mod tests;
