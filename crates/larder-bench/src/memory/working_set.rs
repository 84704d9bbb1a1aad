//! How much memory passes over the queries need when they come again and again.

use super::pager::Pager;
use super::workload::Workload;

/// Limits are parts of the peak.
const PARTS: u64 = 32;
/// The least that is tried.
const LEAST: u64 = 8;
/// What may be read from the disk in a pass, as a part of the peak: so little that it has next to no faults.
const READ: u64 = 100;

/// The least limit of those tried, to 1/32 of `peak`, under which the second of two passes reads next to nothing back.
pub(super) fn measure(workload: &mut Workload, pager: &dyn Pager, peak: u64) -> anyhow::Result<u64> {
    let (mut too_little, mut enough) = (LEAST, PARTS);
    while enough - too_little > 1 {
        let parts = (too_little + enough) / 2;
        let limit = peak / PARTS * parts;
        pager.limit(limit)?;
        workload.pass(pager)?;
        let pass = workload.pass(pager)?;
        eprintln!(
            "working set: {} MiB: {:.2} s, {} MiB read",
            limit >> 20,
            pass.seconds,
            pass.done.read >> 20
        );
        match pass.done.read <= peak / READ {
            true => enough = parts,
            false => too_little = parts,
        }
    }
    Ok(peak / PARTS * enough)
}
