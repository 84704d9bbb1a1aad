//! Kills the disk servers of a guest at random moments while it boots under `larder run`, when QEMU and the guest's
//! driver set the devices up. The guest must boot, read back its own writes, and power off.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;

use super::Random;
use super::cached::TestCacheOptions;
use super::disk::{self, Format, Victim};
use super::guest::{KERNEL_ARGUMENTS, accelerator, initramfs, test_bed};
use super::process::Process;

/// Time after the last kill within which the guest must power off: 120 s. It is counted in steps, so that time in
/// which all processes were stopped does not count.
const STEPS_MAX: u32 = 1200;
const STEP: Duration = Duration::from_millis(100);

/// Kills in one boot at most. A server that dies repeatedly is restarted after growing delays.
const KILLS_MAX: u32 = 8;

const SCRIPT: &str = r#"
for disk in vda vdb; do
  fio --minimal --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bsrange=4k-64k --size=8m --fsync=16 \
    --verify=crc32c --verify_fatal=1 --filename=/dev/$disk --name=$disk >/fio || { cat /fio; dmesg | tail; exit 1; }
done
if dmesg | grep -iE 'i/o error|blk_update|hung task'; then exit 1; fi
"#;

/// Result of the campaign.
#[derive(Debug, Default)]
pub struct Report {
    /// Guests started.
    pub boots: u32,
    /// Servers killed.
    pub kills: u32,
    /// Failures: one text for each guest that failed.
    pub failures: Vec<String>,
}

/// Bytes of each disk.
pub const DISK: u64 = 16 << 20;

/// Boots `count` guests, each from a new raw and a new qcow2 image in `directory`, with or without caches.
///
/// # Errors
/// If a guest cannot be started at all.
pub fn run(
    larder: &Path,
    directory: &Path,
    cache: Option<TestCacheOptions>,
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let mut report = Report::default();
    let initrd = initramfs(SCRIPT, directory)?;
    for boot in 0..count {
        report.boots += 1;
        let images = [Format::Raw, Format::Qcow2].map(|format| (format, directory.join(format!("disk-{format:?}"))));
        for (format, image) in &images {
            let victim = Victim { format: *format, ..Victim::from(larder) };
            disk::create(&victim, image, DISK)?;
        }
        let mut command = Command::new(larder);
        command.arg("run").env("STATE_DIRECTORY", directory.join("state"));
        if let Some(cache) = cache {
            for (format, image) in &images {
                command.arg("--disk").arg(with_cache(*format, image, cache)?);
            }
        }
        command
            .args(["--", "qemu-system-x86_64", "-name", "boot-kills"])
            .args(["-accel", &accelerator()?, "-m", "512", "-smp", "2"])
            .args(["-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"])
            .arg("-kernel")
            .arg(test_bed("vmlinuz")?)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", KERNEL_ARGUMENTS]);
        for (format, image) in images.iter().filter(|_| cache.is_none()) {
            let format = format!("{format:?}").to_lowercase();
            let drive = format!("if=virtio,cache=none,format={format},file={}", image.display());
            command.args(["-drive", &drive]);
        }
        let mut run = Process::start(command)?;
        let result = kill_servers(&mut run, &mut report.kills, random).and_then(|()| {
            disk::qcow2_contents(&images[1].1)?;
            Ok(())
        });
        if let Err(error) = result {
            report.failures.push(format!("boot {boot}: {error:#}"));
        }
    }
    Ok(report)
}

/// Returns the `--disk` value for a new image with a new cache.
fn with_cache(format: Format, image: &Path, cache: TestCacheOptions) -> anyhow::Result<String> {
    let file = image.with_extension("cache");
    if file.exists() {
        std::fs::remove_file(&file)?;
    }
    Ok(format!(
        "{},format={},cache={},cache-size={},cache-mode={}",
        image.display(),
        format!("{format:?}").to_lowercase(),
        file.display(),
        cache.size,
        cache.mode.word()
    ))
}

/// Kills the servers of a run repeatedly until it ends, some of them again within milliseconds.
fn kill_servers(run: &mut Process, kills: &mut u32, random: &mut Random) -> anyhow::Result<()> {
    // The first kill may come while QEMU sets itself up.
    let mut pause = random.below(1000);
    for _ in 0..KILLS_MAX {
        std::thread::sleep(Duration::from_millis(pause));
        if run.output().contains("LARDER-GUEST-EXIT") {
            break;
        }
        *kills += kill_children(run.id());
        pause = match random.below(4) {
            0 => random.below(30),
            _ => 300 + random.below(2200),
        };
    }
    let mut steps = 0..STEPS_MAX;
    let status = loop {
        match run.wait(STEP) {
            Ok(status) => break status,
            Err(error) if steps.next().is_none() => return Err(error.context("the guest hangs")),
            Err(_) => {}
        }
    };
    let guest_succeeded = run.output().contains("LARDER-GUEST-EXIT 0");
    ensure!(status.success() && guest_succeeded, "larder run exited with {status}:\n{}", run.output());
    Ok(())
}

/// Kills the servers if QEMU has been started. Returns their number.
fn kill_children(run: u32) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{run}/task/{run}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|text| text.parse::<i32>().ok());
    let commands: Vec<(i32, String)> = children
        .map(|child| {
            let cmdline = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
            (child, String::from_utf8_lossy(&cmdline).into_owned())
        })
        .collect();
    if !commands.iter().any(|(_, cmdline)| cmdline.starts_with("qemu-system")) {
        return 0;
    }
    let servers = commands.iter().filter(|(_, cmdline)| cmdline.contains("disk\0serve"));
    servers
        .map(|(server, _)| {
            // SAFETY: `kill` accesses no memory. The number was a server's a moment ago, and PIDs are not soon
            // reused.
            unsafe { libc::kill(*server, libc::SIGKILL) };
        })
        .count() as u32
}
