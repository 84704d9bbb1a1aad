//! Kills of the server at random moments. `larder-bench kill` runs the same for longer.

mod support;

use larder_bench::campaign::disk::{Format, Target, Victim};
use larder_bench::campaign::front_end::Options;
use larder_bench::campaign::{Random, boot_kills, flush_kills, guest_kills};
use support::{larder_path, temp_dir_on_disk, temp_dir_on_tmpfs};

/// After kills of the server no acknowledged write is lost, and every request is answered.
#[test]
fn killed_server_loses_no_acknowledged_write() {
    for (folder, packed) in [
        (temp_dir_on_disk(), false),
        (temp_dir_on_disk(), true),
        (temp_dir_on_tmpfs(), false),
        (temp_dir_on_tmpfs(), true),
    ] {
        let sockets = temp_dir_on_tmpfs();
        let options = Options { queues: 2, packed, ..Options::default() };
        let image = folder.path().join("disk.raw");
        let report = flush_kills::run(larder_path(), &image, sockets.path(), options, 10, &mut Random::new(1));
        let report = report.expect("survives");
        assert_eq!(report.kills, 10);
        assert!(report.writes > 0 && report.flushes > 0, "{report:?}");
    }
}

#[test]
fn killed_qcow2_server_keeps_flushed_writes() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let image = folder.path().join("disk.qcow2");
    let larder = Victim { format: Format::Qcow2, ..Victim::from(larder_path()) };
    let options = Options { queues: 2, ..Options::default() };
    let report = flush_kills::run(larder, &image, sockets.path(), options, 10, &mut Random::new(4));
    assert_eq!(report.expect("survives").kills, 10);
}

#[test]
fn killed_nbd_backend_loses_nothing() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let image = folder.path().join("disk.raw");
    let nbdkit = Victim { target: Target::Nbdkit, ..Victim::from(larder_path()) };
    let report = flush_kills::run(nbdkit, &image, sockets.path(), Options::default(), 5, &mut Random::new(5));
    assert_eq!(report.expect("survives").kills, 5);
}

#[test]
fn guest_on_disk_survives_kills() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let image = folder.path().join("disk.raw");
    guest_kills::run(larder_path(), &image, sockets.path(), "num-queues=2", 5, &mut Random::new(2)).expect("survives");
}

#[test]
fn guest_with_packed_queues_survives_kills() {
    let (folder, sockets) = (temp_dir_on_tmpfs(), temp_dir_on_tmpfs());
    let image = folder.path().join("disk.raw");
    let disk = "num-queues=2,packed=on";
    guest_kills::run(larder_path(), &image, sockets.path(), disk, 5, &mut Random::new(3)).expect("survives");
}

#[test]
fn guest_boots_through_server_kills() {
    let folder = temp_dir_on_disk();
    let report = boot_kills::run(larder_path(), folder.path(), None, 2, &mut Random::new(6)).expect("starts");
    assert!(report.kills > 0, "{report:?}");
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
}
