//! A control group for memory, of cgroup v1.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::undo::Undo;

const CONTROLLER_PATH: &str = "/sys/fs/cgroup/memory";

/// The group can be removed once its processes have exited, which takes killed ones a moment.
const REMOVE: &str = r#"for try in $(seq 100); do rmdir -- "$1" 2>/dev/null && exit; sleep 0.1; done; exit 1"#;

/// A control group, removed when this is dropped or the process ends. Its processes must have exited by then.
pub(super) struct Cgroup {
    path: PathBuf,
    _undo: Undo,
}

impl Cgroup {
    /// Creates a group without a limit.
    pub(super) fn new(name: &str) -> anyhow::Result<Self> {
        if !Path::new(CONTROLLER_PATH).join("memory.limit_in_bytes").exists() {
            bail!("{CONTROLLER_PATH} has no memory controller of cgroup v1, which these experiments need");
        }
        let path = Path::new(CONTROLLER_PATH).join(format!("larder-bench-{}-{name}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("creating the control group {}", path.display()))?;
        Ok(Self { _undo: Undo::new(REMOVE, [&path])?, path })
    }

    /// Returns the group's directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the bytes charged to the group: memory of its processes, and page cache that they were the first to
    /// read.
    pub(super) fn used(&self) -> anyhow::Result<u64> {
        number(&self.path.join("memory.usage_in_bytes"))
    }

    /// Returns the peak of [`Cgroup::used`] since its last reset.
    pub(super) fn used_most(&self) -> anyhow::Result<u64> {
        number(&self.path.join("memory.max_usage_in_bytes"))
    }

    /// Resets [`Cgroup::used_most`].
    pub(super) fn reset_used_max(&self) -> anyhow::Result<()> {
        let path = self.path.join("memory.max_usage_in_bytes");
        fs::write(&path, "0").with_context(|| format!("writing {}", path.display()))
    }

    /// Limits the group to `bytes`. The kernel reclaims memory for a while; returns false if it cannot reclaim
    /// enough.
    pub(super) fn limit(&self, bytes: u64) -> anyhow::Result<bool> {
        let path = self.path.join("memory.limit_in_bytes");
        match fs::write(&path, bytes.to_string()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(false),
            Err(error) => Err(error).with_context(|| format!("writing {bytes} to {}", path.display())),
        }
    }

    /// Returns how many of the group's processes the OOM killer has killed.
    pub(super) fn killed(&self) -> anyhow::Result<u64> {
        named(&self.path.join("memory.oom_control"), "oom_kill ")
    }

    /// Returns the group's major faults, which waited for a device or for zswap.
    pub(super) fn major_faults(&self) -> anyhow::Result<u64> {
        named(&self.path.join("memory.stat"), "pgmajfault")
    }
}

/// Reads a file that contains one number.
pub(super) fn number(path: &Path) -> anyhow::Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let number = text.trim().parse();
    number.with_context(|| format!("{} contains no number: {text}", path.display()))
}

/// Reads the number after a name, from a file with one name on each line.
pub(super) fn named(path: &Path, name: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let number = text.lines().find_map(|line| {
        let rest = line.strip_prefix(name)?;
        rest.trim_start_matches(':').split_whitespace().next()?.parse().ok()
    });
    number.with_context(|| format!("{} has no line {name}", path.display()))
}
