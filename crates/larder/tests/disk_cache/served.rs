//! Reads and writes of a guest whose disk has a cache, and the cache's state after stops and kills.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::process::Process;
use serde_json::json;

use crate::support::{LoopDevice, TEST_TIMEOUT, disk_serve_command, larder_path, run_tool, wait_until};
use crate::{MIB, Place, qemu_io, text};

/// Number of reads of [`crate::Served::read_all`] per MiB.
const READS: u64 = 256;

/// A cache is warm after a stop and after a kill.
#[test]
fn restarted_cache_is_warm() {
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
    served.io(&["read -P 7 0 1M", "read -P 9 1M 1M", "read -P 7 2M 18M", "read -P 10 20M 4k"]);
    let said = served.stop();
    assert!(!said.contains("starts empty"), "{said}");
    qemu_io("raw", text(&image), &["read -P 9 1M 1M", "read -P 10 20M 4k"]);
}

#[test]
fn unclosed_cache_without_note_starts_empty() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(2);
    served.settle();
    served.kill();
    std::fs::remove_dir_all(place.path("state")).expect("it was noted");
    let served = place.serve(&image, &cache, &[]);
    served.process.wait_for("cached data is not used", TEST_TIMEOUT).expect("told");
    served.read_all(2);
    assert!(served.count("misses") >= 2 * READS, "it is empty");
    served.warm_up(2);
    served.stop();
    // A closed cache needs no note, and its note is removed.
    let mut notes = std::fs::read_dir(place.path("state/caches")).expect("a folder");
    assert!(notes.next().is_none());
    let served = place.serve(&image, &cache, &[]);
    served.read_all(2);
    assert_eq!(served.count("misses"), 0);
}

#[test]
fn foreign_writes_after_kill_are_seen() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(2);
    served.io(&["write -P 8 0 64k"]);
    served.settle();
    served.kill();
    // A server without the cache works for an hour.
    let control = place.socket("c");
    let nbd = place.nbd();
    let without = crate::support::disk_serve_command(&[text(&image), "--nbd", &nbd, "--control", text(&control)]);
    let served = place.start(without);
    served.io(&["write -P 9 1M 64k"]);
    served.stop();
    run_tool("touch", &["-d", "+1 hour", text(&image)]);
    let served = place.serve(&image, &cache, &[]);
    served.process.wait_for("was changed since without it", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 8 0 64k", "read -P 7 64k 960k", "read -P 9 1M 64k", "read -P 7 1088k 14M"]);
}

#[test]
fn kill_during_writes_leaves_cache_warm() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    // The image's timestamps are old, and only the first write changes them.
    run_tool("touch", &["-d", "-1 hour", text(&image)]);
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

/// A note that was not written in time, on a busy file system, neither empties the cache nor hides foreign writes.
#[test]
fn late_note_is_compensated() {
    for mode in ["wt", "wb"] {
        let place = Place::new();
        let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
        run_tool("touch", &["-d", "-1 hour", text(&image)]);
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
        // The old note is restored, as if its file system had been busy all the time.
        std::fs::write(place.note(), before).expect("is written");
        let served = place.serve(&image, &cache, &[]);
        served.read_all(2);
        assert_eq!(served.count("misses"), 0, "{mode}");
        served.io(&["read -P 8 8M 64k"]);
        if mode == "wb" {
            served.io(&["read -P 9 9M 64k"]);
        }
        served.kill();
        // Foreign writes are still detected.
        run_tool("touch", &["-d", "+1 hour", text(&image)]);
        let words = "changed since without it";
        if mode == "wb" {
            place.refused(&image, text(&cache), &[], &[words]);
        } else {
            let served = place.serve(&image, &cache, &[]);
            served.process.wait_for(words, TEST_TIMEOUT).expect("told");
        }
    }
}

/// A server that is killed at its first write is recognised as the author of that write.
#[test]
fn kill_at_first_write_keeps_cache() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    run_tool("touch", &["-d", "-1 hour", text(&image)]);
    let served = place.serve(&image, &cache, &["--cache-size", "4M", "--cache-mode", "wb"]);
    // More data than the cache has room for.
    served.io(&["write -P 8 0 14M"]);
    served.kill();
    let served = place.serve(&image, &cache, &[]);
    served.io(&["read -P 8 0 14M", "read -P 7 14M 2M"]);
}

#[test]
fn foreign_writes_while_stopped_are_seen() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.read_all(2);
    served.stop();
    qemu_io("raw", text(&image), &["write -P 9 1M 64k"]);
    let served = place.serve(&image, &cache, &[]);
    served.process.wait_for("starts empty", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 7 0 1M", "read -P 9 1M 64k", "read -P 7 1088k 14M"]);
    served.read_all(2);
    served.stop();
    run_tool("truncate", &["-s", "24M", text(&image)]);
    let served = place.serve(&image, &cache, &[]);
    served.process.wait_for("starts empty", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 0 16M 8M"]);
}

/// A foreign write to any file of a backing chain is detected, and the server's own writes are not taken for one.
#[test]
fn foreign_change_in_chain_is_detected() {
    let place = Place::new();
    let base = place.image("base.raw", 16);
    let [middle, top] = ["middle.qcow2", "top.qcow2"].map(|name| place.path(name));
    let create = |image: &Path, of: &Path, format: &str| {
        let options = ["create", "-q", "-f", "qcow2", "-F", format, "-b"];
        run_tool("qemu-img", &[&options[..], &[text(of), text(image)]].concat());
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
    for (image, format, place_on_disk) in [(&base, "raw", "64k"), (&middle, "qcow2", "128k"), (&top, "qcow2", "192k")] {
        qemu_io(format, text(image), &[&format!("write -P 9 {place_on_disk} 64k")]);
        let (misses, said) = warm();
        assert!(misses > 0 && said.contains("starts empty"), "{image:?}: {misses} {said}");
        assert_eq!(warm().0, 0, "{image:?}");
    }
    let served = place.serve(&top, &cache, &[]);
    served.io(&["read -P 8 0 64k", "read -P 9 64k 192k", "read -P 7 256k 1M"]);
}

/// Changes a file's content at 64 KiB to 64 KiB of 9, and sets its modification time back as `touch -r` does.
fn change_and_restore_time(image: &Path) {
    let file = File::options().write(true).open(image).expect("is there");
    let modified = file.metadata().and_then(|found| found.modified());
    file.write_all_at(&[9; 64 << 10], 64 << 10).expect("is written");
    file.set_modified(modified.expect("has a time")).expect("can be set");
}

/// A change of a file that the server only reads is seen after a kill, also if its modification time was set back: the
/// cache's data is compared before use. The change may come after the kill, or while the server runs. A note without
/// ctimes, of an earlier version, proves nothing. Without a change all data is used at once.
#[test]
fn restored_time_hides_no_change() {
    for (is_backing, is_before_kill, is_old_note) in
        [(true, false, false), (true, true, false), (true, false, true), (false, false, false)]
    {
        let case = format!("backing {is_backing}, before the kill {is_before_kill}, old note {is_old_note}");
        let place = Place::new();
        let (base, top, cache) = (place.image("base.raw", 16), place.path("top.qcow2"), place.path("cache"));
        let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&base), text(&top)];
        run_tool("qemu-img", &create);
        let (image, options) = match is_backing {
            true => (&top, &["--cache-size", "8M"][..]),
            false => (&base, &["--cache-size", "8M", "--read-only"][..]),
        };
        let served = place.serve(image, &cache, options);
        served.warm_up(2);
        served.settle();
        // The next server keeps all data that it has checkpointed.
        served.stop();
        let served = place.serve(image, &cache, options);
        served.settle();
        if is_before_kill {
            change_and_restore_time(&base);
            let now = place.path("now");
            std::fs::write(&now, "").expect("is written");
            place.noted_lately(&now);
        }
        served.kill();
        place.left(&cache);

        if !is_before_kill && !is_old_note {
            let served = place.serve(image, &cache, options);
            served.read_all(2);
            assert_eq!(served.count("misses"), 0, "{case}: nothing was changed");
            served.kill();
            place.left(&cache);
        }
        if is_old_note {
            let note = std::fs::read_to_string(place.note()).expect("is read");
            let lines = note.lines().map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
                [word @ ("stamp" | "written"), bytes, _] => format!("{word} {bytes}\n"),
                _ => format!("{line}\n"),
            });
            std::fs::write(place.note(), lines.collect::<String>()).expect("is written");
        }
        if !is_before_kill {
            change_and_restore_time(&base);
        }
        let served = place.serve(image, &cache, options);
        let read = || {
            let commands = ["read -P 7 0 64k", "read -P 9 64k 64k", "read -P 7 128k 1920k"];
            let commands = commands.iter().flat_map(|command| ["-c", *command]);
            let all: Vec<&str> = ["-r", "-f", "raw"].into_iter().chain(commands).chain([&*served.uri]).collect();
            let said = run_tool("qemu-io", &all);
            assert!(!said.contains("failed"), "{case}: {said}");
        };
        read();
        wait_until("all is compared", || served.count("unproven") == 0);
        read();
        let said = served.stop();
        assert!(!said.contains("starts empty"), "{case}: {said}");
        assert!(!said.contains("nothing else has written"), "{case}: {said}");
    }
}

/// Returns a `fio` command that writes to the disk at random, and verifies its writes.
pub(crate) fn verify(uri: &str, options: &[&str]) -> Command {
    let mut command = larder_bench::campaign::process::killed_with_parent("fio");
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
    let status = fio.wait(TEST_TIMEOUT).expect("ends");
    assert!(status.success(), "{}", fio.output());
}

#[test]
fn small_cache_returns_all_writes() {
    for (line, mode) in [("4k", "wt"), ("64k", "wt"), ("16k", "wa"), ("4k", "pt")] {
        let place = Place::new();
        let (image, cache) = (place.image("disk.raw", 64), place.path("cache"));
        let options = ["--cache-size", "6M", "--cache-line", line, "--cache-mode", mode];
        let served = place.serve(&image, &cache, &options);
        run_to_its_end(verify(&served.uri, &[]));
        let (told, lines) = (served.cache(), line.trim_end_matches('k').parse::<u64>().expect("a number") << 10);
        assert_eq!((&told["mode"], &told["state"]), (&json!(mode), &json!("works")));
        assert_eq!((&told["line_size"], &told["size"]), (&json!(lines), &json!(6 * MIB)));
        assert_eq!(told["evicted"] != json!(0), mode != "pt", "{told}");
        served.stop();
    }
}

#[test]
fn mode_changes_under_load() {
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
    let status = fio.wait(TEST_TIMEOUT).expect("ends");
    assert!(status.success(), "{}", fio.output());
    set("wa");
    served.kill();
    // The mode is kept across restarts, unless an option changes it.
    let served = place.serve(&image, &cache, &[]);
    assert_eq!(served.cache()["mode"], json!("wa"));
    served.stop();
    let served = place.serve(&image, &cache, &["--cache-mode", "wt"]);
    assert_eq!(served.cache()["mode"], json!("wt"));
}

#[test]
fn read_only_disk_uses_cache() {
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

/// A block device is used in its whole size, both as a disk and as a cache.
#[test]
fn block_device_is_disk_or_cache() {
    let place = Place::new();
    let (image, ssd) = (place.image("disk.raw", 16), place.path("ssd.raw"));
    run_tool("truncate", &["-s", "8M", text(&ssd)]);
    let (disk, cache) = (LoopDevice::new(&image, 512), LoopDevice::new(&ssd, 4096));
    place.refused(&disk.0, text(&cache.0), &["--cache-size", "4M"], &["it has 8", "omit cache-size"]);
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
fn uncached_writes_after_kill_are_seen() {
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
    served.process.wait_for("was changed since without it", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 9 0 64k", "read -P 7 64k 4M"]);
}

/// On a device without timestamps, foreign writes are seen where the guest wrote last.
#[test]
fn foreign_writes_to_device_are_seen() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let disk = LoopDevice::new(&image, 512);
    let serve = |options: &[&str]| place.serve(&disk.0, &cache, options);
    let served = serve(&["--cache-size", "8M"]);
    served.warm_up(2);
    served.io(&["write -P 8 5M 64k", "write -P 9 1M 4k"]);
    served.stop();
    for _ in 0..2 {
        // The same holds if the guest only reads.
        let served = serve(&[]);
        served.read_all(2);
        assert_eq!(served.count("misses"), 0, "nobody has used it");
        served.stop();
    }
    qemu_io("raw", text(&disk.0), &["write -P 10 0 64k", "write -P 10 5M 4k"]);
    let served = serve(&[]);
    served.process.wait_for("the disk was changed without it", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 10 0 64k", "read -P 9 1M 4k", "read -P 10 5M 4k"]);
    served.stop();
}

/// Checks writes that a server without the cache makes between two servers with it, all stopped in order, on a disk
/// whose changes no timestamp records. The writes are to ranges that the guest had only read.
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
    let message = "the disk was used without its cache";
    served.process.wait_for(message, TEST_TIMEOUT).expect("told");
    served.warm_up(4);
    let said = served.stop();
    assert_eq!(said.matches(message).count(), 1, "{said}");
    let served = serve(&[]);
    served.read_all(4);
    assert_eq!(served.count("misses"), 0, "nobody has used it");
    served.stop();
    // The same holds if that server is killed, and the cache is resized; a server that only reads changes nothing.
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
    // The cache is not trusted either if the note is lost.
    std::fs::remove_dir_all(place.path("state")).expect("there are notes");
    let served = without();
    served.io(&["write -P 11 3M 64k"]);
    served.stop();
    let served = serve(&[]);
    served.process.wait_for("does not exist (expected at", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 11 3M 64k"]);
    served.stop();
}

#[test]
fn uncached_writes_to_device_are_seen() {
    let place = Place::new();
    let disk = LoopDevice::new(&place.image("disk.raw", 16), 512);
    changed_by_a_server_without_the_cache(&place, text(&disk.0));
}

#[test]
fn uncached_writes_to_export_are_seen() {
    let place = Place::new();
    let (image, socket) = (place.image("disk.raw", 16), place.socket("export"));
    let export = format!("nbd+unix:///?socket={}", text(&socket));
    let server = Process::start(disk_serve_command(&[text(&image), "--nbd", &export])).expect("larder starts");
    server.wait_for("serving", TEST_TIMEOUT).expect("it serves");
    changed_by_a_server_without_the_cache(&place, &export);
}

#[test]
fn status_reports_cache() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(1);
    let said = run_tool(text(larder_path()), &["status", text(&served.control)]);
    for part in [
        &format!("cache:            {}", text(&cache)),
        "write-through, works",
        "8 MiB (8388608 bytes), lines of 4 KiB",
        "holds:          1 MiB (",
        "hits:         ",
        "misses:       ",
    ] {
        assert!(said.contains(part), "'{part}' in {said}");
    }
}

#[test]
fn daily_ssd_writes_are_limited() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let day = 64 * MIB;
    let options = ["--cache-size", "32M", "--cache-endurance", "64M"];
    let served = place.serve(&image, &place.path("cache"), &options);
    assert_eq!(served.count("endurance"), day);
    // A 24th of a day's bytes may be written at once, and more as time passes.
    let began = Instant::now();
    let may_be_written = || day / 24 + MIB / 8 + day * began.elapsed().as_secs() / (24 * 60 * 60);
    for _ in 0..3 {
        served.read_all(16);
    }
    // A cache that seems slow, as on a busy machine, is bypassed for a while.
    while served.count("occupancy") <= MIB {
        assert!(began.elapsed() < TEST_TIMEOUT, "{}", served.cache());
        served.read_all(16);
    }
    assert!(served.count("occupancy") < may_be_written(), "{}", served.cache());
    served.settle();
    let written = served.count("cache_written");
    assert!(written <= may_be_written(), "{}", served.cache());
    // Written lines are dropped from the cache, and new ones are not admitted.
    served.io(&["write -P 9 0 8M", "read -P 9 0 8M", "read -P 7 8M 8M"]);
    assert!(served.count("cache_written") < written + MIB, "{}", served.cache());
    let said = run_tool(text(larder_path()), &["status", text(&served.control)]);
    assert!(said.contains("of 64 MiB a day"), "{said}");
    served.kill();
    let served = place.serve(&image, &place.path("cache"), &[]);
    served.io(&["read -P 9 0 8M", "read -P 7 8M 8M"]);
}

/// The status reports the miss ratio that caches of other sizes would have.
#[test]
fn miss_ratios_by_size_are_reported() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let served = place.serve(&image, &place.path("cache"), &["--cache-size", "8M"]);
    assert_eq!(served.cache()["miss_ratios"], serde_json::json!([]));
    // A loop: under LRU, a cache that does not hold all of it never has the next line.
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
    assert!(bytes("cache_written") >= bytes("filled") + bytes("metadata_written"), "{cache}");
}
