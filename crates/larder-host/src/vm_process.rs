//! State of one control socket at which a VM's server is, was, or may be.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use larder_vm::control::memory::MemoryState;
use larder_vm::control::memory_rates::MemoryRates;
use larder_vm::control::migration::{Direction, MigrationState};
use larder_vm::control::rates::DiskRates;
use larder_vm::control::state::{DiskList, DiskState, ServerState};
use larder_vm::vm::find::MEMORY_SOCKET_SUFFIX;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::control_client::ControlRequestError;
use crate::discovery::{DiscoveredSocket, SocketId, VmName};

/// Largest number of event subscriptions to one VM; its server accepts 16 in all.
const SUBSCRIPTIONS_MAX: usize = 4;

/// Largest number of disks of a VM that are polled.
const DISKS_MAX: usize = 256;

/// Longest name that is republished, in bytes.
const NAME_BYTES_MAX: usize = 200;

/// Health of a VM's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Health {
    /// Not polled yet.
    New,
    /// The server answers.
    Up,
    /// The server or one of its disks is slow to answer.
    Stuck,
    /// The server was killed, or ended without removing its socket.
    Killed,
    /// The VM has a VM file and no server.
    Stopped,
    /// This user may not connect.
    Denied,
    /// The socket is not a Larder control socket.
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

/// State of all disks of a VM, and of its memory, at one time.
#[derive(Debug)]
pub(crate) struct Sample {
    /// Time of the sample, in milliseconds since 1970 (UTC).
    pub(crate) time_ms: u64,
    /// Disks, each with a unique name.
    pub(crate) disks: Vec<NamedDisk>,
    /// Memory, if the process manages any.
    pub(crate) memory: Option<MemorySample>,
    /// Migration, if the process runs one.
    pub(crate) migration: Option<MigrationState>,
}

#[derive(Debug)]
pub(crate) struct MemorySample {
    pub(crate) state: MemoryState,
    /// Rates since the previous sample.
    pub(crate) rates: Option<MemoryRates>,
}

#[derive(Debug)]
pub(crate) struct NamedDisk {
    pub(crate) name: String,
    pub(crate) state: DiskState,
    /// Rates since the previous sample.
    pub(crate) rates: Option<DiskRates>,
}

impl Sample {
    pub(crate) fn new(reported: DiskList, memory: Option<MemoryState>, before: Option<&Self>) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut names = HashSet::new();
        let mut disks = Vec::with_capacity(reported.disks.len().min(DISKS_MAX));
        for (index, state) in reported.disks.into_iter().take(DISKS_MAX).enumerate() {
            let name = truncate_name(state.name.clone().unwrap_or_else(|| index.to_string()));
            if !names.insert(name.clone()) {
                continue;
            }
            let before = before.and_then(|before| before.disks.iter().find(|disk| disk.name == name));
            let rates = before.and_then(|before| DiskRates::between(&before.state, &state));
            disks.push(NamedDisk { name, state, rates });
        }
        let memory = memory.map(|state| {
            let before = before.and_then(|before| before.memory.as_ref());
            let rates = before.and_then(|before| MemoryRates::between(&before.state, &state));
            MemorySample { state, rates }
        });
        Self { time_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX), disks, memory, migration: None }
    }

    /// Creates a sample of a process that only migrates a VM.
    pub(crate) fn from_migration(state: MigrationState) -> Self {
        Self { migration: Some(state), ..Self::new(DiskList { disks: Vec::new() }, None, None) }
    }

    /// Returns whether a clock of the process went backwards, which shows that the server was restarted.
    pub(crate) fn is_of_restarted_server(&self, before: &Self) -> bool {
        let clocks: HashMap<&str, u64> = before.clocks().collect();
        let of_memory = |sample: &Self| sample.memory.as_ref().map(|memory| memory.state.time_ns);
        let went_backwards = |(before, now): (u64, u64)| now < before;
        let of_migration = |sample: &Self| sample.migration.as_ref().map(|state| state.time_ns);
        of_memory(before).zip(of_memory(self)).is_some_and(went_backwards)
            || of_migration(before).zip(of_migration(self)).is_some_and(went_backwards)
            || self.clocks().any(|(name, time)| clocks.get(name).is_some_and(|before| time < *before))
    }

    fn clocks(&self) -> impl Iterator<Item = (&str, u64)> {
        self.disks.iter().map(|disk| (disk.name.as_str(), disk.state.time_ns))
    }
}

/// Returns the name, truncated to [`NAME_BYTES_MAX`] bytes.
pub(crate) fn truncate_name(mut name: String) -> String {
    if name.len() > NAME_BYTES_MAX {
        let end = (0..=NAME_BYTES_MAX).rev().find(|at| name.is_char_boundary(*at));
        name.truncate(end.unwrap_or_default());
        name.push('…');
    }
    name
}

/// Control socket, with the state of its server.
pub(crate) struct VmProcess {
    /// Path of the socket.
    pub(crate) path: PathBuf,
    /// VM according to the VM file, if there is one.
    pub(crate) configured: Option<VmName>,
    /// Socket that exists at the path.
    pub(crate) socket: Option<SocketId>,
    pub(crate) health: Health,
    /// Explanation of the health, as text for people.
    pub(crate) reason: Option<String>,
    /// VM whose memory is managed by the process at this socket; derived from the socket's directory.
    pub(crate) memory_of: Option<String>,
    /// VM that the process at this socket migrates, and nothing else; derived from the socket's name.
    pub(crate) migration: Option<(String, Direction)>,
    /// True if the server manages memory; `None` until it was asked.
    pub(crate) has_memory: Option<bool>,
    /// True if the server manages memory and serves no disks, as far as is known.
    pub(crate) manages_only_memory: bool,
    /// Description that the server gave of itself.
    pub(crate) server: Option<ServerState>,
    /// Process that listened when the description was given.
    pub(crate) listener: Option<i32>,
    /// Latest sample of the disks.
    pub(crate) sample: Option<Arc<Sample>>,
    /// Request in flight, and its start.
    pub(crate) request: Option<(Instant, AbortHandle)>,
    /// Answers since the server last described itself.
    pub(crate) answers_since_description: u32,
    /// Time of the latest answer, if there was one.
    pub(crate) last_answer: Option<Instant>,
    pub(crate) subscriptions: Arc<Semaphore>,
}

impl VmProcess {
    pub(crate) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            configured: None,
            socket: None,
            health: Health::New,
            reason: None,
            memory_of: None,
            migration: None,
            has_memory: None,
            manages_only_memory: false,
            server: None,
            listener: None,
            sample: None,
            request: None,
            answers_since_description: 0,
            last_answer: None,
            subscriptions: Arc::new(Semaphore::new(SUBSCRIPTIONS_MAX)),
        }
    }

    /// Returns whether the socket is known to be a VM's, or to have been one.
    pub(crate) fn is_vm(&self) -> bool {
        self.configured.is_some() || self.server.is_some()
    }

    /// Returns the VM's name, which is libvirt's name of the domain if it has one. The process that manages a VM's
    /// memory is named after the VM.
    pub(crate) fn name(&self) -> String {
        let reported = self.server.as_ref().and_then(|server| server.vm.clone());
        let configured = || {
            let configured = self.configured.as_ref().map(|named| named.name.clone());
            configured.or_else(|| self.memory_of.clone())
        };
        let file = || {
            let stem = self.path.file_stem().unwrap_or_default().to_string_lossy();
            let of_vm =
                stem.strip_suffix(MEMORY_SOCKET_SUFFIX).filter(|name| self.manages_only_memory && !name.is_empty());
            of_vm.unwrap_or(&stem).to_owned()
        };
        truncate_name(reported.or_else(configured).unwrap_or_else(file))
    }

    pub(crate) fn uuid(&self) -> Option<&str> {
        let reported = self.server.as_ref().and_then(|server| server.uuid.as_deref());
        reported.or_else(|| self.configured.as_ref()?.uuid.as_deref())
    }

    /// Updates the state from the result of a discovery.
    pub(crate) fn update_from(&mut self, discovered: DiscoveredSocket) {
        self.configured = discovered.vm;
        self.memory_of = discovered.memory_of;
        self.migration = discovered.migration;
        self.manages_only_memory |= self.memory_of.is_some();
        if self.socket == discovered.socket {
            return;
        }
        self.socket = discovered.socket;
        self.abort_request();
        if discovered.socket.is_some() {
            (self.health, self.reason) = (Health::New, None);
            self.listener = None;
            self.has_memory = None;
        }
    }

    /// Records that the socket does not exist any more.
    pub(crate) fn mark_stopped(&mut self) {
        self.abort_request();
        self.socket = None;
        let why = match self.configured {
            Some(_) => "its server is not running; start it with larder vm",
            None if self.migration.is_some() => "the migration has ended",
            None => "its server has ended",
        };
        self.set_health(Health::Stopped, why);
        self.drop_sample();
    }

    /// Aborts the request in flight.
    fn abort_request(&mut self) {
        if let Some((_, request)) = self.request.take() {
            request.abort();
        }
    }

    pub(crate) fn set_health(&mut self, health: Health, why: impl Into<String>) {
        self.health = health;
        self.reason = Some(why.into());
    }

    pub(crate) fn accept_sample(&mut self, sample: Sample) {
        if self.sample.as_ref().is_some_and(|before| sample.is_of_restarted_server(before)) {
            self.listener = None;
        }
        self.manages_only_memory = sample.memory.is_some() && sample.disks.is_empty();
        self.sample = Some(Arc::new(sample));
        self.answers_since_description += 1;
        self.last_answer = Some(Instant::now());
        (self.health, self.reason) = (Health::Up, None);
    }

    /// Records that a request failed.
    pub(crate) fn record_failure(&mut self, error: &ControlRequestError) {
        match error {
            ControlRequestError::NoSocket => return self.mark_stopped(),
            ControlRequestError::Killed => self.set_health(Health::Killed, error.to_string()),
            ControlRequestError::Denied => self.set_health(Health::Denied, error.to_string()),
            // A server that has answered before is Larder's.
            ControlRequestError::NotLarder(_) if self.server.is_none() => {
                self.set_health(Health::Foreign, error.to_string())
            }
            ControlRequestError::HungUp if !self.is_vm() => {
                self.set_health(Health::Foreign, format!("it is not a Larder control socket: {error}"));
            }
            _ => return self.set_health(Health::Stuck, error.to_string()),
        }
        self.drop_sample();
    }

    /// Drops the sample of a server that has ended, which is stale. The last state of a migration stays valid.
    fn drop_sample(&mut self) {
        if self.migration.is_none() {
            self.sample = None;
        }
    }

    /// Returns the latest sample, if the server answers.
    pub(crate) fn current_sample(&self) -> Option<&Arc<Sample>> {
        self.sample.as_ref().filter(|_| self.health == Health::Up)
    }
}
