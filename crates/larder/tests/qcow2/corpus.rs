//! Images of every kind: read as QEMU reads them, and written so that QEMU reads the same.

use std::fs;

use larder_bench::campaign::Random;

use crate::model::Model;
use crate::operations::commands;
use crate::served::{Folder, Health, Served, compare, dump, health, text};
use crate::spec::{Kind, Made, Spec};
use crate::support::{run_tool, temp_dir_on_disk, temp_dir_on_tmpfs};

/// Number of images of each kind.
const IMAGES: u64 = 24;

pub(crate) fn images(default: u64) -> u64 {
    match std::env::var("LARDER_QCOW2_IMAGES") {
        Ok(text) => text.parse().expect("LARDER_QCOW2_IMAGES is a number"),
        Err(_) => default,
    }
}

/// Returns QEMU's content of a snapshot.
fn snapshot(made: &Made, name: &str) -> Vec<u8> {
    let into = made.image.with_extension("snapshot");
    let which = format!("snapshot.name={name}");
    run_tool("qemu-img", &["convert", "-f", "qcow2", "-l", &which, "-O", "raw", text(&made.image), text(&into)]);
    fs::read(into).expect("reads")
}

/// Snapshots and backing files, which must not change.
pub(crate) struct Kept {
    snapshots: Vec<Vec<u8>>,
    backing_files: Vec<Vec<u8>>,
}

impl Kept {
    pub(crate) fn of(made: &Made) -> Self {
        Self {
            snapshots: made.snapshots.iter().map(|name| snapshot(made, name)).collect(),
            backing_files: made.backing_files.iter().map(|file| fs::read(file).expect("reads")).collect(),
        }
    }

    pub(crate) fn check(&self, made: &Made) {
        for (name, before) in made.snapshots.iter().zip(&self.snapshots) {
            assert!(snapshot(made, name) == *before, "{name} has changed");
        }
        for (file, before) in made.backing_files.iter().zip(&self.backing_files) {
            assert!(fs::read(file).expect("reads") == *before, "{} has changed", file.display());
        }
    }
}

/// Returns options for a server, some of which are not the default.
pub(crate) fn options(random: &mut Random) -> Vec<&'static str> {
    match random.below(6) {
        0 => vec!["--buffered"],
        // Less than the map of a single leaf.
        1 => vec!["--metadata-memory", "1KiB"],
        2 => vec!["--metadata-memory", "16KiB", "--format", "qcow2"],
        _ => vec!["--format", "qcow2"],
    }
}

fn check_image(kind: Kind, seed: u64) {
    let mut random = Random::new(seed);
    let spec = Spec::new(kind, &mut random);
    let folder = Folder::new(if random.below(2) == 0 { temp_dir_on_disk() } else { temp_dir_on_tmpfs() });
    println!("{kind:?}, seed {seed}, in {}: {spec:#?}", folder.path().display());
    let made = spec.make(&folder.path(), &mut random);
    let image = text(&made.image);
    let expected = folder.path().join("expected.raw");
    let before = dump("qcow2", image, &expected);
    fs::write(&expected, &before).expect("writes");
    let kept = Kept::of(&made);

    let options = options(&mut random);
    println!("{options:?}");
    let served = Served::new(&made.image, &options);
    compare(&expected, "raw", &served.uri());
    let mut model = Model::new(before);
    assert_eq!(model.size(), spec.size);
    let mut is = Vec::new();
    for _ in 0..2 {
        let operations = made.disk.operations(&mut random, 24);
        let commands = commands(&operations);
        println!("{}", commands.join("\n"));
        served.io(&commands);
        model.apply(&operations);
        is = served.dump();
        if let Err(wrong) = model.check(&is) {
            panic!("over NBD: {wrong}");
        }
    }
    served.stop();

    assert_eq!(health(&made.image), Health::Clean, "{image} has leaks");
    fs::write(&expected, &is).expect("writes");
    compare(&expected, "qcow2", image);
    kept.check(&made);
    let again = Served::new(&made.image, &["--read-only"]);
    compare(&expected, "raw", &again.uri());
    again.stop();
}

fn check_images(kind: Kind) {
    for number in 0..images(IMAGES) {
        check_image(kind, 10_000 * (kind as u64 + 1) + number);
    }
}

#[test]
fn plain_images_match_qemu() {
    check_images(Kind::Plain);
}

#[test]
fn version_2_images_match_qemu() {
    check_images(Kind::Version2);
}

#[test]
fn small_cluster_images_match_qemu() {
    check_images(Kind::SmallClusters);
}

#[test]
fn large_cluster_images_match_qemu() {
    check_images(Kind::LargeClusters);
}

#[test]
fn compressed_images_match_qemu() {
    check_images(Kind::Compressed);
}

#[test]
fn subcluster_images_match_qemu() {
    check_images(Kind::ExtendedL2);
}

#[test]
fn backing_chains_match_qemu() {
    check_images(Kind::Chain);
}

#[test]
fn data_file_images_match_qemu() {
    check_images(Kind::DataFile);
}

#[test]
fn snapshot_images_match_qemu() {
    check_images(Kind::Snapshots);
}

#[test]
fn preallocated_images_match_qemu() {
    check_images(Kind::Preallocated);
}
