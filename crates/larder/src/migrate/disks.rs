//! The disks of a VM that is moved: `larder vm` serves them, and is controlled over its control socket.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use larder_migrate::moving::disks::{DiskServers, HandoverAction, ServedDisk};
use larder_vm::control::state::DiskState;
use larder_vm::control::{ControlClientError, fetch_disks, fetch_hot_ranges, request_move_step, warm_disk};
use larder_vm::vm::{MoveStep, find};

/// Maximum time that a server may be away while it restarts.
const RESTART_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between attempts to reach a server.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The disk servers of this host that this user may control.
#[derive(Default)]
pub(super) struct LocalDiskServers {
    /// Control sockets by the disks' sockets, so that a server's control socket is known even while the server
    /// restarts.
    controls: Mutex<BTreeMap<PathBuf, PathBuf>>,
}

impl DiskServers for LocalDiskServers {
    fn list(&self, sockets: &[PathBuf]) -> Result<Vec<(PathBuf, ServedDisk)>, String> {
        let mut found = Vec::new();
        let mut controls = BTreeMap::new();
        for vm in find::known_vms() {
            let disks = match fetch_disks(&vm.control) {
                Ok((_, disks)) => disks.disks,
                Err(error) if is_unreachable(&error) || matches!(error, ControlClientError::Permission { .. }) => {
                    continue;
                }
                Err(error) => return Err(format!("the server of the disks of {}: {error}", vm.name)),
            };
            for (socket, disk) in pair_with_sockets(disks, sockets) {
                controls.insert(socket.clone(), vm.control.clone());
                found.push((socket, to_served_disk(disk)));
            }
        }
        self.lock_controls().extend(controls);
        Ok(found)
    }

    fn flush_caches(&self, sockets: &[PathBuf]) -> Result<bool, String> {
        let mut is_done = true;
        for control in self.control_paths(sockets, RESTART_TIMEOUT)? {
            is_done &= request_step_with_retries(&control, MoveStep::Settle, false)?;
        }
        Ok(is_done)
    }

    fn hot_ranges(&self, sockets: &[PathBuf]) -> Vec<(PathBuf, String)> {
        let named = self.named_disks(sockets);
        let hot = named.into_iter().map(|(socket, control, disk)| (socket, fetch_hot_ranges(&control, &disk)));
        hot.filter_map(|(socket, ranges)| match ranges {
            Ok(ranges) => Some((socket, ranges)),
            Err(error) => {
                tracing::debug!("the hot ranges of a disk are unknown: {error}");
                None
            }
        })
        .collect()
    }

    fn warm_cache(&self, socket: &Path, ranges: &str) {
        for (_, control, disk) in self.named_disks(&[socket.to_owned()]) {
            if let Err(error) = warm_disk(&control, &disk, ranges) {
                tracing::warn!("the cache of disk {disk} cannot be warmed: {error}");
            }
        }
    }

    fn apply(&self, sockets: &[PathBuf], deed: HandoverAction) -> Result<(), String> {
        let step = match deed {
            HandoverAction::RestoreCaches => MoveStep::Stay,
            HandoverAction::Inactivate => MoveStep::Leave,
            HandoverAction::AwaitIncoming => MoveStep::Expect,
            HandoverAction::Activate => MoveStep::Take,
            HandoverAction::Commit => MoveStep::Keep,
            HandoverAction::RollBack => MoveStep::Yield,
        };
        // A server that has exited has nothing open, does not open the disks if it is restarted, and has no caches in
        // use.
        let exited_counts_as_done = matches!(deed, HandoverAction::RestoreCaches | HandoverAction::RollBack);
        let controls = match exited_counts_as_done {
            true => self.running_control_paths(sockets)?,
            false => self.control_paths(sockets, RESTART_TIMEOUT)?,
        };
        for control in controls {
            while !request_step_with_retries(&control, step, exited_counts_as_done)? {
                thread::sleep(RETRY_INTERVAL);
            }
        }
        Ok(())
    }
}

impl LocalDiskServers {
    fn lock_controls(&self) -> MutexGuard<'_, BTreeMap<PathBuf, PathBuf>> {
        self.controls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the control socket and the name of each of these disks whose server answers.
    fn named_disks(&self, sockets: &[PathBuf]) -> Vec<(PathBuf, PathBuf, String)> {
        let mut named = Vec::new();
        for control in self.control_paths(sockets, Duration::ZERO).unwrap_or_default() {
            let Ok((_, disks)) = fetch_disks(&control) else {
                continue;
            };
            let disks = pair_with_sockets(disks.disks, sockets);
            named.extend(disks.filter_map(|(socket, disk)| Some((socket, control.clone(), disk.name?))));
        }
        named
    }

    /// Returns the control sockets of the servers of all these disks, without duplicates.
    ///
    /// # Errors
    /// A server is not found within `timeout`.
    fn control_paths(&self, sockets: &[PathBuf], timeout: Duration) -> Result<Vec<PathBuf>, String> {
        let deadline = Instant::now() + timeout;
        loop {
            let unknown = {
                let known = self.lock_controls();
                sockets.iter().find(|socket| !known.contains_key(*socket))
            };
            let Some(unknown) = unknown else { break };
            let found = self.list(sockets)?;
            if found.iter().all(|(socket, _)| socket != unknown) {
                if Instant::now() > deadline {
                    return Err(format!(
                        "no `larder vm` serves {}: start it again, with the same file",
                        unknown.display()
                    ));
                }
                thread::sleep(RETRY_INTERVAL);
            }
        }
        Ok(self.known_control_paths(sockets))
    }

    /// Returns the control sockets of those servers of these disks that run, without duplicates.
    ///
    /// # Errors
    /// A server runs and does not answer.
    fn running_control_paths(&self, sockets: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
        let is_known = |socket: &PathBuf| self.lock_controls().contains_key(socket);
        if !sockets.iter().all(is_known) {
            self.list(sockets)?;
        }
        Ok(self.known_control_paths(sockets))
    }

    fn known_control_paths(&self, sockets: &[PathBuf]) -> Vec<PathBuf> {
        let known = self.lock_controls();
        let mut all: Vec<PathBuf> = sockets.iter().filter_map(|socket| known.get(socket).cloned()).collect();
        all.sort();
        all.dedup();
        all
    }
}

/// Has a server take a step; returns true once the step is done. Waits for a server that has exited to be restarted,
/// unless it `may_have_exited`.
fn request_step_with_retries(control: &Path, step: MoveStep, may_have_exited: bool) -> Result<bool, String> {
    let deadline = Instant::now() + RESTART_TIMEOUT;
    loop {
        match request_move_step(control, step) {
            Ok(moved) => return Ok(moved.done),
            Err(ControlClientError::Missing { .. } | ControlClientError::NoListener { .. }) if may_have_exited => {
                return Ok(true);
            }
            Err(error) if is_unreachable(&error) && Instant::now() < deadline => thread::sleep(RETRY_INTERVAL),
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Returns true if no server answers at the socket for now.
fn is_unreachable(error: &ControlClientError) -> bool {
    matches!(
        error,
        ControlClientError::Missing { .. } | ControlClientError::NoListener { .. } | ControlClientError::Busy { .. }
    )
}

/// Pairs each of these sockets with the server's disk that is served there.
fn pair_with_sockets(disks: Vec<DiskState>, sockets: &[PathBuf]) -> impl Iterator<Item = (PathBuf, DiskState)> {
    disks.into_iter().filter_map(|disk| {
        let at = Path::new(&disk.exports.vhost_user.as_ref()?.socket);
        let socket = sockets.iter().find(|socket| is_same_socket(socket, at))?.clone();
        Some((socket, disk))
    })
}

/// Returns true if both paths lead to the same socket.
fn is_same_socket(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino())).ok();
    one == other || identity(one).is_some_and(|found| identity(other) == Some(found))
}

fn to_served_disk(disk: DiskState) -> ServedDisk {
    ServedDisk {
        inode: Path::new(&disk.image).metadata().ok().filter(|it| it.is_file()).map(|it| it.ino()),
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
