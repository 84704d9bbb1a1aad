//! State of all VMs of the host, which are polled while there is a watcher.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use larder_vm::control::memory::MemoryState;
use larder_vm::control::migration::MigrationState;
use larder_vm::control::state::{DiskList, ErrorBody, ServerState};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{sleep, sleep_until, timeout};

use crate::balance_loop::BalanceState;
use crate::control_client::{ControlRequestError, ControlResponse, get_resource};
use crate::discovery::{Discovery, Finder, UnwatchedCounts};
use crate::vm_process::{Health, Sample, VmProcess};

/// Interval between two polls of all VMs.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Age up to which the results of a poll count as fresh.
pub(crate) const FRESH_AGE_MAX: Duration = Duration::from_millis(900);

/// Time after which a VM that gives no answer counts as stuck.
const STUCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for which a poll waits for answers before its results so far are published; VMs that are stuck are not waited
/// for.
const ANSWER_WAIT_MAX: Duration = Duration::from_millis(700);

/// Time within which the directories must be scanned.
const DISCOVERY_TIME_MAX: Duration = Duration::from_millis(500);

/// Largest number of requests in flight; a stuck VM gives up its permit to the next.
const REQUESTS_IN_FLIGHT_MAX: usize = 64;

/// Number of attempts at a server that hangs up, as a server with too many clients does.
const ATTEMPTS_MAX: u32 = 3;
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Number of answers after which a server is asked for its own description again.
const DESCRIPTION_POLLS_MAX: u32 = 30;

/// Time for which a VM without a VM file is still shown after its server has ended.
const RETENTION: Duration = Duration::from_secs(600);

/// All VMs of the host.
pub(crate) struct Fleet {
    vms: Mutex<BTreeMap<PathBuf, VmProcess>>,
    /// Finder of VMs; `None` while directories are scanned.
    finder: Mutex<Option<Finder>>,
    /// Number of polls so far.
    poll_count: watch::Sender<u64>,
    watchers: watch::Sender<usize>,
    last_poll: tokio::sync::Mutex<Option<Instant>>,
    request_permits: Arc<Semaphore>,
    answered: Notify,
    /// Changes of the VMs' memory budgets.
    balance: Mutex<BalanceState>,
    /// Counts of control sockets that are not watched.
    unwatched: Mutex<UnwatchedCounts>,
}

/// Watcher of the fleet; VMs are polled as long as there is one.
pub(crate) struct Watcher {
    fleet: Arc<Fleet>,
    polls: watch::Receiver<u64>,
}

impl Watcher {
    /// Waits for the next poll of all VMs.
    pub(crate) async fn next(&mut self) {
        // The sender lives in the fleet, which this watcher keeps alive.
        let _ = self.polls.changed().await;
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
            poll_count: watch::Sender::new(0),
            watchers: watch::Sender::new(0),
            last_poll: tokio::sync::Mutex::default(),
            request_permits: Arc::new(Semaphore::new(REQUESTS_IN_FLIGHT_MAX)),
            answered: Notify::new(),
            balance: Mutex::default(),
            unwatched: Mutex::default(),
        }
    }

    pub(crate) fn watch(self: &Arc<Self>) -> Watcher {
        self.watchers.send_modify(|count| *count += 1);
        Watcher { fleet: Arc::clone(self), polls: self.poll_count.subscribe() }
    }

    /// Polls all VMs periodically while there is a watcher. Drop the future to end it.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut watchers = self.watchers.subscribe();
        loop {
            if watchers.wait_for(|count| *count > 0).await.is_err() {
                return;
            }
            let next = tokio::time::Instant::now() + POLL_INTERVAL;
            self.poll(&mut *self.last_poll.lock().await).await;
            sleep_until(next).await;
        }
    }

    /// Makes the state of all VMs fresh, except of those that are stuck.
    pub(crate) async fn refresh(self: &Arc<Self>) {
        self.refresh_after(FRESH_AGE_MAX).await;
    }

    /// Makes the state of all VMs no older than `age`, except of those that are stuck.
    pub(crate) async fn refresh_after(self: &Arc<Self>, age: Duration) {
        let mut last = self.last_poll.lock().await;
        if last.is_none_or(|last| last.elapsed() > age) {
            self.poll(&mut last).await;
        }
        let all_answered = self.all_answered();
        drop(last);
        let _ = timeout(STUCK_TIMEOUT, all_answered).await;
    }

    async fn poll(self: &Arc<Self>, last: &mut Option<Instant>) {
        *last = Some(Instant::now());
        let discovery = self.discover().await;
        self.poll_all(discovery);
        let _ = timeout(ANSWER_WAIT_MAX, self.all_answered()).await;
        self.poll_count.send_modify(|count| *count += 1);
    }

    /// Scans for VMs; returns `None` if directories take too long.
    async fn discover(self: &Arc<Self>) -> Option<Discovery> {
        let mut finder = self.finder.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let fleet = Arc::clone(self);
        let finding = tokio::task::spawn_blocking(move || {
            let discovery = finder.find();
            *fleet.finder.lock().unwrap_or_else(PoisonError::into_inner) = Some(finder);
            discovery
        });
        timeout(DISCOVERY_TIME_MAX, finding).await.ok()?.ok()
    }

    /// Waits until every VM has answered or is stuck.
    async fn all_answered(&self) {
        loop {
            let changed = self.answered.notified();
            let is_unanswered = |vm: &VmProcess| vm.request.is_some() && vm.health != Health::Stuck;
            if !self.vms().values().any(is_unanswered) {
                return;
            }
            changed.await;
        }
    }

    fn poll_all(self: &Arc<Self>, discovery: Option<Discovery>) {
        let mut vms = self.vms();
        if let Some(discovery) = discovery {
            *self.unwatched.lock().unwrap_or_else(PoisonError::into_inner) = discovery.unwatched_counts;
            merge_discovery(&mut vms, discovery);
        }
        let disk_sockets = sockets_of_disks(&vms);
        vms.retain(|path, vm| vm.is_vm() || !disk_sockets.contains(path));
        let to_poll: Vec<PathBuf> = vms.values().filter(|vm| should_poll(vm, &vms)).map(|vm| vm.path.clone()).collect();
        for path in to_poll {
            let task = tokio::spawn(Arc::clone(self).poll_vm(path.clone()));
            if let Some(vm) = vms.get_mut(&path) {
                vm.request = Some((Instant::now(), task.abort_handle()));
            }
        }
    }

    /// Polls a VM, however long that takes.
    async fn poll_vm(self: Arc<Self>, path: PathBuf) {
        let query = async {
            let permit = Arc::clone(&self.request_permits).acquire_owned().await;
            let mut permit = permit.ok();
            let answer = self.query(&path);
            tokio::pin!(answer);
            tokio::select! {
                answer = &mut answer => return answer,
                () = sleep(STUCK_TIMEOUT) => {}
            }
            drop(permit.take());
            self.mark_stuck(&path);
            answer.await
        };
        let answer = query.await;
        {
            let mut vms = self.vms();
            if let Some(vm) = vms.get_mut(&path) {
                vm.request = None;
                match answer {
                    Ok(PollAnswer::State(disks, memory)) => {
                        let sample = Sample::new(disks, memory.map(|memory| *memory), vm.sample.as_deref());
                        vm.accept_sample(sample);
                    }
                    Ok(PollAnswer::Migration(state)) => vm.accept_sample(Sample::from_migration(*state)),
                    Ok(PollAnswer::Failure(error)) => vm.set_health(Health::Stuck, error),
                    Err(error) => vm.record_failure(&error),
                }
            }
        }
        self.answered.notify_waiters();
    }

    fn mark_stuck(&self, path: &Path) {
        if let Some(vm) = self.vms().get_mut(path) {
            let why = match vm.is_vm() {
                true => format!("no answer for {} s: its server is stopped or stuck", STUCK_TIMEOUT.as_secs()),
                false => "no answer: its server is stopped or stuck, or it is not a Larder control socket".to_owned(),
            };
            vm.set_health(Health::Stuck, why);
        }
        self.answered.notify_waiters();
    }

    async fn query(&self, path: &Path) -> Result<PollAnswer, ControlRequestError> {
        let (is_known, listener, has_memory, is_migration) = {
            let mut vms = self.vms();
            let vm = vms.get_mut(path).ok_or(ControlRequestError::NoSocket)?;
            if vm.answers_since_description >= DESCRIPTION_POLLS_MAX {
                (vm.answers_since_description, vm.listener, vm.has_memory) = (0, None, None);
            }
            (vm.server.is_some(), vm.listener, vm.has_memory, vm.migration.is_some())
        };
        if !is_known || listener.is_none() {
            self.query_server(path).await?;
        }
        let resource = if is_migration { "/v1/migration" } else { "/v1/disks" };
        let response = get_with_retries(path, resource).await?;
        if response.listener.is_some() && listener.is_some() && response.listener != listener {
            self.query_server(path).await?;
        }
        if !response.status.is_success() {
            return Ok(PollAnswer::Failure(parse_body::<ErrorBody>(&response)?.error));
        }
        if is_migration {
            return Ok(PollAnswer::Migration(Box::new(parse_body(&response)?)));
        }
        let disks = parse_body(&response)?;
        if has_memory == Some(false) {
            return Ok(PollAnswer::State(disks, None));
        }
        let response = get_with_retries(path, "/v1/memory").await?;
        let manages_memory = !matches!(response.status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED);
        if let Some(vm) = self.vms().get_mut(path) {
            vm.has_memory = Some(manages_memory);
        }
        match (manages_memory, response.status.is_success()) {
            (false, _) => Ok(PollAnswer::State(disks, None)),
            (true, true) => {
                let state: MemoryState = parse_body(&response)?;
                Ok(PollAnswer::State(disks, Some(Box::new(state))))
            }
            (true, false) => Ok(PollAnswer::Failure(parse_body::<ErrorBody>(&response)?.error)),
        }
    }

    /// Requests a server's own description.
    async fn query_server(&self, path: &Path) -> Result<(), ControlRequestError> {
        let response = get_with_retries(path, "/v1").await?;
        let server: ServerState = parse_body(&response)?;
        if let Some(vm) = self.vms().get_mut(path) {
            let before = vm.server.as_ref().map(|server| (server.pid, server.started_ms));
            if before.is_some_and(|before| before != (server.pid, server.started_ms)) {
                (vm.sample, vm.has_memory) = (None, None);
            }
            vm.server = Some(server);
            vm.listener = response.listener;
        }
        Ok(())
    }

    pub(crate) fn unwatched(&self) -> UnwatchedCounts {
        *self.unwatched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn balance(&self) -> MutexGuard<'_, BalanceState> {
        self.balance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn vms(&self) -> MutexGuard<'_, BTreeMap<PathBuf, VmProcess>> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum PollAnswer {
    /// Disks, and memory if the process manages any.
    State(DiskList, Option<Box<MemoryState>>),
    /// Migration.
    Migration(Box<MigrationState>),
    /// Reason why there is no answer, as text for people.
    Failure(String),
}

async fn get_with_retries(path: &Path, resource: &str) -> Result<ControlResponse, ControlRequestError> {
    for _ in 1..ATTEMPTS_MAX {
        match get_resource(path, resource).await {
            Err(ControlRequestError::HungUp | ControlRequestError::Full) => sleep(RETRY_DELAY).await,
            response => return response,
        }
    }
    get_resource(path, resource).await
}

fn parse_body<T: DeserializeOwned>(response: &ControlResponse) -> Result<T, ControlRequestError> {
    serde_json::from_slice(&response.body)
        .map_err(|error| ControlRequestError::NotLarder(format!("its answer ({}): {error}", response.status)))
}

/// Merges the result of a discovery into the known VMs.
fn merge_discovery(vms: &mut BTreeMap<PathBuf, VmProcess>, mut discovery: Discovery) {
    vms.retain(|path, _| !discovery.disk_sockets.contains(path) && !discovery.unwatched.contains(path));
    for (path, vm) in vms.iter_mut() {
        match discovery.sockets.remove(path) {
            Some(discovered) if discovered.socket.is_some() => vm.update_from(discovered),
            missing => {
                vm.configured = missing.and_then(|discovered| discovered.vm);
                vm.mark_stopped();
            }
        }
    }
    vms.retain(|_, vm| {
        let is_retained = vm.is_vm() && vm.last_answer.is_some_and(|seen| seen.elapsed() < RETENTION);
        vm.socket.is_some() || vm.configured.is_some() || is_retained
    });
    for (path, discovered) in discovery.sockets {
        let mut vm = VmProcess::new(&path);
        let has_socket = discovered.socket.is_some();
        vm.update_from(discovered);
        if !has_socket {
            vm.mark_stopped();
        }
        vms.insert(path, vm);
    }
}

/// Returns the sockets on which VMs report that their disks are served.
fn sockets_of_disks(vms: &BTreeMap<PathBuf, VmProcess>) -> HashSet<PathBuf> {
    let samples = vms.values().filter_map(|vm| vm.sample.as_ref());
    let exports = samples.flat_map(|sample| sample.disks.iter().map(|disk| &disk.state.exports));
    let sockets = exports.filter_map(|exports| exports.vhost_user.as_ref());
    sockets.map(|export| PathBuf::from(&export.socket)).collect()
}

/// Returns whether a request to this socket does no harm and may get an answer.
fn should_poll(vm: &VmProcess, all: &BTreeMap<PathBuf, VmProcess>) -> bool {
    if vm.socket.is_none() || vm.request.is_some() {
        return false;
    }
    if vm.is_vm() || vm.migration.is_some() {
        return true;
    }
    // A socket that turned out not to be Larder's is not asked again, as long as it is the same socket.
    if matches!(vm.health, Health::Foreign) {
        return false;
    }
    // `web-vda.sock` is usually a disk's socket of the VM at `web.sock`. It is not polled before that VM has
    // answered, because the answer names the sockets of its disks.
    let name = vm.path.file_stem().unwrap_or_default().to_string_lossy();
    let owner_sockets = name.match_indices('-').map(|(at, _)| format!("{}.sock", &name[..at]));
    !owner_sockets
        .filter_map(|owner| all.get(&vm.path.with_file_name(owner)))
        .any(|owner| owner.socket.is_some() && !matches!(owner.health, Health::Up | Health::Foreign))
}
