//! A raw image file or a block device of the host.
//!
//! The device uses direct I/O through io_uring where the file system supports it, with the alignment that the kernel
//! reports. Otherwise (tmpfs, odd sizes, or because the user wants the page cache) I/O is buffered: requests that the
//! page cache can answer without waiting complete synchronously, by a system call on the disk's thread; all others go
//! through io_uring. Discards punch holes.
//!
//! How it fails: a host error is reported to the request that met it, with its errno. After a failed flush of
//! buffered data the kernel may have dropped dirty pages, so every later flush fails too, as in QEMU.

mod discard_pieces;
mod extents;
mod locked_file;
mod open;
mod write_record;

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

use discard_pieces::DiscardPieces;
use extents::DataRuns;
pub use locked_file::{LockedFile, PathChange};
pub use open::{CONTAINER_UNIT, Caching, FileOpenError, FileOptions, FileRole, claim_device, open_locked};
pub use write_record::Verdict;
use write_record::{RecordFinding, RecordedChange, SectorCount, WriteRecord};

use super::image_lock;
use crate::boot::processors;
use crate::buffer::{AlignedBuf, ReadBuf, WriteBuf};
use crate::device::{BlockDevice, BoxFuture, Extent, Geometry, Io, SizeChanges, WriteFlags, ZeroFlags, check_request};
use crate::error::{Failure, IoError, IoResult, Operation};
use crate::event_loop::{Loop, Ring, RingTransfer, TransferBuffer, TransferOptions, yield_now};
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The maximum number of times that a short read at the end of a growing file is repeated.
const SHORT_READS_MAX: u32 = 8;

/// The smallest sector size that guests use, in bytes.
const SECTOR: u64 = 512;

/// The interval at which the file's size and path are rechecked.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The duration above which a synchronous buffered write counts as slow: it has met a busy journal or the dirty
/// limit.
const SLOW_CALL_MIN: Duration = Duration::from_micros(200);

/// The number of writes that go through io_uring's workers after a slow one, so that the disk's thread stays
/// responsive.
const OFFLOADED_WRITES: u32 = 64;

/// A turn number that no turn of the loop has.
const NO_TURN: u64 = u64::MAX;

/// Returns how many workers can usefully copy data in addition to the disk's thread and a guest.
fn useful_workers() -> u32 {
    (processors() / 2).clamp(1, 4) as u32
}

/// The transfer size, in bytes, above which copying takes longer than the hand-over to a worker.
const LARGE_COPY_BYTES: usize = 128 << 10;

/// The length in bytes of the zero buffer for devices that cannot write zeroes by themselves.
const ZERO_CHUNK_BYTES: usize = 1 << 20;

/// A file or block device as a disk.
pub struct FileDevice {
    name: Rc<str>,
    path: PathBuf,
    file: File,
    /// The descriptor that claims a block device exclusively, see [`FileOptions::exclusive`].
    claimed: RefCell<Option<File>>,
    /// The purpose of the file, which log messages name.
    role: FileRole,
    /// The state of the path that was last logged.
    reported_path_change: Cell<Option<PathChange>>,
    on: Loop,
    ring: Ring,
    geometry: Cell<Geometry>,
    direct: bool,
    /// See [`FileOptions::container`].
    container: bool,
    kind: FileKind,
    /// The file system is known to be local to this host, so metadata queries return at once.
    is_local: bool,
    /// The number of times that this device has extended the file.
    grow_count: Cell<u64>,
    /// The way in which a synchronous read avoids waiting: with RWF_NOWAIT, or without flags where the file is
    /// memory.
    sync_read_mode: Cell<SyncMode>,
    sync_write_mode: Cell<SyncMode>,
    /// The number of buffered writes that must still go through io_uring after the last slow one.
    offloaded_writes_left: Cell<u32>,
    /// The turn of the loop in which the last large synchronous transfer was made.
    last_large_transfer_turn: Cell<u64>,
    /// Large transfers that are with workers now, and their maximum.
    worker_transfers: Cell<u32>,
    worker_transfers_max: u32,
    /// The file system supports ZERO_RANGE, PUNCH_HOLE and plain fallocate, as far as is known.
    can_zero: Cell<bool>,
    can_punch: Cell<bool>,
    can_allocate: Cell<bool>,
    flush_failed: Cell<Option<i32>>,
    changes: SizeChanges,
    /// Runs of data found so far.
    data_runs: DataRuns,
    /// The finding of the write record when the file was opened, and the record since then. See
    /// [`FileOptions::write_record_directory`].
    record_finding: Option<RecordFinding>,
    write_record: Option<Rc<WriteRecord>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FileKind {
    Regular,
    /// A file on tmpfs, which is memory, so that a system call never waits for a device.
    Tmpfs,
    Block,
}

/// The way in which a transfer may be tried synchronously.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SyncMode {
    Never,
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
        if let Ok(size) = file_size(&self.file) {
            self.apply_size(size);
        }
    }

    /// Applies a file size of `size` bytes: updates the geometry, logs the change and announces it.
    fn apply_size(&self, size: u64) {
        let mut geometry = self.geometry.get();
        let visible = visible_size(size, geometry.block_size, self.direct, self.container);
        if visible != geometry.size {
            let (image, from, to) = (&self.name, geometry.size.get(), visible.get());
            if let (true, FileRole::CacheOf(disk)) = (to < from, &self.role) {
                tracing::warn!(
                    event = "size-changed", image = %disk, cache = %image,
                    "the disk's cache has shrunk from {from} to {to} bytes while in use: the data past its new end is lost; \
                     `larder disk cache replace {image} --control PATH --with FILE` writes the remaining dirty data to the disk and switches to another cache"
                );
            } else if to < from {
                tracing::warn!(
                    event = "size-changed", %image,
                    "the image has shrunk from {from} to {to} bytes while in use: the data past its new end is lost, and requests there fail; \
                     if this was not intended, stop the guest before it writes more"
                );
            } else if !self.container {
                // The file of a container grows as it is used; its content does not.
                tracing::info!(event = "size-changed", %image, "the image has grown from {from} to {to} bytes");
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
        if self.kind == FileKind::Block {
            return Err(IoError::new(&self.name, Operation::Grow, range, Failure::NoSpace));
        }
        if let Some(record) = &self.write_record {
            record.raise_size_max(size.get());
        }
        let _change = self.start_change(0);
        self.grow_count.set(self.grow_count.get() + 1);
        if let Err(error) = rustix::fs::ftruncate(&self.file, size.get()) {
            return Err(self.error(Operation::Grow, range, error.raw_os_error()));
        }
        geometry.size = ByteLen::new(geometry.size.get().max(size.get()));
        self.geometry.set(geometry);
        Ok(())
    }

    /// Returns true if the file of a container ends before `end`. The range may be visible nonetheless.
    fn ends_before(&self, end: ByteOffset) -> bool {
        self.container && file_size(&self.file).is_ok_and(|size| size < end.get())
    }

    /// Completes a read that ended early. At the end of the file, the rest of the last sector reads as zeros. If the
    /// file has grown meanwhile, the read is repeated.
    fn finish_short_read(&self, range: ByteRange, buffer: ReadBuf<'_>, mut moved: usize) -> IoResult {
        for _ in 0..SHORT_READS_MAX {
            let size = file_size(&self.file).map_err(|error| self.error(Operation::Read, range, errno_of(&error)))?;
            if range.start.get() + (moved as u64) >= size {
                return self.fill_to_end(range, buffer, moved, size);
            }
            moved =
                self.read_blocking(range.start, buffer).map_err(|errno| self.error(Operation::Read, range, errno))?;
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
    fn read_blocking(&self, start: ByteOffset, buffer: ReadBuf<'_>) -> Result<usize, i32> {
        let pieces: smallvec::SmallVec<[_; 16]> = buffer.pieces().collect();
        let (file, count) = (self.descriptor(), pieces.len() as i32);
        // SAFETY: the pieces are valid for writes by `ReadBuf`'s contract; `IoVec` is a `struct iovec`.
        let moved = unsafe { libc::preadv(file, pieces.as_ptr().cast(), count, start.get() as i64) };
        usize::try_from(moved).map_err(|_| errno_of(&io::Error::last_os_error()))
    }

    /// Tries a transfer synchronously. Returns the number of bytes moved, or `None` if the transfer must go through
    /// io_uring.
    fn try_sync(&self, mode: &Cell<SyncMode>, call: impl FnOnce(i32) -> isize) -> Option<Result<usize, i32>> {
        let flags = match mode.get() {
            SyncMode::Never => return None,
            SyncMode::NoWait => libc::RWF_NOWAIT,
            SyncMode::Plain => 0,
        };
        let moved = call(flags);
        if let Ok(moved) = usize::try_from(moved) {
            return Some(Ok(moved));
        }
        match errno_of(&io::Error::last_os_error()) {
            libc::EAGAIN | libc::EINTR => None,
            libc::EOPNOTSUPP => {
                mode.set(SyncMode::Never);
                None
            }
            errno => Some(Err(errno)),
        }
    }

    /// Returns true if a worker should make a transfer of `len` bytes that could be made synchronously. That is so if
    /// the transfer is large, another large one was made just before, and the workers are not busy: then several
    /// processors copy.
    fn reserve_worker(&self, len: usize) -> bool {
        if self.direct || len < LARGE_COPY_BYTES {
            return false;
        }
        let turn = self.ring.turn();
        let is_isolated = turn.wrapping_sub(self.last_large_transfer_turn.replace(turn)) > 1;
        let reserved = !is_isolated && self.worker_transfers.get() < self.worker_transfers_max;
        if reserved {
            self.worker_transfers.set(self.worker_transfers.get() + 1);
        }
        reserved
    }

    fn try_read_sync(&self, start: ByteOffset, buffer: ReadBuf<'_>) -> Option<Result<usize, i32>> {
        let (file, offset) = (self.descriptor(), start.get() as i64);
        self.try_sync(&self.sync_read_mode, |flags| match buffer.as_single() {
            // SAFETY: the piece is valid for writes by `ReadBuf`'s contract.
            Some(piece) if flags == 0 => unsafe { libc::pread(file, piece.base().cast(), piece.len(), offset) },
            _ => {
                let pieces: smallvec::SmallVec<[_; 16]> = buffer.pieces().take(SYNC_PIECES_MAX).collect();
                // SAFETY: each piece is valid for writes by `ReadBuf`'s contract; `IoVec` is a `struct iovec`.
                unsafe { libc::preadv2(file, pieces.as_ptr().cast(), pieces.len() as i32, offset, flags) }
            }
        })
    }

    fn try_write_sync(&self, start: ByteOffset, buffer: WriteBuf<'_>, flags: WriteFlags) -> Option<Result<usize, i32>> {
        if let offloaded @ 1.. = self.offloaded_writes_left.get() {
            self.offloaded_writes_left.set(offloaded - 1);
            return None;
        }
        if flags.fua && self.kind != FileKind::Tmpfs {
            return None;
        }
        let (file, offset) = (self.descriptor(), start.get() as i64);
        let timed = self.kind != FileKind::Tmpfs && self.sync_write_mode.get() == SyncMode::Plain;
        let started = timed.then(Instant::now);
        let result = self.try_sync(&self.sync_write_mode, |flags| {
            let pieces: smallvec::SmallVec<[_; 16]> = buffer.pieces().take(SYNC_PIECES_MAX).collect();
            // SAFETY: the pieces are valid for reads by `WriteBuf`'s contract; `IoVec` is a `struct iovec`.
            unsafe { libc::pwritev2(file, pieces.as_ptr().cast(), pieces.len() as i32, offset, flags) }
        });
        if self.sync_write_mode.get() == SyncMode::Never && !self.direct {
            // RWF_NOWAIT does not work for writes here (ext4). A plain call is used as long as it proves quick.
            self.sync_write_mode.set(SyncMode::Plain);
        }
        if started.is_some_and(|begin| begin.elapsed() > SLOW_CALL_MIN) {
            self.offloaded_writes_left.set(OFFLOADED_WRITES);
        }
        result
    }

    async fn flush_steps(&self, operation: Operation, range: ByteRange) -> IoResult {
        if let Some(errno) = self.flush_failed.get() {
            return Err(self.error(operation, range, errno));
        }
        let result =
            self.ring.start_plain(opcode::Fsync::new(Fd(self.descriptor())).flags(FsyncFlags::DATASYNC).build()).await;
        if result < 0 {
            if !self.direct {
                self.flush_failed.set(Some(-result));
            }
            return Err(self.error(operation, range, -result));
        }
        Ok(())
    }

    /// Calls fallocate in a mode that the file system may lack. Returns false if the file system lacks it.
    async fn try_allocate(&self, mode: i32, supported: &Cell<bool>, range: ByteRange) -> Result<bool, i32> {
        if !supported.get() {
            return Ok(false);
        }
        loop {
            let entry = opcode::Fallocate::new(Fd(self.descriptor()), range.len.get())
                .offset(range.start.get())
                .mode(mode)
                .build();
            let change = self.start_change(range.len.get());
            match -RecordedChange::start(&self.on, &self.ring, entry, change).await {
                libc::EINTR => {}
                libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENOTTY | libc::ENODEV => {
                    supported.set(false);
                    return Ok(false);
                }
                errno if errno > 0 => return Err(errno),
                _ => return Ok(true),
            }
        }
    }

    /// Changes the allocation of a range of any length in pieces, because other requests to the file wait while the
    /// kernel changes its allocation.
    async fn try_allocate_pieces(&self, mode: i32, supported: &Cell<bool>, range: ByteRange) -> Result<bool, i32> {
        let mut pieces = DiscardPieces::default();
        let mut rest = range;
        while !rest.is_empty() {
            let piece = pieces.next(rest);
            let started = Instant::now();
            if !self.try_allocate(mode, supported, piece).await? {
                return Ok(false);
            }
            let elapsed = started.elapsed();
            pieces.record(piece.len, elapsed);
            rest = ByteRange::between(piece.end(), rest.end());
            if elapsed > discard_pieces::PAUSE_THRESHOLD && !rest.is_empty() {
                self.on.sleep(discard_pieces::PAUSE_TIME).await;
            }
        }
        Ok(true)
    }

    async fn discard_steps(&self, range: ByteRange) -> IoResult {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let done = self.try_allocate_pieces(mode, &self.can_punch, range).await;
        self.data_runs.invalidate(range);
        match done {
            Ok(_) => Ok(()),
            Err(errno) => Err(self.error(Operation::Discard, range, errno)),
        }
    }

    async fn allocate_steps(&self, range: ByteRange) -> IoResult {
        match self.try_allocate(libc::FALLOC_FL_KEEP_SIZE, &self.can_allocate, range).await {
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
        self.data_runs.invalidate(range);
        let done = done.map_err(failed)?;
        if !done {
            if flags.fast_only {
                return Err(IoError::new(&self.name, Operation::WriteZeroes, range, Failure::Unsupported));
            }
            self.write_zero_buffers(range).await?;
        }
        if flags.fua {
            self.flush_steps(Operation::WriteZeroes, range).await?;
        }
        Ok(())
    }

    async fn write_zero_buffers(&self, range: ByteRange) -> IoResult {
        let zeros = AlignedBuf::zeroed(ZERO_CHUNK_BYTES.min(range.len.as_usize()));
        let mut at = range.start;
        while at < range.end() {
            let chunk = (range.end() - at).min(ByteLen::of_buffer(zeros.len()));
            self.write(at, WriteBuf::new(&zeros[..chunk.as_usize()]), WriteFlags::NONE).await?;
            at += chunk;
            // The writes may have completed synchronously, without letting other tasks run.
            yield_now().await;
        }
        Ok(())
    }
}

/// The maximum number of pieces of a synchronous transfer. The rest goes through io_uring.
const SYNC_PIECES_MAX: usize = 256;

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
        let ending =
            TransferGuard { device: self, use_worker: self.reserve_worker(buffer.len()), counted_sectors: None };
        let done = if ending.use_worker { None } else { self.try_read_sync(start, buffer) };
        let moved = match done {
            Some(Ok(moved)) if moved == buffer.len() => return Io::ready(Ok(())),
            Some(Ok(moved)) => moved,
            Some(Err(errno)) => return Io::ready(Err(self.error(Operation::Read, range, errno))),
            None => 0,
        };
        ending.transfer(start.get() + moved as u64, TransferBuffer::Read(buffer.skip(moved)), false)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        if let Err(error) = check_request(&self.name, &self.geometry.get(), Operation::Write, range) {
            return Io::ready(Err(error));
        }
        let guard = TransferGuard {
            device: self,
            use_worker: self.reserve_worker(buffer.len()),
            counted_sectors: self.write_record.as_ref().map(|mark| mark.start_write(range.len.get())),
        };
        let done = if guard.use_worker { None } else { self.try_write_sync(start, buffer, flags) };
        let moved = match done {
            Some(Ok(moved)) if moved == buffer.len() => return Io::ready(Ok(())),
            Some(Ok(moved)) => moved,
            Some(Err(errno)) => return Io::ready(Err(self.error(Operation::Write, range, errno))),
            None => 0,
        };
        guard.transfer(start.get() + moved as u64, TransferBuffer::Write(buffer.skip(moved)), flags.fua)
    }

    fn flush(&self) -> Io<'_> {
        if self.kind == FileKind::Tmpfs {
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
            if let Some(mark) = &self.write_record {
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
    transfer: RingTransfer<'a>,
    /// Dropped after `transfer`, which waits for its completion when it is dropped.
    guard: TransferGuard<'a>,
}

// Every layer moves its requests, which are as large as the largest kind of them.
const _: () = assert!(std::mem::size_of::<FileIo<'_>>() <= 128);

/// Accounts for the end of a transfer when it is dropped.
struct TransferGuard<'a> {
    device: &'a FileDevice,
    use_worker: bool,
    /// The sectors that were counted in the mark as begun.
    counted_sectors: Option<SectorCount>,
}

impl<'a> TransferGuard<'a> {
    /// Starts the transfer of `memory`, from byte `at` of the file on.
    fn transfer(self, at: u64, memory: TransferBuffer<'a>, durable: bool) -> Io<'a> {
        let how = TransferOptions { durable, uses_worker: self.use_worker };
        Io::file(FileIo {
            transfer: RingTransfer::start(&self.device.ring, self.device.descriptor(), at, memory, how),
            guard: self,
        })
    }
}

impl Drop for TransferGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.use_worker {
            let given = &self.device.worker_transfers;
            given.set(given.get() - 1);
        }
        if let (Some(sectors), Some(mark)) = (self.counted_sectors, &self.device.write_record) {
            mark.complete_write(sectors);
        }
    }
}

impl FileIo<'_> {
    /// Returns the result of a transfer that has failed, or has moved less than its whole memory.
    #[cold]
    fn partial_result(&self, result: Result<usize, i32>) -> IoResult {
        let (device, memory) = (self.guard.device, self.transfer.buffer());
        if let (Some(_), Some(record)) = (self.guard.counted_sectors, &device.write_record) {
            record.set_inexact();
        }
        let range = ByteOffset::new(self.transfer.offset()).range(ByteLen::of_buffer(memory.len()));
        match (result, memory) {
            (Ok(moved), TransferBuffer::Read(buffer)) => device.finish_short_read(range, buffer, moved),
            (Ok(_), TransferBuffer::Write(_)) => Err(device.error(Operation::Write, range, libc::EIO)),
            (Err(errno), TransferBuffer::Read(_)) => Err(device.error(Operation::Read, range, errno)),
            (Err(errno), TransferBuffer::Write(_)) => Err(device.error(Operation::Write, range, errno)),
        }
    }
}

impl Future for FileIo<'_> {
    type Output = IoResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        let result = std::task::ready!(Pin::new(&mut self.transfer).poll(context));
        Poll::Ready(match result {
            Ok(moved) if moved == self.transfer.buffer().len() => Ok(()),
            _ => self.partial_result(result),
        })
    }
}

fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Returns the size of a file or block device in bytes.
fn file_size(file: &File) -> io::Result<u64> {
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
async fn recheck_periodically(on: Loop, device: std::rc::Weak<FileDevice>) {
    loop {
        on.sleep(CHECK_INTERVAL).await;
        let Some(open) = device.upgrade() else { return };
        if open.is_local {
            open.check_size();
            open.recheck_path();
            continue;
        }
        let (path, times_grown) = (open.path.clone(), open.grow_count.get());
        let Ok(file) = open.file.try_clone() else { continue };
        // The thread must not keep the device open.
        drop(open);
        let look = move || (file.metadata().map(|found| found.len()), locked_file::path_change(&file, &path));
        let Ok((size, displaced)) = on.run_blocking(look).await else {
            continue;
        };
        let Some(open) = device.upgrade() else { return };
        // A size that was read before this device extended the file is stale.
        if let Ok(size) = size
            && times_grown == open.grow_count.get()
        {
            open.apply_size(size);
        }
        if let Ok(path_change) = displaced {
            open.report_path_change(path_change);
        }
    }
}
