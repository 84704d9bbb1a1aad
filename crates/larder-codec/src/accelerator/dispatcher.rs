//! Distribution of requests to instances, in turn.

use super::cpu::CpuInstance;
use super::{EncodeOutcome, EncodeRequest, Instance, InstanceStatistics};
use crate::batch::Method;

/// Consecutive failures after which an instance receives no more requests.
const FAILURES_MAX: u32 = 3;

/// Several instances as one, for one thread. A request whose method no instance makes, or that an instance has failed
/// on, is encoded by the CPU.
pub struct Dispatcher {
    slots: Vec<Slot>,
    /// Next slot to submit to, for each method, because not every instance makes each method.
    submit_next: [usize; Method::COUNT],
    /// Next slot to poll.
    poll_next: usize,
    cpu: CpuInstance,
}

struct Slot {
    instance: Box<dyn Instance>,
    /// Consecutive failures.
    failures: u32,
}

impl Slot {
    const fn is_enabled(&self) -> bool {
        self.failures < FAILURES_MAX
    }
}

/// State of one instance of a dispatcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstanceState {
    /// Name of the accelerator; `cpu (for others)` stands for requests that the dispatcher has encoded itself.
    pub name: &'static str,
    /// True if the instance receives requests.
    pub is_enabled: bool,
    /// Statistics of the instance.
    pub statistics: InstanceStatistics,
}

impl Dispatcher {
    /// Creates a dispatcher over these instances.
    #[must_use]
    pub fn new(instances: Vec<Box<dyn Instance>>) -> Self {
        let slots = instances.into_iter().map(|instance| Slot { instance, failures: 0 });
        Self {
            slots: slots.collect(),
            submit_next: [0; Method::COUNT],
            poll_next: 0,
            cpu: CpuInstance::new("cpu (for others)", &Method::ALL),
        }
    }

    /// Submits a request to the next instance in turn that makes its method and has room.
    ///
    /// # Errors
    /// No instance has room: the request is returned unchanged, to be submitted again after [`Self::poll`] has
    /// returned one.
    pub fn submit(&mut self, mut request: Box<EncodeRequest>) -> Result<(), Box<EncodeRequest>> {
        let mut is_supported = false;
        let next = &mut self.submit_next[request.method().index()];
        for step in 0..self.slots.len() {
            let at = (*next + step) % self.slots.len();
            let slot = &mut self.slots[at];
            if !slot.is_enabled() || !slot.instance.supports(request.method()) {
                continue;
            }
            is_supported = true;
            match slot.instance.submit(request) {
                Ok(()) => {
                    *next = at + 1;
                    return Ok(());
                }
                Err(refused) => request = refused,
            }
        }
        if is_supported { Err(request) } else { self.cpu.submit(request) }
    }

    /// Returns a completed request, if there is one, polling the instances in turn.
    pub fn poll(&mut self) -> Option<Box<EncodeRequest>> {
        for step in 0..self.slots.len() {
            let at = (self.poll_next + step) % self.slots.len();
            let slot = &mut self.slots[at];
            let Some(mut request) = slot.instance.poll() else {
                continue;
            };
            self.poll_next = at + 1;
            if request.outcome() == EncodeOutcome::Failed {
                slot.failures = slot.failures.saturating_add(1);
                self.cpu.encode_now(&mut request);
            } else if slot.is_enabled() {
                slot.failures = 0;
            }
            return Some(request);
        }
        self.cpu.poll()
    }

    /// Returns the number of requests that were accepted and not returned.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        let slots = self.slots.iter().map(|slot| slot.instance.in_flight());
        slots.sum::<usize>() + self.cpu.in_flight()
    }

    /// Returns the statistics of each instance, and at the end those of the CPU in their place.
    pub fn statistics(&self) -> impl Iterator<Item = InstanceState> {
        let slots = self.slots.iter().map(|slot| InstanceState {
            name: slot.instance.name(),
            is_enabled: slot.is_enabled(),
            statistics: slot.instance.statistics(),
        });
        slots.chain([InstanceState { name: self.cpu.name(), is_enabled: true, statistics: self.cpu.statistics() }])
    }
}
