//! Frames about migrations for the dashboard, sent each second. The latest state that the migrating process reported
//! is kept for a while after the process has ended.

use std::collections::BTreeMap;
use std::path::PathBuf;

use larder_vm::control::migration::{Direction, MigrationPhase, MigrationState};
use serde::Serialize;

use crate::fleet::Fleet;
use crate::vm_process::{Health, VmProcess, truncate_name};

/// Longest list in a frame.
const LIST_MAX: usize = 64;

/// Migration, as a row of the list.
#[derive(Clone, Serialize)]
pub(crate) struct MigrationRow {
    /// Key, unique among all migrations.
    key: String,
    vm: String,
    direction: Direction,
    peer: Option<String>,
    health: Health,
    phase: MigrationPhase,
    words: String,
    reason: Option<String>,
    verdict: Option<String>,
    /// Share of this round's memory that was sent, from 0 to 1.
    share: Option<f64>,
    ratio: Option<f64>,
    stream_bytes_per_s: Option<u64>,
    expected_seconds: Option<f64>,
}

/// Migration, for its own page.
#[derive(Serialize)]
struct MigrationFrame<'a> {
    migration: Option<MigrationDetails<'a>>,
}

#[derive(Serialize)]
struct MigrationDetails<'a> {
    health: Health,
    why: Option<&'a str>,
    /// Time of the state, in milliseconds since 1970 (UTC).
    time_ms: u64,
    words: String,
    ratio: Option<f64>,
    state: MigrationState,
}

/// Returns the key of a migration.
pub(crate) fn migration_key(vm: &VmProcess) -> String {
    truncate_name(vm.path.file_stem().unwrap_or_default().to_string_lossy().into_owned())
}

/// Returns the state of a migration as text, including that its process was killed or is stuck.
pub(crate) fn phase_text(vm: &VmProcess, state: &MigrationState) -> String {
    match vm.health {
        Health::Killed => format!("killed, {}", state.summary()),
        Health::Stuck => format!("stuck, {}", state.summary()),
        _ => state.summary(),
    }
}

/// Returns the migrations that have reported a state, with that state.
pub(crate) fn migrations(
    vms: &BTreeMap<PathBuf, VmProcess>,
) -> impl Iterator<Item = (&VmProcess, &str, &MigrationState)> {
    vms.values().filter_map(|vm| {
        let (name, _) = vm.migration.as_ref()?;
        let state = vm.sample.as_ref()?.migration.as_ref()?;
        Some((vm, name.as_str(), state))
    })
}

/// Returns the migrations of all VMs, or of the VM `of`.
pub(crate) fn rows(vms: &BTreeMap<PathBuf, VmProcess>, only_vm: Option<&str>) -> Vec<MigrationRow> {
    let selected = migrations(vms).filter(|(_, name, state)| only_vm.is_none_or(|of| of == *name || of == state.vm));
    selected
        .map(|(vm, name, state)| {
            let course = state.course.as_ref();
            MigrationRow {
                key: migration_key(vm),
                vm: truncate_name(name.to_owned()),
                direction: state.direction,
                peer: state.peer.clone().map(truncate_name),
                health: vm.health,
                phase: state.phase,
                words: phase_text(vm, state),
                reason: state.reason.clone(),
                verdict: course.and_then(|course| course.verdict.clone()),
                share: course
                    .filter(|course| course.total_bytes > 0)
                    .map(|course| 1.0 - course.remaining_bytes as f64 / course.total_bytes as f64),
                ratio: state.ratio(),
                stream_bytes_per_s: state.rates.as_ref().map(|rates| rates.stream_bytes_per_s),
                expected_seconds: course.and_then(|course| course.expected_seconds),
            }
        })
        .collect()
}

/// Describes the VM's migration in a few words, if one is running.
pub(crate) fn current_migration_text(vms: &BTreeMap<PathBuf, VmProcess>, name: &str) -> Option<String> {
    let (vm, _, state) = migrations(vms).find(|(vm, name_of_vm, state)| {
        *name_of_vm == name && !state.phase.has_ended() && vm.health != Health::Stopped
    })?;
    let peer = state.peer.as_deref().unwrap_or("another host");
    let direction = match state.direction {
        Direction::Leaving => format!("to {peer}"),
        Direction::Coming => format!("from {peer}"),
    };
    Some(format!("{} {direction}", phase_text(vm, state)))
}

/// Returns the frame of the migration with this key.
pub(crate) fn migration_frame(fleet: &Fleet, key: &str) -> String {
    let vms = fleet.vms();
    let found = migrations(&vms).find(|(vm, ..)| migration_key(vm) == key);
    let migration = found.map(|(vm, _, state)| {
        let mut state = state.clone();
        // A genuine process has only a few of each; the bound is for a hostile one.
        if let Some(sent) = &mut state.sent {
            sent.methods.truncate(LIST_MAX);
        }
        if let Some(evidence) = &mut state.evidence {
            evidence.classes.truncate(LIST_MAX);
            evidence.classes.iter_mut().for_each(|class| class.offers.truncate(LIST_MAX));
        }
        MigrationDetails {
            health: vm.health,
            why: vm.reason.as_deref(),
            time_ms: vm.sample.as_ref().map_or(0, |sample| sample.time_ms),
            words: phase_text(vm, &state),
            ratio: state.ratio(),
            state,
        }
    });
    serde_json::to_string(&MigrationFrame { migration }).unwrap_or_default()
}
