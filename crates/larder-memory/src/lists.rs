//! The order in which pages are to go: two queues through all resident pages.
//!
//! Of a page that is in memory the kernel tells only that it was written to while it was protected; that it is read
//! cannot be seen. So a page's age is the time since it came, and what is known of its use is how soon it was wanted
//! back when it had gone: then it stays longer the next time (as with the kernel's refault distance, and 2Q's second
//! queue). A scan passes through the first queue and leaves the second alone.

use crate::units::PageIndex;

/// One of the two queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    /// Of pages that have come for the first time, or were long away.
    Probation,
    /// Of pages that were wanted back soon.
    Working,
}

const NONE: u32 = u32::MAX;

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

/// Both queues. Each page is in one of them or in none.
pub struct Lists {
    links: Vec<Links>,
    /// 0: in none, else the queue's number and 1.
    queue_of: Vec<u8>,
    ends: [Ends; 2],
}

impl Lists {
    /// Empty ones, for `pages` pages.
    pub fn new(pages: u32) -> Self {
        Self {
            links: vec![
                Links {
                    newer: NONE,
                    older: NONE
                };
                pages as usize
            ],
            queue_of: vec![0; pages as usize],
            ends: [Ends {
                newest: NONE,
                oldest: NONE,
                len: 0,
            }; 2],
        }
    }

    /// Makes room for more pages, which are in none.
    pub fn grow(&mut self, pages: u32) {
        self.links.resize(
            pages as usize,
            Links {
                newer: NONE,
                older: NONE,
            },
        );
        self.queue_of.resize(pages as usize, 0);
    }

    /// How many pages a queue has.
    pub fn len(&self, queue: Queue) -> u32 {
        self.ends[queue as usize].len
    }

    /// Puts `page` at the young end of `queue`.
    ///
    /// # Panics
    /// It is in one already.
    pub fn push(&mut self, queue: Queue, page: PageIndex) {
        let index = page.get();
        assert_eq!(self.queue_of[page.as_usize()], 0, "{page:?} is in a queue");
        let ends = &mut self.ends[queue as usize];
        self.links[page.as_usize()] = Links {
            newer: NONE,
            older: ends.newest,
        };
        match ends.newest {
            NONE => ends.oldest = index,
            newest => self.links[newest as usize].newer = index,
        }
        ends.newest = index;
        ends.len += 1;
        self.queue_of[page.as_usize()] = queue as u8 + 1;
    }

    /// Takes `page` out, if it is in one.
    pub fn remove(&mut self, page: PageIndex) {
        let queue = match self.queue_of[page.as_usize()].checked_sub(1) {
            None => return,
            Some(number) => number as usize,
        };
        let Links { newer, older } = self.links[page.as_usize()];
        let ends = &mut self.ends[queue];
        match newer {
            NONE => ends.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        match older {
            NONE => ends.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        ends.len -= 1;
        self.queue_of[page.as_usize()] = 0;
    }

    fn oldest(&self, queue: Queue) -> Option<PageIndex> {
        let oldest = self.ends[queue as usize].oldest;
        (oldest != NONE).then(|| PageIndex::new(oldest))
    }

    /// The page to go next; it is in no queue then. While probation has less than a fourth of all pages, the oldest of
    /// the working ones go on probation first: so each of them has a time there in which a write can save it.
    pub fn pop(&mut self) -> Option<PageIndex> {
        let all = self.len(Queue::Probation) + self.len(Queue::Working);
        // Two for one: probation grows to its share in a few steps, whatever was asked before.
        for _ in 0..2 {
            if self.len(Queue::Probation) >= all / 4 {
                break;
            }
            let Some(page) = self.oldest(Queue::Working) else { break };
            self.remove(page);
            self.push(Queue::Probation, page);
        }
        let page = self.oldest(Queue::Probation).or_else(|| self.oldest(Queue::Working))?;
        self.remove(page);
        Some(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pages_leave_in_the_order_in_which_they_came() {
        let mut lists = Lists::new(10);
        for index in [3, 1, 7] {
            lists.push(Queue::Probation, PageIndex::new(index));
        }
        lists.remove(PageIndex::new(1));
        assert_eq!(lists.pop(), Some(PageIndex::new(3)));
        assert_eq!(lists.pop(), Some(PageIndex::new(7)));
        assert_eq!(lists.pop(), None);
    }

    #[test]
    fn a_scan_leaves_the_working_pages_alone() {
        let mut lists = Lists::new(1000);
        for index in 0..100 {
            lists.push(Queue::Working, PageIndex::new(index));
        }
        for index in 100..400 {
            lists.push(Queue::Probation, PageIndex::new(index));
        }
        for index in 400..1000 {
            let gone = lists.pop().unwrap();
            assert!(gone.get() >= 100);
            lists.push(Queue::Probation, PageIndex::new(index));
        }
    }

    proptest! {
        #[test]
        fn no_page_is_lost_or_doubled(steps in proptest::collection::vec((0u8..4, 0u32..50), 0..400)) {
            let mut lists = Lists::new(50);
            let mut inside = std::collections::BTreeSet::new();
            for (what, index) in steps {
                let page = PageIndex::new(index);
                match what {
                    0 | 1 if !inside.contains(&page) => {
                        lists.push([Queue::Probation, Queue::Working][usize::from(what)], page);
                        inside.insert(page);
                    }
                    2 => {
                        lists.remove(page);
                        inside.remove(&page);
                    }
                    _ => {
                        let any = !inside.is_empty();
                        prop_assert_eq!(lists.pop().map(|page| inside.remove(&page)), any.then_some(true));
                    }
                }
                prop_assert_eq!((lists.len(Queue::Probation) + lists.len(Queue::Working)) as usize, inside.len());
            }
        }
    }
}
