//! Counts how many cases had each feature, and each pair of features.

use std::collections::BTreeMap;
use std::fmt;

use super::random::SeededRandom;
use super::shape::{Shape, Wanted};

/// Number of rarest pairs in the report.
const RAREST_PAIRS_MAX: usize = 12;

/// Number of random shapes that determine the possible pairs.
const SHAPES: u64 = 50_000;

/// Counts of features and of pairs.
#[derive(Debug, Default)]
pub(super) struct FeatureCoverage {
    features: BTreeMap<String, u64>,
    pairs: BTreeMap<(String, String), u64>,
}

/// The counts as a table, with the possible pairs that were never seen.
pub(super) struct Table<'a> {
    coverage: &'a FeatureCoverage,
    possible: FeatureCoverage,
}

impl FeatureCoverage {
    /// Adds a case's features.
    pub(super) fn add(&mut self, features: &[String]) {
        let mut features = features.to_vec();
        features.sort();
        features.dedup();
        for (index, feature) in features.iter().enumerate() {
            *self.features.entry(feature.clone()).or_default() += 1;
            for other in &features[index + 1..] {
                *self.pairs.entry((feature.clone(), other.clone())).or_default() += 1;
            }
        }
    }

    /// Returns the table of a campaign.
    pub(super) fn table(&self, wanted: Wanted) -> Table<'_> {
        let mut possible = Self::default();
        for seed in 0..SHAPES {
            possible.add(&Shape::random(&mut SeededRandom::new(seed, 0), wanted).features());
        }
        Table { coverage: self, possible }
    }

    fn pair(&self, left: &str, right: &str) -> u64 {
        let key = if left <= right { (left, right) } else { (right, left) };
        self.pairs.get(&(key.0.to_owned(), key.1.to_owned())).copied().unwrap_or(0)
    }
}

/// Returns the kind of a feature; a case has at most one feature of certain kinds.
fn kind(feature: &str) -> &str {
    ["version", "cluster", "refcount bits", "compressed", "data file", "backing", "preallocation"]
        .into_iter()
        .find(|kind| feature.starts_with(kind))
        .unwrap_or(feature)
}

impl Table<'_> {
    /// Returns whether an image can have both features. Events, such as a kill, are possible with any feature.
    fn is_possible(&self, left: &str, right: &str) -> bool {
        let is_image_feature = |name: &str| self.possible.features.contains_key(name);
        kind(left) != kind(right)
            && (!is_image_feature(left) || !is_image_feature(right) || self.possible.pair(left, right) > 0)
    }
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FeatureCoverage { features, pairs } = self.coverage;
        writeln!(f, "{:28} {:>7} {:>18}", "feature", "images", "with others")?;
        let mut never = Vec::new();
        for (name, count) in features {
            let others: Vec<&String> = features.keys().filter(|other| self.is_possible(name, other)).collect();
            let unseen: Vec<&String> =
                others.iter().copied().filter(|other| self.coverage.pair(name, other) == 0).collect();
            let seen = format!("{} of {}", others.len() - unseen.len(), others.len());
            writeln!(f, "{name:28} {count:>7} {seen:>18}")?;
            never.extend(unseen.iter().filter(|other| **other > name).map(|other| format!("{name} + {other}")));
        }
        let missing = self.possible.features.keys().filter(|name| !features.contains_key(*name));
        let missing: Vec<&str> = missing.map(String::as_str).collect();
        if !missing.is_empty() {
            writeln!(f, "features that did not occur: {}", missing.join(", "))?;
        }
        let mut rarest: Vec<_> = pairs.iter().map(|(pair, count)| (*count, pair)).collect();
        rarest.sort();
        writeln!(f, "{} pairs of features; the rarest:", rarest.len())?;
        for (count, (left, right)) in rarest.into_iter().take(RAREST_PAIRS_MAX) {
            writeln!(f, "  {count:>5}  {left} + {right}")?;
        }
        write!(f, "{} possible pairs that did not occur: {}", never.len(), never.join("; "))
    }
}
