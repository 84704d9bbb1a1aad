//! Moves a VM: QEMU's monitor on both hosts, and what its two movers agree on.
//!
//! ```text
//! source: larder migrate VM --to HOST                    destination: larder migrate receive --qmp
//!   describe QEMU                    -- Prepare -->        compare, set QEMU, let it wait
//!                                    <-- Prepared --       (it will not run of itself: `stop` while it waits)
//!   migrate; QEMU -> sender ============================> receiver -> QEMU
//!   QEMU says completed: stopped, and all is over there
//!                                    -- Go -->             cont
//!                                    <-- Running --
//!   QEMU quits
//! ```
//!
//! Who has the VM, at every moment:
//! - Until `Go` is sent it is the source. Whatever fails before, its QEMU runs on, or is made to.
//! - The destination's QEMU runs only after `Go`, and only for the move that it was prepared for.
//! - Once `Go` is sent, the source's QEMU stays stopped, unless the destination says `NotRunning`, which it says only of a
//!   QEMU that it never told to run and, having noted so, never will. If the link breaks before an answer, the source asks
//!   again, over a new session, until it is answered; asking again does no harm. Nobody guesses: where the destination does
//!   not know whether its QEMU ran before it ended, it says so, and the user decides ([`source::take_back`]).
//! - Post-copy hands over when the source's QEMU has switched over: from then on neither half is a VM by itself, and
//!   neither is ended before the other has all.
//!
//! Disks that are served beside QEMU go along ([`disks`]): their images are closed at the source before `Go` is sent, when its
//! guest has stopped, and opened at the destination before the VM is let run. Whoever lets it run at the source again opens
//! them there first.
//!
//! Either mover may die at any moment: what it must not forget is in a [`record`] before it is done. Of the source: which
//! move, before QEMU migrates. Of the destination: which move, before QEMU waits; and that QEMU may run, before `cont`.

mod description;
pub mod destination;
pub mod disks;
pub mod folder;
mod loading;
pub mod messages;
pub mod postcopy;
pub mod record;
pub mod settings;
pub mod source;
#[cfg(test)]
mod tests;
pub mod watch;

use std::io;

pub use description::{Description, available_memory};
use serde_json::Value;

/// Of what `query-migrate` answers; `none` before the first migration.
fn status_of(migration: &Value) -> &str {
    migration["status"].as_str().unwrap_or("none")
}

/// Whether a migration of this status is not under way.
fn has_ended(status: &str) -> bool {
    matches!(status, "none" | "completed" | "failed" | "cancelled")
}

fn random_hex<const BYTES: usize>() -> io::Result<String> {
    let mut random = [0; BYTES];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut random)
        .map_err(|_| io::Error::other("there are no random numbers"))?;
    Ok(hex(&random))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
