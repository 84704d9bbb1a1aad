//! Bringing everything back, so that the process can be left alone.

use super::fault::Put;
use super::{Pager, Phase};
use crate::entry::Word;
use crate::guest::GuestMemory;
use crate::units::PageIndex;
use crate::worker::Worker;

/// How many reads there are at a time.
const READS_MAX: usize = 8;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Nothing is evicted any more, and all that was is to come back ([`Self::bring_back`]).
    pub fn begin_detach(&mut self) {
        self.is_leaving = true;
        self.brought_back = 0;
        self.stay_all();
    }

    /// Keeps within the limit again: what has come back is evicted as any other page.
    pub fn cancel_detach(&mut self) {
        self.is_leaving = false;
    }

    /// Whether the kernel had no memory for the last page that was to come back.
    pub fn lacks_memory(&self) -> bool {
        self.no_memory_until.is_some()
    }

    /// How many pages, in bytes, are to come back.
    pub fn stored_bytes(&self) -> u64 {
        let stored = self.stored;
        u64::from(stored.uniform + stored.ram + stored.ssd + stored.slow) * crate::units::PAGE_BYTES
    }

    /// Brings back up to `count` pages; whether that was all there is. Faults are to be answered in between.
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
        // What was given up and stored again, or could not be put in place, comes in the next round.
        self.brought_back = 0;
        if std::mem::take(&mut self.is_unmarked) {
            return false;
        }
        self.stored_bytes() == 0 && self.stalled.is_empty() && self.waiting.is_empty()
    }
}
