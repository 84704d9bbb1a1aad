//! The moves of VMs on this host, and their progress.

use std::path::Path;

use larder_vm::control::migration::{Direction, MigrationState};
use larder_vm::control::{FetchError, fetch_migration};
use larder_vm::vm::find;
use serde_json::Value;

use crate::disk_image::human;

/// State of a move: the JSON as received, and the fields that this program knows.
pub(crate) type Told = (Value, MigrationState);

/// Name of a VM, and the result of querying its move.
pub(crate) type Asked = (String, Result<Told, FetchError>);

/// Queries all processes that move VMs, concurrently; those that have exited meanwhile are left out.
pub(crate) fn ask_all() -> Vec<Asked> {
    let all = find::moves();
    let asked: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = all
            .iter()
            .map(|(_, _, control)| scope.spawn(move || fetch_migration(control)))
            .collect();
        // A panic in a thread aborts the process, so `join` does not fail.
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let asked = all.into_iter().map(|(vm, ..)| vm).zip(asked);
    asked
        .filter(|(_, asked)| !matches!(asked, Err(FetchError::Missing { .. })))
        .collect()
}

/// Returns the moves of one VM whose processes answer.
pub(crate) fn of_vm(name: &str) -> Vec<Told> {
    let asked = ask_all().into_iter().filter(|(vm, _)| vm == name);
    asked.filter_map(|(_, asked)| asked.ok()).collect()
}

/// Returns the running move whose QEMU listens at `qmp`, if this user can see one.
pub(crate) fn of_qemu(qmp: &Path) -> Option<MigrationState> {
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let wanted = resolved(qmp);
    let states = ask_all().into_iter().filter_map(|(_, asked)| asked.ok());
    let mut states = states.map(|(_, state)| state);
    states.find(|state| !state.phase.is_over() && resolved(Path::new(&state.qemu)) == wanted)
}

/// Formats a move as one line.
pub(crate) fn line(state: &MigrationState) -> String {
    let peer = state.peer.as_deref().unwrap_or("another host");
    let way = match state.direction {
        Direction::Leaving => "to",
        Direction::Coming => "from",
    };
    let mut parts = vec![format!("{} moves {way} {peer}: {}", state.vm, state.words())];
    if let Some(course) = state.course.as_ref().filter(|_| !state.phase.is_over()) {
        parts.push(format!(
            "{} of {} remaining",
            human(course.remaining_bytes),
            human(course.total_bytes)
        ));
        parts.push(format!("dirty rate {}/s", human(course.dirty_bytes_per_s)));
    }
    if let Some(rates) = state.rates.as_ref().filter(|_| !state.phase.is_over()) {
        parts.push(format!(
            "{}/s in {}/s, {:.1} CPUs",
            human(rates.stream_bytes_per_s),
            human(rates.wire_bytes_per_s),
            rates.processors
        ));
    }
    if let Some(delivered) = &state.delivered {
        parts.push(format!("{} delivered", human(delivered.raw_bytes)));
    }
    if let Some(ratio) = state.ratio() {
        parts.push(format!("{ratio:.1}x"));
    }
    if let Some(course) = state.course.as_ref().filter(|_| !state.phase.is_over()) {
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
pub(crate) fn lines(all: Vec<Asked>) -> Vec<String> {
    let told = all.into_iter().map(|(vm, asked)| match asked {
        Ok((_, state)) => line(&state),
        Err(error) => trouble(&vm, &error),
    });
    told.collect()
}

/// Formats, as one line, the reason why a move's state is unknown.
pub(crate) fn trouble(vm: &str, error: &FetchError) -> String {
    match error {
        FetchError::Dead { path } => format!(
            "{vm}: its move: no process listens on {}: the process that moved it was killed; if the virtual machine is not \
             where it should be, run the same command again; a later move removes the file, or remove it",
            path.display()
        ),
        error => format!("{vm}: its move: {error}"),
    }
}
