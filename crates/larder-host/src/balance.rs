//! How the host's memory is shared among VMs: what is seen of them goes in, moves of their budgets come out. Nothing here
//! asks or changes anything.
//!
//! It follows Senpai, the controller of Meta's TMO ("TMO: Transparent Memory Offloading in Datacenters", ASPLOS 2022): how
//! much memory a VM needs is found by taking a little as long as nothing is lost by that, and the measure of what is lost is
//! the time in which somebody in the VM waits for memory.
//!
//! # Rules
//! - *Short* is a VM that has lost more than [`Policy::stall`] of the time since the last look. Nothing is ever taken from it.
//! - It gets memory from what the host has free above the reserve, up to its `high`; beyond that, up to `max`, if no other one
//!   is short below its own. What it lacks yet is taken from VMs that are not short, down to their `low`; they release it by
//!   and by, and it is given once it is free. So **no budget grows into the reserve**: what other budgets may take yet counts
//!   as taken.
//! - If less than the reserve is free, memory is taken at once from those who are not short, the least stalled first: down to
//!   `low`, and only when all of them are there, down to `min`. Nobody gets any meanwhile.
//! - Otherwise a VM that has been calm for some looks gives up a little at a time, down to `low`: what it does not need is
//!   free for others and for the host.
//! - What does not answer is left alone. Its budget counts as used.
//!
//! # Why it does not oscillate
//! Between calm and short there is a gap, in which nothing is done. Memory whose loss made a VM short is given back, and then
//! that VM is left alone, for twice as long each time that this happens again, and less is taken next time, until much more was
//! taken without harm. So its budget comes to rest where its loss is in the gap. What is taken
//! must be out of memory before more is. A VM is left alone for a while also after it was given memory for another reason.

use std::collections::HashMap;

use larder_vm::memory::range::Bounds;

/// What is to be kept to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// How much of the host's memory is to stay free, in bytes.
    pub reserve: u64,
    /// For which share of the time a VM may wait for memory.
    pub stall: f64,
}

/// What is seen of a VM whose memory is managed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    /// Of no other VM.
    pub(crate) name: String,
    /// It answers; otherwise this is what it said last.
    pub(crate) answers: bool,
    /// Where its budget may be moved to; nowhere without.
    pub(crate) bounds: Option<Bounds>,
    /// All of its memory, in bytes.
    pub(crate) size: u64,
    /// Its budget, in bytes.
    pub(crate) budget: u64,
    /// What of that is used, in bytes.
    pub(crate) used: u64,
    /// For which share of the time since the last look it waited for want of memory; `None`: it was not seen then.
    pub(crate) stall: Option<f64>,
    /// It cannot send pages away, or has just refused.
    pub(crate) is_stuck: bool,
}

/// A budget is to be another one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Move {
    pub(crate) name: String,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) why: Why,
    /// The VM's, as it was seen.
    pub(crate) stall: f64,
}

/// Why a budget is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The VM is short of memory.
    Short,
    /// It has become short by what was taken.
    GiveBack,
    /// It is calm, and may need less.
    Calm,
    /// Another one is short.
    ForOthers,
    /// The host's reserve is broken.
    Reserve,
}

impl Why {
    /// For people.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Short => "it is short of memory",
            Self::GiveBack => "it needs what was taken",
            Self::Calm => "it waits for nothing, and may need less",
            Self::ForOthers => "another virtual machine is short of memory",
            Self::Reserve => "less of the host's memory is free than the reserve",
        }
    }
}

/// Looks at which a VM has been calm before anything is taken.
const CALM_MIN: u32 = 2;

/// It is calm while it loses less than this part of what it may.
const CALM_PART: f64 = 0.5;

/// What is taken from a calm VM at a time, in parts of its memory: 1/100 at most, 1/1600 at least.
const TAKE_MIN: f64 = 1.0 / 1600.0;
const TAKE_MAX: f64 = 1.0 / 100.0;
/// At first.
const TAKE_FIRST: f64 = 1.0 / 400.0;

/// The same for another one that is short, and for the reserve.
const TAKE_FOR_OTHERS: f64 = 1.0 / 50.0;
const TAKE_FOR_RESERVE: f64 = 1.0 / 16.0;

/// What a VM that is short gets at a time, in parts of its memory, for each time that it loses what it may; so many times at
/// most.
const GIVE: f64 = 1.0 / 64.0;
const GIVE_TIMES_MAX: f64 = 4.0;

/// Looks after which it is not for what was taken any more that a VM is short.
const BLAME_LOOKS: u32 = 1;

/// Looks for which nothing is taken after memory was given.
const HOLD_MIN: u32 = 4;
const HOLD_MAX: u32 = 128;

/// So many times what was given back has to be taken in vain no more before less caution is needed.
const OWED_TIMES: u64 = 4;

/// Looks for which a VM that has refused a budget is left alone.
const REFUSED_LOOKS: u32 = 16;

/// What a pager keeps free of its budget for pages that come: not used is only what is beyond that.
const SLACK_PART: u64 = 32;
const SLACK_MIN: u64 = 2 << 20;

/// Moves of less are not worth it.
const MOVE_MIN: u64 = 64 << 10;

/// What is remembered of a VM.
#[derive(Clone, Copy, Debug)]
struct History {
    /// Looks at which it has been calm without a break.
    calm: u32,
    /// Looks for which nothing is taken yet.
    hold: u32,
    /// How long that is next time.
    hold_next: u32,
    /// Which part of its memory is taken next.
    take: f64,
    /// What was taken last of what it may have used, and how many looks ago.
    taken: Option<(u64, u32)>,
    /// What is to be taken without harm yet before it is left alone for less long, and more is taken at a time.
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

/// Decides; see the module's description.
#[derive(Debug)]
pub(crate) struct Balancer {
    policy: Policy,
    vms: HashMap<String, History>,
}

/// A VM, what is remembered of it, and what becomes of its budget.
struct Party<'a> {
    seen: &'a Seen,
    bounds: Bounds,
    stall: f64,
    /// To give back, as it was taken shortly before.
    give_back: Option<u64>,
    history: History,
    to: u64,
    why: Option<Why>,
}

impl Party<'_> {
    fn part(&self, part: f64) -> u64 {
        (self.seen.size as f64 * part) as u64
    }

    /// What of its budget nobody would miss.
    fn idle(&self) -> u64 {
        let slack = (self.seen.budget / SLACK_PART).max(SLACK_MIN);
        self.seen.budget.saturating_sub(self.seen.used.saturating_add(slack))
    }

    /// What was taken is out of memory.
    fn has_released(&self) -> bool {
        self.seen.used <= self.seen.budget
    }

    /// Takes so much at most, not below `floor`; what it takes.
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

    /// A budget was refused.
    pub(crate) fn is_refused(&mut self, name: &str) {
        if let Some(history) = self.vms.get_mut(name) {
            history.hold = history.hold.max(REFUSED_LOOKS);
            history.taken = None;
        }
    }

    /// What is to be done, now that the host has `available` bytes free.
    pub(crate) fn decide(&mut self, available: u64, seen: &[Seen]) -> Vec<Move> {
        self.vms.retain(|name, _| seen.iter().any(|vm| vm.name == *name));
        let mut parties: Vec<Party<'_>> = seen.iter().filter_map(|vm| self.look(vm)).collect();
        // What budgets that are lowered already have yet to release.
        let leaving = |vm: &Seen| vm.used.saturating_sub(vm.budget);
        let leaving: u64 = seen.iter().filter(|vm| vm.answers).map(leaving).sum();
        let missing = self.policy.reserve.saturating_sub(available.saturating_add(leaving));
        if missing > 0 {
            self.restore(missing, &mut parties);
        } else if available >= self.policy.reserve {
            // What others may take yet is theirs.
            let promised: u64 = seen.iter().map(|vm| vm.budget.saturating_sub(vm.used)).sum();
            let spare = (available - self.policy.reserve).saturating_sub(promised);
            let lacking = self.give(spare, &mut parties);
            // What is on its way is for them.
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

    /// Takes up what is seen of a VM; nothing if its budget cannot be moved now.
    fn look<'a>(&mut self, seen: &'a Seen) -> Option<Party<'a>> {
        if !seen.answers {
            // What it does meanwhile is not known.
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
            // It did not need that.
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

    /// Takes what is missing in the reserve.
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
        // Below `low` only if nobody has anything above it any more.
        if order.iter().any(|party| party.to > party.bounds.low) {
            return;
        }
        for party in order {
            let taken = party.seen.budget - party.to;
            let most = party.part(TAKE_FOR_RESERVE).saturating_sub(taken).min(missing);
            missing -= party.take(most, party.bounds.min, Why::Reserve);
        }
    }

    /// Gives to those who are short; what they lack yet.
    fn give(&self, mut spare: u64, parties: &mut [Party<'_>]) -> u64 {
        let mut lacking = 0;
        let mut order: Vec<&mut Party<'_>> = parties
            .iter_mut()
            // Who has not used up what he has needs something else.
            .filter(|party| self.is_short(party) && party.idle() == 0)
            .collect();
        // Who is below `low` first, then who has lost the most.
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
                // What is beyond `high` is nobody's due.
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

    /// Takes what others lack.
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
            // What is above its `high` was its own only as long as nobody else had use for it.
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

    /// Takes a little of what may not be needed.
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

/// The move that has come out, if it is worth it.
fn finish(party: &mut Party<'_>) -> Option<Move> {
    let (from, to, why) = (party.seen.budget, party.to, party.why?);
    let is_at_bound = [party.bounds.min, party.bounds.low, party.bounds.high, party.bounds.max].contains(&to);
    if from == to || (from.abs_diff(to) < MOVE_MIN && !is_at_bound) {
        return None;
    }
    if to < from {
        // For what it did not use it is not to blame.
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
