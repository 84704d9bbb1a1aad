//! Stands in for the policy until it is there: CLOCK with two bits.

use crate::shape::{Shape, Slot};

pub(crate) struct Policy {
    ways: usize,
    hot: Vec<u8>,
    hands: Vec<u8>,
}

impl Policy {
    pub(crate) fn new(shape: &Shape) -> Self {
        Self {
            ways: shape.ways as usize,
            hot: vec![0; shape.slots() as usize],
            hands: vec![0; shape.sets as usize],
        }
    }

    fn at(&self, slot: Slot) -> usize {
        slot.set() as usize * self.ways + slot.way() as usize
    }

    pub(crate) fn touch(&mut self, slot: Slot) {
        let at = self.at(slot);
        self.hot[at] = (self.hot[at] + 1).min(3);
    }

    pub(crate) fn hotness(&self, slot: Slot) -> u8 {
        self.hot[self.at(slot)]
    }

    pub(crate) fn load(&mut self, slot: Slot, hotness: u8) {
        let at = self.at(slot);
        self.hot[at] = hotness.min(3);
    }

    pub(crate) fn remove(&mut self, slot: Slot) {
        let at = self.at(slot);
        self.hot[at] = 0;
    }

    pub(crate) fn victim(&mut self, set: u32, mut may_evict: impl FnMut(Slot) -> bool) -> Option<Slot> {
        for _ in 0..self.ways * 5 {
            let way = u32::from(self.hands[set as usize]);
            self.hands[set as usize] = ((way as usize + 1) % self.ways) as u8;
            let slot = Slot::new(set, way);
            if !may_evict(slot) {
                continue;
            }
            let at = self.at(slot);
            if self.hot[at] == 0 {
                return Some(slot);
            }
            self.hot[at] -= 1;
        }
        None
    }
}
