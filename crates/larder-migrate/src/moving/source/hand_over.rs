//! Hand-over of a VM to the destination, and recovery when it fails.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::carrier::Carrier;
use super::course::{Course, Postcopy};
use super::mover::Mover;
use super::{ASK_AGAIN, Done, LOOK_EVERY, Late, MoveError};
use crate::moving::disks::Deed;
use crate::moving::messages::{Tell, ToSource};
use crate::qmp::{Qmp, QmpError};

/// Time for which a cancelled mover still waits for the answer to `Go`.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for a QEMU that has closed its monitor to exit: it first releases all of its memory.
const EXIT_PATIENCE: Duration = Duration::from_secs(120);
/// Time for which the destination is asked once QEMU has exited here.
const ASK_WITHOUT_SOURCE: Duration = Duration::from_secs(60);

/// Reasons why post-copy is not resumed.
enum NotRecovered {
    /// Post-copy can never be resumed.
    Never(String),
    /// The next attempt may succeed.
    Yet(String),
}

impl Mover<'_> {
    /// Hands the VM over to the destination. The source is stopped, and everything has arrived or arrives by
    /// post-copy. Returns a session in which the destination has answered that it runs the VM.
    pub(super) fn hand_over(&mut self, carrier: Carrier, course: &mut Course) -> Result<Carrier, MoveError> {
        let stopped = course.watch.stopped_at(&mut self.qmp).ok().flatten();
        if let Err(reason) = self.let_disks_go(&mut course.leaving) {
            return Err(match course.postcopy {
                // The disks were closed before the switch to post-copy, or their refusal would have prevented it.
                Postcopy::Yes => MoveError::Unsettled(format!("{reason}: run the same command again")),
                _ => self.take_back(carrier, course, reason),
            });
        }
        self.will_tell(course)?;
        let answer = self.ask_to_go(&carrier, course);
        let result = match answer {
            Ok(answer) => self.took(answer, course).map(|_| carrier),
            Err(lost) => {
                drop(carrier);
                tracing::warn!("the VM was handed over, and the destination's answer was lost: {lost}");
                self.reach(course).map(|(carrier, _)| carrier)
            }
        };
        course.downtime_ms = stopped.map(|stopped| stopped.elapsed().as_millis() as u64);
        result
    }

    /// Records that the destination may run the VM from here on.
    fn will_tell(&self, course: &mut Course) -> Result<(), MoveError> {
        if !course.leaving.told {
            course.leaving.told = true;
            self.place.save(&course.leaving).map_err(|error| {
                MoveError::Unsettled(format!(
                    "all data has arrived, but the record of the move cannot be saved ({error}): free some space, and run the same command again"
                ))
            })?;
        }
        Ok(())
    }

    /// Sends `Go`, in post-copy until the destination can run the VM. Returns the answer, or why there is none.
    fn ask_to_go(&self, carrier: &Carrier, course: &Course) -> Result<ToSource, String> {
        let mut late = Late::default();
        loop {
            match carrier.ask(&course.go(), self.cancel, ANSWER_PATIENCE)? {
                ToSource::NotYet { reason } => {
                    if late.is_time() {
                        tracing::warn!("the destination cannot start the VM yet: {reason}");
                    }
                }
                answer => return Ok(answer),
            }
            thread::sleep(ASK_AGAIN);
        }
    }

    /// Asks the destination over new sessions until it answers. It is unknown whether `Go` has arrived, or what has
    /// happened to the VM since. Returns the session in which the destination has answered that it runs the VM, and
    /// whether it has all of its memory.
    pub(super) fn reach(&mut self, course: &mut Course) -> Result<(Carrier, bool), MoveError> {
        self.let_disks_go(&mut course.leaving)
            .map_err(|reason| match self.is_gone {
                // A later mover would not find a VM here.
                true => MoveError::Lost {
                    reason: format!(
                        "the VM was not started there, because {reason}; larder vm NAME --take opens its disks here for the next \
                         boot, unless they are still open"
                    ),
                },
                false => {
                    MoveError::Unsettled(format!("all data has arrived, but {reason}: run the same command again"))
                }
            })?;
        self.will_tell(course)?;
        let mut lost = "cancelled".to_owned();
        let mut late = Late::default();
        let begun = Instant::now();
        while !(self.is_cancelled() || self.is_gone && begun.elapsed() > ASK_WITHOUT_SOURCE) {
            lost = match self.connect() {
                Ok(carrier) => match self.ask_to_go(&carrier, course) {
                    Ok(answer) => {
                        let whole = self.took(answer, course)?;
                        course.carries = false;
                        return Ok((carrier, whole));
                    }
                    Err(lost) => lost,
                },
                Err(lost) => lost,
            };
            if late.is_time() {
                tracing::warn!("asking the destination again until it answers: {lost}");
            }
            thread::sleep(ASK_AGAIN);
        }
        // No QEMU is left here that could have the VM back.
        if self.is_gone {
            let disks = match course.leaving.disks_left {
                true => {
                    "; unless it does, the VM's disks are open on neither host: larder vm NAME --take opens them here for the next boot"
                }
                false => "",
            };
            return Err(MoveError::Lost {
                reason: format!("the destination does not report whether it has everything: {lost}{disks}"),
            });
        }
        Err(MoveError::InDoubt { reason: lost })
    }

    /// Handles the answer to `Go`; returns whether the destination has all of the VM's memory.
    fn took(&mut self, answer: ToSource, course: &mut Course) -> Result<bool, MoveError> {
        match answer {
            ToSource::Running { whole } => {
                course.answered = true;
                Ok(whole)
            }
            ToSource::NotRunning { reason } if self.is_gone => {
                self.take_disks_alone(course);
                Err(match course.watch.shutdown_cause(&mut self.qmp) {
                    Some(cause) => MoveError::ShutDown { cause },
                    None => MoveError::Lost { reason },
                })
            }
            ToSource::NotRunning { reason } => match self.run_here(&course.leaving) {
                Ok(()) => {
                    self.stays(&course.leaving);
                    Err(MoveError::Here { reason })
                }
                Err(error) if course.postcopy == Postcopy::Yes => Err(MoveError::Broken {
                    reason: format!("{reason}; and here: {error}"),
                }),
                Err(error) => Err(MoveError::Unsettled(format!(
                    "{reason}; and then: {error}: check the VM"
                ))),
            },
            ToSource::Refused { reasons } => Err(MoveError::InDoubt {
                reason: reasons.join("; "),
            }),
            ToSource::Unknown { reason } => Err(MoveError::InDoubt { reason }),
            other @ (ToSource::Prepared { .. } | ToSource::Noted | ToSource::NotYet { .. }) => {
                Err(MoveError::InDoubt {
                    reason: format!("it gave the unexpected answer {other:?}"),
                })
            }
        }
    }

    /// Opens the disks here for the next VM, since this one runs on neither host.
    fn take_disks_alone(&self, course: &Course) {
        if course.leaving.disks_left
            && let Err(error) = self.options.servers.have(&course.leaving.disks, Deed::Keep)
        {
            tracing::warn!("the VM's disks could not be reopened here; larder vm NAME --take opens them: {error}");
        }
    }

    /// Handles a failure in QEMU after `Go` was sent. This can happen at the end of post-copy, and QEMU then resumes
    /// its own processors, so they are stopped again.
    pub(super) fn after_failure(
        &mut self,
        carrier: Option<Carrier>,
        mut course: Course,
        reason: String,
    ) -> Result<Done, MoveError> {
        if let Err(error) = self.qmp.execute("stop", json!({})) {
            tracing::warn!("QEMU could not pause the VM: {error}");
        }
        drop(carrier);
        match self.reach(&mut course)? {
            (carrier, true) => Ok(self.finish(carrier, &course, 0)),
            (_, false) => Err(MoveError::Broken { reason }),
        }
    }

    /// Handles the exit of QEMU here. The destination can still run the VM if everything was sent.
    pub(super) fn without_source(
        &mut self,
        carrier: Carrier,
        mut course: Course,
        error: &QmpError,
    ) -> Result<Done, MoveError> {
        if !self.has_exited() {
            return Err(MoveError::Unsettled(format!(
                "{error}; its process still runs: run the same command again"
            )));
        }
        let may_be_complete = course.told() || course.postcopy != Postcopy::No || !course.leaving.run;
        if !may_be_complete && let Some(cause) = course.watch.shutdown_before_stop(&mut self.qmp) {
            return Err(MoveError::ShutDown { cause });
        }
        if !course.told() && course.watch.has_gone_on(&mut self.qmp) {
            self.take_disks_alone(&course);
            if let Some(cause) = course.watch.shutdown_cause(&mut self.qmp) {
                return Err(MoveError::ShutDown { cause });
            }
            return Err(MoveError::Lost {
                reason: "the migration had failed before, and the destination's data is outdated".to_owned(),
            });
        }
        tracing::warn!(
            "{error}; asking the destination, for up to {} s, whether it has all of the VM",
            ASK_WITHOUT_SOURCE.as_secs()
        );
        self.is_gone = true;
        drop(carrier);
        match self.reach(&mut course)? {
            (carrier, true) => Ok(self.finish(carrier, &course, 0)),
            (_, false) => Err(MoveError::Lost {
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
        let mut late = Late::default();
        let begun = Instant::now();
        while process.lives() {
            let answers = matches!(Qmp::connect(self.qmp.path()), Ok(_) | Err(QmpError::Busy { .. }));
            if answers || self.is_cancelled() || begun.elapsed() > EXIT_PATIENCE {
                return false;
            }
            if late.is_time() {
                tracing::info!(
                    "waiting for QEMU's process {} to exit, which has closed its monitor",
                    process.pid
                );
            }
            thread::sleep(LOOK_EVERY);
        }
        true
    }

    /// Recovers post-copy after a lost connection: both QEMUs wait for a new one. Returns a session that carries the
    /// rest, or in which the destination has answered that nothing is left.
    pub(super) fn recover(&mut self, carrier: Carrier, course: &mut Course) -> Result<(Carrier, bool), MoveError> {
        tracing::warn!("the connection was lost in the middle of post-copy; reconnecting");
        drop(carrier);
        let mut reason = "cancelled".to_owned();
        let mut late = Late::default();
        while !self.is_cancelled() {
            match self.recover_once(course) {
                Ok((carrier, whole)) if course.answered => return Ok((carrier, whole)),
                Ok((carrier, _)) => return Ok((self.hand_over(carrier, course)?, false)),
                Err(NotRecovered::Never(reason)) => return Err(MoveError::Broken { reason }),
                Err(NotRecovered::Yet(lost)) => reason = lost,
            }
            if late.is_time() {
                tracing::warn!("{reason}; trying again");
            }
            thread::sleep(ASK_AGAIN);
        }
        Err(MoveError::Broken {
            reason: format!("{reason}; run the same command again while both QEMUs still run"),
        })
    }

    fn recover_once(&mut self, course: &mut Course) -> Result<(Carrier, bool), NotRecovered> {
        let yet = NotRecovered::Yet;
        let carrier = self.connect().map_err(yet)?;
        let recover = course.tell(Tell::Recover);
        match carrier.ask(&recover, self.cancel, Duration::ZERO).map_err(yet)? {
            ToSource::Prepared { .. } => match self.migrate(&carrier.socket.socket(), true) {
                Ok(()) => {
                    course.carries = true;
                    Ok((carrier, false))
                }
                Err(error) if error.is_gone() => Err(NotRecovered::Never(error.to_string())),
                Err(error) => Err(yet(error.to_string())),
            },
            ToSource::Running { whole: true } => {
                course.answered = true;
                Ok((carrier, true))
            }
            ToSource::NotRunning { reason } | ToSource::Unknown { reason } => Err(NotRecovered::Never(reason)),
            ToSource::Refused { reasons } => Err(yet(reasons.join("; "))),
            other => Err(yet(format!("the destination answers {other:?}"))),
        }
    }
}
