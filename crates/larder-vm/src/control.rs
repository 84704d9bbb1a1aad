//! The control socket of a server: HTTP/1.1 with JSON over a unix socket, for whoever wants to know what it is doing.
//! `docs/control.md` describes it for users.
//!
//! [`ControlServer`] answers in a thread of its own, which sleeps while nobody asks. It knows nothing by itself: it asks
//! each disk's thread, which answers between two requests of its guest ([`crate::disk::DiskInquiry`]), so that the way of
//! the data shares and locks nothing. Whatever a client does, it takes a place among few, for a bounded time.
//! [`fetch_disks`] and [`change_cache`] are the other end. What is told stands in [`state`], for both.

mod client;
mod server;
pub mod state;

pub use client::{FetchError, change_cache, fetch_disks};
pub use server::{ControlError, ControlServer, ControlSocket};

/// Where the disks are told of.
const DISKS_PATH: &str = "/v1/disks";

/// Where the cache of the disk of that number, from 0 on, is changed.
fn cache_path(disk: usize) -> String {
    format!("{DISKS_PATH}/{disk}/cache")
}

/// Where it is flushed.
fn flush_path(disk: usize) -> String {
    format!("{DISKS_PATH}/{disk}/cache/flush")
}

/// Where it is replaced.
fn replace_path(disk: usize) -> String {
    format!("{DISKS_PATH}/{disk}/cache/replace")
}
