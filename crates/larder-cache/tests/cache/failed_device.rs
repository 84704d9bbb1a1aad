//! Failures of a cache device that has dirty data.

use std::rc::Rc;

use larder_block::backend::simulated::{FaultEffect, InjectedFault, SimulatedDevice, SimulatedMedium};
use larder_block::{
    BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, Loop, Operation, ReadBuf, WriteBuf, WriteFlags,
};
use larder_cache::{Cache, CacheMode, CacheOpenOptions};

use super::devices::{self, LINE, Notes, device, make};

async fn opened(on: &Loop, disk: &Rc<SimulatedDevice>, fast: &Rc<SimulatedDevice>, notes: &Notes) -> Rc<Cache> {
    let options = CacheOpenOptions { mode: Some(CacheMode::WriteBack), load_ahead: false, ..devices::options(notes) };
    devices::open(on, disk, fast, options).await
}

/// Returns a disk of 1 MiB, and a device of `fast` bytes with a write-back cache for it.
async fn made(on: &Loop, fast: ByteLen) -> (Rc<SimulatedDevice>, Rc<SimulatedDevice>) {
    let size = ByteLen::mib(1);
    let [disk, fast] = [size, fast].map(|size| device(on, SimulatedMedium::new(size, 512)));
    make(&fast, 7, CacheMode::WriteBack, size).await;
    (disk, fast)
}

async fn write(cache: &Rc<Cache>, at: u64, byte: u8, len: usize) -> Result<(), Failure> {
    let bytes = vec![byte; len];
    let written = cache.write(ByteOffset::new(at), WriteBuf::new(&bytes), WriteFlags::NONE);
    written.await.map_err(|error| error.failure())
}

async fn read(cache: &Rc<Cache>, at: u64) -> Result<u8, Failure> {
    let mut bytes = vec![0xee; 512];
    let read = cache.read(ByteOffset::new(at), ReadBuf::new(&mut bytes)).await;
    read.map_err(|error| error.failure())?;
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "one write made all of it");
    Ok(bytes[0])
}

/// Dirty data that the cache device cannot read can be overwritten; the new data survives the next opening.
#[test]
fn unreadable_dirty_data_can_be_overwritten() {
    let on = Loop::simulated().expect("no kernel is needed");
    on.block_on(async {
        let (disk, fast) = made(&on, ByteLen::kib(256)).await;
        let notes = Notes::default();
        let cache = opened(&on, &disk, &fast, &notes).await;
        for line in 0..4 {
            write(&cache, line * LINE as u64, 1, LINE).await.expect("the cache takes it");
        }
        assert_eq!(cache.statistics().dirty_lines, 4);
        let error = Failure::Os(5);
        fast.inject(InjectedFault::always(FaultEffect::Fail(error)).on(Operation::Read));
        assert_eq!(read(&cache, 0).await, Err(error), "only the cache has it");
        assert!(!cache.is_working());

        // A whole line, a part of another, and a part that is cleared.
        write(&cache, 0, 2, LINE).await.expect("it need not be read");
        write(&cache, LINE as u64 + 1024, 2, 512).await.expect("it need not be read");
        let part = ByteRange::new(2 * LINE as u64 + 1024, 512);
        let zeroed = cache.write_zeroes(part, larder_block::ZeroFlags::default());
        zeroed.await.expect("it need not be read");
        let found = async |cache: &Rc<Cache>| {
            let mut found = Vec::new();
            for at in [0, 4096, 4096 + 1024, 8192, 8192 + 1024, 12288] {
                found.push(read(cache, at).await);
            }
            found
        };
        let wanted = [Ok(2), Err(error), Ok(2), Err(error), Ok(0), Err(error)];
        assert_eq!(found(&cache).await, wanted);
        assert!(notes.detached().is_some(), "who opens it next is to know");
        drop(cache);

        // Once the device works again, the data that was not overwritten is there.
        fast.clear_faults();
        let cache = opened(&on, &disk, &fast, &notes).await;
        assert_eq!(found(&cache).await, [Ok(2), Ok(1), Ok(2), Ok(1), Ok(0), Ok(1)]);
        cache.close().await.expect("both devices work");
        assert_eq!(cache.statistics().dirty_lines, 0);
    });
}

/// Bad sectors of the disk keep only their own lines dirty, and a disk that fails all writes is not tried for each
/// line.
#[test]
fn bad_sector_leaves_other_lines_cleaned() {
    const LINES: u64 = 96;
    let bad = [3, 4, 40, 95];
    let on = Loop::simulated().expect("no kernel is needed");
    on.block_on(async {
        let (disk, fast) = made(&on, ByteLen::mib(1)).await;
        let cache = opened(&on, &disk, &fast, &Notes::default()).await;
        let error = Failure::Os(5);
        for line in bad {
            let range = ByteRange::new(line * LINE as u64, 512);
            disk.inject(InjectedFault::always(FaultEffect::Fail(error)).on(Operation::Write).within(range));
        }
        for line in 0..LINES {
            write(&cache, line * LINE as u64, 1 + line as u8, LINE).await.expect("the cache takes it");
        }
        for _ in 0..2 {
            let cleaned = cache.clean().await.map_err(|error| error.failure());
            assert_eq!(cleaned, Err(error));
            assert_eq!(cache.statistics().dirty_lines, bad.len() as u64);
        }
        disk.inject(InjectedFault::always(FaultEffect::Fail(error)).on(Operation::Write));
        let begin = on.now();
        assert!(cache.clean().await.is_err());
        assert!(on.now().since(begin).as_secs() < 5, "a disk that takes nothing is not asked for each line");
        disk.clear_faults();
        cache.clean().await.expect("it takes everything");
        assert_eq!(cache.statistics().dirty_lines, 0);
        cache.close().await.expect("both devices work");
        for line in 0..LINES {
            let mut bytes = vec![0; LINE];
            let at = ByteOffset::new(line * LINE as u64);
            disk.read(at, ReadBuf::new(&mut bytes)).await.expect("can be read");
            assert!(bytes.iter().all(|byte| *byte == 1 + line as u8), "line {line}");
        }
    });
}
