//! Guests that use and verify their memory, moved from one QEMU to another.

use std::time::{Duration, Instant};

use larder_bench::campaign::migration::larder::Side;
use larder_bench::campaign::migration::tap::Tap;
use larder_bench::campaign::migration::vm::{Load, Machine, Release, Settings, Vm, counted};
use serde_json::{Value, json};

use crate::MEMORY_MIB;
use crate::support::{TEST_TIMEOUT, larder_path};

/// Moves a guest with this load, by post-copy if the settings say so, with further arguments for the sender. Checks
/// that the guest continues with its memory, and that each QEMU received exactly the other's stream. QEMU sends
/// rounds until it begins round `until_round`, or as many as it likes. Returns the sender's statistics.
fn moves(release: Release, kind: &'static str, settings: &Settings, words: &[&str], until_round: Option<u64>) -> Value {
    let load = Load { kind, ..Load::default() };
    let machine = Machine::new(release, MEMORY_MIB, &load).expect("the test bed is set up");
    let mut source = machine.boot().expect("the guest boots");
    let mut destination = machine.incoming().expect("QEMU starts");
    let path = |name: &str| machine.folder().join(name);
    for vm in [&mut source, &mut destination] {
        vm.prepare(settings).expect("QEMU takes it");
    }
    destination.listen(&path("qemu")).expect("QEMU waits");
    let there = Tap::start(&path("receiver"), &path("qemu")).expect("listens");
    let mut receiver = Side::receiver(larder_path(), &path("receiver"), &[]).expect("it listens");
    let words = [&["--lanes", "3", "--output", "json"], words].concat();
    let mut sender = Side::sender(larder_path(), &path("sender"), receiver.address(), &words).expect("it connects");
    let here = Tap::start(&path("source"), &path("sender")).expect("listens");
    if until_round.is_some() {
        may_pause_for(&mut source, 1);
    }
    source.migrate(&path("source")).expect("QEMU begins");
    if let Some(round) = until_round {
        wait_for_round(&mut source, round);
        may_pause_for(&mut source, 20_000);
    }
    if settings.postcopy {
        source.wait_for_migration(&["active"]).expect("it goes on");
        source.ask("migrate-start-postcopy", &json!({})).expect("it may");
    }
    source.wait_for_migration(&["completed"]).expect("the guest is moved");
    let by_postcopy = source.monitor().take_events().concat().contains("postcopy-active");
    assert_eq!(by_postcopy, settings.postcopy);
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
    let said = sender.process.output();
    let told = said.find('{').map_or("", |begin| &said[begin..]);
    let told: Value = serde_json::from_str(told).expect("JSON");
    let bytes: u64 = sent.iter().map(|channel| channel.there.bytes).sum();
    assert_eq!(told["raw_bytes"], bytes);
    assert!(told["wire_bytes"].as_u64() < Some(bytes), "{said}");
    told
}

/// Sets the maximum downtime, from which QEMU decides when to send no further round.
fn may_pause_for(source: &mut Vm, milliseconds: u64) {
    source.ask("migrate-set-parameters", &json!({"downtime-limit": milliseconds})).expect("QEMU takes it");
}

/// Waits until QEMU begins that round.
fn wait_for_round(source: &mut Vm, round: u64) {
    let give_up = Instant::now() + TEST_TIMEOUT;
    loop {
        let is = source.ask("query-migrate", &json!({})).expect("it answers");
        if is["status"] == "completed" || is["ram"]["dirty-sync-count"].as_u64() >= Some(round) {
            return;
        }
        assert!(Instant::now() < give_up, "{is}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the number of pages that were sent as deltas.
fn deltas(told: &Value) -> u64 {
    let ways = told["methods"].as_array().expect("a list");
    let way = ways.iter().find(|way| way["method"] == "delta").expect("it is told");
    way["pages"].as_u64().expect("a number")
}

/// Options for a link on which it pays to compress.
const SLOW: [&str; 2] = ["--bandwidth", "48MiB"];

/// Options for a link on which a round takes seconds, so that also a slow guest changes much in it.
const SLOWER: [&str; 2] = ["--bandwidth", "16MiB"];

/// Round before which pages were sent twice, and then as deltas.
const FOURTH: u64 = 4;

#[test]
fn host_qemu_moves_over_one_channel() {
    moves(Release::Host, "mixed", &Settings::default(), &[], None);
}

#[test]
fn host_qemu_moves_with_multifd() {
    let settings = Settings { multifd: 2, ..Settings::default() };
    let told = moves(Release::Host, "sequence", &settings, &SLOWER, Some(FOURTH));
    assert!(deltas(&told) > 0, "{told}");
}

#[test]
fn host_qemu_moves_by_postcopy() {
    let settings = Settings { postcopy: true, ..Settings::default() };
    moves(Release::Host, "random", &settings, &[], None);
}

#[test]
fn qemu_10_moves_over_one_channel() {
    let told = moves(Release::Debian13, "partial", &Settings::default(), &SLOWER, Some(FOURTH));
    assert!(deltas(&told) > 0, "{told}");
}

#[test]
fn qemu_10_moves_with_multifd() {
    let settings = Settings { multifd: 2, ..Settings::default() };
    moves(Release::Debian13, "mixed", &settings, &SLOW, None);
}

/// Post-copy with a separate channel for urgent pages works with QEMU 10.
#[test]
fn qemu_10_moves_by_preemptible_postcopy() {
    let settings = Settings { postcopy: true, preempt: true, ..Settings::default() };
    moves(Release::Debian13, "constant", &settings, &[], None);
}
