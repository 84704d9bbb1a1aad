//! Faults that a simulated device is told to have.

use std::time::Duration;

use crate::error::{Failure, Operation};
use crate::units::ByteRange;

/// What happens to a request that meets a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It fails. Of a change, each sector is old or new.
    Fail(Failure),
    /// It takes this much longer, of the loop's time.
    Delay(Duration),
    /// It never completes, until [`release`](super::SimulatedDevice::release) or a stop of the device.
    Stick,
}

/// Which requests meet a fault, and what it does to them.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Only requests of this kind; any if `None`.
    pub operation: Option<Operation>,
    /// Only requests that share a byte with this; any if `None`. A flush has no bytes.
    pub range: Option<ByteRange>,
    /// How many such requests go unharmed first.
    pub after: u64,
    /// How many such requests are harmed; `None` for all that follow.
    pub times: Option<u64>,
    /// What happens to them.
    pub effect: Effect,
}

impl Fault {
    /// Every request from now on has `effect`.
    pub fn always(effect: Effect) -> Self {
        Self {
            operation: None,
            range: None,
            after: 0,
            times: None,
            effect,
        }
    }

    /// The next request has `effect`.
    pub fn once(effect: Effect) -> Self {
        Self {
            times: Some(1),
            ..Self::always(effect)
        }
    }

    /// The same, but only for requests of this kind.
    pub fn on(self, operation: Operation) -> Self {
        Self {
            operation: Some(operation),
            ..self
        }
    }

    /// The same, but only for requests that share a byte with `range`.
    pub fn within(self, range: ByteRange) -> Self {
        Self {
            range: Some(range),
            ..self
        }
    }

    /// The same, but only after `after` requests of its kind.
    pub fn after(self, after: u64) -> Self {
        Self { after, ..self }
    }

    fn meets(&self, operation: Operation, range: ByteRange) -> bool {
        self.operation.is_none_or(|own| own == operation) && self.range.is_none_or(|own| own.overlaps(range))
    }
}

/// The faults that are set.
#[derive(Default)]
pub(super) struct Faults(Vec<Fault>);

impl Faults {
    pub(super) fn add(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// What happens to a request; the oldest fault that it meets counts.
    pub(super) fn meet(&mut self, operation: Operation, range: ByteRange) -> Option<Effect> {
        let mut found = None;
        for fault in self.0.iter_mut().filter(|fault| fault.meets(operation, range)) {
            if fault.after > 0 {
                fault.after -= 1;
            } else if found.is_none() {
                found = Some(fault.effect);
                fault.times = fault.times.map(|times| times.saturating_sub(1));
            }
        }
        self.0.retain(|fault| fault.times != Some(0));
        found
    }
}
