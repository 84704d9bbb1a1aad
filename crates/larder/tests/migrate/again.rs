//! Connections that are lost and made again: every byte still arrives once, in both directions, and neither QEMU sees
//! more than a pause.

use std::io::Read as _;
use std::net::Shutdown;
use std::sync::Mutex;

use larder_bench::campaign::Random;
use larder_bench::campaign::migration::larder::{Side, receive_command};
use larder_bench::campaign::migration::relay::{Relay, Tamper, Way};
use larder_bench::campaign::migration::vm::{Load, Machine, Release, Settings, counted};
use serde_json::json;

use crate::MEMORY_MIB;
use crate::ends::{Between, Received, Waiting, carries, carries_on, main_channel, was_closed, write};
use crate::support::{TEST_TIMEOUT, larder_path, test_pattern};
use crate::tls::Authority;
use crate::wire::{END, OPEN};

const PAGES: usize = 2000;
const IS_BACK: &str = "the link was restored after";

/// Carries a main channel, lets `happens` act when `held_at` bytes have crossed the lanes, and checks that everything
/// arrives. Returns the sender's output.
fn goes_on(mut between: Between, held_at: u64, happens: impl FnOnce(&Between)) -> String {
    let stream = main_channel(PAGES);
    between.relay.hold_at(held_at);
    let writer = write(between.source(), stream.clone());
    between.relay.wait_until_held(TEST_TIMEOUT).expect("it carries so much");
    happens(&between);
    between.relay.release();
    for side in [&between.sender, &between.receiver] {
        side.process.wait_for(IS_BACK, TEST_TIMEOUT).expect("it says so");
    }
    carries_on(&mut between, &stream, || writer.join().expect("written"))
}

#[test]
fn session_survives_cut_connections() {
    for held_at in [1, 100_000, 2_000_001] {
        goes_on(Between::start(), held_at, |between| between.relay.cut());
    }
}

#[test]
fn session_survives_one_cut_connection() {
    for number in 0..3 {
        goes_on(Between::start(), 1_000_000, |between| between.relay.cut_connection(number));
    }
}

#[test]
fn idle_session_survives_cuts() {
    let mut between = Between::start();
    for number in 1..=3 {
        between.relay.cut();
        for side in [&between.sender, &between.receiver] {
            let back = side.process.wait_for_count(IS_BACK, number, TEST_TIMEOUT);
            back.expect("the session goes on");
        }
    }
    carries(&mut between, PAGES);
}

/// A link that silently carries nothing in one or both directions, as after a router lost its state, is made again.
#[test]
fn frozen_link_is_reconnected() {
    std::thread::scope(|scope| {
        for ways in [&[Way::There][..], &[Way::Back], &[Way::There, Way::Back]] {
            scope.spawn(move || {
                goes_on(Between::start(), 1_000_000, |between| {
                    ways.iter().for_each(|way| between.relay.freeze(*way));
                })
            });
        }
    });
}

/// Ends a connection after this many bytes.
struct Cutter(u64);

impl Tamper for Cutter {
    fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        let len = self.0.min(bytes.len() as u64);
        out.extend_from_slice(&bytes[..len as usize]);
        self.0 -= len;
        self.0 > 0
    }
}

/// Carries channels in both directions over connections each of which is cut after some bytes, `cuts` times. Data of
/// unknown channels, and answers of the destination's QEMU, arrive as well.
fn over_and_over(words: [&[&str]; 2], seed: u64, cuts: usize) {
    let random = Mutex::new(Random::new(seed));
    let tamper = move |number: usize, way: Way| -> Option<Box<dyn Tamper>> {
        // The first connections open the session.
        let is_cut = (3..3 + cuts).contains(&number) || number < 3;
        let mut random = random.lock().expect("whole");
        let least = if number < 3 { 8_000 } else { 0 };
        let bytes = match (way, random.below(3)) {
            (Way::There, 0) => least + random.below(3_000),
            (Way::There, _) => least + random.below(600_000),
            (Way::Back, _) => least + random.below(5_000),
        };
        is_cut.then(|| Box::new(Cutter(bytes + 1)) as Box<dyn Tamper>)
    };
    let mut between = Waiting::start(words[1]).joined_by(words[0], tamper);
    let streams = [main_channel(PAGES), test_pattern(5, 6_000_000), test_pattern(6, 300_001)];
    let answers = test_pattern(9, 400_000);
    let sources = streams.clone().map(|_| between.source());
    let destinations = streams.clone().map(|_| between.destination());
    let written: Vec<_> = sources
        .iter()
        .zip(&streams)
        .map(|(source, stream)| write(source.try_clone().expect("a socket"), stream.clone()))
        .collect();
    let received: Vec<_> =
        destinations.iter().map(|destination| Received::from(destination.try_clone().expect("a socket"))).collect();
    let answered = write(destinations[2].try_clone().expect("a socket"), answers.clone());
    let mut heard = vec![0; answers.len()];
    if let Err(error) = (&sources[2]).read_exact(&mut heard) {
        panic!("seed {seed}: {error}: {:#?}", between.fail());
    }
    assert!(heard == answers, "other bytes came back");
    drop(answered.join());
    for (source, writer) in sources.iter().zip(written) {
        drop(writer.join().expect("written"));
        source.shutdown(Shutdown::Write).expect("a socket");
    }
    for (received, stream) in received.into_iter().zip(&streams) {
        let received = received.end();
        assert!(received == *stream, "{} bytes became {}", stream.len(), received.len());
    }
    drop(destinations);
    assert!(sources.iter().all(was_closed));
    let said = between.succeed();
    assert!(said.contains(IS_BACK), "{said}");
}

#[test]
fn repeated_cuts_lose_and_repeat_nothing() {
    for seed in 1..=4 {
        over_and_over([&[], &[]], seed, 60);
    }
}

#[test]
fn repeated_tls_cuts_lose_nothing() {
    let authority = Authority::new();
    let words = authority.words();
    for seed in 5..=6 {
        over_and_over([&words, &words], seed, 40);
    }
}

/// Ends the first control connection before or after a message of this kind.
struct CutAt {
    kind: u8,
    after: bool,
    before: Vec<u8>,
    greeting: usize,
}

impl Tamper for CutAt {
    fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        self.before.extend_from_slice(bytes);
        let greeting = self.greeting.min(self.before.len());
        out.extend(self.before.drain(..greeting));
        self.greeting -= greeting;
        while self.greeting == 0 && self.before.len() >= 24 {
            let len = 24 + u32::from_le_bytes(self.before[4..8].try_into().expect("4 bytes")) as usize;
            if self.before.len() < len {
                return true;
            }
            let is_there = self.before[2] == self.kind;
            if !is_there || self.after {
                out.extend(self.before.drain(..len));
            }
            if is_there {
                return false;
            }
        }
        true
    }
}

/// A session ends properly, however the connections are cut around its first and last messages.
#[test]
fn session_ends_cleanly_despite_cuts() {
    for (kind, way, after) in [
        (OPEN, Way::There, false),
        (OPEN, Way::There, true),
        (END, Way::There, false),
        (END, Way::There, true),
        (END, Way::Back, false),
    ] {
        let tamper = move |number, going: Way| -> Option<Box<dyn Tamper>> {
            let greeting = match way {
                Way::There => crate::wire::HELLO_BYTES,
                Way::Back => crate::wire::WELCOME_BYTES,
            };
            (number == 0 && going == way)
                .then(|| Box::new(CutAt { kind, after, before: Vec::new(), greeting }) as Box<dyn Tamper>)
        };
        let mut between = Waiting::start(&[]).joined_by(&[], tamper);
        carries(&mut between, 200);
    }
}

#[test]
fn lost_link_fails_after_patience() {
    let mut between = Waiting::start(&[]).joined(&["--patience", "1"]);
    let stream = main_channel(PAGES);
    between.relay.hold_at(1_000_000);
    let _writer = write(between.source(), stream.clone());
    let source = between.source();
    let received = Received::from(between.destination());
    between.relay.wait_until_held(TEST_TIMEOUT).expect("so much");
    between.relay.stall();
    let [sender, receiver] = between.fail();
    assert!(sender.contains("and could not be restored within 1 s: "), "{sender}");
    assert!(receiver.contains("and the sender did not reconnect within 1 s"), "{receiver}");
    assert!(was_closed(&source));
    let received = received.end();
    assert!(received.len() < stream.len() && stream.starts_with(&received));
}

#[test]
fn dead_receiver_is_not_awaited() {
    let mut between = Waiting::start(&[]).joined_directly(&["--patience", "3600"]);
    let source = between.source();
    between.receiver.process.kill();
    let [sender, _] = between.fail();
    assert!(
        sender.contains("and cannot be re-established: cannot connect to 127.0.0.1:") && sender.contains("refused"),
        "{sender}"
    );
    assert!(was_closed(&source));
}

#[test]
fn restarted_receiver_rejects_old_session() {
    let mut between = Waiting::start(&[]).joined(&["--patience", "3600"]);
    let source = between.source();
    let _destination = between.destination();
    let address = between.receiver.address().to_string();
    between.relay.stall();
    between.receiver.process.kill();
    let second = receive_command(larder_path(), &address, &between.path("qemu"), &[]);
    let second = Side::listening(second).expect("it listens");
    between.relay.release();
    let (code, said) = between.sender.end().expect("it ends");
    assert_eq!(code, Some(2), "{said}");
    let text = "and cannot be re-established: the receiver refuses: there is no such session here: this receiver was restarted";
    assert!(said.contains(text), "{said}");
    assert!(was_closed(&source));
    second.process.wait_for("refused: there is no such session here", TEST_TIMEOUT).expect("it says so");
}

#[test]
fn lost_link_is_shown_in_status() {
    let waiting = Waiting::start(&[]);
    let folder = crate::support::temp_dir_on_tmpfs();
    let control = folder.path().join("control");
    let control = control.to_str().expect("UTF-8");
    let mut between = waiting.joined(&["--control", control]);
    let status = |words: &[&str]| {
        let mut command = std::process::Command::new(larder_path());
        command.args(["migrate", "status", control]).args(words);
        crate::support::run_command(command).1
    };
    let when = |text: &str| {
        let give_up = std::time::Instant::now() + TEST_TIMEOUT;
        while !status(&[]).contains(text) {
            assert!(std::time::Instant::now() < give_up, "no {text}: {}", status(&[]));
        }
    };
    between.relay.stall();
    between.relay.cut();
    when("link lost, reconnecting for ");
    let state: serde_json::Value = serde_json::from_str(&status(&["--output", "json"])).expect("JSON");
    assert!(state["link"]["lost_seconds"].as_f64() >= Some(0.0) && state["link"]["losses"] == 1, "{state}");
    between.relay.release();
    between.sender.process.wait_for(IS_BACK, TEST_TIMEOUT).expect("it says so");
    when("lost once");
    assert!(!status(&[]).contains("link lost"));
    carries(&mut between, 200);
}

/// Checks a move by post-copy whose connections are cut around the switch-over, a fraction of a second in which a
/// connection that is lost for good would kill the guest.
fn goes_over_by_post_copy(release: Release) {
    let load = Load { kind: "random", ..Load::default() };
    let machine = Machine::new(release, MEMORY_MIB, &load).expect("the test bed is set up");
    let mut source = machine.boot().expect("the guest boots");
    let mut destination = machine.incoming().expect("QEMU starts");
    let settings = Settings { postcopy: true, ..Settings::default() };
    let path = |name: &str| machine.folder().join(name);
    for vm in [&mut source, &mut destination] {
        vm.prepare(&settings).expect("QEMU takes it");
    }
    destination.listen(&path("qemu")).expect("QEMU waits");
    let mut receiver = Side::receiver(larder_path(), &path("qemu"), &[]).expect("it listens");
    let relay = Relay::start(receiver.address()).expect("a port");
    let mut sender =
        Side::sender(larder_path(), &path("sender"), relay.address(), &["--bandwidth", "48MiB"]).expect("it connects");
    source.migrate(&path("sender")).expect("QEMU begins");
    source.wait_for_migration(&["active"]).expect("it goes on");
    source.ask("migrate-start-postcopy", &json!({})).expect("it may");
    // Cuts as soon as the source's guest is paused, and also each time that more than a frame was carried.
    let (mut stands, mut before) = (false, relay.carried());
    while destination.run_state().expect("answers") != "running" {
        let stops = !stands && source.run_state().expect("answers") != "running";
        if stops || relay.carried() > before + 400_000 {
            relay.cut();
            (stands, before) = (stands || stops, relay.carried());
        }
    }
    assert!(stands, "it was not seen to stand still");
    relay.cut();
    source.wait_for_migration(&["completed"]).expect("the guest is moved");
    destination.verifies().expect("its memory is right");
    assert_eq!(source.run_state().expect("answers"), "postmigrate");
    for side in [&mut sender, &mut receiver] {
        let (code, said) = side.end().expect("ends");
        assert!(code == Some(0) && said.contains(IS_BACK), "{said}");
    }
    counted(&[source.console(), destination.console()]).expect("it has counted on");
}

/// With the host's QEMU, a move by post-copy survives cut connections at the switch-over.
#[test]
fn host_qemu_postcopy_survives_switchover_cuts() {
    goes_over_by_post_copy(Release::Host);
}

/// With QEMU 10, a move by post-copy survives cut connections at the switch-over.
#[test]
fn qemu_10_postcopy_survives_switchover_cuts() {
    goes_over_by_post_copy(Release::Debian13);
}
