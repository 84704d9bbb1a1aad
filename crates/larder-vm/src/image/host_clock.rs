//! Steps of the host's clock. File timestamps come from that clock, which may be set at any time: by NTP, by an
//! administrator, after a resume. The time since boot cannot be set. The difference between both changes only when
//! the clock is set, apart from what NTP slews.

use std::ops::RangeInclusive;
use std::sync::OnceLock;

use larder_block::boot::boot_id;
use rustix::time::{ClockId, clock_gettime};

/// Tolerance for NTP slewing and for the granularity of file timestamps, in seconds.
const SLEWED_SECONDS_MAX: u64 = 2;

/// Setting of the host's clock at some time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct HostClock {
    /// Boot ID of the host at that time.
    pub(super) boot: u128,
    /// Difference between the clock and the time since boot, in seconds.
    pub(super) ahead_seconds: i64,
}

impl HostClock {
    /// Returns the current setting; `None` if the kernel does not provide a boot ID.
    pub(super) fn now() -> Option<Self> {
        // A confined server cannot read the boot ID any more, so it is read once.
        static BOOT: OnceLock<Option<u128>> = OnceLock::new();
        let boot = (*BOOT.get_or_init(|| boot_id().ok()))?;
        let ahead_seconds = seconds() - clock_gettime(ClockId::Boottime).tv_sec;
        Some(Self { boot, ahead_seconds })
    }

    /// Returns the number of seconds by which the clock has been set forward since, negative if it was set back. It
    /// is zero if the host was rebooted since, because the step is unknown then.
    pub(super) fn step(self) -> i64 {
        let now = Self::now().filter(|now| now.boot == self.boot);
        let step = now.map_or(0, |now| now.ahead_seconds - self.ahead_seconds);
        match step.unsigned_abs() > SLEWED_SECONDS_MAX {
            true => step,
            false => 0,
        }
    }
}

/// Returns the clock's time in seconds since 1970.
pub(super) fn seconds() -> i64 {
    clock_gettime(ClockId::Realtime).tv_sec
}

/// Returns whether a file was certainly modified within `window`. The file has the timestamp `time` now, the clock
/// shows `now`, and `window` is in times from before the clock was set by `step` seconds.
pub(super) fn is_within(time: i64, window: &RangeInclusive<i64>, step: i64, now: i64) -> bool {
    let if_after_step = window.contains(&time.saturating_sub(step));
    // All changes before a step forward have older timestamps than all changes after it. A clock that was set back
    // shows every time in the step twice: a timestamp that it has not reached again is from before the step.
    let if_before_step = window.contains(&time) && (step >= 0 || time > now);
    if_after_step || if_before_step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_step_never_hides_late_change() {
        let window = 970..=1030;
        // Timestamp of the file, step, the clock now, and whether the change was within the window.
        for (time, step, now, wanted) in [
            (1000, 0, 5000, true),
            (1031, 0, 5000, false),
            (969, 0, 5000, false),
            // One hour forward: changed before the step, changed after it in time, and changed after it too late.
            (1000, 3600, 5000, true),
            (4600, 3600, 5000, true),
            (4631, 3600, 5000, false),
            (1500, 3600, 5000, false),
            // One hour back, and the clock has not reached that time again: changed before the step.
            (1010, -3600, 0, true),
            (-2600, -3600, 0, true),
            // The clock has reached that time again, so the file may have been changed an hour too late.
            (1010, -3600, 1011, false),
            (-2569, -3600, 0, false),
        ] {
            assert_eq!(is_within(time, &window, step, now), wanted, "{time} {step} {now}");
        }
    }

    #[test]
    fn unset_clock_has_no_step() {
        let now = HostClock::now().expect("the kernel says which start this is");
        assert_eq!(now.step(), 0);
        let before = |by: i64| HostClock { ahead_seconds: now.ahead_seconds - by, ..now };
        assert!((3598..=3602).contains(&before(3600).step()));
        assert!((-3602..=-3598).contains(&before(-3600).step()));
        let other_boot = HostClock { boot: !now.boot, ..before(3600) };
        assert_eq!(other_boot.step(), 0);
    }
}
