//! A full file system: acknowledged writes can be flushed, because space for their metadata was reserved before, and
//! the flush puts them into the image, so that the journal is not needed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::served::{Health, Served, health, qemu_io, qemu_io_with, text};
use crate::space::{SHAPES, ext4};
use crate::support::{
    LoopDevice, TEST_TIMEOUT, fill_file_system, mount_tmpfs, run_tool, temp_dir_on_disk, temp_dir_on_tmpfs,
};

/// Size of a write, in bytes.
const LEN: u64 = 4096;

/// Number of writes into a file system with [`ROOM`] free bytes; not all of them can succeed.
const WRITES: u64 = 256;
/// Free space of the file system, in bytes.
const ROOM: u64 = 256 << 10;

/// State of the image before the server starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    /// Without data.
    Empty,
    /// A backing file, from which the written clusters are copied.
    Backed,
    /// A snapshot shares the tables, so that they are copied.
    Snapshot,
    /// The tables have holes in the file where they are zeros, as after `cp --sparse=always`.
    Holes,
}

/// Returns the offset of a write: each is in another L2 table as long as `tables` last, then after the first ones.
fn place(step: u64, span: u64, tables: u64) -> u64 {
    // Avoids the first write of `Before`, and its slice of the table.
    step % tables * span + span / 2 + step / tables * LEN
}

fn pattern(step: u64) -> u64 {
    step % 251 + 1
}

/// Runs writes that are flushed only at the end.
fn try_writes(served: &Served, commands: &[String]) -> (bool, String) {
    qemu_io_with(&["-t", "writeback"], "raw", &served.uri(), commands)
}

/// Returns the steps whose writes succeeded, and the output.
fn write_all(served: &Served, steps: impl Iterator<Item = u64>, span: u64, tables: u64) -> (Vec<u64>, String) {
    let steps: Vec<u64> = steps.collect();
    let commands = steps.iter().map(|step| {
        let at = place(*step, span, tables);
        format!("write -P {} {at} {LEN}", pattern(*step))
    });
    let (_, said) = try_writes(served, &commands.collect::<Vec<_>>());
    let wrote = |step: &u64| {
        let at = place(*step, span, tables);
        said.contains(&format!("wrote {LEN}/{LEN} bytes at offset {at}\n"))
    };
    (steps.into_iter().filter(wrote).collect(), said)
}

fn assert_reads(format: &str, image: &str, written: &[u64], span: u64, tables: u64) {
    for some in written.chunks(512) {
        let commands = some.iter().map(|step| {
            let at = place(*step, span, tables);
            format!("read -P {} {at} {LEN}", pattern(*step))
        });
        let (success, said) = qemu_io(format, image, &commands.collect::<Vec<_>>());
        assert!(success, "{image}: {said}");
    }
}

fn prepare(image: &Path, elsewhere: &Path, shape: &str, before: Before, span: u64, tables: u64) {
    let size = (tables * span).to_string();
    let backing = elsewhere.join("backing");
    let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", shape];
    if before == Before::Backed {
        fs::File::create(&backing).and_then(|file| file.set_len(tables * span)).expect("a file");
        // Data to be copied, around the first write.
        let write = format!("write -P 255 {} 1M", span / 2);
        run_tool("qemu-io", &["-f", "raw", "-c", &write, text(&backing)]);
        arguments.extend(["-b", text(&backing), "-F", "raw"]);
    }
    arguments.extend([text(image), &size]);
    run_tool("qemu-img", &arguments);
    if matches!(before, Before::Empty | Before::Backed) {
        return;
    }
    let commands: Vec<String> = (0..tables / 2).map(|table| format!("write {} 512", table * span)).collect();
    assert!(qemu_io("qcow2", text(image), &commands).0);
    if before == Before::Snapshot {
        run_tool("qemu-img", &["snapshot", "-c", "before", text(image)]);
    } else {
        let sparse = elsewhere.join("sparse");
        run_tool("cp", &["--sparse=always", text(image), text(&sparse)]);
        fs::remove_file(image).expect("removes");
        run_tool("cp", &["--sparse=always", text(&sparse), text(image)]);
    }
}

fn a_full_file_system(mounted: &Path, shape: &str, before: Before) {
    let what = format!("{shape}, {before:?}");
    // Bytes that an L2 table covers.
    let (span, tables) = match shape {
        _ if shape.contains("cluster_size=512") => (512 * 64, 512),
        _ if shape.contains("cluster_size=4k") => (4096 * 512, 256),
        _ if shape.contains("extended_l2") => (65536 * 4096, 32),
        _ => (65536 * 8192, 32),
    };
    let elsewhere = temp_dir_on_disk();
    let image = mounted.join("image.qcow2");
    let ballast = mounted.join("ballast");
    prepare(&image, elsewhere.path(), shape, before, span, tables);
    let served = Served::new(&image, &[]);
    // Without a reservation, data would take the space that its tables need.
    let first = tables / 4;
    let (mut written, said) = write_all(&served, 0..first, span, tables);
    assert_eq!(written.len() as u64, first, "{what}: {said}");
    fill_file_system(&ballast);
    let file = fs::File::options().write(true).open(&ballast).expect("opens");
    let len = file.metadata().expect("it is there").len();
    file.set_len(len - ROOM).expect("truncates");
    file.sync_all().expect("syncs");
    let (more, said) = write_all(&served, first..first + WRITES, span, tables);
    assert!(said.contains("No space left on device"), "{what}: {said}");
    written.extend(more);
    fill_file_system(&ballast);
    served.io(&["flush"]);
    assert_reads("raw", &served.uri(), &written, span, tables);
    let (more, _) = write_all(&served, first + WRITES..first + WRITES + 8, span, tables);
    written.extend(more);
    served.io(&["flush"]);

    // A copy without the server and its journal; its session bits are cleared, as any other program would do.
    let copy: PathBuf = elsewhere.path().join("copy.qcow2");
    fs::copy(&image, &copy).expect("copies");
    health(&copy);
    assert_reads("qcow2", text(&copy), &written, span, tables);

    let said = served.stop();
    assert!(!said.contains("panicked"), "{what}: {said}");
    assert_eq!(health(&image), Health::Clean, "{what}: {said}");
    assert_reads("qcow2", text(&image), &written, span, tables);
}

const BEFORE: [Before; 4] = [Before::Empty, Before::Backed, Before::Snapshot, Before::Holes];

#[test]
fn acknowledged_writes_flush_on_full_tmpfs() {
    for shape in SHAPES {
        for before in BEFORE {
            let folder = temp_dir_on_tmpfs();
            let mount = mount_tmpfs(&folder.path().join("mounted"), "size=12M");
            a_full_file_system(&mount.0, shape, before);
        }
    }
}

#[test]
fn acknowledged_writes_flush_on_full_ext4() {
    for shape in SHAPES {
        for before in BEFORE {
            let folder = temp_dir_on_disk();
            let mount = ext4(folder.path(), &folder.path().join("mounted"));
            a_full_file_system(&mount.0, shape, before);
        }
    }
}

/// A server that cannot commit names its journal, with advice. A loop device cannot reserve space of its file, like a
/// copy-on-write or thin store.
#[test]
fn failed_commit_names_journal_and_advice() {
    let folder = temp_dir_on_disk();
    let mount = mount_tmpfs(&folder.path().join("mounted"), "size=4M");
    let (file, ballast) = (mount.0.join("image"), mount.0.join("ballast"));
    let (made, data) = (folder.path().join("made.qcow2"), folder.path().join("data"));
    let options = format!("data_file={}", text(&data));
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&made), "256M"]);
    // Allocates a table, whose part for the rest of the disk becomes a hole.
    assert!(qemu_io("qcow2", text(&made), &["write -P 1 0 64k"]).0);
    run_tool("cp", &["--sparse=always", text(&made), text(&file)]);
    fill_file_system(&ballast);
    let device = LoopDevice::new(&file, 512);
    let mut served = Served::new(&device.0, &["--format", "qcow2"]);
    let (success, said) = try_writes(&served, &["write -P 2 128M 64k".to_owned()]);
    assert!(success, "{said}");
    served.io(&["read -P 2 128M 64k"]);
    assert!(!served.try_io(&["flush"]).0);
    served.process.signal(libc::SIGTERM);
    let status = served.process.wait(TEST_TIMEOUT).expect("ends");
    let said = served.process.output();
    assert_eq!(status.code(), Some(2), "{said}");
    let journal = said.split_once("in the journal ").and_then(|(_, rest)| rest.split_once(' '));
    let (journal, _) = journal.unwrap_or_else(|| panic!("no journal is named: {said}"));
    assert!(Path::new(journal).exists(), "{said}");
    assert!(said.contains("do not move or copy the image"), "{said}");

    fs::remove_file(&ballast).expect("removes");
    let served = Served::new(&device.0, &["--format", "qcow2"]);
    served.io(&["read -P 2 128M 64k", "read -P 1 0 64k", "flush"]);
    served.stop();
    assert!(!Path::new(journal).exists(), "{said}");
    assert_eq!(health(&device.0), Health::Clean);
    assert!(qemu_io("qcow2", text(&device.0), &["read -P 2 128M 64k"]).0);
}

/// On a full file system, space that the guest discards can be written again at once.
#[test]
fn discarded_space_is_reusable_when_full() {
    for cluster_size in ["512", "4k", "64k"] {
        let folder = temp_dir_on_tmpfs();
        let mount = mount_tmpfs(&folder.path().join("mounted"), "size=8M");
        let image = mount.0.join("image.qcow2");
        let options = format!("cluster_size={cluster_size}");
        run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&image), "16M"]);
        let served = Served::new(&image, &[]);
        let fill: Vec<String> = (0..256).map(|step| format!("write -P 1 {} 64k", step << 16)).collect();
        assert!(!try_writes(&served, &fill).0, "it is not full");
        for round in 0..4 {
            let at = round << 20;
            let commands = [
                format!("discard {at} 1M"),
                "flush".to_owned(),
                format!("write -P 9 {at} 768k"),
                "flush".to_owned(),
                format!("read -P 9 {at} 768k"),
            ];
            let (success, said) = qemu_io_with(&["-t", "writeback", "-d", "unmap"], "raw", &served.uri(), &commands);
            assert!(success, "clusters of {cluster_size}, round {round}: {said}");
        }
        served.stop();
        assert_eq!(health(&image), Health::Clean);
    }
}
