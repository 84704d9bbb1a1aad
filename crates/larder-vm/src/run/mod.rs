//! `larder run`: QEMU started from its plain command line, with its disks served by Larder.
//!
//! [`plan`] turns the command line into what is to be started; it touches nothing. [`lease`] makes what that needs on
//! this host, files of RAM and a folder for the sockets, and takes it away again. [`supervise`] starts a server for
//! each disk and QEMU, keeps the servers alive, and ends when QEMU does. `keeper` stands between QEMU and each server,
//! so that QEMU never sees one go. [`memory`] keeps the guest's memory within a budget. [`hold`] keeps the images' locks from one server to the next.
//!
//! Invariants:
//! - An argument that is not about a disk or the RAM reaches QEMU as it is, in its order.
//! - A disk is served only if all that the command line says of it is kept; otherwise it stays with QEMU, and the user
//!   is told.
//! - From the check of the images to the end of the servers nobody else can open them as QEMU and its tools do, whatever
//!   becomes of a server.
//! - Whatever way the program ends, nothing of it stays: at once if it can still act, otherwise at the next start.

pub mod arguments;
pub mod backoff;
pub mod check;
mod child;
pub mod device;
mod disks;
pub mod drive;
pub mod hold;
mod inventory;
mod keeper;
pub mod keyval;
pub mod lease;
pub mod machine;
pub mod memory;
mod option_names;
pub mod plan;
pub mod ram;
mod rewrite;
pub mod shell;
mod signals;
pub mod size;
pub mod supervise;
pub mod version;
