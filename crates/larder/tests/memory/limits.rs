//! Budgets that change, and budgets that cannot be kept.

use larder_vm::control::memory::MemoryProblem;

use crate::support::TEST_TIMEOUT;
use crate::{BUDGET, Fixture, MIB};

#[test]
fn budget_changes_while_process_works() {
    let mut fixture = Fixture::with("compressible");
    let mut pager = fixture.attach(&["--budget", "56MiB"]).start().expect("it attaches");
    for (budget, said_wanted) in [
        ("24MiB", "budget 24 MiB, of which up to 12 MiB for compressed pages; "),
        ("40MiB", "budget 40 MiB, of which up to 20 MiB for compressed pages; "),
        ("20MiB", "budget 20 MiB, of which up to 10 MiB for compressed pages; "),
        ("1GiB", "budget 1 GiB, of which up to 512 MiB for compressed pages; "),
    ] {
        let (code, said) = fixture.ask(&format!("limit --budget {budget}"));
        assert!(code == Some(0) && said.starts_with(said_wanted), "{said}");
        let state = pager.wait_for_budget().expect("within the budget");
        assert_eq!(state.problem, None, "{state:#?}");
        fixture.works();
    }
    // With room for all pages, evicted ones come back as they are touched, and no more are evicted.
    let before = pager.state().expect("answers").evicted_pages;
    fixture.works();
    assert_eq!(pager.state().expect("answers").evicted_pages, before);
    pager.detach().expect("lets go");
    fixture.verify();
}

#[test]
fn stall_time_is_reported() {
    let mut fixture = Fixture::with("compressible");
    let mut pager = fixture.attach(&["--budget", BUDGET]).start().expect("it attaches");
    fixture.works();
    let is_told = pager.wait_until(|state| state.pressure.some.avg10 > 0.0);
    let pressure = is_told.expect("somebody waits").pressure;
    assert!(pressure.some.total_us > 0 && pressure.some.avg10 <= 100.0, "{pressure:?}");
    // One of the program's threads only waits for commands, so not all threads stall.
    assert_eq!(pressure.full.total_us, 0, "{pressure:?}");
    let (_, said) = fixture.ask("status");
    assert!(said.contains("pressure, some:") && said.contains(" in all"), "{said}");
    pager.detach().expect("lets go");
    fixture.verify();
}

#[test]
fn chosen_compressed_limit_stays() {
    let fixture = Fixture::new();
    let mut pager = fixture.start();
    let (_, said) = fixture.ask("limit --budget 40MiB --compressed 8MiB");
    assert!(said.starts_with("budget 40 MiB, of which up to 8 MiB for compressed pages; "), "{said}");
    let (_, said) = fixture.ask("limit --budget 36MiB");
    assert!(said.starts_with("budget 36 MiB, of which up to 8 MiB for compressed pages; "), "{said}");
    for (limits, why) in [
        ("--budget 4MiB", "a budget of 4 MiB is too small: memory of 64 MiB needs at least 17 MiB"),
        (
            "--budget 20MiB --compressed 19MiB",
            "19 MiB of compressed pages leave too little of a budget of 20 MiB for the guest",
        ),
    ] {
        let (code, said) = fixture.ask(&format!("limit {limits}"));
        assert!(code == Some(2) && said.contains(why), "{said}");
    }
    assert_eq!(pager.state().expect("answers").budget, 36 * MIB);
    pager.detach().expect("lets go");
    fixture.verify();
}

#[test]
fn incompressible_memory_is_reported() {
    let mut fixture = Fixture::with("incompressible");
    let mut pager = fixture.attach(&["--budget", BUDGET]).start().expect("it attaches");
    let is_told = pager.wait_until(|state| state.problem == Some(MemoryProblem::Incompressible));
    let state = is_told.expect("a problem");
    assert!(state.used > state.budget, "{state:#?}");
    let told = "the pages in memory cannot be compressed, and there is no swap cache";
    pager.process.wait_for(told, TEST_TIMEOUT).expect("it is logged");
    let (_, said) = fixture.ask("status");
    assert!(said.contains(told), "{said}");
    fixture.works();
    // With a budget for all pages the problem is gone.
    let (code, said) = fixture.ask("limit --budget 128MiB");
    assert_eq!(code, Some(0), "{said}");
    let state = pager.wait_until(|state| state.problem.is_none()).expect("no problem");
    assert!(state.used <= state.budget, "{state:#?}");
    fixture.works();
    pager.detach().expect("lets go");
    fixture.verify();
}

/// Refaults free space in full compressed memory, although they leave holes in its segments.
#[test]
fn refaults_free_full_compressed_memory() {
    let mut fixture = Fixture::with("compressible");
    let attach = fixture.attach(&["--budget", "20MiB", "--compressed", "4MiB"]);
    let mut pager = attach.start().expect("it attaches");
    let is_told = pager.wait_until(|state| state.problem == Some(MemoryProblem::TiersFull));
    let full = is_told.expect("a problem").compressed.pages;
    // Pages are refaulted singly, from all over the memory.
    let mut least = full;
    for _ in 0..60 {
        fixture.works();
        let state = pager.state().expect("answers");
        assert!(state.compressed.used <= 5 * MIB, "{state:#?}");
        least = least.min(state.compressed.pages);
    }
    assert!(least * 5 > full * 2, "it once had {full} pages, and then {least}");
    pager.detach().expect("lets go");
    fixture.verify();
}

#[test]
fn full_tiers_are_reported_without_loss() {
    let mut fixture = Fixture::new();
    let attach = fixture.attach(&["--budget", "20MiB", "--compressed", "2MiB"]);
    let mut pager = attach.start().expect("it attaches");
    let is_told = pager.wait_until(|state| state.problem == Some(MemoryProblem::TiersFull));
    let state = is_told.expect("a problem");
    assert!(
        // One segment in addition, while another one is emptied.
        state.used > state.budget && state.compressed.used <= 3 * MIB,
        "{state:#?}"
    );
    let told = "there is no space left for evicted pages";
    pager.process.wait_for(told, TEST_TIMEOUT).expect("it is logged");
    fixture.works();
    pager.detach().expect("lets go");
    fixture.works();
    fixture.verify();
}
