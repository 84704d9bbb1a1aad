//! The simulator of the pager of guest memory: a process and its kernel, a worker, and disks, all simulated, and the real
//! pager, which is killed at any moment and followed by another. What the process reads is checked against what it wrote.
//! See `docs/simulator.md`.

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

/// A kind of host that is simulated.
#[derive(Debug)]
pub struct Memory {
    name: &'static str,
    variant: Variant,
}

/// All kinds.
pub const MEMORIES: [&Memory; 4] = [
    &Memory {
        name: "memory-ram",
        variant: Variant::Ram,
    },
    &Memory {
        name: "memory-ssd",
        variant: Variant::Ssd,
    },
    &Memory {
        name: "memory-tiers",
        variant: Variant::Tiers,
    },
    &Memory {
        name: "memory-io",
        variant: Variant::Io,
    },
];

impl Memory {
    /// What it is called.
    pub fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn run(&self, seed: u64, is_logged: bool) -> Run {
        Run::new(self.variant, seed, is_logged)
    }
}
