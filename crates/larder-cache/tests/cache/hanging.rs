//! Cache device that does not answer: the disk works without it.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::simulated::{
    DeviceStop, FaultEffect, InjectedFault, SimulatedDevice, SimulatedMedium, SimulatedOptions,
};
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, IoResult, Loop, Operation, ReadBuf, WriteBuf, WriteFlags,
    ZeroFlags, join,
};
use larder_cache::{Cache, CacheMode, CacheOpenOptions, PersistOptions};
use smallvec::SmallVec;

use super::devices::{self, Notes, make};

const LINE: u64 = devices::LINE as u64;

struct Stack {
    on: Loop,
    disk: Rc<SimulatedDevice>,
    fast: Rc<SimulatedDevice>,
    notes: Notes,
    cache: Rc<Cache>,
}

/// Opens a device with latency.
fn device(on: &Loop, name: &str, medium: SimulatedMedium) -> Rc<SimulatedDevice> {
    let options = SimulatedOptions { name: name.to_owned(), ..SimulatedOptions::default() };
    SimulatedDevice::open(on, medium, options)
}

fn open(
    on: &Loop,
    disk: &Rc<SimulatedDevice>,
    fast: &Rc<SimulatedDevice>,
    notes: &Notes,
    mode: CacheMode,
) -> Rc<Cache> {
    let options = CacheOpenOptions { mode: Some(mode), ..devices::options(notes) };
    on.block_on(devices::open(on, disk, fast, options))
}

impl Stack {
    /// Returns a stack with lines 0 to 15 cached.
    fn new(mode: CacheMode) -> Self {
        let on = Loop::simulated().expect("a loop");
        let disk = device(&on, "disk", SimulatedMedium::new(ByteLen::mib(1), 512));
        let fast = device(&on, "fast", SimulatedMedium::new(ByteLen::kib(512), 512));
        on.block_on(make(&fast, 1, mode, disk.geometry().size));
        let notes = Notes::default();
        let cache = open(&on, &disk, &fast, &notes, mode);
        let stack = Self { on, disk, fast, notes, cache };
        for line in 0..16 {
            stack.write(line, 1).expect("written");
            stack.read(line).expect("read");
        }
        stack.flush().expect("flushed");
        let hits = stack.cache.statistics().hits;
        (0..16).for_each(|line| assert_eq!(stack.read(line).expect("read"), 1));
        assert_eq!(stack.cache.statistics().hits, hits + 16);
        stack
    }

    /// Returns the result of a request, which must complete within 60 s: no guest waits longer.
    fn wait<T>(&self, request: impl Future<Output = IoResult<T>>) -> IoResult<T> {
        let limit = Duration::from_secs(60);
        self.on.block_on(self.on.timeout(limit, request)).expect("it hangs")
    }

    fn read(&self, line: u64) -> IoResult<u8> {
        self.wait(read(&*self.cache, line))
    }

    fn write(&self, line: u64, byte: u8) -> IoResult {
        self.wait(write(&*self.cache, line, byte))
    }

    fn flush(&self) -> IoResult {
        self.wait(self.cache.flush())
    }

    /// Makes the cache device answer no request, or none of one kind.
    fn hang(&self, operation: Option<Operation>) {
        let fault = InjectedFault::always(FaultEffect::Hang);
        self.fast.inject(operation.map_or(fault, |operation| fault.on(operation)));
    }

    /// Makes the cache device answer again, also the earlier requests.
    fn answer(&self) {
        self.fast.clear_faults();
        self.fast.release();
        self.on.block_on(self.on.sleep(Duration::from_secs(2)));
    }

    fn on_disk(&self, line: u64) -> u8 {
        self.on.block_on(read(&*self.disk, line)).expect("read")
    }
}

async fn read(device: &dyn BlockDevice, line: u64) -> IoResult<u8> {
    let mut bytes = AlignedBuf::zeroed(LINE as usize);
    let at = ByteOffset::new(line * LINE);
    device.read(at, ReadBuf::new(&mut bytes)).await?;
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "line {line} is of two minds");
    Ok(bytes[0])
}

async fn write(device: &dyn BlockDevice, line: u64, byte: u8) -> IoResult {
    let bytes = [byte; LINE as usize];
    let at = ByteOffset::new(line * LINE);
    device.write(at, WriteBuf::new(&bytes), WriteFlags::NONE).await
}

/// Spawns a read of a cached line; the cell gets its result when it has ended.
fn spawn_read(stack: &Stack, line: u64) -> Rc<Cell<Option<u8>>> {
    let found = Rc::new(Cell::new(None));
    let (cache, theirs) = (Rc::clone(&stack.cache), Rc::clone(&found));
    stack.on.spawn(async move {
        theirs.set(read(&*cache, line).await.ok());
    });
    stack.on.block_on(stack.on.sleep(Duration::from_millis(1)));
    found
}

/// After the cache device hangs in any way, all requests are served by the disk.
#[test]
fn hanging_device_is_bypassed() {
    let kinds = [None, Some(Operation::Write), Some(Operation::Flush)];
    for mode in [CacheMode::WriteThrough, CacheMode::WriteAround] {
        for kind in kinds {
            let stack = Stack::new(mode);
            stack.hang(kind);
            // Until the timeout, a line is written and read again and again.
            let mut byte = 1;
            while stack.cache.is_working() {
                byte = byte % 200 + 1;
                stack.write(3, byte).expect("written");
                assert_eq!(stack.on_disk(3), byte);
                match kind {
                    // The read itself would wait for the device.
                    None => {}
                    Some(_) => assert_eq!(stack.read(3).expect("read"), byte),
                }
                stack.flush().expect("flushed");
            }
            assert_eq!(stack.notes.detaches(), 1, "{mode:?} {kind:?}");
            for line in 0..32 {
                let is = stack.read(line).expect("read");
                assert_eq!(is, stack.on_disk(line));
                stack.write(line, 7).expect("written");
                assert_eq!(stack.read(line).expect("read"), 7);
            }
            stack.flush().expect("flushed");
            let zeroed = stack.cache.write_zeroes(ByteRange::new(0, 8 * LINE), ZeroFlags::default());
            stack.on.block_on(zeroed).expect("zeroed");
            assert_eq!(stack.read(3).expect("read"), 0);
            let errors = stack.cache.statistics();
            assert!(errors.read_errors + errors.write_errors > 0, "{errors:?}");
            stack.wait(stack.cache.close()).expect("closed");
        }
    }
}

/// While a read waits for a device that hangs, writes and other reads of the same line complete.
#[test]
fn waiting_read_blocks_no_other_request() {
    let stack = Stack::new(CacheMode::WriteThrough);
    stack.hang(Some(Operation::Read));
    let found = spawn_read(&stack, 5);
    // The write waits for the reader of the slot, until the cache has failed.
    stack.write(5, 2).expect("written");
    assert!(!stack.cache.is_working());
    assert_eq!((found.get(), stack.read(5).expect("read")), (None, 2));
    stack.write(5, 3).expect("written");
    stack.answer();
    // The read may return any content that the line had during the read.
    assert!(matches!(found.get(), Some(1..=3)), "{:?}", found.get());
    assert_eq!((stack.read(5).expect("read"), stack.on_disk(5)), (3, 3));
}

/// Reads that come while others have waited for seconds go to the disk, and the cache is used again afterwards.
#[test]
fn reads_bypass_late_device() {
    let stack = Stack::new(CacheMode::WriteThrough);
    stack.hang(Some(Operation::Read));
    let found = spawn_read(&stack, 5);
    stack.on.block_on(stack.on.sleep(Duration::from_secs(5)));
    assert!(stack.cache.is_working());
    assert_eq!(stack.read(6).expect("read"), 1);
    assert!(stack.cache.is_working() && found.get().is_none());
    // The device was only slow.
    stack.answer();
    assert_eq!(found.get(), Some(1));
    let hits = stack.cache.statistics().hits;
    assert_eq!(stack.read(6).expect("read"), 1);
    assert!(stack.cache.is_working() && stack.cache.statistics().hits > hits);
}

/// Requests that a hanging device completes late do not affect any data that is read, in this process or the next.
#[test]
fn late_completions_are_not_trusted() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        let stack = Stack::new(mode);
        stack.on.block_on(stack.cache.set_mode(mode)).expect("noted");
        stack.on.block_on(stack.cache.clean()).expect("clean");
        stack.hang(Some(Operation::Write));
        let mut wanted = HashMap::new();
        for line in 0..24 {
            stack.write(line, 2).expect("written");
            stack.write(line, 3).expect("written");
            wanted.insert(line, 3);
        }
        assert!(!stack.cache.is_working());
        // Now the device completes the first writes.
        stack.answer();
        let check = |cache: &Rc<Cache>| {
            for (line, byte) in &wanted {
                let found = stack.on.block_on(read(&**cache, *line)).expect("read");
                assert_eq!(found, *byte, "{mode:?}, line {line}");
            }
        };
        check(&stack.cache);
        stack.flush().expect("flushed");
        let (disk, fast) = (stack.disk.stop(DeviceStop::Kill), stack.fast.stop(DeviceStop::Kill));
        let (disk, fast) = (device(&stack.on, "disk", disk), device(&stack.on, "fast", fast));
        let next = open(&stack.on, &disk, &fast, &stack.notes, mode);
        check(&next);
    }
}

/// Lets the device hang while lines 2, 3 and 9 are dirty, then overwrites line 2 and the first sector of line 3.
fn lose_some() -> Stack {
    let stack = Stack::new(CacheMode::WriteBack);
    stack.on.block_on(stack.cache.clean()).expect("clean");
    for line in [2, 3, 9] {
        stack.write(line, 2).expect("written");
    }
    assert_eq!(stack.cache.statistics().dirty_lines, 3);
    stack.flush().expect("flushed");
    stack.hang(None);
    stack.write(20, 4).expect("goes to the disk");
    assert!(!stack.cache.is_working());
    for line in 0..32 {
        let is_lost = [2, 3, 9].contains(&line);
        assert_eq!(stack.read(line).is_err(), is_lost, "line {line}");
    }
    // The device gets no more requests as long as it does not answer.
    let asked = stack.cache.statistics().cache_read;
    stack.read(9).expect_err("not answered");
    assert_eq!(stack.cache.statistics().cache_read, asked);
    // Data that is overwritten is no longer lost.
    stack.write(2, 5).expect("written");
    assert_eq!(stack.read(2).expect("read"), 5);
    let sector = [5; 512];
    let at = ByteOffset::new(3 * LINE);
    let written = stack.cache.write(at, WriteBuf::new(&sector), WriteFlags::NONE);
    stack.on.block_on(written).expect("written");
    let mut read = [0; 512];
    let first = stack.cache.read(at, ReadBuf::new(&mut read));
    stack.on.block_on(first).expect("read");
    assert_eq!(read, sector);
    stack.read(3).expect_err("the rest is lost");
    stack
}

/// While the device hangs, only reads of dirty data fail; once it answers, that data is written to the disk.
#[test]
fn hanging_device_fails_only_dirty_reads() {
    let stack = lose_some();
    // The dirty data could not be made durable.
    stack.flush().expect_err("not durable");
    stack.answer();
    // The dirty data is written to the disk without a request.
    assert_eq!(stack.cache.statistics().dirty_lines, 0);
    check_rescued(&stack.on, &*stack.cache);
    check_rescued(&stack.on, &*stack.disk);
    stack.flush().expect("flushed");
    assert!(!stack.cache.is_working());
}

/// Many concurrent flushes on a failed cache all fail in bounded time.
#[test]
fn concurrent_failing_flushes_complete() {
    let stack = lose_some();
    let flushes = (0..200).map(|_| stack.cache.flush());
    stack.wait(join(flushes.collect::<SmallVec<[_; 2]>>())).expect_err("not durable");
}

/// A server that stops may have to wait for such a flush, which no guest has requested.
#[test]
fn persisted_cache_flushes_no_more() {
    let on = Loop::simulated().expect("a loop");
    on.block_on(async {
        let disk = devices::device(&on, SimulatedMedium::new(ByteLen::mib(1), 512));
        let fast = devices::device(&on, SimulatedMedium::new(ByteLen::kib(512), 512));
        make(&fast, 1, CacheMode::WriteThrough, disk.geometry().size).await;
        let options = CacheOpenOptions {
            persist: PersistOptions { delay_max: Duration::from_secs(5), lines_max: Some(2) },
            ..devices::options(&Notes::default())
        };
        let cache = devices::open(&on, &disk, &fast, options).await;
        // The first line starts the timer. The second one exceeds the limit, so both are persisted at once.
        for line in 0..2 {
            write(&*cache, line, 1).await.expect("written");
        }
        on.sleep(Duration::from_secs(1)).await;
        let counts = cache.statistics();
        assert_eq!((counts.lines, counts.unpersisted), (2, 0));
        fast.inject(InjectedFault::always(FaultEffect::Hang).on(Operation::Flush));
        on.sleep(Duration::from_secs(60)).await;
        assert!(cache.is_working(), "a flush has no answer");
    });
}

/// Checks that line 9 and most of line 3 are as before the device hung, and that later writes are there.
fn check_rescued(on: &Loop, device: &dyn BlockDevice) {
    assert_eq!(on.block_on(read(device, 2)).expect("read"), 5);
    assert_eq!(on.block_on(read(device, 9)).expect("read"), 2);
    let mut bytes = [0; LINE as usize];
    let line = device.read(ByteOffset::new(3 * LINE), ReadBuf::new(&mut bytes));
    on.block_on(line).expect("read");
    let (first, rest) = bytes.split_at(512);
    assert_eq!((first, rest), (&[5; 512][..], &[2; LINE as usize - 512][..]));
}

/// Writes made while the device hangs survive a kill and a power loss, and so does the dirty data before.
#[test]
fn writes_past_hanging_device_survive_crash() {
    for how in [DeviceStop::Kill, DeviceStop::PowerLoss] {
        let stack = lose_some();
        let (disk, fast) = (stack.disk.stop(how), stack.fast.stop(how));
        let disk = device(&stack.on, "disk", disk);
        let fast = device(&stack.on, "fast", fast);
        let next = open(&stack.on, &disk, &fast, &stack.notes, CacheMode::WriteBack);
        check_rescued(&stack.on, &*next);
    }
}

/// A cache whose device hangs can be closed; that fails only if dirty data cannot be read.
#[test]
fn cache_closes_while_device_hangs() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        for kind in [None, Some(Operation::Flush), Some(Operation::Write)] {
            let stack = Stack::new(mode);
            stack.write(40, 2).expect("written");
            let is_dirty = stack.cache.statistics().dirty_lines > 0;
            stack.hang(kind);
            let closed = stack.wait(stack.cache.close());
            // Readable dirty data is on the disk then.
            assert_eq!(closed.is_err(), is_dirty && kind.is_none(), "{mode:?} {kind:?}");
            assert!(!stack.cache.is_working());
            assert_eq!(stack.notes.detaches(), 1);
        }
    }
}
