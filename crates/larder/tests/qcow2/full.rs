//! A full file system: what was acknowledged can be flushed, because the room for the way to it was there before; it is
//! in the image, whatever becomes of the journal.

use std::fs;
use std::path::{Path, PathBuf};

use crate::served::{Health, Served, health, qemu_io, text};
use crate::space::{SHAPES, ext4, fill, tmpfs};
use crate::support::{on_disk, on_tmpfs, tool};

/// Bytes of a write.
const LEN: u64 = 4096;

/// Writes into a file system that is full already; not all can succeed.
const WRITES: u64 = 256;

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

/// The steps whose writes succeeded.
fn write_all(served: &Served, steps: impl Iterator<Item = u64>, span: u64, tables: u64) -> (Vec<u64>, String) {
    let steps: Vec<u64> = steps.collect();
    let commands = steps.iter().map(|step| {
        let at = place(*step, span, tables);
        format!("write -P {} {at} {LEN}", pattern(*step))
    });
    let (_, said) = served.try_io(&commands.collect::<Vec<_>>());
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
    let commands: Vec<String> = (0..tables / 2).map(|table| format!("write {} 512", table * span)).collect();
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
    // Some room for the first tables; what is left of it is taken away while nothing is flushed.
    let first = tables / 4;
    let (mut written, said) = write_all(&served, 0..first, span, tables);
    assert_eq!(written.len() as u64, first, "{what}: {said}");
    fill(&ballast);
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
