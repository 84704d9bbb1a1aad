//! Frames about memory for the dashboard, sent each second. Units are bytes, seconds and shares, as in
//! [`larder_vm::control::memory_rates`].

use larder_vm::control::memory::{MemoryProblem, SwapState};
use larder_vm::control::memory_rates::MemoryRates;
use larder_vm::memory::range::BudgetBounds;
use serde::Serialize;

use crate::balance_loop::{BudgetChanges, LastChange};
use crate::vm_process::{MemorySample, Sample};

/// Memory of a VM, as a row of the list of VMs.
#[derive(Serialize)]
pub(crate) struct MemoryTotals {
    size: u64,
    budget: u64,
    used: u64,
    /// Share of the time since the previous poll for which at least one thread waited.
    some: Option<f64>,
    /// Share of the last minute for which at least one thread waited.
    some_60s: f64,
    lost_pages: u64,
    failed: usize,
    problem: Option<&'static str>,
}

/// Memory of a VM, for its own page.
#[derive(Serialize)]
pub(crate) struct MemoryFrame<'a> {
    /// Time of the sample, in milliseconds since 1970 (UTC).
    time_ms: u64,
    process: &'a str,
    pid: i32,
    size: u64,
    resident: u64,
    budget: u64,
    bounds: Option<BoundsFrame>,
    used: u64,
    compressed: CompressedFrame,
    disks: Vec<MemoryDiskFrame<'a>>,
    uniform_pages: u64,
    lost_pages: u64,
    refaults: u64,
    evicted_pages: u64,
    stalled: u64,
    some: StallFrame,
    full: StallFrame,
    problem: Option<&'static str>,
    detaching: bool,
    rates: Option<&'a MemoryRates>,
    moves: BudgetChangesFrame<'a>,
}

#[derive(Serialize)]
struct BoundsFrame {
    min: u64,
    low: u64,
    high: u64,
    max: u64,
}

#[derive(Serialize)]
struct CompressedFrame {
    pages: u64,
    used: u64,
    limit: u64,
    ratio: Option<f64>,
}

#[derive(Serialize)]
struct MemoryDiskFrame<'a> {
    tier: &'static str,
    file: &'a str,
    live: u64,
    limit: u64,
    written: u64,
    /// Bytes written per day, at the average rate since the pager attached.
    written_per_day: f64,
    failed: bool,
}

/// Shares of the time that were lost to stalls.
#[derive(Serialize)]
struct StallFrame {
    avg10: f64,
    avg60: f64,
    avg300: f64,
    total: f64,
}

#[derive(Serialize)]
struct BudgetChangesFrame<'a> {
    up: u64,
    down: u64,
    last: Option<&'a LastChange>,
}

fn failed(disks: &[SwapState]) -> usize {
    disks.iter().filter(|disk| disk.failed).count()
}

impl MemoryTotals {
    pub(crate) fn new(memory: &MemorySample) -> Self {
        let state = &memory.state;
        Self {
            size: state.size,
            budget: state.budget,
            used: state.used,
            some: memory.rates.as_ref().map(|rates| rates.some),
            some_60s: state.pressure.some.avg60 / 100.0,
            lost_pages: state.lost_pages,
            failed: failed(&state.disks),
            problem: state.problem.map(MemoryProblem::description),
        }
    }
}

impl<'a> MemoryFrame<'a> {
    pub(crate) fn new(sample: &'a Sample, changes: &'a BudgetChanges) -> Option<Self> {
        let memory = sample.memory.as_ref()?;
        let state = &memory.state;
        let bounds = state.range.map(|range| range.bounds(state.size));
        let stall_frame = |lost: &larder_vm::control::memory::StallState| StallFrame {
            avg10: lost.avg10 / 100.0,
            avg60: lost.avg60 / 100.0,
            avg300: lost.avg300 / 100.0,
            total: lost.total_us as f64 / 1e6,
        };
        let disk = |disk: &'a SwapState| MemoryDiskFrame {
            tier: disk.tier.name(),
            file: &disk.name,
            live: disk.live,
            limit: disk.limit,
            written: disk.written_bytes,
            written_per_day: disk.written_bytes as f64 * 86_400e9 / state.time_ns.max(1) as f64,
            failed: disk.failed,
        };
        Some(Self {
            time_ms: sample.time_ms,
            process: &state.process,
            pid: state.pid,
            size: state.size,
            resident: state.resident,
            budget: state.budget,
            bounds: bounds.map(|BudgetBounds { min, low, high, max }| BoundsFrame { min, low, high, max }),
            used: state.used,
            compressed: CompressedFrame {
                pages: state.compressed.pages,
                used: state.compressed.used,
                limit: state.compressed.limit,
                ratio: state.compression_ratio(),
            },
            disks: state.disks.iter().map(disk).collect(),
            uniform_pages: state.uniform_pages,
            lost_pages: state.lost_pages,
            refaults: state.refaults,
            evicted_pages: state.evicted_pages,
            stalled: state.stalled,
            some: stall_frame(&state.pressure.some),
            full: stall_frame(&state.pressure.full),
            problem: state.problem.map(MemoryProblem::description),
            detaching: state.detaching,
            rates: memory.rates.as_ref(),
            moves: BudgetChangesFrame { up: changes.up, down: changes.down, last: changes.last.as_ref() },
        })
    }
}
