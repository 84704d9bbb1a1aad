//! The program: TPC-H in DuckDB, with its memory in one memfd.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use larder_bench::campaign::process::{Process, killed_with_parent};
use serde_json::Value;

use super::MIB;
use super::cgroup::{Cgroup, named};
use super::pager::{Done, Pager};

const SCRIPT: &str = include_str!("tpch.py");

/// Directory that keeps tables from one run to the next.
const TABLES_DIRECTORY: &str = "target/testbed";

/// Time limit for loading, or for a pass.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Interval at which memory use is sampled during a pass.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Size of the memfd for each unit of the scale. Tables and working memory take about 1.8 GiB.
const RAM: u64 = 4 << 30;

/// Files and parameters to run the program with.
pub(super) struct Kit {
    python: PathBuf,
    preload: PathBuf,
    tables: PathBuf,
    threads: u32,
    ram: u64,
}

impl Kit {
    /// Prepares the program: installs and generates missing files.
    pub(super) fn new(scale: f64, threads: u32) -> anyhow::Result<Self> {
        let preload = std::env::current_exe()?.with_file_name("liblarder_bench_preload.so");
        if !preload.exists() {
            bail!("{} is missing: cargo build --release --workspace", preload.display());
        }
        let wheels = Path::new("testbed/wheels.sh");
        if !wheels.exists() {
            bail!("{} is missing: run this in the project's directory", wheels.display());
        }
        let python = Path::new(&told(Command::new(wheels).arg("duckdb"))?).join("python");
        let tables = std::path::absolute(Path::new(TABLES_DIRECTORY).join(format!("tpch-{scale}.duckdb")))?;
        if !tables.exists() {
            let mut generate = Command::new(&python);
            generate.args(["-c", SCRIPT, "generate"]).arg(&tables);
            told(generate.arg(scale.to_string()))?;
        }
        Ok(Self { python, preload, tables, threads, ram: RAM * scale.max(1.0).ceil() as u64 })
    }

    /// Returns the size of the memfd in bytes, more than the program ever uses.
    pub(super) fn ram(&self) -> u64 {
        self.ram
    }

    /// Starts the program in `cgroup`, and waits until its tables are in memory.
    pub(super) fn start(&self, cgroup: &Cgroup) -> anyhow::Result<Workload> {
        // Page cache is charged to the first reader: this charges programs and libraries outside the group.
        told(Command::new(&self.python).args(["-c", "import duckdb"]))?;
        let mut command = killed_with_parent("sh");
        command.args(["-c", r#"echo $$ >"$0/cgroup.procs" && exec env "$@""#]);
        command
            .arg(cgroup.path())
            .arg(format!("LARDER_BENCH_RAM={}", self.ram))
            .arg(format!("LD_PRELOAD={}", self.preload.display()))
            .arg(&self.python)
            .args(["-c", SCRIPT, "run"])
            .arg(&self.tables)
            .arg(self.threads.to_string());
        let process = Process::start(command)?;
        process.wait_for("seconds", PATIENCE)?;
        Ok(Workload { process })
    }
}

/// Returns a command's output.
fn told(command: &mut Command) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("starting {name}"))?;
    if !output.status.success() {
        bail!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// The running program; killed when this is dropped.
pub(super) struct Workload {
    process: Process,
}

/// A pass over the queries.
#[derive(Clone, Debug)]
pub(super) struct QueryPass {
    pub(super) seconds: f64,
    /// Digest of the results of all queries.
    pub(super) digest: String,
    /// Work of the pager during the pass.
    pub(super) done: Done,
    /// Bytes of memory in use, on average and at most.
    pub(super) used_mean: u64,
    pub(super) used_most: u64,
}

impl fmt::Display for QueryPass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Done { faults, read, written, unpacked, packed } = self.done;
        write!(
            f,
            "{:.2} s, {faults} faults; MiB: {} used, {} at peak, {} read, {} written, {} decompressed, {} compressed",
            self.seconds,
            self.used_mean / MIB,
            self.used_most / MIB,
            read / MIB,
            written / MIB,
            unpacked / MIB,
            packed / MIB
        )
    }
}

/// Resident memory of the program, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resident {
    pub(super) all: u64,
    /// Part of the resident memory that is in the memfd.
    pub(super) inside: u64,
}

impl Workload {
    /// Returns the process number.
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Runs the queries once, while `pager` manages the memory.
    pub(super) fn pass(&mut self, pager: &dyn Pager) -> anyhow::Result<QueryPass> {
        let before = pager.done()?;
        let stop = AtomicBool::new(false);
        let (answer, used) = thread::scope(|scope| {
            let sampler = scope.spawn(|| {
                let mut used = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    used.push(pager.used()?);
                    thread::sleep(LOOK_EVERY);
                }
                anyhow::Ok(used)
            });
            let answer = self.answer();
            stop.store(true, Ordering::Relaxed);
            (answer, sampler.join())
        });
        let done = pager.done()?.since(before);
        let answer = answer?;
        let Ok(used) = used else { bail!("sampling memory use failed: a thread panicked") };
        let used = used?;
        let queries = answer["queries"].as_array();
        let queries = queries.with_context(|| format!("no query times in the reply: {answer}"))?;
        let digest = answer["digest"].as_str();
        Ok(QueryPass {
            seconds: queries.iter().filter_map(Value::as_f64).sum(),
            digest: digest.with_context(|| format!("no digest in the reply: {answer}"))?.to_owned(),
            done,
            used_mean: used.iter().sum::<u64>() / used.len().max(1) as u64,
            used_most: used.iter().copied().max().unwrap_or(0),
        })
    }

    fn answer(&mut self) -> anyhow::Result<Value> {
        let lines = self.process.lines();
        self.process.say("pass")?;
        let line = self.process.wait_for_after(lines, "digest", PATIENCE)?;
        serde_json::from_str(&line).with_context(|| format!("parsing the reply {line}"))
    }

    fn proc_path(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.process.id().to_string()).join(name)
    }

    /// Returns the resident memory.
    pub(super) fn resident(&self) -> anyhow::Result<Resident> {
        let status = self.proc_path("status");
        Ok(Resident { all: named(&status, "VmRSS")? << 10, inside: named(&status, "RssShmem")? << 10 })
    }

    /// Resets the record of accessed memory.
    pub(super) fn clear_referenced(&self) -> anyhow::Result<()> {
        Ok(fs::write(self.proc_path("clear_refs"), "1")?)
    }

    /// Returns the resident bytes that were accessed since the record was reset.
    pub(super) fn touched(&self) -> anyhow::Result<u64> {
        let maps = fs::read_to_string(self.proc_path("smaps"))?;
        let kib = maps.lines().filter_map(|line| {
            let rest = line.strip_prefix("Referenced:")?;
            rest.split_whitespace().next()?.parse::<u64>().ok()
        });
        Ok(kib.sum::<u64>() << 10)
    }
}
