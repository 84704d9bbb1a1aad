//! Metric families about memory.

use larder_vm::control::memory::{MemoryProblem, SwapState};

use super::MemoryMetrics;
use super::families::{Family, Kind, Of, family};
use super::write::Put;

/// Families about memory, in the order in which they are written.
pub(super) const FAMILIES: &[Family] = &[
    family(
        "larder_host_memory_available_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Available memory of the host, while budgets are balanced (--balance-memory)",
        Of::Host(|host, put| host.memory.iter().for_each(|memory| put.value(memory.available))),
    ),
    family(
        "larder_host_memory_reserve_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Memory of the host that is to stay free (--memory-reserve)",
        Of::Host(|host, put| host.memory.iter().for_each(|memory| put.value(memory.reserve))),
    ),
    family(
        "larder_memory",
        Kind::Info,
        None,
        "Process whose memory is managed",
        Of::Memory(memory_info),
    ),
    family(
        "larder_memory_size_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Size of the VM's memory",
        Of::Memory(|of, put| put.value(of.memory.state.size)),
    ),
    family(
        "larder_memory_resident_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Resident memory of the VM, not compressed",
        Of::Memory(|of, put| put.value(of.memory.state.resident)),
    ),
    family(
        "larder_memory_budget_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Memory budget of the VM",
        Of::Memory(|of, put| put.value(of.memory.state.budget)),
    ),
    family(
        "larder_memory_budget_bound_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Bounds of the budget",
        Of::Memory(bounds),
    ),
    family(
        "larder_memory_budget_moves",
        Kind::Counter,
        None,
        "Budget changes by larder host, by direction",
        Of::Memory(moves),
    ),
    family(
        "larder_memory_used_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Used part of the budget",
        Of::Memory(|of, put| put.value(of.memory.state.used)),
    ),
    family(
        "larder_memory_compressed_pages",
        Kind::Gauge,
        None,
        "Compressed pages",
        Of::Memory(|of, put| put.value(of.memory.state.compressed.pages)),
    ),
    family(
        "larder_memory_compressed_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Memory used by compressed pages",
        Of::Memory(|of, put| put.value(of.memory.state.compressed.used)),
    ),
    family(
        "larder_memory_compressed_limit_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Limit of the memory used by compressed pages",
        Of::Memory(|of, put| put.value(of.memory.state.compressed.limit)),
    ),
    family(
        "larder_memory_compression_ratio",
        Kind::Gauge,
        Some("ratio"),
        "Size of the compressed pages before compression, divided by the memory that they use",
        Of::Memory(|of, put| {
            of.memory
                .state
                .compression_ratio()
                .iter()
                .for_each(|ratio| put.value(ratio))
        }),
    ),
    family(
        "larder_memory_uniform_pages",
        Kind::Gauge,
        None,
        "Pages filled with one repeated word, which use no memory",
        Of::Memory(|of, put| put.value(of.memory.state.uniform_pages)),
    ),
    family(
        "larder_memory_clean_pages",
        Kind::Gauge,
        None,
        "Resident pages that have an identical copy on a disk",
        Of::Memory(|of, put| put.value(of.memory.state.clean_pages)),
    ),
    family(
        "larder_memory_lost_pages",
        Kind::Gauge,
        None,
        "Pages that could not be read back; an access to one causes a memory error",
        Of::Memory(|of, put| put.value(of.memory.state.lost_pages)),
    ),
    family(
        "larder_memory_disk",
        Kind::Info,
        None,
        "A disk for evicted pages: swap cache or slow store",
        Of::Memory(disk_info),
    ),
    family(
        "larder_memory_disk_working",
        Kind::Gauge,
        None,
        "Whether the disk works (1), or cannot be written to (0)",
        Of::Memory(|of, put| disks(of, put, |disk| u64::from(!disk.failed))),
    ),
    family(
        "larder_memory_disk_pages",
        Kind::Gauge,
        None,
        "Evicted pages on the disk",
        Of::Memory(|of, put| disks(of, put, |disk| disk.pages)),
    ),
    family(
        "larder_memory_disk_used_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Used space of the disk, including obsolete pages",
        Of::Memory(|of, put| disks(of, put, |disk| disk.used)),
    ),
    family(
        "larder_memory_disk_live_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Space of the disk used by live pages",
        Of::Memory(|of, put| disks(of, put, |disk| disk.live)),
    ),
    family(
        "larder_memory_disk_limit_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Space limit of the disk",
        Of::Memory(|of, put| disks(of, put, |disk| disk.limit)),
    ),
    family(
        "larder_memory_disk_written_bytes",
        Kind::Counter,
        Some("bytes"),
        "Bytes written to the disk",
        Of::Memory(|of, put| disks(of, put, |disk| disk.written_bytes)),
    ),
    family(
        "larder_memory_disk_read_bytes",
        Kind::Counter,
        Some("bytes"),
        "Bytes read from the disk",
        Of::Memory(|of, put| disks(of, put, |disk| disk.read_bytes)),
    ),
    family(
        "larder_memory_fault_duration_seconds",
        Kind::Histogram,
        Some("seconds"),
        "Duration of faults, by source of the page; write: a write to a page that was being evicted",
        Of::Memory(faults),
    ),
    family(
        "larder_memory_refaults",
        Kind::Counter,
        None,
        "Refaults: pages faulted in so soon after eviction that a little more memory would have kept them",
        Of::Memory(|of, put| put.value(of.memory.state.refaults)),
    ),
    family(
        "larder_memory_evicted_pages",
        Kind::Counter,
        None,
        "Evicted pages",
        Of::Memory(|of, put| put.value(of.memory.state.evicted_pages)),
    ),
    family(
        "larder_memory_evicted_bytes",
        Kind::Counter,
        Some("bytes"),
        "Bytes in which evicted pages were stored",
        Of::Memory(|of, put| put.value(of.memory.state.evicted_bytes)),
    ),
    family(
        "larder_memory_ahead_pages",
        Kind::Counter,
        None,
        "Pages prefetched along with faulted ones",
        Of::Memory(|of, put| put.value(of.memory.state.ahead_pages)),
    ),
    family(
        "larder_memory_stalled",
        Kind::Gauge,
        None,
        "Threads that wait for a page that is unavailable now",
        Of::Memory(|of, put| put.value(of.memory.state.stalled)),
    ),
    family(
        "larder_memory_stall_seconds",
        Kind::Counter,
        Some("seconds"),
        "Time lost by waiting for memory; some: at least one thread waited, full: all vCPUs waited",
        Of::Memory(stall_seconds),
    ),
    family(
        "larder_memory_stall_ratio",
        Kind::Gauge,
        Some("ratio"),
        "Share of the last 10, 60 and 300 seconds lost by waiting for memory",
        Of::Memory(stall_ratios),
    ),
    family(
        "larder_memory_problem",
        Kind::Gauge,
        None,
        "Whether the budget is exceeded, by reason",
        Of::Memory(problems),
    ),
    family(
        "larder_memory_detaching",
        Kind::Gauge,
        None,
        "Whether all pages are being paged in to detach the pager",
        Of::Memory(|of, put| put.flag(of.memory.state.detaching)),
    ),
];

fn memory_info(of: &MemoryMetrics<'_>, put: &mut Put<'_>) {
    let state = &of.memory.state;
    put.value_of(&[("process", &state.process), ("pid", &state.pid.to_string())], 1);
}

fn bounds(of: &MemoryMetrics<'_>, put: &mut Put<'_>) {
    let state = &of.memory.state;
    let Some(bounds) = state.range.map(|range| range.bounds(state.size)) else {
        return;
    };
    for (name, bytes) in [
        ("min", bounds.min),
        ("low", bounds.low),
        ("high", bounds.high),
        ("max", bounds.max),
    ] {
        put.value_of(&[("bound", name)], bytes);
    }
}

fn moves(of: &MemoryMetrics<'_>, put: &mut Put<'_>) {
    put.value_of(&[("direction", "up")], of.moved.up);
    put.value_of(&[("direction", "down")], of.moved.down);
}

fn disk_info(of: &MemoryMetrics<'_>, put: &mut Put<'_>) {
    for disk in &of.memory.state.disks {
        put.value_of(&[("tier", disk.tier.name()), ("file", &disk.name)], 1);
    }
}

fn disks(of: &MemoryMetrics<'_>, put: &mut Put<'_>, value: fn(&SwapState) -> u64) {
    for disk in &of.memory.state.disks {
        put.value_of(&[("tier", disk.tier.name())], value(disk));
    }
}

fn faults(of: &MemoryMetrics<'_>, put: &mut Put<'_>) {
    let faults = &of.memory.state.faults;
    for (source, times) in [
        ("zero", &faults.zero),
        ("uniform", &faults.uniform),
        ("compressed", &faults.compressed),
        ("disk", &faults.disk),
        ("write", &faults.write),
    ] {
        put.histogram_of(&[("source", source)], times);
    }
}

fn stall_seconds(of: &MemoryMetrics<'_>, put: &mut Put<'_>) {
    let pressure = &of.memory.state.pressure;
    for (kind, lost) in [("some", &pressure.some), ("full", &pressure.full)] {
        put.value_of(&[("kind", kind)], lost.total_us as f64 / 1e6);
    }
}

fn stall_ratios(of: &MemoryMetrics<'_>, put: &mut Put<'_>) {
    let pressure = &of.memory.state.pressure;
    for (kind, lost) in [("some", &pressure.some), ("full", &pressure.full)] {
        for (window, percent) in [("10s", lost.avg10), ("60s", lost.avg60), ("300s", lost.avg300)] {
            put.value_of(&[("kind", kind), ("window", window)], percent / 100.0);
        }
    }
}

fn problems(of: &MemoryMetrics<'_>, put: &mut Put<'_>) {
    for problem in MemoryProblem::ALL {
        let is_so = of.memory.state.problem == Some(problem);
        put.value_of(&[("reason", problem.name())], u8::from(is_so));
    }
}
