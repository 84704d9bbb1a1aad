//! A swap file, and zswap before it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::cgroup::named;
use super::undo::Undo;
use crate::prefetch::place::Place;

/// The folder goes too: while the file was swapped to it could not.
const SWAP_OFF: &str = r#"swapoff -- "$1" && rm -rf -- "$(dirname -- "$1")""#;

/// A file that the kernel swaps to, gone with this or with the process.
pub(super) struct SwapFile {
    _undo: Undo,
}

impl SwapFile {
    /// Of `size` bytes, with something in each block: one that was never written may be faster, or slower.
    pub(super) fn new(place: &Place, size: u64) -> anyhow::Result<Self> {
        let swaps = fs::read_to_string("/proc/swaps").context("reading /proc/swaps")?;
        if let Some(other) = swaps.lines().nth(1) {
            bail!("this machine swaps already, and what is measured might go there: {other}");
        }
        let path = place.raw_image(size)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        command("mkswap", &path)?;
        command("swapon", &path)?;
        Ok(Self {
            _undo: Undo::new(SWAP_OFF, [&path])?,
        })
    }
}

fn command(program: &str, path: &Path) -> anyhow::Result<()> {
    let output = Command::new(program).arg(path).output();
    let output = output.with_context(|| format!("starting {program}, of the package util-linux or mount"))?;
    if !output.status.success() {
        bail!(
            "{program} {}: {}",
            path.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

const PARAMETERS: &str = "/sys/module/zswap/parameters";

/// `$1` is the folder, then come names and values.
const SET_BACK: &str = r#"cd "$1" && shift && while [ $# -gt 0 ]; do echo "$2" >"$1" || exit; shift 2; done"#;

/// zswap, switched on; set back with this or with the process.
pub(super) struct Zswap {
    _undo: Undo,
}

impl Zswap {
    /// With a pool of `percent` hundredths of the machine's memory at most.
    pub(super) fn on(compressor: &str, percent: u64) -> anyhow::Result<Self> {
        let mut before = vec![PARAMETERS.to_owned()];
        for name in ["enabled", "compressor", "max_pool_percent"] {
            let value = fs::read_to_string(parameter(name)).context("this kernel has no zswap")?;
            before.extend([name.to_owned(), value.trim().to_owned()]);
        }
        let undo = Undo::new(SET_BACK, before)?;
        set("compressor", compressor)?;
        set("max_pool_percent", &percent.to_string())?;
        set("enabled", "Y")?;
        Ok(Self { _undo: undo })
    }

    /// Bytes of its pool.
    pub(super) fn pool() -> anyhow::Result<u64> {
        Ok(named(Path::new("/proc/meminfo"), "Zswap:")? << 10)
    }

    /// The first of some compressors that this kernel has.
    pub(super) fn compressor(names: &[String]) -> anyhow::Result<&str> {
        let path = parameter("compressor");
        let now = fs::read_to_string(&path).context("this kernel has no zswap")?;
        let found = names.iter().find(|name| fs::write(&path, name).is_ok());
        fs::write(&path, now.trim())?;
        let found = found.with_context(|| format!("zswap of this kernel has none of {}", names.join(", ")))?;
        Ok(found)
    }
}

fn parameter(name: &str) -> PathBuf {
    Path::new(PARAMETERS).join(name)
}

fn set(name: &str, value: &str) -> anyhow::Result<()> {
    fs::write(parameter(name), value).with_context(|| format!("setting zswap's {name} to {value}"))
}
