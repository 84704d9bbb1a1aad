//! Frames for the dashboard, sent each second as JSON. Units are bytes, seconds and shares, as in
//! [`larder_vm::control::rates`].

use std::path::PathBuf;
use std::sync::Arc;

use larder_vm::control::rates::DiskRates;
use larder_vm::control::state::{CacheHealth, DiskState, ExportsState, LimitsState, MissRatio};
use serde::Serialize;

use crate::assembled_vm::{AssembledVm, assemble_vms};
use crate::balance_loop::BudgetChanges;
use crate::fleet::Fleet;
use crate::memory_frames::{MemoryFrame, MemoryTotals};
use crate::migration_frames::{self, MigrationRow, current_migration_text};
use crate::vm_process::{Health, Sample};

/// Largest number of points of a miss-ratio curve in a frame.
const CURVE_POINTS_MAX: usize = 256;

/// List of all VMs.
#[derive(Serialize)]
struct FleetFrame {
    vms: Vec<VmRow>,
    /// Migrations that are running, or ended lately.
    migrations: Vec<MigrationRow>,
    /// Sockets that are not known to be VMs'.
    others: Vec<UnknownSocketRow>,
    left_out: UnwatchedFrame,
}

/// Counts of control sockets that are not watched, because there are too many.
#[derive(Serialize)]
struct UnwatchedFrame {
    sockets: usize,
    stopped: usize,
}

#[derive(Serialize)]
struct VmRow {
    #[serde(flatten)]
    about: VmSummary,
    disks: usize,
    size: u64,
    totals: Option<DiskTotals>,
    /// Memory of the VM, if it is managed.
    memory: Option<MemoryTotals>,
    /// Description of the running migration, if there is one.
    moving: Option<String>,
}

/// Identity and health of a VM.
#[derive(Clone, Serialize)]
struct VmSummary {
    name: String,
    health: Health,
    why: Option<String>,
    socket: String,
    /// Socket of the process that manages the memory, if it is a separate one.
    memory_socket: Option<String>,
    uuid: Option<String>,
    version: Option<String>,
    pid: Option<u32>,
    started_ms: Option<u64>,
    time_ms: Option<u64>,
}

/// Sums over all disks of a VM.
#[derive(Default, Serialize)]
struct DiskTotals {
    reads_s: f64,
    writes_s: f64,
    read_bytes_s: f64,
    write_bytes_s: f64,
    errors_s: f64,
    /// Mean latency of reads and writes, in seconds.
    mean: Option<f64>,
    /// 99th percentile of the latency, of the disk where it is longest.
    p99: Option<f64>,
    cache_hit_ratio: Option<f64>,
    cache: Option<CacheTotals>,
    errors: u64,
}

#[derive(Default, Serialize)]
struct CacheTotals {
    capacity: u64,
    occupancy: u64,
    dirty: u64,
    failed: usize,
}

#[derive(Serialize)]
struct UnknownSocketRow {
    socket: String,
    health: Health,
    why: Option<String>,
}

/// Data of a VM's own page.
#[derive(Serialize)]
struct VmFrame<'a> {
    vm: VmSummary,
    /// True if the server of the disks answers.
    disks_up: bool,
    /// Time of the disks' sample, in milliseconds since 1970 (UTC).
    disks_time_ms: Option<u64>,
    disks: Vec<DiskFrame<'a>>,
    memory: Option<MemoryFrame<'a>>,
    migrations: &'a [MigrationRow],
}

#[derive(Serialize)]
struct DiskFrame<'a> {
    name: &'a str,
    image: &'a str,
    format: &'static str,
    size: u64,
    read_only: bool,
    exports: &'a ExportsState,
    limits: &'a LimitsState,
    in_flight: u64,
    /// Counts since the start of the server.
    counts: Counts,
    rates: Option<&'a DiskRates>,
    prefetch: Option<PrefetchFrame>,
    cache: Option<CacheFrame<'a>>,
}

#[derive(Serialize)]
struct Counts {
    reads: u64,
    writes: u64,
    read_bytes: u64,
    write_bytes: u64,
    errors: u64,
}

#[derive(Serialize)]
struct PrefetchFrame {
    memory: u64,
    memory_limit: u64,
    streams: u64,
}

#[derive(Serialize)]
struct CacheFrame<'a> {
    file: &'a str,
    mode: &'a str,
    works: bool,
    capacity: u64,
    occupancy: u64,
    dirty: u64,
    written: u64,
    endurance: Option<u64>,
    errors: u64,
    miss_ratios: &'a [MissRatio],
}

impl VmSummary {
    fn new(vm: &AssembledVm<'_>) -> Self {
        let head = vm.describing_process();
        let server = head.server.as_ref();
        let times = [Some(vm.main), vm.memory_process].into_iter().flatten();
        let times = times.filter_map(|vm| vm.sample.as_ref()).map(|sample| sample.time_ms);
        Self {
            name: vm.name.clone(),
            health: vm.health(),
            why: vm.why(),
            socket: head.path.display().to_string(),
            memory_socket: vm.memory_process.map(|memory_process| memory_process.path.display().to_string()),
            uuid: head.uuid().map(str::to_owned),
            version: server.map(|server| server.version.clone()),
            pid: server.map(|server| server.pid),
            started_ms: server.map(|server| server.started_ms),
            time_ms: times.max(),
        }
    }
}

fn errors(disk: &DiskState) -> u64 {
    let requests = &disk.requests;
    [&requests.read, &requests.write, &requests.flush, &requests.discard, &requests.write_zeroes]
        .map(|kind| kind.errors)
        .into_iter()
        .fold(0, u64::saturating_add)
}

impl DiskTotals {
    fn new(sample: &Sample) -> Self {
        let mut all = Self::default();
        let (mut time, mut hits, mut reads) = (0.0, 0.0, 0.0);
        for disk in &sample.disks {
            all.errors = all.errors.saturating_add(errors(&disk.state));
            if let Some(cache) = &disk.state.cache {
                let caches = all.cache.get_or_insert_default();
                caches.capacity = caches.capacity.saturating_add(cache.capacity);
                caches.occupancy = caches.occupancy.saturating_add(cache.occupancy);
                caches.dirty = caches.dirty.saturating_add(cache.dirty);
                caches.failed += usize::from(cache.state != CacheHealth::Works);
            }
            let Some(rates) = &disk.rates else { continue };
            all.reads_s += rates.read.per_second;
            all.writes_s += rates.write.per_second;
            all.read_bytes_s += rates.read.bytes_per_second;
            all.write_bytes_s += rates.write.bytes_per_second;
            for kind in [&rates.read, &rates.write] {
                all.errors_s += kind.errors_per_second;
                time += kind.per_second * kind.await_seconds.unwrap_or_default();
                all.p99 = [all.p99, kind.p99_seconds].into_iter().flatten().reduce(f64::max);
            }
            if let Some(ratio) = rates.cache_hits {
                hits += ratio * rates.read.per_second;
                reads += rates.read.per_second;
            }
        }
        let requests = all.reads_s + all.writes_s;
        all.mean = (requests > 0.0).then(|| time / requests);
        all.cache_hit_ratio = (reads > 0.0).then(|| hits / reads);
        all
    }
}

/// Returns the frame with all VMs.
pub(crate) fn fleet_frame(fleet: &Fleet) -> String {
    let vms = fleet.vms();
    let all = assemble_vms(&vms);
    let rows = all.iter().map(|vm| {
        let sample = vm.main.sample.as_ref();
        VmRow {
            about: VmSummary::new(vm),
            disks: sample.map_or(0, |sample| sample.disks.len()),
            size: sample.map_or(0, |sample| {
                let sizes = sample.disks.iter().map(|disk| disk.state.size);
                sizes.fold(0, u64::saturating_add)
            }),
            totals: vm
                .current_disks()
                .filter(|sample| !sample.disks.is_empty() || sample.memory.is_none())
                .map(|sample| DiskTotals::new(sample)),
            memory: vm.current_memory().and_then(|sample| sample.memory.as_ref()).map(MemoryTotals::new),
            moving: current_migration_text(&vms, &vm.name),
        }
    });
    let unwatched = fleet.unwatched();
    let unknown_sockets = vms.values().filter(|vm| !vm.is_vm() && vm.health != Health::New);
    let unknown_sockets = unknown_sockets.map(|vm| UnknownSocketRow {
        socket: vm.path.display().to_string(),
        health: vm.health,
        why: vm.reason.clone(),
    });
    let frame = FleetFrame {
        vms: rows.collect(),
        migrations: migration_frames::rows(&vms, None),
        others: unknown_sockets.collect(),
        left_out: UnwatchedFrame { sockets: unwatched.sockets, stopped: unwatched.stopped },
    };
    serde_json::to_string(&frame).unwrap_or_default()
}

/// Data of a VM's page: its sockets and its state.
pub(crate) struct VmPage {
    pub(crate) paths: Vec<PathBuf>,
    /// True if the server of its disks answers.
    is_up: bool,
    summary: VmSummary,
    sample: Option<Arc<Sample>>,
    memory_sample: Option<Arc<Sample>>,
    budget_changes: BudgetChanges,
    migrations: Vec<MigrationRow>,
}

/// Returns the data of the VM with this name.
pub(crate) fn vm_page(fleet: &Fleet, name: &str) -> Option<VmPage> {
    let vms = fleet.vms();
    let all = assemble_vms(&vms);
    let vm = all.iter().find(|vm| vm.name == name)?;
    Some(VmPage {
        paths: [Some(vm.main), vm.memory_process].into_iter().flatten().map(|vm| vm.path.clone()).collect(),
        is_up: vm.main.health == Health::Up,
        summary: VmSummary::new(vm),
        sample: vm.main.sample.clone(),
        memory_sample: vm.current_memory().cloned(),
        budget_changes: fleet.balance().changes_of(name),
        migrations: migration_frames::rows(&vms, Some(name)),
    })
}

impl VmPage {
    pub(crate) fn to_json(&self) -> String {
        let disks = self.sample.iter().flat_map(|sample| &sample.disks);
        let disks = disks.map(|disk| {
            let state = &disk.state;
            DiskFrame {
                name: &disk.name,
                image: &state.image,
                format: state.format.name(),
                size: state.size,
                read_only: state.read_only,
                exports: &state.exports,
                limits: &state.limits,
                in_flight: state.requests.under_way,
                counts: Counts {
                    reads: state.requests.read.count,
                    writes: state.requests.write.count,
                    read_bytes: state.requests.read.bytes,
                    write_bytes: state.requests.write.bytes,
                    errors: errors(state),
                },
                // Rates of a server that no longer answers are stale, so they are not sent.
                rates: disk.rates.as_ref().filter(|_| self.is_up),
                prefetch: state.prefetch.as_ref().map(|prefetch| PrefetchFrame {
                    memory: prefetch.memory,
                    memory_limit: prefetch.memory_limit,
                    streams: prefetch.streams.now,
                }),
                cache: state.cache.as_ref().map(|cache| CacheFrame {
                    file: &cache.file,
                    mode: &cache.mode,
                    works: cache.state == CacheHealth::Works,
                    capacity: cache.capacity,
                    occupancy: cache.occupancy,
                    dirty: cache.dirty,
                    written: cache.cache_written,
                    endurance: cache.endurance,
                    errors: cache.read_errors.saturating_add(cache.write_errors),
                    miss_ratios: &cache.miss_ratios[..cache.miss_ratios.len().min(CURVE_POINTS_MAX)],
                }),
            }
        });
        let frame = VmFrame {
            vm: self.summary.clone(),
            disks_up: self.is_up,
            disks_time_ms: self.sample.as_ref().map(|sample| sample.time_ms),
            disks: disks.collect(),
            memory: self.memory_sample.as_ref().and_then(|sample| MemoryFrame::new(sample, &self.budget_changes)),
            migrations: &self.migrations,
        };
        serde_json::to_string(&frame).unwrap_or_default()
    }
}
