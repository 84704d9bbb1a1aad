//! Metric families whose values have labels of their own.

use larder_vm::control::state::DiskState;

use super::VmMetrics;
use super::write::SampleWriter;

pub(super) fn vm_info(vm: &VmMetrics, put: &mut SampleWriter<'_>) {
    if let Some(server) = &vm.server {
        put.labelled_value(
            &[
                ("uuid", vm.uuid.as_deref().unwrap_or_default()),
                ("version", &server.version),
                ("pid", &server.pid.to_string()),
            ],
            1,
        );
    }
}

pub(super) fn disk_info(disk: &DiskState, put: &mut SampleWriter<'_>) {
    let read_only = if disk.read_only { "true" } else { "false" };
    let labels = [
        ("image", disk.image.as_str()),
        ("format", disk.format.name()),
        ("block_size", &disk.block_size.to_string()),
        ("read_only", read_only),
    ];
    put.labelled_value(&labels, 1);
}

pub(super) fn cache_info(disk: &DiskState, put: &mut SampleWriter<'_>) {
    if let Some(cache) = &disk.cache {
        put.labelled_value(&[("file", &cache.file), ("mode", &cache.mode)], 1);
    }
}

pub(super) fn prefetch_reads(disk: &DiskState, put: &mut SampleWriter<'_>) {
    if let Some(state) = &disk.prefetch {
        for (result, count) in [
            ("hit", state.hits),
            ("wait", state.waits),
            ("partial_hit", state.partial_hits),
            ("miss", state.misses),
            ("bypassed", state.bypassed),
        ] {
            put.labelled_value(&[("result", result)], count);
        }
    }
}

pub(super) fn prefetch_streams(disk: &DiskState, put: &mut SampleWriter<'_>) {
    if let Some(state) = disk.prefetch.as_ref().map(|prefetch| &prefetch.streams) {
        for (direction, count) in [("forward", state.forward), ("backward", state.backward), ("strided", state.strided)]
        {
            put.labelled_value(&[("direction", direction)], count);
        }
    }
}

pub(super) fn cache_reads(disk: &DiskState, put: &mut SampleWriter<'_>) {
    if let Some(state) = &disk.cache {
        for (result, count) in [
            ("hit", state.hits),
            ("partial_hit", state.partial_hits),
            ("miss", state.misses),
            ("bypassed_slow", state.bypassed_slow),
        ] {
            put.labelled_value(&[("result", result)], count);
        }
    }
}

pub(super) fn miss_ratios(disk: &DiskState, put: &mut SampleWriter<'_>) {
    for state in disk.cache.iter().flat_map(|cache| &cache.miss_ratios) {
        put.labelled_value(&[("capacity_bytes", &state.capacity.to_string())], state.miss_ratio);
    }
}
