//! Random requests to disks with random features, compared with a model and with QEMU (`docs/fuzzing.md`). `make
//! fuzz` runs the same for longer.

mod support;

use std::ops::Range;

use larder_bench::fuzz_disks::short;
use support::larder_path;

/// Asserts that the fuzzer finds no error in the images of these seeds.
fn finds_nothing(seeds: Range<u64>, data_files_only: bool, kills: bool) {
    let images = seeds.end - seeds.start;
    let report = short(larder_path(), seeds, data_files_only, kills).expect("the fuzzer runs");
    assert!(report.findings.is_empty(), "{}", report.findings.join("\n"));
    assert_eq!(report.images + report.skipped, images);
    assert!(report.skipped * 10 < images, "{report:?}");
}

/// Images with any features, as `larder-bench fuzz-disks` creates them, behave as in QEMU.
#[test]
fn random_disks_agree_with_qemu() {
    finds_nothing(0..100, false, false);
}

/// Images with an external data file behave as in QEMU.
#[test]
fn random_data_files_agree_with_qemu() {
    finds_nothing(0..30, true, false);
}

/// Images whose servers are killed keep their data.
#[test]
fn random_disks_survive_kills() {
    finds_nothing(0..30, false, true);
}
