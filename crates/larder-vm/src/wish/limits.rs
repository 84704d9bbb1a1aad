//! Limits on a disk's requests and bytes per second, under QEMU's names.

use std::collections::BTreeMap;
use std::fmt;

use crate::limits::{LimitName, LimitsTextError, parse_limits};

/// Returns QEMU's current names of all limits, then QEMU's older ones.
pub fn names() -> impl Iterator<Item = &'static str> {
    LimitName::all()
        .map(|row| row.name)
        .chain(LimitName::all().map(|row| row.old))
}

/// Limits by name. Prints as `bps-read=1048576,iops-total=100`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits(BTreeMap<&'static str, u64>);

impl Limits {
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
    pub fn take(&mut self, key: &str, value: &str) -> Taken {
        let name = key.strip_prefix("throttling.").unwrap_or(key);
        // This accepts only names that QEMU accepts.
        let Some(row) = LimitName::all().find(|row| name == row.name || key == row.old) else {
            return Taken::OtherKey;
        };
        match crate::run::size::parse_size(value, 1) {
            Some(value) => {
                self.0.insert(row.name, value);
                Taken::Yes
            }
            None => Taken::BadValue,
        }
    }
}

/// Result of setting `key=value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The limit is set.
    Yes,
    /// The key does not name a limit.
    OtherKey,
    /// The key names a limit, but the value is not a number.
    BadValue,
}

impl fmt::Display for Limits {
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
        let mut limits = Limits::default();
        assert!(limits.is_empty());
        assert_eq!(limits.take("throttling.iops-total", "100"), Taken::Yes);
        assert_eq!(limits.take("bps_rd_max", "1M"), Taken::Yes);
        assert!(limits.check().is_err(), "a burst without an average");
        assert_eq!(limits.take("bps_rd", "1k"), Taken::Yes);
        assert_eq!(limits.take("iops-size", "4096"), Taken::Yes);
        assert_eq!(limits.take("file", "x"), Taken::OtherKey);
        assert_eq!(limits.take("throttling.group", "x"), Taken::OtherKey);
        assert_eq!(limits.take("iops", "many"), Taken::BadValue);
        assert_eq!(limits.take("total_iops_sec", "1"), Taken::OtherKey);
        assert_eq!(limits.check(), Ok(()));
        assert_eq!(
            limits.to_string(),
            "bps-read=1024,bps-read-max=1048576,iops-size=4096,iops-total=100"
        );
        assert_eq!(Limits::default().check(), Ok(()));
    }
}
