//! The file that a swap cache is: whose it is, and how large it may become.

use std::path::{Path, PathBuf};

use larder_bench::campaign::memory::{ATTACHED, Attach, Pager};
use larder_bench::campaign::process::Process;

use crate::support::{LIMIT, disk_serve, larder, on_disk, run};
use crate::{BUDGET, Fixture};

/// With little compressed RAM, so that pages go to `swap`.
fn attach(fixture: &Fixture, swap: &Path, size: &str) -> Attach {
    let swap = swap.display().to_string();
    let disk = ["--swap-cache", &swap, "--swap-size", size];
    fixture.attach(&[&["--budget", BUDGET, "--compressed", "2MiB"], &disk[..]].concat())
}

/// A program whose memory is within its budget, with that file as its swap cache.
fn managed(swap: &Path) -> (Fixture, Pager) {
    let fixture = Fixture::new();
    let pager = attach(&fixture, swap, "64MiB").start().expect("it attaches");
    let state = pager.wait_until(|state| state.used <= state.budget && state.disks.iter().any(|disk| disk.live > 0));
    state.expect("pages are on the disk");
    (fixture, pager)
}

fn refusal(attach: &Attach) -> String {
    let (code, said) = run(attach.command());
    assert_eq!(code, Some(2), "{said}");
    said
}

#[test]
fn a_swap_cache_in_use_is_not_changed_for_another_process() {
    let disk = on_disk();
    let swap = disk.path().join("swap");
    let (mut fixture, mut pager) = managed(&swap);
    let len = || swap.metadata().expect("the file").len();
    let before = len();
    let other = Fixture::new();
    for size in ["16MiB", "256MiB"] {
        let said = refusal(&attach(&other, &swap, size));
        assert!(said.contains("in use by another process"), "{said}");
        assert_eq!(len(), before);
    }
    fixture.works();
    pager.detach().expect("it detaches");
    fixture.verify();
}

#[test]
fn what_a_killed_pager_has_on_a_disk_is_kept_for_its_successor() {
    let disk = on_disk();
    let swap = disk.path().join("swap");
    let (mut fixture, mut pager) = managed(&swap);
    pager.process.kill();
    let said = refusal(&attach(&Fixture::new(), &swap, "64MiB"));
    let wanted = format!("pages of process {} are on it, whose pager has ended", fixture.pid());
    assert!(said.contains(&wanted), "{said}");
    // Nor does it become a disk.
    let socket = disk.path().join("nbd");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let (code, said) = run(disk_serve(&[
        &swap.display().to_string(),
        "--format",
        "raw",
        "--nbd",
        &uri,
    ]));
    let wanted = format!("swap cache, with memory of process {}", fixture.pid());
    assert!(code == Some(2) && said.contains(&wanted), "{said}");
    let mut pager = attach(&fixture, &swap, "64MiB").start().expect("it goes on");
    fixture.works();
    // That process has ended, and with it what its pages are worth.
    pager.process.kill();
    drop(fixture);
    let other = Fixture::new();
    let mut pager = attach(&other, &swap, "64MiB").start().expect("it attaches");
    pager.detach().expect("it detaches");
    assert!(!swap.exists(), "the swap cache's file is left");
    other.verify();
}

#[test]
fn a_swap_cache_that_goes_while_it_is_waited_for_is_made_anew() {
    let disk = on_disk();
    let swap = disk.path().join("swap");
    let (fixture, mut first) = managed(&swap);
    let mut other = Fixture::new();
    let attach = attach(&other, &swap, "64MiB");
    let waiting = Process::start(attach.command()).expect("starts");
    waiting.wait_for("in use by another process", LIMIT).expect("it waits");
    first.detach().expect("it detaches");
    fixture.verify();
    waiting.wait_for(ATTACHED, LIMIT).expect("it attaches");
    assert!(swap.exists(), "its file is one that was removed");
    drop(waiting);
    let mut pager = attach.start().expect("it goes on after a kill");
    pager.wait_for_budget().expect("within the budget");
    other.works();
    pager.detach().expect("it detaches");
    other.verify();
}

#[test]
fn a_swap_cache_for_which_there_is_no_room_takes_none() {
    let disk = on_disk();
    let fixture = Fixture::new();
    let new = disk.path().join("new");
    let empty = disk.path().join("empty");
    std::fs::write(&empty, "").expect("a file");
    let there = |path: &PathBuf| path.metadata().ok().map(|found| found.len());
    for size in ["1000TiB", "8000000TiB"] {
        for path in [&new, &empty] {
            let said = refusal(&attach(&fixture, path, size));
            assert!(said.contains("and there is room for"), "{said}");
            assert_eq!((there(&new), there(&empty)), (None, Some(0)));
        }
    }
    // What was given its size and nothing else is nobody's.
    std::fs::File::options()
        .write(true)
        .open(&empty)
        .expect("opens")
        .set_len(1 << 20)
        .expect("a hole");
    let mut pager = attach(&fixture, &empty, "64MiB").start().expect("it attaches");
    pager.detach().expect("it detaches");
    fixture.verify();
}

#[test]
fn a_swap_cache_that_is_the_slow_store_too_is_refused_and_not_made() {
    let disk = on_disk();
    let fixture = Fixture::new();
    let path = disk.path().join("both");
    let words = path.display().to_string();
    let both = [
        "--swap-cache",
        &words,
        "--swap-size",
        "64MiB",
        "--slow-store",
        &words,
        "--slow-size",
        "64MiB",
    ];
    let said = refusal(&Attach::new(
        larder(),
        disk.path(),
        fixture.pid(),
        &[&["--budget", BUDGET], &both[..]].concat(),
    ));
    assert!(
        said.contains("is given as the swap cache and as the slow store"),
        "{said}"
    );
    assert!(!path.exists());
    fixture.verify();
}

/// A file may become no larger than RLIMIT_FSIZE: the kernel has a signal for that, which is no way to report it.
#[test]
fn swap_file_beyond_rlimit_is_refused() {
    let disk = on_disk();
    let swap = disk.path().join("swap");
    let mut fixture = Fixture::new();
    let said = refusal(&attach(&fixture, &swap, "64MiB").by(&["prlimit", "--fsize=8388608"]));
    assert!(
        said.contains("RLIMIT_FSIZE") && said.contains("give a smaller size"),
        "{said}"
    );
    assert!(!swap.exists(), "the file is left");
    fixture.works();
    fixture.verify();
}
