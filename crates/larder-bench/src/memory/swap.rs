//! A swap file, and zswap in front of it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::cgroup::named;
use crate::prefetch::place::Place;
use crate::undo::Undo;

/// Removes the directory too, which is not possible while the file is in use as swap.
const SWAP_OFF_SCRIPT: &str = r#"swapoff -- "$1" && rm -rf -- "$(dirname -- "$1")""#;

/// A file that the kernel swaps to, removed when this is dropped or the process ends.
pub(super) struct SwapFile {
    _undo: Undo,
}

impl SwapFile {
    /// Creates a swap file of `size` bytes with data in each block, since blocks that were never written may have
    /// another speed.
    pub(super) fn new(scratch: &Place, size: u64) -> anyhow::Result<Self> {
        let swaps = fs::read_to_string("/proc/swaps").context("reading /proc/swaps")?;
        if let Some(other) = swaps.lines().nth(1) {
            bail!("this machine has another swap area, which would distort the measurement: {other}");
        }
        let path = scratch.raw_image(size)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        command("mkswap", &path)?;
        command("swapon", &path)?;
        Ok(Self { _undo: Undo::new(SWAP_OFF_SCRIPT, [&path])? })
    }
}

fn command(program: &str, path: &Path) -> anyhow::Result<()> {
    let output = Command::new(program).arg(path).output();
    let output = output.with_context(|| format!("starting {program} (package util-linux or mount)"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", path.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

const ZSWAP_PARAMETERS_PATH: &str = "/sys/module/zswap/parameters";

/// Swap read-ahead: the number of pages read at once, as a power of two.
const PAGE_CLUSTER_PATH: &str = "/proc/sys/vm/page-cluster";

/// Restores settings, given as pairs of a path and a value.
const RESTORE_SCRIPT: &str = r#"while [ $# -gt 0 ]; do echo "$2" >"$1" || exit; shift 2; done"#;

/// zswap, enabled; settings are restored when this is dropped or the process ends.
pub(super) struct Zswap {
    _undo: Undo,
}

impl Zswap {
    /// Enables zswap with a pool of at most `percent` % of the machine's memory, and disables swap read-ahead.
    /// Read-ahead from the pool decompresses pages in vain, which made passes under a limit two to three times as
    /// long.
    pub(super) fn on(compressor: &str, percent: u64) -> anyhow::Result<Self> {
        let settings = [
            (parameter("compressor"), compressor),
            (parameter("max_pool_percent"), &percent.to_string()),
            (PathBuf::from(PAGE_CLUSTER_PATH), "0"),
            (parameter("enabled"), "Y"),
        ];
        let mut before = Vec::new();
        // In reverse order: zswap is disabled first.
        for (path, _) in settings.iter().rev() {
            let value = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            before.extend([path.clone().into_os_string(), value.trim().into()]);
        }
        let undo = Undo::new(RESTORE_SCRIPT, before)?;
        for (path, value) in settings {
            fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))?;
        }
        Ok(Self { _undo: undo })
    }

    /// Returns the bytes of the pool.
    pub(super) fn pool() -> anyhow::Result<u64> {
        Ok(named(Path::new("/proc/meminfo"), "Zswap:")? << 10)
    }

    /// Returns the first of these compressors that this kernel has.
    pub(super) fn compressor(names: &[String]) -> anyhow::Result<&str> {
        let path = parameter("compressor");
        let previous = fs::read_to_string(&path).context("this kernel has no zswap")?;
        let found = names.iter().find(|name| fs::write(&path, name).is_ok());
        fs::write(&path, previous.trim())?;
        let found =
            found.with_context(|| format!("this kernel's zswap has none of the compressors {}", names.join(", ")))?;
        Ok(found)
    }
}

fn parameter(name: &str) -> PathBuf {
    Path::new(ZSWAP_PARAMETERS_PATH).join(name)
}
