//! Proof by a block device's kernel counters that no other program has written to it.

use super::verdict::{Finding, Snapshot};
use crate::opener::DiskCounters;

/// Returns what the counters prove of a device.
///
/// The kernel counts a write when it completes. So the growth since the capture lies between this process's sectors
/// that have ended and those that have begun. It equals the latter if no own write was lost and no other program has
/// written.
pub(super) fn judge_disk(mark: &Snapshot, now: &DiskCounters) -> Finding {
    let Some((capture, then)) = mark.capture.and_then(|capture| Some((capture, capture.disk?))) else {
        return Finding::Unproven;
    };
    if now.sequence != then.sequence {
        return Finding::Changed;
    }
    if now.sequence == 0 || !now.is_reliable || mark.is_inexact {
        return Finding::Unproven;
    }
    let growth = now.written.wrapping_sub(then.written);
    let begun = mark.begun_sectors.wrapping_sub(capture.begun_sectors);
    let ended = mark.ended_sectors.wrapping_sub(capture.begun_sectors);
    // Writes through the whole disk may have hit another partition.
    let of_disk = match now.beside == then.beside {
        true => Finding::Proven,
        false => Finding::Unproven,
    };
    let of_device = match growth {
        growth if growth == begun => Finding::Proven,
        growth if (ended..begun).contains(&growth) => Finding::Unproven,
        _ => Finding::Changed,
    };
    of_device.max(of_disk)
}
