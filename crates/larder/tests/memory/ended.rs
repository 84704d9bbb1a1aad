//! Processes that end while their memory is managed.

use crate::Fixture;
use crate::support::LIMIT;

fn ends_with(how: impl FnOnce(&mut Fixture)) {
    let mut fixture = Fixture::new();
    let pidfile = fixture.path("pid");
    let words = ["--budget", crate::BUDGET, "--pidfile", pidfile.to_str().expect("UTF-8")];
    let mut pager = fixture.attach(&words).start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    let number = std::fs::read_to_string(&pidfile).expect("a pid file");
    assert_eq!(number.trim(), pager.process.id().to_string());
    how(&mut fixture);
    let ended = pager.process.wait(LIMIT).expect("ends");
    let said = pager.process.output();
    assert!(
        ended.success() && said.contains("the process has ended"),
        "{ended}: {said}"
    );
    assert_eq!(fixture.left(), [""; 0]);
}

#[test]
fn whoever_ends_by_himself_while_managed_finds_all_as_it_was() {
    ends_with(|fixture| {
        fixture.verifier.process.say("stop").expect("reads");
        let ended = fixture.verifier.process.wait(LIMIT).expect("ends");
        let said = fixture.verifier.process.output();
        assert!(ended.success() && said.contains("verified "), "{said}");
    });
}

#[test]
fn the_end_of_a_process_that_is_killed_is_told() {
    ends_with(|fixture| fixture.verifier.process.kill());
}

#[test]
fn a_process_whose_pager_was_killed_can_be_killed_too() {
    let mut fixture = Fixture::new();
    let mut pager = fixture.start();
    pager.wait_for_budget().expect("within the budget");
    pager.process.kill();
    // By now it may wait for memory that nobody brings.
    fixture.verifier.process.kill();
    let (code, said) = fixture.ask("status");
    assert!(
        code == Some(2) && said.contains("nobody listens") || said.contains("killed"),
        "{said}"
    );
}
