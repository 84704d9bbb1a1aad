//! The part `memory`: the peak memory of read-ahead, whatever is read.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder_block::ByteLen;

use super::fio::Job;
use super::rows::BLOCK;
use super::servers::{Export, Larder, Prefetch, Serve, text};
use super::{Arguments, DISK_BYTES};
use crate::figures::{median, spread};

/// Values of the option, in MiB.
const PREFETCH_MIB: [u64; 3] = [1, 4, 64];

const LOOK_EVERY: Duration = Duration::from_millis(5);

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let place = arguments.place()?;
    let image = place.raw_image(DISK_BYTES)?;
    let job =
        Job { random: false, block: BLOCK, depth: 32, jobs: 16, seconds: arguments.seconds(3.0), size: DISK_BYTES };
    let serve = |prefetch| -> anyhow::Result<Larder> {
        let serve =
            Serve { image: text(&image)?, format: "raw", prefetch, export: Export::Nbd, options: "--read-only" };
        serve.start(&place)
    };
    let mut without = Vec::new();
    let mut reported = vec![Vec::new(); PREFETCH_MIB.len()];
    let mut with = vec![Vec::new(); PREFETCH_MIB.len()];
    for _ in 0..arguments.rounds(3) {
        without.push(most(&serve(Prefetch::Off)?, &job)?);
        for ((option, with), reported) in PREFETCH_MIB.iter().zip(&mut with).zip(&mut reported) {
            let larder = serve(Prefetch::Of(ByteLen::mib(*option)))?;
            with.push(most(&larder, &job)?);
            reported.push(larder.statistics()?.memory as f64 / 1024.0);
        }
    }
    println!(
        "Peak anonymous memory of the server (`RssAnon`), sampled every {LOOK_EVERY:?}, while {} jobs read sequentially \
         at depth {}; KiB\n",
        job.jobs, job.depth
    );
    println!(
        "| `--prefetch` | memory | increase over no read-ahead | share of the option | `memory` of `larder status` |"
    );
    println!("|{}", " --- |".repeat(5));
    println!("| off | {:.0} ({}) | | | |", median(&without), spread(&without, 0));
    for ((option, with), reported) in PREFETCH_MIB.iter().zip(&with).zip(&reported) {
        let increase: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with - without).collect();
        println!(
            "| {option} MiB | {:.0} ({}) | {:.0} ({}) | {:.2} | {:.0} |",
            median(with),
            spread(with, 0),
            median(&increase),
            spread(&increase, 0),
            median(&increase) / (option << 10) as f64,
            median(reported)
        );
    }
    Ok(())
}

/// Returns Larder's peak memory while the job runs, in KiB.
fn most(larder: &Larder, job: &Job) -> anyhow::Result<f64> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let mut most = 0;
            while !stop.load(Ordering::Relaxed) {
                most = most.max(larder.server().memory_bytes()?);
                std::thread::sleep(LOOK_EVERY);
            }
            anyhow::Ok(most)
        });
        let measured = job.run_nbd(larder.socket());
        stop.store(true, Ordering::Relaxed);
        let most = match sampler.join() {
            Ok(most) => most?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        measured?;
        Ok(most as f64 / 1024.0)
    })
}
