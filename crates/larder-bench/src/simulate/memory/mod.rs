//! The simulator of the pager of guest memory. A process and its kernel, a worker, and disks are simulated. The pager
//! is the real one; it is killed at random moments, and a successor continues. All reads of the process are checked
//! against its writes. See `docs/simulator.md`.

mod content;
mod guest;
mod kernel;
mod oracle;
mod process;
mod run;
mod shape;
mod store;
mod world;

pub(super) use run::Run;
use shape::Variant;

/// A kind of host to simulate.
#[derive(Debug)]
pub struct Memory {
    name: &'static str,
    variant: Variant,
}

/// All kinds.
pub const MEMORY_SUBJECTS: [&Memory; 4] = [
    &Memory { name: "memory-ram", variant: Variant::Ram },
    &Memory { name: "memory-ssd", variant: Variant::Ssd },
    &Memory { name: "memory-tiers", variant: Variant::Tiers },
    &Memory { name: "memory-io", variant: Variant::Io },
];

impl Memory {
    /// Returns the name of the kind.
    pub fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn run(&self, seed: u64, is_logged: bool) -> Run {
        Run::new(self.variant, seed, is_logged)
    }
}
