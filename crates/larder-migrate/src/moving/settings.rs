//! Migration settings of QEMU on either host; both hosts must agree on most of them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::qmp::{Qmp, QmpError};

/// Maximum multifd channels of QEMU.
pub const CHANNELS_MAX: u8 = 64;

/// Settings that both hosts must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct QemuMigrationSettings {
    /// Number of multifd channels, in addition to QEMU's main channel; 0: none.
    pub multifd_channels: u8,
    /// True if the migration may be ended by post-copy.
    pub postcopy: bool,
}

/// Side of a migration that a QEMU is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationRole {
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
pub struct PreviousSettings {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

impl QemuMigrationSettings {
    /// Applies the settings to a QEMU, whatever its current ones, and returns the previous values.
    ///
    /// # Errors
    /// QEMU lacks a needed capability, refuses, or has exited.
    pub fn apply(self, qmp: &mut Qmp, role: MigrationRole) -> Result<PreviousSettings, QmpError> {
        let mut previous = PreviousSettings::default();
        let known = qmp.capabilities()?;
        let current = |name: &str| known.iter().find(|(known, _)| known == name).map(|(_, on)| *on);
        let wanted = self.capabilities(role);
        let missing = wanted.iter().find(|(name, on)| *on && current(name).is_none());
        if let Some((name, _)) = missing {
            return Err(QmpError::Refused {
                command: "migrate-set-capabilities".to_owned(),
                text: format!("it has no capability '{name}'"),
            });
        }
        let mut changes = Vec::new();
        for (name, on) in wanted {
            if let Some(old) = current(name).filter(|was| *was != on) {
                changes.push((name.to_owned(), on));
                previous.capabilities.push((name.to_owned(), old));
            }
        }
        if !changes.is_empty() {
            qmp.set_capabilities(&changes)?;
        }
        let current = match qmp.execute("query-migrate-parameters", json!({})) {
            Ok(current) => current,
            Err(error) => {
                previous.restore(qmp);
                return Err(error);
            }
        };
        let mut changes = Map::new();
        for (name, value) in self.parameters(role) {
            let Some(old) = current.get(name) else { continue };
            // This parameter is also changed later, during the move.
            if *old != value || name == "downtime-limit" {
                previous.parameters.insert(name.to_owned(), old.clone());
                changes.insert(name.to_owned(), value);
            }
        }
        if !changes.is_empty()
            && let Err(error) = qmp.execute("migrate-set-parameters", changes.into())
        {
            previous.parameters.clear();
            previous.restore(qmp);
            return Err(error);
        }
        Ok(previous)
    }

    fn capabilities(self, role: MigrationRole) -> Vec<(&'static str, bool)> {
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
            MigrationRole::Source { throttle, .. } => wanted.push(("auto-converge", throttle)),
            // The images stay the source's until the VM runs: otherwise a source that takes the VM back could not
            // open them.
            MigrationRole::Destination => wanted.push(("late-block-activate", true)),
        }
        wanted
    }

    fn parameters(self, role: MigrationRole) -> Vec<(&'static str, Value)> {
        let mut wanted = vec![
            ("multifd-channels", self.multifd_channels.max(1).into()),
            ("multifd-compression", "none".into()),
            // Larder encrypts the connection.
            ("tls-creds", "".into()),
            ("mode", "normal".into()),
        ];
        if let MigrationRole::Source { downtime_ms, .. } = role {
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

impl PreviousSettings {
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
