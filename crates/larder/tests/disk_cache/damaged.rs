//! A cache whose bookkeeping is damaged, one byte at a time: no old byte is read, and nobody ends.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use larder_bench::campaign::Random;
use larder_bench::campaign::process::Process;

use crate::support::{LIMIT, run, tool};
use crate::{MIB, Place, Served, text};

const IMAGE_MIB: u64 = 16;
const CACHE: u64 = 4 * MIB;

/// Bytes that are damaged in each part, after each way to end.
const FLIPS: usize = 10;

/// Writes and reads all over the disk, some again and again, so that lines come, change and leave.
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

/// Whether a server that was started reads as `expected`: it must, or say that something is damaged.
fn is_right(served: &Served, expected: &Path) -> bool {
    let mut compare = Command::new("qemu-img");
    compare.args([
        "compare",
        "-U",
        "-s",
        "-f",
        "raw",
        "-F",
        "raw",
        text(expected),
        &served.uri,
    ]);
    let (code, said) = run(compare);
    assert_ne!(code, Some(1), "{said}");
    if code != Some(0) {
        served.process.wait_for("damaged", LIMIT).expect("it is said");
    }
    code == Some(0)
}

/// Disk, cache and note as they were left, to be damaged again and again.
struct Left {
    cache: Vec<u8>,
    image: Vec<u8>,
    modified: SystemTime,
}

impl Left {
    fn new(place: &Place, image: &Path, cache: &Path) -> Self {
        place.left(cache);
        tool("cp", &["-rT", text(&place.path("state")), text(&place.path("kept"))]);
        Self {
            cache: fs::read(cache).expect("is there"),
            image: fs::read(image).expect("is there"),
            modified: image.metadata().and_then(|it| it.modified()).expect("has a time"),
        }
    }

    fn restore(&self, place: &Place, image: &Path, cache: &Path, damage: (u64, u8)) {
        place.left(cache);
        fs::remove_dir_all(place.path("state")).expect("was there");
        tool("cp", &["-rT", text(&place.path("kept")), text(&place.path("state"))]);
        let open = |path| File::options().write(true).open(path).expect("is there");
        let (disk, fast) = (open(image), open(cache));
        disk.write_all_at(&self.image, 0).expect("as it was");
        disk.set_modified(self.modified).expect("can be set");
        fast.write_all_at(&self.cache, 0).expect("as it was");
        let (at, flip) = damage;
        fast.write_all_at(&[self.cache[at as usize] ^ flip], at)
            .expect("damaged");
    }
}

#[test]
fn one_damaged_byte_of_the_bookkeeping_makes_nothing_old_or_wrong() {
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

        // Superblocks, journal, pages.
        let journal = 8192;
        let pages = journal + (CACHE / 4096).max(16 << 10);
        // What the shape leaves over lies behind the data, so where that begins is known roughly only.
        let parts = [0..journal, journal..pages, pages..(pages + CACHE - capacity) / 2];
        let (mut warm, mut unread) = (0, 0);
        for at in parts.into_iter().flat_map(|part| vec![part; FLIPS]) {
            let damage = (at.start + random.below(at.end - at.start), 1u8 << random.below(8));
            println!("{damage:?}, {mode}, {stops}");
            left.restore(&place, &image, &cache, damage);
            let process = Process::start(place.serve_command(&image, text(&cache), &[])).expect("larder starts");
            if let Err(said) = process.wait_for("serving", LIMIT) {
                // What only the cache has is not guessed.
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
                // And whatever comes after it.
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
