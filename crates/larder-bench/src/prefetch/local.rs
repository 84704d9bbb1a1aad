//! The part `fio`: the published table over a raw image on the disk.

use super::fio::Job;
use super::place::Place;
use super::rows::{self, BLOCK, RowServers};
use super::servers::text;
use super::{Arguments, DISK_BYTES, GIB};
use crate::figures::median;

/// Size of the reads that measure the disk's bandwidth.
const LONG_READ_BYTES: u64 = 128 << 10;

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let seconds = arguments.seconds(1.0);
    let scratch = arguments.place()?;
    let image = scratch.raw_image(DISK_BYTES)?;
    let memory = Place::new("/dev/shm".as_ref())?;
    let image_in_memory = memory.raw_image(DISK_BYTES)?;
    let servers = RowServers::of(text(&image)?, text(&image_in_memory)?, "--read-only");
    let long = Job { random: false, block: LONG_READ_BYTES, depth: 16, jobs: 1, seconds, size: DISK_BYTES };
    let short = Job { block: BLOCK, depth: 64, random: true, ..long };
    let (mut sequential_bandwidths, mut random_iops) = (Vec::new(), Vec::new());
    let mut rows = rows::all(None);
    for _ in 0..arguments.rounds(3) {
        sequential_bandwidths.push(long.run_file(&image)?.bytes_per_second);
        random_iops.push(short.run_file(&image)?.iops);
        for row in &mut rows {
            let job = row.job(DISK_BYTES, seconds);
            row.measure(&scratch, &job, &servers)?;
        }
    }
    let (bandwidth, random) = (median(&sequential_bandwidths), median(&random_iops));
    println!(
        "fio over NBD, a raw image of {} GiB, each job on its own part. The disk alone: {:.0} MB/s with sequential reads of \
         {} KiB, which is {:.0} reads of 4 KiB per second, and {random:.0} random reads per second. *Bound*: the gain of a \
         read-ahead that has every read in memory, limited by the disk's bandwidth\n",
        DISK_BYTES / GIB,
        bandwidth / 1e6,
        LONG_READ_BYTES >> 10,
        bandwidth / BLOCK as f64,
    );
    rows::print(&rows, |_| bandwidth / BLOCK as f64);
    Ok(())
}
