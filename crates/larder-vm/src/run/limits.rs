//! Limits on a disk's requests and bytes per second, by QEMU's names for them.

use std::collections::BTreeMap;
use std::fmt;

use crate::limits::{LimitsTextError, parse_limits};

/// QEMU's names (`-drive throttling.NAME=...`), and the older names of the same.
const NAMES: [(&str, &str); 19] = [
    ("iops-total", "iops"),
    ("iops-read", "iops_rd"),
    ("iops-write", "iops_wr"),
    ("bps-total", "bps"),
    ("bps-read", "bps_rd"),
    ("bps-write", "bps_wr"),
    ("iops-total-max", "iops_max"),
    ("iops-read-max", "iops_rd_max"),
    ("iops-write-max", "iops_wr_max"),
    ("bps-total-max", "bps_max"),
    ("bps-read-max", "bps_rd_max"),
    ("bps-write-max", "bps_wr_max"),
    ("iops-total-max-length", "iops_max_length"),
    ("iops-read-max-length", "iops_rd_max_length"),
    ("iops-write-max-length", "iops_wr_max_length"),
    ("bps-total-max-length", "bps_max_length"),
    ("bps-read-max-length", "bps_rd_max_length"),
    ("bps-write-max-length", "bps_wr_max_length"),
    ("iops-size", "iops_size"),
];

/// Every name that a limit may be given by: QEMU's, then the older ones.
pub fn names() -> impl Iterator<Item = &'static str> {
    NAMES
        .iter()
        .map(|(name, _)| *name)
        .chain(NAMES.iter().map(|(_, old)| *old))
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
        let Some((name, _)) = NAMES.iter().find(|(new, old)| name == *new || key == *old) else {
            return Taken::OtherKey;
        };
        match super::size::parse_size(value, 1) {
            Some(value) => {
                self.0.insert(name, value);
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
        assert_eq!(limits.check(), Ok(()));
        assert_eq!(
            limits.to_string(),
            "bps-read=1024,bps-read-max=1048576,iops-size=4096,iops-total=100"
        );
    }
}
