//! Mover at the destination: prepares QEMU, and runs the VM when the source asks for it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thiserror::Error;

use super::description::clock_ms;
use super::disks::{self, Deed, DiskDescription, DiskServers};
use super::folder::Folder;
use super::loading::{LOOK_TIMEOUT, NotLoaded, is_waiting, listens, wait_until_loaded};
use super::messages::{Tell, ToDestination, ToSource, VERSION};
use super::postcopy::{self, FaultClaim, FaultHandlers};
use super::record::{Arriving, MoveId, Phase, Place};
use super::settings::{CHANNELS_MAX, Role, Settings};
use super::{Description, status_of};
use crate::notes::{Notes, Received};
use crate::qmp::{Qmp, QmpError};

/// Time limit for QEMU to run the VM: it opens its images for writing.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the servers of disks to make the images this host's, before the VM runs.
const KEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before that is retried.
const KEEP_AGAIN: Duration = Duration::from_millis(200);
/// Run states of a QEMU that has loaded a VM and has not received `cont`.
const STILL: [&str; 2] = ["paused", "prelaunch"];

/// State of a VM at its destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// QEMU waits for a VM.
    Waiting,
    /// A VM is arriving, or has arrived and may not run yet.
    Coming,
    /// The VM was started here.
    Running {
        /// True if all of its memory is here; otherwise post-copy continues.
        whole: bool,
    },
    /// The VM was started here, and QEMU has exited since.
    Ended,
    /// The VM was never started here, and never will be.
    Never {
        /// Reason why.
        reason: String,
    },
}

/// Stage of a VM's arrival, for monitoring: available without asking QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No VM has arrived, or one is arriving; it runs at its source.
    Coming,
    /// The source has stopped the VM, and it does not run here yet, or it runs here with nothing left to transfer.
    HandingOver,
    /// The VM runs here, and some of its memory has not arrived yet.
    PostCopy,
}

/// Mover of one QEMU at the destination, over any number of sessions.
pub struct Destination {
    qmp_path: PathBuf,
    /// Directory of the socket where QEMU is to wait.
    incoming: Folder,
    user: u32,
    in_session: AtomicBool,
    stage: Mutex<Stage>,
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
    place: Place,
    arriving: Option<Arriving>,
    /// Settings with which QEMU waits.
    settings: Option<Settings>,
    /// Last answer to the source.
    told: Option<ToSource>,
    /// Set once all of the VM has arrived.
    whole: bool,
    /// Set if QEMU did not answer the last query.
    is_late: bool,
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

impl Destination {
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
        let place = Place::new(records, "to", &connection);
        let mut arriving: Option<Arriving> = place.load().map_err(|error| NotReady::Other(error.to_string()))?;
        let waits = is_waiting(&mut connection)?;
        // The earlier mover ended before it made QEMU wait.
        if waits && arriving.take_if(|it| it.phase == Phase::Coming).is_some() {
            place.remove();
        }
        if !waits && arriving.is_none() {
            return Err(NotReady::Other(format!(
                "the QEMU at {} already has a VM, or is receiving one that is unknown to larder migrate: start a QEMU with \
                '-incoming defer', with the same options as the source's",
                qmp.display()
            )));
        }
        let devices = disks::sockets_of(&mut connection)?;
        // An earlier mover received `Go` and ended before it sent `cont` to QEMU.
        let let_run = arriving.as_ref().filter(|it| matches!(it.phase, Phase::LetRun { .. }));
        if let Some(arriving) = let_run.filter(|it| !it.disks.is_empty()) {
            servers.have(&arriving.disks, Deed::Keep).map_err(NotReady::Other)?;
        }
        if let_run.is_some_and(|it| it.phase == Phase::LetRun { run: true }) {
            let state = connection.run_state()?;
            if STILL.contains(&state.as_str()) {
                connection.execute_within("cont", json!({}), RUN_TIMEOUT)?;
            }
        }
        let user = connection.user();
        let incoming = Folder::for_listener(user)
            .map_err(|error| NotReady::Other(format!("cannot create a directory for QEMU's socket: {error}")))?;
        Ok(Self {
            qmp_path: qmp.to_owned(),
            incoming,
            user,
            in_session: AtomicBool::new(false),
            stage: Mutex::new(Stage::Coming),
            inner: Mutex::new(Inner {
                qmp: connection,
                servers,
                fault_handlers,
                fault_claim: None,
                devices,
                place,
                arriving,
                settings: None,
                told: None,
                whole: false,
                is_late: false,
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
    pub fn look(&self) -> Option<State> {
        match self.inner.try_lock() {
            Ok(mut inner) => Some(self.looked(inner.look())),
            Err(TryLockError::Poisoned(inner)) => Some(self.looked(inner.into_inner().look())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the state of the VM, after waiting for other queries to QEMU.
    pub fn look_now(&self) -> State {
        self.looked(self.lock().look())
    }

    /// Returns the stage that was last determined.
    pub fn stage(&self) -> Stage {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, stage: Stage) {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = stage;
    }

    fn looked(&self, state: State) -> State {
        if let State::Running { whole } = state {
            self.enter(running(whole));
        }
        state
    }

    /// Returns true while a source has a session with this mover.
    pub fn is_in_session(&self) -> bool {
        self.in_session.load(Ordering::Relaxed)
    }

    /// Returns true if all of the VM has arrived, so that its source may ask to run it.
    pub fn was_loaded(&self) -> bool {
        self.lock().whole
    }

    /// Returns the last answer to the source, if there was one.
    pub fn told(&self) -> Option<ToSource> {
        self.lock().told.clone()
    }

    /// Answers the notes of a session until it is over.
    pub fn answer(&self, notes: &Notes) {
        self.in_session.store(true, Ordering::Relaxed);
        loop {
            match notes.receive(Duration::from_secs(1)) {
                Received::Over => break,
                Received::Nothing => {}
                Received::Note(note) => {
                    let answer = self.heard(&note);
                    match &answer {
                        ToSource::Refused { reasons } => tracing::warn!("refused: {}", reasons.join("; ")),
                        answer => tracing::debug!("{answer:?}"),
                    }
                    notes.send(&serde_json::to_vec(&answer).expect("plain data"));
                }
            }
        }
        self.in_session.store(false, Ordering::Relaxed);
    }

    /// Processes a note and returns the answer.
    pub(super) fn heard(&self, note: &[u8]) -> ToSource {
        let mut inner = self.lock();
        let answer = match parse(note) {
            Ok(ToDestination { id, tell, .. }) => match tell {
                Tell::Prepare { vm, settings, disks } => self
                    .prepare(&mut inner, id, (&vm, &disks), settings)
                    .unwrap_or_else(|reasons| ToSource::Refused { reasons }),
                Tell::Hot { chardev, ranges } => inner.warm(&id, &chardev, &ranges),
                Tell::CheckPostcopy => inner.check_postcopy(&id),
                Tell::Go { run, postcopy } => {
                    let before = self.stage();
                    self.enter(Stage::HandingOver);
                    let answer = inner.go(&id, run, postcopy);
                    self.enter(match answer {
                        ToSource::Running { whole } => running(whole),
                        ToSource::Refused { .. } => before,
                        _ => Stage::HandingOver,
                    });
                    answer
                }
                Tell::Recover => self.recover(&mut inner, &id),
            },
            Err(reason) => refused(reason),
        };
        inner.told = Some(answer.clone());
        answer
    }

    fn prepare(
        &self,
        inner: &mut Inner,
        id: MoveId,
        (vm, their_disks): (&Description, &[DiskDescription]),
        settings: Settings,
    ) -> Result<ToSource, Vec<String>> {
        let said = |error: QmpError| vec![error.to_string()];
        let came_at = clock_ms();
        if settings.multifd_channels > CHANNELS_MAX {
            return Err(vec![format!(
                "{} channels for pages were requested, and at most {CHANNELS_MAX} are supported",
                settings.multifd_channels
            )]);
        }
        // QEMU waits for a move that has not begun, because its source has given up.
        let waits_still = inner.waits_with(settings).map_err(said)?;
        if inner.arriving.is_some() && !waits_still {
            return Err(vec![format!(
                "the QEMU at {} does not wait for a VM, or waits for one with other settings: start a new one",
                self.qmp_path.display()
            )]);
        }
        let here = Description {
            clock_ms: came_at,
            ..Description::of(&mut inner.qmp).map_err(said)?
        };
        let mut differences = vm.differences(&here);
        inner.fault_claim = None;
        if settings.postcopy
            && let Err(reasons) = inner.claim_faults()
        {
            differences.extend(reasons);
        }
        let our_disks = disks::describe(&*inner.servers, &inner.devices);
        let agreed = our_disks
            .map_err(|error| vec![error])
            .and_then(|ours| disks::agree(their_disks, &ours));
        let agreed = agreed
            .map_err(|reasons| differences.extend(reasons))
            .unwrap_or_default();
        if !differences.is_empty() {
            inner.fault_claim = None;
            return Err(differences);
        }
        let go_along = |device: &&(String, PathBuf)| agreed.go_along.contains(&device.0);
        let coming = Arriving {
            id,
            disks: inner
                .devices
                .iter()
                .filter(go_along)
                .map(|(_, path)| path.clone())
                .collect(),
            phase: Phase::Coming,
        };
        let waits = self.wait_for(inner, coming, settings, waits_still);
        waits.inspect_err(|_| inner.fault_claim = None)?;
        Ok(ToSource::Prepared {
            warnings: [vm.warnings(&here), agreed.warnings].concat(),
            disks: !agreed.go_along.is_empty(),
        })
    }

    /// Makes QEMU wait for this move, and records the move.
    fn wait_for(
        &self,
        inner: &mut Inner,
        coming: Arriving,
        settings: Settings,
        waits_still: bool,
    ) -> Result<(), Vec<String>> {
        let said = |error: QmpError| vec![error.to_string()];
        if !waits_still {
            // Other clients may have used QEMU since.
            if !is_waiting(&mut inner.qmp).map_err(said)? {
                return Err(vec![format!(
                    "the QEMU at {} does not wait for a VM any more: start a new QEMU",
                    self.qmp_path.display()
                )]);
            }
            settings.apply(&mut inner.qmp, Role::Destination).map_err(said)?;
            // While QEMU waits, this only revokes that it would run once all has arrived.
            inner.qmp.execute("stop", json!({})).map_err(said)?;
        }
        inner.save(coming).map_err(|error| vec![error])?;
        if !waits_still {
            let uri = format!("unix:{}", self.incoming.socket().display());
            let waits = inner.qmp.execute("migrate-incoming", json!({"uri": uri}));
            if let Err(error) = waits {
                inner.forget();
                return Err(said(error));
            }
            inner.settings = Some(settings);
        }
        Ok(())
    }

    /// Makes QEMU wait for the rest of a VM that is partly here. While it waits for memory, it can execute no other
    /// command.
    fn recover(&self, inner: &mut Inner, id: &MoveId) -> ToSource {
        if !inner.is_of(id) {
            return inner.unknown_move();
        }
        self.incoming.clear();
        let uri = format!("unix:{}", self.incoming.socket().display());
        match inner.qmp.execute_out_of_band("migrate-recover", json!({"uri": uri})) {
            Ok(_) => ToSource::Prepared {
                warnings: Vec::new(),
                disks: false,
            },
            Err(error) => match inner.look() {
                State::Running { whole: true } => ToSource::Running { whole: true },
                State::Ended => ended(),
                State::Never { reason } => ToSource::NotRunning { reason },
                _ => refused(error.to_string()),
            },
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn is_of(&self, id: &MoveId) -> bool {
        self.arriving.as_ref().is_some_and(|arriving| arriving.id == *id)
    }

    fn unknown_move(&self) -> ToSource {
        refused(format!(
            "this move is unknown to the receiver for the QEMU at {}: is it the right host?",
            self.qmp.path().display()
        ))
    }

    /// Returns true if QEMU waits for a VM with these settings, and none of it has arrived.
    fn waits_with(&mut self, settings: Settings) -> Result<bool, QmpError> {
        let is_coming = self.arriving.as_ref().is_some_and(|it| it.phase == Phase::Coming);
        if !is_coming || self.settings != Some(settings) {
            return Ok(false);
        }
        let migration = self.qmp.migration()?;
        Ok(match status_of(&migration) {
            "setup" => true,
            "none" => listens(&migration) && self.qmp.run_state()? == "inmigrate",
            _ => false,
        })
    }

    /// Saves the record on disk first, then here: an answer must not be forgotten.
    fn save(&mut self, arriving: Arriving) -> Result<(), String> {
        self.place
            .save(&arriving)
            .map_err(|error| format!("the destination cannot save the record of the move: {error}"))?;
        self.arriving = Some(arriving);
        Ok(())
    }

    fn enter(&mut self, phase: Phase) -> Result<(), String> {
        match self.arriving.clone() {
            Some(arriving) => self.save(Arriving { phase, ..arriving }),
            None => Err("there is no move".to_owned()),
        }
    }

    fn forget(&mut self) {
        self.arriving = None;
        self.fault_claim = None;
        self.place.remove();
    }

    fn look(&mut self) -> State {
        let state = self.inspect();
        if !matches!(state, State::Waiting | State::Coming | State::Running { whole: false }) {
            self.fault_claim = None;
        }
        state
    }

    fn inspect(&mut self) -> State {
        let migration = self
            .qmp
            .execute_within("query-migrate", json!({}), LOOK_TIMEOUT)
            .map(|migration| status_of(&migration).to_owned());
        let is_gone = migration.as_ref().is_err_and(QmpError::is_gone);
        let is_late = migration.is_err() && !is_gone;
        if let Some(error) = migration.as_ref().err().filter(|_| is_late && !self.is_late) {
            tracing::warn!("{error}; if it is not receiving a VM at the moment, end it");
        }
        self.is_late = is_late;
        // A busy QEMU reports no status, so the flag is sticky. Only an outgoing migration is cancelled, before which
        // all must have arrived.
        self.whole |= migration
            .as_ref()
            .is_ok_and(|status| ["completed", "cancelling", "cancelled"].contains(&status.as_str()));
        match self.arriving.as_ref().map(|arriving| &arriving.phase) {
            Some(Phase::Never { reason }) => State::Never { reason: reason.clone() },
            Some(Phase::LetRun { .. }) if is_gone => State::Ended,
            Some(Phase::LetRun { .. }) => State::Running { whole: self.whole },
            Some(Phase::Coming) if is_gone || migration.as_ref().is_ok_and(|status| status == "failed") => {
                let reason = match migration {
                    Err(_) => "the destination's QEMU exited before all data had arrived".to_owned(),
                    Ok(_) => "the destination's QEMU failed to load the VM".to_owned(),
                };
                match self.never(reason) {
                    Ok(reason) => State::Never { reason },
                    Err(error) => {
                        tracing::error!("{error}");
                        State::Coming
                    }
                }
            }
            None if is_gone => State::Never {
                reason: "the destination's QEMU has exited".to_owned(),
            },
            Some(Phase::Coming) => State::Coming,
            None => State::Waiting,
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
        if !self.is_of(id) {
            return self.unknown_move();
        }
        match self.claim_faults() {
            Ok(()) => ToSource::Noted,
            Err(reasons) => ToSource::Refused { reasons },
        }
    }

    /// Passes the ranges that were hot at the source to the server of a disk that moves along.
    fn warm(&self, id: &MoveId, chardev: &str, ranges: &str) -> ToSource {
        let socket = self
            .devices
            .iter()
            .find(|(label, _)| label == chardev)
            .map(|(_, path)| path);
        let comes = |socket: &&PathBuf| {
            let arriving = self.arriving.as_ref().filter(|arriving| arriving.id == *id);
            arriving.is_some_and(|arriving| arriving.disks.contains(socket))
        };
        if let Some(socket) = socket.filter(comes) {
            self.servers.warm(socket, ranges);
        }
        ToSource::Noted
    }

    fn have_disks(&self, deed: Deed) -> Result<(), String> {
        match self.arriving.as_ref().map(|arriving| arriving.disks.as_slice()) {
            None | Some([]) => Ok(()),
            Some(disks) => self.servers.have(disks, deed),
        }
    }

    /// Makes the disks this host's before the VM runs. Then neither a crash of this process nor of this host can give
    /// another host disks that the guest here has written to.
    fn keep_disks(&self) -> Result<(), String> {
        let until = Instant::now() + KEEP_TIMEOUT;
        while let Err(error) = self.have_disks(Deed::Keep) {
            if Instant::now() > until {
                return Err(format!(
                    "the destination cannot take over the VM's disks, so the VM was not started there yet: {error}"
                ));
            }
            std::thread::sleep(KEEP_AGAIN);
        }
        Ok(())
    }

    /// Records that the VM never runs here, whatever happens. Returns the reason.
    fn never(&mut self, reason: String) -> Result<String, String> {
        // The source opens the disks next, and storage without locks would permit that while they are open here.
        self.have_disks(Deed::Yield)
            .map_err(|error| format!("{reason}; and its disks may still be open at the destination: {error}"))?;
        self.enter(Phase::Never { reason: reason.clone() })
            .map_err(|error| format!("the destination could not record that the VM will not run there: {error}"))?;
        // QEMU may have exited already.
        let _ = self.qmp.execute_within("quit", json!({}), LOOK_TIMEOUT);
        Ok(reason)
    }

    /// Starts the VM if all of it is here; also confirms a VM that was started before.
    fn go(&mut self, id: &MoveId, run: bool, postcopy: bool) -> ToSource {
        if !self.is_of(id) {
            return self.unknown_move();
        }
        match self.look() {
            State::Never { reason } => return ToSource::NotRunning { reason },
            State::Running { whole } => return self.go_again(run, postcopy, whole),
            State::Ended => return ended(),
            State::Waiting | State::Coming => {}
        }
        if let Err(error) = wait_until_loaded(&mut self.qmp) {
            return match error {
                NotLoaded::Late(reason) if postcopy => ToSource::NotYet { reason },
                NotLoaded::Never(reason) | NotLoaded::Late(reason) => self.not_running(reason),
            };
        }
        // Until the VM may run, a server of disks that restarts has them closed.
        if let Err(reason) = self.have_disks(Deed::Take) {
            let reason = format!("its disks cannot be opened at the destination: {reason}");
            return match postcopy {
                true => ToSource::NotYet { reason },
                false => self.not_running(reason),
            };
        }
        // The VM may run from here on.
        if let Err(error) = self.enter(Phase::LetRun { run }) {
            return refused(error);
        }
        if let Err(reason) = self.keep_disks() {
            return not_yet(postcopy, reason);
        }
        if run && let Err(error) = self.qmp.execute_within("cont", json!({}), RUN_TIMEOUT) {
            return match error {
                QmpError::Refused { .. } => self.refuses_to_run(postcopy, error.to_string()),
                error => ToSource::Unknown {
                    reason: error.to_string(),
                },
            };
        }
        self.whole |= !postcopy;
        ToSource::Running { whole: self.whole }
    }

    /// Handles QEMU's refusal to run the VM: it has not run, so its disks are released again.
    fn refuses_to_run(&mut self, postcopy: bool, reason: String) -> ToSource {
        let left = self.have_disks(Deed::GiveBack);
        let not_run = left.and_then(|()| self.enter(Phase::Coming));
        match not_run {
            Err(error) => not_yet(postcopy, format!("{reason}; and then: {error}")),
            // The source may ask again.
            Ok(()) if postcopy => ToSource::NotYet { reason },
            Ok(()) => self.not_running(reason),
        }
    }

    /// Confirms a VM that was started before. The mover may have ended before QEMU ran it.
    fn go_again(&mut self, run: bool, postcopy: bool, whole: bool) -> ToSource {
        if let Err(reason) = self.keep_disks() {
            return not_yet(postcopy, reason);
        }
        let unknown = |error: QmpError| ToSource::Unknown {
            reason: error.to_string(),
        };
        match self.qmp.run_state() {
            Ok(state) if run && STILL.contains(&state.as_str()) => {
                match self.qmp.execute_within("cont", json!({}), RUN_TIMEOUT) {
                    Ok(_) => ToSource::Running { whole },
                    Err(error) => unknown(error),
                }
            }
            Ok(_) => ToSource::Running { whole },
            Err(error) => unknown(error),
        }
    }

    fn not_running(&mut self, reason: String) -> ToSource {
        match self.never(reason) {
            Ok(reason) => ToSource::NotRunning { reason },
            Err(error) => refused(error),
        }
    }
}

const fn running(whole: bool) -> Stage {
    match whole {
        true => Stage::HandingOver,
        false => Stage::PostCopy,
    }
}

/// Returns the answer for an obstacle that may pass. In post-copy the source asks again; otherwise its user does.
fn not_yet(postcopy: bool, reason: String) -> ToSource {
    match postcopy {
        true => ToSource::NotYet { reason },
        false => refused(reason),
    }
}

fn ended() -> ToSource {
    ToSource::Unknown {
        reason: "the destination's QEMU received the command to run the VM, and has exited since".to_owned(),
    }
}

fn refused(reason: String) -> ToSource {
    ToSource::Refused { reasons: vec![reason] }
}

fn parse(note: &[u8]) -> Result<ToDestination, String> {
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
