//! Restarts or kills `larder vm`, run as a service, over and over under a guest that writes and verifies. The
//! front-end cannot reconnect, so a connection that is not taken over is an error for the guest.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;

use super::Random;
use super::guest::{Guest, GuestOptions, KERNEL_ERROR_CHECK_SCRIPT, LIMIT, ROUNDS};
use super::pauses::DurationSample;
use super::service::Service;

/// Repeatedly restart a VM's server under a guest that verifies its disk
#[derive(Args)]
pub struct Arguments {
    /// Number of restarts
    #[arg(long, default_value_t = 100)]
    count: u32,
    /// Kill the server instead of asking it to exit
    #[arg(long)]
    kill: bool,
    /// Directory of the image and the cache
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// Path of larder; by default the one in this program's directory
    #[arg(long)]
    larder: Option<PathBuf>,
    /// Seed of the random moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Script part that runs during the rounds: a reader that logs the latency of each read.
const READ_PROBE_SCRIPT: &str = r#"
fio --minimal --direct=1 --ioengine=psync --rw=randread --bs=4k --rate_iops=500 --time_based --runtime=1d \
  --filename=/dev/vda --name=probe --offset=32m --size=16m --write_lat_log=/probe --output=/probe.out &
probe=$!
"#;

/// Script part that runs after the rounds. COUNT is the number of longest reads that it prints.
const LONGEST_READS_SCRIPT: &str = r#"
kill -INT $probe
wait $probe
echo "PAUSES" $(sort -t , -k 2 -n /probe_lat.1.log | tail -n COUNT | cut -d , -f 2)
"#;

/// The disk's size in bytes.
const DISK: u64 = 64 << 20;

/// Way in which the server is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// By SIGTERM, as systemd does.
    Asked,
    /// By SIGKILL.
    Killed,
}

/// Result of the campaign.
#[derive(Debug)]
pub struct Report {
    /// Rounds that the guest wrote and verified.
    pub rounds: usize,
    /// Times from the signal until the next process was ready.
    pub servers: DurationSample,
    /// The guest's longest reads, as many as there were restarts.
    pub guest: DurationSample,
}

/// Creates a VM's file in `directory`, with one qcow2 disk and a write-back cache. Returns the command that serves it.
///
/// # Errors
/// If the image cannot be created.
pub fn vm(larder: &Path, directory: &Path) -> anyhow::Result<Vec<OsString>> {
    let image = directory.join("disk.qcow2");
    let mut create = std::process::Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg(DISK.to_string());
    ensure!(create.status().context("qemu-img")?.success(), "qemu-img failed");
    let file = directory.join("web.toml");
    let text = "control = \"control\"\n\n[[disk]]\nname = \"vda\"\nimage = \"disk.qcow2\"\nformat = \"qcow2\"\nsocket = \"vda\"\n\
                cache = \"./cache\"\ncache-size = \"24M\"\ncache-mode = \"wb\"\n";
    std::fs::write(&file, text)?;
    let state = format!("STATE_DIRECTORY={}", directory.join("state").display());
    let command_line = ["env".into(), state.into(), larder.into(), "vm".into(), file.into()];
    Ok(command_line.to_vec())
}

/// Restarts the server `count` times.
///
/// # Errors
/// If the guest sees an error or wrong data, or hangs.
pub fn run(larder: &Path, directory: &Path, method: How, count: u32, random: &mut Random) -> anyhow::Result<Report> {
    let mut service = Service::start(&vm(larder, directory)?, &directory.join("notify"))?;
    let options = GuestOptions { reconnects: false, ..GuestOptions::default() };
    let pauses = LONGEST_READS_SCRIPT.replace("COUNT", &count.to_string());
    let script = [READ_PROBE_SCRIPT, ROUNDS, &pauses, KERNEL_ERROR_CHECK_SCRIPT].concat();
    let mut guest = Guest::start(&script, &directory.join("vda"), &options)?;
    guest.process.wait_for("ROUND 1", LIMIT)?;
    let mut servers = DurationSample::default();
    let signal = match method {
        How::Asked => libc::SIGTERM,
        How::Killed => libc::SIGKILL,
    };
    for restart in 0..count {
        // A restart may come anywhere in the guest's rounds.
        std::thread::sleep(Duration::from_micros(300_000 + random.below(400_000)));
        if guest.process.output().contains("LARDER-GUEST-EXIT") {
            bail!("the guest exited after restart {restart}: {}", guest.process.output());
        }
        servers.push(service.restart(signal)?);
    }
    let rounds = || guest.process.output().matches("ROUND").count();
    // Waits for a whole round with the last server.
    let more = format!("ROUND {}", rounds() + 2);
    let served = guest.process.wait_for(&more, LIMIT);
    served.with_context(|| format!("the server's output: {}", service.process.output()))?;
    guest.process.say("stop")?;
    let console = guest.finish()?;
    let mut pauses = DurationSample::default();
    let console_line = console.lines().find_map(|line| Some(line.split_once("PAUSES ")?.1));
    for pause in
        console_line.with_context(|| format!("no line PAUSES on the guest's console: {console}"))?.split_whitespace()
    {
        pauses.push(Duration::from_nanos(pause.parse()?));
    }
    let rounds = console.matches("ROUND").count();
    drop(guest);
    let ended = service.end(libc::SIGTERM)?;
    ensure!(ended.success(), "the last server failed: {}", service.process.output());
    Ok(Report { rounds, servers, guest: pauses })
}

/// Runs the campaign and prints its results.
///
/// # Errors
/// If the guest noticed an error, or something is missing.
pub fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = super::find_larder(arguments.larder.as_deref())?;
    let directory = tempfile::tempdir_in(&arguments.folder).context("creating a directory for the image")?;
    let how = if arguments.kill { How::Killed } else { How::Asked };
    let report = run(&larder, directory.path(), how, arguments.count, &mut Random::new(arguments.seed))?;
    println!(
        "{} restarts under a guest that cannot reconnect; it wrote and verified {} rounds without an error",
        arguments.count, report.rounds
    );
    println!("time from the signal until the next server was ready, {}", report.servers);
    println!("the guest's longest reads, {}", report.guest);
    Ok(())
}
