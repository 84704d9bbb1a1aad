//! Metric families about VMs and disks, and the sources of their values.

use larder_vm::control::state::{CacheHealth, DiskState};

use super::labelled::{cache_info, cache_reads, disk_info, miss_ratios, prefetch_reads, prefetch_streams, vm_info};
use super::write::SampleWriter;
use super::{HostMetrics, MemoryMetrics, MigrationMetrics, VmMetrics};
use crate::vm_process::Health;

/// Type of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    Histogram,
    Info,
}

impl MetricKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Info => "info",
        }
    }
}

/// Object that a family has one set of samples for.
#[derive(Clone, Copy)]
pub(super) enum FamilyScope {
    Host(fn(&HostMetrics, &mut SampleWriter<'_>)),
    Vm(fn(&VmMetrics, &mut SampleWriter<'_>)),
    Disk(fn(&DiskState, &mut SampleWriter<'_>)),
    Memory(fn(&MemoryMetrics<'_>, &mut SampleWriter<'_>)),
    Migration(fn(&MigrationMetrics, &mut SampleWriter<'_>)),
}

/// Metric family: its name, its description, and the function that writes its values.
pub(super) struct Family {
    /// Name without the suffixes `_total` and `_info`.
    pub(super) name: &'static str,
    pub(super) kind: MetricKind,
    pub(super) unit: Option<&'static str>,
    /// Description without the full stop.
    pub(super) help: &'static str,
    pub(super) scope: FamilyScope,
}

pub(super) const fn family(
    name: &'static str,
    kind: MetricKind,
    unit: Option<&'static str>,
    help: &'static str,
    scope: FamilyScope,
) -> Family {
    Family { name, kind, unit, help, scope }
}

/// Families about VMs and disks, in the order in which they are written.
pub(super) const FAMILIES: &[Family] = &[
    family(
        "larder_build",
        MetricKind::Info,
        None,
        "Version of the Larder that exports these metrics",
        FamilyScope::Host(|_, put| put.labelled_value(&[("version", env!("CARGO_PKG_VERSION"))], 1)),
    ),
    family(
        "larder_host_sockets",
        MetricKind::Gauge,
        None,
        "Control sockets of VMs that exist, existed or may exist, by state",
        FamilyScope::Host(|host, put| {
            host.sockets.iter().for_each(|(state, count)| put.labelled_value(&[("state", state)], count))
        }),
    ),
    family(
        "larder_host_left_out",
        MetricKind::Gauge,
        None,
        "Control sockets of VMs that are not watched, because there are more than 1024, by whether the socket exists or the VM is stopped",
        FamilyScope::Host(|host, put| {
            put.labelled_value(&[("state", "socket")], host.unwatched.sockets);
            put.labelled_value(&[("state", "stopped")], host.unwatched.stopped);
        }),
    ),
    family(
        "larder_vm_up",
        MetricKind::Gauge,
        None,
        "Whether the VM's server and the server of its memory answer (1), or one of them was killed or is stuck (0)",
        FamilyScope::Vm(|vm, put| put.bool_value(vm.health == Health::Up)),
    ),
    family(
        "larder_vm_stuck",
        MetricKind::Gauge,
        None,
        "Whether the VM's server, or the server of its memory, runs but does not answer in time, or one of the disks does not",
        FamilyScope::Vm(|vm, put| put.bool_value(vm.health == Health::Stuck)),
    ),
    family("larder_vm", MetricKind::Info, None, "Properties of the VM", FamilyScope::Vm(vm_info)),
    family(
        "larder_vm_start_time_seconds",
        MetricKind::Gauge,
        Some("seconds"),
        "Start time of the VM's server, in seconds since 1970 (UTC)",
        FamilyScope::Vm(|vm, put| {
            if let Some(server) = &vm.server {
                put.value(server.started_ms as f64 / 1e3);
            }
        }),
    ),
    family(
        "larder_vm_disks",
        MetricKind::Gauge,
        None,
        "Disks that the VM's server serves",
        FamilyScope::Vm(|vm, put| vm.sample.iter().for_each(|sample| put.value(sample.disks.len()))),
    ),
    family("larder_disk", MetricKind::Info, None, "Properties of the disk", FamilyScope::Disk(disk_info)),
    family(
        "larder_disk_size_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Size of the disk",
        FamilyScope::Disk(|disk, put| put.value(disk.size)),
    ),
    family(
        "larder_disk_read_requests",
        MetricKind::Counter,
        None,
        "Completed reads, including failed ones",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.read.count)),
    ),
    family(
        "larder_disk_read_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes read for guests and clients",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.read.bytes)),
    ),
    family(
        "larder_disk_read_errors",
        MetricKind::Counter,
        None,
        "Reads that failed",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.read.errors)),
    ),
    family(
        "larder_disk_read_duration_seconds",
        MetricKind::Histogram,
        Some("seconds"),
        "Duration of reads",
        FamilyScope::Disk(|disk, put| put.histogram(&disk.requests.read.latency)),
    ),
    family(
        "larder_disk_write_requests",
        MetricKind::Counter,
        None,
        "Completed writes, including failed ones",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.write.count)),
    ),
    family(
        "larder_disk_write_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes written for guests and clients",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.write.bytes)),
    ),
    family(
        "larder_disk_write_errors",
        MetricKind::Counter,
        None,
        "Writes that failed",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.write.errors)),
    ),
    family(
        "larder_disk_write_duration_seconds",
        MetricKind::Histogram,
        Some("seconds"),
        "Duration of writes",
        FamilyScope::Disk(|disk, put| put.histogram(&disk.requests.write.latency)),
    ),
    family(
        "larder_disk_flush_requests",
        MetricKind::Counter,
        None,
        "Completed flushes, including failed ones",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.flush.count)),
    ),
    family(
        "larder_disk_flush_errors",
        MetricKind::Counter,
        None,
        "Flushes that failed",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.flush.errors)),
    ),
    family(
        "larder_disk_flush_duration_seconds",
        MetricKind::Histogram,
        Some("seconds"),
        "Duration of flushes",
        FamilyScope::Disk(|disk, put| put.histogram(&disk.requests.flush.latency)),
    ),
    family(
        "larder_disk_discard_requests",
        MetricKind::Counter,
        None,
        "Completed discards, including failed ones",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.discard.count)),
    ),
    family(
        "larder_disk_discard_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes discarded for guests and clients",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.discard.bytes)),
    ),
    family(
        "larder_disk_discard_errors",
        MetricKind::Counter,
        None,
        "Discards that failed",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.discard.errors)),
    ),
    family(
        "larder_disk_discard_duration_seconds",
        MetricKind::Histogram,
        Some("seconds"),
        "Duration of discards",
        FamilyScope::Disk(|disk, put| put.histogram(&disk.requests.discard.latency)),
    ),
    family(
        "larder_disk_write_zeroes_requests",
        MetricKind::Counter,
        None,
        "Completed write-zeroes requests, including failed ones",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.write_zeroes.count)),
    ),
    family(
        "larder_disk_write_zeroes_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes zeroed for guests and clients",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.write_zeroes.bytes)),
    ),
    family(
        "larder_disk_write_zeroes_errors",
        MetricKind::Counter,
        None,
        "Write-zeroes requests that failed",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.write_zeroes.errors)),
    ),
    family(
        "larder_disk_write_zeroes_duration_seconds",
        MetricKind::Histogram,
        Some("seconds"),
        "Duration of write-zeroes requests",
        FamilyScope::Disk(|disk, put| put.histogram(&disk.requests.write_zeroes.latency)),
    ),
    family(
        "larder_disk_requests_in_flight",
        MetricKind::Gauge,
        None,
        "Requests in flight",
        FamilyScope::Disk(|disk, put| put.value(disk.requests.under_way)),
    ),
    family(
        "larder_disk_busy_seconds",
        MetricKind::Counter,
        Some("seconds"),
        "Time for which at least one request was in flight",
        FamilyScope::Disk(|disk, put| put.seconds(disk.requests.busy_ns)),
    ),
    family(
        "larder_disk_limit",
        MetricKind::Gauge,
        None,
        "Limits of the disk, under QEMU's names: requests or bytes per second, lengths of bursts in seconds",
        FamilyScope::Disk(|disk, put| {
            disk.limits.0.iter().for_each(|(name, value)| put.labelled_value(&[("limit", name)], value))
        }),
    ),
    family(
        "larder_disk_vhost_user_connected",
        MetricKind::Gauge,
        None,
        "Whether a front-end, such as QEMU, is connected",
        FamilyScope::Disk(|disk, put| {
            if let Some(export) = &disk.exports.vhost_user {
                put.bool_value(export.connected);
            }
        }),
    ),
    family(
        "larder_disk_nbd_clients",
        MetricKind::Gauge,
        None,
        "Connected NBD clients",
        FamilyScope::Disk(|disk, put| {
            if let Some(export) = &disk.exports.nbd {
                put.value(export.clients);
            }
        }),
    ),
    family(
        "larder_prefetch_memory_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Memory used for read-ahead, including tables",
        FamilyScope::Disk(|disk, put| disk.prefetch.iter().for_each(|it| put.value(it.memory))),
    ),
    family(
        "larder_prefetch_memory_limit_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Memory limit of read-ahead; 0 if read-ahead is off",
        FamilyScope::Disk(|disk, put| disk.prefetch.iter().for_each(|it| put.value(it.memory_limit))),
    ),
    family(
        "larder_prefetch_unread_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Bytes prefetched and not read yet",
        FamilyScope::Disk(|disk, put| disk.prefetch.iter().for_each(|it| put.value(it.unread))),
    ),
    family(
        "larder_prefetch_fetched_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes read ahead",
        FamilyScope::Disk(|disk, put| disk.prefetch.iter().for_each(|it| put.value(it.fetched))),
    ),
    family(
        "larder_prefetch_used_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Prefetched bytes that were read",
        FamilyScope::Disk(|disk, put| disk.prefetch.iter().for_each(|it| put.value(it.used))),
    ),
    family(
        "larder_prefetch_wasted_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Prefetched bytes that were dropped unread",
        FamilyScope::Disk(|disk, put| disk.prefetch.iter().for_each(|it| put.value(it.wasted))),
    ),
    family(
        "larder_prefetch_reads",
        MetricKind::Counter,
        None,
        "Reads by how much of their data was prefetched",
        FamilyScope::Disk(prefetch_reads),
    ),
    family(
        "larder_prefetch_errors",
        MetricKind::Counter,
        None,
        "Prefetch requests that failed",
        FamilyScope::Disk(|disk, put| disk.prefetch.iter().for_each(|it| put.value(it.errors))),
    ),
    family(
        "larder_prefetch_streams",
        MetricKind::Gauge,
        None,
        "Detected readers with prefetched data in memory",
        FamilyScope::Disk(|disk, put| disk.prefetch.iter().for_each(|it| put.value(it.streams.now))),
    ),
    family(
        "larder_prefetch_found_streams",
        MetricKind::Counter,
        None,
        "Detected readers, by direction",
        FamilyScope::Disk(prefetch_streams),
    ),
    family("larder_cache", MetricKind::Info, None, "Properties of the disk's cache", FamilyScope::Disk(cache_info)),
    family(
        "larder_cache_working",
        MetricKind::Gauge,
        None,
        "Whether the cache works (1), or its device has failed (0)",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.bool_value(it.state == CacheHealth::Works))),
    ),
    family(
        "larder_cache_size_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Size of the cache's file or device",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.size))),
    ),
    family(
        "larder_cache_capacity_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Bytes of the disk that the cache can hold",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.capacity))),
    ),
    family(
        "larder_cache_line_size_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Size of a line of the cache",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.line_size))),
    ),
    family(
        "larder_cache_occupancy_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Bytes of the disk that the cache holds",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.occupancy))),
    ),
    family(
        "larder_cache_dirty_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Dirty bytes in the cache, in whole lines",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.dirty))),
    ),
    family(
        "larder_cache_unsettled_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Bytes, in whole lines, whose metadata is not checkpointed, so that a crash now would drop or revert them",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.unsettled))),
    ),
    family(
        "larder_cache_unproven_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Bytes in the cache that are compared with the disk before use, because the server was killed",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.unproven))),
    ),
    family(
        "larder_cache_cleaned_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Dirty bytes written back to the disk",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.cleaned))),
    ),
    family(
        "larder_cache_flush_running",
        MetricKind::Gauge,
        None,
        "Whether a requested operation on the cache is running",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.bool_value(it.flush.running))),
    ),
    family(
        "larder_cache_flush_failed",
        MetricKind::Gauge,
        None,
        "Whether the last requested operation on the cache failed",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.bool_value(it.flush.error.is_some()))),
    ),
    family(
        "larder_cache_reads",
        MetricKind::Counter,
        None,
        "Reads by result of the cache lookup, or that bypassed the cache because it was slower than the disk",
        FamilyScope::Disk(cache_reads),
    ),
    family(
        "larder_cache_hit_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes read from the cache",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.hit_bytes))),
    ),
    family(
        "larder_cache_joined",
        MetricKind::Counter,
        None,
        "Parts of reads served by a fill in flight for another read",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.joined))),
    ),
    family(
        "larder_cache_filled_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes filled into the cache after reads",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.filled))),
    ),
    family(
        "larder_cache_bypassed_busy",
        MetricKind::Counter,
        None,
        "Parts of reads that were not cached because too many fills or writes were in flight",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.bypassed_busy))),
    ),
    family(
        "larder_cache_evicted_lines",
        MetricKind::Counter,
        None,
        "Lines evicted to make room",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.evicted))),
    ),
    family(
        "larder_cache_metadata_written_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes of cache metadata written",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.metadata_written))),
    ),
    family(
        "larder_cache_disk_read_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes read from the disk below the cache",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.disk_read))),
    ),
    family(
        "larder_cache_disk_written_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes written to the disk below the cache",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.disk_written))),
    ),
    family(
        "larder_cache_device_read_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes read from the cache's device",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.cache_read))),
    ),
    family(
        "larder_cache_device_written_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes written to the cache's device",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.cache_written))),
    ),
    family(
        "larder_cache_device_read_errors",
        MetricKind::Counter,
        None,
        "Reads of the cache's device that failed or timed out",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.read_errors))),
    ),
    family(
        "larder_cache_device_write_errors",
        MetricKind::Counter,
        None,
        "Other requests to the cache's device that failed or timed out",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.value(it.write_errors))),
    ),
    family(
        "larder_cache_daily_write_limit_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Limit of bytes written to the cache's device per day",
        FamilyScope::Disk(|disk, put| {
            disk.cache.iter().filter_map(|it| it.endurance).for_each(|limit| put.value(limit))
        }),
    ),
    family(
        "larder_cache_lru_miss_ratio",
        MetricKind::Gauge,
        Some("ratio"),
        "Miss ratio that an LRU cache of that capacity would have had so far",
        FamilyScope::Disk(miss_ratios),
    ),
    family(
        "larder_cache_hit_duration_seconds",
        MetricKind::Histogram,
        Some("seconds"),
        "Duration of reads that hit the cache completely",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.histogram(&it.hit_latency))),
    ),
    family(
        "larder_cache_miss_duration_seconds",
        MetricKind::Histogram,
        Some("seconds"),
        "Duration of reads that needed the disk",
        FamilyScope::Disk(|disk, put| disk.cache.iter().for_each(|it| put.histogram(&it.miss_latency))),
    ),
];
