//! The part `tpch`: completion time by the ratio of the memory that the program uses to its limit.
//!
//! Each row is a process of its own. It loads its tables and runs two passes without a limit; the second one is the
//! row's reference. Then the limit is set, and all memory beyond it is evicted. The next pass is the cold one, those
//! after it are warm. All passes of all rows must have the same results.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::ValueEnum as _;

use super::cgroup::Cgroup;
use super::larder::Larder;
use super::pager::{Done, Kernel, Nobody, Pager, Variant};
use super::plot::{self, Line, Panel};
use super::swap::{SwapFile, Zswap};
use super::working_set;
use super::workload::{Kit, QueryPass, Resident, Workload};
use super::{Arguments, MIB, zswap_pool_percent};
use crate::figures::median;
use crate::prefetch::place::Place;

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("control groups and swap files need root: run this as root");
    }
    let mut experiment = Experiment::new(arguments)?;
    let unlimited = experiment.unlimited()?;
    let is_kernel = |variant: &Variant| matches!(variant, Variant::Swap | Variant::Zswap);
    let _swap = match arguments.variants.iter().any(is_kernel) {
        false => None,
        true => Some(SwapFile::new(&experiment.place, experiment.kit.ram())?),
    };
    let working_set = match (arguments.working_set, &_swap) {
        (Some(mib), _) => Some(mib * MIB),
        (None, Some(_)) => Some(experiment.working_set(unlimited.peak)?),
        (None, None) => None,
    };
    unlimited.print(working_set);
    let mut rows = Vec::new();
    for variant in Variant::value_variants().iter().copied() {
        if !arguments.variants.contains(&variant) {
            continue;
        }
        match variant {
            Variant::None => rows.push(Row::new(variant, None)),
            _ => rows.extend(arguments.levels.iter().map(|percent| {
                let limit = unlimited.peak * 100 / u64::from(*percent);
                Row::new(variant, Some(Level { percent: *percent, limit }))
            })),
        }
    }
    // Pagers take turns at each level, so that other load on the machine affects them alike.
    rows.sort_by_key(|row| row.level.map_or(0, |level| level.percent));
    let measured = experiment.measure_all(&mut rows);
    // Prints the completed rows even after an error.
    rows.retain(|row| !row.runs.is_empty());
    experiment.print(&rows, working_set)?;
    measured?;
    if let Some(path) = &arguments.plot {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(path, plot::svg(&panels(&rows))).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

struct Experiment<'a> {
    arguments: &'a Arguments,
    kit: Kit,
    place: Place,
    compressor: Option<&'a str>,
    /// Results that all passes must have.
    digest: Option<String>,
}

/// Memory limit of a program.
#[derive(Clone, Copy)]
struct Level {
    /// The peak, in % of the limit.
    percent: u32,
    /// Limit in bytes.
    limit: u64,
}

/// One row of the table.
struct Row {
    variant: Variant,
    level: Option<Level>,
    runs: Vec<Run>,
}

/// A process that was measured.
struct Run {
    /// Seconds of a pass before there was a limit.
    unlimited: f64,
    /// Passes under the limit, the cold one first. There are fewer if the OOM killer has killed the program.
    passes: Vec<QueryPass>,
}

impl Run {
    fn cold(&self) -> Option<&QueryPass> {
        self.passes.first()
    }

    fn warm(&self) -> &[QueryPass] {
        self.passes.get(1..).unwrap_or_default()
    }
}

/// Memory use of the program without a limit.
struct UnlimitedMemory {
    peak: u64,
    loading: u64,
    /// Peak of a late pass, when nothing is left of earlier ones.
    last: u64,
    resident: Resident,
    touched: u64,
}

impl<'a> Experiment<'a> {
    fn new(arguments: &'a Arguments) -> anyhow::Result<Self> {
        let compressor = match arguments.variants.contains(&Variant::Zswap) {
            true => Some(Zswap::compressor(&arguments.compressors)?),
            false => None,
        };
        Ok(Self {
            kit: Kit::new(arguments.scale, arguments.threads)?,
            place: Place::new(&arguments.folder)?,
            compressor,
            digest: None,
            arguments,
        })
    }

    /// Runs a pass, which must have the same results as the others.
    fn pass(&mut self, workload: &mut Workload, pager: &dyn Pager, label: &str) -> anyhow::Result<QueryPass> {
        let pass = workload.pass(pager)?;
        eprintln!("{label}: {pass}");
        let digest = self.digest.get_or_insert_with(|| pass.digest.clone());
        if *digest != pass.digest {
            bail!("{label}: the queries' results differ from those of the first pass");
        }
        Ok(pass)
    }

    fn unlimited(&mut self) -> anyhow::Result<UnlimitedMemory> {
        let cgroup = Arc::new(Cgroup::new("unlimited")?);
        let mut workload = self.kit.start(&cgroup)?;
        let loading = cgroup.used_most()?;
        cgroup.reset_used_max()?;
        let pager = Nobody { cgroup: Arc::clone(&cgroup) };
        for _ in 0..self.arguments.passes {
            self.pass(&mut workload, &pager, "unlimited")?;
        }
        // The allocator keeps freed memory for some seconds, also after loading: the first passes have the peak.
        let (peak, resident) = (cgroup.used_most()?, workload.resident()?);
        workload.clear_referenced()?;
        let last = self.pass(&mut workload, &pager, "unlimited")?.used_most;
        let touched = workload.touched()?;
        Ok(UnlimitedMemory { peak, loading, last, resident, touched })
    }

    fn working_set(&mut self, peak: u64) -> anyhow::Result<u64> {
        let cgroup = Arc::new(Cgroup::new("working-set")?);
        let mut workload = self.kit.start(&cgroup)?;
        let pager = Kernel::new(Arc::clone(&cgroup), None);
        workload.pass(&pager)?;
        working_set::measure(&mut workload, &pager, peak)
    }

    fn measure_all(&mut self, rows: &mut [Row]) -> anyhow::Result<()> {
        for _ in 0..self.arguments.rounds {
            for row in &mut *rows {
                let run = self.measure(row)?;
                row.runs.push(run);
            }
        }
        Ok(())
    }

    fn measure(&mut self, row: &Row) -> anyhow::Result<Run> {
        let what = row.name();
        // Dropped last: a group can be removed only when it has no processes.
        let cgroup = Arc::new(Cgroup::new("row")?);
        let mut workload = self.kit.start(&cgroup)?;
        let nobody = Nobody { cgroup: Arc::clone(&cgroup) };
        self.pass(&mut workload, &nobody, "loaded")?;
        let unlimited = self.pass(&mut workload, &nobody, "loaded")?.seconds;
        // A pager that is a separate program attaches here.
        let pager: Box<dyn Pager> = match (row.variant, row.level) {
            (Variant::None, _) | (_, None) => Box::new(nobody),
            (Variant::Swap, Some(_)) => Box::new(Kernel::new(Arc::clone(&cgroup), None)),
            (Variant::Zswap, Some(level)) => {
                let zswap =
                    Zswap::on(self.compressor.unwrap_or_default(), zswap_pool_percent(self.arguments, level.limit)?)?;
                Box::new(Kernel::new(Arc::clone(&cgroup), Some(zswap)))
            }
            (Variant::Larder | Variant::Slow, Some(_)) => {
                let slow = row.variant == Variant::Slow;
                let pid = workload.id();
                Box::new(Larder::new(self.arguments, &self.place, Arc::clone(&cgroup), pid, slow)?)
            }
        };
        if let Some(level) = row.level {
            pager.limit(level.limit)?;
        }
        let mut passes = Vec::new();
        for number in 0..self.arguments.passes {
            let what = format!("{what}, {}", if number == 0 { "cold" } else { "warm" });
            match self.pass(&mut workload, &*pager, &what) {
                Ok(pass) => passes.push(pass),
                Err(_) if cgroup.killed()? > 0 => {
                    eprintln!("{what}: the OOM killer has killed the program");
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Run { unlimited, passes })
    }

    fn print(&self, rows: &[Row], working_set: Option<u64>) -> anyhow::Result<()> {
        let read_setting = |path: &str| fs::read_to_string(Path::new(path)).map(|text| text.trim().to_owned());
        println!(
            "\nLinux {}, page-cluster {}, swappiness {}{}; {} under each limit, medians of {}.\n",
            read_setting("/proc/sys/kernel/osrelease")?,
            read_setting("/proc/sys/vm/page-cluster")?,
            read_setting("/sys/fs/cgroup/memory/memory.swappiness")?,
            self.compressor.map_or(String::new(), |name| format!(", zswap with {name} and page-cluster 0")),
            match self.arguments.passes - 1 {
                1 => "a cold and a warm pass".to_owned(),
                warm => format!("a cold and {warm} warm passes"),
            },
            match self.arguments.rounds {
                1 => "the warm ones".to_owned(),
                rounds => format!("the warm ones, and of {rounds} rounds"),
            }
        );
        println!(
            "| level, % | of the working set, % | limit, MiB | | unlimited, s | cold, s | warm, s: median (each) | cold / unlimited | \
             warm / unlimited | used, MiB: mean, peak | faults, cold | faults, warm | from disk, MiB: cold, warm | to disk, \
             MiB: cold, warm | from zswap, MiB: cold, warm |"
        );
        println!("|{}", " --- |".repeat(15));
        for row in rows {
            row.print(working_set, self.arguments.passes);
        }
        Ok(())
    }
}

impl Row {
    fn new(variant: Variant, level: Option<Level>) -> Self {
        Self { variant, level, runs: Vec::new() }
    }

    fn name(&self) -> String {
        match self.level {
            Some(level) => format!("{} at {} %", self.variant.name(), level.percent),
            None => self.variant.name().to_owned(),
        }
    }

    /// Median over the cold passes; NaN if none was completed.
    fn cold(&self, value: impl Fn(&QueryPass) -> f64) -> f64 {
        median(&self.runs.iter().filter_map(Run::cold).map(value).collect::<Vec<_>>())
    }

    fn warm(&self, figure: impl Fn(&QueryPass) -> f64) -> f64 {
        let of_run = |run: &Run| median(&run.warm().iter().map(&figure).collect::<Vec<_>>());
        median(&self.runs.iter().map(of_run).collect::<Vec<_>>())
    }

    /// Median over the runs of a pass's time divided by that without a limit.
    fn slowdown(&self, seconds: impl Fn(&Run) -> f64) -> f64 {
        median(&self.runs.iter().map(|run| seconds(run) / run.unlimited).collect::<Vec<_>>())
    }

    fn cold_slowdown(&self) -> f64 {
        self.slowdown(|run| run.cold().map_or(f64::NAN, |pass| pass.seconds))
    }

    fn warm_slowdown(&self) -> f64 {
        self.slowdown(|run| median(&run.warm().iter().map(|pass| pass.seconds).collect::<Vec<_>>()))
    }

    fn print(&self, working_set: Option<u64>, passes: u32) {
        let level = match self.level {
            Some(Level { percent, limit }) => {
                let of_set =
                    working_set.map_or(String::new(), |set| format!("{:.0}", set as f64 * 100.0 / limit as f64));
                format!("{percent} | {of_set} | {:.0}", limit as f64 / MIB as f64)
            }
            None => "| |".to_owned(),
        };
        let format_or_killed = |figure: f64| match figure.is_nan() {
            true => "killed".to_owned(),
            false => format!("{figure:.2}"),
        };
        // All times behind the median show whether passes get faster or slower.
        let each = self.runs.iter().map(|run| {
            let ended = run.warm().iter().map(|pass| format!("{:.2}", pass.seconds));
            let killed = (run.passes.len() < passes as usize).then(|| "killed".to_owned());
            ended.chain(killed).collect::<Vec<_>>().join(", ")
        });
        let cold_and_warm = |figure: fn(&Done) -> u64| {
            let mib = |pass: &QueryPass| figure(&pass.done) as f64 / MIB as f64;
            format!("{:.0}, {:.0}", self.cold(mib), self.warm(mib))
        };
        let faults = |pass: &QueryPass| pass.done.faults as f64;
        let all = || self.runs.iter().flat_map(|run| &run.passes);
        println!(
            "| {level} | {} | {:.2} | {} | {} ({}) | {} | {} | {:.0}, {} | {:.0} | {:.0} | {} | {} | {} |",
            self.variant.name(),
            median(&self.runs.iter().map(|run| run.unlimited).collect::<Vec<_>>()),
            format_or_killed(self.cold(|pass| pass.seconds)),
            format_or_killed(self.warm(|pass| pass.seconds)),
            each.collect::<Vec<_>>().join("; "),
            format_or_killed(self.cold_slowdown()),
            format_or_killed(self.warm_slowdown()),
            self.warm(|pass| pass.used_mean as f64 / MIB as f64),
            all().map(|pass| pass.used_most).max().unwrap_or(0) / MIB,
            self.cold(faults),
            self.warm(faults),
            cold_and_warm(|done| done.read),
            cold_and_warm(|done| done.written),
            cold_and_warm(|done| done.unpacked),
        );
    }
}

impl UnlimitedMemory {
    fn print(&self, working_set: Option<u64>) {
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        println!(
            "Without a limit: {:.0} MiB at the peak of passes ({:.0} while loading, {:.0} in the last pass); {:.1} % of \
             the resident memory is in the memfd; {:.0} MiB accessed in a warm pass.",
            mib(self.peak),
            mib(self.loading),
            mib(self.last),
            self.resident.inside as f64 * 100.0 / self.resident.all as f64,
            mib(self.touched)
        );
        if let Some(set) = working_set {
            println!(
                "The warm working set: {:.0} MiB, {:.0} % of the peak; the limit equals it at a level of {:.0} %.",
                mib(set),
                set as f64 * 100.0 / self.peak as f64,
                self.peak as f64 * 100.0 / set as f64
            );
        }
    }
}

/// Returns the measured lines, and the published ones as described in words.
fn panels(rows: &[Row]) -> [Panel; 3] {
    let lines = |figure: fn(&Row) -> f64| {
        let of = |variant: Variant| {
            let rows = rows.iter().filter(move |row| row.variant == variant);
            let points = rows.filter_map(|row| Some((f64::from(row.level?.percent), figure(row))));
            let points = points.filter(|(_, value)| value.is_finite());
            Line { name: variant.name(), colour: colour(variant), points: points.collect() }
        };
        let lines = Variant::value_variants().iter().copied().map(of);
        lines.filter(|line| !line.points.is_empty()).collect()
    };
    [
        Panel { title: "Cold pass, time relative to no limit", lines: lines(Row::cold_slowdown), scale: true },
        Panel { title: "Warm pass, time relative to no limit", lines: lines(Row::warm_slowdown), scale: true },
        published(),
    ]
}

fn colour(variant: Variant) -> &'static str {
    match variant {
        Variant::None => "#888",
        Variant::Swap => "#c33",
        Variant::Zswap => "#36c",
        Variant::Larder => "#393",
        Variant::Slow => "#963",
    }
}

/// Draws the published shape from its description, since the lines themselves were not at hand: up to 125 % they are
/// much the same; at 150 % the SSD reaches 88 % of the performance of memory, and 2.3 times that of the SAN.
fn published() -> Panel {
    let ssd = 1.0 / 0.88;
    Panel {
        title: "Published (Intel IT, 2016), drawn from its description, no scale",
        lines: vec![
            Line { name: "swap to SAN", colour: "#c33", points: vec![(100.0, 1.0), (125.0, 1.25), (150.0, ssd * 2.3)] },
            Line { name: "swap to SSD", colour: "#393", points: vec![(100.0, 1.0), (125.0, 1.05), (150.0, ssd)] },
        ],
        scale: false,
    }
}
