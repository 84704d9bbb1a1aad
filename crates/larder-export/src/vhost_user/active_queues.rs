//! Active queues: those that are started and for which the front-end has not yet sent GET_VRING_BASE. The front-end's
//! base is stale for these, and exact for all others.
//!
//! A successor of a killed server must know the active queues before its front-end reconnects. A VM that is stopped
//! meanwhile for the end of a migration is transferred with QEMU's guess of such a queue's position: that every
//! request up to the last answered one is done, and none after it. The set can therefore be stored in a file. The
//! file lives as long as the host runs, and its single block is written in one write:
//!
//! ```text
//!   0        8        16
//!   +--------+--------+
//!   | magic  | queues |    u64 each, little-endian; queues: bit n is set for queue n
//!   +--------+--------+
//! ```
//!
//! A queue is added before it takes its first request, and removed after the front-end has received its base. A crash
//! in between leaves a queue in the set whose base is exact: the set may have one queue too many, never one too few.

use std::cell::{Cell, OnceCell};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MAGIC: [u8; 8] = *b"LARDERq1";
const BYTES: usize = 16;

/// Set of active queues of a disk.
#[derive(Debug, Default)]
pub(super) struct ActiveQueues {
    queues: Cell<u64>,
    /// File that stores the set for the next process, if there is one.
    file: OnceCell<File>,
}

impl ActiveQueues {
    /// Continues with the set that a previous process left in `file`, which is empty if there was none, and stores
    /// changes there. Must be called only once.
    pub(super) fn persist_in(&self, file: File) -> io::Result<()> {
        let mut bytes = [0; BYTES];
        let queues = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => Self::parse(bytes).ok_or_else(|| io::Error::other("the file has other contents"))?,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            Err(error) => return Err(error),
        };
        file.write_all_at(&Self::encode(queues), 0)?;
        self.queues.set(queues);
        let _ = self.file.set(file);
        Ok(())
    }

    fn parse(bytes: [u8; BYTES]) -> Option<u64> {
        let [m0, m1, m2, m3, m4, m5, m6, m7, queues @ ..] = bytes;
        ([m0, m1, m2, m3, m4, m5, m6, m7] == MAGIC).then(|| u64::from_le_bytes(queues))
    }

    fn encode(queues: u64) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..].copy_from_slice(&queues.to_le_bytes());
        bytes
    }

    /// Adds queue `index`, which a front-end has started.
    pub(super) fn insert(&self, index: u16) {
        self.set(self.queues.get() | bit(index));
    }

    /// Removes queue `index`, whose base the front-end has received.
    pub(super) fn remove(&self, index: u16) {
        self.set(self.queues.get() & !bit(index));
    }

    /// Clears the set, because the guest that had started the queues has ended or reset them.
    pub(super) fn clear(&self) {
        self.set(0);
    }

    /// Returns the active queues in ascending order.
    pub(super) fn queues(&self) -> impl Iterator<Item = u16> + use<> {
        let queues = self.queues.get();
        (0..u64::BITS as u16).filter(move |index| queues & bit(*index) != 0)
    }

    fn set(&self, queues: u64) {
        if self.queues.replace(queues) == queues {
            return;
        }
        let Some(file) = self.file.get() else { return };
        if let Err(error) = file.write_all_at(&Self::encode(queues), 0) {
            tracing::warn!("cannot record the active queues for the next process: {error}");
        }
    }
}

fn bit(index: u16) -> u64 {
    1u64.checked_shl(index.into()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn persisted_in(file: &File) -> ActiveQueues {
        let active_queues = ActiveQueues::default();
        active_queues.persist_in(file.try_clone().expect("a descriptor")).expect("the file is empty or has a set");
        active_queues
    }

    /// The active queues are stored for the next process.
    #[test]
    fn active_queues_survive_restart() {
        let file = tempfile::tempfile().expect("a file");
        let now = |active_queues: &ActiveQueues| active_queues.queues().collect::<Vec<_>>();
        let active_queues = persisted_in(&file);
        assert!(now(&active_queues).is_empty());
        for index in [0, 5, 63] {
            active_queues.insert(index);
        }
        active_queues.remove(5);
        assert_eq!(now(&active_queues), [0, 63]);
        drop(active_queues);
        let next = persisted_in(&file);
        assert_eq!(now(&next), [0, 63]);
        next.clear();
        assert!(now(&persisted_in(&file)).is_empty());
    }

    #[test]
    fn foreign_file_is_refused() {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(b"of something else, and long enough", 0).expect("writes");
        ActiveQueues::default().persist_in(file).expect_err("the file has other contents");
    }
}
