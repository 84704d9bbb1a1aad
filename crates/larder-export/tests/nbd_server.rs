//! Tests of the NBD server with third-party clients: libnbd's tools, QEMU's, fio.

#[path = "../../larder-block/tests/nbd_support/mod.rs"]
mod nbd_support;

use std::cell::Cell;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::rc::Rc;

use larder_block::backend::file::{FileDevice, FileOptions};
use larder_block::backend::memory::MemoryDevice;
use larder_block::event_loop::{Listener, POLL_MAX_DEFAULT};
use larder_block::{BlockDevice, BoxFuture, ByteLen, ByteRange, Extent, Filter, IoResult, Loop};
use larder_export::nbd::{NbdServer, NbdServerOptions};
use nbd_support::{Place, output, pattern, program, program_of_debian13};

const MIB: u64 = 1 << 20;

fn on_loop(test: impl AsyncFn(&Loop)) {
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    on.block_on(test(&on));
}

/// Creates a file as a disk, on a file system with holes and direct I/O.
async fn file_disk(on: &Loop, size: u64) -> (Rc<FileDevice>, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("an image");
    file.as_file().set_len(size).expect("room for it");
    let options = FileOptions { share: true, ..FileOptions::default() };
    let device = FileDevice::open(on, file.path(), options).await;
    (device.expect("opens"), file)
}

fn serve(on: &Loop, device: Rc<dyn BlockDevice>, options: NbdServerOptions) -> (NbdServer, Place) {
    let place = Place::new();
    let server = NbdServer::new(on, device, options);
    server.listen(Listener::from_descriptor(on, place.listener()).expect("a socket"));
    (server, place)
}

/// Runs a program in another thread while the loop runs; returns its output. Panics if the program fails.
async fn run_beside(on: &Loop, command: Command) -> String {
    let named = format!("{command:?}");
    let (success, printed) = try_beside(on, command).await;
    assert!(success, "{named} failed: {printed}");
    printed
}

/// Runs a program in another thread while the loop runs; returns whether it succeeded, and its output.
async fn try_beside(on: &Loop, mut command: Command) -> (bool, String) {
    let output = on.run_blocking(move || output(&mut command)).await.expect("a thread");
    let printed = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&printed).into_owned())
}

fn with<const N: usize>(name: &str, arguments: [&str; N]) -> Command {
    let mut command = program(name);
    command.args(arguments);
    command
}

/// nbdinfo reports every feature, and finds the export by its name and as the default export.
#[test]
fn nbdinfo_sees_features_and_export_names() {
    on_loop(async |on| {
        let options = NbdServerOptions {
            export: "disk".to_owned(),
            description: "a disk for a test".to_owned(),
            ..NbdServerOptions::default()
        };
        let device = Rc::new(MemoryDevice::new(ByteLen::mib(8), 512));
        let (server, place) = serve(on, device, options);
        let uri = place.uri("disk").to_string();
        for feature in ["df", "fast-zero", "flush", "fua", "multi-conn", "trim", "write", "zero", "cache", "structured"]
        {
            let asked = match feature {
                "structured" => with("nbdinfo", ["--can", "structured-reply", &uri]),
                feature => with("nbdinfo", ["--can", feature, &uri]),
            };
            run_beside(on, asked).await;
        }
        for wrong in ["--is=read-only", "--is=rotational"] {
            let (is, printed) = try_beside(on, with("nbdinfo", [wrong, &uri])).await;
            assert!(!is, "{wrong} {printed}");
        }
        let default = place.uri("").to_string();
        for uri in [&uri, &default] {
            let told = run_beside(on, with("nbdinfo", ["--json", uri])).await;
            for part in [
                r#""export-name": "disk""#,
                r#""description": "a disk for a test""#,
                r#""export-size": 8388608"#,
                r#""block_size_minimum": 512"#,
                r#""block_size_maximum": 33554432"#,
                r#""base:allocation""#,
            ] {
                assert!(told.contains(part), "no {part} in {told}");
            }
        }
        let told = run_beside(on, with("nbdinfo", ["--list", &default])).await;
        assert!(told.contains("export=\"disk\""), "{told}");
        let unknown = place.uri("other").to_string();
        let (found, told) = try_beside(on, with("nbdinfo", [&unknown])).await;
        assert!(!found && told.contains("No such file or directory for export: other"), "{told}");
        server.stop().await;
        assert_eq!(server.statistics().connections, 0);
    });
}

/// Data that other clients copy to the export is read back unchanged.
#[test]
fn data_of_other_clients_reads_back() {
    on_loop(async |on| {
        let (device, image) = file_disk(on, 32 * MIB).await;
        let (_server, place) = serve(on, device, NbdServerOptions::default());
        let uri = place.uri("").to_string();
        let source = place.path("source");
        let file = std::fs::File::create(&source).expect("a file");
        file.set_len(32 * MIB).expect("room");
        for (at, len) in [(0, 1), (100 << 10, 30 << 10), (3 * MIB, 2 * MIB), (17 * MIB + 512, 9 * MIB)] {
            file.write_all_at(&pattern(len as usize, at), at).expect("room");
        }
        let source = source.display().to_string();
        for copy in [
            with("nbdcopy", [&source, &uri]),
            with("qemu-img", ["convert", "-n", "-f", "raw", "-O", "raw", &source, &uri]),
            with("nbdcopy", ["--connections=4", "--requests=64", &source, &uri]),
        ] {
            image.as_file().set_len(0).expect("can shrink");
            image.as_file().write_all_at(&vec![0x55; (32 * MIB) as usize], 0).expect("room");
            run_beside(on, copy).await;
            run_beside(on, with("qemu-img", ["compare", "-f", "raw", "-F", "raw", &source, &uri])).await;
            let back = place.path("back").display().to_string();
            // Without the allocation map reads span the boundaries of holes.
            for how in ["--no-extents", "--requests=16"] {
                run_beside(on, with("nbdcopy", [how, &uri, &back])).await;
                run_beside(on, with("cmp", [&source, &back])).await;
            }
            let image = image.path().display().to_string();
            run_beside(on, with("cmp", [&source, &image])).await;
        }
    });
}

/// The allocation map of an export equals that of its file.
#[test]
fn export_map_equals_file_map() {
    on_loop(async |on| {
        let (device, image) = file_disk(on, 8 * MIB).await;
        for (at, len) in [(0, 64 << 10), (MIB, 128 << 10), (5 * MIB, MIB)] {
            image.as_file().write_all_at(&pattern(len as usize, at), at).expect("room");
        }
        let (_server, place) = serve(on, device, NbdServerOptions::default());
        let uri = place.uri("").to_string();
        let map = run_beside(on, with("nbdinfo", ["--map", &uri])).await;
        let map: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
        let expected = [
            ["0", "65536", "0"],
            ["65536", "983040", "3"],
            ["1048576", "131072", "0"],
            ["1179648", "4063232", "3"],
            ["5242880", "1048576", "0"],
            ["6291456", "2097152", "3"],
        ];
        assert_eq!(map, expected);
        let map = run_beside(on, with("qemu-img", ["map", "--output=json", "-f", "raw", &uri])).await;
        assert!(
            map.contains(r#""start": 1179648, "length": 4063232, "depth": 0, "present": true, "zero": true"#),
            "{map}"
        );
    });
}

#[test]
fn qemu_io_verifies_its_own_requests() {
    on_loop(async |on| {
        let (device, image) = file_disk(on, 64 * MIB).await;
        let (server, place) = serve(on, device, NbdServerOptions::default());
        let mut command = with("qemu-io", ["-f", "raw", "-d", "unmap", "-t", "none"]);
        for step in [
            "write -P 0x11 0 64M",
            "write -f -P 0x22 1M 512k",
            "write -z 2M 1M",
            "write -z -u 4M 1M",
            "discard 6M 1M",
            "aio_write -P 0x33 8M 4M",
            "aio_write -P 0x44 12M 4M",
            "aio_write -P 0x55 16M 32M",
            "aio_flush",
            "flush",
            "read -P 0x11 0 1M",
            "read -P 0x22 1M 512k",
            "read -P 0 2M 1M",
            "read -P 0 4M 1M",
            "read -P 0 6M 1M",
            "read -P 0x33 8M 4M",
            "read -P 0x44 12M 4M",
            "read -P 0x55 16M 32M",
            "read -P 0x22 1049088 512",
            "read -P 0x11 48M 16M",
        ] {
            command.args(["-c", step]);
        }
        command.arg(place.uri("").to_string());
        let told = run_beside(on, command).await;
        assert!(!told.contains("verification failed") && !told.contains("failed:"), "{told}");
        let mut block = [1; 512];
        image.as_file().read_exact_at(&mut block, 4 * MIB).expect("is there");
        assert_eq!(block, [0; 512]);
        assert_eq!(server.statistics().requests_failed, 0);
    });
}

/// fio verifies its own data, written with many requests in flight.
#[test]
fn fio_verifies_concurrent_writes() {
    on_loop(async |on| {
        let (device, _image) = file_disk(on, 32 * MIB).await;
        let (server, place) = serve(on, device, NbdServerOptions::default());
        let uri = format!("--uri={}", place.uri(""));
        let job = [
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--rwmixread=30",
            "--bssplit=4k/40:64k/30:512/10:1m/20",
            "--blockalign=512",
            "--size=32m",
            "--io_size=128m",
            "--iodepth=64",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_backlog=64",
            "--randseed=7",
            "--fsync=50",
            "--verify_state_save=0",
        ];
        run_beside(on, with("fio", job)).await;
        let seen = server.statistics();
        assert_eq!(seen.requests_failed, 0);
        assert!(seen.bytes_written.get() > 32 * MIB, "{seen:?}");
    });
}

#[test]
fn qemu_uses_extended_headers() {
    /// A QEMU that supports extended headers uses them.
    const GIB: u64 = 1 << 30;
    on_loop(async |on| {
        let (device, image) = file_disk(on, 6 * GIB).await;
        image.as_file().write_all_at(&pattern(MIB as usize, 1), 5 * GIB).expect("room");
        let (server, place) = serve(on, device, NbdServerOptions::default());
        let uri = place.uri("").to_string();
        let mut command = program_of_debian13("qemu-io");
        command.args(["-f", "raw", "-d", "unmap", "-t", "none"]);
        for step in [
            "write -P 0x11 0 3M",
            "write -P 0x22 5000M 40M",
            "discard 1M 1M",
            "write -z -u 5001M 1M",
            "read -P 0x11 0 1M",
            "read -P 0 1M 1M",
            "read -P 0x11 2M 1M",
            "read -P 0x22 5000M 1M",
            "read -P 0 5001M 1M",
            "read -P 0x22 5002M 38M",
            "flush",
        ] {
            command.args(["-c", step]);
        }
        command.arg(&uri);
        let told = run_beside(on, command).await;
        assert!(!told.contains("verification failed") && !told.contains("failed:"), "{told}");
        let mut map = program_of_debian13("qemu-img");
        map.args(["map", "--output=json", "-f", "raw", &uri]);
        let map = run_beside(on, map).await;
        for part in [
            r#""start": 0, "length": 1048576, "depth": 0, "present": true, "zero": false"#,
            r#""start": 3145728, "length": 5239734272, "depth": 0, "present": true, "zero": true"#,
            r#""start": 5242880000, "length": 1048576, "depth": 0, "present": true, "zero": false"#,
        ] {
            assert!(map.contains(part), "no {part} in {map}");
        }
        let before = server.statistics();
        let mut zero = program_of_debian13("qemu-io");
        zero.args(["-f", "raw", "-d", "unmap", "-c", "write -n -z -u 0 5G", "-c", "read -P 0 0 64M", &uri]);
        let told = run_beside(on, zero).await;
        assert!(!told.contains("failed"), "{told}");
        let seen = server.statistics();
        assert_eq!(seen.connections_extended, seen.connections_accepted);
        assert_eq!(seen.requests_failed, 0, "{before:?} {seen:?}");
    });
}

/// Disk whose extent queries never complete, as if its server were unreachable.
struct Silent(Rc<dyn BlockDevice>);

impl Filter for Silent {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.0
    }

    fn extents(&self, _: ByteRange, _: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(std::future::pending())
    }
}

/// A read waits for its data alone, and not for the extents.
#[test]
fn read_does_not_wait_for_extents() {
    on_loop(async |on| {
        let (device, image) = file_disk(on, 8 * MIB).await;
        let data = pattern((4 * MIB) as usize, 3);
        image.as_file().write_all_at(&data, MIB).expect("room");
        let (_server, place) = serve(on, Rc::new(Silent(device)), NbdServerOptions::default());
        let (uri, back) = (place.uri("").to_string(), place.path("back").display().to_string());
        let limit = std::time::Duration::from_secs(120);
        let copy = run_beside(on, with("nbdcopy", ["--no-extents", &uri, &back]));
        assert!(on.timeout(limit, copy).await.is_some(), "the copy hangs");
        let image = image.path().display().to_string();
        run_beside(on, with("cmp", [&image, &back])).await;
    });
}

/// Disk whose extent queries take a while, and which counts queries that are dropped before they complete.
struct Slow {
    lower: Rc<dyn BlockDevice>,
    on: Loop,
    asked: Cell<u32>,
    answered: Cell<u32>,
    dropped: Cell<u32>,
}

impl Filter for Slow {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        struct Question<'a>(&'a Slow);
        impl Drop for Question<'_> {
            fn drop(&mut self) {
                self.0.dropped.set(self.0.asked.get() - self.0.answered.get());
            }
        }
        Box::pin(async move {
            let _question = Question(self);
            self.asked.set(self.asked.get() + 1);
            assert_eq!(self.asked.get(), self.answered.get() + 1, "two questions at a time");
            self.on.sleep(std::time::Duration::from_millis(10)).await;
            let found = self.lower.extents(range, limit).await;
            self.answered.set(self.answered.get() + 1);
            found
        })
    }
}

/// An extent query that a read does not wait for is not dropped, because the kernel may be writing to its memory.
#[test]
fn extent_query_is_not_dropped() {
    on_loop(async |on| {
        let (device, _image) = file_disk(on, 8 * MIB).await;
        let slow = Rc::new(Slow {
            lower: device,
            on: on.clone(),
            asked: Cell::new(0),
            answered: Cell::new(0),
            dropped: Cell::new(0),
        });
        let lower: Rc<dyn BlockDevice> = Rc::clone(&slow) as _;
        let (server, place) = serve(on, lower, NbdServerOptions::default());
        let (uri, back) = (place.uri("").to_string(), place.path("back").display().to_string());
        for _ in 0..2 {
            run_beside(on, with("nbdcopy", ["--no-extents", &uri, &back])).await;
        }
        server.stop().await;
        assert!(slow.asked.get() > 0, "no read has asked");
        assert_eq!((slow.answered.get(), slow.dropped.get()), (slow.asked.get(), 0));
    });
}
