//! The server is killed at random moments. `larder-bench kill` does the same for longer.

mod support;

use larder_bench::campaign::disk::{Format, Target, Victim};
use larder_bench::campaign::front_end::Options;
use larder_bench::campaign::{Random, boot_kills, flush_kills, guest_kills};
use support::{larder, on_disk, on_tmpfs};

#[test]
fn nothing_acknowledged_is_lost_and_everything_is_answered_when_the_server_is_killed() {
    for (folder, packed) in [
        (on_disk(), false),
        (on_disk(), true),
        (on_tmpfs(), false),
        (on_tmpfs(), true),
    ] {
        let sockets = on_tmpfs();
        let options = Options {
            queues: 2,
            packed,
            ..Options::default()
        };
        let image = folder.path().join("disk.raw");
        let report = flush_kills::run(larder(), &image, sockets.path(), options, 10, &mut Random::new(1));
        let report = report.expect("survives");
        assert_eq!(report.kills, 10);
        assert!(report.writes > 0 && report.flushes > 0, "{report:?}");
    }
}

#[test]
fn no_flushed_write_is_lost_when_the_server_of_a_qcow2_image_is_killed() {
    let (folder, sockets) = (on_disk(), on_tmpfs());
    let image = folder.path().join("disk.qcow2");
    let larder = Victim {
        format: Format::Qcow2,
        ..Victim::from(larder())
    };
    let options = Options {
        queues: 2,
        ..Options::default()
    };
    let report = flush_kills::run(larder, &image, sockets.path(), options, 10, &mut Random::new(4));
    assert_eq!(report.expect("survives").kills, 10);
}

#[test]
fn nothing_acknowledged_is_lost_when_the_nbd_server_behind_a_disk_is_killed() {
    let (folder, sockets) = (on_disk(), on_tmpfs());
    let image = folder.path().join("disk.raw");
    let nbdkit = Victim {
        target: Target::Nbdkit,
        ..Victim::from(larder())
    };
    let report = flush_kills::run(
        nbdkit,
        &image,
        sockets.path(),
        Options::default(),
        5,
        &mut Random::new(5),
    );
    assert_eq!(report.expect("survives").kills, 5);
}

#[test]
fn a_guest_on_a_disk_file_system_notices_only_a_pause_when_its_server_is_killed() {
    let (folder, sockets) = (on_disk(), on_tmpfs());
    let image = folder.path().join("disk.raw");
    guest_kills::run(larder(), &image, sockets.path(), "num-queues=2", 5, &mut Random::new(2)).expect("survives");
}

#[test]
fn a_guest_with_packed_queues_on_tmpfs_notices_only_a_pause_when_its_server_is_killed() {
    let (folder, sockets) = (on_tmpfs(), on_tmpfs());
    let image = folder.path().join("disk.raw");
    let disk = "num-queues=2,packed=on";
    guest_kills::run(larder(), &image, sockets.path(), disk, 5, &mut Random::new(3)).expect("survives");
}

#[test]
fn a_guest_boots_though_the_servers_of_its_disks_are_killed_all_the_while() {
    let folder = on_disk();
    let report = boot_kills::run(larder(), folder.path(), None, 2, &mut Random::new(6)).expect("starts");
    assert!(report.kills > 0, "{report:?}");
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
}
