//! Tests of both movers with fake QEMUs, which fail on demand at chosen moments.

mod destination;
mod disks;
mod fake;
mod moves;
