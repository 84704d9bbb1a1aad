//! Data and holes of a file, as the file system reports them.
//!
//! The kernel may walk through a whole run of data to find its end: page by page on tmpfs, about 10 ms for each GiB,
//! and with a request to the server on a network file system. So the file remembers the runs that were found, and a
//! read costs no walk unless it reaches a run not seen before.
//!
//! Invariant: the file remembers data only, never a hole. Data may hold anything, zeros included, so a run that has
//! become stale (another process made a hole in it) costs a reader no more than the read.

use std::cell::RefCell;
use std::io;

use super::{FileDevice, errno_of, file_size};
use crate::device::{BlockDevice, Extent, ExtentKind, check_request};
use crate::error::{IoError, Operation};
use crate::event_loop::WorkSlice;
use crate::units::{ByteOffset, ByteRange};

/// The maximum number of remembered runs. Usually there are fewer concurrent sequential readers.
const RUNS_MAX: usize = 16;

/// The run length in bytes from which the start of a run is searched as well, for readers that move backwards.
const LONG_RUN_BYTES: u64 = 16 << 20;

/// The maximum number of holes that the search for a run's start skips.
const HOLES_SKIPPED_MAX: usize = 16;

/// The number of extents found in a row before other tasks run. Each takes two system calls.
const EXTENTS_PER_SLICE: u64 = 64;

/// Runs of data, each up to a hole or the file's end, the most recently used first.
#[derive(Default)]
pub(super) struct DataRuns(RefCell<Vec<ByteRange>>);

impl DataRuns {
    /// Returns the end of the known run around `at`.
    fn run_end(&self, at: ByteOffset) -> Option<ByteOffset> {
        let mut runs = self.0.borrow_mut();
        let index = runs.iter().position(|part| part.start <= at && at < part.end())?;
        runs[..=index].rotate_right(1);
        Some(runs[0].end())
    }

    fn add(&self, found: ByteRange) {
        let mut runs = self.0.borrow_mut();
        runs.retain(|part| !found.contains(*part));
        runs.truncate(RUNS_MAX - 1);
        runs.insert(0, found);
    }

    /// Removes `range`, which may contain a hole now.
    pub(super) fn invalidate(&self, range: ByteRange) {
        let mut runs = self.0.borrow_mut();
        let Some(end) = range.checked_end() else {
            runs.clear();
            return;
        };
        for index in 0..runs.len() {
            let part = runs[index];
            if !part.overlaps(range) {
                continue;
            }
            runs[index] = ByteRange::between(part.start, range.start);
            let rest = ByteRange::between(end, part.end());
            if !rest.is_empty() && runs.len() < RUNS_MAX {
                runs.push(rest);
            }
        }
        runs.retain(|part| !part.is_empty());
    }
}

impl FileDevice {
    pub(super) async fn extents_steps(&self, range: ByteRange, limit: usize) -> Result<Vec<Extent>, IoError> {
        let geometry = self.geometry();
        check_request(self.name(), &geometry, Operation::Extents, range)?;
        let failed = |errno| self.error(Operation::Extents, range, errno);
        let unit = u64::from(geometry.block_size);
        let mut found = Vec::new();
        let mut at = range.start;
        let mut slice = WorkSlice::new(EXTENTS_PER_SLICE);
        while at < range.end() && found.len() < limit.max(1) {
            slice.complete_steps(1).await;
            let (kind, next) = match self.data_runs.run_end(at) {
                Some(end) => (ExtentKind::Data, end),
                None => self.query_extent(at, range.end()).map_err(failed)?,
            };
            // A boundary inside a block belongs to the data.
            let next = match kind {
                ExtentKind::Data => next.align_up(unit).min(range.end()),
                _ if next < range.end() => next.align_down(unit),
                _ => range.end(),
            };
            let (kind, next) = match next > at {
                true => (kind, next),
                // A hole smaller than a block counts as data.
                false => (ExtentKind::Data, ByteOffset::new(at.get() + unit).min(range.end())),
            };
            push_extent(&mut found, ByteRange::between(at, next), kind);
            at = next;
        }
        Ok(found)
    }

    /// Returns the kind of the byte at `at` and the end of its run; `end` if the run reaches the end of the request.
    fn query_extent(&self, at: ByteOffset, end: ByteOffset) -> Result<(ExtentKind, ByteOffset), i32> {
        match self.seek(libc::SEEK_DATA, at)? {
            Some(data) if data > at => return Ok((ExtentKind::Hole, data)),
            Some(_) => {}
            None => return Ok((ExtentKind::Hole, end)),
        }
        let file_end = ByteOffset::new(file_size(&self.file).map_err(|error| errno_of(&error))?);
        let next = self.seek(libc::SEEK_HOLE, at)?.unwrap_or(file_end).max(at);
        let start = self.run_start(at, next)?;
        self.data_runs.add(ByteRange::between(start, next));
        // The padding of the last sector is not in the file, and reads as zeros.
        Ok((ExtentKind::Data, if next >= file_end { end } else { next }))
    }

    /// Returns a start of the run of data from `at` to `end`, at or before `at`. The search walks through no more data
    /// before `at` than there is after it, so it may miss the exact start.
    fn run_start(&self, at: ByteOffset, end: ByteOffset) -> Result<ByteOffset, i32> {
        let len = (end - at).get();
        if len < LONG_RUN_BYTES {
            return Ok(at);
        }
        let mut from = ByteOffset::new(at.get().saturating_sub(len));
        for _ in 0..HOLES_SKIPPED_MAX {
            let Some(data) = self.seek(libc::SEEK_DATA, from)?.filter(|data| *data < at) else {
                break;
            };
            match self.seek(libc::SEEK_HOLE, data)? {
                Some(hole) if hole <= at => from = hole,
                _ => return Ok(data),
            }
        }
        Ok(at)
    }

    /// Seeks to data or to a hole with lseek. Returns `None` past the last one.
    fn seek(&self, whence: i32, from: ByteOffset) -> Result<Option<ByteOffset>, i32> {
        // SAFETY: plain system call on an open descriptor; the file's own position is not used.
        let found = unsafe { libc::lseek(self.descriptor(), from.get() as i64, whence) };
        if let Ok(found) = u64::try_from(found) {
            return Ok(Some(ByteOffset::new(found).max(from)));
        }
        match errno_of(&io::Error::last_os_error()) {
            libc::ENXIO => Ok(None),
            // The file system does not report holes: all is data.
            libc::EINVAL | libc::EOPNOTSUPP if whence == libc::SEEK_DATA => Ok(Some(from)),
            libc::EINVAL | libc::EOPNOTSUPP => Ok(None),
            errno => Err(errno),
        }
    }
}

/// Appends an extent, merging it with the last one if that is of the same kind.
fn push_extent(found: &mut Vec<Extent>, range: ByteRange, kind: ExtentKind) {
    match found.last_mut() {
        Some(last) if last.kind == kind => last.range.len += range.len,
        _ => found.push(Extent { range, kind }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hole_in_known_run_is_removed() {
        let runs = DataRuns::default();
        let end_of = |at| runs.run_end(ByteOffset::new(at)).map(ByteOffset::get);
        runs.add(ByteRange::new(100, 900));
        assert_eq!((end_of(99), end_of(100), end_of(999), end_of(1000)), (None, Some(1000), Some(1000), None));
        runs.invalidate(ByteRange::new(400, 100));
        assert_eq!((end_of(399), end_of(400), end_of(499), end_of(500)), (Some(400), None, None, Some(1000)));
        runs.invalidate(ByteRange::new(0, 300));
        assert_eq!((end_of(299), end_of(300)), (None, Some(400)));
        runs.invalidate(ByteRange::new(0, u64::MAX));
        assert_eq!(end_of(600), None);
        for part in 0..100 {
            runs.add(ByteRange::new(part * 10, 5));
        }
        assert_eq!((end_of(0), end_of(994)), (None, Some(995)));
    }
}
