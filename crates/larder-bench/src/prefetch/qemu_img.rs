//! The part `qemu-img`: `qemu-img bench` reads a qcow2 image sequentially, by itself and through Larder.
//!
//! The published table is that of Virtuozzo's PCache, 2016: seconds of `qemu-img bench -c 262144 -s 4096 -S 4096 -t
//! none` without and with it.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, bail};

use super::servers::{Export, Larder, Prefetch, Serve, text};
use super::{Arguments, DISK_BYTES};
use crate::figures::{median, ratio};
use crate::vhost_user::debian13;
use crate::vhost_user::server::killed_with_parent;

/// Requests in flight, and the published seconds without and with read-ahead.
const DEPTHS: [(u32, f64, f64); 3] = [(1, 19.594, 4.378), (8, 5.933, 4.356), (64, 4.659, 4.204)];

/// Requests of a measurement, as published: 1 GiB.
const COUNT: u64 = 262_144;

/// Reader of the image.
#[derive(Clone, Copy)]
enum Reader {
    /// `qemu-img` itself, with its thread pool, as published.
    Threads,
    /// `qemu-img` itself with Linux AIO.
    Native,
    /// Larder, for `qemu-img` over vhost-user-blk.
    Larder(Prefetch),
}

const READERS: [Reader; 4] =
    [Reader::Threads, Reader::Native, Reader::Larder(Prefetch::Off), Reader::Larder(Prefetch::Default)];

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let place = arguments.place()?;
    let image = place.qcow2_image(DISK_BYTES)?;
    let image = text(&image)?;
    let count = arguments.count.unwrap_or(COUNT);
    let mut seconds = vec![vec![Vec::new(); READERS.len()]; DEPTHS.len()];
    for _ in 0..arguments.rounds(2) {
        for ((depth, ..), row) in DEPTHS.iter().zip(&mut seconds) {
            for (reader, values) in READERS.iter().zip(row) {
                let server = match reader {
                    Reader::Larder(prefetch) => Some(
                        Serve {
                            image,
                            format: "qcow2",
                            prefetch: *prefetch,
                            export: Export::VhostUser,
                            options: "--read-only",
                        }
                        .start(&place)?,
                    ),
                    _ => None,
                };
                let socket = server.as_ref().map(Larder::socket);
                values.push(bench(*reader, image, socket, count, *depth)?);
            }
        }
    }
    println!(
        "`qemu-img bench -c {count} -s 4096 -S 4096 -t none`, a qcow2 image of 2 GiB with all its clusters written, seconds\n"
    );
    println!(
        "| depth | QEMU | QEMU, `-n` | Larder, off | Larder, on | gain over QEMU | over QEMU, `-n` | over off | published |"
    );
    println!("|{}", " --- |".repeat(9));
    for ((depth, without, with), row) in DEPTHS.iter().zip(&seconds) {
        print!("| {depth} |");
        for values in row {
            print!(" {:.3} |", median(values));
        }
        let [threads, native, off, on] = &row[..] else { continue };
        for other_seconds in [threads, native, off] {
            print!(" {} |", ratio(other_seconds, on));
        }
        println!(" {:.2} |", without / with);
    }
    Ok(())
}

/// Returns the seconds that `qemu-img bench` reports.
fn bench(reader: Reader, image: &str, socket: Option<&Path>, count: u64, depth: u32) -> anyhow::Result<f64> {
    let mut command = killed_with_parent(text(debian13()?)?);
    command.args(["qemu-img", "bench", "-s", "4096", "-S", "4096", "-t", "none"]);
    command.args(["-c", &count.to_string(), "-d", &depth.to_string()]);
    match (reader, socket) {
        (_, Some(socket)) => command
            .args(["--image-opts", &format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", text(socket)?)]),
        (Reader::Native, None) => command.args(["-n", "-f", "qcow2", image]),
        (_, None) => command.args(["-f", "qcow2", image]),
    };
    let output = command.stdin(Stdio::null()).output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("qemu-img bench: {}{stdout}", String::from_utf8_lossy(&output.stderr));
    }
    let seconds = stdout.lines().find_map(|line| {
        let rest = line.strip_prefix("Run completed in ")?;
        rest.split_whitespace().next()?.parse().ok()
    });
    seconds.with_context(|| format!("qemu-img bench reports no duration: {stdout}"))
}
