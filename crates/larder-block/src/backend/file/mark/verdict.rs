//! The verdict: a pure function of the mark as an earlier process left it, of the image as it is now, and of the
//! clock.
//!
//! Facts that this relies on (measured on ext4, tmpfs and loop devices, Linux 6.18):
//! - A write, a hole, `fallocate` and `ftruncate` set mtime and ctime; a flush does not. The kernel takes the time
//!   when it starts the write, at the latest when it completes, from a clock that is at most one tick (10 ms) behind
//!   `CLOCK_REALTIME`.
//! - When the lock of a killed process is free, none of its writes changes a time any more.
//! - ctime cannot be set by a program; mtime can.

use super::block::judge_disk;
use crate::opener::{DiskCounters, FileTimes};

/// The verdict on writes by other programs since a Larder process last had the image open. A later variant outweighs
/// the earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// No other program has written.
    #[default]
    Proven,
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
    Proven,
    /// There was no mark of this boot.
    NoMark,
    Unproven,
    Changed,
}

impl Finding {
    pub(super) fn code(self) -> u64 {
        self as u64
    }

    /// Returns the finding of a stored code. An unknown code proves nothing.
    pub(super) fn of_code(code: u64) -> Self {
        match code {
            0 => Self::Proven,
            1 => Self::NoMark,
            3 => Self::Changed,
            _ => Self::Unproven,
        }
    }
}

/// The finding of a mark when an image was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::backend::file) struct Found {
    pub(in crate::backend::file) finding: Finding,
    /// The use that the mark belonged to; 0: none.
    pub(in crate::backend::file) of_use: u64,
}

impl Found {
    pub(in crate::backend::file) const NO_MARK: Self = Self {
        finding: Finding::NoMark,
        of_use: 0,
    };
}

/// The content of a mark as an earlier process has left it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub(super) boot: u128,
    pub(super) ahead_ns: i64,
    pub(super) begun: u64,
    pub(super) ended: u64,
    pub(super) begun_sectors: u64,
    pub(super) ended_sectors: u64,
    pub(super) ended_at_ns: i64,
    pub(super) alive_at_ns: i64,
    pub(super) size_max: u64,
    pub(super) carried: Finding,
    pub(super) foreign: Finding,
    pub(super) is_inexact: bool,
    pub(super) of_use: u64,
    pub(super) capture: Option<Capture>,
}

/// The state of an image while no write was in flight. Any later write by any program leaves another state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Capture {
    pub(super) begun: u64,
    pub(super) begun_sectors: u64,
    pub(super) ahead_ns: i64,
    /// The times of the file, or of the file behind a loop device.
    pub(super) file: Option<FileTimes>,
    /// The counters of a block device.
    pub(super) disk: Option<DiskCounters>,
}

/// An image as it is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) file: Option<FileTimes>,
    pub(super) disk: Option<DiskCounters>,
    /// Times and counters show all writes, because the image is local to this host.
    pub(super) is_provable: bool,
}

/// The host's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock {
    pub(super) boot: u128,
    /// The time in nanoseconds since 1970.
    pub(super) now_ns: i64,
    /// The difference between `now_ns` and the time since boot, in nanoseconds. It changes only when the clock is
    /// set: NTP slews both.
    pub(super) ahead_ns: i64,
}

/// The smallest change of the clock, in nanoseconds, that counts as a step. Reading two clocks takes time.
pub(super) const STEP_MIN_NS: i64 = 1_000_000;

/// The maximum difference, in nanoseconds, between the times of own writes that ended together, unless the storage is
/// very slow.
const OWN_TIMES_NS: i64 = 2_000_000_000;

/// The maximum time, in nanoseconds, that a process lives after its last heartbeat: the interval of heartbeats.
pub(super) const HEARTBEAT_NS: i64 = 20_000_000;

/// Returns what `found` proves of an image that is in the state `now`.
pub(super) fn judge(found: Option<&Snapshot>, now: &State, clock: Clock) -> Finding {
    let Some(mark) = found.filter(|mark| mark.boot == clock.boot) else {
        return Finding::NoMark;
    };
    let known = mark.carried.max(mark.foreign);
    if !now.is_provable {
        return known.max(Finding::Unproven);
    }
    let file = now.file.map_or(Finding::Proven, |file| judge_file(mark, &file, clock));
    let disk = now.disk.map_or(Finding::Proven, |disk| judge_disk(mark, &disk));
    known.max(file).max(disk)
}

fn judge_file(mark: &Snapshot, now: &FileTimes, clock: Clock) -> Finding {
    let capture = mark.capture.and_then(|capture| Some((capture, capture.file?)));
    if let Some((capture, then)) = capture {
        let has_grown_only = mark.begun > capture.begun && then.size <= now.size && now.size <= mark.size_max;
        if now.inode != then.inode || now.size != then.size && !has_grown_only {
            return Finding::Changed;
        }
        if *now == then {
            // Own writes that have ended must have changed the times. Unless they failed, an older state was
            // restored.
            return match mark.ended > capture.begun {
                true => Finding::Unproven,
                false => Finding::Proven,
            };
        }
        if mark.begun == capture.begun {
            return match now.mtime_ns == then.mtime_ns && now.ctime_ns > then.ctime_ns {
                true => Finding::Unproven,
                false => Finding::Changed,
            };
        }
    }
    judge_times(
        mark,
        capture.map(|(capture, then)| (capture.ahead_ns, then)),
        now,
        clock,
    )
}

/// Judges by times, if own writes began since the capture `then`, or there is none.
fn judge_times(mark: &Snapshot, then: Option<(i64, FileTimes)>, now: &FileTimes, clock: Clock) -> Finding {
    let is_quiet = mark.begun == mark.ended;
    let last_own = match is_quiet {
        true => mark.ended_at_ns,
        false => mark.ended_at_ns.max(mark.alive_at_ns).saturating_add(HEARTBEAT_NS),
    };
    let latest = now.latest_ns();
    // The clock passes some times twice, but has not yet returned to times after the present.
    let was_set_back = clock.ahead_ns < mark.ahead_ns - STEP_MIN_NS;
    if was_set_back && latest <= clock.now_ns {
        return Finding::Unproven;
    }
    if latest > last_own {
        return match is_quiet && now.mtime_ns > last_own {
            true => Finding::Changed,
            false => Finding::Unproven,
        };
    }
    if latest >= mark.ended_at_ns.saturating_sub(OWN_TIMES_NS) {
        return Finding::Proven;
    }
    match then {
        // The state is older than the one before own writes, if the clock was not set since.
        Some((ahead_ns, then))
            if latest < then.latest_ns()
                && (ahead_ns - mark.ahead_ns).abs() < STEP_MIN_NS
                && (clock.ahead_ns - mark.ahead_ns).abs() < STEP_MIN_NS =>
        {
            Finding::Changed
        }
        _ => Finding::Unproven,
    }
}
