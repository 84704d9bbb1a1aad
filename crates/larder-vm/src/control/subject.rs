//! The state that a control socket serves, and the recipients of the changes that it accepts.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

use super::migration::MigrationInquiry;
use super::state::ServerState;
use super::wishes::Reloaded;
use crate::disk::DiskInquiry;
use crate::memory::MemoryInquiry;
use crate::vm::config::VmConfig;
use crate::vm::{Moved, VmMove};

/// Callback that requests a reload of the VM's file; returns false if the recipient has ended.
pub type Reload = Box<dyn Fn(ReloadReply) -> bool + Send + Sync>;

/// Callback that requests a step of a move of the VM's disks; returns false if the recipient has ended.
pub type MoveOn = Box<dyn Fn(VmMove, MoveReply) -> bool + Send + Sync>;

/// Channel for the result of a step of a move.
pub type MoveReply = oneshot::Sender<Result<Moved, String>>;

/// Channel for the result of a reload.
pub type ReloadReply = oneshot::Sender<Result<Reloaded, String>>;

/// A process that serves disks, manages memory, or moves a VM.
pub struct Subject {
    vm: Option<String>,
    uuid: Option<String>,
    file: Option<PathBuf>,
    started: SystemTime,
    disks: Mutex<Vec<DiskInquiry>>,
    memory: Option<MemoryInquiry>,
    migration: Option<MigrationInquiry>,
    reload: Option<Reload>,
    move_on: Option<MoveOn>,
    is_confined: bool,
}

impl Subject {
    /// Returns the subject of a process that serves one disk of an unknown VM.
    pub fn disk(disk: DiskInquiry) -> Self {
        Self {
            vm: None,
            uuid: None,
            file: None,
            started: SystemTime::now(),
            disks: Mutex::new(vec![disk]),
            memory: None,
            migration: None,
            reload: None,
            move_on: None,
            is_confined: false,
        }
    }

    /// Returns the subject of a process that manages the memory of an unknown VM.
    pub fn memory(memory: MemoryInquiry) -> Self {
        Self {
            vm: None,
            uuid: None,
            file: None,
            started: SystemTime::now(),
            disks: Mutex::default(),
            memory: Some(memory),
            migration: None,
            reload: None,
            move_on: None,
            is_confined: false,
        }
    }

    /// Returns the subject of a process that manages the memory of the VM that `file` describes; `config` is the
    /// parsed file.
    pub fn vm_memory(config: &VmConfig, file: &Path, memory: MemoryInquiry) -> Self {
        Self {
            vm: Some(config.name.clone()),
            uuid: config.uuid.clone(),
            file: Some(std::path::absolute(file).unwrap_or_else(|_| file.to_owned())),
            ..Self::memory(memory)
        }
    }

    /// Returns the subject of a process that moves the VM of this name.
    pub fn migration(vm: &str, migration: MigrationInquiry) -> Self {
        Self {
            vm: Some(vm.to_owned()),
            uuid: None,
            file: None,
            started: SystemTime::now(),
            disks: Mutex::default(),
            memory: None,
            migration: Some(migration),
            reload: None,
            move_on: None,
            is_confined: false,
        }
    }

    /// Returns the subject of a process that serves the disks of the VM that `file` describes. `config` is the parsed
    /// file, the callbacks request reloads and steps of a move, and `is_confined` tells whether the process is
    /// confined ([`crate::confine`]).
    pub fn vm(
        config: &VmConfig,
        file: &Path,
        disks: Vec<DiskInquiry>,
        (reload, move_on): (Reload, MoveOn),
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
            reload: Some(reload),
            move_on: Some(move_on),
            is_confined,
        }
    }

    /// Replaces the list of disks.
    pub fn set_disks(&self, disks: Vec<DiskInquiry>) {
        *self.now() = disks;
    }

    pub(super) fn disks(&self) -> Vec<DiskInquiry> {
        self.now().clone()
    }

    /// Returns the disk with this name, or with this index in the list, counted from 0.
    pub(super) fn find(&self, called: &str) -> Option<DiskInquiry> {
        let disks = self.now();
        let by_name = disks.iter().find(|disk| disk.name() == Some(called));
        let by_place = || disks.get(called.parse::<usize>().ok()?);
        by_name.or_else(by_place).cloned()
    }

    pub(super) fn memory_of(&self) -> Option<MemoryInquiry> {
        self.memory.clone()
    }

    pub(super) fn migration_of(&self) -> Option<MigrationInquiry> {
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
            confined: self.is_confined,
            started_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Requests a reload of the VM's file.
    pub(super) fn reload(&self, reply: ReloadReply) -> bool {
        self.reload.as_ref().is_some_and(|reload| reload(reply))
    }

    /// Requests a step of a move.
    pub(super) fn move_on(&self, step: VmMove, reply: MoveReply) -> bool {
        self.move_on.as_ref().is_some_and(|move_on| move_on(step, reply))
    }

    fn now(&self) -> MutexGuard<'_, Vec<DiskInquiry>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
