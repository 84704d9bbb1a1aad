//! The mark of an image: a page in the host's memory that outlives the process, and proves after a kill that no other
//! program has written to the image.
//!
//! The process counts the writes that it begins and ends in the page, with plain stores. While a write is in flight
//! it also stores a heartbeat. When no write is in flight, it captures the times of the file, or the counters of the
//! block device. The next process that opens the image compares the page with the image (`verdict`, `block`).
//!
//! Invariants:
//! - A write is counted as begun before the kernel gets it, and as ended after its completion was reaped, together
//!   with a time that is not before any time that the write gave the file.
//! - A capture is taken when no own write is in flight, and only once any later write leaves another state.
//! - A finding that is not `Proven` is carried from mark to mark until [`FileDevice::acknowledge_verdict`]: a process
//!   that is killed before it has acted upon the finding leaves it to the next one.
//! - The page stays as it was found until the process writes to the image, or acts upon the finding: a process that
//!   closes the image before that leaves the page to the next one.
//! - The page is allocated before it is mapped, so no store raises SIGBUS.
//!
//! How it fails: without a mark the finding is unproven. An image or a device on a server is never proven, and its
//! times and counters are not read.

mod block;
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

use super::{FileDevice, Kind, SECTOR};
use crate::boot::{boot_id, is_local, is_tmpfs};
use crate::event_loop::{Loop, Ring, RingOp, TurnEnd};
use crate::opener::{FileTimes, opener};
use layout::{PAGE, Page, Word};
use verdict::Finding;
pub(super) use verdict::Found;
pub use verdict::Verdict;
use verdict::{Capture, Clock, HEARTBEAT_NS, STEP_MIN_NS, Snapshot, State, judge};

/// The interval of heartbeats and captures while writes have begun since the last capture.
const HEARTBEAT: Duration = Duration::from_nanos(HEARTBEAT_NS as u64);

/// The distance in nanoseconds after the present from which a file's time comes from no clock: a program has set it.
const FUTURE_NS: i64 = 1_000_000_000;

/// The maximum number of attempts to read two clocks at the same time.
const CLOCK_READS: u32 = 4;

/// The duration in nanoseconds within which two clock readings count as simultaneous.
const CLOCK_READ_NS: i64 = 20_000;

/// The image to mark.
pub(super) struct Marked<'a> {
    pub(super) file: &'a File,
    pub(super) kind: Kind,
    /// The page cache is bypassed.
    pub(super) is_direct: bool,
    /// This process updates the mark. False if other processes may write too, or this process does not write: then
    /// the mark is only read.
    pub(super) is_kept: bool,
    /// The maximum size that a write within the visible size may give the file.
    pub(super) size_max: u64,
}

/// The mark of an open image, which this process updates.
pub(super) struct Mark {
    page: Page,
    on: Loop,
    image: Image,
    boot: u128,
    found: Found,
    /// The image's state when it was opened, until the page is set up.
    opened: Cell<Option<State>>,
    size_max: Cell<u64>,
    /// The task that stores heartbeats and captures is running, or is not wanted.
    is_watched: Cell<bool>,
    is_closed: Cell<bool>,
    /// Writes that have ended in this turn of the loop, and their sectors.
    ending: Cell<u64>,
    ending_sectors: Cell<u64>,
    begun_at_tick: Cell<u64>,
    last: Cell<Option<Capture>>,
}

/// The source of an image's state.
enum Image {
    File(File),
    Block(u64),
    /// None: the state proves nothing.
    Unprovable,
}

/// The sectors of a write that was counted as begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sectors(u32);

/// A change in flight of an image's size or allocation. It ends when this value is dropped.
pub(super) struct Begun {
    mark: Rc<Mark>,
    sectors: Sectors,
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.mark.end_write(self.sectors);
    }
}

impl Mark {
    /// Reads the mark that an earlier process has left in `directory`, if there is one. Begins a new one if this
    /// process is to update it. The caller has locked the image and written nothing to it since.
    ///
    /// # Errors
    /// The directory is not in the host's memory or not exclusive to this user, or the host's memory is full.
    pub(super) fn open(on: &Loop, directory: &Path, marked: &Marked<'_>) -> io::Result<(Found, Option<Rc<Self>>)> {
        let boot = boot_id()?;
        let metadata = marked.file.metadata()?;
        prepare_directory(directory, marked.is_kept)?;
        let path = directory.join(name(marked, &metadata)?);
        let Some(file) = open_mark(&path, marked.is_kept)? else {
            return Ok((Found::NO_MARK, None));
        };
        let snapshot = layout::read(&file)?;
        let (image, state) = image_of(marked, &metadata);
        let clock = clock(boot);
        let size_max = Cell::new(marked.size_max);
        let found = Found {
            finding: judge(snapshot.as_ref(), &state, clock),
            of_use: snapshot.as_ref().map_or(0, |mark| mark.of_use),
        };
        tracing::debug!(path = %path.display(), ?snapshot, ?state, ?clock, ?found, "mark");
        if !marked.is_kept {
            return Ok((found, None));
        }
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, PAGE as u64)?;
        let page = Page::map(&file)?;
        let mark = Rc::new(Self {
            page,
            on: on.clone(),
            image,
            boot,
            found,
            opened: Cell::new(Some(state)),
            size_max,
            is_watched: Cell::new(false),
            is_closed: Cell::new(false),
            ending: Cell::new(0),
            ending_sectors: Cell::new(0),
            begun_at_tick: Cell::new(0),
            last: Cell::new(None),
        });
        Ok((found, Some(mark)))
    }

    /// Makes the page this process's own, if it is not yet. No write of this process may be in flight.
    fn set_up(self: &Rc<Self>) {
        let Some(opened) = self.opened.take() else { return };
        let clock = clock(self.boot);
        self.page.set_up(
            self.boot,
            clock.ahead_ns,
            clock.now_ns,
            self.size_max.get(),
            &self.found,
        );
        if matches!(self.image, Image::Unprovable) {
            self.is_watched.set(true);
            return;
        }
        self.last.set(Some(Capture {
            ahead_ns: clock.ahead_ns,
            file: opened.file,
            disk: opened.disk,
            ..Capture::default()
        }));
        if let (Ok(now), Some(then)) = (self.state(), opened.file) {
            self.compare(now, then);
        }
        if !self.tick() {
            self.watch();
        }
    }

    /// Compares the file's state with `then`, since which this process has not changed the file.
    fn compare(&self, now: State, then: FileTimes) {
        let Some(now) = now.file.filter(|now| *now != then) else {
            return;
        };
        let is_written = now.mtime_ns != then.mtime_ns || now.size != then.size;
        self.record_foreign(if is_written {
            Finding::Changed
        } else {
            Finding::Unproven
        });
    }

    /// Counts a write of `len` bytes as begun; one of more than 2 TiB counts as one of 2 TiB. The caller submits it to
    /// the kernel next, and passes the result to [`Self::end_write`] when the kernel has completed it.
    #[inline]
    pub(super) fn begin_write(self: &Rc<Self>, len: u64) -> Sectors {
        let sectors = Sectors(u32::try_from(len / SECTOR).unwrap_or(u32::MAX));
        if !self.is_watched.get() {
            self.wake();
        }
        let page = &self.page;
        page.store(Word::BegunSectors, page.load(Word::BegunSectors) + u64::from(sectors.0));
        page.store(Word::Begun, page.load(Word::Begun) + 1);
        sectors
    }

    /// Counts a write as ended, at the end of this turn of the loop.
    #[inline]
    pub(super) fn end_write(self: &Rc<Self>, sectors: Sectors) {
        let ending = self.ending.get();
        if ending == 0 {
            // One clock reading serves all writes that end in this turn.
            self.on.call_at_turn_end(Rc::clone(self) as Rc<dyn TurnEnd>);
        }
        self.ending.set(ending + 1);
        self.ending_sectors
            .set(self.ending_sectors.get() + u64::from(sectors.0));
    }

    /// Marks the counted sectors as inexact: the device may have counted another number than those begun.
    #[cold]
    pub(super) fn set_inexact(&self) {
        self.page.store(Word::Inexact, 1);
    }

    /// Announces that a later write may give the file this size.
    pub(super) fn may_grow_to(&self, size: u64) {
        self.size_max.set(self.size_max.get().max(size));
        if self.is_set_up() {
            self.page.store(Word::SizeMax, self.size_max.get());
        }
    }

    fn is_set_up(&self) -> bool {
        self.opened.get().is_none()
    }

    /// Reports that the findings of this opening and of earlier ones have been acted upon. The mark belongs to this
    /// use from now on.
    pub(super) fn acknowledge(self: &Rc<Self>, of_use: u64) {
        self.set_up();
        self.page.store(Word::Use, of_use);
        self.page.store(Word::Carried, Finding::Proven.code());
    }

    /// Starts heartbeats and captures, for the first write since the last capture or ever.
    #[cold]
    fn wake(self: &Rc<Self>) {
        if !self.is_set_up() {
            self.set_up();
            if !self.is_watched.get() {
                self.watch();
            }
            return;
        }
        if let (Image::File(_), Some(last)) = (&self.image, self.last.get())
            && let (Ok(now), Some(then)) = (self.state(), last.file)
        {
            self.compare(now, then);
        }
        self.watch();
    }

    fn watch(self: &Rc<Self>) {
        self.is_watched.set(true);
        self.on.spawn(watch(self.on.clone(), Rc::downgrade(self)));
    }

    fn record_foreign(&self, finding: Finding) {
        let known = Finding::of_code(self.page.load(Word::Foreign));
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
        let (page, clock) = (&self.page, clock(self.boot));
        let was_set = self.follow(clock);
        page.store(Word::AliveAt, clock.now_ns as u64);
        let begun = page.load(Word::Begun);
        if begun != page.load(Word::Ended) {
            return false;
        }
        // The counters of a device are read through the opener, which is too slow between two writes of a busy guest.
        if matches!(self.image, Image::Block(_)) && self.begun_at_tick.replace(begun) != begun {
            return false;
        }
        self.capture(clock, was_set)
    }

    /// Captures the state, if any later write is certain to leave another one, and returns whether that is so. No
    /// write is in flight.
    fn capture(&self, clock: Clock, was_set: bool) -> bool {
        let page = &self.page;
        let coarse_ns = nanoseconds(ClockId::RealtimeCoarse);
        let Ok(state) = self.state() else {
            return true;
        };
        if let Some(file) = state.file {
            let ended_at = page.load(Word::EndedAt) as i64;
            let is_past = file.latest_ns() <= clock.now_ns;
            if !was_set && is_past && file.latest_ns() > ended_at {
                let is_written = file.mtime_ns > ended_at;
                self.record_foreign(if is_written {
                    Finding::Changed
                } else {
                    Finding::Unproven
                });
            }
            // The next write gets the time of the coarse clock, or a later one.
            if file.latest_ns() >= coarse_ns && file.latest_ns() < clock.now_ns + FUTURE_NS {
                return false;
            }
        }
        let begun_sectors = page.load(Word::BegunSectors);
        if let Some(disk) = &state.disk {
            let last = Snapshot {
                begun_sectors,
                ended_sectors: begun_sectors,
                is_inexact: page.load(Word::Inexact) != 0,
                capture: self.last.get(),
                ..Snapshot::default()
            };
            if last.capture.is_some() && !last.is_inexact {
                self.record_foreign(block::judge_disk(&last, disk));
            }
        }
        let capture = Capture {
            begun: page.load(Word::Begun),
            begun_sectors,
            ahead_ns: clock.ahead_ns,
            file: state.file,
            disk: state.disk,
        };
        page.capture(&capture);
        page.store(Word::Inexact, 0);
        self.last.set(Some(capture));
        true
    }

    /// Adjusts the page to a clock that was set, and returns whether it was. A kill during the adjustment leaves the
    /// earlier mark, which proves less.
    fn follow(&self, clock: Clock) -> bool {
        let page = &self.page;
        let was_set = (clock.ahead_ns - page.load(Word::Ahead) as i64).abs() > STEP_MIN_NS;
        if was_set {
            let ended_at = page.load(Word::EndedAt) as i64;
            page.store(Word::AliveAt, clock.now_ns as u64);
            page.store(Word::EndedAt, ended_at.min(clock.now_ns) as u64);
            page.store(Word::Ahead, clock.ahead_ns as u64);
        }
        was_set
    }

    fn state(&self) -> io::Result<State> {
        state_of(&self.image)
    }

    /// Captures the state for the last time. The image is still locked. Nothing is stored from now on.
    pub(super) fn close(&self) {
        if self.is_closed.replace(true) {
            return;
        }
        self.turn();
        let page = &self.page;
        if self.is_set_up()
            && !matches!(self.image, Image::Unprovable)
            && page.load(Word::Begun) == page.load(Word::Ended)
        {
            let clock = clock(self.boot);
            let was_set = self.follow(clock);
            // If it is too early for a capture, the time of the last write's end serves as well.
            self.capture(clock, was_set);
        }
        page.detach();
    }
}

impl TurnEnd for Mark {
    fn turn(&self) {
        let (ending, sectors) = (self.ending.take(), self.ending_sectors.take());
        if ending == 0 {
            return;
        }
        let page = &self.page;
        // The time is stored first: the times of all writes counted as ended are then not after it.
        page.store(Word::EndedAt, nanoseconds(ClockId::Realtime) as u64);
        page.store(Word::EndedSectors, page.load(Word::EndedSectors) + sectors);
        page.store(Word::Ended, page.load(Word::Ended) + ending);
    }
}

async fn watch(on: Loop, mark: Weak<Mark>) {
    loop {
        on.sleep(HEARTBEAT).await;
        let Some(mark) = mark.upgrade() else { return };
        if mark.tick() {
            mark.is_watched.set(false);
            return;
        }
    }
}

/// A change of a file's allocation through io_uring, which continues in the kernel when its future is dropped.
pub(super) struct MarkedChange<'a> {
    op: Option<RingOp>,
    begun: Option<Begun>,
    on: &'a Loop,
}

impl<'a> MarkedChange<'a> {
    pub(super) fn start(on: &'a Loop, ring: &Ring, entry: squeue::Entry, begun: Option<Begun>) -> Self {
        if let Some(begun) = &begun {
            // Devices count some of these changes as writes, some as discards, and some not at all.
            begun.mark.set_inexact();
        }
        Self {
            op: Some(ring.start_plain(entry)),
            begun,
            on,
        }
    }
}

impl Future for MarkedChange<'_> {
    type Output = i32;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<i32> {
        let Some(op) = self.op.as_mut() else {
            return Poll::Pending;
        };
        let result = std::task::ready!(Pin::new(op).poll(context));
        self.op = None;
        self.begun = None;
        Poll::Ready(result)
    }
}

impl Drop for MarkedChange<'_> {
    fn drop(&mut self) {
        if let (Some(op), Some(begun)) = (self.op.take(), self.begun.take()) {
            self.on.spawn(async move {
                op.await;
                drop(begun);
            });
        }
    }
}

impl FileDevice {
    /// Returns whether another program has written to the image since one of the given `uses` of it began
    /// ([`Self::acknowledge_verdict`]). Returns `None` if the host was rebooted since: then the caller's durable
    /// records count. `noted_boot` is the boot ID of the host when the caller last wrote these records. It
    /// distinguishes a mark that was lost from one that a reboot has removed.
    pub fn verdict(&self, noted_boot: Option<u128>, uses: &[u64]) -> Option<Verdict> {
        let found = self.found?;
        match found.finding {
            // The last process that used the image has updated the mark, possibly without the caller's own records.
            Finding::NoMark => None,
            _ if !uses.contains(&found.of_use) => None,
            Finding::Proven => Some(Verdict::Proven),
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
    pub fn acknowledge_verdict(&self, of_use: u64) {
        if let Some(mark) = &self.mark {
            mark.acknowledge(of_use);
        }
    }

    /// Counts a change of `len` bytes as begun, if there is a mark.
    pub(super) fn begin(&self, len: u64) -> Option<Begun> {
        self.mark.as_ref().map(|mark| Begun {
            sectors: mark.begin_write(len),
            mark: Rc::clone(mark),
        })
    }
}

/// Reads the host's clocks.
fn clock(boot: u128) -> Clock {
    let mut best = (i64::MAX, Clock::default());
    for _ in 0..CLOCK_READS {
        let before = nanoseconds(ClockId::Boottime);
        let now_ns = nanoseconds(ClockId::Realtime);
        let took = nanoseconds(ClockId::Boottime) - before;
        if took < best.0 {
            let ahead_ns = now_ns - before - took / 2;
            best = (took, Clock { boot, now_ns, ahead_ns });
        }
        if took < CLOCK_READ_NS {
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
fn image_of(marked: &Marked<'_>, found: &Metadata) -> (Image, State) {
    let image = match marked.kind {
        Kind::Block if marked.is_direct => {
            // Foreign writes through the page cache are counted only when the kernel writes them to the device.
            let all =
                libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
            // SAFETY: a plain system call on an open descriptor.
            let result = unsafe { libc::sync_file_range(marked.file.as_raw_fd(), 0, 0, all) };
            match result {
                0 => Image::Block(found.rdev()),
                _ => Image::Unprovable,
            }
        }
        Kind::Block => Image::Unprovable,
        Kind::Regular | Kind::Tmpfs => {
            let is_provable = rustix::fs::fstatfs(marked.file).is_ok_and(|found| is_local(&found));
            // Another open file description, because the image's own one has the locks.
            let own = format!("/proc/self/fd/{}", marked.file.as_raw_fd());
            match rustix::fs::open(own, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(place) if is_provable => Image::File(place.into()),
                _ => Image::Unprovable,
            }
        }
    };
    match state_of(&image) {
        Ok(state) if state.is_provable => (image, state),
        _ => (Image::Unprovable, State::default()),
    }
}

fn state_of(image: &Image) -> io::Result<State> {
    Ok(match image {
        Image::File(place) => State {
            file: Some(FileTimes::from(&place.metadata()?)),
            disk: None,
            is_provable: true,
        },
        Image::Block(device) => {
            let disk = opener().disk_counters(*device)?;
            State {
                file: disk.backing,
                disk: Some(disk),
                is_provable: disk.is_reliable,
            }
        }
        Image::Unprovable => State::default(),
    })
}

/// Returns the name of an image's mark. All names of an image give the same mark, and no other image has it at the
/// same time.
fn name(marked: &Marked<'_>, found: &Metadata) -> io::Result<PathBuf> {
    if marked.kind == Kind::Block {
        return Ok(format!("block-{:x}", found.rdev()).into());
    }
    let more = rustix::fs::statx(marked.file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME)?;
    let made = &more.stx_btime;
    Ok(format!(
        "file-{:x}-{:x}-{:x}-{:x}",
        found.dev(),
        found.ino(),
        made.tv_sec,
        made.tv_nsec
    )
    .into())
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
        found => found?,
    };
    let user = rustix::process::geteuid().as_raw();
    if !found.is_dir() || found.uid() != user || found.mode() & 0o022 != 0 {
        return Err(io::Error::other(
            "it is not a directory that only this user may write to",
        ));
    }
    if !is_tmpfs(&rustix::fs::statfs(directory)?) {
        return Err(io::Error::other("it is not on tmpfs"));
    }
    Ok(())
}

/// Opens a mark, and creates it if it is missing and wanted.
fn open_mark(path: &Path, is_wanted: bool) -> io::Result<Option<File>> {
    let flags = match is_wanted {
        true => OFlags::RDWR | OFlags::CREATE,
        false => OFlags::RDONLY,
    };
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        file => File::from(file?),
    };
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("the record is not a regular file of this user"));
    }
    Ok(Some(file))
}
