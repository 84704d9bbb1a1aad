//! Kills of pagers. `larder-bench memory-kills` runs the same for longer.

use larder_bench::campaign::Random;
use larder_bench::campaign::memory::{Attach, Verifier};
use larder_bench::campaign::memory_attach;
use larder_bench::campaign::memory_kills::{self, KillPlan};

use crate::support::{larder_path, temp_dir_on_disk, temp_dir_on_tmpfs};
use crate::{Alone, BUDGET, verifier_command};

const KILLS: KillPlan = KillPlan { count: 15, burst_every: 4 };

/// A process sees no wrong page when pagers are killed, only pauses.
#[test]
fn process_survives_pager_kills() {
    let folder = temp_dir_on_tmpfs();
    let report = memory_kills::of_verifier(
        larder_path(),
        verifier_command("mixed"),
        &[],
        folder.path(),
        KILLS,
        &mut Random::new(1),
    );
    let report = report.expect("nothing was noticed");
    assert_eq!((report.kills, report.stalls.len()), (15, 15));
    assert!(report.bursts > 0 && report.evicted > 0 && report.faults > 0, "{report:?}");
}

#[test]
fn process_survives_kills_with_swap() {
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let swap = disk.path().join("swap").display().to_string();
    let words = ["--compressed", "2MiB", "--swap-cache", &swap, "--swap-size", "256MiB"];
    let report = memory_kills::of_verifier(
        larder_path(),
        verifier_command("mixed"),
        &words,
        folder.path(),
        KILLS,
        &mut Random::new(2),
    );
    assert!(report.expect("nothing was noticed").faults > 0);
    assert!(!disk.path().join("swap").exists(), "the swap cache's file is left");
}

#[test]
fn successor_of_killed_pager_detaches_cleanly() {
    let folder = temp_dir_on_tmpfs();
    let mut verifier = Verifier::start(verifier_command("mixed")).expect("a program to manage");
    let before = Alone::of(verifier.pid());
    let attach = Attach::new(larder_path(), folder.path(), verifier.pid(), &["--budget", BUDGET]);
    for _ in 0..2 {
        let mut pager = attach.start().expect("it attaches");
        pager.wait_for_budget().expect("within the budget");
        pager.process.kill();
        // The process waits for its memory, which no pager installs.
        let mut pager = attach.start().expect("it takes the place");
        assert!(pager.stood_still.is_none() && pager.process.output().contains("in place of another pager"));
        verifier.works().expect("goes on");
        pager.wait_for_budget().expect("within the budget");
        pager.detach().expect("lets go");
        assert_eq!(Alone::of(verifier.pid()), before);
    }
    verifier.stop().expect("all is as it was written");
}

#[test]
fn kill_during_attach_hinders_no_successor() {
    let folder = temp_dir_on_tmpfs();
    let mut verifier = Verifier::start(verifier_command("mixed")).expect("a program to manage");
    let before = Alone::of(verifier.pid());
    let attach = Attach::new(larder_path(), folder.path(), verifier.pid(), &["--budget", BUDGET]);
    let mut random = Random::new(3);
    for _ in 0..10 {
        for _ in 0..2 {
            let mut early = larder_bench::campaign::process::Process::start(attach.command()).expect("starts");
            std::thread::sleep(std::time::Duration::from_micros(random.below(40_000)));
            early.kill();
        }
        let mut pager = attach.start().expect("it attaches");
        verifier.works().expect("goes on");
        pager.detach().expect("lets go");
        // A pager that is killed while it hands over descriptors leaves the ones that the hand-over uses
        // (docs/memory.md).
        let is_of_handing_over = |path: &std::path::Path| {
            let path = path.to_string_lossy();
            path.starts_with("socket:")
                || path == "/dev/userfaultfd"
                || path == "anon_inode:[io_uring]"
                || path == "/memfd:verified (deleted)"
        };
        let mut after = Alone::of(verifier.pid());
        after.descriptors.retain(|number, path| before.descriptors.contains_key(number) || !is_of_handing_over(path));
        assert_eq!(after, before);
    }
    verifier.stop().expect("all is as it was written");
}

/// A process that is attached to and detached from again and again sees only pauses.
#[test]
fn process_survives_attach_and_detach() {
    let folder = temp_dir_on_tmpfs();
    let command = verifier_command("mixed");
    let report = memory_attach::of_verifier(larder_path(), command, folder.path(), 10, &mut Random::new(4));
    let report = report.expect("nothing was noticed");
    assert_eq!(report.pauses.len(), 10);
    assert!(report.evicted > 0, "{report:?}");
}

#[test]
fn killed_detach_is_resumed() {
    let folder = temp_dir_on_tmpfs();
    let mut verifier = Verifier::start(verifier_command("mixed")).expect("a program to manage");
    let before = Alone::of(verifier.pid());
    let attach = Attach::new(larder_path(), folder.path(), verifier.pid(), &["--budget", BUDGET]);
    let mut random = Random::new(5);
    for _ in 0..6 {
        let mut pager = attach.start().expect("it attaches");
        pager.wait_for_budget().expect("within the budget");
        pager.process.signal(libc::SIGTERM);
        std::thread::sleep(std::time::Duration::from_micros(random.below(60_000)));
        pager.process.kill();
        verifier.report().expect("nothing is wrong");
        let mut pager = attach.start().expect("it attaches");
        verifier.works().expect("goes on");
        pager.detach().expect("lets go");
        assert_eq!(Alone::of(verifier.pid()), before);
    }
    verifier.stop().expect("all is as it was written");
}
