//! Record of a move, kept by a mover until the host restarts, so that a mover started after a crash knows where the
//! VM may run.
//!
//! There is one file for each QEMU and role, in a directory of this user alone. A record is valid only for the very
//! process that it was written for, which is part of its name. Once that process has ended, the file is not written
//! again, and the next mover removes it. A restarted host has neither these processes nor the directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use larder_block::small_file::{self, STATE_BYTES_MAX};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use super::settings::PreviousSettings;
use crate::qmp::{ProcessIdentity, Qmp};

/// Number of a move, unique: 16 bytes, in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MoveId(String);

impl MoveId {
    /// Creates a number that cannot be guessed.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new() -> io::Result<Self> {
        super::random_hex::<16>().map(Self)
    }
}

/// Record of a move at its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct OutgoingRecord {
    /// Number of the move.
    pub id: MoveId,
    /// True if the VM's processors run; otherwise it stays stopped.
    pub run: bool,
    /// Destination.
    pub to: String,
    /// True if the mover has stopped the VM for post-copy, or is about to.
    pub stopped: bool,
    /// Sockets of the disks that move along; empty if there are none.
    pub disks: Vec<PathBuf>,
    /// True if the disks may have been closed for the destination.
    pub disks_left: bool,
    /// True if `Go` may have been sent to the destination.
    pub told: bool,
    /// Migration settings of QEMU before the move.
    pub before: PreviousSettings,
}

/// Record of a move at its destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IncomingRecord {
    /// Number of the move.
    pub id: MoveId,
    /// Sockets of the disks that move along; empty if there are none.
    pub disks: Vec<PathBuf>,
    /// Phase of the move.
    pub phase: IncomingPhase,
}

/// Phase of a VM at its destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum IncomingPhase {
    /// QEMU has not run the VM.
    Coming,
    /// The source has allowed the VM to run.
    LetRun {
        /// True if its processors run; `cont` was then sent to QEMU, or is about to be.
        run: bool,
    },
    /// QEMU has never run the VM, and never will.
    Never {
        /// Reason why.
        reason: String,
    },
}

/// File of a record.
pub struct RecordFile {
    path: PathBuf,
    qemu: Option<ProcessIdentity>,
}

#[derive(Serialize, Deserialize)]
struct StoredRecord<T> {
    qemu: Option<ProcessIdentity>,
    record: T,
}

impl RecordFile {
    /// Returns the file for a QEMU and a role in a directory, and removes outdated files from the directory.
    #[must_use]
    pub fn new(directory: &Path, role: &str, qmp: &Qmp) -> Self {
        let socket = fs::canonicalize(qmp.path()).unwrap_or_else(|_| qmp.path().to_owned());
        let digest = ring::digest::digest(&ring::digest::SHA256, socket.as_os_str().as_encoded_bytes());
        let name = super::hex(&digest.as_ref()[..8]);
        let qemu = qmp.process();
        let process = qemu.map_or_else(String::new, |qemu| format!("-{}-{}", qemu.pid, qemu.started));
        remove_stale(directory);
        Self { path: directory.join(format!("{role}-{name}{process}.json")), qemu }
    }

    /// Reads the record of this QEMU; returns `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read or parsed.
    pub fn load<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let bytes = match small_file::read(&self.path, STATE_BYTES_MAX) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.with_path(&error)),
        };
        let stored: StoredRecord<T> = serde_json::from_slice(&bytes).map_err(|error| self.with_path(&error.into()))?;
        Ok((stored.qemu == self.qemu).then_some(stored.record))
    }

    /// Saves the record. If this process ends at any moment, the file has either this record or the previous one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save<T: Serialize>(&self, record: T) -> io::Result<()> {
        let stored = StoredRecord { qemu: self.qemu, record };
        let new = self.path.with_extension("new");
        fs::write(&new, serde_json::to_vec(&stored).expect("plain data")).map_err(|error| self.with_path(&error))?;
        fs::rename(&new, &self.path).map_err(|error| self.with_path(&error))
    }

    /// Removes the record.
    pub fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }

    fn with_path(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("{}: {error}", self.path.display()))
    }
}

/// Removes records of QEMUs that have exited: they describe no other process, and nothing can be asked of theirs.
fn remove_stale(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let bytes = small_file::read(&entry.path(), STATE_BYTES_MAX).ok();
        let stored: Option<StoredRecord<IgnoredAny>> = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let qemu = stored.and_then(|stored| stored.qemu);
        if qemu.is_some_and(|qemu| !qemu.is_alive()) {
            // A file of another user, or one that is removed already, does no harm.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records of exited QEMUs are removed, and no other files.
    #[test]
    fn sweep_removes_records_of_exited_qemus() {
        let directory = tempfile::tempdir().expect("a folder");
        let live = ProcessIdentity::with_pid(std::process::id() as i32).expect("it lives");
        let exited = ProcessIdentity { started: live.started - 1, ..live };
        let record_file = |name: &str, qemu| RecordFile { path: directory.path().join(name), qemu };
        record_file("from-1.json", Some(exited)).save("dead").expect("there is room");
        record_file("to-1.json", Some(live)).save("lives").expect("there is room");
        record_file("to-2.json", None).save("unknown").expect("there is room");
        fs::write(directory.path().join("to-3.json"), "no record").expect("there is room");
        remove_stale(directory.path());
        let remaining = fs::read_dir(directory.path()).expect("is there");
        let mut remaining: Vec<_> = remaining.map(|entry| entry.expect("is there").file_name()).collect();
        remaining.sort();
        assert_eq!(remaining, ["to-1.json", "to-2.json", "to-3.json"]);
    }
}
