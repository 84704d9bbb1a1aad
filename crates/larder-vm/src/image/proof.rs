//! What is proven of a disk whose server was killed: whether another program has written to it since.
//!
//! A file or device that the server writes to has a mark ([`FileDevice::verdict`]) that counts the server's own writes. A file that
//! it only reads has the same times as before. Of a device that it only reads, and of an export, nothing proves that nobody has
//! written to it.
//!
//! A mark says what has happened since its image was last used, and belongs to that use. The note of a cache names the uses of its
//! disk in which it was the disk's cache: so a mark says nothing of a cache without which the disk was used meanwhile.

use std::path::PathBuf;
use std::rc::Rc;

use larder_block::backend::file::{FileDevice, Verdict};

use super::disk_id::{DiskFile, FileStamp};
use crate::private_folder;
use crate::runtime_folder::{self, runtime_folder};

/// The files of a disk, as they were found when they were opened.
#[derive(Clone, Default)]
pub(super) struct Proof {
    /// In the order of the disk's [`DiskFile`]s.
    files: Vec<Rc<FileDevice>>,
    has_export: bool,
}

impl Proof {
    pub(super) fn add_file(&mut self, file: &Rc<FileDevice>) {
        self.files.push(Rc::clone(file));
    }

    pub(super) fn add_export(&mut self) {
        self.has_export = true;
    }

    /// Returns what is proven since the disk's `files` had the stamps `then`, in a start of the host with the ID `boot`, in one of
    /// these `uses` of the disk. After a new start of the host the stamps alone count.
    pub(super) fn verdict(&self, files: &[DiskFile], then: &[FileStamp], boot: Option<u128>, uses: &[u64]) -> Verdict {
        if files.len() != then.len() || files.len() != self.files.len() {
            return Verdict::Changed;
        }
        let of_file = |((device, file), then): ((&Rc<FileDevice>, &DiskFile), &FileStamp)| {
            let by_times = match file.is_as_at(then) {
                _ if file.lacks_times() => Verdict::Unproven,
                true => Verdict::Proven,
                false if then.is_written => Verdict::Unproven,
                false => Verdict::Changed,
            };
            let by_mark = then.is_written.then(|| device.verdict(boot, uses));
            by_mark.flatten().unwrap_or(by_times)
        };
        let verdicts = self.files.iter().zip(files).zip(then).map(of_file);
        let of_exports = self.has_export.then_some(Verdict::Unproven);
        verdicts.chain(of_exports).max().unwrap_or_default()
    }

    /// Returns those of `uses` that a mark of the disk belongs to.
    pub(super) fn uses_of_marks(&self, uses: &[u64]) -> Vec<u64> {
        let has_mark = |of_use: &u64| self.files.iter().any(|file| file.verdict(None, &[*of_use]).is_some());
        uses.iter().copied().filter(has_mark).collect()
    }

    /// The verdict has been acted upon, and a use of the disk with this number has begun.
    pub(super) fn acknowledge(&self, of_use: u64) {
        for file in &self.files {
            file.acknowledge_verdict(of_use);
        }
    }
}

/// Returns where this process keeps the marks of its images. It is made when the first one is; what it is in is made now.
pub(super) fn marks_folder() -> PathBuf {
    let folder = private_folder::runtime().map_or_else(
        || {
            let folder = runtime_folder();
            // Whoever makes a mark says that there is no folder for it.
            let _ = runtime_folder::make(&folder, 0o755);
            folder
        },
        |own| own.to_owned(),
    );
    folder.join("marks")
}
