//! Hand-over of a VM to the destination, and recovery when it fails.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::carrier::Carrier;
use super::move_state::{MoveState, PostcopyState};
use super::mover::SourceMover;
use super::{CompletedMove, MoveError, POLL_INTERVAL, RETRY_DELAY, WarningLimiter};
use crate::moving::disks::HandoverAction;
use crate::moving::messages::{MoverRequest, ToSource};
use crate::qmp::{Qmp, QmpError};

/// Time for which a cancelled mover still waits for the answer to `Go`.
const CANCELLED_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for a QEMU that has closed its monitor to exit: it first releases all of its memory.
const EXIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Time for which the destination is asked once QEMU has exited here.
const ASK_AFTER_EXIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Reasons why post-copy is not resumed.
enum RecoverError {
    /// Post-copy can never be resumed.
    Permanent(String),
    /// The next attempt may succeed.
    Transient(String),
}

impl SourceMover<'_> {
    /// Hands the VM over to the destination. The source is stopped, and everything has arrived or arrives by
    /// post-copy. Returns a session in which the destination has answered that it runs the VM.
    pub(super) fn hand_over(&mut self, carrier: Carrier, move_state: &mut MoveState) -> Result<Carrier, MoveError> {
        tracing::debug!("the hand-over begins");
        let stopped = move_state.monitor.stopped_at(&mut self.qmp).ok().flatten();
        if let Err(reason) = self.inactivate_disks(&mut move_state.record) {
            return Err(match move_state.postcopy {
                // The disks were closed before the switch to post-copy, or their refusal would have prevented it.
                PostcopyState::Active => MoveError::Unresolved(format!("{reason}: run the same command again")),
                _ => self.abort(carrier, move_state, reason),
            });
        }
        self.record_start(move_state)?;
        let answer = self.request_start(&carrier, move_state);
        let result = match answer {
            Ok(answer) => self.handle_start_answer(answer, move_state).map(|_| carrier),
            Err(lost) => {
                drop(carrier);
                tracing::warn!("the VM was handed over, and the destination's answer was lost: {lost}");
                self.ask_until_answered(move_state).map(|(carrier, _)| carrier)
            }
        };
        move_state.downtime_ms = stopped.map(|stopped| stopped.elapsed().as_millis() as u64);
        result
    }

    /// Records that the destination may run the VM from here on.
    fn record_start(&self, move_state: &mut MoveState) -> Result<(), MoveError> {
        if !move_state.record.told {
            tracing::debug!("the destination may run the VM from now on");
            move_state.record.told = true;
            self.record_file.save(&move_state.record).map_err(|error| {
                MoveError::Unresolved(format!(
                    "all data has arrived, but the record of the move cannot be saved ({error}): free some space, and run the same command again"
                ))
            })?;
        }
        Ok(())
    }

    /// Sends `Go`, in post-copy until the destination can run the VM. Returns the answer, or why there is none.
    fn request_start(&self, carrier: &Carrier, move_state: &MoveState) -> Result<ToSource, String> {
        let mut late = WarningLimiter::default();
        loop {
            match carrier.ask(&move_state.start_request(), self.cancel, CANCELLED_ANSWER_TIMEOUT)? {
                ToSource::NotYet { reason } => {
                    if late.is_due() {
                        tracing::warn!("the destination cannot start the VM yet: {reason}");
                    }
                }
                answer => return Ok(answer),
            }
            thread::sleep(RETRY_DELAY);
        }
    }

    /// Asks the destination over new sessions until it answers. It is unknown whether `Go` has arrived, or what has
    /// happened to the VM since. Returns the session in which the destination has answered that it runs the VM, and
    /// whether it has all of its memory.
    pub(super) fn ask_until_answered(&mut self, move_state: &mut MoveState) -> Result<(Carrier, bool), MoveError> {
        self.inactivate_disks(&mut move_state.record)
            .map_err(|reason| match self.qemu_exited {
                // A later mover would not find a VM here.
                true => MoveError::VmLost {
                    reason: format!(
                        "the VM was not started there, because {reason}; larder vm NAME --take opens its disks here for the next \
                         boot, unless they are still open"
                    ),
                },
                false => {
                    MoveError::Unresolved(format!("all data has arrived, but {reason}: run the same command again"))
                }
            })?;
        self.record_start(move_state)?;
        tracing::debug!("the destination is asked over new sessions until it answers");
        let mut lost = "cancelled".to_owned();
        let mut late = WarningLimiter::default();
        let started = Instant::now();
        while !(self.is_cancelled() || self.qemu_exited && started.elapsed() > ASK_AFTER_EXIT_TIMEOUT) {
            lost = match self.connect() {
                Ok(carrier) => match self.request_start(&carrier, move_state) {
                    Ok(answer) => {
                        let has_all_memory = self.handle_start_answer(answer, move_state)?;
                        move_state.carries_channels = false;
                        return Ok((carrier, has_all_memory));
                    }
                    Err(lost) => lost,
                },
                Err(lost) => lost,
            };
            if late.is_due() {
                tracing::warn!("asking the destination again until it answers: {lost}");
            }
            thread::sleep(RETRY_DELAY);
        }
        // No QEMU is left here that could have the VM back.
        if self.qemu_exited {
            let disks = match move_state.record.disks_left {
                true => {
                    "; unless it does, the VM's disks are open on neither host: larder vm NAME --take opens them here for the next boot"
                }
                false => "",
            };
            return Err(MoveError::VmLost {
                reason: format!("the destination does not report whether it has everything: {lost}{disks}"),
            });
        }
        Err(MoveError::OutcomeUnknown { reason: lost })
    }

    /// Handles the answer to `Go`; returns whether the destination has all of the VM's memory.
    fn handle_start_answer(&mut self, answer: ToSource, move_state: &mut MoveState) -> Result<bool, MoveError> {
        tracing::debug!(?answer, "the destination has answered");
        match answer {
            ToSource::Running { whole: has_all_memory } => {
                move_state.destination_runs = true;
                Ok(has_all_memory)
            }
            ToSource::NotRunning { reason } if self.qemu_exited => {
                self.reopen_disks(move_state);
                Err(match move_state.monitor.shutdown_cause(&mut self.qmp) {
                    Some(cause) => MoveError::ShutDown { cause },
                    None => MoveError::VmLost { reason },
                })
            }
            ToSource::NotRunning { reason } => match self.resume_vm(&move_state.record) {
                Ok(()) => {
                    self.restore_source(&move_state.record);
                    Err(MoveError::NotMoved { reason })
                }
                Err(error) if move_state.postcopy == PostcopyState::Active => {
                    Err(MoveError::PostcopyBroken { reason: format!("{reason}; and here: {error}") })
                }
                Err(error) => Err(MoveError::Unresolved(format!("{reason}; and then: {error}: check the VM"))),
            },
            ToSource::Refused { reasons } => Err(MoveError::OutcomeUnknown { reason: reasons.join("; ") }),
            ToSource::Unknown { reason } => Err(MoveError::OutcomeUnknown { reason }),
            other @ (ToSource::Prepared { .. } | ToSource::Noted | ToSource::NotYet { .. }) => {
                Err(MoveError::OutcomeUnknown { reason: format!("it gave the unexpected answer {other:?}") })
            }
        }
    }

    /// Opens the disks here for the next VM, since this one runs on neither host.
    fn reopen_disks(&self, move_state: &MoveState) {
        if move_state.record.disks_left
            && let Err(error) = self.options.servers.apply(&move_state.record.disks, HandoverAction::Commit)
        {
            tracing::warn!("the VM's disks could not be reopened here; larder vm NAME --take opens them: {error}");
        }
    }

    /// Handles a failure in QEMU after `Go` was sent. This can happen at the end of post-copy, and QEMU then resumes
    /// its own processors, so they are stopped again.
    pub(super) fn handle_late_failure(
        &mut self,
        carrier: Option<Carrier>,
        mut move_state: MoveState,
        reason: String,
    ) -> Result<CompletedMove, MoveError> {
        if let Err(error) = self.qmp.execute("stop", json!({})) {
            tracing::warn!("QEMU could not pause the VM: {error}");
        }
        drop(carrier);
        match self.ask_until_answered(&mut move_state)? {
            (carrier, true) => Ok(self.finish(carrier, &move_state, 0)),
            (_, false) => Err(MoveError::PostcopyBroken { reason }),
        }
    }

    /// Handles the exit of QEMU here. The destination can still run the VM if everything was sent.
    pub(super) fn handle_source_exit(
        &mut self,
        carrier: Carrier,
        mut move_state: MoveState,
        error: &QmpError,
    ) -> Result<CompletedMove, MoveError> {
        if !self.has_exited() {
            return Err(MoveError::Unresolved(format!("{error}; its process still runs: run the same command again")));
        }
        let may_be_complete =
            move_state.start_sent() || move_state.postcopy != PostcopyState::Inactive || !move_state.record.run;
        if !may_be_complete && let Some(cause) = move_state.monitor.shutdown_before_stop(&mut self.qmp) {
            return Err(MoveError::ShutDown { cause });
        }
        if !move_state.start_sent() && move_state.monitor.has_resumed(&mut self.qmp) {
            self.reopen_disks(&move_state);
            if let Some(cause) = move_state.monitor.shutdown_cause(&mut self.qmp) {
                return Err(MoveError::ShutDown { cause });
            }
            return Err(MoveError::VmLost {
                reason: "the migration had failed before, and the destination's data is outdated".to_owned(),
            });
        }
        tracing::warn!(
            "{error}; asking the destination, for up to {} s, whether it has all of the VM",
            ASK_AFTER_EXIT_TIMEOUT.as_secs()
        );
        self.qemu_exited = true;
        drop(carrier);
        match self.ask_until_answered(&mut move_state)? {
            (carrier, true) => Ok(self.finish(carrier, &move_state, 0)),
            (_, false) => Err(MoveError::VmLost {
                reason: "it exited during post-copy, before it had sent everything".to_owned(),
            }),
        }
    }

    /// Waits for QEMU's process to exit, which closes its monitor first. Returns false if it lives on (its monitor
    /// may be unreachable because the socket's path was removed), or if this mover is cancelled first. An unknown
    /// process counts as alive.
    fn has_exited(&self) -> bool {
        let Some(process) = self.qmp.process() else {
            return false;
        };
        let mut late = WarningLimiter::default();
        let started = Instant::now();
        while process.is_alive() {
            let answers = matches!(Qmp::connect(self.qmp.path()), Ok(_) | Err(QmpError::Busy { .. }));
            if answers || self.is_cancelled() || started.elapsed() > EXIT_TIMEOUT {
                return false;
            }
            if late.is_due() {
                tracing::info!("waiting for QEMU's process {} to exit, which has closed its monitor", process.pid);
            }
            thread::sleep(POLL_INTERVAL);
        }
        true
    }

    /// Recovers post-copy after a lost connection: both QEMUs wait for a new one. Returns a session that carries the
    /// rest, or in which the destination has answered that nothing is left.
    pub(super) fn recover(
        &mut self,
        carrier: Carrier,
        move_state: &mut MoveState,
    ) -> Result<(Carrier, bool), MoveError> {
        tracing::warn!("the connection was lost in the middle of post-copy; reconnecting");
        drop(carrier);
        let mut reason = "cancelled".to_owned();
        let mut late = WarningLimiter::default();
        while !self.is_cancelled() {
            match self.try_recover(move_state) {
                Ok((carrier, has_all_memory)) if move_state.destination_runs => return Ok((carrier, has_all_memory)),
                Ok((carrier, _)) => return Ok((self.hand_over(carrier, move_state)?, false)),
                Err(RecoverError::Permanent(reason)) => return Err(MoveError::PostcopyBroken { reason }),
                Err(RecoverError::Transient(lost)) => reason = lost,
            }
            if late.is_due() {
                tracing::warn!("{reason}; trying again");
            }
            thread::sleep(RETRY_DELAY);
        }
        Err(MoveError::PostcopyBroken {
            reason: format!("{reason}; run the same command again while both QEMUs still run"),
        })
    }

    fn try_recover(&mut self, move_state: &mut MoveState) -> Result<(Carrier, bool), RecoverError> {
        let transient = RecoverError::Transient;
        let carrier = self.connect().map_err(transient)?;
        let recover = move_state.request(MoverRequest::Recover);
        match carrier.ask(&recover, self.cancel, Duration::ZERO).map_err(transient)? {
            ToSource::Prepared { .. } => match self.migrate(&carrier.socket_dir.socket(), true) {
                Ok(()) => {
                    move_state.carries_channels = true;
                    Ok((carrier, false))
                }
                Err(error) if error.is_disconnected() => Err(RecoverError::Permanent(error.to_string())),
                Err(error) => Err(transient(error.to_string())),
            },
            ToSource::Running { whole: true } => {
                move_state.destination_runs = true;
                Ok((carrier, true))
            }
            ToSource::NotRunning { reason } | ToSource::Unknown { reason } => Err(RecoverError::Permanent(reason)),
            ToSource::Refused { reasons } => Err(transient(reasons.join("; "))),
            other => Err(transient(format!("the destination answers {other:?}"))),
        }
    }
}
