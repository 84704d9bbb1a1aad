//! Assembly of one VM: opens its disks, stacks their layers and serves them.

pub mod confine;
pub mod control;
mod data_limit;
pub mod disk;
pub mod disk_spec;
pub mod exports;
pub mod foreign_data;
pub mod image;
pub mod inherited;
pub mod known_hosts;
pub mod latch;
pub mod libvirt;
pub mod limits;
pub mod listen;
pub mod memory;
pub mod opener;
mod private_directory;
pub mod read_group;
pub mod run;
pub mod runtime_directory;
mod thread_result;
pub mod user;
pub mod vm;
