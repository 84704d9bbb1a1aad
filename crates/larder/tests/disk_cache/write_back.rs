//! Write-back: data that only the cache has is not lost, not trusted where it is stale, and reaches the disk.

use std::fs;
use std::path::Path;
use std::process::Command;

use larder_bench::campaign::process::{Process, killed_with_parent};
use serde_json::{Value, json};

use crate::failing::Fast;
use crate::support::{
    TEST_TIMEOUT, disk_serve_command, fill_file_system, mount_tmpfs, run_command, run_tool, wait_until_listening,
};
use crate::{Place, Served, assert_fails, qemu_io, text};

pub(crate) const WRITE_BACK: [&str; 4] = ["--cache-size", "8M", "--cache-mode", "wb"];

/// Writes of these tests. The image has 7 everywhere else; [`READS`] verifies them.
pub(crate) const WRITES: [&str; 3] = ["write -P 9 1M 64k", "write -P 10 5M 4k", "write -P 11 5244416 512"];
pub(crate) const READS: [&str; 7] = [
    "read -P 7 0 1M",
    "read -P 9 1M 64k",
    "read -P 7 1088k 4032k",
    "read -P 10 5M 1536",
    "read -P 11 5244416 512",
    "read -P 10 5244928 2k",
    "read -P 7 5124k 2M",
];

/// Returns an image and its write-back cache with newer data, whose server was killed.
pub(crate) fn killed(place: &Place) -> (std::path::PathBuf, std::path::PathBuf) {
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    served.kill();
    (image, cache)
}

/// Runs a command that must succeed; returns its output.
fn cache_command(place: &Place, arguments: &[&str]) -> String {
    let (code, said) = place.cache_command(arguments);
    assert_eq!(code, Some(0), "{arguments:?}: {said}");
    said
}

/// Runs a command that must fail and report all of `words`.
fn refused(place: &Place, arguments: &[&str], words: &[&str]) {
    let (code, said) = place.cache_command(arguments);
    assert_eq!(code, Some(2), "{arguments:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{arguments:?} says nothing of '{word}': {said}");
    }
}

#[test]
fn stop_writes_everything_to_disk() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    let status = served.cache();
    let of = |name: &str| status[name].as_u64().expect("a number");
    assert!(of("dirty") + of("cleaned") >= (64 + 4) << 10, "it is not written through: {status}");
    served.io(&READS);
    served.stop();
    qemu_io("raw", text(&image), &READS);
    let told = place.info(&cache);
    assert_eq!((&told["may_be_dirty"], &told["closed"]), (&json!(false), &json!(true)));
    let served = place.serve(&image, &cache, &[]);
    assert_eq!(served.cache()["mode"], json!("wb"), "as it was left");
    served.io(&READS);
}

#[test]
fn writes_survive_kill() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    let told = place.info(&cache);
    assert_eq!((&told["may_be_dirty"], &told["closed"]), (&json!(true), &json!(false)));
    let served = place.serve(&image, &cache, &[]);
    served.io(&READS);
    // nbdcopy does not flush, unlike qemu-io, which does at its end.
    let unflushed = place.path("unflushed");
    fs::write(&unflushed, [12; 64 << 10]).expect("a file");
    run_tool("nbdcopy", &[text(&unflushed), &served.uri]);
    served.kill();
    let served = place.serve(&image, &cache, &[]);
    let reads = ["read -P 12 0 64k", "read -P 7 64k 960k", "read -P 9 1M 64k"];
    served.io(&reads);
    served.stop();
    qemu_io("raw", text(&image), &reads);
}

#[test]
fn older_dirty_cache_copy_is_refused() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&["write -P 8 1M 64k"]);
    served.stop();
    let older = place.path("older");
    fs::copy(&cache, &older).expect("copied");
    let served = place.serve(&image, &cache, &[]);
    served.io(&WRITES);
    served.kill();
    let newer = format!("`larder disk cache drop --lose-dirty {}`", text(&cache));
    let is_refused = |given: &Path| place.refused(&image, text(given), &[], &["older copy", &newer]);
    is_refused(&older);
    let served = place.serve(&image, &cache, &[]);
    served.io(&READS);
    served.kill();
    // The same copy at the cache's own path is refused as well.
    fs::rename(&cache, place.path("newer")).expect("moved");
    fs::copy(&older, &cache).expect("copied");
    is_refused(&cache);
    // The cache is given up, as the message advises.
    cache_command(&place, &["drop", "--lose-dirty", text(&cache)]);
    let served = place.serve(&image, &older, &[]);
    served.io(&["read -P 8 1M 64k", "read -P 7 5M 4k"]);
    served.stop();
    qemu_io("raw", text(&image), &["read -P 8 1M 64k"]);
}

/// After the cache's file was deleted under its server, the message says so, and following it loses no data.
#[test]
fn deleted_cache_file_loses_nothing() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    fs::remove_file(&cache).expect("was there");
    let told = served.process.wait_for("deleted or replaced", TEST_TIMEOUT).expect("told");
    for part in [
        &format!("image=\"{}\"", text(&image)),
        &format!("cache=\"{}\"", text(&cache)),
        &format!("larder disk cache replace {} --control PATH --with FILE", text(&cache)),
        &format!("larder disk cache flush {} --control PATH", text(&cache)),
        "the disk's cache was",
    ] {
        assert!(told.contains(part), "no '{part}' in {told}");
    }
    assert!(!told.contains("/proc/"), "{told}");
    // The steps that the message advises.
    let (other, control) = (place.path("other"), text(&served.control));
    cache_command(&place, &["flush", text(&cache), "--control", control]);
    assert_eq!(served.count("dirty"), 0);
    served.io(&["write -P 12 9M 4k"]);
    cache_command(&place, &["replace", text(&cache), "--control", control, "--with", text(&other)]);
    served.kill();
    place.left(&other);
    let served = place.serve(&image, &other, &[]);
    served.io(&READS);
    served.io(&["read -P 12 9M 4k"]);
    served.stop();
    qemu_io("raw", text(&image), &READS);
}

#[test]
fn idle_dirty_lines_are_cleaned() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    served.cleaned();
    assert!(served.count("cleaned") >= (64 + 4) << 10);
    let reads: Vec<&str> = ["-U", "-r", "-f", "raw"]
        .into_iter()
        .chain(READS.iter().flat_map(|read| ["-c", read]))
        .chain([text(&image)])
        .collect();
    let said = run_tool("qemu-io", &reads);
    assert!(!said.contains("failed"), "{said}");
    served.kill();
    qemu_io("raw", text(&image), &READS);
}

#[test]
fn flush_command_works_online_and_offline() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    refused(&place, &["flush", text(&cache)], &["--control PATH"]);
    cache_command(&place, &["flush", text(&cache), "--control", text(&served.control)]);
    let status = served.cache();
    assert_eq!((&status["dirty"], &status["mode"]), (&json!(0), &json!("wb")));
    let said = run_tool(text(crate::larder_path()), &["status", text(&served.control)]);
    assert!(said.contains("write-back, works") && said.contains("cleaned"), "{said}");
    served.kill();
    qemu_io("raw", text(&image), &READS);
    cache_command(&place, &["drop", text(&cache), "--lose-dirty"]);

    let place = Place::new();
    let (image, cache) = killed(&place);
    refused(&place, &["drop", text(&cache)], &["never written to", "larder disk cache flush", "--lose-dirty"]);
    refused(&place, &["resize", text(&cache), "16M"], &["was not closed", "disk.raw"]);
    // The disk was moved, and is the same under its new name.
    let moved = place.path("moved.raw");
    fs::rename(&image, &moved).expect("moves");
    refused(&place, &["flush", text(&cache)], &["disk.raw", "No such file"]);
    let said = cache_command(&place, &["flush", text(&cache), "--image", text(&moved)]);
    assert!(said.contains("no dirty data remains"), "{said}");
    qemu_io("raw", text(&moved), &READS);
    let said = cache_command(&place, &["flush", text(&cache), "--image", text(&moved)]);
    assert!(said.contains("there is no dirty data"), "{said}");
    cache_command(&place, &["drop", text(&cache)]);
}

/// Dirty data of a cache that may be stale is neither dropped nor written to the disk unless the user decides.
#[test]
fn unsure_dirty_data_needs_users_decision() {
    type Harm = fn(&Place, &Path);
    let harms: [(Harm, &str); 2] = [
        (
            |place, _| fs::remove_dir_all(place.path("state")).expect("was there"),
            "no state file confirms that it worked until its server ended",
        ),
        (|_, image| drop(run_tool("touch", &["-d", "+1 hour", text(image)])), "was changed since without it"),
    ];
    for (harm, words) in harms {
        let place = Place::new();
        let (image, cache) = killed(&place);
        harm(&place, &image);
        for _ in 0..2 {
            let said = place.refused(
                &image,
                text(&cache),
                &[],
                &[words, &format!("flush --force {}", text(&cache)), &format!("drop --lose-dirty {}", text(&cache))],
            );
            assert!(
                said.contains("nobody can") || said.contains("only you") || said.contains("no state file confirms")
            );
        }
        refused(&place, &["flush", text(&cache)], &[words]);
        cache_command(&place, &["flush", text(&cache), "--force"]);
        qemu_io("raw", text(&image), &READS);
        let served = place.serve(&image, &cache, &[]);
        served.io(&READS);
        served.stop();
    }
}

#[test]
fn read_only_disk_keeps_cache_dirty() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    let served = place.serve(&image, &cache, &["--read-only"]);
    let said = run_tool("qemu-io", &["-r", "-f", "raw", "-c", "read -P 9 1M 64k", &served.uri]);
    assert!(!said.contains("failed"), "{said}");
    served.stop();
    let told = place.info(&cache);
    assert_eq!((&told["may_be_dirty"], &told["closed"]), (&json!(true), &json!(true)));
    // The cache cannot be resized, and is not flushed over foreign writes.
    refused(&place, &["resize", text(&cache), "16M"], &["never written to", "larder disk cache flush"]);
    run_tool("touch", &["-d", "+1 hour", text(&image)]);
    place.refused(&image, text(&cache), &[], &["was changed without the cache since"]);
    refused(&place, &["flush", text(&cache)], &["was changed without the cache since"]);
    cache_command(&place, &["flush", text(&cache), "--force"]);
    qemu_io("raw", text(&image), &READS);
}

/// Write-back is refused for a remote cache, and where Larder cannot keep a note about the cache.
#[test]
fn write_back_needs_local_noted_cache() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let words = ["write-back (wb) needs its cache on this host", "wt (write-through)"];
    let remote = "nbd://127.0.0.1:1/cache";
    place.refused(&image, remote, &["--cache-mode", "wb"], &words);
    refused(&place, &["mode", remote, "wb"], &words);
    fs::write(place.path("file"), []).expect("a file");
    let mut nowhere = place.serve_command(&image, text(&cache), &WRITE_BACK);
    nowhere.env("STATE_DIRECTORY", place.path("file/state"));
    assert_fails(nowhere, &["write-back needs it", "file/state", "wt (write-through)"]);
    assert!(!cache.exists(), "nothing is left behind");
    let mut through = place.serve_command(&image, text(&cache), &["--cache-size", "8M"]);
    through.env("STATE_DIRECTORY", place.path("file/state"));
    let served = place.start(through);
    let control = text(&served.control);
    refused(&place, &["mode", text(&cache), "wb", "--control", control], &["write-back needs it"]);
    assert_eq!(served.cache()["mode"], json!("wt"));
}

/// Starts a server of a disk with these arguments; returns it with the disk's URI.
fn remote_disk(place: &Place, arguments: &[&str]) -> (Process, String) {
    let socket = place.socket("remote");
    let mut command = killed_with_parent("nbdkit");
    command.args(["-f", "-U", text(&socket)]).args(arguments);
    let process = Process::start(command).expect("nbdkit; testbed/setup.sh installs it");
    wait_until_listening(&socket);
    (process, format!("nbd+unix:///?socket={}", text(&socket)))
}

#[test]
fn slow_mode_change_is_awaited() {
    let place = Place::new();
    // A disk whose writes are slow.
    let (_slow, uri) = remote_disk(&place, &["--filter=delay", "memory", "16M", "wdelay=100ms"]);
    let cache = place.path("cache");
    let served = place.serve(Path::new(&uri), &cache, &WRITE_BACK);
    // Far apart, so that each is a separate write.
    let writes: Vec<String> = (0..400).map(|at| format!("write -P 9 {}k 4k", 16 * at)).collect();
    let reads: Vec<String> = (0..400).map(|at| format!("read -P 9 {}k 4k", 16 * at)).collect();
    served.io(&writes);
    let control = served.control.clone();
    let put = |path: &str, arguments: &[&str]| {
        let url = format!("http://localhost/v1/disks/0{path}");
        let mut all = vec!["-s", "-i", "--unix-socket", text(&control), &url];
        all.extend(arguments);
        run_tool("curl", &all)
    };
    let said = put("", &["-X", "PATCH", "--data-binary", "{\"cache\":{\"mode\":\"wt\"}}"]);
    let (head, body) = said.split_once("\r\n\r\n").expect("a body");
    assert!(head.starts_with("HTTP/1.1 202 "), "{said}");
    let state: Value = serde_json::from_str(body).expect("JSON");
    assert_eq!(state["cache"]["flush"]["running"], json!(true), "{said}");
    // A second client waits for the same change.
    cache_command(&place, &["mode", text(&cache), "wt", "--control", text(&control)]);
    let status = served.cache();
    assert_eq!((&status["dirty"], &status["mode"]), (&json!(0), &json!("wt")));
    assert_eq!(status["flush"], json!({"running": false, "error": null}));
    served.io(&reads);
    assert_eq!(place.info(&cache)["may_be_dirty"], json!(false));
    served.kill();
    qemu_io("raw", &uri, &reads);
    let served = place.serve(Path::new(&uri), &cache, &[]);
    assert_eq!(served.cache()["mode"], json!("wt"));
    let said = put("/cache/flush", &["-X", "PUT"]);
    assert!(said.starts_with("HTTP/1.1 405 ") && said.contains("allow: POST"), "{said}");
    let said = put("/cache/flush", &["-X", "POST"]);
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
}

/// Asserts that a command of qemu-io fails.
pub(crate) fn fails(served: &Served, command: &str) {
    let mut io = std::process::Command::new("qemu-io");
    io.args(["-f", "raw", "-c", command, &served.uri]);
    let (_, said) = run_command(io);
    assert!(said.contains("Input/output error"), "{command}: {said}");
}

/// While a cache has failed, only data that no other copy has cannot be read; it is readable again with the cache.
#[test]
fn failed_cache_hides_only_dirty_data() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let fast = Fast::start(&place);
    let serve = || place.start(place.serve_command(&image, &fast.uri, &["--cache-mode", "wb"]));
    let served = serve();
    served.io(&["write -P 9 1M 64k", "flush"]);
    fast.fail();
    fails(&served, "read 1M 4k");
    served.io(&["read -P 7 0 1M", "write -P 8 2M 64k", "read -P 8 2M 64k"]);
    fails(&served, "read 1084k 4k");
    assert_eq!(served.cache()["state"], json!("failed"));
    assert_eq!(served.count("dirty"), 64 << 10);
    served.kill();
    fast.work();
    let served = serve();
    served.process.wait_for("had failed", TEST_TIMEOUT).expect("told");
    served.io(&["read -P 7 0 1M", "read -P 9 1M 64k", "read -P 8 2M 64k"]);
    served.stop();
    qemu_io("raw", text(&image), &["read -P 9 1M 64k", "read -P 8 2M 64k"]);
}

/// A cache whose device fails only writes is flushed to the disk, and serves no stale data later.
#[test]
fn cache_failing_writes_flushes_to_disk() {
    for stops in [true, false] {
        let place = Place::new();
        let image = place.image("disk.raw", 16);
        let fast = Fast::with(&place, &["error-pwrite-rate=1"]);
        let serve = || place.start(place.serve_command(&image, &fast.uri, &["--cache-mode", "wb"]));
        let served = serve();
        served.io(&["write -P 9 1M 1M", "flush"]);
        fast.fail();
        served.io(&["write -P 10 1M 64k", "write -P 11 3M 4k", "flush"]);
        served.process.wait_for("all data that only its cache had is written to it now", TEST_TIMEOUT).expect("told");
        served.io(&["write -P 12 1088k 64k", "read -P 10 1M 64k", "read -P 12 1088k 64k"]);
        match stops {
            true => drop(served.stop()),
            false => served.kill(),
        }
        let reads = ["read -P 10 1M 64k", "read -P 12 1088k 64k", "read -P 9 1152k 896k", "read -P 11 3M 4k"];
        qemu_io("raw", text(&image), &reads);
        fast.work();
        let served = serve();
        served.io(&reads);
        assert_eq!(served.cache()["state"], json!("works"));
        served.stop();
        qemu_io("raw", text(&image), &reads);
    }
}

/// Asserts that a write fails with `error`, and leaves a cache that can be cleaned.
fn refused_at_once(place: &Place, served: Served, cache: &Path, write: &str, error: &str) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw", "-c", write, &served.uri]);
    let (code, said) = run_command(command);
    assert!(code != Some(0) && said.contains(error), "{write}: {said}");
    cache_command(place, &["flush", text(cache), "--control", text(&served.control)]);
    assert_eq!(served.count("dirty"), 0);
    served.stop();
}

/// A write of data past the end of an export of an odd size fails at once, not when it is cleaned.
#[test]
fn data_past_odd_end_is_refused() {
    let place = Place::new();
    // The last sector begins at 999936.
    let (_remote, uri) = remote_disk(&place, &["memory", "1000100"]);
    let cache = place.path("cache");
    let served = place.serve(Path::new(&uri), &cache, &WRITE_BACK);
    served.io(&["write -P 9 999936 164", "write -P 0 1000100 348"]);
    refused_at_once(&place, served, &cache, "write -P 10 999424 1024", "No space left on device");
    qemu_io("raw", &uri, &["read -P 9 999936 164"]);
}

/// A write that makes a disk of a guessed format begin like another one fails at once, not when it is cleaned.
#[test]
fn other_formats_header_is_refused() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let header = place.path("header");
    fs::write(&header, [b"QFI\xfb".as_slice(), &[0; 508]].concat()).expect("a file");
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    let write = format!("write -s {} 0 512", text(&header));
    refused_at_once(&place, served, &cache, &write, "Input/output error");
    qemu_io("raw", text(&image), &READS);
}

/// A cache with dirty data is not served as a disk, which would lose that data.
#[test]
fn dirty_cache_cannot_be_a_disk() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    place.left(&cache);
    let before = fs::read(&cache).expect("is there");
    let words = [text(&cache), "it is the cache of", text(&image), "larder disk cache flush"];
    for format in [&[][..], &["--format", "raw"]] {
        let mut command = place.without_cache(&cache);
        command.args(format);
        assert_fails(command, &words);
    }
    assert_fails(place.disk_command(&["resize", text(&cache), "32M"]), &words);
    assert!(fs::read(&cache).expect("is there") == before, "it was changed");
    let mut reading = place.without_cache(&cache);
    reading.arg("--read-only");
    place.start(reading).stop();
    let served = place.serve(&image, &cache, &[]);
    served.io(&["read -P 9 1M 64k", "read -P 7 0 1M"]);
    served.stop();
    // A cache that is used through this very server may be served.
    let socket = place.socket("export");
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    let export = || {
        let process =
            Process::start(disk_serve_command(&[text(&cache), "--format", "raw", "--nbd", &uri])).expect("starts");
        process.wait_for("serving", TEST_TIMEOUT).expect("it serves");
        process
    };
    let mut exported = export();
    let served = place.start(place.serve_command(&image, &uri, &["--cache-mode", "wb"]));
    served.io(&["write -P 10 2M 64k", "flush"]);
    served.kill();
    exported.kill();
    let mut exported = export();
    let served = place.start(place.serve_command(&image, &uri, &[]));
    served.io(&["read -P 10 2M 64k"]);
    served.stop();
    exported.kill();
    // A cache without dirty data may be served: a guest may have a cache of its own on its disk.
    let served = place.start(place.without_cache(&cache));
    served.process.wait_for("it looks like the disk cache", TEST_TIMEOUT).expect("told");
    served.stop();
}

/// The steps in the message for an overwritten dirty cache work.
#[test]
fn overwritten_dirty_cache_can_be_dropped() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    place.left(&cache);
    let junk = vec![1; 8 << 20];
    fs::write(&cache, &junk).expect("written");
    let words = ["may have data that was never written", "drop --lose-dirty"];
    assert_fails(place.without_cache(&image), &words);
    let (code, said) = place.cache_command(&["drop", text(&cache)]);
    assert!(code == Some(2) && said.contains("not a Larder cache"), "{said}");
    let (code, said) = place.cache_command(&["drop", "--lose-dirty", text(&cache)]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("there was no cache on it any more"), "{said}");
    assert!(fs::read(&cache).expect("is there") == junk, "it is somebody else's");
    place.start(place.without_cache(&image)).stop();
}

/// A qcow2 image whose write-back cache has more data is not called clean.
#[test]
fn dirty_cache_makes_image_incomplete() {
    let place = Place::new();
    let (image, cache) = (place.path("disk.qcow2"), place.path("cache"));
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "16M"]);
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&["write -P 9 1M 64k"]);
    served.kill();
    // This applies the journal, and not the cache's data.
    assert_fails(place.without_cache(&image), &["never written to the disk"]);
    let (_, said) = run_command(place.disk_command(&["info", text(&image)]));
    assert!(said.contains("incomplete without its cache"), "{said}");
    cache_command(&place, &["flush", text(&cache)]);
    let (_, said) = run_command(place.disk_command(&["info", text(&image)]));
    assert!(!said.contains("incomplete"), "{said}");
}

/// A stop on a full file system says that the data stays in the cache, and how it reaches the disk.
#[test]
fn full_disk_keeps_data_in_cache() {
    let place = Place::new();
    let small = mount_tmpfs(&place.path("small"), "size=6M");
    let (image, cache) = (small.0.join("disk.raw"), place.path("cache"));
    run_tool("truncate", &["-s", "16M", text(&image)]);
    fill_file_system(&small.0.join("rest"));
    let mut served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&["write -P 9 0 1M"]);
    served.process.signal(libc::SIGTERM);
    let status = served.process.wait(TEST_TIMEOUT).expect("ends");
    let said = served.process.output();
    assert_eq!(status.code(), Some(2), "{said}");
    let advice = format!("larder disk cache flush {}", text(&cache));
    for words in ["the data stays in the cache", &advice] {
        assert!(said.contains(words), "{said}");
    }
    fs::remove_file(small.0.join("rest")).expect("was there");
    cache_command(&place, &["flush", text(&cache)]);
    qemu_io("raw", text(&image), &["read -P 9 0 1M"]);
}

/// A change by another program whose time was put back is found by the comparison, and reported.
#[test]
fn change_beside_dirty_data_is_reported() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.warm_up(4);
    served.settle();
    served.io(&WRITES);
    served.kill();
    let before = place.path("times");
    run_tool("touch", &["-r", text(&image), text(&before)]);
    qemu_io("raw", text(&image), &["write -P 13 0 512k"]);
    run_tool("touch", &["-r", text(&before), text(&image)]);
    let served = place.serve(&image, &cache, &[]);
    served.process.wait_for("another program has changed it", TEST_TIMEOUT).expect("is reported");
    served.io(&["read -P 13 0 512k", "read -P 9 1M 64k"]);
    served.stop();
}
