//! The disks of a VM that is moved: `larder vm` serves them, and is controlled over its control socket.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use larder_migrate::moving::disks::{Deed, DiskServers, ServedDisk};
use larder_vm::control::state::DiskState;
use larder_vm::control::{FetchError, fetch_disks, fetch_hot, move_vm, warm_disk};
use larder_vm::vm::{VmMove, find};

/// Maximum time that a server may be away while it restarts.
const RESTART_MAX: Duration = Duration::from_secs(20);
/// Interval between attempts to reach a server.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The disk servers of this host that this user may control.
#[derive(Default)]
pub(super) struct LocalServers {
    /// Control sockets by the disks' sockets, so that a server's control socket is known even while the server
    /// restarts.
    controls: Mutex<BTreeMap<PathBuf, PathBuf>>,
}

impl DiskServers for LocalServers {
    fn look(&self, sockets: &[PathBuf]) -> Result<Vec<(PathBuf, ServedDisk)>, String> {
        let mut found = Vec::new();
        let mut controls = BTreeMap::new();
        for vm in find::vms() {
            let disks = match fetch_disks(&vm.control) {
                Ok((_, disks)) => disks.disks,
                Err(error) if is_away(&error) || matches!(error, FetchError::Permission { .. }) => continue,
                Err(error) => return Err(format!("the server of the disks of {}: {error}", vm.name)),
            };
            for (socket, disk) in at(disks, sockets) {
                controls.insert(socket.clone(), vm.control.clone());
                found.push((socket, described(disk)));
            }
        }
        self.controls().extend(controls);
        Ok(found)
    }

    fn settle(&self, sockets: &[PathBuf]) -> Result<bool, String> {
        let mut is_done = true;
        for control in self.controls_of(sockets, RESTART_MAX)? {
            is_done &= patiently(&control, VmMove::Settle, false)?;
        }
        Ok(is_done)
    }

    fn hot(&self, sockets: &[PathBuf]) -> Vec<(PathBuf, String)> {
        let named = self.named(sockets);
        let hot = named
            .into_iter()
            .map(|(socket, control, disk)| (socket, fetch_hot(&control, &disk)));
        hot.filter_map(|(socket, ranges)| match ranges {
            Ok(ranges) => Some((socket, ranges)),
            Err(error) => {
                tracing::debug!("the hot ranges of a disk are unknown: {error}");
                None
            }
        })
        .collect()
    }

    fn warm(&self, socket: &Path, ranges: &str) {
        for (_, control, disk) in self.named(&[socket.to_owned()]) {
            if let Err(error) = warm_disk(&control, &disk, ranges) {
                tracing::warn!("the cache of disk {disk} cannot be warmed: {error}");
            }
        }
    }

    fn have(&self, sockets: &[PathBuf], deed: Deed) -> Result<(), String> {
        let step = match deed {
            Deed::Stay => VmMove::Stay,
            Deed::Leave => VmMove::Leave,
            Deed::GiveBack => VmMove::Expect,
            Deed::Take => VmMove::Take,
            Deed::Keep => VmMove::Keep,
            Deed::Yield => VmMove::Yield,
        };
        // A server that has exited has nothing open, does not open the disks if it is restarted, and has no caches in
        // use.
        let is_idle = matches!(deed, Deed::Stay | Deed::Yield);
        let controls = match is_idle {
            true => self.controls_that_are_there(sockets)?,
            false => self.controls_of(sockets, RESTART_MAX)?,
        };
        for control in controls {
            while !patiently(&control, step, is_idle)? {
                thread::sleep(ASK_AGAIN);
            }
        }
        Ok(())
    }
}

impl LocalServers {
    fn controls(&self) -> MutexGuard<'_, BTreeMap<PathBuf, PathBuf>> {
        self.controls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the control socket and the name of each of these disks whose server answers.
    fn named(&self, sockets: &[PathBuf]) -> Vec<(PathBuf, PathBuf, String)> {
        let mut named = Vec::new();
        for control in self.controls_of(sockets, Duration::ZERO).unwrap_or_default() {
            let Ok((_, disks)) = fetch_disks(&control) else {
                continue;
            };
            let disks = at(disks.disks, sockets);
            named.extend(disks.filter_map(|(socket, disk)| Some((socket, control.clone(), disk.name?))));
        }
        named
    }

    /// Returns the control sockets of the servers of all these disks, without duplicates.
    ///
    /// # Errors
    /// A server is not found within `patience`.
    fn controls_of(&self, sockets: &[PathBuf], patience: Duration) -> Result<Vec<PathBuf>, String> {
        let until = Instant::now() + patience;
        loop {
            let unknown = {
                let known = self.controls();
                sockets.iter().find(|socket| !known.contains_key(*socket))
            };
            let Some(unknown) = unknown else { break };
            let found = self.look(sockets)?;
            if found.iter().all(|(socket, _)| socket != unknown) {
                if Instant::now() > until {
                    return Err(format!(
                        "no `larder vm` serves {}: start it again, with the same file",
                        unknown.display()
                    ));
                }
                thread::sleep(ASK_AGAIN);
            }
        }
        Ok(self.known(sockets))
    }

    /// Returns the control sockets of those servers of these disks that run, without duplicates.
    ///
    /// # Errors
    /// A server runs and does not answer.
    fn controls_that_are_there(&self, sockets: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
        let is_known = |socket: &PathBuf| self.controls().contains_key(socket);
        if !sockets.iter().all(is_known) {
            self.look(sockets)?;
        }
        Ok(self.known(sockets))
    }

    fn known(&self, sockets: &[PathBuf]) -> Vec<PathBuf> {
        let known = self.controls();
        let mut all: Vec<PathBuf> = sockets.iter().filter_map(|socket| known.get(socket).cloned()).collect();
        all.sort();
        all.dedup();
        all
    }
}

/// Has a server take a step; returns true once the step is done. Waits for a server that has exited to be restarted,
/// unless it `may_have_ended`.
fn patiently(control: &Path, step: VmMove, may_have_ended: bool) -> Result<bool, String> {
    let until = Instant::now() + RESTART_MAX;
    loop {
        match move_vm(control, step) {
            Ok(moved) => return Ok(moved.done),
            Err(FetchError::Missing { .. } | FetchError::Dead { .. }) if may_have_ended => return Ok(true),
            Err(error) if is_away(&error) && Instant::now() < until => thread::sleep(ASK_AGAIN),
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Returns true if no server answers at the socket for now.
fn is_away(error: &FetchError) -> bool {
    matches!(
        error,
        FetchError::Missing { .. } | FetchError::Dead { .. } | FetchError::Busy { .. }
    )
}

/// Pairs each of these sockets with the server's disk that is served there.
fn at(disks: Vec<DiskState>, sockets: &[PathBuf]) -> impl Iterator<Item = (PathBuf, DiskState)> {
    disks.into_iter().filter_map(|disk| {
        let at = Path::new(&disk.exports.vhost_user.as_ref()?.socket);
        let socket = sockets.iter().find(|socket| is_same(socket, at))?.clone();
        Some((socket, disk))
    })
}

/// Returns true if both paths lead to the same socket.
fn is_same(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino())).ok();
    one == other || place(one).is_some_and(|found| place(other) == Some(found))
}

fn described(disk: DiskState) -> ServedDisk {
    ServedDisk {
        inode: Path::new(&disk.image)
            .metadata()
            .ok()
            .filter(|it| it.is_file())
            .map(|it| it.ino()),
        image: disk.image,
        size: disk.size,
        block_size: disk.block_size,
        serial: disk.serial,
        format: disk.format.name().to_owned(),
        read_only: disk.read_only,
        shared: disk.shared,
        away: disk.away,
    }
}
