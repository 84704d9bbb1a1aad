//! The working directory of a part, which is removed with the process, and images full of random data in it.

use std::fs::{self, File};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, bail};

use crate::qcow2::image::{Layout, Order};

/// Bytes written at a time.
const WRITE_BYTES: usize = 1 << 20;

/// log2 of the cluster size.
const CLUSTER_BITS: u32 = 16;

/// Waits for the end of its input, which comes when this process ends in any way, and removes the directory.
const REMOVE: &str = r#"trap "" INT TERM HUP; cat >/dev/null; rm -rf -- "$1""#;

/// A directory, removed when this is dropped or the process ends.
pub(crate) struct Place {
    path: PathBuf,
    remover: Child,
    names: AtomicU32,
}

impl Place {
    /// Creates a directory in `parent`, which is created if it is missing.
    pub(crate) fn new(parent: &Path) -> anyhow::Result<Self> {
        let parent = std::path::absolute(parent)?;
        fs::create_dir_all(&parent).with_context(|| format!("making {}", parent.display()))?;
        let directory = tempfile::Builder::new().prefix("larder-bench-").tempdir_in(parent)?;
        let remover = Command::new("sh")
            .args(["-c", REMOVE, "sh"])
            .arg(directory.path())
            .stdin(Stdio::piped())
            .spawn()
            .context("starting sh")?;
        Ok(Self { path: directory.keep(), remover, names: AtomicU32::new(0) })
    }

    /// Returns the directory's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a path in the directory that does not exist yet.
    pub(crate) fn unused(&self, name: &str) -> PathBuf {
        let number = self.names.fetch_add(1, Ordering::Relaxed);
        self.path.join(format!("{name}{number}"))
    }

    /// Creates a raw image of `size` bytes of random data, which on return is on the disk and not in the page cache.
    pub(crate) fn raw_image(&self, size: u64) -> anyhow::Result<PathBuf> {
        let path = self.unused("raw");
        fill(&path, 0, size)?;
        Ok(path)
    }

    /// Creates a qcow2 image like [`Self::raw_image`], with its clusters in the order of the disk.
    pub(crate) fn qcow2_image(&self, size: u64) -> anyhow::Result<PathBuf> {
        let path = self.unused("qcow2");
        let layout = Layout { size, cluster_bits: CLUSTER_BITS, order: Order::Contiguous };
        layout.write(&path)?;
        fill(&path, layout.data_offset(), size)?;
        Ok(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(self.remover.stdin.take());
        let _ = self.remover.wait();
    }
}

/// Writes `size` random bytes at offset `start`.
fn fill(path: &Path, start: u64, size: u64) -> anyhow::Result<()> {
    let context = || format!("writing {}", path.display());
    if !size.is_multiple_of(WRITE_BYTES as u64) {
        bail!("the size of an image, {size} bytes, is not a multiple of 1 MiB");
    }
    let mut file = File::options().create(true).truncate(false).write(true).open(path).with_context(context)?;
    file.seek(SeekFrom::Start(start))?;
    let mut out = BufWriter::with_capacity(WRITE_BYTES, &file);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for _ in 0..size / 8 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.write_all(&state.to_le_bytes()).with_context(context)?;
    }
    out.flush().with_context(context)?;
    drop(out);
    file.sync_all().with_context(context)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}
