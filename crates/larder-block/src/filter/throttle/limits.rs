//! The limits of a disk, as in libvirt's `<iotune>` and QEMU's throttling.

use crate::units::ByteLen;

/// A limit per second, in bytes or requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// The long-term average; 0 for no limit. At most [`RateLimit::MAX`].
    pub average: u64,
    /// The rate during a burst (`*_max`); 0 for no bursts. Not below `average`.
    pub burst: u64,
    /// The maximum duration of a burst (`*_max_length`), in seconds; 0 means 1. Beyond 1 only with a burst.
    pub burst_seconds: u32,
}

impl RateLimit {
    /// No limit.
    pub const NONE: Self = Self { average: 0, burst: 0, burst_seconds: 0 };

    /// The maximum rate that can be set, per second.
    pub const MAX: u64 = 1_000_000_000_000_000;

    /// Returns a limit without bursts.
    pub const fn per_second(average: u64) -> Self {
        Self { average, burst: 0, burst_seconds: 0 }
    }

    fn check(self, name: &'static str) -> Result<(), ThrottleLimitError> {
        let Self { average, burst, burst_seconds } = self;
        let most = Self::MAX;
        if average.max(burst) > most {
            let value = average.max(burst);
            return Err(ThrottleLimitError::TooLarge { name, value, most });
        }
        if u128::from(burst) * u128::from(burst_seconds.max(1)) > u128::from(most) {
            return Err(ThrottleLimitError::BurstTooLarge { name, burst, seconds: burst_seconds, most });
        }
        if burst > 0 && average == 0 {
            return Err(ThrottleLimitError::BurstWithoutAverage { name });
        }
        if burst > 0 && burst < average {
            return Err(ThrottleLimitError::BurstBelowAverage { name, burst, average });
        }
        if burst_seconds > 1 && burst == 0 {
            return Err(ThrottleLimitError::LengthWithoutBurst { name });
        }
        Ok(())
    }
}

/// The limits of a disk. A total and a limit for one of its directions cannot both be set, as in libvirt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleLimits {
    /// The bytes of reads and writes together (`total_bytes_sec`).
    pub bytes_total: RateLimit,
    /// The bytes read (`read_bytes_sec`).
    pub bytes_read: RateLimit,
    /// The bytes written (`write_bytes_sec`).
    pub bytes_write: RateLimit,
    /// The number of reads and writes together (`total_iops_sec`).
    pub requests_total: RateLimit,
    /// The number of reads (`read_iops_sec`).
    pub requests_read: RateLimit,
    /// The number of writes (`write_iops_sec`).
    pub requests_write: RateLimit,
    /// The number of bytes above which a request counts as several (`size_iops_sec`); zero: each counts as one.
    pub request_size: ByteLen,
}

/// The reason why limits cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ThrottleLimitError {
    #[error("{name}: {value} is more than a limit can be, which is {most}; leave it out for no limit")]
    TooLarge { name: &'static str, value: u64, most: u64 },
    #[error("{name}: a burst of {burst}/s for {seconds} s is more than a limit can be, which is {most} in all")]
    BurstTooLarge { name: &'static str, burst: u64, seconds: u32, most: u64 },
    #[error("{name}: a burst needs an average")]
    BurstWithoutAverage { name: &'static str },
    #[error("{name}: the burst ({burst}/s) is below the average ({average}/s)")]
    BurstBelowAverage { name: &'static str, burst: u64, average: u64 },
    #[error("{name}: a burst's length needs a burst")]
    LengthWithoutBurst { name: &'static str },
    #[error("{name}: set either the total or reads and writes, not both")]
    TotalAndDirection { name: &'static str },
    #[error("a request size has an effect only together with a limit on requests")]
    RequestSizeWithoutLimit,
}

impl ThrottleLimits {
    /// No limits.
    pub const NONE: Self = Self {
        bytes_total: RateLimit::NONE,
        bytes_read: RateLimit::NONE,
        bytes_write: RateLimit::NONE,
        requests_total: RateLimit::NONE,
        requests_read: RateLimit::NONE,
        requests_write: RateLimit::NONE,
        request_size: ByteLen::ZERO,
    };

    /// Checks that the limits are valid.
    ///
    /// # Errors
    /// See [`ThrottleLimitError`].
    pub fn check(&self) -> Result<(), ThrottleLimitError> {
        self.bytes_total.check("total bytes")?;
        self.bytes_read.check("read bytes")?;
        self.bytes_write.check("write bytes")?;
        self.requests_total.check("total requests")?;
        self.requests_read.check("read requests")?;
        self.requests_write.check("write requests")?;
        let both = |total: RateLimit, read: RateLimit, write: RateLimit| {
            total.average > 0 && (read.average > 0 || write.average > 0)
        };
        if both(self.bytes_total, self.bytes_read, self.bytes_write) {
            return Err(ThrottleLimitError::TotalAndDirection { name: "bytes" });
        }
        if both(self.requests_total, self.requests_read, self.requests_write) {
            return Err(ThrottleLimitError::TotalAndDirection { name: "requests" });
        }
        let requests = [self.requests_total, self.requests_read, self.requests_write];
        if !self.request_size.is_zero() && requests.iter().all(|limit| limit.average == 0) {
            return Err(ThrottleLimitError::RequestSizeWithoutLimit);
        }
        Ok(())
    }

    pub(super) fn is_limited(&self) -> bool {
        let all = [
            self.bytes_total,
            self.bytes_read,
            self.bytes_write,
            self.requests_total,
            self.requests_read,
            self.requests_write,
        ];
        all.iter().any(|limit| limit.average > 0)
    }

    /// Returns the number of requests that a request of `bytes` counts as.
    pub(super) fn request_cost(&self, bytes: ByteLen) -> f64 {
        if self.request_size.is_zero() || bytes <= self.request_size {
            return 1.0;
        }
        bytes.get() as f64 / self.request_size.get() as f64
    }
}
