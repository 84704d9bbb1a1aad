//! One seed: a process whose memory a pager manages. The pager is killed, and a successor continues, until in the end
//! all memory is read.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use larder_block::backend::simulated::SeededRng;
use larder_memory::entry::Tier;
use larder_memory::pager::{Pager, PagerOptions};
use larder_memory::segment_log::SEGMENT_BYTES;
use larder_memory::shared::SharedMemory;
use larder_memory::state::{PagerState, Region};
use larder_memory::store::SegmentStore;
use larder_memory::units::{PAGE_BYTES, PageIndex, PageRun};
use larder_memory::worker::WorkerState;

use super::super::seed::Summary;
use super::guest::{Files, Guest, Helper, present};
use super::process::Process;
use super::shape::{CAPACITY, Shape, Variant};
use super::store::{Disk, StoreMedium, stored_in};
use super::world::{KILL_TRIGGERS, Killed, World, frozen_clock, set_current, with_current};

/// Start time of the process, as recorded in its state.
const STARTED: u64 = 7;

/// Maximum number of successive steps without the clock moving, after which the pager counts as restless.
const STEPS_WITHOUT_TIME_MAX: u32 = 30_000;
/// Number and length of the time steps for the pager to come to rest, in sum longer than any of its retry delays.
const IDLE_STEPS_MAX: u32 = 150;
const IDLE_STEP: Duration = Duration::from_millis(200);

/// A run of one seed.
pub(crate) struct Run {
    world: Rc<World>,
    media: Vec<Rc<RefCell<StoreMedium>>>,
    compressed: Option<Arc<SharedMemory>>,
    state: Option<Arc<PagerState>>,
    options: PagerOptions,
    is_detaching: bool,
    summary: Summary,
}

type Outcome = Result<(), String>;

/// Way in which a life ended.
enum End {
    Killed,
    LetGo,
}

impl Drop for Run {
    fn drop(&mut self) {
        // Breaks the reference cycle of pager and world.
        self.drop_pager();
        set_current(None);
    }
}

impl Run {
    /// Creates the run of `seed`; events are logged if `is_logged` is set.
    pub(crate) fn new(variant: Variant, seed: u64, is_logged: bool) -> Self {
        let mut random = SeededRng::new(seed);
        let shape = Shape::new(variant, &mut random);
        let media = shape.disks.iter().map(|(tier, segments)| StoreMedium::new(*tier, *segments));
        let options = PagerOptions {
            limit_bytes: 0,
            compressed_bytes: 0,
            quarantine: shape.quarantine,
            priority_thread: shape.has_first_thread.then_some(100),
            prefetch: shape.prefetch,
            guest_threads: shape.threads,
        };
        Self {
            media: media.collect(),
            options,
            world: World::new(shape, random, is_logged),
            compressed: None,
            state: None,
            is_detaching: false,
            summary: Summary::default(),
        }
    }

    /// Returns the log.
    pub(crate) fn log(&self) -> String {
        self.world.logged()
    }

    /// Runs the seed.
    ///
    /// # Errors
    /// The violated invariant.
    pub(crate) fn run(&mut self) -> Result<Summary, String> {
        set_current(Some(&self.world));
        let world = Rc::clone(&self.world);
        world.log(|| format!("{:?}", world.shape));
        let pages = world.shape.regions.clone();
        pages.into_iter().for_each(|pages| self.map(pages));
        Process::fill(&world);
        for _ in 0..world.between(0, 300) {
            Process::step(&world);
        }
        let lives = world.shape.lives;
        for life in 1..=lives {
            world.log(|| format!("--- life {life}"));
            world.kill_in(0);
            if life < lives {
                self.plan_kill();
            }
            let end = catch_unwind(AssertUnwindSafe(|| self.live(life == lives)));
            let end = match end {
                Ok(end) => end?,
                Err(panic) if panic.is::<Killed>() => End::Killed,
                Err(panic) => {
                    self.drop_pager();
                    resume_unwind(panic)
                }
            };
            world.kill_in(0);
            self.check_violation()?;
            match end {
                End::Killed => self.killed(),
                End::LetGo => {
                    let lost = self.state.as_ref().map_or(0, |state| state.lost_pages());
                    self.let_go()?;
                    // A process with lost pages cannot be managed again (`larder_memory::attach`).
                    if lost > 0 {
                        break;
                    }
                }
            }
            for _ in 0..world.between(0, 20) {
                Process::step(&world);
            }
            self.check_violation()?;
        }
        self.drop_pager();
        self.summary.requests = world.process.borrow().accesses;
        self.summary.virtual_time = world.now();
        Ok(self.summary)
    }

    /// Plans a kill in the middle of a step: at a random call, or at a moment where much can be lost.
    fn plan_kill(&self) {
        let world = &self.world;
        match world.below(10) {
            0..3 => {
                let limit_max = world.pick(&[20, 200, 2000, 10_000]);
                world.kill_in(world.between(1, limit_max));
            }
            3..8 => {
                let (moment, count) = (world.pick(&KILL_TRIGGERS), world.between(1, 40));
                world.kill_after(moment, count, world.between(1, 12));
            }
            _ => {}
        }
    }

    fn check_violation(&self) -> Outcome {
        self.world.broken().map_or(Ok(()), Err)
    }

    fn map(&self, pages: u32) {
        let region = self.world.kernel.borrow_mut().map(pages);
        self.world.log(|| format!("process maps {region:?}"));
        self.world.process.borrow_mut().oracle.grow(pages);
    }

    fn drop_pager(&mut self) {
        if let Some(pager) = self.world.pager.take() {
            let statistics = pager.stats();
            self.summary.pages_out += statistics.evicted;
            self.summary.pages_lost += statistics.lost;
        }
        self.world.hands.take();
        self.world.jobs.take();
        self.world.done.take();
        self.is_detaching = false;
    }

    fn killed(&mut self) {
        self.world.log(|| "--- the pager has exited".to_owned());
        self.summary.stops += 1;
        self.world.set_interleave(0);
        self.drop_pager();
        for medium in &self.media {
            Disk::forget(&self.world, medium);
        }
    }

    /// Ends the management of the process after a detach.
    fn let_go(&mut self) -> Outcome {
        self.world.log(|| "--- the pager has detached".to_owned());
        self.world.set_interleave(0);
        self.drop_pager();
        self.state = None;
        self.compressed = None;
        self.world.memory.take();
        let now = self.world.now();
        self.world.process.borrow_mut().oracle.let_go(now);
        self.world.kernel.borrow_mut().unregister_all();
        for medium in &self.media {
            Disk::forget(&self.world, medium);
        }
        self.read_all()
    }

    fn begin(&mut self) -> Outcome {
        let world = Rc::clone(&self.world);
        let failed = |error: std::io::Error| format!("the simulator failed: {error}");
        let mut state = match self.state.take() {
            Some(state) => {
                let memory = SharedMemory::open(std::os::fd::AsFd::as_fd(state.memory())).map_err(failed)?;
                PagerState::open(memory, STARTED).map_err(|error| error.to_string())?
            }
            None => PagerState::create(CAPACITY, STARTED).map_err(failed)?,
        };
        state.set_observer(|| {
            with_current(|world| world.point());
        });
        let state = Arc::new(state);
        self.state = Some(Arc::clone(&state));
        let compressed = match &self.compressed {
            Some(compressed) => Arc::clone(compressed),
            None => {
                let bytes = CAPACITY as usize * PAGE_BYTES as usize + SEGMENT_BYTES;
                Arc::new(SharedMemory::create(c"larder-compressed", bytes).map_err(failed)?)
            }
        };
        self.compressed = Some(Arc::clone(&compressed));
        *world.memory.borrow_mut() = Some((Arc::clone(&state), Arc::clone(&compressed)));
        world.set_interleave(world.shape.meanwhile_per_mille);
        self.set_limits();
        let known = state.regions();
        for region in &known {
            let is_mapped = world.kernel.borrow().area(region.first).is_mapped;
            if is_mapped {
                world.kernel.borrow_mut().register(region.first);
            } else if !region.is_unmapped() {
                state.mark_unmapped(region.first);
                world.kernel.borrow_mut().forget(region.first);
            }
            world.call();
        }
        let mut present_runs = Vec::new();
        for region in state.regions().iter().filter(|region| !region.is_unmapped()) {
            world.call();
            let run = PageRun { first: region.first, count: region.pages };
            present(&world, run, &mut |run| present_runs.push(run));
        }
        world.call();
        let worker_state = WorkerState::new(Arc::new(Files), Arc::clone(&state), Arc::clone(&compressed));
        *world.hands.borrow_mut() = Some(worker_state.with_clock(frozen_clock));
        let stores = self.media.iter().map(|medium| {
            let tier: Tier = medium.borrow().tier();
            (tier, Box::new(Disk::new(&world, medium)) as Box<dyn SegmentStore>)
        });
        let pager = Pager::new(
            Guest(Rc::clone(&world)),
            Helper(Rc::clone(&world)),
            state,
            compressed,
            stores.collect(),
            &present_runs,
            self.options.clone(),
        );
        *world.pager.borrow_mut() = Some(pager);
        self.add_regions()
    }

    /// Adds the process's regions that the state does not know.
    fn add_regions(&self) -> Outcome {
        let world = &self.world;
        let Some(state) = &self.state else { return Ok(()) };
        let known = state.regions().len();
        let all: Vec<_> = world.kernel.borrow().areas.iter().map(|area| area.region).collect();
        for region in all.into_iter().skip(known) {
            state.add_region(&region).map_err(|error| error.to_string())?;
            world.call();
            let is_mapped = world.kernel.borrow().area(region.first).is_mapped;
            if !is_mapped {
                // Keeps the page numbers the same for all pagers.
                world.kernel.borrow_mut().forget(region.first);
                state.mark_unmapped(region.first);
                if let Some(pager) = &mut *world.pager.borrow_mut() {
                    pager.add_region(Region { address: 0, ..region }, &[]);
                }
                continue;
            }
            // The pager does not run between the registration and its knowledge of the region: both happen on its
            // thread.
            let mut pager = world.pager.borrow_mut();
            world.kernel.borrow_mut().register(region.first);
            let run = PageRun { first: region.first, count: region.pages };
            let mut there = Vec::new();
            present(world, run, &mut |run| there.push(run));
            world.call();
            if let Some(pager) = &mut *pager {
                pager.add_region(region, &there);
            }
        }
        Ok(())
    }

    fn set_limits(&mut self) {
        const MIB: u64 = 1 << 20;
        let world = &self.world;
        let most = if world.shape.disks.is_empty() { 7 } else { 20 } * MIB;
        self.options.limit_bytes = match world.below(4) {
            0 => world.between(0, MIB),
            1 => world.between(MIB, 4 * MIB),
            _ => world.between(MIB, most),
        };
        self.options.compressed_bytes = world.between(1, 6) * MIB;
        world.log(|| format!("limits: {:?}", self.options));
    }

    fn live(&mut self, is_last: bool) -> Result<End, String> {
        self.begin()?;
        let world = Rc::clone(&self.world);
        for _ in 0..world.between(20, world.shape.steps) {
            self.check_violation()?;
            if let Some(end) = self.step()? {
                return Ok(end);
            }
        }
        if !is_last && world.chance(700) {
            return Ok(End::Killed);
        }
        self.come_to_rest()?;
        self.read_all()?;
        if !is_last {
            return Ok(End::Killed);
        }
        self.come_to_rest()?;
        self.detach()
    }

    fn step(&mut self) -> Result<Option<End>, String> {
        let world = Rc::clone(&self.world);
        match world.below(100) {
            0..58 => Process::step(&world),
            58..76 => return Ok(self.turn()),
            76..86 => world.work(),
            86..93 => {
                if !self.media.is_empty() {
                    Disk::complete_one(&world, &self.media[world.below(self.media.len() as u64) as usize]);
                }
            }
            93..96 => world.pass(Duration::from_micros(world.between(1, 20_000))),
            96 => self.seldom()?,
            _ => self.inject_disturbance(),
        }
        Ok(None)
    }

    /// Lets the pager run, and page memory in if it is detaching.
    fn turn(&mut self) -> Option<End> {
        let world = &self.world;
        if self.is_detaching && world.chance(100) {
            // The pager waits for reports of holes.
            world.pass(IDLE_STEP);
        }
        world.turn();
        if self.is_detaching
            && let Some(pager) = &mut *world.pager.borrow_mut()
            && pager.page_in_step(world.between(1, 128) as u32)
        {
            return Some(End::LetGo);
        }
        None
    }

    fn seldom(&mut self) -> Outcome {
        let world = Rc::clone(&self.world);
        match world.below(12) {
            0..4 => {
                self.set_limits();
                if let Some(pager) = &mut *world.pager.borrow_mut() {
                    pager.set_limit(self.options.limit_bytes, self.options.compressed_bytes);
                }
            }
            4 if world.kernel.borrow().areas.len() < 5 => {
                self.map(world.between(1, 64) as u32);
                for _ in 0..world.between(0, 5) {
                    Process::step(&world);
                }
                self.add_regions()?;
            }
            5 if world.chance(300) => self.is_detaching = self.begin_detach(),
            6 if self.is_detaching => {
                if let Some(pager) = &mut *world.pager.borrow_mut() {
                    pager.cancel_detach();
                }
                self.is_detaching = false;
            }
            7 if world.shape.write_failures_per_mille > 0 && world.chance(100) => {
                if let Some(medium) = self.media.first() {
                    world.log(|| "all further writes to a disk fail".to_owned());
                    medium.borrow_mut().is_dead = true;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn begin_detach(&self) -> bool {
        self.world.log(|| "detach".to_owned());
        if let Some(pager) = &mut *self.world.pager.borrow_mut() {
            pager.begin_detach();
        }
        true
    }

    fn inject_disturbance(&self) {
        let world = &self.world;
        if world.chance(300) {
            let page = PageIndex::new(world.below(u64::from(world.kernel.borrow().pages())) as u32);
            world.kernel.borrow_mut().reclaim(page);
        }
        if world.chance(world.shape.shortage_per_mille * 3) {
            let is_short = world.kernel.borrow().is_short;
            world.kernel.borrow_mut().is_short = !is_short;
        }
        if world.chance(world.shape.damage_per_mille * 3) {
            self.damage();
        }
    }

    /// Flips a bit of a page's stored copy.
    fn damage(&self) {
        let world = &self.world;
        let tier = world.pick(&[Tier::Ram, Tier::Ssd, Tier::Slow]);
        let stored = stored_in(world, tier);
        if stored.is_empty() {
            return;
        }
        let (page, at, len) = stored[world.below(stored.len() as u64) as usize];
        let (at, bit) = (at + world.below(len), world.below(8) as u8);
        let medium = self.media.iter().find(|medium| medium.borrow().tier() == tier);
        let was_damaged = match (medium, &self.compressed) {
            (Some(medium), _) => medium.borrow_mut().flip_bit(at, bit),
            (None, Some(compressed)) => {
                let shift = at % 8 * 8 + u64::from(bit);
                let word = compressed.word((at - at % 8) as usize);
                word.fetch_xor(1 << shift, std::sync::atomic::Ordering::Relaxed);
                true
            }
            (None, None) => false,
        };
        if was_damaged {
            world.log(|| format!("bit {bit} of byte {at} of {tier:?} flips, in the copy of {page:?}"));
            world.process.borrow_mut().oracle.damaged(page);
        }
    }

    /// Runs everything until nothing more can be done at the present time.
    fn run_until_blocked(&mut self) -> Outcome {
        let world = Rc::clone(&self.world);
        for _ in 0..STEPS_WITHOUT_TIME_MAX {
            Process::step_all_threads(&world);
            let was_busy = world.is_worker_busy();
            world.work();
            for medium in &self.media {
                Disk::complete_one(&world, medium);
            }
            let worked = world.run_pager_once();
            self.check_violation()?;
            if !worked
                && !was_busy
                && !world.is_worker_busy()
                && self.media.iter().all(|medium| medium.borrow().is_idle())
            {
                Process::step_all_threads(&world);
                if !world.kernel.borrow().has_unread_messages() {
                    return Ok(());
                }
            }
        }
        Err(format!("the pager does not become idle; {}", world.process.borrow().waiting()))
    }

    /// Stops new operations, damage and memory shortage, and waits until no operation is in progress. Disks and the
    /// worker may still fail.
    fn come_to_rest(&mut self) -> Outcome {
        let world = Rc::clone(&self.world);
        world.log(|| "waiting for the pager to become idle".to_owned());
        world.process.borrow_mut().is_quiet = true;
        world.kernel.borrow_mut().is_short = false;
        let mut idle = 0;
        for _ in 0..IDLE_STEPS_MAX {
            self.run_until_blocked()?;
            let is_due = {
                let pager = world.pager.borrow();
                pager.as_ref().is_some_and(|pager| pager.next_turn().is_some())
            };
            idle = if is_due || world.process.borrow().is_busy() { 0 } else { idle + 1 };
            if idle > 1 && self.is_within_limit() || idle > 80 {
                break;
            }
            world.pass(IDLE_STEP);
        }
        if world.process.borrow().is_busy() {
            return Err(format!("an operation never completes: {}", world.process.borrow().waiting()));
        }
        world.process.borrow_mut().oracle.settled();
        self.check()?;
        world.process.borrow_mut().is_quiet = false;
        Ok(())
    }

    fn is_within_limit(&self) -> bool {
        let pager = self.world.pager.borrow();
        let Some(pager) = &*pager else { return true };
        pager.used_bytes() <= pager.limit_bytes()
            || pager.stuck().is_some()
            || pager.resident_pages() == 0
            || self.is_detaching
    }

    /// Checks the counts and the limit while nothing is in progress.
    fn check(&self) -> Outcome {
        let world = &self.world;
        let pager = world.pager.borrow();
        let Some(pager) = &*pager else { return Ok(()) };
        pager.check()?;
        let present = world.kernel.borrow().present_pages();
        // Pages whose eviction failed are counted only when they are next accessed.
        if world.shape.worker_failures_per_mille == 0 && present != pager.resident_pages() {
            return Err(format!("{present} pages are in memory, but the pager counts {}", pager.resident_pages()));
        }
        if world.shape.worker_failures_per_mille == 0 && !self.is_within_limit() {
            return Err(format!(
                "{} bytes are used with a limit of {}, {} pages are in memory, and nothing prevents their eviction; {:?}",
                pager.used_bytes(),
                pager.limit_bytes(),
                pager.resident_pages(),
                pager.stored_pages(),
            ));
        }
        world.log(|| format!("{:?}, {present} pages in memory, stuck: {:?}", pager.stored_pages(), pager.stuck()));
        Ok(())
    }

    /// Reads all memory.
    fn read_all(&mut self) -> Outcome {
        let world = Rc::clone(&self.world);
        world.log(|| "reading all memory".to_owned());
        let was_quiet = std::mem::replace(&mut world.process.borrow_mut().is_quiet, true);
        // First completes the operations in progress.
        for _ in 0..IDLE_STEPS_MAX {
            if !world.process.borrow().is_busy() {
                break;
            }
            self.run_until_blocked()?;
            world.pass(IDLE_STEP);
        }
        if world.process.borrow().is_busy() {
            return Err(format!("an operation never completes: {}", world.process.borrow().waiting()));
        }
        let pages = world.kernel.borrow().pages();
        for page in (0..pages).map(PageIndex::new) {
            if !world.kernel.borrow().area(page).is_mapped {
                continue;
            }
            Process::read_by_first_thread(&world, page);
            Process::step_all_threads(&world);
            let mut rounds = 0;
            while world.process.borrow().is_busy() {
                self.run_until_blocked()?;
                if world.process.borrow().is_busy() {
                    world.pass(IDLE_STEP);
                }
                rounds += 1;
                if rounds > IDLE_STEPS_MAX {
                    return Err(format!("an operation never completes: {}", world.process.borrow().waiting()));
                }
            }
            self.check_violation()?;
        }
        world.process.borrow_mut().is_quiet = was_quiet;
        Ok(())
    }

    /// Detaches the pager at the end.
    fn detach(&mut self) -> Result<End, String> {
        let world = Rc::clone(&self.world);
        world.process.borrow_mut().is_quiet = true;
        if !self.is_detaching {
            self.is_detaching = self.begin_detach();
        }
        for _ in 0..5000 {
            Process::step_all_threads(&world);
            world.work();
            self.media.iter().for_each(|medium| Disk::complete_one(&world, medium));
            if let Some(end) = self.turn() {
                return Ok(end);
            }
            if world.chance(100) {
                world.pass(IDLE_STEP);
            }
            self.check_violation()?;
        }
        Err("the stored pages are not paged in".to_owned())
    }
}
