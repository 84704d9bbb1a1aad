//! Moves of real guests that break off: the guest goes on at its source, or, once the destination has it, there, and never on
//! both.

use larder_bench::campaign::migration::larder::Side;
use larder_bench::campaign::migration::relay::Relay;
use larder_bench::campaign::migration::vm::{Load, Machine, Release, Settings, Vm, counted};
use serde_json::json;

use crate::MEMORY_MIB;
use crate::support::{LIMIT, larder};

/// How far a migration has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The first of the guest's memory is under way.
    Begun,
    /// Much of it.
    Middle,
    /// The source has stopped the guest, and has still something to send.
    Stopped,
    /// It has sent all of it, but the destination has not got it.
    Sent,
}

const STAGES: [Stage; 4] = [Stage::Begun, Stage::Middle, Stage::Stopped, Stage::Sent];

/// What a move consists of, but the source.
struct Way {
    destination: Vm,
    receiver: Side,
    relay: Relay,
    sender: Side,
}

impl Way {
    /// Everything is ready, and QEMU has not begun.
    fn new(machine: &Machine, source: &mut Vm, settings: &Settings, words: &[&str]) -> Self {
        let mut destination = machine.incoming().expect("QEMU starts");
        source.prepare(settings).expect("QEMU takes it");
        destination.prepare(settings).expect("QEMU takes it");
        let qemu = machine.folder().join("qemu");
        destination.listen(&qemu).expect("QEMU waits");
        let receiver = Side::receiver(larder(), &qemu, &[]).expect("it listens");
        let relay = Relay::start(receiver.address()).expect("a port");
        // What breaks is to stay so.
        let words = [&["--lanes", "2", "--patience", "0"], words].concat();
        let sender = Side::sender(larder(), &machine.folder().join("sender"), relay.address(), &words);
        Self {
            destination,
            receiver,
            relay,
            sender: sender.expect("it connects"),
        }
    }

    /// At a stage of the migration.
    fn at(stage: Stage, machine: &Machine, source: &mut Vm) -> Self {
        let settings = Settings {
            pause_before_switchover: matches!(stage, Stage::Stopped | Stage::Sent),
            ..Settings::default()
        };
        let way = Self::new(machine, source, &settings, &[]);
        match stage {
            Stage::Begun => way.relay.hold_at(1_000_000),
            Stage::Middle => way.relay.hold_at(30_000_000),
            Stage::Stopped | Stage::Sent => {}
        }
        source.migrate(&machine.folder().join("sender")).expect("QEMU begins");
        match stage {
            Stage::Begun | Stage::Middle => way.relay.wait_until_held(LIMIT).expect("so much comes"),
            Stage::Stopped | Stage::Sent => {
                source
                    .wait_for_migration(&["pre-switchover"])
                    .expect("it gets that far");
            }
        }
        if stage == Stage::Sent {
            way.relay.hold_at(way.relay.carried());
            let go_on = json!({"state": "pre-switchover"});
            // It may answer only once the rest has been sent.
            source.begin("migrate-continue", &go_on).expect("it goes on");
            way.relay.wait_until_held(LIMIT).expect("it sends the rest");
        }
        way
    }

    /// Whatever has broken: neither of Larder's processes says that all is well, the guest works on at the source, and has
    /// never run at the destination.
    fn failed(mut self, stage: Stage, source: &mut Vm) {
        if stage == Stage::Stopped {
            // It waits to be told, and finds out then, unless it was told by what broke.
            let _ = source.ask("migrate-continue", &json!({"state": "pre-switchover"}));
        }
        source
            .wait_for_migration(&["failed", "cancelled"])
            .expect("it gives up");
        source.works().expect("the guest goes on");
        assert_eq!(source.run_state().expect("answers"), "running");
        for side in [&mut self.sender, &mut self.receiver] {
            let (code, said) = side.end().expect("it ends");
            assert!(code.is_none_or(|code| code == 2), "{stage:?}: {code:?} {said}");
        }
        let console = self.destination.console();
        assert!(
            !console.contains("TICK"),
            "{stage:?}: it ran at the destination: {console}"
        );
        if let Ok(state) = self.destination.run_state() {
            assert_ne!(state, "running", "{stage:?}");
        }
    }
}

/// What breaks, and how.
type Break<'a> = (&'a str, &'a dyn Fn(&mut Way));

fn machine() -> Machine {
    Machine::new(Release::Host, MEMORY_MIB, &Load::default()).expect("the test bed is set up")
}

/// Moves the guest after all.
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

#[test]
fn a_guest_goes_on_at_its_source_when_larder_or_the_network_breaks_and_can_be_moved_after_that() {
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

#[test]
fn a_guest_goes_on_at_its_source_when_its_migration_is_cancelled_or_the_network_is_silent() {
    let machine = machine();
    let mut source = machine.boot().expect("the guest boots");
    // In the last stage QEMU answers nobody until it has got rid of what it sends.
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

#[test]
fn a_guest_goes_on_at_its_source_when_the_destination_is_killed_and_nowhere_when_the_source_is() {
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
fn a_post_copy_that_was_cut_goes_on_through_another_pair() {
    let machine = Machine::new(Release::Debian13, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    let mut source = machine.boot().expect("the guest boots");
    let settings = Settings {
        postcopy: true,
        ..Settings::default()
    };
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
    way.destination
        .wait_for_migration(&["postcopy-paused"])
        .expect("it waits");
    assert_ne!(source.run_state().expect("answers"), "running");
    let (again, sender) = (machine.folder().join("again"), machine.folder().join("sender"));
    let uri = |path: &std::path::Path| format!("unix:{}", path.display());
    way.destination
        .ask("migrate-recover", &json!({"uri": uri(&again)}))
        .expect("it may");
    let mut receiver = Side::receiver(larder(), &again, &[]).expect("it listens");
    let mut other = Side::sender(larder(), &sender, receiver.address(), &[]).expect("it connects");
    source
        .ask("migrate", &json!({"uri": uri(&sender), "resume": true}))
        .expect("it may");
    source.wait_for_migration(&["completed"]).expect("it moves");
    way.destination.verifies().expect("its memory is right");
    for side in [&mut other, &mut receiver] {
        let (code, said) = side.end().expect("ends");
        assert_eq!(code, Some(0), "{said}");
    }
    counted(&[source.console(), way.destination.console()]).expect("it has counted on");
}
