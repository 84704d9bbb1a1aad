//! A full file system: what was acknowledged can be flushed, because the room for the way to it was there before; it is
//! in the image, whatever becomes of the journal.

use std::fs;
use std::path::{Path, PathBuf};

use crate::served::{Health, Served, health, qemu_io, qemu_io_with, text};
use crate::space::{SHAPES, ext4};
use crate::support::{LIMIT, LoopDevice, fill, on_disk, on_tmpfs, tmpfs, tool};

/// Bytes of a write.
const LEN: u64 = 4096;

/// Writes into a file system that has [`ROOM`] left, in bytes; not all can succeed.
const WRITES: u64 = 256;
const ROOM: u64 = 256 << 10;

/// What was there before the server came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    /// Nothing.
    Empty,
    /// A backing file, which the clusters that are written are copied from.
    Backed,
    /// Tables that a snapshot has, too, so that they are copied.
    Snapshot,
    /// Tables that have holes in the file where they are zeros, as after `cp --sparse=always`.
    Holes,
}

/// Where a write goes: each to another L2 table as long as `tables` last, then behind the first ones.
fn place(step: u64, span: u64, tables: u64) -> u64 {
    // Not to where the first write of `Before` was, nor to its slice of the table.
    step % tables * span + span / 2 + step / tables * LEN
}

fn pattern(step: u64) -> u64 {
    step % 251 + 1
}

/// Writes that are flushed at the end only.
fn try_writes(served: &Served, commands: &[String]) -> (bool, String) {
    qemu_io_with(&["-t", "writeback"], "raw", &served.uri(), commands)
}

/// The steps whose writes succeeded.
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
        fs::File::create(&backing)
            .and_then(|file| file.set_len(tables * span))
            .expect("a file");
        // Something to copy, around the first write.
        let write = format!("write -P 255 {} 1M", span / 2);
        tool("qemu-io", &["-f", "raw", "-c", &write, text(&backing)]);
        arguments.extend(["-b", text(&backing), "-F", "raw"]);
    }
    arguments.extend([text(image), &size]);
    tool("qemu-img", &arguments);
    if matches!(before, Before::Empty | Before::Backed) {
        return;
    }
    let commands: Vec<String> = (0..tables / 2)
        .map(|table| format!("write {} 512", table * span))
        .collect();
    assert!(qemu_io("qcow2", text(image), &commands).0);
    if before == Before::Snapshot {
        tool("qemu-img", &["snapshot", "-c", "before", text(image)]);
    } else {
        let sparse = elsewhere.join("sparse");
        tool("cp", &["--sparse=always", text(image), text(&sparse)]);
        fs::remove_file(image).expect("removes");
        tool("cp", &["--sparse=always", text(&sparse), text(image)]);
    }
}

fn a_full_file_system(mounted: &Path, shape: &str, before: Before) {
    let what = format!("{shape}, {before:?}");
    // What an L2 table covers, in bytes.
    let (span, tables) = match shape {
        _ if shape.contains("cluster_size=512") => (512 * 64, 512),
        _ if shape.contains("cluster_size=4k") => (4096 * 512, 256),
        _ if shape.contains("extended_l2") => (65536 * 4096, 32),
        _ => (65536 * 8192, 32),
    };
    let elsewhere = on_disk();
    let image = mounted.join("image.qcow2");
    let ballast = mounted.join("ballast");
    prepare(&image, elsewhere.path(), shape, before, span, tables);
    let served = Served::new(&image, &[]);
    // What is left of the room goes to data, if nobody sees to it that its tables have some.
    let first = tables / 4;
    let (mut written, said) = write_all(&served, 0..first, span, tables);
    assert_eq!(written.len() as u64, first, "{what}: {said}");
    fill(&ballast);
    let file = fs::File::options().write(true).open(&ballast).expect("opens");
    let len = file.metadata().expect("it is there").len();
    file.set_len(len - ROOM).expect("truncates");
    file.sync_all().expect("syncs");
    let (more, said) = write_all(&served, first..first + WRITES, span, tables);
    assert!(said.contains("No space left on device"), "{what}: {said}");
    written.extend(more);
    fill(&ballast);
    served.io(&["flush"]);
    assert_reads("raw", &served.uri(), &written, span, tables);
    let (more, _) = write_all(&served, first + WRITES..first + WRITES + 8, span, tables);
    written.extend(more);
    served.io(&["flush"]);

    // Without the server and its journal; its session is cleared as by any other program.
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
fn what_was_acknowledged_can_be_flushed_on_a_full_tmpfs() {
    for shape in SHAPES {
        for before in BEFORE {
            let folder = on_tmpfs();
            let mount = tmpfs(&folder.path().join("mounted"), "size=12M");
            a_full_file_system(&mount.0, shape, before);
        }
    }
}

#[test]
fn what_was_acknowledged_can_be_flushed_on_a_full_ext4() {
    for shape in SHAPES {
        for before in BEFORE {
            let folder = on_disk();
            let mount = ext4(folder.path(), &folder.path().join("mounted"));
            a_full_file_system(&mount.0, shape, before);
        }
    }
}

/// A loop device knows nothing of the room that its file has: so it is with every copy-on-write or thin store.
#[test]
fn a_server_that_cannot_commit_says_where_the_journal_is_and_what_to_do() {
    let folder = on_disk();
    let mount = tmpfs(&folder.path().join("mounted"), "size=4M");
    let (file, ballast) = (mount.0.join("image"), mount.0.join("ballast"));
    let (made, data) = (folder.path().join("made.qcow2"), folder.path().join("data"));
    let options = format!("data_file={}", text(&data));
    tool(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-o", &options, text(&made), "256M"],
    );
    // A table, whose part for the rest of the disk is a hole then.
    assert!(qemu_io("qcow2", text(&made), &["write -P 1 0 64k"]).0);
    tool("cp", &["--sparse=always", text(&made), text(&file)]);
    fill(&ballast);
    let device = LoopDevice::new(&file, 512);
    let mut served = Served::new(&device.0, &["--format", "qcow2"]);
    let (success, said) = try_writes(&served, &["write -P 2 128M 64k".to_owned()]);
    assert!(success, "{said}");
    served.io(&["read -P 2 128M 64k"]);
    assert!(!served.try_io(&["flush"]).0);
    served.process.signal(libc::SIGTERM);
    let status = served.process.wait(LIMIT).expect("ends");
    let said = served.process.output();
    assert_eq!(status.code(), Some(2), "{said}");
    let journal = said
        .split_once("in the journal ")
        .and_then(|(_, rest)| rest.split_once(' '));
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

#[test]
fn what_a_guest_discards_on_a_full_file_system_can_be_written_again_at_once() {
    for cluster_size in ["512", "4k", "64k"] {
        let folder = on_tmpfs();
        let mount = tmpfs(&folder.path().join("mounted"), "size=8M");
        let image = mount.0.join("image.qcow2");
        let options = format!("cluster_size={cluster_size}");
        tool(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-o", &options, text(&image), "16M"],
        );
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
