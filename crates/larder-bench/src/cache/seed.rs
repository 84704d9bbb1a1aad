//! The part `seed`: QLC behind a cache on Optane, against TLC without a cache, by the number of VMs.

use std::time::Duration;

use anyhow::{Context, ensure};

use super::Arguments;
use super::closed::{self, MeasuredInterval};
use super::drive::{BLOCK, Nanos};
use super::plot::{self, Line, Panel};
use super::rack::{DriveConfig, SimulatedDrives};
use super::sheets::{self, Drive};
use super::vms::{Hits, Vms};
use crate::prefetch::place::Place;

/// Cached parts of a disk, out of 15.
const CACHED_FIFTEENTHS: u64 = 12;

/// Share of reads among the requests.
const READS: f64 = 0.7;

/// Index of the cache's drive.
const FAST: usize = 0;

/// Measured interval of the simulation that gives the bound, after a second of warm-up.
pub(super) const SPAN: MeasuredInterval = MeasuredInterval { start: 1_000_000_000, end: 3_000_000_000 };

/// Seconds of one VM's reads from drives that answer at once, which measure the latency of the programs alone.
const BASELINE_SECONDS: f64 = 1.0;

/// Read latencies, in us.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latency {
    pub(super) mean_us: f64,
    /// 80th percentile.
    pub(super) p80_us: f64,
}

impl Latency {
    /// Summarizes `values`; all fields are 0 if there are none.
    pub(super) fn of(values: &[Nanos]) -> Self {
        let mut values = values.to_vec();
        values.sort_unstable();
        let Some(p80) = values.get(values.len() * 4 / 5) else {
            return Self::default();
        };
        Self { mean_us: values.iter().sum::<Nanos>() as f64 / values.len() as f64 / 1e3, p80_us: *p80 as f64 / 1e3 }
    }

    /// Summarizes latencies measured by the host's clock, which runs `dilation` times faster than the drives'.
    fn measured(values: &[Duration], dilation: f64) -> Self {
        let nanos: Vec<Nanos> = values.iter().map(|value| value.as_nanos() as Nanos).collect();
        let Self { mean_us: mean, p80_us: p80 } = Self::of(&nanos);
        Self { mean_us: mean / dilation, p80_us: p80 / dilation }
    }
}

/// Measurements at one number of VMs.
#[derive(Clone, Copy, Debug)]
struct Point {
    vms: usize,
    measured: Latency,
    model_bound: Latency,
    cache: Option<Cached>,
    /// Mean delay of the drives' answers behind the model, in us of the drives' time.
    lateness_us: f64,
    /// Processors that the servers kept busy.
    cpus_busy: f64,
}

/// Cache effectiveness in one measurement.
#[derive(Clone, Copy, Debug)]
struct Cached {
    /// Share of the reads that hit the cache.
    hit_share: f64,
    /// Share of the misses that filled the cache.
    fill_share: f64,
    /// Blocks written to the fast drive per request, including fills and the cache's own metadata.
    fast_writes_per_request: f64,
}

/// The three configurations that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contender {
    Tlc,
    Qlc,
    Cached,
}

impl Contender {
    const ALL: [Self; 3] = [Self::Tlc, Self::Qlc, Self::Cached];

    fn drives(self) -> &'static [Drive] {
        const CACHED: [Drive; 2] = [sheets::OPTANE, sheets::QLC];
        match self {
            Self::Tlc => &[sheets::TLC],
            Self::Qlc => &[sheets::QLC],
            Self::Cached => &CACHED,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tlc => "TLC",
            Self::Qlc => "QLC",
            Self::Cached => "QLC, cached",
        }
    }

    fn colour(self) -> &'static str {
        match self {
            Self::Tlc => "#c0392b",
            Self::Qlc => "#7f8c8d",
            Self::Cached => "#2471a3",
        }
    }
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(arguments.dilation > 0.0, "--dilation must be more than 0");
    let scratch = Place::new(&arguments.folder)?;
    let mut lines = Vec::new();
    for contender in Contender::ALL {
        lines.push(measure(arguments, &scratch, contender)?);
    }
    print(&lines);
    if let Some(path) = &arguments.plot {
        let chart = plot::svg(&[
            panel("average read latency, us", &lines, |latency| latency.mean_us),
            panel("80th percentile of read latencies, us", &lines, |latency| latency.p80_us),
        ]);
        std::fs::write(path, chart).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Measures a configuration at every number of VMs.
fn measure(arguments: &Arguments, scratch: &Place, contender: Contender) -> anyhow::Result<Vec<Point>> {
    let count = arguments.vms.iter().copied().max().unwrap_or(0);
    let disk = arguments.disk << 20;
    let bays: Vec<DriveConfig> = contender
        .drives()
        .iter()
        .map(|drive| DriveConfig {
            model: drive.model(arguments.programs),
            partition_bytes: match drive.name == sheets::OPTANE.name {
                true => disk * CACHED_FIFTEENTHS / 15,
                false => disk,
            },
        })
        .collect();
    let rack = SimulatedDrives::start(scratch, &bays, count, arguments.dilation)?;
    let slow = bays.len() - 1;
    let image = |number| rack.uri(slow, number).to_owned();
    let options = |number| match contender {
        Contender::Cached => format!("--cache {} --cache-mode wt", rack.uri(FAST, number)),
        Contender::Tlc | Contender::Qlc => String::new(),
    };
    let vms = Vms::start(scratch, count, disk, image, options)?;
    let cache_hits = || match contender {
        Contender::Cached => vms.hits(),
        Contender::Tlc | Contender::Qlc => Ok(Hits::default()),
    };
    let passes = if contender == Contender::Cached { arguments.warm } else { 0 };
    for pass in 0..passes {
        let counters_before = cache_hits()?;
        vms.read_all(pass)?;
        let hits = cache_hits()?.since(counters_before);
        println!("Warm-up pass {}: {:.1} % hits.", pass + 1, hits.ratio() * 100.0);
    }
    let baseline = Latency::measured(&vms.run(1, 0.0, BASELINE_SECONDS)?, 1.0);
    println!(
        "{}: with drives without latency, a read by one VM takes {:.0} us by this machine's clock, {:.2} us by the \
         drives'.",
        contender.name(),
        baseline.mean_us,
        baseline.mean_us / arguments.dilation
    );
    rack.set_timed(true);
    let mut points = Vec::new();
    for &count in &arguments.vms {
        let (counters_before, cpu) = (cache_hits()?, vms.cpu_time()?);
        rack.take_mean_lateness();
        rack.take_written_blocks(FAST);
        let done = vms.run(count, arguments.before, arguments.seconds)?;
        let late = rack.take_mean_lateness().as_secs_f64() * 1e6 / arguments.dilation;
        let fast_writes = rack.take_written_blocks(FAST);
        let cpu = (vms.cpu_time()? - cpu).as_secs_f64();
        let hits = cache_hits()?.since(counters_before);
        let (cached, bound) = match (contender, &bays[..]) {
            (Contender::Cached, [fast, slow]) => {
                let reads = (hits.hits + hits.misses) as f64;
                let cached = Cached {
                    hit_share: hits.ratio(),
                    fill_share: hits.filled_bytes as f64 / (hits.misses * BLOCK) as f64,
                    fast_writes_per_request: fast_writes as f64 / (reads / READS),
                };
                let bound = closed::cached(fast.model, slow.model, count, disk, cached.hit_share, SPAN);
                (Some(cached), bound)
            }
            (_, bays) => (None, closed::run_on_one_drive(bays[0].model, count, disk, SPAN)),
        };
        points.push(Point {
            vms: count,
            measured: Latency::measured(&done, arguments.dilation),
            model_bound: Latency::of(&bound.read_latencies),
            cache: cached,
            lateness_us: late,
            cpus_busy: cpu / (arguments.before + arguments.seconds),
        });
    }
    Ok(points)
}

fn print(lines: &[Vec<Point>]) {
    let [tlc, qlc, cached] = lines else { return };
    println!(
        "\nReads, us of the drives' time: average and 80th percentile, each with its ratio to the models alone.\n"
    );
    println!("| VMs | TLC | QLC | QLC, cached | gain, average | gain, P80 |");
    println!("|{}", " --- |".repeat(6));
    let with_bound_ratio = |point: &Point| {
        format!(
            "{:.0} ({:.2}), {:.0} ({:.2})",
            point.measured.mean_us,
            point.measured.mean_us / point.model_bound.mean_us,
            point.measured.p80_us,
            point.measured.p80_us / point.model_bound.p80_us
        )
    };
    for ((tlc, qlc), cached) in tlc.iter().zip(qlc).zip(cached) {
        println!(
            "| {} | {} | {} | {} | {:.2} | {:.2} |",
            tlc.vms,
            with_bound_ratio(tlc),
            with_bound_ratio(qlc),
            with_bound_ratio(cached),
            tlc.measured.mean_us / cached.measured.mean_us,
            tlc.measured.p80_us / cached.measured.p80_us
        );
    }
    println!(
        "\nThe cache, and the overhead of this machine: lateness of answers in us of the drives' time, and processors used by the servers.\n"
    );
    println!(
        "| VMs | hits, % | misses filled, % | writes to Optane per request | lateness, us: TLC, QLC, cached | processors |"
    );
    println!("|{}", " --- |".repeat(6));
    for ((tlc, qlc), cached) in tlc.iter().zip(qlc).zip(cached) {
        let Some(cache) = cached.cache else { continue };
        println!(
            "| {} | {:.1} | {:.1} | {:.2} | {:.2}, {:.2}, {:.2} | {:.2}, {:.2}, {:.2} |",
            tlc.vms,
            cache.hit_share * 100.0,
            cache.fill_share * 100.0,
            cache.fast_writes_per_request,
            tlc.lateness_us,
            qlc.lateness_us,
            cached.lateness_us,
            tlc.cpus_busy,
            qlc.cpus_busy,
            cached.cpus_busy
        );
    }
}

fn panel(title: &'static str, lines: &[Vec<Point>], value: fn(&Latency) -> f64) -> Panel {
    let line = |(contender, points): (Contender, &Vec<Point>)| Line {
        name: contender.name(),
        colour: contender.colour(),
        points: points.iter().map(|point| (point.vms as f64, value(&point.measured))).collect(),
    };
    Panel { title, lines: Contender::ALL.into_iter().zip(lines).map(line).collect() }
}
