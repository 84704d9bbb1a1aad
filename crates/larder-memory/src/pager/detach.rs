//! Detaching: pages everything in, so that the process can run without a pager.
//!
//! The process may have punched a hole for a page before the page was paged in, and not have reported that yet
//! ([`super`]). The old content is in memory then. Without a pager the report would have no receiver, and the old
//! content would remain. So the pager receives reports for a while after it has paged in the last page, and only then
//! releases the memory. A hole that is punched later needs no report: nothing brings the old content back.

use std::time::{Duration, Instant};

use super::fault::PageInResult;
use super::{Pager, Phase};
use crate::entry::EntryWord;
use crate::guest::GuestMemory;
use crate::units::PageIndex;
use crate::worker::Worker;

/// Maximum number of concurrent reads.
const READS_MAX: usize = 8;

/// Time within which a process reports a hole that it has punched, also on a busy host.
pub const HOLE_REPORT_DELAY_MAX: Duration = Duration::from_secs(1);

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Stops evicting, and starts to page everything in ([`Self::page_in_step`]).
    pub fn begin_detach(&mut self) {
        tracing::debug!(bytes = self.stored_bytes(), "evictions end, and all pages are paged in");
        self.is_detaching = true;
        self.detach_cursor = 0;
        self.cancel_all_evictions();
    }

    /// Enforces the limit again. Pages that have been paged in are evicted like any other.
    pub fn cancel_detach(&mut self) {
        tracing::debug!("the detach has ended early, and pages are evicted again");
        self.is_detaching = false;
    }

    /// Returns true if the kernel had no memory for the last page that was paged in.
    pub fn lacks_memory(&self) -> bool {
        self.no_memory_until.is_some()
    }

    /// Returns the size of the pages that are not in memory and still have to be paged in, in bytes.
    pub fn stored_bytes(&self) -> u64 {
        let stored = self.stored;
        u64::from(stored.uniform + stored.ram + stored.ssd + stored.slow) * crate::units::PAGE_BYTES
    }

    /// Updates the time since which nothing is stored, at the beginning of a turn.
    pub(super) fn update_nothing_stored(&mut self, now: Instant) {
        self.nothing_stored_since = match self.stored_bytes() {
            0 => self.nothing_stored_since.or(Some(now)),
            _ => None,
        };
    }

    /// Returns true if no page has been paged in from a copy for so long that every hole from before that is
    /// reported, and the report was received.
    fn has_received_reports(&self) -> bool {
        // The current turn has received the messages after its beginning.
        self.nothing_stored_since
            .is_some_and(|since| self.now.saturating_duration_since(since) >= HOLE_REPORT_DELAY_MAX)
    }

    /// Pages in up to `count` pages. Returns true if none is left, and the process has reported the holes that it
    /// has punched before that. The caller must handle messages between the calls.
    pub fn page_in_step(&mut self, count: u32) -> bool {
        if self.jobs > 0 || self.stored_bytes() == 0 && !self.has_received_reports() {
            return false;
        }
        let pages = self.pages();
        let mut pages_left = count;
        if self.disks.reads() >= READS_MAX {
            return false;
        }
        while self.detach_cursor < pages {
            if pages_left == 0 {
                return false;
            }
            let page = PageIndex::new(self.detach_cursor);
            let word = self.state.word(page);
            if self.phases.get(page) == Phase::Absent && word != EntryWord::NOT_STORED {
                pages_left -= 1;
                match self.install(page, false) {
                    PageInResult::MappingChanged | PageInResult::NoMemory => return false,
                    PageInResult::Reading if self.disks.reads() >= READS_MAX => pages_left = 0,
                    _ => {}
                }
            }
            self.detach_cursor += 1;
        }
        if self.disks.reads() > 0 {
            return false;
        }
        // Pages that were given up and stored again, or could not be put in place, are found in the next pass.
        self.detach_cursor = 0;
        if std::mem::take(&mut self.poison_pending) {
            return false;
        }
        self.stored_bytes() == 0 && self.has_received_reports() && self.stalled.is_empty() && self.waiters.is_empty()
    }
}
