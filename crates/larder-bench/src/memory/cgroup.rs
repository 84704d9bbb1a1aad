//! A control group for memory, of cgroup v1.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::undo::Undo;

const CONTROLLER: &str = "/sys/fs/cgroup/memory";

/// It can be removed when its processes are gone, which takes those that are killed a moment.
const REMOVE: &str = r#"for try in $(seq 100); do rmdir -- "$1" 2>/dev/null && exit; sleep 0.1; done; exit 1"#;

/// A control group, gone with this or with the process. What is in it must be gone by then.
pub(super) struct Cgroup {
    path: PathBuf,
    _undo: Undo,
}

impl Cgroup {
    /// A new one without a limit.
    pub(super) fn new(name: &str) -> anyhow::Result<Self> {
        if !Path::new(CONTROLLER).join("memory.limit_in_bytes").exists() {
            bail!("{CONTROLLER} has no memory controller of cgroup v1, which these experiments are made with");
        }
        let path = Path::new(CONTROLLER).join(format!("larder-bench-{}-{name}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("making the control group {}", path.display()))?;
        Ok(Self {
            _undo: Undo::new(REMOVE, [&path])?,
            path,
        })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that its processes have: their memory, and files' pages that they were the first to read.
    pub(super) fn used(&self) -> anyhow::Result<u64> {
        number(&self.path.join("memory.usage_in_bytes"))
    }

    /// The most that [`Cgroup::used`] was since it was forgotten.
    pub(super) fn used_most(&self) -> anyhow::Result<u64> {
        number(&self.path.join("memory.max_usage_in_bytes"))
    }

    /// Begins anew with [`Cgroup::used_most`].
    pub(super) fn forget_most(&self) -> anyhow::Result<()> {
        let path = self.path.join("memory.max_usage_in_bytes");
        fs::write(&path, "0").with_context(|| format!("writing {}", path.display()))
    }

    /// Lets it have no more than `bytes`. The kernel makes room for a while, and says false if there is none.
    pub(super) fn limit(&self, bytes: u64) -> anyhow::Result<bool> {
        let path = self.path.join("memory.limit_in_bytes");
        match fs::write(&path, bytes.to_string()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(false),
            Err(error) => Err(error).with_context(|| format!("writing {bytes} to {}", path.display())),
        }
    }

    /// How many of its processes the kernel has killed because there was no memory for them.
    pub(super) fn killed(&self) -> anyhow::Result<u64> {
        named(&self.path.join("memory.oom_control"), "oom_kill ")
    }

    /// Faults of its processes that had to wait for a device, or for zswap.
    pub(super) fn major_faults(&self) -> anyhow::Result<u64> {
        named(&self.path.join("memory.stat"), "pgmajfault")
    }
}

/// The number that a file has.
pub(super) fn number(path: &Path) -> anyhow::Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let number = text.trim().parse();
    number.with_context(|| format!("{} has no number: {text}", path.display()))
}

/// The number behind a name in a file with one on each line.
pub(super) fn named(path: &Path, name: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let number = text.lines().find_map(|line| {
        let rest = line.strip_prefix(name)?;
        rest.trim_start_matches(':').split_whitespace().next()?.parse().ok()
    });
    number.with_context(|| format!("{} tells no {name}", path.display()))
}
