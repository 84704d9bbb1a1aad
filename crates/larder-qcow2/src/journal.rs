//! What outlives a killed process: the changes of the mapping since the last commit.
//!
//! A guest outlives its disk's server: it goes on with the next one, and every write that had completed must be there,
//! flushed or not. The data is in the image file, but the mapping that leads to it was in the dead process's memory. So
//! each change is also noted in memory that the host keeps, a file on tmpfs, before the request completes; the next
//! process makes the changes again. That costs a copy of 64 bytes. A loss of power takes the journal with it, and the
//! guest, which then can expect what it had flushed.
//!
//! ```text
//! byte  0  magic "LRDRJRNL"    8  version, u32    12  bytes of a record, u32
//!      16  the host's boot ID, 16 bytes           32  session, u64    40  records that fit, u64
//!      48  first valid record, u64                56  end of the valid records, u64
//!      64  records: record n lies at 64 + n % fit * 64
//!          guest cluster, count, old entry (2 words), new entry (2 words), 2 words of padding
//! ```
//! All numbers have the host's byte order: the journal never leaves it. The session also stands in the image's header,
//! in autoclear bits, which every other program that opens the image for writing clears: a journal is only believed if
//! it is there, and if what the image maps is what the journal says it did before.
//!
//! How it fails: without a journal each change is committed before its request completes, which is safe and slow.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::entry::Entry;

const MAGIC: u64 = u64::from_le_bytes(*b"LRDRJRNL");
const VERSION: u64 = 1;
const RECORD_WORDS: u64 = 8;
const HEADER_WORDS: u64 = 8;
/// 512 KiB of records; more changes than that wait for a commit.
const RECORDS: u64 = 1 << 13;
/// Bytes of a journal.
pub const JOURNAL_BYTES: u64 = (HEADER_WORDS + RECORDS * RECORD_WORDS) * 8;

const AT_SESSION: u64 = 4;
const AT_START: u64 = 6;
const AT_END: u64 = 7;

/// A change of the mapping: `count` guest clusters from `cluster` on, which were a run that began with `old`, are one
/// that begins with `new`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) cluster: u64,
    pub(crate) count: u64,
    pub(crate) old: Entry,
    pub(crate) new: Entry,
}

/// A journal in memory that outlives the process.
pub struct Journal {
    words: NonNull<u64>,
    start: Cell<u64>,
    end: Cell<u64>,
    /// Records that somebody is going to append.
    promised: Cell<u64>,
    /// Its file, to be removed when the image is left tidy.
    path: Option<PathBuf>,
}

/// Room for records; what is not used is given back when this is dropped.
pub(crate) struct Room<'a> {
    journal: &'a Journal,
    records: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let promised = &self.journal.promised;
        promised.set(promised.get() - self.records);
    }
}

impl Journal {
    /// Opens or makes the journal at `path`, which should be on tmpfs, for nobody else to read.
    ///
    /// # Errors
    /// The host's.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(path)?;
        let mut journal = Self::map(&file)?;
        journal.path = Some(path.to_owned());
        Ok(journal)
    }

    /// The name of its file.
    pub(crate) fn place(&self) -> String {
        self.path
            .as_ref()
            .map_or_else(String::new, |path| path.display().to_string())
    }

    /// Removes its file: the image needs no journal any more.
    pub(crate) fn remove(&self) {
        self.begin(0);
        if let Some(path) = &self.path {
            // A journal that stays is not believed.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Maps the journal in `file`, which is made as long as it must be. What it holds is forgotten unless it was written
    /// since the host was started, by a process of this version.
    ///
    /// # Errors
    /// The host's: no space, no memory.
    pub fn map(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() != JOURNAL_BYTES {
            rustix::fs::ftruncate(file, 0)?;
            // Allocated, because a page that the file system has no room for would kill the process.
            rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, JOURNAL_BYTES)?;
        }
        // SAFETY: a new mapping, wherever the kernel likes.
        let memory = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                JOURNAL_BYTES as usize,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::SHARED,
                file,
                0,
            )?
        };
        let words = NonNull::new(memory.cast::<u64>()).ok_or_else(|| io::Error::from_raw_os_error(12))?;
        let journal = Self {
            words,
            start: Cell::new(0),
            end: Cell::new(0),
            promised: Cell::new(0),
            path: None,
        };
        let head = [MAGIC, VERSION | (RECORD_WORDS * 8) << 32];
        let head = [head[0], head[1], boot_id()?[0], boot_id()?[1]];
        let (start, end) = (journal.load(AT_START), journal.load(AT_END));
        let is_valid = (0..4).all(|at| journal.load(at) == head[at as usize])
            && journal.load(5) == RECORDS
            && start <= end
            && end - start <= RECORDS;
        if is_valid {
            journal.start.set(start);
            journal.end.set(end);
        } else {
            journal.store(AT_SESSION, 0);
            journal.store(AT_START, 0);
            journal.store(AT_END, 0);
            journal.store(5, RECORDS);
            (0..4).for_each(|at| journal.store(at, head[at as usize]));
        }
        Ok(journal)
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        debug_assert!(at < JOURNAL_BYTES / 8);
        // SAFETY: inside the mapping, which lives as long as this does; aligned; and only ever used atomically.
        unsafe { AtomicU64::from_ptr(self.words.as_ptr().add(at as usize)) }
    }

    fn load(&self, at: u64) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    /// In program order: who reads after the process was killed sees a prefix of its stores.
    fn store(&self, at: u64, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }

    /// The session that the records are of; 0 if none.
    pub(crate) fn session(&self) -> u64 {
        self.load(AT_SESSION)
    }

    /// Forgets all records and begins a session.
    pub(crate) fn begin(&self, session: u64) {
        self.store(AT_SESSION, 0);
        self.forget(self.end.get());
        self.store(AT_SESSION, session);
    }

    /// How many more records fit.
    fn free(&self) -> u64 {
        RECORDS - (self.end.get() - self.start.get())
    }

    /// Room for so many records; `None` if a commit must make some first.
    pub(crate) fn room(&self, records: u64) -> Option<Room<'_>> {
        if self.free() < self.promised.get() + records {
            return None;
        }
        self.promised.set(self.promised.get() + records);
        Some(Room { journal: self, records })
    }

    /// The end of the records as they are now.
    pub(crate) fn end(&self) -> u64 {
        self.end.get()
    }

    /// Forgets the records before `end`: the image has them.
    pub(crate) fn forget(&self, end: u64) {
        self.start.set(end.max(self.start.get()));
        self.store(AT_START, self.start.get());
    }

    /// Notes a change.
    ///
    /// # Panics
    /// If there is no room.
    pub(crate) fn append(&self, record: Record) {
        assert!(
            self.free() > 0,
            "a change of the mapping is not noted: the journal is full"
        );
        let at = Self::slot(self.end.get());
        let Record {
            cluster,
            count,
            old,
            new,
        } = record;
        for (index, word) in [cluster, count, old.word, old.bitmap, new.word, new.bitmap]
            .into_iter()
            .enumerate()
        {
            self.store(at + index as u64, word);
        }
        // Killed before this, the record was never there, and its request has not completed.
        self.end.set(self.end.get() + 1);
        self.store(AT_END, self.end.get());
    }

    /// All records, oldest first.
    pub(crate) fn records(&self) -> Vec<Record> {
        let word = |at, index| self.load(at + index);
        (self.start.get()..self.end.get())
            .map(Self::slot)
            .map(|at| Record {
                cluster: word(at, 0),
                count: word(at, 1),
                old: Entry {
                    word: word(at, 2),
                    bitmap: word(at, 3),
                },
                new: Entry {
                    word: word(at, 4),
                    bitmap: word(at, 5),
                },
            })
            .collect()
    }

    fn slot(number: u64) -> u64 {
        HEADER_WORDS + number % RECORDS * RECORD_WORDS
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.words.as_ptr().cast(), JOURNAL_BYTES as usize) };
    }
}

/// Which start of the host this is.
fn boot_id() -> io::Result<[u64; 2]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok([(id >> 64) as u64, id as u64])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u64) -> Record {
        Record {
            cluster: number,
            count: 1 + number % 3,
            old: Entry {
                word: number * 7,
                bitmap: 0,
            },
            new: Entry {
                word: number * 11,
                bitmap: number,
            },
        }
    }

    #[test]
    fn a_journal_outlives_its_process() {
        let file = tempfile::tempfile().expect("a file");
        let journal = Journal::map(&file).expect("it can be mapped");
        journal.begin(77);
        (0..RECORDS).for_each(|number| journal.append(record(number)));
        assert!(journal.room(1).is_none());
        journal.forget(RECORDS - 3);
        (RECORDS..RECORDS + 5).for_each(|number| journal.append(record(number)));
        drop(journal);
        let journal = Journal::map(&file).expect("it can be mapped again");
        assert_eq!(journal.session(), 77);
        let expected: Vec<Record> = (RECORDS - 3..RECORDS + 5).map(record).collect();
        assert_eq!(journal.records(), expected);
        journal.begin(78);
        assert!(Journal::map(&file).expect("once more").records().is_empty());
    }
}
