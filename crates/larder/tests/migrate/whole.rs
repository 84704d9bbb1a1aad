//! `larder migrate --qmp` and `larder migrate receive --qmp`: the whole move, of a guest that works on its memory and checks
//! it.

use std::process::Command;
use std::time::{Duration, Instant};

use larder_bench::campaign::Random;
use larder_bench::campaign::migrate_kills::{Fault, campaign};
use larder_bench::campaign::migration::larder::{Side, move_command, receive_whole_command, verdict};
use larder_bench::campaign::migration::vm::{Load, Machine, Release, Vm, counted};
use larder_bench::campaign::process::Process;
use serde_json::Value;

use crate::support::{LIMIT, larder, run};

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
    cancelled(&machine, &mut source);

    let mut destination = machine.incoming().expect("QEMU starts");
    let mut waits = receiver(&destination);
    let (code, said) = moves(&source, &waits, &["--cpu", "0.04"]);
    assert_eq!(code, Some(0), "{said}");
    let told = verdict(&said).unwrap_or_else(|| panic!("no JSON: {said}"));
    let number = |place: &str| {
        told.pointer(place)
            .and_then(Value::as_f64)
            .unwrap_or_else(|| panic!("{place}: {told}"))
    };
    assert!(
        number("/moved/downtime-ms") > 0.0 && number("/moved/rounds") >= 2.0,
        "{told}"
    );
    // It lets no lane take more than that, whatever else the host does.
    let processors = number("/sent/cpu_seconds") / number("/moved/seconds");
    println!("{processors} processors");
    assert!(processors <= 0.044, "{processors} processors: {told}");
    assert!(number("/sent/encode_cpu_seconds") > 0.0, "{told}");
    assert!(told.pointer("/sent/evidence/classes/0/method").is_some(), "{told}");
    let (code, heard) = waits.end().expect("it ends");
    assert_eq!(code, Some(0), "{heard}");
    assert!(heard.contains("the virtual machine runs here"), "{heard}");
    assert!(source.process.has_ended(), "the source's QEMU lives");
    destination.verifies().expect("its memory is right");
    assert_eq!(destination.run_state().expect("answers"), "running");
    counted(&[source.console(), destination.console()]).expect("it has counted on");
}

/// A move is watched, told to keep to other limits, and cancelled; the VM goes on.
fn cancelled(machine: &Machine, source: &mut Vm) {
    let mut destination = machine.incoming().expect("QEMU starts");
    let waits = receiver(&destination);
    let control = machine.folder().join("control");
    let at = control.to_str().expect("UTF-8");
    let words = ["--bandwidth", "1MiB", "--control", at];
    let to = waits.address().to_string();
    let mover = Process::start(move_command(larder(), source.qmp_for_others(), &to, &words)).expect("larder starts");
    let mut mover = Side {
        process: mover,
        address: None,
    };
    let ask = |words: &[&str]| {
        let mut command = Command::new(larder());
        command.arg("migrate").args(words);
        run(command)
    };
    let state_when = |what: &str, is_so: &dyn Fn(&Value) -> bool| {
        let give_up = Instant::now() + LIMIT;
        loop {
            let (code, said) = ask(&["status", at, "--output", "json"]);
            if let Some(state) = serde_json::from_str::<Value>(&said).ok().filter(|_| code == Some(0))
                && is_so(&state)
            {
                return state;
            }
            assert!(Instant::now() < give_up, "{what}: {said}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let state = state_when("it moves", &|state| {
        state["phase"] == "moving" && state["rates"]["wire_bytes_per_s"].as_u64() > Some(0)
    });
    let course = &state["course"];
    assert!(
        course["remaining_bytes"].as_u64() > Some(0) && course["round"] == 1,
        "{state}"
    );
    assert_eq!(
        (&state["whole"], &state["limits"]["downtime_ms"]),
        (&true.into(), &300.into())
    );
    let (code, said) = ask(&[
        "limit",
        at,
        "--downtime",
        "700",
        "--timeout",
        "600",
        "--bandwidth",
        "2MiB",
    ]);
    assert!(
        code == Some(0) && said.contains("2 MiB/s on the link, a downtime of 700 ms, 600 s in all"),
        "{said}"
    );
    state_when("it keeps to them", &|state| state["limits"]["downtime_ms"] == 700);
    // Whoever looks at QEMU sees that it is not QEMU that decides when its guest stops.
    let set = source.ask("query-migrate-parameters", &serde_json::json!({}));
    assert_eq!(set.expect("answers")["downtime-limit"], 1);
    let (code, said) = ask(&["cancel", at]);
    assert_eq!(code, Some(0), "{said}");
    let last = state_when("it ends", &|state| state["phase"] == "failed");
    assert_eq!(last["place"], "here", "{last}");
    let (code, said) = mover.end().expect("it ends");
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("cancelled; the VM goes on here") && !control.exists(),
        "{said}"
    );
    source.works().expect("it goes on");
    destination.process.kill();
}

#[test]
fn a_vm_runs_at_one_place_whatever_is_cut_or_killed() {
    let report = campaign(larder(), Release::Debian12, &Fault::ALL, 9, &mut Random::new(2)).expect("all is well");
    assert_eq!(report.moves, 9);
}
