//! The guest's memory within a budget: `larder memory attach` as a child process that is restarted when it dies.
//!
//! It is a separate process because it has rights over QEMU that the servers of the disks must not have. A guest
//! whose pager dies blocks as soon as it touches a page that is not resident, and continues with the next pager.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::process::Signal;

use super::child::{ChildGuard, start_pager};
use super::restart_backoff::RestartBackoff;
use super::supervise::{ServerProgram, ShowMessage};
use crate::memory::spec::MemorySpec;

/// Planned management of the guest's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedMemory {
    /// Memory options of the user.
    pub spec: MemorySpec,
    /// Control socket of the pager.
    pub control: PathBuf,
}

impl PlannedMemory {
    /// Returns the plan, with a control socket in the directory of the sockets.
    pub(super) fn new(spec: &MemorySpec, sockets: &Path) -> Self {
        Self { spec: spec.clone(), control: sockets.join("memory.sock") }
    }

    /// Returns the arguments with which this program manages the memory of the process `pid`, which is just starting.
    pub fn attach_arguments(&self, pid: &str) -> Vec<OsString> {
        let mut words: Vec<OsString> = ["memory", "attach", "--pid", pid, "--wait"].map(OsString::from).to_vec();
        words.extend(self.spec.attach_arguments());
        words.extend(["--control".into(), self.control.clone().into()]);
        words
    }
}

/// The pager of a running QEMU.
pub(super) struct SupervisedPager<'a> {
    planned: &'a PlannedMemory,
    /// QEMU's process ID.
    pid: u32,
    program: &'a ServerProgram,
    show_message: ShowMessage<'a>,
    /// The pager's process; `None` if it could not be started.
    process: Option<ChildGuard>,
    started: Instant,
    backoff: RestartBackoff,
    /// Time of the next restart, if the pager is down.
    pub(super) restart_at: Option<Instant>,
    /// The pager's work is complete: QEMU has ended, or a client has had the pager detach.
    is_done: bool,
}

impl<'a> SupervisedPager<'a> {
    /// Starts the pager of QEMU's process `pid`. If that fails, it is retried.
    pub(super) fn start(
        planned: &'a PlannedMemory,
        pid: u32,
        program: &'a ServerProgram,
        say: ShowMessage<'a>,
    ) -> Self {
        let mut pager = Self {
            planned,
            pid,
            program,
            show_message: say,
            process: None,
            started: Instant::now(),
            backoff: RestartBackoff::default(),
            restart_at: Some(Instant::now()),
            is_done: false,
        };
        pager.restart();
        pager
    }

    /// Detects that the pager has died, and restarts it when that is due.
    pub(super) fn restart_if_dead(&mut self) -> io::Result<()> {
        if self.is_done {
            return Ok(());
        }
        if self.restart_at.is_none() {
            let Some(status) = self.process.as_mut().map(ChildGuard::exit_status).transpose()?.flatten() else {
                return Ok(());
            };
            if status.success() {
                self.is_done = true;
                return Ok(());
            }
            let delay = self.backoff.next_delay(self.started.elapsed());
            (self.show_message)(&format!("memory: its pager died ({status}) and is restarted; the guest waits for it"));
            self.restart_at = Some(Instant::now() + delay);
        }
        if self.restart_at.is_some_and(|due| due <= Instant::now()) {
            self.restart();
        }
        Ok(())
    }

    fn restart(&mut self) {
        self.started = Instant::now();
        match start_pager(self.program, self.planned, self.pid) {
            Ok(child) => {
                self.process = Some(ChildGuard::new(child));
                self.restart_at = None;
            }
            Err(error) => {
                (self.show_message)(&format!("memory: cannot start its pager: {error}; Larder will try again"));
                self.restart_at = Some(Instant::now() + self.backoff.next_delay(std::time::Duration::ZERO));
            }
        }
    }

    /// Ends the pager after QEMU's end.
    pub(super) fn stop(&mut self) {
        self.is_done = true;
        self.restart_at = None;
        // The pager detects QEMU's end itself, except before it has attached.
        if let Some(process) = &mut self.process {
            process.send_signal(Signal::TERM);
        }
    }

    /// Returns whether the pager has ended.
    pub(super) fn has_ended(&mut self) -> io::Result<bool> {
        match &mut self.process {
            Some(process) => Ok(process.exit_status()?.is_some()),
            None => Ok(true),
        }
    }
}
