//! The working set of repeated passes over the queries.

use super::pager::Pager;
use super::workload::Workload;

/// Limits are multiples of the peak divided by this number.
const PARTS: u64 = 32;
/// Lowest limit tried, in these units.
const LEAST: u64 = 8;
/// Divisor of the peak that gives the permitted reads from the disk in a pass, so few that there are hardly any
/// faults.
const READ: u64 = 100;

/// Returns the lowest limit, to 1/32 of `peak`, under which the second of two passes reads next to nothing back.
pub(super) fn measure(workload: &mut Workload, pager: &dyn Pager, peak: u64) -> anyhow::Result<u64> {
    let (mut too_small, mut enough) = (LEAST, PARTS);
    while enough - too_small > 1 {
        let parts = (too_small + enough) / 2;
        let limit = peak / PARTS * parts;
        pager.limit(limit)?;
        workload.pass(pager)?;
        let pass = workload.pass(pager)?;
        eprintln!("working set: {} MiB: {:.2} s, {} MiB read", limit >> 20, pass.seconds, pass.done.read >> 20);
        match pass.done.read <= peak / READ {
            true => enough = parts,
            false => too_small = parts,
        }
    }
    Ok(peak / PARTS * enough)
}
