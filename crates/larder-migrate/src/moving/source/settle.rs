//! The end of a move: the VM goes on here, or is the destination's.

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

/// How long QEMU may take to give up a migration whose sockets are shut, and to run again.
pub(super) const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the source's QEMU may take to end when the VM runs elsewhere.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How far a VM is from running here. The texts say what QEMU is.
enum Step {
    Done,
    NotYet(String),
    /// There is no way back from post-copy.
    Never(String),
}

impl Mover<'_> {
    /// The VM goes on here: waits until QEMU has given up, and lets it run if it does not by itself. Nothing that would
    /// let the destination run it was sent.
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
            Err(error) => MoveError::Unsettled(format!("{reason}; and then: {error}: look at the VM")),
        }
    }

    /// Says so if a VM that was paused is so still, but not in QEMU's eyes: one that had begun to stop it for the end of a
    /// migration calls it `postmigrate` afterwards (before 8.2 always, later if the migration had completed here). Nothing
    /// but `cont` leads out of that, and the guest is not let run to have a better name for it.
    fn say_if_postmigrate(&mut self, leaving: &Leaving) {
        if !leaving.run && self.qmp.run_state().is_ok_and(|state| state == "postmigrate") {
            tracing::warn!(
                "the VM is paused here, as it was before; QEMU calls that 'postmigrate' now: 'cont' lets it run, and QEMU \
                 moves it to no other place before it has run"
            );
        }
    }

    /// Until QEMU's migration has ended and, if it is to, the VM runs, with its disks.
    pub(super) fn run_here(&mut self, leaving: &Leaving) -> Result<(), String> {
        if leaving.disks_left {
            let opened = self.options.servers.have(&leaving.disks, Deed::Keep);
            opened.map_err(|error| {
                format!(
                    "its disks cannot be opened here again, so it stands still: {error}; once they can be, larder migrate \
                     --take-back lets it run"
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
                return Err(format!("QEMU does not let it run: {is}"));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// One step towards that.
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
            // It is refused where it is too early.
            if status != "cancelling" {
                let _ = self.qmp.execute("migrate_cancel", json!({}));
            }
            return Ok(Step::NotYet(is));
        }
        // Where it does not run for a reason of its own, such as an error of a disk, that is its user's.
        let stands = ["paused", "prelaunch", "postmigrate", "finish-migrate"].contains(&state.as_str());
        if !run || !stands {
            return Ok(Step::Done);
        }
        // It starts its processors again by itself, but for one that had completed.
        self.qmp.execute("cont", json!({}))?;
        Ok(Step::NotYet(is))
    }

    /// The VM is here, and will be moved anew or not at all.
    pub(super) fn stays(&mut self, leaving: &Leaving) {
        self.place.remove();
        leaving.before.restore(&mut self.qmp);
        self.disks_stay(leaving);
        self.warm_again(leaving);
        self.say_if_postmigrate(leaving);
    }

    /// The VM runs elsewhere. Its QEMU here is ended before the session is, so that no mover that comes after a crash in
    /// between finds a VM that seems to wait.
    pub(super) fn finish(&mut self, carrier: Carrier, course: &Course, rounds: u64) -> Done {
        let seconds = course.begun.elapsed().as_secs_f64();
        if !self.options.keep && !self.is_gone && !self.qmp.quit(END_LIMIT) {
            tracing::warn!(
                "the VM runs at {}; its QEMU here, {}, was told to end and has not: kill it",
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
