//! `larder-bench hostile-guest`: guests that demand as much as virtio allows, and the resulting cost for the host and
//! for other clients of the disk. There is one server, `larder disk serve`, for each mode and line size of the cache.
//! A front-end of this program attacks it over vhost-user-blk, while two other clients read and write over NBD.

mod attacks;
mod neighbours;
mod watch;

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use larder_bench::campaign::find_larder;
use larder_bench::campaign::process::killed_with_parent;
use larder_bench::campaign::server::Server;
use larder_block::ByteLen;

use self::attacks::{Attack, Done, Guest, MIB};
use self::neighbours::{Latencies, Neighbours};
use self::watch::Use;
use crate::prefetch::place::Place;

/// Attack a disk's server with a hostile guest, and measure the cost
#[derive(Args)]
pub(crate) struct Arguments {
    /// Path of larder; by default the one in this program's directory
    #[arg(long, value_name = "PROGRAM")]
    larder: Option<PathBuf>,
    /// Modes of the cache; "none" is no cache
    #[arg(long, value_name = "MODES", value_delimiter = ',', default_value = "none,wt,wb,wa,pt")]
    mode: Vec<String>,
    /// Line sizes of the cache
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "4KiB,64KiB")]
    line: Vec<String>,
    /// Size of the cache
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    cache_size: ByteLen,
    /// Size of the disk
    #[arg(long, value_name = "SIZE", default_value = "3GiB")]
    disk: ByteLen,
    /// Run fewer attacks, and each for a shorter time
    #[arg(long)]
    quick: bool,
    /// Minimum duration of an attack; by default 2000, or 500 with --quick
    #[arg(long, value_name = "MS")]
    attack_ms: Option<u64>,
    /// Run only attacks whose names contain this text, and the idle and the well-behaved guest
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Limit for an attack's memory, above the server's memory at rest
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    memory_max: ByteLen,
    /// Limit for the latency of 99 of 100 requests of the other clients
    #[arg(long, value_name = "MS", default_value_t = 50)]
    p99_ms: u64,
    /// Limit for the CPU time per byte of a long request, as a multiple of that of a request of 16 MiB
    #[arg(long, value_name = "RATIO", default_value_t = 2.0)]
    cpu_ratio: f64,
    /// Directory for images and caches
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/tmp")]
    folder: PathBuf,
}

/// A server: one row of the matrix.
struct Setup<'a> {
    mode: &'a str,
    line: &'a str,
}

impl Setup<'_> {
    fn has_cache(&self) -> bool {
        self.mode != "none"
    }
}

impl fmt::Display for Setup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.has_cache() {
            true => write!(f, "{} {}", self.mode, self.line),
            false => f.write_str("none"),
        }
    }
}

/// Measurements of one attack.
struct Outcome {
    attack: Attack,
    done: Done,
    /// Memory above the server's memory at rest, in bytes.
    growth: u64,
    used: Use,
    /// Latencies of the reader and of the writer.
    latencies: [Latencies; 2],
    /// Load average of the machine, on which other programs may run.
    load: String,
}

impl Outcome {
    /// Returns the server's CPU time in microseconds per MiB; not finite if the attack transferred no bytes.
    fn cpu_us_per_mib(&self) -> f64 {
        self.used.cpu_seconds * 1e6 / (self.done.bytes as f64 / MIB as f64)
    }

    fn p99(&self) -> Duration {
        self.latencies.iter().map(Latencies::p99).max().unwrap_or_default()
    }
}

/// Runs the experiment, and prints a table. Returns whether every limit was kept.
///
/// # Errors
/// If a program is missing, or the server fails a request, exits or panics.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let program = find_larder(arguments.larder.as_deref())?;
    println!(
        "A raw image of {} in {}. Memory is RssAnon above that of the idle server; latencies are P50 / P99 / longest of 4 KiB over \
         NBD, one request at a time.\n",
        arguments.disk,
        arguments.folder.display()
    );
    println!("| cache | guest | requests | MiB | memory, MiB | CPU, us/MiB | read, ms | write, ms | load |");
    println!("|{}", " --- |".repeat(9));
    let mut exceeded = Vec::new();
    for mode in &arguments.mode {
        for line in &arguments.line {
            let setup = Setup { mode, line };
            let outcomes = measure(arguments, &program, &setup).with_context(|| setup.to_string())?;
            exceeded.extend(exceeded_limits(arguments, &setup, &outcomes));
            if !setup.has_cache() {
                break;
            }
        }
    }
    println!();
    if exceeded.is_empty() {
        println!(
            "All limits were kept: memory at most {} above that of the idle server, P99 below {} ms, CPU time per byte of a long \
             request at most {} times that of one of 16 MiB.",
            arguments.memory_max, arguments.p99_ms, arguments.cpu_ratio
        );
    }
    exceeded.iter().for_each(|limit| println!("LIMIT EXCEEDED: {limit}"));
    Ok(exceeded.is_empty())
}

/// Serves a disk, and runs all attacks on it.
fn measure(arguments: &Arguments, program: &Path, setup: &Setup<'_>) -> anyhow::Result<Vec<Outcome>> {
    // An image on tmpfs takes host memory, which must be freed however this process ends.
    let scratch = Place::new(&arguments.folder)?;
    let path = |name: &str| scratch.path().join(name);
    let (image, socket, nbd) = (path("image"), path("vhost"), path("nbd"));
    File::create(&image)?.set_len(arguments.disk.get())?;
    let mut command = killed_with_parent(program.to_str().context("the program's path is not UTF-8")?);
    command
        .args(["disk", "serve", "--format", "raw", "--nbd"])
        .arg(format!("nbd+unix:///?socket={}", nbd.display()))
        .arg("--socket")
        .arg(&socket);
    if setup.has_cache() {
        command
            .arg("--cache")
            .arg(path("cache"))
            .args(["--cache-size", &arguments.cache_size.get().to_string()])
            .args(["--cache-line", setup.line, "--cache-mode", setup.mode]);
    }
    command.arg(&image);
    let server = Server::from_command(command, &socket)?;
    let outcomes = attack(arguments, setup, &server, &nbd);
    let output = server.process.output();
    let outcomes = outcomes.with_context(|| format!("the server's output:\n{output}"))?;
    ensure!(!output.contains("panicked"), "the server panicked: {output}");
    let status = server.stop()?;
    ensure!(status == Some(0), "the server exited with {status:?}: {output}");
    Ok(outcomes)
}

fn attack(arguments: &Arguments, setup: &Setup<'_>, server: &Server, nbd: &Path) -> anyhow::Result<Vec<Outcome>> {
    let duration_min = Duration::from_millis(arguments.attack_ms.unwrap_or(match arguments.quick {
        true => 500,
        false => 2_000,
    }));
    let process = server.process.id();
    let mut neighbours = Neighbours::connect(nbd)?;
    let idle_memory_bytes = watch::memory_bytes(process)?;
    Guest::fill(&server.socket)?;
    let mut outcomes = Vec::new();
    let is_selected = |attack: &Attack| {
        matches!(attack, Attack::Idle | Attack::Usual(_)) || attack.to_string().contains(&arguments.only)
    };
    for attack in Attack::all(arguments.disk.get(), arguments.quick).into_iter().filter(is_selected) {
        if attack.needs_filled_disk() {
            Guest::fill(&server.socket)?;
        }
        let mut guest = Guest::connect(attack, &server.socket)?;
        let run = || neighbours.beside(|| guest.run(&server.process, duration_min));
        let ((done, latencies), used) = watch::during(process, run).with_context(|| attack.to_string())?;
        let outcome = Outcome {
            attack,
            done,
            growth: used.memory_bytes.saturating_sub(idle_memory_bytes),
            used,
            latencies,
            load: load(),
        };
        print_row(setup, &outcome);
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2}", time.as_secs_f64() * 1e3)
}

fn print_row(setup: &Setup<'_>, outcome: &Outcome) {
    let times =
        |latencies: &Latencies| [latencies.median(), latencies.p99(), latencies.max()].map(milliseconds).join(" / ");
    let [read, write] = &outcome.latencies;
    let cpu = match outcome.done.bytes {
        0 => String::new(),
        _ => format!("{:.1}", outcome.cpu_us_per_mib()),
    };
    println!(
        "| {setup} | {} | {} | {} | {:.1} | {cpu} | {} | {} | {} |",
        outcome.attack,
        outcome.done.requests,
        outcome.done.bytes / MIB,
        outcome.growth as f64 / MIB as f64,
        times(read),
        times(write),
        outcome.load
    );
}

/// Returns descriptions of the broken limits.
fn exceeded_limits(arguments: &Arguments, setup: &Setup<'_>, outcomes: &[Outcome]) -> Vec<String> {
    let find_result = |attack: Attack| outcomes.iter().find(|outcome| outcome.attack == attack);
    // The machine and the file system delay other clients even without an attack.
    let baseline_p99 = outcomes
        .iter()
        .filter(|outcome| matches!(outcome.attack, Attack::Idle | Attack::Usual(_)))
        .map(Outcome::p99)
        .max()
        .unwrap_or_default();
    let mut broken = Vec::new();
    for outcome in outcomes {
        let name = format!("cache {setup}, {}", outcome.attack);
        if outcome.growth > arguments.memory_max.get() {
            broken.push(format!("{name}: {:.1} MiB of memory", outcome.growth as f64 / MIB as f64));
        }
        if outcome.p99() >= Duration::from_millis(arguments.p99_ms) {
            broken.push(format!(
                "{name}: P99 of {} ms; it is {} ms with an idle or a well-behaved guest; load {}",
                milliseconds(outcome.p99()),
                milliseconds(baseline_p99),
                outcome.load
            ));
        }
        let Some(short) = outcome.attack.shorter_reference().and_then(find_result) else {
            continue;
        };
        let ratio = outcome.cpu_us_per_mib() / short.cpu_us_per_mib();
        if ratio > arguments.cpu_ratio {
            broken.push(format!("{name}: {ratio:.2} times the CPU time per byte of {}", short.attack));
        }
    }
    broken
}

/// Returns the machine's load average over the last minute.
fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or_default().to_owned()
}
