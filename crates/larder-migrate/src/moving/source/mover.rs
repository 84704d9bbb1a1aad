//! Mover from the first query to the end of QEMU's migration.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::carrier::Carrier;
use super::course::{Course, Cut, Postcopy};
use super::ending::{LIMIT_MS, LIMIT_TO_END_MS, Look};
use super::settle::SETTLE_TIMEOUT;
use super::{Done, LOOK_EVERY, MoveError, Options, preflight, runs};
use crate::moving::description::clock_ms;
use crate::moving::disks::{self, Deed};
use crate::moving::messages::{Tell, ToSource};
use crate::moving::record::{Leaving, MoveId, Place};
use crate::moving::settings::{Before, Role, Settings};
use crate::moving::watch::Report;
use crate::moving::{Description, status_of};
use crate::progress::Progress;
use crate::qmp::{Qmp, QmpError};

/// Time from the last byte until the VM runs at the destination.
const HAND_OVER: Duration = Duration::from_millis(30);

/// Errors of QEMU for a new migration while an old one is being cleaned up, and the time limit for that.
const STILL_BUSY: [&str; 2] = ["duplicate yank instance", "There's a migration process in progress"];
const FREE_WITHIN: Duration = Duration::from_secs(5);

/// Returns why QEMU's migration has not succeeded. Often the source's QEMU only knows that the other one has
/// disconnected.
fn why(migration: &Value, status: &str) -> String {
    let said = migration["error-desc"].as_str().unwrap_or("it gives no reason");
    match status {
        "failed" => format!(
            "QEMU's migration has failed ({said}); if the destination's QEMU has exited, it has reported why, for example that it \
             lacks a device"
        ),
        _ => format!("QEMU's migration was {status}"),
    }
}

/// Reasons why QEMU's migration has not begun.
enum NotBegun {
    /// QEMU was not asked, or refuses.
    Refused(String),
    /// The migration may have begun.
    Unclear(QmpError),
}

impl From<QmpError> for NotBegun {
    fn from(error: QmpError) -> Self {
        match error {
            QmpError::Refused { .. } => Self::Refused(error.to_string()),
            error => Self::Unclear(error),
        }
    }
}

pub(super) struct Mover<'a> {
    pub(super) options: &'a Options,
    pub(super) qmp: Qmp,
    vm: Description,
    /// Character devices of QEMU that are sockets.
    devices: Vec<(String, PathBuf)>,
    /// Hot ranges of the disks that move along, by their sockets.
    hot: Vec<(PathBuf, String)>,
    progress: Arc<Progress>,
    pub(super) cancel: &'a AtomicBool,
    pub(super) place: Place,
    /// Set once QEMU has exited.
    pub(super) is_gone: bool,
}

impl<'a> Mover<'a> {
    pub(super) fn new(
        options: &'a Options,
        progress: Arc<Progress>,
        cancel: &'a AtomicBool,
    ) -> Result<Self, MoveError> {
        let mut qmp = Qmp::connect(&options.qmp)?;
        let vm = Description::of(&mut qmp)?;
        let devices = disks::sockets_of(&mut qmp)?;
        let place = Place::new(&options.records, "from", &qmp);
        Ok(Self {
            options,
            qmp,
            vm,
            devices,
            hot: Vec::new(),
            progress,
            cancel,
            place,
            is_gone: false,
        })
    }

    /// Returns the states of the VM and of its migration. With `is_ours`, waits while a migration is in progress: its
    /// mover has ended and its connection is lost, which QEMU detects soon.
    pub(super) fn at_rest(&mut self, is_ours: bool) -> Result<(String, Value), MoveError> {
        let until = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let migration = self.qmp.migration()?;
            let state = self.qmp.run_state()?;
            let status = status_of(&migration);
            let moves = matches!(status, "setup" | "active" | "device" | "cancelling")
                || state == "finish-migrate" && !status.starts_with("postcopy-");
            if !is_ours || !moves || Instant::now() > until || self.is_cancelled() {
                return Ok((state, migration));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    pub(super) fn connect(&self) -> Result<Carrier, String> {
        Carrier::start(&self.options.send, self.qmp.user(), &self.progress)
    }

    /// Returns the migration settings. QEMU 7.2 accepts multifd with post-copy, and its destination then fails an
    /// assertion (`yank_unregister_instance`); later versions up to 10.0 refuse the combination.
    const fn settings(&self) -> Settings {
        Settings {
            multifd_channels: if self.options.postcopy {
                0
            } else {
                self.options.multifd_channels
            },
            postcopy: self.options.postcopy,
        }
    }

    /// Cleans up after an earlier mover that had not handed the VM over.
    pub(super) fn clear_up(&mut self, leaving: Leaving) -> Result<(), MoveError> {
        if leaving.stopped || leaving.disks_left {
            self.run_here(&leaving).map_err(MoveError::Unclear)?;
        }
        self.stays(&leaving);
        Ok(())
    }

    pub(super) fn move_it(&mut self, run: bool, report: &mut dyn FnMut(&Report)) -> Result<Done, MoveError> {
        self.blockers()?;
        let leaving = Leaving {
            id: MoveId::new().map_err(preflight)?,
            run,
            to: self.options.send.to.clone(),
            stopped: false,
            disks: Vec::new(),
            disks_left: false,
            told: false,
            before: Before::default(),
        };
        let mut course = Course::new(leaving, self.options);
        let disks = disks::describe(&*self.options.servers, &self.devices).map_err(preflight)?;
        if let Some(disk) = disks.first().filter(|_| self.options.postcopy) {
            return Err(preflight(format!(
                "disk {} ({}): its server would access memory that has not arrived yet, so QEMU supports no post-copy with it: \
                 leave out --postcopy; --throttle slows down a guest that changes too much memory",
                disk.chardev, disk.served.image
            )));
        }
        let served: Vec<String> = disks.iter().map(|disk| disk.chardev.clone()).collect();
        let carrier = self.connect().map_err(preflight)?;
        let prepare = course.tell(Tell::Prepare {
            vm: Box::new(Description {
                clock_ms: clock_ms(),
                ..self.vm.clone()
            }),
            settings: self.settings(),
            disks,
        });
        match carrier.ask(&prepare, self.cancel, Duration::ZERO) {
            Ok(ToSource::Prepared { warnings, disks }) => {
                for warning in warnings {
                    tracing::warn!("{warning}");
                }
                if disks {
                    let go_along = self.devices.iter().filter(|(chardev, _)| served.contains(chardev));
                    course.leaving.disks = go_along.map(|(_, socket)| socket.clone()).collect();
                }
            }
            Ok(ToSource::Refused { reasons }) => return Err(MoveError::Preflight(reasons)),
            Ok(other) => return Err(preflight(format!("the destination answers {other:?}"))),
            Err(reason) => {
                let reason = carrier.break_off().map_or(reason, |error| error.to_string());
                return Err(preflight(format!("the destination: {reason}")));
            }
        }
        self.settle_disks(&course.leaving).map_err(preflight)?;
        if let Err(reason) = self.tell_what_is_hot(&carrier, &course) {
            self.disks_stay(&course.leaving);
            return Err(preflight(format!("the destination: {reason}")));
        }
        // The preparation takes time, and other monitor clients may have changed the state.
        let state = self.qmp.run_state()?;
        if runs(&state) != run {
            self.disks_stay(&course.leaving);
            return Err(preflight(format!(
                "the state of QEMU's VM has changed to '{state}' in the meantime"
            )));
        }
        match self.begin(&carrier.socket.socket(), &mut course) {
            Ok(()) => self.see_through(carrier, course, report),
            // A migration that is in progress in QEMU is not this move.
            Err(NotBegun::Refused(reason)) => {
                self.stays(&course.leaving);
                Err(MoveError::Here { reason })
            }
            Err(NotBegun::Unclear(error)) => Err(self.take_back(carrier, &course, error.to_string())),
        }
    }

    /// Makes write-back caches write the data that the images lack, while the guest runs, and write through
    /// afterwards. A later mover knows the servers of these caches only once the move has begun; a mover that is
    /// killed before that leaves the caches writing through.
    fn settle_disks(&self, leaving: &Leaving) -> Result<(), String> {
        if leaving.disks.is_empty() {
            return Ok(());
        }
        let settled = loop {
            match self.options.servers.settle(&leaving.disks) {
                Ok(false) if self.is_cancelled() => break Err("cancelled".to_owned()),
                Ok(false) => {
                    tracing::info!("writing the dirty data of write-back caches to the VM's disks before the move")
                }
                settled => break settled.map(drop),
            }
        };
        settled.inspect_err(|_| self.disks_stay(leaving))
    }

    /// Sends the hot ranges to the destination, so that its caches are warm before the guest asks for data that they
    /// lack.
    fn tell_what_is_hot(&mut self, carrier: &Carrier, course: &Course) -> Result<(), String> {
        if course.leaving.disks.is_empty() {
            return Ok(());
        }
        self.hot = self.options.servers.hot(&course.leaving.disks);
        for (socket, ranges) in &self.hot {
            let Some((chardev, _)) = self.devices.iter().find(|(_, path)| path == socket) else {
                continue;
            };
            for part in disks::hot_parts(ranges) {
                let hot = course.tell(Tell::Hot {
                    chardev: chardev.clone(),
                    ranges: part.to_owned(),
                });
                carrier.ask(&hot, self.cancel, Duration::ZERO)?;
            }
        }
        Ok(())
    }

    /// Refills caches that were emptied when their disks were closed, with their hot ranges.
    pub(super) fn warm_again(&self, leaving: &Leaving) {
        for (socket, ranges) in self.hot.iter().filter(|_| leaving.disks_left) {
            for part in disks::hot_parts(ranges) {
                self.options.servers.warm(socket, part);
            }
        }
    }

    pub(super) fn disks_stay(&self, leaving: &Leaving) {
        super::disks_stay(&*self.options.servers, &leaving.disks);
    }

    /// Closes the disks here. The guest has stopped, and will run at the destination or stay stopped until its disks
    /// are open here again. May be repeated.
    pub(super) fn let_disks_go(&self, leaving: &mut Leaving) -> Result<(), String> {
        if leaving.disks.is_empty() || leaving.told {
            return Ok(());
        }
        // A later mover must open them again.
        leaving.disks_left = true;
        self.place.save(&*leaving).map_err(|error| error.to_string())?;
        let left = self.options.servers.have(&leaving.disks, Deed::Leave);
        left.map_err(|error| format!("the VM's disks cannot be closed: {error}"))
    }

    /// Checks for migration blockers that QEMU reports.
    fn blockers(&mut self) -> Result<(), MoveError> {
        let migration = self.qmp.migration()?;
        let reasons: Vec<String> = migration["blocked-reasons"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|reason| reason.as_str().map(str::to_owned))
            .collect();
        if reasons.is_empty() {
            Ok(())
        } else {
            Err(MoveError::Preflight(reasons))
        }
    }

    fn begin(&mut self, socket: &Path, course: &mut Course) -> Result<(), NotBegun> {
        let role = Role::Source {
            downtime_ms: LIMIT_MS,
            throttle: self.options.throttle,
        };
        let settings = self.settings();
        course.leaving.before = self.once_free(|mover| settings.apply(&mut mover.qmp, role))?;
        // From the record, a later mover knows what was moved where, if this one is killed.
        if let Err(error) = self.place.save(&course.leaving) {
            course.leaving.before.restore(&mut self.qmp);
            return Err(NotBegun::Refused(format!(
                "the record of the move cannot be saved: {error}"
            )));
        }
        course.begun = Instant::now();
        Ok(self.once_free(|mover| mover.migrate(socket, false))?)
    }

    /// Repeats a command while QEMU is busy: it reports a migration as cancelled or failed before it has released all
    /// of its resources.
    fn once_free<T>(&mut self, mut ask: impl FnMut(&mut Self) -> Result<T, QmpError>) -> Result<T, QmpError> {
        let give_up = Instant::now() + FREE_WITHIN;
        loop {
            match ask(self) {
                Err(QmpError::Refused { text, .. })
                    if STILL_BUSY.iter().any(|busy| text.contains(busy)) && Instant::now() < give_up =>
                {
                    thread::sleep(LOOK_EVERY);
                }
                asked => return asked,
            }
        }
    }

    pub(super) fn migrate(&mut self, socket: &Path, resume: bool) -> Result<(), QmpError> {
        let mut arguments = json!({"uri": format!("unix:{}", socket.display())});
        if resume {
            arguments["resume"] = true.into();
        }
        self.qmp.execute("migrate", arguments).map(|_| ())
    }

    /// Continues a move whose mover has ended after QEMU had completed, or during post-copy.
    pub(super) fn go_on(
        &mut self,
        leaving: Leaving,
        status: &str,
        report: &mut dyn FnMut(&Report),
    ) -> Result<Done, MoveError> {
        tracing::warn!("continuing a move to {} whose mover has ended", leaving.to);
        let mut course = Course::new(leaving, self.options);
        course.resumed = true;
        if status != "completed" {
            course.postcopy = Postcopy::Yes;
        }
        if matches!(status, "failed" | "cancelled") {
            let reason = format!("the source's migration is '{status}'");
            return self.after_failure(None, course, reason);
        }
        let (carrier, whole) = self.reach(&mut course)?;
        if whole {
            return Ok(self.finish(carrier, &course, 0));
        }
        self.see_through(carrier, course, report)
    }

    /// Watches a migration until the VM runs at the destination, or continues here.
    fn see_through(
        &mut self,
        mut carrier: Carrier,
        mut course: Course,
        report: &mut dyn FnMut(&Report),
    ) -> Result<Done, MoveError> {
        let mut cut = Cut::default();
        loop {
            let migration = match self.qmp.migration() {
                Ok(migration) => migration,
                Err(error) if error.is_gone() => return self.without_source(carrier, course, &error),
                Err(error) => {
                    tracing::warn!("{error}");
                    // The status is unknown; only watching is possible.
                    json!({"status": "late"})
                }
            };
            match status_of(&migration) {
                "completed" => {
                    if !course.answered {
                        report(&course.watch.report(&migration, &self.progress, course.begun.elapsed()));
                        carrier = self.hand_over(carrier, &mut course)?;
                    }
                    let mut last = course.watch.report(&migration, &self.progress, course.begun.elapsed());
                    last.downtime_ms = course.downtime_ms;
                    report(&last);
                    return Ok(self.finish(carrier, &course, last.round));
                }
                status @ ("failed" | "cancelled") => {
                    let reason = why(&migration, status);
                    if course.told() {
                        return self.after_failure(Some(carrier), course, reason);
                    }
                    return Err(self.take_back(carrier, &course, reason));
                }
                "postcopy-active" => {
                    course.postcopy = Postcopy::Yes;
                    if !course.answered {
                        carrier = self.hand_over(carrier, &mut course)?;
                    } else if cut.is_unseen(carrier.is_over() || !course.carries)? {
                        let whole;
                        (carrier, whole) = self.reach(&mut course)?;
                        if whole {
                            return Ok(self.finish(carrier, &course, 0));
                        }
                        let _ = self.qmp.execute_out_of_band("migrate-pause", json!({}));
                    }
                }
                "postcopy-paused" => {
                    course.postcopy = Postcopy::Yes;
                    let whole;
                    (carrier, whole) = self.recover(carrier, &mut course)?;
                    if whole {
                        return Ok(self.finish(carrier, &course, 0));
                    }
                    cut = Cut::default();
                }
                "active" => {
                    self.look_whether_it_runs(&mut course);
                    self.keep_downtime(&mut course, &migration);
                }
                _ => {}
            }
            if !course.told()
                && let Err(stop) = self.may_go_on(&carrier, &mut course)
            {
                let error = self.take_back(carrier, &course, stop.clone().unwrap_or_default());
                return Err(match error {
                    MoveError::Here { .. } if stop.is_none() => MoveError::Cancelled,
                    error => error,
                });
            }
            let mut now = course.watch.report(&migration, &self.progress, course.begun.elapsed());
            now.expected_downtime_ms = course.expected_downtime.map(|time| time.as_millis() as u64);
            now.downtime_ms = course.downtime_ms;
            report(&now);
            // An exit of QEMU is detected above.
            let _ = course.watch.hear(&mut self.qmp, LOOK_EVERY);
        }
    }

    /// Checks whether the move may continue; once it may have switched to post-copy, it must. The error is the reason
    /// to abort, or `None` if the user has cancelled.
    fn may_go_on(&mut self, carrier: &Carrier, course: &mut Course) -> Result<(), Option<String>> {
        // QEMU may have switched to post-copy, which cannot be undone.
        if course.postcopy == Postcopy::Asked {
            return Ok(());
        }
        if self.is_cancelled() {
            return Err(None);
        }
        let verdict = course.watch.verdict();
        if let Some(timeout) = self
            .options
            .limits()
            .timeout
            .filter(|timeout| course.begun.elapsed() > *timeout)
        {
            return Err(Some(format!(
                "it did not end in {} s: {}",
                timeout.as_secs(),
                verdict.unwrap_or_else(|| "it was still in progress".to_owned())
            )));
        }
        if carrier.is_over() {
            return Err(Some("the connection was lost".to_owned()));
        }
        if self.options.postcopy
            && let Some(verdict) = verdict
        {
            tracing::info!("post-copy begins: {verdict}");
            self.begin_post_copy(carrier, course)
                .map_err(|error| Some(format!("post-copy could not be started: {error}")))?;
        }
        Ok(())
    }

    /// Starts post-copy. Stops the VM first: if the end of post-copy fails, QEMU 10 resumes a VM that it has stopped
    /// itself, and then the VM would run on both hosts.
    fn begin_post_copy(&mut self, carrier: &Carrier, course: &mut Course) -> Result<(), String> {
        match carrier.ask(&course.tell(Tell::CheckPostcopy), self.cancel, Duration::ZERO)? {
            ToSource::Noted => {}
            ToSource::Refused { reasons } => return Err(reasons.join("; ")),
            other => return Err(format!("the destination answers {other:?}")),
        }
        course.leaving.stopped = true;
        self.place.save(&course.leaving).map_err(|error| error.to_string())?;
        self.qmp.execute("stop", json!({})).map_err(|error| error.to_string())?;
        // The disks are closed first, because a failure after the switch could not be undone.
        self.let_disks_go(&mut course.leaving)?;
        let begun = self.qmp.execute("migrate-start-postcopy", json!({}));
        begun.map_err(|error| error.to_string())?;
        course.postcopy = Postcopy::Asked;
        Ok(())
    }

    /// Makes QEMU stop its guest once the rest can be sent within the permitted downtime. QEMU counts bytes accepted
    /// by Larder as sent, so the bytes in flight and the hand-over add to the downtime.
    fn keep_downtime(&mut self, course: &mut Course, migration: &Value) {
        let totals = self.progress.totals();
        let look = Look::new(course.begun.elapsed(), migration, totals.raw_bytes, totals.wire_bytes);
        // While the link is lost, QEMU only fills Larder's buffers, and nothing is sent.
        let is_lost = self.progress.link().lost.is_some();
        let rest = course.ending.expected(look).filter(|_| !is_lost);
        course.expected_downtime = rest.map(|rest| rest.saturating_add(self.progress.flight() + HAND_OVER));
        let allowed_ms = self.options.limits().downtime_ms;
        course.watch.allow(allowed_ms);
        let limit_ms = match course.expected_downtime {
            Some(expected) if expected <= Duration::from_millis(allowed_ms) => LIMIT_TO_END_MS,
            _ => LIMIT_MS,
        };
        if limit_ms == course.limit_ms {
            return;
        }
        // A failure is retried at the next sample.
        let set = json!({"downtime-limit": limit_ms});
        if self.qmp.execute("migrate-set-parameters", set).is_ok() {
            course.limit_ms = limit_ms;
        }
    }

    /// Tracks whether the user pauses or resumes the VM while it moves.
    fn look_whether_it_runs(&mut self, course: &mut Course) {
        let state = match self.qmp.run_state() {
            Ok(state) if !course.leaving.stopped => state,
            _ => return,
        };
        // Other states are QEMU's own at the end of a migration.
        let stands = [
            "paused",
            "io-error",
            "guest-panicked",
            "internal-error",
            "shutdown",
            "watchdog",
            "prelaunch",
        ];
        let runs = runs(&state);
        if course.leaving.run != runs && (runs || stands.contains(&state.as_str())) {
            course.leaving.run = runs;
            if let Err(error) = self.place.save(&course.leaving) {
                tracing::warn!("the record of the move cannot be updated: {error}");
            }
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }
}
