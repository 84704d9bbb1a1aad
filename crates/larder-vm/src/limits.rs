//! Limits as users write them: `iops-total=1000,bps-read=100MiB`, with the names of QEMU's `throttling.*`.

use larder_block::ByteLen;
use larder_block::filter::throttle::{Limit, LimitError, Limits};

/// The keys, for messages.
const KEYS: &str = "iops-total, iops-read, iops-write, bps-total, bps-read, bps-write, each also with -max and -max-length, and iops-size";

/// Why a list of limits is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum LimitsTextError {
    #[error("'{0}' is not KEY=VALUE, as in iops-total=1000")]
    NotAPair(String),
    #[error("'{key}' is not a limit; known are {KEYS}")]
    UnknownKey { key: String },
    #[error("{key}={value}: {why}")]
    Value { key: String, value: String, why: String },
    #[error(transparent)]
    Limit(#[from] LimitError),
}

/// Reads a comma-separated list of limits.
///
/// # Errors
/// See [`LimitsTextError`].
pub fn parse_limits(text: &str) -> Result<Limits, LimitsTextError> {
    let mut limits = Limits::NONE;
    for pair in text.split(',').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair
            .split_once('=')
            .ok_or_else(|| LimitsTextError::NotAPair(pair.to_owned()))?;
        set_limit(&mut limits, key.trim(), value.trim())?;
    }
    limits.check()?;
    Ok(limits)
}

/// Sets the limit that `key` names.
///
/// # Errors
/// The key is not known, or the value is not a number (for bytes: a size).
fn set_limit(limits: &mut Limits, key: &str, value: &str) -> Result<(), LimitsTextError> {
    let size = |value: &str| {
        value.parse::<ByteLen>().map_err(|error| LimitsTextError::Value {
            key: key.to_owned(),
            value: value.to_owned(),
            why: error.to_string(),
        })
    };
    let count = |value: &str| {
        value.parse::<u64>().map_err(|_| LimitsTextError::Value {
            key: key.to_owned(),
            value: value.to_owned(),
            why: "not a whole number".to_owned(),
        })
    };
    if key == "iops-size" {
        limits.request_size = size(value)?;
        return Ok(());
    }
    let (name, part) = match (key.strip_suffix("-max-length"), key.strip_suffix("-max")) {
        (Some(name), _) => (name, Part::Length),
        (None, Some(name)) => (name, Part::Burst),
        (None, None) => (key, Part::Average),
    };
    let limit: &mut Limit = match name {
        "iops-total" => &mut limits.requests_total,
        "iops-read" => &mut limits.requests_read,
        "iops-write" => &mut limits.requests_write,
        "bps-total" => &mut limits.bytes_total,
        "bps-read" => &mut limits.bytes_read,
        "bps-write" => &mut limits.bytes_write,
        _ => return Err(LimitsTextError::UnknownKey { key: key.to_owned() }),
    };
    let number = |value: &str| {
        if name.starts_with("bps") {
            size(value).map(ByteLen::get)
        } else {
            count(value)
        }
    };
    match part {
        Part::Average => limit.average = number(value)?,
        Part::Burst => limit.burst = number(value)?,
        Part::Length => {
            let seconds = count(value)?;
            limit.burst_seconds = u32::try_from(seconds).map_err(|_| LimitsTextError::Value {
                key: key.to_owned(),
                value: value.to_owned(),
                why: "more seconds than fit 32 bits".to_owned(),
            })?;
        }
    }
    Ok(())
}

enum Part {
    Average,
    Burst,
    Length,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_read_as_users_write_them() {
        let limits =
            parse_limits("iops-total=1000,bps-read=100MiB,bps-read-max=1GiB,bps-read-max-length=10,iops-size=64KiB")
                .expect("they make sense");
        assert_eq!(limits.requests_total, Limit::per_second(1000));
        assert_eq!(
            limits.bytes_read,
            Limit {
                average: 100 << 20,
                burst: 1 << 30,
                burst_seconds: 10
            }
        );
        assert_eq!(limits.request_size, ByteLen::kib(64));
    }

    #[test]
    fn wrong_limits_say_what_is_wrong() {
        for (text, part) in [
            ("iops", "KEY=VALUE"),
            ("iops-totl=1", "known are"),
            ("iops-total=many", "whole number"),
            ("bps-total=1XB", "unit"),
            ("iops-total=5,iops-read=5", "not both"),
            ("iops-total-max=5", "average"),
        ] {
            let error = parse_limits(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
