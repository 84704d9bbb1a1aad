//! Races of changes with fetches: in any order, no read gets a stale byte after a change.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use larder_block::backend::memory::MemoryDevice;
use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, Failure, Geometry, Io, IoError, IoResult, Loop,
    Operation, ReadBuf, SizeChanges, WriteBuf, WriteFlags, ZeroFlags,
};
use larder_prefetch::{Prefetch, PrefetchOptions};

const BLOCK: u64 = 4096;
const SIZE: u64 = 64 * BLOCK;
/// Bytes that a guest reads before a fetch starts.
const READ: u64 = 4 * BLOCK;

/// Disk that can delay the completion of reads after [`READ`]: they read at once, and complete when the gate opens.
struct Gated {
    lower: MemoryDevice,
    closed: Cell<bool>,
    failing: Cell<bool>,
    /// Set if writes wait for the gate too, before they write.
    slow_writes: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
    /// Reads after [`READ`].
    reads: Cell<u32>,
    under_way: Cell<u32>,
}

impl Gated {
    fn new() -> Rc<Self> {
        Rc::new(Self {
            lower: MemoryDevice::new(ByteLen::new(SIZE), 512),
            closed: Cell::new(false),
            failing: Cell::new(false),
            slow_writes: Cell::new(false),
            waiting: RefCell::default(),
            reads: Cell::new(0),
            under_way: Cell::new(0),
        })
    }

    fn open(&self) {
        self.closed.set(false);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    async fn opened(&self) {
        std::future::poll_fn(|context| match self.closed.get() {
            true => {
                self.waiting.borrow_mut().push(context.waker().clone());
                Poll::Pending
            }
            false => Poll::Ready(()),
        })
        .await;
    }
}

impl BlockDevice for Gated {
    fn name(&self) -> &Rc<str> {
        self.lower.name()
    }

    fn geometry(&self) -> Geometry {
        self.lower.geometry()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let is_ahead = start.get() >= READ;
        self.reads.set(self.reads.get() + u32::from(is_ahead));
        if is_ahead && self.failing.get() {
            let range = start.range(buffer.byte_len());
            let error = IoError::new(self.name(), Operation::Read, range, Failure::Invalid);
            return Io::task(async { Err(error) });
        }
        let read = self.lower.read(start, buffer);
        self.under_way.set(self.under_way.get() + 1);
        Io::task(async move {
            let result = read.await;
            if is_ahead {
                self.opened().await;
            }
            self.under_way.set(self.under_way.get() - 1);
            result
        })
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        Io::task(async move {
            if self.slow_writes.get() {
                self.opened().await;
            }
            self.lower.write(start, buffer, flags).await
        })
    }

    fn flush(&self) -> Io<'_> {
        self.lower.flush()
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        // A discard may erase the data.
        self.lower.write_zeroes(range, ZeroFlags::default())
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.lower.write_zeroes(range, flags)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        self.lower.extents(range, limit)
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        assert_eq!(self.under_way.get(), 0, "reads are under way");
        self.lower.close()
    }

    fn size_changes(&self) -> &SizeChanges {
        self.lower.size_changes()
    }
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Write,
    Discard,
    Zeroes,
}

struct Guest {
    on: Loop,
    disk: Rc<Gated>,
    device: Rc<Prefetch>,
    /// Expected content of the disk.
    model: RefCell<Vec<u8>>,
}

impl Guest {
    fn new() -> Self {
        let on = Loop::simulated().expect("a loop");
        let disk = Gated::new();
        let device = Prefetch::new(&on, Rc::clone(&disk) as _, PrefetchOptions::default());
        let model: Vec<u8> = (0..SIZE).map(|at| (at / 512 * 7 + at % 5) as u8).collect();
        let write = disk.lower.write(ByteOffset::ZERO, WriteBuf::new(&model), WriteFlags::NONE);
        on.block_on(write).expect("writes");
        Self { on, disk, device, model: RefCell::new(model) }
    }

    /// Reads sequentially, so that a fetch starts.
    fn read_on(&self) {
        for at in (0..READ).step_by(BLOCK as usize) {
            self.reads_right(at, BLOCK);
        }
        self.on.block_on(larder_block::event_loop::yield_now());
        assert!(self.disk.reads.get() > 0, "nothing is fetched");
    }

    fn change(&self, change: Change, range: ByteRange) {
        let (from, to) = (range.start.get() as usize, range.end().get() as usize);
        let bytes = vec![0xab; to - from];
        let (io, new) = match change {
            Change::Write => (self.device.write(range.start, WriteBuf::new(&bytes), WriteFlags::NONE), 0xab),
            Change::Discard => (self.device.discard(range), 0),
            Change::Zeroes => (self.device.write_zeroes(range, ZeroFlags::default()), 0),
        };
        self.on.block_on(io).expect("changes");
        self.model.borrow_mut()[from..to].fill(new);
    }

    /// Writes to the disk directly, as another program would, where blocks are fetched.
    fn change_behind_its_back(&self) {
        let bytes = vec![0xcd; 4 * BLOCK as usize];
        let start = ByteOffset::new(READ);
        let write = self.disk.lower.write(start, WriteBuf::new(&bytes), WriteFlags::NONE);
        self.on.block_on(write).expect("writes");
        self.model.borrow_mut()[READ as usize..][..bytes.len()].copy_from_slice(&bytes);
    }

    fn wait(&self, time: Duration) {
        self.on.block_on(self.on.sleep(time));
    }

    fn reads(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0x55; len as usize];
        let read = self.device.read(ByteOffset::new(at), ReadBuf::new(&mut bytes));
        self.on.block_on(read).expect("reads");
        bytes
    }

    fn reads_right(&self, at: u64, len: u64) {
        let bytes = self.reads(at, len);
        let model = self.model.borrow();
        assert!(bytes == model[at as usize..(at + len) as usize], "old bytes at {at}");
    }

    fn all_reads_right(&self) {
        for at in (0..SIZE).step_by(BLOCK as usize) {
            self.reads_right(at, BLOCK);
        }
    }
}

/// Returns ranges around the fetched blocks, which begin at [`READ`].
fn ranges() -> Vec<ByteRange> {
    let mut ranges = Vec::new();
    for start in [READ - BLOCK, READ - 512, READ, READ + 512, READ + BLOCK, READ + 3 * BLOCK] {
        for len in [512, BLOCK, 2 * BLOCK + 512, 16 * BLOCK] {
            ranges.push(ByteRange::new(start, len));
        }
    }
    ranges
}

const CHANGES: [Change; 3] = [Change::Write, Change::Discard, Change::Zeroes];

/// Blocks that were fetched before a change are not returned after it.
#[test]
fn change_removes_fetched_blocks() {
    for change in CHANGES {
        for range in ranges() {
            let guest = Guest::new();
            guest.read_on();
            guest.change(change, range);
            guest.all_reads_right();
        }
    }
}

/// Blocks that are being fetched during a change are not returned after it.
#[test]
fn change_discards_blocks_in_flight() {
    for change in CHANGES {
        for range in ranges() {
            let guest = Guest::new();
            guest.disk.closed.set(true);
            guest.read_on();
            guest.change(change, range);
            guest.disk.open();
            guest.all_reads_right();
        }
    }
}

/// A read that waits for a fetch while its range changes returns old or new data; later reads return new data.
#[test]
fn read_waiting_during_change_sees_either() {
    for change in CHANGES {
        for range in ranges() {
            let guest = Guest::new();
            guest.disk.closed.set(true);
            guest.read_on();
            let old = guest.model.borrow().clone();
            let device = Rc::clone(&guest.device);
            let waiting = guest.on.spawn_with_result(async move {
                let mut bytes = vec![0x55; 2 * BLOCK as usize];
                let read = device.read(ByteOffset::new(READ), ReadBuf::new(&mut bytes));
                read.await.expect("reads");
                bytes
            });
            guest.on.block_on(larder_block::event_loop::yield_now());
            guest.change(change, range);
            guest.disk.open();
            let seen = guest.on.block_on(waiting);
            let new = guest.model.borrow().clone();
            for (sector, seen) in seen.chunks(512).enumerate() {
                let at = READ as usize + sector * 512;
                assert!(seen == &old[at..at + 512] || seen == &new[at..at + 512], "neither");
            }
            guest.all_reads_right();
        }
    }
}

/// No fetch of a range starts while a change of the range is under way.
#[test]
fn changing_range_is_not_fetched() {
    let guest = Guest::new();
    guest.disk.slow_writes.set(true);
    let device = Rc::clone(&guest.device);
    let len = 8 * BLOCK as usize;
    let writing = guest.on.spawn_with_result(async move {
        let bytes = vec![0xab; len];
        let write = device.write(ByteOffset::new(READ), WriteBuf::new(&bytes), WriteFlags::NONE);
        write.await
    });
    guest.disk.closed.set(true);
    guest.on.block_on(larder_block::event_loop::yield_now());
    for at in (0..READ).step_by(BLOCK as usize) {
        guest.reads_right(at, BLOCK);
    }
    guest.on.block_on(larder_block::event_loop::yield_now());
    guest.disk.open();
    guest.on.block_on(writing).expect("writes");
    guest.model.borrow_mut()[READ as usize..][..len].fill(0xab);
    guest.all_reads_right();
}

/// An error of a fetch is not returned by any read of the guest.
#[test]
fn failed_fetch_is_not_visible() {
    let guest = Guest::new();
    guest.disk.failing.set(true);
    guest.read_on();
    guest.disk.failing.set(false);
    guest.all_reads_right();
    assert!(guest.device.statistics().errors > 0);
}

/// Closing a disk waits until no fetch is in flight.
#[test]
fn close_waits_for_fetches() {
    let guest = Guest::new();
    guest.disk.closed.set(true);
    guest.read_on();
    let device = Rc::clone(&guest.device);
    let closing = guest.on.spawn_with_result(async move { device.close().await });
    guest.on.block_on(larder_block::event_loop::yield_now());
    guest.disk.open();
    guest.on.block_on(closing).expect("closes");
}

/// Short time in the simulation.
const MOMENT: Duration = Duration::from_millis(1);
const BELIEVED: Duration = Duration::from_secs(2);

/// Changes by other programs are visible once fetched data expires, and without expiry the cached data is returned.
#[test]
fn foreign_changes_are_visible_after_expiry() {
    for changed_by_others in [false, true] {
        let guest = Guest::new();
        if changed_by_others {
            guest.device.set_max_age(BELIEVED);
        }
        guest.read_on();
        guest.wait(MOMENT);
        let old = guest.reads(READ, 512);
        guest.change_behind_its_back();
        assert!(guest.reads(READ, 512) == old, "it was not in memory, so nothing is shown here");
        guest.wait(BELIEVED - 2 * MOMENT);
        assert!(guest.reads(READ, 512) == old);
        guest.wait(BELIEVED + 2 * MOMENT);
        match changed_by_others {
            true => guest.all_reads_right(),
            false => assert!(guest.reads(READ, 512) == old),
        }
    }
}

/// Data that is fetched later expires as well, and no timer runs while there is no data.
#[test]
fn later_fetches_expire_too() {
    for quarters in 0..8 {
        let guest = Guest::new();
        guest.device.set_max_age(BELIEVED);
        guest.read_on();
        guest.wait(BELIEVED * quarters / 4);
        // The stream continues, and more is fetched for it.
        guest.reads_right(READ, 4 * BLOCK);
        guest.wait(MOMENT);
        assert!(guest.device.statistics().unread > 0);
        guest.change_behind_its_back();
        guest.wait(2 * BELIEVED);
        assert_eq!(guest.device.statistics().unread, 0);
        guest.all_reads_right();
        // Without data there is no timer.
        guest.wait(3 * BELIEVED);
        let polls = guest.on.statistics().task_polls;
        guest.wait(1000 * BELIEVED);
        assert!(guest.on.statistics().task_polls < polls + 10);
    }
}

/// Data that was fetched before all clients have left is not returned to the next client.
#[test]
fn leaving_clients_drop_fetched_data() {
    for is_on_its_way in [false, true] {
        let guest = Guest::new();
        guest.device.set_max_age(BELIEVED);
        guest.disk.closed.set(is_on_its_way);
        guest.read_on();
        guest.wait(MOMENT);
        guest.change_behind_its_back();
        guest.device.clients_disconnected();
        let asked = guest.disk.reads.get();
        guest.disk.open();
        guest.wait(MOMENT);
        assert_eq!(guest.disk.reads.get(), asked, "more is fetched, for nobody");
        guest.all_reads_right();
    }
    let guest = Guest::new();
    guest.read_on();
    guest.wait(MOMENT);
    let unread = guest.device.statistics().unread;
    guest.device.clients_disconnected();
    assert_eq!(guest.device.statistics().unread, unread, "nobody else writes there");
}
