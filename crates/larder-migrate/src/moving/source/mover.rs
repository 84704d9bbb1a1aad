//! Mover from the first query to the end of QEMU's migration.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::carrier::Carrier;
use super::downtime::{DOWNTIME_LIMIT_RUN_MS, DOWNTIME_LIMIT_STOP_MS, MigrationSample};
use super::finish::ABORT_TIMEOUT;
use super::move_state::{MoveState, PostcopyState, UndetectedLoss};
use super::{CompletedMove, MoveError, Options, POLL_INTERVAL, is_running, preflight_error};
use crate::moving::description::clock_ms;
use crate::moving::disks::{self, HandoverAction};
use crate::moving::messages::{MoverRequest, ToSource};
use crate::moving::record::{MoveId, OutgoingRecord, RecordFile};
use crate::moving::settings::{MigrationRole, PreviousSettings, QemuMigrationSettings};
use crate::moving::watch::MigrationReport;
use crate::moving::{Description, status_of};
use crate::progress::SenderProgress;
use crate::qmp::{Qmp, QmpError};

/// Time from the last byte until the VM runs at the destination.
const HANDOVER_TIME: Duration = Duration::from_millis(30);

/// Errors of QEMU for a new migration while an old one is being cleaned up, and the time limit for that.
const BUSY_ERRORS: [&str; 2] = ["duplicate yank instance", "There's a migration process in progress"];
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns why QEMU's migration has not succeeded. Often the source's QEMU only knows that the other one has
/// disconnected.
fn failure_reason(migration: &Value, status: &str) -> String {
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
enum StartError {
    /// QEMU was not asked, or refuses.
    Refused(String),
    /// The migration may have begun.
    Uncertain(QmpError),
}

impl From<QmpError> for StartError {
    fn from(error: QmpError) -> Self {
        match error {
            QmpError::Refused { .. } => Self::Refused(error.to_string()),
            error => Self::Uncertain(error),
        }
    }
}

pub(super) struct SourceMover<'a> {
    pub(super) options: &'a Options,
    pub(super) qmp: Qmp,
    vm: Description,
    /// Character devices of QEMU that are sockets.
    devices: Vec<(String, PathBuf)>,
    /// Hot ranges of the disks that move along, by their sockets.
    hot_ranges: Vec<(PathBuf, String)>,
    progress: Arc<SenderProgress>,
    pub(super) cancel: &'a AtomicBool,
    pub(super) record_file: RecordFile,
    /// Set once QEMU has exited.
    pub(super) qemu_exited: bool,
}

impl<'a> SourceMover<'a> {
    pub(super) fn new(
        options: &'a Options,
        progress: Arc<SenderProgress>,
        cancel: &'a AtomicBool,
    ) -> Result<Self, MoveError> {
        let mut qmp = Qmp::connect(&options.qmp)?;
        let vm = Description::query(&mut qmp)?;
        let devices = disks::socket_chardevs(&mut qmp)?;
        let record_file = RecordFile::new(&options.records, "from", &qmp);
        Ok(Self {
            options,
            qmp,
            vm,
            devices,
            hot_ranges: Vec::new(),
            progress,
            cancel,
            record_file,
            qemu_exited: false,
        })
    }

    /// Returns the states of the VM and of its migration. With `has_record`, waits while a migration is in progress:
    /// its mover has ended and its connection is lost, which QEMU detects soon.
    pub(super) fn wait_until_idle(&mut self, has_record: bool) -> Result<(String, Value), MoveError> {
        let until = Instant::now() + ABORT_TIMEOUT;
        loop {
            let migration = self.qmp.migration()?;
            let state = self.qmp.run_state()?;
            let status = status_of(&migration);
            let in_progress = matches!(status, "setup" | "active" | "device" | "cancelling")
                || state == "finish-migrate" && !status.starts_with("postcopy-");
            if !has_record || !in_progress || Instant::now() > until || self.is_cancelled() {
                return Ok((state, migration));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    pub(super) fn connect(&self) -> Result<Carrier, String> {
        Carrier::start(&self.options.send, self.qmp.user(), &self.progress)
    }

    /// Returns the migration settings. QEMU 7.2 accepts multifd with post-copy, and its destination then fails an
    /// assertion (`yank_unregister_instance`); later versions up to 10.0 refuse the combination.
    const fn settings(&self) -> QemuMigrationSettings {
        QemuMigrationSettings {
            multifd_channels: if self.options.postcopy { 0 } else { self.options.multifd_channels },
            postcopy: self.options.postcopy,
        }
    }

    /// Cleans up after an earlier mover that had not handed the VM over.
    pub(super) fn clean_up(&mut self, record: OutgoingRecord) -> Result<(), MoveError> {
        if record.stopped || record.disks_left {
            self.resume_vm(&record).map_err(MoveError::OwnerUnknown)?;
        }
        self.restore_source(&record);
        Ok(())
    }

    pub(super) fn start_move(
        &mut self,
        run: bool,
        report: &mut dyn FnMut(&MigrationReport),
    ) -> Result<CompletedMove, MoveError> {
        self.check_blockers()?;
        let record = OutgoingRecord {
            id: MoveId::new().map_err(preflight_error)?,
            run,
            to: self.options.send.to.clone(),
            stopped: false,
            disks: Vec::new(),
            disks_left: false,
            told: false,
            before: PreviousSettings::default(),
        };
        let mut move_state = MoveState::new(record, self.options);
        let disks = disks::describe(&*self.options.servers, &self.devices).map_err(preflight_error)?;
        if let Some(disk) = disks.first().filter(|_| self.options.postcopy) {
            return Err(preflight_error(format!(
                "disk {} ({}): its server would access memory that has not arrived yet, so QEMU supports no post-copy with it: \
                 leave out --postcopy; --throttle slows down a guest that changes too much memory",
                disk.chardev, disk.served.image
            )));
        }
        let served: Vec<String> = disks.iter().map(|disk| disk.chardev.clone()).collect();
        let carrier = self.connect().map_err(preflight_error)?;
        let prepare = move_state.request(MoverRequest::Prepare {
            vm: Box::new(Description { clock_ms: clock_ms(), ..self.vm.clone() }),
            settings: self.settings(),
            disks,
        });
        match carrier.ask(&prepare, self.cancel, Duration::ZERO) {
            Ok(ToSource::Prepared { warnings, disks }) => {
                for warning in warnings {
                    tracing::warn!("{warning}");
                }
                if disks {
                    let moving_devices = self.devices.iter().filter(|(chardev, _)| served.contains(chardev));
                    move_state.record.disks = moving_devices.map(|(_, socket)| socket.clone()).collect();
                }
                tracing::debug!(disks = move_state.record.disks.len(), "the destination is prepared");
            }
            Ok(ToSource::Refused { reasons }) => return Err(MoveError::Preflight(reasons)),
            Ok(other) => return Err(preflight_error(format!("the destination answers {other:?}"))),
            Err(reason) => {
                let reason = carrier.abort().map_or(reason, |error| error.to_string());
                return Err(preflight_error(format!("the destination: {reason}")));
            }
        }
        self.flush_caches(&move_state.record).map_err(preflight_error)?;
        if let Err(reason) = self.send_hot_ranges(&carrier, &move_state) {
            self.restore_caches(&move_state.record);
            return Err(preflight_error(format!("the destination: {reason}")));
        }
        // The preparation takes time, and other monitor clients may have changed the state.
        let state = self.qmp.run_state()?;
        if is_running(&state) != run {
            self.restore_caches(&move_state.record);
            return Err(preflight_error(format!("the state of QEMU's VM has changed to '{state}' in the meantime")));
        }
        match self.begin_migration(&carrier.socket_dir.socket(), &mut move_state) {
            Ok(()) => self.watch_migration(carrier, move_state, report),
            // A migration that is in progress in QEMU is not this move.
            Err(StartError::Refused(reason)) => {
                self.restore_source(&move_state.record);
                Err(MoveError::NotMoved { reason })
            }
            Err(StartError::Uncertain(error)) => Err(self.abort(carrier, &move_state, error.to_string())),
        }
    }

    /// Makes write-back caches write the data that the images lack, while the guest runs, and write through
    /// afterwards. A later mover knows the servers of these caches only once the move has begun; a mover that is
    /// killed before that leaves the caches writing through.
    fn flush_caches(&self, record: &OutgoingRecord) -> Result<(), String> {
        if record.disks.is_empty() {
            return Ok(());
        }
        let flushed = loop {
            match self.options.servers.flush_caches(&record.disks) {
                Ok(false) if self.is_cancelled() => break Err("cancelled".to_owned()),
                Ok(false) => {
                    tracing::info!("writing the dirty data of write-back caches to the VM's disks before the move")
                }
                result => break result.map(drop),
            }
        };
        tracing::debug!(is_done = flushed.is_ok(), "the caches of the disks were to write through");
        flushed.inspect_err(|_| self.restore_caches(record))
    }

    /// Sends the hot ranges to the destination, so that its caches are warm before the guest asks for data that they
    /// lack.
    fn send_hot_ranges(&mut self, carrier: &Carrier, move_state: &MoveState) -> Result<(), String> {
        if move_state.record.disks.is_empty() {
            return Ok(());
        }
        self.hot_ranges = self.options.servers.hot_ranges(&move_state.record.disks);
        for (socket, ranges) in &self.hot_ranges {
            let Some((chardev, _)) = self.devices.iter().find(|(_, path)| path == socket) else {
                continue;
            };
            for part in disks::split_hot_ranges(ranges) {
                let message =
                    move_state.request(MoverRequest::Hot { chardev: chardev.clone(), ranges: part.to_owned() });
                carrier.ask(&message, self.cancel, Duration::ZERO)?;
            }
        }
        Ok(())
    }

    /// Refills caches that were emptied when their disks were closed, with their hot ranges.
    pub(super) fn rewarm_caches(&self, record: &OutgoingRecord) {
        for (socket, ranges) in self.hot_ranges.iter().filter(|_| record.disks_left) {
            for part in disks::split_hot_ranges(ranges) {
                self.options.servers.warm_cache(socket, part);
            }
        }
    }

    pub(super) fn restore_caches(&self, record: &OutgoingRecord) {
        super::restore_caches(&*self.options.servers, &record.disks);
    }

    /// Closes the disks here. The guest has stopped, and will run at the destination or stay stopped until its disks
    /// are open here again. May be repeated.
    pub(super) fn inactivate_disks(&self, record: &mut OutgoingRecord) -> Result<(), String> {
        if record.disks.is_empty() || record.told {
            return Ok(());
        }
        // A later mover must open them again.
        record.disks_left = true;
        self.record_file.save(&*record).map_err(|error| error.to_string())?;
        tracing::debug!("the disks are being closed here");
        let closed = self.options.servers.apply(&record.disks, HandoverAction::Inactivate);
        tracing::debug!(is_done = closed.is_ok(), "the disks were to be closed here");
        closed.map_err(|error| format!("the VM's disks cannot be closed: {error}"))
    }

    /// Checks for migration blockers that QEMU reports.
    fn check_blockers(&mut self) -> Result<(), MoveError> {
        let migration = self.qmp.migration()?;
        let reasons: Vec<String> = migration["blocked-reasons"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|reason| reason.as_str().map(str::to_owned))
            .collect();
        if reasons.is_empty() { Ok(()) } else { Err(MoveError::Preflight(reasons)) }
    }

    fn begin_migration(&mut self, socket: &Path, move_state: &mut MoveState) -> Result<(), StartError> {
        let role = MigrationRole::Source { downtime_ms: DOWNTIME_LIMIT_RUN_MS, throttle: self.options.throttle };
        let settings = self.settings();
        move_state.record.before = self.retry_while_busy(|mover| settings.apply(&mut mover.qmp, role))?;
        // From the record, a later mover knows what was moved where, if this one is killed.
        if let Err(error) = self.record_file.save(&move_state.record) {
            move_state.record.before.restore(&mut self.qmp);
            return Err(StartError::Refused(format!("the record of the move cannot be saved: {error}")));
        }
        move_state.started = Instant::now();
        tracing::debug!("QEMU's migration begins");
        Ok(self.retry_while_busy(|mover| mover.migrate(socket, false))?)
    }

    /// Repeats a command while QEMU is busy: it reports a migration as cancelled or failed before it has released all
    /// of its resources.
    fn retry_while_busy<T>(
        &mut self,
        mut command: impl FnMut(&mut Self) -> Result<T, QmpError>,
    ) -> Result<T, QmpError> {
        let give_up = Instant::now() + BUSY_TIMEOUT;
        loop {
            match command(self) {
                Err(QmpError::Refused { text, .. })
                    if BUSY_ERRORS.iter().any(|busy| text.contains(busy)) && Instant::now() < give_up =>
                {
                    thread::sleep(POLL_INTERVAL);
                }
                result => return result,
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
    pub(super) fn resume_move(
        &mut self,
        record: OutgoingRecord,
        status: &str,
        report: &mut dyn FnMut(&MigrationReport),
    ) -> Result<CompletedMove, MoveError> {
        tracing::warn!("continuing a move to {} whose mover has ended", record.to);
        let mut move_state = MoveState::new(record, self.options);
        move_state.resumed = true;
        if status != "completed" {
            move_state.postcopy = PostcopyState::Active;
        }
        if matches!(status, "failed" | "cancelled") {
            let reason = format!("the source's migration is '{status}'");
            return self.handle_late_failure(None, move_state, reason);
        }
        let (carrier, has_all_memory) = self.ask_until_answered(&mut move_state)?;
        if has_all_memory {
            return Ok(self.finish(carrier, &move_state, 0));
        }
        self.watch_migration(carrier, move_state, report)
    }

    /// Watches a migration until the VM runs at the destination, or continues here.
    fn watch_migration(
        &mut self,
        mut carrier: Carrier,
        mut move_state: MoveState,
        report: &mut dyn FnMut(&MigrationReport),
    ) -> Result<CompletedMove, MoveError> {
        let mut loss = UndetectedLoss::default();
        loop {
            let migration = match self.qmp.migration() {
                Ok(migration) => migration,
                Err(error) if error.is_disconnected() => return self.handle_source_exit(carrier, move_state, &error),
                Err(error) => {
                    tracing::warn!("{error}");
                    // The status is unknown; only watching is possible.
                    json!({"status": "late"})
                }
            };
            move_state.log_status(status_of(&migration));
            match status_of(&migration) {
                "completed" => {
                    if !move_state.destination_runs {
                        report(&move_state.monitor.report(&migration, &self.progress, move_state.started.elapsed()));
                        carrier = self.hand_over(carrier, &mut move_state)?;
                    }
                    let mut last = move_state.monitor.report(&migration, &self.progress, move_state.started.elapsed());
                    last.downtime_ms = move_state.downtime_ms;
                    report(&last);
                    return Ok(self.finish(carrier, &move_state, last.round));
                }
                status @ ("failed" | "cancelled") => {
                    let reason = failure_reason(&migration, status);
                    if move_state.start_sent() {
                        return self.handle_late_failure(Some(carrier), move_state, reason);
                    }
                    return Err(self.abort(carrier, &move_state, reason));
                }
                "postcopy-active" => {
                    move_state.postcopy = PostcopyState::Active;
                    if !move_state.destination_runs {
                        carrier = self.hand_over(carrier, &mut move_state)?;
                    } else if loss.is_overdue(carrier.is_over() || !move_state.carries_channels)? {
                        let has_all_memory;
                        (carrier, has_all_memory) = self.ask_until_answered(&mut move_state)?;
                        if has_all_memory {
                            return Ok(self.finish(carrier, &move_state, 0));
                        }
                        let _ = self.qmp.execute_out_of_band("migrate-pause", json!({}));
                    }
                }
                "postcopy-paused" => {
                    move_state.postcopy = PostcopyState::Active;
                    let has_all_memory;
                    (carrier, has_all_memory) = self.recover(carrier, &mut move_state)?;
                    if has_all_memory {
                        return Ok(self.finish(carrier, &move_state, 0));
                    }
                    loss = UndetectedLoss::default();
                }
                "active" => {
                    self.track_run_state(&mut move_state);
                    self.adjust_downtime_limit(&mut move_state, &migration);
                }
                _ => {}
            }
            if !move_state.start_sent()
                && let Err(stop) = self.check_may_continue(&carrier, &mut move_state)
            {
                let error = self.abort(carrier, &move_state, stop.clone().unwrap_or_default());
                return Err(match error {
                    MoveError::NotMoved { .. } if stop.is_none() => MoveError::Cancelled,
                    error => error,
                });
            }
            let mut now = move_state.monitor.report(&migration, &self.progress, move_state.started.elapsed());
            now.expected_downtime_ms = move_state.expected_downtime.map(|time| time.as_millis() as u64);
            now.downtime_ms = move_state.downtime_ms;
            report(&now);
            // An exit of QEMU is detected above.
            let _ = move_state.monitor.poll_event(&mut self.qmp, POLL_INTERVAL);
        }
    }

    /// Checks whether the move may continue; once it may have switched to post-copy, it must. The error is the reason
    /// to abort, or `None` if the user has cancelled.
    fn check_may_continue(&mut self, carrier: &Carrier, move_state: &mut MoveState) -> Result<(), Option<String>> {
        // QEMU may have switched to post-copy, which cannot be undone.
        if move_state.postcopy == PostcopyState::Requested {
            return Ok(());
        }
        if self.is_cancelled() {
            return Err(None);
        }
        let verdict = move_state.monitor.verdict();
        if let Some(timeout) = self.options.limits().timeout.filter(|timeout| move_state.started.elapsed() > *timeout) {
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
            self.begin_postcopy(carrier, move_state)
                .map_err(|error| Some(format!("post-copy could not be started: {error}")))?;
        }
        Ok(())
    }

    /// Starts post-copy. Stops the VM first: if the end of post-copy fails, QEMU 10 resumes a VM that it has stopped
    /// itself, and then the VM would run on both hosts.
    fn begin_postcopy(&mut self, carrier: &Carrier, move_state: &mut MoveState) -> Result<(), String> {
        match carrier.ask(&move_state.request(MoverRequest::CheckPostcopy), self.cancel, Duration::ZERO)? {
            ToSource::Noted => {}
            ToSource::Refused { reasons } => return Err(reasons.join("; ")),
            other => return Err(format!("the destination answers {other:?}")),
        }
        move_state.record.stopped = true;
        self.record_file.save(&move_state.record).map_err(|error| error.to_string())?;
        self.qmp.execute("stop", json!({})).map_err(|error| error.to_string())?;
        // The disks are closed first, because a failure after the switch could not be undone.
        self.inactivate_disks(&mut move_state.record)?;
        let result = self.qmp.execute("migrate-start-postcopy", json!({}));
        result.map_err(|error| error.to_string())?;
        tracing::debug!("QEMU switches to post-copy");
        move_state.postcopy = PostcopyState::Requested;
        Ok(())
    }

    /// Makes QEMU stop its guest once the rest can be sent within the permitted downtime. QEMU counts bytes accepted
    /// by Larder as sent, so the bytes in flight and the hand-over add to the downtime.
    fn adjust_downtime_limit(&mut self, move_state: &mut MoveState, migration: &Value) {
        let totals = self.progress.totals();
        let sample = MigrationSample::new(move_state.started.elapsed(), migration, totals.raw_bytes, totals.wire_bytes);
        // While the link is lost, QEMU only fills Larder's buffers, and nothing is sent.
        let is_lost = self.progress.link().lost_since.is_some();
        let estimate = move_state.estimator.estimate(sample).filter(|_| !is_lost);
        move_state.expected_downtime =
            estimate.map(|rest| rest.saturating_add(self.progress.transit_time() + HANDOVER_TIME));
        let allowed_ms = self.options.limits().downtime_ms;
        move_state.monitor.set_downtime(allowed_ms);
        let limit_ms = match move_state.expected_downtime {
            Some(expected) if expected <= Duration::from_millis(allowed_ms) => DOWNTIME_LIMIT_STOP_MS,
            _ => DOWNTIME_LIMIT_RUN_MS,
        };
        if limit_ms == move_state.downtime_limit_ms {
            return;
        }
        // A failure is retried at the next sample.
        let set = json!({"downtime-limit": limit_ms});
        if self.qmp.execute("migrate-set-parameters", set).is_ok() {
            tracing::debug!(limit_ms, expected = ?move_state.expected_downtime, "QEMU's downtime limit is changed");
            move_state.downtime_limit_ms = limit_ms;
        }
    }

    /// Tracks whether the user pauses or resumes the VM while it moves.
    fn track_run_state(&mut self, move_state: &mut MoveState) {
        let state = match self.qmp.run_state() {
            Ok(state) if !move_state.record.stopped => state,
            _ => return,
        };
        // Other states are QEMU's own at the end of a migration.
        let stopped_states =
            ["paused", "io-error", "guest-panicked", "internal-error", "shutdown", "watchdog", "prelaunch"];
        let runs = is_running(&state);
        if move_state.record.run != runs && (runs || stopped_states.contains(&state.as_str())) {
            tracing::debug!(runs, "the user has paused or resumed the VM");
            move_state.record.run = runs;
            if let Err(error) = self.record_file.save(&move_state.record) {
                tracing::warn!("the record of the move cannot be updated: {error}");
            }
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }
}
