//! The part `instructions`: the cost of read-ahead where it is useless, in user-space instructions of the server for
//! each request, which callgrind counts exactly.
//!
//! For each result a server runs twice under callgrind, for a number of requests and for twice as many. The
//! difference is the cost of the second half, without start and end. Images are read with direct I/O, through
//! io_uring, because a read that is answered in the call bypasses read-ahead.
//!
//! Valgrind 3.19 does not know that waiting for io_uring blocks, and lets no other thread run meanwhile, not even the
//! one that handles the signal to exit. So the threads are scheduled in turns, and connections wake the waiting one.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use larder_bench::campaign::process::{Process, killed_with_parent};

use super::place::Place;
use super::servers::text;
use super::{Arguments, GIB};
use crate::figures::{median, ratios, spread};
use crate::vhost_user::client::{Client, Random, Workload};
use crate::vhost_user::larder;

/// Large enough that random reads are hardly ever adjacent.
const IMAGE_BYTES: u64 = GIB;

const BLOCK: usize = 4096;

/// Requests of the shorter run.
const COUNT: u64 = 16_384;

const CLIENT_MEMORY_BYTES: usize = 1 << 20;

/// Generous limit: callgrind makes a server some fifty times slower.
const LIMIT: Duration = Duration::from_secs(60);

/// Interval and maximum number of connections that wake an exiting server.
const STEP: Duration = Duration::from_millis(100);
const STEPS_MAX: u32 = 600;

/// Functions that differ by fewer instructions for each request are not shown.
const SHOWN_DIFFERENCE_MIN: f64 = 8.0;

/// A function with as many instructions for each request is shown beside that of another program.
const SHOWN_COST_MIN: f64 = 60.0;

/// Blocks that the loads of cache hits read. They fit in the cache.
const HIT_BLOCKS: u64 = 4096;

/// The order of a load's requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Random,
    Sequential,
    /// Random blocks, all of which have been read before.
    Hits,
}

/// A load of requests of one block each.
#[derive(Clone, Copy)]
struct Requests {
    name: &'static str,
    write: bool,
    order: Order,
    depth: usize,
}

const REQUESTS: [Requests; 8] = [
    Requests::new("random read, depth 1", false, Order::Random, 1),
    Requests::new("random read, depth 32", false, Order::Random, 32),
    Requests::new("random write, depth 1", true, Order::Random, 1),
    Requests::new("random write, depth 32", true, Order::Random, 32),
    Requests::new("sequential read, depth 1", false, Order::Sequential, 1),
    Requests::new("sequential read, depth 32", false, Order::Sequential, 32),
    Requests::new("hit, depth 1", false, Order::Hits, 1),
    Requests::new("hit, depth 32", false, Order::Hits, 32),
];

impl Requests {
    const fn new(name: &'static str, write: bool, order: Order, depth: usize) -> Self {
        Self { name, write, order, depth }
    }

    /// Returns the offsets of `count` requests, after those that fill the cache.
    fn offsets(&self, count: u64) -> Vec<u64> {
        let mut random = Random::default();
        let blocks = IMAGE_BYTES / BLOCK as u64;
        let filled = 0..if self.order == Order::Hits { HIT_BLOCKS } else { 0 };
        let measured = (0..count).map(|index| match self.order {
            Order::Random => random.below(blocks),
            Order::Sequential => index % blocks,
            Order::Hits => random.below(HIT_BLOCKS),
        });
        filled.chain(measured).map(|block| block * BLOCK as u64).collect()
    }
}

/// A function, and the source file of its instructions or of code inlined into it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct ProfiledFunction {
    source: String,
    name: String,
}

/// Instructions by function.
#[derive(Clone, Default)]
struct Costs(BTreeMap<ProfiledFunction, f64>);

impl Costs {
    fn total(&self) -> f64 {
        self.0.values().sum()
    }

    /// Returns the difference from other costs, function by function.
    fn over(&self, others: &Self) -> Self {
        let mut costs = self.0.clone();
        for (function, cost) in &others.0 {
            *costs.entry(function.clone()).or_default() -= cost;
        }
        Self(costs)
    }

    fn divided(mut self, by: u64) -> Self {
        self.0.values_mut().for_each(|cost| *cost /= by as f64);
        self
    }

    /// Returns the instructions of read-ahead's own code.
    fn read_ahead_total(&self) -> f64 {
        let own = self.0.iter().filter(|(function, _)| function.is_read_ahead());
        own.map(|(_, cost)| cost).sum()
    }

    /// Prints a row for each function, from the most to the least expensive.
    fn print(&self) {
        let mut functions: BTreeMap<&str, f64> = BTreeMap::new();
        for (function, cost) in &self.0 {
            *functions.entry(&function.name).or_default() += cost;
        }
        let mut shown: Vec<(&str, f64)> =
            functions.into_iter().filter(|(_, cost)| cost.abs() >= SHOWN_DIFFERENCE_MIN).collect();
        shown.sort_by(|one, other| other.1.total_cmp(&one.1));
        for (function, cost) in &shown {
            println!("| `{function}` | {cost:+.0} |");
        }
        let rest = self.total() - shown.iter().map(|(_, cost)| cost).sum::<f64>();
        println!("| all other functions | {rest:+.0} |");
    }

    /// Prints a row for each function that costs much, or not what it costs in `others`; the largest difference is
    /// first.
    fn print_comparison(&self, others: &Self) {
        let mut functions: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        for (function, cost) in &others.0 {
            functions.entry(&function.name).or_default().0 += cost;
        }
        for (function, cost) in &self.0 {
            functions.entry(&function.name).or_default().1 += cost;
        }
        let mut shown: Vec<(&str, (f64, f64))> = functions
            .into_iter()
            .filter(|(_, (others, own))| (own - others).abs() >= SHOWN_DIFFERENCE_MIN || *own >= SHOWN_COST_MIN)
            .collect();
        shown.sort_by(|(_, one), (_, other)| (other.1 - other.0).total_cmp(&(one.1 - one.0)));
        for (function, (others, own)) in &shown {
            println!("| `{function}` | {others:.0} | {own:.0} | {:+.0} |", own - others);
        }
    }

    /// Reads a profile that callgrind has written.
    fn read(profile: &Path) -> anyhow::Result<Self> {
        let output = Command::new("callgrind_annotate")
            .args(["--threshold=100", "--auto=no"])
            .arg(profile)
            .output()
            .context("starting callgrind_annotate, which testbed/setup.sh installs")?;
        let said = String::from_utf8_lossy(&output.stdout);
        let mut costs = Self::default();
        for (function, cost) in said.lines().filter_map(function_and_cost) {
            *costs.0.entry(function).or_default() += cost;
        }
        ensure!(
            output.status.success() && costs.total() > 0.0,
            "callgrind_annotate lists no function of {}: {}{said}",
            profile.display(),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(costs)
    }
}

impl ProfiledFunction {
    fn is_read_ahead(&self) -> bool {
        self.source.contains("larder-prefetch/") || self.name.contains("larder_prefetch::")
    }
}

/// Parses a line of callgrind_annotate's list, `1,234 (5.67%)  file:function [object]`.
fn function_and_cost(line: &str) -> Option<(ProfiledFunction, f64)> {
    let (cost, rest) = line.trim_start().split_once(" (")?;
    let cost = cost.replace(',', "").parse().ok()?;
    let scratch = rest.split_once("%)")?.1.trim();
    let scratch = scratch.split(" [/").next().unwrap_or(scratch);
    // The total is on a line without a file.
    let (source, name) = scratch.split_once(':')?;
    // An apostrophe marks a recursive call.
    let name = name.split('\'').next().unwrap_or(name);
    let function = ProfiledFunction { source: source.to_owned(), name: name.to_owned() };
    Some((function, cost))
}

/// Configuration of a measured server.
#[derive(Clone, Copy)]
struct Served<'a> {
    program: &'a Path,
    image: &'a Path,
    format: &'a str,
    prefetch: &'a str,
    /// True if there is a write-through cache.
    is_cached: bool,
}

impl Served<'_> {
    /// Returns the instructions of one request.
    fn of_each(&self, place: &Place, requests: &Requests, count: u64) -> anyhow::Result<Costs> {
        let of = |count| counted(place, self, requests, count);
        Ok(of(2 * count)?.over(&of(count)?).divided(count))
    }
}

/// Compares this program with another one.
fn compare(arguments: &Arguments, place: &Place, images: &[(&str, PathBuf)], other: &Path) -> anyhow::Result<()> {
    let (own, count) = (larder()?, arguments.count.unwrap_or(COUNT));
    println!(
        "User-space instructions of the server per request of 4 KiB; disk of 1 GiB, direct I/O, {count} requests\n"
    );
    println!("| | {} | this program | ratio |\n| --- | --- | --- | --- |", other.display());
    let mut differences = Vec::new();
    let mut failures = Vec::new();
    for (format, image) in images {
        for is_cached in [false, true] {
            for requests in &REQUESTS {
                let cached = if is_cached { " with a cache" } else { "" };
                let load = format!("{format}{cached}, {}", requests.name);
                let is_possible = is_cached || requests.order != Order::Hits;
                if !is_possible || !load.contains(&arguments.load) {
                    continue;
                }
                let of = |program: &Path| {
                    let served = Served { program, image, format, prefetch: "off", is_cached };
                    served.of_each(place, requests, count)
                };
                let rounds = (0..arguments.rounds(1)).map(|_| Ok((of(other)?, of(&own)?)));
                let mut rounds: Vec<(Costs, Costs)> = match rounds.collect::<anyhow::Result<_>>() {
                    Ok(rounds) => rounds,
                    Err(error) => {
                        failures.push(format!("{load}: {error:#}"));
                        continue;
                    }
                };
                let others: Vec<f64> = rounds.iter().map(|(theirs, _)| theirs.total()).collect();
                let ours: Vec<f64> = rounds.iter().map(|(_, own)| own.total()).collect();
                let ratios = ratios(&ours, &others);
                println!(
                    "| {load} | {:.0} | {:.0} | {:.3} ({}) |",
                    median(&others),
                    median(&ours),
                    median(&ratios),
                    spread(&ratios, 3)
                );
                differences.extend(rounds.pop().map(|last| (load, last)));
            }
        }
    }
    for (name, (theirs, own)) in &differences {
        println!(
            "\n| {name}, by function | the other program | this program | difference |\n| --- | --- | --- | --- |"
        );
        own.print_comparison(theirs);
    }
    ensure!(failures.is_empty(), "not measured: {}", failures.join("; "));
    Ok(())
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let scratch = arguments.place()?;
    let images = [("raw", scratch.raw_image(IMAGE_BYTES)?), ("qcow2", scratch.qcow2_image(IMAGE_BYTES)?)];
    if let Some(other) = &arguments.against {
        return compare(arguments, &scratch, &images, other);
    }
    let (program, count) = (larder()?, arguments.count.unwrap_or(COUNT));
    println!("User-space instructions of the server per request of 4 KiB; disk of 1 GiB, direct I/O, {count} requests");
    for (format, image) in &images {
        for requests in REQUESTS.iter().filter(|requests| requests.order != Order::Hits) {
            let (mut off, mut on) = (Vec::new(), Vec::new());
            let mut last = Costs::default();
            for _ in 0..arguments.rounds(1) {
                let of_each = |prefetch| {
                    let served = Served { program: &program, image, format, prefetch, is_cached: false };
                    served.of_each(&scratch, requests, count)
                };
                let (without, with) = (of_each("off")?, of_each("4MiB")?);
                off.push(without.total());
                on.push(with.total());
                last = with.over(&without);
            }
            let ratios = ratios(&on, &off);
            println!("\n| {format}, {} | instructions |\n| --- | --- |", requests.name);
            println!("| read-ahead off | {:.0} |", median(&off));
            println!("| on | {:.0} |", median(&on));
            println!("| on / off | {:.3} ({}) |", median(&ratios), spread(&ratios, 3));
            println!("| on - off | {:+.0} |", last.total());
            println!("| of that, read-ahead's own code | {:+.0} |", last.read_ahead_total());
            last.print();
        }
    }
    Ok(())
}

/// Returns the instructions of a server from its start to its exit.
fn counted(place: &Place, served: &Served<'_>, requests: &Requests, count: u64) -> anyhow::Result<Costs> {
    let (socket, profile) = (place.unused("socket"), place.unused("callgrind"));
    let mut command = killed_with_parent("valgrind");
    command
        .args(["-q", "--fair-sched=yes", "--tool=callgrind"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(served.program)
        .args(["disk", "serve", text(served.image)?, "--format", served.format])
        .args(["--prefetch", served.prefetch])
        .args(["--poll-us", "0", "--socket", text(&socket)?]);
    let cache = place.unused("cache");
    if served.is_cached {
        command.args(["--cache", text(&cache)?, "--cache-size", "128MiB", "--cache-mode", "wt"]);
    }
    let mut server = Process::start(command)?;
    server.wait_for("serving", LIMIT)?;
    let mut client = Client::connect_with(&socket, true, CLIENT_MEMORY_BYTES)?;
    let workload = Workload { write: requests.write, block: BLOCK, depth: requests.depth, duration: Duration::ZERO };
    client.run_at(&workload, &requests.offsets(count))?;
    drop(client);
    server.signal(libc::SIGTERM);
    let mut steps = 0..STEPS_MAX;
    let status = loop {
        match server.wait(STEP) {
            Ok(status) => break status,
            Err(error) if steps.next().is_none() => return Err(error),
            // The server may just be exiting.
            Err(_) => drop(UnixStream::connect(&socket)),
        }
    };
    ensure!(status.success(), "{status}:\n{}", server.output());
    let costs = Costs::read(&profile)?;
    std::fs::remove_file(&profile)?;
    if served.is_cached {
        std::fs::remove_file(&cache)?;
    }
    Ok(costs)
}
