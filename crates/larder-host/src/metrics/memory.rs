//! Metric families about memory.

use larder_vm::control::memory::{MemoryProblem, SwapState};

use super::MemoryMetrics;
use super::families::{Family, FamilyScope, MetricKind, family};
use super::write::SampleWriter;

/// Families about memory, in the order in which they are written.
pub(super) const FAMILIES: &[Family] = &[
    family(
        "larder_host_memory_available_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Available memory of the host, while budgets are balanced (--balance-memory)",
        FamilyScope::Host(|host, put| host.memory.iter().for_each(|memory| put.value(memory.available))),
    ),
    family(
        "larder_host_memory_reserve_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Memory of the host that is to stay free (--memory-reserve)",
        FamilyScope::Host(|host, put| host.memory.iter().for_each(|memory| put.value(memory.reserve))),
    ),
    family(
        "larder_memory",
        MetricKind::Info,
        None,
        "Process whose memory is managed",
        FamilyScope::Memory(memory_info),
    ),
    family(
        "larder_memory_size_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Size of the VM's memory",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.size)),
    ),
    family(
        "larder_memory_resident_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Resident memory of the VM, not compressed",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.resident)),
    ),
    family(
        "larder_memory_budget_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Memory budget of the VM",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.budget)),
    ),
    family(
        "larder_memory_budget_bound_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Bounds of the budget",
        FamilyScope::Memory(bounds),
    ),
    family(
        "larder_memory_budget_moves",
        MetricKind::Counter,
        None,
        "Budget changes by larder host, by direction",
        FamilyScope::Memory(budget_changes),
    ),
    family(
        "larder_memory_used_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Used part of the budget",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.used)),
    ),
    family(
        "larder_memory_compressed_pages",
        MetricKind::Gauge,
        None,
        "Compressed pages",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.compressed.pages)),
    ),
    family(
        "larder_memory_compressed_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Memory used by compressed pages",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.compressed.used)),
    ),
    family(
        "larder_memory_compressed_limit_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Limit of the memory used by compressed pages",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.compressed.limit)),
    ),
    family(
        "larder_memory_compression_ratio",
        MetricKind::Gauge,
        Some("ratio"),
        "Size of the compressed pages before compression, divided by the memory that they use",
        FamilyScope::Memory(|metrics, put| {
            metrics.memory.state.compression_ratio().iter().for_each(|ratio| put.value(ratio))
        }),
    ),
    family(
        "larder_memory_uniform_pages",
        MetricKind::Gauge,
        None,
        "Pages filled with one repeated word, which use no memory",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.uniform_pages)),
    ),
    family(
        "larder_memory_clean_pages",
        MetricKind::Gauge,
        None,
        "Resident pages that have an identical copy on a disk",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.clean_pages)),
    ),
    family(
        "larder_memory_lost_pages",
        MetricKind::Gauge,
        None,
        "Pages that could not be read back; an access to one causes a memory error",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.lost_pages)),
    ),
    family(
        "larder_memory_disk",
        MetricKind::Info,
        None,
        "A disk for evicted pages: swap cache or slow store",
        FamilyScope::Memory(disk_info),
    ),
    family(
        "larder_memory_disk_working",
        MetricKind::Gauge,
        None,
        "Whether the disk works (1), or cannot be written to (0)",
        FamilyScope::Memory(|metrics, put| disks(metrics, put, |disk| u64::from(!disk.failed))),
    ),
    family(
        "larder_memory_disk_pages",
        MetricKind::Gauge,
        None,
        "Evicted pages on the disk",
        FamilyScope::Memory(|metrics, put| disks(metrics, put, |disk| disk.pages)),
    ),
    family(
        "larder_memory_disk_used_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Used space of the disk, including obsolete pages",
        FamilyScope::Memory(|metrics, put| disks(metrics, put, |disk| disk.used)),
    ),
    family(
        "larder_memory_disk_live_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Space of the disk used by live pages",
        FamilyScope::Memory(|metrics, put| disks(metrics, put, |disk| disk.live)),
    ),
    family(
        "larder_memory_disk_limit_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Space limit of the disk",
        FamilyScope::Memory(|metrics, put| disks(metrics, put, |disk| disk.limit)),
    ),
    family(
        "larder_memory_disk_written_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes written to the disk",
        FamilyScope::Memory(|metrics, put| disks(metrics, put, |disk| disk.written_bytes)),
    ),
    family(
        "larder_memory_disk_read_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes read from the disk",
        FamilyScope::Memory(|metrics, put| disks(metrics, put, |disk| disk.read_bytes)),
    ),
    family(
        "larder_memory_fault_duration_seconds",
        MetricKind::Histogram,
        Some("seconds"),
        "Duration of faults, by source of the page; write: a write to a page that was being evicted",
        FamilyScope::Memory(faults),
    ),
    family(
        "larder_memory_refaults",
        MetricKind::Counter,
        None,
        "Refaults: pages faulted in so soon after eviction that a little more memory would have kept them",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.refaults)),
    ),
    family(
        "larder_memory_evicted_pages",
        MetricKind::Counter,
        None,
        "Evicted pages",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.evicted_pages)),
    ),
    family(
        "larder_memory_evicted_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes in which evicted pages were stored",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.evicted_bytes)),
    ),
    family(
        "larder_memory_ahead_pages",
        MetricKind::Counter,
        None,
        "Pages prefetched along with faulted ones",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.ahead_pages)),
    ),
    family(
        "larder_memory_stalled",
        MetricKind::Gauge,
        None,
        "Threads that wait for a page that is unavailable now",
        FamilyScope::Memory(|metrics, put| put.value(metrics.memory.state.stalled)),
    ),
    family(
        "larder_memory_stall_seconds",
        MetricKind::Counter,
        Some("seconds"),
        "Time lost by waiting for memory; some: at least one thread waited, full: all vCPUs waited",
        FamilyScope::Memory(stall_seconds),
    ),
    family(
        "larder_memory_stall_ratio",
        MetricKind::Gauge,
        Some("ratio"),
        "Share of the last 10, 60 and 300 seconds lost by waiting for memory",
        FamilyScope::Memory(stall_ratios),
    ),
    family(
        "larder_memory_problem",
        MetricKind::Gauge,
        None,
        "Whether the budget is exceeded, by reason",
        FamilyScope::Memory(problems),
    ),
    family(
        "larder_memory_detaching",
        MetricKind::Gauge,
        None,
        "Whether all pages are being paged in to detach the pager",
        FamilyScope::Memory(|metrics, put| put.bool_value(metrics.memory.state.detaching)),
    ),
];

fn memory_info(metrics: &MemoryMetrics<'_>, put: &mut SampleWriter<'_>) {
    let state = &metrics.memory.state;
    put.labelled_value(&[("process", &state.process), ("pid", &state.pid.to_string())], 1);
}

fn bounds(metrics: &MemoryMetrics<'_>, put: &mut SampleWriter<'_>) {
    let state = &metrics.memory.state;
    let Some(bounds) = state.range.map(|range| range.bounds(state.size)) else {
        return;
    };
    for (name, bytes) in [("min", bounds.min), ("low", bounds.low), ("high", bounds.high), ("max", bounds.max)] {
        put.labelled_value(&[("bound", name)], bytes);
    }
}

fn budget_changes(metrics: &MemoryMetrics<'_>, put: &mut SampleWriter<'_>) {
    put.labelled_value(&[("direction", "up")], metrics.budget_changes.up);
    put.labelled_value(&[("direction", "down")], metrics.budget_changes.down);
}

fn disk_info(metrics: &MemoryMetrics<'_>, put: &mut SampleWriter<'_>) {
    for disk in &metrics.memory.state.disks {
        put.labelled_value(&[("tier", disk.tier.name()), ("file", &disk.name)], 1);
    }
}

fn disks(metrics: &MemoryMetrics<'_>, put: &mut SampleWriter<'_>, value: fn(&SwapState) -> u64) {
    for disk in &metrics.memory.state.disks {
        put.labelled_value(&[("tier", disk.tier.name())], value(disk));
    }
}

fn faults(metrics: &MemoryMetrics<'_>, put: &mut SampleWriter<'_>) {
    let faults = &metrics.memory.state.faults;
    for (source, times) in [
        ("zero", &faults.zero),
        ("uniform", &faults.uniform),
        ("compressed", &faults.compressed),
        ("disk", &faults.disk),
        ("write", &faults.write),
    ] {
        put.labelled_histogram(&[("source", source)], times);
    }
}

fn stall_seconds(metrics: &MemoryMetrics<'_>, put: &mut SampleWriter<'_>) {
    let pressure = &metrics.memory.state.pressure;
    for (kind, lost) in [("some", &pressure.some), ("full", &pressure.full)] {
        put.labelled_value(&[("kind", kind)], lost.total_us as f64 / 1e6);
    }
}

fn stall_ratios(metrics: &MemoryMetrics<'_>, put: &mut SampleWriter<'_>) {
    let pressure = &metrics.memory.state.pressure;
    for (kind, lost) in [("some", &pressure.some), ("full", &pressure.full)] {
        for (window, percent) in [("10s", lost.avg10), ("60s", lost.avg60), ("300s", lost.avg300)] {
            put.labelled_value(&[("kind", kind), ("window", window)], percent / 100.0);
        }
    }
}

fn problems(metrics: &MemoryMetrics<'_>, put: &mut SampleWriter<'_>) {
    for problem in MemoryProblem::ALL {
        let is_current = metrics.memory.state.problem == Some(problem);
        put.labelled_value(&[("reason", problem.name())], u8::from(is_current));
    }
}
