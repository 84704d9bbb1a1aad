//! Which queues a front-end has started, and not taken back since (GET_VRING_BASE). Of those it does not know how far they
//! are; the rest are where it thinks that they are.
//!
//! A successor of a killed server must know that before its front-end is back: a VM that is stopped meanwhile for the end of
//! a migration takes along what its QEMU makes of such a queue, which is a guess: what the guest has been answered so far, as
//! if everything before that had been, and nothing after. So it can be kept in a file. The file is for as long as the host
//! runs, and its one block is written in one go:
//!
//! ```text
//!   0        8        16
//!   +--------+--------+
//!   | magic  | queues |    u64 each, little-endian; queues: bit n is set for queue n
//!   +--------+--------+
//! ```
//!
//! A queue is noted before it takes its first request, and crossed out after the front-end was answered where it is. A death
//! in between leaves a queue noted that is where the front-end thinks: one too many, never one too few.

use std::cell::{Cell, OnceCell};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MAGIC: [u8; 8] = *b"LARDERq1";
const BYTES: usize = 16;

/// The queues of a disk that a front-end has lent out.
#[derive(Debug, Default)]
pub(super) struct Lent {
    queues: Cell<u64>,
    /// Where the next process finds it, if it shall.
    file: OnceCell<File>,
}

impl Lent {
    /// Goes on with what a process before this one has left in `file`, which is empty if there was none, and notes changes
    /// there. Said once.
    pub(super) fn keep_in(&self, file: File) -> io::Result<()> {
        let mut bytes = [0; BYTES];
        let queues = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => Self::parse(bytes).ok_or_else(|| io::Error::other("it is something else"))?,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            Err(error) => return Err(error),
        };
        file.write_all_at(&Self::text(queues), 0)?;
        self.queues.set(queues);
        let _ = self.file.set(file);
        Ok(())
    }

    fn parse(bytes: [u8; BYTES]) -> Option<u64> {
        let [m0, m1, m2, m3, m4, m5, m6, m7, queues @ ..] = bytes;
        ([m0, m1, m2, m3, m4, m5, m6, m7] == MAGIC).then(|| u64::from_le_bytes(queues))
    }

    fn text(queues: u64) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..].copy_from_slice(&queues.to_le_bytes());
        bytes
    }

    /// A front-end has started queue `index`.
    pub(super) fn lend(&self, index: u16) {
        self.set(self.queues.get() | bit(index));
    }

    /// It has been told where the queue is.
    pub(super) fn take_back(&self, index: u16) {
        self.set(self.queues.get() & !bit(index));
    }

    /// The guest that had started queues is no more, or has reset them.
    pub(super) fn forget(&self) {
        self.set(0);
    }

    /// Those that were not taken back, the lowest first.
    pub(super) fn queues(&self) -> impl Iterator<Item = u16> + use<> {
        let queues = self.queues.get();
        (0..u64::BITS as u16).filter(move |index| queues & bit(*index) != 0)
    }

    fn set(&self, queues: u64) {
        if self.queues.replace(queues) == queues {
            return;
        }
        let Some(file) = self.file.get() else { return };
        if let Err(error) = file.write_all_at(&Self::text(queues), 0) {
            tracing::warn!("which queues run cannot be noted for the next process: {error}");
        }
    }
}

fn bit(index: u16) -> u64 {
    1u64.checked_shl(index.into()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept_in(file: &File) -> Lent {
        let lent = Lent::default();
        lent.keep_in(file.try_clone().expect("a descriptor"))
            .expect("it is ours");
        lent
    }

    #[test]
    fn the_next_process_knows_which_queues_were_not_taken_back() {
        let file = tempfile::tempfile().expect("a file");
        let now = |lent: &Lent| lent.queues().collect::<Vec<_>>();
        let lent = kept_in(&file);
        assert!(now(&lent).is_empty());
        for index in [0, 5, 63] {
            lent.lend(index);
        }
        lent.take_back(5);
        assert_eq!(now(&lent), [0, 63]);
        drop(lent);
        let next = kept_in(&file);
        assert_eq!(now(&next), [0, 63]);
        next.forget();
        assert!(now(&kept_in(&file)).is_empty());
    }

    #[test]
    fn a_file_of_something_else_is_left_alone() {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(b"of something else, and long enough", 0)
            .expect("writes");
        Lent::default().keep_in(file).expect_err("it is not ours");
    }
}
