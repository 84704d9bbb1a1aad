//! A raw image file or a block device of the host.
//!
//! The device uses direct I/O through io_uring where the file system supports it, with the alignment that the kernel
//! reports. Otherwise (tmpfs, odd sizes, or because the user wants the page cache) I/O is buffered: requests that the
//! page cache can answer without waiting complete synchronously, by a system call on the disk's thread; all others go
//! through io_uring. Discards punch holes.
//!
//! How it fails: a host error is reported to the request that met it, with its errno. After a failed flush of
//! buffered data the kernel may have dropped dirty pages, so every later flush fails too, as in QEMU.

mod extents;
mod held;
mod mark;
mod open;
mod pieces;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use io_uring::opcode;
use io_uring::types::{Fd, FsyncFlags};

use extents::KnownData;
pub use held::{Displaced, HeldFile};
pub use mark::Verdict;
use mark::{Found, Mark, MarkedChange, Sectors};
pub use open::{CONTAINER_UNIT, Caching, FileOptions, OpenError, Role, claim, claim_device};
use pieces::Pieces;

use super::image_lock;
use crate::boot::processors;
use crate::buffer::{AlignedBuf, ReadBuf, WriteBuf};
use crate::device::{BlockDevice, BoxFuture, Extent, Geometry, Io, SizeChanges, WriteFlags, ZeroFlags, check_request};
use crate::error::{Failure, IoError, IoResult, Operation};
use crate::event_loop::{Loop, Memory, Ring, RingIo, Transfer, yield_now};
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The maximum number of times that a short read at the end of a growing file is repeated.
const SHORT_READS_MAX: u32 = 8;

/// The smallest sector size that guests use, in bytes.
const SECTOR: u64 = 512;

/// The interval at which the file's size and path are rechecked.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The duration above which a synchronous buffered write counts as slow: it has met a busy journal or the dirty
/// limit.
const SLOW_CALL: Duration = Duration::from_micros(200);

/// The number of writes that go through io_uring's workers after a slow one, so that the disk's thread stays
/// responsive.
const WRITES_OFFLOADED: u32 = 64;

/// A turn number that no turn of the loop has.
const NO_TURN: u64 = u64::MAX;

/// Returns how many workers can usefully copy data in addition to the disk's thread and a guest.
fn workers_worth_having() -> u32 {
    (processors() / 2).clamp(1, 4) as u32
}

/// The transfer size, in bytes, above which copying takes longer than the hand-over to a worker.
const LARGE_COPY: usize = 128 << 10;

/// The length in bytes of the zero buffer for devices that cannot write zeroes by themselves.
const ZERO_CHUNK: usize = 1 << 20;

/// A file or block device as a disk.
pub struct FileDevice {
    name: Rc<str>,
    path: PathBuf,
    file: File,
    /// The descriptor that claims a block device exclusively, see [`FileOptions::exclusive`].
    claimed: RefCell<Option<File>>,
    /// The purpose of the file, which log messages name.
    role: Role,
    /// The state of the path that was last logged.
    displaced: Cell<Option<Displaced>>,
    on: Loop,
    ring: Ring,
    geometry: Cell<Geometry>,
    direct: bool,
    /// See [`FileOptions::container`].
    container: bool,
    kind: Kind,
    /// The file system is known to be local to this host, so metadata queries return at once.
    is_local: bool,
    /// The number of times that this device has extended the file.
    times_grown: Cell<u64>,
    /// The way in which a synchronous read avoids waiting: with RWF_NOWAIT, or without flags where the file is
    /// memory.
    read_in_call: Cell<InCall>,
    write_in_call: Cell<InCall>,
    /// The number of buffered writes that must still go through io_uring after the last slow one.
    writes_offloaded: Cell<u32>,
    /// The turn of the loop in which the last large synchronous transfer was made.
    large_in_call: Cell<u64>,
    /// Large transfers that are with workers now, and their maximum.
    given_to_workers: Cell<u32>,
    given_max: u32,
    /// The file system supports ZERO_RANGE, PUNCH_HOLE and plain fallocate, as far as is known.
    can_zero: Cell<bool>,
    can_punch: Cell<bool>,
    can_allocate: Cell<bool>,
    flush_failed: Cell<Option<i32>>,
    changes: SizeChanges,
    /// Runs of data found so far.
    known_data: KnownData,
    /// The finding of the mark when the file was opened, and the mark since then. See [`FileOptions::mark`].
    found: Option<Found>,
    mark: Option<Rc<Mark>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Regular,
    /// A file on tmpfs, which is memory, so that a system call never waits for a device.
    Tmpfs,
    Block,
}

/// The way in which a transfer may be tried synchronously.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InCall {
    No,
    /// With RWF_NOWAIT: the kernel refuses a transfer that would wait.
    NoWait,
    /// Without flags: the transfer is quick, or its duration is measured.
    Plain,
}

impl FileDevice {
    /// Returns true if I/O bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    fn error(&self, operation: Operation, range: ByteRange, errno: i32) -> IoError {
        IoError::new(&self.name, operation, range, Failure::from_errno(errno))
    }

    /// Rechecks the file's size and announces a change.
    pub fn check_size(&self) {
        if let Ok(size) = size_of(&self.file) {
            self.has_size(size);
        }
    }

    /// Applies a file size of `size` bytes: updates the geometry, logs the change and announces it.
    fn has_size(&self, size: u64) {
        let mut geometry = self.geometry.get();
        let visible = visible_size(size, geometry.block_size, self.direct, self.container);
        if visible != geometry.size {
            let (image, from, to) = (&self.name, geometry.size.get(), visible.get());
            if let (true, Role::CacheOf(disk)) = (to < from, &self.role) {
                tracing::warn!(
                    image = %disk, cache = %image,
                    "the disk's cache has shrunk from {from} to {to} bytes while in use: the data past its new end is lost; \
                     `larder disk cache replace {image} --control PATH --with FILE` writes the remaining dirty data to the disk and switches to another cache"
                );
            } else if to < from {
                tracing::warn!(
                    %image,
                    "the image has shrunk from {from} to {to} bytes while in use: the data past its new end is lost, and requests there fail; \
                     if this was not intended, stop the guest before it writes more"
                );
            } else if !self.container {
                // The file of a container grows as it is used; its content does not.
                tracing::info!(%image, "the image has grown from {from} to {to} bytes");
            }
            let cut = size.saturating_sub(visible.get());
            if cut > 0 {
                let unit = geometry.block_size;
                tracing::warn!(
                    %image,
                    "the image's last {cut} bytes are not accessible: direct I/O uses blocks of {unit} bytes; \
                     truncate -s %{unit} extends it to whole blocks"
                );
            }
            geometry.size = visible;
            self.geometry.set(geometry);
            self.changes.announce_size(visible);
        }
    }

    /// Extends the file. That takes no longer than a small write, because no space is allocated. A container's file
    /// gets the full length too, whatever part of it is visible.
    ///
    /// To move an end that lies inside a page, the kernel fills up that page in its cache. If a direct write to the
    /// same page is in flight, a later flush then fails with EIO (Linux 6.18, ext4). A caller that grows a file
    /// concurrently with writes therefore keeps its end at multiples of [`CONTAINER_UNIT`], from before the first
    /// write on.
    fn grow_now(&self, size: ByteLen) -> IoResult {
        let mut geometry = self.geometry.get();
        let size = ByteOffset::new(size.get()).align_up(u64::from(geometry.block_size));
        if size.get() <= geometry.size.get() && !self.ends_before(size) {
            return Ok(());
        }
        let range = ByteRange::between(ByteOffset::ZERO, size);
        if self.kind == Kind::Block {
            return Err(IoError::new(&self.name, Operation::Grow, range, Failure::NoSpace));
        }
        if let Some(mark) = &self.mark {
            mark.may_grow_to(size.get());
        }
        let _begun = self.begin(0);
        self.times_grown.set(self.times_grown.get() + 1);
        if let Err(error) = rustix::fs::ftruncate(&self.file, size.get()) {
            return Err(self.error(Operation::Grow, range, error.raw_os_error()));
        }
        geometry.size = ByteLen::new(geometry.size.get().max(size.get()));
        self.geometry.set(geometry);
        Ok(())
    }

    /// Returns true if the file of a container ends before `end`. The range may be visible nonetheless.
    fn ends_before(&self, end: ByteOffset) -> bool {
        self.container && size_of(&self.file).is_ok_and(|size| size < end.get())
    }

    /// Completes a read that ended early. At the end of the file, the rest of the last sector reads as zeros. If the
    /// file has grown meanwhile, the read is repeated.
    fn finish_short_read(&self, range: ByteRange, buffer: ReadBuf<'_>, mut moved: usize) -> IoResult {
        for _ in 0..SHORT_READS_MAX {
            let size = size_of(&self.file).map_err(|error| self.error(Operation::Read, range, os_code(&error)))?;
            if range.start.get() + (moved as u64) >= size {
                return self.fill_to_end(range, buffer, moved, size);
            }
            moved = self
                .read_again(range.start, buffer)
                .map_err(|errno| self.error(Operation::Read, range, errno))?;
            if moved == buffer.len() {
                return Ok(());
            }
        }
        Err(self.error(Operation::Read, range, libc::EIO))
    }

    fn fill_to_end(&self, range: ByteRange, buffer: ReadBuf<'_>, moved: usize, size: u64) -> IoResult {
        let visible = visible_size(size, self.geometry.get().block_size, self.direct, self.container);
        if range.end().get() > visible.get().max(size.next_multiple_of(SECTOR)) {
            // The file was truncated during the read.
            self.check_size();
            return Err(IoError::new(&self.name, Operation::Read, range, Failure::OutOfRange));
        }
        buffer.skip(moved).fill_zero();
        Ok(())
    }

    /// Reads synchronously, however long that takes. Returns the number of bytes read, or the errno.
    fn read_again(&self, start: ByteOffset, buffer: ReadBuf<'_>) -> Result<usize, i32> {
        let pieces: smallvec::SmallVec<[_; 16]> = buffer.pieces().collect();
        let (file, count) = (self.descriptor(), pieces.len() as i32);
        // SAFETY: the pieces are valid for writes by `ReadBuf`'s contract; `IoVec` is a `struct iovec`.
        let moved = unsafe { libc::preadv(file, pieces.as_ptr().cast(), count, start.get() as i64) };
        usize::try_from(moved).map_err(|_| os_code(&io::Error::last_os_error()))
    }

    /// Tries a transfer synchronously. Returns the number of bytes moved, or `None` if the transfer must go through
    /// io_uring.
    fn try_in_call(&self, how: &Cell<InCall>, call: impl FnOnce(i32) -> isize) -> Option<Result<usize, i32>> {
        let flags = match how.get() {
            InCall::No => return None,
            InCall::NoWait => libc::RWF_NOWAIT,
            InCall::Plain => 0,
        };
        let moved = call(flags);
        if let Ok(moved) = usize::try_from(moved) {
            return Some(Ok(moved));
        }
        match os_code(&io::Error::last_os_error()) {
            libc::EAGAIN | libc::EINTR => None,
            libc::EOPNOTSUPP => {
                how.set(InCall::No);
                None
            }
            errno => Some(Err(errno)),
        }
    }

    /// Returns true if a worker should make a transfer of `len` bytes that could be made synchronously. That is so if
    /// the transfer is large, another large one was made just before, and the workers are not busy: then several
    /// processors copy.
    fn gives_to_worker(&self, len: usize) -> bool {
        if self.direct || len < LARGE_COPY {
            return false;
        }
        let turn = self.ring.turn();
        let alone = turn.wrapping_sub(self.large_in_call.replace(turn)) > 1;
        let give = !alone && self.given_to_workers.get() < self.given_max;
        if give {
            self.given_to_workers.set(self.given_to_workers.get() + 1);
        }
        give
    }

    fn read_in_call(&self, start: ByteOffset, buffer: ReadBuf<'_>) -> Option<Result<usize, i32>> {
        let (file, offset) = (self.descriptor(), start.get() as i64);
        self.try_in_call(&self.read_in_call, |flags| match buffer.as_single() {
            // SAFETY: the piece is valid for writes by `ReadBuf`'s contract.
            Some(piece) if flags == 0 => unsafe { libc::pread(file, piece.base().cast(), piece.len(), offset) },
            _ => {
                let pieces: smallvec::SmallVec<[_; 16]> = buffer.pieces().take(PIECES_IN_CALL).collect();
                // SAFETY: each piece is valid for writes by `ReadBuf`'s contract; `IoVec` is a `struct iovec`.
                unsafe { libc::preadv2(file, pieces.as_ptr().cast(), pieces.len() as i32, offset, flags) }
            }
        })
    }

    fn write_in_call(&self, start: ByteOffset, buffer: WriteBuf<'_>, flags: WriteFlags) -> Option<Result<usize, i32>> {
        if let offloaded @ 1.. = self.writes_offloaded.get() {
            self.writes_offloaded.set(offloaded - 1);
            return None;
        }
        if flags.fua && self.kind != Kind::Tmpfs {
            return None;
        }
        let (file, offset) = (self.descriptor(), start.get() as i64);
        let watched = self.kind != Kind::Tmpfs && self.write_in_call.get() == InCall::Plain;
        let begin = watched.then(Instant::now);
        let result = self.try_in_call(&self.write_in_call, |flags| {
            let pieces: smallvec::SmallVec<[_; 16]> = buffer.pieces().take(PIECES_IN_CALL).collect();
            // SAFETY: the pieces are valid for reads by `WriteBuf`'s contract; `IoVec` is a `struct iovec`.
            unsafe { libc::pwritev2(file, pieces.as_ptr().cast(), pieces.len() as i32, offset, flags) }
        });
        if self.write_in_call.get() == InCall::No && !self.direct {
            // RWF_NOWAIT does not work for writes here (ext4). A plain call is used as long as it proves quick.
            self.write_in_call.set(InCall::Plain);
        }
        if begin.is_some_and(|begin| begin.elapsed() > SLOW_CALL) {
            self.writes_offloaded.set(WRITES_OFFLOADED);
        }
        result
    }

    async fn flush_steps(&self, operation: Operation, range: ByteRange) -> IoResult {
        if let Some(errno) = self.flush_failed.get() {
            return Err(self.error(operation, range, errno));
        }
        let result = self
            .ring
            .start_plain(
                opcode::Fsync::new(Fd(self.descriptor()))
                    .flags(FsyncFlags::DATASYNC)
                    .build(),
            )
            .await;
        if result < 0 {
            if !self.direct {
                self.flush_failed.set(Some(-result));
            }
            return Err(self.error(operation, range, -result));
        }
        Ok(())
    }

    /// Calls fallocate in a mode that the file system may lack. Returns false if the file system lacks it.
    async fn try_allocate(&self, mode: i32, can: &Cell<bool>, range: ByteRange) -> Result<bool, i32> {
        if !can.get() {
            return Ok(false);
        }
        loop {
            let entry = opcode::Fallocate::new(Fd(self.descriptor()), range.len.get())
                .offset(range.start.get())
                .mode(mode)
                .build();
            let begun = self.begin(range.len.get());
            match -MarkedChange::start(&self.on, &self.ring, entry, begun).await {
                libc::EINTR => {}
                libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENOTTY | libc::ENODEV => {
                    can.set(false);
                    return Ok(false);
                }
                errno if errno > 0 => return Err(errno),
                _ => return Ok(true),
            }
        }
    }

    /// Changes the allocation of a range of any length in pieces, because other requests to the file wait while the
    /// kernel changes its allocation.
    async fn try_allocate_pieces(&self, mode: i32, can: &Cell<bool>, range: ByteRange) -> Result<bool, i32> {
        let mut pieces = Pieces::default();
        let mut rest = range;
        while !rest.is_empty() {
            let piece = pieces.next(rest);
            let began = Instant::now();
            if !self.try_allocate(mode, can, piece).await? {
                return Ok(false);
            }
            let took = began.elapsed();
            pieces.took(piece.len, took);
            rest = ByteRange::between(piece.end(), rest.end());
            if took > pieces::LONG && !rest.is_empty() {
                self.on.sleep(pieces::PAUSE).await;
            }
        }
        Ok(true)
    }

    async fn discard_steps(&self, range: ByteRange) -> IoResult {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let done = self.try_allocate_pieces(mode, &self.can_punch, range).await;
        self.known_data.forget(range);
        match done {
            Ok(_) => Ok(()),
            Err(errno) => Err(self.error(Operation::Discard, range, errno)),
        }
    }

    async fn allocate_steps(&self, range: ByteRange) -> IoResult {
        match self
            .try_allocate(libc::FALLOC_FL_KEEP_SIZE, &self.can_allocate, range)
            .await
        {
            Ok(_) => Ok(()),
            Err(errno) => Err(self.error(Operation::Write, range, errno)),
        }
    }

    async fn zero_steps(&self, range: ByteRange, flags: ZeroFlags) -> IoResult {
        let failed = |errno| self.error(Operation::WriteZeroes, range, errno);
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let zero = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        let mut done = Ok(false);
        if flags.unmap {
            done = self.try_allocate_pieces(punch, &self.can_punch, range).await;
        }
        if done == Ok(false) {
            done = self.try_allocate_pieces(zero, &self.can_zero, range).await;
        }
        self.known_data.forget(range);
        let done = done.map_err(failed)?;
        if !done {
            if flags.fast_only {
                return Err(IoError::new(
                    &self.name,
                    Operation::WriteZeroes,
                    range,
                    Failure::Unsupported,
                ));
            }
            self.write_zero_buffers(range).await?;
        }
        if flags.fua {
            self.flush_steps(Operation::WriteZeroes, range).await?;
        }
        Ok(())
    }

    async fn write_zero_buffers(&self, range: ByteRange) -> IoResult {
        let zeros = AlignedBuf::zeroed(ZERO_CHUNK.min(range.len.as_usize()));
        let mut at = range.start;
        while at < range.end() {
            let chunk = (range.end() - at).min(ByteLen::of_buffer(zeros.len()));
            self.write(at, WriteBuf::new(&zeros[..chunk.as_usize()]), WriteFlags::NONE)
                .await?;
            at += chunk;
            // The writes may have completed synchronously, without letting other tasks run.
            yield_now().await;
        }
        Ok(())
    }
}

/// The maximum number of pieces of a synchronous transfer. The rest goes through io_uring.
const PIECES_IN_CALL: usize = 256;

impl BlockDevice for FileDevice {
    fn name(&self) -> &Rc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        if let Err(error) = check_request(&self.name, &self.geometry.get(), Operation::Read, range) {
            return Io::ready(Err(error));
        }
        let ending = Ending {
            device: self,
            by_worker: self.gives_to_worker(buffer.len()),
            counted: None,
        };
        let done = if ending.by_worker {
            None
        } else {
            self.read_in_call(start, buffer)
        };
        let moved = match done {
            Some(Ok(moved)) if moved == buffer.len() => return Io::ready(Ok(())),
            Some(Ok(moved)) => moved,
            Some(Err(errno)) => return Io::ready(Err(self.error(Operation::Read, range, errno))),
            None => 0,
        };
        ending.transfer(start.get() + moved as u64, Memory::Into(buffer.skip(moved)), false)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        if let Err(error) = check_request(&self.name, &self.geometry.get(), Operation::Write, range) {
            return Io::ready(Err(error));
        }
        let ending = Ending {
            device: self,
            by_worker: self.gives_to_worker(buffer.len()),
            counted: self.mark.as_ref().map(|mark| mark.begin_write(range.len.get())),
        };
        let done = if ending.by_worker {
            None
        } else {
            self.write_in_call(start, buffer, flags)
        };
        let moved = match done {
            Some(Ok(moved)) if moved == buffer.len() => return Io::ready(Ok(())),
            Some(Ok(moved)) => moved,
            Some(Err(errno)) => return Io::ready(Err(self.error(Operation::Write, range, errno))),
            None => 0,
        };
        ending.transfer(start.get() + moved as u64, Memory::From(buffer.skip(moved)), flags.fua)
    }

    fn flush(&self) -> Io<'_> {
        if self.kind == Kind::Tmpfs {
            // Nothing on tmpfs survives a crash of the host.
            return Io::ready(Ok(()));
        }
        Io::task(self.flush_steps(Operation::Flush, ByteRange::default()))
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        match check_request(&self.name, &self.geometry.get(), Operation::Discard, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) if range.is_empty() => Io::ready(Ok(())),
            Ok(()) => Io::task(self.discard_steps(range)),
        }
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        match check_request(&self.name, &self.geometry.get(), Operation::WriteZeroes, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) if range.is_empty() => Io::ready(Ok(())),
            Ok(()) => Io::task(self.zero_steps(range, flags)),
        }
    }

    fn allocate(&self, range: ByteRange) -> Io<'_> {
        match check_request(&self.name, &self.geometry.get(), Operation::Write, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) if range.is_empty() || !self.can_allocate.get() => Io::ready(Ok(())),
            Ok(()) => Io::task(self.allocate_steps(range)),
        }
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(self.extents_steps(range, limit))
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        Box::pin(std::future::ready(self.grow_now(size)))
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        Box::pin(async {
            let flushed = match self.geometry.get().read_only {
                true => Ok(()),
                false => self.flush().await,
            };
            if let Some(mark) = &self.mark {
                mark.close();
            }
            // The locks are released after an error too: the kernel may keep the file open, with its locks, for a
            // moment after this process has exited.
            image_lock::unlock(self.file.as_fd());
            self.claimed.take();
            flushed
        })
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.changes
    }
}

/// A transfer of a file through io_uring.
pub(crate) struct FileIo<'a> {
    transfer: RingIo<'a>,
    /// Dropped after `transfer`, which waits for its completion when it is dropped.
    ending: Ending<'a>,
}

// Every layer moves its requests, which are as large as the largest kind of them.
const _: () = assert!(std::mem::size_of::<FileIo<'_>>() <= 128);

/// Accounts for the end of a transfer when it is dropped.
struct Ending<'a> {
    device: &'a FileDevice,
    by_worker: bool,
    /// The sectors that were counted in the mark as begun.
    counted: Option<Sectors>,
}

impl<'a> Ending<'a> {
    /// Starts the transfer of `memory`, from byte `at` of the file on.
    fn transfer(self, at: u64, memory: Memory<'a>, durable: bool) -> Io<'a> {
        let how = Transfer {
            durable,
            by_worker: self.by_worker,
        };
        Io::file(FileIo {
            transfer: RingIo::start(&self.device.ring, self.device.descriptor(), at, memory, how),
            ending: self,
        })
    }
}

impl Drop for Ending<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.by_worker {
            let given = &self.device.given_to_workers;
            given.set(given.get() - 1);
        }
        if let (Some(sectors), Some(mark)) = (self.counted, &self.device.mark) {
            mark.end_write(sectors);
        }
    }
}

impl FileIo<'_> {
    /// Returns the result of a transfer that has failed, or has moved less than its whole memory.
    #[cold]
    fn result_of_part(&self, result: Result<usize, i32>) -> IoResult {
        let (device, memory) = (self.ending.device, self.transfer.memory());
        if let (Some(_), Some(mark)) = (self.ending.counted, &device.mark) {
            mark.set_inexact();
        }
        let range = ByteOffset::new(self.transfer.offset()).range(ByteLen::of_buffer(memory.len()));
        match (result, memory) {
            (Ok(moved), Memory::Into(buffer)) => device.finish_short_read(range, buffer, moved),
            (Ok(_), Memory::From(_)) => Err(device.error(Operation::Write, range, libc::EIO)),
            (Err(errno), Memory::Into(_)) => Err(device.error(Operation::Read, range, errno)),
            (Err(errno), Memory::From(_)) => Err(device.error(Operation::Write, range, errno)),
        }
    }
}

impl Future for FileIo<'_> {
    type Output = IoResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        let result = std::task::ready!(Pin::new(&mut self.transfer).poll(context));
        Poll::Ready(match result {
            Ok(moved) if moved == self.transfer.memory().len() => Ok(()),
            _ => self.result_of_part(result),
        })
    }
}

fn os_code(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Returns the size of a file or block device in bytes.
fn size_of(file: &File) -> io::Result<u64> {
    // Unlike fstat, seeking also works for a block device, and sees a size that has changed since it was opened.
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// Returns the size of the disk for a file of `size` bytes, in whole sectors. Like in QEMU, the file's last sector is
/// padded with zeros. Direct I/O reaches whole blocks only; a container is padded to whole blocks, because its end
/// has no meaning.
fn visible_size(size: u64, block_size: u32, direct: bool, container: bool) -> ByteLen {
    if container {
        ByteLen::new(size.next_multiple_of(CONTAINER_UNIT.max(block_size.into())))
    } else if direct {
        ByteLen::new(size - size % u64::from(block_size))
    } else {
        ByteLen::new(size.next_multiple_of(SECTOR))
    }
}

/// Rechecks the file's size and path at [`CHECK_INTERVAL`]. A file server may not answer for a long time, while the
/// disk's cache still serves hits. So a file that is not known to be local is queried by another thread.
async fn watch(on: Loop, device: std::rc::Weak<FileDevice>) {
    loop {
        on.sleep(CHECK_INTERVAL).await;
        let Some(open) = device.upgrade() else { return };
        if open.is_local {
            open.check_size();
            open.check_path();
            continue;
        }
        let (path, times_grown) = (open.path.clone(), open.times_grown.get());
        let Ok(file) = open.file.try_clone() else { continue };
        // The thread must not keep the device open.
        drop(open);
        let look = move || (file.metadata().map(|found| found.len()), held::displaced(&file, &path));
        let Ok((size, displaced)) = on.run_blocking(look).await else {
            continue;
        };
        let Some(open) = device.upgrade() else { return };
        // A size that was read before this device extended the file is stale.
        if let Ok(size) = size
            && times_grown == open.times_grown.get()
        {
            open.has_size(size);
        }
        if let Ok(displaced) = displaced {
            open.is_displaced(displaced);
        }
    }
}
