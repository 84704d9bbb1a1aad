//! A loop device over a sparse file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

/// A loop device, detached when this is dropped.
pub(super) struct LoopDevice {
    path: PathBuf,
    file: File,
}

/// Granularity of holes, in bytes.
const UNIT: usize = 4096;

/// Length of a read, in bytes.
const PIECE: usize = 1 << 20;

impl LoopDevice {
    /// Creates a device of `size` bytes.
    pub(super) fn new(file_path: &Path, size: u64) -> anyhow::Result<Self> {
        let file = File::options().read(true).write(true).create_new(true).open(file_path)?;
        file.set_len(size)?;
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file_path).output();
        let output = output.context("losetup")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "losetup, which needs root: {stderr}");
        let path = String::from_utf8_lossy(&output.stdout).trim().into();
        Ok(Self { path, file })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Punches holes where the file has zeros. The device must not be in use.
    pub(super) fn punch_zeros(&self) -> anyhow::Result<()> {
        let device = File::options().read(true).write(true).open(&self.path)?;
        // The device's page cache may be ahead of the file.
        device.sync_all()?;
        let mut bytes = vec![0; PIECE];
        let mut at = 0;
        // ENXIO: there is no further data.
        while let Ok(start) = seek(&self.file, SeekFrom::Data(at)) {
            let end = seek(&self.file, SeekFrom::Hole(start))?;
            at = start;
            while at < end {
                let len = (end - at).min(PIECE as u64) as usize;
                self.file.read_exact_at(&mut bytes[..len], at)?;
                self.punch_zeros_in(&bytes[..len], at)?;
                at += len as u64;
            }
        }
        Ok(())
    }

    fn punch_zeros_in(&self, bytes: &[u8], at: u64) -> anyhow::Result<()> {
        let mut zeros = 0..0;
        for (index, unit) in (0..).zip(bytes.chunks(UNIT)) {
            let start = at + index * UNIT as u64;
            if unit.iter().all(|byte| *byte == 0) {
                if zeros.end != start {
                    self.dig(zeros)?;
                    zeros = start..start;
                }
                zeros.end = start + unit.len() as u64;
            }
        }
        self.dig(zeros)
    }

    fn dig(&self, zeros: std::ops::Range<u64>) -> anyhow::Result<()> {
        if !zeros.is_empty() {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.file, flags, zeros.start, zeros.end - zeros.start)?;
        }
        Ok(())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
