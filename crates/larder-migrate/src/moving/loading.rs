//! Queries to a QEMU that is to receive a VM: whether it waits for one, and whether it has loaded one.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::status_of;
use crate::qmp::{Qmp, QmpError};

/// Time limit for QEMU to load everything that it was sent, before `cont`.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a query while QEMU may be busy.
pub(super) const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which QEMU is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Reasons why a VM cannot be started.
pub(super) enum NotLoaded {
    /// The VM can never be started.
    Never(String),
    /// QEMU has not loaded the VM in time.
    Timeout(String),
}

/// Waits until QEMU has loaded the VM, except memory that arrives by post-copy, so that only its processors are
/// stopped.
pub(super) fn wait_until_loaded(qmp: &mut Qmp) -> Result<(), NotLoaded> {
    let until = Instant::now() + LOAD_TIMEOUT;
    loop {
        let queried = qmp
            .execute_within("query-migrate", json!({}), QUERY_TIMEOUT)
            .and_then(|migration| Ok((migration, qmp.execute_within("query-status", json!({}), QUERY_TIMEOUT)?)));
        let is = match queried {
            Ok((migration, run)) => {
                let state = run["status"].as_str().unwrap_or("unknown");
                match (state, status_of(&migration)) {
                    (_, "failed" | "cancelled") => {
                        let reason = migration["error-desc"].as_str().unwrap_or("it gives no reason");
                        return Err(NotLoaded::Never(format!(
                            "the destination's QEMU failed to load the VM: {reason}"
                        )));
                    }
                    // QEMU is still passing the last of the state to its devices.
                    ("inmigrate", _) => {}
                    (_, status) if status == "completed" || status.starts_with("postcopy-") => return Ok(()),
                    _ => {}
                }
                format!("'{state}' (migration: {})", status_of(&migration))
            }
            Err(error) if error.is_disconnected() => return Err(NotLoaded::Never(error.to_string())),
            Err(error) => error.to_string(),
        };
        if Instant::now() > until {
            return Err(NotLoaded::Timeout(format!(
                "the destination's QEMU has not loaded the VM in {} s: {is}",
                LOAD_TIMEOUT.as_secs()
            )));
        }
        match qmp.event(POLL_INTERVAL) {
            Ok(_) => {}
            Err(error) => return Err(NotLoaded::Never(error.to_string())),
        }
    }
}

/// Returns true if QEMU was started to receive a VM and does not listen for one yet.
pub(super) fn is_waiting(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let migration = qmp.migration()?;
    Ok(qmp.run_state()? == "inmigrate" && status_of(&migration) == "none" && !is_listening(&migration))
}

/// Returns true if QEMU listens for a VM. Until a sender connects, QEMU 7.2 reports the address, but no status.
pub(super) fn is_listening(migration: &Value) -> bool {
    migration["socket-address"].as_array().is_some_and(|addresses| !addresses.is_empty())
}
