//! Questions to a QEMU that is to receive a VM: whether it waits for one, and whether it has loaded one.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::status_of;
use crate::qmp::{Qmp, QmpError};

/// How long QEMU may take to have loaded all that it was sent before it is let run.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// For a question while QEMU may be busy with something else.
pub(super) const LOOK_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two looks at QEMU.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Why a VM cannot be let run.
pub(super) enum NotLoaded {
    /// It never can.
    Never(String),
    /// Not in this time.
    Late(String),
}

/// Until QEMU has all of the VM but what post-copy brings, and only its processors stand still.
pub(super) fn wait_until_loaded(qmp: &mut Qmp) -> Result<(), NotLoaded> {
    let until = Instant::now() + LOAD_TIMEOUT;
    loop {
        let looked = qmp
            .execute_within("query-migrate", json!({}), LOOK_TIMEOUT)
            .and_then(|migration| Ok((migration, qmp.execute_within("query-status", json!({}), LOOK_TIMEOUT)?)));
        let is = match looked {
            Ok((migration, run)) => {
                let state = run["status"].as_str().unwrap_or("unknown");
                match (state, status_of(&migration)) {
                    (_, "failed" | "cancelled") => {
                        let reason = migration["error-desc"].as_str().unwrap_or("it says no more");
                        return Err(NotLoaded::Never(format!("the QEMU here failed to load it: {reason}")));
                    }
                    // The last of it is still on its way to QEMU's devices.
                    ("inmigrate", _) => {}
                    (_, status) if status == "completed" || status.starts_with("postcopy-") => return Ok(()),
                    _ => {}
                }
                format!("'{state}' (migration: {})", status_of(&migration))
            }
            Err(error) if error.is_gone() => return Err(NotLoaded::Never(error.to_string())),
            Err(error) => error.to_string(),
        };
        if Instant::now() > until {
            return Err(NotLoaded::Late(format!(
                "the QEMU here has not loaded it in {} s: it is {is}",
                LOAD_TIMEOUT.as_secs()
            )));
        }
        match qmp.event(LOOK_EVERY) {
            Ok(_) => {}
            Err(error) => return Err(NotLoaded::Never(error.to_string())),
        }
    }
}

/// Whether QEMU was started to take a VM in, and was told nothing yet.
pub(super) fn is_waiting(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let migration = qmp.migration()?;
    Ok(qmp.run_state()? == "inmigrate" && status_of(&migration) == "none" && !listens(&migration))
}

/// Whether QEMU was told where a VM comes from: until somebody connects there QEMU 7.2 tells the place, and no status.
pub(super) fn listens(migration: &Value) -> bool {
    migration["socket-address"]
        .as_array()
        .is_some_and(|places| !places.is_empty())
}
