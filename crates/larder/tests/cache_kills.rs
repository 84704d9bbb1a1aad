//! Kills of servers of cached disks at random moments. `larder-bench kill --cache-mode` runs the same for longer.

mod support;

use std::time::Duration;

use larder_bench::campaign::cached::{CacheMode, TestCacheOptions};
use larder_bench::campaign::disk::{Format, Victim};
use larder_bench::campaign::foreign::{Campaign, Outcome};
use larder_bench::campaign::front_end::Options;
use larder_bench::campaign::{Random, boot_kills, fio_kills, flush_kills, guest_kills};
use support::{larder_path, temp_dir_on_disk, temp_dir_on_tmpfs};

const MODES: [CacheMode; 4] = [CacheMode::Wt, CacheMode::Wa, CacheMode::Pt, CacheMode::Wb];

/// After a kill the next server serves all acknowledged writes and the writes that another program made meanwhile, or
/// refuses a write-back cache with data that the disk lacks. Without foreign writes it uses the cache at once.
/// `larder-bench foreign-writes` runs the same for longer.
#[test]
fn foreign_write_after_kill_is_served() {
    let (on_disk, in_memory) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let report = Campaign {
        larder: larder_path(),
        folders: &[on_disk.path().to_owned(), in_memory.path().to_owned()],
        tries: 24,
        controls: 12,
        at_once: 18,
        delays: &[Duration::from_millis(100), Duration::from_secs(1)],
        seed: 1,
    };
    let report = report.run().expect("tries");
    assert!(report.failures.is_empty(), "{report}\n{}", report.failures.join("\n"));
    let total = report.total();
    assert_eq!(total.count(Outcome::Believed), 0, "{report}");
    assert!(total.count(Outcome::Compared) > 0, "{report}");
    assert!(total.count(Outcome::Anew) > 0 && total.count(Outcome::Refused) > 0, "{report}");
}

/// Returns a server whose cache is too small for the load's working set.
fn cached(mode: CacheMode, working_set: u64) -> Victim<'static> {
    Victim { cache: Some(TestCacheOptions { mode, size: working_set / 4 * 3 }), ..Victim::from(larder_path()) }
}

/// No read returns stale data, and no acknowledged write is lost, in any cache mode.
#[test]
fn killed_cached_disk_loses_nothing() {
    for (seed, mode) in (1..).zip(MODES) {
        let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
        let image = folder.path().join("disk.raw");
        let victim = cached(mode, flush_kills::DISK);
        let options = Options { queues: 2, ..Options::default() };
        let report = flush_kills::run(victim, &image, sockets.path(), options, 8, &mut Random::new(seed));
        let report = report.expect("survives");
        assert_eq!(report.kills, 8);
        assert!(report.writes > 0 && report.reads > 0, "{report:?}");
        if mode != CacheMode::Pt {
            let share = report.warmth.of_settled().expect("caches that were not empty");
            assert!(share > 0.9, "{mode:?}: {}", report.warmth);
        }
    }
}

/// No read returns stale data after kills of a server with all layers: qcow2, cache and read-ahead.
#[test]
fn killed_full_stack_returns_current_data() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let image = folder.path().join("disk.qcow2");
    let victim = Victim { format: Format::Qcow2, whole: true, ..cached(CacheMode::Wt, flush_kills::DISK) };
    let (options, mut random) = (Options::default(), Random::new(5));
    let report = flush_kills::run(victim, &image, sockets.path(), options, 5, &mut random).expect("survives");
    assert_eq!(report.kills, 5);
    let report = fio_kills::run(victim, &image, sockets.path(), 2, &mut random).expect("survives");
    assert_eq!(report.kills, 2);
}

/// fio verifies its writes after the server of a cached disk was killed, in every cache mode.
#[test]
fn fio_verifies_after_cached_server_kill() {
    for (seed, mode) in (1..).zip(MODES) {
        let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
        let image = folder.path().join("disk.raw");
        let victim = cached(mode, fio_kills::DISK);
        let report = fio_kills::run(victim, &image, sockets.path(), 2, &mut Random::new(seed)).expect("survives");
        assert_eq!(report.kills, 2);
        assert!(report.verified > 0, "{report:?}");
    }
}

/// Guests whose disks have caches notice only a pause when their servers are killed.
#[test]
fn guest_survives_kills_of_cached_server() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let image = folder.path().join("disk.raw");
    let (victim, mut random) = (cached(CacheMode::Wt, guest_kills::WORKING_SET_BYTES), Random::new(2));
    guest_kills::run(victim, &image, sockets.path(), "num-queues=2", 5, &mut random).expect("survives");
    let cache = cached(CacheMode::Wt, boot_kills::DISK / 2).cache;
    let report = boot_kills::run(larder_path(), folder.path(), cache, 1, &mut random).expect("starts");
    assert!(report.kills > 0, "{report:?}");
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
}
