//! Faults that are injected into a simulated device.

use std::time::Duration;

use crate::error::{Failure, Operation};
use crate::units::ByteRange;

/// The effect of a fault on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultEffect {
    /// The request fails. Each sector of a change is old or new.
    Fail(Failure),
    /// The request takes this much longer, in the loop's time.
    Delay(Duration),
    /// The request does not complete until [`release`](super::SimulatedDevice::release) or a stop of the device.
    Hang,
}

/// A condition for requests, and the effect on the requests that meet it.
#[derive(Clone, Copy, Debug)]
pub struct InjectedFault {
    /// The kind of requests; any kind if `None`.
    pub operation: Option<Operation>,
    /// Requests that share a byte with this range; all if `None`. A flush has no bytes.
    pub range: Option<ByteRange>,
    /// The number of matching requests that are not affected at first.
    pub after: u64,
    /// The number of matching requests that are affected; `None` for all that follow.
    pub times: Option<u64>,
    /// The effect on the affected requests.
    pub effect: FaultEffect,
}

impl InjectedFault {
    /// Returns a fault with `effect` on every request from now on.
    pub fn always(effect: FaultEffect) -> Self {
        Self { operation: None, range: None, after: 0, times: None, effect }
    }

    /// Returns a fault with `effect` on the next request.
    pub fn once(effect: FaultEffect) -> Self {
        Self { times: Some(1), ..Self::always(effect) }
    }

    /// Restricts the fault to requests of this kind.
    pub fn on(self, operation: Operation) -> Self {
        Self { operation: Some(operation), ..self }
    }

    /// Restricts the fault to requests that share a byte with `range`.
    pub fn within(self, range: ByteRange) -> Self {
        Self { range: Some(range), ..self }
    }

    /// Delays the fault until after `after` matching requests.
    pub fn after(self, after: u64) -> Self {
        Self { after, ..self }
    }

    fn matches(&self, operation: Operation, range: ByteRange) -> bool {
        self.operation.is_none_or(|own| own == operation) && self.range.is_none_or(|own| own.overlaps(range))
    }
}

/// The injected faults of a device.
#[derive(Default)]
pub(super) struct Faults(Vec<InjectedFault>);

impl Faults {
    pub(super) fn add(&mut self, fault: InjectedFault) {
        self.0.push(fault);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the effect on a request; the oldest fault that it meets takes effect.
    pub(super) fn effect_on(&mut self, operation: Operation, range: ByteRange) -> Option<FaultEffect> {
        let mut found = None;
        for fault in self.0.iter_mut().filter(|fault| fault.matches(operation, range)) {
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
