//! A front-end's connection across restarts of the VM's service.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_bench::campaign::Random;
use larder_bench::campaign::front_end::memory::Memory;
use larder_bench::campaign::front_end::queue::{AREA_BYTES, Request};
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::front_end::wire;
use larder_bench::campaign::guest::{Guest, GuestOptions};
use larder_bench::campaign::process::Process;
use larder_bench::campaign::restarts::{self, How};
use larder_bench::campaign::service::Service;

use crate::support::{larder_path, temp_dir_on_disk, temp_dir_on_tmpfs, test_pattern};
use crate::{FrontEnd, Options, TEST_TIMEOUT, TWO, Vm, assert_io_works, run_tool, text, two};

const BOTH: [i32; 2] = [libc::SIGTERM, libc::SIGKILL];

/// Starts the VM's server as a service.
fn start(vm: &Vm) -> Service {
    let state = format!("STATE_DIRECTORY={}", text(&vm.path("state")));
    let file = vm.file();
    let words = ["env", &state, text(larder_path()), "vm", text(&file)];
    let words: Vec<_> = words.iter().map(Into::into).collect();
    Service::start(&words, &vm.path("notify")).expect("starts")
}

fn connect(vm: &Vm, options: Options) -> FrontEnd {
    FrontEnd::connect(&vm.path("vda"), options).expect("connects")
}

/// Returns true if the server has closed the connection.
fn is_closed(guest: &FrontEnd) -> bool {
    let mut stream = guest.wire.stream();
    stream.set_read_timeout(Some(Duration::from_millis(200))).expect("can be set");
    matches!(stream.read(&mut [0; 1]), Ok(0))
}

fn becomes(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < TEST_TIMEOUT, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn connection_survives_stop_and_kill() {
    for packed in [false, true] {
        let vm = two();
        let mut service = start(&vm);
        let options = Options { queues: 2, packed, ..Options::default() };
        let mut guest = connect(&vm, options);
        let size = guest.capacity().expect("is told");
        for round in 0..6 {
            assert_io_works(&mut guest, round);
            service.restart(BOTH[round as usize % 2]).expect("starts again");
            assert_io_works(&mut guest, 100 + round);
            assert_eq!(guest.capacity().expect("the connection is there"), size);
            // The next server has to know this change, too.
            let base = guest.stop_queue(1).expect("stops");
            // The server does not know yet that its answer was received; see `HandoverError::MidMessage`.
            std::thread::sleep(Duration::from_millis(20));
            service.restart(BOTH[round as usize / 2 % 2]).expect("starts again");
            let started = guest.start_queue_at(1, base);
            assert!(started.is_ok(), "{started:?}: {}", service.process.output());
        }
        assert!(service.process.output().contains("connection continues"));
        drop(guest);
        becomes("nothing is kept of a connection that has ended", || service.kept().expect("is known").is_empty());
        let mut guest = connect(&vm, options);
        assert_io_works(&mut guest, 7);
        assert!(service.end(libc::SIGTERM).expect("ends").success());
        assert!(!is_closed(&guest), "it is kept");
        service.let_go();
        becomes("the service has ended for good", || is_closed(&guest));
    }
}

/// Two disks of a guest store the descriptors of its memory only once.
#[test]
fn disks_share_stored_guest_memory() {
    let vm = two();
    let nbd = "nbd = \"nbd+unix:///data?socket=data.nbd\"\nnbd-description = \"the VM's data\"";
    vm.write(&TWO.replace(nbd, "socket = \"vdb\""));
    let mut service = start(&vm);
    let mut guest = connect(&vm, Options::default());
    let second = || {
        let stream = UnixStream::connect(vm.path("vdb")).expect("connects");
        let memory = Arc::clone(&guest.memory);
        let mut other = FrontEnd::unconfigured(stream, Options::default(), memory).expect("connects");
        other.negotiate().expect("agrees");
        other.set_memory().expect("is told");
        other
    };
    let other = second();
    service.restart(libc::SIGTERM).expect("starts again");
    assert_eq!(other.capacity().expect("goes on"), 8 << 20);
    drop(other);
    let is_kept = |name: &str| service.kept().expect("is known").iter().any(|kept| kept.starts_with(name));
    becomes("nothing is kept of it", || !is_kept("larder/data/"));
    let other = second();
    assert_io_works(&mut guest, 1);
    service.restart(libc::SIGKILL).expect("starts again");
    assert_io_works(&mut guest, 2);
    assert_eq!(other.capacity().expect("goes on"), 8 << 20);
    drop(guest);
    service.restart(libc::SIGTERM).expect("starts again");
    assert_eq!(other.capacity().expect("goes on"), 8 << 20);
}

/// Requests that are made while no server runs are completed by the next one.
#[test]
fn next_server_answers_pending_requests() {
    for signal in BOTH {
        let vm = two();
        let mut service = start(&vm);
        let mut guest = connect(&vm, Options::default());
        assert_io_works(&mut guest, 1);
        let (data, bytes) = (guest.data(), test_pattern(9, 4096));
        guest.memory.write(data, &bytes);
        service.end(signal).expect("ends");
        let piece = |address| [Buffer { address, len: 4096 }];
        let write = guest.queue().add(&Request::write(64, &piece(data)));
        guest.queue().go();
        // A message is pending in addition.
        guest.wire.send_raw(&wire::Wire::encode(wire::GET_FEATURES, false, &[]), &[]).expect("is sent");
        service.launch().expect("starts");
        assert_eq!(guest.queue().finish(write).expect("is answered").status, 0);
        assert_eq!(guest.wire.receive().expect("is answered").payload.len(), 8);
        let read = guest.queue().run(&Request::read(64, &piece(data + 4096)));
        assert_eq!(read.expect("reads").status, 0);
        assert_eq!(guest.memory.read_vec(data + 4096, 4096), bytes);
    }
}

#[test]
fn half_message_does_not_delay_stop() {
    let vm = two();
    let mut service = start(&vm);
    let guest = connect(&vm, Options::default());
    let message = wire::Wire::encode(wire::SET_FEATURES, true, &[0; 8]);
    guest.wire.send_raw(&message[..14], &[]).expect("is sent");
    assert!(service.end(libc::SIGTERM).expect("ends").success());
    becomes("the connection is closed", || is_closed(&guest));
    service.launch().expect("starts");
    assert_io_works(&mut connect(&vm, Options::default()), 1);
}

#[test]
fn stalled_service_manager_is_tolerated() {
    let vm = two();
    let manager = UnixDatagram::bind(vm.path("notify")).expect("binds");
    let full = UnixDatagram::unbound().expect("a socket");
    full.set_nonblocking(true).expect("can be set");
    while full.send_to(b"x", vm.path("notify")).is_ok() {}
    let mut command = vm.command(&[]);
    command.env("NOTIFY_SOCKET", vm.path("notify"));
    let mut process = Process::start(command).expect("starts");
    process.wait_for(" ready ", TEST_TIMEOUT).expect("serves");
    let mut guest = connect(&vm, Options::default());
    assert_io_works(&mut guest, 1);
    assert!(process.output().contains("does not accept messages"), "{}", process.output());
    process.signal(libc::SIGTERM);
    assert!(process.wait(TEST_TIMEOUT).expect("ends").success());
    becomes("it is closed", || is_closed(&guest));
    drop(manager);
}

/// Connects a guest whose front-end has no in-flight region.
fn without_notes(vm: &Vm) -> FrontEnd {
    let stream = UnixStream::connect(vm.path("vda")).expect("connects");
    let memory = Arc::new(Memory::new(AREA_BYTES as usize + (4 << 20)).expect("memory"));
    let mut guest = FrontEnd::unconfigured(stream, Options::default(), memory).expect("connects");
    guest.negotiate().expect("agrees");
    guest.set_memory().expect("is told");
    guest.start_queue(0).expect("starts");
    guest
}

/// Without an in-flight region the connection survives a stop of the server, but not a kill.
#[test]
fn without_inflight_region_only_stop_resumes() {
    let vm = two();
    let mut service = start(&vm);
    let mut guest = without_notes(&vm);
    for round in 0..3 {
        assert_io_works(&mut guest, round);
        service.restart(libc::SIGTERM).expect("starts again");
        assert_io_works(&mut guest, 100 + round);
    }
    service.restart(libc::SIGKILL).expect("starts again");
    becomes("it has to connect again", || is_closed(&guest));
    service.process.wait_for("INFLIGHT_SHMFD", TEST_TIMEOUT).expect("it says why");
    assert_io_works(&mut without_notes(&vm), 8);
}

/// A connection that cannot be resumed is closed, and the front-end can connect again.
#[test]
fn unresumable_connection_is_closed() {
    type Kept = Vec<(String, OwnedFd)>;
    type Way<'a> = (&'a str, &'a dyn Fn(&mut Kept));
    let ledger = |kept: &Kept| {
        let found = kept.iter().find(|(name, _)| name == "larder/vda/ledger");
        File::from(found.expect("is kept").1.try_clone().expect("is copied"))
    };
    let ways: [Way<'_>; 6] = [
        ("ended while it was answering a message", &|kept| {
            ledger(kept).write_all_at(&[1], 8).expect("writes");
        }),
        ("stored state of the connection is invalid", &|kept| {
            ledger(kept).write_all_at(&[9], 8).expect("writes");
        }),
        ("stored state of the connection is invalid", &|kept| {
            let bytes = 1u64 << 40;
            (4096..).step_by(1 << 20).take(2).for_each(|at| {
                ledger(kept).write_all_at(&bytes.to_le_bytes(), at).expect("writes");
            });
        }),
        ("has not stored the ledger", &|kept| {
            kept.retain(|(name, _)| name != "larder/vda/ledger");
        }),
        ("has not stored the connection", &|kept| {
            kept.retain(|(name, _)| name != "larder/vda/connection");
        }),
        // The store had room for only some of the descriptors.
        ("FileDescriptorStoreMax= may be too low", &|kept| {
            kept.retain(|(name, _)| name != "larder/2");
        }),
    ];
    for (why, way) in ways {
        let vm = two();
        let mut service = start(&vm);
        let mut guest = connect(&vm, Options::default());
        assert_io_works(&mut guest, 1);
        service.end(libc::SIGKILL).expect("ends");
        service.tamper(way);
        service.launch().expect("starts");
        becomes(why, || service.process.output().contains(why));
        becomes("it is closed", || is_closed(&guest));
        guest.reconnect(UnixStream::connect(vm.path("vda")).expect("connects")).expect("goes on");
        assert_io_works(&mut guest, 2);
        // The new connection is stored, and nothing of the old one.
        service.restart(libc::SIGKILL).expect("starts again");
        assert_io_works(&mut guest, 3);
    }
}

/// A guest's connection is not resumed with a disk that has other properties.
#[test]
fn changed_disk_closes_connection() {
    let ways = [
        ("is another one now", "IMAGES/system.qcow2", "IMAGES/other.qcow2"),
        ("no queue 1", "serial =", "queues = 1\nserial ="),
        ("of which 0x", "serial =", "readonly = true\nserial ="),
    ];
    for (why, from, to) in ways {
        let vm = two();
        let image = vm.images.path().join("other.qcow2");
        run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "64M"]);
        // The disk has no cache, so that only the tested property changes.
        vm.write(&without_cache(TWO));
        let mut service = start(&vm);
        let two_queues = Options { queues: 2, ..Options::default() };
        let mut guest = connect(&vm, two_queues);
        assert_io_works(&mut guest, 1);
        vm.write(&without_cache(&TWO.replace(from, to)));
        service.restart(libc::SIGTERM).expect("starts again");
        becomes("it is closed", || is_closed(&guest));
        let said = || service.process.output();
        becomes("it is told", || said().contains(why));
        becomes("nothing is kept", || service.kept().expect("is known").is_empty());
    }
}

fn without_cache(file: &str) -> String {
    let lines = file.lines().filter(|line| !line.starts_with("cache"));
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn removed_disk_closes_connection() {
    let vm = two();
    let mut service = start(&vm);
    let mut guest = connect(&vm, Options::default());
    let data = TWO.split("[[disk]]").nth(2).expect("the second disk");
    assert_io_works(&mut guest, 2);
    vm.write(&format!("control = \"control\"\n[[disk]]{data}"));
    service.restart(libc::SIGTERM).expect("starts again");
    becomes("it is closed", || is_closed(&guest));
    becomes("nothing is kept", || service.kept().expect("is known").is_empty());
    becomes("it is told", || service.process.output().contains("the disk no longer exists"));
}

/// A guest whose QEMU cannot reconnect sees only pauses when its server is stopped or killed.
#[test]
fn guest_without_reconnect_survives_restarts() {
    for (how, seed) in [(How::Asked, 1), (How::Killed, 2)] {
        let folder = temp_dir_on_disk();
        let report = restarts::run(larder_path(), folder.path(), how, 5, &mut Random::new(seed)).expect("survives");
        assert_eq!((report.servers.len(), report.guest.len()), (5, 5));
    }
}

/// A guest whose QEMU cannot reconnect boots while its server is restarted.
#[test]
fn guest_boots_through_server_restarts() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let words = restarts::vm(larder_path(), folder.path()).expect("an image");
    let mut service = Service::start(&words, &sockets.path().join("notify")).expect("starts");
    let options = GuestOptions { reconnects: false, ..GuestOptions::default() };
    let script = "dd if=/dev/vda of=/dev/null bs=1M count=16 && echo DONE\n";
    let guest = Guest::start(script, &folder.path().join("vda"), &options).expect("starts");
    let connected = service.process.wait_for("front-end connected", TEST_TIMEOUT);
    connected.expect("connects");
    while !guest.process.output().contains("DONE") && !guest.process.has_ended() {
        service.restart(libc::SIGTERM).expect("starts again");
        std::thread::sleep(Duration::from_millis(50));
    }
    let finished = guest.finish();
    assert!(finished.is_ok(), "{finished:?}\nthe server: {}", service.process.output());
}
