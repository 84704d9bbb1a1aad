//! Replacement of a cache, and return of a failed cache, while its disk is used.

use std::path::Path;

use larder_bench::campaign::process::Process;
use serde_json::json;

use crate::failing::Fast;
use crate::served::verify;
use crate::support::{TEST_TIMEOUT, run_tool, start_io_without_flush, wait_until_listening};
use crate::write_back::{READS, WRITE_BACK, WRITES, fails, killed};
use crate::{MIB, Place, Served, qemu_io, text};

/// Runs `larder disk cache replace` on a cache that a server uses; returns the exit status and the output.
fn replace(place: &Place, served: &Served, cache: &str, options: &[&str]) -> (Option<i32>, String) {
    let control = text(&served.control);
    place.cache_command(&[&["replace", cache, "--control", control], options].concat())
}

fn replaced(place: &Place, served: &Served, cache: &str, options: &[&str]) {
    let (code, said) = replace(place, served, cache, options);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(served.cache()["state"], json!("works"));
}

/// Asserts that the cache is not replaced, and that all of `words` are reported.
fn not_replaced(place: &Place, served: &Served, cache: &str, options: &[&str], words: &[&str]) {
    let (code, said) = replace(place, served, cache, options);
    assert_eq!(code, Some(2), "{said}");
    for word in words {
        assert!(said.contains(word), "{options:?} says nothing of '{word}': {said}");
    }
}

fn file_of(served: &Served) -> String {
    served.cache()["file"].as_str().expect("a text").to_owned()
}

#[test]
fn caches_are_replaced_under_load() {
    for mode in ["wt", "wb"] {
        let place = Place::new();
        let image = place.image("disk.raw", 64);
        let caches = [place.path("one"), place.path("two")];
        let options = ["--cache-size", "16M", "--cache-line", "8k", "--cache-mode", mode];
        let served = place.serve(&image, &caches[0], &options);
        let mut fio = Process::start(verify(&served.uri, &["--loops=3"])).expect("fio; testbed/setup.sh installs it");
        for turn in 0..12 {
            let (old, new) = (&caches[turn % 2], &caches[(turn + 1) % 2]);
            replaced(&place, &served, text(old), &["--with", text(new)]);
            let now = served.cache();
            assert_eq!((&now["file"], &now["mode"]), (&json!(text(new)), &json!(mode)));
            assert_eq!((&now["size"], &now["line_size"]), (&json!(16 * MIB), &json!(8192)));
            // The old cache is closed, and belongs to no disk.
            let info = place.info(old);
            assert_eq!((&info["closed"], &info["in_use"]), (&json!(true), &json!(false)), "{info}");
            assert_eq!(info["dirty"], json!(0), "{info}");
        }
        let status = fio.wait(TEST_TIMEOUT).expect("ends");
        assert!(status.success(), "{}", fio.output());
        served.stop();
        // Both caches can be used again with right data.
        for cache in &caches {
            let served = place.serve(&image, cache, &[]);
            assert_eq!(file_of(&served), text(cache));
            served.read_all(64);
            run_tool("qemu-img", &["compare", "-U", "-f", "raw", "-F", "raw", &served.uri, text(&image)]);
            served.stop();
        }
    }
}

#[test]
fn failed_cache_returns_when_device_works() {
    for is_restarted in [false, true] {
        let place = Place::new();
        let image = place.image("disk.raw", 16);
        let fast = Fast::start(&place);
        let serve = || place.start(place.serve_command(&image, &fast.uri, &["--cache-mode", "wb"]));
        let mut served = serve();
        not_replaced(&place, &served, &fast.uri, &[], &["it works", "--with"]);
        served.io(&["write -P 9 1M 64k", "flush"]);
        fast.fail();
        fails(&served, "read 1M 4k");
        served.io(&["write -P 8 2M 64k", "read -P 8 2M 64k", "write -P 6 1028k 4k"]);
        let new = place.path("new");
        for _ in 0..2 {
            not_replaced(&place, &served, &fast.uri, &[], &["Input/output error"]);
            let with = ["--with", text(&new)];
            not_replaced(&place, &served, &fast.uri, &with, &["never written to the disk", "--lose-dirty"]);
            assert!(!new.exists());
        }
        fails(&served, "read 1M 4k");
        served.io(&["read -P 7 0 1M", "read -P 6 1028k 4k", "write -P 3 1036k 4k"]);
        match is_restarted {
            false => {
                fast.work();
                replaced(&place, &served, &fast.uri, &[]);
            }
            true => {
                served.kill();
                fast.work();
                served = serve();
            }
        }
        let reads = [
            "read -P 7 0 1M",
            "read -P 9 1M 4k",
            "read -P 6 1028k 4k",
            "read -P 9 1032k 4k",
            "read -P 3 1036k 4k",
            "read -P 9 1040k 48k",
            "read -P 8 2M 64k",
        ];
        served.io(&reads);
        served.io(&["write -P 5 3M 64k", "read -P 5 3M 64k"]);
        served.stop();
        qemu_io("raw", text(&image), &reads);
        qemu_io("raw", text(&image), &["read -P 5 3M 64k"]);
    }
}

#[test]
fn dirty_failed_cache_needs_lose_dirty() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let fast = Fast::start(&place);
    let served = place.start(place.serve_command(&image, &fast.uri, &["--cache-mode", "wb"]));
    served.io(&["write -P 9 1M 64k", "flush"]);
    fast.fail();
    fails(&served, "read 1M 4k");
    let new = place.path("new");
    let with = ["--with", text(&new), "--size", "4M", "--lose-dirty"];
    replaced(&place, &served, &fast.uri, &with);
    assert_eq!(served.count("size"), 4 * MIB);
    served.io(&["read -P 7 0 2M", "write -P 4 1M 4k"]);
    served.kill();
    fast.work();
    // The old cache is neither trusted nor opened any more.
    let served = place.start(place.serve_command(&image, &fast.uri, &[]));
    assert_eq!(file_of(&served), text(&new));
    served.io(&["read -P 4 1M 4k", "read -P 7 1028k 1M"]);
    served.stop();
    let (code, said) = place.cache_command(&["drop", text(&new)]);
    assert_eq!(code, Some(0), "{said}");
    place.refused(&image, &fast.uri, &[], &["changed since without it", "drop --lose-dirty"]);
}

/// A server that is started with the replaced cache's path uses the replacement.
#[test]
fn old_cache_option_finds_replacement() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let [one, two, three] = ["one", "two", "three"].map(|name| place.path(name));
    let served = place.serve(&image, &one, &WRITE_BACK);
    replaced(&place, &served, text(&one), &["--with", text(&two)]);
    replaced(&place, &served, text(&two), &["--with", text(&three), "--size", "4M"]);
    served.io(&WRITES);
    served.kill();
    // The device of the replacement is not mounted for a while.
    let away = place.path("away");
    std::fs::rename(&three, &away).expect("moves");
    place.refused(&image, text(&one), &WRITE_BACK, &[text(&three), "is not there now"]);
    std::fs::rename(&away, &three).expect("moves");
    let served = place.serve(&image, &one, &WRITE_BACK);
    assert_eq!(file_of(&served), text(&three));
    served.io(&READS);
    replaced(&place, &served, text(&three), &["--with", text(&one)]);
    served.stop();
    qemu_io("raw", text(&image), &READS);
    let served = place.serve(&image, &one, &[]);
    assert_eq!(file_of(&served), text(&one));
    replaced(&place, &served, text(&one), &["--with", text(&two)]);
    served.stop();
    // The new cache may be named, and after that the old one, too.
    for cache in [&two, &one] {
        let served = place.serve(&image, cache, &[]);
        assert_eq!(file_of(&served), text(cache));
        served.io(&READS);
        served.stop();
    }
    let served = place.serve(&image, &one, &[]);
    replaced(&place, &served, text(&one), &["--with", text(&three)]);
    served.stop();
    std::fs::remove_file(&three).expect("was there");
    let served = place.serve(&image, &one, &[]);
    assert_eq!(file_of(&served), text(&one));
}

#[test]
fn unsuitable_replacement_is_refused() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let (cache, full) = (place.path("cache"), place.image("full", 4));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(2);
    let folder = place.path("");
    let missing = place.path("missing/new");
    let refusals: [(&[&str], &[&str]); 5] = [
        (&[], &["it works", "--with"]),
        (&["--with", text(&cache)], &["it works"]),
        (&["--with", text(&full)], &["not empty"]),
        (&["--with", text(&missing)], &["cannot be created"]),
        (&["--with", text(&folder)], &["directory"]),
    ];
    for (options, words) in refusals {
        not_replaced(&place, &served, text(&cache), options, words);
        assert_eq!(file_of(&served), text(&cache));
    }
    not_replaced(&place, &served, text(&full), &["--with", text(&missing)], &["does not use"]);
    let small = place.path("small");
    not_replaced(&place, &served, text(&cache), &["--with", text(&small), "--size", "8k"], &["too small"]);
    assert!(!small.exists());
    let before = served.count("misses");
    served.read_all(2);
    assert_eq!(served.count("misses"), before);
    let put = |body: &str| {
        let control = text(&served.control);
        let url = "http://localhost/v1/disks/0/cache/replace";
        run_tool("curl", &["-s", "-i", "--unix-socket", control, "-X", "POST", "-d", body, url])
    };
    for (body, words) in [
        ("", "the body must be JSON"),
        ("{\"with\":\"relative\"}", "must be absolute"),
        ("{\"size\":-1}", "the body must be JSON"),
        ("{\"by\":\"/x\"}", "unknown field"),
    ] {
        let said = put(body);
        assert!(said.starts_with("HTTP/1.1 400 ") && said.contains(words), "{body}: {said}");
    }
    let said = put("{}");
    assert!(said.starts_with("HTTP/1.1 409 ") && said.contains("it works"), "{said}");
}

/// A disk is not served without its cache while that cache, whose server was killed, has data that the disk lacks.
#[test]
fn disk_needs_its_dirty_killed_cache() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    place.left(&cache);
    let words = [text(&cache), "larder disk cache flush", "drop --lose-dirty"];
    let without = || place.without_cache(&image);
    let other = place.path("other");
    for options in [&["--cache-size", "4M"][..], &["--cache-size", "4M", "--read-only"]] {
        place.refused(&image, text(&other), options, &words);
        assert!(!Path::new(&other).exists());
    }
    crate::assert_fails(without(), &words);
    let overlay = place.path("overlay.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-b", text(&image), "-F", "raw", text(&overlay)];
    run_tool("qemu-img", &create);
    let before = std::fs::read(&overlay).expect("is read");
    crate::assert_fails(place.without_cache(&overlay), &words);
    assert_eq!(std::fs::read(&overlay).expect("is read"), before);
    let (_, info) = crate::run_command(place.disk_command(&["info", "--backing-chain", text(&overlay)]));
    assert!(info.contains(&format!("cache: {} may have data", text(&cache))), "{info}");
    let (code, said) = place.cache_command(&["flush", text(&cache)]);
    assert_eq!(code, Some(0), "{said}");
    for image in [&image, &overlay] {
        let served = place.start(place.without_cache(image));
        served.io(&READS);
        served.stop();
    }
}

#[test]
fn repair_refuses_image_with_dirty_cache() {
    let place = Place::new();
    let (image, cache) = (place.path("disk.qcow2"), place.path("cache"));
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "16M"]);
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&["write -P 7 0 16M", "flush"]);
    served.io(&WRITES);
    served.kill();
    let words = [text(&cache), "larder disk cache flush", "drop --lose-dirty"];
    for options in [&["--repair"][..], &["--discard-journal"]] {
        crate::assert_fails(place.disk_command(&[&["check", text(&image)], options].concat()), &words);
        crate::assert_fails(place.without_cache(&image), &words);
    }
    let served = place.serve(&image, &cache, &[]);
    served.io(&READS);
    // A server without the cache is refused while the disk is served with it.
    crate::assert_fails(place.without_cache(&image), &["in use"]);
    let mut shared = place.without_cache(&image);
    shared.args(["--read-only", "--share"]);
    crate::assert_fails(shared, &[text(&cache), "is used by its server"]);
    served.stop();
    let (code, said) = crate::support::run_command(place.disk_command(&["check", "--repair", text(&image)]));
    assert_eq!(code, Some(0), "{said}");
    let served = place.start(place.without_cache(&image));
    served.io(&READS);
}

/// After another program has written to the image of a killed server, giving up the journal, which no longer fits the
/// image, does not lose data that only the cache has.
#[test]
fn dirty_cache_survives_discarded_journal() {
    let place = Place::new();
    let (image, cache) = (place.path("disk.qcow2"), place.path("cache"));
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "16M"]);
    let served = place.serve(&image, &cache, &WRITE_BACK);
    served.io(&["write -P 7 0 16M", "flush"]);
    served.cleaned();
    served.io(&["write -P 8 1M 64k", "flush"]);
    let client = start_io_without_flush(&served.uri, &["discard 8M 1M"]);
    served.kill();
    drop(client);
    qemu_io("qcow2", text(&image), &["write -P 9 4M 64k"]);

    place.refused(&image, text(&cache), &WRITE_BACK, &["--discard-journal"]);
    let check = place.disk_command(&["check", "--discard-journal", text(&image)]);
    let (_, said) = crate::support::run_command(check);
    assert!(said.contains("discarded: ") && said.contains(text(&cache)), "{said}");
    crate::assert_fails(place.without_cache(&image), &[text(&cache), "larder disk cache flush"]);
    place.refused(&image, text(&cache), &WRITE_BACK, &["changed since without it", "flush --force"]);
    let (code, said) = place.cache_command(&["flush", "--force", text(&cache)]);
    assert_eq!(code, Some(0), "{said}");
    let served = place.start(place.without_cache(&image));
    served.io(&["read -P 8 1M 64k", "read -P 9 4M 64k", "read -P 7 2M 1M"]);
}

#[test]
fn older_copy_of_cache_is_refused() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    let old = place.path("old");
    std::fs::copy(&cache, &old).expect("copies");
    let served = place.serve(&image, &cache, &[]);
    served.io(&["write -P 3 1M 64k", "flush"]);
    place.noted_lately(&cache);
    served.kill();
    place.refused(&image, text(&old), &[], &["older copy", "was last used with"]);
    let served = place.serve(&image, &cache, &[]);
    served.io(&["read -P 3 1M 64k"]);
}

#[test]
fn returning_cache_serves_no_stale_data() {
    // A raw image has a file with timestamps; an export has none.
    for is_remote in [false, true] {
        let place = Place::new();
        let image = place.image("disk.raw", 16);
        let store = place.socket("store");
        let mut command = larder_bench::campaign::process::killed_with_parent("qemu-nbd");
        command.args(["-f", "raw", "--persistent", "-k", text(&store), text(&image)]);
        let _store = is_remote.then(|| Process::start(command).expect("qemu-nbd"));
        let disk = match is_remote {
            false => image.clone(),
            true => format!("nbd+unix:///?socket={}", text(&store)).into(),
        };
        if is_remote {
            wait_until_listening(&store);
        }
        let [one, two] = ["one", "two"].map(|name| place.path(name));
        let options = ["--cache-size", "8M"];
        place.serve(&disk, &one, &options).stop();
        for begins_with in [&one, &two] {
            let served = place.serve(&disk, begins_with, &options);
            served.warm_up(2);
            if begins_with == &one {
                replaced(&place, &served, text(&one), &["--with", text(&two)]);
            }
            served.io(&["write -P 34 0 2M", "flush"]);
            replaced(&place, &served, text(&two), &["--with", text(&one)]);
            served.io(&["read -P 34 0 2M", "write -P 7 0 2M", "read -P 7 0 2M"]);
            replaced(&place, &served, text(&one), &["--with", text(&two)]);
            served.io(&["read -P 7 0 2M"]);
            served.stop();
        }
    }
}

/// A disk is not served while its killed write-back cache, which has newer data, is missing.
#[test]
fn disk_waits_for_missing_dirty_cache() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    place.left(&cache);
    let away = place.path("away");
    std::fs::rename(&cache, &away).expect("moves");
    let words = [text(&cache), "is not there now", "drop --lose-dirty"];
    let without = || place.without_cache(&image);
    crate::assert_fails(without(), &words);
    for path in [&cache, &place.path("other")] {
        place.refused(&image, text(path), &WRITE_BACK, &words);
        assert!(!path.exists());
    }
    std::fs::rename(&away, &cache).expect("moves");
    // Serving it read-only in between changes nothing.
    for _ in 0..2 {
        let served = place.serve(&image, &cache, &["--read-only"]);
        run_tool("qemu-io", &["-r", "-f", "raw", "-c", "read -P 9 1M 64k", &served.uri]);
        served.stop();
        crate::assert_fails(without(), &[text(&cache), "disk cache flush"]);
    }
    // A copy of the disk is another disk.
    let copy = place.path("copy.raw");
    std::fs::copy(&image, &copy).expect("copies");
    place.refused(&copy, text(&cache), &[], &["belongs to another disk", text(&image)]);
    std::fs::remove_file(&cache).expect("was there");
    let (code, said) = place.cache_command(&["drop", text(&cache)]);
    assert_eq!(code, Some(2), "{said}");
    let (code, said) = place.cache_command(&["drop", "--lose-dirty", text(&cache)]);
    assert_eq!(code, Some(0), "{said}");
    let served = place.start(without());
    served.io(&["read -P 7 0 16M"]);
    served.stop();
}
