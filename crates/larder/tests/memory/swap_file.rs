//! The file of a swap cache: its owner, and its size.

use std::path::{Path, PathBuf};

use larder_bench::campaign::memory::{ATTACHED_TEXT, Attach, Pager};
use larder_bench::campaign::process::Process;

use crate::support::{TEST_TIMEOUT, disk_serve_command, larder_path, run_command, temp_dir_on_disk};
use crate::{BUDGET, Fixture};

/// Returns an attach with little compressed RAM, so that pages go to `swap`.
fn attach(fixture: &Fixture, swap: &Path, size: &str) -> Attach {
    let swap = swap.display().to_string();
    let disk = ["--swap-cache", &swap, "--swap-size", size];
    fixture.attach(&[&["--budget", BUDGET, "--compressed", "2MiB"], &disk[..]].concat())
}

/// Starts a program whose memory is within its budget, with that file as its swap cache.
fn managed(swap: &Path) -> (Fixture, Pager) {
    let fixture = Fixture::new();
    let pager = attach(&fixture, swap, "64MiB").start().expect("it attaches");
    let state = pager.wait_until(|state| state.used <= state.budget && state.disks.iter().any(|disk| disk.live > 0));
    state.expect("pages are on the disk");
    (fixture, pager)
}

fn refusal(attach: &Attach) -> String {
    let (code, said) = run_command(attach.command());
    assert_eq!(code, Some(2), "{said}");
    said
}

/// A swap cache in use is refused to another process, and not changed.
#[test]
fn swap_cache_in_use_is_unchanged() {
    let disk = temp_dir_on_disk();
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

/// A killed pager's swap cache is kept for its successor while the process lives, and is free after that.
#[test]
fn killed_pagers_swap_cache_is_reserved() {
    let disk = temp_dir_on_disk();
    let swap = disk.path().join("swap");
    let (mut fixture, mut pager) = managed(&swap);
    pager.process.kill();
    let said = refusal(&attach(&Fixture::new(), &swap, "64MiB"));
    let wanted = format!("it holds pages of process {}, whose pager has ended", fixture.pid());
    assert!(said.contains(&wanted), "{said}");
    // It cannot be served as a disk either.
    let socket = disk.path().join("nbd");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let (code, said) =
        run_command(disk_serve_command(&[&swap.display().to_string(), "--format", "raw", "--nbd", &uri]));
    let wanted = format!("swap cache with memory of the running process {}", fixture.pid());
    assert!(code == Some(2) && said.contains(&wanted), "{said}");
    let mut pager = attach(&fixture, &swap, "64MiB").start().expect("it goes on");
    fixture.works();
    // The process has ended, so its pages are not needed any more.
    pager.process.kill();
    drop(fixture);
    let other = Fixture::new();
    let mut pager = attach(&other, &swap, "64MiB").start().expect("it attaches");
    pager.detach().expect("it detaches");
    assert!(!swap.exists(), "the swap cache's file is left");
    other.verify();
}

/// A swap cache's file that its owner removes while an attach waits for it is created again.
#[test]
fn vanished_swap_cache_is_recreated() {
    let disk = temp_dir_on_disk();
    let swap = disk.path().join("swap");
    let (fixture, mut first) = managed(&swap);
    let mut other = Fixture::new();
    let attach = attach(&other, &swap, "64MiB");
    let waiting = Process::start(attach.command()).expect("starts");
    waiting.wait_for("in use by another process", TEST_TIMEOUT).expect("it waits");
    first.detach().expect("it detaches");
    fixture.verify();
    waiting.wait_for(ATTACHED_TEXT, TEST_TIMEOUT).expect("it attaches");
    assert!(swap.exists(), "its file is one that was removed");
    drop(waiting);
    let mut pager = attach.start().expect("it goes on after a kill");
    pager.wait_for_budget().expect("within the budget");
    other.works();
    pager.detach().expect("it detaches");
    other.verify();
}

#[test]
fn swap_cache_without_space_takes_none() {
    let disk = temp_dir_on_disk();
    let fixture = Fixture::new();
    let new = disk.path().join("new");
    let empty = disk.path().join("empty");
    std::fs::write(&empty, "").expect("a file");
    let there = |path: &PathBuf| path.metadata().ok().map(|found| found.len());
    for size in ["1000TiB", "8000000TiB"] {
        for path in [&new, &empty] {
            let said = refusal(&attach(&fixture, path, size));
            assert!(said.contains("and there is space for"), "{said}");
            assert_eq!((there(&new), there(&empty)), (None, Some(0)));
        }
    }
    // A file that has a size and no data is free to use.
    std::fs::File::options().write(true).open(&empty).expect("opens").set_len(1 << 20).expect("a hole");
    let mut pager = attach(&fixture, &empty, "64MiB").start().expect("it attaches");
    pager.detach().expect("it detaches");
    fixture.verify();
}

/// One file cannot be swap cache and slow store, and is not created then.
#[test]
fn swap_cache_cannot_be_slow_store() {
    let disk = temp_dir_on_disk();
    let fixture = Fixture::new();
    let path = disk.path().join("both");
    let words = path.display().to_string();
    let both = ["--swap-cache", &words, "--swap-size", "64MiB", "--slow-store", &words, "--slow-size", "64MiB"];
    let said =
        refusal(&Attach::new(larder_path(), disk.path(), fixture.pid(), &[&["--budget", BUDGET], &both[..]].concat()));
    assert!(said.contains("is given both as the swap cache and as the slow store"), "{said}");
    assert!(!path.exists());
    fixture.verify();
}

/// A swap file beyond RLIMIT_FSIZE is refused; the kernel's signal for that would be no usable report.
#[test]
fn swap_file_beyond_rlimit_is_refused() {
    let disk = temp_dir_on_disk();
    let swap = disk.path().join("swap");
    let mut fixture = Fixture::new();
    let said = refusal(&attach(&fixture, &swap, "64MiB").by(&["prlimit", "--fsize=8388608"]));
    assert!(said.contains("RLIMIT_FSIZE") && said.contains("give a smaller size"), "{said}");
    assert!(!swap.exists(), "the file is left");
    fixture.works();
    fixture.verify();
}
