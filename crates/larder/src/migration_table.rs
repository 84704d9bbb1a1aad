//! The moves of VMs on this host, and their progress.

use std::path::Path;

use larder_vm::control::migration::{Direction, MigrationState};
use larder_vm::control::{ControlClientError, fetch_migration};
use larder_vm::vm::find;
use serde_json::Value;

use crate::concurrent::query_each;
use crate::disk_image::format_size;

/// State of a move: the JSON as received, and the fields that this program knows.
pub(crate) type MigrationReply = (Value, MigrationState);

/// Name of a VM, and the result of querying its move.
pub(crate) type MigrationQuery = (String, Result<MigrationReply, ControlClientError>);

/// Queries all processes that move VMs, concurrently; those that have exited meanwhile are left out.
pub(crate) fn query_all() -> Vec<MigrationQuery> {
    let all = find::migration_sockets();
    let asked = query_each(&all, |(_, _, control)| fetch_migration(control));
    let asked = all.into_iter().map(|(vm, ..)| vm).zip(asked);
    asked.filter(|(_, asked)| !matches!(asked, Err(ControlClientError::Missing { .. }))).collect()
}

/// Returns the moves of one VM whose processes answer.
pub(crate) fn find_by_vm(name: &str) -> Vec<MigrationReply> {
    let asked = query_all().into_iter().filter(|(vm, _)| vm == name);
    asked.filter_map(|(_, asked)| asked.ok()).collect()
}

/// Returns the running move whose QEMU listens at `qmp`, if this user can see one.
pub(crate) fn find_by_qemu(qmp: &Path) -> Option<MigrationState> {
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let qmp_path = resolved(qmp);
    let states = query_all().into_iter().filter_map(|(_, asked)| asked.ok());
    let mut states = states.map(|(_, state)| state);
    states.find(|state| !state.phase.has_ended() && resolved(Path::new(&state.qemu)) == qmp_path)
}

/// Formats a move as one line.
pub(crate) fn format_line(state: &MigrationState) -> String {
    let peer = state.peer.as_deref().unwrap_or("another host");
    let preposition = match state.direction {
        Direction::Leaving => "to",
        Direction::Coming => "from",
    };
    let mut parts = vec![format!("{} moves {preposition} {peer}: {}", state.vm, state.summary())];
    if let Some(course) = state.course.as_ref().filter(|_| !state.phase.has_ended()) {
        parts.push(format!("{} of {} remaining", format_size(course.remaining_bytes), format_size(course.total_bytes)));
        parts.push(format!("dirty rate {}/s", format_size(course.dirty_bytes_per_s)));
    }
    if let Some(rates) = state.rates.as_ref().filter(|_| !state.phase.has_ended()) {
        parts.push(format!(
            "{}/s in {}/s, {:.1} CPUs",
            format_size(rates.stream_bytes_per_s),
            format_size(rates.wire_bytes_per_s),
            rates.processors
        ));
    }
    if let Some(delivered) = &state.delivered {
        parts.push(format!("{} delivered", format_size(delivered.raw_bytes)));
    }
    if let Some(ratio) = state.ratio() {
        parts.push(format!("{ratio:.1}x"));
    }
    if let Some(course) = state.course.as_ref().filter(|_| !state.phase.has_ended()) {
        match (&course.verdict, course.expected_seconds) {
            (Some(_), _) => parts.push("will not end at this rate".to_owned()),
            (None, Some(seconds)) => parts.push(format!("{seconds:.0} s left")),
            (None, None) => {}
        }
    }
    parts.extend(state.reason.clone());
    parts.join(", ")
}

/// Formats all moves, one line each.
pub(crate) fn format_lines(all: Vec<MigrationQuery>) -> Vec<String> {
    let told = all.into_iter().map(|(vm, asked)| match asked {
        Ok((_, state)) => format_line(&state),
        Err(error) => format_error(&vm, &error),
    });
    told.collect()
}

/// Formats, as one line, the reason why a move's state is unknown.
pub(crate) fn format_error(vm: &str, error: &ControlClientError) -> String {
    match error {
        ControlClientError::NoListener { path } => format!(
            "{vm}: its move: no process listens on {}: the process that moved it was killed; if the virtual machine is not \
             where it should be, run the same command again; a later move removes the file, or remove it",
            path.display()
        ),
        error => format!("{vm}: its move: {error}"),
    }
}
