//! Budgets that change, and such that cannot be kept.

use larder_vm::control::memory::MemoryProblem;

use crate::support::LIMIT;
use crate::{BUDGET, Fixture, MIB};

#[test]
fn a_budget_is_lowered_and_raised_while_the_process_works() {
    let mut fixture = Fixture::with("compressible");
    let mut pager = fixture.attach(&["--budget", "56MiB"]).start().expect("it attaches");
    for (budget, said_wanted) in [
        ("24MiB", "budget 24 MiB, of that up to 12 MiB compressed pages; "),
        ("40MiB", "budget 40 MiB, of that up to 20 MiB compressed pages; "),
        ("20MiB", "budget 20 MiB, of that up to 10 MiB compressed pages; "),
        ("1GiB", "budget 1 GiB, of that up to 512 MiB compressed pages; "),
    ] {
        let (code, said) = fixture.ask(&format!("limit --budget {budget}"));
        assert!(code == Some(0) && said.starts_with(said_wanted), "{said}");
        let state = pager.wait_for_budget().expect("within the budget");
        assert_eq!(state.problem, None, "{state:#?}");
        fixture.works();
    }
    // With room for all, what was evicted comes back as it is touched, and nothing goes any more.
    let before = pager.state().expect("answers").evicted_pages;
    fixture.works();
    assert_eq!(pager.state().expect("answers").evicted_pages, before);
    pager.detach().expect("lets go");
    fixture.verify();
}

#[test]
fn time_that_is_lost_by_waiting_is_told() {
    let mut fixture = Fixture::with("compressible");
    let mut pager = fixture.attach(&["--budget", BUDGET]).start().expect("it attaches");
    fixture.works();
    let is_told = pager.wait_until(|state| state.pressure.some.avg10 > 0.0);
    let pressure = is_told.expect("somebody waits").pressure;
    assert!(
        pressure.some.total_us > 0 && pressure.some.avg10 <= 100.0,
        "{pressure:?}"
    );
    // One of its threads waits for nothing but what it is told.
    assert_eq!(pressure.full.total_us, 0, "{pressure:?}");
    let (_, said) = fixture.ask("status");
    assert!(said.contains("lost, some:") && said.contains(" in all"), "{said}");
    pager.detach().expect("lets go");
    fixture.verify();
}

#[test]
fn a_share_for_compressed_pages_that_was_chosen_stays() {
    let fixture = Fixture::new();
    let mut pager = fixture.start();
    let (_, said) = fixture.ask("limit --budget 40MiB --compressed 8MiB");
    assert!(
        said.starts_with("budget 40 MiB, of that up to 8 MiB compressed pages; "),
        "{said}"
    );
    let (_, said) = fixture.ask("limit --budget 36MiB");
    assert!(
        said.starts_with("budget 36 MiB, of that up to 8 MiB compressed pages; "),
        "{said}"
    );
    for (limits, why) in [
        (
            "--budget 4MiB",
            "a budget of 4 MiB is too small: 17 MiB is the least for memory of 64 MiB",
        ),
        (
            "--budget 20MiB --compressed 19MiB",
            "19 MiB of compressed pages in a budget of 20 MiB leave nothing for the guest",
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
fn a_budget_that_cannot_be_kept_because_nothing_can_be_compressed_is_told() {
    let mut fixture = Fixture::with("incompressible");
    let mut pager = fixture.attach(&["--budget", BUDGET]).start().expect("it attaches");
    let is_told = pager.wait_until(|state| state.problem == Some(MemoryProblem::Incompressible));
    let state = is_told.expect("a problem");
    assert!(state.used > state.budget, "{state:#?}");
    let told = "what is in memory cannot be compressed, and there is no swap cache";
    pager.process.wait_for(told, LIMIT).expect("it is logged");
    let (_, said) = fixture.ask("status");
    assert!(said.contains(told), "{said}");
    fixture.works();
    // Once there is room, all is well.
    let (code, said) = fixture.ask("limit --budget 128MiB");
    assert_eq!(code, Some(0), "{said}");
    let state = pager.wait_until(|state| state.problem.is_none()).expect("no problem");
    assert!(state.used <= state.budget, "{state:#?}");
    fixture.works();
    pager.detach().expect("lets go");
    fixture.verify();
}

#[test]
fn what_has_come_back_makes_room_for_more_in_full_compressed_memory() {
    let mut fixture = Fixture::with("compressible");
    let attach = fixture.attach(&["--budget", "20MiB", "--compressed", "4MiB"]);
    let mut pager = attach.start().expect("it attaches");
    let is_told = pager.wait_until(|state| state.problem == Some(MemoryProblem::TiersFull));
    let full = is_told.expect("a problem").compressed.pages;
    // Pages come back one by one, from here and there.
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
fn a_budget_that_cannot_be_kept_for_want_of_room_is_told_and_nothing_is_lost() {
    let mut fixture = Fixture::new();
    let attach = fixture.attach(&["--budget", "20MiB", "--compressed", "2MiB"]);
    let mut pager = attach.start().expect("it attaches");
    let is_told = pager.wait_until(|state| state.problem == Some(MemoryProblem::TiersFull));
    let state = is_told.expect("a problem");
    assert!(
        // One segment more while another is emptied.
        state.used > state.budget && state.compressed.used <= 3 * MIB,
        "{state:#?}"
    );
    let told = "there is no room left for evicted pages";
    pager.process.wait_for(told, LIMIT).expect("it is logged");
    fixture.works();
    pager.detach().expect("lets go");
    fixture.works();
    fixture.verify();
}
