//! The part `faults`: the latency of page faults, by the location of the page.
//!
//! The floor is a thread that does nothing but poll for faults (userfaultfd(2)) and has every page ready: Larder
//! cannot be faster. All latencies are measured by the faulting program, one page after the other. Nothing is evicted
//! meanwhile.

use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use larder_block::AlignedBuf;

use super::Arguments;
use crate::campaign::Random;
use crate::campaign::find_larder;
use crate::campaign::memory::{Attach, LIMIT, Pager};
use crate::campaign::process::{Process, killed_with_parent};
use crate::figures::median;
use crate::prefetch::place::Place;

/// The program's memory in MiB, and the budget for it while the rest is evicted.
const MIB: u64 = 256;
const BUDGET: &str = "40MiB";
/// Size of the swap cache, large enough for all of the program's memory.
const ROOM: &str = "1GiB";
/// Number of random accesses.
const RANDOM: usize = 8000;
/// Number of rounds, of which medians are shown.
const ROUNDS: usize = 3;

/// A configuration of the pager.
struct Case {
    name: &'static str,
    /// Arguments of `larder memory attach`.
    words: Vec<String>,
    /// Limit of compressed memory during the eviction.
    compressed: &'static str,
    budget: &'static str,
    what: &'static str,
    pages: usize,
}

/// Measured latencies.
#[derive(Clone, Copy)]
struct FaultLatency {
    pages: f64,
    p50_us: f64,
    p99_us: f64,
    pages_per_s: f64,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = find_larder(arguments.larder.as_deref())?;
    let scratch = Place::new(&arguments.folder)?;
    let disk = |prefetch: &str| {
        let path = scratch.unused("swap").display().to_string();
        ["--swap-cache", &path, "--swap-size", ROOM, "--prefetch", prefetch].map(str::to_owned).to_vec()
    };
    let case =
        |name, options, compressed, budget, what, pages| Case { name, words: options, compressed, budget, what, pages };
    let all = MIB as usize * 256;
    let mut cases: Vec<(&str, Vec<FaultLatency>)> = Vec::new();
    let mut add = |name, touched| match cases.iter_mut().find(|(of, _)| *of == name) {
        Some((_, rounds)) => rounds.push(touched),
        None => cases.push((name, vec![touched])),
    };
    let mut device = Vec::new();
    for _ in 0..ROUNDS {
        add("floor: page ready, thread spinning", floor()?);
        for case in [
            case("compressed RAM", vec![], "160MiB", "200MiB", "random", RANDOM),
            case(
                "compressed RAM, --poll-us 1000",
                vec!["--poll-us".into(), "1000".into()],
                "160MiB",
                "200MiB",
                "random",
                RANDOM,
            ),
            case("swap cache", disk("on"), "6MiB", BUDGET, "random", RANDOM),
            case("swap cache, sequential, --prefetch off", disk("off"), "6MiB", BUDGET, "sequential", all),
            case("swap cache, sequential", disk("on"), "6MiB", BUDGET, "sequential", all),
        ] {
            add(case.name, measure(&larder, &scratch, &case)?);
        }
        device.push(device_us(&scratch)?);
    }
    let device = median(&device);
    let floor = middle(&cases[0].1).p50_us;
    println!(
        "\nFaults, one at a time; medians of {ROUNDS} rounds. 4 KiB of a file, read with O_DIRECT: {device:.1} µs.\n"
    );
    println!("| location of the pages | pages | P50, µs | P99, µs | P50 / floor | (P50 - device) / floor | pages/s |");
    println!("|{}", " --- |".repeat(7));
    for (name, rounds) in &cases {
        let FaultLatency { pages, p50_us, p99_us, pages_per_s } = middle(rounds);
        let device_free_ratio = match name.contains("swap") && !name.contains("sequential") {
            true => format!("{:.2}", (p50_us - device) / floor),
            false => String::new(),
        };
        println!(
            "| {name} | {pages:.0} | {p50_us:.1} | {p99_us:.1} | {:.2} | {device_free_ratio} | {pages_per_s:.0} |",
            p50_us / floor
        );
    }
    Ok(())
}

fn middle(rounds: &[FaultLatency]) -> FaultLatency {
    let of = |value: fn(&FaultLatency) -> f64| median(&rounds.iter().map(value).collect::<Vec<_>>());
    FaultLatency {
        pages: of(|round| round.pages),
        p50_us: of(|round| round.p50_us),
        p99_us: of(|round| round.p99_us),
        pages_per_s: of(|round| round.pages_per_s),
    }
}

/// Starts a program with 256 MiB of memory to access.
pub(super) fn start() -> anyhow::Result<(Process, u32)> {
    let this_program = std::env::current_exe()?;
    let mut command = killed_with_parent(&this_program.display().to_string());
    command.args(["touch-memory", "--mib", &MIB.to_string()]);
    let process = Process::start(command)?;
    let output = process.wait_for("ready ", LIMIT)?;
    let pid = output.split_once("ready ").context("no PID")?.1.trim().parse()?;
    Ok((process, pid))
}

fn touch(process: &mut Process, what: &str, pages: usize) -> anyhow::Result<FaultLatency> {
    let before = process.lines();
    process.say(&format!("{what} {pages}"))?;
    let line = process.wait_for_after(before, "touched ", LIMIT)?;
    let number = |name: &str| -> anyhow::Result<f64> {
        let found = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        Ok(found.with_context(|| format!("no {name} in: {line}"))?.parse()?)
    };
    let pages = number("pages")?;
    ensure!(pages > 0.0, "no page was missing from memory");
    Ok(FaultLatency {
        pages,
        p50_us: number("p50_ns")? / 1e3,
        p99_us: number("p99_ns")? / 1e3,
        pages_per_s: pages / number("took_us")? * 1e6,
    })
}

fn floor() -> anyhow::Result<FaultLatency> {
    let (mut process, _) = start()?;
    touch(&mut process, "floor", RANDOM)
}

fn measure(larder: &Path, scratch: &Place, case: &Case) -> anyhow::Result<FaultLatency> {
    let (mut process, pid) = start()?;
    let directory = scratch.unused("pager");
    std::fs::create_dir(&directory)?;
    let mut options = vec!["--budget", case.budget, "--compressed", case.compressed];
    options.extend(case.words.iter().map(String::as_str));
    let attach = Attach::new(larder, &directory, pid, &options);
    let mut pager: Pager = attach.start()?;
    pager.wait_for_budget()?;
    let mut command = Command::new(larder);
    command.args(["memory", "limit", "--budget", ROOM, "--compressed", "512MiB", "--control"]);
    let limit_output = command.arg(attach.control()).output()?;
    ensure!(
        limit_output.status.success(),
        "larder memory limit: {}",
        String::from_utf8_lossy(&limit_output.stderr).trim()
    );
    // Lets pending work finish.
    std::thread::sleep(Duration::from_millis(500));
    let touched = touch(&mut process, case.what, case.pages)?;
    pager.detach()?;
    Ok(touched)
}

/// Returns the latency in us of a random 4 KiB read of a written file, one at a time.
fn device_us(scratch: &Place) -> anyhow::Result<f64> {
    const BYTES: u64 = MIB << 20;
    let path = scratch.unused("device");
    std::fs::write(&path, vec![0x5a; BYTES as usize])?;
    let file = std::fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(&path)?;
    // SAFETY: takes no pointers.
    unsafe { libc::fsync(file.as_raw_fd()) };
    let mut bytes = AlignedBuf::zeroed(4096);
    let mut random = Random::new(7);
    let mut times = Vec::new();
    for _ in 0..2000 {
        let at = random.below(BYTES / 4096) * 4096;
        let started = Instant::now();
        file.read_exact_at(&mut bytes, at)?;
        times.push(started.elapsed().as_nanos() as f64 / 1e3);
    }
    std::fs::remove_file(path)?;
    Ok(median(&times))
}
