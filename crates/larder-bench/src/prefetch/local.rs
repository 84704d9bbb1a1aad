//! The part `fio`: the published table over a raw image on the disk.

use super::fio::Job;
use super::place::Place;
use super::rows::{self, BLOCK, Servers};
use super::servers::text;
use super::{Arguments, DISK_BYTES, GIB};
use crate::figures::median;

/// Size of the reads that measure the disk's bandwidth.
const LONG_READ: u64 = 128 << 10;

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let seconds = arguments.seconds(1.0);
    let place = arguments.place()?;
    let image = place.raw_image(DISK_BYTES)?;
    let memory = Place::new("/dev/shm".as_ref())?;
    let image_in_memory = memory.raw_image(DISK_BYTES)?;
    let servers = Servers::of(text(&image)?, text(&image_in_memory)?, "--read-only");
    let long = Job {
        random: false,
        block: LONG_READ,
        depth: 16,
        jobs: 1,
        seconds,
        size: DISK_BYTES,
    };
    let short = Job {
        block: BLOCK,
        depth: 64,
        random: true,
        ..long
    };
    let (mut in_order, mut at_random) = (Vec::new(), Vec::new());
    let mut rows = rows::all(None);
    for _ in 0..arguments.rounds(3) {
        in_order.push(long.run_file(&image)?.bytes_per_second);
        at_random.push(short.run_file(&image)?.iops);
        for row in &mut rows {
            let job = row.job(DISK_BYTES, seconds);
            row.measure(&place, &job, &servers)?;
        }
    }
    let (ceiling, random) = (median(&in_order), median(&at_random));
    println!(
        "fio over NBD, a raw image of {} GiB, each job on its own part. The disk alone: {:.0} MB/s with sequential reads of \
         {} KiB, which is {:.0} reads of 4 KiB per second, and {random:.0} random reads per second. *Bound*: the gain of a \
         read-ahead that has every read in memory, limited by the disk's bandwidth\n",
        DISK_BYTES / GIB,
        ceiling / 1e6,
        LONG_READ >> 10,
        ceiling / BLOCK as f64,
    );
    rows::print(&rows, |_| ceiling / BLOCK as f64);
    Ok(())
}
