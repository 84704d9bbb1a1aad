//! What a guest sees of a disk with a cache, and what becomes of the cache.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::process::Process;
use serde_json::json;

use crate::support::{LIMIT, LoopDevice, disk_serve, larder, tool};
use crate::{MIB, Place, qemu_io, text};

/// Reads of [`crate::Served::read_all`] for a MiB.
const READS: u64 = 256;

#[test]
fn a_cache_is_warm_after_a_stop_and_after_a_kill() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 64), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "32M"]);
    served.read_all(8);
    assert!(served.count("misses") >= 8 * READS, "it was empty");
    served.warm_up(8);
    assert_eq!(served.count("filled"), 8 * MIB);
    assert_eq!(served.count("occupancy"), 8 * MIB);
    served.stop();

    let served = place.serve(&image, &cache, &[]);
    served.read_all(8);
    assert_eq!((served.count("hits"), served.count("misses")), (8 * READS, 0));
    served.io(&["write -P 9 1M 1M", "write -P 10 20M 4k", "flush"]);
    served.settle();
    place.noted(&image);
    served.kill();

    let served = place.serve(&image, &cache, &["--cache-size", "32M"]);
    served.read_all(8);
    assert_eq!((served.count("hits"), served.count("misses")), (8 * READS, 0));
    served.io(&[
        "read -P 7 0 1M",
        "read -P 9 1M 1M",
        "read -P 7 2M 18M",
        "read -P 10 20M 4k",
    ]);
    let said = served.stop();
    assert!(!said.contains("begins anew"), "{said}");
    qemu_io("raw", text(&image), &["read -P 9 1M 1M", "read -P 10 20M 4k"]);
}

#[test]
fn without_the_note_of_its_user_a_cache_that_was_not_closed_begins_anew() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(2);
    served.settle();
    served.kill();
    std::fs::remove_dir_all(place.path("state")).expect("it was noted");
    let served = place.serve(&image, &cache, &[]);
    served.process.wait_for("is not believed", LIMIT).expect("told");
    served.read_all(2);
    assert!(served.count("misses") >= 2 * READS, "it is empty");
    served.warm_up(2);
    served.stop();
    // One that was closed needs none, and leaves none.
    let mut notes = std::fs::read_dir(place.path("state/caches")).expect("a folder");
    assert!(notes.next().is_none());
    let served = place.serve(&image, &cache, &[]);
    served.read_all(2);
    assert_eq!(served.count("misses"), 0);
}

#[test]
fn what_others_did_to_the_disk_since_its_server_was_killed_is_seen() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(2);
    served.io(&["write -P 8 0 64k"]);
    served.settle();
    served.kill();
    // A server without it, and an hour of work.
    let control = place.socket("c");
    let nbd = place.nbd();
    let without = crate::support::disk_serve(&[text(&image), "--nbd", &nbd, "--control", text(&control)]);
    let served = place.start(without);
    served.io(&["write -P 9 1M 64k"]);
    served.stop();
    tool("touch", &["-d", "+1 hour", text(&image)]);
    let served = place.serve(&image, &cache, &[]);
    served
        .process
        .wait_for("was changed since without it", LIMIT)
        .expect("told");
    served.io(&[
        "read -P 8 0 64k",
        "read -P 7 64k 960k",
        "read -P 9 1M 64k",
        "read -P 7 1088k 14M",
    ]);
}

#[test]
fn a_cache_is_warm_after_a_kill_in_the_midst_of_writing() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    // The image's times are those of long ago, and change with the first write only.
    tool("touch", &["-d", "-1 hour", text(&image)]);
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(2);
    served.io(&["write -P 8 8M 64k"]);
    served.settle();
    place.noted(&image);
    served.kill();
    let served = place.serve(&image, &cache, &[]);
    served.read_all(2);
    assert_eq!(served.count("misses"), 0);
}

#[test]
fn what_is_noted_too_late_of_a_disk_is_known_all_the_same() {
    for mode in ["wt", "wb"] {
        let place = Place::new();
        let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
        tool("touch", &["-d", "-1 hour", text(&image)]);
        let served = place.serve(&image, &cache, &["--cache-size", "8M", "--cache-mode", mode]);
        let before = std::fs::read(place.note()).expect("is read");
        served.warm_up(2);
        served.io(&["write -P 8 8M 64k", "flush"]);
        if mode == "wb" {
            let flush = ["flush", text(&cache), "--control", text(&served.control)];
            assert_eq!(place.cache_command(&flush).0, Some(0));
            served.io(&["write -P 9 9M 64k", "flush"]);
        }
        served.settle();
        place.noted_lately(&image);
        served.kill();
        // As if its file system had been busy all the time.
        std::fs::write(place.note(), before).expect("is written");
        let served = place.serve(&image, &cache, &[]);
        served.read_all(2);
        assert_eq!(served.count("misses"), 0, "{mode}");
        served.io(&["read -P 8 8M 64k"]);
        if mode == "wb" {
            served.io(&["read -P 9 9M 64k"]);
        }
        served.kill();
        // And others are found out still.
        tool("touch", &["-d", "+1 hour", text(&image)]);
        let words = "changed since without it";
        if mode == "wb" {
            place.refused(&image, text(&cache), &[], &[words]);
        } else {
            let served = place.serve(&image, &cache, &[]);
            served.process.wait_for(words, LIMIT).expect("told");
        }
    }
}

#[test]
fn a_server_that_is_killed_at_its_first_write_is_known_to_have_made_it() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    tool("touch", &["-d", "-1 hour", text(&image)]);
    let served = place.serve(&image, &cache, &["--cache-size", "4M", "--cache-mode", "wb"]);
    // More than the cache has room for.
    served.io(&["write -P 8 0 14M"]);
    served.kill();
    let served = place.serve(&image, &cache, &[]);
    served.io(&["read -P 8 0 14M", "read -P 7 14M 2M"]);
}

#[test]
fn what_others_did_to_the_disk_meanwhile_is_seen() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.read_all(2);
    served.stop();
    qemu_io("raw", text(&image), &["write -P 9 1M 64k"]);
    let served = place.serve(&image, &cache, &[]);
    served.process.wait_for("begins anew", LIMIT).expect("told");
    served.io(&["read -P 7 0 1M", "read -P 9 1M 64k", "read -P 7 1088k 14M"]);
    served.read_all(2);
    served.stop();
    tool("truncate", &["-s", "24M", text(&image)]);
    let served = place.serve(&image, &cache, &[]);
    served.process.wait_for("begins anew", LIMIT).expect("told");
    served.io(&["read -P 0 16M 8M"]);
}

#[test]
fn a_change_to_any_file_of_a_chain_is_seen_and_the_servers_own_are_none() {
    let place = Place::new();
    let base = place.image("base.raw", 16);
    let [middle, top] = ["middle.qcow2", "top.qcow2"].map(|name| place.path(name));
    let create = |image: &Path, of: &Path, format: &str| {
        let options = ["create", "-q", "-f", "qcow2", "-F", format, "-b"];
        tool("qemu-img", &[&options[..], &[text(of), text(image)]].concat());
    };
    create(&middle, &base, "raw");
    create(&top, &middle, "qcow2");
    let cache = place.path("cache");
    let served = place.serve(&top, &cache, &["--cache-size", "8M"]);
    served.io(&["write -P 8 0 64k"]);
    served.warm_up(2);
    served.stop();
    let warm = || {
        let served = place.serve(&top, &cache, &[]);
        served.read_all(2);
        let misses = served.count("misses");
        served.warm_up(2);
        (misses, served.stop())
    };
    assert_eq!(warm().0, 0);
    for (image, format, place_on_disk) in [
        (&base, "raw", "64k"),
        (&middle, "qcow2", "128k"),
        (&top, "qcow2", "192k"),
    ] {
        qemu_io(format, text(image), &[&format!("write -P 9 {place_on_disk} 64k")]);
        let (misses, said) = warm();
        assert!(misses > 0 && said.contains("begins anew"), "{image:?}: {misses} {said}");
        assert_eq!(warm().0, 0, "{image:?}");
    }
    let served = place.serve(&top, &cache, &[]);
    served.io(&["read -P 8 0 64k", "read -P 9 64k 192k", "read -P 7 256k 1M"]);
}

/// `fio` that writes to the disk at random and verifies all that it has written.
pub(crate) fn verify(uri: &str, options: &[&str]) -> Command {
    let mut command = larder_bench::campaign::process::mortal("fio");
    command.args([
        "--name=cache",
        "--ioengine=nbd",
        &format!("--uri={uri}"),
        "--rw=randrw",
        "--bssplit=512/10:4k/50:12k/20:64k/20",
        "--blockalign=512",
        "--size=64M",
        "--iodepth=16",
        "--verify=crc32c-intel",
        "--verify_backlog=256",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--randrepeat=1",
        "--output-format=terse",
    ]);
    command.args(options);
    command
}

fn run_to_its_end(command: Command) {
    let mut fio = Process::start(command).expect("fio; testbed/setup.sh installs it");
    let status = fio.wait(LIMIT).expect("ends");
    assert!(status.success(), "{}", fio.output());
}

#[test]
fn all_that_was_written_is_read_with_a_cache_that_is_small_for_the_disk() {
    for (line, mode) in [("4k", "wt"), ("64k", "wt"), ("16k", "wa"), ("4k", "pt")] {
        let place = Place::new();
        let (image, cache) = (place.image("disk.raw", 64), place.path("cache"));
        let options = ["--cache-size", "6M", "--cache-line", line, "--cache-mode", mode];
        let served = place.serve(&image, &cache, &options);
        run_to_its_end(verify(&served.uri, &[]));
        let (told, lines) = (
            served.cache(),
            line.trim_end_matches('k').parse::<u64>().expect("a number") << 10,
        );
        assert_eq!((&told["mode"], &told["state"]), (&json!(mode), &json!("works")));
        assert_eq!((&told["line_size"], &told["size"]), (&json!(lines), &json!(6 * MIB)));
        assert_eq!(told["evicted"] != json!(0), mode != "pt", "{told}");
        served.stop();
    }
}

#[test]
fn the_mode_changes_under_load() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 64), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "16M"]);
    let mut fio = Process::start(verify(&served.uri, &["--loops=3"])).expect("fio; testbed/setup.sh installs it");
    let set = |mode: &str| {
        let control = text(&served.control);
        let (code, said) = place.cache_command(&["mode", text(&cache), mode, "--control", control]);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains(&format!("({mode}) from now on")), "{said}");
        assert_eq!(served.cache()["mode"], json!(mode));
    };
    for mode in ["wa", "wt", "pt", "wt", "pt", "wa"].into_iter().cycle().take(30) {
        set(mode);
    }
    let status = fio.wait(LIMIT).expect("ends");
    assert!(status.success(), "{}", fio.output());
    set("wa");
    served.kill();
    // It is kept, unless something else is said.
    let served = place.serve(&image, &cache, &[]);
    assert_eq!(served.cache()["mode"], json!("wa"));
    served.stop();
    let served = place.serve(&image, &cache, &["--cache-mode", "wt"]);
    assert_eq!(served.cache()["mode"], json!("wt"));
}

#[test]
fn a_read_only_disk_has_a_cache_too() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let options = ["--read-only", "--cache-size", "8M"];
    for is_empty in [true, false] {
        let served = place.serve(&image, &cache, &options);
        served.read_all(2);
        assert_eq!(served.count("misses") > 0, is_empty);
        served.warm_up(2);
        served.stop();
    }
}

#[test]
fn a_block_device_is_taken_whole_for_a_disk_and_for_a_cache() {
    let place = Place::new();
    let (image, ssd) = (place.image("disk.raw", 16), place.path("ssd.raw"));
    tool("truncate", &["-s", "8M", text(&ssd)]);
    let (disk, cache) = (LoopDevice::new(&image, 512), LoopDevice::new(&ssd, 4096));
    place.refused(
        &disk.0,
        text(&cache.0),
        &["--cache-size", "4M"],
        &["it has 8", "leave cache-size out"],
    );
    for is_empty in [true, false] {
        let served = place.serve(&disk.0, &cache.0, &[]);
        served.read_all(2);
        assert_eq!((served.count("misses") > 0, served.count("size")), (is_empty, 8 * MIB));
        served.warm_up(2);
        served.stop();
    }
    let (code, said) = place.cache_command(&["drop", text(&cache.0)]);
    assert_eq!(code, Some(0), "{said}");
    let served = place.serve(&disk.0, &cache.0, &[]);
    assert_eq!(served.count("occupancy"), 0);
}

#[test]
fn what_a_server_without_the_cache_did_at_once_after_a_kill_is_seen() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(2);
    served.io(&["write -P 8 0 64k"]);
    served.settle();
    place.noted(&image);
    served.kill();
    let served = place.start(place.without_cache(&image));
    served.io(&["write -P 9 0 64k"]);
    served.stop();
    let served = place.serve(&image, &cache, &[]);
    served
        .process
        .wait_for("was changed since without it", LIMIT)
        .expect("told");
    served.io(&["read -P 9 0 64k", "read -P 7 64k 4M"]);
}

#[test]
fn what_others_did_to_a_device_without_times_is_seen_where_the_guest_wrote_last() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let disk = LoopDevice::new(&image, 512);
    let serve = |options: &[&str]| place.serve(&disk.0, &cache, options);
    let served = serve(&["--cache-size", "8M"]);
    served.warm_up(2);
    served.io(&["write -P 8 5M 64k", "write -P 9 1M 4k"]);
    served.stop();
    for _ in 0..2 {
        // Also if its guest only reads.
        let served = serve(&[]);
        served.read_all(2);
        assert_eq!(served.count("misses"), 0, "nobody has used it");
        served.stop();
    }
    qemu_io("raw", text(&disk.0), &["write -P 10 0 64k", "write -P 10 5M 4k"]);
    let served = serve(&[]);
    served
        .process
        .wait_for("the disk was changed without it", LIMIT)
        .expect("told");
    served.io(&["read -P 10 0 64k", "read -P 9 1M 4k", "read -P 10 5M 4k"]);
    served.stop();
}

/// What a server without the cache did between two with it, each closed in order, to a disk of whose changes no time
/// tells: it wrote where the guest had only read before.
fn changed_by_a_server_without_the_cache(place: &Place, disk: &str) {
    let cache = place.path("cache");
    let serve = |options: &[&str]| place.serve(Path::new(disk), &cache, options);
    let served = serve(&["--cache-size", "8M"]);
    served.warm_up(4);
    served.io(&["write -P 8 15M 64k"]);
    served.stop();
    let without = || place.start(place.without_cache(Path::new(disk)));
    let served = without();
    served.io(&["write -P 9 1M 64k"]);
    served.stop();
    let served = serve(&[]);
    served.io(&["read -P 7 0 1M", "read -P 9 1M 64k", "read -P 8 15M 64k"]);
    let message = "it was used without its cache";
    served.process.wait_for(message, LIMIT).expect("told");
    served.warm_up(4);
    let said = served.stop();
    assert_eq!(said.matches(message).count(), 1, "{said}");
    let served = serve(&[]);
    served.read_all(4);
    assert_eq!(served.count("misses"), 0, "nobody has used it");
    served.stop();
    // Also if it is killed, and the cache gets another size; what only reads the disk changes nothing.
    let served = without();
    served.io(&["write -P 10 2M 64k"]);
    served.kill();
    let (code, said) = place.cache_command(&["resize", text(&cache), "12M"]);
    assert_eq!(code, Some(0), "{said}");
    let mut reading = place.without_cache(Path::new(disk));
    reading.arg("--read-only");
    place.start(reading).stop();
    let served = serve(&[]);
    served.io(&["read -P 10 2M 64k", "read -P 9 1M 64k"]);
    served.warm_up(4);
    served.stop();
    // Nor is it believed if the note is lost.
    std::fs::remove_dir_all(place.path("state")).expect("there are notes");
    let served = without();
    served.io(&["write -P 11 3M 64k"]);
    served.stop();
    let served = serve(&[]);
    served.process.wait_for("is gone (looked for at", LIMIT).expect("told");
    served.io(&["read -P 11 3M 64k"]);
    served.stop();
}

#[test]
fn what_a_server_without_the_cache_did_to_a_device_is_seen() {
    let place = Place::new();
    let disk = LoopDevice::new(&place.image("disk.raw", 16), 512);
    changed_by_a_server_without_the_cache(&place, text(&disk.0));
}

#[test]
fn what_a_server_without_the_cache_did_to_an_export_is_seen() {
    let place = Place::new();
    let (image, socket) = (place.image("disk.raw", 16), place.socket("export"));
    let export = format!("nbd+unix:///?socket={}", text(&socket));
    let server = Process::start(disk_serve(&[text(&image), "--nbd", &export])).expect("larder starts");
    server.wait_for("serving", LIMIT).expect("it serves");
    changed_by_a_server_without_the_cache(&place, &export);
}

#[test]
fn status_tells_of_the_cache() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(1);
    let said = tool(text(larder()), &["status", text(&served.control)]);
    for part in [
        &format!("cache:            {}", text(&cache)),
        "write-through, works",
        "8 MiB (8388608 bytes), lines of 4 KiB",
        "holds:          1 MiB (",
        "had all:      ",
        "had nothing:  ",
    ] {
        assert!(said.contains(part), "'{part}' in {said}");
    }
}

#[test]
fn no_more_is_written_to_the_ssd_in_a_day_than_it_may() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let day = 64 * MIB;
    let options = ["--cache-size", "32M", "--cache-endurance", "64M"];
    let served = place.serve(&image, &place.path("cache"), &options);
    assert_eq!(served.count("endurance"), day);
    // A 24th of the bytes of a day may be written at once, and further ones as time passes.
    let began = Instant::now();
    let may_be_written = || day / 24 + MIB / 8 + day * began.elapsed().as_secs() / (24 * 60 * 60);
    for _ in 0..3 {
        served.read_all(16);
    }
    // A cache that seems slow, as on a busy machine, is left alone for a while.
    while served.count("occupancy") <= MIB {
        assert!(began.elapsed() < LIMIT, "{}", served.cache());
        served.read_all(16);
    }
    assert!(served.count("occupancy") < may_be_written(), "{}", served.cache());
    served.settle();
    let written = served.count("cache_written");
    assert!(written <= may_be_written(), "{}", served.cache());
    // What is there and is written leaves the cache, and what is not does not come.
    served.io(&["write -P 9 0 8M", "read -P 9 0 8M", "read -P 7 8M 8M"]);
    assert!(served.count("cache_written") < written + MIB, "{}", served.cache());
    let said = tool(text(larder()), &["status", text(&served.control)]);
    assert!(said.contains("of 64 MiB a day"), "{said}");
    served.kill();
    let served = place.serve(&image, &place.path("cache"), &[]);
    served.io(&["read -P 9 0 8M", "read -P 7 8M 8M"]);
}

#[test]
fn what_a_cache_of_another_size_would_do_is_told() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let served = place.serve(&image, &place.path("cache"), &["--cache-size", "8M"]);
    assert_eq!(served.cache()["miss_ratios"], serde_json::json!([]));
    // Round and round: what does not hold all of it never has what is asked for next.
    for _ in 0..4 {
        served.read_all(4);
    }
    let cache = served.cache();
    let ratios = cache["miss_ratios"].as_array().expect("a list");
    for ratio in ratios {
        let (capacity, misses) = (ratio["capacity"].as_u64(), ratio["miss_ratio"].as_f64());
        let (capacity, misses) = (capacity.expect("bytes"), misses.expect("a share"));
        let expected = if capacity < 4 * MIB { 1.0 } else { 0.25 };
        assert!((misses - expected).abs() < 0.05, "{cache}");
    }
    assert!(ratios.len() > 4, "{cache}");
    let bytes = |name: &str| cache[name].as_u64().expect("bytes");
    assert!(bytes("disk_read") + bytes("hit_bytes") >= 16 * MIB, "{cache}");
    assert!(bytes("cache_read") >= bytes("hit_bytes"), "{cache}");
    assert!(
        bytes("cache_written") >= bytes("filled") + bytes("metadata_written"),
        "{cache}"
    );
}
