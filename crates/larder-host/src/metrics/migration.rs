//! Metric families about migrations.

use larder_vm::control::migration::{CourseState, MigrationPhase, MigrationState, SentState};

use super::families::{Family, Kind, Of, family};
use super::write::{Labels, Put};
use crate::fleet::Fleet;
use crate::migration_frames::moves;
use crate::vm::{Health, shortened};

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
    fn course(&self) -> Option<&CourseState> {
        let goes_on = self.health == Health::Up && !self.state.phase.is_over();
        self.state.course.as_ref().filter(|_| goes_on)
    }

    fn sent(&self) -> Option<&SentState> {
        self.state.sent.as_ref()
    }

    /// Returns whether the migration failed and left the VM nowhere, or at an unknown place.
    fn is_in_doubt(&self) -> bool {
        let place = self.state.place.as_deref();
        self.state.phase == MigrationPhase::Failed && place.is_some_and(|place| place != "here" && place != "there")
    }
}

/// Collects all migrations, each with unique labels.
pub(super) fn seen(fleet: &Fleet) -> Vec<MigrationMetrics> {
    let vms = fleet.vms();
    let mut all: Vec<MigrationMetrics> = moves(&vms)
        .map(|(vm, name, state)| MigrationMetrics {
            domain: shortened(name.to_owned()),
            health: vm.health,
            state: state.clone(),
        })
        .collect();
    // A migration of the same name and direction in another directory is the same VM's; only the newer one is kept.
    all.sort_by(|a, b| {
        let key = |of: &MigrationMetrics| (of.domain.clone(), of.state.direction, of.state.started_ms);
        key(b).cmp(&key(a))
    });
    all.dedup_by(|one, other| one.domain == other.domain && one.state.direction == other.state.direction);
    all
}

/// Families about migrations, in the order in which they are written.
pub(super) const FAMILIES: &[Family] = &[
    family(
        "larder_migration",
        Kind::Info,
        None,
        "VM that is being migrated, or was migrated recently",
        Of::Migration(info),
    ),
    family(
        "larder_migration_up",
        Kind::Gauge,
        None,
        "Whether the migration process answers or has ended normally (1), or was killed or is stuck (0)",
        Of::Migration(|of, put| put.flag(matches!(of.health, Health::Up | Health::Stopped | Health::New))),
    ),
    family(
        "larder_migration_phase",
        Kind::Gauge,
        None,
        "Phase of the migration: 1 for the current phase",
        Of::Migration(|of, put| {
            for phase in MigrationPhase::ALL {
                put.value_of(&[("phase", phase.name())], u8::from(of.state.phase == phase));
            }
        }),
    ),
    family(
        "larder_migration_in_doubt",
        Kind::Gauge,
        None,
        "Whether the migration failed, and the VM does not simply continue on its source host",
        Of::Migration(|of, put| put.flag(of.is_in_doubt())),
    ),
    family(
        "larder_migration_start_time_seconds",
        Kind::Gauge,
        Some("seconds"),
        "Start time of the migration process, in seconds since 1970 (UTC)",
        Of::Migration(|of, put| put.value(of.state.started_ms as f64 / 1e3)),
    ),
    family(
        "larder_migration_converges",
        Kind::Gauge,
        None,
        "Whether the migration can complete at the current rates (1) or not (0)",
        Of::Migration(|of, put| course(of, put, |course| Some(u8::from(course.verdict.is_none()).into()))),
    ),
    family(
        "larder_migration_round",
        Kind::Gauge,
        None,
        "Current round of QEMU; the first round sends all memory",
        Of::Migration(|of, put| course(of, put, |course| Some(course.round as f64))),
    ),
    family(
        "larder_migration_memory_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Size of the guest's memory",
        Of::Migration(|of, put| course(of, put, |course| Some(course.total_bytes as f64))),
    ),
    family(
        "larder_migration_remaining_bytes",
        Kind::Gauge,
        Some("bytes"),
        "Memory that remains to be sent in this round",
        Of::Migration(|of, put| course(of, put, |course| Some(course.remaining_bytes as f64))),
    ),
    family(
        "larder_migration_dirty_bytes_per_second",
        Kind::Gauge,
        None,
        "Memory that the guest changes per second",
        Of::Migration(|of, put| course(of, put, |course| Some(course.dirty_bytes_per_s as f64))),
    ),
    family(
        "larder_migration_expected_seconds",
        Kind::Gauge,
        Some("seconds"),
        "Expected remaining time at the current rates",
        Of::Migration(|of, put| course(of, put, |course| course.expected_seconds)),
    ),
    family(
        "larder_migration_expected_downtime_seconds",
        Kind::Gauge,
        Some("seconds"),
        "Expected downtime if the guest were paused now",
        Of::Migration(|of, put| course(of, put, |course| Some(course.expected_downtime_ms? as f64 / 1e3))),
    ),
    family(
        "larder_migration_downtime_seconds",
        Kind::Gauge,
        Some("seconds"),
        "Downtime of the guest",
        Of::Migration(|of, put| of.state.downtime_ms.iter().for_each(|ms| put.value(*ms as f64 / 1e3))),
    ),
    family(
        "larder_migration_stream_bytes",
        Kind::Counter,
        Some("bytes"),
        "Bytes of QEMU's stream that were sent, or delivered to QEMU",
        Of::Migration(|of, put| both(of, put, |sent| sent.raw_bytes, |delivered| delivered.0)),
    ),
    family(
        "larder_migration_wire_bytes",
        Kind::Counter,
        Some("bytes"),
        "Bytes on the link for them",
        Of::Migration(|of, put| both(of, put, |sent| sent.wire_bytes, |delivered| delivered.1)),
    ),
    family(
        "larder_migration_delivered_bytes",
        Kind::Counter,
        Some("bytes"),
        "Bytes of QEMU's stream that the destination's QEMU has received",
        Of::Migration(|of, put| both(of, put, |sent| sent.delivered_bytes, |delivered| delivered.0)),
    ),
    family(
        "larder_migration_link_up",
        Kind::Gauge,
        None,
        "Whether the connections between the hosts are up (1), or were lost and are being re-established (0)",
        Of::Migration(|of, put| {
            if of.health == Health::Up && !of.state.phase.is_over() {
                put.flag(of.state.link.lost_seconds.is_none());
            }
        }),
    ),
    family(
        "larder_migration_link_losses",
        Kind::Counter,
        None,
        "Number of times that the connections were lost",
        Of::Migration(|of, put| put.value(of.state.link.losses as f64)),
    ),
    family(
        "larder_migration_pages",
        Kind::Counter,
        None,
        "Pages sent, by method",
        Of::Migration(|of, put| {
            for way in of.sent().iter().flat_map(|sent| &sent.methods) {
                put.value_of(&[("method", &way.method)], way.pages);
            }
        }),
    ),
    family(
        "larder_migration_page_bytes",
        Kind::Counter,
        Some("bytes"),
        "Bytes on the link for them",
        Of::Migration(|of, put| {
            for way in of.sent().iter().flat_map(|sent| &sent.methods) {
                put.value_of(&[("method", &way.method)], way.bytes);
            }
        }),
    ),
    family(
        "larder_migration_cpu_seconds",
        Kind::Counter,
        Some("seconds"),
        "CPU time of the sender (encoding, other) or of the receiver (decoding, other)",
        Of::Migration(|of, put| {
            let sent = of.sent().map(|it| ("encoding", it.cpu_seconds, it.encode_cpu_seconds));
            let taken_in = of.state.delivered.as_ref();
            let taken_in = taken_in.map(|it| ("decoding", it.cpu_seconds, it.decode_cpu_seconds));
            if let Some((work, all, seconds)) = sent.or(taken_in) {
                put.value_of(&[("work", work)], seconds);
                put.value_of(&[("work", "other")], (all - seconds).max(0.0));
            }
        }),
    ),
    family(
        "larder_migration_limit",
        Kind::Gauge,
        None,
        "Limits of the migration",
        Of::Migration(limits),
    ),
];

fn info(of: &MigrationMetrics, put: &mut Put<'_>) {
    let peer = shortened(of.state.peer.clone().unwrap_or_default());
    put.value_of(&[("peer", &peer), ("qemu", &shortened(of.state.qemu.clone()))], 1);
}

fn course(of: &MigrationMetrics, put: &mut Put<'_>, value: fn(&CourseState) -> Option<f64>) {
    if let Some(value) = of.course().and_then(value) {
        put.value(value);
    }
}

/// Writes a counter from the sending side's state, or from the receiving side's. `delivered` selects from (bytes of
/// the stream, bytes on the wire).
fn both(of: &MigrationMetrics, put: &mut Put<'_>, sent: fn(&SentState) -> u64, delivered: fn((u64, u64)) -> u64) {
    let received = of.state.delivered.map(|it| (it.raw_bytes, it.wire_bytes));
    if let Some(value) = of.sent().map(sent).or_else(|| received.map(delivered)) {
        put.value(value);
    }
}

fn limits(of: &MigrationMetrics, put: &mut Put<'_>) {
    let Some(limits) = &of.state.limits else { return };
    let all = [
        ("bandwidth", limits.bandwidth.map(|rate| rate as f64)),
        ("processors", limits.processors),
        ("downtime-ms", limits.downtime_ms.map(|ms| ms as f64)),
        ("timeout-s", limits.timeout_s.map(|seconds| seconds as f64)),
    ];
    for (name, value) in all {
        if let Some(value) = value {
            put.value_of(&[("limit", name)], value);
        }
    }
}
