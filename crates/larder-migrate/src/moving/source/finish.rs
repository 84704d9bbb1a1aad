//! Conclusion of a move: the VM continues here, or belongs to the destination.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::carrier::Carrier;
use super::move_state::{MoveState, PostcopyState};
use super::mover::SourceMover;
use super::{CompletedMove, MoveError, POLL_INTERVAL};
use crate::moving::disks::HandoverAction;
use crate::moving::record::OutgoingRecord;
use crate::moving::{has_ended, status_of};
use crate::qmp::QmpError;

/// Time limit for QEMU to abort a migration whose sockets are shut, and to run again.
pub(super) const ABORT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the source's QEMU to exit once the VM runs elsewhere.
const QUIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Distance of a VM from running here. The texts describe QEMU's state.
enum ResumeStep {
    Done,
    NotYet(String),
    /// Post-copy cannot be undone.
    Never(String),
}

impl SourceMover<'_> {
    /// Keeps the VM here: waits until QEMU has aborted, and resumes the guest if QEMU does not. Must be called only
    /// while nothing was sent that allows the destination to run it.
    pub(super) fn abort(&mut self, carrier: Carrier, move_state: &MoveState, reason: String) -> MoveError {
        let lost = carrier.abort();
        let reason = match lost {
            Some(error) if !reason.is_empty() => format!("{error} (QEMU: {reason})"),
            Some(error) => error.to_string(),
            None => reason,
        };
        match self.resume_vm(&move_state.record) {
            Ok(()) => {
                self.restore_source(&move_state.record);
                MoveError::NotMoved { reason }
            }
            Err(error) => MoveError::Unresolved(format!("{reason}; and then: {error}: check the VM")),
        }
    }

    /// Warns if a VM that was paused is paused still, but not in QEMU's terms. A QEMU that had begun to stop it for
    /// the end of a migration reports `postmigrate` afterwards (before 8.2 always, later if the migration had
    /// completed here). Only `cont` ends that state, and the guest is not resumed merely to change its name.
    fn warn_if_postmigrate(&mut self, record: &OutgoingRecord) {
        if !record.run && self.qmp.run_state().is_ok_and(|state| state == "postmigrate") {
            tracing::warn!(
                "the VM is paused here, as it was before; QEMU calls this state 'postmigrate' now: 'cont' resumes it, and QEMU \
                 does not migrate it again before it has run"
            );
        }
    }

    /// Waits until QEMU's migration has ended and, if the VM is to run, it runs, with its disks open.
    pub(super) fn resume_vm(&mut self, record: &OutgoingRecord) -> Result<(), String> {
        if record.disks_left {
            let opened = self.options.servers.apply(&record.disks, HandoverAction::Commit);
            opened.map_err(|error| {
                format!(
                    "the VM's disks cannot be reopened here, so it stays paused: {error}; once they can be opened, larder migrate \
                     --take-back resumes it"
                )
            })?;
        }
        let run = record.run;
        tracing::debug!(run, "the VM is kept here: QEMU's migration is being ended");
        let until = Instant::now() + ABORT_TIMEOUT;
        loop {
            let is = match self.resume_step(run) {
                Ok(ResumeStep::Done) => return Ok(()),
                Ok(ResumeStep::Never(is)) => return Err(is),
                Ok(ResumeStep::NotYet(is)) => is,
                Err(error) if error.is_disconnected() => return Err(error.to_string()),
                Err(error) => error.to_string(),
            };
            if Instant::now() > until {
                return Err(format!("QEMU does not resume the VM: {is}"));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Performs one step towards a VM that runs here.
    fn resume_step(&mut self, run: bool) -> Result<ResumeStep, QmpError> {
        let migration = self.qmp.migration()?;
        let status = status_of(&migration);
        let state = self.qmp.run_state()?;
        let is = format!("it is '{state}', its migration '{status}'");
        if status.starts_with("postcopy-") {
            // QEMU 7.2 would hang if it were cancelled.
            return Ok(ResumeStep::Never(is));
        }
        if !has_ended(status) {
            // QEMU refuses to cancel where it is too early.
            if status != "cancelling" {
                let _ = self.qmp.execute("migrate_cancel", json!({}));
            }
            return Ok(ResumeStep::NotYet(is));
        }
        // If the guest is stopped for another reason, such as a disk error, its user must resolve that.
        let is_stopped = ["paused", "prelaunch", "postmigrate", "finish-migrate"].contains(&state.as_str());
        if !run || !is_stopped {
            return Ok(ResumeStep::Done);
        }
        // QEMU resumes its processors by itself, except after a completed migration.
        self.qmp.execute("cont", json!({}))?;
        Ok(ResumeStep::NotYet(is))
    }

    /// Restores settings and caches of a VM that stays here, to be moved again or not at all.
    pub(super) fn restore_source(&mut self, record: &OutgoingRecord) {
        tracing::debug!("the VM stays here: settings and caches are being restored");
        self.record_file.remove();
        record.before.restore(&mut self.qmp);
        self.restore_caches(record);
        self.rewarm_caches(record);
        self.warn_if_postmigrate(record);
    }

    /// Ends the move of a VM that runs elsewhere. Its QEMU here is ended before the session, so that a mover that
    /// starts after a crash in between does not find a VM that seems to wait.
    pub(super) fn finish(&mut self, carrier: Carrier, move_state: &MoveState, rounds: u64) -> CompletedMove {
        let seconds = move_state.started.elapsed().as_secs_f64();
        tracing::debug!(seconds, "the VM is at the destination");
        if !self.options.keep_qemu && !self.qemu_exited && !self.qmp.quit(QUIT_TIMEOUT) {
            tracing::warn!(
                "the VM runs at {}; its QEMU here, {}, received the command to quit and still runs: kill it",
                self.options.send.to,
                self.options.qmp.display()
            );
        }
        self.record_file.remove();
        if let Err(error) = carrier.end() {
            tracing::warn!("after the VM was handed over: {error}");
        }
        CompletedMove {
            seconds,
            downtime_ms: move_state.downtime_ms,
            rounds,
            postcopy: move_state.postcopy == PostcopyState::Active,
            resumed: move_state.resumed,
        }
    }
}
