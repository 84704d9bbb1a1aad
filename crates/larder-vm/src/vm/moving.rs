//! A VM's disks go to another host with the VM, and come from there.
//!
//! Who has the images, at every moment, is whoever has them open: one server, or for a moment none.
//!
//! ```text
//! the VM's old host                      the VM's new host
//!                                        AWAY: started with a note that says so; no image is open
//! HERE: settle, while the guest runs
//! its guest has stopped
//! leave: its queues are where its QEMU thinks
//!        all is on the image, durably
//!        no cache is believed any more
//!        the note is made
//!        images are closed, locks go
//! AWAY, and only now that is answered
//!                                        take: images are opened and locked; the note stays
//!                                        VISIT: a server that is started again is AWAY
//!                                        keep: the note goes
//!                                        HERE
//!                                        its guest runs
//! ```
//!
//! - Before the note is made a server that dies comes back with the images open, and its guest goes on; after it, it comes
//!   back with none. The answer to `leave` follows the note, so whoever has it knows that no server of this host opens them
//!   again by itself, not after a kill and not after a loss of power.
//! - Nothing is left of a guest whose QEMU does not know how far its queues are: it has nobody to ask if the server is killed
//!   in the moment in which the guest stops, takes a guess along, and the guest would be answered twice elsewhere, or never.
//!   Here the next server knows it from the notes of requests in flight. So `leave` is refused, and the VM goes on here.
//! - Caches are given up before the note is made: a cache that survives fits no disk ([`larder_cache::Cache::leave`]). What
//!   is opened by `take` believes no cache besides: not one that was not closed, either.
//! - The note goes before the guest runs: what it has written is found by every server that is started here, also after a
//!   loss of power, and is never taken for another host's. A visit ends with `yield`, if the guest does not run here after
//!   all: nothing was written.
//! - Each step may be asked for again, whatever became of the answer.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::timeout;
use utoipa::ToSchema;

use super::Vm;
use crate::disk::{DiskChange, DiskMove};

/// How long a step may take: what is written by it is little, unless storage is stuck.
const STEP_TIME_MAX: Duration = Duration::from_secs(60);

/// A step of a move. Each may be asked for again, and does nothing then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmMove {
    /// It is about to go: caches in write-back give the disks what only they have, and write through.
    Settle,
    /// It stays: they write back again.
    Stay,
    /// Its guest has stopped here, and will run on another host with what its QEMU took along: the images are closed. Refused
    /// where QEMU cannot know how far its queues are.
    Leave,
    /// There is no guest of it here, or it has not run, and there may be one on another host that took nothing along from
    /// here: the images are closed.
    Expect,
    /// It comes: the images are opened.
    Take,
    /// Its guest runs here, or is about to, or no other host has it: the images are opened, and this host's.
    Keep,
    /// It does not come after all: what `take` has opened is closed.
    Yield,
}

/// What has become of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Moved {
    /// It is done; else it goes on, and may be asked for again.
    pub done: bool,
}

impl Vm {
    pub(super) fn move_on(&mut self, step: VmMove) -> Result<(), String> {
        match step {
            VmMove::Settle => self.all(DiskMove::Settle)?,
            VmMove::Stay => self.all(DiskMove::Stay)?,
            VmMove::Leave => self.leave(true)?,
            VmMove::Expect => self.leave(false)?,
            VmMove::Take => self.take()?,
            VmMove::Keep => {
                self.take()?;
                self.note.remove().map_err(|error| error.to_string())?;
            }
            VmMove::Yield => self.give_up_visit()?,
        }
        Ok(())
    }

    fn leave(&mut self, goes_on: bool) -> Result<(), String> {
        if self.is_away {
            // The last one may not have waited for the end of that.
            return self.all(DiskMove::Close);
        }
        // Before anything is given up.
        if let Err(error) = self.all(DiskMove::Rest { goes_on }) {
            self.all(DiskMove::Serve)?;
            return Err(error);
        }
        let why = "its VM has gone to another host";
        let parted = self
            .all(DiskMove::Part)
            .and_then(|()| self.note.make(why).map_err(|error| error.to_string()));
        if let Err(error) = parted {
            let removed = self.note.remove().map_err(|error| error.to_string());
            // Without their caches until the server is started again, where those were parted from.
            removed.and_then(|()| self.all(DiskMove::Serve)).map_err(|worse| {
                format!("{error}; and then: {worse}: the disks rest until their server is started again")
            })?;
            return Err(error);
        }
        // From here on a server that is started again has no images.
        self.is_away = true;
        tracing::info!("the VM has gone to another host, and its disks with it");
        if let Err(error) = self.all(DiskMove::Close) {
            tracing::error!("an image was not closed as it should, and has all that was flushed: {error}");
            return Err(error);
        }
        Ok(())
    }

    fn take(&mut self) -> Result<(), String> {
        if !self.is_away {
            return Ok(());
        }
        if let Err(error) = self.all(DiskMove::Open) {
            // Nothing was written.
            if let Err(closing) = self.all(DiskMove::Close) {
                tracing::warn!("a disk that was opened in vain could not be closed: {closing}");
            }
            return Err(error);
        }
        self.all(DiskMove::Serve)?;
        self.is_away = false;
        tracing::info!("the VM's disks are here");
        Ok(())
    }

    fn give_up_visit(&mut self) -> Result<(), String> {
        let is_visit = self.note.is_there().map_err(|error| error.to_string())?;
        if self.is_away {
            // Nobody may have waited for the end of an opening that took too long.
            return self.all(DiskMove::Close);
        }
        if is_visit {
            self.all(DiskMove::Close)?;
            self.is_away = true;
            tracing::info!("the VM does not come, and its disks are left to its old host");
        }
        Ok(())
    }

    /// Has all disks take a step, beside one another.
    fn all(&self, step: DiskMove) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|error| format!("the disks cannot be asked: {error}"))?;
        runtime.block_on(async {
            let mut steps = JoinSet::new();
            for disk in &self.disks {
                let (name, inquiry) = (disk.name.clone(), disk.inquiry.clone());
                steps.spawn(async move {
                    match timeout(STEP_TIME_MAX, inquiry.change(DiskChange::Move(step))).await {
                        Ok(Some(Ok(_))) => Ok(()),
                        Ok(Some(Err(error))) => Err(format!("disk {name}: {error}")),
                        Ok(None) => Err(format!("disk {name}: it is being closed")),
                        Err(_) => Err(format!(
                            "disk {name}: it gives no answer for {} s; is its storage stuck?",
                            STEP_TIME_MAX.as_secs()
                        )),
                    }
                });
            }
            let mut result = Ok(());
            while let Some(ended) = steps.join_next().await {
                let ended = ended.unwrap_or_else(|error| Err(error.to_string()));
                result = result.and(ended);
            }
            result
        })
    }
}
