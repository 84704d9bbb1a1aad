//! `larder host --balance-memory`: budgets move to where they are needed.

use super::memory::{MEMORY_MIB, Managed};
use super::support::{TEST_TIMEOUT, run_command};
use super::{User, until, value_in};

const MIB: u64 = 1 << 20;

const WORDS: [&str; 6] = ["--budget", "40MiB", "--budget-min", "20MiB", "--budget-max", "72MiB"];

/// Difference of two budgets that shows which VM got the memory, in bytes.
const MORE: u64 = 12 * MIB;

fn budget(of: &Managed) -> u64 {
    let state = of.pager.state().expect("answers");
    assert!((20 * MIB..=72 * MIB).contains(&state.budget), "{state:?}");
    state.budget
}

#[test]
fn budgets_follow_working_sets() {
    let user = User::new();
    let mut web = user.memory("web", &WORDS);
    let mut db = user.memory("db", &WORDS);
    let fixed = user.memory("fixed", &["--budget", "32MiB"]);
    web.verifier.set_hot_percent(75).expect("takes it");
    db.verifier.set_hot_percent(10).expect("takes it");
    let mut host = user.host(&[
        "--balance-memory",
        "--memory-period",
        "200ms",
        "--memory-stall",
        "10%",
        "--memory-reserve",
        "64MiB",
    ]);
    until("memory for the one that needs it", || (budget(&web) > budget(&db) + MORE).then_some(()));
    web.verifier.set_hot_percent(10).expect("takes it");
    db.verifier.set_hot_percent(75).expect("takes it");
    until("memory for the other one", || (budget(&db) > budget(&web) + MORE).then_some(()));
    assert_eq!(fixed.pager.state().expect("answers").budget, 32 * MIB, "nobody allows that");
    // The metrics report each move and its reason.
    let metrics = host.metrics();
    for (name, direction) in [("web", "up"), ("web", "down"), ("db", "up"), ("db", "down")] {
        let moves = format!("larder_memory_budget_moves_total{{domain=\"{name}\",direction=\"{direction}\"}}");
        assert!(value_in(&metrics, &moves).is_some_and(|moves| moves > 0.0), "{moves}: {metrics}");
    }
    assert_eq!(value_in(&metrics, "larder_host_memory_reserve_bytes"), Some((64 * MIB) as f64));
    assert!(value_in(&metrics, "larder_host_memory_available_bytes").is_some());
    let page = host.follow("/api/vm/db").next("vm");
    assert!(page["memory"]["moves"]["last"]["why"].is_string(), "{page}");
    for words in
        ["budget changed: it is short of memory", "budget changed: it does not wait for memory", "vm=\"db\"", " %\""]
    {
        host.process.wait_for(words, TEST_TIMEOUT).expect("it says so");
    }
    // After the balancer is killed the budgets stay.
    host.process.kill();
    let left = [budget(&web), budget(&db)];
    for managed in [&mut web, &mut db] {
        managed.verifier.works().expect("it works");
    }
    assert_eq!([budget(&web), budget(&db)], left);
    assert!(left.iter().sum::<u64>() <= 2 * (MEMORY_MIB + 16) * MIB);
}

#[test]
fn violated_reserve_shrinks_budgets_to_min() {
    let user = User::new();
    let mut web = user.memory("web", &["--budget", "40MiB", "--budget-min", "20MiB", "--budget-low", "28MiB"]);
    web.verifier.set_hot_percent(5).expect("takes it");
    // A reserve that exceeds any host's memory.
    let _host = user.host(&[
        "--balance-memory",
        "--memory-period",
        "200ms",
        "--memory-stall",
        "20%",
        "--memory-reserve",
        "1024TiB",
    ]);
    until("all that may be taken", || (budget(&web) == 20 * MIB).then_some(()));
    web.verifier.works().expect("it works");
    assert_eq!(budget(&web), 20 * MIB);
}

#[test]
fn bounds_are_validated_and_changed_live() {
    let user = User::new();
    let memory = user.memory("web", &["--budget", "40MiB", "--budget-low", "30MiB", "--budget-max", "60MiB"]);
    let control = user.socket("web-memory.sock");
    let limit = |words: &[&str]| {
        let control = super::text(&control);
        run_command(user.larder(&[&["memory", "limit", "--control", control], words].concat()))
    };
    let state = memory.pager.state().expect("answers");
    let range = state.range.expect("it has bounds");
    assert_eq!((range.min, range.low, range.max), (None, Some(30 * MIB), Some(60 * MIB)));
    let (code, said) = limit(&["--budget-high", "50MiB"]);
    assert!(code == Some(0) && said.contains("low 30 MiB, high 50 MiB, max 60 MiB"), "{said}");
    for (words, why) in [
        (&["--budget", "61MiB"][..], "a budget of 61 MiB is above its max of 60 MiB"),
        (&["--budget-min", "31MiB"], "min of 31 MiB is above its low of 30 MiB"),
        (&["--budget-min", "1MiB"], "min of 1 MiB is too small: memory of 64 MiB needs at least 17 MiB"),
        (&["--budget-max", "39MiB", "--budget-high", "39MiB"], "a budget of 40 MiB is above its max of 39 MiB"),
    ] {
        let (code, said) = limit(words);
        assert!(code == Some(2) && said.contains(why), "{words:?}: {said}");
    }
    assert_eq!(memory.pager.state().expect("answers").range.expect("stays").high, Some(50 * MIB));
    let (code, said) = limit(&["--budget-fixed"]);
    assert!(code == Some(0) && !said.contains("moves"), "{said}");
    assert_eq!(memory.pager.state().expect("answers").range, None);
    let (code, said) = run_command(user.larder(&["host", "--memory-reserve", "1GiB"]));
    assert!(code == Some(2) && said.contains("--balance-memory"), "{said}");
}
