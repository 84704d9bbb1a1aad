//! The mark of an image: a page in the host's memory that outlives the process, and proves after a kill that no other
//! program has written to the image.
//!
//! The process counts the writes that it begins and ends in the page, with plain stores. While a write is in flight
//! it also stores a heartbeat. When no write is in flight, it captures the times of the file, or the counters of the
//! block device. The next process that opens the image compares the page with the image (`verdict`, `block_device`).
//!
//! Invariants:
//! - A write is counted as begun before the kernel gets it, and as ended after its completion was reaped, together
//!   with a time that is not before any time that the write gave the file.
//! - A capture is taken when no own write is in flight, and only once any later write leaves another state.
//! - A finding that is not `Unchanged` is carried from mark to mark until [`FileDevice::acknowledge_verdict`]: a
//!   process that is killed before it has acted upon the finding leaves it to the next one.
//! - The page stays as it was found until the process writes to the image, or acts upon the finding: a process that
//!   closes the image before that leaves the page to the next one.
//! - The page is allocated before it is mapped, so no store raises SIGBUS.
//!
//! How it fails: without a mark the finding is unproven. An image or a device on a server is never proven, and its
//! times and counters are not read.

mod block_device;
mod layout;
#[cfg(test)]
mod tests;
mod verdict;

use std::cell::Cell;
use std::fs::{DirBuilder, File, Metadata};
use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use io_uring::squeue;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, StatxFlags};
use rustix::time::{ClockId, clock_gettime};

use super::{FileDevice, FileKind, SECTOR};
use crate::boot::{boot_id, is_local_file_system, is_tmpfs};
use crate::event_loop::{Loop, Ring, RingOp, TurnEndHook};
use crate::opener::{FileTimes, opener};
use layout::{PAGE_BYTES, RecordPage, Word};
use verdict::Finding;
pub(super) use verdict::RecordFinding;
pub use verdict::Verdict;
use verdict::{CLOCK_STEP_MIN_NS, Capture, ClockReading, HEARTBEAT_INTERVAL_NS, ImageState, Snapshot, judge};

/// The interval of heartbeats and captures while writes have begun since the last capture.
const HEARTBEAT_INTERVAL: Duration = Duration::from_nanos(HEARTBEAT_INTERVAL_NS as u64);

/// The distance in nanoseconds after the present from which a file's time comes from no clock: a program has set it.
const FUTURE_MARGIN_NS: i64 = 1_000_000_000;

/// The maximum number of attempts to read two clocks at the same time.
const CLOCK_READS_MAX: u32 = 4;

/// The duration in nanoseconds within which two clock readings count as simultaneous.
const CLOCK_READ_NS_MAX: i64 = 20_000;

/// The image to mark.
pub(super) struct RecordedImage<'a> {
    pub(super) file: &'a File,
    pub(super) kind: FileKind,
    /// The page cache is bypassed.
    pub(super) is_direct: bool,
    /// This process updates the mark. False if other processes may write too, or this process does not write: then
    /// the mark is only read.
    pub(super) keeps_record: bool,
    /// The maximum size that a write within the visible size may give the file.
    pub(super) size_max: u64,
}

/// The mark of an open image, which this process updates.
pub(super) struct WriteRecord {
    page: RecordPage,
    on: Loop,
    state_source: StateSource,
    boot: u128,
    finding: RecordFinding,
    /// The image's state when it was opened, until the page is set up.
    state_at_open: Cell<Option<ImageState>>,
    size_max: Cell<u64>,
    /// The task that stores heartbeats and captures is running, or is not wanted.
    heartbeat_started: Cell<bool>,
    is_closed: Cell<bool>,
    /// Writes that have ended in this turn of the loop, and their sectors.
    completed_in_turn: Cell<u64>,
    completed_sectors_in_turn: Cell<u64>,
    started_at_last_tick: Cell<u64>,
    last_capture: Cell<Option<Capture>>,
}

/// The source of an image's state.
enum StateSource {
    File(File),
    Block(u64),
    /// None: the state proves nothing.
    Unprovable,
}

/// The sectors of a write that was counted as begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SectorCount(u32);

/// A change in flight of an image's size or allocation. It ends when this value is dropped.
pub(super) struct ChangeInFlight {
    record: Rc<WriteRecord>,
    sectors: SectorCount,
}

impl Drop for ChangeInFlight {
    fn drop(&mut self) {
        self.record.complete_write(self.sectors);
    }
}

impl WriteRecord {
    /// Reads the mark that an earlier process has left in `directory`, if there is one. Begins a new one if this
    /// process is to update it. The caller has locked the image and written nothing to it since.
    ///
    /// # Errors
    /// The directory is not in the host's memory or not exclusive to this user, or the host's memory is full.
    pub(super) fn open(
        on: &Loop,
        directory: &Path,
        recorded: &RecordedImage<'_>,
    ) -> io::Result<(RecordFinding, Option<Rc<Self>>)> {
        let boot = boot_id()?;
        let metadata = recorded.file.metadata()?;
        prepare_directory(directory, recorded.keeps_record)?;
        let path = directory.join(record_name(recorded, &metadata)?);
        let Some(file) = open_record_file(&path, recorded.keeps_record)? else {
            return Ok((RecordFinding::NO_RECORD, None));
        };
        let snapshot = layout::read(&file)?;
        let (image, state) = state_source(recorded, &metadata);
        let clock = read_clock(boot);
        let size_max = Cell::new(recorded.size_max);
        let found = RecordFinding {
            finding: judge(snapshot.as_ref(), &state, clock),
            use_id: snapshot.as_ref().map_or(0, |mark| mark.use_id),
        };
        tracing::debug!(path = %path.display(), ?snapshot, ?state, ?clock, ?found, "mark");
        if !recorded.keeps_record {
            return Ok((found, None));
        }
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, PAGE_BYTES as u64)?;
        let page = RecordPage::map(&file)?;
        let record = Rc::new(Self {
            page,
            on: on.clone(),
            state_source: image,
            boot,
            finding: found,
            state_at_open: Cell::new(Some(state)),
            size_max,
            heartbeat_started: Cell::new(false),
            is_closed: Cell::new(false),
            completed_in_turn: Cell::new(0),
            completed_sectors_in_turn: Cell::new(0),
            started_at_last_tick: Cell::new(0),
            last_capture: Cell::new(None),
        });
        Ok((found, Some(record)))
    }

    /// Makes the page this process's own, if it is not yet. No write of this process may be in flight.
    fn initialize_page(self: &Rc<Self>) {
        let Some(opened) = self.state_at_open.take() else {
            return;
        };
        let clock = read_clock(self.boot);
        self.page.initialize(self.boot, clock.clock_offset_ns, clock.now_ns, self.size_max.get(), &self.finding);
        if matches!(self.state_source, StateSource::Unprovable) {
            self.heartbeat_started.set(true);
            return;
        }
        self.last_capture.set(Some(Capture {
            clock_offset_ns: clock.clock_offset_ns,
            file: opened.file,
            disk: opened.disk,
            ..Capture::default()
        }));
        if let (Ok(now), Some(then)) = (self.state(), opened.file) {
            self.detect_foreign_change(now, then);
        }
        if !self.tick() {
            self.start_heartbeat();
        }
    }

    /// Compares the file's state with `then`, since which this process has not changed the file.
    fn detect_foreign_change(&self, now: ImageState, then: FileTimes) {
        let Some(now) = now.file.filter(|now| *now != then) else {
            return;
        };
        let is_written = now.mtime_ns != then.mtime_ns || now.size != then.size;
        self.record_foreign_change(if is_written { Finding::Changed } else { Finding::Unproven });
    }

    /// Counts a write of `len` bytes as begun; one of more than 2 TiB counts as one of 2 TiB. The caller submits it to
    /// the kernel next, and passes the result to [`Self::complete_write`] when the kernel has completed it.
    #[inline]
    pub(super) fn start_write(self: &Rc<Self>, len: u64) -> SectorCount {
        let sectors = SectorCount(u32::try_from(len / SECTOR).unwrap_or(u32::MAX));
        if !self.heartbeat_started.get() {
            self.resume_heartbeat();
        }
        let page = &self.page;
        page.store(Word::StartedSectors, page.load(Word::StartedSectors) + u64::from(sectors.0));
        page.store(Word::Started, page.load(Word::Started) + 1);
        sectors
    }

    /// Counts a write as ended, at the end of this turn of the loop.
    #[inline]
    pub(super) fn complete_write(self: &Rc<Self>, sectors: SectorCount) {
        let completed = self.completed_in_turn.get();
        if completed == 0 {
            // One clock reading serves all writes that end in this turn.
            self.on.call_at_turn_end(Rc::clone(self) as Rc<dyn TurnEndHook>);
        }
        self.completed_in_turn.set(completed + 1);
        self.completed_sectors_in_turn.set(self.completed_sectors_in_turn.get() + u64::from(sectors.0));
    }

    /// Marks the counted sectors as inexact: the device may have counted another number than those begun.
    #[cold]
    pub(super) fn set_inexact(&self) {
        self.page.store(Word::Inexact, 1);
    }

    /// Announces that a later write may give the file this size.
    pub(super) fn raise_size_max(&self, size: u64) {
        self.size_max.set(self.size_max.get().max(size));
        if self.is_initialized() {
            self.page.store(Word::SizeMax, self.size_max.get());
        }
    }

    fn is_initialized(&self) -> bool {
        self.state_at_open.get().is_none()
    }

    /// Reports that the findings of this opening and of earlier ones have been acted upon. The mark belongs to this
    /// use from now on.
    pub(super) fn acknowledge(self: &Rc<Self>, use_id: u64) {
        self.initialize_page();
        self.page.store(Word::UseId, use_id);
        self.page.store(Word::Carried, Finding::Unchanged.code());
    }

    /// Starts heartbeats and captures, for the first write since the last capture or ever.
    #[cold]
    fn resume_heartbeat(self: &Rc<Self>) {
        if !self.is_initialized() {
            self.initialize_page();
            if !self.heartbeat_started.get() {
                self.start_heartbeat();
            }
            return;
        }
        if let (StateSource::File(_), Some(last)) = (&self.state_source, self.last_capture.get())
            && let (Ok(now), Some(then)) = (self.state(), last.file)
        {
            self.detect_foreign_change(now, then);
        }
        self.start_heartbeat();
    }

    fn start_heartbeat(self: &Rc<Self>) {
        self.heartbeat_started.set(true);
        self.on.spawn(run_heartbeat(self.on.clone(), Rc::downgrade(self)));
    }

    fn record_foreign_change(&self, finding: Finding) {
        let known = Finding::from_code(self.page.load(Word::Foreign));
        if finding > known {
            self.page.store(Word::Foreign, finding.code());
        }
    }

    /// Stores a heartbeat, and captures the state if no write is in flight. Returns true if the state was captured,
    /// or never will be.
    fn tick(&self) -> bool {
        if self.is_closed.get() {
            return true;
        }
        let (page, clock) = (&self.page, read_clock(self.boot));
        let was_set = self.adjust_to_clock(clock);
        page.store(Word::HeartbeatAt, clock.now_ns as u64);
        let started = page.load(Word::Started);
        if started != page.load(Word::Completed) {
            return false;
        }
        // The counters of a device are read through the opener, which is too slow between two writes of a busy guest.
        if matches!(self.state_source, StateSource::Block(_)) && self.started_at_last_tick.replace(started) != started {
            return false;
        }
        self.capture(clock, was_set)
    }

    /// Captures the state, if any later write is certain to leave another one, and returns whether that is so. No
    /// write is in flight.
    fn capture(&self, clock: ClockReading, clock_was_set: bool) -> bool {
        let page = &self.page;
        let coarse_ns = nanoseconds(ClockId::RealtimeCoarse);
        let Ok(state) = self.state() else {
            return true;
        };
        if let Some(file) = state.file {
            let completed_at = page.load(Word::CompletedAt) as i64;
            let is_past = file.latest_ns() <= clock.now_ns;
            if !clock_was_set && is_past && file.latest_ns() > completed_at {
                let is_written = file.mtime_ns > completed_at;
                self.record_foreign_change(if is_written { Finding::Changed } else { Finding::Unproven });
            }
            // The next write gets the time of the coarse clock, or a later one.
            if file.latest_ns() >= coarse_ns && file.latest_ns() < clock.now_ns + FUTURE_MARGIN_NS {
                return false;
            }
        }
        let started_sectors = page.load(Word::StartedSectors);
        if let Some(disk) = &state.disk {
            let last = Snapshot {
                started_sectors,
                completed_sectors: started_sectors,
                is_inexact: page.load(Word::Inexact) != 0,
                capture: self.last_capture.get(),
                ..Snapshot::default()
            };
            if last.capture.is_some() && !last.is_inexact {
                self.record_foreign_change(block_device::judge_disk(&last, disk));
            }
        }
        let capture = Capture {
            started: page.load(Word::Started),
            started_sectors,
            clock_offset_ns: clock.clock_offset_ns,
            file: state.file,
            disk: state.disk,
        };
        page.store_capture(&capture);
        page.store(Word::Inexact, 0);
        self.last_capture.set(Some(capture));
        true
    }

    /// Adjusts the page to a clock that was set, and returns whether it was. A kill during the adjustment leaves the
    /// earlier mark, which proves less.
    fn adjust_to_clock(&self, clock: ClockReading) -> bool {
        let page = &self.page;
        let clock_was_set = (clock.clock_offset_ns - page.load(Word::ClockOffset) as i64).abs() > CLOCK_STEP_MIN_NS;
        if clock_was_set {
            let completed_at = page.load(Word::CompletedAt) as i64;
            page.store(Word::HeartbeatAt, clock.now_ns as u64);
            page.store(Word::CompletedAt, completed_at.min(clock.now_ns) as u64);
            page.store(Word::ClockOffset, clock.clock_offset_ns as u64);
        }
        clock_was_set
    }

    fn state(&self) -> io::Result<ImageState> {
        read_state(&self.state_source)
    }

    /// Captures the state for the last time. The image is still locked. Nothing is stored from now on.
    pub(super) fn close(&self) {
        if self.is_closed.replace(true) {
            return;
        }
        self.on_turn_end();
        let page = &self.page;
        if self.is_initialized()
            && !matches!(self.state_source, StateSource::Unprovable)
            && page.load(Word::Started) == page.load(Word::Completed)
        {
            let clock = read_clock(self.boot);
            let clock_was_set = self.adjust_to_clock(clock);
            // If it is too early for a capture, the time of the last write's end serves as well.
            self.capture(clock, clock_was_set);
        }
        page.detach();
    }
}

impl TurnEndHook for WriteRecord {
    fn on_turn_end(&self) {
        let (completed, sectors) = (self.completed_in_turn.take(), self.completed_sectors_in_turn.take());
        if completed == 0 {
            return;
        }
        let page = &self.page;
        // The time is stored first: the times of all writes counted as ended are then not after it.
        page.store(Word::CompletedAt, nanoseconds(ClockId::Realtime) as u64);
        page.store(Word::CompletedSectors, page.load(Word::CompletedSectors) + sectors);
        page.store(Word::Completed, page.load(Word::Completed) + completed);
    }
}

async fn run_heartbeat(on: Loop, mark: Weak<WriteRecord>) {
    loop {
        on.sleep(HEARTBEAT_INTERVAL).await;
        let Some(record) = mark.upgrade() else { return };
        if record.tick() {
            record.heartbeat_started.set(false);
            return;
        }
    }
}

/// A change of a file's allocation through io_uring, which continues in the kernel when its future is dropped.
pub(super) struct RecordedChange<'a> {
    op: Option<RingOp>,
    change: Option<ChangeInFlight>,
    on: &'a Loop,
}

impl<'a> RecordedChange<'a> {
    pub(super) fn start(on: &'a Loop, ring: &Ring, entry: squeue::Entry, change: Option<ChangeInFlight>) -> Self {
        if let Some(change) = &change {
            // Devices count some of these changes as writes, some as discards, and some not at all.
            change.record.set_inexact();
        }
        Self { op: Some(ring.start_plain(entry)), change, on }
    }
}

impl Future for RecordedChange<'_> {
    type Output = i32;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<i32> {
        let Some(op) = self.op.as_mut() else {
            return Poll::Pending;
        };
        let result = std::task::ready!(Pin::new(op).poll(context));
        self.op = None;
        self.change = None;
        Poll::Ready(result)
    }
}

impl Drop for RecordedChange<'_> {
    fn drop(&mut self) {
        if let (Some(op), Some(begun)) = (self.op.take(), self.change.take()) {
            self.on.spawn(async move {
                op.await;
                drop(begun);
            });
        }
    }
}

impl FileDevice {
    /// Returns whether another program has written to the image since one of the uses `use_ids` of it began
    /// ([`Self::acknowledge_verdict`]). Returns `None` if the host was rebooted since: then the caller's durable
    /// records count. `noted_boot` is the boot ID of the host when the caller last wrote these records. It
    /// distinguishes a mark that was lost from one that a reboot has removed.
    pub fn verdict(&self, noted_boot: Option<u128>, use_ids: &[u64]) -> Option<Verdict> {
        let found = self.record_finding?;
        match found.finding {
            // The last process that used the image has updated the mark, possibly without the caller's own records.
            Finding::NoRecord => None,
            _ if !use_ids.contains(&found.use_id) => None,
            Finding::Unchanged => Some(Verdict::Unchanged),
            Finding::Unproven => Some(Verdict::Unproven),
            Finding::Changed => Some(Verdict::Changed),
        }
        .or_else(|| {
            let is_same_boot = noted_boot.is_some() && noted_boot == boot_id().ok();
            is_same_boot.then_some(Verdict::Unproven)
        })
    }

    /// Reports that the verdict has been acted upon, and that a new use of the image begins, for which the caller has
    /// chosen a random number. Until then later openings of the image have no better verdict than this one.
    pub fn acknowledge_verdict(&self, use_id: u64) {
        if let Some(mark) = &self.write_record {
            mark.acknowledge(use_id);
        }
    }

    /// Counts a change of `len` bytes as begun, if there is a mark.
    pub(super) fn start_change(&self, len: u64) -> Option<ChangeInFlight> {
        self.write_record
            .as_ref()
            .map(|record| ChangeInFlight { sectors: record.start_write(len), record: Rc::clone(record) })
    }
}

/// Reads the host's clocks.
fn read_clock(boot: u128) -> ClockReading {
    let mut best = (i64::MAX, ClockReading::default());
    for _ in 0..CLOCK_READS_MAX {
        let before = nanoseconds(ClockId::Boottime);
        let now_ns = nanoseconds(ClockId::Realtime);
        let elapsed = nanoseconds(ClockId::Boottime) - before;
        if elapsed < best.0 {
            let ahead_ns = now_ns - before - elapsed / 2;
            best = (elapsed, ClockReading { boot, now_ns, clock_offset_ns: ahead_ns });
        }
        if elapsed < CLOCK_READ_NS_MAX {
            break;
        }
    }
    best.1
}

fn nanoseconds(clock: ClockId) -> i64 {
    let time = clock_gettime(clock);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// Returns the source of an image's state, and its present state.
fn state_source(recorded: &RecordedImage<'_>, metadata: &Metadata) -> (StateSource, ImageState) {
    let image = match recorded.kind {
        FileKind::Block if recorded.is_direct => {
            // Foreign writes through the page cache are counted only when the kernel writes them to the device.
            let all =
                libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
            // SAFETY: a plain system call on an open descriptor.
            let result = unsafe { libc::sync_file_range(recorded.file.as_raw_fd(), 0, 0, all) };
            match result {
                0 => StateSource::Block(metadata.rdev()),
                _ => StateSource::Unprovable,
            }
        }
        FileKind::Block => StateSource::Unprovable,
        FileKind::Regular | FileKind::Tmpfs => {
            let is_provable = rustix::fs::fstatfs(recorded.file).is_ok_and(|found| is_local_file_system(&found));
            // Another open file description, because the image's own one has the locks.
            let own = format!("/proc/self/fd/{}", recorded.file.as_raw_fd());
            match rustix::fs::open(own, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(place) if is_provable => StateSource::File(place.into()),
                _ => StateSource::Unprovable,
            }
        }
    };
    match read_state(&image) {
        Ok(state) if state.is_provable => (image, state),
        _ => (StateSource::Unprovable, ImageState::default()),
    }
}

fn read_state(image: &StateSource) -> io::Result<ImageState> {
    Ok(match image {
        StateSource::File(path_file) => {
            ImageState { file: Some(FileTimes::from(&path_file.metadata()?)), disk: None, is_provable: true }
        }
        StateSource::Block(device) => {
            let disk = opener().disk_counters(*device)?;
            ImageState { file: disk.backing, disk: Some(disk), is_provable: disk.is_reliable }
        }
        StateSource::Unprovable => ImageState::default(),
    })
}

/// Returns the name of an image's mark. All names of an image give the same mark, and no other image has it at the
/// same time.
fn record_name(marked: &RecordedImage<'_>, metadata: &Metadata) -> io::Result<PathBuf> {
    if marked.kind == FileKind::Block {
        return Ok(format!("block-{:x}", metadata.rdev()).into());
    }
    let more = rustix::fs::statx(marked.file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME)?;
    let created = &more.stx_btime;
    Ok(format!("file-{:x}-{:x}-{:x}-{:x}", metadata.dev(), metadata.ino(), created.tv_sec, created.tv_nsec).into())
}

/// Creates the directory if it is missing and wanted, and checks that it is on tmpfs and exclusive to this user.
fn prepare_directory(directory: &Path, is_wanted: bool) -> io::Result<()> {
    let found = match directory.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound && is_wanted => {
            match DirBuilder::new().mode(0o700).create(directory) {
                // Another device's opening has created it first.
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => directory.symlink_metadata()?,
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata?,
    };
    let user = rustix::process::geteuid().as_raw();
    if !found.is_dir() || found.uid() != user || found.mode() & 0o022 != 0 {
        return Err(io::Error::other("it is not a directory that only this user may write to"));
    }
    if !is_tmpfs(&rustix::fs::statfs(directory)?) {
        return Err(io::Error::other("it is not on tmpfs"));
    }
    Ok(())
}

/// Opens a mark, and creates it if it is missing and wanted.
fn open_record_file(path: &Path, is_wanted: bool) -> io::Result<Option<File>> {
    let flags = match is_wanted {
        true => OFlags::RDWR | OFlags::CREATE,
        false => OFlags::RDONLY,
    };
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        file => File::from(file?),
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("the record is not a regular file of this user"));
    }
    Ok(Some(file))
}
