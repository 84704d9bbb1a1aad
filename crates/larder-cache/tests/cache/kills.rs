//! Kills after changes by many concurrent writers; the next process reads what they wrote. The journal is short, so
//! that its beginning is freed all the time.

use std::cell::RefCell;
use std::rc::Rc;

use larder_block::backend::simulated::{
    DeviceStop, LatencyDistribution, SimulatedDevice, SimulatedMedium, SimulatedOptions,
};
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, Io, Loop, ReadBuf, WriteBuf, WriteFlags, ZeroFlags, join,
};
use larder_cache::{Cache, CacheMode};
use smallvec::SmallVec;

use super::devices::{Notes, make, open, options};

const SECTOR: usize = 512;
const DISK: ByteLen = ByteLen::mib(8);
const FAST: ByteLen = ByteLen::mib(12);
const WRITERS: usize = 8;
const CHANGES: usize = 60;

fn timed(on: &Loop, medium: SimulatedMedium) -> Rc<SimulatedDevice> {
    let options = SimulatedOptions { latency: LatencyDistribution::VARIED, ..SimulatedOptions::default() };
    SimulatedDevice::open(on, medium, options)
}

/// Expected byte of each sector: all bytes of a sector are equal.
type Wanted = RefCell<Vec<u8>>;

/// Repeatedly writes whole lines, then zeroes a range whose end is inside such a line, in this writer's part of the
/// disk.
async fn change(cache: &Cache, wanted: &Wanted, part: std::ops::Range<usize>, mut state: u32) {
    let mut random = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    for _ in 0..CHANGES {
        let from = part.start + random((part.len() - 48) / 8) * 8;
        let (count, byte) = (24 + 8 * random(3), 1 + random(255) as u8);
        let bytes = vec![byte; count * SECTOR];
        let at = ByteOffset::new((from * SECTOR) as u64);
        let written = cache.write(at, WriteBuf::new(&bytes), WriteFlags::NONE).await;
        written.expect("both devices work");
        wanted.borrow_mut()[from..from + count].fill(byte);
        let (from, count) = (from + 8 + random(7), 9);
        let range = ByteRange::new((from * SECTOR) as u64, (count * SECTOR) as u64);
        let zeroed = cache.write_zeroes(range, ZeroFlags::default()).await;
        zeroed.expect("both devices work");
        wanted.borrow_mut()[from..from + count].fill(0);
    }
}

fn check(on: &Loop, cache: &Cache, wanted: &Wanted, what: &str) {
    let mut bytes = AlignedBuf::zeroed(DISK.as_usize());
    on.block_on(cache.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes))).expect("can be read");
    for (sector, (found, wanted)) in bytes.chunks(SECTOR).zip(&*wanted.borrow()).enumerate() {
        assert!(found.iter().all(|byte| byte == wanted), "{what}: sector {sector}: {} instead of {wanted}", found[0]);
    }
}

/// All changes of concurrent writers are read right after each of many kills.
#[test]
fn concurrent_changes_survive_repeated_kills() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        let on = Loop::simulated().expect("no kernel is needed");
        let (mut disk, mut fast) =
            (timed(&on, SimulatedMedium::new(DISK, 512)), timed(&on, SimulatedMedium::new(FAST, 512)));
        on.block_on(make(&fast, 1, mode, DISK));
        let wanted: Wanted = RefCell::new(vec![0; DISK.as_usize() / SECTOR]);
        for round in 0..12 {
            let cache = on.block_on(open(&on, &disk, &fast, options(&Notes::default())));
            check(&on, &cache, &wanted, &format!("{mode:?}, round {round}"));
            let part = DISK.as_usize() / SECTOR / WRITERS;
            let writers: SmallVec<[Io<'_>; WRITERS]> = (0..WRITERS)
                .map(|writer| {
                    let (cache, wanted) = (&cache, &wanted);
                    Io::task(async move {
                        let state = (round * WRITERS + writer) as u32;
                        change(cache, wanted, writer * part..(writer + 1) * part, state).await;
                        Ok(())
                    })
                })
                .collect();
            on.block_on(join(writers)).expect("both devices work");
            drop(cache);
            disk = timed(&on, disk.stop(DeviceStop::Kill));
            fast = timed(&on, fast.stop(DeviceStop::Kill));
        }
    }
}
