//! Failures of a cache's device: the guest sees no error, and no byte that differs from the disk's, then and later.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use larder_bench::campaign::process::{Process, killed_with_parent};
use serde_json::json;

use crate::support::{
    LoopDevice, Mount, TEST_TIMEOUT, fill_file_system, mount_tmpfs, run_tool, wait_until, wait_until_listening,
};
use crate::{Place, Served, text};

/// An NBD server with room for a cache, whose requests fail while a trigger file exists.
pub(crate) struct Fast {
    pub(crate) uri: String,
    trigger: PathBuf,
    process: Process,
}

impl Fast {
    pub(crate) fn start(place: &Place) -> Self {
        Self::with(place, &["error-rate=1"])
    }

    /// Starts a server whose reads take this many milliseconds.
    fn with_delay(place: &Place, millis: u32) -> Self {
        Self::with(place, &["error-rate=1", &format!("rdelay={millis}ms")])
    }

    /// Starts a server with settings of `nbdkit-error-filter` and `nbdkit-delay-filter`.
    pub(crate) fn with(place: &Place, settings: &[&str]) -> Self {
        let (socket, trigger) = (place.socket("fast"), place.path("fail"));
        let mut command = killed_with_parent("nbdkit");
        command.args(["-f", "-v", "-U", text(&socket), "--filter=delay", "--filter=error", "memory", "8M"]);
        command.args(settings).arg(format!("error-file={}", text(&trigger)));
        let process = Process::start(command).expect("nbdkit; testbed/setup.sh installs it");
        wait_until_listening(&socket);
        Self { uri: format!("nbd+unix:///?socket={}", text(&socket)), trigger, process }
    }

    pub(crate) fn fail(&self) {
        File::create(&self.trigger).expect("a file");
    }

    pub(crate) fn work(&self) {
        fs::remove_file(&self.trigger).expect("was there");
    }
}

#[test]
fn failed_cache_is_never_trusted_again() {
    for stops in [true, false] {
        let place = Place::new();
        let image = place.image("disk.raw", 16);
        let fast = Fast::start(&place);
        let serve = || place.start(place.serve_command(&image, &fast.uri, &[]));
        let served = serve();
        served.warm_up(2);
        served.settle();
        fast.fail();
        served.io(&["write -P 9 1M 64k", "read -P 9 1M 64k", "read -P 7 0 1M", "read -P 7 4M 1M", "flush"]);
        assert_eq!(served.cache()["state"], json!("failed"));
        let said = run_tool(text(crate::larder_path()), &["status", text(&served.control)]);
        assert!(said.contains("has failed"), "{said}");
        let control = text(&served.control);
        let (code, said) = place.cache_command(&["mode", &fast.uri, "wa", "--control", control]);
        assert!(code == Some(2) && said.contains("has failed, so it cannot be changed"), "{said}");
        served.io(&["write -P 10 1M 4k"]);
        match stops {
            true => drop(served.stop()),
            false => served.kill(),
        }
        // The device works again, with all its old data.
        fast.work();
        let served = serve();
        served.process.wait_for("starts empty", TEST_TIMEOUT).expect("told");
        served.io(&["read -P 10 1M 4k", "read -P 9 1028k 60k", "read -P 7 0 1M", "read -P 7 1088k 14M"]);
        assert_eq!(served.cache()["state"], json!("works"));
    }
}

/// A cache whose NBD server is gone is given up much sooner than a disk would be.
#[test]
fn lost_cache_server_is_not_awaited() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let mut fast = Fast::start(&place);
    let served = place.start(place.serve_command(&image, &fast.uri, &["--nbd-reconnect", "3600"]));
    served.warm_up(2);
    fast.process.kill();
    served.io(&["read -P 7 0 1M", "write -P 9 1M 64k", "read -P 9 1M 64k", "read -P 7 4M 1M", "flush"]);
    assert_eq!(served.cache()["state"], json!("failed"));
    served.stop();
    crate::qemu_io("raw", text(&image), &["read -P 7 0 1M", "read -P 9 1M 64k"]);
}

/// A cache that is slower than the disk is not used for a while.
#[test]
fn slow_cache_is_bypassed_temporarily() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let fast = Fast::with_delay(&place, 50);
    let served = place.start(place.serve_command(&image, &fast.uri, &[]));
    // The wait is not for a full cache: lines that are missing when the device proves slow stay missing.
    served.read_all(1);
    served.settle();
    let reads: Vec<String> = (0..128).map(|at| format!("read -P 7 {}k 4k", 4 * at)).collect();
    served.io(&reads);
    let (hits, bypassed) = (served.count("hits"), served.count("bypassed_slow"));
    assert!(hits > 0 && bypassed > 0, "{}", served.cache());
    let status = served.cache();
    let latency = &status["hit_latency"];
    let slow: u64 = latency["buckets"].as_array().expect("buckets").iter().fold(0, |slow, bucket| {
        let is_slow = bucket["below_ns"].as_u64().is_none_or(|below| below > 50_000_000);
        slow + if is_slow { bucket["count"].as_u64().expect("a number") } else { 0 }
    });
    assert_eq!((latency["count"].as_u64(), slow), (Some(hits), hits), "{status}");
    let said = run_tool(text(crate::larder_path()), &["status", text(&served.control)]);
    assert!(said.contains("bypassed"), "{said}");
    // Writes still go to the cache, and its data is right when it is used again.
    served.io(&["write -P 9 64k 4k", "read -P 9 64k 4k"]);
    served.stop();
    crate::qemu_io("raw", text(&image), &["read -P 9 64k 4k", "read -P 7 68k 956k"]);
}

#[test]
fn missing_cache_at_start_refuses_disk() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let fast = Fast::start(&place);
    fast.fail();
    place.refused(&image, &fast.uri, &[], &["cache of", "disk.raw"]);
    fast.work();
    place.start(place.serve_command(&image, &fast.uri, &[])).io(&["read -P 7 0 16M"]);
}

/// A block device whose requests get no answer while the NBD server behind it is stopped.
struct Stoppable {
    device: LoopDevice,
    _mount: Mount,
    fuse: Process,
    server: Process,
}

impl Stoppable {
    fn start(place: &Place) -> Self {
        let socket = place.socket("fast");
        let mut command = killed_with_parent("nbdkit");
        command.args(["-f", "-v", "-U", text(&socket), "memory", "8M"]);
        let server = Process::start(command).expect("nbdkit; testbed/setup.sh installs it");
        wait_until_listening(&socket);
        let (file, ready) = (place.path("fast"), place.path("fuse.pid"));
        File::create(&file).expect("a file");
        let mut command = killed_with_parent("nbdfuse");
        let uri = format!("nbd+unix:///?socket={}", text(&socket));
        command.args(["--pidfile", text(&ready), text(&file), &uri]);
        let fuse = Process::start(command).expect("nbdfuse; testbed/setup.sh installs it");
        wait_until("nbdfuse has mounted it", || ready.exists());
        let mount = Mount(file.clone());
        let device = LoopDevice::new(&file, 512);
        run_tool("losetup", &["--direct-io=on", text(&device.0)]);
        Self { device, _mount: mount, fuse, server }
    }

    fn stop(&self) {
        self.server.signal(libc::SIGSTOP);
    }

    fn go_on(&self) {
        self.server.signal(libc::SIGCONT);
    }

    /// Returns whether the device has a request in flight.
    fn has_requests(&self) -> bool {
        let name = self.device.0.file_name().expect("a name");
        let inflight = Path::new("/sys/block").join(name).join("inflight");
        let counts = fs::read_to_string(inflight).expect("a block device");
        counts.split_whitespace().any(|count| count != "0")
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        // Requests that still wait for an answer get an error.
        self.server.kill();
        self.fuse.kill();
    }
}

#[test]
fn unresponsive_cache_device_is_given_up() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let fast = Stoppable::start(&place);
    let serve = || place.start(place.serve_command(&image, text(&fast.device.0), &[]));
    let served = serve();
    served.warm_up(2);
    served.settle();
    fast.stop();
    served.io(&["write -P 9 1M 64k", "flush"]);
    served.process.wait_for("has not answered for 15 s", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 9 1M 64k", "read -P 7 0 1M", "read -P 7 4M 1M", "flush"]);
    assert_eq!(served.cache()["state"], json!("failed"));
    assert!(served.count("write_errors") > 0, "{}", served.cache());
    let said = run_tool(text(crate::larder_path()), &["status", text(&served.control)]);
    assert!(said.contains("errors:"), "{said}");
    served.stop();
    crate::qemu_io("raw", text(&image), &["read -P 7 0 1M", "read -P 9 1M 64k"]);
    fast.go_on();
    // The device may have executed its old requests by now, so the cache is not trusted.
    let served = serve();
    served.process.wait_for("starts empty", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 7 0 1M", "read -P 9 1M 64k", "read -P 7 1088k 14M"]);
}

/// Returns a client whose read of 4 KiB at 64 KiB waits for the cache device. On a slow machine the device may just
/// have been slow, and such a read goes to the disk.
fn waiting_reader(served: &Served, fast: &Stoppable) -> Process {
    let give_up = Instant::now() + TEST_TIMEOUT;
    loop {
        let mut command = killed_with_parent("qemu-io");
        command.args(["-f", "raw", "-c", "read -P 7 64k 4k", &served.uri]);
        let reader = Process::start(command).expect("qemu-io; testbed/setup.sh installs it");
        wait_until("the read has begun", || fast.has_requests() || reader.has_ended());
        if fast.has_requests() {
            return reader;
        }
        assert!(Instant::now() < give_up, "no read goes to the cache device");
    }
}

/// A read that the cache device never answers delays neither other requests nor the server's exit.
#[test]
fn unanswered_read_delays_nothing_else() {
    for goes_on in [true, false] {
        let place = Place::new();
        let image = place.image("disk.raw", 16);
        let fast = Stoppable::start(&place);
        let served = place.start(place.serve_command(&image, text(&fast.device.0), &[]));
        served.warm_up(2);
        served.settle();
        fast.stop();
        let mut reader = waiting_reader(&served, &fast);
        served.process.wait_for("still wait for it: 1", TEST_TIMEOUT).expect("told");
        served.io(&["write -P 9 64k 4k", "read -P 9 64k 4k", "read -P 7 1M 64k", "flush"]);
        if goes_on {
            fast.go_on();
            let status = reader.wait(TEST_TIMEOUT).expect("ends");
            assert!(status.success(), "{}", reader.output());
            served.stop();
        } else {
            served.process.signal(libc::SIGTERM);
            let said = served.process.wait_for("some requests still wait", TEST_TIMEOUT);
            said.expect("it ends without it");
            // The process can exit only once the kernel has an answer.
            fast.go_on();
        }
        crate::qemu_io("raw", text(&image), &["read -P 9 64k 4k", "read -P 7 0 64k"]);
    }
}

/// Returns whether one of the kernel's workers for io_uring, which are threads of the process, waits for a device.
fn has_waiting_worker(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("procfs");
    threads.flatten().any(|thread| {
        // A worker may have exited since the directory was read.
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.contains("(iou-wrk-") && stat.contains(") D ")
    })
}

/// A server stops although a flush gets no answer. The kernel lets no thread exit whose worker waits for a device,
/// and a worker executes each flush.
#[test]
fn unanswered_flush_does_not_delay_stop() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let fast = Stoppable::start(&place);
    let mut served = place.start(place.serve_command(&image, text(&fast.device.0), &[]));
    let process = served.process.id();
    // Lines are flushed up to five seconds after they are filled. On a slow machine that may be before the device is
    // stopped.
    let has_flush = (0..8).any(|at| {
        served.io(&[format!("read -P 7 {at}M 64k")]);
        wait_until("the lines are filled", || served.count("occupancy") == (at + 1) << 16);
        fast.stop();
        wait_until("the lines are flushed", || has_waiting_worker(process) || served.count("unsettled") == 0);
        let has_flush = has_waiting_worker(process);
        if !has_flush {
            fast.go_on();
        }
        has_flush
    });
    assert!(has_flush, "no flush waits for the device");
    served.process.wait_for("has not answered for 15 s", TEST_TIMEOUT).expect("the cache fails");
    served.io(&["write -P 9 0 4k", "flush"]);
    served.process.signal(libc::SIGTERM);
    wait_until("the control socket is removed", || !served.control.exists());
    // The process exits when the kernel has its answer.
    fast.go_on();
    let status = served.process.wait(TEST_TIMEOUT).expect("exits");
    assert!(status.success(), "{}", served.process.output());
    crate::qemu_io("raw", text(&image), &["read -P 9 0 4k", "read -P 7 4k 60k"]);
}

/// A successor waits for a killed server's locks, which last until its last I/O has ended, and not for a fixed time.
#[test]
fn successor_waits_while_killed_server_exists() {
    let place = Place::new();
    let slow = Stoppable::start(&place);
    let device = slow.device.0.clone();
    let command = || {
        let mut command = killed_with_parent(text(crate::larder_path()));
        command.args(["disk", "serve", text(&device), "--format", "raw", "--socket"]);
        command.arg(place.path("guest"));
        command
    };
    let (uri, socket) = {
        let socket = place.socket("disk");
        (format!("nbd+unix:///?socket={}", text(&socket)), socket)
    };
    let mut first = command();
    first.args(["--nbd", &uri]);
    let killed = Process::start(first).expect("larder");
    killed.wait_for("serving", TEST_TIMEOUT).expect("it serves");
    assert!(socket.exists());
    slow.stop();
    let mut writer = killed_with_parent("qemu-io");
    writer.args(["-f", "raw", "-c", "write 0 64k", &uri]);
    let _writer = Process::start(writer).expect("qemu-io; testbed/setup.sh installs it");
    wait_until("the write is under way", || slow.has_requests());
    killed.signal(libc::SIGKILL);
    let next = Process::start(command()).expect("larder");
    // Whether the process or its last I/O is waited for depends on the kernel.
    next.wait_for("waiting until", TEST_TIMEOUT).expect("it says what it waits for");
    // The message is repeated after more than the time that a running server is waited for.
    let said = next.lines();
    next.wait_for_after(said, "waiting until", TEST_TIMEOUT).expect("it still waits");
    assert!(!next.has_output_after(0, "serving") && !next.has_ended());
    slow.go_on();
    next.wait_for("serving", TEST_TIMEOUT).expect("it serves when the other one has ended");
}

/// Checks that the guest can use the disk while `harm` is done to the cache's file, and that the disk is right
/// afterwards.
fn survives(place: &Place, cache: &Path, harm: impl Fn()) {
    let image = place.image("disk.raw", 16);
    let served = place.serve(&image, cache, &["--cache-size", "4M"]);
    served.warm_up(1);
    harm();
    served.io(&["read -P 7 0 1M", "write -P 9 64k 64k", "read -P 9 64k 64k", "flush"]);
    served.read_all(8);
    served.io(&["read -P 7 0 64k", "read -P 9 64k 64k", "read -P 7 128k 8M"]);
    served.stop();
    crate::qemu_io("raw", text(&image), &["read -P 7 0 64k", "read -P 9 64k 64k", "read -P 7 128k 8M"]);
}

#[test]
fn guest_survives_removed_or_truncated_cache() {
    let place = Place::new();
    let cache = place.path("cache");
    survives(&place, &cache, || fs::remove_file(&cache).expect("was there"));
    let place = Place::new();
    let cache = place.path("cache");
    survives(&place, &cache, || {
        let file = File::options().write(true).open(&cache).expect("is there");
        file.set_len(0).expect("is cut off");
    });
}

/// The space of a cache's file is allocated, so that it also works when its file system is full.
#[test]
fn cache_works_on_full_file_system() {
    let place = Place::new();
    let small = mount_tmpfs(&place.path("small"), "size=6M");
    let cache = small.0.join("cache");
    let image = place.image("disk.raw", 16);
    let served = place.serve(&image, &cache, &["--cache-size", "4M"]);
    fill_file_system(&small.0.join("rest"));
    served.warm_up(2);
    assert_eq!((&served.cache()["state"], served.count("occupancy")), (&json!("works"), 2 << 20));
    served.stop();
    // The cache is discarded, and restarts without new space.
    crate::qemu_io("raw", text(&image), &["write -P 9 0 64k"]);
    let served = place.serve(&image, &cache, &[]);
    served.process.wait_for("starts empty", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 9 0 64k", "read -P 7 64k 8M"]);
    served.read_all(2);
    assert_eq!(served.cache()["state"], json!("works"));
}
