//! A worker, which sends one random request after the other and reports the results to the oracle.

use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::simulated::{FaultEffect, InjectedFault, SeededRng};
use larder_block::signal::first_of;
use larder_block::{
    AlignedBuf, ByteLen, ByteOffset, ByteRange, ExtentKind, Failure, Geometry, Io, IoError, IoResult, IoVec, Operation,
    ReadBuf, WriteBuf, WriteFlags, ZeroFlags,
};

use super::life::Life;
use super::log::{Event, Request};
use super::oracle::{Effect, Ending, sectors};
use super::stamp::{self, SECTOR, Stamp};

/// Maximum length of a request, in bytes.
pub(super) const REQUEST_MAX: u64 = 64 << 10;

/// Size up to which disks grow, in bytes.
const DISK_MAX: u64 = 4 << 20;

/// Relative frequency of each kind of request, and their location.
#[derive(Clone, Copy)]
pub(super) struct RequestMix {
    reads: u64,
    writes: u64,
    flushes: u64,
    discards: u64,
    zeroes: u64,
    extents: u64,
    grows: u64,
    /// Invalid requests, changes of size or settings, and faults.
    odd: u64,
    /// Durable (FUA) requests and abandoned ones, in 1000.
    forced_per_mille: u32,
    given_up_per_mille: u32,
    /// Area that most requests access, in blocks.
    hot_blocks: u64,
    /// Maximum length of most requests, in blocks.
    blocks_max: u64,
    /// Reads in 1000 that continue the pattern of the last one.
    follows_per_mille: u32,
    /// Maximum pause between two requests.
    pause_max: Duration,
    /// True if faults are injected.
    faults: bool,
}

impl RequestMix {
    /// Creates a random mix.
    pub(super) fn new(random: &mut SeededRng, faults: bool, growable: bool) -> Self {
        Self {
            reads: random.between(1, 40),
            writes: random.between(10, 40),
            flushes: random.pick(&[0, 2, 8, 20]),
            discards: random.pick(&[0, 2, 8]),
            zeroes: random.pick(&[0, 4, 10]),
            extents: random.pick(&[0, 2]),
            grows: if growable { random.pick(&[0, 1, 4]) } else { 0 },
            odd: random.pick(&[0, 2, 4]),
            forced_per_mille: random.pick(&[0, 100, 500]),
            given_up_per_mille: random.pick(&[0, 20, 100]),
            hot_blocks: random.pick(&[4, 16, 64, 1 << 20]),
            blocks_max: random.pick(&[1, 4, 16, 48]),
            follows_per_mille: random.pick(&[0, 500, 900, 990]),
            pause_max: Duration::from_micros(random.pick(&[0, 100, 2000])),
            faults,
        }
    }
}

/// Next step of a worker.
enum Step {
    Ask(Request),
    /// An invalid request, which must fail with this error.
    Misuse(Request, Failure),
    Odd,
}

/// Sends requests until none are left.
pub(super) struct Worker {
    life: Rc<Life>,
    index: usize,
    random: SeededRng,
    mix: RequestMix,
    memory: AlignedBuf,
    /// The last read, and its distance from the one before, in bytes.
    last_read: ByteRange,
    stride: i64,
}

impl Worker {
    /// Creates the worker with this index in [`Life::waits`].
    pub(super) fn new(life: Rc<Life>, index: usize, random: SeededRng, mix: RequestMix) -> Self {
        Self {
            life,
            index,
            random,
            mix,
            memory: AlignedBuf::zeroed(REQUEST_MAX as usize + 4096),
            last_read: ByteRange::default(),
            stride: 0,
        }
    }

    /// Runs until the life ends.
    pub(super) async fn run(mut self) {
        while self.life.claim_request() {
            match self.choose() {
                Step::Ask(request) => self.ask(request).await,
                Step::Misuse(request, failure) => self.send_invalid(request, failure).await,
                Step::Odd => self.disturb(),
            }
            self.life.waits.borrow_mut()[self.index] = None;
            self.pause().await;
        }
        self.life.finish_worker();
    }

    async fn pause(&mut self) {
        let pause = self.random.duration(Duration::ZERO, self.mix.pause_max);
        if pause.is_zero() {
            return;
        }
        if let Some(sleep) = self.life.on.upgrade().map(|on| on.sleep(pause)) {
            sleep.await;
        }
    }

    fn choose(&mut self) -> Step {
        let mix = self.mix;
        let changes = mix.writes + mix.discards + mix.zeroes + mix.grows;
        let mut ticket = self.random.below(changes + mix.reads + mix.flushes + mix.extents + mix.odd);
        let mut selects = |weight: u64| {
            let is_selected = ticket < weight;
            ticket = ticket.wrapping_sub(weight);
            is_selected
        };
        let kind = if selects(mix.reads) {
            Operation::Read
        } else if selects(mix.writes) {
            Operation::Write
        } else if selects(mix.flushes) {
            Operation::Flush
        } else if selects(mix.discards) {
            Operation::Discard
        } else if selects(mix.zeroes) {
            Operation::WriteZeroes
        } else if selects(mix.extents) {
            Operation::Extents
        } else if selects(mix.grows) {
            return Step::Ask(self.choose_growth());
        } else if self.random.chance(500) {
            return Step::Odd;
        } else {
            return self.choose_invalid();
        };
        let geometry = self.life.opened.device.geometry();
        let range = match kind {
            Operation::Read => self.choose_read(&geometry),
            _ => self.choose_range(&geometry),
        };
        Step::Ask(self.request(kind, range))
    }

    /// Returns a random read, or one that continues the last one's pattern.
    fn choose_read(&mut self, geometry: &Geometry) -> ByteRange {
        let last = self.last_read;
        let next = last.start.get().checked_add_signed(self.stride);
        let fits = |start: &u64| last.len > ByteLen::ZERO && start + last.len.get() <= geometry.size.get();
        if let Some(start) = next.filter(fits)
            && self.random.chance(self.mix.follows_per_mille)
        {
            self.last_read = ByteOffset::new(start).range(last.len);
            return self.last_read;
        }
        self.last_read = self.choose_range(geometry);
        let len = self.last_read.len.get() as i64;
        self.stride = self.random.pick(&[len, len, -len, len * 3, 16 << 10]);
        self.last_read
    }

    fn request(&mut self, kind: Operation, range: ByteRange) -> Request {
        let fua = self.random.chance(self.mix.forced_per_mille);
        match kind {
            Operation::Read => Request::Read(range),
            Operation::Write => Request::Write { range, fua },
            Operation::Flush => Request::Flush,
            Operation::Discard => Request::Discard(range),
            Operation::Extents | Operation::Grow => Request::Extents(range),
            Operation::WriteZeroes => {
                Request::Zero { range, unmap: self.random.chance(500), fast: self.random.chance(100), fua }
            }
        }
    }

    /// Returns a random range of whole blocks.
    fn choose_range(&mut self, geometry: &Geometry) -> ByteRange {
        let block = u64::from(geometry.block_size);
        let blocks = geometry.size.get() / block;
        let area_blocks = match self.random.chance(800) {
            true => self.mix.hot_blocks.min(blocks),
            false => blocks,
        };
        // For disks that grow, the area at the end is preferred sometimes.
        let first = match self.mix.grows > 0 && self.random.chance(200) {
            true => blocks - area_blocks + self.random.below(area_blocks),
            false => self.random.below(area_blocks),
        };
        let len_max = match self.random.chance(950) {
            true => self.mix.blocks_max,
            false => REQUEST_MAX,
        };
        let len_max = len_max.min(blocks - first).min(REQUEST_MAX / block).max(1);
        ByteRange::new(first * block, self.random.between(1, len_max) * block)
    }

    /// Mostly a small growth; sometimes to a size that the disk already has.
    fn choose_growth(&mut self) -> Request {
        let size = self.life.opened.device.geometry().size.get();
        let added_max = self.random.pick(&[8, 64, 512, 4096]) * SECTOR;
        let added = self.random.between(0, added_max / SECTOR) * SECTOR;
        Request::Grow(ByteLen::new((size + added).min(DISK_MAX).max(size)))
    }

    fn choose_invalid(&mut self) -> Step {
        let geometry = self.life.opened.device.geometry();
        let block = u64::from(geometry.block_size);
        let kinds = [Operation::Read, Operation::Write, Operation::Discard, Operation::WriteZeroes];
        let kind = self.random.pick(&kinds);
        // A change just past the end would succeed if the disk grew while the request waits.
        let must_be_far = self.life.expectations.resizable && kind != Operation::Read;
        let (range, failure) = match self.random.below(3) {
            0 if !must_be_far => (ByteRange::new(geometry.size.get(), block), Failure::OutOfRange),
            0 => (ByteRange::new(1 << 40, block), Failure::OutOfRange),
            1 => (ByteRange::new(!4095, 4096), Failure::OutOfRange),
            _ => (ByteRange::new(1, block), Failure::Misaligned),
        };
        Step::Misuse(self.request(kind, range), failure)
    }

    fn disturb(&mut self) {
        let life = Rc::clone(&self.life);
        match self.random.below(4) {
            0 if life.expectations.resizable => life.resize(&mut self.random),
            1 => {
                if let Some(poke) = &life.opened.poke {
                    poke(&mut self.random);
                    life.log(Event::Poked);
                }
            }
            2 if self.mix.faults => self.inject_fault(),
            _ => {
                let per_mille = match self.mix.faults {
                    true => self.random.pick(&[0, 0, 10, 50]),
                    false => 0,
                };
                life.disks[..life.expectations.failing].iter().for_each(|disk| disk.set_failures(per_mille));
                life.log(Event::Failures { per_mille });
            }
        }
    }

    fn inject_fault(&mut self) {
        let random = &mut self.random;
        let effect = match random.below(5) {
            0 => FaultEffect::Hang,
            1 => FaultEffect::Delay(random.duration(Duration::ZERO, Duration::from_secs(2))),
            // When room is short, `NoSpace` must be due to the shortage alone.
            2 if !self.life.expectations.room_is_short => FaultEffect::Fail(Failure::NoSpace),
            _ => FaultEffect::Fail(Failure::Os(5)),
        };
        let kinds = [
            Operation::Read,
            Operation::Write,
            Operation::Write,
            Operation::Flush,
            Operation::Flush,
            Operation::Discard,
            Operation::WriteZeroes,
        ];
        let mut fault = InjectedFault::once(effect).after(random.below(4));
        fault.times = match (effect, random.pick(&[1, 1, 2, 5, u64::MAX])) {
            (FaultEffect::Fail(_), u64::MAX) => None,
            (_, times) => Some(times.min(5)),
        };
        if random.chance(800) {
            fault = fault.on(random.pick(&kinds));
        }
        let disk = random.below(self.life.expectations.failing as u64) as usize;
        self.life.disks[disk].inject(fault);
        self.life.log(Event::Fault { disk, fault });
    }

    /// Returns memory for a transfer, with random offset and pieces as far as the device allows.
    fn pieces(&mut self, geometry: &Geometry, len: u64) -> (usize, Vec<IoVec>) {
        let unit = u64::from(geometry.memory_alignment);
        let skip = self.random.pick(&[0, 0, 1, 3]) * unit;
        let base = self.memory.as_mut_ptr().wrapping_add(skip as usize);
        let mut cuts = vec![0, len];
        while cuts.len() < 5 && len > unit && self.random.chance(200) {
            cuts.push(self.random.between(1, len / unit - 1) * unit);
        }
        cuts.sort_unstable();
        let piece = |cut: &[u64]| IoVec::new(base.wrapping_add(cut[0] as usize), (cut[1] - cut[0]) as usize);
        (skip as usize, cuts.windows(2).map(piece).collect())
    }

    /// Waits for a request, or abandons it. Returns its result, or `None` if it was abandoned.
    async fn wait_for(&mut self, number: u32, request: Io<'_>) -> Option<IoResult> {
        let (life, random) = (&self.life, &mut self.random);
        life.waits.borrow_mut()[self.index] = Some((number, life.now()));
        let abandoned = random.chance(self.mix.given_up_per_mille);
        let result = match life.on.upgrade().filter(|_| abandoned) {
            None => Some(request.await),
            Some(on) => {
                let limit = random.duration(Duration::ZERO, Duration::from_millis(1));
                let sleep = on.sleep(limit);
                drop(on);
                let timeout = async {
                    sleep.await;
                    None
                };
                first_of(async { Some(request.await) }, timeout).await
            }
        };
        self.life.log(match &result {
            Some(Ok(())) => Event::Done { number },
            Some(Err(error)) => Event::Failed { number, failure: error.failure() },
            None => Event::GivenUp { number },
        });
        result
    }

    async fn ask(&mut self, request: Request) {
        let number = self.life.record.number();
        self.life.log(Event::Started { number, request });
        let start = self.life.record.oracle.borrow().now();
        let failed = match request {
            Request::Read(range) => self.read(number, range).await,
            Request::Flush => self.flush(number).await,
            Request::Extents(range) => self.extents(number, range).await,
            Request::Grow(to) => self.grow(number, to).await,
            change => self.change(number, change).await,
        };
        let Some(error) = failed else { return };
        let end = request.range().end().get();
        let (least, _) = self.life.sizes_since(start);
        match error.failure() {
            Failure::OutOfRange if end > least.get() => {}
            Failure::OutOfRange | Failure::Misaligned => {
                self.life.fail(format!("#{number} was rejected: {error}"));
            }
            Failure::Unsupported if matches!(request, Request::Zero { fast: true, .. }) => {}
            // A version 2 image with a snapshot cannot grow.
            Failure::Unsupported if matches!(request, Request::Grow(_)) => {}
            failure => self.life.count_failure(number, failure),
        }
    }

    async fn read(&mut self, number: u32, range: ByteRange) -> Option<IoError> {
        let life = Rc::clone(&self.life);
        let device = Rc::clone(&life.opened.device);
        let start = life.record.oracle.borrow_mut().start_read();
        let (skip, pieces) = self.pieces(&device.geometry(), range.len.get());
        self.memory[skip..][..range.len.as_usize()].fill(0xee);
        // SAFETY: the pieces lie in `self.memory`, which outlives the request and is not read meanwhile.
        let buffer = unsafe { ReadBuf::from_pieces(&pieces) };
        let result = self.wait_for(number, device.read(range.start, buffer)).await;
        let oracle = &mut *life.record.oracle.borrow_mut();
        if let Some(Ok(())) = result {
            let bytes = &self.memory[skip..][..range.len.as_usize()];
            let first = range.start.get() / SECTOR;
            let seen = oracle.see(start, sectors(range.start.get(), range.len.get()), |sector| {
                let at = ((sector - first) * SECTOR) as usize;
                stamp::read(&bytes[at..][..SECTOR as usize], sector, life.record.key)
            });
            if let Err(violation) = seen {
                life.fail(format!("#{number}: {violation}"));
            }
        }
        oracle.end_read(start);
        result.and_then(Result::err)
    }

    async fn flush(&mut self, number: u32) -> Option<IoError> {
        let life = Rc::clone(&self.life);
        let start = life.record.oracle.borrow_mut().start_flush();
        let size = life.record.sizes.borrow().start_flush();
        let result = self.wait_for(number, life.opened.device.flush()).await;
        if let Some(Ok(())) = result {
            life.record.oracle.borrow_mut().end_flush(start);
            life.record.sizes.borrow_mut().end_flush(size);
        }
        if let Some(Err(error)) = &result
            && life.expectations.fails_only_with_a_disk
            && life.expectations.room_is_short
            && error.failure() == Failure::NoSpace
        {
            life.fail(format!("#{number}: there is no space for acknowledged data: {error}"));
        }
        result.and_then(Result::err)
    }

    async fn grow(&mut self, number: u32, to: ByteLen) -> Option<IoError> {
        let life = Rc::clone(&self.life);
        let device = Rc::clone(&life.opened.device);
        let (before, generation_before) = (device.geometry().size, device.size_changes().generation());
        life.record.sizes.borrow_mut().start_growth(to);
        life.record.oracle.borrow_mut().grow(to.get() / SECTOR);
        let result = self.wait_for(number, Io::task(device.grow(to))).await;
        let grown = matches!(result, Some(Ok(())));
        life.see_size(grown.then_some(to));
        if grown && before < to && device.size_changes().generation() == generation_before {
            life.fail(format!("#{number}: a growth was not reported to observers"));
        }
        result.and_then(Result::err)
    }

    async fn change(&mut self, number: u32, request: Request) -> Option<IoError> {
        let life = Rc::clone(&self.life);
        let device = Rc::clone(&life.opened.device);
        let range = request.range();
        let effect = match request {
            Request::Write { .. } => Effect::Holds(Stamp(number)),
            Request::Zero { .. } => Effect::Holds(Stamp::ZEROS),
            _ => Effect::Forgets,
        };
        let changed_sectors = sectors(range.start.get(), range.len.get());
        let change = life.record.oracle.borrow_mut().start_change(changed_sectors, effect);
        let (skip, pieces) = self.pieces(&device.geometry(), range.len.get());
        let (io, durable) = match request {
            Request::Write { fua, .. } => {
                let bytes = &mut self.memory[skip..][..range.len.as_usize()];
                stamp::fill(bytes, changed_sectors.first, Stamp(number), life.record.key);
                // SAFETY: the pieces lie in `self.memory`, which outlives the request and is not changed meanwhile.
                let buffer = unsafe { WriteBuf::from_pieces(&pieces) };
                (device.write(range.start, buffer, WriteFlags { fua }), fua)
            }
            Request::Zero { unmap, fast, fua, .. } => {
                let flags = ZeroFlags { unmap, fua, fast_only: fast };
                (device.write_zeroes(range, flags), fua)
            }
            _ => (device.discard(range), false),
        };
        let result = self.wait_for(number, io).await;
        let ending = match &result {
            Some(Ok(())) if durable => Ending::Forced,
            Some(Ok(())) => Ending::Done,
            _ => Ending::Unsure,
        };
        life.record.oracle.borrow_mut().end_change(change, ending);
        result.and_then(Result::err)
    }

    async fn extents(&mut self, number: u32, range: ByteRange) -> Option<IoError> {
        let life = Rc::clone(&self.life);
        let start = life.record.oracle.borrow_mut().start_read();
        let limit = self.random.between(1, 4) as usize;
        let result = life.opened.device.extents(range, limit).await;
        let oracle = &mut *life.record.oracle.borrow_mut();
        let mut at = range.start;
        for extent in result.as_deref().unwrap_or_default() {
            if extent.range.start != at || extent.range.is_empty() || !range.contains(extent.range) {
                life.fail(format!("#{number}: extent {} does not begin at {at}", extent.range));
                break;
            }
            at = extent.range.end();
            if extent.kind != ExtentKind::Data {
                let part = sectors(extent.range.start.get(), extent.range.len.get());
                if let Err(violation) = oracle.see(start, part, |_| Ok(Stamp::ZEROS)) {
                    life.fail(format!("#{number}: {:?} {}: {violation}", extent.kind, extent.range));
                }
            }
        }
        oracle.end_read(start);
        match &result {
            Ok(found) if found.is_empty() || found.len() > limit => {
                life.fail(format!("#{number}: {} extents, expected 1 to {limit}", found.len()));
            }
            Ok(_) => life.log(Event::Done { number }),
            Err(error) => life.log(Event::Failed { number, failure: error.failure() }),
        }
        result.err()
    }

    /// Sends an invalid request, which must fail without effect.
    async fn send_invalid(&mut self, request: Request, expected: Failure) {
        let life = Rc::clone(&self.life);
        let device = Rc::clone(&life.opened.device);
        let number = life.record.number();
        life.log(Event::Started { number, request });
        let start = life.record.oracle.borrow().now();
        let (range, geometry) = (request.range(), device.geometry());
        let (_, pieces) = self.pieces(&geometry, range.len.get());
        let io = match request {
            Request::Read(range) => {
                // SAFETY: the pieces lie in `self.memory`, which outlives the request and is not read meanwhile.
                device.read(range.start, unsafe { ReadBuf::from_pieces(&pieces) })
            }
            Request::Write { range, fua } => {
                // SAFETY: the pieces lie in `self.memory`, which outlives the request and is not changed meanwhile.
                device.write(range.start, unsafe { WriteBuf::from_pieces(&pieces) }, WriteFlags { fua })
            }
            Request::Zero { range, unmap, fua, .. } => {
                device.write_zeroes(range, ZeroFlags { unmap, fua, fast_only: false })
            }
            _ => device.discard(range),
        };
        let result = self.wait_for(number, io).await;
        let end = range.checked_end().map_or(ByteLen::new(u64::MAX), |end| end - ByteOffset::ZERO);
        let (_, most) = life.sizes_since(start);
        match result {
            // The request was abandoned, or the disk has grown.
            None => {}
            Some(_) if expected == Failure::OutOfRange && end <= most => {}
            Some(Err(error)) if error.failure() == expected => {}
            Some(result) => life.fail(format!("#{number} should fail with {expected:?}, but returned {result:?}")),
        }
    }
}
