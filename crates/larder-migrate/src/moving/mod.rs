//! Mover of a VM: the control of QEMU through its monitor on both hosts, and the protocol between the two movers.
//!
//! ```text
//! source: larder migrate VM --to HOST                    destination: larder migrate receive --qmp
//!   describe QEMU                    -- Prepare -->        compare, configure QEMU, make it wait
//!                                    <-- Prepared --       (it does not run by itself: `stop` while it waits)
//!   migrate; QEMU -> sender ============================> receiver -> QEMU
//!   QEMU reports completed: the guest is stopped, and all has arrived
//!                                    -- Go -->             cont
//!                                    <-- Running --
//!   QEMU quits
//! ```
//!
//! Owner of the VM, at every moment:
//! - Until `Go` is sent, it is the source. Whatever fails before, its QEMU runs on, or is resumed.
//! - The destination's QEMU runs only after `Go`, and only for the move that it was prepared for.
//! - Once `Go` is sent, the source's QEMU stays stopped unless the destination answers `NotRunning`. The destination
//!   answers this only for a QEMU that has never run the VM and, having recorded so, never will. If the link breaks
//!   before an answer, the source repeats `Go` over new sessions until it is answered; repeating it is harmless.
//!   Neither side guesses: where the destination does not know whether its QEMU ran before it exited, it reports
//!   that, and the user decides ([`source::take_back`]).
//! - Post-copy hands over when the source's QEMU has switched over. From then on neither half is a VM by itself, and
//!   neither is ended before the other has everything.
//!
//! Disks that are served beside QEMU move along ([`disks`]). Their images are closed at the source once its guest has
//! stopped, before `Go` is sent, and opened at the destination before the VM is started. Before the VM is started at
//! the source again, they are opened there first.
//!
//! Either mover may be killed at any moment. Before each irreversible step, the state that must survive is saved in a
//! [`record`]. At the source: the number of the move, before QEMU migrates. At the destination: the number of the
//! move, before QEMU waits; and that QEMU may run, before `cont`.

mod description;
pub mod destination;
pub mod disks;
mod loading;
pub mod messages;
pub mod postcopy;
pub mod record;
pub mod settings;
pub mod socket_dir;
pub mod source;
#[cfg(test)]
mod tests;
pub mod watch;

use std::io;

pub use description::{Description, available_memory};
use serde_json::Value;

/// Returns the status in an answer of `query-migrate`; `none` before the first migration.
fn status_of(migration: &Value) -> &str {
    migration["status"].as_str().unwrap_or("none")
}

/// Returns true if no migration is in progress at this status.
fn has_ended(status: &str) -> bool {
    matches!(status, "none" | "completed" | "failed" | "cancelled")
}

fn random_hex<const BYTES: usize>() -> io::Result<String> {
    let mut random = [0; BYTES];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut random)
        .map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(hex(&random))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
