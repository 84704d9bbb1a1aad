//! Limits on a disk's requests and bytes per second, by QEMU's names for them.

use std::collections::BTreeMap;
use std::fmt;

use crate::limits::{LimitName, LimitsTextError, parse_limits};

/// Every name of QEMU's that a limit may be given by, then the older ones.
pub fn names() -> impl Iterator<Item = &'static str> {
    LimitName::all()
        .map(|row| row.name)
        .chain(LimitName::all().map(|row| row.old))
}

/// Limits by name. Prints as `bps-read=1048576,iops-total=100`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits(BTreeMap<&'static str, u64>);

impl Limits {
    /// Whether there are none. 0 stands for no limit, as in QEMU.
    pub fn is_empty(&self) -> bool {
        self.0.values().all(|value| *value == 0)
    }

    /// Whether they make sense together.
    ///
    /// # Errors
    /// They do not.
    pub fn check(&self) -> Result<(), LimitsTextError> {
        parse_limits(&self.to_string()).map(|_| ())
    }

    /// Takes up `key=value` if `key` is the name of a limit; otherwise, or if the value is no number, it tells.
    pub fn take(&mut self, key: &str, value: &str) -> Taken {
        let name = key.strip_prefix("throttling.").unwrap_or(key);
        // Only what QEMU takes too.
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

/// What became of a `key=value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is a limit now.
    Yes,
    /// The key is not the name of a limit.
    OtherKey,
    /// It is, but the value is not a number.
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
    fn both_kinds_of_names_mean_the_same() {
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
