//! Compare before use: after a kill another program may have changed the disk, so clean lines are compared with it.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::simulated::{
    DeviceStop, FaultEffect, InjectedFault, LatencyDistribution, SimulatedDevice, SimulatedMedium, SimulatedOptions,
};
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, Io, Loop, Operation, ReadBuf, WriteBuf,
    WriteFlags, join,
};
use larder_cache::{
    Cache, CacheMode, CacheOpenError, CacheOpenOptions, PersistOptions, Superblock, Verdict, copy, read_superblock,
};
use smallvec::SmallVec;

use super::devices::{self, LINE, Notes, device, make};

const SECTOR: usize = 512;
const PER_LINE: usize = LINE / SECTOR;
/// Twice as many lines as are compared at once.
const LINES: usize = 128;
const DISK: ByteLen = ByteLen::mib(1);
const FAST: ByteLen = ByteLen::mib(2);
const MODES: [CacheMode; 3] = [CacheMode::WriteThrough, CacheMode::WriteAround, CacheMode::WriteBack];

fn at(sector: usize) -> ByteOffset {
    ByteOffset::new((sector * SECTOR) as u64)
}

fn options(verdict: Verdict) -> CacheOpenOptions {
    CacheOpenOptions {
        verdict,
        persist: PersistOptions { lines_max: Some(4096), ..PersistOptions::default() },
        ..devices::options(&Notes::default())
    }
}

/// Disk with a cache, and the expected content of each sector: a byte that all its bytes equal.
struct Rig {
    on: Loop,
    disk: Rc<SimulatedDevice>,
    fast: Rc<SimulatedDevice>,
    cache: Rc<Cache>,
    wanted: Vec<u8>,
}

impl Rig {
    /// Returns a rig with lines 0 to [`LINES`] cached, clean and persisted.
    fn new(mode: CacheMode) -> Self {
        let on = Loop::simulated().expect("no kernel is needed");
        let [disk, fast] = [DISK, FAST].map(|size| device(&on, SimulatedMedium::new(size, 512)));
        on.block_on(make(&fast, 1, mode, DISK));
        let cache = on.block_on(devices::open(&on, &disk, &fast, options(Verdict::Unchanged)));
        let mut rig = Self { on, disk, fast, cache, wanted: vec![0; DISK.as_usize() / SECTOR] };
        for line in 0..LINES {
            rig.write(line * PER_LINE, PER_LINE, 1);
            rig.read(line * PER_LINE, PER_LINE);
        }
        rig.on.block_on(rig.cache.clean()).expect("clean");
        rig.on.block_on(rig.cache.flush()).expect("flushed");
        rig.sleep(10);
        assert_eq!(rig.hits(), LINES as u64);
        rig
    }

    fn sleep(&self, seconds: u64) {
        self.on.block_on(self.on.sleep(Duration::from_secs(seconds)));
    }

    fn write(&mut self, sector: usize, count: usize, byte: u8) {
        let bytes = vec![byte; count * SECTOR];
        let written = self.cache.write(at(sector), WriteBuf::new(&bytes), WriteFlags::NONE);
        self.on.block_on(written).expect("both devices work");
        self.wanted[sector..sector + count].fill(byte);
    }

    /// Reads sectors and checks their content.
    fn read(&self, sector: usize, count: usize) {
        let mut bytes = vec![0xee; count * SECTOR];
        let read = self.cache.read(at(sector), ReadBuf::new(&mut bytes));
        self.on.block_on(read).expect("both devices work");
        for (index, found) in bytes.chunks(SECTOR).enumerate() {
            let (sector, wanted) = (sector + index, self.wanted[sector + index]);
            assert_eq!(found, [wanted; SECTOR], "sector {sector}, {:?}", self.cache.mode());
        }
    }

    fn read_all(&self) {
        (0..self.wanted.len() / PER_LINE).for_each(|line| self.read(line * PER_LINE, PER_LINE));
    }

    /// Reads all lines that were cached; returns how many reads the cache served entirely.
    fn hits(&self) -> u64 {
        let before = self.cache.statistics().hits;
        (0..LINES).for_each(|line| self.read(line * PER_LINE, PER_LINE));
        self.cache.statistics().hits - before
    }

    /// Kills the process, changes some sectors of the disk as another program would, and opens the cache again.
    fn restart(&mut self, changed: &[usize], byte: u8, verdict: Verdict) {
        let (mut disk, fast) = (self.disk.stop(DeviceStop::Kill), self.fast.stop(DeviceStop::Kill));
        for sector in changed {
            disk.write_durably(at(*sector), &[byte; SECTOR]);
            self.wanted[*sector] = byte;
        }
        self.disk = device(&self.on, disk);
        self.fast = device(&self.on, fast);
        // The first read of the disk is that of the first piece to compare.
        let late = InjectedFault::once(FaultEffect::Delay(Duration::from_secs(60)));
        self.disk.inject(late.on(Operation::Read));
        let opened = devices::open(&self.on, &self.disk, &self.fast, options(verdict));
        self.cache = self.on.block_on(opened);
        self.on.block_on(self.on.sleep(Duration::from_millis(1)));
    }

    fn superblock(&self) -> Superblock {
        let fast: Rc<dyn BlockDevice> = Rc::clone(&self.fast) as _;
        self.on.block_on(read_superblock(&fast)).expect("a cache")
    }

    fn unproven(&self) -> u64 {
        self.cache.statistics().unproven
    }

    /// Waits until everything is compared.
    fn compared(&self) {
        self.sleep(120);
        assert_eq!((self.unproven(), self.superblock().unproven), (0, false));
    }
}

/// Sectors in both pieces, one of them in a line whose other sectors are read first.
const CHANGED: [usize; 4] = [3 * PER_LINE + 2, 17 * PER_LINE, 70 * PER_LINE + 1, 127 * PER_LINE + 7];

/// Changed sectors are read right both before and after their line is compared.
#[test]
fn changed_sectors_are_never_read_stale() {
    for mode in MODES {
        let mut rig = Rig::new(mode);
        rig.restart(&CHANGED, 9, Verdict::Unproven);
        assert_eq!(rig.unproven(), (LINES * LINE) as u64);
        assert!(rig.superblock().unproven);
        rig.read_all();
        // Lines that reads got from the disk were compared at once, in the piece that the task had not begun.
        assert_eq!(rig.unproven(), (LINES / 2 * LINE) as u64);
        rig.compared();
        rig.read_all();
        // The next process trusts the remaining lines.
        rig.restart(&[], 0, Verdict::Unchanged);
        assert_eq!(rig.unproven(), 0);
        rig.read_all();
    }
}

/// If nothing was changed, the comparison drops no line.
#[test]
fn comparing_unchanged_disk_keeps_all_hits() {
    for mode in MODES {
        let mut rig = Rig::new(mode);
        rig.restart(&[], 0, Verdict::Unproven);
        rig.compared();
        assert_eq!(rig.hits(), LINES as u64, "{mode:?}");
        rig.restart(&[], 0, Verdict::Unchanged);
        assert_eq!((rig.hits(), rig.unproven()), (LINES as u64, 0), "{mode:?}");
    }
}

/// Only sectors that differ are dropped.
#[test]
fn comparing_keeps_equal_sectors() {
    let mut rig = Rig::new(CacheMode::WriteThrough);
    rig.restart(&CHANGED, 9, Verdict::Unproven);
    rig.compared();
    let before = rig.cache.statistics().hits;
    for sector in (0..LINES * PER_LINE).filter(|sector| !CHANGED.contains(sector)) {
        rig.read(sector, 1);
    }
    let hits = rig.cache.statistics().hits - before;
    assert_eq!(hits, (LINES * PER_LINE - CHANGED.len()) as u64);
}

/// Lines that were not compared stay unproven, whatever verdict the next opening gets.
#[test]
fn kill_during_comparing_keeps_lines_unproven() {
    for mode in MODES {
        let mut rig = Rig::new(mode);
        rig.restart(&CHANGED, 9, Verdict::Unproven);
        for _ in 0..2 {
            rig.restart(&[], 0, Verdict::Unchanged);
            assert!(rig.superblock().unproven);
            assert!(rig.unproven() > 0);
            rig.read_all();
        }
        rig.compared();
        rig.read_all();
    }
}

/// A clean stop during the comparison makes no line trusted that was not compared.
#[test]
fn clean_stop_keeps_uncompared_lines_unproven() {
    let mut rig = Rig::new(CacheMode::WriteThrough);
    rig.restart(&CHANGED, 9, Verdict::Unproven);
    rig.on.block_on(rig.cache.close()).expect("both devices work");
    let superblock = rig.superblock();
    assert!(superblock.clean && superblock.unproven);
    rig.restart(&[], 0, Verdict::Unchanged);
    assert!(rig.unproven() > 0);
    rig.read_all();
    rig.compared();
    rig.read_all();
}

/// A cache of another size is as unproven as its source.
#[test]
fn copied_cache_stays_unproven() {
    let mut rig = Rig::new(CacheMode::WriteThrough);
    rig.restart(&CHANGED, 9, Verdict::Unproven);
    rig.on.block_on(rig.cache.close()).expect("both devices work");
    let old: Rc<dyn BlockDevice> = device(&rig.on, rig.fast.stop(DeviceStop::Kill)) as _;
    let larger = device(&rig.on, SimulatedMedium::new(ByteLen::mib(4), 512));
    let to: Rc<dyn BlockDevice> = Rc::clone(&larger) as _;
    rig.on.block_on(copy(&old, &to, [2; 16])).expect("has room");
    rig.fast = larger;
    assert!(rig.superblock().unproven);
    rig.restart(&[], 0, Verdict::Unchanged);
    assert!(rig.unproven() > 0);
    rig.read_all();
}

/// Dirty data is trusted, and the rest of the same line is not.
#[test]
fn dirty_sectors_survive_unproven_opening() {
    let mut rig = Rig::new(CacheMode::WriteBack);
    rig.write(4 * PER_LINE, 4 * PER_LINE, 2);
    rig.write(70 * PER_LINE + 3, 1, 2);
    rig.on.block_on(rig.cache.flush()).expect("flushed");
    rig.restart(&CHANGED, 9, Verdict::Unproven);
    rig.read_all();
    rig.write(17 * PER_LINE + 1, 1, 3);
    rig.read_all();
    rig.compared();
    rig.read_all();
    rig.on.block_on(rig.cache.clean()).expect("clean");
    for (sector, wanted) in rig.wanted.iter().enumerate() {
        let mut found = [0; SECTOR];
        let read = rig.disk.read(at(sector), ReadBuf::new(&mut found));
        rig.on.block_on(read).expect("the disk works");
        assert_eq!(found, [*wanted; SECTOR], "sector {sector}");
    }
}

/// A write that a kill interrupts leaves the disk's old data or the new data, never the cache's stale data.
#[test]
fn interrupted_write_leaves_nothing_stale() {
    for mode in MODES {
        let mut rig = Rig::new(mode);
        let sector = 70 * PER_LINE;
        rig.restart(&[sector, sector + 1], 9, Verdict::Unproven);
        // The data does not reach the cache device, nor the disk.
        let data = ByteRange::new(128 << 10, FAST.get() - (128 << 10));
        let stuck = InjectedFault::always(FaultEffect::Hang).on(Operation::Write);
        rig.fast.inject(stuck.within(data));
        rig.disk.inject(stuck);
        let cache = Rc::clone(&rig.cache);
        rig.on.spawn(async move {
            let bytes = [2; SECTOR];
            let _ = cache.write(at(sector), WriteBuf::new(&bytes), WriteFlags::NONE).await;
        });
        rig.sleep(1);
        rig.restart(&[], 0, Verdict::Unchanged);
        let mut found = [0; SECTOR];
        let read = rig.cache.read(at(sector), ReadBuf::new(&mut found));
        rig.on.block_on(read).expect("both devices work");
        assert!(found.iter().all(|byte| [2, 9].contains(byte)), "{mode:?}: {found:?}");
        rig.read(sector + 1, 1);
    }
}

/// Lines of a disk that cannot be read stay unproven, and are compared once it can be read.
#[test]
fn unreadable_lines_are_compared_later() {
    let mut rig = Rig::new(CacheMode::WriteThrough);
    rig.restart(&CHANGED, 9, Verdict::Unproven);
    rig.disk.inject(InjectedFault::always(FaultEffect::Fail(Failure::Os(5))).on(Operation::Read));
    rig.sleep(100);
    assert!(rig.unproven() > 0 && rig.superblock().unproven);
    let mut bytes = [0; SECTOR];
    let read = rig.cache.read(at(CHANGED[0]), ReadBuf::new(&mut bytes));
    assert!(rig.on.block_on(read).is_err());
    rig.disk.clear_faults();
    rig.compared();
    rig.read_all();
}

/// A disk that was certainly changed is handled like one whose stamp differs.
#[test]
fn changed_verdict_empties_or_refuses_cache() {
    let mut rig = Rig::new(CacheMode::WriteThrough);
    rig.restart(&CHANGED, 9, Verdict::Changed);
    assert_eq!((rig.cache.statistics().lines, rig.unproven()), (0, 0));
    rig.read_all();
    let mut rig = Rig::new(CacheMode::WriteBack);
    rig.write(0, 1, 2);
    let disk = device(&rig.on, rig.disk.stop(DeviceStop::Kill));
    let fast = device(&rig.on, rig.fast.stop(DeviceStop::Kill));
    let opened = Cache::open(&rig.on, disk, fast, options(Verdict::Changed));
    let refused = rig.on.block_on(opened).err();
    assert!(matches!(refused, Some(CacheOpenError::Diverged { .. })), "{refused:?}");
}

/// The guest's changes and kills at any moment during the comparison leave no stale data. In between, another program
/// changes the half of the disk that the guest only reads.
#[test]
fn writes_race_with_comparing() {
    let sectors = DISK.as_usize() / SECTOR;
    for mode in MODES {
        let on = Loop::simulated().expect("no kernel is needed");
        let timed = |medium: SimulatedMedium| {
            let options = SimulatedOptions { latency: LatencyDistribution::VARIED, ..SimulatedOptions::default() };
            SimulatedDevice::open(&on, medium, options)
        };
        let [mut disk, mut fast] = [DISK, FAST].map(|size| timed(SimulatedMedium::new(size, 512)));
        on.block_on(make(&fast, 1, mode, DISK));
        let wanted = RefCell::new(vec![0_u8; sectors]);
        for round in 0..40_usize {
            let cache = on.block_on(devices::open(&on, &disk, &fast, options(Verdict::Unproven)));
            let tasks: SmallVec<[Io<'_>; 8]> = (0..8)
                .map(|task| {
                    let (cache, wanted) = (&cache, &wanted);
                    Io::task(async move {
                        let mut state = (round * 8 + task) as u32;
                        let mut random = |below: usize| {
                            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                            (state >> 8) as usize % below
                        };
                        for _ in 0..60 {
                            if task < 4 {
                                let (part, count) = (sectors / 8, 1 + random(12));
                                let sector = task * part + random(part - count);
                                let byte = 1 + random(255) as u8;
                                let bytes = vec![byte; count * SECTOR];
                                cache.write(at(sector), WriteBuf::new(&bytes), WriteFlags::NONE).await?;
                                wanted.borrow_mut()[sector..sector + count].fill(byte);
                                let wanted = wanted.borrow()[sector..sector + count].to_vec();
                                check(cache, &wanted, sector).await;
                            } else {
                                let count = 1 + random(12);
                                let sector = sectors / 2 + random(sectors / 2 - count);
                                let wanted = wanted.borrow()[sector..sector + count].to_vec();
                                check(cache, &wanted, sector).await;
                            }
                        }
                        Ok(())
                    })
                })
                .collect();
            on.block_on(join(tasks)).expect("both devices work");
            if round % 2 == 0 {
                on.block_on(on.sleep(Duration::from_secs(20)));
            }
            drop(cache);
            let mut medium = disk.stop(DeviceStop::Kill);
            for step in 0..20 {
                let sector = sectors / 2 + (round * 7919 + step * 104_729) % (sectors / 2);
                let byte = 1 + ((round + step) % 255) as u8;
                medium.write_durably(at(sector), &[byte; SECTOR]);
                wanted.borrow_mut()[sector] = byte;
            }
            disk = timed(medium);
            fast = timed(fast.stop(DeviceStop::Kill));
        }
    }
}

/// Reads sectors that are not written concurrently, and checks them.
async fn check(cache: &Cache, wanted: &[u8], sector: usize) {
    let mut bytes = AlignedBuf::zeroed(wanted.len() * SECTOR);
    let read = cache.read(at(sector), ReadBuf::new(&mut bytes)).await;
    read.expect("both devices work");
    for (index, (found, wanted)) in bytes.chunks(SECTOR).zip(wanted).enumerate() {
        assert_eq!(found, [*wanted; SECTOR], "sector {}, {:?}", sector + index, cache.mode());
    }
}
