//! The rates at which a guest is moved: the given ones, or growing ones until it cannot be moved any more.

use super::Bench;
use super::guest::{Guest, Move};
use super::method::Method;
use super::moving::Outcome;
use super::table::Row;

/// Number of moves at a rate, and the number of them that must succeed.
const TRIES: usize = 3;
const SUCCESSES_MIN: usize = 2;
/// Factor between successive rates, in quarters.
const STEP_QUARTERS: u64 = 5;

/// Moves guests at all rates, and appends the results to `rows`.
pub(super) fn measure(bench: &Bench<'_>, rows: &mut Vec<Row>) -> anyhow::Result<()> {
    let arguments = bench.arguments;
    let rounds = arguments.rounds as usize;
    if arguments.rates.is_empty() {
        return search(arguments.from, arguments.to, &arguments.modes, |rate, methods| {
            try_all(rate, methods, bench, rows)
        });
    }
    for &rate in &arguments.rates {
        measure_in_turns(rate, &arguments.modes, rounds, |_| false, bench, rows)?;
    }
    Ok(())
}

/// Searches upward from `from` with the methods that can move the guest at that rate, then from half of it with the
/// others, and so on: rates that are too high cost the most time.
fn search(
    from: u64,
    to: u64,
    methods: &[Method],
    mut try_all: impl FnMut(u64, &[Method]) -> anyhow::Result<RateResult>,
) -> anyhow::Result<()> {
    let (mut rate, mut end) = (from, to.saturating_add(1));
    let mut remaining = methods.to_vec();
    while !remaining.is_empty() && rate > 0 {
        remaining = search_upward(rate, end, remaining, &mut try_all)?;
        (rate, end) = (rate / 2, rate);
    }
    Ok(())
}

/// Climbs from one rate to below another with the methods that can move the guest. Returns those that failed at the
/// first rate.
fn search_upward(
    from: u64,
    end: u64,
    methods: Vec<Method>,
    try_all: &mut impl FnMut(u64, &[Method]) -> anyhow::Result<RateResult>,
) -> anyhow::Result<Vec<Method>> {
    let mut unable = None;
    let mut left = methods;
    let mut rate = from;
    while !left.is_empty() && rate < end {
        let tried = try_all(rate, &left)?;
        unable.get_or_insert(tried.unable);
        if tried.alone < Row::SLOW * rate as f64 {
            eprintln!("the guest reaches only {:.0} MB/s: higher rates are not tried", tried.alone);
            break;
        }
        left = tried.able;
        rate = (rate * STEP_QUARTERS).div_ceil(4);
    }
    Ok(unable.unwrap_or_default())
}

/// Methods that can move a guest at a rate, and those that cannot.
struct RateResult {
    able: Vec<Method>,
    unable: Vec<Method>,
    alone: f64,
}

fn try_all(rate: u64, methods: &[Method], bench: &Bench<'_>, rows: &mut Vec<Row>) -> anyhow::Result<RateResult> {
    let first = rows.len();
    let verdict = |row: &Row| verdict(row, bench.arguments.accept_ms());
    let rate_without_moves = measure_in_turns(rate, methods, TRIES, |row| verdict(row).is_some(), bench, rows)?;
    let (able, unable) = rows[first..].iter().partition::<Vec<_>, _>(|row| verdict(row) == Some(true));
    let methods = |rows: Vec<&Row>| rows.iter().map(|row| row.method).collect();
    Ok(RateResult { able: methods(able), unable: methods(unable), alone: rate_without_moves })
}

/// Returns whether a guest can be moved in this way, once that is decided.
pub(super) fn verdict(row: &Row, accept_ms: f64) -> Option<bool> {
    let is_good = |of: &&Move| of.outcome == Outcome::Moved && of.downtime_ms.is_some_and(|ms| ms <= accept_ms);
    let good = row.moves.iter().filter(is_good).count();
    if good >= SUCCESSES_MIN {
        return Some(true);
    }
    (row.moves.len() - good > TRIES - SUCCESSES_MIN).then_some(false)
}

/// Boots a guest, and moves it `times` times by each of these methods, or until the result is decided. Returns the
/// rate at which the guest changes memory without moves, in 10^6 bytes per second.
fn measure_in_turns(
    rate: u64,
    methods: &[Method],
    times: usize,
    is_decided: impl Fn(&Row) -> bool,
    bench: &Bench<'_>,
    rows: &mut Vec<Row>,
) -> anyhow::Result<f64> {
    let mut guest = Guest::boot(bench, rate)?;
    let alone = guest.alone(Row::SLOW * rate as f64)?;
    let first = rows.len();
    rows.extend(methods.iter().map(|&method| Row { method, rate, alone, moves: Vec::new() }));
    for round in 0..times {
        for turn in 0..methods.len() {
            // Rotates the order, so that no method always comes first or after the same one.
            let row = &mut rows[first + (round + turn) % methods.len()];
            if is_decided(row) {
                continue;
            }
            let result = guest.moves(row.method)?;
            eprintln!(
                "{}, {}, {rate} MB/s, {}: {}",
                bench.load.name(),
                bench.link.speed.words(),
                row.method.name(),
                result.line()
            );
            row.moves.push(result);
        }
    }
    guest.finish()?;
    Ok(alone)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the attempts of a search in which each method can move the guest up to a certain rate, and the guest
    /// reaches `alone`.
    fn tried(from: u64, alone: f64, largest: &[(Method, u64)]) -> Vec<(u64, Vec<Method>)> {
        let mut tried = Vec::new();
        let methods: Vec<Method> = largest.iter().map(|&(method, _)| method).collect();
        search(from, 1000, &methods, |rate, methods| {
            tried.push((rate, methods.to_vec()));
            let can = |method: &Method| largest.iter().any(|&(other, rate_max)| other == *method && rate <= rate_max);
            let (able, unable) = methods.iter().partition(|method| can(method));
            Ok(RateResult { able, unable, alone })
        })
        .expect("nothing fails");
        tried
    }

    #[test]
    /// Methods that can move the guest climb; the others start again from half the rate.
    fn search_climbs_or_halves_per_method() {
        use Method::{Larder, MultifdZlib, Qemu};
        let found = tried(40, 1e3, &[(Qemu, 40), (MultifdZlib, 30), (Larder, 60)]);
        let expected = [
            (40, vec![Qemu, MultifdZlib, Larder]),
            (50, vec![Qemu, Larder]),
            (63, vec![Larder]),
            (20, vec![MultifdZlib]),
            (25, vec![MultifdZlib]),
            (32, vec![MultifdZlib]),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    /// A search ends at rate 0, at the end of its range, or at the guest's own speed.
    fn search_ends_at_rate_limits() {
        let none_able = tried(4, 1e3, &[(Method::Qemu, 0)]);
        assert_eq!(none_able.iter().map(|(rate, _)| *rate).collect::<Vec<_>>(), [4, 2, 1]);
        let any = tried(900, 1e4, &[(Method::Qemu, 10_000)]);
        assert_eq!(any.len(), 1, "up to 1000: {any:?}");
        let slow = tried(40, 45.0, &[(Method::Qemu, 1000)]);
        assert_eq!(slow.iter().map(|(rate, _)| *rate).collect::<Vec<_>>(), [40, 50, 63]);
    }
}
