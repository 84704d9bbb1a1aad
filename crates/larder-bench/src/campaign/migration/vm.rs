//! A guest that changes its memory and checks it, under a QEMU that can be moved.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::guest::{KERNEL_ARGUMENTS, Monitor, accelerator, initramfs, project, test_bed};
use super::super::process::{Process, mortal};
use super::{LIMIT, LOOK};

/// Whose QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The QEMU that is installed: 7.2 on Debian 12, 10.0 on Debian 13.
    Host,
    /// QEMU 10, of the test bed's chroot. Entering it needs root.
    Debian13,
}

impl Release {
    fn command(self) -> anyhow::Result<Command> {
        const QEMU: &str = "qemu-system-x86_64";
        if self == Self::Host {
            return Ok(mortal(QEMU));
        }
        ensure!(
            rustix::process::geteuid().is_root(),
            "this needs root: entering the Debian 13 chroot"
        );
        test_bed("debian13.stamp")?;
        let enter = project().join("testbed/debian13.sh");
        let mut command = mortal(enter.to_str().context("the project's path is no UTF-8")?);
        command.arg(QEMU);
        Ok(command)
    }
}

/// `command` with other words before it, that run it in the end.
pub fn put_before(words: &[&str], command: Command) -> Command {
    let [program, first @ ..] = words else { return command };
    let mut whole = Command::new(program);
    whole.args(first).arg(command.get_program()).args(command.get_args());
    whole
}

/// What the guest does: `guest-load` of the test bed, with these options.
#[derive(Clone, Debug)]
pub struct Load {
    /// `constant`, `sequence`, `random`, `partial` or `mixed`.
    pub kind: &'static str,
    /// How much memory it changes, in MiB.
    pub mib: u64,
    /// How fast, in 10^6 bytes per second; 0: as fast as it can.
    pub rate: u64,
    /// Of so many pages one is checked before it is changed.
    pub check: u64,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            kind: "mixed",
            mib: 32,
            rate: 10,
            check: 1,
        }
    }
}

/// Has the guest's kernel use memory at once that a virtio-mem device plugs.
const USE_PLUGGED_MEMORY: &str = "memhp_default_state=online_movable";

/// The memory backend of a QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    /// QEMU's own choice.
    Default,
    /// Private memory that the host has allocated beforehand.
    Preallocated,
    /// A shared memfd.
    Shared,
}

impl Backend {
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

/// What source and destination have in common.
pub struct Machine {
    release: Release,
    memory_kib: u64,
    backend: Backend,
    plugged_mib: u64,
    folder: TempDir,
    initrd: PathBuf,
}

impl Machine {
    /// With so much memory in MiB, less what QEMU before 9.0 needs to see the writes of an emulated guest: it loses some
    /// where memory is a multiple of 64 pages.
    ///
    /// # Errors
    /// The test bed is not set up.
    pub fn new(release: Release, memory_mib: u64, load: &Load) -> anyhow::Result<Self> {
        let Load { kind, mib, rate, check } = load;
        let script = format!("exec guest-load {kind} --size {mib} --rate {rate} --check {check}\n");
        Self::running(release, memory_mib, &script)
    }

    /// With a script for the guest that says what `guest-load` does.
    ///
    /// # Errors
    /// The test bed is not set up.
    pub fn running(release: Release, memory_mib: u64, script: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let initrd = initramfs(script, folder.path())?;
        Ok(Self {
            release,
            memory_kib: (memory_mib << 10) - 8,
            backend: Backend::Default,
            plugged_mib: 0,
            folder,
            initrd,
        })
    }

    /// The same, and the host gives each QEMU all of its memory before it does anything.
    #[must_use]
    pub const fn preallocated(mut self) -> Self {
        self.backend = Backend::Preallocated;
        self
    }

    /// The same, with memory that a pager can manage.
    #[must_use]
    pub const fn shared(mut self) -> Self {
        self.backend = Backend::Shared;
        self
    }

    /// The same machine, with further memory plugged by a virtio-mem device.
    #[must_use]
    pub const fn plugged(mut self, mib: u64) -> Self {
        self.plugged_mib = mib;
        self
    }

    /// QEMU's words for memory: that of the machine, and that of a virtio-mem device of twice what is plugged.
    fn memory_words(&self) -> Vec<String> {
        let (kib, plugged) = (self.memory_kib, self.plugged_mib);
        if plugged == 0 {
            return vec!["-m".to_owned(), format!("{kib}k")];
        }
        let whole = plugged * 2;
        let most = kib + (whole << 10);
        [
            "-m".to_owned(),
            format!("{kib}k,slots=1,maxmem={most}k"),
            "-object".to_owned(),
            format!("memory-backend-memfd,id=plugged,size={whole}M,share=on,reserve=off"),
            "-device".to_owned(),
            format!("virtio-mem-pci,memdev=plugged,requested-size={plugged}M,block-size=2M"),
        ]
        .into()
    }

    /// Where its files, and sockets between its QEMUs, may lie.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Boots the guest, and waits until it works.
    ///
    /// # Errors
    /// It does not get that far.
    pub fn boot(&self) -> anyhow::Result<Vm> {
        self.boot_by(&[])
    }

    /// Boots it likewise, and QEMU by other words before its own: `ip netns exec NAME`.
    ///
    /// # Errors
    /// It does not get that far.
    pub fn boot_by(&self, before: &[&str]) -> anyhow::Result<Vm> {
        let vm = self.start(before, &[], self.backend)?;
        vm.wait_for_console("TICK", 1)?;
        Ok(vm)
    }

    /// Boots it with a disk that somebody serves as vhost-user-blk at `socket`; its guest has it as /dev/vda.
    ///
    /// # Errors
    /// It does not get that far.
    pub fn boot_with(&self, socket: &Path) -> anyhow::Result<Vm> {
        let vm = self.start_with(socket, &[])?;
        vm.wait_for_console("TICK", 1)?;
        Ok(vm)
    }

    /// A QEMU with such a disk that waits to be told where its guest comes from.
    ///
    /// # Errors
    /// It does not start.
    pub fn incoming_with(&self, socket: &Path) -> anyhow::Result<Vm> {
        self.start_with(socket, &["-incoming", "defer"])
    }

    fn start_with(&self, socket: &Path, words: &[&str]) -> anyhow::Result<Vm> {
        let chardev = format!("socket,id=vda,path={},reconnect=1", socket.display());
        let device = "vhost-user-blk-pci,chardev=vda,num-queues=1";
        let disk = ["-chardev", &chardev, "-device", device];
        self.start(&[], &[&disk, words].concat(), Backend::Shared)
    }

    /// A QEMU that waits to be told where its guest comes from.
    ///
    /// # Errors
    /// It does not start.
    pub fn incoming(&self) -> anyhow::Result<Vm> {
        self.incoming_by(&[])
    }

    /// The same, with its memory in this file.
    ///
    /// # Errors
    /// It does not start.
    pub fn incoming_in_file(&self, path: &Path) -> anyhow::Result<Vm> {
        let (kib, path) = (self.memory_kib, path.display());
        let memory = format!("memory-backend-file,id=memory,size={kib}k,mem-path={path},share=on");
        let words = [
            "-incoming",
            "defer",
            "-object",
            &memory,
            "-machine",
            "memory-backend=memory",
        ];
        self.start(&[], &words, Backend::Default)
    }

    /// The same, and QEMU by other words before its own.
    ///
    /// # Errors
    /// It does not start.
    pub fn incoming_by(&self, before: &[&str]) -> anyhow::Result<Vm> {
        self.start(before, &["-incoming", "defer"], self.backend)
    }

    fn start(&self, before: &[&str], words: &[&str], backend: Backend) -> anyhow::Result<Vm> {
        let folder = tempfile::tempdir_in(self.folder.path())?;
        let (console, qmp) = (folder.path().join("console"), folder.path().join("qmp"));
        let [others, watched] = ["qmp-others", "qmp-watched"].map(|name| folder.path().join(name));
        let monitor = |path: &Path| format!("unix:{},server=on,wait=off", path.display());
        let mut command = self.release.command()?;
        command
            .args(["-accel", &accelerator()?, "-smp", "1"])
            .args(self.memory_words())
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-kernel"])
            .arg(test_bed("vmlinuz")?.canonicalize()?)
            .arg("-initrd")
            .arg(&self.initrd)
            .args([
                "-append",
                &format!("{KERNEL_ARGUMENTS} {USE_PLUGGED_MEMORY}"),
                "-serial",
            ])
            .arg(format!("file:{}", console.display()))
            .args([
                "-qmp",
                &monitor(&qmp),
                "-qmp",
                &monitor(&others),
                "-qmp",
                &monitor(&watched),
            ])
            .args(words)
            .args(backend.words(self.memory_kib));
        let process = Process::start(put_before(before, command))?;
        let give_up = Instant::now() + LIMIT;
        // Its sockets are there a moment before it listens.
        let monitor = loop {
            if [&console, &others, &watched].iter().all(|path| path.exists())
                && let Ok(monitor) = Monitor::connect(&qmp)
            {
                break monitor;
            }
            ensure!(!process.has_ended(), "QEMU: {}", process.output());
            ensure!(Instant::now() < give_up, "QEMU does not start: {}", process.output());
            std::thread::sleep(LOOK);
        };
        Ok(Vm {
            monitor,
            others,
            watched,
            process,
            console,
            _folder: folder,
        })
    }
}

/// What a guest's console shows when it does not go on.
const ENDS: [&str; 4] = [
    "MISMATCH",
    "LARDER-GUEST-EXIT",
    "Kernel panic",
    "Initramfs unpacking failed",
];

/// How a guest is moved: capabilities and parameters of migration, the same on both sides.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// Channels for pages besides the main one; 0: all goes over that.
    pub multifd: u8,
    /// It may switch to post-copy.
    pub postcopy: bool,
    /// Pages that are waited for have a channel of their own then.
    pub preempt: bool,
    /// The source waits before it lets go of the guest.
    pub pause_before_switchover: bool,
    /// Nothing comes back from the destination.
    pub no_return_path: bool,
}

/// A QEMU, and its guest, if that is here.
pub struct Vm {
    /// It.
    pub process: Process,
    monitor: Monitor,
    others: PathBuf,
    watched: PathBuf,
    console: PathBuf,
    _folder: TempDir,
}

impl Vm {
    /// QEMU's monitor.
    pub fn monitor(&mut self) -> &mut Monitor {
        &mut self.monitor
    }

    /// The socket of a monitor for somebody else: QEMU talks to one at a time on each.
    pub fn qmp_for_others(&self) -> &Path {
        &self.others
    }

    /// A monitor for another thread.
    ///
    /// # Errors
    /// QEMU has ended, or another thread has it.
    pub fn second_monitor(&self) -> anyhow::Result<Monitor> {
        Monitor::patient(&self.watched, Duration::from_secs(1))
    }

    /// Runs a command; what QEMU answers.
    ///
    /// # Errors
    /// It refuses, or has ended.
    pub fn ask(&mut self, command: &str, arguments: &Value) -> anyhow::Result<Value> {
        let line = self.monitor.run(command, &arguments.to_string());
        let line = line.with_context(|| format!("QEMU said {}", self.process.output()))?;
        let mut answer: Value = serde_json::from_str(&line)?;
        Ok(answer["return"].take())
    }

    /// Gives a command whose answer QEMU may owe until something else has happened.
    ///
    /// # Errors
    /// It has ended.
    pub fn begin(&mut self, command: &str, arguments: &Value) -> anyhow::Result<()> {
        self.monitor.begin(command, &arguments.to_string())
    }

    /// Prepares it, as source or destination.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn prepare(&mut self, settings: &Settings) -> anyhow::Result<()> {
        let capabilities = [
            ("return-path", !settings.no_return_path),
            ("events", true),
            ("multifd", settings.multifd > 0),
            ("postcopy-ram", settings.postcopy),
            ("postcopy-preempt", settings.preempt),
            ("pause-before-switchover", settings.pause_before_switchover),
        ];
        let list: Vec<Value> = capabilities
            .into_iter()
            .map(|(name, on)| json!({"capability": name, "state": on}))
            .collect();
        self.ask("migrate-set-capabilities", &json!({"capabilities": list}))?;
        self.ask(
            "migrate-set-parameters",
            &json!({
                // As fast as the link: it is Larder that knows how fast that may be.
                "max-bandwidth": 100_u64 << 30,
                "multifd-channels": settings.multifd.max(1),
            }),
        )?;
        Ok(())
    }

    /// Has it wait for its guest at a socket.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn listen(&mut self, socket: &Path) -> anyhow::Result<()> {
        let uri = format!("unix:{}", socket.display());
        self.ask("migrate-incoming", &json!({"uri": uri})).map(drop)
    }

    /// Has it begin to send its guest to a socket.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn migrate(&mut self, socket: &Path) -> anyhow::Result<()> {
        let uri = format!("unix:{}", socket.display());
        self.ask("migrate", &json!({"uri": uri})).map(drop)
    }

    /// What its migration is at: `active`, `completed`, `failed`, ...
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn migration(&mut self) -> anyhow::Result<String> {
        let info = self.ask("query-migrate", &json!({}))?;
        Ok(info["status"].as_str().unwrap_or("none").to_owned())
    }

    /// Waits until its migration is at one of these; which.
    ///
    /// # Errors
    /// QEMU ends, or it gets to another end, or to none.
    pub fn wait_for_migration(&mut self, wanted: &[&str]) -> anyhow::Result<String> {
        let give_up = Instant::now() + LIMIT;
        loop {
            let is = self.migration()?;
            if wanted.contains(&is.as_str()) {
                return Ok(is);
            }
            if ["completed", "failed", "cancelled"].contains(&is.as_str()) || Instant::now() > give_up {
                let said = self.process.output();
                bail!("the migration is {is}, not {wanted:?}; QEMU said {said}");
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Whether its processors run: `running`, `paused`, `inmigrate`, `postmigrate`, `finish-migrate`, ...
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn run_state(&mut self) -> anyhow::Result<String> {
        let info = self.ask("query-status", &json!({}))?;
        Ok(info["status"].as_str().unwrap_or("none").to_owned())
    }

    /// What its console has shown so far.
    pub fn console(&self) -> String {
        let bytes = fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until its console has shown a word in `count` lines more.
    ///
    /// # Errors
    /// It does not come, or the guest has found something wrong.
    pub fn wait_for_console(&self, word: &str, count: usize) -> anyhow::Result<()> {
        // The line that is being written may have been counted already.
        let goal = self.console().matches(word).count() + count;
        let give_up = Instant::now() + LIMIT;
        loop {
            // Before what the console shows: a guest that powers off has said why by then.
            let has_ended = self.process.has_ended();
            let console = self.console();
            ensure!(
                !ENDS.iter().any(|end| console.contains(end)),
                "the guest has ended: {console}"
            );
            if console.matches(word).count() >= goal {
                return Ok(());
            }
            let said = self.process.output();
            ensure!(!has_ended, "QEMU has ended: {said}");
            ensure!(Instant::now() < give_up, "the guest stands still: {console}\n{said}");
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until the guest has gone on for a while, here.
    ///
    /// # Errors
    /// It stands still, or has found something wrong.
    pub fn works(&self) -> anyhow::Result<()> {
        self.wait_for_console("TICK", 3)
    }

    /// Waits until the guest has checked all its memory, here, once more: every page was written anew, and is right, after
    /// this was called.
    ///
    /// # Errors
    /// It stands still, or has found something wrong.
    pub fn verifies(&self) -> anyhow::Result<()> {
        // One round is under way.
        self.wait_for_console("ROUND", 2)
    }
}

/// Checks what the consoles of one guest's QEMUs have shown, one after the other: it has counted on without a gap, and found
/// nothing wrong. How far it has counted.
///
/// # Errors
/// It has not.
pub fn counted(consoles: &[String]) -> anyhow::Result<u64> {
    // A line may have begun on one and ended on the next.
    let text = consoles.concat();
    ensure!(!text.contains("MISMATCH"), "the guest's memory is wrong: {text}");
    let mut next = 0;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for line in whole.lines().filter(|line| line.contains("TICK")) {
        let number = line
            .trim()
            .strip_prefix("TICK ")
            .and_then(|rest| rest.split(' ').next());
        let number: u64 = number
            .and_then(|number| number.parse().ok())
            .with_context(|| format!("'{line}' in {text}"))?;
        ensure!(number == next, "{number} follows {next} less one: {text}");
        next += 1;
    }
    ensure!(next > 0, "the guest has not begun: {text}");
    Ok(next)
}
