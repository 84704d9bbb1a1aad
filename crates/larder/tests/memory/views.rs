//! A program whose disk Larder serves, with direct I/O into memory whose pages are constantly evicted, and into clean
//! pages. A guest under QEMU mostly reads into memory that it has just used, which is not evicted.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_bench::campaign::Random;
use larder_bench::campaign::front_end::queue::Request;
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::memory::{Attach, Pager, Verifier};
use larder_bench::campaign::server::Server;
use tempfile::TempDir;

use crate::support::{TEST_TIMEOUT, larder_path, temp_dir_on_disk, temp_dir_on_tmpfs};
use crate::{Alone, MIB};

/// Size of a read, in bytes.
const BLOCK: usize = 64 << 10;
const WORDS: usize = BLOCK / 8;
/// Number of blocks of the disk.
const BLOCKS: u64 = 512;
/// Number of block-sized slots in the memory.
const PLACES: usize = 1024;
/// Number of reads in flight.
const DEPTH: usize = 64;
/// Number of reads under a pager: some thousands reveal writes that are not stopped, or not waited for.
const READS: u64 = 20_000;

/// Variable with the socket of the disk, for the programs below.
const PROGRAM: &str = "LARDER_TEST_READS";

/// Returns the content of a block of the disk.
fn words(block: u64) -> impl Iterator<Item = u64> {
    let mut random = Random::new(block + 1);
    std::iter::repeat_with(move || random.below(u64::MAX)).take(WORDS)
}

fn bytes(block: u64) -> Vec<u8> {
    words(block).flat_map(u64::to_le_bytes).collect()
}

/// Program that reads from its disk. It is no test: other tests start it.
#[test]
#[ignore = "started by other tests"]
fn reads() {
    let Some(socket) = std::env::var_os(PROGRAM).map(PathBuf::from) else {
        return;
    };
    let findings = Arc::new(Findings::default());
    let mut reader = Reader::new(&socket, Arc::clone(&findings));
    let reading = std::thread::spawn(move || reader.work());
    while findings.reads.load(Ordering::Relaxed) < PLACES as u64 {
        assert!(!reading.is_finished(), "it reads");
        std::thread::yield_now();
    }
    println!("\nready {}", std::process::id());
    for line in std::io::stdin().lock().lines() {
        if line.expect("what to do") == "stop" {
            break;
        }
        findings.tell("report");
    }
    findings.stop.store(true, Ordering::Relaxed);
    reading.join().expect("it reads");
    findings.tell("verified");
    assert_eq!(findings.mismatches.load(Ordering::Relaxed), 0);
}

/// Program that fills its memory, and on the command "write" writes the first blocks of it to its disk. It is no
/// test: other tests start it.
#[test]
#[ignore = "started by other tests"]
fn writes() {
    let Some(socket) = std::env::var_os(PROGRAM).map(PathBuf::from) else {
        return;
    };
    let mut guest = connect(&socket);
    let address_of = |guest: &FrontEnd, place: usize| guest.data() + (place * BLOCK) as u64;
    for place in 0..PLACES {
        guest.memory.write(address_of(&guest, place), &bytes(BLOCKS + place as u64));
    }
    println!("\nready {}", std::process::id());
    for line in std::io::stdin().lock().lines() {
        let is_write = line.expect("what to do") == "write";
        for place in 0..DEPTH {
            // Reads use only the last slot, so that apart from it only the queue's pages are paged in.
            let block =
                [Buffer { address: address_of(&guest, if is_write { place } else { PLACES - 1 }), len: BLOCK as u32 }];
            let sector = (place * BLOCK / 512) as u64;
            let request = match is_write {
                true => Request::write(sector, &block),
                false => Request::read(sector, &block),
            };
            guest.queue().add(&request);
        }
        guest.queue().go();
        if !is_write {
            (0..DEPTH).for_each(|_| assert_eq!(guest.queue().complete(TEST_TIMEOUT).expect("an answer").status, 0));
            println!("\nhas read");
        }
    }
}

fn connect(socket: &Path) -> FrontEnd {
    let options = Options { indirect: true, data_bytes: PLACES * BLOCK, ..Options::default() };
    FrontEnd::connect(socket, options).expect("a server")
}

#[derive(Default)]
struct Findings {
    reads: AtomicU64,
    mismatches: AtomicU64,
    stop: AtomicBool,
}

impl Findings {
    /// Prints a report in the form that [`Verifier`] parses.
    fn tell(&self, what: &str) {
        println!(
            "\n{what} accesses={} mismatches={} stalls=0 longest_us=0",
            self.reads.load(Ordering::Relaxed),
            self.mismatches.load(Ordering::Relaxed),
        );
        std::io::stdout().flush().expect("it is heard");
    }
}

/// Reads blocks into random slots of its memory, and verifies other slots meanwhile.
struct Reader {
    guest: FrontEnd,
    findings: Arc<Findings>,
    random: Random,
    /// The block in each slot; `None` while a read into the slot is in flight.
    held: Vec<Option<u64>>,
    /// Slot and block of each request in flight.
    under_way: BTreeMap<u16, (usize, u64)>,
}

impl Reader {
    fn new(socket: &Path, findings: Arc<Findings>) -> Self {
        Self {
            guest: connect(socket),
            findings,
            random: Random::new(u64::from(std::process::id())),
            held: vec![None; PLACES],
            under_way: BTreeMap::new(),
        }
    }

    fn address_of(&self, place: usize) -> u64 {
        self.guest.data() + (place * BLOCK) as u64
    }

    fn read(&mut self, place: usize) {
        let block = self.random.below(BLOCKS);
        let (address, len) = (self.address_of(place), BLOCK as u32);
        let into = [Buffer { address, len }];
        let request = Request::read(block * BLOCK as u64 / 512, &into);
        let id = self.guest.queue().add(&request);
        self.held[place] = None;
        self.under_way.insert(id, (place, block));
    }

    fn wait_for_one(&mut self) {
        let queue = self.guest.queue();
        queue.go();
        let done = queue.complete(TEST_TIMEOUT).expect("an answer");
        assert_eq!(done.status, 0, "a read failed");
        let (place, block) = self.under_way.remove(&done.id).expect("it was asked for");
        self.held[place] = Some(block);
        self.findings.reads.fetch_add(1, Ordering::Relaxed);
    }

    fn verify(&self, place: usize) {
        let Some(block) = self.held[place] else { return };
        let found = self.guest.memory.read_vec(self.address_of(place), BLOCK);
        let (found, _) = found.as_chunks::<8>();
        if !found.iter().map(|word| u64::from_le_bytes(*word)).eq(words(block)) {
            println!("\nmismatch: place {place} is not block {block}");
            self.findings.mismatches.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn work(&mut self) {
        for place in 0..PLACES {
            if self.under_way.len() == DEPTH {
                self.wait_for_one();
            }
            self.read(place);
        }
        while !self.findings.stop.load(Ordering::Relaxed) {
            while self.under_way.len() < DEPTH {
                // The slot is not accessed first, which would page it in, so that it would not be one of the evicted.
                let place = self.random.below(PLACES as u64) as usize;
                if self.held[place].is_some() {
                    self.read(place);
                }
            }
            self.wait_for_one();
            let place = self.random.below(PLACES as u64) as usize;
            self.verify(place);
        }
        while !self.under_way.is_empty() {
            self.wait_for_one();
        }
        (0..PLACES).for_each(|place| self.verify(place));
    }
}

/// A disk, its server, and a program that uses it.
struct Bed {
    images: TempDir,
    server: Server,
}

impl Bed {
    fn new() -> Self {
        let images = temp_dir_on_disk();
        let (image, socket) = (images.path().join("disk.raw"), images.path().join("disk.sock"));
        let disk = File::create(&image).expect("an image");
        for block in 0..BLOCKS {
            disk.write_all_at(&bytes(block), block * BLOCK as u64).expect("room");
        }
        disk.sync_all().expect("a disk");
        let server = Server::start(larder_path(), &image, &socket, &["--format", "raw"]).expect("it serves");
        Self { images, server }
    }

    fn program(&self, name: &str) -> Verifier {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--ignored", "--exact", &format!("views::{name}"), "--nocapture"]);
        command.env(PROGRAM, &self.server.socket);
        Verifier::start(command).expect("a program to manage")
    }

    /// Starts a pager that keeps a program within a budget, with a swap cache.
    fn pager(&self, folder: &TempDir, program: &Verifier) -> Pager {
        let budget = (40 * MIB).to_string();
        let swap = self.images.path().join("swap").display().to_string();
        let words = ["--budget", &budget, "--swap-cache", &swap, "--swap-size", "1GiB"];
        let attach = Attach::new(larder_path(), folder.path(), program.pid(), &words);
        let pager = attach.start().expect("it attaches");
        pager.wait_for_budget().expect("within the budget");
        pager
    }
}

/// Direct I/O that bypasses the program's page tables, into pages that are clean or being evicted, is not lost.
#[test]
fn direct_reads_into_evicted_pages_survive() {
    let (folder, bed) = (temp_dir_on_tmpfs(), Bed::new());
    let mut reader = bed.program("reads");
    let mut pager = bed.pager(&folder, &reader);
    let goal = reader.report().expect("it reads").accesses + READS;
    let give_up = Instant::now() + TEST_TIMEOUT;
    while reader.report().expect("all is as it was read").accesses < goal {
        assert!(Instant::now() < give_up, "it stands still");
        std::thread::sleep(Duration::from_millis(50));
    }
    let state = pager.state().expect("answers");
    assert!(state.faults.disk.count + state.faults.compressed.count > 0, "{state:#?}");
    pager.detach().expect("lets go");
    assert_eq!(Alone::of(bed.server.process.id()).watched, 0);
    reader.stop().expect("all is as it was read");
}

/// Requests in flight when a VM is killed are completed, although they may wait for pages on the swap cache.
#[test]
fn requests_of_killed_process_are_completed() {
    let (folder, bed) = (temp_dir_on_tmpfs(), Bed::new());
    let mut writer = bed.program("writes");
    let mut pager = bed.pager(&folder, &writer);
    writer.process.say("read").expect("it lives");
    writer.process.wait_for("has read", TEST_TIMEOUT).expect("it reads");
    pager.process.signal(libc::SIGSTOP);
    writer.process.say("write").expect("it lives");
    let server = bed.server.process.id();
    let give_up = Instant::now() + TEST_TIMEOUT;
    while !waits_for_memory(server) {
        assert!(Instant::now() < give_up, "no request waits for memory");
        std::thread::sleep(Duration::from_millis(5));
    }
    writer.process.kill();
    pager.process.signal(libc::SIGCONT);
    let ended = pager.process.wait(TEST_TIMEOUT).expect("ends");
    let said = pager.process.output();
    assert!(ended.success() && said.contains("the process has ended"), "{ended}: {said}");

    let mut guest = connect(&bed.server.socket);
    let mut written = 0;
    for block in 0..DEPTH as u64 {
        let address = guest.data();
        let into = [Buffer { address, len: BLOCK as u32 }];
        let id = guest.queue().add(&Request::read(block * BLOCK as u64 / 512, &into));
        guest.queue().go();
        let done = guest.queue().complete(TEST_TIMEOUT).expect("the server serves others");
        assert_eq!((done.id, done.status), (id, 0));
        let found = guest.memory.read_vec(address, BLOCK);
        let (old, new) = (bytes(block), bytes(BLOCKS + block));
        let sectors = found.chunks(512).zip(old.chunks(512).zip(new.chunks(512)));
        for (sector, (found, (old, new))) in sectors.enumerate() {
            assert!(found == old || found == new, "sector {sector} of block {block} is neither old nor new");
            written += usize::from(found == new);
        }
    }
    assert!(written > 0, "the request that waited was completed");
}

/// Returns true if a thread of the process waits for a missing page.
fn waits_for_memory(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
    threads.flatten().any(|thread| {
        let waits_in = std::fs::read_to_string(thread.path().join("wchan"));
        waits_in.is_ok_and(|name| name == "handle_userfault")
    })
}
