//! A program whose disk Larder serves: direct I/O into memory of which pages are leaving all the time, and clean ones. A guest
//! under QEMU mostly reads into memory that it has just used, which does not leave.

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
use larder_bench::campaign::memory::{Attach, Verifier};
use larder_bench::campaign::server::Server;

use crate::support::{LIMIT, larder, on_disk, on_tmpfs};
use crate::{Alone, MIB};

/// What is read at a time.
const BLOCK: usize = 64 << 10;
const WORDS: usize = BLOCK / 8;
/// Blocks of the disk.
const BLOCKS: u64 = 512;
/// Places of the memory for one.
const PLACES: usize = 1024;
/// Reads in flight.
const DEPTH: usize = 64;
/// For so many it goes on under a pager: some thousands show it where writes are not stopped, or not waited for.
const READS: u64 = 20_000;

/// How the program below is told where its disk is served.
const PROGRAM: &str = "LARDER_TEST_READS";

/// What is in a block of the disk.
fn words(block: u64) -> impl Iterator<Item = u64> {
    let mut random = Random::new(block + 1);
    std::iter::repeat_with(move || random.below(u64::MAX)).take(WORDS)
}

/// No test, but the program.
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

#[derive(Default)]
struct Findings {
    reads: AtomicU64,
    mismatches: AtomicU64,
    stop: AtomicBool,
}

impl Findings {
    /// As [`Verifier`] understands it.
    fn tell(&self, what: &str) {
        println!(
            "\n{what} accesses={} mismatches={} stalls=0 longest_us=0",
            self.reads.load(Ordering::Relaxed),
            self.mismatches.load(Ordering::Relaxed),
        );
        std::io::stdout().flush().expect("it is heard");
    }
}

/// Reads blocks to wherever in its memory, and looks at others meanwhile.
struct Reader {
    guest: FrontEnd,
    findings: Arc<Findings>,
    random: Random,
    /// The block in each place; none where one is being read to.
    held: Vec<Option<u64>>,
    /// By request: the place, and the block.
    under_way: BTreeMap<u16, (usize, u64)>,
}

impl Reader {
    fn new(socket: &Path, findings: Arc<Findings>) -> Self {
        let options = Options {
            indirect: true,
            data_bytes: PLACES * BLOCK,
            ..Options::default()
        };
        Self {
            guest: FrontEnd::connect(socket, options).expect("a server"),
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
        let done = queue.complete(LIMIT).expect("an answer");
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
                // Not looked at before: it would come back, and not be one of those that leave.
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

#[test]
fn what_is_read_past_the_page_tables_to_pages_that_are_leaving_or_clean_is_not_lost() {
    let (folder, images) = (on_tmpfs(), on_disk());
    let (image, socket) = (images.path().join("disk.raw"), images.path().join("disk.sock"));
    let disk = File::create(&image).expect("an image");
    for block in 0..BLOCKS {
        let bytes: Vec<u8> = words(block).flat_map(u64::to_le_bytes).collect();
        disk.write_all_at(&bytes, block * BLOCK as u64).expect("room");
    }
    disk.sync_all().expect("a disk");
    let server = Server::start(larder(), &image, &socket, &["--format", "raw"]).expect("it serves");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--ignored", "--exact", "views::reads", "--nocapture"]);
    command.env(PROGRAM, &socket);
    let mut reader = Verifier::start(command).expect("a program to manage");

    let budget = (40 * MIB).to_string();
    let swap = images.path().join("swap").display().to_string();
    let words = ["--budget", &budget, "--swap-cache", &swap, "--swap-size", "1GiB"];
    let attach = Attach::new(larder(), folder.path(), reader.pid(), &words);
    let mut pager = attach.start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    let goal = reader.report().expect("it reads").accesses + READS;
    let give_up = Instant::now() + LIMIT;
    while reader.report().expect("all is as it was read").accesses < goal {
        assert!(Instant::now() < give_up, "it stands still");
        std::thread::sleep(Duration::from_millis(50));
    }
    let state = pager.state().expect("answers");
    assert!(
        state.faults.disk.count + state.faults.compressed.count > 0,
        "{state:#?}"
    );
    pager.detach().expect("lets go");
    assert_eq!(Alone::of(server.process.id()).watched, 0);
    reader.stop().expect("all is as it was read");
}
