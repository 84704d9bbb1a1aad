//! The simulator. It checks random work on stacks of layers over simulated disks that fail and stop against the
//! contract of [`larder_block::device`], and on memory whose pager is killed. See `docs/simulator.md`.

mod cached;
mod campaign;
mod life;
mod log;
pub mod memory;
mod oracle;
mod qcow2_image;
mod qcow2_stack;
mod scattered;
mod seed;
mod size;
pub mod stack;
mod stamp;
mod worker;

pub use campaign::{Arguments, Finding, Subject, run, simulate};
pub use seed::Summary;
