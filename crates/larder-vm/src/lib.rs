//! Assembly of one VM: opens its disks, stacks their layers and serves them.

pub mod confine;
pub mod control;
mod data_limit;
pub mod disk;
pub mod exports;
pub mod image;
pub mod inherited;
pub mod known_hosts;
pub mod latch;
pub mod libvirt;
pub mod limits;
pub mod listen;
pub mod memory;
pub mod occupied;
pub mod opener;
mod outcome;
mod private_folder;
pub mod read_group;
pub mod run;
pub mod runtime_folder;
pub mod user;
pub mod vm;
pub mod wish;
