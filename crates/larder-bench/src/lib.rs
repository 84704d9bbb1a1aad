//! The experiments: the seed tables, measured and plotted, and the simulator.

pub mod campaign;
pub mod simulate;
