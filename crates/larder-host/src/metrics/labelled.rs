//! Metric families whose values have labels of their own.

use larder_vm::control::state::DiskState;

use super::VmMetrics;
use super::write::Put;

pub(super) fn vm_info(vm: &VmMetrics, put: &mut Put<'_>) {
    if let Some(server) = &vm.server {
        put.value_of(
            &[
                ("uuid", vm.uuid.as_deref().unwrap_or_default()),
                ("version", &server.version),
                ("pid", &server.pid.to_string()),
            ],
            1,
        );
    }
}

pub(super) fn disk_info(disk: &DiskState, put: &mut Put<'_>) {
    let read_only = if disk.read_only { "true" } else { "false" };
    let labels = [
        ("image", disk.image.as_str()),
        ("format", disk.format.name()),
        ("block_size", &disk.block_size.to_string()),
        ("read_only", read_only),
    ];
    put.value_of(&labels, 1);
}

pub(super) fn cache_info(disk: &DiskState, put: &mut Put<'_>) {
    if let Some(cache) = &disk.cache {
        put.value_of(&[("file", &cache.file), ("mode", &cache.mode)], 1);
    }
}

pub(super) fn prefetch_reads(disk: &DiskState, put: &mut Put<'_>) {
    if let Some(of) = &disk.prefetch {
        for (result, count) in [
            ("hit", of.hits),
            ("wait", of.waits),
            ("partial_hit", of.partial_hits),
            ("miss", of.misses),
            ("bypassed", of.bypassed),
        ] {
            put.value_of(&[("result", result)], count);
        }
    }
}

pub(super) fn prefetch_streams(disk: &DiskState, put: &mut Put<'_>) {
    if let Some(of) = disk.prefetch.as_ref().map(|prefetch| &prefetch.streams) {
        for (direction, count) in [
            ("forward", of.forward),
            ("backward", of.backward),
            ("strided", of.strided),
        ] {
            put.value_of(&[("direction", direction)], count);
        }
    }
}

pub(super) fn cache_reads(disk: &DiskState, put: &mut Put<'_>) {
    if let Some(of) = &disk.cache {
        for (result, count) in [
            ("hit", of.hits),
            ("partial_hit", of.partial_hits),
            ("miss", of.misses),
            ("bypassed_slow", of.bypassed_slow),
        ] {
            put.value_of(&[("result", result)], count);
        }
    }
}

pub(super) fn miss_ratios(disk: &DiskState, put: &mut Put<'_>) {
    for of in disk.cache.iter().flat_map(|cache| &cache.miss_ratios) {
        put.value_of(&[("capacity_bytes", &of.capacity.to_string())], of.miss_ratio);
    }
}
