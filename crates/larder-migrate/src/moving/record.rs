//! What a mover keeps of a move until the host restarts, so that one that is started after a crash knows where the VM may run.
//!
//! One file for each QEMU and role, in a folder that is this user's alone. It is believed only for the very process it was
//! written for, which is part of its name: when that process has ended, nobody writes the file again, and whoever comes next
//! removes it. A host that has restarted has none of these processes, nor the folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use larder_block::small_file::{self, STATE_BYTES_MAX};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use super::settings::Before;
use crate::qmp::{Process, Qmp};

/// The number of a move, which no other has: 16 bytes, in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MoveId(String);

impl MoveId {
    /// One that nobody can guess.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new() -> io::Result<Self> {
        super::random_hex::<16>().map(Self)
    }
}

/// The source's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Leaving {
    /// Which move.
    pub id: MoveId,
    /// Whether the VM's processors run; else it stays stopped.
    pub run: bool,
    /// Where to.
    pub to: String,
    /// The mover has stopped it, for post-copy, or is about to.
    pub stopped: bool,
    /// Where the disks are served that go along; none if none do.
    pub disks: Vec<PathBuf>,
    /// They may have been closed for the destination.
    pub disks_left: bool,
    /// The destination may have been told to run it.
    pub told: bool,
    /// How QEMU was set.
    pub before: Before,
}

/// The destination's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Arriving {
    /// Which move.
    pub id: MoveId,
    /// Where the disks are served that go along; none if none do.
    pub disks: Vec<PathBuf>,
    /// How far it is.
    pub phase: Phase,
}

/// What has become of a VM at its destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Phase {
    /// QEMU was never told to let it run.
    Coming,
    /// The source has said that it may run.
    LetRun {
        /// Whether its processors do; QEMU was told so then, or is about to be.
        run: bool,
    },
    /// QEMU was never told so, and never will be.
    Never {
        /// Why.
        reason: String,
    },
}

/// The place of a record.
pub struct Place {
    path: PathBuf,
    qemu: Option<Process>,
}

#[derive(Serialize, Deserialize)]
struct Kept<T> {
    qemu: Option<Process>,
    record: T,
}

impl Place {
    /// In a folder, of a QEMU, in a role.
    #[must_use]
    pub fn new(folder: &Path, role: &str, qmp: &Qmp) -> Self {
        let socket = fs::canonicalize(qmp.path()).unwrap_or_else(|_| qmp.path().to_owned());
        let digest = ring::digest::digest(&ring::digest::SHA256, socket.as_os_str().as_encoded_bytes());
        let name = super::hex(&digest.as_ref()[..8]);
        let qemu = qmp.process();
        let process = qemu.map_or_else(String::new, |qemu| format!("-{}-{}", qemu.pid, qemu.started));
        sweep(folder);
        Self {
            path: folder.join(format!("{role}-{name}{process}.json")),
            qemu,
        }
    }

    /// What was kept of this QEMU; `None` if nothing was.
    ///
    /// # Errors
    /// It cannot be read, or not be understood.
    pub fn load<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let bytes = match small_file::read(&self.path, STATE_BYTES_MAX) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.named(&error)),
        };
        let kept: Kept<T> = serde_json::from_slice(&bytes).map_err(|error| self.named(&error.into()))?;
        Ok((kept.qemu == self.qemu).then_some(kept.record))
    }

    /// Keeps it. Either this or what was there before is there afterwards, wherever this process ends.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn save<T: Serialize>(&self, record: T) -> io::Result<()> {
        let kept = Kept {
            qemu: self.qemu,
            record,
        };
        let new = self.path.with_extension("new");
        fs::write(&new, serde_json::to_vec(&kept).expect("plain data")).map_err(|error| self.named(&error))?;
        fs::rename(&new, &self.path).map_err(|error| self.named(&error))
    }

    /// Keeps nothing any more.
    pub fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }

    fn named(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("{}: {error}", self.path.display()))
    }
}

/// Removes records of QEMUs that have ended: nobody can ask them anything, and no other process is meant.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let kept = small_file::read(&entry.path(), STATE_BYTES_MAX).ok();
        let kept: Option<Kept<IgnoredAny>> = kept.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let qemu = kept.and_then(|kept| kept.qemu);
        if qemu.is_some_and(|qemu| !qemu.lives()) {
            // Another one's, or one that is gone already, is in nobody's way.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_qemus_that_have_ended_are_removed_and_no_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let us = Process::with(std::process::id() as i32).expect("it lives");
        let before = Process {
            started: us.started - 1,
            ..us
        };
        let place = |name: &str, qemu| Place {
            path: folder.path().join(name),
            qemu,
        };
        place("from-1.json", Some(before)).save("dead").expect("there is room");
        place("to-1.json", Some(us)).save("lives").expect("there is room");
        place("to-2.json", None).save("unknown").expect("there is room");
        fs::write(folder.path().join("to-3.json"), "no record").expect("there is room");
        sweep(folder.path());
        let left = fs::read_dir(folder.path()).expect("is there");
        let mut left: Vec<_> = left.map(|entry| entry.expect("is there").file_name()).collect();
        left.sort();
        assert_eq!(left, ["to-1.json", "to-2.json", "to-3.json"]);
    }
}
