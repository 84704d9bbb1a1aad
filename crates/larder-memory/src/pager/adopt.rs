//! Adoption of the pages that an earlier pager has stored, and of those that were in memory before the first pager.

use super::{Pager, Phase};
use crate::entry::{Location, Tier, Word};
use crate::guest::GuestMemory;
use crate::lists::Queue;
use crate::log::SEGMENT;
use crate::state::MESSAGES;
use crate::units::{PageIndex, PageRun};
use crate::userfaultfd::{Message, RawMessage};
use crate::worker::Worker;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    pub(super) fn adopt(&mut self, present: &[PageRun]) {
        for page in present.iter().flat_map(|run| run.pages()) {
            self.phases.set(page, Phase::Resident);
            self.present += 1;
            self.lists.push(Queue::Probation, page);
        }
        for region in self.regions.clone() {
            for page in (0..region.pages).map(|offset| region.first.plus(offset)) {
                match region.is_gone() {
                    true => self.state.replace(page, Word::NOWHERE),
                    false => self.adopt_entry(page),
                }
            }
        }
        let compressed = &self.compressed;
        self.ram.found_allocated(|segment| {
            let takes_memory = compressed.takes_memory(segment.start() as usize, SEGMENT);
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
            self.guest.wake(PageRun {
                first: region.first,
                count: region.pages,
            });
        }
    }

    fn adopt_entry(&mut self, page: PageIndex) {
        let word = self.state.word(page);
        if word == Word::NOWHERE {
            return;
        }
        let is_there = self.phases.get(page) == Phase::Resident;
        let is_lost = word.decode() == Some(Location::Lost);
        if is_lost && !is_there && word.is_clean() {
            // The page was given up after it was lost, and is still poisoned.
            self.stored.change(Word::NOWHERE, word);
            self.to_clear.push(page);
            return;
        }
        if is_there && (is_lost || !word.is_clean()) {
            // The page was paged in, or not yet removed, and may have been written to since.
            self.state.replace(page, Word::NOWHERE);
            return;
        }
        let is_sound = match word.decode() {
            Some(Location::In {
                tier: Tier::Ram,
                stored,
                ..
            }) => self.ram.found(stored),
            Some(Location::In { tier, stored, .. }) => self.found_on_disk(tier, stored),
            Some(Location::Uniform { .. } | Location::Lost) => true,
            Some(Location::Nowhere) | None => false,
        };
        // A page in memory stays clean until the messages of the earlier pager are handled.
        let word = word.with_clean(is_there && is_sound);
        self.state.replace(page, word);
        self.stored.change(Word::NOWHERE, word);
        if !is_sound {
            tracing::error!(
                ?page,
                "invalid page entry {:#x}: a thread that touches the page gets a memory error",
                word.0
            );
            self.set_word(page, Word::of(Location::Lost));
        }
    }

    /// Handles the last messages that the kernel delivered, which the earlier pager may not have handled. Threads
    /// that wait for a page fault again.
    fn adopt_messages(&mut self) {
        // SAFETY: as in `receive`.
        let messages: &mut [RawMessage] = unsafe { self.state.messages().as_mut() };
        let mut left = [RawMessage::default(); MESSAGES];
        left.copy_from_slice(messages);
        for raw in &left {
            match raw.decode() {
                Some(Message::Removed(range)) => self.removed(range, false),
                Some(Message::Unmapped(range)) => self.removed(range, true),
                _ => {}
            }
        }
        messages.fill(RawMessage::default());
    }
}
