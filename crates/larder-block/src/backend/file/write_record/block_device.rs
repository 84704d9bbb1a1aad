//! Proof by a block device's kernel counters that no other program has written to it.

use super::verdict::{Finding, Snapshot};
use crate::opener::DiskCounters;

/// Returns what the counters prove of a device.
///
/// The kernel counts a write when it completes. So the growth since the capture lies between this process's sectors
/// that have ended and those that have begun. It equals the latter if no own write was lost and no other program has
/// written.
pub(super) fn judge_disk(snapshot: &Snapshot, now: &DiskCounters) -> Finding {
    let Some((capture, captured)) = snapshot.capture.and_then(|capture| Some((capture, capture.disk?))) else {
        return Finding::Unproven;
    };
    if now.sequence != captured.sequence {
        return Finding::Changed;
    }
    if now.sequence == 0 || !now.is_reliable || snapshot.is_inexact {
        return Finding::Unproven;
    }
    let growth = now.written_sectors.wrapping_sub(captured.written_sectors);
    let started = snapshot.started_sectors.wrapping_sub(capture.started_sectors);
    let completed = snapshot.completed_sectors.wrapping_sub(capture.started_sectors);
    // Writes through the whole disk may have hit another partition.
    let by_whole_disk = match now.written_through_disk == captured.written_through_disk {
        true => Finding::Unchanged,
        false => Finding::Unproven,
    };
    let by_device = match growth {
        growth if growth == started => Finding::Unchanged,
        growth if (completed..started).contains(&growth) => Finding::Unproven,
        _ => Finding::Changed,
    };
    by_device.max(by_whole_disk)
}
