//! A cache whose bookkeeping is damaged, one byte at a time: no old byte is read, and nobody ends.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use larder_bench::campaign::Random;

use crate::support::tool;
use crate::{MIB, Place, text};

const IMAGE_MIB: u64 = 16;
const CACHE: u64 = 4 * MIB;

/// Bytes that are damaged in each part, after each way to end.
const FLIPS: u64 = 10;

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

/// All that the server's clients would read is what the image has.
fn check(image: &Path, uri: &str) {
    tool(
        "qemu-img",
        &["compare", "-U", "-s", "-f", "raw", "-F", "raw", text(image), uri],
    );
}

#[test]
fn one_damaged_byte_of_the_bookkeeping_makes_nothing_old_or_wrong() {
    let mut random = Random::new(7);
    for stops in [true, false] {
        let place = Place::new();
        let image = place.image("disk.raw", IMAGE_MIB);
        let cache = place.path("cache");
        let served = place.serve(&image, &cache, &["--cache-size", &CACHE.to_string()]);
        let capacity = served.count("capacity");
        for _ in 0..2 {
            served.io(&work(&mut random));
            served.settle();
        }
        served.io(&work(&mut random));
        place.noted(&image);
        match stops {
            true => drop(served.stop()),
            false => served.kill(),
        }
        let whole = fs::read(&cache).expect("is there");
        let kept = place.path("kept");
        let copy = |from: &Path, to: &Path| tool("cp", &["-rT", text(from), text(to)]);
        copy(&place.path("state"), &kept);

        // Superblocks, journal, pages.
        let journal = 8192;
        let pages = journal + (CACHE / 4096).max(16 << 10);
        // What the shape leaves over lies behind the data, so where that begins is known roughly only.
        let parts = [0..journal, journal..pages, pages..(pages + CACHE - capacity) / 2];
        let mut warm = 0;
        let serve_again = || {
            fs::remove_dir_all(place.path("state")).expect("was there");
            copy(&kept, &place.path("state"));
            place.serve(&image, &cache, &[])
        };
        let served = serve_again();
        check(&image, &served.uri);
        assert!(
            served.count("hits") + served.count("partial_hits") > 0,
            "nothing to be believed"
        );
        served.kill();
        for part in parts {
            for _ in 0..FLIPS {
                let at = part.start + random.below(part.end - part.start);
                let flip = 1u8 << random.below(8);
                let file = File::options().write(true).open(&cache).expect("is there");
                file.write_all_at(&whole, 0).expect("as it was");
                file.write_all_at(&[whole[at as usize] ^ flip], at).expect("damaged");
                let served = serve_again();
                println!("bit {flip} of byte {at}, {stops}");
                check(&image, &served.uri);
                warm += (served.count("hits") + served.count("partial_hits")).min(1);
                // And whatever comes after it.
                served.io(&work(&mut random)
                    .iter()
                    .map(String::as_str)
                    .filter(|step| step.starts_with("read"))
                    .collect::<Vec<_>>());
                served.kill();
            }
        }
        assert!(warm > FLIPS, "one byte costs the whole cache nearly always: {warm}");
    }
}
