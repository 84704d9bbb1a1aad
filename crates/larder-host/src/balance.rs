//! Policy that shares the host's memory among VMs: observations of VMs go in, changes of their budgets come out.
//! Nothing here queries or changes a VM.
//!
//! The policy follows Senpai, the controller of Meta's TMO ("TMO: Transparent Memory Offloading in Datacenters",
//! ASPLOS 2022). It finds how much memory a VM needs by taking a little for as long as that costs nothing. The cost
//! is measured as the share of the time in which some thread of the VM waits for memory: the stall.
//!
//! # Rules
//! - A VM is *short* if its stall since the last poll exceeds [`Policy::stall`]. Memory is never taken from a short
//!   VM.
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

use larder_vm::memory::range::Bounds;

/// Goals of the balancing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Host memory that is to stay free, in bytes.
    pub reserve: u64,
    /// Share of the time for which a VM may wait for memory.
    pub stall: f64,
}

/// Observation of a VM with managed memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    /// Name, unique among all VMs.
    pub(crate) name: String,
    /// False if the VM gave no answer; the other fields are then those of its last answer.
    pub(crate) answers: bool,
    /// Bounds of its budget; `None` if the budget is fixed.
    pub(crate) bounds: Option<Bounds>,
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
pub(crate) struct Move {
    pub(crate) name: String,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) why: Why,
    /// Stall of the VM when the change was decided.
    pub(crate) stall: f64,
}

/// Reason for a change of a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The VM is short of memory.
    Short,
    /// The VM became short because memory was taken from it.
    GiveBack,
    /// The VM is calm, and may need less.
    Calm,
    /// Another VM is short.
    ForOthers,
    /// Less than the reserve is free.
    Reserve,
}

impl Why {
    /// Returns the reason as text for people.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Short => "it is short of memory",
            Self::GiveBack => "it needs the memory that was taken from it",
            Self::Calm => "it does not wait for memory, and may need less",
            Self::ForOthers => "another virtual machine is short of memory",
            Self::Reserve => "the host's free memory is below the reserve",
        }
    }
}

/// Polls for which a VM must have been calm before memory is taken from it.
const CALM_MIN: u32 = 2;

/// Share of [`Policy::stall`] below which a VM is calm.
const CALM_PART: f64 = 0.5;

/// Step by which memory is taken from a calm VM, as a fraction of its memory: 1/1600 to 1/100.
const TAKE_MIN: f64 = 1.0 / 1600.0;
const TAKE_MAX: f64 = 1.0 / 100.0;
/// First step by which memory is taken from a calm VM, as a fraction of its memory.
const TAKE_FIRST: f64 = 1.0 / 400.0;

/// Steps by which memory is taken for another VM that is short, and for the reserve.
const TAKE_FOR_OTHERS: f64 = 1.0 / 50.0;
const TAKE_FOR_RESERVE: f64 = 1.0 / 16.0;

/// Step by which a short VM gets memory, as a fraction of its memory, for each multiple of the allowed stall; and the
/// largest multiple that counts.
const GIVE: f64 = 1.0 / 64.0;
const GIVE_TIMES_MAX: f64 = 4.0;

/// Polls after which a shortage is no longer attributed to memory that was taken.
const BLAME_LOOKS: u32 = 1;

/// Polls for which nothing is taken after memory was given: the first and the longest duration.
const HOLD_MIN: u32 = 4;
const HOLD_MAX: u32 = 128;

/// Multiple of the returned memory that must be taken without harm before the steps grow again.
const OWED_TIMES: u64 = 4;

/// Polls for which a VM that has refused a budget is left alone.
const REFUSED_LOOKS: u32 = 16;

/// Free part of the budget that a pager keeps for incoming pages; only memory beyond it counts as idle.
const SLACK_PART: u64 = 32;
const SLACK_MIN: u64 = 2 << 20;

/// Smallest change that is worth making, in bytes.
const MOVE_MIN: u64 = 64 << 10;

/// History of a VM.
#[derive(Clone, Copy, Debug)]
struct History {
    /// Consecutive polls at which the VM was calm.
    calm: u32,
    /// Polls for which nothing is taken yet.
    hold: u32,
    /// Duration of the next hold, in polls.
    hold_next: u32,
    /// Fraction of its memory that is taken next.
    take: f64,
    /// Used memory that was taken last, in bytes, and the number of polls since.
    taken: Option<(u64, u32)>,
    /// Bytes still to be taken without harm before the hold becomes shorter and the step larger.
    owed: u64,
}

impl Default for History {
    fn default() -> Self {
        Self {
            calm: 0,
            hold: 0,
            hold_next: HOLD_MIN,
            take: TAKE_FIRST,
            taken: None,
            owed: 0,
        }
    }
}

/// Decision maker; the module's documentation has the rules.
#[derive(Debug)]
pub(crate) struct Balancer {
    policy: Policy,
    vms: HashMap<String, History>,
}

/// VM during one decision: its observation, its history, and its new budget.
struct Party<'a> {
    seen: &'a Seen,
    bounds: Bounds,
    stall: f64,
    /// Bytes to give back, because they were taken shortly before.
    give_back: Option<u64>,
    history: History,
    to: u64,
    why: Option<Why>,
}

impl Party<'_> {
    fn part(&self, part: f64) -> u64 {
        (self.seen.size as f64 * part) as u64
    }

    /// Returns the bytes of the budget that the VM does not use, beyond the pager's slack.
    fn idle(&self) -> u64 {
        let slack = (self.seen.budget / SLACK_PART).max(SLACK_MIN);
        self.seen.budget.saturating_sub(self.seen.used.saturating_add(slack))
    }

    /// Returns whether the memory that was taken has been released.
    fn has_released(&self) -> bool {
        self.seen.used <= self.seen.budget
    }

    /// Takes at most `most` bytes, not below `floor`, and returns the bytes taken.
    fn take(&mut self, most: u64, floor: u64, why: Why) -> u64 {
        let took = most.min(self.to.saturating_sub(floor));
        if took == 0 {
            return 0;
        }
        self.to -= took;
        self.why = Some(why);
        took
    }
}

impl Balancer {
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            policy,
            vms: HashMap::new(),
        }
    }

    /// Records that a pager has refused a budget.
    pub(crate) fn is_refused(&mut self, name: &str) {
        if let Some(history) = self.vms.get_mut(name) {
            history.hold = history.hold.max(REFUSED_LOOKS);
            history.taken = None;
        }
    }

    /// Returns the changes to make, given that the host has `available` bytes free.
    pub(crate) fn decide(&mut self, available: u64, seen: &[Seen]) -> Vec<Move> {
        self.vms.retain(|name, _| seen.iter().any(|vm| vm.name == *name));
        let mut parties: Vec<Party<'_>> = seen.iter().filter_map(|vm| self.look(vm)).collect();
        // Memory that budgets lowered earlier have yet to release.
        let leaving = |vm: &Seen| vm.used.saturating_sub(vm.budget);
        let leaving: u64 = seen.iter().filter(|vm| vm.answers).map(leaving).sum();
        let missing = self.policy.reserve.saturating_sub(available.saturating_add(leaving));
        if missing > 0 {
            self.restore(missing, &mut parties);
        } else if available >= self.policy.reserve {
            // Memory that other budgets may still claim belongs to them.
            let promised: u64 = seen.iter().map(|vm| vm.budget.saturating_sub(vm.used)).sum();
            let spare = (available - self.policy.reserve).saturating_sub(promised);
            let lacking = self.give(spare, &mut parties);
            // Memory on its way to being released is for the short VMs.
            let lacking = lacking.saturating_sub(leaving);
            if lacking > 0 {
                self.take_for_others(lacking, &mut parties);
            }
            self.take_from_calm(&mut parties);
        }
        let moves = parties.iter_mut().filter_map(finish).collect();
        for party in parties {
            self.vms.insert(party.seen.name.clone(), party.history);
        }
        moves
    }

    fn is_short(&self, party: &Party<'_>) -> bool {
        party.stall > self.policy.stall
    }

    /// Evaluates the observation of a VM; returns `None` if its budget cannot be changed now.
    fn look<'a>(&mut self, seen: &'a Seen) -> Option<Party<'a>> {
        if !seen.answers {
            // Its behaviour while it does not answer is unknown.
            self.vms.remove(&seen.name);
            return None;
        }
        let bounds = seen.bounds?;
        let mut history = self.vms.get(&seen.name).copied().unwrap_or_default();
        let Some(stall) = seen.stall else {
            self.vms.insert(seen.name.clone(), History::default());
            return None;
        };
        history.hold = history.hold.saturating_sub(1);
        let taken = history.taken.map(|(bytes, looks)| (bytes, looks + 1));
        history.taken = taken.filter(|(_, looks)| *looks <= BLAME_LOOKS);
        let mut give_back = None;
        if stall > self.policy.stall {
            history.calm = 0;
            if let Some((bytes, _)) = history.taken.take() {
                give_back = Some(bytes);
                history.owed = bytes.saturating_mul(OWED_TIMES);
                history.hold_next = (history.hold_next * 2).min(HOLD_MAX);
                history.take = (history.take / 2.0).max(TAKE_MIN);
            }
            history.hold = history.hold.max(history.hold_next);
        } else if stall < self.policy.stall * CALM_PART || self.policy.stall == 0.0 {
            history.calm += 1;
            // The VM did not need the memory that was taken.
            if let (Some((bytes, _)), None) = (taken, history.taken) {
                history.owed = history.owed.saturating_sub(bytes);
                if history.owed == 0 {
                    history.hold_next = (history.hold_next / 2).max(HOLD_MIN);
                    history.take = (history.take * 2.0).min(TAKE_MAX);
                }
            }
        } else {
            history.calm = 0;
        }
        Some(Party {
            seen,
            bounds,
            stall,
            give_back,
            history,
            to: seen.budget,
            why: None,
        })
    }

    /// Takes the memory that is missing from the reserve.
    fn restore(&self, missing: u64, parties: &mut [Party<'_>]) {
        let mut missing = missing;
        let mut order: Vec<&mut Party<'_>> = parties
            .iter_mut()
            .filter(|party| !self.is_short(party) && !party.seen.is_stuck)
            .collect();
        order.sort_by(|one, other| one.stall.total_cmp(&other.stall));
        for party in &mut order {
            if missing == 0 {
                return;
            }
            let most = party.part(TAKE_FOR_RESERVE).max(party.idle()).min(missing);
            missing -= party.take(most, party.bounds.low, Why::Reserve);
        }
        // Below `low` only if no VM has anything left above its own.
        if order.iter().any(|party| party.to > party.bounds.low) {
            return;
        }
        for party in order {
            let taken = party.seen.budget - party.to;
            let most = party.part(TAKE_FOR_RESERVE).saturating_sub(taken).min(missing);
            missing -= party.take(most, party.bounds.min, Why::Reserve);
        }
    }

    /// Gives memory to the short VMs, and returns the bytes that they still lack.
    fn give(&self, mut spare: u64, parties: &mut [Party<'_>]) -> u64 {
        let mut lacking = 0;
        let mut order: Vec<&mut Party<'_>> = parties
            .iter_mut()
            // A VM that has idle memory is not helped by more.
            .filter(|party| self.is_short(party) && party.idle() == 0)
            .collect();
        // VMs below `low` come first, then those with the largest stall.
        order.sort_by(|one, other| {
            let is_low = |party: &Party<'_>| party.seen.budget < party.bounds.low;
            is_low(other).cmp(&is_low(one)).then(other.stall.total_cmp(&one.stall))
        });
        for is_beyond_high in [false, true] {
            for party in &mut order {
                let is_at_high = party.seen.budget >= party.bounds.high;
                if is_at_high != is_beyond_high {
                    continue;
                }
                let bound = match is_beyond_high {
                    true => party.bounds.max,
                    false => party.bounds.high,
                };
                let times = (party.stall / self.policy.stall.max(f64::EPSILON)).min(GIVE_TIMES_MAX);
                let (wanted, why) = match party.give_back {
                    Some(bytes) => (bytes.saturating_mul(2), Why::GiveBack),
                    None => (party.part(GIVE * times), Why::Short),
                };
                let wanted = wanted.max(MOVE_MIN).min(bound.saturating_sub(party.to));
                let given = wanted.min(spare);
                if given > 0 {
                    party.to += given;
                    party.why = Some(why);
                    spare -= given;
                }
                // No VM is entitled to memory beyond `high`.
                if !is_beyond_high {
                    lacking += wanted - given;
                }
            }
            if lacking > 0 {
                break;
            }
        }
        lacking
    }

    /// Takes from other VMs the memory that short VMs lack.
    fn take_for_others(&self, mut lacking: u64, parties: &mut [Party<'_>]) {
        let mut order: Vec<&mut Party<'_>> = parties
            .iter_mut()
            .filter(|party| !self.is_short(party) && !party.seen.is_stuck && party.has_released())
            .collect();
        order.sort_by(|one, other| {
            let is_above = |party: &Party<'_>| party.seen.budget > party.bounds.high;
            is_above(other)
                .cmp(&is_above(one))
                .then(one.stall.total_cmp(&other.stall))
        });
        for party in order {
            // A VM is not entitled to memory above its `high` while another VM needs it.
            let above = party.seen.budget.saturating_sub(party.bounds.high);
            let is_settled = party.history.calm >= CALM_MIN && party.history.hold == 0;
            let most = match is_settled {
                true => party.part(TAKE_FOR_OTHERS),
                false => party.part(TAKE_FOR_OTHERS).min(above),
            };
            let most = most.max(party.idle()).min(lacking);
            lacking -= party.take(most, party.bounds.low, Why::ForOthers);
        }
    }

    /// Takes a little memory from each calm VM.
    fn take_from_calm(&self, parties: &mut [Party<'_>]) {
        for party in parties {
            let history = party.history;
            let is_settled = history.calm >= CALM_MIN && history.hold == 0 && history.taken.is_none();
            if is_settled && party.why.is_none() && !party.seen.is_stuck && party.has_released() {
                let most = party.part(history.take).max(MOVE_MIN);
                party.take(most, party.bounds.low, Why::Calm);
            }
        }
    }
}

/// Returns the resulting change, if it is worth making.
fn finish(party: &mut Party<'_>) -> Option<Move> {
    let (from, to, why) = (party.seen.budget, party.to, party.why?);
    let is_at_bound = [party.bounds.min, party.bounds.low, party.bounds.high, party.bounds.max].contains(&to);
    if from == to || (from.abs_diff(to) < MOVE_MIN && !is_at_bound) {
        return None;
    }
    if to < from {
        // Idle memory is excluded: taking it cannot make the VM short.
        let used = (from - to).saturating_sub(party.idle());
        party.history.taken = (used > 0).then_some((used, 0));
    }
    Some(Move {
        name: party.seen.name.clone(),
        from,
        to,
        why,
        stall: party.stall,
    })
}

#[cfg(test)]
mod tests;
