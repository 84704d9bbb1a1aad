//! Proof, for a disk whose server was killed, of whether another program has written to the disk since.
//!
//! A file or device that the server writes to has a mark ([`FileDevice::verdict`]) that counts the server's own
//! writes. A file that it only reads is unchanged if its timestamps are, including its ctime, which no program can set
//! back. For a device that it only reads, and for an export, there is no proof.
//!
//! A mark covers the time since the last use of its image, and belongs to that use. The state file of a cache lists
//! the uses of its disk in which it was the disk's cache. So a mark proves nothing for a cache if the disk was used
//! without that cache since.

use std::path::PathBuf;
use std::rc::Rc;

use larder_block::backend::file::{FileDevice, Verdict};

use super::disk_id::{DiskFile, FileFingerprint};
use crate::private_directory;
use crate::runtime_directory::{self, runtime_directory};

/// The files of a disk, as they were found when they were opened.
#[derive(Clone, Default)]
pub(super) struct ModificationProof {
    /// In the order of the disk's [`DiskFile`]s.
    files: Vec<Rc<FileDevice>>,
    has_export: bool,
}

impl ModificationProof {
    pub(super) fn add_file(&mut self, file: &Rc<FileDevice>) {
        self.files.push(Rc::clone(file));
    }

    pub(super) fn add_export(&mut self) {
        self.has_export = true;
    }

    /// Checks for foreign writes since the disk's `files` had the fingerprints `then`, during the host boot with the
    /// ID `boot`, in one of these `uses` of the disk; returns the verdict. After a reboot of the host the
    /// fingerprints alone count.
    pub(super) fn verdict(
        &self,
        files: &[DiskFile],
        then: &[FileFingerprint],
        boot: Option<u128>,
        uses: &[u64],
    ) -> Verdict {
        if files.len() != then.len() || files.len() != self.files.len() {
            return Verdict::Changed;
        }
        let file_verdict = |((device, file), then): ((&Rc<FileDevice>, &DiskFile), &FileFingerprint)| {
            let by_times = match file.matches_except_ctime(then) {
                _ if file.lacks_timestamps() => Verdict::Unproven,
                true if file.is_unchanged_since(then) => Verdict::Unchanged,
                false if !then.is_written => Verdict::Changed,
                _ => Verdict::Unproven,
            };
            let by_mark = then.is_written.then(|| device.verdict(boot, uses));
            by_mark.flatten().unwrap_or(by_times)
        };
        let verdicts = self.files.iter().zip(files).zip(then).map(file_verdict);
        let export_verdict = self.has_export.then_some(Verdict::Unproven);
        verdicts.chain(export_verdict).max().unwrap_or_default()
    }

    /// Returns those of `uses` that a mark of the disk belongs to.
    pub(super) fn marked_uses(&self, uses: &[u64]) -> Vec<u64> {
        let has_mark = |use_id: &u64| self.files.iter().any(|file| file.verdict(None, &[*use_id]).is_some());
        uses.iter().copied().filter(has_mark).collect()
    }

    /// Records that the verdict has been acted upon, and that the use of the disk with this number has begun.
    pub(super) fn acknowledge(&self, use_id: u64) {
        for file in &self.files {
            file.acknowledge_verdict(use_id);
        }
    }
}

/// Returns the directory for this process's image marks. The parent directory is created here; the directory itself
/// is created together with the first mark.
pub(super) fn mark_directory() -> PathBuf {
    let directory = private_directory::runtime().map_or_else(
        || {
            let directory = runtime_directory();
            // If this fails, creating a mark in it fails too, and reports the error.
            let _ = runtime_directory::create(&directory, 0o755);
            directory
        },
        |private| private.to_owned(),
    );
    directory.join("marks")
}
