//! What a method did with the pages of a class.

use crate::PAGE;

/// Moving averages of pages, those of one batch as one observation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Average {
    /// Left of a page.
    pub(super) bytes: f32,
    /// For a page.
    pub(super) ns: f32,
    /// Up to [`Self::BATCHES_MAX`].
    batches: f32,
}

impl Average {
    /// That an average is of, in effect.
    const BATCHES_MAX: f32 = 16.0;
    /// How many batches what is expected counts as.
    const EXPECTED: f32 = 0.2;

    /// Of each byte `left` are left, after so long.
    pub(super) fn expected((left, ns_per_byte): (f32, f32)) -> Self {
        Self {
            bytes: left * PAGE as f32,
            ns: ns_per_byte * PAGE as f32,
            batches: Self::EXPECTED,
        }
    }

    pub(super) fn record(&mut self, bytes: f32, ns: f32) {
        // A thread that lost its CPU meanwhile says nothing about the method.
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
    fn an_interruption_counts_as_little_and_no_record_is_too_much() {
        let mut average = Average::expected((0.03, 0.15));
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
