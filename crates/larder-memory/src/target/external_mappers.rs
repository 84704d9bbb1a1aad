//! Other processes that have the target's memory mapped: Larder's own, which can be served, and others, whose faults
//! would not be reported.

use std::fs;
use std::io;

use rustix::process::{Pid, getpid};

use super::descriptors::Descriptors;
use super::maps::{self, Mapping};
use super::{DiskServerProcess, MappingLocation, Obstacle, process};

/// Other processes that map memory of the target.
#[derive(Default)]
pub struct ExternalMappers {
    /// Larder's own servers.
    pub servers: Vec<DiskServerProcess>,
    /// All others, as obstacles.
    pub obstacles: Vec<Obstacle>,
    /// All processes were inspected, apart from those that only root may inspect.
    pub is_complete: bool,
}

/// Finds the processes that map any of `memories`, which are locations and names, apart from `target` and this
/// process.
pub(super) fn find(target: Pid, memories: &[(MappingLocation, &str)], warnings: &mut Vec<String>) -> ExternalMappers {
    let mut mappers = ExternalMappers { is_complete: true, ..ExternalMappers::default() };
    if memories.is_empty() {
        return mappers;
    }
    let mut unreadable = Vec::new();
    for pid in process::all().filter(|pid| ![target, getpid()].contains(pid)) {
        let mappings = match mappings(pid) {
            Ok(mappings) => mappings,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                unreadable.push(pid);
                continue;
            }
            Err(error) => {
                mappers.is_complete &= process::is_exit_error(&error);
                continue;
            }
        };
        let is_mapped = |(place, _): &&(MappingLocation, &str)| mappings.iter().any(|mapping| mapping.overlaps(place));
        let mapped: Vec<&(MappingLocation, &str)> = memories.iter().filter(is_mapped).collect();
        if mapped.is_empty() {
            continue;
        }
        match Descriptors::read(pid).map(|all| all.view_memory()) {
            Ok(Some(descriptor)) => {
                mappers.servers.push(DiskServerProcess { pid, descriptor });
                continue;
            }
            Ok(None) => {}
            // No pager with the same rights has served that process.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => mappers.is_complete &= process::is_exit_error(&error),
        }
        mappers.obstacles.extend(mapped.into_iter().map(|(location, name)| Obstacle::MappedByOther {
            location: *location,
            name: (*name).to_owned(),
            pid,
            process_name: process::name(pid.as_raw_pid()),
        }));
    }
    if !unreadable.is_empty() {
        warnings.push(format!(
            "only root (with CAP_SYS_PTRACE) may inspect {}: if one of them has the memory mapped, that is not detected, \
             and it reads zeros where pages are evicted",
            format_pids(&unreadable)
        ));
    }
    mappers
}

/// Lists the first few processes, and the number of the others.
fn format_pids(pids: &[Pid]) -> String {
    let (named, omitted) = pids.split_at(pids.len().min(8));
    let named = named.iter().map(|pid| format!("{pid} ({})", process::name(pid.as_raw_pid())));
    let mut text = named.collect::<Vec<_>>().join(", ");
    if !omitted.is_empty() {
        text.push_str(&format!(" and {} more", omitted.len()));
    }
    format!("processes {text}")
}

fn mappings(pid: Pid) -> io::Result<Vec<Mapping>> {
    let found = maps::read(pid)?;
    if !found.is_empty() {
        return Ok(found);
    }
    // A kernel thread has no mappings. A main thread that has ended before the others has none either.
    let threads = fs::read_dir(format!("/proc/{pid}/task"))?;
    let thread_maps = threads.flatten().filter_map(|entry| fs::read(entry.path().join("maps")).ok());
    Ok(thread_maps.map(|text| maps::parse(&text)).find(|found| !found.is_empty()).unwrap_or_default())
}
