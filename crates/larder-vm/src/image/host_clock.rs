//! The host's clock, by which files have their times, may be set at any time: by NTP, by an administrator, after a resume.
//! Beside it runs one that nothing sets, the time since the host was started; what lies between them changes when, and only
//! when, the clock is set, but for what NTP slews.

use std::ops::RangeInclusive;
use std::sync::OnceLock;

use larder_block::boot::boot_id;
use rustix::time::{ClockId, clock_gettime};

/// What NTP may have slewed meanwhile, in seconds, and what the granularity of a file's times may be.
const SLEWED_SECONDS_MAX: u64 = 2;

/// How the host's clock was set at some time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct HostClock {
    /// Which start of the host that was.
    pub(super) boot: u128,
    /// By how many seconds the clock was ahead of the time since then.
    pub(super) ahead_seconds: i64,
}

impl HostClock {
    /// As it is set now; `None` if the kernel does not say which start of the host this is.
    pub(super) fn now() -> Option<Self> {
        // A confined server cannot read it any more.
        static BOOT: OnceLock<Option<u128>> = OnceLock::new();
        let boot = (*BOOT.get_or_init(|| boot_id().ok()))?;
        let ahead_seconds = seconds() - clock_gettime(ClockId::Boottime).tv_sec;
        Some(Self { boot, ahead_seconds })
    }

    /// By how many seconds it has been set forward since, or back if that is less than zero. Zero if the host was started
    /// anew since: then nothing is known of it.
    pub(super) fn step(self) -> i64 {
        let now = Self::now().filter(|now| now.boot == self.boot);
        let step = now.map_or(0, |now| now.ahead_seconds - self.ahead_seconds);
        match step.unsigned_abs() > SLEWED_SECONDS_MAX {
            true => step,
            false => 0,
        }
    }
}

/// The clock's seconds since 1970.
pub(super) fn seconds() -> i64 {
    clock_gettime(ClockId::Realtime).tv_sec
}

/// Whether a file that has the time `time` now, where the clock says `now`, was changed for sure within `window`, which is in
/// times of before the clock was set by `step` seconds.
pub(super) fn is_within(time: i64, window: &RangeInclusive<i64>, step: i64, now: i64) -> bool {
    let if_after_step = window.contains(&time.saturating_sub(step));
    // What was changed before a step forward has an older time than all that was changed after it. A clock that was set back
    // comes to each time twice: one that it has not come to again is of before.
    let if_before_step = window.contains(&time) && (step >= 0 || time > now);
    if_after_step || if_before_step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stepped_clock_never_makes_late_change_early() {
        let window = 970..=1030;
        // Time of the file, step, the clock now; and whether the change was within the window.
        for (time, step, now, wanted) in [
            (1000, 0, 5000, true),
            (1031, 0, 5000, false),
            (969, 0, 5000, false),
            // An hour forward: changed before it, after it in time, and after it too late.
            (1000, 3600, 5000, true),
            (4600, 3600, 5000, true),
            (4631, 3600, 5000, false),
            (1500, 3600, 5000, false),
            // An hour back, and the clock has not come to that time again: changed before.
            (1010, -3600, 0, true),
            (-2600, -3600, 0, true),
            // It has: then somebody may have changed it an hour too late.
            (1010, -3600, 1011, false),
            (-2569, -3600, 0, false),
        ] {
            assert_eq!(is_within(time, &window, step, now), wanted, "{time} {step} {now}");
        }
    }

    #[test]
    fn clock_that_is_not_set_has_no_step() {
        let now = HostClock::now().expect("the kernel says which start this is");
        assert_eq!(now.step(), 0);
        let before = |by: i64| HostClock {
            ahead_seconds: now.ahead_seconds - by,
            ..now
        };
        assert!((3598..=3602).contains(&before(3600).step()));
        assert!((-3602..=-3598).contains(&before(-3600).step()));
        let other_boot = HostClock {
            boot: !now.boot,
            ..before(3600)
        };
        assert_eq!(other_boot.step(), 0);
    }
}
