//! Search for disk servers that have the memory mapped too: on request, and at intervals.
//!
//! A server that is started while the memory is managed waits until it is registered ([`larder_export::view`]). It
//! touches the memory's file, and inotify reports that. Where the server is not permitted to, it is found after its
//! predecessor has ended, or by the search at intervals.

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

use super::Service;
use crate::guest::Files;
use crate::target::{Obstacle, others_of};
use crate::views::{Looked, View, Views};

/// Interval of the search through all processes without a request.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// After a server has ended, its successor is searched for: the first interval, the maximum interval, and the
/// duration.
const HUNT_MIN: Duration = Duration::from_millis(50);
const HUNT_MAX: Duration = Duration::from_secs(2);
const HUNT_FOR: Duration = Duration::from_secs(60);

/// Requests for inspections of the views.
#[derive(Default)]
pub(super) struct Wish {
    asked: Cell<bool>,
    ended: Cell<bool>,
    raised: Signal,
}

impl Wish {
    /// Requests a search for a server that could not be registered.
    pub(super) fn hunt(&self) {
        self.ended.set(true);
        self.asked.set(true);
        self.raised.raise();
    }

    /// Requests an inspection if a view has ended, or waits to be inspected.
    pub(super) fn look_at(&self, views: &Views) {
        if views.is_empty() {
            return;
        }
        if views.leave_out_ended() {
            self.ended.set(true);
        }
        if self.ended.get() || !views.to_look(false).is_empty() {
            self.asked.set(true);
            self.raised.raise();
        }
    }
}

/// Notifier that reports when the memory's files are touched (inotify).
pub(super) struct Bell(Option<OwnedFd>);

impl Bell {
    /// Makes a notifier for these files.
    pub(super) fn new(files: &Files) -> Self {
        let made = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK);
        let watched = made.map_err(std::io::Error::from).and_then(|bell| {
            for path in files.paths() {
                inotify::add_watch(&bell, path, inotify::WatchFlags::ATTRIB)?;
            }
            Ok(bell)
        });
        if let Err(error) = &watched {
            tracing::debug!("new disk servers of the VM are not reported by inotify: {error}");
        }
        Self(watched.ok())
    }

    async fn rings(&self, on: &Loop) {
        match &self.0 {
            Some(bell) if on.readable(bell.as_fd()).await.is_ok() => {
                let mut read = [0; 4096];
                while rustix::io::read(bell, &mut read).is_ok_and(|count| count > 0) {}
            }
            _ => std::future::pending().await,
        }
    }
}

/// Searches for servers as long as the service runs.
pub(super) async fn watch(on: Loop, bell: Bell, service: Weak<Service>) {
    let mut told = HashSet::new();
    let mut hunt: Option<(Instant, Duration)> = None;
    loop {
        let pause = hunt.map_or(LOOK_EVERY, |(_, pause)| pause);
        let Some(of) = service.upgrade().filter(|of| !of.is_ending()) else {
            return;
        };
        let asked = async {
            of.views.raised.when(|| of.views.asked.take() || of.is_ending()).await;
            false
        };
        let timed = async {
            on.sleep(pause).await;
            true
        };
        let rung = async {
            bell.rings(&on).await;
            true
        };
        let others = pin!(first_of(timed, rung));
        let all_processes = first_of(asked, others).await;
        if of.is_ending() {
            return;
        }
        if of.views.ended.take() {
            hunt = Some((Instant::now() + HUNT_FOR, HUNT_MIN));
        }
        for (pid, obstacle) in look(&on, &of, all_processes || hunt.is_some()).await {
            if told.insert(pid) {
                tracing::error!(
                    "{obstacle}. It has mapped the memory while Larder manages it: end that process, or detach"
                );
            }
        }
        hunt = hunt.and_then(|(until, pause)| {
            let goes_on = Instant::now() < until;
            goes_on.then(|| (until, (pause * 2).min(HUNT_MAX)))
        });
    }
}

/// Inspects the views that request it, and all processes if `all_processes` is set. Returns the processes that have
/// the memory mapped and cannot be registered.
pub(super) async fn look(on: &Loop, service: &Rc<Service>, all_processes: bool) -> Vec<(Pid, Obstacle)> {
    let asked = service.attached.borrow().as_ref().map(|attached| {
        let views = attached.pager.guest().views();
        let regions = attached.pager.regions().to_vec();
        (attached.pid(), regions, views.to_look(all_processes), views.pids())
    });
    let Some((pid, regions, to_look, known)) = asked else {
        return Vec::new();
    };
    // None of this may delay faults, or wait for a thread that waits for the pager.
    let looked = on.run_blocking(move || {
        let looked: Vec<Looked> = to_look
            .into_iter()
            .filter_map(|of| Looked::now(of, &regions).ok())
            .collect();
        let mut begun = Vec::new();
        let mut strangers = Vec::new();
        let mut is_complete = false;
        if all_processes {
            let others = others_of(pid, &regions);
            is_complete = others.is_complete;
            for viewer in others.viewers.into_iter().filter(|viewer| !known.contains(&viewer.pid)) {
                let view = View::begin(viewer).map_err(|error| error.to_string());
                let view = view.and_then(|view| {
                    let looked = view.look(&regions).map_err(|error| error.to_string())?;
                    Ok((view, looked))
                });
                begun.push(view);
            }
            strangers.extend(others.obstacles.into_iter().filter_map(|obstacle| match obstacle {
                Obstacle::MappedByOther { pid, .. } => Some((pid, obstacle)),
                _ => None,
            }));
        }
        (looked, begun, strangers, is_complete)
    });
    let Ok((looked, begun, strangers, mut is_complete)) = looked.await else {
        return Vec::new();
    };
    let mut attached = service.attached.borrow_mut();
    let Some(attached) = attached.as_mut().filter(|_| !service.is_ending()) else {
        // Meanwhile the process was detached from, or has ended.
        begun.into_iter().flatten().for_each(|(view, _)| view.let_go());
        return Vec::new();
    };
    let views = attached.pager.guest().views();
    looked.into_iter().for_each(|looked| views.looked(looked));
    for begun in begun {
        let added = begun.and_then(|(view, looked)| {
            let added = views.add(view, looked, true);
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
