//! Order of eviction: two queues with all resident pages.
//!
//! For a resident page the kernel reports only writes while the page is protected; reads are invisible. So the age of
//! a page is the time since it was paged in, and its use is known only from how soon it was wanted after an eviction.
//! A page that was wanted soon stays longer the next time (like the kernel's refault distance, and the second queue
//! of 2Q). A scan passes through the first queue and does not touch the second.

use crate::units::PageIndex;

/// Queue of resident pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResidentQueue {
    /// Pages that were paged in for the first time, or long after their eviction.
    Probation,
    /// Pages that were wanted soon after their eviction.
    Working,
}

const NO_PAGE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Links {
    newer: u32,
    older: u32,
}

#[derive(Clone, Copy)]
struct Ends {
    newest: u32,
    oldest: u32,
    len: u32,
}

/// Both queues. Each page is in at most one of them.
pub struct ResidentQueues {
    links: Vec<Links>,
    /// 0 if the page is in no queue, else one more than the number of the queue.
    queue_of: Vec<u8>,
    ends: [Ends; 2],
}

impl ResidentQueues {
    /// Makes empty queues for `pages` pages.
    pub fn new(pages: u32) -> Self {
        Self {
            links: vec![Links { newer: NO_PAGE, older: NO_PAGE }; pages as usize],
            queue_of: vec![0; pages as usize],
            ends: [Ends { newest: NO_PAGE, oldest: NO_PAGE, len: 0 }; 2],
        }
    }

    /// Grows the tables to `pages` pages. The new pages are in no queue.
    pub fn grow(&mut self, pages: u32) {
        self.links.resize(pages as usize, Links { newer: NO_PAGE, older: NO_PAGE });
        self.queue_of.resize(pages as usize, 0);
    }

    /// Returns the number of pages in a queue.
    pub fn len(&self, queue: ResidentQueue) -> u32 {
        self.ends[queue as usize].len
    }

    /// Appends `page` to `queue` as its newest page.
    ///
    /// # Panics
    /// If the page is in a queue already.
    pub fn push(&mut self, queue: ResidentQueue, page: PageIndex) {
        let index = page.get();
        assert_eq!(self.queue_of[page.as_usize()], 0, "{page:?} is already in a queue");
        let ends = &mut self.ends[queue as usize];
        self.links[page.as_usize()] = Links { newer: NO_PAGE, older: ends.newest };
        match ends.newest {
            NO_PAGE => ends.oldest = index,
            newest => self.links[newest as usize].newer = index,
        }
        ends.newest = index;
        ends.len += 1;
        self.queue_of[page.as_usize()] = queue as u8 + 1;
    }

    /// Removes `page` from its queue, if it is in one.
    pub fn remove(&mut self, page: PageIndex) {
        let queue = match self.queue_of[page.as_usize()].checked_sub(1) {
            None => return,
            Some(number) => number as usize,
        };
        let Links { newer, older } = self.links[page.as_usize()];
        let ends = &mut self.ends[queue];
        match newer {
            NO_PAGE => ends.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        match older {
            NO_PAGE => ends.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        ends.len -= 1;
        self.queue_of[page.as_usize()] = 0;
    }

    fn oldest(&self, queue: ResidentQueue) -> Option<PageIndex> {
        let oldest = self.ends[queue as usize].oldest;
        (oldest != NO_PAGE).then(|| PageIndex::new(oldest))
    }

    /// Removes and returns the page to evict next. While probation has less than a fourth of all pages, the oldest
    /// working pages move to probation first, so a write can still save each of them there.
    pub fn pop_victim(&mut self) -> Option<PageIndex> {
        let all = self.len(ResidentQueue::Probation) + self.len(ResidentQueue::Working);
        // Two moves for one eviction: probation grows to its share in a few steps, whatever the order was before.
        for _ in 0..2 {
            if self.len(ResidentQueue::Probation) >= all / 4 {
                break;
            }
            let Some(page) = self.oldest(ResidentQueue::Working) else {
                break;
            };
            self.remove(page);
            self.push(ResidentQueue::Probation, page);
        }
        let page = self.oldest(ResidentQueue::Probation).or_else(|| self.oldest(ResidentQueue::Working))?;
        self.remove(page);
        Some(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn oldest_page_is_evicted_first() {
        let mut lists = ResidentQueues::new(10);
        for index in [3, 1, 7] {
            lists.push(ResidentQueue::Probation, PageIndex::new(index));
        }
        lists.remove(PageIndex::new(1));
        assert_eq!(lists.pop_victim(), Some(PageIndex::new(3)));
        assert_eq!(lists.pop_victim(), Some(PageIndex::new(7)));
        assert_eq!(lists.pop_victim(), None);
    }

    #[test]
    fn scan_does_not_evict_working_pages() {
        let mut lists = ResidentQueues::new(1000);
        for index in 0..100 {
            lists.push(ResidentQueue::Working, PageIndex::new(index));
        }
        for index in 100..400 {
            lists.push(ResidentQueue::Probation, PageIndex::new(index));
        }
        for index in 400..1000 {
            let victim = lists.pop_victim().unwrap();
            assert!(victim.get() >= 100);
            lists.push(ResidentQueue::Probation, PageIndex::new(index));
        }
    }

    proptest! {
        /// No sequence of operations loses or duplicates a page.
        #[test]
        fn queues_match_reference_set(steps in proptest::collection::vec((0u8..4, 0u32..50), 0..400)) {
            let mut lists = ResidentQueues::new(50);
            let mut inside = std::collections::BTreeSet::new();
            for (what, index) in steps {
                let page = PageIndex::new(index);
                match what {
                    0 | 1 if !inside.contains(&page) => {
                        lists.push([ResidentQueue::Probation, ResidentQueue::Working][usize::from(what)], page);
                        inside.insert(page);
                    }
                    2 => {
                        lists.remove(page);
                        inside.remove(&page);
                    }
                    _ => {
                        let any = !inside.is_empty();
                        prop_assert_eq!(lists.pop_victim().map(|page| inside.remove(&page)), any.then_some(true));
                    }
                }
                prop_assert_eq!((lists.len(ResidentQueue::Probation) + lists.len(ResidentQueue::Working)) as usize, inside.len());
            }
        }
    }
}
