//! A place where a VM's server is, was, or may be, and what is known of it.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use larder_vm::control::memory::MemoryState;
use larder_vm::control::memory_rates::MemoryRates;
use larder_vm::control::migration::{Direction, MigrationState};
use larder_vm::control::rates::Rates;
use larder_vm::control::state::{DiskState, Disks, ServerState};
use larder_vm::vm::find::OF_MEMORY;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::ask::AskError;
use crate::find::{Place, SocketId, VmName};

/// Whoever follows one VM's events, at a time: its server tells them to 16.
const LISTENERS_MAX: usize = 4;

/// Disks of a VM that are looked at.
const DISKS_MAX: usize = 256;

/// The longest name that is told on, in bytes.
const NAME_BYTES_MAX: usize = 200;

/// How a place is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Health {
    /// Not known yet.
    New,
    /// Its server answers.
    Up,
    /// It takes long, or a disk of it does.
    Stuck,
    /// Its server was killed, or has gone without a word.
    Killed,
    /// It has a file, and no server.
    Stopped,
    /// This user may not ask.
    Denied,
    /// It is something else.
    Foreign,
}

impl Health {
    pub(crate) const ALL: [(Self, &'static str); 7] = [
        (Self::New, "new"),
        (Self::Up, "up"),
        (Self::Stuck, "stuck"),
        (Self::Killed, "killed"),
        (Self::Stopped, "stopped"),
        (Self::Denied, "denied"),
        (Self::Foreign, "foreign"),
    ];
}

/// What all disks of a VM, and its memory, said at a time.
#[derive(Debug)]
pub(crate) struct Sample {
    /// In milliseconds since 1970 (UTC).
    pub(crate) time_ms: u64,
    /// Each has a name that no other one has.
    pub(crate) disks: Vec<NamedDisk>,
    /// The memory that the process manages, if it does.
    pub(crate) memory: Option<Memory>,
    /// The VM that the process moves, if it does.
    pub(crate) migration: Option<MigrationState>,
}

#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) state: MemoryState,
    /// What it did since the last sample.
    pub(crate) rates: Option<MemoryRates>,
}

#[derive(Debug)]
pub(crate) struct NamedDisk {
    pub(crate) name: String,
    pub(crate) state: DiskState,
    /// What it did since the last sample.
    pub(crate) rates: Option<Rates>,
}

impl Sample {
    pub(crate) fn new(told: Disks, memory: Option<MemoryState>, before: Option<&Self>) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut names = HashSet::new();
        let mut disks = Vec::with_capacity(told.disks.len().min(DISKS_MAX));
        for (place, state) in told.disks.into_iter().take(DISKS_MAX).enumerate() {
            let name = shortened(state.name.clone().unwrap_or_else(|| place.to_string()));
            if !names.insert(name.clone()) {
                continue;
            }
            let before = before.and_then(|before| before.disks.iter().find(|disk| disk.name == name));
            let rates = before.and_then(|before| Rates::between(&before.state, &state));
            disks.push(NamedDisk { name, state, rates });
        }
        let memory = memory.map(|state| {
            let before = before.and_then(|before| before.memory.as_ref());
            let rates = before.and_then(|before| MemoryRates::between(&before.state, &state));
            Memory { state, rates }
        });
        Self {
            time_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            disks,
            memory,
            migration: None,
        }
    }

    /// Of a process that moves a VM, and does nothing else.
    pub(crate) fn of_migration(state: MigrationState) -> Self {
        Self {
            migration: Some(state),
            ..Self::new(Disks { disks: Vec::new() }, None, None)
        }
    }

    /// Whether a disk's clock has gone back, as in a server that was started anew.
    pub(crate) fn is_of_another_server_than(&self, before: &Self) -> bool {
        let clocks: HashMap<&str, u64> = before.clocks().collect();
        let of_memory = |sample: &Self| sample.memory.as_ref().map(|memory| memory.state.time_ns);
        let has_gone_back = |(before, now): (u64, u64)| now < before;
        let of_migration = |sample: &Self| sample.migration.as_ref().map(|state| state.time_ns);
        of_memory(before).zip(of_memory(self)).is_some_and(has_gone_back)
            || of_migration(before).zip(of_migration(self)).is_some_and(has_gone_back)
            || self
                .clocks()
                .any(|(name, time)| clocks.get(name).is_some_and(|before| time < *before))
    }

    fn clocks(&self) -> impl Iterator<Item = (&str, u64)> {
        self.disks.iter().map(|disk| (disk.name.as_str(), disk.state.time_ns))
    }
}

/// A name that is not too long.
pub(crate) fn shortened(mut name: String) -> String {
    if name.len() > NAME_BYTES_MAX {
        let end = (0..=NAME_BYTES_MAX).rev().find(|at| name.is_char_boundary(*at));
        name.truncate(end.unwrap_or_default());
        name.push('…');
    }
    name
}

/// A place.
pub(crate) struct Vm {
    /// The socket.
    pub(crate) path: PathBuf,
    /// What its file says, if it has one.
    pub(crate) named: Option<VmName>,
    /// The socket that is there.
    pub(crate) socket: Option<SocketId>,
    pub(crate) health: Health,
    /// What is to be said of that, for people.
    pub(crate) why: Option<String>,
    /// The VM whose memory is managed there, as its folder says.
    pub(crate) memory_of: Option<String>,
    /// The VM that is moved there, and nothing else, as the socket's name says.
    pub(crate) moved: Option<(String, Direction)>,
    /// Whether the server manages memory; not known before it was asked.
    pub(crate) has_memory: Option<bool>,
    /// It does, and serves no disks, as far as is known.
    pub(crate) is_of_memory: bool,
    /// What its server has said of itself.
    pub(crate) server: Option<ServerState>,
    /// The process that listened then.
    pub(crate) listener: Option<i32>,
    /// The last that its disks have said.
    pub(crate) sample: Option<Arc<Sample>>,
    /// The question that is under way, and since when.
    pub(crate) asked: Option<(Instant, AbortHandle)>,
    /// Answers since the server was last asked about itself.
    pub(crate) answers: u32,
    /// When it last answered, if ever.
    pub(crate) seen: Option<Instant>,
    pub(crate) listeners: Arc<Semaphore>,
}

impl Vm {
    pub(crate) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            named: None,
            socket: None,
            health: Health::New,
            why: None,
            memory_of: None,
            moved: None,
            has_memory: None,
            is_of_memory: false,
            server: None,
            listener: None,
            sample: None,
            asked: None,
            answers: 0,
            seen: None,
            listeners: Arc::new(Semaphore::new(LISTENERS_MAX)),
        }
    }

    /// It is known to be a VM's, or to have been one.
    pub(crate) fn is_vm(&self) -> bool {
        self.named.is_some() || self.server.is_some()
    }

    /// What it is called: libvirt's name of the domain where it is a VM's. The process that manages a VM's memory is called
    /// as the VM.
    pub(crate) fn name(&self) -> String {
        let told = self.server.as_ref().and_then(|server| server.vm.clone());
        let named = || {
            let named = self.named.as_ref().map(|named| named.name.clone());
            named.or_else(|| self.memory_of.clone())
        };
        let file = || {
            let stem = self.path.file_stem().unwrap_or_default().to_string_lossy();
            let of_vm = stem
                .strip_suffix(OF_MEMORY)
                .filter(|name| self.is_of_memory && !name.is_empty());
            of_vm.unwrap_or(&stem).to_owned()
        };
        shortened(told.or_else(named).unwrap_or_else(file))
    }

    pub(crate) fn uuid(&self) -> Option<&str> {
        let told = self.server.as_ref().and_then(|server| server.uuid.as_deref());
        told.or_else(|| self.named.as_ref()?.uuid.as_deref())
    }

    /// Takes up what was found there now.
    pub(crate) fn is_found(&mut self, place: Place) {
        self.named = place.vm;
        self.memory_of = place.memory_of;
        self.moved = place.moved;
        self.is_of_memory |= self.memory_of.is_some();
        if self.socket == place.socket {
            return;
        }
        self.socket = place.socket;
        self.give_up();
        if place.socket.is_some() {
            (self.health, self.why) = (Health::New, None);
            self.listener = None;
            self.has_memory = None;
        }
    }

    /// The socket is gone.
    pub(crate) fn is_gone(&mut self) {
        self.give_up();
        self.socket = None;
        let why = match self.named {
            Some(_) => "no server runs for it; larder vm starts one",
            None if self.moved.is_some() => "the move has ended",
            None => "its server has ended",
        };
        self.is(Health::Stopped, why);
        self.forget_disks();
    }

    /// Ends the question that is under way.
    fn give_up(&mut self) {
        if let Some((_, question)) = self.asked.take() {
            question.abort();
        }
    }

    pub(crate) fn is(&mut self, health: Health, why: impl Into<String>) {
        self.health = health;
        self.why = Some(why.into());
    }

    pub(crate) fn is_up(&mut self, sample: Sample) {
        if self
            .sample
            .as_ref()
            .is_some_and(|before| sample.is_of_another_server_than(before))
        {
            self.listener = None;
        }
        self.is_of_memory = sample.memory.is_some() && sample.disks.is_empty();
        self.sample = Some(Arc::new(sample));
        self.answers += 1;
        self.seen = Some(Instant::now());
        (self.health, self.why) = (Health::Up, None);
    }

    /// There is no answer.
    pub(crate) fn has_failed(&mut self, error: &AskError) {
        match error {
            AskError::Gone => return self.is_gone(),
            AskError::Killed => self.is(Health::Killed, error.to_string()),
            AskError::Denied => self.is(Health::Denied, error.to_string()),
            // What has answered before is Larder.
            AskError::Foreign(_) if self.server.is_none() => self.is(Health::Foreign, error.to_string()),
            AskError::HungUp if !self.is_vm() => {
                self.is(Health::Foreign, format!("it is no control socket of Larder: {error}"));
            }
            _ => return self.is(Health::Stuck, error.to_string()),
        }
        self.forget_disks();
    }

    /// What a server that is gone has said is true no more. How a move was at last is what there is to know of it.
    fn forget_disks(&mut self) {
        if self.moved.is_none() {
            self.sample = None;
        }
    }

    /// What its disks said, if its server answers.
    pub(crate) fn now(&self) -> Option<&Arc<Sample>> {
        self.sample.as_ref().filter(|_| self.health == Health::Up)
    }
}
