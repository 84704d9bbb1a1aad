//! What a control socket tells of, and where it passes on what is to be done.

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

/// Passes on that the VM's file is to be read again, or what is in it now; whether somebody is there to do it.
pub type Reload = Box<dyn Fn(ReloadReply) -> bool + Send + Sync>;

/// Passes on that the VM goes to another host, or comes; whether somebody is there to do it.
pub type MoveOn = Box<dyn Fn(VmMove, MoveReply) -> bool + Send + Sync>;

/// Where is told what has become of it, or why it is not done.
pub type MoveReply = oneshot::Sender<Result<Moved, String>>;

/// Where is told what became of it, or what is wrong with the file.
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
    /// One disk, which belongs to no VM that is known.
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

    /// The memory of a process, which belongs to no VM that is known.
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

    /// The memory of a VM that is described in `file` as `config` has it.
    pub fn vm_memory(config: &VmConfig, file: &Path, memory: MemoryInquiry) -> Self {
        Self {
            vm: Some(config.name.clone()),
            uuid: config.uuid.clone(),
            file: Some(std::path::absolute(file).unwrap_or_else(|_| file.to_owned())),
            ..Self::memory(memory)
        }
    }

    /// A VM of that name that is moved.
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

    /// The disks of a VM that is described in `file` as `config` has it, and who reads that again, and moves them; and whether this
    /// process is confined ([`crate::confine`]).
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

    /// Other disks are served from now on.
    pub fn set_disks(&self, disks: Vec<DiskInquiry>) {
        *self.now() = disks;
    }

    pub(super) fn disks(&self) -> Vec<DiskInquiry> {
        self.now().clone()
    }

    /// The disk that a client calls so: by its name, or by its place in the list, from 0 on.
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

    /// Has the VM's file read again, or `text` instead, if there is one.
    pub(super) fn reload(&self, reply: ReloadReply) -> bool {
        self.reload.as_ref().is_some_and(|reload| reload(reply))
    }

    /// Has the VM go, or come.
    pub(super) fn move_on(&self, step: VmMove, reply: MoveReply) -> bool {
        self.move_on.as_ref().is_some_and(|move_on| move_on(step, reply))
    }

    fn now(&self) -> MutexGuard<'_, Vec<DiskInquiry>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
