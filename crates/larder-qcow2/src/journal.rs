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
//!      16  the host's boot ID, 16 bytes           32  session and commit, u64    40  records that fit, u64
//!      48  first valid record, u64                56  end of the valid records, u64
//!      64  bytes of the image's identity, u64     72  bytes of its place, u64
//!      80  identity, then place, up to byte 4096
//!    4096  records: record n lies at 4096 + n % fit * 64
//!          guest cluster, count, old entry (2 words), new entry (2 words), 2 words of padding
//! ```
//! All numbers have the host's byte order: the journal never leaves it. The session also stands in the image's header,
//! in autoclear bits, which every other program that opens the image for writing clears, and with it the number of the
//! last commit, which each commit changes before the image's tables. A journal is only believed if the image has its
//! session and commit (an older copy of the image, put back in its place, has not), and if what the image maps is what
//! the journal says it did before. The session begins with 16 bits of the host's boot ID: who misses the journal of a
//! session of this boot has lost something, who misses one of an earlier boot has not, for the guest was lost with it.
//!
//! While a process has a journal in use, its file is locked (`flock`), so that nobody sweeps it away.
//!
//! How it fails: without a journal each change is committed before its request completes, which is safe and slow.

use std::cell::Cell;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder_block::SizeChanges;
use larder_block::boot::is_tmpfs;
use larder_block::lock_wait::{LockKind, LockWait};
use rustix::io::Errno;

use crate::entry::Entry;
use crate::header::AUTOCLEAR_SESSION;

const MAGIC: u64 = u64::from_le_bytes(*b"LRDRJRNL");
const VERSION: u64 = 3;
const RECORD_WORDS: u64 = 8;
const HEADER_WORDS: u64 = 512;
/// 512 KiB of records; more changes than that wait for a commit.
const RECORDS: u64 = 1 << 13;
/// Bytes of a journal.
pub const JOURNAL_BYTES: u64 = (HEADER_WORDS + RECORDS * RECORD_WORDS) * 8;

/// The interval between two tries to lock a journal.
const LOCK_STEP: Duration = Duration::from_millis(5);

const AT_SESSION: u64 = 4;
const AT_START: u64 = 6;
const AT_END: u64 = 7;
const AT_IDENTITY_LEN: u64 = 8;
const AT_PLACE_LEN: u64 = 9;
const AT_NAMES: u64 = 10;
/// Bytes for identity and place together.
const NAMES_BYTES: usize = ((HEADER_WORDS - AT_NAMES) * 8) as usize;

/// A change of the mapping: `count` guest clusters from `cluster` on, which were a run that began with `old`, are one
/// that begins with `new`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) cluster: u64,
    pub(crate) count: u64,
    pub(crate) old: Entry,
    pub(crate) new: Entry,
}

/// Which image a journal is of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageId {
    /// What no other image of the host has, not even one that comes after it; empty if there is no such thing.
    pub identity: Vec<u8>,
    /// Where it was, for people and for who wants to know whether it is still there.
    pub place: Vec<u8>,
}

/// What a journal says, read without changing it.
#[derive(Clone, Debug)]
pub struct Left {
    /// The session and commit that the changes follow; 0 if none.
    pub session: u64,
    /// Of which image.
    pub image: ImageId,
    /// How many changes are noted.
    pub changes: u64,
    start: u64,
    pub(crate) records: Vec<Record>,
}

impl Left {
    /// Whether the changes are of the image whose header has `session`.
    pub fn fits(&self, session: u64) -> bool {
        fits(self.session, session)
    }

    /// Reads what is in the journal `file`, without the changes; `None` if it is none of this version, or not of this
    /// start of the host.
    ///
    /// # Errors
    /// The host's.
    pub fn head(file: &File) -> io::Result<Option<Self>> {
        if file.metadata()?.len() != JOURNAL_BYTES {
            return Ok(None);
        }
        let mut bytes = vec![0; HEADER_WORDS as usize * 8];
        file.read_exact_at(&mut bytes, 0)?;
        let words = native_words(&bytes);
        if !is_valid(is_of_this_start(file, [words[2], words[3]])?, |at| words[at as usize]) {
            return Ok(None);
        }
        let identity_len = usize::try_from(words[AT_IDENTITY_LEN as usize]).unwrap_or(usize::MAX);
        let place_len = usize::try_from(words[AT_PLACE_LEN as usize]).unwrap_or(usize::MAX);
        let names = &bytes[AT_NAMES as usize * 8..];
        let Some((identity, rest)) = names.split_at_checked(identity_len) else {
            return Ok(None);
        };
        let start = words[AT_START as usize];
        Ok(Some(Self {
            session: words[AT_SESSION as usize],
            image: ImageId {
                identity: identity.to_vec(),
                place: rest.get(..place_len).unwrap_or_default().to_vec(),
            },
            changes: words[AT_END as usize] - start,
            start,
            records: Vec::new(),
        }))
    }

    /// The guest clusters whose mapping the changes are of, if they were read: the first, and how many.
    pub fn guest_clusters(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.records.iter().map(|record| (record.cluster, record.count))
    }

    /// Reads what is in the journal `file`, with the changes. It is no longer in use.
    ///
    /// # Errors
    /// The host's.
    pub fn read(file: &File) -> io::Result<Option<Self>> {
        let Some(mut left) = Self::head(file)? else {
            return Ok(None);
        };
        let mut bytes = vec![0; (JOURNAL_BYTES - HEADER_WORDS * 8) as usize];
        file.read_exact_at(&mut bytes, HEADER_WORDS * 8)?;
        let words = native_words(&bytes);
        left.records = (left.start..left.start + left.changes)
            .map(|number| Record::of(|index| words[(number % RECORDS * RECORD_WORDS + index) as usize]))
            .collect();
        Ok(Some(left))
    }
}

fn native_words(bytes: &[u8]) -> Vec<u64> {
    let words = bytes.chunks_exact(8).map(|bytes| {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        u64::from_ne_bytes(word)
    });
    words.collect()
}

/// Whether a journal of the boot ID `boot` was written since the host was started. One on tmpfs was, whatever ID that was:
/// containers have one of their own, which a service of theirs does not see if it has a `/proc` of its own.
fn is_of_this_start(file: &File, boot: [u64; 2]) -> io::Result<bool> {
    Ok(is_tmpfs(&rustix::fs::fstatfs(file)?) || boot == boot_id()?)
}

/// Whether the words of a header are of this version, and make sense.
fn is_valid(is_of_this_start: bool, word: impl Fn(u64) -> u64) -> bool {
    let (start, end) = (word(AT_START), word(AT_END));
    is_of_this_start
        && head([word(2), word(3)])
            .into_iter()
            .zip(0..)
            .all(|(expected, at)| word(at) == expected)
        && word(5) == RECORDS
        && start <= end
        && end - start <= RECORDS
}

/// How a journal begins.
fn head(boot: [u64; 2]) -> [u64; 4] {
    [MAGIC, VERSION | (RECORD_WORDS * 8) << 32, boot[0], boot[1]]
}

impl Record {
    fn of(word: impl Fn(u64) -> u64) -> Self {
        Self {
            cluster: word(0),
            count: word(1),
            old: Entry {
                word: word(2),
                bitmap: word(3),
            },
            new: Entry {
                word: word(4),
                bitmap: word(5),
            },
        }
    }
}

/// Locks a journal's file. A process that looks whether it can be removed has it locked for a moment, and a server that was
/// killed until the kernel has taken it apart.
fn lock(file: &File) -> io::Result<()> {
    const BUSY: &str = "a server of this image is running";
    let mut wait = LockWait::new(LockKind::Flock);
    loop {
        match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if wait.goes_on(file.as_fd(), &format_args!("journal: {BUSY}")) => {
                std::thread::sleep(LOCK_STEP);
            }
            Err(Errno::WOULDBLOCK) => return Err(io::Error::new(io::ErrorKind::ResourceBusy, BUSY)),
            result => return Ok(result?),
        }
    }
}

/// A number for a session, in its place among the autoclear bits: 16 bits tell this start of the host from others, 16
/// this session, 24 its commits, whose first number does not matter.
pub(crate) fn new_session() -> u64 {
    let random = RandomState::new().build_hasher().finish();
    let boot = boot_id().map_or(random, |id| id[1]);
    boot << 48 | 1 << 32 | (random >> 16) & AUTOCLEAR_SESSION
}

/// The session with its next commit.
fn next_commit(session: u64) -> u64 {
    const COMMITS: u64 = AUTOCLEAR_SESSION & 0xffff_ffff;
    let one = 1 << COMMITS.trailing_zeros();
    session & !COMMITS | session.wrapping_add(one) & COMMITS
}

/// Whether a journal that has `noted` is of the image that has `found`: the commit that was under way may be there.
fn fits(noted: u64, found: u64) -> bool {
    found != 0 && noted != 0 && (found == noted || found == next_commit(noted))
}

/// Whether a session was begun since the host was started; one of an earlier start, or of another host, is taken for
/// one of this with a chance of 1 in 65536.
pub fn is_of_this_boot(session: u64) -> bool {
    session != 0 && boot_id().is_ok_and(|id| id[1] << 48 == session & 0xffff << 48)
}

/// A journal in memory that outlives the process.
pub struct Journal {
    words: NonNull<u64>,
    start: Cell<u64>,
    end: Cell<u64>,
    /// Records that somebody is going to append.
    promised: Cell<u64>,
    /// Its file, locked, to be removed when the image is left tidy.
    file: Option<(PathBuf, File)>,
    /// Announces that it has become half full.
    pub(crate) half_full: Rc<SizeChanges>,
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
    /// Opens or makes the journal of an image at `path`, which should be on tmpfs, for nobody else to read. What is there
    /// of another image is forgotten.
    ///
    /// # Errors
    /// The host's; `ResourceBusy` if another process keeps it.
    pub fn open(path: &Path, image: &ImageId) -> io::Result<Self> {
        let file = Self::lock(path)?;
        let left = Left::head(&file)?;
        let mut journal = Self::map(&file)?;
        if left.is_none_or(|left| left.image.identity != image.identity) {
            journal.begin(0);
        }
        journal.name(image);
        journal.file = Some((path.to_owned(), file));
        Ok(journal)
    }

    /// Opens or makes the file of a journal, for nobody else to use as long as it is open.
    ///
    /// # Errors
    /// The host's; `ResourceBusy` if another process keeps it.
    pub fn lock(path: &Path) -> io::Result<File> {
        loop {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
                .open(path)?;
            lock(&file)?;
            if file.metadata()?.nlink() > 0 {
                return Ok(file);
            }
        }
    }

    /// Notes which image it is of; a place that is too long is left out.
    fn name(&self, image: &ImageId) {
        let mut bytes = image.identity.clone();
        let fits = image.identity.len() + image.place.len() <= NAMES_BYTES;
        let place: &[u8] = if fits { &image.place } else { &[] };
        bytes.extend_from_slice(place);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        for (at, word) in (AT_NAMES..).zip(native_words(&bytes)) {
            self.store(at, word);
        }
        self.store(AT_IDENTITY_LEN, image.identity.len() as u64);
        self.store(AT_PLACE_LEN, place.len() as u64);
    }

    /// The name of its file.
    pub(crate) fn place(&self) -> String {
        self.file
            .as_ref()
            .map_or_else(String::new, |(path, _)| path.display().to_string())
    }

    /// Removes its file: the image needs no journal any more.
    pub(crate) fn remove(&self) {
        self.begin(0);
        if let Some((path, _)) = &self.file {
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
            file: None,
            half_full: Rc::default(),
        };
        let is_of_this_start = is_of_this_start(file, [journal.load(2), journal.load(3)])?;
        if is_valid(is_of_this_start, |at| journal.load(at)) {
            journal.start.set(journal.load(AT_START));
            journal.end.set(journal.load(AT_END));
        } else {
            journal.store(AT_SESSION, 0);
            journal.store(AT_START, 0);
            journal.store(AT_END, 0);
            journal.store(5, RECORDS);
            (0..)
                .zip(head(boot_id()?))
                .for_each(|(at, word)| journal.store(at, word));
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

    /// Whether the records are of the image whose header has `session`.
    pub(crate) fn fits(&self, session: u64) -> bool {
        fits(self.load(AT_SESSION), session)
    }

    /// Notes the session and commit that the image has, which the journal fits.
    pub(crate) fn go_on(&self, session: u64) {
        self.store(AT_SESSION, session);
    }

    /// What the image is to have before the next commit changes its tables.
    pub(crate) fn next_commit(&self) -> u64 {
        next_commit(self.load(AT_SESSION))
    }

    /// A commit, whose number the image has, is done with the records before `end`.
    pub(crate) fn committed(&self, session: u64, end: u64) {
        self.forget(end);
        self.store(AT_SESSION, session);
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

    /// Returns whether a commit is due, so that no request has to wait for room.
    pub(crate) fn is_half_full(&self) -> bool {
        self.free() <= RECORDS / 2
    }

    /// The end of the records as they are now.
    pub(crate) fn end(&self) -> u64 {
        self.end.get()
    }

    /// Forgets the records before `end`.
    fn forget(&self, end: u64) {
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
        if self.free() == RECORDS / 2 {
            self.half_full.announce();
        }
    }

    /// All records, oldest first.
    pub(crate) fn records(&self) -> Vec<Record> {
        (self.start.get()..self.end.get())
            .map(Self::slot)
            .map(|at| Record::of(|index| self.load(at + index)))
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
    let id = larder_block::boot::boot_id()?;
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
        assert!(journal.room(1).is_none() && journal.is_half_full());
        assert_eq!(journal.half_full.generation(), 1);
        journal.forget(RECORDS - 3);
        assert!(!journal.is_half_full());
        (RECORDS..RECORDS + 5).for_each(|number| journal.append(record(number)));
        drop(journal);
        let journal = Journal::map(&file).expect("it can be mapped again");
        assert!(journal.fits(77));
        let expected: Vec<Record> = (RECORDS - 3..RECORDS + 5).map(record).collect();
        assert_eq!(journal.records(), expected);
        let left = Left::read(&file).expect("it is read").expect("it is a journal");
        assert_eq!((left.session, left.changes), (77, RECORDS - 3 + 5 - (RECORDS - 3) + 3));
        assert_eq!(left.records, expected);
        journal.begin(78);
        assert!(Journal::map(&file).expect("once more").records().is_empty());
    }
}
