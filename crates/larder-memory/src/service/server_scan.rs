//! Search for disk servers that have the memory mapped too: on request, and at intervals.
//!
//! A server that is started while the memory is managed waits until it is registered
//! ([`larder_export::external_mapping`]). It touches the memory's file, and inotify reports that. Where the server is
//! not permitted to, it is found after its predecessor has ended, or by the search at intervals.

use std::cell::Cell;
use std::collections::HashSet;
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use larder_block::Loop;
use larder_block::signal::{Signal, first_of};
use rustix::fs::inotify;
use rustix::process::Pid;

use super::PagerService;
use crate::external_mappings::{ExternalMapping, ExternalMappings, MappingScan};
use crate::guest::RegionFiles;
use crate::target::{Obstacle, external_mappers_of};

/// Interval of the search through all processes without a request.
const SCAN_INTERVAL: Duration = Duration::from_secs(30);
/// After a server has ended, its successor is searched for: the first interval, the maximum interval, and the
/// duration.
const SEARCH_INTERVAL_MIN: Duration = Duration::from_millis(50);
const SEARCH_INTERVAL_MAX: Duration = Duration::from_secs(2);
const SEARCH_DURATION: Duration = Duration::from_secs(60);

/// Requests for inspections of the views.
#[derive(Default)]
pub(super) struct ScanRequests {
    requested: Cell<bool>,
    server_ended: Cell<bool>,
    signal: Signal,
}

impl ScanRequests {
    /// Requests a search for a server that could not be registered.
    pub(super) fn request_search(&self) {
        self.server_ended.set(true);
        self.requested.set(true);
        self.signal.raise();
    }

    /// Requests an inspection if a view has ended, or waits to be inspected.
    pub(super) fn request_if_needed(&self, mappings: &ExternalMappings) {
        if mappings.is_empty() {
            return;
        }
        if mappings.remove_exited() {
            self.server_ended.set(true);
        }
        if self.server_ended.get() || !mappings.scan_requests(false).is_empty() {
            self.requested.set(true);
            self.signal.raise();
        }
    }
}

/// Notifier that reports when the memory's files are touched (inotify).
pub(super) struct FileWatch(Option<OwnedFd>);

impl FileWatch {
    /// Makes a notifier for these files.
    pub(super) fn new(files: &RegionFiles) -> Self {
        let made = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK);
        let watched = made.map_err(std::io::Error::from).and_then(|watch| {
            for path in files.paths() {
                inotify::add_watch(&watch, path, inotify::WatchFlags::ATTRIB)?;
            }
            Ok(watch)
        });
        if let Err(error) = &watched {
            tracing::debug!("new disk servers of the VM are not reported by inotify: {error}");
        }
        Self(watched.ok())
    }

    async fn touched(&self, on: &Loop) {
        match &self.0 {
            Some(inotify) if on.readable(inotify.as_fd()).await.is_ok() => {
                let mut read = [0; 4096];
                while rustix::io::read(inotify, &mut read).is_ok_and(|count| count > 0) {}
            }
            _ => std::future::pending().await,
        }
    }
}

/// Searches for servers as long as the service runs.
pub(super) async fn watch(on: Loop, file_watch: FileWatch, service: Weak<PagerService>) {
    let mut reported = HashSet::new();
    let mut search: Option<(Instant, Duration)> = None;
    loop {
        let pause = search.map_or(SCAN_INTERVAL, |(_, pause)| pause);
        let Some(of) = service.upgrade().filter(|of| !of.is_ending()) else {
            return;
        };
        let requested = async {
            of.scan_requests.signal.when(|| of.scan_requests.requested.take() || of.is_ending()).await;
            false
        };
        let timed = async {
            on.sleep(pause).await;
            true
        };
        let touched = async {
            file_watch.touched(&on).await;
            true
        };
        let others = pin!(first_of(timed, touched));
        let all_processes = first_of(requested, others).await;
        if of.is_ending() {
            return;
        }
        if of.scan_requests.server_ended.take() {
            search = Some((Instant::now() + SEARCH_DURATION, SEARCH_INTERVAL_MIN));
        }
        for (pid, obstacle) in scan(&on, &of, all_processes || search.is_some()).await {
            if reported.insert(pid) {
                tracing::error!(
                    "{obstacle}. It has mapped the memory while Larder manages it: end that process, or detach"
                );
            }
        }
        search = search.and_then(|(until, pause)| {
            let is_searching = Instant::now() < until;
            is_searching.then(|| (until, (pause * 2).min(SEARCH_INTERVAL_MAX)))
        });
    }
}

/// Inspects the views that request it, and all processes if `all_processes` is set. Returns the processes that have
/// the memory mapped and cannot be registered.
pub(super) async fn scan(on: &Loop, service: &Rc<PagerService>, all_processes: bool) -> Vec<(Pid, Obstacle)> {
    let snapshot = service.attached.borrow().as_ref().map(|attached| {
        let mappings = attached.pager.guest().external_mappings();
        let regions = attached.pager.regions().to_vec();
        (attached.pid(), regions, mappings.scan_requests(all_processes), mappings.pids())
    });
    let Some((pid, regions, to_look, known)) = snapshot else {
        return Vec::new();
    };
    // None of this may delay faults, or wait for a thread that waits for the pager.
    let scanned = on.run_blocking(move || {
        let scans: Vec<MappingScan> =
            to_look.into_iter().filter_map(|of| MappingScan::perform(of, &regions).ok()).collect();
        let mut attached_servers = Vec::new();
        let mut unmanaged = Vec::new();
        let mut is_complete = false;
        if all_processes {
            let others = external_mappers_of(pid, &regions);
            is_complete = others.is_complete;
            for viewer in others.servers.into_iter().filter(|server| !known.contains(&server.pid)) {
                let mapping = ExternalMapping::attach(viewer).map_err(|error| error.to_string());
                let view = mapping.and_then(|view| {
                    let scan = view.scan(&regions).map_err(|error| error.to_string())?;
                    Ok((view, scan))
                });
                attached_servers.push(view);
            }
            unmanaged.extend(others.obstacles.into_iter().filter_map(|obstacle| match obstacle {
                Obstacle::MappedByOther { pid, .. } => Some((pid, obstacle)),
                _ => None,
            }));
        }
        (scans, attached_servers, unmanaged, is_complete)
    });
    let Ok((scans, begun, strangers, mut is_complete)) = scanned.await else {
        return Vec::new();
    };
    let mut attached = service.attached.borrow_mut();
    let Some(attached) = attached.as_mut().filter(|_| !service.is_ending()) else {
        // Meanwhile the process was detached from, or has ended.
        begun.into_iter().flatten().for_each(|(mapping, _)| mapping.detach());
        return Vec::new();
    };
    let mappings = attached.pager.guest().external_mappings();
    scans.into_iter().for_each(|scan| mappings.register_scan(scan));
    for server in begun {
        let added = server.and_then(|(mapping, scan)| {
            let added = mappings.add(mapping, scan, true);
            added.map_err(|error| error.to_string())
        });
        if let Err(error) = added {
            is_complete = false;
            // The server still waits, and is found again.
            tracing::warn!("a disk server of the VM is not registered, and its requests wait: {error}");
        }
    }
    if is_complete {
        attached.pager.pause_evictions(false);
    }
    strangers
}
