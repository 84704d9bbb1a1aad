//! Damage of a cache's metadata, one byte at a time: no stale byte is read, and no server crashes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use larder_bench::campaign::Random;
use larder_bench::campaign::process::Process;
use serde_json::json;

use crate::support::{TEST_TIMEOUT, run_command, run_tool};
use crate::write_back::WRITE_BACK;
use crate::{MIB, Place, Served, qemu_io, text};

const IMAGE_MIB: u64 = 16;
const CACHE: u64 = 4 * MIB;

/// Number of bytes that are damaged in each part, after each way to end.
const FLIPS: usize = 10;

/// Returns writes and reads all over the disk, some repeated, so that lines are filled, changed and evicted.
fn work(random: &mut Random) -> Vec<String> {
    let step = |at: u64| {
        let hot = random.below(2) == 0;
        let sector = random.below(if hot { 1 << 10 } else { IMAGE_MIB << 11 } - 64);
        let sectors = 1 + random.below(64);
        match random.below(3) {
            0 => format!("write -P {} {} {}", at % 251, sector * 512, sectors * 512),
            _ => format!("read {} {}", sector * 512, sectors * 512),
        }
    };
    (0..600).map(step).collect()
}

/// Returns true if the disk of a started server has the content of `expected`, and false if the server reported
/// damage.
fn is_right(served: &Served, expected: &Path) -> bool {
    let mut compare = Command::new("qemu-img");
    compare.args(["compare", "-U", "-s", "-f", "raw", "-F", "raw", text(expected), &served.uri]);
    let (code, said) = run_command(compare);
    assert_ne!(code, Some(1), "{said}");
    if code != Some(0) {
        served.process.wait_for("damaged", TEST_TIMEOUT).expect("it is said");
    }
    code == Some(0)
}

/// Disk, cache and note in the state that is damaged again and again.
struct Left {
    cache: Vec<u8>,
    image: Vec<u8>,
    modified: SystemTime,
}

impl Left {
    fn new(place: &Place, image: &Path, cache: &Path) -> Self {
        place.left(cache);
        run_tool("cp", &["-rT", text(&place.path("state")), text(&place.path("kept"))]);
        Self {
            cache: fs::read(cache).expect("is there"),
            image: fs::read(image).expect("is there"),
            modified: image.metadata().and_then(|it| it.modified()).expect("has a time"),
        }
    }

    fn restore(&self, place: &Place, image: &Path, cache: &Path, damage: (u64, u8)) {
        place.left(cache);
        fs::remove_dir_all(place.path("state")).expect("was there");
        run_tool("cp", &["-rT", text(&place.path("kept")), text(&place.path("state"))]);
        let open = |path| File::options().write(true).open(path).expect("is there");
        let (disk, fast) = (open(image), open(cache));
        disk.write_all_at(&self.image, 0).expect("as it was");
        disk.set_modified(self.modified).expect("can be set");
        fast.write_all_at(&self.cache, 0).expect("as it was");
        let (at, flip) = damage;
        fast.write_all_at(&[self.cache[at as usize] ^ flip], at).expect("damaged");
    }
}

const JOURNAL_AT: u64 = 8192;

fn journal_len(cache: &Path) -> u64 {
    let mut len = [0; 8];
    let file = File::open(cache).expect("is there");
    file.read_exact_at(&mut len, 64).expect("a superblock");
    u64::from_le_bytes(len)
}

/// Returns, for a cache that was closed, the number of the journal's sectors, and the sectors that are still needed.
fn journal_of(cache: &Path) -> (u64, Vec<u64>) {
    let bytes = fs::read(cache).expect("is there");
    let long = |at: u64| u64::from_le_bytes(bytes[at as usize..at as usize + 8].try_into().expect("eight"));
    let (sectors, end) = (journal_len(cache) / 512, long(88));
    let last = JOURNAL_AT + (end - 1) % sectors * 512;
    assert_eq!(long(last + 8), end - 1, "the last sector");
    (sectors, (long(last + 24)..end).map(|sequence| sequence % sectors).collect())
}

/// Simulates a foreign write to a closed cache: into the unneeded part of its journal, and into its pages. If the
/// cache was in use, the blocks of its last writes are spared.
fn overwrite(cache: &Path, in_use: bool, random: &mut Random) {
    let (sectors, mut needed) = journal_of(cache);
    if in_use {
        let blocks: Vec<u64> = needed.iter().map(|sector| sector / 8 * 8).collect();
        needed.extend(blocks.into_iter().flat_map(|block| block..block + 8));
    }
    let mut noise = || (0..512).map(|_| random.below(256) as u8).collect::<Vec<u8>>();
    let file = File::options().write(true).open(cache).expect("is there");
    for sector in (0..sectors).filter(|sector| !needed.contains(sector)) {
        file.write_all_at(&noise(), JOURNAL_AT + sector * 512).expect("damaged");
    }
    for page in 0..64 {
        file.write_all_at(&noise(), JOURNAL_AT + (sectors + page) * 512).expect("damaged");
    }
}

/// Writes to a cache that was damaged while it was closed survive a kill of the server.
#[test]
fn damaged_closed_cache_keeps_new_writes() {
    let mut random = Random::new(7);
    // The counts make the journal end at every position within a block.
    for (in_use, count) in [true, false].into_iter().flat_map(|in_use| (1..=8).map(move |count| (in_use, count))) {
        println!("{in_use}, {count}");
        let place = Place::new();
        let (image, cache) = (place.image("disk.raw", IMAGE_MIB), place.path("cache"));
        let served = place.serve(&image, &cache, &WRITE_BACK);
        served.io(&["write -P 9 0 64k", "write -P 9 2M 64k"]);
        served.stop();
        overwrite(&cache, in_use, &mut random);
        let served = place.serve(&image, &cache, &[]);
        let said = served.process.output();
        assert!(said.contains("its journal is damaged in a part that is not needed"), "{said}");
        let writes: Vec<String> = (0..count).map(|at| format!("write -P 10 {at}M 4k")).collect();
        let reads: Vec<String> = (0..count).map(|at| format!("read -P 10 {at}M 4k")).collect();
        served.io(&writes);
        served.kill();
        place.left(&cache);
        assert_eq!(place.info(&cache)["damaged"], json!(false), "{count}");
        let served = place.serve(&image, &cache, &[]);
        served.io(&reads);
        served.io(&["read -P 9 4k 60k", "read -P 9 2101248 60k", "read -P 7 64k 960k", "read -P 7 8M 8M"]);
        served.stop();
        qemu_io("raw", text(&image), &reads);
    }
}

#[test]
fn info_reports_damaged_cache() {
    let mut random = Random::new(7);
    let mut noise = |cache: &Path, at: u64, len: u64| {
        let noise: Vec<u8> = (0..len).map(|_| random.below(256) as u8).collect();
        let file = File::options().write(true).open(cache).expect("is there");
        file.write_all_at(&noise, at).expect("damaged");
    };
    for kills in [false, true] {
        let place = Place::new();
        let (image, cache) = (place.image("disk.raw", IMAGE_MIB), place.path("cache"));
        let served = place.serve(&image, &cache, &WRITE_BACK);
        served.io(&["write -P 9 1M 64k"]);
        match kills {
            true => served.kill(),
            false => drop(served.stop()),
        }
        place.left(&cache);
        assert_eq!(place.info(&cache)["damaged"], json!(false));
        let journal_len = journal_len(&cache);
        let all_pages = 64 << 10;
        for (at, len, what) in
            [(JOURNAL_AT + journal_len, all_pages, " sets"), (JOURNAL_AT, journal_len, "its journal")]
        {
            noise(&cache, at, len);
            let told = place.info(&cache);
            assert_eq!(told["damaged"], json!(true), "{what}");
            assert_eq!(told["dirty"].is_null(), what == "its journal", "{told}");
            let (code, said) = place.cache_command(&["info", text(&cache)]);
            assert_eq!(code, Some(0), "{said}");
            assert!(said.contains("damaged: ") && said.contains(what), "{said}");
            assert_eq!(said.contains("drop --lose-dirty"), kills, "{said}");
            assert_eq!(said.contains("nothing is lost"), !kills, "{said}");
        }
    }
}

/// A single damaged byte of the metadata never makes the disk serve stale or wrong data.
#[test]
fn damaged_metadata_byte_yields_correct_reads() {
    for (mode, stops) in [("wt", true), ("wt", false), ("wb", false)] {
        let mut random = Random::new(7);
        let place = Place::new();
        let (image, cache) = (place.image("disk.raw", IMAGE_MIB), place.path("cache"));
        let expected = place.image("expected.raw", IMAGE_MIB);
        let size = CACHE.to_string();
        let served = place.serve(&image, &cache, &["--cache-size", &size, "--cache-mode", mode]);
        let capacity = served.count("capacity");
        for part in 0..3 {
            let steps = work(&mut random);
            served.io(&steps);
            crate::qemu_io("raw", text(&expected), &steps);
            if part < 2 && mode == "wt" {
                served.settle();
            }
        }
        place.noted(&image);
        match stops {
            true => drop(served.stop()),
            false => served.kill(),
        }
        let left = Left::new(&place, &image, &cache);
        let served = place.serve(&image, &cache, &[]);
        assert!(is_right(&served, &expected));
        let hits = |served: &Served| served.count("hits") + served.count("partial_hits");
        assert!(hits(&served) > 0, "nothing to be believed");
        served.kill();

        // The parts: superblocks, journal, pages.
        let journal = JOURNAL_AT;
        let pages = journal + (CACHE / 4096).max(16 << 10);
        // Space that the shape leaves over comes after the data, so the start of the data is known only roughly.
        let parts = [0..journal, journal..pages, pages..(pages + CACHE - capacity) / 2];
        let (mut warm, mut unread) = (0, 0);
        for at in parts.into_iter().flat_map(|part| vec![part; FLIPS]) {
            let damage = (at.start + random.below(at.end - at.start), 1u8 << random.below(8));
            println!("{damage:?}, {mode}, {stops}");
            left.restore(&place, &image, &cache, damage);
            let process = Process::start(place.serve_command(&image, text(&cache), &[])).expect("larder starts");
            if let Err(said) = process.wait_for("serving", TEST_TIMEOUT) {
                // Data that only the cache has is refused instead of guessed.
                let said = said.to_string();
                assert!(mode == "wb" && said.contains("damaged"), "{said}");
                unread += 1;
                continue;
            }
            let served = place.served(process);
            let is_right = is_right(&served, &expected);
            assert!(is_right || mode == "wb", "something could not be read");
            unread += usize::from(!is_right);
            warm += usize::from(hits(&served) > 0);
            if is_right {
                // Later reads are right as well.
                let mut reads = work(&mut random);
                reads.retain(|step| step.starts_with("read"));
                served.io(&reads);
            }
            served.kill();
        }
        println!("{mode}, {stops}: {warm} warm, {unread} not all of which can be read");
        assert!(warm > FLIPS, "one byte costs the whole cache nearly always");
    }
}
