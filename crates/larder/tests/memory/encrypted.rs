//! Pages on disks are encrypted by default, so that the disks alone reveal nothing; with `--encrypt off` they are
//! not.

use std::os::unix::fs::FileExt as _;
use std::path::Path;

use larder_bench::campaign::Random;
use larder_bench::campaign::memory::Pager;
use larder_bench::campaign::memory_kills::{self, KillPlan};

use crate::holder::{Holder, NONE, readable};
use crate::support::{TEST_TIMEOUT, larder_path, run_command, temp_dir_on_disk, temp_dir_on_tmpfs};
use crate::{BUDGET, Fixture, MIB, verifier_command};

/// Offset of the key in the state (docs/memory.md).
const KEY_AT: u64 = 128;
const KEY_BYTES: usize = 64;

/// First bytes of the log's segments.
const SEGMENT: &[u8] = b"LARDSEG\0";

fn has(path: &Path, what: &[u8]) -> bool {
    let bytes = std::fs::read(path).expect("a file");
    bytes.windows(what.len()).any(|found| found == what)
}

/// Waits until at least `bytes` bytes were written to the disk with this index.
fn wait_for_disk(pager: &Pager, disk: usize, bytes: u64) {
    let is_there = pager.wait_until(|state| state.disks[disk].written_bytes >= bytes);
    is_there.expect("it goes to the disk");
}

/// Without `--encrypt off` no page and no key can be found on the disk.
#[test]
fn swap_disk_is_readable_only_unencrypted() {
    for (encrypt, is_readable) in [(&["--encrypt", "off"][..], true), (&["--encrypt", "on"], false), (&[], false)] {
        let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
        let mut holder = Holder::start();
        let path = disk.path().join("swap");
        let swap = path.display().to_string();
        let words = [&["--swap-cache", &swap, "--swap-size", "128MiB"], encrypt].concat();
        let mut pager = holder.attach(folder.path(), &words).start().expect("it attaches");
        wait_for_disk(&pager, 0, 20 * MIB);
        let state = pager.state().expect("answers");
        assert_eq!(state.disks[0].encrypted, !is_readable, "{state:#?}");
        assert_eq!(has(&path, SEGMENT), is_readable);
        match is_readable {
            true => assert!(readable(&path).len() > 4000),
            false => assert!(readable(&path).is_empty()),
        }
        // The header still identifies the disk.
        assert!(has(&path, b"LRDRSWAP"));
        let mut key = [0; KEY_BYTES];
        let pages = std::fs::File::open(holder.memfd("larder-pages")).expect("a memfd");
        pages.read_exact_at(&mut key, KEY_AT).expect("a key");
        assert_eq!(key == [0; KEY_BYTES], is_readable);
        for part in key.chunks(8).filter(|_| !is_readable) {
            assert!(!has(&path, part), "the key is on the disk");
        }
        assert_eq!(holder.check(), NONE);
        let read = pager.state().expect("answers").faults.disk.count;
        assert!(read > 0, "nothing was read back");
        pager.detach().expect("lets go");
        assert_eq!(holder.check(), NONE);
        holder.stop();
    }
}

/// A successor uses the state's key, whatever its `--encrypt` option, also for the pages that move to the slow store.
#[test]
fn successor_keeps_encryption_key() {
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let mut holder = Holder::start();
    let (fast, slow) = (disk.path().join("fast"), disk.path().join("slow"));
    let (fast_name, slow_name) = (fast.display().to_string(), slow.display().to_string());
    let disks = ["--swap-cache", &fast_name, "--swap-size", "16MiB"];
    let disks = [&disks[..], &["--slow-store", &slow_name, "--slow-size", "128MiB"]].concat();
    let attach = |holder: &Holder, encrypt: &[&str]| {
        let words = [&disks[..], encrypt].concat();
        holder.attach(folder.path(), &words).start().expect("it attaches")
    };
    let mut pager = attach(&holder, &[]);
    wait_for_disk(&pager, 1, 4 * MIB);
    for encrypt in [&[][..], &["--encrypt", "off"], &["--encrypt", "on"]] {
        pager.process.kill();
        pager = attach(&holder, encrypt);
        let told = "data on the disks is encrypted, as the previous pager was configured";
        assert_eq!(
            pager.process.output().contains(told),
            encrypt == ["--encrypt", "off"],
            "{}",
            pager.process.output()
        );
        assert_eq!(holder.check(), NONE);
        let state = pager.state().expect("answers");
        assert!(state.disks.iter().all(|disk| disk.encrypted), "{state:#?}");
        for path in [&fast, &slow] {
            assert!(!has(path, SEGMENT) && readable(path).is_empty(), "{}", path.display());
        }
    }
    pager.detach().expect("lets go");
    holder.stop();
}

/// A successor of a pager without encryption does not encrypt; a new attach does.
#[test]
fn unencrypted_state_changes_only_on_reattach() {
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let mut holder = Holder::start();
    let swap = disk.path().join("swap").display().to_string();
    let disks = ["--swap-cache", &swap, "--swap-size", "128MiB"];
    let plain = [&disks[..], &["--encrypt", "off"]].concat();
    let mut pager = holder.attach(folder.path(), &plain).start().expect("it attaches");
    wait_for_disk(&pager, 0, 8 * MIB);
    pager.process.kill();
    let attach = holder.attach(folder.path(), &disks);
    let mut pager = attach.start().expect("it takes the place");
    let told = "data on the disks is not encrypted, as the previous pager was configured";
    pager.process.wait_for(told, TEST_TIMEOUT).expect("it is logged");
    assert!(!pager.state().expect("answers").disks[0].encrypted);
    assert_eq!(holder.check(), NONE);
    pager.detach().expect("lets go");
    let mut pager = attach.start().expect("it attaches");
    assert!(pager.state().expect("answers").disks[0].encrypted);
    pager.detach().expect("lets go");
    holder.stop();
}

#[test]
fn damaged_key_loses_pages_never_corrupts() {
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let mut holder = Holder::start();
    let swap = disk.path().join("swap").display().to_string();
    let words = ["--swap-cache", &swap, "--swap-size", "128MiB"];
    let attach = holder.attach(folder.path(), &words);
    let mut pager = attach.start().expect("it attaches");
    wait_for_disk(&pager, 0, 20 * MIB);
    pager.process.kill();
    let state = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(holder.memfd("larder-pages"))
        .expect("root, or who attached");
    let mut byte = [0];
    state.read_exact_at(&mut byte, KEY_AT + 5).expect("a key");
    state.write_all_at(&[byte[0] ^ 0x10], KEY_AT + 5).expect("a key");
    let mut pager = attach.start().expect("it takes the place");
    let lost = holder.check();
    // About half of the memory is on the disk.
    assert!(lost.len() > 2000 && lost.len() < 11_000, "{} pages", lost.len());
    let told = pager.state().expect("answers").lost_pages;
    assert_eq!(told, lost.len() as u64);
    let logged = pager.process.wait_for(" is lost, because its stored copy is damaged", TEST_TIMEOUT);
    logged.expect("it is logged");
    pager.detach().expect("lets go");
}

/// A process whose pager has an encrypted swap cache sees no wrong page when pagers are killed.
#[test]
fn process_survives_kills_with_encryption() {
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let swap = disk.path().join("swap").display().to_string();
    let words = ["--compressed", "2MiB", "--swap-cache", &swap, "--swap-size", "256MiB"];
    let report = memory_kills::of_verifier(
        larder_path(),
        verifier_command("mixed"),
        &words,
        folder.path(),
        KillPlan { count: 15, burst_every: 4 },
        &mut Random::new(11),
    );
    assert!(report.expect("nothing was noticed").faults > 0);
    assert!(!disk.path().join("swap").exists(), "the swap cache's file is left");
}

#[test]
fn encrypt_without_disk_is_refused() {
    let fixture = Fixture::new();
    let (code, said) = run_command(fixture.attach(&["--budget", BUDGET, "--encrypt", "on"]).command());
    let why = "--encrypt on: there is nothing to encrypt without --swap-cache or --slow-store";
    assert!(code == Some(2) && said.contains(why), "{said}");
    fixture.verify();
}
