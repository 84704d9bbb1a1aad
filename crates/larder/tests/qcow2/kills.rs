//! `kill -9` under load: the image stays sound, and all flushed data is there.

use std::process::Command;

use larder_bench::campaign::Random;
use larder_bench::campaign::process::Process;

use crate::corpus::{Kept, images, options};
use crate::model::Model;
use crate::operations::{Operation, commands};
use crate::served::{Folder, Served, dump, health, qemu_io, text};
use crate::spec::{Kind, Spec};
use crate::support::{
    QEMU_IO_MARKER, TEST_TIMEOUT, larder_path, run_command, run_tool, temp_dir_on_disk, temp_dir_on_tmpfs,
};

/// Number of images of each kind.
const IMAGES: u64 = 4;
/// Number of kills per image.
const KILLS: u64 = 4;

/// Starts qemu-io over NBD, with unbuffered output.
fn client(served: &Served, flushed: &[Operation], unsure: &[Operation]) -> Process {
    let mut command = Command::new("stdbuf");
    command.args(["-oL", "qemu-io", "-f", "raw", "-d", "unmap"]);
    for line in commands(flushed) {
        command.args(["-c", &line]);
    }
    command.args(["-c", "flush", "-c", QEMU_IO_MARKER.0]);
    for line in commands(unsure) {
        command.args(["-c", &line]);
    }
    command.arg(served.uri());
    Process::start(command).expect("starts")
}

/// Compressed clusters that share a host cluster are overwritten and flushed, which frees the host cluster. Then data
/// goes there, and the server is killed before another flush. Until then the image has the cluster's old refcount.
#[test]
fn reused_compressed_cluster_survives_kill() {
    for leaves in [None, Some("discard 1M 128k")] {
        let folder = temp_dir_on_tmpfs();
        let image = folder.path().join("image.qcow2");
        run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "4M"]);
        let packed = ["write -c -P 11 0 64k", "write -c -P 22 64k 64k", "write -c -P 33 128k 64k"];
        assert!(qemu_io("qcow2", text(&image), &packed).0);
        let served = Served::new(&image, &[]);
        let rewrite = ["write -P 1 0 64k", "write -P 2 64k 64k", "write -P 3 128k 64k", "flush"];
        let reuse = (16..22).map(|cluster| format!("write -P 4 {}k 64k", cluster * 64));
        let commands = rewrite.map(str::to_owned).into_iter().chain(reuse);
        let client = served.io_without_flush(&commands.chain(leaves.map(str::to_owned)).collect::<Vec<_>>());
        served.kill();
        drop(client);
        let served = Served::new(&image, &[]);
        let kept = ["read -P 1 0 64k", "read -P 2 64k 64k", "read -P 3 128k 64k", "read -P 4 1152k 256k"];
        served.io(&kept);
        served.stop();
        health(&image);
        assert!(qemu_io("qcow2", text(&image), &kept).0);
    }
}

fn kill_under_load(kind: Kind, seed: u64) {
    let mut random = Random::new(seed);
    let spec = Spec::new(kind, &mut random);
    let folder = Folder::new(if random.below(2) == 0 { temp_dir_on_disk() } else { temp_dir_on_tmpfs() });
    println!("{kind:?}, seed {seed}, in {}: {spec:#?}", folder.path().display());
    let made = spec.make(&folder.path(), &mut random);
    let into = folder.path().join("dump");
    let kept = Kept::of(&made);
    let mut model = Model::new(dump("qcow2", text(&made.image), &into));
    for _ in 0..KILLS {
        let served = Served::new(&made.image, &options(&mut random));
        // The server may see unflushed changes of its predecessor, which QEMU does not.
        let is = served.dump();
        if let Err(wrong) = model.check_after_kill(&is) {
            panic!("after a kill and a start: {wrong}");
        }
        model = Model::new(is);
        let flushed = made.disk.operations(&mut random, 12);
        model.apply(&flushed);
        model.flushed();
        // The server is killed after some answers, while other requests are in flight.
        let unsure = made.disk.operations(&mut random, 40);
        model.apply(&unsure);
        println!("{}\n---\n{}", commands(&flushed).join("\n"), commands(&unsure).join("\n"));
        // Each operation prints two lines.
        let answers = 2 * unsure.iter().filter(|operation| operation.len > 0).count() as u64;
        let client = client(&served, &flushed, &unsure);
        client.wait_for(QEMU_IO_MARKER.1, TEST_TIMEOUT).expect("an answer");
        let said = client.output();
        let before = said.lines().take_while(|line| !line.contains(QEMU_IO_MARKER.1));
        assert!(!before.clone().any(|line| line.contains("failed")), "{said}");
        let lines = before.count() + 1 + random.below(answers) as usize;
        client.wait_for_after(lines, "", TEST_TIMEOUT).expect("an answer");
        served.kill();
        drop(client);

        health(&made.image);
        let is = dump("qcow2", text(&made.image), &into);
        if let Err(wrong) = model.check_after_kill(&is) {
            panic!("after a kill: {wrong}");
        }
        kept.check(&made);
        if random.below(3) == 0 {
            // Once the journal is discarded, QEMU's later writes are the valid ones.
            let operations = made.disk.operations(&mut random, 6);
            let (success, said) = qemu_io("qcow2", text(&made.image), &commands(&operations));
            assert!(success, "{said}");
            let mut command = Command::new(larder_path());
            command.args(["disk", "check", "--discard-journal", text(&made.image)]);
            let (code, said) = run_command(command);
            assert!(matches!(code, Some(0 | 1)), "{said}");
            model = Model::new(dump("qcow2", text(&made.image), &into));
        }
    }
    Served::new(&made.image, &[]).stop();
    health(&made.image);
}

fn kill_under_loads(kinds: &[Kind]) {
    for kind in kinds {
        for number in 0..images(IMAGES) {
            kill_under_load(*kind, 1_000_000 + 10_000 * (*kind as u64 + 1) + number);
        }
    }
}

/// After a kill under load the image is sound, and has all flushed data.
#[test]
fn kill_leaves_plain_images_sound() {
    kill_under_loads(&[Kind::Plain, Kind::Version2, Kind::SmallClusters, Kind::LargeClusters]);
}

/// After a kill under load, backing chains, images with snapshots and images with subclusters are sound.
#[test]
fn kill_leaves_chains_and_snapshots_sound() {
    kill_under_loads(&[Kind::Chain, Kind::Snapshots, Kind::ExtendedL2]);
}

/// After a kill under load, compressed and preallocated images and images with a data file are sound.
#[test]
fn kill_leaves_compressed_and_split_sound() {
    kill_under_loads(&[Kind::Compressed, Kind::Preallocated, Kind::DataFile]);
}
