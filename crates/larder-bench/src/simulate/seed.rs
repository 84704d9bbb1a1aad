//! Runs one seed: a stack is opened, used, stopped, and opened again, until in the end all of it is read.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::simulated::{
    DeviceStop, FaultEffect, InjectedFault, LatencyDistribution, SeededRng, SimulatedDevice, SimulatedMedium,
};
use larder_block::{AlignedBuf, ByteLen, ByteOffset, Loop, LoopTime, Operation, ReadBuf};

use super::life::{Expectations, Life, Record, TICK};
use super::log::{Event, Log};
use super::oracle::{Oracle, sectors};
use super::size::SizeOracle;
use super::stack::{Disk, Opened, Stack};
use super::stamp::{self, SECTOR};
use super::worker::{REQUEST_MAX, RequestMix, Worker};

/// Duration of a disk's hang: longer than a cache waits, and so long that a layer that must wait does so only once.
const DISK_HANG_MIN: Duration = Duration::from_secs(17);
const DISK_HANG_MAX: Duration = Duration::from_secs(60);

/// Statistics of a seed without violations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// Requests sent.
    pub requests: u64,
    /// Number of stops of the stack, or kills of the pager.
    pub stops: u64,
    /// Pages of memory that were evicted.
    pub pages_out: u64,
    /// Evicted pages that could not be read back, because the stored copy was damaged.
    pub pages_lost: u64,
    /// Lives, without a seed's first one, in which a table of either kind of [`Stack::tables`] was moved.
    pub moves: [u64; 2],
    /// Time that has passed on the virtual clock.
    pub virtual_time: Duration,
}

/// A run of one seed, whose log is available even after a panic.
pub(super) struct Run<'a> {
    stack: &'a dyn Stack,
    random: SeededRng,
    shapes: Vec<Disk>,
    record: Rc<Record>,
    summary: Summary,
}

/// Description of a violated invariant.
pub(super) type Broken = String;

impl<'a> Run<'a> {
    /// Creates the run of `seed` on `stack`.
    pub(super) fn new(stack: &'a dyn Stack, seed: u64) -> Self {
        let mut random = SeededRng::new(seed);
        let shapes = stack.disks(&mut random.fork());
        let record = Rc::new(Record {
            oracle: RefCell::new(Oracle::new(0)),
            sizes: RefCell::new(SizeOracle::new(ByteLen::ZERO)),
            log: RefCell::new(Log::default()),
            next_number: Cell::new(1),
            key: random.next_u64(),
        });
        Self { stack, random, shapes, record, summary: Summary::default() }
    }

    /// Returns the log as text.
    pub(super) fn log(&self) -> String {
        match self.record.log.try_borrow() {
            Ok(log) => log.to_string(),
            Err(_) => String::new(),
        }
    }

    /// Runs the seed.
    ///
    /// # Errors
    /// The violated invariant.
    pub(super) fn run(&mut self) -> Result<Summary, Broken> {
        let mut media: Vec<SimulatedMedium> = self.shapes.iter().map(Disk::medium).collect();
        let lives = match self.stack.is_persistent() {
            true => self.random.between(1, 3) as u32,
            false => 1,
        };
        for life in 1..=lives {
            media = self.live(life, media)?;
        }
        if self.stack.is_persistent() {
            self.run_final_life(lives + 1, media)?;
        }
        self.summary.requests = self.record.log.borrow().requests();
        Ok(self.summary)
    }

    /// Runs one life. Returns the disks' content after it.
    fn live(&mut self, life: u32, media: Vec<SimulatedMedium>) -> Result<Vec<SimulatedMedium>, Broken> {
        let event_loop = simulated_loop()?;
        let tables = self.stack.tables(&media);
        let disks = self.open_disks(&event_loop, media);
        if life == 1 {
            let formatted = event_loop.block_on(self.stack.format(&event_loop, &disks));
            formatted.map_err(|error| format!("the stack cannot be formatted: {error}"))?;
        }
        let media_after = match self.open(&event_loop, life, &disks)? {
            Some(opened) => event_loop.block_on(self.work(&event_loop, life, opened, &disks))?,
            None => {
                let stop_kind = self.choose_stop();
                self.stop(event_loop.now(), &disks, stop_kind)
            }
        };
        self.stack.check(&media_after).map_err(|reason| format!("checking the disks after the stop: {reason}"))?;
        self.count_moves(&tables, &self.stack.tables(&media_after));
        self.summary.virtual_time += event_loop.now().since(LoopTime::default());
        drop(disks);
        drop_loop(event_loop)?;
        Ok(media_after)
    }

    fn count_moves(&mut self, before: &[[u64; 2]], after: &[[u64; 2]]) {
        let disks = before.iter().zip(after).filter(|(before, _)| **before != [0; 2]);
        for (before, after) in disks {
            for (kind, moves) in self.summary.moves.iter_mut().enumerate() {
                *moves += u64::from(before[kind] != after[kind]);
            }
        }
    }

    fn open_disks(&mut self, on: &Loop, media: Vec<SimulatedMedium>) -> Vec<Rc<SimulatedDevice>> {
        let asynchronous =
            LatencyDistribution { synchronous_per_mille: 0, slow_per_mille: 100, ..LatencyDistribution::VARIED };
        let varied = LatencyDistribution::VARIED;
        let latency =
            self.random.pick(&[LatencyDistribution::NONE, asynchronous, asynchronous, varied, varied, varied, varied]);
        let mut disks = Vec::new();
        for (shape, medium) in self.shapes.iter().zip(media) {
            let mut options = shape.options(self.random.next_u64());
            options.latency = latency;
            options.fast_zeroes = self.random.chance(800);
            disks.push(SimulatedDevice::open(on, medium, options));
        }
        disks
    }

    /// Opens the stack; `None` if it is stopped during the opening.
    fn open(&mut self, on: &Loop, life: u32, disks: &[Rc<SimulatedDevice>]) -> Result<Option<Opened>, Broken> {
        let opening = self.stack.open(on, disks, self.random.fork());
        let opened = match life > 1 && self.random.chance(100) {
            true => {
                let limit = self.random.duration(Duration::ZERO, Duration::from_millis(5));
                on.block_on(on.timeout(limit, opening))
            }
            false => Some(on.block_on(opening)),
        };
        let Some(opened) = opened.transpose().map_err(|error| format!("the stack cannot be opened: {error}"))? else {
            self.log_at(on.now(), Event::OpenCutShort { life });
            return Ok(None);
        };
        self.log_at(on.now(), Event::Opened { life });
        self.check_opened_size(life, &opened)?;
        Ok(Some(opened))
    }

    /// Checks the size of an opened stack.
    fn check_opened_size(&self, life: u32, opened: &Opened) -> Result<(), Broken> {
        let size = opened.device.geometry().size;
        let mut oracle = self.record.oracle.borrow_mut();
        let mut sizes = self.record.sizes.borrow_mut();
        if life == 1 {
            *oracle = Oracle::new(size.get() / SECTOR);
            *sizes = SizeOracle::new(size);
            return Ok(());
        }
        sizes.open(size)?;
        if !oracle.cut_off(size.get() / SECTOR) {
            return Err(format!("the disk has a size of only {size}, and lacks durable data past that"));
        }
        oracle.grow(size.get() / SECTOR);
        Ok(())
    }

    fn log_at(&self, at: LoopTime, event: Event) {
        self.record.log.borrow_mut().add(at, event);
    }

    /// Lets workers run until the moment of the stop, and stops.
    async fn work(
        &mut self,
        on: &Loop,
        number: u32,
        opened: Opened,
        disks: &[Rc<SimulatedDevice>],
    ) -> Result<Vec<SimulatedMedium>, Broken> {
        let size = opened.device.geometry().size;
        if number > 1 && self.random.chance(300) {
            self.verify(on, &opened).await?;
        }
        let requests = self.random.between(10, 300) as u32;
        // A quarter of the lives complete all their requests.
        let stop_at = self.random.below(u64::from(requests) * 4 / 3) as u32;
        let stop_at = if self.stack.is_persistent() && stop_at < requests { stop_at } else { 0 };
        let workers = self.random.between(1, 8) as usize;
        let failing = &disks[..self.stack.failing(disks.len())];
        let life = Rc::new(Life {
            on: on.downgrade(),
            opened,
            disks: disks.to_vec(),
            record: Rc::clone(&self.record),
            expectations: Expectations {
                resizable: self.stack.is_resizable(),
                growable: self.stack.is_growable(),
                fails_only_with_a_disk: self.stack.fails_only_with_a_disk(),
                room_is_short: self.random.chance(200),
                failing: failing.len(),
            },
            requests_left: Cell::new(requests),
            stop_at,
            waits: RefCell::new(vec![None; workers]),
            running: Cell::new(workers),
            broken: RefCell::new(None),
            waker: RefCell::new(None),
            sizes: RefCell::new(vec![(self.record.oracle.borrow().now(), size)]),
            failed: Cell::new(0),
        });
        let faults = self.random.chance(500);
        let mix = RequestMix::new(&mut self.random, faults, life.expectations.growable);
        if faults {
            let per_mille = self.random.pick(&[0, 5, 30, 100]);
            failing.iter().for_each(|disk| disk.set_failures(per_mille));
            self.log_at(on.now(), Event::Failures { per_mille });
            self.set_hang(on.now(), disks);
        }
        if life.expectations.room_is_short {
            let room = ByteLen::kib(self.random.pick(&[0, 16, 64, 256, 1024]));
            failing.iter().for_each(|disk| disk.limit_free_space(Some(room)));
            self.log_at(on.now(), Event::Room { room });
        }
        for index in 0..workers {
            let worker = Worker::new(Rc::clone(&life), index, self.random.fork(), mix);
            on.spawn(worker.run());
        }
        self.watch(on, &life).await?;
        if !self.stack.is_persistent() {
            disks.iter().for_each(|disk| disk.clear_faults());
            self.verify(on, &life.opened).await?;
        }
        let stop_delay = self.random.duration(Duration::ZERO, Duration::from_micros(800));
        on.sleep(stop_delay).await;
        life.see_size(None);
        broken(&life)?;
        let how = self.choose_stop();
        Ok(self.stop(on.now(), disks, how))
    }

    /// Sometimes makes a disk that may hang do so, from some request on.
    fn set_hang(&self, at: LoopTime, disks: &[Rc<SimulatedDevice>]) {
        let Some(disk) = self.stack.may_hang(disks.len()) else {
            return;
        };
        // A separate generator leaves all other choices unchanged.
        let mut random = SeededRng::new(disks[disk].seed());
        if !random.chance(250) {
            return;
        }
        let delay = random.duration(DISK_HANG_MIN, DISK_HANG_MAX);
        let mut fault = InjectedFault::always(FaultEffect::Delay(delay)).after(random.below(200));
        fault.times = random.pick(&[Some(1), Some(2), Some(8), None]);
        if random.chance(300) {
            fault = fault.on(random.pick(&[Operation::Read, Operation::Write, Operation::Flush]));
        }
        disks[disk].inject(fault);
        self.log_at(at, Event::Fault { disk, fault });
    }

    fn choose_stop(&mut self) -> DeviceStop {
        match self.random.below(10) {
            0..3 if self.stack.survives_kill() => DeviceStop::Kill,
            3..5 if self.stack.keeps_host_memory() => DeviceStop::KillAndClearMemory,
            _ => DeviceStop::PowerLoss,
        }
    }

    /// Waits for the end of a life, and detects hung requests.
    async fn watch(&self, on: &Loop, life: &Life) -> Result<(), Broken> {
        while on.timeout(TICK, life.ended()).await.is_none() {
            if let Some(number) = life.hanging() {
                return Err(format!("#{number} hangs"));
            }
            life.disks.iter().for_each(|disk| disk.release());
        }
        broken(life)
    }

    fn stop(&mut self, at: LoopTime, disks: &[Rc<SimulatedDevice>], how: DeviceStop) -> Vec<SimulatedMedium> {
        self.log_at(at, Event::Stopped { how });
        self.summary.stops += 1;
        self.record.oracle.borrow_mut().stop(how);
        self.record.sizes.borrow_mut().stop(how);
        disks.iter().map(|disk| disk.stop(how)).collect()
    }

    /// Runs the last life, which reads everything twice.
    fn run_final_life(&mut self, life: u32, media: Vec<SimulatedMedium>) -> Result<(), Broken> {
        let on = simulated_loop()?;
        let disks = self.open_disks(&on, media);
        let opening = self.stack.open(&on, &disks, self.random.fork());
        let opened = on.block_on(opening).map_err(|error| format!("the stack cannot be opened: {error}"))?;
        self.log_at(on.now(), Event::Opened { life });
        self.check_opened_size(life, &opened)?;
        for _ in 0..2 {
            on.block_on(self.verify(&on, &opened))?;
        }
        drop((disks, opened));
        drop_loop(on)
    }

    /// Reads everything, with no other requests in flight.
    async fn verify(&self, on: &Loop, opened: &Opened) -> Result<(), Broken> {
        let mut buffer = AlignedBuf::zeroed(REQUEST_MAX as usize);
        let end = ByteOffset::ZERO + opened.device.geometry().size;
        let mut at = ByteOffset::ZERO;
        while at < end {
            let len = (end - at).min(ByteLen::new(REQUEST_MAX));
            let bytes = &mut buffer[..len.as_usize()];
            let start = self.record.oracle.borrow_mut().start_read();
            let read = opened.device.read(at, ReadBuf::new(bytes)).await;
            read.map_err(|error| format!("verifying: {error}"))?;
            let mut oracle = self.record.oracle.borrow_mut();
            let seen = oracle.see(start, sectors(at.get(), len.get()), |sector| {
                let from = (sector * SECTOR - at.get()) as usize;
                stamp::read(&bytes[from..][..SECTOR as usize], sector, self.record.key)
            });
            oracle.end_read(start);
            seen.map_err(|violation| format!("verifying: {violation}"))?;
            at += len;
        }
        self.log_at(on.now(), Event::Verified);
        Ok(())
    }
}

fn broken(life: &Life) -> Result<(), Broken> {
    match life.broken.borrow_mut().take() {
        Some(reason) => Err(reason),
        None => Ok(()),
    }
}

fn simulated_loop() -> Result<Loop, Broken> {
    Loop::simulated().map_err(|error| format!("creating the event loop: {error}"))
}

/// Drops a loop with all its tasks.
fn drop_loop(on: Loop) -> Result<(), Broken> {
    let weak = on.downgrade();
    drop(on);
    match weak.upgrade() {
        Some(_) => Err("a layer or one of its tasks keeps the event loop alive".to_owned()),
        None => Ok(()),
    }
}
