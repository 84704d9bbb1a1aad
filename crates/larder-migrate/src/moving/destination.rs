//! Mover at the destination: prepares QEMU, and runs the VM when the source asks for it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thiserror::Error;

use super::description::clock_ms;
use super::disks::{self, DiskDescription, DiskServers, HandoverAction};
use super::loading::{NotLoaded, QUERY_TIMEOUT, is_listening, is_waiting, wait_until_loaded};
use super::messages::{MoverRequest, ToDestination, ToSource, VERSION};
use super::postcopy::{self, FaultClaim, FaultHandlers};
use super::record::{IncomingPhase, IncomingRecord, MoveId, RecordFile};
use super::settings::{CHANNELS_MAX, MigrationRole, QemuMigrationSettings};
use super::socket_dir::SocketDir;
use super::{Description, status_of};
use crate::notes::{Notes, ReceivedNote};
use crate::qmp::{Qmp, QmpError};

/// Time limit for QEMU to run the VM: it opens its images for writing.
const CONT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the servers of disks to make the images this host's, before the VM runs.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before that is retried.
const COMMIT_RETRY_DELAY: Duration = Duration::from_millis(200);
/// Run states of a QEMU that has loaded a VM and has not received `cont`.
const STOPPED_STATES: [&str; 2] = ["paused", "prelaunch"];

/// State of a VM at its destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IncomingState {
    /// QEMU waits for a VM.
    Waiting,
    /// A VM is arriving, or has arrived and may not run yet.
    Incoming,
    /// The VM was started here.
    Running {
        /// True if all of its memory is here; otherwise post-copy continues.
        has_all_memory: bool,
    },
    /// The VM was started here, and QEMU has exited since.
    Exited,
    /// The VM was never started here, and never will be.
    NeverRan {
        /// Reason why.
        reason: String,
    },
}

/// Stage of a VM's arrival, for monitoring: available without asking QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncomingStage {
    /// No VM has arrived, or one is arriving; it runs at its source.
    Incoming,
    /// The source has stopped the VM, and it does not run here yet, or it runs here with nothing left to transfer.
    HandingOver,
    /// The VM runs here, and some of its memory has not arrived yet.
    PostCopy,
}

/// Mover of one QEMU at the destination, over any number of sessions.
pub struct DestinationMover {
    qmp_path: PathBuf,
    /// Directory of the socket where QEMU is to wait.
    incoming: SocketDir,
    user: u32,
    in_session: AtomicBool,
    stage: Mutex<IncomingStage>,
    inner: Mutex<Inner>,
}

struct Inner {
    qmp: Qmp,
    servers: Arc<dyn DiskServers>,
    fault_handlers: Arc<dyn FaultHandlers>,
    /// Held from the preparation of a move with post-copy until QEMU has all of the memory, or never will.
    fault_claim: Option<FaultClaim>,
    /// Character devices of QEMU that are sockets.
    devices: Vec<(String, PathBuf)>,
    record_file: RecordFile,
    record: Option<IncomingRecord>,
    /// Settings with which QEMU waits.
    settings: Option<QemuMigrationSettings>,
    /// Last answer to the source.
    last_answer: Option<ToSource>,
    /// Set once all of the VM has arrived.
    has_all_memory: bool,
    /// Set if QEMU did not answer the last query.
    query_timed_out: bool,
}

/// Reasons why a mover cannot be created for a QEMU.
#[derive(Debug, Error)]
pub enum NotReady {
    /// Error of QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Another obstacle; the text includes what to do.
    #[error("{0}")]
    Other(String),
}

impl DestinationMover {
    /// Creates the mover of the QEMU at `qmp`. Either QEMU was started with `-incoming defer`, or an earlier mover
    /// has left a record of it in the directory `records`. Its disks are served by some of `servers`; a move with
    /// post-copy claims its page faults from `fault_handlers`.
    ///
    /// # Errors
    /// QEMU does not answer, or does not wait for a VM.
    pub fn new(
        qmp: &Path,
        records: &Path,
        servers: Arc<dyn DiskServers>,
        fault_handlers: Arc<dyn FaultHandlers>,
    ) -> Result<Self, NotReady> {
        let mut connection = Qmp::connect(qmp)?;
        let record_file = RecordFile::new(records, "to", &connection);
        let mut record: Option<IncomingRecord> =
            record_file.load().map_err(|error| NotReady::Other(error.to_string()))?;
        let waiting = is_waiting(&mut connection)?;
        // The earlier mover ended before it made QEMU wait.
        if waiting && record.take_if(|it| it.phase == IncomingPhase::Coming).is_some() {
            record_file.remove();
        }
        if !waiting && record.is_none() {
            return Err(NotReady::Other(format!(
                "the QEMU at {} already has a VM, or is receiving one that is unknown to larder migrate: start a QEMU with \
                '-incoming defer', with the same options as the source's",
                qmp.display()
            )));
        }
        let devices = disks::socket_chardevs(&mut connection)?;
        // An earlier mover received `Go` and ended before it sent `cont` to QEMU.
        let allowed = record.as_ref().filter(|it| matches!(it.phase, IncomingPhase::LetRun { .. }));
        if let Some(record) = allowed.filter(|it| !it.disks.is_empty()) {
            servers.apply(&record.disks, HandoverAction::Commit).map_err(NotReady::Other)?;
        }
        if allowed.is_some_and(|it| it.phase == IncomingPhase::LetRun { run: true }) {
            let state = connection.run_state()?;
            if STOPPED_STATES.contains(&state.as_str()) {
                connection.execute_within("cont", json!({}), CONT_TIMEOUT)?;
            }
        }
        let user = connection.user();
        let incoming = SocketDir::for_listener(user)
            .map_err(|error| NotReady::Other(format!("cannot create a directory for QEMU's socket: {error}")))?;
        Ok(Self {
            qmp_path: qmp.to_owned(),
            incoming,
            user,
            in_session: AtomicBool::new(false),
            stage: Mutex::new(IncomingStage::Incoming),
            inner: Mutex::new(Inner {
                qmp: connection,
                servers,
                fault_handlers,
                fault_claim: None,
                devices,
                record_file,
                record,
                settings: None,
                last_answer: None,
                has_all_memory: false,
                query_timed_out: false,
            }),
        })
    }

    /// Returns the path of the socket where QEMU waits, once it does.
    pub fn incoming(&self) -> PathBuf {
        self.incoming.socket()
    }

    /// Returns the user that QEMU runs as.
    pub const fn user(&self) -> u32 {
        self.user
    }

    /// Returns the state of the VM, or `None` while QEMU is busy with another query.
    pub fn try_state(&self) -> Option<IncomingState> {
        match self.inner.try_lock() {
            Ok(mut inner) => Some(self.update_stage(inner.state())),
            Err(TryLockError::Poisoned(inner)) => Some(self.update_stage(inner.into_inner().state())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the state of the VM, after waiting for other queries to QEMU.
    pub fn state(&self) -> IncomingState {
        self.update_stage(self.lock().state())
    }

    /// Returns the stage that was last determined.
    pub fn stage(&self) -> IncomingStage {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_stage(&self, stage: IncomingStage) {
        let mut current = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        if *current != stage {
            tracing::debug!(from = ?*current, to = ?stage, "the stage of the VM has changed");
            *current = stage;
        }
    }

    fn update_stage(&self, state: IncomingState) -> IncomingState {
        if let IncomingState::Running { has_all_memory } = state {
            self.set_stage(running_stage(has_all_memory));
        }
        state
    }

    /// Returns true while a source has a session with this mover.
    pub fn is_in_session(&self) -> bool {
        self.in_session.load(Ordering::Relaxed)
    }

    /// Returns true if all of the VM has arrived, so that its source may ask to run it.
    pub fn is_loaded(&self) -> bool {
        self.lock().has_all_memory
    }

    /// Returns the last answer to the source, if there was one.
    pub fn last_answer(&self) -> Option<ToSource> {
        self.lock().last_answer.clone()
    }

    /// Answers the notes of a session until it is over.
    pub fn answer_notes(&self, notes: &Notes) {
        let _span = tracing::debug_span!("move", qemu = %self.qmp_path.display()).entered();
        self.in_session.store(true, Ordering::Relaxed);
        tracing::debug!("a session with the source begins");
        loop {
            match notes.receive(Duration::from_secs(1)) {
                ReceivedNote::SessionEnded => break,
                ReceivedNote::Timeout => {}
                ReceivedNote::Note(note) => {
                    let answer = self.handle_note(&note);
                    match &answer {
                        ToSource::Refused { reasons } => tracing::warn!("refused: {}", reasons.join("; ")),
                        answer => tracing::debug!(?answer, "the source's request is answered"),
                    }
                    notes.send(&serde_json::to_vec(&answer).expect("plain data"));
                }
            }
        }
        self.in_session.store(false, Ordering::Relaxed);
        tracing::debug!("the session with the source has ended");
    }

    /// Processes a note and returns the answer.
    pub(super) fn handle_note(&self, note: &[u8]) -> ToSource {
        let mut inner = self.lock();
        let answer = match parse_request(note) {
            Ok(ToDestination { id, tell, .. }) => match tell {
                MoverRequest::Prepare { vm, settings, disks } => self
                    .prepare(&mut inner, id, (&vm, &disks), settings)
                    .unwrap_or_else(|reasons| ToSource::Refused { reasons }),
                MoverRequest::Hot { chardev, ranges } => inner.warm_cache(&id, &chardev, &ranges),
                MoverRequest::CheckPostcopy => inner.check_postcopy(&id),
                MoverRequest::Go { run, postcopy } => {
                    let before = self.stage();
                    self.set_stage(IncomingStage::HandingOver);
                    let answer = inner.start_vm(&id, run, postcopy);
                    self.set_stage(match answer {
                        ToSource::Running { whole: has_all_memory } => running_stage(has_all_memory),
                        ToSource::Refused { .. } => before,
                        _ => IncomingStage::HandingOver,
                    });
                    answer
                }
                MoverRequest::Recover => self.recover(&mut inner, &id),
            },
            Err(reason) => refused(reason),
        };
        inner.last_answer = Some(answer.clone());
        answer
    }

    fn prepare(
        &self,
        inner: &mut Inner,
        id: MoveId,
        (vm, source_disks): (&Description, &[DiskDescription]),
        settings: QemuMigrationSettings,
    ) -> Result<ToSource, Vec<String>> {
        let to_reasons = |error: QmpError| vec![error.to_string()];
        let received_ms = clock_ms();
        if settings.multifd_channels > CHANNELS_MAX {
            return Err(vec![format!(
                "{} channels for pages were requested, and at most {CHANNELS_MAX} are supported",
                settings.multifd_channels
            )]);
        }
        // QEMU waits for a move that has not begun, because its source has given up.
        let already_waits = inner.is_waiting_with(settings).map_err(to_reasons)?;
        if inner.record.is_some() && !already_waits {
            return Err(vec![format!(
                "the QEMU at {} does not wait for a VM, or waits for one with other settings: start a new one",
                self.qmp_path.display()
            )]);
        }
        let here = Description { clock_ms: received_ms, ..Description::query(&mut inner.qmp).map_err(to_reasons)? };
        let mut differences = vm.differences(&here);
        inner.fault_claim = None;
        if settings.postcopy
            && let Err(reasons) = inner.claim_faults()
        {
            differences.extend(reasons);
        }
        let local_disks = disks::describe(&*inner.servers, &inner.devices);
        let agreed = local_disks.map_err(|error| vec![error]).and_then(|local| disks::agree(source_disks, &local));
        let agreed = agreed.map_err(|reasons| differences.extend(reasons)).unwrap_or_default();
        if !differences.is_empty() {
            inner.fault_claim = None;
            return Err(differences);
        }
        let moves_along = |device: &&(String, PathBuf)| agreed.moving_chardevs.contains(&device.0);
        let record = IncomingRecord {
            id,
            disks: inner.devices.iter().filter(moves_along).map(|(_, path)| path.clone()).collect(),
            phase: IncomingPhase::Coming,
        };
        let listening = self.start_listening(inner, record, settings, already_waits);
        listening.inspect_err(|_| inner.fault_claim = None)?;
        Ok(ToSource::Prepared {
            warnings: [vm.warnings(&here), agreed.warnings].concat(),
            disks: !agreed.moving_chardevs.is_empty(),
        })
    }

    /// Makes QEMU wait for this move, and records the move.
    fn start_listening(
        &self,
        inner: &mut Inner,
        record: IncomingRecord,
        settings: QemuMigrationSettings,
        already_waits: bool,
    ) -> Result<(), Vec<String>> {
        let to_reasons = |error: QmpError| vec![error.to_string()];
        if !already_waits {
            // Other clients may have used QEMU since.
            if !is_waiting(&mut inner.qmp).map_err(to_reasons)? {
                return Err(vec![format!(
                    "the QEMU at {} does not wait for a VM any more: start a new QEMU",
                    self.qmp_path.display()
                )]);
            }
            settings.apply(&mut inner.qmp, MigrationRole::Destination).map_err(to_reasons)?;
            // While QEMU waits, this only revokes that it would run once all has arrived.
            inner.qmp.execute("stop", json!({})).map_err(to_reasons)?;
        }
        inner.save(record).map_err(|error| vec![error])?;
        if !already_waits {
            let uri = format!("unix:{}", self.incoming.socket().display());
            let listening = inner.qmp.execute("migrate-incoming", json!({"uri": uri}));
            if let Err(error) = listening {
                inner.clear_record();
                return Err(to_reasons(error));
            }
            inner.settings = Some(settings);
        }
        Ok(())
    }

    /// Makes QEMU wait for the rest of a VM that is partly here. While it waits for memory, it can execute no other
    /// command.
    fn recover(&self, inner: &mut Inner, id: &MoveId) -> ToSource {
        if !inner.is_move(id) {
            return inner.unknown_move();
        }
        self.incoming.clear();
        let uri = format!("unix:{}", self.incoming.socket().display());
        match inner.qmp.execute_out_of_band("migrate-recover", json!({"uri": uri})) {
            Ok(_) => ToSource::Prepared { warnings: Vec::new(), disks: false },
            Err(error) => match inner.state() {
                IncomingState::Running { has_all_memory: true } => ToSource::Running { whole: true },
                IncomingState::Exited => exited_answer(),
                IncomingState::NeverRan { reason } => ToSource::NotRunning { reason },
                _ => refused(error.to_string()),
            },
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn is_move(&self, id: &MoveId) -> bool {
        self.record.as_ref().is_some_and(|record| record.id == *id)
    }

    fn unknown_move(&self) -> ToSource {
        refused(format!(
            "this move is unknown to the receiver for the QEMU at {}: is it the right host?",
            self.qmp.path().display()
        ))
    }

    /// Returns true if QEMU waits for a VM with these settings, and none of it has arrived.
    fn is_waiting_with(&mut self, settings: QemuMigrationSettings) -> Result<bool, QmpError> {
        let is_incoming = self.record.as_ref().is_some_and(|it| it.phase == IncomingPhase::Coming);
        if !is_incoming || self.settings != Some(settings) {
            return Ok(false);
        }
        let migration = self.qmp.migration()?;
        Ok(match status_of(&migration) {
            "setup" => true,
            "none" => is_listening(&migration) && self.qmp.run_state()? == "inmigrate",
            _ => false,
        })
    }

    /// Saves the record on disk first, then here: an answer must not be forgotten.
    fn save(&mut self, record: IncomingRecord) -> Result<(), String> {
        self.record_file
            .save(&record)
            .map_err(|error| format!("the destination cannot save the record of the move: {error}"))?;
        tracing::debug!(phase = ?record.phase, "the phase of the move is recorded");
        self.record = Some(record);
        Ok(())
    }

    fn set_phase(&mut self, phase: IncomingPhase) -> Result<(), String> {
        match self.record.clone() {
            Some(record) => self.save(IncomingRecord { phase, ..record }),
            None => Err("there is no move".to_owned()),
        }
    }

    fn clear_record(&mut self) {
        tracing::debug!("the record of the move is removed");
        self.record = None;
        self.fault_claim = None;
        self.record_file.remove();
    }

    fn state(&mut self) -> IncomingState {
        let state = self.query_state();
        if !matches!(
            state,
            IncomingState::Waiting | IncomingState::Incoming | IncomingState::Running { has_all_memory: false }
        ) {
            self.fault_claim = None;
        }
        state
    }

    fn query_state(&mut self) -> IncomingState {
        let migration = self
            .qmp
            .execute_within("query-migrate", json!({}), QUERY_TIMEOUT)
            .map(|migration| status_of(&migration).to_owned());
        let has_exited = migration.as_ref().is_err_and(QmpError::is_disconnected);
        let timed_out = migration.is_err() && !has_exited;
        if let Some(error) = migration.as_ref().err().filter(|_| timed_out && !self.query_timed_out) {
            tracing::warn!("{error}; if it is not receiving a VM at the moment, end it");
        }
        self.query_timed_out = timed_out;
        // A busy QEMU reports no status, so the flag is sticky. Only an outgoing migration is cancelled, before which
        // all must have arrived.
        self.has_all_memory |=
            migration.as_ref().is_ok_and(|status| ["completed", "cancelling", "cancelled"].contains(&status.as_str()));
        match self.record.as_ref().map(|record| &record.phase) {
            Some(IncomingPhase::Never { reason }) => IncomingState::NeverRan { reason: reason.clone() },
            Some(IncomingPhase::LetRun { .. }) if has_exited => IncomingState::Exited,
            Some(IncomingPhase::LetRun { .. }) => IncomingState::Running { has_all_memory: self.has_all_memory },
            Some(IncomingPhase::Coming) if has_exited || migration.as_ref().is_ok_and(|status| status == "failed") => {
                let reason = match migration {
                    Err(_) => "the destination's QEMU exited before all data had arrived".to_owned(),
                    Ok(_) => "the destination's QEMU failed to load the VM".to_owned(),
                };
                match self.record_never_ran(reason) {
                    Ok(reason) => IncomingState::NeverRan { reason },
                    Err(error) => {
                        tracing::error!("{error}");
                        IncomingState::Incoming
                    }
                }
            }
            None if has_exited => IncomingState::NeverRan { reason: "the destination's QEMU has exited".to_owned() },
            Some(IncomingPhase::Coming) => IncomingState::Incoming,
            None => IncomingState::Waiting,
        }
    }

    /// Claims the page faults of QEMU's memory, unless they are claimed already.
    fn claim_faults(&mut self) -> Result<(), Vec<String>> {
        if self.fault_claim.is_none() {
            self.fault_claim = Some(postcopy::claim(&mut self.qmp, &*self.fault_handlers)?);
        }
        Ok(())
    }

    /// Checks again whether QEMU can receive memory by post-copy. A receiver that was killed has lost its claim, and
    /// a pager may have attached since.
    fn check_postcopy(&mut self, id: &MoveId) -> ToSource {
        if !self.is_move(id) {
            return self.unknown_move();
        }
        match self.claim_faults() {
            Ok(()) => ToSource::Noted,
            Err(reasons) => ToSource::Refused { reasons },
        }
    }

    /// Passes the ranges that were hot at the source to the server of a disk that moves along.
    fn warm_cache(&self, id: &MoveId, chardev: &str, ranges: &str) -> ToSource {
        let socket = self.devices.iter().find(|(label, _)| label == chardev).map(|(_, path)| path);
        let moves_along = |socket: &&PathBuf| {
            let record = self.record.as_ref().filter(|arriving| arriving.id == *id);
            record.is_some_and(|record| record.disks.contains(socket))
        };
        if let Some(socket) = socket.filter(moves_along) {
            self.servers.warm_cache(socket, ranges);
        }
        ToSource::Noted
    }

    fn apply_to_disks(&self, action: HandoverAction) -> Result<(), String> {
        match self.record.as_ref().map(|record| record.disks.as_slice()) {
            None | Some([]) => Ok(()),
            Some(disks) => {
                tracing::debug!(?action, "the servers of the disks perform a step");
                self.servers.apply(disks, action)
            }
        }
    }

    /// Makes the disks this host's before the VM runs. Then neither a crash of this process nor of this host can give
    /// another host disks that the guest here has written to.
    fn commit_disks(&self) -> Result<(), String> {
        let until = Instant::now() + COMMIT_TIMEOUT;
        while let Err(error) = self.apply_to_disks(HandoverAction::Commit) {
            if Instant::now() > until {
                return Err(format!(
                    "the destination cannot take over the VM's disks, so the VM was not started there yet: {error}"
                ));
            }
            std::thread::sleep(COMMIT_RETRY_DELAY);
        }
        Ok(())
    }

    /// Records that the VM never runs here, whatever happens. Returns the reason.
    fn record_never_ran(&mut self, reason: String) -> Result<String, String> {
        // The source opens the disks next, and storage without locks would permit that while they are open here.
        self.apply_to_disks(HandoverAction::RollBack)
            .map_err(|error| format!("{reason}; and its disks may still be open at the destination: {error}"))?;
        self.set_phase(IncomingPhase::Never { reason: reason.clone() })
            .map_err(|error| format!("the destination could not record that the VM will not run there: {error}"))?;
        // QEMU may have exited already.
        let _ = self.qmp.execute_within("quit", json!({}), QUERY_TIMEOUT);
        Ok(reason)
    }

    /// Starts the VM if all of it is here; also confirms a VM that was started before.
    fn start_vm(&mut self, id: &MoveId, run: bool, postcopy: bool) -> ToSource {
        if !self.is_move(id) {
            return self.unknown_move();
        }
        match self.state() {
            IncomingState::NeverRan { reason } => return ToSource::NotRunning { reason },
            IncomingState::Running { has_all_memory } => return self.confirm_start(run, postcopy, has_all_memory),
            IncomingState::Exited => return exited_answer(),
            IncomingState::Waiting | IncomingState::Incoming => {}
        }
        if let Err(error) = wait_until_loaded(&mut self.qmp) {
            return match error {
                NotLoaded::Timeout(reason) if postcopy => ToSource::NotYet { reason },
                NotLoaded::Never(reason) | NotLoaded::Timeout(reason) => self.answer_not_running(reason),
            };
        }
        // Until the VM may run, a server of disks that restarts has them closed.
        if let Err(reason) = self.apply_to_disks(HandoverAction::Activate) {
            let reason = format!("its disks cannot be opened at the destination: {reason}");
            return match postcopy {
                true => ToSource::NotYet { reason },
                false => self.answer_not_running(reason),
            };
        }
        // The VM may run from here on.
        if let Err(error) = self.set_phase(IncomingPhase::LetRun { run }) {
            return refused(error);
        }
        if let Err(reason) = self.commit_disks() {
            return not_yet(postcopy, reason);
        }
        if run && let Err(error) = self.qmp.execute_within("cont", json!({}), CONT_TIMEOUT) {
            return match error {
                QmpError::Refused { .. } => self.handle_refused_start(postcopy, error.to_string()),
                error => ToSource::Unknown { reason: error.to_string() },
            };
        }
        self.has_all_memory |= !postcopy;
        ToSource::Running { whole: self.has_all_memory }
    }

    /// Handles QEMU's refusal to run the VM: it has not run, so its disks are released again.
    fn handle_refused_start(&mut self, postcopy: bool, reason: String) -> ToSource {
        let closed = self.apply_to_disks(HandoverAction::AwaitIncoming);
        let not_run = closed.and_then(|()| self.set_phase(IncomingPhase::Coming));
        match not_run {
            Err(error) => not_yet(postcopy, format!("{reason}; and then: {error}")),
            // The source may ask again.
            Ok(()) if postcopy => ToSource::NotYet { reason },
            Ok(()) => self.answer_not_running(reason),
        }
    }

    /// Confirms a VM that was started before. The mover may have ended before QEMU ran it.
    fn confirm_start(&mut self, run: bool, postcopy: bool, has_all_memory: bool) -> ToSource {
        if let Err(reason) = self.commit_disks() {
            return not_yet(postcopy, reason);
        }
        let unknown = |error: QmpError| ToSource::Unknown { reason: error.to_string() };
        match self.qmp.run_state() {
            Ok(state) if run && STOPPED_STATES.contains(&state.as_str()) => {
                match self.qmp.execute_within("cont", json!({}), CONT_TIMEOUT) {
                    Ok(_) => ToSource::Running { whole: has_all_memory },
                    Err(error) => unknown(error),
                }
            }
            Ok(_) => ToSource::Running { whole: has_all_memory },
            Err(error) => unknown(error),
        }
    }

    fn answer_not_running(&mut self, reason: String) -> ToSource {
        match self.record_never_ran(reason) {
            Ok(reason) => ToSource::NotRunning { reason },
            Err(error) => refused(error),
        }
    }
}

const fn running_stage(has_all_memory: bool) -> IncomingStage {
    match has_all_memory {
        true => IncomingStage::HandingOver,
        false => IncomingStage::PostCopy,
    }
}

/// Returns the answer for an obstacle that may pass. In post-copy the source asks again; otherwise its user does.
fn not_yet(postcopy: bool, reason: String) -> ToSource {
    match postcopy {
        true => ToSource::NotYet { reason },
        false => refused(reason),
    }
}

fn exited_answer() -> ToSource {
    ToSource::Unknown {
        reason: "the destination's QEMU received the command to run the VM, and has exited since".to_owned(),
    }
}

fn refused(reason: String) -> ToSource {
    ToSource::Refused { reasons: vec![reason] }
}

fn parse_request(note: &[u8]) -> Result<ToDestination, String> {
    let value: Value =
        serde_json::from_slice(note).map_err(|error| format!("the source's message is no JSON ({error})"))?;
    let version = &value["version"];
    if *version != VERSION {
        return Err(format!(
            "the source's mover has version {version}, this one {VERSION}: use the same version of Larder"
        ));
    }
    serde_json::from_value(value).map_err(|error| {
        format!("the destination's Larder does not understand the source's message ({error}): use the same version of Larder")
    })
}
