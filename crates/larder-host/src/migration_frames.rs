//! Frames about migrations for the dashboard, sent each second. The latest state that the migrating process reported
//! is kept for a while after the process has ended.

use std::collections::BTreeMap;
use std::path::PathBuf;

use larder_vm::control::migration::{Direction, MigrationPhase, MigrationState};
use serde::Serialize;

use crate::fleet::Fleet;
use crate::vm::{Health, Vm, shortened};

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
    migration: Option<OneMove<'a>>,
}

#[derive(Serialize)]
struct OneMove<'a> {
    health: Health,
    why: Option<&'a str>,
    /// Time of the state, in milliseconds since 1970 (UTC).
    time_ms: u64,
    words: String,
    ratio: Option<f64>,
    state: MigrationState,
}

/// Returns the key of a migration.
pub(crate) fn key_of(vm: &Vm) -> String {
    shortened(vm.path.file_stem().unwrap_or_default().to_string_lossy().into_owned())
}

/// Returns the state of a migration as text, including that its process was killed or is stuck.
pub(crate) fn words(vm: &Vm, state: &MigrationState) -> String {
    match vm.health {
        Health::Killed => format!("killed, {}", state.words()),
        Health::Stuck => format!("stuck, {}", state.words()),
        _ => state.words(),
    }
}

/// Returns the migrations that have reported a state, with that state.
pub(crate) fn moves(vms: &BTreeMap<PathBuf, Vm>) -> impl Iterator<Item = (&Vm, &str, &MigrationState)> {
    vms.values().filter_map(|vm| {
        let (name, _) = vm.moved.as_ref()?;
        let state = vm.sample.as_ref()?.migration.as_ref()?;
        Some((vm, name.as_str(), state))
    })
}

/// Returns the migrations of all VMs, or of the VM `of`.
pub(crate) fn rows(vms: &BTreeMap<PathBuf, Vm>, of: Option<&str>) -> Vec<MigrationRow> {
    let of_vm = moves(vms).filter(|(_, name, state)| of.is_none_or(|of| of == *name || of == state.vm));
    of_vm
        .map(|(vm, name, state)| {
            let course = state.course.as_ref();
            MigrationRow {
                key: key_of(vm),
                vm: shortened(name.to_owned()),
                direction: state.direction,
                peer: state.peer.clone().map(shortened),
                health: vm.health,
                phase: state.phase,
                words: words(vm, state),
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
pub(crate) fn moving(vms: &BTreeMap<PathBuf, Vm>, name: &str) -> Option<String> {
    let (vm, _, state) =
        moves(vms).find(|(vm, of, state)| *of == name && !state.phase.is_over() && vm.health != Health::Stopped)?;
    let peer = state.peer.as_deref().unwrap_or("another host");
    let way = match state.direction {
        Direction::Leaving => format!("to {peer}"),
        Direction::Coming => format!("from {peer}"),
    };
    Some(format!("{} {way}", words(vm, state)))
}

/// Returns the frame of the migration with this key.
pub(crate) fn of_migration(fleet: &Fleet, key: &str) -> String {
    let vms = fleet.vms();
    let found = moves(&vms).find(|(vm, ..)| key_of(vm) == key);
    let migration = found.map(|(vm, _, state)| {
        let mut state = state.clone();
        // A genuine process has only a few of each; the bound is for a hostile one.
        if let Some(sent) = &mut state.sent {
            sent.methods.truncate(LIST_MAX);
        }
        if let Some(evidence) = &mut state.evidence {
            evidence.classes.truncate(LIST_MAX);
            evidence
                .classes
                .iter_mut()
                .for_each(|class| class.offers.truncate(LIST_MAX));
        }
        OneMove {
            health: vm.health,
            why: vm.why.as_deref(),
            time_ms: vm.sample.as_ref().map_or(0, |sample| sample.time_ms),
            words: words(vm, &state),
            ratio: state.ratio(),
            state,
        }
    });
    serde_json::to_string(&MigrationFrame { migration }).unwrap_or_default()
}
