//! `larder migrate --postcopy` where an obstacle at the destination excludes post-copy.

use std::process::Command;

use larder_bench::campaign::memory::Attach;
use larder_bench::campaign::migration::larder::{Side, whole_move_command, whole_receive_command};
use larder_bench::campaign::migration::vm::{Load, Machine, Release, Vm};
use larder_bench::campaign::process::Process;

use crate::support::{TEST_TIMEOUT, larder_path, run_command, temp_dir_on_tmpfs};

/// Memory of the guests in MiB.
const MEMORY_MIB: u64 = 320;

const BUDGET: [&str; 2] = ["--budget", "192MiB"];

fn receiver(vm: &Vm) -> Side {
    let command = whole_receive_command(larder_path(), "127.0.0.1:0", vm.external_qmp(), &[]);
    Side::listening(command).expect("it listens")
}

fn post_copy(source: &Vm, receiver: &Side, words: &[&str]) -> Command {
    let to = receiver.address().to_string();
    whole_move_command(larder_path(), source.external_qmp(), &to, &[&["--postcopy"], words].concat())
}

/// A pager and a QEMU that receives a VM by post-copy need the page faults of the same memory: the second one is
/// refused, whichever it is, and the VM runs.
#[test]
fn postcopy_and_pager_exclude_each_other() {
    let machine = Machine::new(Release::Host, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    let machine = machine.shared();
    let source = machine.boot().expect("the guest boots");
    let destination = machine.incoming().expect("QEMU starts");
    let mut waits = receiver(&destination);
    let folder = temp_dir_on_tmpfs();
    let attach = Attach::new(larder_path(), folder.path(), destination.process.id(), &BUDGET);

    let mut pager = attach.start().expect("it attaches");
    let (code, output) = run_command(post_copy(&source, &waits, &[]));
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("nothing was changed: a pager manages the memory"), "{output}");
    source.works().expect("it runs");
    // A killed pager leaves its userfaultfd in QEMU.
    pager.process.kill();
    let (code, output) = run_command(post_copy(&source, &waits, &[]));
    assert!(code == Some(1) && output.contains("a pager manages the memory"), "{output}");
    let mut pager = attach.start().expect("it attaches");
    pager.detach().expect("it detaches");

    let mover = Process::start(post_copy(&source, &waits, &["--bandwidth", "1MiB"])).expect("larder starts");
    mover.wait_for("round 1: ", TEST_TIMEOUT).expect("it is under way");
    let (code, output) = run_command(attach.command());
    assert_eq!(code, Some(2), "{output}");
    assert!(output.contains("to receive a VM by post-copy"), "{output}");
    let mut mover = Side { process: mover, address: None };
    mover.process.signal(libc::SIGTERM);
    let (code, output) = mover.end().expect("it ends");
    assert_eq!(code, Some(1), "{output}");
    source.works().expect("it runs");
    waits.end().expect("its QEMU has ended");
}

/// Post-copy into a file on an ordinary file system is refused, because QEMU would detect that too late.
#[test]
fn postcopy_into_disk_file_is_refused() {
    let machine = Machine::new(Release::Host, MEMORY_MIB, &Load::default()).expect("the test bed is set up");
    let source = machine.boot().expect("the guest boots");
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
    let destination = machine.start_incoming_in_file(file.path()).expect("QEMU starts");
    let waits = receiver(&destination);
    let (code, output) = run_command(post_copy(&source, &waits, &[]));
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("neither in a tmpfs nor in a hugetlbfs"), "{output}");
    source.works().expect("it runs");
}
