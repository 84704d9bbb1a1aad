//! A guest under QEMU whose memory is a shared memfd, and that works on all of it and verifies it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::ValueEnum;
use tempfile::TempDir;

use super::guest::{LIMIT, Monitor, NO_ERRORS, accelerator, initramfs, test_bed};
use super::process::{Process, mortal};

/// What it does, round after round, until a line comes on the console: it writes and verifies files in its memory, looks
/// whether one that was written in the beginning is as it was, and does the same with its disk, if it has one, through
/// memory that was free; then it is idle for a moment. Once it has had memory plugged in it fills some of it, too.
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

/// What it says at the end of its first one.
pub const FIRST_ROUND: &str = "ROUND 1";

/// Its processors.
pub const PROCESSORS: u32 = 2;

/// The disk's size in bytes.
const DISK: u64 = 32 << 20;

/// How QEMU does the I/O of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiskIo {
    /// By threads, through the page cache
    Threads,
    /// By io_uring, past the page cache
    Uring,
    /// Larder does, past the page cache: whoever starts the guest has a server for [`disk_image`] at [`disk_socket`]
    #[value(skip)]
    Larder,
}

/// The image of a guest's disk.
pub fn disk_image(images: &Path) -> PathBuf {
    images.join("disk.raw")
}

/// Where its server listens, if it has one.
pub fn disk_socket(images: &Path) -> PathBuf {
    images.join("disk.sock")
}

/// Makes the image, empty.
///
/// # Errors
/// It cannot be made.
pub fn make_disk(images: &Path) -> anyhow::Result<()> {
    Ok(std::fs::File::create(disk_image(images))?.set_len(DISK)?)
}

/// What the guest is like.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Its memory in MiB.
    pub mib: u64,
    /// What of that it writes once, and each round, in MiB.
    pub old_mib: u64,
    /// As above.
    pub new_mib: u64,
    /// It has a disk, too.
    pub disk: Option<DiskIo>,
    /// QEMU locks itself in.
    pub sandbox: bool,
    /// Memory can be plugged in, for which the guest keeps some 64 MiB besides.
    pub pluggable: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mib: 512,
            old_mib: 64,
            new_mib: 32,
            disk: None,
            sandbox: false,
            pluggable: false,
        }
    }
}

/// A running guest; QEMU is killed when this is dropped.
pub struct MemoryGuest {
    /// QEMU; its lines are the serial console's.
    pub process: Process,
    folder: TempDir,
}

impl MemoryGuest {
    /// Boots one, with its disk in `images`, and waits for its first round.
    ///
    /// # Errors
    /// The test bed is not set up, or it does not get that far.
    pub fn start(options: Options, images: &Path) -> anyhow::Result<Self> {
        let guest = Self::boot(options, images)?;
        guest.process.wait_for(FIRST_ROUND, LIMIT)?;
        Ok(guest)
    }

    /// Boots one, with its disk in `images`.
    ///
    /// # Errors
    /// The test bed is not set up.
    pub fn boot(options: Options, images: &Path) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let script = ROUNDS
            .replace("OLD", &options.old_mib.to_string())
            .replace("NEW", &(options.new_mib / 2).to_string());
        let initrd = initramfs(&[&script, NO_ERRORS].concat(), folder.path())?;
        let mut command = mortal("qemu-system-x86_64");
        let memory = format!("memory-backend-memfd,id=m,size={}M,share=on", options.mib);
        let slots = if options.pluggable { ",slots=2,maxmem=4G" } else { "" };
        command
            .args([
                "-accel",
                &accelerator()?,
                "-smp",
                &PROCESSORS.to_string(),
                "-m",
                &format!("{}M{slots}", options.mib),
            ])
            .args(["-object", &memory, "-machine", "q35,memory-backend=m"])
            .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
            .args(["-device", "virtio-balloon-pci,free-page-reporting=on", "-kernel"])
            .arg(test_bed("vmlinuz")?)
            .arg("-initrd")
            .arg(&initrd)
            // On a busy host the kernel may find its timer missing.
            .args([
                "-append",
                "console=ttyS0 quiet panic=0 no_timer_check memhp_default_state=online_movable",
            ])
            .arg("-qmp")
            .arg(format!(
                "unix:{},server=on,wait=off",
                folder.path().join("qmp").display()
            ));
        if let Some(how) = options.disk {
            let own = |how: &str| {
                let image = disk_image(images);
                let drive = format!("if=virtio,format=raw,file={},{how}", image.display());
                make_disk(images).map(|()| ["-drive".to_owned(), drive].to_vec())
            };
            command.args(match how {
                DiskIo::Threads => own("aio=threads,cache=writeback")?,
                DiskIo::Uring => own("aio=io_uring,cache.direct=on")?,
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
        Ok(Self {
            process: Process::start(command)?,
            folder,
        })
    }

    /// QEMU's process number.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Where its monitor listens.
    pub fn qmp(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }

    /// A connection to that.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn monitor(&self) -> anyhow::Result<Monitor> {
        Monitor::connect(&self.qmp())
    }

    /// How much of its memory is in use, in bytes.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn used(&self) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let kib = status
            .lines()
            .find_map(|line| line.strip_prefix("RssShmem:")?.strip_suffix("kB"));
        Ok(kib.context("no RssShmem")?.trim().parse::<u64>()? << 10)
    }

    /// Rounds so far.
    pub fn rounds(&self) -> usize {
        self.process.output().matches("ROUND ").count()
    }

    /// Waits until it has done all of `count` rounds more.
    ///
    /// # Errors
    /// It does not, or has ended.
    pub fn works(&self, count: usize) -> anyhow::Result<()> {
        // One is under way.
        let goal = self.rounds() + count + 1;
        let give_up = Instant::now() + LIMIT;
        while self.rounds() < goal {
            let (output, has_ended) = (self.process.output(), self.process.has_ended());
            ensure!(
                !has_ended && !output.contains("LARDER-GUEST-EXIT"),
                "the guest ended: {output}"
            );
            ensure!(Instant::now() < give_up, "the guest stands still: {output}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Has it end after this round; its rounds.
    ///
    /// # Errors
    /// It found something wrong, or does not end.
    pub fn finish(self) -> anyhow::Result<usize> {
        self.finish_within(LIMIT)
    }

    /// Likewise, where that may take so long.
    ///
    /// # Errors
    /// As in [`MemoryGuest::finish`].
    pub fn finish_within(mut self, limit: Duration) -> anyhow::Result<usize> {
        self.process.say("stop")?;
        let end = self.process.wait_for("LARDER-GUEST-EXIT", limit)?;
        ensure!(
            end.trim() == "LARDER-GUEST-EXIT 0",
            "the guest: {}",
            self.process.output()
        );
        let ended = self.process.wait(limit)?;
        ensure!(ended.success(), "QEMU: {ended}: {}", self.process.output());
        Ok(self.rounds())
    }
}
