//! Bounds within which a host-wide balancer may move a budget.
//!
//! The bounds are those of the kernel's cgroups (`memory.min`, `low`, `high`, `max`). A budget never falls below
//! `min`, and below `low` only while the host is short of memory and all other VMs are at their `low`. It rises above
//! `high` only with memory that no other VM can use, and never above `max`.

use larder_block::ByteLen;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{BUDGET_MIN, metadata_bytes};

/// Bounds of a budget, in bytes; if all are `null`, the budget is not moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BudgetRange {
    /// Hard lower bound; by default the smallest valid budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u64>,
    /// Soft lower bound: the budget falls below it only while the host is short of memory and all other VMs are at
    /// theirs. The default is `min`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<u64>,
    /// Soft upper bound: the budget rises above it only with memory that no other VM can use. The default is `max`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<u64>,
    /// Hard upper bound; by default all of the memory with its metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
}

/// The effective bounds, with defaults filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetBounds {
    /// See [`BudgetRange::min`].
    pub min: u64,
    /// See [`BudgetRange::low`].
    pub low: u64,
    /// See [`BudgetRange::high`].
    pub high: u64,
    /// See [`BudgetRange::max`].
    pub max: u64,
}

/// Reason why a range is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum BudgetRangeError {
    #[error(
        "a budget's {lower_name} of {lower} is above its {upper_name} of {upper}; the order is min, low, high, max"
    )]
    Order { lower_name: &'static str, lower: ByteLen, upper_name: &'static str, upper: ByteLen },
    #[error("a budget's min of {min} is too small: memory of {bytes} needs at least {needed}")]
    TooSmall { min: ByteLen, needed: ByteLen, bytes: ByteLen },
    #[error("a budget of {budget} is below its min of {min}")]
    BelowMin { budget: ByteLen, min: ByteLen },
    #[error("a budget of {budget} is above its max of {max}")]
    AboveMax { budget: ByteLen, max: ByteLen },
}

/// Returns the smallest valid budget for memory of `bytes`.
pub(super) fn budget_min(bytes: u64) -> u64 {
    BUDGET_MIN.get() + metadata_bytes(bytes)
}

impl BudgetRange {
    /// Returns whether the budget may be moved.
    pub fn is_set(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the effective bounds for memory of `bytes`.
    pub fn bounds(&self, bytes: u64) -> BudgetBounds {
        let full_budget = bytes.saturating_add(budget_min(bytes));
        let largest_bound = [self.low, self.high].into_iter().flatten().max();
        let max = self.max.unwrap_or(full_budget.max(largest_bound.unwrap_or_default()));
        // Hotplugged memory may need a larger budget than a bound allows.
        let min = self.min.unwrap_or_default().max(budget_min(bytes)).min(max);
        let low = self.low.unwrap_or(min).clamp(min, max);
        let high = self.high.unwrap_or(max).clamp(low, max);
        BudgetBounds { min, low, high, max }
    }

    /// Checks the bounds for memory of `bytes` with this budget.
    ///
    /// # Errors
    /// The bounds are not in order, are too small, or do not include the budget.
    pub fn check(&self, bytes: u64, budget: u64) -> Result<(), BudgetRangeError> {
        let said = [("min", self.min), ("low", self.low), ("high", self.high), ("max", self.max)];
        let said: Vec<(&'static str, u64)> =
            said.into_iter().filter_map(|(name, bound)| Some((name, bound?))).collect();
        for pair in said.windows(2) {
            let ((lower_name, lower), (upper_name, upper)) = (pair[0], pair[1]);
            if lower > upper {
                return Err(BudgetRangeError::Order {
                    lower_name,
                    lower: ByteLen::new(lower),
                    upper_name,
                    upper: ByteLen::new(upper),
                });
            }
        }
        let needed = budget_min(bytes);
        if let Some(min) = self.min.filter(|min| *min < needed) {
            return Err(BudgetRangeError::TooSmall {
                min: ByteLen::new(min),
                needed: ByteLen::new(needed.next_multiple_of(1 << 20)),
                bytes: ByteLen::new(bytes),
            });
        }
        match (self.min, self.max) {
            (Some(min), _) if budget < min => {
                Err(BudgetRangeError::BelowMin { budget: ByteLen::new(budget), min: ByteLen::new(min) })
            }
            (_, Some(max)) if budget > max => {
                Err(BudgetRangeError::AboveMax { budget: ByteLen::new(budget), max: ByteLen::new(max) })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn range(all: [u64; 4]) -> BudgetRange {
        let [min, low, high, max] = all.map(|mib| (mib > 0).then_some(mib * MIB));
        BudgetRange { min, low, high, max }
    }

    #[test]
    fn unset_bounds_follow_the_others() {
        let of = |all: [u64; 4]| {
            let BudgetBounds { min, low, high, max } = range(all).bounds(64 * MIB);
            [min, low, high, max].map(|bytes| bytes / MIB)
        };
        assert_eq!(of([20, 30, 40, 50]), [20, 30, 40, 50]);
        assert_eq!(of([0, 30, 0, 0]), [16, 30, 80, 80]);
        assert_eq!(of([20, 0, 40, 0]), [20, 20, 40, 80]);
        assert_eq!(of([0, 0, 0, 50]), [16, 16, 50, 50]);
        assert_eq!(of([0, 0, 500, 0]), [16, 16, 500, 500]);
        assert_eq!(of([0, 0, 10, 0]), [16, 16, 16, 80]);
        for all in [[20, 0, 0, 0], [0, 0, 17, 0], [0, 1, 2, 3], [0, 90, 0, 0], [0, 0, 0, 1]] {
            let BudgetBounds { min, low, high, max } = range(all).bounds(64 * MIB);
            assert!(min <= low && low <= high && high <= max, "{all:?}");
        }
    }

    #[test]
    fn bounds_must_rise_and_include_budget() {
        let said = |all: [u64; 4], budget: u64| match range(all).check(64 * MIB, budget * MIB) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        };
        for good in [[0; 4], [20, 30, 40, 50], [20, 0, 0, 20], [0, 0, 20, 0], [0, 30, 30, 0]] {
            assert_eq!(said(good, 20), "", "{good:?}");
        }
        for (bad, budget, why) in [
            ([30, 20, 0, 0], 30, "min of 30 MiB is above its low of 20 MiB"),
            ([30, 0, 0, 20], 30, "min of 30 MiB is above its max of 20 MiB"),
            ([0, 40, 30, 0], 30, "low of 40 MiB is above its high of 30 MiB"),
            ([10, 0, 0, 0], 30, "min of 10 MiB is too small: memory of 64 MiB needs at least 17 MiB"),
            ([40, 0, 0, 0], 30, "a budget of 30 MiB is below its min of 40 MiB"),
            ([0, 0, 0, 20], 30, "a budget of 30 MiB is above its max of 20 MiB"),
        ] {
            let said = said(bad, budget);
            assert!(said.contains(why), "{bad:?}: {said}");
        }
    }
}
