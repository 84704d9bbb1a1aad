//! External data files, in which each guest cluster has a fixed offset, and the first one has offset 0.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bad_input::Bytes;
use crate::served::{Health, Served, health, qemu_io, qemu_io_with, text};
use crate::support::{larder_path, run_command, run_tool, temp_dir_on_tmpfs};

const COPIED: u64 = 1 << 63;
const CLUSTERS: u64 = 16;

/// An image with a data file in the same directory.
struct Pair {
    image: PathBuf,
    data: PathBuf,
    cluster_len: u64,
}

impl Pair {
    fn new(folder: &Path, options: &str, cluster_len: u64) -> Self {
        let (image, data) = (folder.join("image.qcow2"), folder.join("image.data"));
        let options = format!("{options},cluster_size={cluster_len},data_file={}", text(&data));
        run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&image), "32M"]);
        Self { image, data, cluster_len }
    }

    /// Creates a file in which each cluster has its own byte, beginning with `first`.
    fn pattern(&self, first: u8) -> PathBuf {
        let path = self.image.with_file_name("pattern");
        let bytes: Vec<u8> =
            (0..CLUSTERS as u8).flat_map(|cluster| vec![first + cluster; self.cluster_len as usize]).collect();
        fs::write(&path, bytes).expect("writes");
        path
    }

    /// Returns commands of qemu-io that read each cluster alone, and verify it with the byte from `expected`.
    fn reads(&self, expected: impl Fn(u8) -> u8) -> Vec<String> {
        let len = self.cluster_len;
        (0..CLUSTERS as u8)
            .map(|cluster| format!("read -P {} {} {len}", expected(cluster), u64::from(cluster) * len))
            .collect()
    }

    /// Asserts that QEMU and the data file have each cluster at its fixed offset.
    fn is_in_place(&self, expected: impl Fn(u8) -> u8) {
        assert_eq!(health(&self.image), Health::Clean);
        let (success, said) = qemu_io("qcow2", text(&self.image), &self.reads(&expected));
        assert!(success, "{said}");
        let data = fs::read(&self.data).expect("reads");
        for (cluster, bytes) in (0..CLUSTERS as u8).zip(data.chunks(self.cluster_len as usize)) {
            assert!(bytes.iter().all(|byte| *byte == expected(cluster)), "cluster {cluster}");
        }
    }
}

const SHAPES: [(&str, u64); 4] = [
    ("data_file_raw=off", 64 << 10),
    ("data_file_raw=off", 512),
    ("data_file_raw=on", 64 << 10),
    ("data_file_raw=off,extended_l2=on", 64 << 10),
];

/// A request that maps many clusters, including the first one, leaves each at its offset, for later requests, the
/// next server, and QEMU. In a raw data file, clusters that QEMU has discarded are mapped again.
#[test]
fn data_file_clusters_stay_in_place() {
    for (options, cluster_len) in SHAPES {
        let folder = temp_dir_on_tmpfs();
        let pair = Pair::new(folder.path(), options, cluster_len);
        let all = CLUSTERS * cluster_len;
        let (success, said) =
            qemu_io("qcow2", text(&pair.image), &[format!("write -P 99 0 {all}"), format!("discard 0 {all}")]);
        assert!(success, "{options}: {said}");
        let served = Served::new(&pair.image, &[]);
        served.io(&[format!("write -s {} 0 {all}", text(&pair.pattern(1))), "flush".to_owned()]);
        served.io(&pair.reads(|cluster| cluster + 1));
        served.io(&[format!("write -P 200 {} {cluster_len}", 3 * cluster_len)]);
        let expected = |cluster| if cluster == 3 { 200 } else { cluster + 1 };
        served.io(&pair.reads(expected));
        served.stop();
        pair.is_in_place(expected);
    }
}

/// Unflushed writes of a killed server, whose mapping is in its journal, also leave each cluster at its offset.
#[test]
fn data_file_clusters_survive_kill() {
    for (options, cluster_len) in SHAPES {
        let folder = temp_dir_on_tmpfs();
        let pair = Pair::new(folder.path(), options, cluster_len);
        let served = Served::new(&pair.image, &[]);
        let write = format!("write -s {} 0 {}", text(&pair.pattern(1)), CLUSTERS * cluster_len);
        let client = served.io_without_flush(&[write]);
        served.kill();
        drop(client);
        let served = Served::new(&pair.image, &[]);
        served.io(&pair.reads(|cluster| cluster + 1));
        served.stop();
        pair.is_in_place(|cluster| cluster + 1);
    }
}

/// Zeroing a cluster with some allocated subclusters also covers the others, for which the backing file has data.
#[test]
fn zeroes_cover_unallocated_subclusters() {
    for (flags, data_file) in [("-z", true), ("-zu", true), ("-z", false), ("-zu", false)] {
        let folder = temp_dir_on_tmpfs();
        let (image, base) = (folder.path().join("image.qcow2"), folder.path().join("base.raw"));
        fs::write(&base, vec![66; 1 << 20]).expect("writes");
        let mut options = format!("extended_l2=on,backing_file={},backing_fmt=raw", text(&base));
        if data_file {
            options += &format!(",data_file={}", text(&folder.path().join("image.data")));
        }
        run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&image), "1M"]);
        let served = Served::new(&image, &[]);
        // A cluster with allocated and then zero subclusters, and a request that ends within another cluster.
        served.io(&[
            "write -P 1 66k 2k",
            "write -z 80k 4k",
            "write -P 2 130k 2k",
            &format!("write {flags} 64k 64k"),
            &format!("write {flags} 128k 20k"),
        ]);
        let expected = ["read -P 66 0 64k", "read -P 0 64k 84k", "read -P 66 148k 876k"];
        served.io(&expected);
        served.stop();
        let (success, said) = qemu_io("qcow2", text(&image), &expected);
        assert!(success, "{flags}, data file {data_file}: {said}");
        assert_eq!(health(&image), Health::Clean);
    }
}

/// Runs `larder disk check`; returns the exit status and the output.
pub(crate) fn check(image: &Path, options: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(larder_path());
    command.args(["disk", "check"]).args(options).arg(image);
    run_command(command)
}

/// An entry that points to a wrong offset of the data file fails requests for it, as in QEMU, and nothing is written
/// there. A check finds the entry, and a repair makes it point to the only possible offset.
#[test]
fn misplaced_data_file_entry_fails() {
    for (options, cluster_len) in SHAPES {
        let entry_len = if options.contains("extended") { 16 } else { 8 };
        for place in [COPIED, COPIED | (7 * cluster_len), 2 * cluster_len] {
            let folder = temp_dir_on_tmpfs();
            let pair = Pair::new(folder.path(), options, cluster_len);
            let write = format!("write -s {} 0 {}", text(&pair.pattern(1)), CLUSTERS * cluster_len);
            let (success, said) = qemu_io("qcow2", text(&pair.image), &[write]);
            assert!(success, "{said}");
            let mut bytes = Bytes::of(&pair.image);
            let at = bytes.l2() + 3 * entry_len;
            bytes.put_u64(at, place);
            fs::write(&pair.image, &bytes.0).expect("writes");

            let start = 3 * cluster_len;
            let read = format!("read {start} {cluster_len}");
            let (success, said) = qemu_io_with(&["-r"], "qcow2", text(&pair.image), &[&read]);
            assert!(!success, "QEMU reads it: {said}");
            let before = fs::read(&pair.data).expect("reads");
            for (options, mode) in [(&["--read-only"][..], &["-r"][..]), (&[], &[])] {
                let served = Served::new(&pair.image, options);
                let io = |commands: &[&str]| qemu_io_with(mode, "raw", &served.uri(), commands);
                let write = format!("write -P 9 {start} {cluster_len}");
                let commands = if mode.is_empty() { vec![&read, &write] } else { vec![&read] };
                for command in commands {
                    let (success, said) = io(&[command]);
                    assert!(!success, "{place:#x}, {command}: {said}");
                }
                let next = format!("read -P 5 {} 512", 4 * cluster_len);
                let (success, said) = io(&["read -P 1 0 512", &next]);
                assert!(success, "{place:#x}: {said}");
                let log = served.stop();
                assert!(log.contains("of the data file, where only") && log.contains("larder disk check"), "{log}");
            }
            assert!(fs::read(&pair.data).expect("reads") == before, "the data file has changed");

            let (code, said) = check(&pair.image, &[]);
            assert_eq!(code, Some(1), "{place:#x}: {said}");
            let says = format!(
                "the entry of guest offset {start:#x} in the active L1 table, {place:#018x}, points to another offset in the data file"
            );
            assert!(said.contains(&says), "{said}");
            let (code, said) = check(&pair.image, &["--repair"]);
            assert_eq!(code, Some(0), "{place:#x}: {said}");
            pair.is_in_place(|cluster| cluster + 1);
        }
    }
}
