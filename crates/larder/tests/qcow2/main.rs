//! The qcow2 format, tested through the program: images that QEMU's tools create are served over NBD, used by QEMU's
//! tools, and checked by QEMU's tools.
//!
//! `LARDER_QCOW2_IMAGES=N` tests N images of each kind; the seeds continue after those of the default.

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
