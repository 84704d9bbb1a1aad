//! `larder run`: runs QEMU from its plain command line, with its disks served by Larder.
//!
//! [`plan`] converts the command line to a plan of processes, without side effects. [`lease`] creates the resources
//! that the plan needs on this host, files of RAM and a directory for the sockets, and removes them again.
//! [`supervise`] starts a server for each disk and QEMU, restarts servers that die, and ends when QEMU does. `proxy`
//! forwards messages between QEMU and each server, so that QEMU never sees a server disconnect. [`memory`] keeps the
//! guest's memory within a budget. [`disk_locks`] holds the images' locks across restarts of servers.
//!
//! Invariants:
//! - An argument that does not concern a disk or the RAM reaches QEMU unchanged, in its order.
//! - A disk is served only if all of its options on the command line are supported; otherwise it stays with QEMU, and
//!   the user is informed.
//! - From the check of the images to the end of the servers, no other program that respects QEMU's locks can open the
//!   images, even while a server is dead.
//! - However the program ends, it leaves nothing behind: it removes its resources itself if it still can, otherwise
//!   the next start does.

pub mod arguments;
pub mod check;
mod child;
pub mod device;
pub mod disk_locks;
mod disks;
pub mod drive;
mod inventory;
pub mod keyval;
pub mod lease;
pub mod machine;
pub mod memory;
mod option_names;
pub mod plan;
mod proxy;
pub mod ram;
pub mod restart_backoff;
mod rewrite;
pub mod shell;
mod signals;
pub mod size;
pub mod supervise;
pub mod version;
