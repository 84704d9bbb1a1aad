//! A guest that changes its memory and verifies it, under a QEMU that can be migrated.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::guest::{KERNEL_ARGUMENTS, Monitor, accelerator, initramfs, project, test_bed};
use super::super::process::{Process, killed_with_parent};
use super::{LIMIT, LOOK};

/// Release of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The host's QEMU: 7.2 on Debian 12, 10.0 on Debian 13.
    Host,
    /// QEMU 10, in the test bed's chroot. Entering it needs root.
    Debian13,
}

impl Release {
    fn command(self) -> anyhow::Result<Command> {
        const QEMU: &str = "qemu-system-x86_64";
        if self == Self::Host {
            return Ok(killed_with_parent(QEMU));
        }
        ensure!(rustix::process::geteuid().is_root(), "this needs root: entering the Debian 13 chroot");
        test_bed("debian13.stamp")?;
        let enter = project().join("testbed/debian13.sh");
        let mut command = killed_with_parent(enter.to_str().context("the project's path is not UTF-8")?);
        command.arg(QEMU);
        Ok(command)
    }
}

/// Prefixes `command` with other words, which execute it in the end.
pub fn prefix_command(words: &[&str], command: Command) -> Command {
    let [program, first @ ..] = words else { return command };
    let mut prefixed = Command::new(program);
    prefixed.args(first).arg(command.get_program()).args(command.get_args());
    prefixed
}

/// The guest's load: `guest-load` of the test bed, with these options.
#[derive(Clone, Debug)]
pub struct Load {
    /// Pattern: `constant`, `sequence`, `random`, `partial` or `mixed`.
    pub kind: &'static str,
    /// Size of the memory that is changed, in MiB.
    pub mib: u64,
    /// Rate of changes, in 10^6 bytes per second; 0: unlimited.
    pub rate: u64,
    /// Pages per verified page: one in this number is verified before it is changed.
    pub check: u64,
}

impl Default for Load {
    fn default() -> Self {
        Self { kind: "mixed", mib: 32, rate: 10, check: 1 }
    }
}

/// Kernel argument that puts memory into use as soon as a virtio-mem device plugs it.
const USE_PLUGGED_MEMORY: &str = "memhp_default_state=online_movable";

/// The memory backend of a QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryBackend {
    /// QEMU's default.
    Default,
    /// Private memory that is preallocated.
    Preallocated,
    /// A shared memfd.
    Shared,
}

impl MemoryBackend {
    fn words(self, memory_kib: u64) -> Vec<String> {
        let object = match self {
            Self::Default => return Vec::new(),
            Self::Preallocated => format!("memory-backend-ram,id=memory,size={memory_kib}k,prealloc=on"),
            Self::Shared => format!("memory-backend-memfd,id=memory,size={memory_kib}k,share=on"),
        };
        let words = ["-object", &object, "-machine", "memory-backend=memory"];
        words.map(str::to_owned).into()
    }
}

/// Common configuration of source and destination.
pub struct Machine {
    release: Release,
    memory_kib: u64,
    backend: MemoryBackend,
    plugged_mib: u64,
    folder: TempDir,
    initrd: PathBuf,
}

impl Machine {
    /// Creates a machine with this memory in MiB, reduced a little: QEMU before 9.0 loses some writes of an emulated
    /// guest if the memory is a multiple of 64 pages.
    ///
    /// # Errors
    /// If the test bed is not set up.
    pub fn new(release: Release, memory_mib: u64, load: &Load) -> anyhow::Result<Self> {
        let Load { kind, mib, rate, check } = load;
        let script = format!("exec guest-load {kind} --size {mib} --rate {rate} --check {check}\n");
        Self::running(release, memory_mib, &script)
    }

    /// Creates a machine whose guest runs a script, which must print the same lines as `guest-load`.
    ///
    /// # Errors
    /// If the test bed is not set up.
    pub fn running(release: Release, memory_mib: u64, script: &str) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let initrd = initramfs(script, directory.path())?;
        Ok(Self {
            release,
            memory_kib: (memory_mib << 10) - 8,
            backend: MemoryBackend::Default,
            plugged_mib: 0,
            folder: directory,
            initrd,
        })
    }

    /// Preallocates the memory of each QEMU.
    #[must_use]
    pub const fn preallocated(mut self) -> Self {
        self.backend = MemoryBackend::Preallocated;
        self
    }

    /// Uses shared memory, which a pager can manage.
    #[must_use]
    pub const fn shared(mut self) -> Self {
        self.backend = MemoryBackend::Shared;
        self
    }

    /// Adds memory, plugged by a virtio-mem device.
    #[must_use]
    pub const fn plugged(mut self, mib: u64) -> Self {
        self.plugged_mib = mib;
        self
    }

    /// QEMU's arguments for memory: the machine's own, and a virtio-mem device of twice the plugged size.
    fn memory_arguments(&self) -> Vec<String> {
        let (kib, plugged) = (self.memory_kib, self.plugged_mib);
        if plugged == 0 {
            return vec!["-m".to_owned(), format!("{kib}k")];
        }
        let plugged_max_mib = plugged * 2;
        let maxmem_kib = kib + (plugged_max_mib << 10);
        [
            "-m".to_owned(),
            format!("{kib}k,slots=1,maxmem={maxmem_kib}k"),
            "-object".to_owned(),
            format!("memory-backend-memfd,id=plugged,size={plugged_max_mib}M,share=on,reserve=off"),
            "-device".to_owned(),
            format!("virtio-mem-pci,memdev=plugged,requested-size={plugged}M,block-size=2M"),
        ]
        .into()
    }

    /// Returns the directory for the machine's files, and for sockets between its QEMUs.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Boots the guest, and waits until its load runs.
    ///
    /// # Errors
    /// If the guest does not get that far.
    pub fn boot(&self) -> anyhow::Result<Vm> {
        self.boot_by(&[])
    }

    /// Boots the guest with a command prefix for QEMU, such as `ip netns exec NAME`, and waits until its load runs.
    ///
    /// # Errors
    /// If the guest does not get that far.
    pub fn boot_by(&self, prefix: &[&str]) -> anyhow::Result<Vm> {
        let vm = self.start(prefix, &[], self.backend)?;
        vm.wait_for_console("TICK", 1)?;
        Ok(vm)
    }

    /// Boots the guest with a disk, its /dev/vda, that the caller serves as vhost-user-blk at `socket`.
    ///
    /// # Errors
    /// If the guest does not get that far.
    pub fn boot_with_disk(&self, socket: &Path) -> anyhow::Result<Vm> {
        let vm = self.start_with_disk(socket, &[])?;
        vm.wait_for_console("TICK", 1)?;
        Ok(vm)
    }

    /// Starts an incoming QEMU with such a disk, which waits for `migrate-incoming`.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub fn start_incoming_with_disk(&self, socket: &Path) -> anyhow::Result<Vm> {
        self.start_with_disk(socket, &["-incoming", "defer"])
    }

    fn start_with_disk(&self, socket: &Path, words: &[&str]) -> anyhow::Result<Vm> {
        let chardev = format!("socket,id=vda,path={},reconnect=1", socket.display());
        let device = "vhost-user-blk-pci,chardev=vda,num-queues=1";
        let disk = ["-chardev", &chardev, "-device", device];
        self.start(&[], &[&disk, words].concat(), MemoryBackend::Shared)
    }

    /// Starts an incoming QEMU, which waits for `migrate-incoming`.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub fn incoming(&self) -> anyhow::Result<Vm> {
        self.start_incoming_with_prefix(&[])
    }

    /// Starts an incoming QEMU whose memory is in this file.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub fn start_incoming_in_file(&self, path: &Path) -> anyhow::Result<Vm> {
        let (kib, path) = (self.memory_kib, path.display());
        let memory = format!("memory-backend-file,id=memory,size={kib}k,mem-path={path},share=on");
        let arguments = ["-incoming", "defer", "-object", &memory, "-machine", "memory-backend=memory"];
        self.start(&[], &arguments, MemoryBackend::Default)
    }

    /// Starts an incoming QEMU with a command prefix.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub fn start_incoming_with_prefix(&self, before: &[&str]) -> anyhow::Result<Vm> {
        self.start(before, &["-incoming", "defer"], self.backend)
    }

    fn start(&self, before: &[&str], words: &[&str], backend: MemoryBackend) -> anyhow::Result<Vm> {
        let directory = tempfile::tempdir_in(self.folder.path())?;
        let (console, qmp) = (directory.path().join("console"), directory.path().join("qmp"));
        let [others, watched] = ["qmp-others", "qmp-watched"].map(|name| directory.path().join(name));
        let monitor = |path: &Path| format!("unix:{},server=on,wait=off", path.display());
        let mut command = self.release.command()?;
        command
            .args(["-accel", &accelerator()?, "-smp", "1"])
            .args(self.memory_arguments())
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-kernel"])
            .arg(test_bed("vmlinuz")?.canonicalize()?)
            .arg("-initrd")
            .arg(&self.initrd)
            .args(["-append", &format!("{KERNEL_ARGUMENTS} {USE_PLUGGED_MEMORY}"), "-serial"])
            .arg(format!("file:{}", console.display()))
            .args(["-qmp", &monitor(&qmp), "-qmp", &monitor(&others), "-qmp", &monitor(&watched)])
            .args(words)
            .args(backend.words(self.memory_kib));
        let process = Process::start(prefix_command(before, command))?;
        let deadline = Instant::now() + LIMIT;
        // The sockets exist a moment before QEMU listens.
        let monitor = loop {
            if [&console, &others, &watched].iter().all(|path| path.exists())
                && let Ok(monitor) = Monitor::connect(&qmp)
            {
                break monitor;
            }
            ensure!(!process.has_ended(), "QEMU: {}", process.output());
            ensure!(Instant::now() < deadline, "QEMU does not start: {}", process.output());
            std::thread::sleep(LOOK);
        };
        Ok(Vm { monitor, others, watched, process, console, _folder: directory })
    }
}

/// Console texts of a guest that has failed or ended.
const ENDS: [&str; 4] = ["MISMATCH", "LARDER-GUEST-EXIT", "Kernel panic", "Initramfs unpacking failed"];

/// Migration capabilities and parameters, the same on both sides.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// Number of multifd channels for pages; 0: multifd is off.
    pub multifd: u8,
    /// True if the migration may switch to post-copy.
    pub postcopy: bool,
    /// True if post-copy sends requested pages over a channel of their own.
    pub preempt: bool,
    /// True if the source waits before the switchover.
    pub pause_before_switchover: bool,
    /// True if there is no return path from the destination.
    pub no_return_path: bool,
}

/// A QEMU, which runs the guest or waits for it.
pub struct Vm {
    /// The QEMU process.
    pub process: Process,
    monitor: Monitor,
    others: PathBuf,
    watched: PathBuf,
    console: PathBuf,
    _folder: TempDir,
}

impl Vm {
    /// Returns QEMU's monitor.
    pub fn monitor(&mut self) -> &mut Monitor {
        &mut self.monitor
    }

    /// Returns the socket of a second monitor, for another program: QEMU serves one client on each.
    pub fn external_qmp(&self) -> &Path {
        &self.others
    }

    /// Connects to a third monitor, for another thread.
    ///
    /// # Errors
    /// If QEMU has exited, or another thread uses that monitor.
    pub fn observer_monitor(&self) -> anyhow::Result<Monitor> {
        Monitor::patient(&self.watched, Duration::from_secs(1))
    }

    /// Runs a command, and returns QEMU's answer.
    ///
    /// # Errors
    /// If QEMU rejects the command, or has exited.
    pub fn ask(&mut self, command: &str, arguments: &Value) -> anyhow::Result<Value> {
        let line = self.monitor.run(command, &arguments.to_string());
        let line = line.with_context(|| format!("QEMU's output: {}", self.process.output()))?;
        let mut answer: Value = serde_json::from_str(&line)?;
        Ok(answer["return"].take())
    }

    /// Sends a command whose answer may depend on a later event.
    ///
    /// # Errors
    /// If QEMU has exited.
    pub fn begin(&mut self, command: &str, arguments: &Value) -> anyhow::Result<()> {
        self.monitor.begin(command, &arguments.to_string())
    }

    /// Sets the migration capabilities and parameters of a source or destination.
    ///
    /// # Errors
    /// If QEMU rejects them.
    pub fn prepare(&mut self, settings: &Settings) -> anyhow::Result<()> {
        let capabilities = [
            ("return-path", !settings.no_return_path),
            ("events", true),
            ("multifd", settings.multifd > 0),
            ("postcopy-ram", settings.postcopy),
            ("postcopy-preempt", settings.preempt),
            ("pause-before-switchover", settings.pause_before_switchover),
        ];
        let list: Vec<Value> =
            capabilities.into_iter().map(|(name, on)| json!({"capability": name, "state": on})).collect();
        self.ask("migrate-set-capabilities", &json!({"capabilities": list}))?;
        self.ask(
            "migrate-set-parameters",
            &json!({
                // Unlimited, since Larder limits the bandwidth.
                "max-bandwidth": 100_u64 << 30,
                "multifd-channels": settings.multifd.max(1),
            }),
        )?;
        Ok(())
    }

    /// Makes QEMU listen at a socket for its incoming migration.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn listen(&mut self, socket: &Path) -> anyhow::Result<()> {
        let uri = format!("unix:{}", socket.display());
        self.ask("migrate-incoming", &json!({"uri": uri})).map(drop)
    }

    /// Starts QEMU's migration to a socket.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn migrate(&mut self, socket: &Path) -> anyhow::Result<()> {
        let uri = format!("unix:{}", socket.display());
        self.ask("migrate", &json!({"uri": uri})).map(drop)
    }

    /// Returns the migration's status: `active`, `completed`, `failed`, ...
    ///
    /// # Errors
    /// If QEMU has exited.
    pub fn migration(&mut self) -> anyhow::Result<String> {
        let info = self.ask("query-migrate", &json!({}))?;
        Ok(info["status"].as_str().unwrap_or("none").to_owned())
    }

    /// Waits until the migration has one of these statuses. Returns it.
    ///
    /// # Errors
    /// If QEMU exits, or the migration ends otherwise or not in time.
    pub fn wait_for_migration(&mut self, statuses: &[&str]) -> anyhow::Result<String> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let status = self.migration()?;
            if statuses.contains(&status.as_str()) {
                return Ok(status);
            }
            if ["completed", "failed", "cancelled"].contains(&status.as_str()) || Instant::now() > deadline {
                let output = self.process.output();
                bail!("the migration is {status}, not {statuses:?}; QEMU's output: {output}");
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Returns QEMU's run state: `running`, `paused`, `inmigrate`, `postmigrate`, `finish-migrate`, ...
    ///
    /// # Errors
    /// If QEMU has exited.
    pub fn run_state(&mut self) -> anyhow::Result<String> {
        let info = self.ask("query-status", &json!({}))?;
        Ok(info["status"].as_str().unwrap_or("none").to_owned())
    }

    /// Returns the console's output so far.
    pub fn console(&self) -> String {
        let bytes = fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until the console has shown a word in `count` more lines.
    ///
    /// # Errors
    /// If that does not happen in time, or the guest has failed.
    pub fn wait_for_console(&self, word: &str, count: usize) -> anyhow::Result<()> {
        // The line that is being written may already be counted.
        let goal = self.console().matches(word).count() + count;
        let deadline = Instant::now() + LIMIT;
        loop {
            // Read before the console: a guest that powers off has printed the reason by then.
            let has_ended = self.process.has_ended();
            let console = self.console();
            ensure!(!ENDS.iter().any(|end| console.contains(end)), "the guest has failed or exited: {console}");
            if console.matches(word).count() >= goal {
                return Ok(());
            }
            let output = self.process.output();
            ensure!(!has_ended, "QEMU has exited: {output}");
            ensure!(Instant::now() < deadline, "the guest makes no progress: {console}\n{output}");
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until the guest has made progress under this QEMU.
    ///
    /// # Errors
    /// If the guest hangs, or has failed.
    pub fn works(&self) -> anyhow::Result<()> {
        self.wait_for_console("TICK", 3)
    }

    /// Waits until the guest has verified all its memory once more under this QEMU, every page rewritten after this
    /// call.
    ///
    /// # Errors
    /// If the guest hangs, or has failed.
    pub fn verifies(&self) -> anyhow::Result<()> {
        // Skips the round in progress.
        self.wait_for_console("ROUND", 2)
    }
}

/// Checks the consoles of one guest's successive QEMUs: the guest must have counted without a gap and found no
/// mismatch. Returns the number of ticks.
///
/// # Errors
/// If the guest has not.
pub fn counted(consoles: &[String]) -> anyhow::Result<u64> {
    // A line may begin on one console and end on the next.
    let text = consoles.concat();
    ensure!(!text.contains("MISMATCH"), "the guest's memory has wrong content: {text}");
    let mut next = 0;
    let complete_lines = text.rfind('\n').map_or("", |end| &text[..end]);
    for line in complete_lines.lines().filter(|line| line.contains("TICK")) {
        let number = line.trim().strip_prefix("TICK ").and_then(|rest| rest.split(' ').next());
        let number: u64 = number
            .and_then(|number| number.parse().ok())
            .with_context(|| format!("the line '{line}' has no tick number: {text}"))?;
        ensure!(number == next, "tick {number} instead of tick {next}: {text}");
        next += 1;
    }
    ensure!(next > 0, "the guest has printed no tick: {text}");
    Ok(next)
}
