//! The destination's mover: gets QEMU ready, and lets it run when the source says so.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Description;
use super::folder::Folder;
use super::messages::{ToDestination, ToSource, VERSION};
use crate::notes::{Notes, Received};
use crate::qmp::{Qmp, QmpError};

/// How long QEMU may take to have loaded all that it was sent before it is let run.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// How far a VM has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// QEMU waits for a VM.
    Waiting,
    /// One is coming, or has come and may not run yet.
    Coming,
    /// It runs here.
    Running,
    /// It will not: QEMU has gone, or was told to.
    Failed,
}

/// The mover of one QEMU, over as many sessions as it takes.
pub struct Destination {
    qmp_path: PathBuf,
    /// Where QEMU is to wait.
    incoming: Folder,
    inner: Mutex<Inner>,
}

struct Inner {
    qmp: Qmp,
    state: State,
}

impl Destination {
    /// Of the QEMU at `qmp`, which was started with `-incoming defer`. A VM that it has
    /// already loaded, for a mover that has died since, counts as coming.
    ///
    /// # Errors
    /// It does not answer, or waits for nothing; the text says what to do.
    pub fn new(qmp: &Path) -> Result<Self, String> {
        let mut connection = Qmp::connect(qmp).map_err(|error| error.to_string())?;
        let state = state_of(&mut connection).map_err(|error| error.to_string())?;
        let Some(state) = state else {
            return Err(format!(
                "the QEMU at {} has a VM already: start one with '-incoming defer', with the same options as the source's",
                qmp.display()
            ));
        };
        let incoming =
            Folder::new(connection.user()).map_err(|error| format!("a folder for QEMU's socket: {error}"))?;
        Ok(Self {
            qmp_path: qmp.to_owned(),
            incoming,
            inner: Mutex::new(Inner { qmp: connection, state }),
        })
    }

    /// Where QEMU waits, once it does.
    pub fn incoming(&self) -> PathBuf {
        self.incoming.socket()
    }

    /// How far it is.
    pub fn state(&self) -> State {
        self.lock().state
    }

    /// The user that QEMU runs as.
    pub fn user(&self) -> u32 {
        self.lock().qmp.user()
    }

    /// Whether a VM that was coming still may come: its QEMU lives and has not failed.
    pub fn look(&self) -> State {
        let mut inner = self.lock();
        if inner.state == State::Coming {
            let lives = inner
                .qmp
                .migration()
                .is_ok_and(|migration| migration["status"] != "failed");
            if !lives {
                inner.state = State::Failed;
            }
        }
        inner.state
    }

    /// Ends QEMU, if the VM does not run in it: nobody will ask for it any more.
    pub fn give_up(&self) {
        let mut inner = self.lock();
        if inner.state != State::Running {
            inner.state = State::Failed;
            let _ = inner.qmp.execute("quit", json!({}));
        }
    }

    /// Answers the notes of a session until it is over.
    pub fn answer(&self, notes: &Notes) {
        loop {
            match notes.receive(Duration::from_secs(1)) {
                Received::Over => return,
                Received::Nothing => {}
                Received::Note(note) => {
                    let answer = match serde_json::from_slice(&note) {
                        Ok(told) => self.heard(told),
                        Err(error) => ToSource::Refused {
                            reasons: vec![format!(
                                "the source's Larder says what this one does not understand ({error}): use the same version"
                            )],
                        },
                    };
                    tracing::debug!("{answer:?}");
                    notes.send(&serde_json::to_vec(&answer).expect("plain data"));
                }
            }
        }
    }

    fn heard(&self, told: ToDestination) -> ToSource {
        let version = told.version();
        if version != VERSION {
            return ToSource::Refused {
                reasons: vec![format!(
                    "the source's mover has version {version}, this one {VERSION}: use the same version of Larder"
                )],
            };
        }
        match told {
            ToDestination::Prepare {
                vm,
                capabilities,
                parameters,
                ..
            } => self
                .prepare(&vm, &capabilities, parameters)
                .unwrap_or_else(|reasons| ToSource::Refused { reasons }),
            ToDestination::Go { uuid, run, .. } => self.go(&uuid, run),
            ToDestination::Recover { .. } => self.recover().unwrap_or_else(|error| ToSource::Refused {
                reasons: vec![error.to_string()],
            }),
        }
    }

    fn prepare(
        &self,
        vm: &Description,
        capabilities: &[(String, bool)],
        parameters: Value,
    ) -> Result<ToSource, Vec<String>> {
        let said = |error: QmpError| vec![error.to_string()];
        let mut inner = self.lock();
        if inner.state != State::Waiting {
            return Err(vec![format!(
                "the QEMU at {} does not wait for a VM: start a new one",
                self.qmp_path.display()
            )]);
        }
        let qmp = &mut inner.qmp;
        let here = Description::of(qmp).map_err(said)?;
        let differences = vm.differences(&here);
        if !differences.is_empty() {
            return Err(differences);
        }
        let mut capabilities: Vec<(&str, bool)> = capabilities.iter().map(|(name, on)| (name.as_str(), *on)).collect();
        // Its images stay the source's until it runs: a source that takes the VM back could not open them otherwise.
        capabilities.push(("late-block-activate", true));
        qmp.set_capabilities(&capabilities).map_err(said)?;
        qmp.execute("migrate-set-parameters", parameters).map_err(said)?;
        // While it waits, this only takes back that it would run once all has come.
        qmp.execute("stop", json!({})).map_err(said)?;
        let uri = format!("unix:{}", self.incoming.socket().display());
        qmp.execute("migrate-incoming", json!({"uri": uri})).map_err(said)?;
        inner.state = State::Coming;
        Ok(ToSource::Prepared {
            warnings: vm.warnings(&here),
            vm: here,
        })
    }

    /// Has QEMU wait for the rest of a VM that runs here already.
    fn recover(&self) -> Result<ToSource, QmpError> {
        let mut inner = self.lock();
        let here = Description::of(&mut inner.qmp)?;
        // What is left of the socket before.
        let _ = std::fs::remove_file(self.incoming.socket());
        let uri = format!("unix:{}", self.incoming.socket().display());
        inner.qmp.execute("migrate-recover", json!({"uri": uri}))?;
        Ok(ToSource::Prepared {
            vm: here,
            warnings: Vec::new(),
        })
    }

    /// Whether the VM is here as a whole, or cannot become so any more.
    pub fn is_done(&self) -> bool {
        let mut inner = self.lock();
        match inner.state {
            State::Failed => true,
            State::Running => inner.qmp.migration().map_or(true, |migration| {
                migration["status"].as_str().is_none_or(|status| status == "completed")
            }),
            State::Waiting | State::Coming => false,
        }
    }

    /// Lets the VM run, if all of it is here; says so, too, if it runs already.
    fn go(&self, uuid: &str, run: bool) -> ToSource {
        let mut inner = self.lock();
        match self.let_run(&mut inner, uuid, run) {
            Ok(()) => {
                inner.state = State::Running;
                ToSource::Running
            }
            Err(reason) => {
                // It must never run from here on, whatever was wrong.
                inner.state = State::Failed;
                let _ = inner.qmp.execute("quit", json!({}));
                ToSource::NotRunning { reason }
            }
        }
    }

    fn let_run(&self, inner: &mut Inner, uuid: &str, run: bool) -> Result<(), String> {
        if inner.state == State::Running {
            return Ok(());
        }
        let until = Instant::now() + LOAD_TIMEOUT;
        let qmp = &mut inner.qmp;
        let text = |error: QmpError| error.to_string();
        let here = qmp.execute("query-uuid", json!({})).map_err(text)?;
        if here["UUID"].as_str() != Some(uuid) {
            return Err(format!("the QEMU here has another VM, with the UUID {}", here["UUID"]));
        }
        loop {
            let state = qmp.run_state().map_err(text)?;
            let migration = qmp.migration().map_err(text)?;
            match (state.as_str(), migration["status"].as_str().unwrap_or("none")) {
                ("running", _) => return Ok(()),
                ("paused" | "prelaunch", "completed" | "postcopy-active") => {
                    if !run {
                        return Ok(());
                    }
                    qmp.execute("cont", json!({})).map_err(text)?;
                }
                (_, "failed") => return Err(format!("the QEMU here failed to load it: {}", migration["error-desc"])),
                // The last of it is still on its way to QEMU's devices.
                _ => {}
            }
            if Instant::now() > until {
                return Err(format!(
                    "the QEMU here is '{state}' (migration: {}) and did not come to run in {} s",
                    migration["status"],
                    LOAD_TIMEOUT.as_secs()
                ));
            }
            let _ = qmp.event(Duration::from_millis(5)).map_err(text)?;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `None` for a QEMU that was not started to take a VM in, or has long had it.
fn state_of(qmp: &mut Qmp) -> Result<Option<State>, QmpError> {
    let migration = qmp.migration()?;
    let state = qmp.run_state()?;
    Ok(match (state.as_str(), migration["status"].as_str()) {
        ("inmigrate", None | Some("none")) => Some(State::Waiting),
        ("inmigrate", Some(_)) => Some(State::Coming),
        // Loaded, and not yet let run: for a mover that has died since.
        ("paused" | "prelaunch", Some("completed" | "postcopy-active")) => Some(State::Coming),
        ("running", Some("postcopy-active" | "postcopy-paused")) => Some(State::Running),
        _ => None,
    })
}
