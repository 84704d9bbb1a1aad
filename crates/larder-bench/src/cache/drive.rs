//! A drive as a queueing model: units that work at the same time, each doing one thing after the other.
//!
//! A read goes to the unit that its address lies on. A write goes there too (memory that is written in place), or into a
//! buffer that survives the loss of power: then it is acknowledged once there is room, gathered with others until a word
//! line is full, and programmed on whichever unit is next. Where the drive maps more than one write's bytes at a time,
//! what lies around a write is read first. For each program there is a share of others that garbage collection makes.
//!
//! On a unit reads go before programs. One that has begun is suspended for them, or not: then it holds them up. When the
//! buffer is full the units hold up writes.
//!
//! The model knows no clock: who has one says what time it is ([`Drive::run_until`]) and asks when something happens next
//! ([`Drive::next`]). Two runs with the same requests at the same times are the same.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Nanoseconds of the model's time.
pub(super) type Nanos = u64;

/// Who is told that a request has completed.
pub(super) type Token = u64;

/// Bytes of a request.
pub(super) const BLOCK: u64 = 4096;

/// What a drive is like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Model {
    /// Parts that work at the same time.
    pub(super) units: usize,
    /// What a read takes of a unit.
    pub(super) read: Nanos,
    /// What a read, or a write in place, takes besides: bus, controller, host.
    pub(super) overhead: Nanos,
    pub(super) writes: Writes,
}

/// What becomes of a write.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Writes {
    /// It takes a unit for so long.
    InPlace(Nanos),
    Buffered(Buffer),
}

/// Writes that are acknowledged before they are programmed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Buffer {
    /// From when there is room to the acknowledgement.
    pub(super) acknowledge: Nanos,
    /// Writes that there is room for.
    pub(super) writes_max: usize,
    /// Writes that are programmed together.
    pub(super) writes_per_program: usize,
    pub(super) program: Nanos,
    /// Programs of garbage collection for each of those.
    pub(super) collections: f64,
    /// What lies around a write is read first.
    pub(super) reads_first: bool,
    /// How long it takes to suspend a program for reads; without, it is not interrupted.
    pub(super) suspend: Option<Nanos>,
}

/// What a unit does.
#[derive(Clone, Copy, Debug)]
enum Work {
    Read(Token),
    Write(Token),
    /// Reads what lies around a write.
    ReadFirst,
    Program,
    Collect,
}

#[derive(Default)]
struct Unit {
    doing: Option<Doing>,
    /// What it was told to do so far; an event for anything but the last of them is void.
    begun: u64,
    /// Each with what it takes, or what is left of that.
    requests: VecDeque<(Work, Nanos)>,
    background: VecDeque<(Work, Nanos)>,
}

#[derive(Clone, Copy, Debug)]
struct Doing {
    work: Work,
    until: Nanos,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A unit has done what it was told to do, of which this is the number.
    Done(usize, u64),
    Complete(Token),
}

/// A drive, and what it has to do.
pub(super) struct Drive {
    model: Model,
    units: Vec<Unit>,
    /// With a number each, so that what happens at the same time happens in a set order.
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    event_count: u64,
    now: Nanos,
    /// Writes in the buffer.
    buffered: usize,
    /// Writes for which the buffer has no room.
    waiting: VecDeque<(Token, u64)>,
    /// Writes in the buffer that wait for others to be programmed with.
    gathered: usize,
    collections_due: f64,
    /// The unit that is programmed next.
    next_unit: usize,
}

impl Drive {
    /// # Panics
    /// If the model has no units, or a buffer that is smaller than what is programmed at once.
    pub(super) fn new(model: Model) -> Self {
        assert!(model.units > 0, "a drive without units");
        if let Writes::Buffered(buffer) = model.writes {
            assert!(
                buffer.writes_max >= buffer.writes_per_program,
                "the buffer never fills a program"
            );
        }
        Self {
            model,
            units: (0..model.units).map(|_| Unit::default()).collect(),
            events: BinaryHeap::new(),
            event_count: 0,
            now: 0,
            buffered: 0,
            waiting: VecDeque::new(),
            gathered: 0,
            collections_due: 0.0,
            next_unit: 0,
        }
    }

    /// When something happens next, if nothing is asked for.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.events.peek().map(|Reverse((at, _, _))| *at)
    }

    /// Lets time go on to `now`. `completed` is told of each request, with the time.
    pub(super) fn run_until(&mut self, now: Nanos, mut completed: impl FnMut(Nanos, Token)) {
        while let Some(Reverse((at, _, event))) = self.events.peek().copied() {
            if at > now {
                break;
            }
            self.events.pop();
            self.now = at;
            match event {
                Event::Complete(token) => completed(at, token),
                Event::Done(unit, number) if self.units[unit].begun == number => self.done(unit),
                Event::Done(..) => {}
            }
        }
        self.now = self.now.max(now);
    }

    /// Asks for the block at `address` (in blocks) at the present time, which is that of the last [`Self::run_until`].
    pub(super) fn request(&mut self, token: Token, write: bool, address: u64) {
        match (write, self.model.writes) {
            (false, _) => self.enqueue(self.unit_of(address), Work::Read(token)),
            (true, Writes::InPlace(_)) => self.enqueue(self.unit_of(address), Work::Write(token)),
            (true, Writes::Buffered(buffer)) if self.buffered < buffer.writes_max => {
                self.take_in(buffer, token, address);
            }
            (true, Writes::Buffered(_)) => self.waiting.push_back((token, address)),
        }
    }

    /// Where an address lies: at random, but always the same.
    fn unit_of(&self, address: u64) -> usize {
        (mixed(address) % self.units.len() as u64) as usize
    }

    fn at(&mut self, at: Nanos, event: Event) {
        self.events.push(Reverse((at, self.event_count, event)));
        self.event_count += 1;
    }

    fn enqueue(&mut self, unit: usize, work: Work) {
        let takes = match (work, self.model.writes) {
            (Work::Read(_) | Work::ReadFirst, _) => self.model.read,
            (_, Writes::InPlace(write)) => write,
            (_, Writes::Buffered(buffer)) => buffer.program,
        };
        let after = match work {
            Work::Read(_) | Work::Write(_) => {
                self.units[unit].requests.push_back((work, takes));
                self.suspend(unit)
            }
            Work::ReadFirst | Work::Program | Work::Collect => {
                self.units[unit].background.push_back((work, takes));
                0
            }
        };
        self.begin(unit, after);
    }

    /// Has a unit leave the program that it is at, if that may be; how long that takes.
    fn suspend(&mut self, unit: usize) -> Nanos {
        let Writes::Buffered(Buffer {
            suspend: Some(suspend), ..
        }) = self.model.writes
        else {
            return 0;
        };
        let it = &mut self.units[unit];
        match it.doing {
            Some(Doing {
                work: work @ (Work::Program | Work::Collect),
                until,
            }) => {
                it.background.push_front((work, until - self.now));
                it.doing = None;
                suspend
            }
            _ => 0,
        }
    }

    /// Has an idle unit do what comes next, after a time.
    fn begin(&mut self, unit: usize, after: Nanos) {
        let it = &mut self.units[unit];
        if it.doing.is_some() {
            return;
        }
        let Some((work, takes)) = it.requests.pop_front().or_else(|| it.background.pop_front()) else {
            return;
        };
        let until = self.now + after + takes;
        it.doing = Some(Doing { work, until });
        it.begun += 1;
        let number = it.begun;
        self.at(until, Event::Done(unit, number));
    }

    fn done(&mut self, unit: usize) {
        let work = self.units[unit].doing.take().map(|doing| doing.work);
        match (work, self.model.writes) {
            (Some(Work::Read(token) | Work::Write(token)), _) => {
                self.at(self.now + self.model.overhead, Event::Complete(token));
            }
            (Some(Work::ReadFirst), Writes::Buffered(buffer)) => self.gather(buffer),
            (Some(Work::Program), Writes::Buffered(buffer)) => self.make_room(buffer),
            _ => {}
        }
        self.begin(unit, 0);
    }

    /// Takes a write into the buffer, which has room.
    fn take_in(&mut self, buffer: Buffer, token: Token, address: u64) {
        self.buffered += 1;
        self.at(self.now + buffer.acknowledge, Event::Complete(token));
        match buffer.reads_first {
            true => self.enqueue(self.unit_of(address), Work::ReadFirst),
            false => self.gather(buffer),
        }
    }

    /// A write can be programmed.
    fn gather(&mut self, buffer: Buffer) {
        self.gathered += 1;
        if self.gathered < buffer.writes_per_program {
            return;
        }
        self.gathered = 0;
        self.program(Work::Program);
        self.collections_due += buffer.collections;
        while self.collections_due >= 1.0 {
            self.collections_due -= 1.0;
            self.program(Work::Collect);
        }
    }

    fn program(&mut self, work: Work) {
        let unit = self.next_unit;
        self.next_unit = (unit + 1) % self.units.len();
        self.enqueue(unit, work);
    }

    /// What was programmed leaves the buffer.
    fn make_room(&mut self, buffer: Buffer) {
        self.buffered -= buffer.writes_per_program;
        while self.buffered < buffer.writes_max
            && let Some((token, address)) = self.waiting.pop_front()
        {
            self.take_in(buffer, token, address);
        }
    }
}

/// A number that shows no pattern of `number`'s (the finalizer of splitmix64).
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
        Drive::new(Model {
            units,
            read: 50 * US,
            overhead: 10 * US,
            writes: Writes::Buffered(buffer),
        })
    }

    const BUFFER: Buffer = Buffer {
        acknowledge: 20 * US,
        writes_max: 64,
        writes_per_program: 4,
        program: 400 * US,
        collections: 0.0,
        reads_first: false,
        suspend: None,
    };

    /// When each request completes, by its token.
    fn run(drive: &mut Drive) -> Vec<(Nanos, Token)> {
        let mut completed = Vec::new();
        drive.run_until(Nanos::MAX / 2, |at, token| completed.push((at, token)));
        completed
    }

    /// Reads that come at random, `load` of what a unit can do, to one unit: the mean of what they wait.
    fn mean_wait(load: f64) -> f64 {
        const READS: u64 = 400_000;
        let mut drive = flash(1, BUFFER);
        let (mut waited, mut now, mut came) = (0, 0.0, Vec::new());
        for token in 0..READS {
            // Of an exponential distribution.
            let uniform = (mixed(token) as f64 + 1.0) / (u64::MAX as f64 + 2.0);
            now += -uniform.ln() * (50 * US) as f64 / load;
            came.push(now as Nanos);
            drive.run_until(now as Nanos, |at, token| waited += at - came[token as usize] - 60 * US);
            drive.request(token, false, token);
        }
        drive.run_until(Nanos::MAX / 2, |at, token| {
            waited += at - came[token as usize] - 60 * US
        });
        waited as f64 / READS as f64
    }

    #[test]
    fn reads_wait_as_long_as_pollaczek_and_khinchine_say() {
        for load in [0.3, 0.5, 0.8] {
            // M/D/1: load times service over twice what is left.
            let theory = load * (50 * US) as f64 / (2.0 * (1.0 - load));
            let seen = mean_wait(load);
            assert!(
                (seen / theory - 1.0).abs() < 0.03,
                "load {load}: {seen} ns, {theory} in theory"
            );
        }
    }

    #[test]
    fn a_read_alone_takes_its_service_and_the_overhead() {
        let mut drive = flash(8, BUFFER);
        drive.request(1, false, 17);
        assert_eq!(run(&mut drive), [(60 * US, 1)]);
    }

    #[test]
    fn a_read_waits_for_a_program_that_has_begun_and_goes_before_one_that_has_not() {
        let mut drive = flash(1, BUFFER);
        for token in 0..8 {
            drive.request(token, true, token);
        }
        drive.run_until(100 * US, |_, _| {});
        drive.request(8, false, 0);
        assert_eq!(run(&mut drive), [(460 * US, 8)]);
    }

    #[test]
    fn a_program_that_is_suspended_for_a_read_takes_as_long_as_without() {
        let mut drive = flash(
            1,
            Buffer {
                writes_max: 4,
                suspend: Some(30 * US),
                ..BUFFER
            },
        );
        for token in 0..5 {
            drive.request(token, true, token);
        }
        drive.run_until(100 * US, |_, _| {});
        drive.request(5, false, 0);
        // The read is over, with its overhead, at 190 us; the unit goes on with the program at 180, and has 300 us left.
        assert_eq!(run(&mut drive), [(190 * US, 5), (500 * US, 4)]);
    }

    #[test]
    fn a_write_is_acknowledged_from_the_buffer_until_that_is_full() {
        let mut drive = flash(2, BUFFER);
        for token in 0..66 {
            drive.request(token, true, token);
        }
        let completed = run(&mut drive);
        assert!(completed[..64].iter().all(|(at, _)| *at == 20 * US));
        // Two units have programmed four writes each by then.
        assert_eq!(completed[64..], [(420 * US, 64), (420 * US, 65)]);
    }

    /// Writes a second that a drive takes for good, if there are always more.
    fn writes_per_second(units: usize, buffer: Buffer) -> f64 {
        let mut drive = flash(units, buffer);
        let (mut completed, mut due) = (0, Vec::new());
        for token in 0..1000 {
            drive.request(token, true, mixed(token));
        }
        const LONG: Nanos = 2_000_000 * US;
        while let Some(at) = drive.next().filter(|at| *at < LONG) {
            drive.run_until(at, |_, token| due.push(token + 1000));
            completed += due.len();
            for token in due.drain(..) {
                drive.request(token, true, mixed(token));
            }
        }
        completed as f64 / 2.0
    }

    #[test]
    fn the_units_say_how_many_writes_there_can_be() {
        let plain = writes_per_second(8, BUFFER);
        // 8 units, each 4 writes in 400 us.
        assert!((plain / 80_000.0 - 1.0).abs() < 0.02, "{plain}");
        let costly = Buffer {
            writes_max: 512,
            collections: 1.5,
            reads_first: true,
            ..BUFFER
        };
        // 4 writes take 4 reads and 2.5 programs: 1,200 us of a unit.
        let seen = writes_per_second(8, costly);
        assert!((seen / 26_667.0 - 1.0).abs() < 0.03, "{seen}");
    }

    #[test]
    fn writes_in_place_take_turns_with_reads() {
        let mut drive = Drive::new(Model {
            units: 1,
            read: 7 * US,
            overhead: 3 * US,
            writes: Writes::InPlace(8 * US),
        });
        drive.request(0, true, 0);
        drive.request(1, false, 0);
        drive.request(2, true, 0);
        assert_eq!(run(&mut drive), [(11 * US, 0), (18 * US, 1), (26 * US, 2)]);
    }
}
