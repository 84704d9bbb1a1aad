//! The pager's interface to the simulated host.

use std::io;
use std::rc::Rc;
use std::task::Waker;

use larder_memory::guest::{Backing, GuestMemory};
use larder_memory::state::Region;
use larder_memory::units::{PAGE, PageIndex, PageRun, runs};
use larder_memory::userfaultfd::{FillResult, RawUffdMessage, UffdMessage};
use larder_memory::worker::{Job, Worker, WorkerResult};

use super::content::{PageWords, WORDS};
use super::world::{Moment, World, with_current};

fn to_page_words(bytes: &[u8]) -> PageWords {
    let (chunks, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|index| u64::from_ne_bytes(chunks[index]))
}

/// The memory.
pub(super) struct Guest(pub(super) Rc<World>);

impl Guest {
    /// Makes a call of the pager's. Before and after it, the pager may be killed.
    fn call<T>(&self, what: impl FnOnce(&World) -> T) -> T {
        self.0.call();
        let result = what(&self.0);
        self.0.point();
        result
    }
}

impl GuestMemory for Guest {
    fn receive(&self, buffer: &mut [RawUffdMessage]) -> io::Result<usize> {
        Ok(self.call(|world| {
            let count = world.kernel.borrow_mut().receive(buffer);
            for message in &buffer[..count] {
                if let Some(UffdMessage::Removed(_) | UffdMessage::Unmapped(_)) = message.decode() {
                    world.comes(Moment::ToldOfRemoval);
                }
                world.log(|| format!("pager receives {:x?}", message.decode()));
            }
            count
        }))
    }

    fn fill(&self, first: PageIndex, content: &[u8], protect: bool) -> (usize, FillResult) {
        self.call(|world| {
            // Large copies are sometimes cut short.
            world.comes(Moment::Filled);
            let pages = content.len() / PAGE;
            let pages_max =
                if pages > 1 && world.chance(100) { world.between(1, pages as u64) as usize } else { pages };
            for (index, page) in content.chunks(PAGE).take(pages_max).enumerate() {
                let at = first.plus(index as u32);
                let filled = world.kernel.borrow_mut().copy(at, to_page_words(page), protect);
                world.log(|| format!("pager fills {at:?}, protected: {protect}: {filled:?}"));
                if filled != FillResult::Done {
                    return if index > 0 { (index, FillResult::Done) } else { (0, filled) };
                }
            }
            (pages_max, FillResult::Done)
        })
    }

    fn fill_zero(&self, page: PageIndex) -> FillResult {
        self.call(|world| {
            let filled = world.kernel.borrow_mut().copy(page, [0; WORDS], false);
            world.log(|| format!("pager fills {page:?} with zeros: {filled:?}"));
            filled
        })
    }

    fn poison(&self, page: PageIndex) -> FillResult {
        self.call(|world| {
            let mut kernel = world.kernel.borrow_mut();
            kernel.protect(PageRun::one(page), false);
            let filled = kernel.poison(page);
            world.log(|| format!("pager poisons {page:?}: {filled:?}"));
            filled
        })
    }

    fn map(&self, page: PageIndex) {
        self.call(|world| {
            world.log(|| format!("pager maps {page:?}"));
            world.kernel.borrow_mut().resolve_minor(page);
        });
    }

    fn protect(&self, run: PageRun) -> io::Result<()> {
        self.call(|world| {
            // The call fails while mappings change.
            let done = world.kernel.borrow_mut().protect(run, true);
            world.log(|| format!("pager protects {run:?}: {done}"));
            done.then_some(()).ok_or_else(|| io::ErrorKind::WouldBlock.into())
        })
    }

    fn unprotect(&self, run: PageRun) -> io::Result<()> {
        self.call(|world| {
            let done = world.kernel.borrow_mut().protect(run, false);
            world.log(|| format!("pager unprotects {run:?}: {done}"));
            done.then_some(()).ok_or_else(|| io::ErrorKind::WouldBlock.into())
        })
    }

    fn wake(&self, run: PageRun) {
        self.call(|world| {
            world.log(|| format!("pager wakes {run:?}"));
            world.kernel.borrow_mut().wake(run);
        });
    }

    fn visit_resident(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        self.call(|world| present(world, run, found));
        Ok(())
    }

    fn read(&self, page: PageIndex, into: &mut [u8; PAGE]) -> io::Result<()> {
        self.call(|world| {
            let arguments = world.kernel.borrow().read(page);
            for (into, word) in into.chunks_mut(8).zip(arguments) {
                into.copy_from_slice(&word.to_ne_bytes());
            }
        });
        Ok(())
    }

    fn remove_pages(&self, run: PageRun) -> io::Result<()> {
        self.call(|world| {
            world.log(|| format!("pager punches out {run:?}"));
            punch(world, run);
        });
        Ok(())
    }

    fn drop_region(&self, region: &Region) {
        self.call(|world| {
            world.kernel.borrow_mut().forget(region.first);
        });
    }
}

/// Reports the pages of `run` that are in memory.
pub(super) fn present(world: &World, run: PageRun, found: &mut dyn FnMut(PageRun)) {
    let kernel = world.kernel.borrow();
    let present_pages = run.pages().filter(|page| !kernel.area(*page).is_forgotten && kernel.is_present(*page));
    let present_pages: Vec<PageIndex> = present_pages.collect();
    drop(kernel);
    runs(present_pages).for_each(found);
}

fn punch(world: &World, run: PageRun) {
    let mut kernel = world.kernel.borrow_mut();
    for page in run.pages() {
        if !kernel.area(page).is_forgotten {
            kernel.punch(page);
        }
    }
}

/// The memory's files, for the worker. They belong to the current thread's world.
pub(super) struct Files;

impl Backing for Files {
    fn read(&self, run: PageRun, into: &mut [u8]) -> io::Result<()> {
        with_current(|world| {
            world.call();
            if world.chance(world.shape.worker_failures_per_mille) {
                return Err(io::Error::other("simulated"));
            }
            for (page, into) in run.pages().zip(into.chunks_mut(PAGE)) {
                if !world.kernel.borrow().area(page).is_forgotten {
                    let arguments = world.kernel.borrow().read(page);
                    for (into, word) in into.chunks_mut(8).zip(arguments) {
                        into.copy_from_slice(&word.to_ne_bytes());
                    }
                }
                // The process runs between two pages.
                if world.chance(20) {
                    world.call();
                }
            }
            Ok(())
        })
        .unwrap_or(Ok(()))
    }

    fn punch(&self, run: PageRun) -> io::Result<()> {
        with_current(|world| {
            world.call();
            if world.chance(world.shape.worker_failures_per_mille) {
                return Err(io::Error::other("simulated"));
            }
            // The pages are punched one at a time, and the process runs meanwhile.
            for page in run.pages() {
                world.log(|| format!("worker punches out {page:?}"));
                punch(world, PageRun::one(page));
                if world.chance(50) {
                    world.call();
                }
            }
            Ok(())
        })
        .unwrap_or(Ok(()))
    }

    fn visit_resident(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        with_current(|world| present(world, run, found));
        Ok(())
    }
}

/// The worker's thread.
pub(super) struct Helper(pub(super) Rc<World>);

impl Worker for Helper {
    fn submit(&self, job: Job) {
        self.0.call();
        self.0.jobs.borrow_mut().push_back(job);
    }

    fn next_result(&self, _: Option<&Waker>) -> Option<WorkerResult> {
        self.0.point();
        let done = self.0.done.borrow_mut().pop_front();
        if done.is_some() {
            self.0.comes(Moment::ToldOfWork);
        }
        done
    }
}
