//! Other processes that have the target's memory mapped, whose faults would go unseen.

use std::collections::HashSet;
use std::fs;
use std::io;

use rustix::process::{Pid, getpid};

use super::maps::{self, Mapping};
use super::{Memory, Obstacle, process};

/// Who maps any of `memories`, apart from `target`, `known` and this process.
pub(super) fn obstacles(target: Pid, known: &[Pid], memories: &[Memory], cautions: &mut Vec<String>) -> Vec<Obstacle> {
    if memories.is_empty() {
        return Vec::new();
    }
    let not_asked: HashSet<Pid> = known.iter().copied().chain([target, getpid()]).collect();
    let mut found = Vec::new();
    let mut unreadable = Vec::new();
    for pid in process::all().filter(|pid| !not_asked.contains(pid)) {
        let mappings = match mappings(pid) {
            Ok(mappings) => mappings,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                unreadable.push(pid);
                continue;
            }
            // It has ended.
            Err(_) => continue,
        };
        let mapped = memories
            .iter()
            .filter(|memory| mappings.iter().any(|mapping| mapping.has_of(&memory.place)));
        found.extend(mapped.map(|memory| Obstacle::MappedByOther {
            place: memory.place,
            name: memory.name.clone(),
            pid,
            by: process::name(pid.as_raw_pid()),
        }));
    }
    if !unreadable.is_empty() {
        cautions.push(format!(
            "only root (with CAP_SYS_PTRACE) may look at {}: if one of them has the memory mapped, that is not seen, \
             and it finds zeros where pages were taken out",
            listed(&unreadable)
        ));
    }
    found
}

/// The first few, and how many more.
fn listed(pids: &[Pid]) -> String {
    let (named, others) = pids.split_at(pids.len().min(8));
    let named = named
        .iter()
        .map(|pid| format!("{pid} ({})", process::name(pid.as_raw_pid())));
    let mut text = named.collect::<Vec<_>>().join(", ");
    if !others.is_empty() {
        text.push_str(&format!(" and {} more", others.len()));
    }
    format!("processes {text}")
}

fn mappings(pid: Pid) -> io::Result<Vec<Mapping>> {
    let found = maps::read(pid)?;
    if !found.is_empty() {
        return Ok(found);
    }
    // A kernel thread has none; neither has a main thread that has ended before the others.
    let threads = fs::read_dir(format!("/proc/{pid}/task"))?;
    let of_threads = threads
        .flatten()
        .filter_map(|entry| fs::read(entry.path().join("maps")).ok());
    Ok(of_threads
        .map(|text| maps::parse(&text))
        .find(|found| !found.is_empty())
        .unwrap_or_default())
}
