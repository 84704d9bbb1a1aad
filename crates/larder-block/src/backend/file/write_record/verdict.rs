//! The verdict: a pure function of the mark as an earlier process left it, of the image as it is now, and of the
//! clock.
//!
//! Facts that this relies on (measured on ext4, tmpfs and loop devices, Linux 6.18):
//! - A write, a hole, `fallocate` and `ftruncate` set mtime and ctime; a flush does not. The kernel takes the time
//!   when it starts the write, at the latest when it completes, from a clock that is at most one tick (10 ms) behind
//!   `CLOCK_REALTIME`.
//! - When the lock of a killed process is free, none of its writes changes a time any more.
//! - ctime cannot be set by a program; mtime can.

use super::block_device::judge_disk;
use crate::opener::{DiskCounters, FileTimes};

/// The verdict on writes by other programs since a Larder process last had the image open. A later variant outweighs
/// the earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// No other program has written.
    #[default]
    Unchanged,
    /// Another program may have written. A cache compares each clean line with the image before it uses the line.
    /// Dirty lines are trusted.
    Unproven,
    /// Another program has written, or another file has replaced the image. A cache starts empty, or is refused if it
    /// may have dirty lines.
    Changed,
}

/// A [`Verdict`], or the finding that there was no mark. A later variant outweighs the earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::backend::file) enum Finding {
    #[default]
    Unchanged,
    /// There was no mark of this boot.
    NoRecord,
    Unproven,
    Changed,
}

impl Finding {
    pub(super) fn code(self) -> u64 {
        self as u64
    }

    /// Returns the finding of a stored code. An unknown code proves nothing.
    pub(super) fn from_code(code: u64) -> Self {
        match code {
            0 => Self::Unchanged,
            1 => Self::NoRecord,
            3 => Self::Changed,
            _ => Self::Unproven,
        }
    }
}

/// The finding of a mark when an image was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::backend::file) struct RecordFinding {
    pub(in crate::backend::file) finding: Finding,
    /// The use that the mark belonged to; 0: none.
    pub(in crate::backend::file) use_id: u64,
}

impl RecordFinding {
    pub(in crate::backend::file) const NO_RECORD: Self = Self { finding: Finding::NoRecord, use_id: 0 };
}

/// The content of a mark as an earlier process has left it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub(super) boot: u128,
    pub(super) clock_offset_ns: i64,
    pub(super) started: u64,
    pub(super) completed: u64,
    pub(super) started_sectors: u64,
    pub(super) completed_sectors: u64,
    pub(super) completed_at_ns: i64,
    pub(super) heartbeat_at_ns: i64,
    pub(super) size_max: u64,
    pub(super) carried: Finding,
    pub(super) foreign: Finding,
    pub(super) is_inexact: bool,
    pub(super) use_id: u64,
    pub(super) capture: Option<Capture>,
}

/// The state of an image while no write was in flight. Any later write by any program leaves another state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Capture {
    pub(super) started: u64,
    pub(super) started_sectors: u64,
    pub(super) clock_offset_ns: i64,
    /// The times of the file, or of the file behind a loop device.
    pub(super) file: Option<FileTimes>,
    /// The counters of a block device.
    pub(super) disk: Option<DiskCounters>,
}

/// An image as it is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ImageState {
    pub(super) file: Option<FileTimes>,
    pub(super) disk: Option<DiskCounters>,
    /// Times and counters show all writes, because the image is local to this host.
    pub(super) is_provable: bool,
}

/// The host's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ClockReading {
    pub(super) boot: u128,
    /// The time in nanoseconds since 1970.
    pub(super) now_ns: i64,
    /// The difference between `now_ns` and the time since boot, in nanoseconds. It changes only when the clock is
    /// set: NTP slews both.
    pub(super) clock_offset_ns: i64,
}

/// The smallest change of the clock, in nanoseconds, that counts as a step. Reading two clocks takes time.
pub(super) const CLOCK_STEP_MIN_NS: i64 = 1_000_000;

/// The maximum difference, in nanoseconds, between the times of own writes that ended together, unless the storage is
/// very slow.
const WRITE_TIME_SPREAD_NS_MAX: i64 = 2_000_000_000;

/// The maximum time, in nanoseconds, that a process lives after its last heartbeat: the interval of heartbeats.
pub(super) const HEARTBEAT_INTERVAL_NS: i64 = 20_000_000;

/// Returns what `snapshot` proves of an image that is in the state `now`.
pub(super) fn judge(snapshot: Option<&Snapshot>, now: &ImageState, clock: ClockReading) -> Finding {
    let Some(snapshot) = snapshot.filter(|mark| mark.boot == clock.boot) else {
        return Finding::NoRecord;
    };
    let known = snapshot.carried.max(snapshot.foreign);
    if !now.is_provable {
        return known.max(Finding::Unproven);
    }
    let file = now.file.map_or(Finding::Unchanged, |file| judge_file(snapshot, &file, clock));
    let disk = now.disk.map_or(Finding::Unchanged, |disk| judge_disk(snapshot, &disk));
    known.max(file).max(disk)
}

fn judge_file(snapshot: &Snapshot, now: &FileTimes, clock: ClockReading) -> Finding {
    let capture = snapshot.capture.and_then(|capture| Some((capture, capture.file?)));
    if let Some((capture, captured)) = capture {
        let has_only_grown =
            snapshot.started > capture.started && captured.size <= now.size && now.size <= snapshot.size_max;
        if now.inode != captured.inode || now.size != captured.size && !has_only_grown {
            return Finding::Changed;
        }
        if *now == captured {
            // Own writes that have ended must have changed the times. Unless they failed, an older state was
            // restored.
            return match snapshot.completed > capture.started {
                true => Finding::Unproven,
                false => Finding::Unchanged,
            };
        }
        if snapshot.started == capture.started {
            return match now.mtime_ns == captured.mtime_ns && now.ctime_ns > captured.ctime_ns {
                true => Finding::Unproven,
                false => Finding::Changed,
            };
        }
    }
    judge_times(snapshot, capture.map(|(capture, then)| (capture.clock_offset_ns, then)), now, clock)
}

/// Judges by times, if own writes began since the capture `then`, or there is none.
fn judge_times(
    snapshot: &Snapshot,
    captured: Option<(i64, FileTimes)>,
    now: &FileTimes,
    clock: ClockReading,
) -> Finding {
    let all_completed = snapshot.started == snapshot.completed;
    let last_write_ns = match all_completed {
        true => snapshot.completed_at_ns,
        false => snapshot.completed_at_ns.max(snapshot.heartbeat_at_ns).saturating_add(HEARTBEAT_INTERVAL_NS),
    };
    let latest = now.latest_ns();
    // The clock passes some times twice, but has not yet returned to times after the present.
    let was_set_back = clock.clock_offset_ns < snapshot.clock_offset_ns - CLOCK_STEP_MIN_NS;
    if was_set_back && latest <= clock.now_ns {
        return Finding::Unproven;
    }
    if latest > last_write_ns {
        return match all_completed && now.mtime_ns > last_write_ns {
            true => Finding::Changed,
            false => Finding::Unproven,
        };
    }
    if latest >= snapshot.completed_at_ns.saturating_sub(WRITE_TIME_SPREAD_NS_MAX) {
        return Finding::Unchanged;
    }
    match captured {
        // The state is older than the one before own writes, if the clock was not set since.
        Some((ahead_ns, then))
            if latest < then.latest_ns()
                && (ahead_ns - snapshot.clock_offset_ns).abs() < CLOCK_STEP_MIN_NS
                && (clock.clock_offset_ns - snapshot.clock_offset_ns).abs() < CLOCK_STEP_MIN_NS =>
        {
            Finding::Changed
        }
        _ => Finding::Unproven,
    }
}
