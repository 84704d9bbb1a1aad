//! A guest of the test bed under QEMU, with a vhost-user-blk disk, that runs one script.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use super::process::{Process, mortal};

/// The kernel's arguments in a guest. Without `no_timer_check` Linux ends with a panic if an emulated timer's first ticks come
/// late, as they do on a busy machine.
pub const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet panic=-1 no_timer_check";

/// Booting under emulation on a busy machine takes its time.
pub const LIMIT: Duration = Duration::from_secs(300);

/// A script that writes and verifies, round after round, until a line comes on the console. Two jobs, so that two queues are
/// busy.
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

/// A script that fails if the kernel has told of an error of a disk, or of one that hung.
pub const NO_ERRORS: &str = r#"
if dmesg | grep -iE 'i/o error|blk_update|hung task|timeout'; then exit 1; fi
"#;

/// What the guest's machine is like.
#[derive(Clone, Debug)]
pub struct GuestOptions {
    /// Processors.
    pub processors: u32,
    /// Memory in KiB. QEMU before 9.0 loses writes of emulated guests in migrations unless this is an odd size.
    pub memory_kib: u64,
    /// Further properties of the disk: `num-queues=4,packed=on`.
    pub disk: String,
    /// Whether QEMU connects to the disk's socket again when the connection has ended.
    pub reconnects: bool,
    /// Further words of QEMU's command line.
    pub qemu: Vec<String>,
    /// What it boots, of the test bed: `guest.cpio.gz` is a whole guest, `boot.cpio.gz` starts Debian from the disk.
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
            base: GUEST,
        }
    }
}

/// A guest that needs no disk.
const GUEST: &str = "guest.cpio.gz";

/// A running guest.
pub struct Guest {
    /// QEMU; its lines are the serial console's.
    pub process: Process,
    monitor: PathBuf,
    _folder: TempDir,
}

/// The project's root folder.
pub fn project() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// A file that `testbed/setup.sh` makes.
///
/// # Errors
/// It is not there.
pub fn test_bed(file: &str) -> anyhow::Result<PathBuf> {
    let path = project().join("target/testbed").join(file);
    ensure!(path.exists(), "{} is missing: run testbed/setup.sh", path.display());
    Ok(path)
}

/// Makes the initramfs, in `folder`, of a guest that runs `script` and powers off.
///
/// # Errors
/// The test bed is not set up, or the host's.
pub fn initramfs(script: &str, folder: &Path) -> anyhow::Result<PathBuf> {
    initramfs_of(GUEST, script, folder)
}

fn initramfs_of(base: &str, script: &str, folder: &Path) -> anyhow::Result<PathBuf> {
    let (source, initrd) = (folder.join("test.sh"), folder.join("initrd"));
    fs::write(&source, script)?;
    let made = Command::new(project().join("testbed/with-script.sh"))
        .arg(test_bed(base)?)
        .args([&source, &initrd])
        .status()?;
    ensure!(made.success(), "testbed/with-script.sh failed");
    Ok(initrd)
}

/// What QEMU's `-accel` is to be on this machine.
///
/// # Errors
/// The test bed is not set up.
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
    /// The test bed is not set up, or QEMU cannot be started.
    pub fn start(script: &str, socket: &Path, options: &GuestOptions) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let initrd = initramfs_of(options.base, script, folder.path())?;
        let monitor = folder.path().join("qmp");
        let mut command = mortal("qemu-system-x86_64");
        command
            .args(["-accel", &accelerator()?, "-smp", &options.processors.to_string()])
            .arg("-m")
            .arg(format!("{}k,slots=4,maxmem=4G", options.memory_kib))
            .arg("-object")
            .arg(format!(
                "memory-backend-memfd,id=m,size={}k,share=on",
                options.memory_kib
            ))
            .args([
                "-machine",
                "q35,memory-backend=m",
                "-nodefaults",
                "-display",
                "none",
                "-no-reboot",
            ])
            .args(["-serial", "stdio", "-kernel"])
            .arg(test_bed("vmlinuz")?)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", KERNEL_ARGUMENTS])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .arg("-chardev")
            .arg(format!(
                "socket,id=c,path={},reconnect={}",
                socket.display(),
                u8::from(options.reconnects)
            ))
            .arg("-device")
            .arg(format!("vhost-user-blk-pci,chardev=c,{}", options.disk))
            .args(&options.qemu);
        Ok(Self {
            process: Process::start(command)?,
            monitor,
            _folder: folder,
        })
    }

    /// Waits until the script has ended well, and gives what the console showed.
    ///
    /// # Errors
    /// It failed, or the guest did not get that far; with the console.
    pub fn finish(&self) -> anyhow::Result<String> {
        let end = self.process.wait_for("LARDER-GUEST-EXIT", LIMIT)?;
        if end.trim() != "LARDER-GUEST-EXIT 0" {
            bail!("the guest's script failed:\n{}", self.process.output());
        }
        Ok(self.process.output())
    }

    /// A connection to QEMU's monitor.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn monitor(&self) -> anyhow::Result<Monitor> {
        Monitor::connect(&self.monitor)
    }
}

/// QEMU's machine protocol, as far as a test needs it.
pub struct Monitor {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
    events: Vec<String>,
    /// Commands that QEMU has not answered.
    unanswered: usize,
}

impl Monitor {
    /// To the monitor that listens there.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn connect(path: &Path) -> anyhow::Result<Self> {
        Self::patient(path, LIMIT)
    }

    /// The same, with a limit for answers.
    ///
    /// # Errors
    /// QEMU has ended, or does not answer in time.
    pub fn patient(path: &Path, limit: Duration) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(limit))?;
        let mut this = Self {
            reader: BufReader::new(stream.try_clone()?),
            stream,
            events: Vec::new(),
            unanswered: 0,
        };
        this.line()?;
        this.run("qmp_capabilities", "{}")?;
        Ok(this)
    }

    /// Changes the limit for answers. After one that did not come in time, no more can be asked.
    ///
    /// # Errors
    /// The system does not take it.
    pub fn set_patience(&self, limit: Duration) -> anyhow::Result<()> {
        Ok(self.stream.set_read_timeout(Some(limit))?)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            bail!("QEMU closed its monitor");
        }
        Ok(line)
    }

    /// Runs a command with its arguments in JSON, and gives the line of its answer.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn run(&mut self, command: &str, arguments: &str) -> anyhow::Result<String> {
        self.begin(command, arguments)?;
        loop {
            let line = self.line()?;
            if !is_answer(&line) {
                self.events.push(line);
                continue;
            }
            self.unanswered -= 1;
            if self.unanswered > 0 {
                continue;
            }
            if line.starts_with("{\"error\"") {
                bail!("QEMU refuses {command}: {line}");
            }
            return Ok(line);
        }
    }

    /// The same, without waiting for its answer, which may come when something else has happened.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn begin(&mut self, command: &str, arguments: &str) -> anyhow::Result<()> {
        self.unanswered += 1;
        Ok(writeln!(
            self.stream,
            "{{\"execute\": \"{command}\", \"arguments\": {arguments}}}"
        )?)
    }

    /// The events, in JSON, that came while commands were run.
    pub fn take_events(&mut self) -> Vec<String> {
        std::mem::take(&mut self.events)
    }

    /// Waits for an event.
    ///
    /// # Errors
    /// QEMU ends first.
    pub fn wait_for_event(&mut self, name: &str) -> anyhow::Result<String> {
        loop {
            let line = self.line()?;
            self.unanswered -= usize::from(self.unanswered > 0 && is_answer(&line));
            if line.contains("\"event\"") && line.contains(name) {
                return Ok(line);
            }
        }
    }
}

fn is_answer(line: &str) -> bool {
    line.starts_with("{\"return\"") || line.starts_with("{\"error\"")
}
