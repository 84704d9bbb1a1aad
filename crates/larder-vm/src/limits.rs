//! Textual limits of a disk: `iops-total=1000,bps-read=100MiB`, under QEMU's names, QEMU's older names, or libvirt's.

use larder_block::ByteLen;
use larder_block::filter::throttle::{RateLimit, ThrottleLimitError, ThrottleLimits};

/// Reason why a list of limits is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum LimitsTextError {
    #[error("no limit is given; write KEY=VALUE, as in iops-total=1000")]
    Empty,
    #[error("'{0}' is not KEY=VALUE, as in iops-total=1000")]
    NotAPair(String),
    #[error("'{key}' is not a limit; known are {}", known_names())]
    UnknownKey { key: String },
    #[error("{key}: {name} has a value already")]
    Duplicate { key: String, name: &'static str },
    #[error("{key}={value}: {why}")]
    Value { key: String, value: String, why: String },
    #[error(transparent)]
    Limit(#[from] ThrottleLimitError),
}

/// Lists the known names, for messages.
fn known_names() -> String {
    let plain = LIMIT_NAMES.iter().filter(|row| row.part == LimitPart::Average).map(|row| row.name);
    let plain: Vec<&str> = plain.collect();
    format!("{}, each also with -max and -max-length, and iops-size", plain.join(", "))
}

/// A kind of limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitName {
    /// QEMU's name (`-drive throttling.NAME=...`).
    pub name: &'static str,
    /// QEMU's older name (`-drive NAME=...`), with underscores.
    pub legacy_name: &'static str,
    /// libvirt's name (`<iotune>`).
    libvirt: &'static str,
    quantity: LimitedQuantity,
    part: LimitPart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitedQuantity {
    RequestsTotal,
    RequestsRead,
    RequestsWrite,
    BytesTotal,
    BytesRead,
    BytesWrite,
    RequestSize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitPart {
    Average,
    Burst,
    Length,
    /// A size in bytes, not a rate.
    Size,
}

const fn row(
    name: &'static str,
    legacy_name: &'static str,
    libvirt: &'static str,
    quantity: LimitedQuantity,
    part: LimitPart,
) -> LimitName {
    LimitName { name, legacy_name, libvirt, quantity, part }
}

/// All kinds of limit, with all their names.
#[rustfmt::skip]
const LIMIT_NAMES: [LimitName; 19] = {
    use LimitPart::{Average, Burst, Length, Size};
    use LimitedQuantity::{BytesRead, BytesTotal, BytesWrite, RequestSize, RequestsRead, RequestsTotal, RequestsWrite};
    [
        row("iops-total", "iops", "total_iops_sec", RequestsTotal, Average),
        row("iops-read", "iops_rd", "read_iops_sec", RequestsRead, Average),
        row("iops-write", "iops_wr", "write_iops_sec", RequestsWrite, Average),
        row("bps-total", "bps", "total_bytes_sec", BytesTotal, Average),
        row("bps-read", "bps_rd", "read_bytes_sec", BytesRead, Average),
        row("bps-write", "bps_wr", "write_bytes_sec", BytesWrite, Average),
        row("iops-total-max", "iops_max", "total_iops_sec_max", RequestsTotal, Burst),
        row("iops-read-max", "iops_rd_max", "read_iops_sec_max", RequestsRead, Burst),
        row("iops-write-max", "iops_wr_max", "write_iops_sec_max", RequestsWrite, Burst),
        row("bps-total-max", "bps_max", "total_bytes_sec_max", BytesTotal, Burst),
        row("bps-read-max", "bps_rd_max", "read_bytes_sec_max", BytesRead, Burst),
        row("bps-write-max", "bps_wr_max", "write_bytes_sec_max", BytesWrite, Burst),
        row("iops-total-max-length", "iops_max_length", "total_iops_sec_max_length", RequestsTotal, Length),
        row("iops-read-max-length", "iops_rd_max_length", "read_iops_sec_max_length", RequestsRead, Length),
        row("iops-write-max-length", "iops_wr_max_length", "write_iops_sec_max_length", RequestsWrite, Length),
        row("bps-total-max-length", "bps_max_length", "total_bytes_sec_max_length", BytesTotal, Length),
        row("bps-read-max-length", "bps_rd_max_length", "read_bytes_sec_max_length", BytesRead, Length),
        row("bps-write-max-length", "bps_wr_max_length", "write_bytes_sec_max_length", BytesWrite, Length),
        row("iops-size", "iops_size", "size_iops_sec", RequestSize, Size),
    ]
};

impl LimitName {
    /// Returns all kinds of limit.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        LIMIT_NAMES.iter()
    }

    /// Returns the kind of limit with any name `key`; dashes and underscores are equivalent.
    pub fn find(key: &str) -> Option<&'static Self> {
        let key = key.replace('-', "_");
        LIMIT_NAMES.iter().find(|row| key == row.name.replace('-', "_") || key == row.legacy_name || key == row.libvirt)
    }

    fn limit(self, limits: &mut ThrottleLimits) -> Option<&mut RateLimit> {
        Some(match self.quantity {
            LimitedQuantity::RequestsTotal => &mut limits.requests_total,
            LimitedQuantity::RequestsRead => &mut limits.requests_read,
            LimitedQuantity::RequestsWrite => &mut limits.requests_write,
            LimitedQuantity::BytesTotal => &mut limits.bytes_total,
            LimitedQuantity::BytesRead => &mut limits.bytes_read,
            LimitedQuantity::BytesWrite => &mut limits.bytes_write,
            LimitedQuantity::RequestSize => return None,
        })
    }

    /// Returns whether the value is in bytes, and so may have a unit.
    fn is_in_bytes(self) -> bool {
        let counts_bytes = matches!(
            self.quantity,
            LimitedQuantity::BytesTotal | LimitedQuantity::BytesRead | LimitedQuantity::BytesWrite
        );
        self.part == LimitPart::Size || (counts_bytes && self.part != LimitPart::Length)
    }

    /// Parses a value; an error is a message for the user.
    fn parse_value(self, value: &str) -> Result<u64, String> {
        let max = RateLimit::MAX;
        if !value.is_empty() && value.chars().all(|c| c.is_ascii_digit()) && value.parse::<u64>().is_err() {
            return Err(format!("more than a limit can be, which is {max}; leave it out for no limit"));
        }
        if self.is_in_bytes() {
            return match value.parse::<ByteLen>() {
                Ok(bytes) => Ok(bytes.get()),
                Err(larder_block::SizeError::TooLarge(_)) => {
                    Err(format!("more than a limit can be, which is {max} bytes; leave it out for no limit"))
                }
                Err(error) => Err(error.to_string()),
            };
        }
        value.parse().map_err(|_| "not a whole number".to_owned())
    }

    fn get(self, limits: &ThrottleLimits) -> u64 {
        let Some(limit) = self.limit(&mut limits.clone()).copied() else {
            return limits.request_size.get();
        };
        match self.part {
            LimitPart::Average | LimitPart::Size => limit.average,
            LimitPart::Burst => limit.burst,
            LimitPart::Length => limit.burst_seconds.into(),
        }
    }

    fn set(self, limits: &mut ThrottleLimits, value: u64) -> Result<(), String> {
        let Some(limit) = self.limit(limits) else {
            limits.request_size = ByteLen::new(value);
            return Ok(());
        };
        match self.part {
            LimitPart::Average | LimitPart::Size => limit.average = value,
            LimitPart::Burst => limit.burst = value,
            LimitPart::Length => {
                limit.burst_seconds = u32::try_from(value).map_err(|_| "more seconds than fit 32 bits")?
            }
        }
        Ok(())
    }
}

/// Returns all limits that are set, under QEMU's names; sizes are in bytes.
pub fn named_limits(limits: &ThrottleLimits) -> impl Iterator<Item = (&'static str, u64)> {
    let all = LIMIT_NAMES.iter().map(move |row| (row.name, row.get(limits)));
    all.filter(|(_, value)| *value > 0)
}

/// Parses a list of at least one limit.
///
/// # Errors
/// See [`LimitsTextError`].
pub fn parse_nonempty_limits(text: &str) -> Result<ThrottleLimits, LimitsTextError> {
    match text.trim() {
        "" => Err(LimitsTextError::Empty),
        text => parse_limits(text),
    }
}

/// Parses a comma-separated list of limits, which may be empty. 0 means no limit, as in QEMU.
///
/// # Errors
/// See [`LimitsTextError`].
pub fn parse_limits(text: &str) -> Result<ThrottleLimits, LimitsTextError> {
    if text.is_empty() {
        return Ok(ThrottleLimits::NONE);
    }
    let mut limits = ThrottleLimits::NONE;
    let mut seen_names: Vec<&str> = Vec::new();
    for pair in text.split(',') {
        let (key, value) = pair.split_once('=').ok_or_else(|| LimitsTextError::NotAPair(pair.to_owned()))?;
        let (key, value) = (key.trim(), value.trim());
        let Some(row) = LimitName::find(key) else {
            return Err(LimitsTextError::UnknownKey { key: key.to_owned() });
        };
        if seen_names.contains(&row.name) {
            return Err(LimitsTextError::Duplicate { key: key.to_owned(), name: row.name });
        }
        seen_names.push(row.name);
        let parsed = row.parse_value(value);
        parsed.and_then(|value| row.set(&mut limits, value)).map_err(|why| LimitsTextError::Value {
            key: key.to_owned(),
            value: value.to_owned(),
            why,
        })?;
    }
    limits.check()?;
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_parsed_with_units() {
        let limits =
            parse_limits("iops-total=1000,bps-read=100MiB,bps-read-max=1GiB,bps-read-max-length=10,iops-size=64KiB")
                .expect("they make sense");
        assert_eq!(limits.requests_total, RateLimit::per_second(1000));
        assert_eq!(limits.bytes_read, RateLimit { average: 100 << 20, burst: 1 << 30, burst_seconds: 10 });
        assert_eq!(limits.request_size, ByteLen::kib(64));
    }

    #[test]
    fn all_limit_names_are_equivalent() {
        let same = |names: &[&str]| {
            let found: Vec<_> = names.iter().map(|name| LimitName::find(name)).collect();
            assert!(found[0].is_some() && found.iter().all(|row| *row == found[0]), "{names:?}");
        };
        same(&["iops-total", "iops_total", "iops", "total_iops_sec"]);
        same(&["bps-total", "bps_total", "bps", "total-bytes-sec"]);
        same(&["bps-read-max", "bps_read_max", "bps_rd_max", "bps-rd-max", "read_bytes_sec_max"]);
        same(&["iops-write-max-length", "iops_wr_max_length", "write_iops_sec_max_length"]);
        same(&["iops-size", "iops_size", "size_iops_sec"]);
        assert_eq!(LimitName::find("iopsx"), None);
        let mut names: Vec<String> = LimitName::all()
            .flat_map(|row| [row.name.replace('-', "_"), row.legacy_name.to_owned(), row.libvirt.to_owned()])
            .collect();
        names.sort();
        // Both of QEMU's names for the request size are the same with underscores.
        assert_eq!(names.windows(2).filter(|pair| pair[0] == pair[1]).count(), 1, "{names:?}");
    }

    #[test]
    fn invalid_limits_give_specific_errors() {
        for (text, part) in [
            ("", "no limit is given"),
            (" ", "no limit is given"),
            ("iops", "KEY=VALUE"),
            ("iops=1,", "KEY=VALUE"),
            ("iops-totl=1", "known are iops-total, "),
            ("iops-total=many", "whole number"),
            ("iops-total=1.5", "whole number"),
            ("iops-total=", "whole number"),
            ("bps-total=1XB", "unit"),
            ("bps-total=1.5G", "smaller unit"),
            ("bps-total=99999999999T", "more than a limit can be, which is 1000000000000000"),
            ("bps-total=99999999999999999999999", "more than a limit can be"),
            ("iops-total=99999999999999999999999", "more than a limit can be"),
            ("bps-total=1000000000000001", "more than a limit can be"),
            ("bps=1G,bps-max=1000G,bps-max-length=1000000", "in all"),
            ("iops=1,iops-max=2,iops-max-length=4294967296", "32 bits"),
            ("iops-total=5,iops-read=5", "not both"),
            ("iops-total=5,iops=6", "iops: iops-total has a value already"),
            ("iops-total=5,iops_total=5", "already"),
            ("iops-total-max=5", "average"),
            ("iops-size=4096", "only together with a limit on requests"),
            ("bps=5,iops-size=4096", "only together with a limit on requests"),
        ] {
            let error = parse_nonempty_limits(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
