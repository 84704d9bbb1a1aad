//! Which rates a guest is moved at: those given, or higher and higher ones until it cannot be moved any more.

use super::Bench;
use super::guest::{Guest, Move};
use super::method::Method;
use super::moving::Outcome;
use super::table::Row;

/// Of so many moves so many must be good.
const TRIES: usize = 3;
const GOOD: usize = 2;
/// From one rate to the next, in quarters.
const STEP_QUARTERS: u64 = 5;
/// A guest that is this much slower than it should be cannot be any faster.
const SLOW: f64 = 0.8;

/// Moves guests of all rates, and tells how it goes.
pub(super) fn measure(bench: &Bench<'_>, rows: &mut Vec<Row>) -> anyhow::Result<()> {
    let arguments = bench.arguments;
    let rounds = arguments.rounds as usize;
    if !arguments.rates.is_empty() {
        for &rate in &arguments.rates {
            let guest = Guest::boot(bench, rate)?;
            take_turns(guest, rate, &arguments.modes, rounds, |_| false, bench, rows)?;
        }
        return Ok(());
    }
    let mut left = arguments.modes.clone();
    let mut rate = arguments.from;
    while !left.is_empty() && rate <= arguments.to {
        let guest = Guest::boot(bench, rate)?;
        let alone = guest.alone()?;
        let first = rows.len();
        let decided = |row: &Row| verdict(row, arguments.accept_ms()).is_some();
        take_turns(guest, rate, &left, TRIES, decided, bench, rows)?;
        if alone < SLOW * rate as f64 {
            eprintln!("the guest changes no more than {alone:.0} MB/s: there the search ends");
            break;
        }
        left.retain(|&method| {
            let row = rows[first..].iter().find(|row| row.method == method);
            row.and_then(|row| verdict(row, arguments.accept_ms())) == Some(true)
        });
        rate = (rate * STEP_QUARTERS).div_ceil(4);
    }
    Ok(())
}

/// Whether a guest can be moved so, once that is certain.
pub(super) fn verdict(row: &Row, accept_ms: f64) -> Option<bool> {
    let is_good = |of: &&Move| of.outcome == Outcome::Moved && of.downtime_ms.is_some_and(|ms| ms <= accept_ms);
    let good = row.moves.iter().filter(is_good).count();
    if good >= GOOD {
        return Some(true);
    }
    (row.moves.len() - good > TRIES - GOOD).then_some(false)
}

/// Moves a guest so often by each of these methods, or until that is decided.
fn take_turns(
    mut guest: Guest<'_>,
    rate: u64,
    methods: &[Method],
    times: usize,
    is_decided: impl Fn(&Row) -> bool,
    bench: &Bench<'_>,
    rows: &mut Vec<Row>,
) -> anyhow::Result<()> {
    let first = rows.len();
    rows.extend(methods.iter().map(|&method| Row {
        method,
        rate,
        moves: Vec::new(),
    }));
    for round in 0..times {
        for turn in 0..methods.len() {
            // Not always the same one before the same other one, or first.
            let row = &mut rows[first + (round + turn) % methods.len()];
            if is_decided(row) {
                continue;
            }
            let figures = guest.moves(row.method)?;
            eprintln!(
                "{}, {}, {rate} MB/s, {}: {}",
                bench.load.name(),
                bench.link.speed.words(),
                row.method.name(),
                figures.line()
            );
            row.moves.push(figures);
        }
    }
    guest.finish()
}
