//! Larder as the pager that keeps a program's memory within a limit.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use larder_vm::control::fetch_memory;
use larder_vm::control::memory::MemoryState;

use super::cgroup::Cgroup;
use super::pager::{Done, Pager};
use super::{Arguments, MIB};
use crate::campaign::find_larder;
use crate::campaign::process::{Process, killed_with_parent};
use crate::prefetch::place::Place;

/// Time limit of operations.
const PATIENCE: Duration = Duration::from_secs(120);

/// Divisor of the limit that gives the reserve for small growth of the program's other memory and of Larder's.
const OVER: u64 = 60;

/// Capacity of the disks in bytes.
const DISK_BYTES: u64 = 4 << 30;

/// `larder memory attach`, in a control group of its own.
pub(super) struct Larder {
    program: PathBuf,
    /// The program's control group.
    cgroup: Arc<Cgroup>,
    control: PathBuf,
    compressed: Option<f64>,
    disk: PathBuf,
    start: Start,
    process: std::sync::Mutex<Option<Process>>,
    _nbd: Option<Process>,
    /// Dropped last: a group can be removed only when it has no processes.
    own: Cgroup,
}

/// Command line, without the sizes.
struct Start(Vec<String>);

impl Larder {
    /// Prepares a pager for the process `pid` in `cgroup`, with a swap cache or a slow store.
    pub(super) fn new(
        arguments: &Arguments,
        scratch: &Place,
        cgroup: Arc<Cgroup>,
        pid: u32,
        slow: bool,
    ) -> anyhow::Result<Self> {
        let control = scratch.unused("control");
        let disk = scratch.unused("swap");
        let mut start = vec!["memory".to_owned(), "attach".to_owned()];
        start.extend(["--pid".to_owned(), pid.to_string()]);
        start.extend(["--control".to_owned(), control.display().to_string()]);
        let mut nbd = None;
        if slow {
            let socket = scratch.unused("nbd");
            let file = std::fs::File::create_new(&disk)?;
            file.set_len(DISK_BYTES)?;
            let mut command = killed_with_parent("nbdkit");
            command.args(["--foreground", "--threads", "32", "--unix"]).arg(&socket);
            command.args(["--filter=delay", "file"]).arg(&disk).arg("cache=none");
            command.args(["rdelay", "wdelay"].map(|delay| format!("{delay}={}ms", arguments.slow_ms)));
            nbd = Some(Process::start(command)?);
            let deadline = Instant::now() + PATIENCE;
            while !socket.exists() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(10));
            }
            start.extend(["--slow-store".to_owned(), format!("nbd+unix:///?socket={}", socket.display())]);
        } else {
            start.extend(["--swap-cache".to_owned(), disk.display().to_string()]);
            start.extend(["--swap-size".to_owned(), DISK_BYTES.to_string()]);
        }
        Ok(Self {
            program: find_larder(arguments.larder.as_deref())?,
            cgroup,
            own: Cgroup::new("larder")?,
            control,
            compressed: arguments.compressed,
            disk,
            start: Start(start),
            process: std::sync::Mutex::default(),
            _nbd: nbd,
        })
    }

    fn state(&self) -> anyhow::Result<MemoryState> {
        Ok(fetch_memory(&self.control).context("querying Larder")?.1)
    }

    fn sizes(&self, budget: u64) -> Vec<String> {
        let mut sizes = vec!["--budget".to_owned(), budget.to_string()];
        if let Some(share) = self.compressed {
            sizes.extend(["--compressed".to_owned(), ((budget as f64 * share) as u64).to_string()]);
        }
        sizes
    }

    fn attach(&self, budget: u64) -> anyhow::Result<()> {
        let mut command = killed_with_parent("sh");
        command.args(["-c", r#"echo $$ >"$0/cgroup.procs" && exec "$@""#]);
        command.arg(self.own.path()).arg(&self.program).args(&self.start.0).args(self.sizes(budget));
        let process = Process::start(command)?;
        process.wait_for("attached", PATIENCE)?;
        if let Ok(mut started) = self.process.lock() {
            *started = Some(process);
        }
        Ok(())
    }
}

impl Drop for Larder {
    fn drop(&mut self) {
        if let Ok(mut process) = self.process.lock() {
            // A killed pager does not remove its files.
            process.take();
        }
        let _ = std::fs::remove_file(&self.disk);
    }
}

impl Pager for Larder {
    fn limit(&self, bytes: u64) -> anyhow::Result<()> {
        // The program's unmanaged memory and Larder's own memory are known only after the attach.
        let mut budget = bytes - bytes / 50;
        self.attach(budget)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            thread::sleep(Duration::from_millis(100));
            let (used, state) = (self.used()?, self.state()?);
            if state.used <= state.budget {
                // The memory outside the budget hardly depends on the budget.
                let unmanaged = used.saturating_sub(state.used);
                budget = (bytes - bytes / OVER).saturating_sub(unmanaged).max(32 * MIB);
                let mut command = Command::new(&self.program);
                command.args(["memory", "limit", "--control"]);
                command.arg(&self.control).args(self.sizes(budget));
                let limit_output = command.output()?;
                if !limit_output.status.success() {
                    bail!("larder memory limit: {}", String::from_utf8_lossy(&limit_output.stderr).trim());
                }
                if used <= bytes {
                    return Ok(());
                }
            }
            if Instant::now() > deadline {
                bail!("with Larder, {used} bytes are in use after {PATIENCE:?}, with a limit of {bytes}: {state:?}");
            }
        }
    }

    fn used(&self) -> anyhow::Result<u64> {
        Ok(self.cgroup.used()? + self.own.used()?)
    }

    fn done(&self) -> anyhow::Result<Done> {
        let state = self.state()?;
        let faults = &state.faults;
        Ok(Done {
            faults: faults.uniform.count + faults.compressed.count + faults.disk.count,
            read: state.disks.iter().map(|disk| disk.read_bytes).sum(),
            written: state.disks.iter().map(|disk| disk.written_bytes).sum(),
            unpacked: faults.compressed.count * 4096,
            packed: 0,
        })
    }
}
