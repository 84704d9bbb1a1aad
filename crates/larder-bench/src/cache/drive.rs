//! A drive as a queueing model: units that work in parallel, each of which does one thing at a time.
//!
//! A read is served by the unit that its address maps to. A write is served there too if the memory is written in
//! place. Otherwise the write enters a power-loss protected buffer: the drive acknowledges it once the buffer has
//! room, gathers it with others until a word line is full, and programs that word line on the next unit in turn.
//! Where the drive maps more than one block at a time, the rest of the mapped unit is read first. Each program causes
//! a share of further programs for garbage collection.
//!
//! On a unit, reads go before programs. A program that has begun is either suspended for a read or delays it, as the
//! model says. When the buffer is full, the units limit the rate of writes.
//!
//! The model has no clock: the caller sets the time ([`Drive::run_until`]) and asks for the time of the next event
//! ([`Drive::next`]). Two runs with the same requests at the same times give the same results.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Nanoseconds of the model's time.
pub(super) type Nanos = u64;

/// Identifies a request when it completes.
pub(super) type Token = u64;

/// Bytes of a request.
pub(super) const BLOCK: u64 = 4096;

/// Parameters of a drive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Model {
    /// Number of units that work in parallel.
    pub(super) units: usize,
    /// Time for which a read occupies a unit.
    pub(super) read_time: Nanos,
    /// Latency in addition to the time in a unit, for a read or a write in place: bus, controller, host.
    pub(super) overhead_time: Nanos,
    pub(super) writes: Writes,
}

/// Handling of writes by the drive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Writes {
    /// The write occupies a unit for this time.
    InPlace(Nanos),
    Buffered(Buffer),
}

/// Writes that are acknowledged before they are programmed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Buffer {
    /// Time from when the buffer has room to the acknowledgement.
    pub(super) acknowledge_latency: Nanos,
    /// Capacity of the buffer, in writes.
    pub(super) writes_max: usize,
    /// Writes that are programmed together.
    pub(super) writes_per_program: usize,
    pub(super) program_time: Nanos,
    /// Garbage collection programs for each program of host writes.
    pub(super) gc_programs_per_program: f64,
    /// True if the rest of the mapped unit is read before a write.
    pub(super) read_modify_write: bool,
    /// Time that it takes to suspend a program for reads; `None` if programs are not interrupted.
    pub(super) suspend_time: Option<Nanos>,
}

/// Work of a unit.
#[derive(Clone, Copy, Debug)]
enum Work {
    Read(Token),
    Write(Token),
    /// Reads the rest of the mapped unit around a write.
    ReadFirst,
    Program,
    Collect,
}

#[derive(Default)]
struct Unit {
    running: Option<Doing>,
    /// Number of work items begun so far. A completion event for any item but the last is void.
    started: u64,
    /// Reads, and writes in place, each with its remaining time.
    pending_requests: VecDeque<(Work, Nanos)>,
    pending_background: VecDeque<(Work, Nanos)>,
}

#[derive(Clone, Copy, Debug)]
struct Doing {
    work: Work,
    until: Nanos,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The unit (first field) has finished the work item with this number.
    Done(usize, u64),
    Complete(Token),
}

/// A simulated drive, with its queued work.
pub(super) struct Drive {
    model: Model,
    units: Vec<Unit>,
    /// Pending events. The number in each makes the order of simultaneous events deterministic.
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    event_count: u64,
    now: Nanos,
    /// Writes in the buffer.
    buffered_writes: usize,
    /// Writes for which the buffer has no room.
    unbuffered_writes: VecDeque<(Token, u64)>,
    /// Writes in the buffer that wait until enough of them can be programmed together.
    batched_writes: usize,
    gc_programs_due: f64,
    /// Unit that gets the next program.
    next_unit: usize,
}

impl Drive {
    /// Creates an idle drive at time 0.
    ///
    /// # Panics
    /// If the model has no units, or its buffer holds fewer writes than one program.
    pub(super) fn new(model: Model) -> Self {
        assert!(model.units > 0, "a drive without units");
        if let Writes::Buffered(buffer) = model.writes {
            assert!(buffer.writes_max >= buffer.writes_per_program, "the buffer never fills a program");
        }
        Self {
            model,
            units: (0..model.units).map(|_| Unit::default()).collect(),
            events: BinaryHeap::new(),
            event_count: 0,
            now: 0,
            buffered_writes: 0,
            unbuffered_writes: VecDeque::new(),
            batched_writes: 0,
            gc_programs_due: 0.0,
            next_unit: 0,
        }
    }

    /// Returns the time of the next event if no further requests arrive.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.events.peek().map(|Reverse((at, _, _))| *at)
    }

    /// Advances the time to `now`. Calls `completed` for each request that completes by then, with its completion
    /// time.
    pub(super) fn run_until(&mut self, now: Nanos, mut completed: impl FnMut(Nanos, Token)) {
        while let Some(Reverse((at, _, event))) = self.events.peek().copied() {
            if at > now {
                break;
            }
            self.events.pop();
            self.now = at;
            match event {
                Event::Complete(token) => completed(at, token),
                Event::Done(unit, number) if self.units[unit].started == number => self.done(unit),
                Event::Done(..) => {}
            }
        }
        self.now = self.now.max(now);
    }

    /// Submits a request for the block at `address` (in blocks) at the current time, which is that of the last
    /// [`Self::run_until`].
    pub(super) fn request(&mut self, token: Token, write: bool, address: u64) {
        match (write, self.model.writes) {
            (false, _) => self.enqueue(self.unit_for(address), Work::Read(token)),
            (true, Writes::InPlace(_)) => self.enqueue(self.unit_for(address), Work::Write(token)),
            (true, Writes::Buffered(buffer)) if self.buffered_writes < buffer.writes_max => {
                self.take_in(buffer, token, address);
            }
            (true, Writes::Buffered(_)) => self.unbuffered_writes.push_back((token, address)),
        }
    }

    /// Maps an address to a unit: pseudo-random, and always the same unit.
    fn unit_for(&self, address: u64) -> usize {
        (mixed(address) % self.units.len() as u64) as usize
    }

    fn at(&mut self, at: Nanos, event: Event) {
        self.events.push(Reverse((at, self.event_count, event)));
        self.event_count += 1;
    }

    fn enqueue(&mut self, unit: usize, work: Work) {
        let duration = match (work, self.model.writes) {
            (Work::Read(_) | Work::ReadFirst, _) => self.model.read_time,
            (_, Writes::InPlace(write)) => write,
            (_, Writes::Buffered(buffer)) => buffer.program_time,
        };
        let delay = match work {
            Work::Read(_) | Work::Write(_) => {
                self.units[unit].pending_requests.push_back((work, duration));
                self.suspend(unit)
            }
            Work::ReadFirst | Work::Program | Work::Collect => {
                self.units[unit].pending_background.push_back((work, duration));
                0
            }
        };
        self.begin(unit, delay);
    }

    /// Suspends the unit's current program if the model allows it. Returns the time that suspending takes.
    fn suspend(&mut self, unit: usize) -> Nanos {
        let Writes::Buffered(Buffer { suspend_time: Some(suspend), .. }) = self.model.writes else {
            return 0;
        };
        let unit_state = &mut self.units[unit];
        match unit_state.running {
            Some(Doing { work: work @ (Work::Program | Work::Collect), until }) => {
                unit_state.pending_background.push_front((work, until - self.now));
                unit_state.running = None;
                suspend
            }
            _ => 0,
        }
    }

    /// Starts the next work item of an idle unit, after a delay.
    fn begin(&mut self, unit: usize, after: Nanos) {
        let unit_state = &mut self.units[unit];
        if unit_state.running.is_some() {
            return;
        }
        let Some((work, takes)) =
            unit_state.pending_requests.pop_front().or_else(|| unit_state.pending_background.pop_front())
        else {
            return;
        };
        let until = self.now + after + takes;
        unit_state.running = Some(Doing { work, until });
        unit_state.started += 1;
        let number = unit_state.started;
        self.at(until, Event::Done(unit, number));
    }

    fn done(&mut self, unit: usize) {
        let work = self.units[unit].running.take().map(|doing| doing.work);
        match (work, self.model.writes) {
            (Some(Work::Read(token) | Work::Write(token)), _) => {
                self.at(self.now + self.model.overhead_time, Event::Complete(token));
            }
            (Some(Work::ReadFirst), Writes::Buffered(buffer)) => self.gather(buffer),
            (Some(Work::Program), Writes::Buffered(buffer)) => self.make_room(buffer),
            _ => {}
        }
        self.begin(unit, 0);
    }

    /// Puts a write into the buffer, which has room.
    fn take_in(&mut self, buffer: Buffer, token: Token, address: u64) {
        self.buffered_writes += 1;
        self.at(self.now + buffer.acknowledge_latency, Event::Complete(token));
        match buffer.read_modify_write {
            true => self.enqueue(self.unit_for(address), Work::ReadFirst),
            false => self.gather(buffer),
        }
    }

    /// Counts a write that is ready to be programmed, and programs once there are enough.
    fn gather(&mut self, buffer: Buffer) {
        self.batched_writes += 1;
        if self.batched_writes < buffer.writes_per_program {
            return;
        }
        self.batched_writes = 0;
        self.program(Work::Program);
        self.gc_programs_due += buffer.gc_programs_per_program;
        while self.gc_programs_due >= 1.0 {
            self.gc_programs_due -= 1.0;
            self.program(Work::Collect);
        }
    }

    fn program(&mut self, work: Work) {
        let unit = self.next_unit;
        self.next_unit = (unit + 1) % self.units.len();
        self.enqueue(unit, work);
    }

    /// Frees the buffer space of programmed writes, and accepts waiting ones.
    fn make_room(&mut self, buffer: Buffer) {
        self.buffered_writes -= buffer.writes_per_program;
        while self.buffered_writes < buffer.writes_max
            && let Some((token, address)) = self.unbuffered_writes.pop_front()
        {
            self.take_in(buffer, token, address);
        }
    }
}

/// Hashes `number` into a number that shows no pattern (the finalizer of splitmix64).
pub(super) fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Nanos = 1000;

    fn flash(units: usize, buffer: Buffer) -> Drive {
        Drive::new(Model { units, read_time: 50 * US, overhead_time: 10 * US, writes: Writes::Buffered(buffer) })
    }

    const BUFFER: Buffer = Buffer {
        acknowledge_latency: 20 * US,
        writes_max: 64,
        writes_per_program: 4,
        program_time: 400 * US,
        gc_programs_per_program: 0.0,
        read_modify_write: false,
        suspend_time: None,
    };

    /// Completion time of each request, with its token.
    fn run(drive: &mut Drive) -> Vec<(Nanos, Token)> {
        let mut completed = Vec::new();
        drive.run_until(Nanos::MAX / 2, |at, token| completed.push((at, token)));
        completed
    }

    /// Mean waiting time of Poisson reads at one unit with utilization `load`.
    fn mean_wait(load: f64) -> f64 {
        const READS: u64 = 400_000;
        let mut drive = flash(1, BUFFER);
        let (mut total_wait, mut now, mut arrivals) = (0, 0.0, Vec::new());
        for token in 0..READS {
            // Exponentially distributed intervals.
            let uniform = (mixed(token) as f64 + 1.0) / (u64::MAX as f64 + 2.0);
            now += -uniform.ln() * (50 * US) as f64 / load;
            arrivals.push(now as Nanos);
            drive.run_until(now as Nanos, |at, token| total_wait += at - arrivals[token as usize] - 60 * US);
            drive.request(token, false, token);
        }
        drive.run_until(Nanos::MAX / 2, |at, token| total_wait += at - arrivals[token as usize] - 60 * US);
        total_wait as f64 / READS as f64
    }

    #[test]
    /// The mean waiting time of reads matches the Pollaczek-Khinchine formula.
    fn read_wait_matches_pollaczek_khinchine() {
        for load in [0.3, 0.5, 0.8] {
            // M/D/1: mean wait = load × service time / (2 (1 - load)).
            let theory = load * (50 * US) as f64 / (2.0 * (1.0 - load));
            let measured = mean_wait(load);
            assert!((measured / theory - 1.0).abs() < 0.03, "load {load}: {measured} ns, {theory} in theory");
        }
    }

    #[test]
    fn lone_read_takes_service_plus_overhead() {
        let mut drive = flash(8, BUFFER);
        drive.request(1, false, 17);
        assert_eq!(run(&mut drive), [(60 * US, 1)]);
    }

    #[test]
    /// A read waits for the program that has begun, and passes those that have not.
    fn read_waits_only_for_started_program() {
        let mut drive = flash(1, BUFFER);
        for token in 0..8 {
            drive.request(token, true, token);
        }
        drive.run_until(100 * US, |_, _| {});
        drive.request(8, false, 0);
        assert_eq!(run(&mut drive), [(460 * US, 8)]);
    }

    #[test]
    /// A program that a read has suspended takes no longer in sum than one that runs through.
    fn suspended_program_keeps_its_total_time() {
        let mut drive = flash(1, Buffer { writes_max: 4, suspend_time: Some(30 * US), ..BUFFER });
        for token in 0..5 {
            drive.request(token, true, token);
        }
        drive.run_until(100 * US, |_, _| {});
        drive.request(5, false, 0);
        // The read completes at 190 us, overhead included. The unit resumes the program at 180 us, with 300 us of it
        // left.
        assert_eq!(run(&mut drive), [(190 * US, 5), (500 * US, 4)]);
    }

    #[test]
    fn writes_acknowledged_until_buffer_full() {
        let mut drive = flash(2, BUFFER);
        for token in 0..66 {
            drive.request(token, true, token);
        }
        let completed = run(&mut drive);
        assert!(completed[..64].iter().all(|(at, _)| *at == 20 * US));
        // By then the two units have programmed four writes each.
        assert_eq!(completed[64..], [(420 * US, 64), (420 * US, 65)]);
    }

    /// Sustained writes per second of a drive that always has more of them queued.
    fn writes_per_second(units: usize, buffer: Buffer) -> f64 {
        let mut drive = flash(units, buffer);
        let (mut completed, mut resubmitted) = (0, Vec::new());
        for token in 0..1000 {
            drive.request(token, true, mixed(token));
        }
        const LONG: Nanos = 2_000_000 * US;
        while let Some(at) = drive.next().filter(|at| *at < LONG) {
            drive.run_until(at, |_, token| resubmitted.push(token + 1000));
            completed += resubmitted.len();
            for token in resubmitted.drain(..) {
                drive.request(token, true, mixed(token));
            }
        }
        completed as f64 / 2.0
    }

    #[test]
    fn units_limit_sustained_writes() {
        let plain = writes_per_second(8, BUFFER);
        // 8 units, each 4 writes in 400 us.
        assert!((plain / 80_000.0 - 1.0).abs() < 0.02, "{plain}");
        let costly = Buffer { writes_max: 512, gc_programs_per_program: 1.5, read_modify_write: true, ..BUFFER };
        // 4 writes take 4 reads and 2.5 programs: 1,200 us of a unit.
        let measured = writes_per_second(8, costly);
        assert!((measured / 26_667.0 - 1.0).abs() < 0.03, "{measured}");
    }

    #[test]
    fn in_place_writes_alternate_with_reads() {
        let mut drive =
            Drive::new(Model { units: 1, read_time: 7 * US, overhead_time: 3 * US, writes: Writes::InPlace(8 * US) });
        drive.request(0, true, 0);
        drive.request(1, false, 0);
        drive.request(2, true, 0);
        assert_eq!(run(&mut drive), [(11 * US, 0), (18 * US, 1), (26 * US, 2)]);
    }
}
