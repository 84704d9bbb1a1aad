//! Limits on a disk's requests and bytes per second, under QEMU's names.

use std::collections::BTreeMap;
use std::fmt;

use crate::limits::{LimitName, LimitsTextError, parse_limits};

/// Returns QEMU's current names of all limits, then QEMU's older ones.
pub fn names() -> impl Iterator<Item = &'static str> {
    LimitName::all().map(|row| row.name).chain(LimitName::all().map(|row| row.legacy_name))
}

/// Limits by name. Prints as `bps-read=1048576,iops-total=100`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedLimits(BTreeMap<&'static str, u64>);

impl NamedLimits {
    /// Returns whether no limit is set. 0 means no limit, as in QEMU.
    pub fn is_empty(&self) -> bool {
        self.0.values().all(|value| *value == 0)
    }

    /// Checks that the limits are consistent.
    ///
    /// # Errors
    /// The limits contradict each other.
    pub fn check(&self) -> Result<(), LimitsTextError> {
        parse_limits(&self.to_string()).map(|_| ())
    }

    /// Sets the limit `key` to `value`, if `key` names a limit and `value` is a number.
    pub fn set(&mut self, key: &str, value: &str) -> SetOutcome {
        let name = key.strip_prefix("throttling.").unwrap_or(key);
        // This accepts only names that QEMU accepts.
        let Some(row) = LimitName::all().find(|row| name == row.name || key == row.legacy_name) else {
            return SetOutcome::UnknownKey;
        };
        match crate::run::size::parse_size(value, 1) {
            Some(value) => {
                self.0.insert(row.name, value);
                SetOutcome::Set
            }
            None => SetOutcome::BadValue,
        }
    }
}

/// Result of setting `key=value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetOutcome {
    /// The limit is set.
    Set,
    /// The key does not name a limit.
    UnknownKey,
    /// The key names a limit, but the value is not a number.
    BadValue,
}

impl fmt::Display for NamedLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set: Vec<String> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&set.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_names_set_same_limits() {
        let mut limits = NamedLimits::default();
        assert!(limits.is_empty());
        assert_eq!(limits.set("throttling.iops-total", "100"), SetOutcome::Set);
        assert_eq!(limits.set("bps_rd_max", "1M"), SetOutcome::Set);
        assert!(limits.check().is_err(), "a burst without an average");
        assert_eq!(limits.set("bps_rd", "1k"), SetOutcome::Set);
        assert_eq!(limits.set("iops-size", "4096"), SetOutcome::Set);
        assert_eq!(limits.set("file", "x"), SetOutcome::UnknownKey);
        assert_eq!(limits.set("throttling.group", "x"), SetOutcome::UnknownKey);
        assert_eq!(limits.set("iops", "many"), SetOutcome::BadValue);
        assert_eq!(limits.set("total_iops_sec", "1"), SetOutcome::UnknownKey);
        assert_eq!(limits.check(), Ok(()));
        assert_eq!(limits.to_string(), "bps-read=1024,bps-read-max=1048576,iops-size=4096,iops-total=100");
        assert_eq!(NamedLimits::default().check(), Ok(()));
    }
}
