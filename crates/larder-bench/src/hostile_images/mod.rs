//! `larder-bench hostile-images`: malicious qcow2 images, each of which demands unbounded memory or time somewhere in
//! its tables. Larder serves or refuses each of them. The experiment measures the time and the peak memory that this
//! takes, and the time that Larder takes to exit on request.

mod images;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use larder_block::ByteLen;

use crate::campaign::find_larder;
use crate::campaign::process::{Process, killed_with_parent};
use images::{CASES, Image};

/// Serve malicious images, and measure the cost
#[derive(Args, Debug)]
pub struct Arguments {
    /// Path of larder; by default the one in this program's directory
    #[arg(long, value_name = "PROGRAM")]
    larder: Option<PathBuf>,
    /// Memory limit for an image's metadata, given to larder
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    metadata_memory: ByteLen,
    /// Limit for memory beyond that
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    memory_max: ByteLen,
    /// Limit for the time until an image is served or refused
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    open_ms: u64,
    /// Limit for the time until the program exits on request
    #[arg(long, value_name = "MS", default_value_t = 1_000)]
    end_ms: u64,
    /// Only use images whose names contain this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Directory for images; by default /var/tmp
    #[arg(long, value_name = "DIRECTORY")]
    folder: Option<PathBuf>,
}

/// Time limit of any operation, on any machine.
const LIMIT: Duration = Duration::from_secs(300);

/// Result of serving one image.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// True if the image was served, false if it was refused.
    pub served: bool,
    /// Time from the program's start until it served or exited.
    pub open: Duration,
    /// Peak memory in bytes, without files.
    pub memory_bytes: u64,
    /// Time from the signal to the exit; `None` if the program had already exited.
    pub end: Option<Duration>,
    /// Last line of the program's output.
    pub said: String,
}

/// Runs the experiment, and prints a table. Returns whether every image stayed within the limits.
///
/// # Errors
/// If a program is missing, or Larder crashes or does not exit.
pub fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let program = find_larder(arguments.larder.as_deref())?;
    let directory = arguments.folder.clone().unwrap_or_else(|| PathBuf::from("/var/tmp"));
    let cases = CASES.iter().filter(|(name, _)| name.contains(&arguments.only));
    let mut passed = true;
    println!("{:>9} {:>8} {:>7}  {:8} image", "open, ms", "MiB", "exit, ms", "");
    for (name, change) in cases {
        let directory = tempfile::Builder::new().prefix("larder-hostile-").tempdir_in(&directory)?;
        let mut image = Image::sound(directory.path())?;
        change(&mut image).with_context(|| (*name).to_owned())?;
        let open_time_max = Duration::from_millis(arguments.open_ms);
        let outcome = serve(&program, image.path(), directory.path(), arguments.metadata_memory, open_time_max);
        let outcome = outcome.with_context(|| (*name).to_owned())?;
        let allowed = arguments.metadata_memory.get() + arguments.memory_max.get();
        let within_limits = outcome.open <= open_time_max
            && outcome.memory_bytes <= allowed
            && outcome.end.is_none_or(|end| end.as_millis() <= u128::from(arguments.end_ms));
        println!(
            "{:>9} {:>8.1} {:>7}  {:8} {name}{}",
            outcome.open.as_millis(),
            outcome.memory_bytes as f64 / f64::from(1 << 20),
            outcome.end.map_or_else(String::new, |end| end.as_millis().to_string()),
            if outcome.served { "served" } else { "refused" },
            if within_limits { "" } else { "  LIMIT EXCEEDED" },
        );
        if !outcome.served {
            println!("{:30}{}", "", outcome.said.trim());
        }
        passed &= within_limits;
    }
    Ok(passed)
}

/// Returns a process's present anonymous memory, in bytes.
fn memory_bytes(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Serves an image for a moment, unless Larder refuses it.
fn serve(
    program: &Path,
    image: &Path,
    directory: &Path,
    metadata_memory: ByteLen,
    wait: Duration,
) -> anyhow::Result<Outcome> {
    let mut command = killed_with_parent(program.to_str().context("the program's path is not UTF-8")?);
    let uri = format!("nbd+unix:///?socket={}/socket", directory.display());
    command
        .args(["disk", "serve", "--format", "qcow2", "--nbd", &uri, "--metadata-memory"])
        .arg(metadata_memory.get().to_string())
        .arg(image);
    let mut outcome = Outcome::default();
    let started = Instant::now();
    let mut process = Process::start(command)?;
    while started.elapsed() < wait && !process.has_ended() && !outcome.served {
        outcome.served = process.has_output_after(0, "serving");
        outcome.memory_bytes = outcome.memory_bytes.max(memory_bytes(process.id()));
        std::thread::sleep(Duration::from_millis(1));
    }
    outcome.open = started.elapsed();
    if outcome.served {
        // Metadata is read in the background meanwhile.
        read_all(&uri)?;
        outcome.memory_bytes = outcome.memory_bytes.max(memory_bytes(process.id()));
    }
    if !process.has_ended() {
        let signalled = Instant::now();
        process.signal(libc::SIGTERM);
        let status = process.wait(LIMIT)?;
        outcome.end = Some(signalled.elapsed());
        ensure!(status.code().is_some(), "the program was killed by a signal: {}", process.output());
    }
    let output = process.output();
    ensure!(!output.contains("panicked"), "the program panicked: {output}");
    outcome.said = output.lines().last().unwrap_or_default().to_owned();
    if !outcome.served {
        let status = process.wait(LIMIT)?;
        ensure!(status.code().is_some(), "the program was killed by a signal: {output}");
    }
    Ok(outcome)
}

/// Reads and writes at both ends of the disk. They may fail, depending on the image.
fn read_all(uri: &str) -> anyhow::Result<()> {
    let mut command = killed_with_parent("qemu-io");
    command.args(["-f", "raw", "-c", "read 0 1M", "-c", "write 128k 64k", "-c", "read 32M 1M", uri]);
    let mut client = Process::start(command).context("qemu-io; testbed/setup.sh installs it")?;
    client.wait(LIMIT).map(drop)
}
