//! Processes that end while their memory is managed.

use crate::Fixture;
use crate::support::TEST_TIMEOUT;

fn ends_with(how: impl FnOnce(&mut Fixture)) {
    let mut fixture = Fixture::new();
    let pidfile = fixture.path("pid");
    let words = ["--budget", crate::BUDGET, "--pidfile", pidfile.to_str().expect("UTF-8")];
    let mut pager = fixture.attach(&words).start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    let number = std::fs::read_to_string(&pidfile).expect("a pid file");
    assert_eq!(number.trim(), pager.process.id().to_string());
    how(&mut fixture);
    let ended = pager.process.wait(TEST_TIMEOUT).expect("ends");
    let said = pager.process.output();
    assert!(ended.success() && said.contains("the process has ended"), "{ended}: {said}");
    assert_eq!(fixture.left(), [""; 0]);
}

/// A process that exits while it is managed finds its memory unchanged, and its pager ends.
#[test]
fn process_exits_while_managed() {
    ends_with(|fixture| {
        fixture.verifier.process.say("stop").expect("reads");
        let ended = fixture.verifier.process.wait(TEST_TIMEOUT).expect("ends");
        let said = fixture.verifier.process.output();
        assert!(ended.success() && said.contains("verified "), "{said}");
    });
}

#[test]
fn kill_of_managed_process_is_reported() {
    ends_with(|fixture| fixture.verifier.process.kill());
}

#[test]
fn process_without_pager_can_be_killed() {
    let mut fixture = Fixture::new();
    let mut pager = fixture.start();
    pager.wait_for_budget().expect("within the budget");
    pager.process.kill();
    // By now the process may wait for a page that no pager installs.
    fixture.verifier.process.kill();
    let (code, said) = fixture.ask("status");
    assert!(code == Some(2) && said.contains("no process listens") || said.contains("killed"), "{said}");
}
