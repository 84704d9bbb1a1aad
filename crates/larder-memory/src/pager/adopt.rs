//! Adoption of the pages that an earlier pager has stored, and of those that were in memory before the first pager.

use super::{Pager, Phase};
use crate::entry::{CopyLocation, EntryWord, Tier};
use crate::guest::GuestMemory;
use crate::resident_queues::ResidentQueue;
use crate::segment_log::SEGMENT_BYTES;
use crate::state::MESSAGES_MAX;
use crate::units::{PageIndex, PageRun};
use crate::userfaultfd::{RawUffdMessage, UffdMessage};
use crate::worker::Worker;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    pub(super) fn adopt(&mut self, resident: &[PageRun]) {
        for page in resident.iter().flat_map(|run| run.pages()) {
            self.phases.set(page, Phase::Resident);
            self.resident += 1;
            self.queues.push(ResidentQueue::Probation, page);
        }
        for region in self.regions.clone() {
            for page in (0..region.pages).map(|offset| region.first.plus(offset)) {
                match region.is_unmapped() {
                    true => self.state.replace(page, EntryWord::NOT_STORED),
                    false => self.adopt_entry(page),
                }
            }
        }
        let compressed = &self.compressed;
        self.ram.adopt_allocated(|segment| {
            let takes_memory = compressed.is_allocated(segment.start() as usize, SEGMENT_BYTES);
            takes_memory.unwrap_or(true)
        });
        self.adopt_messages();
        for region in self.regions.clone() {
            for page in (0..region.pages).map(|offset| region.first.plus(offset)) {
                if self.phases.get(page) == Phase::Resident {
                    self.drop_copy(page);
                }
            }
        }
        // Threads that waited for the earlier pager, or whose message was just handled, retry.
        for region in &self.regions {
            self.guest.wake(PageRun { first: region.first, count: region.pages });
        }
    }

    fn adopt_entry(&mut self, page: PageIndex) {
        let word = self.state.word(page);
        if word == EntryWord::NOT_STORED {
            return;
        }
        let is_resident = self.phases.get(page) == Phase::Resident;
        let is_lost = word.decode() == Some(CopyLocation::Lost);
        if is_lost && !is_resident && word.is_clean() {
            // The page was given up after it was lost, and is still poisoned.
            self.stored.change(EntryWord::NOT_STORED, word);
            self.lost_then_discarded.push(page);
            return;
        }
        if is_resident && (is_lost || !word.is_clean()) {
            // The page was paged in, or not yet removed, and may have been written to since.
            self.state.replace(page, EntryWord::NOT_STORED);
            return;
        }
        let is_valid = match word.decode() {
            Some(CopyLocation::InTier { tier: Tier::Ram, object: stored, .. }) => self.ram.adopt(stored),
            Some(CopyLocation::InTier { tier, object: stored, .. }) => self.adopt_on_disk(tier, stored),
            Some(CopyLocation::Uniform { .. } | CopyLocation::Lost) => true,
            Some(CopyLocation::NotStored) | None => false,
        };
        // A page in memory stays clean until the messages of the earlier pager are handled.
        let word = word.with_clean(is_resident && is_valid);
        self.state.replace(page, word);
        self.stored.change(EntryWord::NOT_STORED, word);
        if !is_valid {
            tracing::error!(
                ?page,
                "invalid page entry {:#x}: a thread that touches the page gets a memory error",
                word.0
            );
            self.set_word(page, EntryWord::encode(CopyLocation::Lost));
        }
    }

    /// Handles the last messages that the kernel delivered, which the earlier pager may not have handled. Threads
    /// that wait for a page fault again.
    fn adopt_messages(&mut self) {
        // SAFETY: as in `receive`.
        let messages: &mut [RawUffdMessage] = unsafe { self.state.messages().as_mut() };
        let mut messages_copy = [RawUffdMessage::default(); MESSAGES_MAX];
        messages_copy.copy_from_slice(messages);
        for raw in &messages_copy {
            match raw.decode() {
                Some(UffdMessage::Removed(range)) => self.on_removed(range, false),
                Some(UffdMessage::Unmapped(range)) => self.on_removed(range, true),
                _ => {}
            }
        }
        messages.fill(RawUffdMessage::default());
    }
}
