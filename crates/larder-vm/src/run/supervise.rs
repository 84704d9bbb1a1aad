//! Supervision of the servers and QEMU: start, restart and common end.
//!
//! A server that dies is restarted; its keeper replays QEMU's setup messages to the next one, and the guest's
//! requests continue where they were. The pager of the guest's memory is restarted as well (`memory`). When QEMU
//! ends, everything ends, with QEMU's exit code. If this process is killed, QEMU and the servers get SIGTERM from the
//! kernel.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::backoff::Backoff;
use super::child::{Guarded, start_qemu, start_server};
use super::hold::Hold;
use super::keeper::{Keeper, KeeperError};
use super::memory::Pager;
use super::plan::{Plan, PlannedDisk};
use super::signals::{Received, Signals};
use crate::image::ImageAddress;
use crate::vm::config::ChainFile;

/// Longest time for a server to open its image.
const START_MAX: Duration = Duration::from_secs(30);

/// Interval between checks of a starting server.
const START_STEP: Duration = Duration::from_millis(2);

/// Longest time for a server to write back its data at the end.
const STOP_MAX: Duration = Duration::from_secs(60);

/// Time after QEMU's end within which a signal belongs to that same end: `timeout` signals a process and its group,
/// and a terminal all of its foreground processes.
const SAME_STOP: Duration = Duration::from_secs(1);

/// Time after which the user is informed about a slow stop.
const STOP_QUIET: Duration = Duration::from_secs(3);

/// The program that serves disks: this one.
#[derive(Clone, Debug)]
pub struct ServerProgram {
    /// Path of the program.
    pub path: PathBuf,
    /// Value of `LARDER_LOG` for it; inherited if `None`.
    pub log: Option<String>,
}

/// Reason for a failure.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SuperviseError {
    #[error("cannot start {what}: {source}")]
    Start { what: String, source: io::Error },
    #[error("the server of disk {image} ended with {status} before it was ready; see the messages before this one")]
    ServerEnded { image: ImageAddress, status: ExitStatus },
    #[error("the server of disk {image} was not ready after {} s; is its storage stuck?", START_MAX.as_secs())]
    ServerSlow { image: ImageAddress },
    #[error("disk {image}: {source}")]
    Keeper {
        image: ImageAddress,
        source: Box<KeeperError>,
    },
    #[error("cannot wait for signals and children: {0}")]
    Wait(#[from] io::Error),
}

/// Callback that shows the user a message of one line.
pub type Say<'a> = &'a dyn Fn(&str);

/// Starts everything, and returns QEMU's exit code (128 plus the signal's number if a signal ended it). The servers
/// share the locks of `holds`, which have the files of each disk of the plan. It must be called in the program's main
/// thread, before other threads exist: the children end with the thread that started them.
///
/// # Errors
/// See [`SuperviseError`]; no child is left running then.
pub fn supervise(plan: &Plan, holds: &[Hold], program: &ServerProgram, say: Say<'_>) -> Result<u8, SuperviseError> {
    let signals = Signals::take_over()?;
    let mut servers = Vec::with_capacity(plan.disks.len());
    for planned in &plan.disks {
        servers.push(Server::start(planned, holds, program, say)?);
    }
    if let Some(signal) = wait_until_ready(&mut servers, &signals)? {
        return Ok(code_of_signal(signal.as_raw()));
    }
    for planned in &plan.disks {
        say_chain(planned, say);
    }
    let keepers = plan.disks.iter().map(keep).collect::<Result<Vec<_>, _>>()?;
    let qemu = start_qemu(plan).map_err(|source| SuperviseError::Start {
        what: plan
            .qemu
            .first()
            .map(|program| program.display().to_string())
            .unwrap_or_default(),
        source,
    })?;
    let mut qemu = Guarded::new(qemu);
    let memory = plan.memory.as_ref();
    let mut pager = memory.map(|planned| Pager::start(planned, qemu.id(), program, say));
    let status = watch(&mut qemu, &mut servers, pager.as_mut(), &keepers, &signals)?;
    drop(keepers);
    stop(servers, pager, &signals, say)?;
    Ok(exit_code(status))
}

/// Shows the files to which the headers of a disk's images lead.
fn say_chain(planned: &PlannedDisk, say: Say<'_>) {
    // An unreadable chain file keeps the next server from starting, which reports that.
    let Ok(Some(found)) = ChainFile::read(&planned.chain_file()) else {
        return;
    };
    for line in found.files(planned.disk.read_only) {
        say(&format!("{}: {line}", planned.disk.image));
    }
}

fn keep(planned: &PlannedDisk) -> Result<Keeper, SuperviseError> {
    Keeper::start(planned).map_err(|source| SuperviseError::Keeper {
        image: planned.disk.image.clone(),
        source: Box::new(source),
    })
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, signal) => code_of_signal(signal.unwrap_or_default()),
    }
}

/// Returns a shell's exit code for a signal.
fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Waits until every server listens; returns the signal that ended the wait early, if there was one.
fn wait_until_ready(servers: &mut [Server<'_>], signals: &Signals) -> Result<Option<Signal>, SuperviseError> {
    for server in servers {
        while !server.planned.ready_file().exists() {
            let image = server.planned.disk.image.clone();
            if let Some(status) = server.process.ended()? {
                return Err(SuperviseError::ServerEnded { image, status });
            }
            if server.started.elapsed() > START_MAX {
                return Err(SuperviseError::ServerSlow { image });
            }
            if let Some(Received::End { signal, .. }) = signals.wait(Some(START_STEP))? {
                return Ok(Some(signal));
            }
        }
    }
    Ok(None)
}

/// Restarts dead servers until QEMU ends.
fn watch(
    qemu: &mut Guarded,
    servers: &mut [Server<'_>],
    mut pager: Option<&mut Pager<'_>>,
    keepers: &[Keeper],
    signals: &Signals,
) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = qemu.ended()? {
            return Ok(status);
        }
        for server in &mut *servers {
            server.keep_alive()?;
        }
        if let Some(pager) = &mut pager {
            pager.keep_alive()?;
        }
        let of_pager = pager.as_ref().and_then(|pager| pager.due);
        let next = servers.iter().filter_map(|server| server.due).chain(of_pager).min();
        let timeout = next.map(|due| due.saturating_duration_since(Instant::now()));
        if let Some(Received::End { signal, from_terminal }) = signals.wait(timeout)? {
            keepers.iter().for_each(Keeper::qemu_ends);
            if !from_terminal {
                qemu.signal(signal);
            }
        }
    }
}

/// Ends the servers; each writes back its data. A signal from the user ends the wait. The pager has nothing left to
/// do, and removes the files that it created.
fn stop(mut servers: Vec<Server<'_>>, mut pager: Option<Pager<'_>>, signals: &Signals, say: Say<'_>) -> io::Result<()> {
    if let Some(pager) = &mut pager {
        pager.end();
    }
    for server in &mut servers {
        server.process.signal(Signal::TERM);
    }
    let begun = Instant::now();
    let mut told = false;
    loop {
        let mut waiting_for = None;
        for server in &mut servers {
            if server.process.ended()?.is_none() {
                let who = format!("disk {}", server.planned.disk.image);
                waiting_for = Some((who, "its server", "data that is not written yet"));
            }
        }
        if let Some(pager) = &mut pager
            && !pager.has_ended()?
        {
            waiting_for.get_or_insert_with(|| ("memory".to_owned(), "its pager", "its pager to clean up"));
        }
        let Some((who, process, what)) = waiting_for else {
            return Ok(());
        };
        if begun.elapsed() > STOP_MAX {
            let limit = STOP_MAX.as_secs();
            say(&format!("{who}: {process} did not end within {limit} s; it is killed"));
            return Ok(());
        }
        if begun.elapsed() > STOP_QUIET && !told {
            told = true;
            say(&format!("{who}: waiting for {what}; a signal ends the wait"));
        }
        let received = signals.wait(Some(STOP_QUIET))?;
        if matches!(received, Some(Received::End { .. })) && begun.elapsed() >= SAME_STOP {
            return Ok(());
        }
    }
}

/// A disk's server.
struct Server<'a> {
    planned: &'a PlannedDisk,
    hold: Option<&'a Hold>,
    program: &'a ServerProgram,
    say: Say<'a>,
    process: Guarded,
    started: Instant,
    backoff: Backoff,
    /// Time of the next restart, if the server is down.
    due: Option<Instant>,
    /// The last obstacle reported to the user.
    obstacle: Option<String>,
}

impl<'a> Server<'a> {
    fn start(
        planned: &'a PlannedDisk,
        holds: &'a [Hold],
        program: &'a ServerProgram,
        say: Say<'a>,
    ) -> Result<Self, SuperviseError> {
        let child = start_server(program, planned).map_err(|source| SuperviseError::Start {
            what: format!("the server of disk {}", planned.disk.image),
            source,
        })?;
        Ok(Self {
            planned,
            hold: holds.iter().find(|hold| hold.image == planned.disk.image),
            program,
            say,
            process: Guarded::new(child),
            started: Instant::now(),
            backoff: Backoff::default(),
            due: None,
            obstacle: None,
        })
    }

    /// Detects that the server has died, and restarts it when that is due.
    fn keep_alive(&mut self) -> io::Result<()> {
        let image = &self.planned.disk.image;
        if self.due.is_none() {
            let Some(status) = self.process.ended()? else {
                return Ok(());
            };
            let delay = self.backoff.died(self.started.elapsed());
            (self.say)(&format!(
                "disk {image}: its server died ({status}) and is restarted; the guest waits for it"
            ));
            self.due = Some(Instant::now() + delay);
        }
        if self.due.is_some_and(|due| due > Instant::now()) {
            return Ok(());
        }
        if self.is_obstructed() {
            self.due = Some(Instant::now() + self.backoff.died(Duration::ZERO));
            return Ok(());
        }
        self.started = Instant::now();
        match start_server(self.program, self.planned) {
            Ok(child) => {
                self.process = Guarded::new(child);
                self.due = None;
            }
            Err(error) => {
                (self.say)(&format!("disk {image}: cannot restart its server: {error}"));
                self.due = Some(Instant::now() + self.backoff.died(Duration::ZERO));
            }
        }
        Ok(())
    }

    /// Returns whether the server must not be started now, because it would not find the guest's files. Reports
    /// changes of that.
    fn is_obstructed(&mut self) -> bool {
        let obstacle = self.hold.and_then(Hold::obstacle);
        if obstacle != self.obstacle {
            let image = &self.planned.disk.image;
            (self.say)(&match &obstacle {
                Some(obstacle) => {
                    format!("disk {image}: its server is not restarted until its files are back: {obstacle}")
                }
                None => format!("disk {image}: its files are back; its server is restarted"),
            });
            self.obstacle.clone_from(&obstacle);
        }
        obstacle.is_some()
    }
}
