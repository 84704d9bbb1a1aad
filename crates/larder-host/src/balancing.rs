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
use larder_vm::control::state::{Failure, Latency};
use serde_json::json;
use tokio::time::{sleep_until, timeout};

use crate::ask::{AskError, patch};
use crate::balance::{Balancer, Move, Policy, Seen};
use crate::fleet::{FRESH, Fleet};
use crate::joined::joined;

/// Time within which a pager must set its budget.
const PATCH_TIME_MAX: Duration = Duration::from_secs(5);

/// Bound on the VMs, stopped ones included, whose budget changes are counted.
const MOVED_MAX: usize = 4096;

/// Configuration of the balancing of memory budgets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BalanceConfig {
    /// Policy to apply.
    pub policy: Policy,
    /// Interval between two polls.
    pub period: Duration,
}

/// Budget changes that were made, for metrics and the dashboard.
#[derive(Clone, Debug, Default)]
pub(crate) struct Balance {
    /// Budget changes, by the VM's name.
    moved: HashMap<String, Moved>,
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
pub(crate) struct Moved {
    pub(crate) up: u64,
    pub(crate) down: u64,
    pub(crate) last: Option<LastMove>,
}

/// Last change of a VM's budget.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct LastMove {
    /// Time of the change, in milliseconds since 1970 (UTC).
    pub(crate) time_ms: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Reason, as text for people.
    pub(crate) why: String,
}

impl Balance {
    pub(crate) fn moved(&self, name: &str) -> Moved {
        self.moved.get(name).cloned().unwrap_or_default()
    }

    fn has_moved(&mut self, it: &Move) {
        if self.moved.len() >= MOVED_MAX && !self.moved.contains_key(&it.name) {
            return;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let moved = self.moved.entry(it.name.clone()).or_default();
        match it.to > it.from {
            true => moved.up += 1,
            false => moved.down += 1,
        }
        moved.last = Some(LastMove {
            time_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            from: it.from,
            to: it.to,
            why: it.why.words().to_owned(),
        });
    }
}

/// State of a VM at the previous poll.
struct Before {
    path: PathBuf,
    seen: Seen,
    time_ns: u64,
    stalled_us: u64,
    waits: Waits,
    pid: i32,
}

/// Total duration of faults, in nanoseconds.
#[derive(Clone, Copy)]
struct Waits {
    /// Faults of the kinds that a larger budget would make fewer.
    for_want: u64,
    all: u64,
}

impl Waits {
    fn new(faults: &FaultsState) -> Self {
        let FaultsState {
            zero,
            uniform,
            compressed,
            disk,
            write,
        } = faults;
        let sum = |all: &[&Latency]| all.iter().map(|it| it.sum_ns).fold(0, u64::saturating_add);
        // Zero-filled pages, never written or discarded, fault with any budget.
        let for_want = sum(&[uniform, compressed, disk, write]);
        Self {
            for_want,
            all: for_want.saturating_add(zero.sum_ns),
        }
    }

    /// Returns the share of the stall time since `before` that was due to a lack of memory, or `None` if the counters
    /// went backwards.
    fn share_since(self, before: Self) -> Option<f64> {
        let all = self.all.checked_sub(before.all)?;
        let for_want = self.for_want.checked_sub(before.for_want)?;
        // A waiter that has not got its page yet waits for a disk, or for free memory.
        Some(if all == 0 { 1.0 } else { for_want as f64 / all as f64 })
    }
}

/// Balances budgets periodically, until it is dropped.
pub(crate) async fn run(fleet: Arc<Fleet>, config: BalanceConfig) {
    let mut balancer = Balancer::new(config.policy);
    let mut before: HashMap<String, Before> = HashMap::new();
    let mut is_told = false;
    loop {
        let next = Instant::now() + config.period;
        match available() {
            Ok(available) => {
                is_told = false;
                fleet.balance().host = Some(HostMemory {
                    available,
                    reserve: config.policy.reserve,
                });
                fleet.refresh_after((config.period / 2).min(FRESH)).await;
                let seen = look(&fleet, &mut before);
                for it in balancer.decide(available, &seen) {
                    if let Err(why) = carry_out(&fleet, &it, &before).await {
                        tracing::warn!(vm = it.name, "the budget remains {}: {why}", ByteLen::new(it.from));
                        balancer.is_refused(&it.name);
                    }
                }
            }
            Err(error) if !std::mem::replace(&mut is_told, true) => {
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
fn look(fleet: &Fleet, before: &mut HashMap<String, Before>) -> Vec<Seen> {
    let vms = fleet.vms();
    let mut now = HashMap::new();
    for vm in joined(&vms) {
        let Some(of_memory) = vm.of_memory() else { continue };
        let old = before.remove(&vm.name);
        let state = vm
            .memory_now()
            .and_then(|sample| sample.memory.as_ref())
            .map(|memory| &memory.state);
        let it = match (state, old) {
            (Some(state), old) => Before::new(&vm.name, of_memory.path.clone(), state, old),
            (None, Some(mut old)) if of_memory.socket.is_some() => {
                old.seen.answers = false;
                old
            }
            (None, _) => continue,
        };
        now.insert(vm.name, it);
    }
    *before = now;
    before.values().map(|it| it.seen.clone()).collect()
}

impl Before {
    fn new(name: &str, path: PathBuf, state: &MemoryState, old: Option<Self>) -> Self {
        let stalled_us = state.pressure.some.total_us;
        let waits = Waits::new(&state.faults);
        let is_same = |old: &Self| old.path == path && old.pid == state.pid && old.seen.answers;
        let stall = old.as_ref().filter(|old| is_same(old)).and_then(|old| {
            let time_us = state.time_ns.checked_sub(old.time_ns)? as f64 / 1e3;
            let stalled = stalled_us.checked_sub(old.stalled_us)? as f64;
            let share = waits.share_since(old.waits)?;
            (time_us > 0.0).then(|| (stalled * share / time_us).min(1.0))
        });
        Self {
            path,
            seen: Seen {
                name: name.to_owned(),
                answers: true,
                bounds: state
                    .range
                    .map(|range| range.bounds(state.size))
                    .filter(|_| !state.detaching),
                size: state.size,
                budget: state.budget,
                used: state.used,
                stall,
                is_stuck: state.problem.is_some(),
            },
            time_ns: state.time_ns,
            stalled_us,
            waits,
            pid: state.pid,
        }
    }
}

/// Sets the pager's budget; the error says why the budget is unchanged.
async fn carry_out(fleet: &Fleet, it: &Move, vms: &HashMap<String, Before>) -> Result<(), String> {
    let path = &vms.get(&it.name).ok_or("the VM no longer exists")?.path;
    let body = json!(MemoryPatch {
        budget: Some(it.to),
        ..MemoryPatch::default()
    });
    let told = timeout(PATCH_TIME_MAX, patch(path, "/v1/memory", body.to_string())).await;
    let told = told.map_err(|_| "no answer in time".to_owned())?;
    let told = told.map_err(|error: AskError| error.to_string())?;
    if !told.status.is_success() {
        let failure: Result<Failure, _> = serde_json::from_slice(&told.body);
        return Err(failure.map_or_else(|_| told.status.to_string(), |failure| failure.error));
    }
    fleet.balance().has_moved(it);
    tracing::info!(
        vm = it.name,
        from = %ByteLen::new(it.from),
        to = %ByteLen::new(it.to),
        stall = format!("{:.2} %", it.stall * 100.0),
        "budget changed: {}",
        it.why.words()
    );
    Ok(())
}

/// Returns the memory that the host can still give, in bytes.
///
/// # Errors
/// `/proc/meminfo` cannot be read or has no `MemAvailable`.
pub(crate) fn available() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    available_in(&text).ok_or_else(|| io::Error::other("it has no MemAvailable"))
}

fn available_in(text: &str) -> Option<u64> {
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
        let of = |sum_ns| Latency {
            sum_ns,
            ..Latency::default()
        };
        let waits = |zero, disk| {
            Waits::new(&FaultsState {
                zero: of(zero),
                uniform: of(0),
                compressed: of(100),
                disk: of(disk),
                write: of(0),
            })
        };
        let before = waits(1000, 500);
        assert_eq!(waits(4000, 1500).share_since(before), Some(0.25));
        assert_eq!(waits(4000, 500).share_since(before), Some(0.0));
        assert_eq!(before.share_since(before), Some(1.0));
        assert_eq!(waits(0, 0).share_since(before), None);
    }

    #[test]
    fn meminfo_is_parsed() {
        let text = "MemTotal:       16307956 kB\nMemAvailable:   12345678 kB\n";
        assert_eq!(available_in(text), Some(12_345_678 * 1024));
        for none in [
            "",
            "MemAvailable: much",
            "MemAvailable: 99999999999999999999 kB",
            "MemAvailable: 1 GB",
        ] {
            assert_eq!(available_in(none), None, "{none}");
        }
    }
}
