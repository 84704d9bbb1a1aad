//! `larder disk cache`.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use serde_json::{Value, json};

use crate::failing::Fast;
use crate::support::require_root;
use crate::write_back::killed;
use crate::{MIB, Place, text};

#[test]
fn info_shows_cache_contents() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M", "--cache-line", "8k", "--cache-mode", "wa"]);
    served.warm_up(2);
    served.settle();
    let in_use = place.info(&cache);
    assert_eq!((&in_use["in_use"], &in_use["occupancy"]), (&json!(true), &Value::Null));
    let (_, said) = place.cache_command(&["info", text(&cache)]);
    assert!(said.contains(&format!("in use by larder, pid {}", served.process.id())), "{said}");
    served.kill();
    // The data is first in the journal only, then, after it was closed, in the pages, then in both.
    for closed in [false, true, true] {
        let told = place.info(&cache);
        for (name, value) in [
            ("file", json!(text(&cache))),
            ("disk", json!(text(&image))),
            ("disk_size", json!(16 * MIB)),
            ("mode", json!("wa")),
            ("size", json!(8 * MIB)),
            ("line_size", json!(8192)),
            ("occupancy", json!(2 * MIB)),
            ("dirty", json!(0)),
            ("may_be_dirty", json!(false)),
            ("closed", json!(closed)),
            ("in_use", json!(false)),
        ] {
            assert_eq!(told[name], value, "{name} in {told}");
        }
        place.serve(&image, &cache, &[]).stop();
    }
    let (code, said) = place.cache_command(&["info", text(&cache)]);
    assert_eq!(code, Some(0));
    for part in ["write-around (wa)", "holds:            2 MiB (", "lines of 8 KiB", "state:            closed"] {
        assert!(said.contains(part), "'{part}' in {said}");
    }
}

#[test]
fn file_without_cache_is_left_alone() {
    let place = Place::new();
    let image = place.image("disk.raw", 4);
    for arguments in [&["info"][..], &["drop"], &["drop", "--lose-dirty"], &["mode"]] {
        let mut all = arguments.to_vec();
        all.push(text(&image));
        if arguments == ["mode"] {
            all.push("wt");
        }
        let (code, said) = place.cache_command(&all);
        assert!(code == Some(2) && said.contains("it is not a Larder cache"), "{all:?}: {said}");
    }
    crate::qemu_io("raw", text(&image), &["read -P 7 0 4M"]);
    let (code, said) = place.cache_command(&["info", text(&place.path("none"))]);
    assert!(code == Some(2) && said.contains("no such file"), "{said}");
}

#[test]
fn cache_in_use_cannot_be_changed() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.read_all(1);
    let (code, said) = place.cache_command(&["drop", text(&cache)]);
    assert!(code == Some(2) && said.contains("stop its server first"), "{said}");
    let (code, said) = place.cache_command(&["mode", text(&cache), "pt"]);
    assert!(code == Some(2) && said.contains("--control PATH"), "{said}");
    let control = text(&served.control);
    let other = place.path("other");
    let (code, said) = place.cache_command(&["mode", text(&other), "pt", "--control", control]);
    assert!(code == Some(2) && said.contains("does not use") && said.contains(text(&cache)), "{said}");
    assert_eq!(served.cache()["mode"], json!("wt"));
    served.warm_up(1);
}

#[test]
fn mode_changes_while_cache_is_unused() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(1);
    served.settle();
    served.kill();
    let (code, said) = place.cache_command(&["mode", text(&cache), "pt"]);
    assert!(code == Some(0) && said.contains("pass-through (pt) from now on"), "{said}");
    assert_eq!(place.info(&cache)["mode"], json!("pt"));
    let served = place.serve(&image, &cache, &[]);
    assert_eq!(served.cache()["mode"], json!("pt"));
    served.stop();
    let (_, said) = place.cache_command(&["mode", text(&cache), "wt"]);
    assert!(said.contains("write-through"), "{said}");
    let served = place.serve(&image, &cache, &[]);
    served.read_all(1);
    assert_eq!(served.count("misses"), 0, "all is there still");
}

/// A cache that cannot be read is dropped only with `--lose-dirty`, since it may have newer data.
#[test]
fn unreadable_cache_drop_needs_lose_dirty() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    place.serve(&image, &cache, &["--cache-size", "8M"]).stop();
    let whole = fs::read(&cache).expect("is there");
    let damage = |change: fn(&mut [u8])| {
        let mut bytes = whole.clone();
        for copy in bytes[..8192].chunks_mut(4096) {
            change(copy);
        }
        fs::write(&cache, bytes).expect("is written");
    };
    for (change, words) in [((|copy| copy[8] = 9) as fn(&mut [u8]), "version 9"), (|copy| copy[100] ^= 1, "damaged")] {
        damage(change);
        place.refused(&image, text(&cache), &[], &[words]);
        let (code, said) = place.cache_command(&["drop", text(&cache)]);
        assert!(code == Some(2) && said.contains(words) && said.contains("--lose-dirty"), "{said}");
        let (code, said) = place.cache_command(&["drop", text(&cache), "--lose-dirty"]);
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(fs::metadata(&cache).expect("is there").len(), 0);
    }
    place.serve(&image, &cache, &["--cache-size", "4M"]).io(&["read -P 7 0 16M"]);
}

#[test]
fn resized_cache_keeps_contents_that_fit() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    for line in ["4k", "32k"] {
        let served = place.serve(&image, &cache, &["--cache-size", "8M", "--cache-line", line]);
        served.warm_up(6);
        served.io(&["write -P 8 1M 512", "write -P 9 1049088 5k"]);
        served.stop();
        let resize = |size: &str| {
            let (code, said) = place.cache_command(&["resize", text(&cache), size]);
            assert_eq!(code, Some(0), "{said}");
            said
        };
        let reads = || {
            let served = place.serve(&image, &cache, &[]);
            served.read_all(6);
            let misses = served.count("misses");
            served.io(&["read -P 7 0 1M", "read -P 8 1M 512", "read -P 9 1049088 5k", "read -P 7 1054208 14M"]);
            served.stop();
            misses
        };
        assert!(resize("24M").contains("(100.0 %) remain"));
        let told = place.info(&cache);
        assert_eq!((&told["size"], &told["closed"]), (&json!(24 * MIB), &json!(true)));
        assert_eq!((&told["occupancy"], reads()), (&json!(6 * MIB), 0));
        resize("24M");
        resize("4M");
        let held = place.info(&cache)["occupancy"].as_u64().expect("a number");
        assert!((2 * MIB..4 * MIB).contains(&held), "{held}");
        // Lines that are filled meanwhile are of the first 6 MiB, too.
        let served = place.serve(&image, &cache, &["--cache-mode", "wa"]);
        served.read_all(6);
        assert!(served.count("hits") > 0 && served.count("misses") > 0);
        served.stop();
        reads();
        let (_, said) = place.cache_command(&["drop", text(&cache)]);
        assert!(said.contains("the cache was removed"), "{said}");
    }
    assert!(!place.path("cache.resize").exists());
}

#[test]
fn impossible_resize_changes_nothing() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(2);
    let refused = |size: &str, words: &str| {
        let (code, said) = place.cache_command(&["resize", text(&cache), size]);
        assert!(code == Some(2) && said.contains(words), "{said}");
    };
    refused("16M", "in use by another process");
    served.settle();
    served.kill();
    refused("16M", "it was not closed");
    place.serve(&image, &cache, &[]).stop();
    refused("20k", "too small");
    refused("4096TiB", "");
    fs::write(place.path("cache.resize"), b"mine").expect("a file");
    refused("16M", "cache.resize, the new cache, cannot be created");
    fs::remove_file(place.path("cache.resize")).expect("stays");
    let (code, said) = place.cache_command(&["resize", text(&image), "16M"]);
    assert!(code == Some(2) && said.contains("it is not a Larder cache"), "{said}");
    let served = place.serve(&image, &cache, &[]);
    served.read_all(2);
    assert_eq!(served.count("misses"), 0);
    let left: Vec<_> = fs::read_dir(place.folder.path()).expect("a folder").flatten().collect();
    assert_eq!(left.len(), 3, "the disk, its cache and the notes: {left:?}");
}

#[test]
fn cache_on_export_has_one_user() {
    let place = Place::new();
    let image = place.image("disk.raw", 16);
    let fast = Fast::start(&place);
    let served = place.start(place.serve_command(&image, &fast.uri, &[]));
    served.warm_up(1);
    let info = || {
        let (_, said) = place.cache_command(&["info", &fast.uri, "--output", "json"]);
        serde_json::from_str::<serde_json::Value>(&said).expect("JSON")
    };
    assert_eq!(info()["in_use"], json!(true));
    for command in [&["drop", &fast.uri][..], &["drop", "--lose-dirty", &fast.uri], &["mode", &fast.uri, "wa"]] {
        let (code, said) = place.cache_command(command);
        assert!(code == Some(2) && said.contains("it is in use by another server"), "{said}");
    }
    served.warm_up(1);
    served.kill();
    assert_eq!(info()["in_use"], json!(false));
    let served = place.start(place.serve_command(&image, &fast.uri, &[]));
    assert_eq!(served.cache()["mode"], json!("wt"));
    served.io(&["read -P 7 0 16M"]);
    served.stop();
    let (code, said) = place.cache_command(&["drop", &fast.uri]);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn killed_resize_leaves_no_obstacle() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    let served = place.serve(&image, &cache, &["--cache-size", "8M"]);
    served.warm_up(2);
    served.stop();
    let beside = place.path("cache.resize");
    let contents = fs::read(&cache).expect("can be read");
    // An incomplete file has a mode of its own.
    for (left, mode) in [(Vec::new(), 0o1600), (vec![0; 1 << 20], 0o1600), (contents, 0o600)] {
        fs::write(&beside, left).expect("can be written");
        fs::set_permissions(&beside, Permissions::from_mode(mode)).expect("is ours");
        for size in ["6M", "8M"] {
            let (code, said) = place.cache_command(&["resize", text(&cache), size]);
            assert_eq!(code, Some(0), "{said}");
            assert!(!beside.exists());
        }
    }
}

/// A file that no resize has left is kept, also if it is empty, or begins with zeros as a disk may.
#[test]
fn resize_keeps_foreign_files() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    place.serve(&image, &cache, &["--cache-size", "8M"]).stop();
    let beside = place.path("cache.resize");
    let mut disk = vec![0; 2 << 20];
    disk.push(1);
    for foreign in [b"mine".to_vec(), Vec::new(), disk] {
        fs::write(&beside, &foreign).expect("can be written");
        let (code, said) = place.cache_command(&["resize", text(&cache), "6M"]);
        assert!(code == Some(2) && said.contains("cannot be created"), "{said}");
        assert!(said.contains("a file of that name exists"), "{said}");
        assert!(fs::read(&beside).expect("is there") == foreign);
    }
}

/// A cache that root resizes is still open to its server's user.
#[test]
fn resize_keeps_owner_and_mode() {
    require_root("cache of another user");
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 16), place.path("cache"));
    place.serve(&image, &cache, &["--cache-size", "8M"]).stop();
    chown(&cache, Some(1234), Some(1235)).expect("we are root");
    fs::set_permissions(&cache, Permissions::from_mode(0o660)).expect("we are root");
    let (code, said) = place.cache_command(&["resize", text(&cache), "6M"]);
    assert_eq!(code, Some(0), "{said}");
    let now = cache.metadata().expect("is there");
    assert_eq!((now.uid(), now.gid(), now.mode() & 0o7777), (1234, 1235, 0o660));
    assert_eq!(now.len(), 6 * MIB);
}

#[test]
fn disk_info_reports_dirty_cache() {
    let place = Place::new();
    let (image, cache) = killed(&place);
    let info = || {
        let mut command = std::process::Command::new(crate::larder_path());
        command.args(["disk", "info", text(&image)]);
        command.env("STATE_DIRECTORY", place.path("state"));
        crate::run_command(command).1
    };
    let told = format!("{} may have data", text(&cache));
    assert!(info().contains(&told), "{}", info());
    place.left(&cache);
    let (code, said) = place.cache_command(&["flush", text(&cache)]);
    assert_eq!(code, Some(0), "{said}");
    assert!(!info().contains(&told), "{}", info());
}
