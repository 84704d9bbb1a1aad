//! The process: threads that read and write pages, walk through memory, discard pages, unmap memory, and start device
//! I/O.

use std::rc::Rc;
use std::time::Duration;

use larder_memory::units::{PageIndex, PageRun};

use super::content::{self, Stamp};
use super::kernel::{Access, Frame};
use super::oracle::Oracle;
use super::shape::Shape;
use super::world::World;

/// Maximum number of pages discarded together.
const DISCARD_PAGES_MAX: u64 = 24;
/// Maximum duration of device I/O, which must end before the quarantine of a page does.
const DEVICE_IO_TIME_MAX: Duration = Duration::from_millis(40);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Read,
    Write(Stamp),
    /// Starts device I/O, which writes this content.
    Device(Stamp),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Punched out of the file; the pager is not notified yet.
    Punched,
    /// The notification is sent, and not received yet.
    Said,
    /// The notification was received.
    Heard,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Doing {
    Nothing,
    Access(PageIndex, What),
    GivingUp(PageRun, Stage),
    Unmapping,
}

/// Accesses to successive pages.
#[derive(Clone, Copy)]
struct Walk {
    next: PageIndex,
    left: u64,
    up: bool,
    write: bool,
}

struct Thread {
    doing: Doing,
    walk: Option<Walk>,
}

struct DeviceIo {
    page: PageIndex,
    frame: Frame,
    stamp: Stamp,
    ends: Duration,
}

pub(super) struct Process {
    threads: Vec<Thread>,
    pub(super) oracle: Oracle,
    io: Vec<DeviceIo>,
    /// True if no new operation may begin.
    pub(super) is_quiet: bool,
    pub(super) accesses: u64,
}

impl Process {
    pub(super) fn new(shape: &Shape) -> Self {
        let threads = (0..shape.threads).map(|_| Thread { doing: Doing::Nothing, walk: None });
        Self { threads: threads.collect(), oracle: Oracle::default(), io: Vec::new(), is_quiet: false, accesses: 0 }
    }

    /// Returns whether an operation is in progress.
    pub(super) fn is_busy(&self) -> bool {
        !self.io.is_empty() || self.threads.iter().any(|thread| thread.doing != Doing::Nothing)
    }

    /// Describes the operations in progress.
    pub(super) fn waiting(&self) -> String {
        let busy = self.threads.iter().enumerate();
        let busy = busy.filter(|(_, thread)| thread.doing != Doing::Nothing);
        let busy: Vec<String> = busy.map(|(index, thread)| format!("thread {index}: {:?}", thread.doing)).collect();
        busy.join(", ")
    }

    /// Writes to many pages, before there is a pager.
    pub(super) fn fill(world: &Rc<World>) {
        let pages = world.kernel.borrow().pages();
        for page in (0..pages).map(PageIndex::new) {
            if world.chance(world.shape.filled_per_mille) {
                access(world, 0, page, What::Write(stamp(world)));
            }
        }
    }

    /// Lets a random thread make a step.
    pub(super) fn step(world: &Rc<World>) {
        let threads = world.shape.threads as u64;
        Self::step_thread(world, world.below(threads) as usize);
    }

    /// Lets each thread make a step.
    pub(super) fn step_all_threads(world: &Rc<World>) {
        (0..world.shape.threads).for_each(|thread| Self::step_thread(world, thread));
    }

    fn step_thread(world: &Rc<World>, index: usize) {
        let doing = world.process.borrow().threads[index].doing;
        let next = match doing {
            Doing::Nothing if world.process.borrow().is_quiet => return,
            Doing::Nothing => begin(world, index),
            Doing::Access(..) if world.kernel.borrow().is_waiting(index) => return,
            Doing::Access(page, what) => access(world, index, page, what),
            Doing::GivingUp(run, stage) => continue_discard(world, index, run, stage),
            Doing::Unmapping => match world.kernel.borrow_mut().take_event_read(index) {
                true => Doing::Nothing,
                false => doing,
            },
        };
        world.process.borrow_mut().threads[index].doing = next;
    }

    /// Lets the first thread access `page`.
    pub(super) fn read_by_first_thread(world: &Rc<World>, page: PageIndex) {
        world.process.borrow_mut().threads[0].doing = Doing::Access(page, What::Read);
    }

    /// Completes device I/O that ends by `until`.
    pub(super) fn complete_device_io(&mut self, world: &World, until: Duration) {
        self.io.retain(|io| {
            if io.ends > until {
                return true;
            }
            world.log(|| format!("device has written {} to {:?}", io.stamp, io.page));
            *io.frame.borrow_mut() = content::words(io.stamp);
            self.oracle.end_device_write(io.page);
            false
        });
    }
}

fn stamp(world: &World) -> Stamp {
    let kind = world.pick(&world.shape.kinds);
    world.process.borrow_mut().oracle.stamp(kind)
}

/// Returns a random page that can be accessed.
fn random_page(world: &World) -> PageIndex {
    let mapped: Vec<_> = {
        let kernel = world.kernel.borrow();
        let areas = kernel.areas.iter().filter(|area| area.is_mapped);
        areas.map(|area| area.region).collect()
    };
    let region = world.pick(&mapped);
    let pages = u64::from(region.pages);
    // A sixth of each region is accessed more often than the rest.
    let offset = match world.chance(500) {
        true => world.below(pages),
        false => world.below(pages.div_ceil(6)),
    };
    region.first.plus(offset as u32)
}

fn begin(world: &Rc<World>, index: usize) -> Doing {
    let walk = world.process.borrow_mut().threads[index].walk.take();
    if let Some(walk) = walk {
        return continue_walk(world, index, walk);
    }
    if world.chance(world.shape.give_ups_per_mille) {
        return begin_giving_up(world);
    }
    if world.chance(1) {
        return begin_unmap(world, index);
    }
    let page = random_page(world);
    if world.chance(40) {
        let walk = Walk { next: page, left: world.between(4, 64), up: world.chance(700), write: world.chance(200) };
        return continue_walk(world, index, walk);
    }
    let is_quiet = world.process.borrow().oracle.is_quiet(page);
    if !world.shape.quarantine.is_zero() && is_quiet && world.chance(50) {
        let stamp = stamp(world);
        return access(world, index, page, What::Device(stamp));
    }
    let what = match world.chance(world.shape.writes_per_mille) {
        true => What::Write(stamp(world)),
        false => What::Read,
    };
    access(world, index, page, what)
}

fn continue_walk(world: &Rc<World>, index: usize, walk: Walk) -> Doing {
    let page = walk.next;
    let region = {
        let kernel = world.kernel.borrow();
        let area = kernel.area(page);
        if !area.is_mapped {
            return Doing::Nothing;
        }
        area.region
    };
    let next = match walk.up {
        true => Some(page.plus(1)),
        false => page.get().checked_sub(1).map(PageIndex::new),
    };
    if let Some(next) = next.filter(|next| region.contains(*next) && walk.left > 1) {
        let left = walk.left - 1;
        world.process.borrow_mut().threads[index].walk = Some(Walk { next, left, ..walk });
    }
    let what = match walk.write {
        true => What::Write(stamp(world)),
        false => What::Read,
    };
    access(world, index, page, what)
}

/// Accesses a page, or waits for it.
fn access(world: &Rc<World>, index: usize, page: PageIndex, what: What) -> Doing {
    // A driver does not access memory that its device writes to.
    if world.process.borrow().oracle.has_device_write(page) {
        return Doing::Access(page, what);
    }
    let is_quiet = world.process.borrow().oracle.is_quiet(page);
    if !world.kernel.borrow().area(page).is_mapped || matches!(what, What::Device(_)) && !is_quiet {
        return Doing::Nothing;
    }
    let result = world.kernel.borrow_mut().access(index, page, what != What::Read);
    let mut process = world.process.borrow_mut();
    let process = &mut *process;
    match result {
        Access::Waits => {
            world.log(|| format!("thread {index}: {what:?} of {page:?} waits"));
            return Doing::Access(page, what);
        }
        Access::MemoryError => {
            world.log(|| format!("thread {index}: {what:?} of {page:?}: memory error"));
            if let Err(reason) = process.oracle.memory_error(page) {
                world.fail(reason);
            }
        }
        Access::Done(frame) => {
            process.accesses += 1;
            match what {
                What::Read => match process.oracle.read(page, &frame.borrow()) {
                    Ok(write_id) => world.log(|| format!("thread {index}: reads {write_id} of {page:?}")),
                    Err(reason) => world.fail(reason),
                },
                What::Write(write_id) => {
                    world.log(|| format!("thread {index}: writes {write_id} to {page:?}"));
                    *frame.borrow_mut() = content::words(write_id);
                    process.oracle.written(page, write_id);
                }
                What::Device(write_id) => {
                    let ends =
                        world.now() + Duration::from_micros(world.between(1, DEVICE_IO_TIME_MAX.as_micros() as u64));
                    world.log(|| format!("thread {index}: a device writes {write_id} to {page:?} until {ends:?}"));
                    process.oracle.begin_device_write(page, write_id);
                    process.io.push(DeviceIo { page, frame, stamp: write_id, ends });
                }
            }
        }
    }
    Doing::Nothing
}

fn begin_giving_up(world: &World) -> Doing {
    // Half of the time, discards a page that a thread waits for.
    let waited_page = world.kernel.borrow().random_waited_page(|count| world.below(count));
    let first = match waited_page.filter(|_| world.chance(500)) {
        Some(waited_page) => waited_page,
        None => random_page(world),
    };
    let region = world.kernel.borrow().area(first).region;
    let pages_max = u64::from(region.pages - (first.get() - region.first.get()));
    let run = PageRun { first, count: world.between(1, DISCARD_PAGES_MAX.min(pages_max)) as u32 };
    let mut process = world.process.borrow_mut();
    if !run.pages().all(|page| process.oracle.is_quiet(page)) {
        return Doing::Nothing;
    }
    world.log(|| format!("process punches {run:?}"));
    for page in run.pages() {
        world.kernel.borrow_mut().punch(page);
        process.oracle.begin_discard(page, world.now());
    }
    Doing::GivingUp(run, Stage::Punched)
}

fn continue_discard(world: &World, index: usize, run: PageRun, stage: Stage) -> Doing {
    let mut kernel = world.kernel.borrow_mut();
    match stage {
        Stage::Punched => {
            let waits = kernel.begin_dontneed(index, run);
            world.log(|| format!("thread {index}: notifies the pager that {run:?} is discarded"));
            Doing::GivingUp(run, if waits { Stage::Said } else { Stage::Heard })
        }
        Stage::Said => match kernel.take_event_read(index) {
            true => Doing::GivingUp(run, Stage::Heard),
            false => Doing::GivingUp(run, stage),
        },
        Stage::Heard => {
            kernel.finish_dontneed(run, world.shape.drops_poison);
            let mut process = world.process.borrow_mut();
            run.pages().for_each(|page| process.oracle.end_discard(page));
            // Freed memory is often reused soon.
            if world.chance(500) {
                process.threads[index].walk =
                    Some(Walk { next: run.first, left: u64::from(run.count), up: true, write: true });
            }
            world.log(|| format!("thread {index}: has discarded {run:?}"));
            Doing::Nothing
        }
    }
}

/// Unmaps a region without operations in progress.
fn begin_unmap(world: &World, index: usize) -> Doing {
    let mut kernel = world.kernel.borrow_mut();
    let process = world.process.borrow();
    let mapped: Vec<usize> = (0..kernel.areas.len())
        .filter(|area| kernel.areas[*area].is_mapped && kernel.areas[*area].is_registered)
        .collect();
    if mapped.len() < 2 {
        return Doing::Nothing;
    }
    let area = world.pick(&mapped);
    let region = kernel.areas[area].region;
    let is_used = |thread: &Thread| match thread.doing {
        Doing::Access(page, _) => region.contains(page),
        Doing::GivingUp(run, _) => region.contains(run.first),
        Doing::Nothing | Doing::Unmapping => false,
    };
    if process.threads.iter().any(is_used)
        || process.io.iter().any(|io| region.contains(io.page))
        || kernel.waits_in(&region)
    {
        return Doing::Nothing;
    }
    world.log(|| format!("thread {index}: unmaps the region of {:?}", region.first));
    match kernel.unmap(index, area) {
        true => Doing::Unmapping,
        false => Doing::Nothing,
    }
}
