//! The part `density`: the number of VMs for each GiB of memory before they wait for it too much.
//!
//! The VMs are programs that use their memory as VMs of three kinds do ([`Kind`]), so that two processors can run
//! many of them. Their number grows, in a fixed mix, while the memory available to all of them stays the same, their
//! pagers' own included. A number of VMs fits if no kind of them waits for pages for more than a certain share of the
//! time. The programs measure that themselves, in the same way with every pager.
//!
//! With the kernel's swap, all VMs are in one control group with that limit, and the kernel chooses victims among all
//! their pages. With Larder, each VM has a pager and a budget, whose share of the memory depends on the VM's kind.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use larder_vm::control::memory::MemoryPatch;
use larder_vm::control::{fetch_memory, limit_memory};

use super::act::Kind;
use super::cgroup::Cgroup;
use super::pager::{Kernel, Pager, Variant};
use super::swap::{SwapFile, Zswap};
use super::{Arguments, MIB, zswap_pool_percent};
use crate::campaign::find_larder;
use crate::campaign::memory::{Attach, Pager as Attached};
use crate::campaign::process::{Process, killed_with_parent};
use crate::prefetch::place::Place;

/// Limit for operations that may be slow.
const PATIENCE: Duration = Duration::from_secs(300);
/// Interval at which memory use is sampled.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Divisor of the memory that gives the reserve for small growth.
const OVER: u64 = 100;
/// Divisor of the memory that gives the part without initial budgets.
const UNBUDGETED_DIVISOR: u64 = 4;
/// Minimum number of budget adjustments: each one knows the unmanaged memory better.
const BUDGET_ADJUSTMENTS_MIN: u32 = 3;
/// Minimum budget of a VM: Larder accepts no smaller one for its size.
const LEAST: u64 = 18 * MIB;

/// Measurements with a certain number of VMs.
struct Point {
    vms: usize,
    /// For each kind, the mean share of the time that its VMs waited for pages, and the longest wait.
    kinds: Vec<(Kind, f64, Duration)>,
    /// Utilization of the machine's processors, 0 to 1.
    busy: f64,
    /// Completed work, as a share of the work due.
    done: f64,
    used_most: u64,
}

impl Point {
    fn worst(&self) -> f64 {
        self.kinds.iter().map(|(_, stalled, _)| *stalled).fold(0.0, f64::max)
    }
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("control groups and swap files need root: run this as root");
    }
    let experiment = Experiment {
        arguments,
        place: Place::new(&arguments.folder)?,
        compressor: match arguments.variants.contains(&Variant::Zswap) {
            true => Zswap::compressor(&arguments.compressors)?,
            false => "",
        },
    };
    let size = arguments.density_mib * MIB * u64::from(arguments.density_most);
    let is_kernel = |variant: &Variant| matches!(variant, Variant::Swap | Variant::Zswap);
    // The swap file must be removed before its directory.
    let _swap = match arguments.variants.iter().any(is_kernel) {
        false => None,
        true => Some(SwapFile::new(&experiment.place, size)?),
    };
    let mut rows = Vec::new();
    for variant in arguments.variants.iter().copied() {
        if !matches!(variant, Variant::None | Variant::Slow) {
            rows.push((variant, experiment.search(variant)?));
        }
    }
    if arguments.variants.contains(&Variant::None) {
        // Uses the largest number that fits with any pager, which shows the waiting that is not due to memory.
        let fitting = rows.iter().flat_map(|(_, points)| points).filter(|point| experiment.fits(point));
        let vms_max = fitting.map(|point| point.vms).max().unwrap_or(Kind::MIX_SIZE);
        rows.push((Variant::None, experiment.measure(Variant::None, vms_max)?.into_iter().collect()));
    }
    experiment.print(&rows);
    Ok(())
}

struct Experiment<'a> {
    arguments: &'a Arguments,
    place: Place,
    compressor: &'a str,
}

/// Running VMs.
struct Vms {
    keeper: Keeper,
    all: Vec<(Kind, Process)>,
    /// Dropped last: a group can be removed only when it has no processes.
    cgroup: Arc<Cgroup>,
}

/// The pager of the VMs' memory.
enum Keeper {
    Nobody,
    Kernel(Arc<Kernel>),
    Larder(Vec<(Attached, PathBuf)>),
}

impl Drop for Vms {
    fn drop(&mut self) {
        let Keeper::Larder(pagers) = &mut self.keeper else {
            return;
        };
        for (pager, control) in pagers.drain(..) {
            // A killed pager does not remove its files.
            drop(pager);
            if let Some(directory) = control.parent() {
                let _ = std::fs::remove_dir_all(directory);
            }
        }
    }
}

impl Experiment<'_> {
    /// Doubles the number of VMs until they wait too much, then bisects, in steps of one mix.
    fn search(&self, variant: Variant) -> anyhow::Result<Vec<Point>> {
        let mix = Kind::MIX_SIZE;
        let most = self.arguments.density_most as usize / mix;
        let mut points: Vec<Point> = Vec::new();
        let (mut fits, mut fails) = (0, most + 1);
        let mut mix_count = (self.arguments.density_from as usize / mix).clamp(1, most);
        while fails - fits > 1 {
            let point = self.measure(variant, mix_count * mix)?;
            match point.as_ref().is_some_and(|point| self.fits(point)) {
                true => fits = mix_count,
                false => fails = mix_count,
            }
            points.extend(point);
            mix_count = match fails > most {
                true => (mix_count * 2).min(most),
                false => (fits + fails) / 2,
            };
        }
        points.sort_by_key(|point| point.vms);
        Ok(points)
    }

    fn fits(&self, point: &Point) -> bool {
        point.worst() < self.arguments.density_stall / 100.0
    }

    /// Measures this number of VMs; `None` if there is no room for their budgets.
    fn measure(&self, variant: Variant, vms: usize) -> anyhow::Result<Option<Point>> {
        let Some(mut vms) = self.start(variant, vms)? else {
            eprintln!("{}: {vms} VMs: their minimum budgets exceed the limit", variant.name());
            return Ok(None);
        };
        let stop = Arc::new(AtomicBool::new(false));
        let used = {
            let (stop, kernel) = (Arc::clone(&stop), vms.kernel());
            let cgroup = Arc::clone(&vms.cgroup);
            // This also makes the kernel's limit follow zswap's pool.
            thread::spawn(move || {
                let mut most = 0;
                while !stop.load(Ordering::Relaxed) {
                    most = most.max(match &kernel {
                        Some(kernel) => kernel.used()?,
                        None => cgroup.used()?,
                    });
                    thread::sleep(LOOK_EVERY);
                }
                anyhow::Ok(most)
            })
        };
        // First lets the working sets return to memory.
        let interval = Duration::from_secs(self.arguments.density_seconds);
        thread::sleep(interval);
        vms.report()?;
        let before = processors()?;
        thread::sleep(interval);
        let reports = vms.report()?;
        let after = processors()?;
        stop.store(true, Ordering::Relaxed);
        let Ok(used) = used.join() else { bail!("sampling memory use failed: a thread panicked") };
        let used_most = used?;
        let point = Point::new(reports, &vms, (before, after), used_most);
        eprintln!("{}: {}", variant.name(), point.line());
        Ok(Some(point))
    }

    fn start(&self, variant: Variant, count: usize) -> anyhow::Result<Option<Vms>> {
        let cgroup = Arc::new(Cgroup::new("vms")?);
        let limit = self.arguments.density_ram.get();
        let keeper = match variant {
            Variant::None | Variant::Slow => Keeper::Nobody,
            Variant::Swap => Keeper::Kernel(Arc::new(Kernel::new(Arc::clone(&cgroup), None))),
            Variant::Zswap => {
                let zswap = Zswap::on(self.compressor, zswap_pool_percent(self.arguments, limit)?)?;
                Keeper::Kernel(Arc::new(Kernel::new(Arc::clone(&cgroup), Some(zswap))))
            }
            Variant::Larder => Keeper::Larder(Vec::new()),
        };
        let mut vms = Vms { keeper, all: Vec::new(), cgroup };
        if let Keeper::Kernel(kernel) = &vms.keeper {
            kernel.limit(limit)?;
        }
        if matches!(vms.keeper, Keeper::Larder(_)) && LEAST * count as u64 > limit {
            return Ok(None);
        }
        for (number, kind) in Kind::mixed().take(count).enumerate() {
            self.start_vm(&mut vms, number, kind, count)?;
        }
        if let Keeper::Larder(pagers) = &vms.keeper
            && !self.settle(pagers, &vms)?
        {
            return Ok(None);
        }
        Ok(Some(vms))
    }

    /// Starts a VM, which fills its memory once the pager has attached.
    fn start_vm(&self, vms: &mut Vms, number: usize, kind: Kind, count: usize) -> anyhow::Result<()> {
        let mut command = killed_with_parent("sh");
        command.args(["-c", r#"echo $$ >"$0/cgroup.procs" && exec "$@""#]);
        command.arg(vms.cgroup.path()).arg(std::env::current_exe()?);
        command.args(["act-memory", "--as", kind.name(), "--seed", &(number + 1).to_string()]);
        command.args(["--mib", &self.arguments.density_mib.to_string()]);
        let mut process = Process::start(command)?;
        process.wait_for("begins", PATIENCE)?;
        if let Keeper::Larder(pagers) = &mut vms.keeper {
            let directory = self.place.unused("vm");
            std::fs::create_dir(&directory)?;
            // Less than the final budget, since the unmanaged memory is still unknown.
            let all = self.arguments.density_ram.get() / UNBUDGETED_DIVISOR * (UNBUDGETED_DIVISOR - 1);
            let budget = self.budget(kind, all, count).to_string();
            let (swap, size) = (directory.join("swap"), (self.arguments.density_mib * MIB * 2).to_string());
            let swap = swap.display().to_string();
            let attach_options = ["--budget", &budget, "--swap-cache", &swap, "--swap-size", &size];
            let group = vms.cgroup.path().display().to_string();
            let attach =
                Attach::new(&find_larder(self.arguments.larder.as_deref())?, &directory, process.id(), &attach_options);
            let attach = attach.by(&["sh", "-c", r#"echo $$ >"$0/cgroup.procs" && exec "$@""#, &group]);
            pagers.push((attach.start()?, attach.control().to_owned()));
        }
        process.say("fill")?;
        let deadline = Instant::now() + PATIENCE;
        while process.wait_for("ready", LOOK_EVERY).is_err() {
            if let Some(kernel) = vms.kernel() {
                kernel.used()?;
            }
            ensure!(Instant::now() < deadline && !process.has_ended(), "a VM: {}", process.output());
        }
        vms.all.push((kind, process));
        Ok(())
    }

    /// Returns the budget of a VM of this kind out of `all` bytes for `count` VMs: the minimum, plus a weighted share
    /// of the rest.
    fn budget(&self, kind: Kind, all: u64, count: usize) -> u64 {
        let weight = |kind: Kind| {
            let index = Kind::MIX.iter().position(|(of, _)| *of == kind);
            index.and_then(|index| self.arguments.density_weights.get(index)).copied().unwrap_or(1)
        };
        let sum: u64 = Kind::mixed().take(count).map(weight).sum();
        LEAST + all.saturating_sub(LEAST * count as u64) / sum.max(1) * weight(kind)
    }

    /// Sets the budgets so that they fit into the limit together with the unmanaged memory of VMs and pagers. Returns
    /// false if that leaves too little.
    fn settle(&self, pagers: &[(Attached, PathBuf)], vms: &Vms) -> anyhow::Result<bool> {
        let all = self.arguments.density_ram.get();
        let deadline = Instant::now() + PATIENCE;
        let mut adjustments = 0;
        loop {
            let (mut managed, mut within_budgets) = (0, true);
            for (_, control) in pagers {
                let (_, state) = fetch_memory(control).context("querying Larder")?;
                managed += state.used;
                within_budgets &= state.used <= state.budget;
            }
            let used = vms.cgroup.used()?;
            if within_budgets && used <= all && adjustments == BUDGET_ADJUSTMENTS_MIN {
                return Ok(true);
            }
            if within_budgets {
                let unmanaged = used.saturating_sub(managed);
                let available = (all - all / OVER).saturating_sub(unmanaged);
                if available < LEAST * vms.all.len() as u64 {
                    return Ok(false);
                }
                for ((_, control), (kind, _)) in pagers.iter().zip(&vms.all) {
                    let patch = MemoryPatch {
                        budget: Some(self.budget(*kind, available, vms.all.len())),
                        ..MemoryPatch::default()
                    };
                    limit_memory(control, patch)?;
                }
                adjustments = BUDGET_ADJUSTMENTS_MIN.min(adjustments + 1);
            }
            ensure!(Instant::now() < deadline, "{used} bytes are in use after {PATIENCE:?}, with a limit of {all}");
            thread::sleep(LOOK_EVERY * 50);
        }
    }

    fn print(&self, rows: &[(Variant, Vec<Point>)]) {
        let arguments = self.arguments;
        println!(
            "\nVMs of {} MiB, two in four idle, one web, one scan; {} for all; a number fits if no kind waits for pages more than \
             {} % of the time; {} s each.\n",
            arguments.density_mib, arguments.density_ram, arguments.density_stall, arguments.density_seconds
        );
        println!(
            "| | VMs | fit | VMs / GiB | waiting, %: idle, web, scan | longest wait, ms | work done, % | processors, % busy | \
             peak use, MiB |"
        );
        println!("|{}", " --- |".repeat(9));
        let gib = arguments.density_ram.get() as f64 / (1 << 30) as f64;
        for (variant, points) in rows {
            for point in points {
                let fits = if self.fits(point) { "yes" } else { "no" };
                println!(
                    "| {} | {} | {fits} | {:.0} | {} |",
                    variant.name(),
                    point.vms,
                    point.vms as f64 / gib,
                    point.cells()
                );
            }
        }
    }
}

impl Kind {
    /// Number of VMs in a mix.
    const MIX_SIZE: usize = 4;

    /// Returns the kinds of all VMs, one mix after the other.
    fn mixed() -> impl Iterator<Item = Self> {
        Self::MIX.into_iter().flat_map(|(kind, count)| std::iter::repeat_n(kind, count)).cycle()
    }
}

/// A VM's report about the time since the last one.
struct Report {
    stalled: f64,
    longest: Duration,
    /// Duration in seconds, and number of work items.
    took: f64,
    turns: f64,
}

impl Vms {
    fn kernel(&self) -> Option<Arc<Kernel>> {
        match &self.keeper {
            Keeper::Kernel(kernel) => Some(Arc::clone(kernel)),
            Keeper::Nobody | Keeper::Larder(_) => None,
        }
    }

    fn report(&mut self) -> anyhow::Result<Vec<Report>> {
        let mut reports = Vec::new();
        for (_, process) in &mut self.all {
            let before = process.lines();
            process.say("report")?;
            let line = process.wait_for_after(before, "acted ", PATIENCE)?;
            let number = |name: &str| -> anyhow::Result<f64> {
                let found = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
                Ok(found.with_context(|| format!("no {name} in: {line}"))?.parse()?)
            };
            let elapsed = number("took_us")? / 1e6;
            reports.push(Report {
                stalled: number("stalled_us")? / 1e6 / elapsed,
                longest: Duration::from_secs_f64(number("longest_us")? / 1e6),
                took: elapsed,
                turns: number("turns")?,
            });
        }
        Ok(reports)
    }
}

impl Point {
    fn new(reports: Vec<Report>, vms: &Vms, (before, after): ([u64; 2], [u64; 2]), used_most: u64) -> Self {
        let kind_summary = |kind: Kind| {
            let all = reports.iter().zip(&vms.all).filter(move |(_, (kind_summary, _))| *kind_summary == kind);
            let (stalled, longest): (Vec<f64>, Vec<Duration>) =
                all.map(|(report, _)| (report.stalled, report.longest)).unzip();
            let mean = stalled.iter().sum::<f64>() / stalled.len().max(1) as f64;
            (kind, mean, longest.into_iter().max().unwrap_or_default())
        };
        let due = |(report, (kind, _)): (&Report, &(Kind, Process))| report.took / kind.every().as_secs_f64();
        let due: f64 = reports.iter().zip(&vms.all).map(due).sum();
        let [busy, all] = [0, 1].map(|index| (after[index] - before[index]) as f64);
        Self {
            vms: vms.all.len(),
            kinds: Kind::MIX.iter().map(|(kind, _)| kind_summary(*kind)).collect(),
            busy: busy / all,
            done: reports.iter().map(|report| report.turns).sum::<f64>() / due,
            used_most,
        }
    }

    fn cells(&self) -> String {
        let each =
            |value: fn(&(Kind, f64, Duration)) -> String| self.kinds.iter().map(value).collect::<Vec<_>>().join(", ");
        format!(
            "{} | {} | {:.0} | {:.0} | {:.0}",
            each(|(_, stalled, _)| format!("{:.2}", stalled * 100.0)),
            each(|(_, _, longest)| format!("{:.0}", longest.as_secs_f64() * 1e3)),
            self.done * 100.0,
            self.busy * 100.0,
            self.used_most as f64 / MIB as f64
        )
    }

    fn line(&self) -> String {
        format!("{} VMs | {}", self.vms, self.cells())
    }
}

/// Returns the machine's busy and total processor time, in ticks.
fn processors() -> anyhow::Result<[u64; 2]> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).filter_map(|word| word.parse().ok()).collect();
    let all: u64 = ticks.iter().sum();
    // Idle, and waiting for disks.
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    Ok([all - idle, all])
}
