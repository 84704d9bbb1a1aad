//! The qcow2 format through the front door: images that QEMU's tools made are served over NBD, used by QEMU's tools, and
//! judged by QEMU's tools.
//!
//! `LARDER_QCOW2_IMAGES=N` tries N images of each kind; the seeds go on where the default ends.

mod bad_input;
mod broken_tables;
mod corpus;
mod data_file;
mod device;
mod full;
mod journal;
mod kills;
mod locks;
mod model;
mod names;
mod operations;
mod served;
mod space;
mod spec;
#[path = "../support/mod.rs"]
mod support;
