//! Migration settings of QEMU on either host; both hosts must agree on most of them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::qmp::{Qmp, QmpError};

/// Maximum multifd channels of QEMU.
pub const CHANNELS_MAX: u8 = 64;

/// Settings that both hosts must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Number of multifd channels, in addition to QEMU's main channel; 0: none.
    pub multifd_channels: u8,
    /// True if the migration may be ended by post-copy.
    pub postcopy: bool,
}

/// Side of a migration that a QEMU is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The VM leaves this QEMU.
    Source {
        /// QEMU's `downtime-limit`, in milliseconds.
        downtime_ms: u64,
        /// True if the guest may be throttled.
        throttle: bool,
    },
    /// The VM enters this QEMU.
    Destination,
}

/// Previous values of the settings that were changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Before {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

impl Settings {
    /// Applies the settings to a QEMU, whatever its current ones, and returns the previous values.
    ///
    /// # Errors
    /// QEMU lacks a needed capability, refuses, or has exited.
    pub fn apply(self, qmp: &mut Qmp, role: Role) -> Result<Before, QmpError> {
        let mut before = Before::default();
        let known = qmp.capabilities()?;
        let is_known = |name: &str| known.iter().find(|(known, _)| known == name).map(|(_, on)| *on);
        let wanted = self.capabilities(role);
        let lacking = wanted.iter().find(|(name, on)| *on && is_known(name).is_none());
        if let Some((name, _)) = lacking {
            return Err(QmpError::Refused {
                command: "migrate-set-capabilities".to_owned(),
                text: format!("it has no capability '{name}'"),
            });
        }
        let mut changes = Vec::new();
        for (name, on) in wanted {
            if let Some(was) = is_known(name).filter(|was| *was != on) {
                changes.push((name.to_owned(), on));
                before.capabilities.push((name.to_owned(), was));
            }
        }
        if !changes.is_empty() {
            qmp.set_capabilities(&changes)?;
        }
        let is = match qmp.execute("query-migrate-parameters", json!({})) {
            Ok(is) => is,
            Err(error) => {
                before.restore(qmp);
                return Err(error);
            }
        };
        let mut changes = Map::new();
        for (name, value) in self.parameters(role) {
            let Some(was) = is.get(name) else { continue };
            // This parameter is also changed later, during the move.
            if *was != value || name == "downtime-limit" {
                before.parameters.insert(name.to_owned(), was.clone());
                changes.insert(name.to_owned(), value);
            }
        }
        if !changes.is_empty()
            && let Err(error) = qmp.execute("migrate-set-parameters", changes.into())
        {
            before.parameters.clear();
            before.restore(qmp);
            return Err(error);
        }
        Ok(before)
    }

    fn capabilities(self, role: Role) -> Vec<(&'static str, bool)> {
        let mut wanted = vec![
            ("return-path", true),
            ("multifd", self.multifd_channels > 0),
            ("postcopy-ram", self.postcopy),
            // So that an event reports when the guest is paused.
            ("events", true),
            // No client would continue the migration after the pause.
            ("pause-before-switchover", false),
            // Both ends would have to be prepared for these, and Larder has no use for them.
            ("postcopy-preempt", false),
            ("switchover-ack", false),
            ("dirty-limit", false),
            // Larder does this itself, and does it better on pages that QEMU has not encoded.
            ("xbzrle", false),
            ("compress", false),
            // These do not use a stream that Larder could carry.
            ("rdma-pin-all", false),
            ("zero-copy-send", false),
            ("x-ignore-shared", false),
            ("mapped-ram", false),
            ("background-snapshot", false),
            ("x-colo", false),
            ("block", false),
            // The source's QEMU must keep all its memory until the VM runs at the destination.
            ("release-ram", false),
        ];
        match role {
            Role::Source { throttle, .. } => wanted.push(("auto-converge", throttle)),
            // The images stay the source's until the VM runs: otherwise a source that takes the VM back could not
            // open them.
            Role::Destination => wanted.push(("late-block-activate", true)),
        }
        wanted
    }

    fn parameters(self, role: Role) -> Vec<(&'static str, Value)> {
        let mut wanted = vec![
            ("multifd-channels", self.multifd_channels.max(1).into()),
            ("multifd-compression", "none".into()),
            // Larder encrypts the connection.
            ("tls-creds", "".into()),
            ("mode", "normal".into()),
        ];
        if let Role::Source { downtime_ms, .. } = role {
            // Larder limits the bandwidth, so that QEMU measures the rate at which Larder accepts bytes.
            wanted.push(("max-bandwidth", (i64::MAX / 4).into()));
            wanted.push(("max-postcopy-bandwidth", 0.into()));
            wanted.push(("downtime-limit", downtime_ms.into()));
            // If set, this value times the limit would be the bytes that may remain, whatever QEMU measures.
            wanted.push(("avail-switchover-bandwidth", 0.into()));
        }
        wanted
    }
}

impl Before {
    /// Restores the settings. A failure is only logged, because the VM has what it needs.
    pub fn restore(&self, qmp: &mut Qmp) {
        let mut result = Ok(());
        if !self.capabilities.is_empty() {
            result = qmp.set_capabilities(&self.capabilities);
        }
        if !self.parameters.is_empty() {
            let parameters = qmp.execute("migrate-set-parameters", self.parameters.clone().into());
            result = result.and(parameters.map(|_| ()));
        }
        if let Err(error) = result {
            tracing::warn!("QEMU's migration settings could not be restored: {error}");
        }
    }
}
