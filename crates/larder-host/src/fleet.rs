//! State of all VMs of the host, which are polled while there is a watcher.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use larder_vm::control::memory::MemoryState;
use larder_vm::control::migration::MigrationState;
use larder_vm::control::state::{Disks, Failure, ServerState};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{sleep, sleep_until, timeout};

use crate::ask::{AskError, Told, ask};
use crate::balancing::Balance;
use crate::find::{Finder, Found, LeftOut};
use crate::vm::{Health, Sample, Vm};

/// Interval between two polls of all VMs.
const INTERVAL: Duration = Duration::from_secs(1);

/// Age up to which the results of a poll count as fresh.
pub(crate) const FRESH: Duration = Duration::from_millis(900);

/// Time after which a VM that gives no answer counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(2);

/// Time for which a poll waits for answers before its results so far are published; VMs that are stuck are not waited
/// for.
const SETTLE_TIME_MAX: Duration = Duration::from_millis(700);

/// Time within which the directories must be scanned.
const FIND_TIME_MAX: Duration = Duration::from_millis(500);

/// Largest number of requests in flight; a stuck VM gives up its permit to the next.
const QUESTIONS_MAX: usize = 64;

/// Number of attempts at a server that hangs up, as a server with too many clients does.
const TRIES_MAX: u32 = 3;
const PAUSE: Duration = Duration::from_millis(100);

/// Number of answers after which a server is asked for its own description again.
const ANSWERS_MAX: u32 = 30;

/// Time for which a VM without a VM file is still shown after its server has ended.
const REMEMBERED: Duration = Duration::from_secs(600);

/// All VMs of the host.
pub(crate) struct Fleet {
    vms: Mutex<BTreeMap<PathBuf, Vm>>,
    /// Finder of VMs; `None` while directories are scanned.
    finder: Mutex<Option<Finder>>,
    /// Number of polls so far.
    looks: watch::Sender<u64>,
    watchers: watch::Sender<usize>,
    last_look: tokio::sync::Mutex<Option<Instant>>,
    questions: Arc<Semaphore>,
    answered: Notify,
    /// Changes of the VMs' memory budgets.
    balance: Mutex<Balance>,
    /// Counts of control sockets that are not watched.
    left_out: Mutex<LeftOut>,
}

/// Watcher of the fleet; VMs are polled as long as there is one.
pub(crate) struct Watcher {
    fleet: Arc<Fleet>,
    looks: watch::Receiver<u64>,
}

impl Watcher {
    /// Waits for the next poll of all VMs.
    pub(crate) async fn next(&mut self) {
        // The sender lives in the fleet, which this watcher keeps alive.
        let _ = self.looks.changed().await;
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.fleet.watchers.send_modify(|count| *count -= 1);
    }
}

impl Fleet {
    pub(crate) fn new(finder: Finder) -> Self {
        Self {
            vms: Mutex::default(),
            finder: Mutex::new(Some(finder)),
            looks: watch::Sender::new(0),
            watchers: watch::Sender::new(0),
            last_look: tokio::sync::Mutex::default(),
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
            answered: Notify::new(),
            balance: Mutex::default(),
            left_out: Mutex::default(),
        }
    }

    pub(crate) fn watch(self: &Arc<Self>) -> Watcher {
        self.watchers.send_modify(|count| *count += 1);
        Watcher {
            fleet: Arc::clone(self),
            looks: self.looks.subscribe(),
        }
    }

    /// Polls all VMs periodically while there is a watcher. Drop the future to end it.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut watchers = self.watchers.subscribe();
        loop {
            if watchers.wait_for(|count| *count > 0).await.is_err() {
                return;
            }
            let next = tokio::time::Instant::now() + INTERVAL;
            self.look(&mut *self.last_look.lock().await).await;
            sleep_until(next).await;
        }
    }

    /// Makes the state of all VMs fresh, except of those that are stuck.
    pub(crate) async fn refresh(self: &Arc<Self>) {
        self.refresh_after(FRESH).await;
    }

    /// Makes the state of all VMs no older than `age`, except of those that are stuck.
    pub(crate) async fn refresh_after(self: &Arc<Self>, age: Duration) {
        let mut last = self.last_look.lock().await;
        if last.is_none_or(|last| last.elapsed() > age) {
            self.look(&mut last).await;
        }
        let settled = self.settled();
        drop(last);
        let _ = timeout(STUCK_AFTER, settled).await;
    }

    async fn look(self: &Arc<Self>, last: &mut Option<Instant>) {
        *last = Some(Instant::now());
        let found = self.find().await;
        self.ask_all(found);
        let _ = timeout(SETTLE_TIME_MAX, self.settled()).await;
        self.looks.send_modify(|looks| *looks += 1);
    }

    /// Scans for VMs; returns `None` if directories take too long.
    async fn find(self: &Arc<Self>) -> Option<Found> {
        let mut finder = self.finder.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let fleet = Arc::clone(self);
        let finding = tokio::task::spawn_blocking(move || {
            let found = finder.find();
            *fleet.finder.lock().unwrap_or_else(PoisonError::into_inner) = Some(finder);
            found
        });
        timeout(FIND_TIME_MAX, finding).await.ok()?.ok()
    }

    /// Waits until every VM has answered or is stuck.
    async fn settled(&self) {
        loop {
            let changed = self.answered.notified();
            let is_late = |vm: &Vm| vm.asked.is_some() && vm.health != Health::Stuck;
            if !self.vms().values().any(is_late) {
                return;
            }
            changed.await;
        }
    }

    fn ask_all(self: &Arc<Self>, found: Option<Found>) {
        let mut vms = self.vms();
        if let Some(found) = found {
            *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) = found.left_out;
            update(&mut vms, found);
        }
        let of_disks = sockets_of_disks(&vms);
        vms.retain(|path, vm| vm.is_vm() || !of_disks.contains(path));
        let to_ask: Vec<PathBuf> = vms
            .values()
            .filter(|vm| is_to_be_asked(vm, &vms))
            .map(|vm| vm.path.clone())
            .collect();
        for path in to_ask {
            let task = tokio::spawn(Arc::clone(self).question(path.clone()));
            if let Some(vm) = vms.get_mut(&path) {
                vm.asked = Some((Instant::now(), task.abort_handle()));
            }
        }
    }

    /// Polls a VM, however long that takes.
    async fn question(self: Arc<Self>, path: PathBuf) {
        let asked = async {
            let permit = Arc::clone(&self.questions).acquire_owned().await;
            let mut permit = permit.ok();
            let answer = self.exchange(&path);
            tokio::pin!(answer);
            tokio::select! {
                answer = &mut answer => return answer,
                () = sleep(STUCK_AFTER) => {}
            }
            drop(permit.take());
            self.is_late(&path);
            answer.await
        };
        let answer = asked.await;
        {
            let mut vms = self.vms();
            if let Some(vm) = vms.get_mut(&path) {
                vm.asked = None;
                match answer {
                    Ok(Answer::Told(disks, memory)) => {
                        let sample = Sample::new(disks, memory.map(|memory| *memory), vm.sample.as_deref());
                        vm.is_up(sample);
                    }
                    Ok(Answer::Migration(state)) => vm.is_up(Sample::of_migration(*state)),
                    Ok(Answer::Failure(error)) => vm.is(Health::Stuck, error),
                    Err(error) => vm.has_failed(&error),
                }
            }
        }
        self.answered.notify_waiters();
    }

    fn is_late(&self, path: &Path) {
        if let Some(vm) = self.vms().get_mut(path) {
            let why = match vm.is_vm() {
                true => format!(
                    "no answer for {} s: its server is stopped or stuck",
                    STUCK_AFTER.as_secs()
                ),
                false => "no answer: its server is stopped or stuck, or it is not a Larder control socket".to_owned(),
            };
            vm.is(Health::Stuck, why);
        }
        self.answered.notify_waiters();
    }

    async fn exchange(&self, path: &Path) -> Result<Answer, AskError> {
        let (is_known, listener, has_memory, is_of_move) = {
            let mut vms = self.vms();
            let vm = vms.get_mut(path).ok_or(AskError::Gone)?;
            if vm.answers >= ANSWERS_MAX {
                (vm.answers, vm.listener, vm.has_memory) = (0, None, None);
            }
            (vm.server.is_some(), vm.listener, vm.has_memory, vm.moved.is_some())
        };
        if !is_known || listener.is_none() {
            self.ask_server(path).await?;
        }
        let what = if is_of_move { "/v1/migration" } else { "/v1/disks" };
        let told = ask_repeatedly(path, what).await?;
        if told.listener.is_some() && listener.is_some() && told.listener != listener {
            self.ask_server(path).await?;
        }
        if !told.status.is_success() {
            return Ok(Answer::Failure(understand::<Failure>(&told)?.error));
        }
        if is_of_move {
            return Ok(Answer::Migration(Box::new(understand(&told)?)));
        }
        let disks = understand(&told)?;
        if has_memory == Some(false) {
            return Ok(Answer::Told(disks, None));
        }
        let told = ask_repeatedly(path, "/v1/memory").await?;
        let is_there = !matches!(told.status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED);
        if let Some(vm) = self.vms().get_mut(path) {
            vm.has_memory = Some(is_there);
        }
        match (is_there, told.status.is_success()) {
            (false, _) => Ok(Answer::Told(disks, None)),
            (true, true) => {
                let state: MemoryState = understand(&told)?;
                Ok(Answer::Told(disks, Some(Box::new(state))))
            }
            (true, false) => Ok(Answer::Failure(understand::<Failure>(&told)?.error)),
        }
    }

    /// Requests a server's own description.
    async fn ask_server(&self, path: &Path) -> Result<(), AskError> {
        let told = ask_repeatedly(path, "/v1").await?;
        let server: ServerState = understand(&told)?;
        if let Some(vm) = self.vms().get_mut(path) {
            let before = vm.server.as_ref().map(|server| (server.pid, server.started_ms));
            if before.is_some_and(|before| before != (server.pid, server.started_ms)) {
                (vm.sample, vm.has_memory) = (None, None);
            }
            vm.server = Some(server);
            vm.listener = told.listener;
        }
        Ok(())
    }

    pub(crate) fn left_out(&self) -> LeftOut {
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn balance(&self) -> MutexGuard<'_, Balance> {
        self.balance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn vms(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Vm>> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Answer {
    /// Disks, and memory if the process manages any.
    Told(Disks, Option<Box<MemoryState>>),
    /// Migration.
    Migration(Box<MigrationState>),
    /// Reason why there is no answer, as text for people.
    Failure(String),
}

async fn ask_repeatedly(path: &Path, resource: &str) -> Result<Told, AskError> {
    for _ in 1..TRIES_MAX {
        match ask(path, resource).await {
            Err(AskError::HungUp | AskError::Full) => sleep(PAUSE).await,
            told => return told,
        }
    }
    ask(path, resource).await
}

fn understand<T: DeserializeOwned>(told: &Told) -> Result<T, AskError> {
    serde_json::from_slice(&told.body)
        .map_err(|error| AskError::Foreign(format!("its answer ({}): {error}", told.status)))
}

/// Merges the result of a discovery into the known VMs.
fn update(vms: &mut BTreeMap<PathBuf, Vm>, mut found: Found) {
    vms.retain(|path, _| !found.of_disks.contains(path) && !found.beyond.contains(path));
    for (path, vm) in vms.iter_mut() {
        match found.places.remove(path) {
            Some(place) if place.socket.is_some() => vm.is_found(place),
            gone => {
                vm.named = gone.and_then(|place| place.vm);
                vm.is_gone();
            }
        }
    }
    vms.retain(|_, vm| {
        let is_remembered = vm.is_vm() && vm.seen.is_some_and(|seen| seen.elapsed() < REMEMBERED);
        vm.socket.is_some() || vm.named.is_some() || is_remembered
    });
    for (path, place) in found.places {
        let mut vm = Vm::new(&path);
        let is_there = place.socket.is_some();
        vm.is_found(place);
        if !is_there {
            vm.is_gone();
        }
        vms.insert(path, vm);
    }
}

/// Returns the sockets on which VMs report that their disks are served.
fn sockets_of_disks(vms: &BTreeMap<PathBuf, Vm>) -> HashSet<PathBuf> {
    let samples = vms.values().filter_map(|vm| vm.sample.as_ref());
    let exports = samples.flat_map(|sample| sample.disks.iter().map(|disk| &disk.state.exports));
    let sockets = exports.filter_map(|exports| exports.vhost_user.as_ref());
    sockets.map(|export| PathBuf::from(&export.socket)).collect()
}

/// Returns whether a request to this socket does no harm and may get an answer.
fn is_to_be_asked(vm: &Vm, all: &BTreeMap<PathBuf, Vm>) -> bool {
    if vm.socket.is_none() || vm.asked.is_some() {
        return false;
    }
    if vm.is_vm() || vm.moved.is_some() {
        return true;
    }
    // A socket that turned out not to be Larder's is not asked again, as long as it is the same socket.
    if matches!(vm.health, Health::Foreign) {
        return false;
    }
    // `web-vda.sock` is usually a disk's socket of the VM at `web.sock`. It is not polled before that VM has
    // answered, because the answer names the sockets of its disks.
    let name = vm.path.file_stem().unwrap_or_default().to_string_lossy();
    let owners = name.match_indices('-').map(|(at, _)| format!("{}.sock", &name[..at]));
    !owners
        .filter_map(|owner| all.get(&vm.path.with_file_name(owner)))
        .any(|owner| owner.socket.is_some() && !matches!(owner.health, Health::Up | Health::Foreign))
}
