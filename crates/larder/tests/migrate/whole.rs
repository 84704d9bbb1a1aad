//! `larder migrate --qmp` and `larder migrate receive --qmp`: the whole move, of a guest that works on its memory and checks
//! it.

use std::process::Command;

use larder_bench::campaign::Random;
use larder_bench::campaign::migrate_kills::{Fault, campaign};
use larder_bench::campaign::migration::larder::{Side, move_command, receive_whole_command};
use larder_bench::campaign::migration::vm::{Load, Machine, Release, Vm, counted};

use crate::support::{larder, run};

/// Memory of the guests in MiB: their file system takes half of it.
const MEMORY_MIB: u64 = 320;

fn receiver(vm: &Vm) -> Side {
    let command = receive_whole_command(larder(), "127.0.0.1:0", vm.qmp_for_others(), &[]);
    Side::listening(command).expect("it listens")
}

fn moves(source: &Vm, receiver: &Side, words: &[&str]) -> (Option<i32>, String) {
    let to = receiver.address().to_string();
    run(move_command(larder(), source.qmp_for_others(), &to, words))
}

fn take_back(vm: &Vm) -> (Option<i32>, String) {
    let mut command = Command::new(larder());
    command
        .args(["migrate", "--take-back", "--qmp"])
        .arg(vm.qmp_for_others());
    run(command)
}

#[test]
fn a_vm_moves_after_what_it_cannot_become_has_been_refused() {
    let machine = Machine::new(Release::Debian12, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    let mut source = machine.boot().expect("the guest boots");
    let before = source
        .ask("query-migrate-parameters", &serde_json::json!({}))
        .expect("answers");

    let other = Machine::new(Release::Debian12, MEMORY_MIB + 32, &Load::default()).expect("the test bed is set up");
    let larger = other.incoming().expect("QEMU starts");
    let waits = receiver(&larger);
    let (code, said) = moves(&source, &waits, &["--channels", "0"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("nothing was changed: bytes of memory (-m): "), "{said}");
    drop((waits, larger));

    let (code, said) = take_back(&source);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("there is nothing to take back"), "{said}");

    // A QEMU that runs is no place for another VM.
    let busy = receive_whole_command(larder(), "127.0.0.1:0", source.qmp_for_others(), &[]);
    let (code, said) = run(busy);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("-incoming defer"), "{said}");

    // Given up in time, the VM goes on, and QEMU is set as it was.
    let mut gives_up = machine.incoming().expect("QEMU starts");
    let waits = receiver(&gives_up);
    let (code, said) = moves(
        &source,
        &waits,
        &["--channels", "0", "--timeout", "1", "--bandwidth", "4MiB"],
    );
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("it did not end in 1 s"), "{said}");
    source.works().expect("it goes on");
    let after = source
        .ask("query-migrate-parameters", &serde_json::json!({}))
        .expect("answers");
    assert_eq!(before, after);
    gives_up.process.kill();
    drop(waits);

    let mut destination = machine.incoming().expect("QEMU starts");
    let mut waits = receiver(&destination);
    let (code, said) = moves(&source, &waits, &[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("\"downtime-ms\""), "{said}");
    let (code, heard) = waits.end().expect("it ends");
    assert_eq!(code, Some(0), "{heard}");
    assert!(heard.contains("the virtual machine runs here"), "{heard}");
    assert!(source.process.has_ended(), "the source's QEMU lives");
    destination.verifies().expect("its memory is right");
    assert_eq!(destination.run_state().expect("answers"), "running");
    counted(&[source.console(), destination.console()]).expect("it has counted on");
}

#[test]
fn a_vm_runs_at_one_place_whatever_is_cut_or_killed() {
    let report = campaign(larder(), Release::Debian12, &Fault::ALL, 8, &mut Random::new(2)).expect("all is well");
    assert_eq!(report.moves, 8);
}
