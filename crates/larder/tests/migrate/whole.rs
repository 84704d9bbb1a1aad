//! `larder migrate --qmp` and `larder migrate receive --qmp`: complete moves of a guest that uses and verifies its
//! memory.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use larder_bench::campaign::Random;
use larder_bench::campaign::migrate_kills::{Fault, campaign};
use larder_bench::campaign::migration::larder::{Side, verdict, whole_move_command, whole_receive_command};
use larder_bench::campaign::migration::vm::{Load, Machine, Release, Vm, counted};
use larder_bench::campaign::process::Process;
use serde_json::{Value, json};

use crate::support::{TEST_TIMEOUT, fill_file_system, larder_path, mount_tmpfs, run_command};

/// Memory of the guests in MiB: their file system takes half of it.
const MEMORY_MIB: u64 = 320;

fn receiver(vm: &Vm) -> Side {
    let command = whole_receive_command(larder_path(), "127.0.0.1:0", vm.external_qmp(), &[]);
    Side::listening(command).expect("it listens")
}

fn moves(source: &Vm, receiver: &Side, words: &[&str]) -> (Option<i32>, String) {
    let to = receiver.address().to_string();
    run_command(whole_move_command(larder_path(), source.external_qmp(), &to, words))
}

fn take_back(vm: &Vm) -> (Option<i32>, String) {
    let mut command = Command::new(larder_path());
    command.args(["migrate", "--take-back", "--qmp"]).arg(vm.external_qmp());
    run_command(command)
}

/// Unsuitable destinations are refused, an aborted move restores QEMU's settings, and then the VM moves.
#[test]
fn refusals_and_abort_precede_successful_move() {
    let machine = Machine::new(Release::Host, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    let mut source = machine.boot().expect("the guest boots");
    let before = source.ask("query-migrate-parameters", &json!({})).expect("answers");

    let other = Machine::new(Release::Host, MEMORY_MIB + 32, &Load::default()).expect("the test bed is set up");
    let larger = other.incoming().expect("QEMU starts");
    let waits = receiver(&larger);
    let (code, said) = moves(&source, &waits, &[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("nothing was changed: bytes of memory (-m): "), "{said}");
    drop((waits, larger));

    let (code, said) = take_back(&source);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("there is nothing to take back"), "{said}");

    // A QEMU that runs a VM cannot receive another one.
    let busy = whole_receive_command(larder_path(), "127.0.0.1:0", source.external_qmp(), &[]);
    let (code, said) = run_command(busy);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("-incoming defer"), "{said}");

    // After a timeout the VM continues, and QEMU has its old settings.
    let mut gives_up = machine.incoming().expect("QEMU starts");
    let waits = receiver(&gives_up);
    let (code, said) = moves(&source, &waits, &["--timeout", "1", "--bandwidth", "4MiB"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("it did not end in 1 s"), "{said}");
    source.works().expect("it goes on");
    let after = source.ask("query-migrate-parameters", &json!({})).expect("answers");
    assert_eq!(before, after);
    gives_up.process.kill();
    drop(waits);
    cancelled(&machine, &mut source);

    let mut destination = machine.incoming().expect("QEMU starts");
    let mut waits = receiver(&destination);
    let (code, said) = moves(&source, &waits, &["--cpu", "0.04"]);
    assert_eq!(code, Some(0), "{said}");
    let told = verdict(&said).unwrap_or_else(|| panic!("no JSON: {said}"));
    let number = |place: &str| told.pointer(place).and_then(Value::as_f64).unwrap_or_else(|| panic!("{place}: {told}"));
    assert!(number("/moved/downtime-ms") > 0.0 && number("/moved/rounds") >= 2.0, "{told}");
    // The lanes stay within the CPU limit, whatever else the host does.
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

/// A VM moves whose load is mostly in memory that a virtio-mem device has plugged.
#[test]
fn vm_with_virtio_mem_moves() {
    const AT_BOOT_MIB: u64 = 384;
    const PLUGGED_MIB: u64 = 256;
    let script = format!(
        "until [ $(sed -n 's/^MemTotal: *//;s/ kB$//p' /proc/meminfo | head -n 1) -gt {} ]; do sleep 0.1; done
exec guest-load mixed --size {PLUGGED_MIB} --rate 10 --check 1
",
        (AT_BOOT_MIB + PLUGGED_MIB / 2) << 10
    );
    // QEMU before 9.0 loses writes of emulated guests to memory of such sizes.
    let machine = Machine::running(Release::Debian13, AT_BOOT_MIB, &script).expect("the test bed is set up");
    let machine = machine.plugged(PLUGGED_MIB);
    let source = machine.boot().expect("the guest boots");
    let destination = machine.incoming().expect("QEMU starts");
    let mut waits = receiver(&destination);
    let (code, output) = moves(&source, &waits, &[]);
    assert_eq!(code, Some(0), "{output}");
    let (code, output) = waits.end().expect("it ends");
    assert_eq!(code, Some(0), "{output}");
    destination.verifies().expect("its memory is right");
    counted(&[source.console(), destination.console()]).expect("it has counted on");
}

fn ask(words: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(larder_path());
    command.arg("migrate").args(words);
    run_command(command)
}

/// Returns the state from a control socket once it satisfies `is_so`.
fn state_when(control: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let give_up = Instant::now() + TEST_TIMEOUT;
    loop {
        let (code, said) = ask(&["status", control, "--output", "json"]);
        if let Some(state) = serde_json::from_str::<Value>(&said).ok().filter(|_| code == Some(0))
            && is_so(&state)
        {
            return state;
        }
        assert!(Instant::now() < give_up, "{what}: {said}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Checks that a move can be watched, limited and cancelled, and that the VM continues to run.
fn cancelled(machine: &Machine, source: &mut Vm) {
    let mut destination = machine.incoming().expect("QEMU starts");
    let waits = receiver(&destination);
    let control = machine.folder().join("control");
    let at = control.to_str().expect("UTF-8");
    let words = ["--bandwidth", "1MiB", "--control", at];
    let to = waits.address().to_string();
    let mover =
        Process::start(whole_move_command(larder_path(), source.external_qmp(), &to, &words)).expect("larder starts");
    let mut mover = Side { process: mover, address: None };
    let state = state_when(at, "it moves", |state| {
        state["phase"] == "moving"
            && state["rates"]["wire_bytes_per_s"].as_u64() > Some(0)
            && state["course"]["remaining_bytes"].as_u64() > Some(0)
    });
    assert_eq!(state["course"]["round"], 1, "{state}");
    assert_eq!((&state["whole"], &state["limits"]["downtime_ms"]), (&true.into(), &300.into()));
    let (code, said) = ask(&["limit", at, "--downtime", "700", "--timeout", "600", "--bandwidth", "2MiB"]);
    assert!(code == Some(0) && said.contains("2 MiB/s on the link, a downtime of 700 ms, 600 s in all"), "{said}");
    state_when(at, "it keeps to them", |state| state["limits"]["downtime_ms"] == 700);
    // QEMU's own limit shows that Larder decides when the guest is paused.
    let set = source.ask("query-migrate-parameters", &json!({}));
    assert_eq!(set.expect("answers")["downtime-limit"], 1);
    let (code, said) = ask(&["cancel", at]);
    assert_eq!(code, Some(0), "{said}");
    let last = state_when(at, "it ends", |state| state["phase"] == "failed");
    assert_eq!(last["place"], "here", "{last}");
    let (code, said) = mover.end().expect("it ends");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("cancelled; the VM continues here") && !control.exists(), "{said}");
    source.works().expect("it goes on");
    destination.process.kill();
}

/// Returns a command prefix that starts QEMU with further options.
fn with(options: &str) -> [String; 4] {
    ["sh", "-c", &format!("exec \"$@\" {options}"), "sh"].map(str::to_owned)
}

fn words(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

/// A destination that differs from the source is refused with the difference, and the VM continues to run.
#[test]
fn unsuitable_destination_keeps_vm_here() {
    let machine = Machine::new(Release::Host, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    let source = machine.boot().expect("the guest boots");
    for (options, said) in [
        ("-machine q35", "machine type: pc-"),
        ("-smp 2", "processors (-smp): 1 at the source, 2 at the destination"),
        (
            "-cpu Nehalem",
            "Nehalem-x86_64-cpu at the destination, which lacks features that the guest may use: CPUID 80000001h ECX 0x4",
        ),
        ("-device virtio-rng-pci", " 1af4:1005 is missing at the source"),
        ("-uuid 9a8b7c6d-0000-1111-2222-333344445555", "UUID (-uuid): "),
    ] {
        let other = machine.start_incoming_with_prefix(&words(&with(options))).expect("QEMU starts");
        let waits = receiver(&other);
        let (code, heard) = moves(&source, &waits, &[]);
        let is_told = heard.contains("the VM cannot be moved, and nothing was changed: ") && heard.contains(said);
        assert!(code == Some(1) && is_told, "{options}: {code:?} {heard}");
        assert_eq!(verdict(&heard).expect("JSON")["vm"], "here", "{options}");
    }
    // A receiver of a stream alone and a sender of a complete move do not fit, nor the reverse.
    let stream_alone = Side::receiver(larder_path(), &machine.folder().join("nothing"), &[]).expect("it listens");
    let (code, heard) = moves(&source, &stream_alone, &[]);
    assert!(code == Some(1) && heard.contains("start it with --qmp instead of --connect"), "{heard}");
    source.works().expect("it goes on");
    // A destination with additional CPU features is accepted.
    let destination = machine.start_incoming_with_prefix(&words(&with("-cpu max"))).expect("QEMU starts");
    let mut waits = receiver(&destination);
    let sender = machine.folder().join("sender");
    let mut side = Side::sender(larder_path(), &sender, waits.address(), &[]).expect("it connects");
    let _qemu = UnixStream::connect(&sender).expect("it listens");
    let (code, heard) = side.end().expect("it ends");
    assert!(code == Some(2) && heard.contains("or send with larder migrate VM"), "{heard}");
    // The source cannot write its record of the move and gives up; the receiver waits for another source.
    let full = mount_tmpfs(&machine.folder().join("full"), "size=64k");
    std::fs::create_dir(full.0.join("migrations")).expect("a folder");
    std::fs::set_permissions(full.0.join("migrations"), PermissionsExt::from_mode(0o700)).expect("ours");
    std::fs::set_permissions(&full.0, PermissionsExt::from_mode(0o755)).expect("ours");
    fill_file_system(&full.0.join("all"));
    let to = waits.address().to_string();
    let mut command = whole_move_command(larder_path(), source.external_qmp(), &to, &[]);
    command.env("RUNTIME_DIRECTORY", &full.0);
    let (code, heard) = run_command(command);
    let is_told = heard.contains("the VM continues here: the record of the move cannot be saved: ");
    assert!(code == Some(1) && is_told, "{heard}");
    source.works().expect("it goes on");
    let (code, heard) = moves(&source, &waits, &[]);
    let is_told = heard.contains("models differ (-cpu), which the guest may notice: qemu64-x86_64-cpu (AuthenticAMD)");
    assert!(code == Some(0) && is_told, "{heard}");
    destination.works().expect("it runs there");
    assert_eq!(waits.end().expect("it ends").0, Some(0));
}

/// Checks that a VM which its user has paused stays paused when its destination finds only at the very end that it
/// lacks a device. QEMU before 10 is then in the state 'postmigrate', and cannot send the VM again before it has run.
fn stays_paused(release: Release) {
    let machine = Machine::new(release, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    // The missing device is no PCI device, so it is not detected before.
    let more = with("-serial null");
    let mut source = machine.boot_by(&words(&more)).expect("the guest boots");
    let version = source.ask("query-version", &json!({})).expect("answers");
    let major = version["qemu"]["major"].as_u64().expect("a number");
    let after = if major < 10 { "postmigrate" } else { "paused" };
    source.ask("stop", &json!({})).expect("it may");
    let stood = source.console();
    let lacks = machine.incoming().expect("QEMU starts");
    let mut waits = receiver(&lacks);
    let (code, said) = moves(&source, &waits, &[]);
    assert_eq!(code, Some(1), "{said}");
    assert_eq!(verdict(&said).expect("JSON")["vm"], "here", "{said}");
    let (code, heard) = waits.end().expect("it ends");
    assert_eq!(code, Some(2), "{heard}");
    assert_eq!(source.run_state().expect("answers"), after, "{said}");
    assert_eq!(said.contains("QEMU calls this state 'postmigrate' now"), after == "postmigrate", "{said}");
    let destination = machine.start_incoming_with_prefix(&words(&more)).expect("QEMU starts");
    if after == "postmigrate" {
        let waits = receiver(&destination);
        let (code, said) = moves(&source, &waits, &[]);
        assert!(code == Some(1) && said.contains("'cont' lets it run, and 'stop' pauses it again"), "{said}");
        assert_eq!(source.console(), stood, "it has run");
        source.ask("cont", &json!({})).expect("it may");
        source.works().expect("it runs");
    }
    let mut waits = receiver(&destination);
    let (code, said) = moves(&source, &waits, &[]);
    assert_eq!(code, Some(0), "{said}");
    let (code, heard) = waits.end().expect("it ends");
    assert_eq!(code, Some(0), "{heard}");
}

/// With the host's QEMU, a paused VM that could not be moved stays paused.
#[test]
fn failed_move_keeps_vm_paused() {
    stays_paused(Release::Host);
}

/// With QEMU 10, a paused VM that could not be moved stays paused.
#[test]
fn failed_move_keeps_qemu_10_paused() {
    stays_paused(Release::Debian13);
}

#[test]
fn both_hosts_report_postcopy_phase() {
    let load = Load { kind: "random", rate: 0, ..Load::default() };
    let machine = Machine::new(Release::Host, MEMORY_MIB, &load).expect("the test bed is set up");
    let source = machine.boot().expect("the guest boots");
    let destination = machine.incoming().expect("QEMU starts");
    let at = ["here", "there"].map(|name| machine.folder().join(name));
    let controls = at.each_ref().map(|path| path.to_str().expect("UTF-8"));
    let command =
        whole_receive_command(larder_path(), "127.0.0.1:0", destination.external_qmp(), &["--control", controls[1]]);
    let mut waits = Side::listening(command).expect("it listens");
    // Slow enough that the post-copy phase is seen while most of the memory is missing.
    let words = ["--bandwidth", "8MiB", "--postcopy", "--control", controls[0]];
    let to = waits.address().to_string();
    let mover =
        Process::start(whole_move_command(larder_path(), source.external_qmp(), &to, &words)).expect("larder starts");
    let mut mover = Side { process: mover, address: None };
    let there = state_when(controls[1], "it runs there", |state| state["phase"] == "post-copy");
    assert_eq!((&there["direction"], &there["whole"]), (&"coming".into(), &true.into()));
    let cpu = |name: &str| there["delivered"][name].as_f64().expect("a number");
    assert!(cpu("cpu_seconds") > cpu("decode_cpu_seconds") && cpu("decode_cpu_seconds") > 0.0, "{there}");
    assert!(there["rates"]["processors"].is_f64(), "{there}");
    state_when(controls[0], "it runs there", |state| state["phase"] == "post-copy");
    let (code, said) = ask(&["limit", controls[0], "--bandwidth", "0"]);
    assert_eq!(code, Some(0), "{said}");
    for side in [&mut mover, &mut waits] {
        let (code, said) = side.end().expect("it ends");
        assert_eq!(code, Some(0), "{said}");
    }
    destination.verifies().expect("its memory is right");
}

/// Whatever is cut or killed during a move, the VM runs on at most one host, and is not lost.
#[test]
fn vm_runs_on_one_host_always() {
    let report =
        campaign(larder_path(), Release::Host, None, &Fault::ALL, 9, &mut Random::new(2)).expect("all is well");
    assert_eq!(report.moves, 9);
}

/// Starts a mover whose VM has most of its memory still to be transferred.
fn slow_mover(source: &Vm, receiver: &Side) -> Process {
    let to = receiver.address().to_string();
    let command = whole_move_command(larder_path(), source.external_qmp(), &to, &["--bandwidth", "1MiB"]);
    let mover = Process::start(command).expect("larder starts");
    mover.wait_for("round 1: ", TEST_TIMEOUT).expect("it is under way");
    mover
}

/// After a mover was killed, the move can be repeated with a new QEMU at the destination, as the message advises.
#[test]
fn killed_mover_needs_new_destination_qemu() {
    let machine = Machine::new(Release::Host, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    let source = machine.boot().expect("the guest boots");
    let destination = machine.incoming().expect("QEMU starts");
    let mut waits = receiver(&destination);
    let mut mover = slow_mover(&source, &waits);
    let again = || whole_receive_command(larder_path(), "127.0.0.1:0", destination.external_qmp(), &[]);
    for (code, said) in [moves(&source, &waits, &[]), take_back(&source), run_command(again())] {
        assert!(code == Some(2) && said.contains(" is already being moved: "), "{said}");
    }
    mover.kill();
    let (code, said) = moves(&source, &waits, &[]);
    let is_told = said.contains("start a new one, and a receiver for it, and run the same command again");
    assert!(code == Some(1) && is_told, "{said}");
    assert_eq!(waits.end().expect("it ends").0, Some(2));
    source.works().expect("it goes on");
    let destination = machine.incoming().expect("QEMU starts");
    let mut waits = receiver(&destination);
    let (code, said) = moves(&source, &waits, &[]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(waits.end().expect("it ends").0, Some(0));
    destination.works().expect("it runs there");
    let other = Process::start(whole_receive_command(larder_path(), "127.0.0.1:0", destination.external_qmp(), &[]));
    let other = other.expect("larder starts");
    other.wait_for(" accepts no other: ", TEST_TIMEOUT).expect("it says so");
}

/// If the source's QEMU is killed before everything was sent, both sides report that the VM is lost.
#[test]
fn killed_source_qemu_is_reported_lost() {
    let machine = Machine::new(Release::Host, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    let mut source = machine.boot().expect("the guest boots");
    let destination = machine.incoming().expect("QEMU starts");
    let mut waits = receiver(&destination);
    let mover = slow_mover(&source, &waits);
    source.process.kill();
    mover.wait_for("whether it has all of the VM", TEST_TIMEOUT).expect("it asks");
    let (code, heard) = waits.end().expect("it ends");
    assert!(code == Some(2) && heard.contains("did not arrive"), "{heard}");
    mover.signal(libc::SIGTERM);
    let mut mover = Side { process: mover, address: None };
    let (code, said) = mover.end().expect("it ends");
    assert_eq!(code, Some(2), "{said}");
    assert_eq!(verdict(&said).expect("JSON")["vm"], "lost", "{said}");
}

/// A VM that its guest or its operator ends during a move cannot be asked for again, and the report names the cause.
#[test]
fn vm_ended_during_move_is_reported() {
    for (command, cause) in
        [("system_reset", "QEMU received the command to reset"), ("quit", "QEMU received the command to quit")]
    {
        let machine = Machine::new(Release::Host, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
        let mut source = machine.boot().expect("the guest boots");
        let destination = machine.incoming().expect("QEMU starts");
        let mut waits = receiver(&destination);
        let mut mover = Side { process: slow_mover(&source, &waits), address: None };
        // QEMU may exit before it has answered.
        let _ = source.ask(command, &json!({}));
        let (code, said) = mover.end().expect("it ends");
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(&format!("not moved: {cause}")), "{said}");
        assert!(!said.contains("run the same command again"), "{said}");
        assert_eq!(verdict(&said).expect("JSON")["vm"], "lost", "{said}");
        let (code, heard) = waits.end().expect("it ends");
        assert_eq!(code, Some(2), "{heard}");
    }
}
