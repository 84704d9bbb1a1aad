//! `larder migrate send` and `larder migrate receive`: between two real QEMUs, and between ends that stand for them where
//! each byte and each moment counts.

mod moves;
#[path = "../support/mod.rs"]
mod support;
