//! The source's mover: sets QEMU going, watches it, and hands the VM over.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};
use thiserror::Error;

use super::Description;
use super::folder::Folder;
use super::messages::{Tell, ToDestination, ToSource, VERSION};
use super::record::{Leaving, MoveId, Place};
use super::settings::{Before, Role, Settings};
use super::watch::{Report, Watch};
use crate::notes::{Notes, Received};
use crate::progress::Progress;
use crate::qmp::{Qmp, QmpError};
use crate::send::{self, SendError, Sender, Steering};

/// After so long without an answer, and again, it is said that there is none.
const SAY_LATE_EVERY: Duration = Duration::from_secs(30);
/// Between two looks at QEMU.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long QEMU may take to give up a migration whose sockets are shut, and to run again.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a VM that is handed over is not left alone by a mover that is to stop.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Between two questions whether the VM runs at the destination.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// How long it asks if QEMU has ended here.
const ASK_WITHOUT_SOURCE: Duration = Duration::from_secs(60);
/// How long QEMU may take to see that its sockets are shut, in post-copy; QEMU 7.2 does not where all is sent.
const CUT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often it is told to see it.
const CUT_TRIES: u32 = 6;

/// What is to be moved, and how.
pub struct Options {
    /// The source QEMU's monitor.
    pub qmp: PathBuf,
    /// A folder, this user's alone, for what a mover after this one must know ([`super::record`]).
    pub records: PathBuf,
    /// Where to, and over what.
    pub send: send::Options,
    /// QEMU's channels for pages besides its main channel; 0: none.
    pub multifd_channels: u8,
    /// How long the guest may stand still in the end, in milliseconds.
    pub downtime_ms: u64,
    /// After so long without an end it is given up.
    pub timeout: Option<Duration>,
    /// What does not converge may be ended by post-copy.
    pub postcopy: bool,
    /// What does not converge may be throttled.
    pub throttle: bool,
    /// The source's QEMU is not ended.
    pub keep: bool,
}

/// How it ended well.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Done {
    /// From the start of QEMU's migration until the VM ran at the destination and nothing was left, in seconds.
    pub seconds: f64,
    /// From the stop of the guest here until the destination said that it runs, in milliseconds.
    pub downtime_ms: Option<u64>,
    /// As QEMU counts.
    pub rounds: u64,
    /// By post-copy.
    pub postcopy: bool,
    /// It had been handed over by a mover before, which had not heard of it.
    pub resumed: bool,
}

/// Why a VM was not moved.
#[derive(Debug, Error)]
pub enum MoveError {
    /// Found before anything was touched.
    #[error("it cannot be moved, and nothing was changed: {}", .0.join("; "))]
    Preflight(Vec<String>),
    /// It runs on where it was.
    #[error("not moved; the VM goes on here: {reason}")]
    Here {
        /// Why.
        reason: String,
    },
    /// It runs on where it was, since the user wanted so.
    #[error("cancelled; the VM goes on here")]
    Cancelled,
    /// It stands still.
    #[error(
        "the VM stands still here: it was handed over, and whether it runs at the destination is not known ({reason}); run \
        the same command again once the destination can be reached, and it will run there or here. Only if its QEMU there \
        has ended, and will not run: larder migrate --take-back lets it run here"
    )]
    InDoubt {
        /// Why there is no answer.
        reason: String,
    },
    /// Post-copy was cut, and the halves do not come together.
    #[error(
        "post-copy broke off and could not be taken up again: {reason}; the VM needs both QEMUs: run the same command again \
        while both live"
    )]
    Broken {
        /// Why.
        reason: String,
    },
    /// The source's QEMU has ended before all had gone.
    #[error(
        "the QEMU here has ended in the middle of the move, and the VM with it unless it runs at the destination: {reason}"
    )]
    Lost {
        /// Why.
        reason: String,
    },
    /// QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Not moved, and QEMU did not go on as it should.
    #[error("{0}")]
    Unsettled(String),
}

/// Moves the VM.
///
/// # Errors
/// It is not at the destination, or nobody knows: the error says where it is.
pub fn run(
    options: &Options,
    progress: &Arc<Progress>,
    cancel: &AtomicBool,
    report: &mut dyn FnMut(&Report),
) -> Result<Done, MoveError> {
    let mut mover = Mover::new(options, Arc::clone(progress), cancel)?;
    let leaving: Option<Leaving> = mover.place.load().map_err(preflight)?;
    let (state, migration) = mover.at_rest(leaving.is_some())?;
    let status = status_of(&migration);
    match (state.as_str(), status) {
        ("running" | "paused" | "suspended" | "io-error", "none" | "completed" | "failed" | "cancelled") => {
            mover.move_it(&state, report)
        }
        ("postmigrate", "completed") | (_, "postcopy-active" | "postcopy-paused" | "postcopy-recover") => {
            let Some(leaving) = leaving else {
                return Err(MoveError::Preflight(vec![format!(
                    "QEMU's VM is '{state}', its migration '{status}', and there is no record of a move under way: it has been \
                    moved, or something else moves it"
                )]));
            };
            mover.go_on(leaving, status, report)
        }
        _ => Err(MoveError::Preflight(vec![format!(
            "QEMU's VM is '{state}', and its migration '{status}'"
        )])),
    }
}

/// Lets a VM run here that was handed over. Whoever wants this has made sure that the destination's QEMU has ended.
///
/// # Errors
/// It was not handed over, or can never run here again.
pub fn take_back(qmp: &Path, records: &Path) -> Result<(), MoveError> {
    let mut qmp = Qmp::connect(qmp)?;
    let place = Place::new(records, "from", &qmp);
    let leaving: Option<Leaving> = place.load().map_err(preflight)?;
    let migration = qmp.migration()?;
    let state = qmp.run_state()?;
    match (leaving, state.as_str(), status_of(&migration)) {
        (Some(leaving), "postmigrate", "completed") => {
            if leaving.run {
                qmp.execute("cont", json!({}))?;
            }
            place.remove();
            Ok(())
        }
        (_, _, status) => Err(MoveError::Preflight(vec![format!(
            "QEMU's VM is '{state}', and its migration '{status}': there is nothing to take back"
        )])),
    }
}

fn preflight(error: impl std::fmt::Display) -> MoveError {
    MoveError::Preflight(vec![error.to_string()])
}

fn status_of(migration: &Value) -> &str {
    migration["status"].as_str().unwrap_or("none")
}

struct Mover<'a> {
    options: &'a Options,
    qmp: Qmp,
    vm: Description,
    progress: Arc<Progress>,
    cancel: &'a AtomicBool,
    place: Place,
    /// How QEMU was set.
    before: Before,
    /// QEMU has ended.
    is_gone: bool,
}

/// A move that QEMU has begun.
struct Course {
    leaving: Leaving,
    begun: Instant,
    watch: Watch,
    /// The source has switched over, or is about to.
    postcopy: Postcopy,
    /// The destination may run the VM: it was told to.
    told: bool,
    /// It has said that it does.
    answered: bool,
    downtime_ms: Option<u64>,
    /// By a mover before.
    resumed: bool,
    /// The session carries QEMU's channels.
    carries: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Postcopy {
    No,
    Asked,
    Yes,
}

/// A session with the destination, and the thread that carries it.
struct Carrier {
    notes: Notes,
    steering: Arc<Steering>,
    socket: Folder,
    thread: Option<JoinHandle<Result<(), SendError>>>,
}

impl Carrier {
    fn start(options: &send::Options, user: u32, progress: &Arc<Progress>) -> Result<Self, String> {
        let sender = Sender::connect(options).map_err(|error| error.to_string())?;
        let (socket, listener) = Folder::with_listener(user).map_err(|error| format!("a socket for QEMU: {error}"))?;
        let steering = Arc::new(Steering::default());
        steering.hold.store(true, Ordering::Relaxed);
        let notes = sender.notes();
        let (steered, progress) = (Arc::clone(&steering), Arc::clone(progress));
        let thread = thread::Builder::new()
            .name("larder-send".to_owned())
            .spawn(move || sender.carry(&listener, &progress, &steered))
            .map_err(|error| format!("a thread: {error}"))?;
        Ok(Self {
            notes,
            steering,
            socket,
            thread: Some(thread),
        })
    }

    /// Says something to the destination and waits for its answer: as long as the session lives, and until it is cancelled,
    /// of which nothing is heard before the end of `patience`.
    fn ask(&self, told: &ToDestination, cancel: &AtomicBool, patience: Duration) -> Result<ToSource, String> {
        self.notes.send(&serde_json::to_vec(told).expect("plain data"));
        let begun = Instant::now();
        let mut said = begun;
        loop {
            if begun.elapsed() >= patience && cancel.load(Ordering::Relaxed) {
                return Err("cancelled".to_owned());
            }
            match self.notes.receive(LOOK_EVERY) {
                Received::Nothing => {}
                Received::Over => return Err("the connection was lost".to_owned()),
                Received::Note(note) => {
                    return serde_json::from_slice(&note)
                        .map_err(|error| format!("it says what is not understood ({error})"));
                }
            }
            if said.elapsed() > SAY_LATE_EVERY {
                said = Instant::now();
                tracing::warn!("the destination has not answered for {} s", begun.elapsed().as_secs());
            }
        }
    }

    fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Lets the session end in order, once QEMU's channels have.
    fn end(mut self) -> Result<(), SendError> {
        self.steering.hold.store(false, Ordering::Relaxed);
        self.join()
    }

    /// Ends the session, whatever is under way, and says why it ended if it had before.
    fn break_off(mut self) -> Option<SendError> {
        self.steering.stop.store(true, Ordering::Relaxed);
        self.join().err().filter(|error| !matches!(error, SendError::Stopped))
    }

    fn join(&mut self) -> Result<(), SendError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            None | Some(Err(_)) => Ok(()),
        }
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        self.steering.stop.store(true, Ordering::Relaxed);
        let _ = self.join();
    }
}

impl Course {
    fn new(leaving: Leaving, options: &Options) -> Self {
        Self {
            leaving,
            begun: Instant::now(),
            watch: Watch::new(options.downtime_ms),
            postcopy: Postcopy::No,
            told: false,
            answered: false,
            downtime_ms: None,
            resumed: false,
            carries: true,
        }
    }

    fn tell(&self, tell: Tell) -> ToDestination {
        ToDestination {
            version: VERSION,
            id: self.leaving.id.clone(),
            tell,
        }
    }

    fn go(&self) -> ToDestination {
        self.tell(Tell::Go {
            run: self.leaving.run,
            postcopy: self.postcopy == Postcopy::Yes,
        })
    }
}

impl<'a> Mover<'a> {
    fn new(options: &'a Options, progress: Arc<Progress>, cancel: &'a AtomicBool) -> Result<Self, MoveError> {
        let mut qmp = Qmp::connect(&options.qmp)?;
        let vm = Description::of(&mut qmp)?;
        let place = Place::new(&options.records, "from", &qmp);
        Ok(Self {
            options,
            qmp,
            vm,
            progress,
            cancel,
            place,
            before: Before::default(),
            is_gone: false,
        })
    }

    /// What the VM and its migration are; one of a mover that has ended has lost its connection, which QEMU sees soon.
    fn at_rest(&mut self, is_ours: bool) -> Result<(String, Value), MoveError> {
        let until = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let migration = self.qmp.migration()?;
            let state = self.qmp.run_state()?;
            let moves = matches!(status_of(&migration), "setup" | "active" | "device" | "cancelling");
            if !is_ours || !moves || Instant::now() > until || self.is_cancelled() {
                return Ok((state, migration));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn connect(&self) -> Result<Carrier, String> {
        Carrier::start(&self.options.send, self.qmp.user(), &self.progress)
    }

    /// QEMU 7.2 takes both multifd and post-copy, and its destination then ends with an assertion (`yank_unregister_instance`);
    /// those after it refuse both, up to 10.0.
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

    fn move_it(&mut self, state: &str, report: &mut dyn FnMut(&Report)) -> Result<Done, MoveError> {
        self.blockers()?;
        let leaving = Leaving {
            id: MoveId::new().map_err(preflight)?,
            run: state == "running",
            to: self.options.send.to.clone(),
        };
        let course = Course::new(leaving, self.options);
        let carrier = self.connect().map_err(preflight)?;
        let prepare = course.tell(Tell::Prepare {
            vm: Box::new(self.vm.clone()),
            settings: self.settings(),
        });
        match carrier.ask(&prepare, self.cancel, Duration::ZERO) {
            Ok(ToSource::Prepared { warnings }) => {
                for warning in warnings {
                    tracing::warn!("{warning}");
                }
            }
            Ok(ToSource::Refused { reasons }) => return Err(MoveError::Preflight(reasons)),
            Ok(other) => return Err(preflight(format!("the destination answers {other:?}"))),
            Err(reason) => {
                let reason = carrier.break_off().map_or(reason, |error| error.to_string());
                return Err(preflight(format!("the destination: {reason}")));
            }
        }
        // A mover after this one knows from it what was moved where, should this one end.
        self.place.save(&course.leaving).map_err(preflight)?;
        match self.begin(&carrier.socket.socket()) {
            Ok(()) => self.see_through(carrier, course, report),
            Err(error) => Err(self.take_back(carrier, &course, error.to_string())),
        }
    }

    /// What QEMU itself says against a migration.
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

    fn begin(&mut self, socket: &Path) -> Result<(), QmpError> {
        let role = Role::Source {
            downtime_ms: self.options.downtime_ms,
            throttle: self.options.throttle,
        };
        self.before = self.settings().apply(&mut self.qmp, role)?;
        self.migrate(socket, false)
    }

    fn migrate(&mut self, socket: &Path, resume: bool) -> Result<(), QmpError> {
        let mut arguments = json!({"uri": format!("unix:{}", socket.display())});
        if resume {
            arguments["resume"] = true.into();
        }
        self.qmp.execute("migrate", arguments).map(|_| ())
    }

    /// A mover before this one has ended, when QEMU had done all, or in the middle of post-copy.
    fn go_on(&mut self, leaving: Leaving, status: &str, report: &mut dyn FnMut(&Report)) -> Result<Done, MoveError> {
        tracing::warn!("going on with a move to {} whose mover has ended", leaving.to);
        let mut course = Course::new(leaving, self.options);
        course.resumed = true;
        // It may have been.
        course.told = true;
        if status != "completed" {
            course.postcopy = Postcopy::Yes;
        }
        let (carrier, whole) = self.reach(&mut course)?;
        if whole {
            return Ok(self.finish(carrier, &course, 0));
        }
        self.see_through(carrier, course, report)
    }

    /// Watches a migration until the VM runs at the destination, or goes on here.
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
                    continue;
                }
            };
            match status_of(&migration) {
                "completed" => {
                    if !course.answered {
                        carrier = self.hand_over(carrier, &mut course)?;
                    }
                    report(&course.watch.report(&migration, &self.progress, course.begun.elapsed()));
                    let rounds = migration["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
                    return Ok(self.finish(carrier, &course, rounds));
                }
                status @ ("failed" | "cancelled") => {
                    let reason = migration["error-desc"].as_str().unwrap_or(status).to_owned();
                    if course.told {
                        return self.after_failure(carrier, course, reason);
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
                _ => {}
            }
            if !course.told
                && let Err(stop) = self.may_go_on(&carrier, &mut course)
            {
                let error = self.take_back(carrier, &course, stop.clone().unwrap_or_default());
                return Err(match error {
                    MoveError::Here { .. } if stop.is_none() => MoveError::Cancelled,
                    error => error,
                });
            }
            report(&course.watch.report(&migration, &self.progress, course.begun.elapsed()));
            // That QEMU has ended is seen above.
            let _ = course.watch.hear(&mut self.qmp, LOOK_EVERY);
        }
    }

    /// Whether it is not to be given up, as long as that can be; or why, if not as the user has said.
    fn may_go_on(&mut self, carrier: &Carrier, course: &mut Course) -> Result<(), Option<String>> {
        if self.is_cancelled() {
            return Err(None);
        }
        let verdict = course.watch.verdict();
        if let Some(timeout) = self.options.timeout.filter(|timeout| course.begun.elapsed() > *timeout) {
            return Err(Some(format!(
                "it did not end in {} s: {}",
                timeout.as_secs(),
                verdict.unwrap_or_else(|| "it was still under way".to_owned())
            )));
        }
        if carrier.is_over() {
            return Err(Some("the connection was lost".to_owned()));
        }
        if self.options.postcopy
            && course.postcopy == Postcopy::No
            && let Some(verdict) = verdict
        {
            tracing::info!("post-copy begins: {verdict}");
            let begun = self.qmp.execute("migrate-start-postcopy", json!({}));
            begun.map_err(|error| Some(error.to_string()))?;
            course.postcopy = Postcopy::Asked;
        }
        Ok(())
    }

    /// The source is stopped and all has arrived, or comes by post-copy: has the destination run it. Returns a session in
    /// which it has said that it does.
    fn hand_over(&mut self, carrier: Carrier, course: &mut Course) -> Result<Carrier, MoveError> {
        course.told = true;
        let stopped = course.watch.stopped_at(&mut self.qmp).ok().flatten();
        let result = match carrier.ask(&course.go(), self.cancel, ANSWER_PATIENCE) {
            Ok(answer) => self.took(answer, course).map(|_| carrier),
            Err(lost) => {
                drop(carrier);
                tracing::warn!("the VM is handed over, and the destination's answer was lost: {lost}");
                self.reach(course).map(|(carrier, _)| carrier)
            }
        };
        course.downtime_ms = stopped.map(|stopped| stopped.elapsed().as_millis() as u64);
        result
    }

    /// Whether `Go` has arrived is not known, or what has become of the VM since: asks over new sessions until somebody says
    /// so. Returns the session in which the destination has said that it runs the VM, and whether it has all of its memory.
    fn reach(&mut self, course: &mut Course) -> Result<(Carrier, bool), MoveError> {
        course.told = true;
        let mut lost = "cancelled".to_owned();
        let mut said: Option<Instant> = None;
        let begun = Instant::now();
        while !self.is_cancelled() {
            // There is nobody here who could have it back.
            if self.is_gone && begun.elapsed() > ASK_WITHOUT_SOURCE {
                return Err(MoveError::Lost {
                    reason: format!("and the destination does not say whether it has everything: {lost}"),
                });
            }
            lost = match self.connect() {
                Ok(carrier) => match carrier.ask(&course.go(), self.cancel, ANSWER_PATIENCE) {
                    Ok(answer) => {
                        let whole = self.took(answer, course)?;
                        course.carries = false;
                        return Ok((carrier, whole));
                    }
                    Err(lost) => lost,
                },
                Err(lost) => lost,
            };
            if said.is_none_or(|said| said.elapsed() > SAY_LATE_EVERY) {
                tracing::warn!("asking the destination again until it answers: {lost}");
                said = Some(Instant::now());
            }
            thread::sleep(ASK_AGAIN);
        }
        Err(MoveError::InDoubt { reason: lost })
    }

    /// The destination has answered to `Go`; whether it has all of the VM's memory.
    fn took(&mut self, answer: ToSource, course: &mut Course) -> Result<bool, MoveError> {
        match answer {
            ToSource::Running { whole } => {
                course.answered = true;
                Ok(whole)
            }
            ToSource::NotRunning { reason } if self.is_gone => Err(MoveError::Lost { reason }),
            ToSource::NotRunning { reason } => match self.run_here(course.leaving.run) {
                Ok(()) => {
                    self.stays();
                    Err(MoveError::Here { reason })
                }
                Err(error) if course.postcopy == Postcopy::Yes => Err(MoveError::Broken {
                    reason: format!("{reason}; and here: {error}"),
                }),
                Err(error) => Err(MoveError::Unsettled(format!(
                    "{reason}; and then: {error}: look at the VM"
                ))),
            },
            ToSource::Refused { reasons } => Err(MoveError::InDoubt {
                reason: reasons.join("; "),
            }),
            ToSource::Unknown { reason } => Err(MoveError::InDoubt { reason }),
            other @ ToSource::Prepared { .. } => Err(MoveError::InDoubt {
                reason: format!("it answers {other:?}"),
            }),
        }
    }

    /// QEMU has failed after the destination was told to run the VM, which it does at the end of post-copy, and lets its own
    /// processors run again.
    fn after_failure(&mut self, carrier: Carrier, mut course: Course, reason: String) -> Result<Done, MoveError> {
        let _ = self.qmp.execute("stop", json!({}));
        drop(carrier);
        match self.reach(&mut course)? {
            (carrier, true) => Ok(self.finish(carrier, &course, 0)),
            (_, false) => Err(MoveError::Broken { reason }),
        }
    }

    /// QEMU has ended here. Nothing stands in the way of the destination, if all had gone.
    fn without_source(&mut self, carrier: Carrier, mut course: Course, error: &QmpError) -> Result<Done, MoveError> {
        if self.qmp.process().is_some_and(|process| process.lives()) {
            return Err(MoveError::Unsettled(format!(
                "{error}; its process lives: run the same command again"
            )));
        }
        tracing::warn!("{error}; asking the destination whether it has all of the VM");
        self.is_gone = true;
        drop(carrier);
        match self.reach(&mut course)? {
            (carrier, true) => Ok(self.finish(carrier, &course, 0)),
            (_, false) => Err(MoveError::Lost {
                reason: "it had not sent all when post-copy was under way".to_owned(),
            }),
        }
    }

    /// Post-copy whose connection broke: both QEMUs wait for another one. Returns a session that carries the rest, or in
    /// which the destination has said that there is none.
    fn recover(&mut self, carrier: Carrier, course: &mut Course) -> Result<(Carrier, bool), MoveError> {
        tracing::warn!("the connection was lost in the middle of post-copy; connecting anew");
        drop(carrier);
        let mut reason = "cancelled".to_owned();
        while !self.is_cancelled() {
            match self.recover_once(course) {
                Ok((carrier, whole)) if course.answered => return Ok((carrier, whole)),
                Ok((carrier, _)) => return Ok((self.hand_over(carrier, course)?, false)),
                Err(lost) => {
                    if reason != lost {
                        tracing::warn!("{lost}; trying again");
                    }
                    reason = lost;
                }
            }
            thread::sleep(ASK_AGAIN);
        }
        Err(MoveError::Broken { reason })
    }

    fn recover_once(&mut self, course: &mut Course) -> Result<(Carrier, bool), String> {
        let carrier = self.connect()?;
        match carrier.ask(&course.tell(Tell::Recover), self.cancel, Duration::ZERO)? {
            ToSource::Prepared { .. } => {
                let resumed = self.migrate(&carrier.socket.socket(), true);
                resumed.map_err(|error| error.to_string())?;
                course.carries = true;
                Ok((carrier, false))
            }
            ToSource::Running { whole: true } => {
                course.answered = true;
                Ok((carrier, true))
            }
            ToSource::Refused { reasons } => Err(reasons.join("; ")),
            other => Err(format!("the destination answers {other:?}")),
        }
    }

    /// The VM goes on here: waits until QEMU has given up, and lets it run if it does not by itself. Nothing that would
    /// let the destination run it was sent.
    fn take_back(&mut self, carrier: Carrier, course: &Course, reason: String) -> MoveError {
        let lost = carrier.break_off();
        let reason = match lost {
            Some(error) if !reason.is_empty() => format!("{error} (QEMU: {reason})"),
            Some(error) => error.to_string(),
            None => reason,
        };
        match self.run_here(course.leaving.run) {
            Ok(()) => {
                self.stays();
                MoveError::Here { reason }
            }
            Err(error) => MoveError::Unsettled(format!("{reason}; and then: {error}: look at the VM")),
        }
    }

    /// Until QEMU's migration has ended and, if it is to, the VM runs.
    fn run_here(&mut self, run: bool) -> Result<(), String> {
        let until = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let is = match self.look_here(run) {
                Ok(None) => return Ok(()),
                Ok(Some(is)) => is,
                Err(error) if error.is_gone() => return Err(error.to_string()),
                Err(error) => error.to_string(),
            };
            if Instant::now() > until {
                return Err(format!("QEMU does not let it run: {is}"));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// One step towards that; what it is if not there yet.
    fn look_here(&mut self, run: bool) -> Result<Option<String>, QmpError> {
        let migration = self.qmp.migration()?;
        let status = status_of(&migration);
        let state = self.qmp.run_state()?;
        if !matches!(status, "none" | "completed" | "failed" | "cancelled") {
            // It is refused where it is too early, or too late.
            if status != "cancelling" {
                let _ = self.qmp.execute("migrate_cancel", json!({}));
            }
        } else if !run
            || !matches!(
                state.as_str(),
                "paused" | "prelaunch" | "postmigrate" | "finish-migrate"
            )
        {
            // Where it does not run for a reason of its own, such as an error of a disk, that is its user's.
            return Ok(None);
        } else {
            // It starts its processors again by itself, but for one that had completed.
            self.qmp.execute("cont", json!({}))?;
        }
        Ok(Some(format!("it is '{state}', its migration '{status}'")))
    }

    /// The VM is here, and will be moved anew or not at all.
    fn stays(&mut self) {
        self.place.remove();
        self.before.restore(&mut self.qmp);
    }

    /// The VM runs elsewhere. Its QEMU here is ended before the session is, so that no mover that comes after a crash in
    /// between finds a VM that seems to wait.
    fn finish(&mut self, carrier: Carrier, course: &Course, rounds: u64) -> Done {
        let seconds = course.begun.elapsed().as_secs_f64();
        if !self.options.keep && !self.is_gone {
            // It closes the connection, at times before it has answered.
            let _ = self.qmp.execute("quit", json!({}));
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

    fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }
}

/// A cut of the connection in post-copy that QEMU does not see.
#[derive(Default)]
struct Cut {
    since: Option<Instant>,
    tries: u32,
}

impl Cut {
    /// Whether it is time to do something about it.
    fn is_unseen(&mut self, is_cut: bool) -> Result<bool, MoveError> {
        if !is_cut {
            self.since = None;
            return Ok(false);
        }
        if self.since.get_or_insert_with(Instant::now).elapsed() < CUT_TIMEOUT {
            return Ok(false);
        }
        self.since = None;
        self.tries += 1;
        if self.tries > CUT_TRIES {
            return Err(MoveError::Broken {
                reason: "QEMU here does not see that the connection is lost".to_owned(),
            });
        }
        Ok(true)
    }
}
