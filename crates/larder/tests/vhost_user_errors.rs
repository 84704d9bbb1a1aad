//! Failures around a served disk: misbehaving front-ends, signals, and errors of the storage or of the log.

mod support;

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use larder_bench::campaign::front_end::queue::Request;
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::front_end::wire::{self, Wire};
use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::server::Server;
use support::{
    Mount, TEST_TIMEOUT, assert_io_works, create_image, larder_path, open_descriptor_count, run_tool, start_server,
    temp_dir_on_disk, temp_dir_on_tmpfs, test_pattern,
};

const MIB: u64 = 1 << 20;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn full_log_does_not_stop_disk() {
    let folder = temp_dir_on_tmpfs();
    let image = create_image(folder.path(), 1 << 20);
    let socket = folder.path().join("nbd");
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    let full = fs::File::options().write(true).open("/dev/full").expect("/dev/full");
    let mut server = Command::new(larder_path())
        .args(["disk", "serve", text(&image), "--nbd", &uri])
        .stderr(full)
        .spawn()
        .expect("starts");
    let give_up = Instant::now() + TEST_TIMEOUT;
    while !socket.exists() {
        assert!(Instant::now() < give_up, "it does not listen");
        std::thread::yield_now();
    }
    assert_eq!(run_tool("nbdinfo", &["--size", &uri]).trim(), "1048576");
    assert_eq!(server.try_wait().expect("its state"), None, "it ended");
    server.kill().expect("it is there");
    server.wait().expect("it ends");
}

/// Front-ends that send invalid messages or disconnect leave no resources behind.
#[test]
fn broken_front_ends_leave_no_resources() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let server = start_server(&disk, sockets.path(), &[]);
    assert_io_works(&mut FrontEnd::connect(&server.socket, Options::default()).expect("connects"), 1);
    // A front-end is served only after the previous one was released.
    let settled = |seed| {
        assert_io_works(&mut FrontEnd::connect(&server.socket, Options::default()).expect("connects"), seed);
        let mut guest = FrontEnd::connect(&server.socket, Options::default()).expect("connects");
        assert_io_works(&mut guest, seed + 1);
        open_descriptor_count(server.process.id())
    };
    let before = settled(2);
    for round in 0..100 {
        let wire = Wire::new(UnixStream::connect(&server.socket).expect("connects")).expect("a wire");
        let null = fs::File::open("/dev/null").expect("/dev/null");
        let bytes = match round % 4 {
            0 => test_pattern(round, 100),
            1 => Wire::encode(wire::SET_MEM_TABLE, true, &wire::words(&[8, 0])),
            2 => Wire::encode(wire::SET_VRING_KICK, true, &wire::longs(&[0]))[..15].to_vec(),
            _ => Wire::encode(wire::SET_LOG_BASE, true, &wire::longs(&[u64::MAX, 0])),
        };
        let _ = wire.send_raw(&bytes, &vec![null.as_fd(); round as usize % 8]);
        drop(wire);
        // A complete guest that disconnects with requests in flight.
        let mut guest = FrontEnd::connect(&server.socket, Options::default());
        if let Ok(guest) = &mut guest {
            let data = guest.data();
            let into = [Buffer { address: data, len: 4096 }];
            (0..20).for_each(|sector| {
                guest.queue().add(&Request::read(sector * 8, &into));
            });
            guest.queue().go();
        }
    }
    assert_eq!(settled(4), before, "descriptors leak");
    assert_eq!(server.stop().expect("stops"), Some(0));
}

#[test]
fn second_front_end_waits_for_first() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let server = start_server(&disk, sockets.path(), &[]);
    let mut first = FrontEnd::connect(&server.socket, Options::default()).expect("connects");
    let socket = server.socket.clone();
    let second = std::thread::spawn(move || {
        let mut guest = FrontEnd::connect(&socket, Options::default()).expect("connects");
        assert_io_works(&mut guest, 3);
    });
    assert_io_works(&mut first, 1);
    server.process.wait_for("another front-end waits", TEST_TIMEOUT).expect("says so");
    assert_io_works(&mut first, 2);
    let said = server.process.output();
    assert_eq!(said.matches("another front-end waits").count(), 1, "once: {said}");
    let holder = format!(", pid {}) is connected", std::process::id());
    assert!(said.contains(&holder), "who is in the way: {said}");
    drop(first);
    second.join().expect("served");
}

/// Starts a server with `count` reads in flight, of which it completes one per second.
fn busy(image: &Path, sockets: &Path, count: usize) -> (Server, FrontEnd) {
    let server = start_server(image, sockets, &["--throttle", "iops=1"]);
    let mut guest = FrontEnd::connect(&server.socket, Options::default()).expect("connects");
    let into = [Buffer { address: guest.data(), len: 512 }];
    for _ in 0..=count {
        guest.queue().add(&Request::read(0, &into));
    }
    guest.queue().go();
    // After the first completion the server has taken all of them.
    guest.queue().complete(TEST_TIMEOUT).expect("the first is done at once");
    (server, guest)
}

/// Signals at the same time stop a server, and do not make it abandon requests.
#[test]
fn simultaneous_signals_count_as_one() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let (mut server, _guest) = busy(&disk, sockets.path(), 2);
    // The server receives both signals when it continues.
    for signal in [libc::SIGSTOP, libc::SIGTERM, libc::SIGINT, libc::SIGCONT] {
        server.process.signal(signal);
    }
    let code = server.process.wait(TEST_TIMEOUT).expect("ends").code();
    let said = server.process.output();
    assert!(code == Some(0) && said.contains("stopping: "), "{code:?}: {said}");
}

#[test]
fn later_second_signal_abandons_requests() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let (mut server, _guest) = busy(&disk, sockets.path(), 20);
    server.process.signal(libc::SIGTERM);
    server.process.wait_for("stopping: ", TEST_TIMEOUT).expect("says so");
    let told = Instant::now();
    while !server.process.output().contains("ended at once: ") {
        assert!(told.elapsed() < TEST_TIMEOUT, "it goes on: {}", server.process.output());
        server.process.signal(libc::SIGTERM);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(server.process.wait(TEST_TIMEOUT).expect("ends").code(), Some(2));
}

#[test]
fn silent_client_is_reported() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let server = start_server(&disk, sockets.path(), &[]);
    let silent = UnixStream::connect(&server.socket).expect("connects");
    let line = server.process.wait_for("sends nothing", TEST_TIMEOUT).expect("says so");
    assert!(line.contains(&format!(", pid {})", std::process::id())), "{line}");
    drop(silent);
    assert_io_works(&mut FrontEnd::connect(&server.socket, Options::default()).expect("connects"), 1);
    // A silent client does not keep the server from stopping either.
    let _silent = UnixStream::connect(&server.socket).expect("connects");
    assert_eq!(server.stop().expect("stops"), Some(0));
}

/// Failures are logged for requests over NBD and vhost-user alike, and the number of messages is limited.
#[test]
fn failure_messages_are_limited() {
    let folder = temp_dir_on_disk();
    let mount = Mount::new(&folder.path().join("tmpfs"), &["-t", "tmpfs", "-o", "size=1m", "none"]);
    let disk = create_image(&mount.0, 64 * MIB);
    let socket = temp_dir_on_tmpfs();
    let uri = format!("nbd+unix:///?socket={}", text(&socket.path().join("nbd")));
    let mut server = start_server(&disk, socket.path(), &["--nbd", &uri]);
    fs::write(mount.0.join("ballast"), vec![1; 2 << 20]).expect_err("it takes all the room there is");
    let mut writes = Command::new("qemu-io");
    writes.args(["-f", "raw", &uri]);
    for at in 0..20 {
        writes.args(["-c", &format!("write {at}M 64k")]);
    }
    let output = writes.output().expect("qemu-io");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.matches("No space left").count(), 20, "{said}");
    server.process.signal(libc::SIGTERM);
    assert_eq!(server.process.wait(TEST_TIMEOUT).expect("stops").code(), Some(0));
    let said = server.process.output();
    // The first ten messages and the sixteenth.
    assert_eq!(said.matches("no space left on the device").count(), 11, "{said}");
}

/// Fills the file system under a sparse image, and then frees space.
fn check_full(folder: &Path) {
    let sockets = temp_dir_on_tmpfs();
    let ballast = folder.join("ballast");
    fs::write(&ballast, vec![1; 4 << 20]).expect("ballast");
    let disk = create_image(folder, 64 * MIB);
    let server = start_server(&disk, sockets.path(), &[]);
    let mut guest = FrontEnd::connect(&server.socket, Options::default()).expect("connects");
    let data = guest.data();
    guest.memory.write(data, &test_pattern(5, 1 << 20));
    let out = [Buffer { address: data, len: 1 << 20 }];
    let mut statuses = Vec::new();
    for index in 0..64 {
        statuses.push(guest.queue().run(&Request::write(index * 2048, &out)).expect("an answer").status);
    }
    assert_eq!(statuses[0], 0, "the first fits");
    let failed = statuses.iter().position(|status| *status != 0).expect("the file system is full at some time");
    assert_eq!(statuses[failed], 1, "an I/O error");
    let told = server.process.wait_for("no space left", TEST_TIMEOUT);
    told.expect("the log says why");
    fs::remove_file(&ballast).expect("room");
    let again = guest.queue().run(&Request::write(failed as u64 * 2048, &out)).expect("an answer");
    assert_eq!(again.status, 0, "once there is space it goes on: {}", server.process.output());
    assert_eq!(guest.queue().run(&Request::flush()).expect("an answer").status, 0);
    let into = [Buffer { address: data + (2 << 20), len: 1 << 20 }];
    assert_eq!(guest.queue().run(&Request::read(failed as u64 * 2048, &into)).expect("an answer").status, 0);
    assert_eq!(guest.memory.read_vec(data + (2 << 20), 1 << 20), test_pattern(5, 1 << 20));
    drop(guest);
    server.stop().expect("stops");
}

/// A full file system fails the guest's writes until there is space again.
#[test]
fn full_file_system_fails_guest_writes() {
    let folder = temp_dir_on_disk();
    {
        let mount = Mount::new(&folder.path().join("tmpfs"), &["-t", "tmpfs", "-o", "size=16m", "none"]);
        check_full(&mount.0);
    }
    let file = folder.path().join("ext4");
    fs::File::create(&file).and_then(|file| file.set_len(32 * MIB)).expect("a file");
    run_tool("mkfs.ext4", &["-q", text(&file)]);
    let mount = Mount::new(&folder.path().join("mnt"), &["-o", "loop", text(&file)]);
    check_full(&mount.0);
}
