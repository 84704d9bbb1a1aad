//! Supervision of the servers and QEMU: start, restart and common end.
//!
//! A server that dies is restarted; its proxy replays QEMU's setup messages to the next one, and the guest's
//! requests continue where they were. The pager of the guest's memory is restarted as well (`memory`). When QEMU
//! ends, everything ends, with QEMU's exit code. If this process is killed, QEMU and the servers get SIGTERM from the
//! kernel.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::child::{ChildGuard, start_qemu, start_server};
use super::disk_locks::DiskLocks;
use super::memory::SupervisedPager;
use super::plan::{PlannedDisk, RunPlan};
use super::proxy::{ProxyError, VhostUserProxy};
use super::restart_backoff::RestartBackoff;
use super::signals::{SignalEvent, SignalFd};
use crate::image::ImageAddress;
use crate::vm::config::ChainFile;

/// Longest time for a server to open its image.
const SERVER_START_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between checks of a starting server.
const SERVER_START_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Longest time for a server to write back its data at the end.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// Time after QEMU's end within which a signal belongs to that same end: `timeout` signals a process and its group,
/// and a terminal all of its foreground processes.
const DUPLICATE_SIGNAL_WINDOW: Duration = Duration::from_secs(1);

/// Time after which the user is informed about a slow stop.
const STOP_NOTICE_DELAY: Duration = Duration::from_secs(3);

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
    #[error("the server of disk {image} was not ready after {} s; is its storage stuck?", SERVER_START_TIMEOUT.as_secs())]
    ServerSlow { image: ImageAddress },
    #[error("disk {image}: {source}")]
    Proxy { image: ImageAddress, source: Box<ProxyError> },
    #[error("cannot wait for signals and children: {0}")]
    Wait(#[from] io::Error),
}

/// Callback that shows the user a message of one line.
pub type ShowMessage<'a> = &'a dyn Fn(&str);

/// Starts everything, and returns QEMU's exit code (128 plus the signal's number if a signal ended it). The servers
/// share the locks of `holds`, which have the files of each disk of the plan. It must be called in the program's main
/// thread, before other threads exist: the children end with the thread that started them.
///
/// # Errors
/// See [`SuperviseError`]; no child is left running then.
pub fn supervise(
    plan: &RunPlan,
    holds: &[DiskLocks],
    program: &ServerProgram,
    show_message: ShowMessage<'_>,
) -> Result<u8, SuperviseError> {
    let signals = SignalFd::block_signals()?;
    let mut servers = Vec::with_capacity(plan.disks.len());
    for planned in &plan.disks {
        servers.push(SupervisedServer::start(planned, holds, program, show_message)?);
    }
    if let Some(signal) = wait_until_ready(&mut servers, &signals)? {
        return Ok(signal_exit_code(signal.as_raw()));
    }
    for planned in &plan.disks {
        show_chain(planned, show_message);
    }
    let proxies = plan.disks.iter().map(start_proxy).collect::<Result<Vec<_>, _>>()?;
    let qemu = start_qemu(plan).map_err(|source| SuperviseError::Start {
        what: plan.qemu.first().map(|program| program.display().to_string()).unwrap_or_default(),
        source,
    })?;
    let mut qemu = ChildGuard::new(qemu);
    let memory = plan.memory.as_ref();
    let mut pager = memory.map(|planned| SupervisedPager::start(planned, qemu.pid(), program, show_message));
    let status = restart_until_qemu_exits(&mut qemu, &mut servers, pager.as_mut(), &proxies, &signals)?;
    drop(proxies);
    stop_children(servers, pager, &signals, show_message)?;
    Ok(exit_code(status))
}

/// Shows the files to which the headers of a disk's images lead.
fn show_chain(planned: &PlannedDisk, say: ShowMessage<'_>) {
    // An unreadable chain file keeps the next server from starting, which reports that.
    let Ok(Some(found)) = ChainFile::read(&planned.chain_file()) else {
        return;
    };
    for line in found.describe_files(planned.disk.read_only) {
        say(&format!("{}: {line}", planned.disk.image));
    }
}

fn start_proxy(planned: &PlannedDisk) -> Result<VhostUserProxy, SuperviseError> {
    VhostUserProxy::start(planned)
        .map_err(|source| SuperviseError::Proxy { image: planned.disk.image.clone(), source: Box::new(source) })
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, signal) => signal_exit_code(signal.unwrap_or_default()),
    }
}

/// Returns a shell's exit code for a signal.
fn signal_exit_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Waits until every server listens; returns the signal that ended the wait early, if there was one.
fn wait_until_ready(
    servers: &mut [SupervisedServer<'_>],
    signals: &SignalFd,
) -> Result<Option<Signal>, SuperviseError> {
    for server in servers {
        while !server.planned.ready_file().exists() {
            let image = server.planned.disk.image.clone();
            if let Some(status) = server.process.exit_status()? {
                return Err(SuperviseError::ServerEnded { image, status });
            }
            if server.started.elapsed() > SERVER_START_TIMEOUT {
                return Err(SuperviseError::ServerSlow { image });
            }
            if let Some(SignalEvent::Terminate { signal, .. }) = signals.wait(Some(SERVER_START_POLL_INTERVAL))? {
                return Ok(Some(signal));
            }
        }
    }
    Ok(None)
}

/// Restarts dead servers until QEMU ends.
fn restart_until_qemu_exits(
    qemu: &mut ChildGuard,
    servers: &mut [SupervisedServer<'_>],
    mut pager: Option<&mut SupervisedPager<'_>>,
    keepers: &[VhostUserProxy],
    signals: &SignalFd,
) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = qemu.exit_status()? {
            return Ok(status);
        }
        for server in &mut *servers {
            server.restart_if_dead()?;
        }
        if let Some(pager) = &mut pager {
            pager.restart_if_dead()?;
        }
        let pager_restart_at = pager.as_ref().and_then(|pager| pager.restart_at);
        let next = servers.iter().filter_map(|server| server.restart_at).chain(pager_restart_at).min();
        let timeout = next.map(|due| due.saturating_duration_since(Instant::now()));
        if let Some(SignalEvent::Terminate { signal, from_terminal }) = signals.wait(timeout)? {
            keepers.iter().for_each(VhostUserProxy::set_qemu_ending);
            if !from_terminal {
                qemu.send_signal(signal);
            }
        }
    }
}

/// Ends the servers; each writes back its data. A signal from the user ends the wait. The pager has nothing left to
/// do, and removes the files that it created.
fn stop_children(
    mut servers: Vec<SupervisedServer<'_>>,
    mut pager: Option<SupervisedPager<'_>>,
    signals: &SignalFd,
    say: ShowMessage<'_>,
) -> io::Result<()> {
    if let Some(pager) = &mut pager {
        pager.stop();
    }
    for server in &mut servers {
        server.process.send_signal(Signal::TERM);
    }
    let stop_started = Instant::now();
    let mut is_notified = false;
    loop {
        let mut waiting_for = None;
        for server in &mut servers {
            if server.process.exit_status()?.is_none() {
                let subject = format!("disk {}", server.planned.disk.image);
                waiting_for = Some((subject, "its server", "data that is not written yet"));
            }
        }
        if let Some(pager) = &mut pager
            && !pager.has_ended()?
        {
            waiting_for.get_or_insert_with(|| ("memory".to_owned(), "its pager", "its pager to clean up"));
        }
        let Some((subject, process, what)) = waiting_for else {
            return Ok(());
        };
        if stop_started.elapsed() > STOP_TIMEOUT {
            let limit = STOP_TIMEOUT.as_secs();
            say(&format!("{subject}: {process} did not end within {limit} s; it is killed"));
            return Ok(());
        }
        if stop_started.elapsed() > STOP_NOTICE_DELAY && !is_notified {
            is_notified = true;
            say(&format!("{subject}: waiting for {what}; a signal ends the wait"));
        }
        let received = signals.wait(Some(STOP_NOTICE_DELAY))?;
        if matches!(received, Some(SignalEvent::Terminate { .. })) && stop_started.elapsed() >= DUPLICATE_SIGNAL_WINDOW
        {
            return Ok(());
        }
    }
}

/// A disk's server.
struct SupervisedServer<'a> {
    planned: &'a PlannedDisk,
    disk_locks: Option<&'a DiskLocks>,
    program: &'a ServerProgram,
    show_message: ShowMessage<'a>,
    process: ChildGuard,
    started: Instant,
    backoff: RestartBackoff,
    /// Time of the next restart, if the server is down.
    restart_at: Option<Instant>,
    /// The last obstacle reported to the user.
    obstacle: Option<String>,
}

impl<'a> SupervisedServer<'a> {
    fn start(
        planned: &'a PlannedDisk,
        holds: &'a [DiskLocks],
        program: &'a ServerProgram,
        say: ShowMessage<'a>,
    ) -> Result<Self, SuperviseError> {
        let child = start_server(program, planned).map_err(|source| SuperviseError::Start {
            what: format!("the server of disk {}", planned.disk.image),
            source,
        })?;
        Ok(Self {
            planned,
            disk_locks: holds.iter().find(|hold| hold.image == planned.disk.image),
            program,
            show_message: say,
            process: ChildGuard::new(child),
            started: Instant::now(),
            backoff: RestartBackoff::default(),
            restart_at: None,
            obstacle: None,
        })
    }

    /// Detects that the server has died, and restarts it when that is due.
    fn restart_if_dead(&mut self) -> io::Result<()> {
        let image = &self.planned.disk.image;
        if self.restart_at.is_none() {
            let Some(status) = self.process.exit_status()? else {
                return Ok(());
            };
            let delay = self.backoff.next_delay(self.started.elapsed());
            (self.show_message)(&format!(
                "disk {image}: its server died ({status}) and is restarted; the guest waits for it"
            ));
            self.restart_at = Some(Instant::now() + delay);
        }
        if self.restart_at.is_some_and(|due| due > Instant::now()) {
            return Ok(());
        }
        if self.is_blocked_by_files() {
            self.restart_at = Some(Instant::now() + self.backoff.next_delay(Duration::ZERO));
            return Ok(());
        }
        self.started = Instant::now();
        match start_server(self.program, self.planned) {
            Ok(child) => {
                self.process = ChildGuard::new(child);
                self.restart_at = None;
            }
            Err(error) => {
                (self.show_message)(&format!("disk {image}: cannot restart its server: {error}"));
                self.restart_at = Some(Instant::now() + self.backoff.next_delay(Duration::ZERO));
            }
        }
        Ok(())
    }

    /// Returns whether the server must not be started now, because it would not find the guest's files. Reports
    /// changes of that.
    fn is_blocked_by_files(&mut self) -> bool {
        let obstacle = self.disk_locks.and_then(DiskLocks::obstacle);
        if obstacle != self.obstacle {
            let image = &self.planned.disk.image;
            (self.show_message)(&match &obstacle {
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
