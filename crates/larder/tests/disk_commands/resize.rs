//! `larder disk resize`: the disk is larger, keeps its data, and reads as zeros in the new part.

use std::fs;
use std::path::Path;

use crate::support::{
    LoopDevice, fill_file_system as fill_up, mount_tmpfs, run_tool, temp_dir_on_disk, temp_dir_on_tmpfs,
};
use crate::{larder, larder_json, qemu_img, text_of};

const MIB: u64 = 1 << 20;

fn create(path: &Path, options: &[&str], size: &str) {
    run_tool("qemu-img", &[&["create", "-q"], options, &[text_of(path), size]].concat());
}

fn fill(path: &Path, format: &str, start: &str, len: &str) {
    let write = format!("write -P 0x5a {start} {len}");
    run_tool("qemu-io", &["-f", format, "-c", &write, text_of(path)]);
}

fn resize(path: &Path, size: &str) -> (i32, String) {
    let (code, out, err) = larder_with(path, size, &[]);
    assert!(!err.contains("read ahead"), "nothing was: {err}");
    (code, out + &err)
}

fn larder_with(path: &Path, size: &str, more: &[&str]) -> (i32, String, String) {
    let arguments = [&["disk", "resize"], more, &[text_of(path)]].concat();
    larder(&arguments, Path::new(size))
}

/// Asserts that `qemu-img check` finds no errors, and that the disk has `full` bytes of a pattern, then zeros up to
/// `size`.
fn assert_holds(path: &Path, format: &str, full: u64, size: u64) {
    if format == "qcow2" {
        let (code, said, errors) = qemu_img(&["check", "-f", "qcow2", text_of(path)]);
        assert_eq!(code, 0, "{said} {errors}");
    }
    let (_, info) = larder_json(&["disk", "info"], path);
    assert_eq!(info["virtual-size"], size, "{info:#}");
    let (_, said, _) = qemu_img(&["info", "--output=json", "-f", format, text_of(path)]);
    assert!(said.contains(&format!("\"virtual-size\": {size},")), "{said}");
    let old = format!("read -P 0x5a 0 {full}");
    let new = format!("read -P 0 {full} {}", size - full);
    for read in [old, new] {
        let said = run_tool("qemu-io", &["-r", "-f", format, "-c", &read, text_of(path)]);
        assert!(!said.contains("failed"), "{said}");
    }
}

#[test]
fn raw_image_gets_requested_size() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    for folder in [folder, temp_dir_on_tmpfs()] {
        let path = folder.path().join("disk.raw");
        create(&path, &["-f", "raw"], "1M");
        fill(&path, "raw", "0", "1M");
        let (code, said) = resize(&path, "+1536");
        assert_eq!(code, 0, "{said}");
        let words = "1050112 bytes (about 1 MiB), was 1 MiB (1048576 bytes)";
        assert!(said.contains(words), "{said}");
        assert_holds(&path, "raw", MIB, MIB + 1536);
        let (code, said) = resize(&path, "3M");
        assert_eq!(code, 0, "{said}");
        assert_holds(&path, "raw", MIB, 3 * MIB);
    }
}

/// A qcow2 image grows for all cluster sizes and versions, whichever of its tables have to move.
#[test]
fn qcow2_growth_resizes_tables() {
    for options in [
        "compat=0.10,cluster_size=512",
        "cluster_size=512",
        "cluster_size=512,refcount_bits=64",
        "cluster_size=64k",
        "cluster_size=64k,extended_l2=on",
        "cluster_size=2M,lazy_refcounts=on",
    ] {
        let folder = temp_dir_on_tmpfs();
        let path = folder.path().join("disk.qcow2");
        create(&path, &["-f", "qcow2", "-o", options], "2M");
        fill(&path, "qcow2", "0", "2M");
        for (size, bytes) in [("+512", 2 * MIB + 512), ("40M", 40 * MIB), ("256M", 256 * MIB)] {
            let (code, said) = resize(&path, size);
            assert_eq!(code, 0, "{options}: {said}");
            assert_holds(&path, "qcow2", 2 * MIB, bytes);
        }
    }
}

/// Data of a longer backing file does not appear in the new part of the disk.
#[test]
fn growth_hides_longer_backing_file() {
    for options in ["cluster_size=64k", "cluster_size=4k,compat=0.10"] {
        let folder = temp_dir_on_tmpfs();
        let base = folder.path().join("base.raw");
        let path = folder.path().join("disk.qcow2");
        create(&base, &["-f", "raw"], "4M");
        fill(&base, "raw", "0", "4M");
        let backed = ["-f", "qcow2", "-b", text_of(&base), "-F", "raw", "-o", options];
        create(&path, &backed, "1M");
        let (code, said) = resize(&path, "8M");
        assert_eq!(code, 0, "{said}");
        assert_holds(&path, "qcow2", MIB, 8 * MIB);
    }
}

/// Data past the disk's end in its last cluster, as after a power loss that undid a growth, does not appear after a
/// growth.
#[test]
fn growth_hides_rest_of_last_cluster() {
    let folder = temp_dir_on_disk();
    let path = folder.path().join("disk.qcow2");
    create(&path, &["-f", "qcow2"], "1M");
    fill(&path, "qcow2", "0", "1M");
    let (full, size) = (MIB - 1536, 2 * MIB);
    let mut bytes = fs::read(&path).expect("reads");
    bytes[24..32].copy_from_slice(&full.to_be_bytes());
    fs::write(&path, bytes).expect("writes");
    let (code, said) = resize(&path, "2M");
    assert_eq!(code, 0, "{said}");
    assert_holds(&path, "qcow2", full, size);
}

/// Clusters that QEMU leaves past the end of a disk do not appear when the disk grows: the VM state of a failed
/// savevm or of a reverted snapshot, and clusters from when the disk was longer. The snapshot keeps its VM state.
#[test]
fn growth_hides_clusters_past_end() {
    for options in
        ["cluster_size=16k", "cluster_size=4k", "cluster_size=16k,compat=0.10", "cluster_size=16k,extended_l2=on"]
    {
        for is_backed in [false, true] {
            // A version 2 disk with snapshots cannot grow.
            let has_snapshot = is_backed && !options.contains("compat");
            let folder = temp_dir_on_tmpfs();
            let (path, base) = (folder.path().join("disk.qcow2"), folder.path().join("base.raw"));
            let mut arguments = vec!["-f", "qcow2", "-o", options];
            if is_backed {
                create(&base, &["-f", "raw"], "12M");
                fill(&base, "raw", "0", "12M");
                arguments.extend(["-b", text_of(&base), "-F", "raw"]);
            }
            create(&path, &arguments, "8M");
            fill(&path, "qcow2", "0", "8M");
            let state = ["-f", "qcow2", "-c", "write -b -P 0x77 0 300k", text_of(&path)];
            run_tool("qemu-io", &state);
            if has_snapshot {
                run_tool("qemu-img", &["snapshot", "-c", "reverted", text_of(&path)]);
                run_tool("qemu-img", &["snapshot", "-a", "reverted", text_of(&path)]);
            }
            // Simulates a disk that was longer before.
            let full = 5 * MIB + 1536;
            let mut bytes = fs::read(&path).expect("reads");
            bytes[24..32].copy_from_slice(&full.to_be_bytes());
            fs::write(&path, bytes).expect("writes");
            for (size, bytes) in [("6M", 6 * MIB), ("40M", 40 * MIB)] {
                let (code, said) = resize(&path, size);
                assert_eq!(code, 0, "{options}: {said}");
                assert_holds(&path, "qcow2", full, bytes);
            }
            if has_snapshot {
                run_tool("qemu-img", &["snapshot", "-a", "reverted", text_of(&path)]);
                assert_holds(&path, "qcow2", 8 * MIB, 8 * MIB);
                let state = ["-r", "-f", "qcow2", "-c", "read -b -P 0x77 0 300k", text_of(&path)];
                let said = run_tool("qemu-io", &state);
                assert!(!said.contains("failed"), "{options}: {said}");
            }
        }
    }
}

#[test]
fn external_data_file_grows_too() {
    let folder = temp_dir_on_tmpfs();
    let path = folder.path().join("disk.qcow2");
    let data = folder.path().join("disk.raw");
    let options = format!("data_file={},data_file_raw=on", text_of(&data));
    create(&path, &["-f", "qcow2", "-o", &options], "1M");
    fill(&path, "qcow2", "0", "1M");
    let (code, said) = resize(&path, "2M");
    assert_eq!(code, 0, "{said}");
    assert_holds(&path, "qcow2", MIB, 2 * MIB);
    assert_holds(&data, "raw", MIB, 2 * MIB);
}

/// Returns the output of `qemu-img map`, and the header's autoclear bits.
fn mapped(path: &Path) -> (String, Vec<u8>) {
    let map = run_tool("qemu-img", &["map", "--output=json", "-f", "qcow2", text_of(path)]);
    (map, fs::read(path).expect("it is there")[88..96].to_vec())
}

/// The new part of a raw external data file is mapped as `qemu-img resize` maps it.
#[test]
fn raw_data_file_growth_matches_qemu() {
    for options in ["cluster_size=64k", "cluster_size=4k", "cluster_size=64k,extended_l2=on"] {
        let folder = temp_dir_on_tmpfs();
        let ours = folder.path().join("ours.qcow2");
        let theirs = folder.path().join("theirs.qcow2");
        for path in [&ours, &theirs] {
            let data = path.with_extension("raw");
            let options = format!("{options},data_file={},data_file_raw=on", text_of(&data));
            create(path, &["-f", "qcow2", "-o", &options], "1500k");
            fill(path, "qcow2", "0", "1500k");
        }
        for (size, bytes) in [("1600k", 1600 << 10), ("2M", 2 * MIB), ("700M", 700 * MIB)] {
            let (code, said) = resize(&ours, size);
            assert_eq!(code, 0, "{options}: {said}");
            run_tool("qemu-img", &["resize", "-q", "-f", "qcow2", text_of(&theirs), size]);
            // QEMU gives subclusters a host offset but does not allocate them: they read as zeros whatever the file
            // has there.
            if !options.contains("extended_l2") {
                assert_eq!(mapped(&ours), mapped(&theirs), "{options}, {size}");
            }
            assert_holds(&ours, "qcow2", 1500 << 10, bytes);
        }
        // A user of the data file itself sees the writes of a user of the image.
        fill(&ours, "qcow2", "600M", "1M");
        let data = ours.with_extension("raw");
        let both = [text_of(&data), text_of(&ours)];
        run_tool("qemu-img", &[&["compare", "-f", "raw", "-F", "qcow2"], &both[..]].concat());
    }
}

#[test]
fn growth_without_space_changes_nothing() {
    for (options, size) in [
        ("cluster_size=512", "200M"),
        ("cluster_size=512,refcount_bits=64", "200M"),
        ("cluster_size=512,compat=0.10", "200M"),
        ("cluster_size=4k", "30G"),
        ("cluster_size=64k", "2T"),
    ] {
        let mut failures = 0;
        for pages in (0..24).step_by(3) {
            let folder = temp_dir_on_disk();
            let mount = mount_tmpfs(&folder.path().join("mounted"), "size=4M");
            let (path, ballast) = (mount.0.join("disk.qcow2"), mount.0.join("ballast"));
            create(&path, &["-f", "qcow2", "-o", options], "1M");
            fill(&path, "qcow2", "0", "100k");
            fill_up(&ballast);
            let len = ballast.metadata().expect("it is there").len() / 4096;
            let ballast = fs::File::options().write(true).open(&ballast).expect("opens");
            ballast.set_len((len - pages) * 4096).expect("truncates");
            let (code, said) = resize(&path, size);
            if code == 0 {
                continue;
            }
            failures += 1;
            assert_eq!(code, 2, "{options}: {said}");
            assert!(said.contains("no space left") && said.contains("free space on"), "{said}");
            assert_holds(&path, "qcow2", 100 << 10, MIB);
            let (_, info) = larder_json(&["disk", "info"], &path);
            assert!(info["journal"].is_null(), "{info:#}");
            if !options.contains("compat") {
                assert_eq!(mapped(&path).1, [0; 8], "{options}");
            }
        }
        assert!(failures > 0, "{options}: there was room after all");
    }
}

#[test]
fn image_cannot_outgrow_block_device() {
    let folder = temp_dir_on_disk();
    let file = folder.path().join("device");
    create(&file, &["-f", "raw"], "8M");
    let device = LoopDevice::new(&file, 512);
    let (code, said) = resize(&device.0, "16M");
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("block device"), "{said}");
    fs::File::create(&file).expect("empties");
    run_tool("losetup", &["--set-capacity", text_of(&device.0)]);
    let (code, said) = resize(&device.0, "16M");
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("has size 0") && !said.contains("truncate"), "{said}");
}

/// A snapshot keeps the disk's size of its time; an image of version 2 with snapshots does not grow.
#[test]
fn snapshots_keep_their_disk_size() {
    let folder = temp_dir_on_tmpfs();
    let path = folder.path().join("disk.qcow2");
    create(&path, &["-f", "qcow2", "-o", "compat=0.10"], "1M");
    fill(&path, "qcow2", "0", "1M");
    run_tool("qemu-img", &["snapshot", "-c", "before", text_of(&path)]);
    let (code, said) = resize(&path, "2M");
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("growth to 2 MiB failed: "), "{said}");
    assert!(said.contains("qemu-img amend -o compat=1.1"), "{said}");
    run_tool("qemu-img", &["amend", "-f", "qcow2", "-o", "compat=1.1", text_of(&path)]);
    let (code, said) = resize(&path, "200G");
    assert_eq!(code, 0, "{said}");
    fill(&path, "qcow2", "199G", "1M");
    run_tool("qemu-img", &["snapshot", "-a", "before", text_of(&path)]);
    assert_holds(&path, "qcow2", MIB, MIB);
}

#[test]
fn growth_reports_invalidated_bitmaps() {
    let folder = temp_dir_on_tmpfs();
    let path = folder.path().join("disk.qcow2");
    create(&path, &["-f", "qcow2"], "1M");
    run_tool("qemu-img", &["bitmap", "--add", text_of(&path), "b0"]);
    let (code, said) = resize(&path, "2M");
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("it has persistent bitmaps"), "{said}");
}

#[test]
fn impossible_size_changes_nothing() {
    let folder = temp_dir_on_tmpfs();
    let path = folder.path().join("disk.qcow2");
    create(&path, &["-f", "qcow2", "-o", "cluster_size=512"], "1M");
    let before = fs::read(&path).expect("it is there");
    for (size, words) in [
        ("512k", "qemu-img resize --shrink"),
        ("1048577", "the next is 1049088"),
        ("20", "qemu-img resize --shrink"),
        ("+20000000T", "larger than any disk"),
        ("+1000000T", "more than its format"),
        ("500T", "larger clusters"),
        ("-1M", "never made smaller"),
        ("-x", "is not a size"),
        ("1.5G", "1.5G"),
    ] {
        let (code, said) = resize(&path, size);
        assert_eq!(code, 2, "{size}: {said}");
        assert!(said.contains(words), "{size}: {said}");
        assert!(fs::read(&path).expect("it is there") == before, "{size}: {said}");
    }
    let (code, said) = resize(&path, "1M");
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("already"), "{said}");
}
