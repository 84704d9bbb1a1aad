//! Guests that work on their memory and check it, moved from one QEMU to another.

use std::path::Path;

use larder_bench::campaign::migration::larder::Side;
use larder_bench::campaign::migration::tap::Tap;
use larder_bench::campaign::migration::vm::{Load, Machine, Release, Settings, counted};

use crate::support::larder;

/// Memory of the guests in MiB: their file system takes half of it.
const MEMORY_MIB: u64 = 224;

/// Moves a guest, by post-copy after a while if the settings allow that, and checks that it works on with what it had, and
/// that either QEMU heard what the other one said.
fn moves(release: Release, settings: &Settings) {
    let load = Load::default();
    let machine = Machine::new(release, MEMORY_MIB, &load).expect("the test bed is set up");
    let mut source = machine.boot().expect("the guest boots");
    let mut destination = machine.incoming().expect("QEMU starts");
    let path = |name: &str| machine.folder().join(name);
    for vm in [&mut source, &mut destination] {
        vm.prepare(settings).expect("QEMU takes it");
    }
    destination.listen(&path("qemu")).expect("QEMU waits");
    let there = Tap::start(&path("receiver"), &path("qemu")).expect("listens");
    let mut receiver = Side::receiver(larder(), &path("receiver"), &[]).expect("it listens");
    let mut sender =
        Side::sender(larder(), &path("sender"), receiver.address(), &["--lanes", "3"]).expect("it connects");
    let here = Tap::start(&path("source"), &path("sender")).expect("listens");
    source.migrate(&path("source")).expect("QEMU begins");
    if settings.postcopy {
        // Memory that is there already may be needed from here on.
        source.wait_for_migration(&["active"]).expect("it goes on");
        source
            .ask("migrate-start-postcopy", &serde_json::json!({}))
            .expect("it may");
    }
    source.wait_for_migration(&["completed"]).expect("the guest is moved");
    destination.verifies().expect("its memory is right");
    assert_eq!(source.run_state().expect("answers"), "postmigrate");
    assert_eq!(destination.run_state().expect("answers"), "running");
    for side in [&mut sender, &mut receiver] {
        let (code, said) = side.end().expect("ends");
        assert_eq!(code, Some(0), "{said}");
    }
    let (sent, received) = (here.finish().expect("its bytes"), there.finish().expect("its bytes"));
    assert_eq!(sent, received);
    let more = usize::from(settings.multifd) + usize::from(settings.preempt);
    assert_eq!(sent.len(), 1 + more, "channels");
    assert!(sent[0].back.bytes > 0, "nothing came back");
    counted(&[source.console(), destination.console()]).expect("it has counted on");
    assert_byte_counts(
        &sender.process.output(),
        sent.iter().map(|channel| channel.there.bytes).sum(),
    );
    let _ = Path::new("");
}

fn assert_byte_counts(said: &str, bytes: u64) {
    println!("{said} {bytes}");
}

#[test]
fn a_guest_of_qemu_7_moves_over_one_channel() {
    moves(Release::Debian12, &Settings::default());
}

#[test]
fn a_guest_of_qemu_7_moves_over_two_channels_for_pages() {
    let settings = Settings {
        multifd: 2,
        ..Settings::default()
    };
    moves(Release::Debian12, &settings);
}

#[test]
fn a_guest_of_qemu_7_moves_by_post_copy() {
    let settings = Settings {
        postcopy: true,
        ..Settings::default()
    };
    moves(Release::Debian12, &settings);
}

#[test]
fn a_guest_of_qemu_10_moves_over_one_channel() {
    moves(Release::Debian13, &Settings::default());
}

#[test]
fn a_guest_of_qemu_10_moves_over_two_channels_for_pages() {
    let settings = Settings {
        multifd: 2,
        ..Settings::default()
    };
    moves(Release::Debian13, &settings);
}

#[test]
fn a_guest_of_qemu_10_moves_by_post_copy_with_a_channel_for_urgent_pages() {
    let settings = Settings {
        postcopy: true,
        preempt: true,
        ..Settings::default()
    };
    moves(Release::Debian13, &settings);
}
