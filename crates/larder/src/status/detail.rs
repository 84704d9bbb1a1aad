//! The complete state of a disk as its control socket reports it, for people.

use std::time::Duration;

use larder_vm::control::state::{
    CacheHealth, CacheState, DiskList, DiskState, FlushState, Latency, MissRatio, PrefetchState, RequestsState,
};
use larder_vm::image::{cache_mode_long_name, parse_cache_mode};

use crate::disk_image::{format_exact_size, format_percent, format_size};
use crate::output::Lines;

pub(super) fn format_text(disks: &DiskList) -> String {
    let disks: Vec<String> = disks.disks.iter().map(disk_text).collect();
    disks.join("\n")
}

fn disk_text(disk: &DiskState) -> String {
    let mut lines = Lines::default();
    if let Some(name) = &disk.name {
        lines.line("name", name);
    }
    lines.line("image", &disk.image);
    let read_only = if disk.read_only { ", read-only" } else { "" };
    lines.line(
        "disk",
        format!(
            "{}, {}, sectors of {}{read_only}",
            disk.format.name(),
            format_exact_size(disk.size),
            format_size(disk.block_size.into())
        ),
    );
    if disk.away {
        lines.line("away", "its VM is on another host, or incoming from one; the image is not open");
    }
    if let Some(server) = &disk.exports.vhost_user {
        let user = if server.connected { "in use" } else { "no client is connected" };
        lines.line("vhost-user", format!("{}, {user}", server.socket));
    }
    if let Some(server) = &disk.exports.nbd {
        let clients = match server.clients {
            1 => "1 client".to_owned(),
            clients => format!("{clients} clients"),
        };
        lines.line("NBD", format!("{}, {clients}", server.uri));
    }
    requests_text(&mut lines, &disk.requests);
    match disk.limits.to_string() {
        none if none.is_empty() => lines.line("limits", "none"),
        limits => lines.line("limits", limits),
    }
    match &disk.prefetch {
        Some(prefetch) if prefetch.memory_limit > 0 => prefetch_text(&mut lines, prefetch),
        _ => lines.line("read-ahead", "off"),
    }
    match &disk.cache {
        Some(cache) => cache_text(&mut lines, cache),
        None => lines.line("cache", "none"),
    }
    lines.into_text()
}

/// Formats the guest's requests.
fn requests_text(lines: &mut Lines, requests: &RequestsState) {
    let kinds = [
        ("guest reads", &requests.read),
        ("  writes", &requests.write),
        ("  flushes", &requests.flush),
        ("  discards", &requests.discard),
        ("  zeroes", &requests.write_zeroes),
    ];
    for (name, counts) in kinds {
        let is_always_shown = ["guest reads", "  writes"].contains(&name);
        if counts.count == 0 && !is_always_shown {
            continue;
        }
        let bytes = match counts.bytes {
            0 => String::new(),
            bytes => format!(", {}", format_size(bytes)),
        };
        let errors = match counts.errors {
            0 => String::new(),
            errors => format!(", {errors} failed"),
        };
        lines.line(name, format!("{}{bytes}{errors}", counts.count));
        if counts.latency.count > 0 {
            lines.line("    latency", latency_text(&counts.latency));
        }
    }
    lines.line("  in flight", requests.under_way);
}

fn cache_text(lines: &mut Lines, cache: &CacheState) {
    lines.line("cache", &cache.file);
    let words = parse_cache_mode(&cache.mode).map_or(cache.mode.as_str(), |mode| cache_mode_long_name(mode));
    let health = match cache.state {
        CacheHealth::Works => "works",
        CacheHealth::Failed => "has failed, and is not used until it is replaced (larder disk cache replace)",
    };
    lines.line("  state", format!("{words}, {health}"));
    lines.line("  size", format!("{}, lines of {}", format_exact_size(cache.size), format_size(cache.line_size)));
    lines.line(
        "  holds",
        format!("{}{}", format_size(cache.occupancy), format_percent(cache.occupancy, cache.capacity)),
    );
    if cache.dirty > 0 || cache.cleaned > 0 {
        let flush = match &cache.flush {
            FlushState { running: true, .. } => ", is being written to the disk".to_owned(),
            FlushState { error: Some(why), .. } => {
                format!(", could not be written to the disk: {why}")
            }
            FlushState { error: None, .. } => String::new(),
        };
        lines.line("    dirty", format_size(cache.dirty) + &flush);
        lines.line("    cleaned", format!("{} so far", format_size(cache.cleaned)));
    }
    lines.line("  not durable", format_size(cache.unsettled));
    if cache.unproven > 0 {
        lines.line("  unverified", format_size(cache.unproven));
    }
    let kinds = [
        ("    hits", cache.hits),
        ("    partial hits", cache.partial_hits),
        ("    misses", cache.misses),
        ("    bypassed", cache.bypassed_slow),
    ];
    let reads: u64 = kinds.iter().map(|(_, reads)| reads).sum();
    lines.line("  reads", reads);
    for (name, count) in kinds {
        lines.line(name, format!("{count}{}", format_percent(count, reads)));
    }
    lines.line("  hit latency", latency_text(&cache.hit_latency));
    lines.line("  miss latency", latency_text(&cache.miss_latency));
    lines.line("  hit bytes", format_size(cache.hit_bytes));
    lines.line("  coalesced", format!("{} reads of data that was being filled in", cache.joined));
    lines.line("  filled", format_size(cache.filled));
    if cache.warmed > 0 {
        lines.line("    warmed", format!("{}, hot on the host that the VM came from", format_size(cache.warmed)));
    }
    lines.line("  not filled", format!("{} reads, because too much was in flight", cache.bypassed_busy));
    lines.line("  evicted", format!("{} lines, to free space", cache.evicted));
    let budget = cache.endurance.map_or(String::new(), |bytes| format!(", of {} a day", format_size(bytes)));
    lines.line(
        "  its device",
        format!("{} read, {} written{budget}", format_size(cache.cache_read), format_size(cache.cache_written)),
    );
    if cache.read_errors + cache.write_errors > 0 {
        let (reads, writes) = (cache.read_errors, cache.write_errors);
        lines.line("    errors", format!("{reads} of reads, {writes} of writes"));
    }
    lines.line("    metadata", format!("{} written", format_size(cache.metadata_written)));
    lines.line(
        "  the disk",
        format!("{} read, {} written", format_size(cache.disk_read), format_size(cache.disk_written)),
    );
    let of = |ratio: &MissRatio| format!("{:.1} % ({})", 100.0 * ratio.miss_ratio, format_size(ratio.capacity));
    let ratios: Vec<String> = cache.miss_ratios.iter().map(of).collect();
    if !ratios.is_empty() {
        lines.line("  LRU would miss", ratios.join(", "));
    }
}

fn latency_text(latency: &Latency) -> String {
    let of = |share| latency.quantile(share).unwrap_or_default();
    match latency.mean() {
        Some(mean) => format!(
            "{mean:.1?} on average, P50 {:.1?}, P99 {:.1?}, maximum {:.1?}",
            of(0.5),
            of(0.99),
            Duration::from_nanos(latency.max_ns)
        ),
        None => "-".to_owned(),
    }
}

fn prefetch_text(lines: &mut Lines, prefetch: &PrefetchState) {
    let limit = format_size(prefetch.memory_limit);
    lines.line("read-ahead", format!("on, with up to {limit} of memory"));
    let part = |bytes: u64| match prefetch.fetched {
        0 => format_size(bytes),
        fetched => format!("{} ({:.1} %)", format_size(bytes), 100.0 * bytes as f64 / fetched as f64),
    };
    lines.line("fetched", format_size(prefetch.fetched));
    lines.line("  used", part(prefetch.used));
    lines.line("  wasted", part(prefetch.wasted));
    lines.line("  not read yet", part(prefetch.unread));
    lines.line("  failed", format!("{} fetches", prefetch.errors));
    let kinds = [
        ("  hits", prefetch.hits),
        ("  waits", prefetch.waits),
        ("  partial hits", prefetch.partial_hits),
        ("  misses", prefetch.misses),
        ("  bypassed", prefetch.bypassed),
    ];
    let reads: u64 = kinds.iter().map(|(_, reads)| reads).sum();
    lines.line("reads", reads);
    for (name, count) in kinds {
        match reads {
            0 => lines.line(name, count),
            _ => lines.line(name, format!("{count} ({:.1} %)", 100.0 * count as f64 / reads as f64)),
        }
    }
    let streams = &prefetch.streams;
    lines.line("streams now", streams.now);
    lines.line(
        "streams so far",
        format!("{} forward, {} backward, {} strided", streams.forward, streams.backward, streams.strided),
    );
}
