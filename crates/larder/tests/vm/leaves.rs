//! A guest's disk can leave with its guest only if the front-end knows the positions of its queues, whatever has
//! happened to their server.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use larder_bench::campaign::front_end::memory::Memory;
use larder_bench::campaign::front_end::queue::Request;
use larder_bench::campaign::front_end::ring::Buffer;
use larder_vm::control::request_move_step;
use larder_vm::vm::MoveStep;

use super::support::{TEST_TIMEOUT, assert_io_works};
use super::{FrontEnd, Options, Process, Vm, ends};

const ONE: &str = r#"
control = "control"

[[disk]]
image = "IMAGES/data.raw"
format = "raw"
socket = "vda"
"#;

/// Limit under which all writes but the first wait.
const SLOW: &str = "iops-write = 1\n";

fn vm(more: &str) -> Vm {
    let vm = Vm::new(&format!("{ONE}{more}"));
    vm.raw("data.raw", 8);
    vm
}

fn start(vm: &Vm) -> Process {
    let mut command = vm.command(&[]);
    command.env("RUNTIME_DIRECTORY", vm.folder.path());
    let process = Process::start(command).expect("larder starts");
    process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
    process
}

/// Asks the server to release the disk, as a mover does when the guest is paused.
fn leaves(vm: &Vm) -> Result<(), String> {
    let control = vm.path("control");
    match request_move_step(&control, MoveStep::Leave) {
        Ok(moved) => {
            assert!(moved.done);
            request_move_step(&control, MoveStep::Keep).expect("it comes back");
            Ok(())
        }
        Err(error) => Err(error.to_string()),
    }
}

fn refuses(vm: &Vm, queue: usize) {
    let why = leaves(vm).expect_err("it is not left");
    assert!(why.contains(&format!("the position of its queue {queue}")), "{why}");
    assert_eq!(vm.disks()[0]["away"], false);
}

fn options(queues: u16, packed: bool) -> Options {
    Options { queues, packed, ..Options::default() }
}

fn connect(vm: &Vm, options: Options) -> FrontEnd {
    FrontEnd::connect(&vm.path("vda"), options).expect("connects")
}

/// Connects a front-end that knows the disk's size, and whose driver has not started.
fn realised(vm: &Vm) -> FrontEnd {
    let stream = UnixStream::connect(vm.path("vda")).expect("connects");
    let memory = Arc::new(Memory::new(8 << 20).expect("memory"));
    let mut guest = FrontEnd::unconfigured(stream, options(2, false), memory).expect("connects");
    guest.negotiate().expect("agrees");
    assert_eq!(guest.capacity().expect("is told"), 8 << 20);
    guest
}

fn comes_back(guest: &mut FrontEnd, vm: &Vm) {
    let stream = UnixStream::connect(vm.path("vda")).expect("connects");
    guest.reconnect(stream).expect("starts its queues");
}

/// Stops the queues as QEMU does.
fn stops(guest: &FrontEnd) {
    for queue in 0..guest.queues.len() {
        guest.stop_queue(queue).expect("stops");
    }
}

/// Requests this many writes, and then a read, which is completed before all writes but the first.
fn asks_for_much(guest: &mut FrontEnd, writes: u64) {
    let data = [Buffer { address: guest.data(), len: 4096 }];
    for number in 0..writes {
        guest.queue().add(&Request::write(8 * number, &data));
        guest.queue().go();
    }
    guest.queue().complete(TEST_TIMEOUT).expect("the first is carried out");
    let read = guest.queue().run(&Request::read(0, &data));
    assert_eq!(read.expect("goes past the writes").status, 0);
}

/// After a kill of its server, a guest's disk cannot leave before the front-end has asked the next server.
#[test]
fn killed_server_blocks_departure_until_queried() {
    for packed in [false, true] {
        let vm = vm(SLOW);
        let mut server = start(&vm);
        let mut guest = connect(&vm, options(1, packed));
        asks_for_much(&mut guest, 3);
        server.kill();
        server = start(&vm);
        // Refused both before and after the next server has started.
        refuses(&vm, 0);
        comes_back(&mut guest, &vm);
        for _ in 1..3 {
            assert_eq!(guest.queue().complete(TEST_TIMEOUT).expect("is repeated").status, 0);
        }
        refuses(&vm, 0);
        stops(&guest);
        leaves(&vm).expect("it knows now");
        drop(guest);
        ends(server);
    }
}

/// A guest's disk can leave once the front-end has stopped its queues, whatever happens to the server after that.
#[test]
fn stopped_queues_permit_departure() {
    for packed in [false, true] {
        let vm = vm("");
        let mut server = start(&vm);
        let mut guest = connect(&vm, options(2, packed));
        assert_io_works(&mut guest, 1);
        stops(&guest);
        leaves(&vm).expect("it knows");
        server.kill();
        server = start(&vm);
        leaves(&vm).expect("it knows, and is not back yet");
        // QEMU reconnects even while its VM is paused.
        comes_back(&mut guest, &vm);
        leaves(&vm).expect("they are where it has them start");
        server.kill();
        server = start(&vm);
        comes_back(&mut guest, &vm);
        leaves(&vm).expect("they are so still");
        assert_io_works(&mut guest, 2);
        refuses(&vm, 0);
        assert_io_works(&mut guest, 3);
        stops(&guest);
        drop(guest);
        leaves(&vm).expect("it knows");
        ends(server);
    }
}

/// Records of an earlier guest's queues do not keep a later guest's disk from leaving.
#[test]
fn earlier_guest_does_not_block_departure() {
    let vm = vm("");
    let mut server = start(&vm);
    // The guest's driver has not started.
    let guest = realised(&vm);
    leaves(&vm).expect("there is nothing to know");
    drop(guest);
    for starts in [false, true] {
        let mut guest = connect(&vm, options(2, false));
        assert_io_works(&mut guest, 1);
        server.kill();
        drop(guest);
        server = start(&vm);
        let guest = match starts {
            false => realised(&vm),
            true => {
                let mut guest = connect(&vm, options(1, false));
                assert_io_works(&mut guest, 2);
                stops(&guest);
                guest
            }
        };
        leaves(&vm).expect("what the earlier one had lent is of no meaning");
        drop(guest);
    }
    ends(server);
    let own = crate::own_folder(vm.folder.path());
    let left = std::fs::read_dir(own.join("queues")).expect("a folder").count();
    assert_eq!(left, 0, "nothing is left behind that says nothing");
}
