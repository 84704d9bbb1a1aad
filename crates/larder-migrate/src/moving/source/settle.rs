//! Conclusion of a move: the VM continues here, or belongs to the destination.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::carrier::Carrier;
use super::course::{Course, Postcopy};
use super::mover::Mover;
use super::{Done, LOOK_EVERY, MoveError};
use crate::moving::disks::Deed;
use crate::moving::record::Leaving;
use crate::moving::{has_ended, status_of};
use crate::qmp::QmpError;

/// Time limit for QEMU to abort a migration whose sockets are shut, and to run again.
pub(super) const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the source's QEMU to exit once the VM runs elsewhere.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Distance of a VM from running here. The texts describe QEMU's state.
enum Step {
    Done,
    NotYet(String),
    /// Post-copy cannot be undone.
    Never(String),
}

impl Mover<'_> {
    /// Keeps the VM here: waits until QEMU has aborted, and resumes the guest if QEMU does not. Must be called only
    /// while nothing was sent that allows the destination to run it.
    pub(super) fn take_back(&mut self, carrier: Carrier, course: &Course, reason: String) -> MoveError {
        let lost = carrier.break_off();
        let reason = match lost {
            Some(error) if !reason.is_empty() => format!("{error} (QEMU: {reason})"),
            Some(error) => error.to_string(),
            None => reason,
        };
        match self.run_here(&course.leaving) {
            Ok(()) => {
                self.stays(&course.leaving);
                MoveError::Here { reason }
            }
            Err(error) => MoveError::Unsettled(format!("{reason}; and then: {error}: check the VM")),
        }
    }

    /// Warns if a VM that was paused is paused still, but not in QEMU's terms. A QEMU that had begun to stop it for
    /// the end of a migration reports `postmigrate` afterwards (before 8.2 always, later if the migration had
    /// completed here). Only `cont` ends that state, and the guest is not resumed merely to change its name.
    fn say_if_postmigrate(&mut self, leaving: &Leaving) {
        if !leaving.run && self.qmp.run_state().is_ok_and(|state| state == "postmigrate") {
            tracing::warn!(
                "the VM is paused here, as it was before; QEMU calls this state 'postmigrate' now: 'cont' resumes it, and QEMU \
                 does not migrate it again before it has run"
            );
        }
    }

    /// Waits until QEMU's migration has ended and, if the VM is to run, it runs, with its disks open.
    pub(super) fn run_here(&mut self, leaving: &Leaving) -> Result<(), String> {
        if leaving.disks_left {
            let opened = self.options.servers.have(&leaving.disks, Deed::Keep);
            opened.map_err(|error| {
                format!(
                    "the VM's disks cannot be reopened here, so it stays paused: {error}; once they can be opened, larder migrate \
                     --take-back resumes it"
                )
            })?;
        }
        let run = leaving.run;
        let until = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let is = match self.look_here(run) {
                Ok(Step::Done) => return Ok(()),
                Ok(Step::Never(is)) => return Err(is),
                Ok(Step::NotYet(is)) => is,
                Err(error) if error.is_gone() => return Err(error.to_string()),
                Err(error) => error.to_string(),
            };
            if Instant::now() > until {
                return Err(format!("QEMU does not resume the VM: {is}"));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Performs one step towards a VM that runs here.
    fn look_here(&mut self, run: bool) -> Result<Step, QmpError> {
        let migration = self.qmp.migration()?;
        let status = status_of(&migration);
        let state = self.qmp.run_state()?;
        let is = format!("it is '{state}', its migration '{status}'");
        if status.starts_with("postcopy-") {
            // QEMU 7.2 would hang if it were cancelled.
            return Ok(Step::Never(is));
        }
        if !has_ended(status) {
            // QEMU refuses to cancel where it is too early.
            if status != "cancelling" {
                let _ = self.qmp.execute("migrate_cancel", json!({}));
            }
            return Ok(Step::NotYet(is));
        }
        // If the guest is stopped for another reason, such as a disk error, its user must resolve that.
        let stands = ["paused", "prelaunch", "postmigrate", "finish-migrate"].contains(&state.as_str());
        if !run || !stands {
            return Ok(Step::Done);
        }
        // QEMU resumes its processors by itself, except after a completed migration.
        self.qmp.execute("cont", json!({}))?;
        Ok(Step::NotYet(is))
    }

    /// Restores settings and caches of a VM that stays here, to be moved again or not at all.
    pub(super) fn stays(&mut self, leaving: &Leaving) {
        self.place.remove();
        leaving.before.restore(&mut self.qmp);
        self.disks_stay(leaving);
        self.warm_again(leaving);
        self.say_if_postmigrate(leaving);
    }

    /// Ends the move of a VM that runs elsewhere. Its QEMU here is ended before the session, so that a mover that
    /// starts after a crash in between does not find a VM that seems to wait.
    pub(super) fn finish(&mut self, carrier: Carrier, course: &Course, rounds: u64) -> Done {
        let seconds = course.begun.elapsed().as_secs_f64();
        if !self.options.keep && !self.is_gone && !self.qmp.quit(END_LIMIT) {
            tracing::warn!(
                "the VM runs at {}; its QEMU here, {}, received the command to quit and still runs: kill it",
                self.options.send.to,
                self.options.qmp.display()
            );
        }
        self.place.remove();
        if let Err(error) = carrier.end() {
            tracing::warn!("after the VM was handed over: {error}");
        }
        Done {
            seconds,
            downtime_ms: course.downtime_ms,
            rounds,
            postcopy: course.postcopy == Postcopy::Yes,
            resumed: course.resumed,
        }
    }
}
