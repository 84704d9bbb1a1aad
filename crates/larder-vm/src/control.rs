//! The control socket of a server: HTTP/1.1 with JSON over a unix socket, for whoever wants to know what it is doing.
//! `docs/control.md` describes it for users.
//!
//! [`ControlServer`] answers in a thread of its own, which sleeps while nobody asks. It knows nothing by itself: it asks
//! each disk's thread, which answers between two requests of its guest ([`crate::disk::DiskInquiry`]), so that the way of
//! the data shares and locks nothing. Whatever a client does, it takes a place among few, for a bounded time.
//! [`writers`] decides which clients may change something; all others may only read.
//!
//! [`fetch_disks`], [`change_disk`] and [`reload`] are the other end. What is told stands in [`state`] for both, what is to be
//! done in [`wishes`]; [`openapi`] describes it for programs.

mod answers;
mod client;
pub mod events;
pub mod memory;
pub mod memory_rates;
pub mod migration;
mod openapi;
pub mod rates;
pub mod response;
mod server;
pub mod state;
mod subject;
pub mod wishes;
mod writers;

pub use client::{
    Change, FetchError, cancel_detach, cancel_migration, change_disk, detach_memory, fetch_disks, fetch_hot,
    fetch_memory, fetch_migration, fetch_server, is_hung_up, limit_memory, limit_migration, move_vm, reload, warm_disk,
};
pub use server::{ControlError, ControlServer, ControlSocket};
pub use subject::{MoveOn, MoveReply, Reload, ReloadReply, Subject};

/// Where the process tells of itself; all else is below.
const SERVER_PATH: &str = "/v1";

/// Where all this is described.
const OPENAPI_PATH: &str = "/v1/openapi.json";

/// Where is told what happens.
const EVENTS_PATH: &str = "/v1/events";

/// Where the VM's file is read again.
const RELOAD_PATH: &str = "/v1/reload";

/// Where the VM's disks go to another host with it, and come.
const MOVE_PATH: &str = "/v1/move";

/// Where the disks are told of.
const DISKS_PATH: &str = "/v1/disks";

/// Where the memory is told of, and limited.
const MEMORY_PATH: &str = "/v1/memory";

/// Where it is let go of.
const DETACH_PATH: &str = "/v1/memory/detach";

/// The path that cancels a detach.
const CANCEL_DETACH_PATH: &str = "/v1/memory/detach/cancel";

/// Where the VM that is moved is told of, and its limits are changed.
const MIGRATION_PATH: &str = "/v1/migration";

/// Where it is cancelled.
const CANCEL_PATH: &str = "/v1/migration/cancel";

/// Where the disk of that name, or number from 0 on, is told of, and changed.
fn disk_path(disk: &str) -> String {
    format!("{DISKS_PATH}/{disk}")
}

/// Where its cache is flushed.
fn flush_path(disk: &str) -> String {
    format!("{DISKS_PATH}/{disk}/cache/flush")
}

/// Where its cache is replaced.
fn replace_path(disk: &str) -> String {
    format!("{DISKS_PATH}/{disk}/cache/replace")
}

/// Where it is told what of it is hot, and what was elsewhere.
fn hot_path(disk: &str) -> String {
    format!("{DISKS_PATH}/{disk}/hot")
}
