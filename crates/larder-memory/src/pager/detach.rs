//! Detaching: pages everything in, so that the process can run without a pager.

use super::fault::Put;
use super::{Pager, Phase};
use crate::entry::Word;
use crate::guest::GuestMemory;
use crate::units::PageIndex;
use crate::worker::Worker;

/// Maximum number of concurrent reads.
const READS_MAX: usize = 8;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Stops evicting, and starts to page everything in ([`Self::bring_back`]).
    pub fn begin_detach(&mut self) {
        self.is_leaving = true;
        self.brought_back = 0;
        self.stay_all();
    }

    /// Enforces the limit again. Pages that have been paged in are evicted like any other.
    pub fn cancel_detach(&mut self) {
        self.is_leaving = false;
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

    /// Pages in up to `count` pages, and returns true if none is left. The caller must handle faults between the
    /// calls.
    pub fn bring_back(&mut self, count: u32) -> bool {
        if self.jobs > 0 {
            return false;
        }
        let pages = self.pages();
        let mut left = count;
        if self.disks.reads() >= READS_MAX {
            return false;
        }
        while self.brought_back < pages {
            if left == 0 {
                return false;
            }
            let page = PageIndex::new(self.brought_back);
            let word = self.state.word(page);
            if self.phases.get(page) == Phase::Absent && word != Word::NOWHERE {
                left -= 1;
                match self.put_in_place(page, false) {
                    Put::Changing | Put::NoMemory => return false,
                    Put::Reading if self.disks.reads() >= READS_MAX => left = 0,
                    _ => {}
                }
            }
            self.brought_back += 1;
        }
        if self.disks.reads() > 0 {
            return false;
        }
        // Pages that were given up and stored again, or could not be put in place, are found in the next pass.
        self.brought_back = 0;
        if std::mem::take(&mut self.is_unmarked) {
            return false;
        }
        self.stored_bytes() == 0 && self.stalled.is_empty() && self.waiting.is_empty()
    }
}
