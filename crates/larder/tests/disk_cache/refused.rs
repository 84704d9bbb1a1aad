//! Caches that are refused, and the messages.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::process::Command;

use crate::support::{LoopDevice, larder_path, mount_tmpfs, write_raid_label};
use crate::{Place, assert_fails, qemu_io, text};

/// A file that cannot become a cache is refused, and not changed.
#[test]
fn unsuitable_cache_file_is_left_alone() {
    let place = Place::new();
    let image = place.image("disk.raw", 8);
    let cache = place.path("cache");
    place.refused(&image, text(&cache), &[], &["cache: no such file", "cache-size"]);
    assert!(!cache.exists());
    place.refused(&image, text(&cache), &["--cache-size", "20k"], &["too small", "lines of 4 KiB"]);
    assert!(!cache.exists(), "nothing is left behind");
    // A size that no file system has room for.
    place.refused(
        &image,
        text(&cache),
        &["--cache-size", "8388607T"],
        &[text(&cache), "its file system does not support files of 8388607 TiB", "smaller cache-size"],
    );
    assert!(!cache.exists(), "nothing is left behind");
    let limited = place.serve_command(&image, text(&cache), &["--cache-size", "64M"]);
    let mut command = Command::new("prlimit");
    command.arg("--fsize=16777216").arg(limited.get_program()).args(limited.get_args());
    command.envs(limited.get_envs().filter_map(|(name, value)| Some((name, value?))));
    assert_fails(command, &["RLIMIT_FSIZE", "smaller cache-size"]);
    assert!(!cache.exists(), "nothing is left behind");
    place.refused(&image, text(&place.path("no/cache")), &["--cache-size", "4M"], &["cannot be created"]);
    place.refused(&image, text(place.folder.path()), &["--cache-size", "4M"], &["directory"]);
    fs::write(&cache, []).expect("a file");
    place.refused(&image, text(&cache), &[], &["it is empty", "cache-size"]);
    let mut garbage = vec![0; 4 << 20];
    garbage[(1 << 20) - 1] = 1;
    fs::write(&cache, &garbage).expect("a file");
    for size in [&[][..], &["--cache-size", "8M"]] {
        place.refused(&image, text(&cache), size, &["not a cache, and not empty", "remove it"]);
    }
    assert!(fs::read(&cache).expect("is there") == garbage);
    // The disk itself is refused as its cache.
    place.refused(&image, text(&image), &[], &["already in use by this process"]);
    qemu_io("raw", text(&image), &["read -P 7 0 8M"]);
    // Only the first MiB identifies a cache.
    garbage.swap((1 << 20) - 1, 1 << 20);
    fs::write(&cache, &garbage).expect("a file");
    place.refused(&image, text(&cache), &["--cache-size", "8M"], &["it has 4", "not 8", "disk cache resize"]);
    let served = place.serve(&image, &cache, &["--cache-size", "4M"]);
    served.io(&["read -P 7 0 8M"]);
    let said = served.stop();
    assert!(said.contains(&format!("creating a cache for it on {}, which begins with zeros", text(&cache))), "{said}");
    let said = place.serve(&image, &cache, &[]).stop();
    assert!(!said.contains("creating a cache"), "{said}");
}

/// A cache in use is refused to other servers, and a closed one to other disks.
#[test]
fn cache_serves_only_its_own_disk() {
    let place = Place::new();
    let (image, other) = (place.image("disk.raw", 8), place.image("other.raw", 8));
    let cache = place.path("cache");
    let served = place.serve(&image, &cache, &["--cache-size", "4M", "--cache-line", "8k"]);
    served.io(&["write -P 8 0 1M"]);
    let busy = format!("in use by another process (larder, pid {})", served.process.id());
    let elsewhere = format!("nbd+unix:///?socket={}", text(&place.socket("m")));
    let mut second = crate::support::disk_serve_command(&[text(&other), "--nbd", &elsewhere, "--cache", text(&cache)]);
    second.env("STATE_DIRECTORY", place.path("state"));
    assert_fails(second, &["cache of", "other.raw", &busy]);
    served.stop();

    place.refused(&other, text(&cache), &[], &["belongs to another disk", "disk.raw", "larder disk cache drop"]);
    place.refused(&image, text(&cache), &["--cache-size", "8M"], &["it has 4", "not 8"]);
    place.refused(&image, text(&cache), &["--cache-line", "4k"], &["lines have 8", "not 4"]);
    place.refused(
        &image,
        text(&cache),
        &["--format", "qcow2"],
        &["not a qcow2 image (it begins with the bytes 08 08 08 08)"],
    );
    // A copy under the disk's old name is another disk; the disk under a new name is the same.
    fs::rename(&image, place.path("moved.raw")).expect("moves");
    fs::copy(place.path("moved.raw"), &image).expect("copies");
    let words = ["belongs to another disk", "an earlier file of this name"];
    place.refused(&image, text(&cache), &[], &words);
    let served = place.serve(&place.path("moved.raw"), &cache, &[]);
    served.io(&["read -P 8 0 1M"]);
    assert!(served.count("hits") > 0);
    served.stop();

    let (code, said) = place.cache_command(&["drop", text(&cache)]);
    assert_eq!(code, Some(0), "{said}");
    let served = place.serve(&other, &cache, &["--cache-size", "4M"]);
    served.io(&["read -P 7 0 8M"]);
}

#[test]
fn cache_without_space_leaves_no_file() {
    let place = Place::new();
    let image = place.image("disk.raw", 8);
    let small = mount_tmpfs(&place.path("small"), "size=6M");
    let cache = small.0.join("cache");
    place.refused(&image, text(&cache), &["--cache-size", "16M"], &["no space for 16", "smaller cache-size"]);
    assert!(!cache.exists());
    fs::write(&cache, []).expect("a file");
    place.refused(&image, text(&cache), &["--cache-size", "16M"], &["no space for 16"]);
    assert_eq!(cache.metadata().expect("is there").len(), 0);
    place.serve(&image, &cache, &["--cache-size", "4M"]).stop();
}

#[test]
fn conflicting_options_are_refused() {
    let place = Place::new();
    let (image, cache) = (place.image("disk.raw", 8), place.path("cache"));
    place.refused(
        &image,
        text(&cache),
        &["--cache-size", "4M", "--share"],
        &["--cache cannot be combined with share", "stale data"],
    );
    for (option, value, words) in [
        ("--cache-size", "4M", "--cache-size has no effect without cache"),
        ("--cache-line", "4k", "--cache-line has no effect without cache"),
        ("--cache-mode", "wt", "--cache-mode has no effect without cache"),
        ("--cache-line", "5k", "a power of two from 4 KiB to 64 KiB"),
        ("--cache-mode", "writethrough", "wt (write-through), wb (write-back), wa (write-around), pt (pass-through)"),
    ] {
        let command =
            crate::support::disk_serve_command(&[text(&image), "--nbd", "nbd+unix:///?socket=/n", option, value]);
        assert_fails(command, &[words]);
    }
}

/// `larder run` detects problems of a cache before it starts anything.
#[test]
fn run_checks_caches_before_start() {
    let place = Place::new();
    let (image, other) = (place.image("disk.raw", 8), place.image("other.raw", 8));
    let cache = place.path("cache");
    let run = |disks: &[String], options: &[&str]| {
        let mut command = Command::new(larder_path());
        command.arg("run").args(options);
        for disk in disks {
            command.args(["--disk", disk]);
        }
        command.args(["--", "qemu-system-x86_64", "-m", "64"]);
        command
    };
    let disk = |image, more: &str| format!("{},cache={}{more}", text(image), text(&cache));
    assert_fails(run(&[disk(&image, "")], &[]), &["no such file", "cache-size"]);
    assert_fails(run(&[disk(&image, ",cache-size=4M,share=on")], &[]), &["cache cannot be combined with share"]);
    let twice = [disk(&image, ",cache-size=4M"), disk(&other, ",cache-size=4M")];
    assert_fails(run(&twice, &[]), &["have the same cache="]);
    let (code, said) =
        crate::support::run_command(run(&[disk(&image, ",cache-size=4M,cache-mode=wa")], &["--dry-run"]));
    assert_eq!(code, Some(0), "{said}");
    let wanted = format!("--cache={} --cache-size 4194304 --cache-mode wa", text(&cache));
    assert!(said.contains(&wanted), "{said}");
    assert!(!cache.exists(), "nothing is made");
    place.serve(&other, &cache, &["--cache-size", "4M"]).stop();
    assert_fails(run(&[disk(&image, "")], &[]), &["it belongs to another disk", text(&other)]);
}

/// A claimed device, or one that a label at its end marks as a RAID member, is not turned into a cache, nor changed.
#[test]
fn device_in_use_becomes_no_cache() {
    let place = Place::new();
    let image = place.image("disk.raw", 8);
    let file = place.path("ssd");
    let sparse = fs::File::create(&file).and_then(|file| file.set_len(64 << 20));
    sparse.expect("a file");
    let device = LoopDevice::new(&file, 512);
    let claim = || {
        let mut options = fs::File::options();
        options.read(true).custom_flags(libc::O_EXCL).open(&device.0)
    };
    let claimed = claim().expect("nothing else uses it");
    place.refused(&image, text(&device.0), &[], &["is claimed by another program"]);
    assert_eq!(file.metadata().expect("the file").blocks(), 0, "something was written");
    drop(claimed);
    let served = place.serve(&image, &device.0, &[]);
    claim().expect_err("the cache is on it");
    served.stop();
    let (code, said) = place.cache_command(&["drop", text(&device.0)]);
    assert_eq!(code, Some(0), "{said}");
    drop(device);
    fs::File::create(&file).and_then(|file| file.set_len(64 << 20)).expect("a file");
    write_raid_label(&file);
    let before = fs::read(&file).expect("the file");
    let device = LoopDevice::new(&file, 512);
    for cache in [&device.0, &file] {
        place.refused(&image, text(cache), &[], &["linux_raid_member is on it", "not overwritten"]);
    }
    assert!(fs::read(&file).expect("the file") == before, "it was changed");
}
