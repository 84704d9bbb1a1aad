//! What a browser is told of VMs that are moved, each second: the last that the process said that moves one, which is kept
//! for a while when it has ended.

use std::collections::BTreeMap;
use std::path::PathBuf;

use larder_vm::control::migration::{Direction, MigrationPhase, MigrationState};
use serde::Serialize;

use crate::fleet::Fleet;
use crate::vm::{Health, Vm, shortened};

/// The most of anything that is a list.
const LIST_MAX: usize = 64;

/// A move among others.
#[derive(Clone, Serialize)]
pub(crate) struct MigrationRow {
    /// Of no other move.
    key: String,
    vm: String,
    direction: Direction,
    peer: Option<String>,
    health: Health,
    phase: MigrationPhase,
    words: String,
    reason: Option<String>,
    verdict: Option<String>,
    /// 0 to 1 of the memory that was to go over in this round.
    share: Option<f64>,
    ratio: Option<f64>,
    stream_bytes_per_s: Option<u64>,
    expected_seconds: Option<f64>,
}

/// One move.
#[derive(Serialize)]
struct MigrationFrame<'a> {
    migration: Option<OneMove<'a>>,
}

#[derive(Serialize)]
struct OneMove<'a> {
    health: Health,
    why: Option<&'a str>,
    /// When it was so, in milliseconds since 1970 (UTC).
    time_ms: u64,
    words: String,
    ratio: Option<f64>,
    state: MigrationState,
}

/// What a move is called.
pub(crate) fn key_of(vm: &Vm) -> String {
    shortened(vm.path.file_stem().unwrap_or_default().to_string_lossy().into_owned())
}

/// How a move is, which has ended without a word if its process was killed.
pub(crate) fn words(vm: &Vm, state: &MigrationState) -> String {
    match vm.health {
        Health::Killed => format!("killed, {}", state.words()),
        Health::Stuck => format!("stuck, {}", state.words()),
        _ => state.words(),
    }
}

/// Those that have said something, with what they said.
pub(crate) fn moves(vms: &BTreeMap<PathBuf, Vm>) -> impl Iterator<Item = (&Vm, &str, &MigrationState)> {
    vms.values().filter_map(|vm| {
        let (name, _) = vm.moved.as_ref()?;
        let state = vm.sample.as_ref()?.migration.as_ref()?;
        Some((vm, name.as_str(), state))
    })
}

/// The moves of all VMs, or of one.
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

/// How the VM moves, if it does now, in a few words.
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

/// The move of that key.
pub(crate) fn of_migration(fleet: &Fleet, key: &str) -> String {
    let vms = fleet.vms();
    let found = moves(&vms).find(|(vm, ..)| key_of(vm) == key);
    let migration = found.map(|(vm, _, state)| {
        let mut state = state.clone();
        // They are a few, of a process that is what it says.
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
