//! Failures that other caches of this kind had, each provoked on purpose. The simulator finds more.

use std::rc::Rc;

use larder_block::backend::simulated::{DeviceStop, FaultEffect, InjectedFault, SimulatedDevice, SimulatedMedium};
use larder_block::{
    BlockDevice, ByteLen, ByteOffset, ByteRange, IoResult, Loop, ReadBuf, WriteBuf, WriteFlags, ZeroFlags,
};
use larder_cache::{Cache, CacheMode, CacheOpenOptions};

use super::devices::{self, LINE, Notes, device, make};

const SECTOR: usize = 512;
/// Sectors of a line.
const PER_LINE: usize = LINE / SECTOR;

/// Disk with a cache, and the expected content of each sector: a byte that all its bytes equal.
struct Rig {
    on: Loop,
    disk: Rc<SimulatedDevice>,
    fast: Rc<SimulatedDevice>,
    notes: Notes,
    boot: u8,
    cache: Rc<Cache>,
    wanted: Vec<u8>,
}

fn open(on: &Loop, disk: &Rc<SimulatedDevice>, fast: &Rc<SimulatedDevice>, notes: &Notes, boot: u8) -> Rc<Cache> {
    let options = CacheOpenOptions { boot: [boot; 16], ..devices::options(notes) };
    on.block_on(devices::open(on, disk, fast, options))
}

impl Rig {
    fn new(mode: CacheMode, disk: ByteLen, fast: ByteLen) -> Self {
        let on = Loop::simulated().expect("no kernel is needed");
        let (disk, fast) = (device(&on, SimulatedMedium::new(disk, 512)), device(&on, SimulatedMedium::new(fast, 512)));
        on.block_on(make(&fast, 1, CacheMode::WriteThrough, disk.geometry().size));
        let notes = Notes::default();
        let cache = open(&on, &disk, &fast, &notes, 1);
        on.block_on(cache.set_mode(mode)).expect("noted");
        Self { wanted: vec![0; disk.geometry().size.as_usize() / SECTOR], on, disk, fast, notes, boot: 1, cache }
    }

    /// Kills the process or cuts the host's power, and opens the cache that is left.
    fn restart(&mut self, how: DeviceStop) {
        let (disk, fast) = (self.disk.stop(how), self.fast.stop(how));
        self.boot += u8::from(how == DeviceStop::PowerLoss);
        self.disk = device(&self.on, disk);
        self.fast = device(&self.on, fast);
        self.cache = open(&self.on, &self.disk, &self.fast, &self.notes, self.boot);
    }

    fn write(&mut self, sector: usize, count: usize, byte: u8) -> IoResult {
        let bytes = vec![byte; count * SECTOR];
        let at = ByteOffset::new((sector * SECTOR) as u64);
        let written = self.cache.write(at, WriteBuf::new(&bytes), WriteFlags::NONE);
        self.on.block_on(written)?;
        self.wanted[sector..sector + count].fill(byte);
        Ok(())
    }

    fn flush(&self) -> IoResult {
        self.on.block_on(self.cache.flush())
    }

    /// Reads sectors and checks their content.
    fn read(&self, sector: usize, count: usize) -> IoResult {
        let mut bytes = vec![0xee; count * SECTOR];
        let at = ByteOffset::new((sector * SECTOR) as u64);
        self.on.block_on(self.cache.read(at, ReadBuf::new(&mut bytes)))?;
        for (index, found) in bytes.chunks(SECTOR).enumerate() {
            let wanted = self.wanted[sector + index];
            assert!(
                found.iter().all(|byte| *byte == wanted),
                "sector {}: {} instead of {wanted}",
                sector + index,
                found[0]
            );
        }
        Ok(())
    }

    fn read_all(&self) {
        for line in 0..self.wanted.len() / PER_LINE {
            self.read(line * PER_LINE, PER_LINE).expect("can be read");
        }
    }
}

/// Writes lines and sectors, reads and flushes on a disk of 48 lines.
fn work(rig: &mut Rig) {
    let is_written_back = rig.cache.mode() == CacheMode::WriteBack;
    let mut state = 1_u32;
    for step in 0..90 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (kind, line, part) = (state >> 29, (state >> 16) as usize % 48, (state >> 8) as usize % PER_LINE);
        let byte = 1 + step;
        match kind {
            0..=2 => rig.write(line * PER_LINE, PER_LINE, byte).expect("written"),
            3 => rig.write(line * PER_LINE + part, 1, byte).expect("written"),
            4 | 5 => {
                let read = rig.read(line * PER_LINE, PER_LINE);
                // A read of lost dirty data fails once.
                assert!(read.is_ok() || is_written_back, "{read:?}");
            }
            6 => rig.flush().expect("flushed"),
            _ => rig.on.block_on(rig.on.sleep(std::time::Duration::from_secs(3))),
        }
    }
    rig.flush().expect("flushed");
}

/// After the failure of any single request to the cache device and a restart, all data is right.
#[test]
fn any_single_cache_request_may_fail() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack, CacheMode::WriteAround] {
        let mut failing = 0;
        loop {
            let mut rig = Rig::new(mode, ByteLen::kib(192), ByteLen::kib(160));
            let fault = InjectedFault::once(FaultEffect::Fail(larder_block::Failure::Os(5)));
            rig.fast.inject(fault.after(failing));
            work(&mut rig);
            let has_failed = rig.fast.failures() > 0;
            let how = [DeviceStop::Kill, DeviceStop::PowerLoss][failing as usize % 2];
            rig.restart(how);
            rig.read_all();
            work(&mut rig);
            rig.restart(DeviceStop::PowerLoss);
            rig.read_all();
            if !has_failed {
                break;
            }
            failing += 1;
        }
        assert!(failing > 20, "{mode:?}: only {failing} requests");
    }
}

/// A new cache on a used device has no line of the old one, even with the same UUID.
#[test]
fn recreated_cache_has_no_old_lines() {
    for uuid in [1, 2] {
        let mut rig = Rig::new(CacheMode::WriteThrough, ByteLen::kib(192), ByteLen::kib(256));
        work(&mut rig);
        rig.on.block_on(rig.cache.close()).expect("closed");
        rig.restart(DeviceStop::Kill);
        assert!(rig.cache.statistics().lines > 0 || rig.on.block_on(rig.cache.load_all()).is_ok());
        assert!(rig.cache.statistics().lines > 0);
        rig.on.block_on(rig.cache.close()).expect("closed");
        let (disk, fast) = (rig.disk.stop(DeviceStop::Kill), rig.fast.stop(DeviceStop::Kill));
        (rig.disk, rig.fast) = (device(&rig.on, disk), device(&rig.on, fast));
        // The disk is replaced by another one.
        let whole = ByteRange::new(0, rig.disk.geometry().size.get());
        let cleared = rig.disk.write_zeroes(whole, ZeroFlags::default());
        rig.on.block_on(cleared).expect("cleared");
        rig.wanted.fill(0);
        let size = rig.disk.geometry().size;
        rig.on.block_on(make(&rig.fast, uuid, CacheMode::WriteThrough, size));
        rig.cache = open(&rig.on, &rig.disk, &rig.fast, &rig.notes, 1);
        rig.on.block_on(rig.cache.load_all()).expect("loaded");
        assert_eq!(rig.cache.statistics().lines, 0);
        rig.read_all();
        work(&mut rig);
        rig.restart(DeviceStop::Kill);
        rig.read_all();
    }
}

/// Requests that are larger than the whole cache are served right in all modes.
#[test]
fn requests_may_exceed_cache_size() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack, CacheMode::WriteAround] {
        let mut rig = Rig::new(mode, ByteLen::mib(2), ByteLen::kib(160));
        let all = rig.wanted.len();
        for byte in 1..4 {
            rig.write(0, all, byte).expect("written");
            rig.read(0, all).expect("read");
            rig.write(24, 1, byte + 8).expect("written");
            rig.read(0, all).expect("read");
        }
        rig.flush().expect("flushed");
        rig.restart(DeviceStop::PowerLoss);
        rig.read(0, all).expect("read");
        rig.write(7, all - 9, 77).expect("written");
        rig.restart(DeviceStop::Kill);
        rig.read(0, all).expect("read");
    }
}

/// Every mix of missing, clean and dirty sectors in a line is read and cleaned right, also after a crash.
#[test]
fn line_supports_any_sector_mix() {
    // State of six sectors of each line: 0: not cached; 1: clean; 2: dirty.
    const MIXED: u32 = 6;
    let mix = |line: usize, sector: u32| line / 3_usize.pow(sector) % 3;
    let lines = 3_usize.pow(MIXED);
    for how in [None, Some(DeviceStop::Kill), Some(DeviceStop::PowerLoss)] {
        let len = ByteLen::new((lines * LINE) as u64);
        let mut rig = Rig::new(CacheMode::WriteThrough, len, ByteLen::mib(8));
        rig.on.block_on(rig.cache.set_mode(CacheMode::WriteAround)).expect("noted");
        for line in 0..lines {
            rig.write(line * PER_LINE, PER_LINE, 1 + (line % 100) as u8).expect("written");
        }
        rig.on.block_on(rig.cache.set_mode(CacheMode::WriteBack)).expect("noted");
        for line in 0..lines {
            for sector in 0..MIXED {
                let at = line * PER_LINE + sector as usize;
                match mix(line, sector) {
                    1 => rig.read(at, 1).expect("read"),
                    2 => rig.write(at, 1, 101 + (line % 100) as u8).expect("written"),
                    _ => {}
                }
            }
        }
        rig.flush().expect("flushed");
        if let Some(how) = how {
            rig.restart(how);
        }
        rig.read_all();
        let done = rig.cache.statistics();
        assert!(done.partial_hits > lines as u64 / 2, "{done:?}");
        // Overwrite all lines in pieces that end inside a line.
        let all = rig.wanted.len();
        for start in (3..all - 13).step_by(13) {
            rig.write(start, 5, 250).expect("written");
        }
        rig.read_all();
        rig.on.block_on(rig.cache.close()).expect("closed");
        let mut bytes = vec![0; SECTOR];
        for (sector, wanted) in rig.wanted.iter().enumerate() {
            let at = ByteOffset::new((sector * SECTOR) as u64);
            let read = rig.disk.read(at, ReadBuf::new(&mut bytes));
            rig.on.block_on(read).expect("read");
            assert!(bytes.iter().all(|byte| byte == wanted), "sector {sector}");
        }
    }
}

/// A disk that grew or shrank while the cache was closed is read right.
#[test]
fn resized_disk_is_read_right() {
    for (mode, is_larger) in [
        (CacheMode::WriteThrough, true),
        (CacheMode::WriteThrough, false),
        (CacheMode::WriteBack, true),
        (CacheMode::WriteBack, false),
    ] {
        let mut rig = Rig::new(mode, ByteLen::kib(192), ByteLen::kib(160));
        work(&mut rig);
        let size = ByteLen::kib(if is_larger { 256 } else { 128 });
        let (old, fast) = (rig.disk.stop(DeviceStop::Kill), rig.fast.stop(DeviceStop::Kill));
        let mut medium = SimulatedMedium::new(size, 512);
        let kept = old.size().min(size).as_usize();
        let mut bytes = vec![0; kept];
        old.read(ByteOffset::ZERO, &mut bytes);
        medium.write_durably(ByteOffset::ZERO, &bytes);
        (rig.disk, rig.fast) = (device(&rig.on, medium), device(&rig.on, fast));
        rig.wanted.resize(size.as_usize() / SECTOR, 0);
        rig.cache = open(&rig.on, &rig.disk, &rig.fast, &rig.notes, rig.boot);
        rig.read_all();
        rig.on.block_on(rig.cache.close()).expect("closed");
        rig.restart(DeviceStop::Kill);
        rig.read_all();
    }
}
