//! A test bed guest under QEMU, with a vhost-user-blk disk, that runs one script.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use super::process::{Process, killed_with_parent};

/// The guest kernel's command line. Without `no_timer_check` Linux panics if an emulated timer's first ticks come
/// late, as they do on a busy machine.
pub const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet panic=-1 no_timer_check";

/// Limit for a guest's answers. Booting under emulation on a busy machine is slow.
pub const LIMIT: Duration = Duration::from_secs(300);

/// A script that writes and verifies, round after round, until a line arrives on the console. Its two jobs keep two
/// queues busy.
pub const ROUNDS: &str = r#"
(read -r line </dev/console; touch /stop) &
round=0
while [ ! -e /stop ]; do
  round=$((round + 1))
  fio --minimal --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bsrange=4k-64k --size=16m --fsync=16 \
    --verify=crc32c --verify_fatal=1 --randseed=$round --filename=/dev/vda --group_reporting \
    --name=a --offset=0 --name=b --offset=16m >/fio || { cat /fio; dmesg | tail; exit 1; }
  echo "ROUND $round clat-max-us $(cut -d';' -f56 /fio)"
done
"#;

/// A script that fails if the kernel has logged an error of a disk, or one that hung.
pub const KERNEL_ERROR_CHECK_SCRIPT: &str = r#"
if dmesg | grep -iE 'i/o error|blk_update|hung task|timeout'; then exit 1; fi
"#;

/// Configuration of the guest's machine.
#[derive(Clone, Debug)]
pub struct GuestOptions {
    /// Number of processors.
    pub processors: u32,
    /// Memory in KiB. QEMU before 9.0 loses writes of emulated guests in migrations unless this is an odd size.
    pub memory_kib: u64,
    /// Further properties of the disk: `num-queues=4,packed=on`.
    pub disk: String,
    /// True if QEMU reconnects to the disk's socket after a disconnect.
    pub reconnects: bool,
    /// Further arguments for QEMU.
    pub qemu: Vec<String>,
    /// Test bed file to boot: `guest.cpio.gz` is a whole guest, `boot.cpio.gz` starts Debian from the disk.
    pub base: &'static str,
}

impl Default for GuestOptions {
    fn default() -> Self {
        Self {
            processors: 2,
            memory_kib: 512 << 10,
            disk: "num-queues=2".to_owned(),
            reconnects: true,
            qemu: Vec::new(),
            base: DEFAULT_BASE,
        }
    }
}

/// A guest that needs no disk.
const DEFAULT_BASE: &str = "guest.cpio.gz";

/// A running guest.
pub struct Guest {
    /// The QEMU process; its output lines are those of the serial console.
    pub process: Process,
    monitor: PathBuf,
    _folder: TempDir,
}

/// Returns the project's root directory.
pub fn project() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Returns the path of a file that `testbed/setup.sh` creates.
///
/// # Errors
/// If the file is missing.
pub fn test_bed(file: &str) -> anyhow::Result<PathBuf> {
    let path = project().join("target/testbed").join(file);
    ensure!(path.exists(), "{} is missing: run testbed/setup.sh", path.display());
    Ok(path)
}

/// Creates the initramfs, in `directory`, of a guest that runs `script` and powers off.
///
/// # Errors
/// If the test bed is not set up, or a system call fails.
pub fn initramfs(script: &str, directory: &Path) -> anyhow::Result<PathBuf> {
    initramfs_of(DEFAULT_BASE, script, directory)
}

fn initramfs_of(base: &str, script: &str, directory: &Path) -> anyhow::Result<PathBuf> {
    let (source, initrd) = (directory.join("test.sh"), directory.join("initrd"));
    fs::write(&source, script)?;
    let status = Command::new(project().join("testbed/with-script.sh"))
        .arg(test_bed(base)?)
        .args([&source, &initrd])
        .status()?;
    ensure!(status.success(), "testbed/with-script.sh failed");
    Ok(initrd)
}

/// Returns the value of QEMU's `-accel` for this machine.
///
/// # Errors
/// If the test bed is not set up.
pub fn accelerator() -> anyhow::Result<String> {
    let output = Command::new(project().join("testbed/accel.sh")).output()?;
    let name = match output.stdout.trim_ascii() {
        b"kvm" => "kvm",
        _ => "tcg,thread=multi",
    };
    Ok(name.to_owned())
}

impl Guest {
    /// Boots a guest that runs `script`.
    ///
    /// # Errors
    /// If the test bed is not set up, or QEMU cannot be started.
    pub fn start(script: &str, socket: &Path, options: &GuestOptions) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let initrd = initramfs_of(options.base, script, directory.path())?;
        let monitor = directory.path().join("qmp");
        let mut command = killed_with_parent("qemu-system-x86_64");
        command
            .args(["-accel", &accelerator()?, "-smp", &options.processors.to_string()])
            .arg("-m")
            .arg(format!("{}k,slots=4,maxmem=4G", options.memory_kib))
            .arg("-object")
            .arg(format!("memory-backend-memfd,id=m,size={}k,share=on", options.memory_kib))
            .args(["-machine", "q35,memory-backend=m", "-nodefaults", "-display", "none", "-no-reboot"])
            .args(["-serial", "stdio", "-kernel"])
            .arg(test_bed("vmlinuz")?)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", KERNEL_ARGUMENTS])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .arg("-chardev")
            .arg(format!("socket,id=c,path={},reconnect={}", socket.display(), u8::from(options.reconnects)))
            .arg("-device")
            .arg(format!("vhost-user-blk-pci,chardev=c,{}", options.disk))
            .args(&options.qemu);
        Ok(Self { process: Process::start(command)?, monitor, _folder: directory })
    }

    /// Waits until the script has succeeded, and returns the console's output.
    ///
    /// # Errors
    /// If the script failed, or the guest did not get that far; with the console's output.
    pub fn finish(&self) -> anyhow::Result<String> {
        let end = self.process.wait_for("LARDER-GUEST-EXIT", LIMIT)?;
        if end.trim() != "LARDER-GUEST-EXIT 0" {
            bail!("the guest's script failed:\n{}", self.process.output());
        }
        Ok(self.process.output())
    }

    /// Connects to QEMU's monitor.
    ///
    /// # Errors
    /// If QEMU has exited.
    pub fn monitor(&self) -> anyhow::Result<Monitor> {
        Monitor::connect(&self.monitor)
    }
}

/// A client of QEMU's machine protocol (QMP), as far as tests need it.
pub struct Monitor {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
    events: Vec<String>,
    /// Commands that QEMU has not answered.
    unanswered: usize,
}

impl Monitor {
    /// Connects to the monitor socket at `path`.
    ///
    /// # Errors
    /// If QEMU has exited.
    pub fn connect(path: &Path) -> anyhow::Result<Self> {
        Self::patient(path, LIMIT)
    }

    /// Connects to the monitor socket at `path`, with a time limit for each answer.
    ///
    /// # Errors
    /// If QEMU has exited, or does not answer in time.
    pub fn patient(path: &Path, limit: Duration) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(limit))?;
        let mut this = Self { reader: BufReader::new(stream.try_clone()?), stream, events: Vec::new(), unanswered: 0 };
        this.line()?;
        this.run("qmp_capabilities", "{}")?;
        Ok(this)
    }

    /// Changes the time limit for answers. The connection is unusable after a timeout.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn set_timeout(&self, limit: Duration) -> anyhow::Result<()> {
        Ok(self.stream.set_read_timeout(Some(limit))?)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            bail!("QEMU closed its monitor");
        }
        Ok(line)
    }

    /// Runs a command with its arguments in JSON, and returns the line of its answer.
    ///
    /// # Errors
    /// If QEMU rejects the command.
    pub fn run(&mut self, command: &str, arguments: &str) -> anyhow::Result<String> {
        self.begin(command, arguments)?;
        loop {
            let line = self.line()?;
            if !is_reply(&line) {
                self.events.push(line);
                continue;
            }
            self.unanswered -= 1;
            if self.unanswered > 0 {
                continue;
            }
            if line.starts_with("{\"error\"") {
                bail!("QEMU rejected {command}: {line}");
            }
            return Ok(line);
        }
    }

    /// Sends a command without waiting for its answer, which may depend on a later event.
    ///
    /// # Errors
    /// If QEMU has exited.
    pub fn begin(&mut self, command: &str, arguments: &str) -> anyhow::Result<()> {
        self.unanswered += 1;
        Ok(writeln!(self.stream, "{{\"execute\": \"{command}\", \"arguments\": {arguments}}}")?)
    }

    /// Returns the events, in JSON, that arrived while commands were run.
    pub fn take_events(&mut self) -> Vec<String> {
        std::mem::take(&mut self.events)
    }

    /// Waits for an event.
    ///
    /// # Errors
    /// If QEMU exits first.
    pub fn wait_for_event(&mut self, name: &str) -> anyhow::Result<String> {
        loop {
            let line = self.line()?;
            self.unanswered -= usize::from(self.unanswered > 0 && is_reply(&line));
            if line.contains("\"event\"") && line.contains(name) {
                return Ok(line);
            }
        }
    }
}

fn is_reply(line: &str) -> bool {
    line.starts_with("{\"return\"") || line.starts_with("{\"error\"")
}
