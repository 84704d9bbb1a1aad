//! The part `seed`: QLC behind a cache on Optane, against TLC without a cache, by the number of VMs.

use std::time::Duration;

use anyhow::{Context, ensure};

use super::Arguments;
use super::closed::{self, Span};
use super::drive::{BLOCK, Nanos};
use super::plot::{self, Line, Panel};
use super::rack::{Bay, Rack};
use super::sheets::{self, Drive};
use super::vms::{Hits, Vms};
use crate::prefetch::place::Place;

/// Cached parts of a disk, out of 15.
const CACHED_OF_15: u64 = 12;

/// Share of reads among the requests.
const READS: f64 = 0.7;

/// Index of the cache's drive.
const FAST: usize = 0;

/// Measured interval of the simulation that gives the bound, after a second of warm-up.
pub(super) const SPAN: Span = Span {
    from: 1_000_000_000,
    to: 3_000_000_000,
};

/// Seconds of one VM's reads from drives that answer at once, which measure the latency of the programs alone.
const BARE_SECONDS: f64 = 1.0;

/// Read latencies, in us.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latency {
    pub(super) mean: f64,
    /// 80th percentile.
    pub(super) p80: f64,
}

impl Latency {
    /// Summarizes `values`; all fields are 0 if there are none.
    pub(super) fn of(values: &[Nanos]) -> Self {
        let mut values = values.to_vec();
        values.sort_unstable();
        let Some(p80) = values.get(values.len() * 4 / 5) else {
            return Self::default();
        };
        Self {
            mean: values.iter().sum::<Nanos>() as f64 / values.len() as f64 / 1e3,
            p80: *p80 as f64 / 1e3,
        }
    }

    /// Summarizes latencies measured by the host's clock, which runs `dilation` times faster than the drives'.
    fn measured(values: &[Duration], dilation: f64) -> Self {
        let nanos: Vec<Nanos> = values.iter().map(|value| value.as_nanos() as Nanos).collect();
        let Self { mean, p80 } = Self::of(&nanos);
        Self {
            mean: mean / dilation,
            p80: p80 / dilation,
        }
    }
}

/// Measurements at one number of VMs.
#[derive(Clone, Copy, Debug)]
struct Point {
    vms: usize,
    seen: Latency,
    bound: Latency,
    cached: Option<Cached>,
    /// Mean delay of the drives' answers behind the model, in us of the drives' time.
    late: f64,
    /// Processors that the servers kept busy.
    processors: f64,
}

/// Cache effectiveness in one measurement.
#[derive(Clone, Copy, Debug)]
struct Cached {
    /// Share of the reads that hit the cache.
    hits: f64,
    /// Share of the misses that filled the cache.
    filled: f64,
    /// Blocks written to the fast drive per request, including fills and the cache's own metadata.
    fast_writes: f64,
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
    let place = Place::new(&arguments.folder)?;
    let mut lines = Vec::new();
    for contender in Contender::ALL {
        lines.push(measure(arguments, &place, contender)?);
    }
    print(&lines);
    if let Some(path) = &arguments.plot {
        let drawn = plot::svg(&[
            panel("average read latency, us", &lines, |latency| latency.mean),
            panel("80th percentile of read latencies, us", &lines, |latency| latency.p80),
        ]);
        std::fs::write(path, drawn).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Measures a configuration at every number of VMs.
fn measure(arguments: &Arguments, place: &Place, contender: Contender) -> anyhow::Result<Vec<Point>> {
    let count = arguments.vms.iter().copied().max().unwrap_or(0);
    let disk = arguments.disk << 20;
    let bays: Vec<Bay> = contender
        .drives()
        .iter()
        .map(|drive| Bay {
            model: drive.model(arguments.programs),
            partition: match drive.name == sheets::OPTANE.name {
                true => disk * CACHED_OF_15 / 15,
                false => disk,
            },
        })
        .collect();
    let rack = Rack::start(place, &bays, count, arguments.dilation)?;
    let slow = bays.len() - 1;
    let image = |number| rack.uri(slow, number).to_owned();
    let options = |number| match contender {
        Contender::Cached => format!("--cache {} --cache-mode wt", rack.uri(FAST, number)),
        Contender::Tlc | Contender::Qlc => String::new(),
    };
    let vms = Vms::start(place, count, disk, image, options)?;
    let hits_of = || match contender {
        Contender::Cached => vms.hits(),
        Contender::Tlc | Contender::Qlc => Ok(Hits::default()),
    };
    let passes = if contender == Contender::Cached {
        arguments.warm
    } else {
        0
    };
    for pass in 0..passes {
        let before = hits_of()?;
        vms.read_all(pass)?;
        let hits = hits_of()?.since(before);
        println!("Warm-up pass {}: {:.1} % hits.", pass + 1, hits.ratio() * 100.0);
    }
    let bare = Latency::measured(&vms.run(1, 0.0, BARE_SECONDS)?, 1.0);
    println!(
        "{}: with drives without latency, a read by one VM takes {:.0} us by this machine's clock, {:.2} us by the \
         drives'.",
        contender.name(),
        bare.mean,
        bare.mean / arguments.dilation
    );
    rack.set_timed(true);
    let mut points = Vec::new();
    for &count in &arguments.vms {
        let (before, cpu) = (hits_of()?, vms.cpu_time()?);
        rack.take_lateness();
        rack.take_writes(FAST);
        let done = vms.run(count, arguments.before, arguments.seconds)?;
        let late = rack.take_lateness().as_secs_f64() * 1e6 / arguments.dilation;
        let fast_writes = rack.take_writes(FAST);
        let cpu = (vms.cpu_time()? - cpu).as_secs_f64();
        let hits = hits_of()?.since(before);
        let (cached, bound) = match (contender, &bays[..]) {
            (Contender::Cached, [fast, slow]) => {
                let reads = (hits.hits + hits.misses) as f64;
                let cached = Cached {
                    hits: hits.ratio(),
                    filled: hits.filled as f64 / (hits.misses * BLOCK) as f64,
                    fast_writes: fast_writes as f64 / (reads / READS),
                };
                let bound = closed::cached(fast.model, slow.model, count, disk, cached.hits, SPAN);
                (Some(cached), bound)
            }
            (_, bays) => (None, closed::on_one_drive(bays[0].model, count, disk, SPAN)),
        };
        points.push(Point {
            vms: count,
            seen: Latency::measured(&done, arguments.dilation),
            bound: Latency::of(&bound.reads),
            cached,
            late,
            processors: cpu / (arguments.before + arguments.seconds),
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
    let over = |point: &Point| {
        format!(
            "{:.0} ({:.2}), {:.0} ({:.2})",
            point.seen.mean,
            point.seen.mean / point.bound.mean,
            point.seen.p80,
            point.seen.p80 / point.bound.p80
        )
    };
    for ((tlc, qlc), cached) in tlc.iter().zip(qlc).zip(cached) {
        println!(
            "| {} | {} | {} | {} | {:.2} | {:.2} |",
            tlc.vms,
            over(tlc),
            over(qlc),
            over(cached),
            tlc.seen.mean / cached.seen.mean,
            tlc.seen.p80 / cached.seen.p80
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
        let Some(of_cache) = cached.cached else { continue };
        println!(
            "| {} | {:.1} | {:.1} | {:.2} | {:.2}, {:.2}, {:.2} | {:.2}, {:.2}, {:.2} |",
            tlc.vms,
            of_cache.hits * 100.0,
            of_cache.filled * 100.0,
            of_cache.fast_writes,
            tlc.late,
            qlc.late,
            cached.late,
            tlc.processors,
            qlc.processors,
            cached.processors
        );
    }
}

fn panel(title: &'static str, lines: &[Vec<Point>], value: fn(&Latency) -> f64) -> Panel {
    let line = |(contender, points): (Contender, &Vec<Point>)| Line {
        name: contender.name(),
        colour: contender.colour(),
        points: points
            .iter()
            .map(|point| (point.vms as f64, value(&point.seen)))
            .collect(),
    };
    Panel {
        title,
        lines: Contender::ALL.into_iter().zip(lines).map(line).collect(),
    }
}
