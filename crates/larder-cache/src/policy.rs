//! Adapter between the policy and the sets, which hold its state together with their lines.

use std::time::Duration;

use larder_policy::Policy;
use larder_policy::policy::{AccessContext, AdmissionPolicy, PolicyOptions};

use crate::layout::{CacheLayout, Line, Slot};
use crate::set_table::SetTable;

/// Creates the policy that scores the lines of a cache of this shape. `budget` is the number of bytes that may be
/// written to the cache device in a day.
pub(crate) fn new(layout: &CacheLayout, budget: Option<u64>) -> Policy {
    Policy::new(PolicyOptions {
        ways: layout.ways as usize,
        spare_ways: layout.spare_ways(),
        lines: layout.slots(),
        line_bytes: layout.line_len() as u32,
        admission: AdmissionPolicy::default(),
        budget,
    })
}

/// The policy, with the sets that hold its state.
pub(crate) struct SetPolicy<'a> {
    pub(crate) policy: &'a mut Policy,
    pub(crate) sets: &'a mut SetTable,
}

impl SetPolicy<'_> {
    /// Returns the policy and the state of a set.
    fn policy_and_state(&mut self, set: u32) -> (&mut Policy, &mut [u8]) {
        (self.policy, self.sets.policy_mut(set))
    }

    pub(crate) fn record_write(&mut self, bytes: u64, now: Duration) {
        self.policy.record_write(bytes, now);
    }

    /// Forwards to [`Policy::set_budget`].
    pub(crate) fn set_budget(&mut self, bytes_per_day: Option<u64>, now: Duration) {
        self.policy.set_budget(bytes_per_day, now);
    }

    pub(crate) fn exceeds_budget(&mut self, bytes: u64, now: Duration) -> bool {
        self.policy.exceeds_budget(bytes, now)
    }

    pub(crate) fn touch(&mut self, slot: Slot, line: Line, context: AccessContext) {
        let (policy, state) = self.policy_and_state(slot.set());
        policy.touch(state, slot.way() as u8, line, context);
    }

    pub(crate) fn admit(&mut self, set: u32, line: Line, context: AccessContext) -> bool {
        let (policy, state) = self.policy_and_state(set);
        policy.admit(state, line, context)
    }

    pub(crate) fn insert(&mut self, slot: Slot, line: Line, context: AccessContext) {
        let (policy, state) = self.policy_and_state(slot.set());
        policy.insert(state, slot.way() as u8, line, context);
    }

    pub(crate) fn victim(&mut self, set: u32, mut may_evict: impl FnMut(Slot) -> bool) -> Option<Slot> {
        let (policy, state) = self.policy_and_state(set);
        let way = policy.victim(state, |way| may_evict(Slot::new(set, way.into())))?;
        Some(Slot::new(set, way.into()))
    }

    pub(crate) fn evict(&mut self, slot: Slot, line: Line) {
        let (policy, state) = self.policy_and_state(slot.set());
        policy.evict(state, slot.way() as u8, line);
    }

    pub(crate) fn remove(&mut self, slot: Slot) {
        let (policy, state) = self.policy_and_state(slot.set());
        policy.remove(state, slot.way() as u8);
    }

    /// Returns the persistent state of a slot.
    pub(crate) fn save(&mut self, slot: Slot) -> u8 {
        let (policy, state) = self.policy_and_state(slot.set());
        policy.save(state, slot.way() as u8)
    }

    /// Restores the persistent state of a set: pairs of way and state.
    pub(crate) fn load(&mut self, set: u32, ways: impl IntoIterator<Item = (u8, u8)>) {
        let (policy, state) = self.policy_and_state(set);
        policy.load(state, ways);
    }
}
