//! Guests and front-ends that try to harm their disk's server. One sends as many requests at once as virtio allows:
//! the memory that the server takes is bounded, and the requests are executed. Another one truncates files that it
//! shares: that ends its own session, and nothing else.

mod support;

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use larder_bench::campaign::front_end::queue::Request;
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::server::Server;
use support::{
    TEST_TIMEOUT, assert_io_works, create_image, run_tool, start_server, temp_dir_on_disk, temp_dir_on_tmpfs,
    wait_until,
};

const MIB: u64 = 1 << 20;

/// Maximum growth of a server's memory by the requests of one disk, in bytes.
const GROWTH_MAX: u64 = 64 * MIB;

/// Measures a process's private memory, which includes neither guest memory nor files.
struct Watched {
    ends: Arc<AtomicBool>,
    most: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
    before: u64,
}

fn anonymous_bytes(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

impl Watched {
    fn new(server: &Server) -> Self {
        let process = server.process.id();
        let (ends, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let thread = std::thread::spawn({
            let (ends, most) = (Arc::clone(&ends), Arc::clone(&most));
            move || {
                while !ends.load(Ordering::Relaxed) {
                    most.fetch_max(anonymous_bytes(process), Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        });
        Self { ends, most, thread: Some(thread), before: anonymous_bytes(process) }
    }

    /// Returns the largest growth of the private memory since the start of the measurement, in bytes.
    fn growth(mut self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it ends");
        }
        let most = self.most.load(Ordering::Relaxed);
        assert!(most > 0, "it was watched");
        most.saturating_sub(self.before)
    }
}

/// Returns the cache options of `larder disk serve` to test.
fn caches(folder: &Path) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    for mode in ["wt", "wb", "wa", "pt"] {
        for line in ["4KiB", "64KiB"] {
            let cache = folder.join(format!("cache-{mode}-{line}"));
            let words = [
                "--cache",
                cache.to_str().expect("UTF-8"),
                "--cache-size",
                "64MiB",
                "--cache-line",
                line,
                "--cache-mode",
                mode,
            ];
            all.push(words.map(str::to_owned).to_vec());
        }
    }
    all
}

#[test]
fn huge_request_takes_bounded_memory() {
    const LEN: u64 = 512 * MIB;
    const PIECE: u64 = 2 * MIB;
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), LEN);
    for cache in caches(folder.path()) {
        let mut words = vec!["--queue-size", "1024"];
        words.extend(cache.iter().map(String::as_str));
        let server = start_server(&disk, folder.path(), &words);
        let options = Options { size: 1024, data_bytes: PIECE as usize, ..Options::default() };
        let mut guest = FrontEnd::connect(&server.socket, options).expect("connects");
        let data = guest.data();
        let pattern = support::test_pattern(1, PIECE as usize);
        guest.memory.write(data, &pattern);
        // All buffers are the same memory.
        let buffers: Vec<Buffer> = (0..LEN / PIECE).map(|_| Buffer { address: data, len: PIECE as u32 }).collect();
        let watched = Watched::new(&server);
        let written = guest.queue().run(&Request::write(0, &buffers)).expect("writes");
        assert_eq!(written.status, 0, "{cache:?}");
        let read = guest.queue().run(&Request::read(0, &buffers)).expect("reads");
        assert_eq!(read.status, 0, "{cache:?}");
        let growth = watched.growth();
        assert!(growth <= GROWTH_MAX, "{cache:?}: {} MiB", growth / MIB);
        assert!(guest.memory.read_vec(data, PIECE as usize) == pattern, "{cache:?}");
        drop(guest);
        assert_eq!(server.stop().expect("stops"), Some(0), "{cache:?}");
    }
}

#[test]
fn many_fragmented_requests_take_bounded_memory() {
    const QUEUES: u16 = 64;
    const SIZE: u16 = 128;
    const LEN: u64 = MIB;
    const DISK: u64 = 64 * MIB;
    // The disk is not on tmpfs, whose requests end before the next one begins.
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), DISK);
    for cache in caches(folder.path()) {
        let mut words = vec!["--queues", "64"];
        words.extend(cache.iter().map(String::as_str));
        let server = start_server(&disk, sockets.path(), &words);
        let options = Options { queues: QUEUES, size: SIZE, data_bytes: LEN as usize, ..Options::default() };
        let mut guest = FrontEnd::connect(&server.socket, options).expect("connects");
        let data = guest.data();
        // Every second sector is in the cache, if the cache takes writes.
        let sector = [Buffer { address: data, len: 512 }];
        for at in (0..DISK / 512).step_by(2).take(16 << 10) {
            while !guest.queue().has_room(1) {
                assert_eq!(guest.queue().complete(TEST_TIMEOUT).expect("writes").status, 0);
            }
            guest.queue().add(&Request::write(at, &sector));
            guest.queue().go();
        }
        while guest.queue().ring.free_slots() < usize::from(SIZE) {
            assert_eq!(guest.queue().complete(TEST_TIMEOUT).expect("writes").status, 0);
        }
        let watched = Watched::new(&server);
        let long = [Buffer { address: data, len: LEN as u32 }];
        let mut asked = 0;
        for round in 0..u64::from(SIZE) {
            for queue in &mut guest.queues {
                if queue.has_room(1) {
                    let at = (asked % (DISK / LEN)) * (LEN / 512);
                    match round % 2 {
                        0 => queue.add(&Request::read(at, &long)),
                        _ => queue.add(&Request::write(at, &long)),
                    };
                    asked += 1;
                }
            }
        }
        guest.queues.iter_mut().for_each(|queue| queue.go());
        assert!(asked >= 64 * 42, "{asked}");
        for queue in &mut guest.queues {
            while queue.ring.free_slots() < usize::from(SIZE) {
                assert_eq!(queue.complete(TEST_TIMEOUT).expect("comes back").status, 0, "{cache:?}");
            }
        }
        let growth = watched.growth();
        println!("{cache:?}: {} MiB", growth / MIB);
        assert!(growth <= GROWTH_MAX, "{cache:?}: {} MiB", growth / MIB);
        drop(guest);
        assert_eq!(server.stop().expect("stops"), Some(0), "{cache:?}");
    }
}

/// A front-end that truncates a file which the server has mapped (guest memory with the rings, guest memory without
/// them, or the region of requests in flight) ends its own session with a message; the server and its NBD clients go
/// on.
#[test]
fn shortened_file_ends_its_session_only() {
    /// A sector that is never written, so that the server itself fills the guest's memory. Reads by the kernel into
    /// truncated memory would fail instead, and be reported to the guest.
    const HOLE: u64 = 1 << 16;
    let folder = temp_dir_on_tmpfs();
    let disk = folder.path().join("disk.qcow2");
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", disk.to_str().expect("UTF-8"), "64M"]);
    let uri = format!("nbd+unix:///?socket={}", folder.path().join("nbd").display());
    let server = start_server(&disk, folder.path(), &["--nbd", &uri]);
    let sessions_lost = || server.process.output().matches(" is lost: ").count();
    for (round, packed) in [false, true].into_iter().enumerate() {
        let options = Options { packed, ..Options::default() };
        let connect = || FrontEnd::connect(&server.socket, options).expect("connects");
        let lost_before = round * 3;

        // The rings are truncated.
        let mut guest = connect();
        rustix::fs::ftruncate(guest.memory.file(), 0).expect("it shrinks");
        guest.queue().kick_now();
        wait_until("the session with no rings ends", || sessions_lost() == lost_before + 1);
        drop(guest);

        // The data is truncated: the guest gets no answer until the memory is back.
        let mut guest = connect();
        let (data, whole) = (guest.data(), guest.memory.bytes() as u64);
        let page = [Buffer { address: data, len: 4096 }];
        rustix::fs::ftruncate(guest.memory.file(), data).expect("it shrinks");
        guest.queue().add(&Request::read(HOLE, &page));
        guest.queue().go();
        wait_until("the session with no data ends", || sessions_lost() == lost_before + 2);
        assert!(guest.queue().try_complete().is_none(), "what the guest has not got is not given back");
        rustix::fs::ftruncate(guest.memory.file(), whole).expect("it grows");
        guest.memory.write(data, &[7; 4096]);
        guest.reconnect(UnixStream::connect(&server.socket).expect("connects")).expect("goes on");
        assert_eq!(guest.queue().complete(TEST_TIMEOUT).expect("comes back").status, 0);
        assert!(guest.memory.read_vec(data, 4096) == [0; 4096]);
        drop(guest);

        // The region of requests in flight is truncated.
        let mut guest = connect();
        let (_, region) = guest.inflight.as_ref().expect("a region");
        rustix::fs::ftruncate(region, 0).expect("it shrinks");
        guest.queue().add(&Request::read(HOLE, &page));
        guest.queue().go();
        wait_until("the session with no notes ends", || sessions_lost() == lost_before + 3);
        drop(guest);

        assert_eq!(run_tool("nbdinfo", &["--size", &uri]).trim(), "67108864");
        assert_io_works(&mut connect(), round as u64);
    }
    assert_eq!(server.stop().expect("stops"), Some(0));
}

/// A cache survives a guest whose memory is truncated: the kernel's failed read into that memory is no fault of the
/// device.
#[test]
fn cache_survives_read_into_truncated_memory() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 64 * MIB);
    let cache = folder.path().join("cache");
    let options = ["--cache", cache.to_str().expect("UTF-8"), "--cache-size", "16MiB"];
    let server = start_server(&disk, folder.path(), &options);
    let connect = || FrontEnd::connect(&server.socket, Options::default()).expect("connects");
    let mut guest = connect();
    let data = guest.data();
    assert_io_works(&mut guest, 1);
    let page = [Buffer { address: data, len: 4096 }];
    // Sector 8 is in the cache by now.
    rustix::fs::ftruncate(guest.memory.file(), data).expect("it shrinks");
    guest.queue().add(&Request::read(8, &page));
    guest.queue().go();
    wait_until("its session ends", || server.process.output().contains(" is lost: "));
    drop(guest);
    assert_io_works(&mut connect(), 2);
    let said = server.process.output();
    assert!(!said.contains("its cache does not work"), "{said}");
    assert_eq!(server.stop().expect("stops"), Some(0));
}

/// A forged request in the in-flight region stops its queue, and not the server that resumes it.
#[test]
fn forged_inflight_request_stops_its_queue() {
    const HEAD: u64 = 5;
    const NEXT: u16 = 1;
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), MIB);
    let server = start_server(&disk, folder.path(), &[]);
    let connect = || UnixStream::connect(&server.socket).expect("connects");
    let mut guest = FrontEnd::over(connect(), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    // vhost-user, "Inflight I/O tracking", split virtqueue: a header of 16 bytes, then 16 for each descriptor, the
    // first of which says whether its request is in flight.
    let (_, region) = guest.inflight.as_ref().expect("a region");
    rustix::io::pwrite(region, &[1], 16 + 16 * HEAD).expect("writes");
    let mut descriptor = [0; 16];
    descriptor[8..12].copy_from_slice(&16u32.to_le_bytes());
    descriptor[12..14].copy_from_slice(&NEXT.to_le_bytes());
    descriptor[14..].copy_from_slice(&u16::MAX.to_le_bytes());
    let table = guest.queue().ring.places().descriptors;
    guest.memory.write(table + 16 * HEAD, &descriptor);
    guest.reconnect(connect()).expect("goes on");
    wait_until("the queue stops", || server.process.output().contains("corrupted its virtqueue"));
    drop(guest);
    assert_io_works(&mut FrontEnd::over(connect(), Options::default()).expect("connects"), 2);
    assert_eq!(server.stop().expect("stops"), Some(0));
}
