//! What QEMU is told about migration, on either host: both must agree on most of it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::qmp::{Qmp, QmpError};

/// QEMU's channels for pages, at most.
pub const CHANNELS_MAX: u8 = 64;

/// What both hosts must be set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Channels for pages besides QEMU's main channel; 0: none.
    pub multifd_channels: u8,
    /// It may be ended by post-copy.
    pub postcopy: bool,
}

/// Where a QEMU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The VM is to leave it.
    Source {
        /// QEMU's `downtime-limit`, in milliseconds.
        downtime_ms: u64,
        /// It may be slowed down.
        throttle: bool,
    },
    /// The VM is to come to it.
    Destination,
}

/// How a QEMU was set before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Before {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

impl Settings {
    /// Sets a QEMU, whatever it was set to, and returns what has changed.
    ///
    /// # Errors
    /// It cannot do what is needed, or has gone.
    pub fn apply(self, qmp: &mut Qmp, role: Role) -> Result<Before, QmpError> {
        let mut before = Before::default();
        let known = qmp.capabilities()?;
        let is_known = |name: &str| known.iter().find(|(known, _)| known == name).map(|(_, on)| *on);
        let wanted = self.capabilities(role);
        let lacking = wanted.iter().find(|(name, on)| *on && is_known(name).is_none());
        if let Some((name, _)) = lacking {
            return Err(QmpError::Refused {
                command: "migrate-set-capabilities".to_owned(),
                text: format!("it knows no '{name}'"),
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
            // This one changes later, too.
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
            // So that it is heard when the guest stands still.
            ("events", true),
            // Nobody would let it go on.
            ("pause-before-switchover", false),
            // What both ends would have to be told of, and Larder has no use for.
            ("postcopy-preempt", false),
            ("switchover-ack", false),
            ("dirty-limit", false),
            // What Larder does instead, and better on pages that nobody has touched yet.
            ("xbzrle", false),
            ("compress", false),
            // What does not go through a stream that Larder could carry.
            ("rdma-pin-all", false),
            ("zero-copy-send", false),
            ("x-ignore-shared", false),
            ("mapped-ram", false),
            ("background-snapshot", false),
            ("x-colo", false),
            ("block", false),
            // The source's QEMU is to have all its memory until the VM runs at the destination.
            ("release-ram", false),
        ];
        match role {
            Role::Source { throttle, .. } => wanted.push(("auto-converge", throttle)),
            // Its images stay the source's until it runs: a source that takes the VM back could not open them otherwise.
            Role::Destination => wanted.push(("late-block-activate", true)),
        }
        wanted
    }

    fn parameters(self, role: Role) -> Vec<(&'static str, Value)> {
        let mut wanted = vec![
            ("multifd-channels", self.multifd_channels.max(1).into()),
            ("multifd-compression", "none".into()),
            // Larder encrypts.
            ("tls-creds", "".into()),
            ("mode", "normal".into()),
        ];
        if let Role::Source { downtime_ms, .. } = role {
            // The cap is Larder's; what QEMU measures is then what Larder takes.
            wanted.push(("max-bandwidth", (i64::MAX / 4).into()));
            wanted.push(("max-postcopy-bandwidth", 0.into()));
            wanted.push(("downtime-limit", downtime_ms.into()));
            // Times the limit it would be what may be left.
            wanted.push(("avail-switchover-bandwidth", 0.into()));
        }
        wanted
    }
}

impl Before {
    /// Sets it as it was. What cannot be set is not worth more than a word: the VM has what it needs.
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
            tracing::warn!("QEMU's settings for migration are not as they were before: {error}");
        }
    }
}
