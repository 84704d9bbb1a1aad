//! Both movers, with ends in place of QEMU that do as they are told, each wrong thing at its moment.

mod destination;
mod disks;
mod fake;
mod moves;
