//! Figures of several rounds.

/// The middle one; the upper of two. Not a number if there is none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The lowest and the highest value.
pub(crate) fn spread(values: &[f64], digits: usize) -> String {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{low:.digits$} to {high:.digits$}")
}

/// `values` over `others`, round by round.
pub(crate) fn ratios(values: &[f64], others: &[f64]) -> Vec<f64> {
    values.iter().zip(others).map(|(value, other)| value / other).collect()
}

/// The median of the rounds' ratios, the lowest and the highest.
pub(crate) fn ratio(values: &[f64], others: &[f64]) -> String {
    let ratios = ratios(values, others);
    format!("{:.2} ({})", median(&ratios), spread(&ratios, 2))
}
