//! `larder-bench hostile-images`: qcow2 images that were made to do harm, each of which asks for memory or time without end
//! somewhere in its tables. Larder serves each, or refuses it, and what it takes for that is measured: the time, the most
//! memory, and the time that it takes to end when it is told to.

mod images;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use larder_block::ByteLen;

use crate::campaign::larder_beside;
use crate::campaign::process::{Process, mortal};
use images::{CASES, Image};

/// Serve images that were made to do harm, and measure what that takes
#[derive(Args, Debug)]
pub struct Arguments {
    /// The program; by default the one beside this program
    #[arg(long, value_name = "PROGRAM")]
    larder: Option<PathBuf>,
    /// What the program may keep of an image's metadata
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    metadata_memory: ByteLen,
    /// The most memory beside that
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    memory_max: ByteLen,
    /// The time within which an image must be served or refused
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    open_ms: u64,
    /// The time within which the program must end when it is told to
    #[arg(long, value_name = "MS", default_value_t = 1_000)]
    end_ms: u64,
    /// Images whose names have this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// The directory for images; by default /var/tmp
    #[arg(long, value_name = "DIRECTORY")]
    folder: Option<PathBuf>,
}

/// Nothing takes so long, on any machine.
const LIMIT: Duration = Duration::from_secs(300);

/// The result of serving one image.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// It was served; otherwise refused.
    pub served: bool,
    /// From the program's start until it served or ended.
    pub open: Duration,
    /// The most memory that was in use, files excluded, in bytes.
    pub memory_bytes: u64,
    /// From the signal to the end, of one that had not ended.
    pub end: Option<Duration>,
    /// The last line that the program said.
    pub said: String,
}

/// Runs the experiment, and prints a table; whether no image took too much.
///
/// # Errors
/// A program is missing; Larder crashes, or does not end.
pub fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let program = larder_beside(arguments.larder.as_deref())?;
    let folder = arguments.folder.clone().unwrap_or_else(|| PathBuf::from("/var/tmp"));
    let cases = CASES.iter().filter(|(name, _)| name.contains(&arguments.only));
    let mut passed = true;
    println!("{:>9} {:>8} {:>7}  {:8} image", "open, ms", "MiB", "end, ms", "");
    for (name, change) in cases {
        let folder = tempfile::Builder::new().prefix("larder-hostile-").tempdir_in(&folder)?;
        let mut image = Image::sound(folder.path())?;
        change(&mut image).with_context(|| (*name).to_owned())?;
        let wait = Duration::from_millis(arguments.open_ms);
        let outcome = serve(&program, image.path(), folder.path(), arguments.metadata_memory, wait);
        let outcome = outcome.with_context(|| (*name).to_owned())?;
        let allowed = arguments.metadata_memory.get() + arguments.memory_max.get();
        let is_well = outcome.open <= wait
            && outcome.memory_bytes <= allowed
            && outcome
                .end
                .is_none_or(|end| end.as_millis() <= u128::from(arguments.end_ms));
        println!(
            "{:>9} {:>8.1} {:>7}  {:8} {name}{}",
            outcome.open.as_millis(),
            outcome.memory_bytes as f64 / f64::from(1 << 20),
            outcome.end.map_or_else(String::new, |end| end.as_millis().to_string()),
            if outcome.served { "served" } else { "refused" },
            if is_well { "" } else { "  TOO MUCH" },
        );
        if !outcome.served {
            println!("{:30}{}", "", outcome.said.trim());
        }
        passed &= is_well;
    }
    Ok(passed)
}

/// The most memory that a process has had of its own so far, in bytes.
fn memory_bytes(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Serves an image for a moment, or until that is refused.
fn serve(
    program: &Path,
    image: &Path,
    folder: &Path,
    metadata_memory: ByteLen,
    wait: Duration,
) -> anyhow::Result<Outcome> {
    let mut command = mortal(program.to_str().context("the program's path is no UTF-8")?);
    let uri = format!("nbd+unix:///?socket={}/socket", folder.display());
    command
        .args(["disk", "serve", "--format", "qcow2", "--nbd", &uri, "--metadata-memory"])
        .arg(metadata_memory.get().to_string())
        .arg(image);
    let mut outcome = Outcome::default();
    let began = Instant::now();
    let mut process = Process::start(command)?;
    while began.elapsed() < wait && !process.has_ended() && !outcome.served {
        outcome.served = process.has_said_after(0, "serving");
        outcome.memory_bytes = outcome.memory_bytes.max(memory_bytes(process.id()));
        std::thread::sleep(Duration::from_millis(1));
    }
    outcome.open = began.elapsed();
    if outcome.served {
        // Metadata is read in the background meanwhile.
        read_all(&uri)?;
        outcome.memory_bytes = outcome.memory_bytes.max(memory_bytes(process.id()));
    }
    if !process.has_ended() {
        let told = Instant::now();
        process.signal(libc::SIGTERM);
        let status = process.wait(LIMIT)?;
        outcome.end = Some(told.elapsed());
        ensure!(
            status.code().is_some(),
            "the program ended by a signal: {}",
            process.output()
        );
    }
    let said = process.output();
    ensure!(!said.contains("panicked"), "the program has panicked: {said}");
    outcome.said = said.lines().last().unwrap_or_default().to_owned();
    if !outcome.served {
        let status = process.wait(LIMIT)?;
        ensure!(status.code().is_some(), "the program ended by a signal: {said}");
    }
    Ok(outcome)
}

/// Reads and writes at both ends of the disk; whether that succeeds is the image's affair.
fn read_all(uri: &str) -> anyhow::Result<()> {
    let mut command = mortal("qemu-io");
    command.args([
        "-f",
        "raw",
        "-c",
        "read 0 1M",
        "-c",
        "write 128k 64k",
        "-c",
        "read 32M 1M",
        uri,
    ]);
    let mut client = Process::start(command).context("qemu-io; testbed/setup.sh installs it")?;
    client.wait(LIMIT).map(drop)
}
