//! Changes of what is being fetched: whatever comes first, nobody reads an old byte afterwards.

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
/// What a guest reads before anything is fetched.
const READ: u64 = 4 * BLOCK;

/// A disk that can hold back the answers of reads behind [`READ`]: they read at once, and answer when they may.
struct Gated {
    lower: MemoryDevice,
    closed: Cell<bool>,
    failing: Cell<bool>,
    /// Writes wait for the gate as well, and write then.
    slow_writes: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
    /// Reads of it behind [`READ`].
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
        // A disk may forget what it is told to.
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
    /// What the disk must hold.
    model: RefCell<Vec<u8>>,
}

impl Guest {
    fn new() -> Self {
        let on = Loop::simulated().expect("a loop");
        let disk = Gated::new();
        let device = Prefetch::over(&on, Rc::clone(&disk) as _, PrefetchOptions::default());
        let model: Vec<u8> = (0..SIZE).map(|at| (at / 512 * 7 + at % 5) as u8).collect();
        let write = disk
            .lower
            .write(ByteOffset::ZERO, WriteBuf::new(&model), WriteFlags::NONE);
        on.block_on(write).expect("writes");
        Self {
            on,
            disk,
            device,
            model: RefCell::new(model),
        }
    }

    /// Reads so that something is fetched.
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
            Change::Write => (
                self.device.write(range.start, WriteBuf::new(&bytes), WriteFlags::NONE),
                0xab,
            ),
            Change::Discard => (self.device.discard(range), 0),
            Change::Zeroes => (self.device.write_zeroes(range, ZeroFlags::default()), 0),
        };
        self.on.block_on(io).expect("changes");
        self.model.borrow_mut()[from..to].fill(new);
    }

    /// Somebody else writes to the disk, where something is fetched.
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

/// Ranges around what is fetched, which is from [`READ`] on.
fn ranges() -> Vec<ByteRange> {
    let mut ranges = Vec::new();
    for start in [
        READ - BLOCK,
        READ - 512,
        READ,
        READ + 512,
        READ + BLOCK,
        READ + 3 * BLOCK,
    ] {
        for len in [512, BLOCK, 2 * BLOCK + 512, 16 * BLOCK] {
            ranges.push(ByteRange::new(start, len));
        }
    }
    ranges
}

const CHANGES: [Change; 3] = [Change::Write, Change::Discard, Change::Zeroes];

#[test]
fn what_was_fetched_before_a_change_is_not_read_after_it() {
    for change in CHANGES {
        for range in ranges() {
            let guest = Guest::new();
            guest.read_on();
            guest.change(change, range);
            guest.all_reads_right();
        }
    }
}

#[test]
fn what_is_on_its_way_during_a_change_is_not_read_after_it() {
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

#[test]
fn who_waits_for_what_is_changed_meanwhile_may_read_either_and_then_the_new() {
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

#[test]
fn nothing_is_fetched_of_what_is_being_changed() {
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

#[test]
fn a_fetch_that_fails_is_not_shown() {
    let guest = Guest::new();
    guest.disk.failing.set(true);
    guest.read_on();
    guest.disk.failing.set(false);
    guest.all_reads_right();
    assert!(guest.device.statistics().errors > 0);
}

#[test]
fn nothing_is_under_way_below_when_a_disk_is_closed() {
    let guest = Guest::new();
    guest.disk.closed.set(true);
    guest.read_on();
    let device = Rc::clone(&guest.device);
    let closing = guest.on.spawn_with_result(async move { device.close().await });
    guest.on.block_on(larder_block::event_loop::yield_now());
    guest.disk.open();
    guest.on.block_on(closing).expect("closes");
}

/// As time goes in the simulation.
const MOMENT: Duration = Duration::from_millis(1);
const BELIEVED: Duration = Duration::from_secs(2);

#[test]
fn what_others_have_changed_is_seen_when_what_was_fetched_is_too_old() {
    for changed_by_others in [false, true] {
        let guest = Guest::new();
        if changed_by_others {
            guest.device.believe_for(BELIEVED);
        }
        guest.read_on();
        guest.wait(MOMENT);
        let old = guest.reads(READ, 512);
        guest.change_behind_its_back();
        assert!(
            guest.reads(READ, 512) == old,
            "it was not in memory, so nothing is shown here"
        );
        guest.wait(BELIEVED - 2 * MOMENT);
        assert!(guest.reads(READ, 512) == old);
        guest.wait(BELIEVED + 2 * MOMENT);
        match changed_by_others {
            true => guest.all_reads_right(),
            false => assert!(guest.reads(READ, 512) == old),
        }
    }
}

#[test]
fn what_is_fetched_later_is_believed_as_long_and_no_longer() {
    for quarters in 0..8 {
        let guest = Guest::new();
        guest.device.believe_for(BELIEVED);
        guest.read_on();
        guest.wait(BELIEVED * quarters / 4);
        // The stream goes on, and more is fetched for it.
        guest.reads_right(READ, 4 * BLOCK);
        guest.wait(MOMENT);
        assert!(guest.device.statistics().unread > 0);
        guest.change_behind_its_back();
        guest.wait(2 * BELIEVED);
        assert_eq!(guest.device.statistics().unread, 0);
        guest.all_reads_right();
        // Where there is nothing, nobody looks.
        guest.wait(3 * BELIEVED);
        let polls = guest.on.statistics().task_polls;
        guest.wait(1000 * BELIEVED);
        assert!(guest.on.statistics().task_polls < polls + 10);
    }
}

#[test]
fn what_was_fetched_for_clients_that_have_left_is_not_for_the_next() {
    for is_on_its_way in [false, true] {
        let guest = Guest::new();
        guest.device.believe_for(BELIEVED);
        guest.disk.closed.set(is_on_its_way);
        guest.read_on();
        guest.wait(MOMENT);
        guest.change_behind_its_back();
        guest.device.clients_left();
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
    guest.device.clients_left();
    assert_eq!(guest.device.statistics().unread, unread, "nobody else writes there");
}
