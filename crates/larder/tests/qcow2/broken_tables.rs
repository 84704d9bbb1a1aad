//! Images with invalid table entries, which are detected only in use: the guest gets an error, the log names the
//! entry and the problem, the rest of the disk works, and nothing is written where it must not be.

use std::fs;
use std::path::{Path, PathBuf};

use larder_bench::campaign::Random;
use tempfile::TempDir;

use crate::bad_input::{Bytes, sound};
use crate::corpus::images;
use crate::data_file::check;
use crate::operations::commands;
use crate::served::{Health, Served, health, qemu_io, qemu_io_with, refused, text};
use crate::spec::{Kind, Spec};
use crate::support::{TEST_TIMEOUT, run_tool, temp_dir_on_tmpfs};

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

fn broken(folder: &TempDir, change: impl FnOnce(&mut Bytes)) -> PathBuf {
    let image = sound(folder, "broken.qcow2");
    let mut bytes = Bytes::of(&image);
    change(&mut bytes);
    fs::write(&image, &bytes.0).expect("writes");
    image
}

/// Asserts that the disk's first cluster can be neither read nor written, that the image is unchanged, that the
/// second cluster works, and that the log contains all of `says`.
fn only_the_first_cluster_fails(image: &Path, says: &[&str]) {
    let before = fs::read(image).expect("reads");
    for options in [&["--read-only"][..], &[]] {
        let served = Served::new(image, options);
        if options.is_empty() {
            for command in ["read 0 4k", "read 60k 8k", "write -P 9 0 64k", "write -P 9 8k 4k"] {
                let (success, said) = served.try_io(&[command]);
                assert!(!success && said.contains("error"), "{command}: {said}");
            }
            served.io(&["read -P 17 64k 64k", "write -P 17 100k 4k", "flush"]);
        } else {
            let into = image.with_extension("dump");
            let output = std::process::Command::new("qemu-img")
                .args(["convert", "-f", "raw", "-O", "raw", &served.uri(), text(&into)])
                .output()
                .expect("qemu-img is there");
            assert!(!output.status.success(), "{}", image.display());
        }
        let log = served.stop();
        for text in says.iter().chain(&[text(image), "larder disk check"]) {
            assert!(log.contains(text), "'{text}' is missing: {log}");
        }
    }
    let after = fs::read(image).expect("reads");
    let same = after.iter().zip(&before).position(|(one, other)| one != other);
    assert_eq!(same, None, "the image has changed");
}

#[test]
fn invalid_l2_entry_is_an_error() {
    let folder = temp_dir_on_tmpfs();
    for (entry, says) in [
        (COPIED | 0x5_0200, "0x50200, which is no multiple of the cluster size"),
        (COPIED | 1 << 40, "0x10000000000, past the end of the file"),
        (COPIED | 0x00ff_ffff_ffff_0000, "0xffffffffff0000, past the end of the file"),
    ] {
        let image = broken(&folder, |bytes| {
            let at = bytes.l2();
            bytes.put_u64(at, entry);
        });
        only_the_first_cluster_fails(&image, &["entry 0 of L2 table 0", says]);
    }
}

/// The zero flag in an image of version 2 is an error, as in QEMU: version 2 has no zero clusters, so the entry may
/// mean zeros, the old data, or the backing file's.
#[test]
fn version_2_zero_flag_fails() {
    for keeps_host in [false, true] {
        let folder = temp_dir_on_tmpfs();
        let (image, base) = (folder.path().join("old.qcow2"), folder.path().join("base.raw"));
        fs::write(&base, vec![66; 8 << 20]).expect("writes");
        let backed = ["create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-b", text(&base), "-F", "raw"];
        run_tool("qemu-img", &[&backed[..], &[text(&image)]].concat());
        let (success, said) = qemu_io("qcow2", text(&image), &["write -P 17 0 128k"]);
        assert!(success, "{said}");
        let mut bytes = Bytes::of(&image);
        let at = bytes.l2();
        let host = if keeps_host { bytes.u64_at(at) } else { 0 };
        bytes.put_u64(at, host | 1);
        fs::write(&image, &bytes.0).expect("writes");
        let (success, said) = qemu_io_with(&["-r"], "qcow2", text(&image), &["read 0 4k"]);
        assert!(!success, "QEMU reads it: {said}");
        only_the_first_cluster_fails(&image, &["entry 0 of L2 table 0", "has the zero flag, which version 2"]);
        for options in [&[][..], &["--repair"]] {
            let (code, said) = check(&image, options);
            assert_eq!(code, Some(1), "{said}");
            let says = "error: the entry of guest offset 0x0 in the active L1 table";
            assert!(said.contains(says) && said.contains("has the zero flag"), "{said}");
        }
    }
}

#[test]
fn data_entry_into_metadata_is_refused() {
    let folder = temp_dir_on_tmpfs();
    let template = Bytes::of(&sound(&folder, "template.qcow2"));
    for place in [template.refcount_table(), template.refcount_block(), template.l1(), template.l2()] {
        let image = broken(&folder, |bytes| {
            let at = bytes.l2();
            bytes.put_u64(at, COPIED | place);
        });
        let before = fs::read(&image).expect("reads");
        let served = Served::new(&image, &[]);
        for command in ["read 0 4k", "write -P 9 0 64k", "write -z 0 64k", "discard 0 64k"] {
            let _ = served.try_io(&[command, "flush"]);
        }
        let (success, said) = served.try_io(&["write -P 9 4k 4k"]);
        assert!(!success, "{place:#x}: {said}");
        served.io(&["read -P 17 64k 64k", "write -P 17 64k 4k"]);
        let log = served.stop();
        assert!(log.contains(&format!("{place:#x}, which holds metadata")) && log.contains(text(&image)), "{log}");
        assert!(fs::read(&image).expect("reads") == before, "{place:#x} was changed");
    }
}

#[test]
fn table_overlapping_metadata_is_not_used() {
    let folder = temp_dir_on_tmpfs();
    let template = Bytes::of(&sound(&folder, "template.qcow2"));
    for place in [template.refcount_table(), template.refcount_block(), template.l1()] {
        let image = broken(&folder, |bytes| {
            let at = bytes.l1();
            bytes.put_u64(at, COPIED | place);
        });
        let before = fs::read(&image).expect("reads");
        let said = refused(&image, &[]);
        assert!(said.contains("overlap"), "{said}");
        assert!(fs::read(&image).expect("reads") == before, "{place:#x} was changed");
    }
    // A refcount block overlaps other metadata.
    for place in [template.l1(), template.l2(), template.refcount_table()] {
        let image = broken(&folder, |bytes| {
            let at = bytes.refcount_table();
            bytes.put_u64(at, place);
        });
        let before = fs::read(&image).expect("reads");
        let said = refused(&image, &[]);
        assert!(said.contains("overlap"), "{said}");
        assert!(fs::read(&image).expect("reads") == before, "{place:#x} was changed");
    }
}

/// Asserts that the disk cannot be read completely.
fn is_not_read_whole(image: &Path, says: &str) {
    let served = Served::new(image, &["--read-only"]);
    let into = image.with_extension("dump");
    let output = std::process::Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "raw", &served.uri(), text(&into)])
        .output()
        .expect("qemu-img is there");
    let log = served.stop();
    assert!(!output.status.success(), "{}: {log}", image.display());
    assert!(log.contains(says), "'{says}' is missing: {log}");
}

/// A truncated image is refused for writing until it is repaired; a read-only server fails reads of the missing part.
#[test]
fn truncated_image_is_never_written() {
    let folder = temp_dir_on_tmpfs();
    let template = Bytes::of(&sound(&folder, "template.qcow2"));
    let data = template.u64_at(template.l2()) & !COPIED;
    for (end, lost, says) in [
        (template.l2(), 1, "L1 entry 0 points to 0x40000, which is past the end of the file"),
        (data, 2, "past the end of the file"),
        (data + (64 << 10), 1, "entry 1 of L2 table 0"),
    ] {
        let image = broken(&folder, |bytes| bytes.0.truncate(end as usize));
        let before = fs::read(&image).expect("reads");
        let said = refused(&image, &[]);
        assert!(
            said.contains(&format!("{lost} entries")) && said.contains("truncated") && said.contains("--read-only"),
            "{said}"
        );
        assert!(fs::read(&image).expect("reads") == before, "the image has changed");
        is_not_read_whole(&image, says);
        // A repair gives the lost data up at the user's request.
        let repaired = larder_check(&image, &["--repair"]);
        assert!(repaired.contains("past the end of the file"), "{repaired}");
        let served = Served::new(&image, &[]);
        let kept = 2 - if end == template.l2() { 2 } else { lost };
        served.io(&[
            format!("read -P 17 0 {}k", 64 * kept),
            format!("read -P 0 {}k {}k", 64 * kept, 64 * (2 - kept)),
            "write -P 3 1M 1M".to_owned(),
        ]);
        served.stop();
        // The lost space may be counted as used.
        health(&image);
    }
}

fn larder_check(image: &Path, options: &[&str]) -> String {
    let mut command = std::process::Command::new(crate::support::larder_path());
    command.args(["disk", "check", text(image)]).args(options);
    let (code, said) = crate::support::run_command(command);
    assert!(matches!(code, Some(0 | 1)), "{said}");
    said
}

/// Images whose file is shorter than its clusters for a legitimate reason are served.
#[test]
fn legitimately_short_image_files_work() {
    let folder = temp_dir_on_tmpfs();
    let image = folder.path().join("image.qcow2");
    for options in [
        "preallocation=metadata",
        "preallocation=metadata,extended_l2=on",
        "preallocation=falloc,cluster_size=2M",
        "preallocation=metadata,cluster_size=512",
        "preallocation=metadata,compat=0.10",
    ] {
        run_tool("qemu-img", &["create", "-f", "qcow2", "-o", options, text(&image), "10M"]);
        let served = Served::new(&image, &[]);
        served.io(&["read -P 0 0 10M", "write -P 5 9M 1M", "read -P 5 9M 1M"]);
        served.stop();
        assert_eq!(health(&image), Health::Clean, "{options}");
    }
    // The last cluster is incomplete.
    let image = broken(&folder, |bytes| {
        let len = bytes.0.len() - (60 << 10);
        bytes.0.truncate(len);
    });
    let served = Served::new(&image, &[]);
    served.io(&["read -P 17 0 68k", "read -P 0 68k 60k", "write -P 1 1M 1M", "read -P 0 68k 60k"]);
    served.stop();
    assert_eq!(health(&image), Health::Clean);
    // Space after the end that was allocated before a power loss, and that no entry points to.
    let image = broken(&folder, |bytes| {
        let block = bytes.refcount_block();
        let clusters = bytes.0.len() as u64 / (64 << 10);
        bytes.put(block + 2 * clusters, &[0, 1, 0, 1]);
    });
    let served = Served::new(&image, &[]);
    served.io(&["write -P 1 1M 4M", "read -P 1 1M 4M", "read -P 17 0 128k"]);
    served.stop();
    assert_eq!(health(&image), Health::Leaks);
}

/// New clusters are not placed where an existing entry points past the end of the file.
#[test]
fn new_clusters_avoid_dangling_entry() {
    let folder = temp_dir_on_tmpfs();
    for cluster_ahead in [0, 3, 100] {
        let image = broken(&folder, |bytes| {
            let at = bytes.l2();
            let end = bytes.0.len() as u64;
            bytes.put_u64(at, COPIED | (end + cluster_ahead * (64 << 10)));
        });
        let served = Served::new(&image, &[]);
        assert!(!served.try_io(&["read 0 4k"]).0, "it is read");
        // Writes until the file would have to grow to that offset, or the disk is full.
        let mut written = 0;
        for at in 2..128u64 {
            let (success, said) = served.try_io(&[format!("write -P 9 {}k 64k", at * 64)]);
            if !success {
                assert!(said.contains("error"), "{said}");
                break;
            }
            written += 1;
        }
        // Space is allocated several clusters at a time.
        assert!(written <= cluster_ahead, "{written} clusters found room before {cluster_ahead}");
        for command in ["read 0 4k", "write -P 1 0 64k"] {
            assert!(!served.try_io(&[command]).0, "{command}");
        }
        served.io(&["read -P 17 64k 64k", "flush"]);
        let log = served.stop();
        assert!(log.contains("past the end of the file"), "{log}");
        let bytes = Bytes::of(&image);
        assert_ne!(bytes.u64_at(bytes.l2()) & COPIED, 0, "the entry has changed");
    }
}

#[test]
fn invalid_refcount_block_is_an_error() {
    let folder = temp_dir_on_tmpfs();
    for place in [1 << 40, 0x9_0200, 0x00ff_ffff_ffff_0000] {
        let image = broken(&folder, |bytes| {
            let at = bytes.refcount_table();
            bytes.put_u64(at, place);
        });
        let served = Served::new(&image, &[]);
        served.io(&["read -P 17 0 128k", "write -P 17 0 4k"]);
        let (success, said) = served.try_io(&["write -P 1 1M 4k"]);
        assert!(!success, "{said}");
        let log = served.stop();
        assert!(log.contains(&format!("{place:#x}")) && log.contains(text(&image)), "{log}");
    }
}

#[test]
fn metadata_marked_free_is_not_overwritten() {
    let folder = temp_dir_on_tmpfs();
    let image = broken(&folder, |bytes| {
        let at = bytes.refcount_block();
        bytes.put(at, &[0; 64]);
    });
    let before = fs::read(&image).expect("reads");
    let served = Served::new(&image, &[]);
    let (success, said) = served.try_io(&["write -P 1 1M 4k"]);
    assert!(!success, "{said}");
    let log = served.stop();
    assert!(log.contains("holds metadata but its refcount is 0"), "{log}");
    let after = fs::read(&image).expect("reads");
    assert!(after[..before.len()] == before, "the image has changed");
}

#[test]
fn broken_compressed_cluster_is_an_error() {
    let folder = temp_dir_on_tmpfs();
    for compression in ["zlib", "zstd"] {
        let raw = folder.path().join("raw");
        fs::write(&raw, [[17; 64 << 10], [18; 64 << 10]].concat()).expect("writes");
        let image = folder.path().join("compressed.qcow2");
        let options = format!("compression_type={compression}");
        run_tool("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, text(&raw), text(&image)]);
        let sound = fs::read(&image).expect("reads");
        let entry = Bytes::of(&image).u64_at(Bytes::of(&image).l2());
        assert_ne!(entry & COMPRESSED, 0);
        let at = entry & ((1 << 54) - 1);
        for (change, says) in [
            (&(|bytes: &mut Bytes| bytes.put(at, &[0xff; 16])) as &dyn Fn(&mut Bytes), "cannot be decompressed"),
            (
                &|bytes: &mut Bytes| {
                    let l2 = bytes.l2();
                    bytes.put_u64(l2, COMPRESSED | 1 << 50);
                },
                "past the end of the file",
            ),
        ] {
            let mut bytes = Bytes(sound.clone());
            change(&mut bytes);
            fs::write(&image, &bytes.0).expect("writes");
            let served = Served::new(&image, &[]);
            let (success, said) = served.try_io(&["read 0 4k"]);
            assert!(!success, "{said}");
            let (success, said) = served.try_io(&["write -P 1 0 4k"]);
            assert!(!success, "what the guest did not write would be lost: {said}");
            served.io(&["read -P 18 64k 64k", "write -P 18 64k 4k", "read -P 18 64k 64k"]);
            let log = served.stop();
            assert!(log.contains(says) && log.contains("guest offset 0x0") && log.contains(text(&image)), "{log}");
        }
    }
}

#[test]
fn writing_repairs_broken_compressed_cluster() {
    let folder = temp_dir_on_tmpfs();
    let raw = folder.path().join("raw");
    fs::write(&raw, [17; 64 << 10]).expect("writes");
    let image = folder.path().join("compressed.qcow2");
    run_tool("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", text(&raw), text(&image)]);
    let mut bytes = Bytes::of(&image);
    let at = bytes.u64_at(bytes.l2()) & ((1 << 54) - 1);
    bytes.put(at, &[0xff; 16]);
    fs::write(&image, &bytes.0).expect("writes");
    let served = Served::new(&image, &[]);
    served.io(&["write -P 3 0 64k", "read -P 3 0 64k"]);
    served.stop();
    assert_eq!(health(&image), Health::Clean);
}

/// Number of images with random damage.
const DAMAGED: u64 = 60;

#[test]
fn random_damage_never_panics_or_hangs() {
    for seed in 0..images(DAMAGED) {
        let mut random = Random::new(5_000_000 + seed);
        let folder = temp_dir_on_tmpfs();
        let kinds = [Kind::Plain, Kind::SmallClusters, Kind::ExtendedL2, Kind::Snapshots, Kind::Compressed];
        let kind = kinds[random.below(kinds.len() as u64) as usize];
        let made = Spec::new(kind, &mut random).make(folder.path(), &mut random);
        let mut bytes = Bytes::of(&made.image);
        let cluster_len = 1u64 << u32::from(bytes.0[23]);
        let tables = [0, bytes.l1(), bytes.refcount_table(), bytes.refcount_block(), bytes.l2(), bytes.l2()];
        for _ in 0..1 + random.below(4) {
            let table = tables[random.below(tables.len() as u64) as usize];
            let most = if table == 0 { 120 } else { cluster_len.min(256) };
            let at = table + random.below(most);
            let bit = 1 << random.below(8);
            if let Some(byte) = bytes.0.get_mut(at as usize) {
                *byte ^= bit;
            }
        }
        fs::write(&made.image, &bytes.0).expect("writes");
        // The image may be served or refused.
        let mut served = Served::unchecked(&made.image, &[]);
        if served.process.wait_for("serving", TEST_TIMEOUT).is_ok() {
            let _ = served.try_io(&commands(&made.disk.operations(&mut random, 30)));
            served.process.signal(libc::SIGTERM);
        }
        let status = served.process.wait(TEST_TIMEOUT).expect("ends");
        assert!(matches!(status.code(), Some(0 | 2)), "seed {seed}: {status}: {}", served.process.output());
    }
}
