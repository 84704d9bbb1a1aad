//! Write-back: what only the cache has is not lost, not believed where it is old, and reaches the disk.

use std::fs;
use std::path::Path;
use std::process::Command;

use larder_bench::campaign::process::{Process, mortal};
use serde_json::{Value, json};

use crate::failing::Fast;
use crate::support::{LIMIT, disk_serve, run, tool, wait_for_listener};
use crate::{Place, Served, assert_fails, qemu_io, text};

pub(crate) const WRITE_BACK: [&str; 4] = ["--cache-size", "8M", "--cache-mode", "wb"];

/// What is written in these tests, and how it is verified. The image has 7 everywhere else.
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

/// An image and a cache that has what the image has not, whose server was killed.
pub(crate) fn killed(place: &Place) -> (std::path::PathBuf, std::path::PathBuf) {
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    served.kill();
    (image, cache)
}

/// A command that must succeed; what it said.
fn cache_command(place: &Place, arguments: &[&str]) -> String {
    let (code, said) = place.cache_command(arguments);
    assert_eq!(code, Some(0), "{arguments:?}: {said}");
    said
}

/// A command that must fail, and say all of `words`.
fn refused(place: &Place, arguments: &[&str], words: &[&str]) {
    let (code, said) = place.cache_command(arguments);
    assert_eq!(code, Some(2), "{arguments:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{arguments:?} says nothing of '{word}': {said}");
    }
}

#[test]
fn a_stop_leaves_everything_on_the_disk() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    let status = served.cache();
    let of = |name: &str| status[name].as_u64().expect("a number");
    assert!(
        of("dirty") + of("cleaned") >= (64 + 4) << 10,
        "it is not written through: {status}"
    );
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
fn what_was_written_is_there_after_a_kill() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    let told = place.info(&cache);
    assert_eq!((&told["may_be_dirty"], &told["closed"]), (&json!(true), &json!(false)));
    let served = place.serve(&image, &cache, &[]);
    served.io(&READS);
    // It does not flush, as qemu-io does at its end.
    let unflushed = place.path("unflushed");
    fs::write(&unflushed, [12; 64 << 10]).expect("a file");
    tool("nbdcopy", &[text(&unflushed), &served.uri]);
    served.kill();
    let served = place.serve(&image, &cache, &[]);
    let reads = ["read -P 12 0 64k", "read -P 7 64k 960k", "read -P 9 1M 64k"];
    served.io(&reads);
    served.stop();
    qemu_io("raw", text(&image), &reads);
}

#[test]
fn an_older_copy_of_a_cache_that_has_newer_data_is_refused() {
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
    // In its place it is no better.
    fs::rename(&cache, place.path("newer")).expect("moved");
    fs::copy(&older, &cache).expect("copied");
    is_refused(&cache);
    // Given up, as it says.
    cache_command(&place, &["drop", "--lose-dirty", text(&cache)]);
    let served = place.serve(&image, &older, &[]);
    served.io(&["read -P 8 1M 64k", "read -P 7 5M 4k"]);
    served.stop();
    qemu_io("raw", text(&image), &["read -P 8 1M 64k"]);
}

#[test]
fn a_cache_that_is_deleted_under_its_server_is_told_of_as_one_and_nothing_need_be_lost() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    fs::remove_file(&cache).expect("was there");
    let told = served.process.wait_for("deleted or replaced", LIMIT).expect("told");
    for part in [
        &format!("image=\"{}\"", text(&image)),
        &format!("cache=\"{}\"", text(&cache)),
        &format!("larder disk cache replace {} --control PATH --with FILE", text(&cache)),
        &format!("larder disk cache flush {} --control PATH", text(&cache)),
        "its cache was",
    ] {
        assert!(told.contains(part), "no '{part}' in {told}");
    }
    assert!(!told.contains("/proc/"), "{told}");
    // As it says.
    let (other, control) = (place.path("other"), text(&served.control));
    cache_command(&place, &["flush", text(&cache), "--control", control]);
    assert_eq!(served.count("dirty"), 0);
    served.io(&["write -P 12 9M 4k"]);
    cache_command(
        &place,
        &["replace", text(&cache), "--control", control, "--with", text(&other)],
    );
    served.kill();
    place.left(&other);
    let served = place.serve(&image, &other, &[]);
    served.io(&READS);
    served.io(&["read -P 12 9M 4k"]);
    served.stop();
    qemu_io("raw", text(&image), &READS);
}

#[test]
fn what_nobody_wants_anything_of_is_cleaned() {
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
    let said = tool("qemu-io", &reads);
    assert!(!said.contains("failed"), "{said}");
    served.kill();
    qemu_io("raw", text(&image), &READS);
}

#[test]
fn a_cache_is_flushed_by_command_while_its_server_runs_and_without() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&WRITES);
    refused(&place, &["flush", text(&cache)], &["--control PATH"]);
    cache_command(&place, &["flush", text(&cache), "--control", text(&served.control)]);
    let status = served.cache();
    assert_eq!((&status["dirty"], &status["mode"]), (&json!(0), &json!("wb")));
    let said = tool(text(crate::larder()), &["status", text(&served.control)]);
    assert!(said.contains("write-back, works") && said.contains("cleaned"), "{said}");
    served.kill();
    qemu_io("raw", text(&image), &READS);
    cache_command(&place, &["drop", text(&cache), "--lose-dirty"]);

    let place = Place::new();
    let (image, cache) = killed(&place);
    refused(
        &place,
        &["drop", text(&cache)],
        &["never written to", "larder disk cache flush", "--lose-dirty"],
    );
    refused(
        &place,
        &["resize", text(&cache), "16M"],
        &["was not closed", "disk.raw"],
    );
    // It is the same disk under another name.
    let moved = place.path("moved.raw");
    fs::rename(&image, &moved).expect("moves");
    refused(&place, &["flush", text(&cache)], &["disk.raw", "No such file"]);
    let said = cache_command(&place, &["flush", text(&cache), "--image", text(&moved)]);
    assert!(said.contains("which has everything now"), "{said}");
    qemu_io("raw", text(&moved), &READS);
    let said = cache_command(&place, &["flush", text(&cache), "--image", text(&moved)]);
    assert!(said.contains("the disk has everything"), "{said}");
    cache_command(&place, &["drop", text(&cache)]);
}

#[test]
fn dirty_data_is_neither_lost_nor_put_over_something_newer_unasked() {
    type Harm = fn(&Place, &Path);
    let harms: [(Harm, &str); 2] = [
        (
            |place, _| fs::remove_dir_all(place.path("state")).expect("was there"),
            "nothing says that it has worked to its end",
        ),
        (
            |_, image| drop(tool("touch", &["-d", "+1 hour", text(image)])),
            "was changed since without it",
        ),
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
                &[words, "flush --force", "drop --lose-dirty"],
            );
            assert!(said.contains("nobody can") || said.contains("only you") || said.contains("nothing says"));
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
fn a_disk_that_is_only_read_leaves_in_the_cache_what_it_has_not() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    let served = place.serve(&image, &cache, &["--read-only"]);
    let said = tool("qemu-io", &["-r", "-f", "raw", "-c", "read -P 9 1M 64k", &served.uri]);
    assert!(!said.contains("failed"), "{said}");
    served.stop();
    let told = place.info(&cache);
    assert_eq!((&told["may_be_dirty"], &told["closed"]), (&json!(true), &json!(true)));
    // It gets no other size, and is not put over what others have written.
    refused(
        &place,
        &["resize", text(&cache), "16M"],
        &["never written to", "larder disk cache flush"],
    );
    tool("touch", &["-d", "+1 hour", text(&image)]);
    place.refused(&image, text(&cache), &[], &["was changed without the cache since"]);
    refused(
        &place,
        &["flush", text(&cache)],
        &["was changed without the cache since"],
    );
    cache_command(&place, &["flush", text(&cache), "--force"]);
    qemu_io("raw", text(&image), &READS);
}

#[test]
fn write_back_needs_a_cache_that_its_host_keeps_and_a_note_of_it() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let words = ["write-back (wb) needs its cache on this host", "wt (write-through)"];
    let remote = "nbd://127.0.0.1:1/cache";
    place.refused(&image, remote, &["--cache-mode", "wb"], &words);
    refused(&place, &["mode", remote, "wb"], &words);
    fs::write(place.path("file"), []).expect("a file");
    let mut nowhere = place.serve_command(&image, text(&cache), &WRITE_BACK);
    nowhere.env("STATE_DIRECTORY", place.path("file/state"));
    assert_fails(nowhere, &["write-back needs that", "file/state", "wt (write-through)"]);
    assert!(!cache.exists(), "nothing is left behind");
    let mut through = place.serve_command(&image, text(&cache), &["--cache-size", "8M"]);
    through.env("STATE_DIRECTORY", place.path("file/state"));
    let served = place.start(through);
    let control = text(&served.control);
    refused(
        &place,
        &["mode", text(&cache), "wb", "--control", control],
        &["write-back needs that"],
    );
    assert_eq!(served.cache()["mode"], json!("wt"));
}

/// A disk on a server that is started with these arguments.
fn remote_disk(place: &Place, arguments: &[&str]) -> (Process, String) {
    let socket = place.socket("remote");
    let mut command = mortal("nbdkit");
    command.args(["-f", "-U", text(&socket)]).args(arguments);
    let process = Process::start(command).expect("nbdkit; testbed/setup.sh installs it");
    wait_for_listener(&socket);
    (process, format!("nbd+unix:///?socket={}", text(&socket)))
}

#[test]
fn a_change_of_the_mode_that_takes_long_is_followed_to_its_end() {
    let place = Place::new();
    // A disk whose writes take long.
    let (_slow, uri) = remote_disk(&place, &["--filter=delay", "memory", "16M", "wdelay=100ms"]);
    let cache = place.path("cache");
    let served = place.serve(Path::new(&uri), &cache, &WRITE_BACK);
    // Far from each other, so that each is a write of its own.
    let writes: Vec<String> = (0..400).map(|at| format!("write -P 9 {}k 4k", 16 * at)).collect();
    let reads: Vec<String> = (0..400).map(|at| format!("read -P 9 {}k 4k", 16 * at)).collect();
    served.io(&writes);
    let control = served.control.clone();
    let put = |path: &str, arguments: &[&str]| {
        let url = format!("http://localhost/v1/disks/0{path}");
        let mut all = vec!["-s", "-i", "--unix-socket", text(&control), &url];
        all.extend(arguments);
        tool("curl", &all)
    };
    let said = put("", &["-X", "PATCH", "--data-binary", "{\"cache\":{\"mode\":\"wt\"}}"]);
    let (head, body) = said.split_once("\r\n\r\n").expect("a body");
    assert!(head.starts_with("HTTP/1.1 202 "), "{said}");
    let state: Value = serde_json::from_str(body).expect("JSON");
    assert_eq!(state["cache"]["flush"]["running"], json!(true), "{said}");
    // It is waited for by whoever wants it, and by whoever wants it besides.
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
    assert!(
        said.starts_with("HTTP/1.1 405 ") && said.contains("allow: POST"),
        "{said}"
    );
    let said = put("/cache/flush", &["-X", "POST"]);
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
}

/// qemu-io's command must fail.
pub(crate) fn fails(served: &Served, command: &str) {
    let mut io = std::process::Command::new("qemu-io");
    io.args(["-f", "raw", "-c", command, &served.uri]);
    let (_, said) = run(io);
    assert!(said.contains("Input/output error"), "{command}: {said}");
}

#[test]
fn only_what_only_a_failed_cache_has_cannot_be_read_and_it_comes_back_with_it() {
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
    served.process.wait_for("had failed", LIMIT).expect("told");
    served.io(&["read -P 7 0 1M", "read -P 9 1M 64k", "read -P 8 2M 64k"]);
    served.stop();
    qemu_io("raw", text(&image), &["read -P 9 1M 64k", "read -P 8 2M 64k"]);
}

#[test]
fn a_cache_that_can_only_be_read_gives_the_disk_what_it_has_and_does_not_get_old() {
    for stops in [true, false] {
        let place = Place::new();
        let image = place.image("disk.raw", 16);
        let fast = Fast::with(&place, &["error-pwrite-rate=1"]);
        let serve = || place.start(place.serve_command(&image, &fast.uri, &["--cache-mode", "wb"]));
        let served = serve();
        served.io(&["write -P 9 1M 1M", "flush"]);
        fast.fail();
        served.io(&["write -P 10 1M 64k", "write -P 11 3M 4k", "flush"]);
        served
            .process
            .wait_for("all that only its cache had is on it now", LIMIT)
            .expect("told");
        served.io(&["write -P 12 1088k 64k", "read -P 10 1M 64k", "read -P 12 1088k 64k"]);
        match stops {
            true => drop(served.stop()),
            false => served.kill(),
        }
        let reads = [
            "read -P 10 1M 64k",
            "read -P 12 1088k 64k",
            "read -P 9 1152k 896k",
            "read -P 11 3M 4k",
        ];
        qemu_io("raw", text(&image), &reads);
        fast.work();
        let served = serve();
        served.io(&reads);
        assert_eq!(served.cache()["state"], json!("works"));
        served.stop();
        qemu_io("raw", text(&image), &reads);
    }
}

/// A write that must fail with `error`, and leaves a cache that can be cleaned.
fn refused_at_once(place: &Place, served: Served, cache: &Path, write: &str, error: &str) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw", "-c", write, &served.uri]);
    let (code, said) = run(command);
    assert!(code != Some(0) && said.contains(error), "{write}: {said}");
    cache_command(place, &["flush", text(cache), "--control", text(&served.control)]);
    assert_eq!(served.count("dirty"), 0);
    served.stop();
}

/// A write of data behind the end of an export of an odd size fails at once, not when it is cleaned.
#[test]
fn data_behind_odd_end_is_refused() {
    let place = Place::new();
    // The last sector begins at 999936.
    let (_remote, uri) = remote_disk(&place, &["memory", "1000100"]);
    let cache = place.path("cache");
    let served = place.serve(Path::new(&uri), &cache, &WRITE_BACK);
    served.io(&["write -P 9 999936 164", "write -P 0 1000100 348"]);
    refused_at_once(
        &place,
        served,
        &cache,
        "write -P 10 999424 1024",
        "No space left on device",
    );
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

/// What only a cache has is lost if the cache is served as a disk.
#[test]
fn cache_that_its_disk_needs_is_no_image() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    place.left(&cache);
    let before = fs::read(&cache).expect("is there");
    let words = [
        text(&cache),
        "it is the cache of",
        text(&image),
        "larder disk cache flush",
    ];
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
    // One that is used by way of this very server.
    let socket = place.socket("export");
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    let export = || {
        let process = Process::start(disk_serve(&[text(&cache), "--format", "raw", "--nbd", &uri])).expect("starts");
        process.wait_for("serving", LIMIT).expect("it serves");
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
    // One of which nothing is needed: a guest may have a cache of its own on its disk.
    let served = place.start(place.without_cache(&cache));
    served
        .process
        .wait_for("it begins like a disk cache", LIMIT)
        .expect("told");
    served.stop();
}

/// What the message advises works.
#[test]
fn data_of_a_cache_that_is_overwritten_is_given_up() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    place.left(&cache);
    let junk = vec![1; 8 << 20];
    fs::write(&cache, &junk).expect("written");
    let words = ["may have data that was never written", "drop --lose-dirty"];
    assert_fails(place.without_cache(&image), &words);
    let (code, said) = place.cache_command(&["drop", text(&cache)]);
    assert!(code == Some(2) && said.contains("no cache of Larder's"), "{said}");
    let (code, said) = place.cache_command(&["drop", "--lose-dirty", text(&cache)]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("there was no cache any more"), "{said}");
    assert!(fs::read(&cache).expect("is there") == junk, "it is somebody else's");
    place.start(place.without_cache(&image)).stop();
}
