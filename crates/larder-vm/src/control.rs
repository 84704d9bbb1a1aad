//! The control socket of a server: HTTP/1.1 with JSON over a unix socket, for status requests and changes.
//! `docs/control.md` documents it for users.
//!
//! [`ControlServer`] answers on a thread of its own, which sleeps between requests. It has no state of its own: it
//! asks each disk's thread, which answers between two requests of its guest ([`crate::disk::DiskHandle`]). So the
//! data path shares no state with it, and takes no locks. A client can use only one of a few connections, for a
//! bounded time. [`writers`] decides which clients may change something; all others may only read.
//!
//! The last events of the disks ([`trace`]) are the exception: they are in memory that both threads share, so that they
//! can be read while a disk's thread hangs.
//!
//! [`fetch_disks`], [`change_disk`] and [`reload`] are the client side. Both sides share the types of answers, in
//! [`state`], and of requests, in [`requests`]; [`openapi`] describes them in machine-readable form.

mod client;
pub mod events;
mod handlers;
pub mod http_response;
pub mod memory;
pub mod memory_rates;
pub mod migration;
mod openapi;
pub mod rates;
pub mod requests;
mod server;
pub mod state;
mod subject;
pub mod trace;
mod writers;

pub use client::{
    ControlClientError, DiskChangeRequest, cancel_detach, cancel_migration, change_disk, closed_by_peer, detach_memory,
    fetch_disks, fetch_hot_ranges, fetch_memory, fetch_migration, fetch_server, fetch_trace, limit_memory,
    limit_migration, reload, request_move_step, warm_disk,
};
pub use server::{ControlError, ControlServer, ControlSocket};
pub use subject::{MoveCallback, MoveReply, ReloadCallback, ReloadReply, Subject};

/// Path of the process's own state; all other paths are below it.
const SERVER_PATH: &str = "/v1";

/// Path of the OpenAPI document.
const OPENAPI_PATH: &str = "/v1/openapi.json";

/// Path of the event stream.
const EVENTS_PATH: &str = "/v1/events";

/// Path of the last events of each disk.
const TRACE_PATH: &str = "/v1/trace";

/// Path that reloads the VM's file.
const RELOAD_PATH: &str = "/v1/reload";

/// Path for the steps of the disks' move to and from another host.
const MOVE_PATH: &str = "/v1/move";

/// Path of the disks' state.
const DISKS_PATH: &str = "/v1/disks";

/// Path of the memory's state and limits.
const MEMORY_PATH: &str = "/v1/memory";

/// Path that detaches from the memory.
const DETACH_PATH: &str = "/v1/memory/detach";

/// Path that cancels a detach.
const CANCEL_DETACH_PATH: &str = "/v1/memory/detach/cancel";

/// Path of a migration's state and limits.
const MIGRATION_PATH: &str = "/v1/migration";

/// Path that cancels a migration.
const CANCEL_MIGRATION_PATH: &str = "/v1/migration/cancel";

/// Returns the path of the state and the settings of a disk, which is given by name, or by number counted from 0.
fn disk_path(disk: &str) -> String {
    format!("{DISKS_PATH}/{disk}")
}

/// Returns the path that flushes a disk's cache.
fn flush_cache_path(disk: &str) -> String {
    format!("{DISKS_PATH}/{disk}/cache/flush")
}

/// Returns the path that replaces a disk's cache.
fn replace_cache_path(disk: &str) -> String {
    format!("{DISKS_PATH}/{disk}/cache/replace")
}

/// Returns the path of a disk's hot ranges, to read them or to warm the cache with those of another host.
fn hot_ranges_path(disk: &str) -> String {
    format!("{DISKS_PATH}/{disk}/hot")
}
