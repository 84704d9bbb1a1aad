//! Moving averages of a method's results for a class of pages.

use crate::PAGE;

/// Moving averages per page, in which each batch counts as one observation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Average {
    /// Remaining bytes of a page.
    pub(super) bytes: f32,
    /// Nanoseconds for a page.
    pub(super) ns: f32,
    /// Number of observed batches, up to [`Self::BATCHES_MAX`].
    batches: f32,
}

impl Average {
    /// Number of batches that an average effectively covers.
    const BATCHES_MAX: f32 = 16.0;
    /// Weight of the initial expectation, in batches.
    const EXPECTATION_BATCHES: f32 = 0.2;

    /// Creates averages from an expectation: the remaining share of each byte, and the nanoseconds for it.
    pub(super) fn from_expectation((left, ns_per_byte): (f32, f32)) -> Self {
        Self { bytes: left * PAGE as f32, ns: ns_per_byte * PAGE as f32, batches: Self::EXPECTATION_BATCHES }
    }

    pub(super) fn record(&mut self, bytes: f32, ns: f32) {
        // The thread may have lost its CPU meanwhile, which must not count for the method.
        let ns = ns.clamp(1.0, 4.0 * self.ns);
        self.batches = (self.batches + 1.0).min(Self::BATCHES_MAX);
        self.bytes += (bytes - self.bytes) / self.batches;
        self.ns += (ns - self.ns) / self.batches;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn average_tolerates_extreme_records() {
        let mut average = Average::from_expectation((0.03, 0.15));
        for _ in 0..100 {
            average.record(1000.0, 4000.0);
        }
        average.record(1000.0, 5e9);
        assert!(average.ns < 5000.0, "{average:?}");
        for _ in 0..100 {
            average.record(PAGE as f32, f32::MAX);
            average.record(1.0, 0.0);
        }
        assert!(average.ns.is_finite() && average.ns >= 1.0);
    }
}
