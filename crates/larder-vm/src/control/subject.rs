//! The state that a control socket serves, and the recipients of the changes that it accepts.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use super::migration::MigrationHandle;
use super::requests::ReloadResult;
use super::state::ServerState;
use super::trace::Traces;
use crate::disk::DiskHandle;
use crate::memory::MemoryHandle;
use crate::vm::config::VmConfig;
use crate::vm::{MoveStep, MoveStepResult};

/// Callback that requests a reload of the VM's file; returns false if the recipient has ended.
pub type ReloadCallback = Box<dyn Fn(ReloadReply) -> bool + Send + Sync>;

/// Callback that requests a step of a move of the VM's disks; returns false if the recipient has ended.
pub type MoveCallback = Box<dyn Fn(MoveStep, MoveReply) -> bool + Send + Sync>;

/// Channel for the result of a step of a move.
pub type MoveReply = oneshot::Sender<Result<MoveStepResult, String>>;

/// Channel for the result of a reload.
pub type ReloadReply = oneshot::Sender<Result<ReloadResult, String>>;

/// A process that serves disks, manages memory, or moves a VM.
pub struct Subject {
    vm: Option<String>,
    uuid: Option<String>,
    file: Option<PathBuf>,
    started: SystemTime,
    disks: Mutex<Vec<DiskHandle>>,
    memory: Option<MemoryHandle>,
    migration: Option<MigrationHandle>,
    reload_callback: Option<ReloadCallback>,
    move_callback: Option<MoveCallback>,
    confined: bool,
}

impl Subject {
    /// Returns the subject of a process that serves one disk of an unknown VM.
    pub fn disk(disk: DiskHandle) -> Self {
        Self {
            vm: None,
            uuid: None,
            file: None,
            started: SystemTime::now(),
            disks: Mutex::new(vec![disk]),
            memory: None,
            migration: None,
            reload_callback: None,
            move_callback: None,
            confined: false,
        }
    }

    /// Returns the subject of a process that manages the memory of an unknown VM.
    pub fn memory(memory: MemoryHandle) -> Self {
        Self {
            vm: None,
            uuid: None,
            file: None,
            started: SystemTime::now(),
            disks: Mutex::default(),
            memory: Some(memory),
            migration: None,
            reload_callback: None,
            move_callback: None,
            confined: false,
        }
    }

    /// Returns the subject of a process that manages the memory of the VM that `file` describes; `config` is the
    /// parsed file.
    pub fn vm_memory(config: &VmConfig, file: &Path, memory: MemoryHandle) -> Self {
        Self {
            vm: Some(config.name.clone()),
            uuid: config.uuid.clone(),
            file: Some(std::path::absolute(file).unwrap_or_else(|_| file.to_owned())),
            ..Self::memory(memory)
        }
    }

    /// Returns the subject of a process that moves the VM of this name.
    pub fn migration(vm: &str, migration: MigrationHandle) -> Self {
        Self {
            vm: Some(vm.to_owned()),
            uuid: None,
            file: None,
            started: SystemTime::now(),
            disks: Mutex::default(),
            memory: None,
            migration: Some(migration),
            reload_callback: None,
            move_callback: None,
            confined: false,
        }
    }

    /// Returns the subject of a process that serves the disks of the VM that `file` describes. `config` is the parsed
    /// file, the callbacks request reloads and steps of a move, and `is_confined` tells whether the process is
    /// confined ([`crate::confine`]).
    pub fn vm(
        config: &VmConfig,
        file: &Path,
        disks: Vec<DiskHandle>,
        (reload, move_on): (ReloadCallback, MoveCallback),
        is_confined: bool,
    ) -> Self {
        Self {
            vm: Some(config.name.clone()),
            uuid: config.uuid.clone(),
            file: Some(std::path::absolute(file).unwrap_or_else(|_| file.to_owned())),
            started: SystemTime::now(),
            disks: Mutex::new(disks),
            memory: None,
            migration: None,
            reload_callback: Some(reload),
            move_callback: Some(move_on),
            confined: is_confined,
        }
    }

    /// Replaces the list of disks.
    pub fn set_disks(&self, disks: Vec<DiskHandle>) {
        *self.lock_disks() = disks;
    }

    pub(super) fn disks(&self) -> Vec<DiskHandle> {
        self.lock_disks().clone()
    }

    /// Returns the last events of the disks, without a query to their threads.
    pub(super) fn traces(&self) -> Traces {
        let disks = self.disks();
        let events = disks.iter().map(|disk| disk.trace().events_of(disk.name()));
        Traces { disks: events.collect() }
    }

    /// Returns the disk with this name, or with this index in the list, counted from 0.
    pub(super) fn find_disk(&self, name: &str) -> Option<DiskHandle> {
        let disks = self.lock_disks();
        let by_name = disks.iter().find(|disk| disk.name() == Some(name));
        let by_index = || disks.get(name.parse::<usize>().ok()?);
        by_name.or_else(by_index).cloned()
    }

    pub(super) fn memory_handle(&self) -> Option<MemoryHandle> {
        self.memory.clone()
    }

    pub(super) fn migration_handle(&self) -> Option<MigrationHandle> {
        self.migration.clone()
    }

    pub(super) fn state(&self) -> ServerState {
        let since = self.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        ServerState {
            vm: self.vm.clone(),
            uuid: self.uuid.clone(),
            file: self.file.as_ref().map(|file| file.display().to_string()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            confined: self.confined,
            started_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Requests a reload of the VM's file.
    pub(super) fn request_reload(&self, reply: ReloadReply) -> bool {
        self.reload_callback.as_ref().is_some_and(|reload| reload(reply))
    }

    /// Requests a step of a move.
    pub(super) fn request_move(&self, step: MoveStep, reply: MoveReply) -> bool {
        self.move_callback.as_ref().is_some_and(|move_on| move_on(step, reply))
    }

    fn lock_disks(&self) -> MutexGuard<'_, Vec<DiskHandle>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
