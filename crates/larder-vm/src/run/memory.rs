//! The guest's memory within a budget: `larder memory attach` as a child process that is restarted when it dies.
//!
//! It is a separate process because it has rights over QEMU that the servers of the disks must not have. A guest
//! whose pager dies blocks as soon as it touches a page that is not resident, and continues with the next pager.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::process::Signal;

use super::backoff::Backoff;
use super::child::{Guarded, start_pager};
use super::supervise::{Say, ServerProgram};
use crate::memory::wish::MemoryWish;

/// Planned management of the guest's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedMemory {
    /// Memory options of the user.
    pub wish: MemoryWish,
    /// Control socket of the pager.
    pub control: PathBuf,
}

impl PlannedMemory {
    /// Returns the plan, with a control socket in the directory of the sockets.
    pub(super) fn new(wish: &MemoryWish, sockets: &Path) -> Self {
        Self {
            wish: wish.clone(),
            control: sockets.join("memory.sock"),
        }
    }

    /// Returns the arguments with which this program manages the memory of the process `pid`, which is just starting.
    pub fn attach_arguments(&self, pid: &str) -> Vec<OsString> {
        let mut words: Vec<OsString> = ["memory", "attach", "--pid", pid, "--wait"]
            .map(OsString::from)
            .to_vec();
        words.extend(self.wish.attach_arguments());
        words.extend(["--control".into(), self.control.clone().into()]);
        words
    }
}

/// The pager of a running QEMU.
pub(super) struct Pager<'a> {
    planned: &'a PlannedMemory,
    /// QEMU's process ID.
    pid: u32,
    program: &'a ServerProgram,
    say: Say<'a>,
    /// The pager's process; `None` if it could not be started.
    process: Option<Guarded>,
    started: Instant,
    backoff: Backoff,
    /// Time of the next restart, if the pager is down.
    pub(super) due: Option<Instant>,
    /// The pager's work is complete: QEMU has ended, or a client has had the pager detach.
    is_over: bool,
}

impl<'a> Pager<'a> {
    /// Starts the pager of QEMU's process `pid`. If that fails, it is retried.
    pub(super) fn start(planned: &'a PlannedMemory, pid: u32, program: &'a ServerProgram, say: Say<'a>) -> Self {
        let mut pager = Self {
            planned,
            pid,
            program,
            say,
            process: None,
            started: Instant::now(),
            backoff: Backoff::default(),
            due: Some(Instant::now()),
            is_over: false,
        };
        pager.start_again();
        pager
    }

    /// Detects that the pager has died, and restarts it when that is due.
    pub(super) fn keep_alive(&mut self) -> io::Result<()> {
        if self.is_over {
            return Ok(());
        }
        if self.due.is_none() {
            let Some(status) = self.process.as_mut().map(Guarded::ended).transpose()?.flatten() else {
                return Ok(());
            };
            if status.success() {
                self.is_over = true;
                return Ok(());
            }
            let delay = self.backoff.died(self.started.elapsed());
            (self.say)(&format!(
                "memory: its pager died ({status}) and is restarted; the guest waits for it"
            ));
            self.due = Some(Instant::now() + delay);
        }
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.start_again();
        }
        Ok(())
    }

    fn start_again(&mut self) {
        self.started = Instant::now();
        match start_pager(self.program, self.planned, self.pid) {
            Ok(child) => {
                self.process = Some(Guarded::new(child));
                self.due = None;
            }
            Err(error) => {
                (self.say)(&format!(
                    "memory: cannot start its pager: {error}; Larder will try again"
                ));
                self.due = Some(Instant::now() + self.backoff.died(std::time::Duration::ZERO));
            }
        }
    }

    /// Ends the pager after QEMU's end.
    pub(super) fn end(&mut self) {
        self.is_over = true;
        self.due = None;
        // The pager detects QEMU's end itself, except before it has attached.
        if let Some(process) = &mut self.process {
            process.signal(Signal::TERM);
        }
    }

    /// Returns whether the pager has ended.
    pub(super) fn has_ended(&mut self) -> io::Result<bool> {
        match &mut self.process {
            Some(process) => Ok(process.ended()?.is_some()),
            None => Ok(true),
        }
    }
}
