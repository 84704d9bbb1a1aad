//! Statistics over several rounds.

/// Returns the median (the upper one of two), or NaN for no values.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Formats the lowest and the highest value.
pub(crate) fn spread(values: &[f64], digits: usize) -> String {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{low:.digits$} to {high:.digits$}")
}

/// Returns `values` divided by `others`, round by round.
pub(crate) fn ratios(values: &[f64], others: &[f64]) -> Vec<f64> {
    values.iter().zip(others).map(|(value, other)| value / other).collect()
}

/// Formats the median of the rounds' ratios, the lowest and the highest.
pub(crate) fn ratio(values: &[f64], others: &[f64]) -> String {
    let ratios = ratios(values, others);
    format!("{:.2} ({})", median(&ratios), spread(&ratios, 2))
}
