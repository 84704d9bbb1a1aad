//! The source's mover: sets QEMU going, watches it, and hands the VM over.

use std::os::unix::fs::chown;
use std::os::unix::net::UnixListener;
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
use super::messages::{ToDestination, ToSource, VERSION};
use super::watch::{Report, Watch};
use crate::notes::{Notes, Received};
use crate::progress::Progress;
use crate::qmp::{Qmp, QmpError};
use crate::send::{self, SendError, Sender, Steering};

/// How long the destination may take to answer a note.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(90);
/// Between two looks at QEMU.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long QEMU may take to give up a migration whose sockets are shut.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two questions whether the VM runs at the destination.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// What is to be moved, and how.
pub struct Options {
    /// The source QEMU's monitor.
    pub qmp: PathBuf,
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
        "the VM stands still: it was handed over, and the destination does not answer ({reason}); run the same command \
        again once it can be reached, and it will run there or here"
    )]
    InDoubt {
        /// Why there is no answer.
        reason: String,
    },
    /// Post-copy was cut, and the halves do not come together.
    #[error(
        "post-copy broke off and could not be taken up again: {reason}; run the same command again while both QEMUs live"
    )]
    Broken {
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
    let mut mover = Mover::new(options, Arc::clone(progress))?;
    let status = mover.qmp.migration()?["status"].as_str().unwrap_or("none").to_owned();
    let state = mover.qmp.run_state()?;
    match (state.as_str(), status.as_str()) {
        ("postmigrate", "completed") => mover.hand_over_again(cancel),
        ("running" | "paused", "none" | "completed" | "failed" | "cancelled") => mover.move_it(&state, cancel, report),
        (_, "postcopy-paused") => mover.go_on_after_break(cancel, report),
        _ => Err(MoveError::Preflight(vec![format!(
            "QEMU's VM is '{state}', and its migration '{status}'"
        )])),
    }
}

struct Mover<'a> {
    options: &'a Options,
    qmp: Qmp,
    vm: Description,
    progress: Arc<Progress>,
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
        let (socket, listener) = socket_for(user).map_err(|error| format!("a socket for QEMU: {error}"))?;
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

    /// Says something to the destination and waits for its answer.
    fn ask(&self, told: &ToDestination, cancel: Option<&AtomicBool>) -> Result<ToSource, String> {
        self.notes.send(&serde_json::to_vec(told).expect("plain data"));
        let until = Instant::now() + ANSWER_TIMEOUT;
        while Instant::now() < until {
            if cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
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
        }
        Err(format!("no answer in {} s", ANSWER_TIMEOUT.as_secs()))
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

/// A socket for QEMU, which may run as another user.
fn socket_for(user: u32) -> std::io::Result<(Folder, UnixListener)> {
    let folder = Folder::new(user)?;
    let listener = UnixListener::bind(folder.socket())?;
    chown(folder.socket(), Some(user), None)?;
    Ok((folder, listener))
}

impl<'a> Mover<'a> {
    fn new(options: &'a Options, progress: Arc<Progress>) -> Result<Self, MoveError> {
        let mut qmp = Qmp::connect(&options.qmp)?;
        let vm = Description::of(&mut qmp)?;
        Ok(Self {
            options,
            qmp,
            vm,
            progress,
        })
    }

    fn move_it(
        &mut self,
        state: &str,
        cancel: &AtomicBool,
        report: &mut dyn FnMut(&Report),
    ) -> Result<Done, MoveError> {
        self.blockers()?;
        let carrier = Carrier::start(&self.options.send, self.qmp.user(), &self.progress)
            .map_err(|reason| MoveError::Preflight(vec![reason]))?;
        let (capabilities, parameters) = self.settings();
        let prepare = ToDestination::Prepare {
            version: VERSION,
            vm: self.vm.clone(),
            capabilities: capabilities.clone(),
            parameters: parameters.clone(),
        };
        match carrier.ask(&prepare, Some(cancel)) {
            Ok(ToSource::Prepared { warnings, .. }) => {
                for warning in warnings {
                    tracing::warn!("{warning}");
                }
            }
            Ok(ToSource::Refused { reasons }) => return Err(MoveError::Preflight(reasons)),
            Ok(other) => return Err(MoveError::Preflight(vec![format!("the destination answers {other:?}")])),
            Err(reason) => {
                let reason = carrier.break_off().map_or(reason, |error| error.to_string());
                return Err(MoveError::Preflight(vec![format!("the destination: {reason}")]));
            }
        }
        let was_running = state == "running";
        let begun = self.begin(&capabilities, parameters, &carrier.socket.socket());
        if let Err(error) = begun {
            return Err(self.take_back(carrier, was_running, error.to_string()));
        }
        self.see_through(carrier, was_running, cancel, report)
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

    /// QEMU 7.2 takes both multifd and post-copy, and its destination then ends with an assertion (`yank_unregister_instance`);
    /// those after it refuse both, up to 10.0.
    const fn channels(&self) -> u8 {
        if self.options.postcopy {
            0
        } else {
            self.options.multifd_channels
        }
    }

    fn settings(&self) -> (Vec<(String, bool)>, Value) {
        let channels = self.channels();
        let capabilities = [
            ("return-path", true),
            ("multifd", channels > 0),
            ("postcopy-ram", self.options.postcopy),
            ("auto-converge", self.options.throttle),
            // What Larder does instead.
            ("xbzrle", false),
        ];
        let capabilities = capabilities.map(|(name, on)| (name.to_owned(), on)).to_vec();
        let mut parameters = json!({
            // The cap is Larder's; what QEMU measures is then what Larder takes.
            "max-bandwidth": i64::MAX / 4,
            "downtime-limit": self.options.downtime_ms,
        });
        if channels > 0 {
            parameters["multifd-channels"] = channels.into();
            parameters["multifd-compression"] = "none".into();
        }
        (capabilities, parameters)
    }

    fn begin(&mut self, capabilities: &[(String, bool)], parameters: Value, socket: &Path) -> Result<(), QmpError> {
        let capabilities: Vec<(&str, bool)> = capabilities.iter().map(|(name, on)| (name.as_str(), *on)).collect();
        self.qmp.set_capabilities(&capabilities)?;
        // So that STOP tells when the guest stood still.
        self.qmp.set_capabilities(&[("events", true)])?;
        self.qmp.execute("migrate-set-parameters", parameters)?;
        let uri = format!("unix:{}", socket.display());
        self.qmp.execute("migrate", json!({"uri": uri})).map(|_| ())
    }

    /// Watches a migration until the VM runs at the destination, or goes on here.
    fn see_through(
        &mut self,
        carrier: Carrier,
        was_running: bool,
        cancel: &AtomicBool,
        report: &mut dyn FnMut(&Report),
    ) -> Result<Done, MoveError> {
        let begun = Instant::now();
        let mut watch = Watch::new(self.options.downtime_ms);
        let mut handed_over = None;
        let mut asked_for_postcopy = false;
        loop {
            let migration = match self.qmp.migration() {
                Ok(migration) => migration,
                // A QEMU that has ended has no VM to go on with, unless it was handed over.
                Err(error) if handed_over.is_some() => {
                    return Err(MoveError::Broken {
                        reason: error.to_string(),
                    });
                }
                Err(error) => return Err(error.into()),
            };
            let status = migration["status"].as_str().unwrap_or("none");
            match status {
                "completed" => {
                    let downtime = match handed_over {
                        Some(downtime) => downtime,
                        None => {
                            let stopped = watch.stopped_at(&mut self.qmp)?;
                            self.hand_over(&carrier, was_running, stopped, cancel)?
                        }
                    };
                    let rounds = migration["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
                    let seconds = begun.elapsed().as_secs_f64();
                    report(&watch.report(&migration, &self.progress, begun.elapsed()));
                    if let Err(error) = carrier.end() {
                        tracing::warn!("after the VM was handed over: {error}");
                    }
                    self.end_source();
                    return Ok(Done {
                        seconds,
                        downtime_ms: downtime,
                        rounds,
                        postcopy: handed_over.is_some(),
                        resumed: false,
                    });
                }
                "failed" | "cancelled" => {
                    let reason = migration["error-desc"].as_str().unwrap_or(status).to_owned();
                    return Err(self.take_back(carrier, was_running, reason));
                }
                "postcopy-active" if handed_over.is_none() => {
                    let stopped = watch.stopped_at(&mut self.qmp)?;
                    handed_over = Some(self.hand_over(&carrier, was_running, stopped, cancel)?);
                }
                "postcopy-paused" => {
                    drop(carrier);
                    return self.go_on_after_break(cancel, report);
                }
                _ => {}
            }
            if handed_over.is_none() {
                let late = self.options.timeout.is_some_and(|timeout| begun.elapsed() > timeout);
                if cancel.load(Ordering::Relaxed) || late {
                    let _ = self.qmp.execute("migrate_cancel", json!({}));
                    let reason = match self.options.timeout {
                        Some(timeout) if late => format!(
                            "it did not end in {} s: {}",
                            timeout.as_secs(),
                            watch.verdict().unwrap_or_else(|| "it was still under way".to_owned())
                        ),
                        _ => String::new(),
                    };
                    return Err(match self.take_back(carrier, was_running, reason) {
                        MoveError::Here { .. } if !late => MoveError::Cancelled,
                        other => other,
                    });
                }
                if carrier.is_over() {
                    return Err(self.take_back(carrier, was_running, "the connection was lost".to_owned()));
                }
                if self.options.postcopy && !asked_for_postcopy && watch.verdict().is_some() {
                    tracing::info!("post-copy begins: {}", watch.verdict().unwrap_or_default());
                    self.qmp.execute("migrate-start-postcopy", json!({}))?;
                    asked_for_postcopy = true;
                }
            }
            report(&watch.report(&migration, &self.progress, begun.elapsed()));
            watch.hear(&mut self.qmp, LOOK_EVERY)?;
        }
    }

    /// The source is stopped and all has arrived: lets the destination run it.
    fn hand_over(
        &mut self,
        carrier: &Carrier,
        run: bool,
        stopped: Option<Instant>,
        cancel: &AtomicBool,
    ) -> Result<Option<u64>, MoveError> {
        let go = self.go(run);
        let answer = match carrier.ask(&go, None) {
            Ok(answer) => answer,
            Err(reason) => self.ask_until_answered(&go, reason, cancel)?,
        };
        self.took(answer, run)?;
        Ok(stopped.map(|stopped| stopped.elapsed().as_millis() as u64))
    }

    fn go(&self, run: bool) -> ToDestination {
        ToDestination::Go {
            version: VERSION,
            uuid: self.vm.uuid.clone(),
            run,
        }
    }

    /// The destination has answered for good.
    fn took(&mut self, answer: ToSource, run: bool) -> Result<(), MoveError> {
        match answer {
            ToSource::Running => Ok(()),
            ToSource::NotRunning { reason } => {
                if run {
                    self.qmp.execute("cont", json!({}))?;
                }
                Err(MoveError::Here { reason })
            }
            other => Err(MoveError::InDoubt {
                reason: format!("it answers {other:?}"),
            }),
        }
    }

    /// Whether `Go` has arrived is not known: asks over new sessions until somebody says so.
    fn ask_until_answered(
        &self,
        go: &ToDestination,
        mut reason: String,
        cancel: &AtomicBool,
    ) -> Result<ToSource, MoveError> {
        tracing::warn!(
            "the VM is handed over, and the destination's answer was lost ({reason}); asking again until it answers"
        );
        while !cancel.load(Ordering::Relaxed) {
            match Carrier::start(&self.options.send, self.qmp.user(), &self.progress) {
                Ok(carrier) => match carrier.ask(go, Some(cancel)) {
                    Ok(answer) => {
                        let _ = carrier.end();
                        return Ok(answer);
                    }
                    Err(lost) => reason = lost,
                },
                Err(lost) => reason = lost,
            }
            thread::sleep(ASK_AGAIN);
        }
        Err(MoveError::InDoubt { reason })
    }

    /// A mover before this one died between the end of the migration and the answer.
    fn hand_over_again(&mut self, cancel: &AtomicBool) -> Result<Done, MoveError> {
        let begun = Instant::now();
        let go = self.go(true);
        let answer = self.ask_until_answered(&go, "its mover has ended".to_owned(), cancel)?;
        self.took(answer, true)?;
        self.end_source();
        Ok(Done {
            seconds: begun.elapsed().as_secs_f64(),
            downtime_ms: None,
            rounds: 0,
            postcopy: false,
            resumed: true,
        })
    }

    /// Post-copy whose connection broke: both QEMUs wait for another one.
    fn go_on_after_break(&mut self, cancel: &AtomicBool, report: &mut dyn FnMut(&Report)) -> Result<Done, MoveError> {
        tracing::warn!("the connection was lost in the middle of post-copy; connecting anew");
        let mut reason = String::new();
        while !cancel.load(Ordering::Relaxed) {
            match Carrier::start(&self.options.send, self.qmp.user(), &self.progress) {
                Ok(carrier) => match carrier.ask(&ToDestination::Recover { version: VERSION }, Some(cancel)) {
                    Ok(ToSource::Prepared { .. }) => {
                        let uri = format!("unix:{}", carrier.socket.socket().display());
                        self.qmp.execute("migrate", json!({"uri": uri, "resume": true}))?;
                        return self.see_post_copy_through(carrier, cancel, report);
                    }
                    Ok(ToSource::Refused { reasons }) => reason = reasons.join("; "),
                    Ok(other) => reason = format!("it answers {other:?}"),
                    Err(lost) => reason = lost,
                },
                Err(lost) => reason = lost,
            }
            thread::sleep(ASK_AGAIN);
        }
        Err(MoveError::Broken { reason })
    }

    fn see_post_copy_through(
        &mut self,
        carrier: Carrier,
        cancel: &AtomicBool,
        report: &mut dyn FnMut(&Report),
    ) -> Result<Done, MoveError> {
        let begun = Instant::now();
        let mut watch = Watch::new(self.options.downtime_ms);
        loop {
            let migration = self.qmp.migration()?;
            match migration["status"].as_str().unwrap_or("none") {
                "completed" => {
                    if let Err(error) = carrier.end() {
                        tracing::warn!("after the VM was moved: {error}");
                    }
                    self.end_source();
                    return Ok(Done {
                        seconds: begun.elapsed().as_secs_f64(),
                        downtime_ms: None,
                        rounds: migration["ram"]["dirty-sync-count"].as_u64().unwrap_or(0),
                        postcopy: true,
                        resumed: true,
                    });
                }
                "postcopy-paused" if carrier.is_over() => {
                    drop(carrier);
                    return self.go_on_after_break(cancel, report);
                }
                "failed" => {
                    return Err(MoveError::Broken {
                        reason: migration["error-desc"]
                            .as_str()
                            .unwrap_or("QEMU says no more")
                            .to_owned(),
                    });
                }
                _ => {}
            }
            report(&watch.report(&migration, &self.progress, begun.elapsed()));
            watch.hear(&mut self.qmp, LOOK_EVERY)?;
        }
    }

    /// The VM goes on here: waits until QEMU has given up, and lets it run if it does not by itself. Nothing that would
    /// let the destination run it was sent.
    fn take_back(&mut self, carrier: Carrier, was_running: bool, reason: String) -> MoveError {
        let lost = carrier.break_off();
        let reason = match lost {
            Some(error) if !reason.is_empty() => format!("{error} (QEMU: {reason})"),
            Some(error) => error.to_string(),
            None => reason,
        };
        match self.settle(was_running) {
            Ok(()) => MoveError::Here { reason },
            Err(error) => MoveError::Unsettled(format!("{reason}; and then: {error}: look at the VM")),
        }
    }

    fn settle(&mut self, was_running: bool) -> Result<(), QmpError> {
        let until = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let migration = self.qmp.migration()?;
            let status = migration["status"].as_str().unwrap_or("none").to_owned();
            let ended = matches!(status.as_str(), "none" | "completed" | "failed" | "cancelled");
            if ended || Instant::now() > until {
                break;
            }
            if matches!(status.as_str(), "active" | "setup" | "device" | "pre-switchover") {
                let _ = self.qmp.execute("migrate_cancel", json!({}));
            }
            let _ = self.qmp.event(Duration::from_millis(20))?;
        }
        // It starts its processors again by itself, but for one that had completed.
        let state = self.qmp.run_state()?;
        if was_running && state != "running" {
            self.qmp.execute("cont", json!({}))?;
        }
        Ok(())
    }

    /// The VM runs elsewhere.
    fn end_source(&mut self) {
        if !self.options.keep {
            // It closes the connection, at times before it has answered.
            let _ = self.qmp.execute("quit", json!({}));
        }
    }
}
