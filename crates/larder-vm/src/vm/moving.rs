//! A VM's disks move to another host with the VM, and from there.
//!
//! The host that has the images at any moment is the one whose server has them open; for a moment there is none.
//!
//! ```text
//! the VM's old host                      the VM's new host
//!                                        AWAY: started with a marker; no image is open
//! HERE: settle, while the guest runs
//! the guest has stopped
//! leave: the queues are where QEMU assumes them
//!        all data is on the image, durably
//!        every cache is stale
//!        the marker is created
//!        images are closed, locks are released
//! AWAY, and only now `leave` is answered
//!                                        take: images are opened and locked; the marker remains
//!                                        VISIT: a restarted server is AWAY
//!                                        keep: the marker is removed
//!                                        HERE
//!                                        the guest runs
//! ```
//!
//! - A server that dies before the marker is created restarts with the images open, and its guest continues; after
//!   that, it restarts without images. The marker precedes the answer to `leave`, so the answer proves that no server
//!   of this host opens the images again by itself, not after a kill and not after a power loss.
//! - `leave` is refused for a guest whose QEMU does not know the positions of its queues. QEMU gets them from the
//!   server; if the server is killed in the moment in which the guest stops, QEMU migrates a guess, and on the other
//!   host requests would be completed twice, or never. On this host the next server knows the positions from the
//!   in-flight region, so the VM continues here.
//! - Caches are invalidated before the marker is created: one that survives fits no disk
//!   ([`larder_cache::Cache::detach`]). In addition, images opened by `take` use no old cached data, not even from a
//!   cache that was not closed.
//! - The marker is removed before the guest runs. So every server that is started here finds the data that the guest
//!   has written, also after a power loss, and no server takes it for another host's. If the guest does not run here
//!   after all, `yield` ends the visit: nothing was written.
//! - Each step may be requested again, whatever happened to the answer.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::timeout;
use utoipa::ToSchema;

use super::Vm;
use crate::disk::{DiskAction, DiskChange};

/// Longest time for a step: steps write little data, so only stuck storage takes longer.
const STEP_TIME_MAX: Duration = Duration::from_secs(60);

/// A step of a move. Each step may be requested again, and then does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MoveStep {
    /// The VM is about to leave: write-back caches write their dirty data to the disks, and become write-through.
    Settle,
    /// The outgoing move is aborted: the caches are write-back again.
    Stay,
    /// The guest is stopped here, and will run on another host with the state that QEMU migrated: the images are
    /// closed. Refused if QEMU cannot know the positions of its queues.
    Leave,
    /// No guest of the VM is on this host, or it has not run. Another host may have one, without state from this
    /// host: the images are closed.
    Expect,
    /// The VM arrives: the images are opened.
    Take,
    /// The guest runs here, or is about to, or no other host has it: the images are opened, and belong to this host.
    Keep,
    /// The incoming move is aborted: the images that `take` has opened are closed.
    Yield,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MoveStepResult {
    /// The step is complete; otherwise it continues, and may be requested again.
    pub done: bool,
}

impl Vm {
    pub(super) fn apply_step(&mut self, step: MoveStep) -> Result<(), String> {
        match step {
            MoveStep::Settle => self.apply_to_disks(DiskAction::FlushCache)?,
            MoveStep::Stay => self.apply_to_disks(DiskAction::RestoreCache)?,
            MoveStep::Leave => self.inactivate(true)?,
            MoveStep::Expect => self.inactivate(false)?,
            MoveStep::Take => self.activate()?,
            MoveStep::Keep => {
                self.activate()?;
                self.marker.remove().map_err(|error| error.to_string())?;
            }
            MoveStep::Yield => self.roll_back()?,
        }
        Ok(())
    }

    fn inactivate(&mut self, migrates_state: bool) -> Result<(), String> {
        if self.is_inactive {
            // The previous request may not have waited until all images were closed.
            return self.apply_to_disks(DiskAction::Close);
        }
        // This check comes before anything is given up.
        if let Err(error) = self.apply_to_disks(DiskAction::Quiesce { migrates_state }) {
            self.apply_to_disks(DiskAction::Resume)?;
            return Err(error);
        }
        let why = "its VM has moved to another host";
        let released = self
            .apply_to_disks(DiskAction::Release)
            .and_then(|()| self.marker.create(why).map_err(|error| error.to_string()));
        if let Err(error) = released {
            let removed = self.marker.remove().map_err(|error| error.to_string());
            // Disks whose caches were detached run without them until the server is restarted.
            removed.and_then(|()| self.apply_to_disks(DiskAction::Resume)).map_err(|worse| {
                format!("{error}; and then: {worse}: the disks are paused until their server is restarted")
            })?;
            return Err(error);
        }
        // From here on a restarted server opens no images.
        self.is_inactive = true;
        tracing::info!("the VM has moved to another host, and its disks with it");
        if let Err(error) = self.apply_to_disks(DiskAction::Close) {
            tracing::error!("an image was not closed properly, but has all flushed data: {error}");
            return Err(error);
        }
        Ok(())
    }

    fn activate(&mut self) -> Result<(), String> {
        if !self.is_inactive {
            return Ok(());
        }
        if let Err(error) = self.apply_to_disks(DiskAction::Open) {
            // Nothing was written, so a failed close loses nothing.
            if let Err(closing) = self.apply_to_disks(DiskAction::Close) {
                tracing::warn!("a disk that was opened for a failed move could not be closed: {closing}");
            }
            return Err(error);
        }
        self.apply_to_disks(DiskAction::Resume)?;
        self.is_inactive = false;
        tracing::info!("the VM's disks are open here");
        Ok(())
    }

    fn roll_back(&mut self) -> Result<(), String> {
        let is_uncommitted = self.marker.exists().map_err(|error| error.to_string())?;
        if self.is_inactive {
            // An opening that took too long may have completed after its request timed out.
            return self.apply_to_disks(DiskAction::Close);
        }
        if is_uncommitted {
            self.apply_to_disks(DiskAction::Close)?;
            self.is_inactive = true;
            tracing::info!("the VM does not arrive, and its disks are closed here for its old host");
        }
        Ok(())
    }

    /// Has all disks perform a step concurrently.
    fn apply_to_disks(&self, action: DiskAction) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|error| format!("no requests can be sent to the disks: {error}"))?;
        runtime.block_on(async {
            let mut actions = JoinSet::new();
            for disk in &self.disks {
                let (name, inquiry) = (disk.name.clone(), disk.inquiry.clone());
                actions.spawn(async move {
                    match timeout(STEP_TIME_MAX, inquiry.change(DiskChange::Move(action))).await {
                        Ok(Some(Ok(_))) => Ok(()),
                        Ok(Some(Err(error))) => Err(format!("disk {name}: {error}")),
                        Ok(None) => Err(format!("disk {name}: it is being closed")),
                        Err(_) => Err(format!(
                            "disk {name}: it has not answered for {} s; is its storage stuck?",
                            STEP_TIME_MAX.as_secs()
                        )),
                    }
                });
            }
            let mut result = Ok(());
            while let Some(ended) = actions.join_next().await {
                let ended = ended.unwrap_or_else(|error| Err(error.to_string()));
                result = result.and(ended);
            }
            result
        })
    }
}
