//! The policy's state of each set, beside the policy.

use std::time::Duration;

use larder_policy::policy::{Admission, Context, PolicyOptions};

use crate::shape::{Line, Shape, Slot};

/// Which lines are worth most.
pub(crate) struct Policy {
    policy: larder_policy::Policy,
    /// For each set so many bytes, in a row.
    states: Vec<u8>,
    set_len: usize,
}

impl Policy {
    /// `budget` is what may be written to the cache device in a day, in bytes.
    pub(crate) fn new(shape: &Shape, budget: Option<u64>) -> Self {
        let policy = larder_policy::Policy::new(PolicyOptions {
            ways: shape.ways as usize,
            spare_ways: shape.spare_ways(),
            lines: shape.slots(),
            line_bytes: shape.line_len() as u32,
            admission: Admission::default(),
            budget,
        });
        let set_len = policy.set_bytes();
        Self {
            policy,
            states: vec![0; set_len * shape.sets as usize],
            set_len,
        }
    }

    /// The policy, and the state of a set.
    fn of(&mut self, set: u32) -> (&mut larder_policy::Policy, &mut [u8]) {
        let from = set as usize * self.set_len;
        (&mut self.policy, &mut self.states[from..from + self.set_len])
    }

    pub(crate) fn written(&mut self, bytes: u64, now: Duration) {
        self.policy.written(bytes, now);
    }

    pub(crate) fn is_spent(&mut self, bytes: u64, now: Duration) -> bool {
        self.policy.is_spent(bytes, now)
    }

    pub(crate) fn touch(&mut self, slot: Slot, line: Line, context: Context) {
        let (policy, state) = self.of(slot.set());
        policy.touch(state, slot.way() as u8, line, context);
    }

    pub(crate) fn admit(&mut self, set: u32, line: Line, context: Context) -> bool {
        let (policy, state) = self.of(set);
        policy.admit(state, line, context)
    }

    pub(crate) fn insert(&mut self, slot: Slot, line: Line, context: Context) {
        let (policy, state) = self.of(slot.set());
        policy.insert(state, slot.way() as u8, line, context);
    }

    pub(crate) fn victim(&mut self, set: u32, mut may_evict: impl FnMut(Slot) -> bool) -> Option<Slot> {
        let (policy, state) = self.of(set);
        let way = policy.victim(state, |way| may_evict(Slot::new(set, way.into())))?;
        Some(Slot::new(set, way.into()))
    }

    pub(crate) fn evict(&mut self, slot: Slot, line: Line) {
        let (policy, state) = self.of(slot.set());
        policy.evict(state, slot.way() as u8, line);
    }

    pub(crate) fn remove(&mut self, slot: Slot) {
        let (policy, state) = self.of(slot.set());
        policy.remove(state, slot.way() as u8);
    }

    /// What is written down of a slot.
    pub(crate) fn save(&mut self, slot: Slot) -> u8 {
        let (policy, state) = self.of(slot.set());
        policy.save(state, slot.way() as u8)
    }

    /// Takes up what was written down of a set: ways, and what was said of each.
    pub(crate) fn load(&mut self, set: u32, ways: impl IntoIterator<Item = (u8, u8)>) {
        let (policy, state) = self.of(set);
        policy.load(state, ways);
    }
}
