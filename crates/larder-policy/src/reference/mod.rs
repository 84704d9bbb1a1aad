//! Policies that Larder's own is compared with, as in their papers: for a whole cache instead of sets, and regardless
//! of the memory for each line.
//!
//! Keys are small numbers, from 0 to one less than the number of keys that a policy is created for; larger ones
//! panic.

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

/// Access to one line of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineAccess {
    /// Key of the line.
    pub key: u32,
    /// Number of lines of the whole request.
    pub request_lines: u32,
    /// Set for a write, unset for a read.
    pub write: bool,
    /// Time in milliseconds since the first access; 0 if unknown.
    pub at_ms: u32,
}

/// Result of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessOutcome {
    /// The key was in the cache.
    Hit,
    /// The key was stored: its line was written to the SSD.
    Filled,
    /// The key was not in the cache, and was not admitted.
    Bypassed,
}

/// Cache that reports the result of each access.
pub trait ReferenceCache {
    /// Accesses a key.
    fn access(&mut self, access: LineAccess) -> AccessOutcome;
}

#[cfg(test)]
mod tests;
