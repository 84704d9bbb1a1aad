//! Policy that shares the host's memory among VMs: observations of VMs go in, changes of their budgets come out.
//! Nothing here queries or changes a VM.
//!
//! The policy follows Senpai, the controller of Meta's TMO ("TMO: Transparent Memory Offloading in Datacenters",
//! ASPLOS 2022). It finds how much memory a VM needs by taking a little for as long as that costs nothing. The cost
//! is measured as the share of the time in which some thread of the VM waits for memory: the stall.
//!
//! # Rules
//! - A VM is *short* if its stall since the last poll exceeds [`BalancePolicy::stall`]. Memory is never taken from a
//!   short VM.
//! - A short VM gets memory from the host's free memory above the reserve, up to its `high`; beyond that, up to
//!   `max`, if no other VM is short below its own `high`. The rest of its demand is taken from VMs that are not
//!   short, down to their `low`. They release it gradually, and it is given once it is free. Therefore **no budget
//!   grows into the reserve**: memory that other budgets may still claim counts as used.
//! - If less than the reserve is free, memory is taken at once from VMs that are not short, the least stalled first:
//!   down to `low`, and only when all of them are there, down to `min`. No VM gets memory meanwhile.
//! - Otherwise a VM that has been calm for some polls gives up a little at a time, down to `low`: memory that it does
//!   not need is free for other VMs and for the host.
//! - A VM that does not answer is left alone. Its budget counts as used.
//!
//! # Why it does not oscillate
//! Between calm and short there is a gap, in which nothing is done. Memory whose loss made a VM short is given back.
//! That VM is then left alone, twice as long each time that this happens, and the next step is smaller, until much
//! more was taken without harm. Its budget therefore converges to a size at which its stall is in the gap. Memory
//! that was taken must be released before more is taken. A VM is also left alone for a while after it was given
//! memory for another reason.

use std::collections::HashMap;

use larder_vm::memory::range::BudgetBounds;

/// Goals of the balancing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BalancePolicy {
    /// Host memory that is to stay free, in bytes.
    pub reserve: u64,
    /// Share of the time for which a VM may wait for memory.
    pub stall: f64,
}

/// Observation of a VM with managed memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VmObservation {
    /// Name, unique among all VMs.
    pub(crate) name: String,
    /// False if the VM gave no answer; the other fields are then those of its last answer.
    pub(crate) is_responding: bool,
    /// Bounds of its budget; `None` if the budget is fixed.
    pub(crate) bounds: Option<BudgetBounds>,
    /// Size of its memory, in bytes.
    pub(crate) size: u64,
    /// Budget, in bytes.
    pub(crate) budget: u64,
    /// Used part of the budget, in bytes.
    pub(crate) used: u64,
    /// Share of the time since the last poll for which it waited for lack of memory; `None` at the first poll.
    pub(crate) stall: Option<f64>,
    /// True if the pager cannot evict pages, or has just refused a budget.
    pub(crate) is_stuck: bool,
}

/// Change of a VM's budget.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BudgetChange {
    pub(crate) name: String,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) reason: ChangeReason,
    /// Stall of the VM when the change was decided.
    pub(crate) stall: f64,
}

/// Reason for a change of a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangeReason {
    /// The VM is short of memory.
    Short,
    /// The VM became short because memory was taken from it.
    Return,
    /// The VM is calm, and may need less.
    Calm,
    /// Another VM is short.
    ForOthers,
    /// Less than the reserve is free.
    Reserve,
}

impl ChangeReason {
    /// Returns the reason as text for people.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::Short => "it is short of memory",
            Self::Return => "it needs the memory that was taken from it",
            Self::Calm => "it does not wait for memory, and may need less",
            Self::ForOthers => "another virtual machine is short of memory",
            Self::Reserve => "the host's free memory is below the reserve",
        }
    }
}

/// Polls for which a VM must have been calm before memory is taken from it.
const CALM_POLLS_MIN: u32 = 2;

/// Share of [`BalancePolicy::stall`] below which a VM is calm.
const CALM_STALL_FRACTION: f64 = 0.5;

/// Step by which memory is taken from a calm VM, as a fraction of its memory: 1/1600 to 1/100.
const RECLAIM_FRACTION_MIN: f64 = 1.0 / 1600.0;
const RECLAIM_FRACTION_MAX: f64 = 1.0 / 100.0;
/// First step by which memory is taken from a calm VM, as a fraction of its memory.
const RECLAIM_FRACTION_FIRST: f64 = 1.0 / 400.0;

/// Steps by which memory is taken for another VM that is short, and for the reserve.
const RECLAIM_FRACTION_FOR_OTHERS: f64 = 1.0 / 50.0;
const RECLAIM_FRACTION_FOR_RESERVE: f64 = 1.0 / 16.0;

/// Step by which a short VM gets memory, as a fraction of its memory, for each multiple of the allowed stall; and the
/// largest multiple that counts.
const GRANT_FRACTION: f64 = 1.0 / 64.0;
const GRANT_MULTIPLE_MAX: f64 = 4.0;

/// Polls after which a shortage is no longer attributed to memory that was taken.
const BLAME_POLLS_MAX: u32 = 1;

/// Polls for which nothing is taken after memory was given: the first and the longest duration.
const HOLD_POLLS_MIN: u32 = 4;
const HOLD_POLLS_MAX: u32 = 128;

/// Multiple of the returned memory that must be taken without harm before the steps grow again.
const PROBATION_MULTIPLE: u64 = 4;

/// Polls for which a VM that has refused a budget is left alone.
const REFUSED_HOLD_POLLS: u32 = 16;

/// Free part of the budget that a pager keeps for incoming pages; only memory beyond it counts as idle.
const SLACK_DIVISOR: u64 = 32;
const SLACK_BYTES_MIN: u64 = 2 << 20;

/// Smallest change that is worth making, in bytes.
const CHANGE_BYTES_MIN: u64 = 64 << 10;

/// History of a VM.
#[derive(Clone, Copy, Debug)]
struct History {
    /// Consecutive polls at which the VM was calm.
    calm_polls: u32,
    /// Polls for which nothing is taken yet.
    hold_polls: u32,
    /// Duration of the next hold, in polls.
    next_hold_polls: u32,
    /// Fraction of its memory that is taken next.
    reclaim_fraction: f64,
    /// Used memory that was taken last, in bytes, and the number of polls since.
    last_reclaim: Option<(u64, u32)>,
    /// Bytes still to be taken without harm before the hold becomes shorter and the step larger.
    probation_bytes: u64,
}

impl Default for History {
    fn default() -> Self {
        Self {
            calm_polls: 0,
            hold_polls: 0,
            next_hold_polls: HOLD_POLLS_MIN,
            reclaim_fraction: RECLAIM_FRACTION_FIRST,
            last_reclaim: None,
            probation_bytes: 0,
        }
    }
}

/// Decision maker; the module's documentation has the rules.
#[derive(Debug)]
pub(crate) struct Balancer {
    policy: BalancePolicy,
    vms: HashMap<String, History>,
}

/// VM during one decision: its observation, its history, and its new budget.
struct Decision<'a> {
    observation: &'a VmObservation,
    bounds: BudgetBounds,
    stall: f64,
    /// Bytes to give back, because they were taken shortly before.
    return_bytes: Option<u64>,
    history: History,
    new_budget: u64,
    reason: Option<ChangeReason>,
}

impl Decision<'_> {
    fn fraction_of_size(&self, fraction: f64) -> u64 {
        (self.observation.size as f64 * fraction) as u64
    }

    /// Returns the bytes of the budget that the VM does not use, beyond the pager's slack.
    fn idle_bytes(&self) -> u64 {
        let slack = (self.observation.budget / SLACK_DIVISOR).max(SLACK_BYTES_MIN);
        self.observation.budget.saturating_sub(self.observation.used.saturating_add(slack))
    }

    /// Returns whether the memory that was taken has been released.
    fn has_released(&self) -> bool {
        self.observation.used <= self.observation.budget
    }

    /// Takes at most `bytes_max` bytes, not below `floor`, and returns the bytes taken.
    fn reclaim(&mut self, bytes_max: u64, floor: u64, why: ChangeReason) -> u64 {
        let reclaimed = bytes_max.min(self.new_budget.saturating_sub(floor));
        if reclaimed == 0 {
            return 0;
        }
        self.new_budget -= reclaimed;
        self.reason = Some(why);
        reclaimed
    }
}

impl Balancer {
    pub(crate) fn new(policy: BalancePolicy) -> Self {
        Self { policy, vms: HashMap::new() }
    }

    /// Records that a pager has refused a budget.
    pub(crate) fn record_refusal(&mut self, name: &str) {
        if let Some(history) = self.vms.get_mut(name) {
            history.hold_polls = history.hold_polls.max(REFUSED_HOLD_POLLS);
            history.last_reclaim = None;
        }
    }

    /// Returns the changes to make, given that the host has `available` bytes free.
    pub(crate) fn decide(&mut self, available: u64, observations: &[VmObservation]) -> Vec<BudgetChange> {
        self.vms.retain(|name, _| observations.iter().any(|vm| vm.name == *name));
        let mut decisions: Vec<Decision<'_>> = observations.iter().filter_map(|vm| self.evaluate(vm)).collect();
        // Memory that budgets lowered earlier have yet to release.
        let releasing = |vm: &VmObservation| vm.used.saturating_sub(vm.budget);
        let releasing: u64 = observations.iter().filter(|vm| vm.is_responding).map(releasing).sum();
        let shortfall = self.policy.reserve.saturating_sub(available.saturating_add(releasing));
        if shortfall > 0 {
            self.restore_reserve(shortfall, &mut decisions);
        } else if available >= self.policy.reserve {
            // Memory that other budgets may still claim belongs to them.
            let claimable: u64 = observations.iter().map(|vm| vm.budget.saturating_sub(vm.used)).sum();
            let spare = (available - self.policy.reserve).saturating_sub(claimable);
            let unmet = self.grant(spare, &mut decisions);
            // Memory on its way to being released is for the short VMs.
            let unmet = unmet.saturating_sub(releasing);
            if unmet > 0 {
                self.reclaim_for_others(unmet, &mut decisions);
            }
            self.reclaim_from_calm(&mut decisions);
        }
        let changes = decisions.iter_mut().filter_map(finish_decision).collect();
        for decision in decisions {
            self.vms.insert(decision.observation.name.clone(), decision.history);
        }
        changes
    }

    fn is_short(&self, decision: &Decision<'_>) -> bool {
        decision.stall > self.policy.stall
    }

    /// Evaluates the observation of a VM; returns `None` if its budget cannot be changed now.
    fn evaluate<'a>(&mut self, observation: &'a VmObservation) -> Option<Decision<'a>> {
        if !observation.is_responding {
            // Its behaviour while it does not answer is unknown.
            self.vms.remove(&observation.name);
            return None;
        }
        let bounds = observation.bounds?;
        let mut history = self.vms.get(&observation.name).copied().unwrap_or_default();
        let Some(stall) = observation.stall else {
            self.vms.insert(observation.name.clone(), History::default());
            return None;
        };
        history.hold_polls = history.hold_polls.saturating_sub(1);
        let last_reclaim = history.last_reclaim.map(|(bytes, polls)| (bytes, polls + 1));
        history.last_reclaim = last_reclaim.filter(|(_, polls)| *polls <= BLAME_POLLS_MAX);
        let mut return_bytes = None;
        if stall > self.policy.stall {
            history.calm_polls = 0;
            if let Some((bytes, _)) = history.last_reclaim.take() {
                return_bytes = Some(bytes);
                history.probation_bytes = bytes.saturating_mul(PROBATION_MULTIPLE);
                history.next_hold_polls = (history.next_hold_polls * 2).min(HOLD_POLLS_MAX);
                history.reclaim_fraction = (history.reclaim_fraction / 2.0).max(RECLAIM_FRACTION_MIN);
            }
            history.hold_polls = history.hold_polls.max(history.next_hold_polls);
        } else if stall < self.policy.stall * CALM_STALL_FRACTION || self.policy.stall == 0.0 {
            history.calm_polls += 1;
            // The VM did not need the memory that was taken.
            if let (Some((bytes, _)), None) = (last_reclaim, history.last_reclaim) {
                history.probation_bytes = history.probation_bytes.saturating_sub(bytes);
                if history.probation_bytes == 0 {
                    history.next_hold_polls = (history.next_hold_polls / 2).max(HOLD_POLLS_MIN);
                    history.reclaim_fraction = (history.reclaim_fraction * 2.0).min(RECLAIM_FRACTION_MAX);
                }
            }
        } else {
            history.calm_polls = 0;
        }
        Some(Decision {
            observation,
            bounds,
            stall,
            return_bytes,
            history,
            new_budget: observation.budget,
            reason: None,
        })
    }

    /// Takes the memory that is missing from the reserve.
    fn restore_reserve(&self, shortfall: u64, decisions: &mut [Decision<'_>]) {
        let mut shortfall = shortfall;
        let mut order: Vec<&mut Decision<'_>> = decisions
            .iter_mut()
            .filter(|decision| !self.is_short(decision) && !decision.observation.is_stuck)
            .collect();
        order.sort_by(|one, other| one.stall.total_cmp(&other.stall));
        for decision in &mut order {
            if shortfall == 0 {
                return;
            }
            let bytes_max =
                decision.fraction_of_size(RECLAIM_FRACTION_FOR_RESERVE).max(decision.idle_bytes()).min(shortfall);
            shortfall -= decision.reclaim(bytes_max, decision.bounds.low, ChangeReason::Reserve);
        }
        // Below `low` only if no VM has anything left above its own.
        if order.iter().any(|decision| decision.new_budget > decision.bounds.low) {
            return;
        }
        for decision in order {
            let reclaimed = decision.observation.budget - decision.new_budget;
            let bytes_max =
                decision.fraction_of_size(RECLAIM_FRACTION_FOR_RESERVE).saturating_sub(reclaimed).min(shortfall);
            shortfall -= decision.reclaim(bytes_max, decision.bounds.min, ChangeReason::Reserve);
        }
    }

    /// Gives memory to the short VMs, and returns the bytes that they still lack.
    fn grant(&self, mut spare: u64, decisions: &mut [Decision<'_>]) -> u64 {
        let mut unmet = 0;
        let mut order: Vec<&mut Decision<'_>> = decisions
            .iter_mut()
            // A VM that has idle memory is not helped by more.
            .filter(|decision| self.is_short(decision) && decision.idle_bytes() == 0)
            .collect();
        // VMs below `low` come first, then those with the largest stall.
        order.sort_by(|one, other| {
            let is_low = |decision: &Decision<'_>| decision.observation.budget < decision.bounds.low;
            is_low(other).cmp(&is_low(one)).then(other.stall.total_cmp(&one.stall))
        });
        for is_beyond_high in [false, true] {
            for decision in &mut order {
                let is_at_high = decision.observation.budget >= decision.bounds.high;
                if is_at_high != is_beyond_high {
                    continue;
                }
                let bound = match is_beyond_high {
                    true => decision.bounds.max,
                    false => decision.bounds.high,
                };
                let times = (decision.stall / self.policy.stall.max(f64::EPSILON)).min(GRANT_MULTIPLE_MAX);
                let (requested, why) = match decision.return_bytes {
                    Some(bytes) => (bytes.saturating_mul(2), ChangeReason::Return),
                    None => (decision.fraction_of_size(GRANT_FRACTION * times), ChangeReason::Short),
                };
                let requested = requested.max(CHANGE_BYTES_MIN).min(bound.saturating_sub(decision.new_budget));
                let granted = requested.min(spare);
                if granted > 0 {
                    decision.new_budget += granted;
                    decision.reason = Some(why);
                    spare -= granted;
                }
                // No VM is entitled to memory beyond `high`.
                if !is_beyond_high {
                    unmet += requested - granted;
                }
            }
            if unmet > 0 {
                break;
            }
        }
        unmet
    }

    /// Takes from other VMs the memory that short VMs lack.
    fn reclaim_for_others(&self, mut unmet: u64, decisions: &mut [Decision<'_>]) {
        let mut order: Vec<&mut Decision<'_>> = decisions
            .iter_mut()
            .filter(|decision| !self.is_short(decision) && !decision.observation.is_stuck && decision.has_released())
            .collect();
        order.sort_by(|one, other| {
            let is_above = |decision: &Decision<'_>| decision.observation.budget > decision.bounds.high;
            is_above(other).cmp(&is_above(one)).then(one.stall.total_cmp(&other.stall))
        });
        for decision in order {
            // A VM is not entitled to memory above its `high` while another VM needs it.
            let above = decision.observation.budget.saturating_sub(decision.bounds.high);
            let may_reclaim = decision.history.calm_polls >= CALM_POLLS_MIN && decision.history.hold_polls == 0;
            let bytes_max = match may_reclaim {
                true => decision.fraction_of_size(RECLAIM_FRACTION_FOR_OTHERS),
                false => decision.fraction_of_size(RECLAIM_FRACTION_FOR_OTHERS).min(above),
            };
            let bytes_max = bytes_max.max(decision.idle_bytes()).min(unmet);
            unmet -= decision.reclaim(bytes_max, decision.bounds.low, ChangeReason::ForOthers);
        }
    }

    /// Takes a little memory from each calm VM.
    fn reclaim_from_calm(&self, decisions: &mut [Decision<'_>]) {
        for decision in decisions {
            let history = decision.history;
            let may_reclaim =
                history.calm_polls >= CALM_POLLS_MIN && history.hold_polls == 0 && history.last_reclaim.is_none();
            if may_reclaim && decision.reason.is_none() && !decision.observation.is_stuck && decision.has_released() {
                let bytes_max = decision.fraction_of_size(history.reclaim_fraction).max(CHANGE_BYTES_MIN);
                decision.reclaim(bytes_max, decision.bounds.low, ChangeReason::Calm);
            }
        }
    }
}

/// Returns the resulting change, if it is worth making.
fn finish_decision(decision: &mut Decision<'_>) -> Option<BudgetChange> {
    let (from, to, why) = (decision.observation.budget, decision.new_budget, decision.reason?);
    let is_at_bound =
        [decision.bounds.min, decision.bounds.low, decision.bounds.high, decision.bounds.max].contains(&to);
    if from == to || (from.abs_diff(to) < CHANGE_BYTES_MIN && !is_at_bound) {
        return None;
    }
    if to < from {
        // Idle memory is excluded: taking it cannot make the VM short.
        let used = (from - to).saturating_sub(decision.idle_bytes());
        decision.history.last_reclaim = (used > 0).then_some((used, 0));
    }
    Some(BudgetChange { name: decision.observation.name.clone(), from, to, reason: why, stall: decision.stall })
}

#[cfg(test)]
mod tests;
