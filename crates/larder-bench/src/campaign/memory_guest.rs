//! A guest under QEMU whose memory is a shared memfd, and that uses all of it and verifies it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::ValueEnum;
use tempfile::TempDir;

use super::guest::{KERNEL_ERROR_CHECK_SCRIPT, LIMIT, Monitor, accelerator, initramfs, test_bed};
use super::process::{Process, killed_with_parent};

/// The guest's load, which repeats until a line arrives on the console. Each round writes and verifies files in
/// memory, and checks that a file from the beginning is unchanged. It does the same with the disk, if there is one,
/// through memory that was free. Then it idles for a moment. Once memory has been hot-plugged, the guest fills some
/// of it too.
const ROUNDS: &str = r#"
fill="--minimal --buffer_compress_percentage=90 --refill_buffers --output=/fio"
check="--verify=crc32c --verify_fatal=1"
failed() { cat /fio; dmesg | tail; exit 1; }
(read -r line </dev/console; touch /stop) &
mkdir /w
mount -t tmpfs -o size=90% w /w
fio $fill --name=old --filename=/w/old --rw=write --bs=64k --size=OLDm || failed
sha256sum /w/old >/old.sum
read -r _ first _ </proc/meminfo
round=0
while [ ! -e /stop ]; do
  round=$((round + 1))
  fio $fill $check --ioengine=psync --directory=/w --rw=randwrite --bsrange=4k-64k --size=NEWm --randseed=$round \
    --group_reporting --name=a --name=b || failed
  sha256sum -c /old.sum >/fio || failed
  if [ -e /dev/vda ]; then
    on="--filename=/dev/vda --bs=64k --size=16m --name=disk $check"
    fio $fill $on --rw=write --do_verify=0 --end_fsync=1 --randseed=$round || failed
    echo 1 >/proc/sys/vm/drop_caches
    fio $fill $on --rw=read || failed
    fio $fill $on --rw=randwrite --direct=1 --ioengine=libaio --iodepth=16 --offset=16m || failed
  fi
  read -r _ total _ </proc/meminfo
  if [ ! -e /grown ] && [ "$total" -gt $((first + 65536)) ]; then
    mount -o remount,size=90% /w
    fio $fill --name=grown --filename=/w/grown --rw=write --bs=64k --size=96m || failed
    sha256sum /w/grown >>/old.sum
    touch /grown
    echo GROWN
  fi
  echo "ROUND $round"
  sleep 0.2
done
"#;

/// Console line at the end of the first round.
pub const FIRST_ROUND_TEXT: &str = "ROUND 1";

/// Number of the guest's processors.
pub const GUEST_CPUS: u32 = 2;

/// The disk's size in bytes.
const DISK: u64 = 32 << 20;

/// Implementation of the guest's disk I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiskIo {
    /// Threads of QEMU, through the page cache
    Threads,
    /// io_uring in QEMU, bypassing the page cache
    Uring,
    /// Larder, bypassing the page cache; the caller must serve [`disk_image`] at [`disk_socket`]
    #[value(skip)]
    Larder,
}

/// Returns the path of a guest's disk image.
pub fn disk_image(images: &Path) -> PathBuf {
    images.join("disk.raw")
}

/// Returns the path of the disk server's socket.
pub fn disk_socket(images: &Path) -> PathBuf {
    images.join("disk.sock")
}

/// Creates an empty disk image.
///
/// # Errors
/// If the file cannot be created.
pub fn create_disk(images: &Path) -> anyhow::Result<()> {
    Ok(std::fs::File::create(disk_image(images))?.set_len(DISK)?)
}

/// Configuration of the guest.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Memory in MiB.
    pub mib: u64,
    /// Size of the file that is written once, in MiB.
    pub old_mib: u64,
    /// Size of the files that are written each round, in MiB.
    pub new_mib: u64,
    /// Disk of the guest, if it has one.
    pub disk: Option<DiskIo>,
    /// True if QEMU sandboxes itself.
    pub sandbox: bool,
    /// True if memory can be hot-plugged, for which the guest uses about 64 MiB more.
    pub pluggable: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { mib: 512, old_mib: 64, new_mib: 32, disk: None, sandbox: false, pluggable: false }
    }
}

/// A running guest; QEMU is killed when this is dropped.
pub struct MemoryGuest {
    /// The QEMU process; its output lines are those of the serial console.
    pub process: Process,
    folder: TempDir,
}

impl MemoryGuest {
    /// Boots a guest, with its disk in `images`, and waits for its first round.
    ///
    /// # Errors
    /// If the test bed is not set up, or the guest does not get that far.
    pub fn start(options: Options, images: &Path) -> anyhow::Result<Self> {
        let guest = Self::boot(options, images)?;
        guest.process.wait_for(FIRST_ROUND_TEXT, LIMIT)?;
        Ok(guest)
    }

    /// Boots a guest, with its disk in `images`.
    ///
    /// # Errors
    /// If the test bed is not set up.
    pub fn boot(options: Options, images: &Path) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let script =
            ROUNDS.replace("OLD", &options.old_mib.to_string()).replace("NEW", &(options.new_mib / 2).to_string());
        let initrd = initramfs(&[&script, KERNEL_ERROR_CHECK_SCRIPT].concat(), directory.path())?;
        let mut command = killed_with_parent("qemu-system-x86_64");
        let memory = format!("memory-backend-memfd,id=m,size={}M,share=on", options.mib);
        let slots = if options.pluggable { ",slots=2,maxmem=4G" } else { "" };
        command
            .args([
                "-accel",
                &accelerator()?,
                "-smp",
                &GUEST_CPUS.to_string(),
                "-m",
                &format!("{}M{slots}", options.mib),
            ])
            .args(["-object", &memory, "-machine", "q35,memory-backend=m"])
            .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
            .args(["-device", "virtio-balloon-pci,free-page-reporting=on", "-kernel"])
            .arg(test_bed("vmlinuz")?)
            .arg("-initrd")
            .arg(&initrd)
            // On a busy host the kernel's timer check may fail.
            .args(["-append", "console=ttyS0 quiet panic=0 no_timer_check memhp_default_state=online_movable"])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", directory.path().join("qmp").display()));
        if let Some(io) = options.disk {
            let drive_arguments = |io: &str| {
                let image = disk_image(images);
                let drive = format!("if=virtio,format=raw,file={},{io}", image.display());
                create_disk(images).map(|()| ["-drive".to_owned(), drive].to_vec())
            };
            command.args(match io {
                DiskIo::Threads => drive_arguments("aio=threads,cache=writeback")?,
                DiskIo::Uring => drive_arguments("aio=io_uring,cache.direct=on")?,
                DiskIo::Larder => {
                    let socket = disk_socket(images);
                    let chardev = format!("socket,id=disk,reconnect=1,path={}", socket.display());
                    let device = "vhost-user-blk-pci,chardev=disk,num-queues=2".to_owned();
                    ["-chardev".to_owned(), chardev, "-device".to_owned(), device].to_vec()
                }
            });
        }
        if options.sandbox {
            let all = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
            command.args(["-sandbox", all]);
        }
        Ok(Self { process: Process::start(command)?, folder: directory })
    }

    /// Returns QEMU's process number.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the path of QEMU's monitor socket.
    pub fn qmp(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }

    /// Connects to QEMU's monitor.
    ///
    /// # Errors
    /// If QEMU has exited.
    pub fn monitor(&self) -> anyhow::Result<Monitor> {
        Monitor::connect(&self.qmp())
    }

    /// Returns how much of its memory the guest uses, in bytes.
    ///
    /// # Errors
    /// If QEMU has exited.
    pub fn used(&self) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let kib = status.lines().find_map(|line| line.strip_prefix("RssShmem:")?.strip_suffix("kB"));
        Ok(kib.context("no RssShmem in the status of QEMU's process")?.trim().parse::<u64>()? << 10)
    }

    /// Returns the number of rounds so far.
    pub fn rounds(&self) -> usize {
        self.process.output().matches("ROUND ").count()
    }

    /// Waits until the guest has completed `count` more whole rounds.
    ///
    /// # Errors
    /// If the guest makes no progress, or has ended.
    pub fn works(&self, count: usize) -> anyhow::Result<()> {
        // Skips the round in progress.
        let goal = self.rounds() + count + 1;
        let deadline = Instant::now() + LIMIT;
        while self.rounds() < goal {
            let (output, has_ended) = (self.process.output(), self.process.has_ended());
            ensure!(!has_ended && !output.contains("LARDER-GUEST-EXIT"), "the guest exited: {output}");
            ensure!(Instant::now() < deadline, "the guest makes no progress: {output}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Makes the guest end after this round. Returns its number of rounds.
    ///
    /// # Errors
    /// If the guest has found wrong data, or does not end.
    pub fn finish(self) -> anyhow::Result<usize> {
        self.finish_within(LIMIT)
    }

    /// Makes the guest end after this round, which may take as long as `limit`. Returns its number of rounds.
    ///
    /// # Errors
    /// As in [`MemoryGuest::finish`].
    pub fn finish_within(mut self, limit: Duration) -> anyhow::Result<usize> {
        self.process.say("stop")?;
        let end = self.process.wait_for("LARDER-GUEST-EXIT", limit)?;
        ensure!(end.trim() == "LARDER-GUEST-EXIT 0", "the guest failed: {}", self.process.output());
        let ended = self.process.wait(limit)?;
        ensure!(ended.success(), "QEMU exited with {ended}: {}", self.process.output());
        Ok(self.rounds())
    }
}
