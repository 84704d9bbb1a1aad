//! Applies the decisions of [`crate::balance`]: polls all VMs periodically, and sets the budgets of their pagers.
//!
//! Killing it at any moment leaves each budget as it is. Its history of VMs is then lost, and learned anew.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use larder_block::ByteLen;
use larder_vm::control::memory::{FaultsState, MemoryPatch, MemoryState};
use larder_vm::control::state::{ErrorBody, Latency};
use serde_json::json;
use tokio::time::{sleep_until, timeout};

use crate::assembled_vm::assemble_vms;
use crate::balance::{BalancePolicy, Balancer, BudgetChange, VmObservation};
use crate::control_client::{ControlRequestError, patch_resource};
use crate::fleet::{FRESH_AGE_MAX, Fleet};

/// Time within which a pager must set its budget.
const PATCH_TIME_MAX: Duration = Duration::from_secs(5);

/// Bound on the VMs, stopped ones included, whose budget changes are counted.
const CHANGED_VMS_MAX: usize = 4096;

/// Configuration of the balancing of memory budgets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BalanceConfig {
    /// Policy to apply.
    pub policy: BalancePolicy,
    /// Interval between two polls.
    pub period: Duration,
}

/// Budget changes that were made, for metrics and the dashboard.
#[derive(Clone, Debug, Default)]
pub(crate) struct BalanceState {
    /// Budget changes, by the VM's name.
    changes: HashMap<String, BudgetChanges>,
    /// Memory of the host; `None` unless budgets are balanced.
    pub(crate) host: Option<HostMemory>,
}

/// Memory of the host, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostMemory {
    pub(crate) available: u64,
    pub(crate) reserve: u64,
}

/// Changes of a VM's budget.
#[derive(Clone, Debug, Default)]
pub(crate) struct BudgetChanges {
    pub(crate) up: u64,
    pub(crate) down: u64,
    pub(crate) last: Option<LastChange>,
}

/// Last change of a VM's budget.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct LastChange {
    /// Time of the change, in milliseconds since 1970 (UTC).
    pub(crate) time_ms: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Reason, as text for people.
    pub(crate) why: String,
}

impl BalanceState {
    pub(crate) fn changes_of(&self, name: &str) -> BudgetChanges {
        self.changes.get(name).cloned().unwrap_or_default()
    }

    fn record_change(&mut self, change: &BudgetChange) {
        if self.changes.len() >= CHANGED_VMS_MAX && !self.changes.contains_key(&change.name) {
            return;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let changes = self.changes.entry(change.name.clone()).or_default();
        match change.to > change.from {
            true => changes.up += 1,
            false => changes.down += 1,
        }
        changes.last = Some(LastChange {
            time_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            from: change.from,
            to: change.to,
            why: change.reason.description().to_owned(),
        });
    }
}

/// State of a VM at the previous poll.
struct PreviousPoll {
    path: PathBuf,
    observation: VmObservation,
    time_ns: u64,
    stalled_us: u64,
    fault_times: FaultTimes,
    pid: i32,
}

/// Total duration of faults, in nanoseconds.
#[derive(Clone, Copy)]
struct FaultTimes {
    /// Faults of the kinds that a larger budget would make fewer.
    from_shortage: u64,
    all: u64,
}

impl FaultTimes {
    fn new(faults: &FaultsState) -> Self {
        let FaultsState { zero, uniform, compressed, disk, write } = faults;
        let sum = |all: &[&Latency]| all.iter().map(|it| it.sum_ns).fold(0, u64::saturating_add);
        // Zero-filled pages, never written or discarded, fault with any budget.
        let from_shortage = sum(&[uniform, compressed, disk, write]);
        Self { from_shortage, all: from_shortage.saturating_add(zero.sum_ns) }
    }

    /// Returns the share of the stall time since `before` that was due to a lack of memory, or `None` if the counters
    /// went backwards.
    fn share_since(self, before: Self) -> Option<f64> {
        let all = self.all.checked_sub(before.all)?;
        let from_shortage = self.from_shortage.checked_sub(before.from_shortage)?;
        // A waiter that has not got its page yet waits for a disk, or for free memory.
        Some(if all == 0 { 1.0 } else { from_shortage as f64 / all as f64 })
    }
}

/// Balances budgets periodically, until it is dropped.
pub(crate) async fn run(fleet: Arc<Fleet>, config: BalanceConfig) {
    let mut balancer = Balancer::new(config.policy);
    let mut before: HashMap<String, PreviousPoll> = HashMap::new();
    let mut warned = false;
    loop {
        let next = Instant::now() + config.period;
        match available() {
            Ok(available) => {
                warned = false;
                fleet.balance().host = Some(HostMemory { available, reserve: config.policy.reserve });
                fleet.refresh_after((config.period / 2).min(FRESH_AGE_MAX)).await;
                let observations = observe(&fleet, &mut before);
                for change in balancer.decide(available, &observations) {
                    if let Err(why) = apply_change(&fleet, &change, &before).await {
                        tracing::warn!(vm = change.name, "the budget remains {}: {why}", ByteLen::new(change.from));
                        balancer.record_refusal(&change.name);
                    }
                }
            }
            Err(error) if !std::mem::replace(&mut warned, true) => {
                tracing::warn!(
                    "no budget is changed, because the host's free memory is unknown: /proc/meminfo: {error}"
                );
            }
            Err(_) => {}
        }
        sleep_until(next.into()).await;
    }
}

/// Returns the observations of all VMs with managed memory, including those that answered before and do not answer
/// now.
fn observe(fleet: &Fleet, before: &mut HashMap<String, PreviousPoll>) -> Vec<VmObservation> {
    let vms = fleet.vms();
    let mut now = HashMap::new();
    for vm in assemble_vms(&vms) {
        let Some(memory_process) = vm.memory_manager() else {
            continue;
        };
        let old = before.remove(&vm.name);
        let state = vm.current_memory().and_then(|sample| sample.memory.as_ref()).map(|memory| &memory.state);
        let poll = match (state, old) {
            (Some(state), old) => PreviousPoll::new(&vm.name, memory_process.path.clone(), state, old),
            (None, Some(mut old)) if memory_process.socket.is_some() => {
                old.observation.is_responding = false;
                old
            }
            (None, _) => continue,
        };
        now.insert(vm.name, poll);
    }
    *before = now;
    before.values().map(|it| it.observation.clone()).collect()
}

impl PreviousPoll {
    fn new(name: &str, path: PathBuf, state: &MemoryState, old: Option<Self>) -> Self {
        let stalled_us = state.pressure.some.total_us;
        let fault_times = FaultTimes::new(&state.faults);
        let is_same = |old: &Self| old.path == path && old.pid == state.pid && old.observation.is_responding;
        let stall = old.as_ref().filter(|old| is_same(old)).and_then(|old| {
            let time_us = state.time_ns.checked_sub(old.time_ns)? as f64 / 1e3;
            let stalled = stalled_us.checked_sub(old.stalled_us)? as f64;
            let share = fault_times.share_since(old.fault_times)?;
            (time_us > 0.0).then(|| (stalled * share / time_us).min(1.0))
        });
        Self {
            path,
            observation: VmObservation {
                name: name.to_owned(),
                is_responding: true,
                bounds: state.range.map(|range| range.bounds(state.size)).filter(|_| !state.detaching),
                size: state.size,
                budget: state.budget,
                used: state.used,
                stall,
                is_stuck: state.problem.is_some(),
            },
            time_ns: state.time_ns,
            stalled_us,
            fault_times,
            pid: state.pid,
        }
    }
}

/// Sets the pager's budget; the error says why the budget is unchanged.
async fn apply_change(fleet: &Fleet, change: &BudgetChange, vms: &HashMap<String, PreviousPoll>) -> Result<(), String> {
    let path = &vms.get(&change.name).ok_or("the VM no longer exists")?.path;
    let body = json!(MemoryPatch { budget: Some(change.to), ..MemoryPatch::default() });
    let response = timeout(PATCH_TIME_MAX, patch_resource(path, "/v1/memory", body.to_string())).await;
    let response = response.map_err(|_| "no answer in time".to_owned())?;
    let response = response.map_err(|error: ControlRequestError| error.to_string())?;
    if !response.status.is_success() {
        let failure: Result<ErrorBody, _> = serde_json::from_slice(&response.body);
        return Err(failure.map_or_else(|_| response.status.to_string(), |failure| failure.error));
    }
    fleet.balance().record_change(change);
    tracing::info!(
        vm = change.name,
        from = %ByteLen::new(change.from),
        to = %ByteLen::new(change.to),
        stall = format!("{:.2} %", change.stall * 100.0),
        "budget changed: {}",
        change.reason.description()
    );
    Ok(())
}

/// Returns the memory that the host can still give, in bytes.
///
/// # Errors
/// `/proc/meminfo` cannot be read or has no `MemAvailable`.
pub(crate) fn available() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    parse_available(&text).ok_or_else(|| io::Error::other("it has no MemAvailable"))
}

fn parse_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// Faults on pages that were never written do not count as a lack of memory.
    fn zero_faults_are_no_shortage() {
        let of = |sum_ns| Latency { sum_ns, ..Latency::default() };
        let fault_times = |zero, disk| {
            FaultTimes::new(&FaultsState {
                zero: of(zero),
                uniform: of(0),
                compressed: of(100),
                disk: of(disk),
                write: of(0),
            })
        };
        let before = fault_times(1000, 500);
        assert_eq!(fault_times(4000, 1500).share_since(before), Some(0.25));
        assert_eq!(fault_times(4000, 500).share_since(before), Some(0.0));
        assert_eq!(before.share_since(before), Some(1.0));
        assert_eq!(fault_times(0, 0).share_since(before), None);
    }

    #[test]
    fn meminfo_is_parsed() {
        let text = "MemTotal:       16307956 kB\nMemAvailable:   12345678 kB\n";
        assert_eq!(parse_available(text), Some(12_345_678 * 1024));
        for none in ["", "MemAvailable: much", "MemAvailable: 99999999999999999999 kB", "MemAvailable: 1 GB"] {
            assert_eq!(parse_available(none), None, "{none}");
        }
    }
}
