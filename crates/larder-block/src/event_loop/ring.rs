//! io_uring: operations as futures, with slots that are reused.
//!
//! Every operation has a slot; its index is the kernel's `user_data`. Memory that the kernel reads or writes belongs
//! to the caller, which must keep it until the operation's future resolves or is dropped. Dropping the future of an
//! operation in flight cancels the operation and waits for its completion, so that the caller can free the memory
//! then.
//!
//! Submission is lazy: entries collect until the loop next processes the ring, and one system call submits them all.
//!
//! A ring is restricted for ever to the operations in [`ALLOWED_OPERATIONS`]: the kernel's workers may have rights that
//! the process has dropped since, and no entry that a guest's attack may put into the ring must open a file with them.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::buffer::{IoVec, ReadBuf, WriteBuf};

/// The number of submission entries. More requests in one turn of the loop cost one more system call, nothing else.
const SUBMISSION_ENTRIES: u32 = 256;

/// The number of completion entries. The kernel stores excess completions, at a cost.
const COMPLETION_ENTRIES: u32 = 4096;

/// All operations that a ring permits.
const ALLOWED_OPERATIONS: [u8; 8] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
];

/// Creates a ring that is disabled at first, and restricts it before it is enabled.
fn build_restricted(builder: &mut io_uring::Builder) -> io::Result<IoUring> {
    let uring = builder.setup_r_disabled().setup_cqsize(COMPLETION_ENTRIES).build(SUBMISSION_ENTRIES)?;
    let flags = Restriction::sqe_flags_allowed(squeue::Flags::ASYNC.bits());
    // The list permits no operation of io_uring_register, so none works once the ring is enabled.
    let mut all: Vec<Restriction> = ALLOWED_OPERATIONS.into_iter().map(Restriction::sqe_op).chain([flags]).collect();
    let submitter = uring.submitter();
    submitter.register_restrictions(&mut all)?;
    submitter.register_enable_rings()?;
    Ok(uring)
}

/// A handle to a loop's ring.
#[derive(Clone)]
pub(crate) struct Ring(Rc<Inner>);

struct Inner {
    uring: RefCell<IoUring>,
    slots: RefCell<Vec<Slot>>,
    free: RefCell<Vec<u32>>,
    turns: Cell<u64>,
    transfers: Cell<u32>,
}

#[derive(Default)]
struct Slot {
    state: State,
    is_transfer: bool,
    /// The pieces of a vectored operation, which the kernel reads when the entry is submitted.
    pieces: Vec<IoVec>,
}

#[derive(Default)]
enum State {
    #[default]
    Free,
    Waiting(Option<Waker>),
    Done(i32),
    /// The future was dropped; the slot is freed when the kernel completes the operation.
    Abandoned,
}

/// The `user_data` of entries whose completion is ignored: cancellations.
const NO_SLOT: u64 = u64::MAX;

impl Ring {
    pub(super) fn new() -> io::Result<Self> {
        // Without DEFER_TASKRUN (kernels before 6.1) completions interrupt the thread, which is slower but equally
        // correct.
        let modern = build_restricted(
            IoUring::builder().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_coop_taskrun(),
        );
        let uring = match modern {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => build_restricted(&mut IoUring::builder())?,
            other => other?,
        };
        Ok(Self(Rc::new(Inner {
            uring: RefCell::new(uring),
            slots: RefCell::default(),
            free: RefCell::default(),
            turns: Cell::new(0),
            transfers: Cell::new(0),
        })))
    }

    /// Submits collected entries and reaps completions. Returns true if there were any.
    pub(super) fn submit_and_reap(&self) -> bool {
        self.0.turns.set(self.0.turns.get() + 1);
        {
            let mut uring = self.0.uring.borrow_mut();
            let (submitter, mut submission, _) = uring.split();
            submission.sync();
            let pending = submission.len();
            if pending > 0 || submission.taskrun() || submission.cq_overflow() {
                // SAFETY: plain submission without an argument; the code that pushed the entries has checked them.
                let result = unsafe { submitter.enter::<()>(to_u32(pending), 0, GET_EVENTS, None) };
                check_enter(result);
            }
        }
        self.reap()
    }

    /// Returns true if transfers between memory and a device are in flight.
    pub(super) fn has_transfers(&self) -> bool {
        self.0.transfers.get() > 0
    }

    /// Returns the number of this turn, which all requests that were taken up together share.
    pub(crate) fn turn(&self) -> u64 {
        self.0.turns.get()
    }

    /// Sleeps until a completion arrives or `limit` has passed.
    pub(super) fn sleep(&self, limit: Option<Duration>) {
        let uring = self.0.uring.borrow();
        let result = match limit {
            None => uring.submitter().submit_and_wait(1),
            Some(limit) => {
                let timespec = Timespec::from(limit);
                uring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timespec))
            }
        };
        check_enter(result);
    }

    fn reap(&self) -> bool {
        let mut any = false;
        loop {
            let completion = self.0.uring.borrow_mut().completion().next();
            let Some(completion) = completion else {
                return any;
            };
            any = true;
            if completion.user_data() != NO_SLOT {
                self.finish(completion.user_data() as u32, completion.result());
            }
        }
    }

    fn finish(&self, index: u32, result: i32) {
        let mut slots = self.0.slots.borrow_mut();
        let slot = &mut slots[index as usize];
        if std::mem::take(&mut slot.is_transfer) {
            self.0.transfers.set(self.0.transfers.get() - 1);
        }
        match std::mem::replace(&mut slot.state, State::Done(result)) {
            State::Waiting(waker) => {
                drop(slots);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            State::Abandoned => {
                slot.state = State::Free;
                self.0.free.borrow_mut().push(index);
            }
            State::Free | State::Done(_) => panic!("io_uring completed operation {index} twice"),
        }
    }

    fn allocate_slot(&self) -> u32 {
        let mut slots = self.0.slots.borrow_mut();
        let index = self.0.free.borrow_mut().pop().unwrap_or_else(|| {
            slots.push(Slot::default());
            to_u32(slots.len() - 1)
        });
        slots[index as usize].state = State::Waiting(None);
        index
    }

    fn push(&self, entry: &squeue::Entry) {
        let mut uring = self.0.uring.borrow_mut();
        loop {
            // SAFETY: the operation's owner keeps memory that the entry names until the operation completes; see the
            // module.
            if unsafe { uring.submission().push(entry) }.is_ok() {
                return;
            }
            check_enter(uring.submit());
        }
    }

    fn start(&self, entry: squeue::Entry, uses_memory: bool) -> RingOp {
        let index = self.allocate_slot();
        self.push(&entry.user_data(u64::from(index)));
        RingOp { ring: self.clone(), index, uses_memory, result_taken: Cell::new(false) }
    }

    /// Starts an operation that uses no memory of the caller.
    pub(crate) fn start_plain(&self, entry: squeue::Entry) -> RingOp {
        self.start(entry, false)
    }

    /// Completes when `descriptor` is readable, or has failed.
    pub(crate) fn poll_readable(&self, descriptor: RawFd) -> RingOp {
        self.start_plain(opcode::PollAdd::new(Fd(descriptor), libc::POLLIN as u32).build())
    }

    /// Completes when `descriptor` is writable, or has failed.
    pub(crate) fn poll_writable(&self, descriptor: RawFd) -> RingOp {
        self.start_plain(opcode::PollAdd::new(Fd(descriptor), libc::POLLOUT as u32).build())
    }

    fn start_transfer(
        &self,
        descriptor: RawFd,
        offset: u64,
        buffer: TransferBuffer<'_>,
        options: TransferOptions,
    ) -> RingOp {
        let rw_flags = if options.durable { libc::RWF_DSYNC } else { 0 };
        let index = self.allocate_slot();
        self.0.slots.borrow_mut()[index as usize].is_transfer = true;
        self.0.transfers.set(self.0.transfers.get() + 1);
        let file = Fd(descriptor);
        let single = match buffer {
            TransferBuffer::Read(buffer) => buffer.as_single(),
            TransferBuffer::Write(buffer) => buffer.as_single(),
        };
        let entry = match (single, buffer) {
            (Some(piece), TransferBuffer::Read(_)) => {
                opcode::Read::new(file, piece.base(), to_u32(piece.len())).offset(offset).build()
            }
            (Some(piece), TransferBuffer::Write(_)) => {
                opcode::Write::new(file, piece.base(), to_u32(piece.len())).offset(offset).rw_flags(rw_flags).build()
            }
            (None, _) => {
                let mut slots = self.0.slots.borrow_mut();
                let list = &mut slots[index as usize].pieces;
                list.clear();
                match buffer {
                    TransferBuffer::Read(buffer) => list.extend(buffer.pieces().take(PIECES_MAX)),
                    TransferBuffer::Write(buffer) => list.extend(buffer.pieces().take(PIECES_MAX)),
                }
                let (base, count) = (list.as_ptr().cast::<libc::iovec>(), to_u32(list.len()));
                match buffer {
                    TransferBuffer::Read(_) => opcode::Readv::new(file, base, count).offset(offset).build(),
                    TransferBuffer::Write(_) => {
                        opcode::Writev::new(file, base, count).offset(offset).rw_flags(rw_flags).build()
                    }
                }
            }
        };
        let entry = if options.uses_worker { entry.flags(squeue::Flags::ASYNC) } else { entry };
        self.push(&entry.user_data(u64::from(index)));
        if options.uses_worker {
            // Submitted now, not at the end of the turn, so that the worker runs in parallel.
            check_enter(self.0.uring.borrow().submit());
        }
        RingOp { ring: self.clone(), index, uses_memory: true, result_taken: Cell::new(false) }
    }
}

/// Options of a transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TransferOptions {
    /// Every part is on stable storage when a write completes (RWF_DSYNC).
    pub(crate) durable: bool,
    /// Uses one of the kernel's workers, even if the call could complete at once: the worker copies while the loop
    /// continues.
    pub(crate) uses_worker: bool,
}

/// The kernel's limit on pieces in one vectored operation (IOV_MAX); the rest is a continuation.
const PIECES_MAX: usize = 1024;

const GET_EVENTS: u32 = 1; // IORING_ENTER_GETEVENTS

fn to_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn check_enter(result: io::Result<usize>) {
    if let Err(error) = result {
        match error.raw_os_error() {
            // Interrupted, timed out, or short of memory for a moment: the loop retries.
            Some(libc::EINTR | libc::ETIME | libc::EAGAIN | libc::EBUSY) => {}
            _ => panic!("io_uring_enter failed: {error}"),
        }
    }
}

/// An operation in flight. Its output is the kernel's result: a count, or a negative error number.
pub struct RingOp {
    ring: Ring,
    index: u32,
    uses_memory: bool,
    result_taken: Cell<bool>,
}

impl RingOp {
    /// Returns true if the operation has completed, without taking the result.
    pub(super) fn is_done(&self) -> bool {
        matches!(self.ring.0.slots.borrow()[self.index as usize].state, State::Done(_))
    }

    fn take_result(&self) -> Option<i32> {
        let mut slots = self.ring.0.slots.borrow_mut();
        let slot = &mut slots[self.index as usize];
        let State::Done(result) = slot.state else {
            return None;
        };
        slot.state = State::Free;
        self.ring.0.free.borrow_mut().push(self.index);
        self.result_taken.set(true);
        Some(result)
    }
}

impl Future for RingOp {
    type Output = i32;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<i32> {
        if let Some(result) = self.take_result() {
            return Poll::Ready(result);
        }
        let mut slots = self.ring.0.slots.borrow_mut();
        if let State::Waiting(waker) = &mut slots[self.index as usize].state {
            match waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            }
        }
        Poll::Pending
    }
}

impl Drop for RingOp {
    fn drop(&mut self) {
        if self.result_taken.get() || self.take_result().is_some() {
            return;
        }
        let cancel = opcode::AsyncCancel::new(u64::from(self.index)).build();
        self.ring.push(&cancel.user_data(NO_SLOT));
        if !self.uses_memory {
            self.ring.0.slots.borrow_mut()[self.index as usize].state = State::Abandoned;
            return;
        }
        // The kernel may access the caller's memory until the operation completes, so this must not return before.
        while !self.is_done() {
            let result = self.ring.0.uring.borrow_mut().submit_and_wait(1);
            check_enter(result);
            self.ring.reap();
        }
        self.take_result();
    }
}

/// The memory of a transfer.
#[derive(Clone, Copy)]
pub(crate) enum TransferBuffer<'a> {
    Read(ReadBuf<'a>),
    Write(WriteBuf<'a>),
}

impl TransferBuffer<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Read(buffer) => buffer.len(),
            Self::Write(buffer) => buffer.len(),
        }
    }

    fn skip(self, bytes: usize) -> Self {
        match self {
            Self::Read(buffer) => Self::Read(buffer.skip(bytes)),
            Self::Write(buffer) => Self::Write(buffer.skip(bytes)),
        }
    }
}

/// A whole transfer: it continues after a short or interrupted operation until all is done, the file ends, or it
/// fails. Its output is the number of bytes moved (short only at the end of the file), or the error number.
pub(crate) struct RingTransfer<'a> {
    op: RingOp,
    descriptor: RawFd,
    offset: u64,
    buffer: TransferBuffer<'a>,
    options: TransferOptions,
    moved: usize,
    retries: u32,
}

/// The number of times that an operation that the kernel did not even begin is retried before its error is reported.
const RETRIES_MAX: u32 = 64;

impl<'a> RingTransfer<'a> {
    pub(crate) fn start(
        ring: &Ring,
        descriptor: RawFd,
        offset: u64,
        buffer: TransferBuffer<'a>,
        options: TransferOptions,
    ) -> Self {
        Self {
            op: ring.start_transfer(descriptor, offset, buffer, options),
            descriptor,
            offset,
            buffer,
            options,
            moved: 0,
            retries: 0,
        }
    }

    /// Returns the offset in the file at which the transfer starts.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the whole memory of the transfer.
    pub(crate) fn buffer(&self) -> TransferBuffer<'a> {
        self.buffer
    }
}

impl Future for RingTransfer<'_> {
    type Output = Result<usize, i32>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let result = std::task::ready!(Pin::new(&mut self.op).poll(context));
            match result {
                0 => return Poll::Ready(Ok(self.moved)),
                count if count > 0 => {
                    self.moved += count as usize;
                    if self.moved >= self.buffer.len() {
                        return Poll::Ready(Ok(self.moved));
                    }
                }
                error if (error == -libc::EINTR || error == -libc::EAGAIN) && self.retries < RETRIES_MAX => {
                    self.retries += 1;
                }
                error => return Poll::Ready(Err(-error)),
            }
            let offset = self.offset + self.moved as u64;
            let rest = self.buffer.skip(self.moved);
            let ring = self.op.ring.clone();
            self.op = ring.start_transfer(self.descriptor, offset, rest, self.options);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs one operation on the ring, and returns its result.
    fn run_operation(ring: &Ring, entry: squeue::Entry) -> i32 {
        let op = ring.start_plain(entry);
        while !op.is_done() {
            ring.sleep(None);
            ring.reap();
        }
        op.take_result().expect("it is done")
    }

    #[test]
    fn ring_refuses_operations_outside_its_list() {
        let ring = Ring::new().expect("a ring");
        let path = c"/etc/hostname".as_ptr();
        let cwd = Fd(libc::AT_FDCWD);
        for (what, entry) in [
            ("openat", opcode::OpenAt::new(cwd, path).build()),
            ("socket", opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build()),
            ("unlinkat", opcode::UnlinkAt::new(cwd, path).build()),
            ("no-op", opcode::Nop::new().build()),
        ] {
            assert_eq!(run_operation(&ring, entry), -libc::EACCES, "{what}");
        }
        let uring = ring.0.uring.borrow();
        let result = uring.submitter().register_files(&[0]);
        assert_eq!(result.expect_err("is refused").raw_os_error(), Some(libc::EACCES));
        drop(uring);
        let (_local, peer) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let poll = opcode::PollAdd::new(Fd(std::os::fd::AsRawFd::as_raw_fd(&peer)), libc::POLLOUT as u32).build();
        assert!(run_operation(&ring, poll) > 0, "operations that the loop needs are allowed");
    }
}
