//! A full file system: the client gets an error, the image stays sound, and writes succeed again once there is space.

use std::fs;
use std::path::{Path, PathBuf};

use crate::served::{Health, Served, compare, dump, health, text};
use crate::support::{Mount, fill_file_system, mount_tmpfs, run_tool, temp_dir_on_disk, temp_dir_on_tmpfs};

const MIB: u64 = 1 << 20;

fn a_full_file_system(mounted: &Path, options: &str) {
    let image = mounted.join("image.qcow2");
    let ballast = mounted.join("ballast");
    run_tool("qemu-img", &["create", "-f", "qcow2", "-o", options, text(&image), "64M"]);
    let served = Served::new(&image, &[]);
    served.io(&["write -P 1 0 1M", "flush"]);
    fill_file_system(&ballast);
    // The image may have some space left, but less than a write needs.
    let mut written = vec![true];
    let mut refusals = 0;
    for mib in 1..64u64 {
        let (success, said) = served.try_io(&[format!("write -P {} {mib}M 1M", mib + 1)]);
        written.push(success);
        if !success {
            assert!(said.contains("No space left on device"), "{said}");
            refusals += 1;
        }
        if refusals == 3 {
            break;
        }
    }
    assert_eq!(refusals, 3, "there was space after all");
    // Existing data can be read, and overwritten in place.
    served.io(&["read -P 1 0 1M", "write -P 99 64k 64k", "read -P 99 64k 64k"]);
    // A flush may lack space for its metadata, but nothing is lost.
    let (success, said) = served.try_io(&["flush"]);
    assert!(success || said.contains("No space left on device"), "{said}");

    fs::remove_file(&ballast).expect("removes");
    served.io(&["flush", "write -P 200 40M 3M", "write -z 44M 1M", "flush"]);
    for (mib, success) in written.iter().enumerate().skip(1) {
        // A refused write may leave the old or the new data.
        if *success {
            served.io(&[format!("read -P {} {mib}M 1M", mib + 1)]);
        }
    }
    served.io(&["read -P 1 0 64k", "read -P 99 64k 64k", "read -P 200 40M 3M"]);
    let is = served.dump();
    let said = served.stop();
    assert!(!said.contains("panicked"), "{said}");
    assert_eq!(health(&image), Health::Clean, "{said}");
    let folder = temp_dir_on_tmpfs();
    let raw = folder.path().join("raw");
    fs::write(&raw, &is).expect("writes");
    compare(&raw, "qcow2", text(&image));
}

pub(crate) fn ext4(folder: &Path, at: &Path) -> Mount {
    let device: PathBuf = folder.join("ext4");
    fs::File::create(&device).and_then(|file| file.set_len(24 * MIB)).expect("a file");
    run_tool("mkfs.ext4", &["-q", text(&device)]);
    Mount::new(at, &["-o", "loop", text(&device)])
}

pub(crate) const SHAPES: [&str; 4] = [
    "cluster_size=64k",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=4k,compat=0.10",
    "cluster_size=64k,extended_l2=on",
];

#[test]
fn full_tmpfs_fails_writes_until_space() {
    for shape in SHAPES {
        let folder = temp_dir_on_disk();
        let mount = mount_tmpfs(&folder.path().join("mounted"), "size=12M");
        a_full_file_system(&mount.0, shape);
    }
}

#[test]
fn full_ext4_fails_writes_until_space() {
    for shape in SHAPES {
        let folder = temp_dir_on_disk();
        let mount = ext4(folder.path(), &folder.path().join("mounted"));
        a_full_file_system(&mount.0, shape);
    }
}

/// A server that stops on a full file system leaves a sound image, and reports data that is not in it.
#[test]
fn stop_on_full_disk_is_safe() {
    for shape in SHAPES {
        let folder = temp_dir_on_disk();
        let mount = mount_tmpfs(&folder.path().join("mounted"), "size=12M");
        let image = mount.0.join("image.qcow2");
        run_tool("qemu-img", &["create", "-f", "qcow2", "-o", shape, text(&image), "64M"]);
        let mut served = Served::new(&image, &[]);
        served.io(&["write -P 1 0 1M", "flush"]);
        let (success, said) = served.try_io(&["write -P 2 1M 32M"]);
        assert!(!success && said.contains("No space left on device"), "{said}");
        served.process.signal(libc::SIGTERM);
        let status = served.process.wait(crate::support::TEST_TIMEOUT).expect("ends");
        let said = served.process.output();
        // Either everything is in the image, or the server reports that it is not.
        assert!(status.code() == Some(0) || said.contains("the last writes may not be on the disk"), "{said}");
        health(&image);
        let is = dump("qcow2", text(&image), &folder.path().join("dump"));
        assert!(is[..MIB as usize].iter().all(|byte| *byte == 1), "what was flushed is lost");
    }
}
