//! Reads and writes of any length that let other tasks of the disk's thread run.
//!
//! Servers of a disk make all reads and writes through a [`PieceScheduler`]. A long request is split into pieces here,
//! because the memory that a layer needs is bounded by the length of a request, and a guest or a client may send one of
//! gigabytes.
//!
//! A device that completes within the call copies for as long as the request is, and a guest may send thousands of
//! requests at once. So after [`TURN_BYTES_MAX`] bytes the next piece waits for the next turn of the loop. Layers below
//! allocate their resources in the order of requests, so no more than [`IN_FLIGHT_BYTES_MAX`] bytes of pieces are in
//! flight. Pieces wait here in order of arrival. Short requests never wait here, and find a short queue below.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use larder_block::event_loop::yield_now;
use larder_block::signal::Signal;
use larder_block::{
    BlockDevice, ByteOffset, Io, IoResult, Loop, Operation, ReadBuf, RequestWatch, WriteBuf, WriteFlags, check_request,
    join,
};
use smallvec::SmallVec;

/// Longest read or write that the layers below the servers receive, in bytes.
pub const PIECE_BYTES_MAX: usize = 2 << 20;

/// Pieces of one request that are in flight at the same time.
pub const PIECES_IN_FLIGHT_MAX: usize = 16;

/// Bytes that may begin in one turn of the loop; the next piece waits for the next turn. A CPU copies them in about
/// 0.3 ms, and a client's short request needs about four turns.
const TURN_BYTES_MAX: usize = 1 << 20;

/// Bytes of pieces in flight from which the next piece waits until one has ended. It is more than any device needs to
/// be kept busy. A layer may need more memory for a request than the request has bytes: a cache that has every second
/// sector of a range reads it in two requests per 1 KiB.
const IN_FLIGHT_BYTES_MAX: usize = 16 << 20;

/// Longest read or write that never waits, in bytes. The number of these in a turn is bounded where they are taken
/// from a queue or a connection.
const SHORT_REQUEST_BYTES_MAX: usize = 128 << 10;

/// Scheduler of the reads and writes of one server on one loop.
pub struct PieceScheduler(Rc<State>);

struct State {
    on: Loop,
    /// Bytes begun in the current turn.
    started_bytes: Cell<usize>,
    /// Bytes of pieces that have begun and not ended.
    in_flight_bytes: Cell<usize>,
    ended: Signal,
    waiting: RefCell<VecDeque<Rc<PieceState>>>,
    /// True while a task counts turns, because a piece waits.
    is_counting: Cell<bool>,
}

/// Waiting state of a piece.
struct PieceState {
    len: usize,
    has_started: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// Piece that waits or has begun; it ends when this is dropped.
struct Piece<'a> {
    state: &'a State,
    piece_state: Rc<PieceState>,
}

impl Drop for Piece<'_> {
    fn drop(&mut self) {
        if self.piece_state.has_started.get() {
            return self.state.end_piece(self.piece_state.len);
        }
        let mut waiting = self.state.waiting.borrow_mut();
        waiting.retain(|other| !Rc::ptr_eq(other, &self.piece_state));
    }
}

/// Ends a request that [`PieceScheduler::try_start_whole`] started without a [`Piece`].
impl RequestWatch for State {
    fn request_ended(&self, len: u32) {
        self.end_piece(len as usize);
    }
}

impl State {
    fn has_room(&self) -> bool {
        self.in_flight_bytes.get() < IN_FLIGHT_BYTES_MAX
    }

    fn start_piece(&self, len: usize) {
        self.started_bytes.set(self.started_bytes.get() + len);
        self.in_flight_bytes.set(self.in_flight_bytes.get() + len);
    }

    fn end_piece(&self, len: usize) {
        self.in_flight_bytes.set(self.in_flight_bytes.get() - len);
        self.ended.raise();
    }

    /// Begins a piece in this turn, unless it has to wait.
    fn try_start_piece(&self, len: usize) -> bool {
        let starts = self.started_bytes.get() < TURN_BYTES_MAX && self.has_room() && self.waiting.borrow().is_empty();
        if starts {
            self.start_piece(len);
        }
        starts
    }

    /// Waits until a piece may begin.
    async fn wait_for_turn(self: &Rc<Self>, len: usize) -> Piece<'_> {
        let piece = Piece {
            state: self,
            piece_state: Rc::new(PieceState {
                len,
                has_started: Cell::new(self.try_start_piece(len)),
                waker: RefCell::default(),
            }),
        };
        if piece.piece_state.has_started.get() {
            return piece;
        }
        self.waiting.borrow_mut().push_back(Rc::clone(&piece.piece_state));
        if !self.is_counting.replace(true) {
            self.on.spawn(Rc::clone(self).start_waiting_pieces());
        }
        poll_fn(|context| {
            if piece.piece_state.has_started.get() {
                return Poll::Ready(());
            }
            *piece.piece_state.waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        piece
    }

    /// Lets pieces begin, turn by turn, until none waits.
    async fn start_waiting_pieces(self: Rc<Self>) {
        loop {
            self.started_bytes.set(0);
            while self.started_bytes.get() < TURN_BYTES_MAX && self.has_room() {
                let Some(piece_state) = self.waiting.borrow_mut().pop_front() else {
                    self.is_counting.set(false);
                    return;
                };
                self.start_piece(piece_state.len);
                piece_state.has_started.set(true);
                if let Some(waker) = piece_state.waker.take() {
                    waker.wake();
                }
            }
            yield_now().await;
            self.ended.when(|| self.has_room()).await;
        }
    }
}

impl PieceScheduler {
    /// Creates the scheduler of a server on the loop `on`.
    pub fn new(on: &Loop) -> Self {
        Self(Rc::new(State {
            on: on.clone(),
            started_bytes: Cell::new(0),
            in_flight_bytes: Cell::new(0),
            ended: Signal::default(),
            waiting: RefCell::default(),
            is_counting: Cell::new(false),
        }))
    }

    /// Reads any length, as [`BlockDevice::read`] does.
    #[inline]
    pub fn read<'a>(&'a self, device: &'a dyn BlockDevice, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        if buffer.len() <= SHORT_REQUEST_BYTES_MAX {
            return device.read(start, buffer);
        }
        self.read_long(device, start, buffer)
    }

    #[cold]
    fn read_long<'a>(&'a self, device: &'a dyn BlockDevice, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        if let Some(io) = self.try_start_whole(buffer.len(), || device.read(start, buffer)) {
            return io;
        }
        let range = start.range(buffer.byte_len());
        if let Err(error) = check_request(device.name(), &device.geometry(), Operation::Read, range) {
            return Io::ready(Err(error));
        }
        Io::task(self.run_in_pieces(start, buffer.len(), move |at, from, len| device.read(at, buffer.slice(from, len))))
    }

    /// Writes any length, as [`BlockDevice::write`] does. A failed write leaves each sector old or new, as a short
    /// one does. A write that exceeds the device writes nothing.
    #[inline]
    pub fn write<'a>(
        &'a self,
        device: &'a dyn BlockDevice,
        start: ByteOffset,
        buffer: WriteBuf<'a>,
        flags: WriteFlags,
    ) -> Io<'a> {
        if buffer.len() <= SHORT_REQUEST_BYTES_MAX {
            return device.write(start, buffer, flags);
        }
        self.write_long(device, start, buffer, flags)
    }

    #[cold]
    fn write_long<'a>(
        &'a self,
        device: &'a dyn BlockDevice,
        start: ByteOffset,
        buffer: WriteBuf<'a>,
        flags: WriteFlags,
    ) -> Io<'a> {
        if let Some(io) = self.try_start_whole(buffer.len(), || device.write(start, buffer, flags)) {
            return io;
        }
        let range = start.range(buffer.byte_len());
        if let Err(error) = check_request(device.name(), &device.geometry(), Operation::Write, range) {
            return Io::ready(Err(error));
        }
        Io::task(
            self.run_in_pieces(start, buffer.len(), move |at, from, len| {
                device.write(at, buffer.slice(from, len), flags)
            }),
        )
    }

    /// Starts a long request that needs no task here: a single piece that need not wait.
    fn try_start_whole<'a>(&'a self, len: usize, request: impl FnOnce() -> Io<'a>) -> Option<Io<'a>> {
        let is_piece = len <= PIECE_BYTES_MAX && self.0.try_start_piece(len);
        is_piece.then(|| request().watched(&*self.0, len as u32))
    }

    /// Makes a request in pieces. `request` receives a piece's offset on the device, and its offset and length in the
    /// buffer. Pieces end at multiples of their length on the device.
    async fn run_in_pieces<'a>(
        &'a self,
        start: ByteOffset,
        len: usize,
        request: impl Fn(ByteOffset, usize, usize) -> Io<'a> + 'a,
    ) -> IoResult {
        let request = &request;
        let mut from = 0;
        while from < len {
            let mut ios: SmallVec<[Io<'_>; PIECES_IN_FLIGHT_MAX]> = SmallVec::new();
            while from < len && ios.len() < PIECES_IN_FLIGHT_MAX {
                let at = start.get() + from as u64;
                let len_max = PIECE_BYTES_MAX - (at % PIECE_BYTES_MAX as u64) as usize;
                let piece = len_max.min(len - from);
                let scheduled = async move {
                    let _piece = self.0.wait_for_turn(piece).await;
                    request(ByteOffset::new(at), from, piece).await
                };
                ios.push(Io::task(scheduled));
                from += piece;
            }
            join(ios).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::pin::pin;
    use std::rc::Rc;
    use std::task::{Context, Waker};

    use larder_block::backend::memory::MemoryDevice;
    use larder_block::{BoxFuture, ByteLen, ByteRange, Extent, Geometry, SizeChanges, ZeroFlags};

    use super::*;

    const LEN: usize = 64 << 20;

    /// Device whose reads take a while, and which counts the bytes in flight.
    struct SlowDevice {
        memory: MemoryDevice,
        in_flight_bytes: Cell<usize>,
        in_flight_bytes_max: Cell<usize>,
    }

    impl SlowDevice {
        fn new() -> Self {
            Self {
                memory: MemoryDevice::new(ByteLen::new(LEN as u64), 512),
                in_flight_bytes: Cell::new(0),
                in_flight_bytes_max: Cell::new(0),
            }
        }
    }

    impl BlockDevice for SlowDevice {
        fn name(&self) -> &Rc<str> {
            self.memory.name()
        }

        fn geometry(&self) -> Geometry {
            self.memory.geometry()
        }

        fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
            Io::task(async move {
                self.in_flight_bytes.set(self.in_flight_bytes.get() + buffer.len());
                self.in_flight_bytes_max.set(self.in_flight_bytes_max.get().max(self.in_flight_bytes.get()));
                for _ in 0..100 {
                    yield_now().await;
                }
                self.in_flight_bytes.set(self.in_flight_bytes.get() - buffer.len());
                self.memory.read(start, buffer).await
            })
        }

        fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
            self.memory.write(start, buffer, flags)
        }

        fn flush(&self) -> Io<'_> {
            self.memory.flush()
        }

        fn discard(&self, range: ByteRange) -> Io<'_> {
            self.memory.discard(range)
        }

        fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
            self.memory.write_zeroes(range, flags)
        }

        fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
            self.memory.extents(range, limit)
        }

        fn size_changes(&self) -> &SizeChanges {
            self.memory.size_changes()
        }
    }

    /// A device that completes within the call receives at most one piece in a turn, and short requests pass those
    /// that wait.
    #[test]
    fn long_request_leaves_turns_to_others() {
        let on = Loop::simulated().expect("a loop");
        let (scheduler, device) = (PieceScheduler::new(&on), MemoryDevice::new(ByteLen::new(LEN as u64), 512));
        let (mut memory, mut other) = (vec![1; LEN], [1; 4096]);
        on.block_on(async {
            let mut read = pin!(scheduler.read(&device, ByteOffset::ZERO, ReadBuf::new(&mut memory)));
            let mut passed = 0;
            poll_fn(|context| match read.as_mut().poll(context) {
                Poll::Ready(result) => {
                    result.expect("reads");
                    Poll::Ready(())
                }
                Poll::Pending => {
                    passed += 1;
                    let short = scheduler.read(&device, ByteOffset::ZERO, ReadBuf::new(&mut other));
                    assert!(short.is_ready(), "a short read waits");
                    Poll::Pending
                }
            })
            .await;
            assert!(passed + 1 >= LEN / PIECE_BYTES_MAX, "{passed} turns of others");
        });
        assert!(memory.iter().all(|byte| *byte == 0));
        assert_eq!(scheduler.0.in_flight_bytes.get(), 0);
    }

    /// Many long requests are in flight in part only, and all end.
    #[test]
    fn pieces_in_flight_are_bounded() {
        const REQUESTS: usize = 8;
        let on = Loop::simulated().expect("a loop");
        let (scheduler, device) = (PieceScheduler::new(&on), SlowDevice::new());
        let mut memory = vec![1; LEN];
        let buffer = ReadBuf::new(&mut memory);
        on.block_on(async {
            let reads: SmallVec<[Io<'_>; REQUESTS]> =
                (0..REQUESTS).map(|_| scheduler.read(&device, ByteOffset::ZERO, buffer)).collect();
            join(reads).await.expect("they read");
        });
        let in_flight_bytes_max = device.in_flight_bytes_max.get();
        assert!(
            (IN_FLIGHT_BYTES_MAX..IN_FLIGHT_BYTES_MAX + PIECE_BYTES_MAX).contains(&in_flight_bytes_max),
            "{in_flight_bytes_max} bytes"
        );
        assert_eq!((scheduler.0.in_flight_bytes.get(), device.in_flight_bytes.get()), (0, 0));
    }

    /// Requests that are cancelled, whether they have begun or wait, make room for others.
    #[test]
    fn cancelled_request_makes_room() {
        let on = Loop::simulated().expect("a loop");
        let (scheduler, device) = (PieceScheduler::new(&on), SlowDevice::new());
        let mut memory = vec![1; LEN];
        let buffer = ReadBuf::new(&mut memory);
        on.block_on(async {
            let mut context = Context::from_waker(Waker::noop());
            let mut cancelled: Vec<_> =
                (0..4).map(|_| Box::pin(scheduler.read(&device, ByteOffset::ZERO, buffer))).collect();
            for _ in 0..50 {
                for read in &mut cancelled {
                    assert!(read.as_mut().poll(&mut context).is_pending());
                }
                yield_now().await;
            }
            assert!(scheduler.0.in_flight_bytes.get() >= IN_FLIGHT_BYTES_MAX);
            assert!(!scheduler.0.waiting.borrow().is_empty());
            drop(cancelled);
            assert_eq!(scheduler.0.in_flight_bytes.get(), 0);
            assert!(scheduler.0.waiting.borrow().is_empty());
            let read = scheduler.read(&device, ByteOffset::ZERO, buffer);
            read.await.expect("reads");
        });
    }

    /// A write that exceeds the device writes nothing.
    #[test]
    fn long_write_past_the_end_writes_nothing() {
        let on = Loop::simulated().expect("a loop");
        let (scheduler, device) = (PieceScheduler::new(&on), MemoryDevice::new(ByteLen::new(LEN as u64), 512));
        let data = vec![1; 4 * PIECE_BYTES_MAX];
        let start = ByteOffset::new((LEN - 3 * PIECE_BYTES_MAX) as u64);
        let mut found = vec![1; 3 * PIECE_BYTES_MAX];
        on.block_on(async {
            let flags = WriteFlags::NONE;
            let written = scheduler.write(&device, start, WriteBuf::new(&data), flags).await;
            assert!(written.is_err());
            let read = scheduler.read(&device, start, ReadBuf::new(&mut found));
            read.await.expect("reads");
        });
        assert!(found.iter().all(|byte| *byte == 0));
    }
}
