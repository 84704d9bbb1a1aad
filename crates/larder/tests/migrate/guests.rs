//! Moves of real guests that fail: the guest continues to run at its source, or, once the destination has it, there,
//! and never on both.

use larder_bench::campaign::migration::larder::Side;
use larder_bench::campaign::migration::relay::Relay;
use larder_bench::campaign::migration::vm::{Load, Machine, Release, Settings, Vm, counted};
use serde_json::json;

use crate::MEMORY_MIB;
use crate::support::{TEST_TIMEOUT, larder_path};

/// Progress of a migration at which something fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The transfer of the guest's memory has begun.
    Begun,
    /// Much of the memory was transferred.
    Middle,
    /// The source has paused the guest, and still has data to send.
    Stopped,
    /// The source has sent everything, but the destination has not received it.
    Sent,
}

const STAGES: [Stage; 4] = [Stage::Begun, Stage::Middle, Stage::Stopped, Stage::Sent];

/// The parts of a move other than the source.
struct Way {
    destination: Vm,
    receiver: Side,
    relay: Relay,
    sender: Side,
}

impl Way {
    /// Prepares everything, without starting QEMU's migration.
    fn new(machine: &Machine, source: &mut Vm, settings: &Settings, words: &[&str]) -> Self {
        let mut destination = machine.incoming().expect("QEMU starts");
        source.prepare(settings).expect("QEMU takes it");
        destination.prepare(settings).expect("QEMU takes it");
        let qemu = machine.folder().join("qemu");
        destination.listen(&qemu).expect("QEMU waits");
        let receiver = Side::receiver(larder_path(), &qemu, &[]).expect("it listens");
        let relay = Relay::start(receiver.address()).expect("a port");
        // Without patience, so that a failure is final.
        let words = [&["--lanes", "2", "--patience", "0"], words].concat();
        let sender = Side::sender(larder_path(), &machine.folder().join("sender"), relay.address(), &words);
        Self { destination, receiver, relay, sender: sender.expect("it connects") }
    }

    /// Prepares a migration at this stage.
    fn at(stage: Stage, machine: &Machine, source: &mut Vm) -> Self {
        let settings =
            Settings { pause_before_switchover: matches!(stage, Stage::Stopped | Stage::Sent), ..Settings::default() };
        let way = Self::new(machine, source, &settings, &[]);
        match stage {
            Stage::Begun => way.relay.hold_at(1_000_000),
            Stage::Middle => way.relay.hold_at(30_000_000),
            Stage::Stopped | Stage::Sent => {}
        }
        source.migrate(&machine.folder().join("sender")).expect("QEMU begins");
        match stage {
            Stage::Begun | Stage::Middle => way.relay.wait_until_held(TEST_TIMEOUT).expect("so much comes"),
            Stage::Stopped | Stage::Sent => {
                source.wait_for_migration(&["pre-switchover"]).expect("it gets that far");
            }
        }
        if stage == Stage::Sent {
            way.relay.hold_at(way.relay.carried());
            let go_on = json!({"state": "pre-switchover"});
            // QEMU may answer only once the rest has been sent.
            source.begin("migrate-continue", &go_on).expect("it goes on");
            way.relay.wait_until_held(TEST_TIMEOUT).expect("it sends the rest");
        }
        way
    }

    /// Asserts, after any failure, that neither of Larder's processes reports success, that the guest runs at the
    /// source, and that it never ran at the destination.
    fn failed(mut self, stage: Stage, source: &mut Vm) {
        if stage == Stage::Stopped {
            // QEMU waits for this command and then notices the failure, unless the failure has ended the migration
            // already.
            let _ = source.ask("migrate-continue", &json!({"state": "pre-switchover"}));
        }
        source.wait_for_migration(&["failed", "cancelled"]).expect("it gives up");
        source.works().expect("the guest goes on");
        assert_eq!(source.run_state().expect("answers"), "running");
        for side in [&mut self.sender, &mut self.receiver] {
            let (code, said) = side.end().expect("it ends");
            assert!(code.is_none_or(|code| code == 2), "{stage:?}: {code:?} {said}");
        }
        let console = self.destination.console();
        assert!(!console.contains("TICK"), "{stage:?}: it ran at the destination: {console}");
        if let Ok(state) = self.destination.run_state() {
            assert_ne!(state, "running", "{stage:?}");
        }
    }
}

/// A failure: its name, and the function that causes it.
type Break<'a> = (&'a str, &'a dyn Fn(&mut Way));

fn machine() -> Machine {
    Machine::new(Release::Host, MEMORY_MIB, &Load::default()).expect("the test bed is set up")
}

/// Moves the guest successfully.
fn moves(machine: &Machine, mut source: Vm) {
    let mut way = Way::new(machine, &mut source, &Settings::default(), &[]);
    source.migrate(&machine.folder().join("sender")).expect("QEMU begins");
    source.wait_for_migration(&["completed"]).expect("it moves");
    way.destination.verifies().expect("its memory is right");
    for side in [&mut way.sender, &mut way.receiver] {
        let (code, said) = side.end().expect("ends");
        assert_eq!(code, Some(0), "{said}");
    }
    counted(&[source.console(), way.destination.console()]).expect("it has counted on");
}

/// After a failure of Larder or the network the guest runs at its source, and can be moved again.
#[test]
fn guest_survives_failure_and_moves_later() {
    let machine = machine();
    let mut source = machine.boot().expect("the guest boots");
    let breaks: [Break<'_>; 3] = [
        ("the sender is killed", &|way| way.sender.process.kill()),
        ("the receiver is killed", &|way| way.receiver.process.kill()),
        ("the network is cut", &|way| way.relay.cut()),
    ];
    for (what, breaks) in breaks {
        for stage in STAGES {
            println!("{what}: {stage:?}");
            let mut way = Way::at(stage, &machine, &mut source);
            breaks(&mut way);
            way.failed(stage, &mut source);
        }
    }
    moves(&machine, source);
}

/// After a cancellation, or on a silent network, the guest runs at its source.
#[test]
fn cancelled_guest_runs_at_source() {
    let machine = machine();
    let mut source = machine.boot().expect("the guest boots");
    // At the last stage QEMU answers no client until its data was sent.
    for stage in [Stage::Begun, Stage::Middle, Stage::Stopped] {
        println!("cancelled: {stage:?}");
        let way = Way::at(stage, &machine, &mut source);
        source.ask("migrate_cancel", &json!({})).expect("it may");
        way.relay.release();
        way.failed(stage, &mut source);
    }
    for stage in [Stage::Middle, Stage::Sent] {
        println!("silent: {stage:?}");
        let way = Way::at(stage, &machine, &mut source);
        way.relay.stall();
        way.failed(stage, &mut source);
    }
    moves(&machine, source);
}

/// If the destination is killed, the guest runs at its source; if the source is killed, it runs nowhere.
#[test]
fn guest_never_runs_from_partial_state() {
    let machine = machine();
    let mut source = machine.boot().expect("the guest boots");
    for stage in STAGES {
        println!("the destination is killed: {stage:?}");
        let mut way = Way::at(stage, &machine, &mut source);
        way.destination.process.kill();
        way.relay.release();
        way.failed(stage, &mut source);
    }
    let mut way = Way::at(Stage::Middle, &machine, &mut source);
    source.process.kill();
    way.relay.release();
    for side in [&mut way.sender, &mut way.receiver] {
        let (code, said) = side.end().expect("it ends");
        assert_eq!(code, Some(2), "{said}");
    }
    assert!(!way.destination.console().contains("TICK"));
}

#[test]
fn interrupted_postcopy_resumes_through_new_pair() {
    let machine = Machine::new(Release::Debian13, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    let mut source = machine.boot().expect("the guest boots");
    let settings = Settings { postcopy: true, ..Settings::default() };
    let mut way = Way::new(&machine, &mut source, &settings, &["--bandwidth", "16MiB"]);
    source.migrate(&machine.folder().join("sender")).expect("QEMU begins");
    source.wait_for_migration(&["active"]).expect("it goes on");
    source.ask("migrate-start-postcopy", &json!({})).expect("it may");
    source.wait_for_migration(&["postcopy-active"]).expect("it does");
    way.destination.wait_for_console("TICK", 1).expect("it runs there");
    way.relay.cut();
    for side in [&mut way.sender, &mut way.receiver] {
        let (code, said) = side.end().expect("ends");
        assert_eq!(code, Some(2), "{said}");
    }
    source.wait_for_migration(&["postcopy-paused"]).expect("it waits");
    way.destination.wait_for_migration(&["postcopy-paused"]).expect("it waits");
    assert_ne!(source.run_state().expect("answers"), "running");
    let (again, sender) = (machine.folder().join("again"), machine.folder().join("sender"));
    let uri = |path: &std::path::Path| format!("unix:{}", path.display());
    way.destination.ask("migrate-recover", &json!({"uri": uri(&again)})).expect("it may");
    let mut receiver = Side::receiver(larder_path(), &again, &[]).expect("it listens");
    let mut other = Side::sender(larder_path(), &sender, receiver.address(), &[]).expect("it connects");
    source.ask("migrate", &json!({"uri": uri(&sender), "resume": true})).expect("it may");
    source.wait_for_migration(&["completed"]).expect("it moves");
    way.destination.verifies().expect("its memory is right");
    for side in [&mut other, &mut receiver] {
        let (code, said) = side.end().expect("ends");
        assert_eq!(code, Some(0), "{said}");
    }
    counted(&[source.console(), way.destination.console()]).expect("it has counted on");
}
