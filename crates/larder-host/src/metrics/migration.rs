//! Metric families about migrations.

use larder_vm::control::migration::{MigrationPhase, MigrationProgressState, MigrationState, SentState};

use super::families::{Family, FamilyScope, MetricKind, family};
use super::write::{Labels, SampleWriter};
use crate::fleet::Fleet;
use crate::migration_frames::migrations;
use crate::vm_process::{Health, truncate_name};

/// Data of a migration for the metrics. The latest state is kept for a while after the migration has ended.
pub(super) struct MigrationMetrics {
    domain: String,
    health: Health,
    state: MigrationState,
}

impl MigrationMetrics {
    pub(super) fn labels(&self) -> Labels {
        Labels::new(&[("domain", &self.domain), ("direction", self.state.direction.name())])
    }

    /// Returns the progress while the migration runs.
    fn course(&self) -> Option<&MigrationProgressState> {
        let is_running = self.health == Health::Up && !self.state.phase.has_ended();
        self.state.course.as_ref().filter(|_| is_running)
    }

    fn sent(&self) -> Option<&SentState> {
        self.state.sent.as_ref()
    }

    /// Returns whether the migration failed and left the VM nowhere, or at an unknown place.
    fn has_unknown_location(&self) -> bool {
        let location = self.state.place.as_deref();
        self.state.phase == MigrationPhase::Failed
            && location.is_some_and(|location| location != "here" && location != "there")
    }
}

/// Collects all migrations, each with unique labels.
pub(super) fn collect(fleet: &Fleet) -> Vec<MigrationMetrics> {
    let vms = fleet.vms();
    let mut all: Vec<MigrationMetrics> = migrations(&vms)
        .map(|(vm, name, state)| MigrationMetrics {
            domain: truncate_name(name.to_owned()),
            health: vm.health,
            state: state.clone(),
        })
        .collect();
    // A migration of the same name and direction in another directory is the same VM's; only the newer one is kept.
    all.sort_by(|a, b| {
        let key =
            |metrics: &MigrationMetrics| (metrics.domain.clone(), metrics.state.direction, metrics.state.started_ms);
        key(b).cmp(&key(a))
    });
    all.dedup_by(|one, other| one.domain == other.domain && one.state.direction == other.state.direction);
    all
}

/// Families about migrations, in the order in which they are written.
pub(super) const FAMILIES: &[Family] = &[
    family(
        "larder_migration",
        MetricKind::Info,
        None,
        "VM that is being migrated, or was migrated recently",
        FamilyScope::Migration(info),
    ),
    family(
        "larder_migration_up",
        MetricKind::Gauge,
        None,
        "Whether the migration process answers or has ended normally (1), or was killed or is stuck (0)",
        FamilyScope::Migration(|metrics, put| {
            put.bool_value(matches!(metrics.health, Health::Up | Health::Stopped | Health::New))
        }),
    ),
    family(
        "larder_migration_phase",
        MetricKind::Gauge,
        None,
        "Phase of the migration: 1 for the current phase",
        FamilyScope::Migration(|metrics, put| {
            for phase in MigrationPhase::ALL {
                put.labelled_value(&[("phase", phase.name())], u8::from(metrics.state.phase == phase));
            }
        }),
    ),
    family(
        "larder_migration_in_doubt",
        MetricKind::Gauge,
        None,
        "Whether the migration failed, and the VM does not simply continue on its source host",
        FamilyScope::Migration(|metrics, put| put.bool_value(metrics.has_unknown_location())),
    ),
    family(
        "larder_migration_start_time_seconds",
        MetricKind::Gauge,
        Some("seconds"),
        "Start time of the migration process, in seconds since 1970 (UTC)",
        FamilyScope::Migration(|metrics, put| put.value(metrics.state.started_ms as f64 / 1e3)),
    ),
    family(
        "larder_migration_converges",
        MetricKind::Gauge,
        None,
        "Whether the migration can complete at the current rates (1) or not (0)",
        FamilyScope::Migration(|metrics, put| {
            write_course_value(metrics, put, |course| Some(u8::from(course.verdict.is_none()).into()))
        }),
    ),
    family(
        "larder_migration_round",
        MetricKind::Gauge,
        None,
        "Current round of QEMU; the first round sends all memory",
        FamilyScope::Migration(|metrics, put| write_course_value(metrics, put, |course| Some(course.round as f64))),
    ),
    family(
        "larder_migration_memory_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Size of the guest's memory",
        FamilyScope::Migration(|metrics, put| {
            write_course_value(metrics, put, |course| Some(course.total_bytes as f64))
        }),
    ),
    family(
        "larder_migration_remaining_bytes",
        MetricKind::Gauge,
        Some("bytes"),
        "Memory that remains to be sent in this round",
        FamilyScope::Migration(|metrics, put| {
            write_course_value(metrics, put, |course| Some(course.remaining_bytes as f64))
        }),
    ),
    family(
        "larder_migration_dirty_bytes_per_second",
        MetricKind::Gauge,
        None,
        "Memory that the guest changes per second",
        FamilyScope::Migration(|metrics, put| {
            write_course_value(metrics, put, |course| Some(course.dirty_bytes_per_s as f64))
        }),
    ),
    family(
        "larder_migration_expected_seconds",
        MetricKind::Gauge,
        Some("seconds"),
        "Expected remaining time at the current rates",
        FamilyScope::Migration(|metrics, put| write_course_value(metrics, put, |course| course.expected_seconds)),
    ),
    family(
        "larder_migration_expected_downtime_seconds",
        MetricKind::Gauge,
        Some("seconds"),
        "Expected downtime if the guest were paused now",
        FamilyScope::Migration(|metrics, put| {
            write_course_value(metrics, put, |course| Some(course.expected_downtime_ms? as f64 / 1e3))
        }),
    ),
    family(
        "larder_migration_downtime_seconds",
        MetricKind::Gauge,
        Some("seconds"),
        "Downtime of the guest",
        FamilyScope::Migration(|metrics, put| {
            metrics.state.downtime_ms.iter().for_each(|ms| put.value(*ms as f64 / 1e3))
        }),
    ),
    family(
        "larder_migration_stream_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes of QEMU's stream that were sent, or delivered to QEMU",
        FamilyScope::Migration(|metrics, put| {
            write_either_side(metrics, put, |sent| sent.raw_bytes, |delivered| delivered.0)
        }),
    ),
    family(
        "larder_migration_wire_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes on the link for them",
        FamilyScope::Migration(|metrics, put| {
            write_either_side(metrics, put, |sent| sent.wire_bytes, |delivered| delivered.1)
        }),
    ),
    family(
        "larder_migration_delivered_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes of QEMU's stream that the destination's QEMU has received",
        FamilyScope::Migration(|metrics, put| {
            write_either_side(metrics, put, |sent| sent.delivered_bytes, |delivered| delivered.0)
        }),
    ),
    family(
        "larder_migration_link_up",
        MetricKind::Gauge,
        None,
        "Whether the connections between the hosts are up (1), or were lost and are being re-established (0)",
        FamilyScope::Migration(|metrics, put| {
            if metrics.health == Health::Up && !metrics.state.phase.has_ended() {
                put.bool_value(metrics.state.link.lost_seconds.is_none());
            }
        }),
    ),
    family(
        "larder_migration_link_losses",
        MetricKind::Counter,
        None,
        "Number of times that the connections were lost",
        FamilyScope::Migration(|metrics, put| put.value(metrics.state.link.losses as f64)),
    ),
    family(
        "larder_migration_pages",
        MetricKind::Counter,
        None,
        "Pages sent, by method",
        FamilyScope::Migration(|metrics, put| {
            for entry in metrics.sent().iter().flat_map(|sent| &sent.methods) {
                put.labelled_value(&[("method", &entry.method)], entry.pages);
            }
        }),
    ),
    family(
        "larder_migration_page_bytes",
        MetricKind::Counter,
        Some("bytes"),
        "Bytes on the link for them",
        FamilyScope::Migration(|metrics, put| {
            for entry in metrics.sent().iter().flat_map(|sent| &sent.methods) {
                put.labelled_value(&[("method", &entry.method)], entry.bytes);
            }
        }),
    ),
    family(
        "larder_migration_cpu_seconds",
        MetricKind::Counter,
        Some("seconds"),
        "CPU time of the sender (encoding, other) or of the receiver (decoding, other)",
        FamilyScope::Migration(|metrics, put| {
            let sent = metrics.sent().map(|it| ("encoding", it.cpu_seconds, it.encode_cpu_seconds));
            let received = metrics.state.delivered.as_ref();
            let received = received.map(|it| ("decoding", it.cpu_seconds, it.decode_cpu_seconds));
            if let Some((work, all, seconds)) = sent.or(received) {
                put.labelled_value(&[("work", work)], seconds);
                put.labelled_value(&[("work", "other")], (all - seconds).max(0.0));
            }
        }),
    ),
    family(
        "larder_migration_limit",
        MetricKind::Gauge,
        None,
        "Limits of the migration",
        FamilyScope::Migration(limits),
    ),
];

fn info(metrics: &MigrationMetrics, put: &mut SampleWriter<'_>) {
    let peer = truncate_name(metrics.state.peer.clone().unwrap_or_default());
    put.labelled_value(&[("peer", &peer), ("qemu", &truncate_name(metrics.state.qemu.clone()))], 1);
}

fn write_course_value(
    metrics: &MigrationMetrics,
    put: &mut SampleWriter<'_>,
    value: fn(&MigrationProgressState) -> Option<f64>,
) {
    if let Some(value) = metrics.course().and_then(value) {
        put.value(value);
    }
}

/// Writes a counter from the sending side's state, or from the receiving side's. `delivered` selects from (bytes of
/// the stream, bytes on the wire).
fn write_either_side(
    metrics: &MigrationMetrics,
    put: &mut SampleWriter<'_>,
    sent: fn(&SentState) -> u64,
    delivered: fn((u64, u64)) -> u64,
) {
    let received = metrics.state.delivered.map(|it| (it.raw_bytes, it.wire_bytes));
    if let Some(value) = metrics.sent().map(sent).or_else(|| received.map(delivered)) {
        put.value(value);
    }
}

fn limits(metrics: &MigrationMetrics, put: &mut SampleWriter<'_>) {
    let Some(limits) = &metrics.state.limits else { return };
    let all = [
        ("bandwidth", limits.bandwidth.map(|rate| rate as f64)),
        ("processors", limits.processors),
        ("downtime-ms", limits.downtime_ms.map(|ms| ms as f64)),
        ("timeout-s", limits.timeout_s.map(|seconds| seconds as f64)),
    ];
    for (name, value) in all {
        if let Some(value) = value {
            put.labelled_value(&[("limit", name)], value);
        }
    }
}
