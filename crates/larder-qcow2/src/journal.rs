//! The journal: changes of the mapping since the last commit, in a file that outlives a killed process.
//!
//! A guest outlives its disk's server: it continues with the next one, and every completed write must be there,
//! flushed or not. The data is in the image file, but the mapping to it was in the dead process's memory. So each
//! change is also recorded in memory that the host keeps, a file on tmpfs, before the request completes; the next
//! process replays the changes. That costs a copy of 64 bytes. A power loss destroys the journal together with the
//! guest, which then can expect flushed data only.
//!
//! ```text
//! byte  0  magic "LRDRJRNL"    8  version, u32    12  bytes of a record, u32
//!      16  the host's boot ID, 16 bytes           32  session and commit, u64    40  records that fit, u64
//!      48  first valid record, u64                56  end of the valid records, u64
//!      64  bytes of the image's identity, u64     72  bytes of its path, u64
//!      80  identity, then path, up to byte 4096
//!    4096  records: record n lies at 4096 + n % fit * 64
//!          guest cluster, count, old entry (2 words), new entry (2 words), 2 words of padding
//! ```
//!
//! All numbers have the host's byte order: the journal never leaves it. The image's header has the session too, in
//! autoclear bits, which every other program that opens the image for writing clears, and with it the number of the
//! last commit, which each commit changes before the image's tables. A journal is valid only if the image has its
//! session and commit (an older copy of the image, restored in its place, does not), and if the image's mapping is
//! the journal's old mapping. The session begins with 16 bits of the host's boot ID. So a missing journal of a
//! session of this boot means lost changes; one of an earlier boot does not, because the guest was lost with it.
//!
//! While a process uses a journal, its file is locked (`flock`), so that no other process removes it.
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

use crate::entry::L2Entry;
use crate::header::AUTOCLEAR_SESSION;

const MAGIC: u64 = u64::from_le_bytes(*b"LRDRJRNL");
const VERSION: u64 = 3;
const RECORD_WORDS: u64 = 8;
const HEADER_WORDS: u64 = 512;
/// The maximum number of records (512 KiB); further changes wait for a commit.
const RECORDS_MAX: u64 = 1 << 13;
/// The length of a journal in bytes.
pub const JOURNAL_BYTES: u64 = (HEADER_WORDS + RECORDS_MAX * RECORD_WORDS) * 8;

/// The interval between two attempts to lock a journal.
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(5);

const WORD_SESSION: u64 = 4;
const WORD_START: u64 = 6;
const WORD_END: u64 = 7;
const WORD_IDENTITY_LEN: u64 = 8;
const WORD_PATH_LEN: u64 = 9;
const WORD_NAMES: u64 = 10;
/// The space for identity and path together, in bytes.
const NAMES_BYTES_MAX: usize = ((HEADER_WORDS - WORD_NAMES) * 8) as usize;

/// A change of the mapping: the `count` guest clusters from `cluster` on, a run that began with `old`, become a run
/// that begins with `new`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) cluster: u64,
    pub(crate) count: u64,
    pub(crate) old: L2Entry,
    pub(crate) new: L2Entry,
}

/// The identity of a journal's image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageId {
    /// Bytes that no other image of the host has, not even a later one; empty if there are no such bytes.
    pub identity: Vec<u8>,
    /// The path of the image, for messages, and to check that the image still exists.
    pub path: Vec<u8>,
}

/// The content of a journal, read without changing it.
#[derive(Clone, Debug)]
pub struct JournalContents {
    /// The session and commit that the changes follow; 0 if none.
    pub session: u64,
    /// The image of the changes.
    pub image: ImageId,
    /// The number of recorded changes.
    pub changes: u64,
    start: u64,
    pub(crate) records: Vec<Record>,
}

impl JournalContents {
    /// Returns true if the changes belong to the image whose header has `session`.
    pub fn fits(&self, session: u64) -> bool {
        session_matches(self.session, session)
    }

    /// Reads the journal `file` without its changes. Returns `None` if it is no journal of this version, or not from
    /// this boot of the host.
    ///
    /// # Errors
    /// The host's error.
    pub fn read_header(file: &File) -> io::Result<Option<Self>> {
        if file.metadata()?.len() != JOURNAL_BYTES {
            return Ok(None);
        }
        let mut bytes = vec![0; HEADER_WORDS as usize * 8];
        file.read_exact_at(&mut bytes, 0)?;
        let words = native_words(&bytes);
        if !is_valid(was_written_since_boot(file, [words[2], words[3]])?, |at| words[at as usize]) {
            return Ok(None);
        }
        let identity_len = usize::try_from(words[WORD_IDENTITY_LEN as usize]).unwrap_or(usize::MAX);
        let path_len = usize::try_from(words[WORD_PATH_LEN as usize]).unwrap_or(usize::MAX);
        let names = &bytes[WORD_NAMES as usize * 8..];
        let Some((identity, rest)) = names.split_at_checked(identity_len) else {
            return Ok(None);
        };
        let start = words[WORD_START as usize];
        Ok(Some(Self {
            session: words[WORD_SESSION as usize],
            image: ImageId { identity: identity.to_vec(), path: rest.get(..path_len).unwrap_or_default().to_vec() },
            changes: words[WORD_END as usize] - start,
            start,
            records: Vec::new(),
        }))
    }

    /// Returns the guest clusters whose mapping is changed, if the changes were read: the first, and the count.
    pub fn guest_clusters(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.records.iter().map(|record| (record.cluster, record.count))
    }

    /// Reads the journal `file` with its changes. It must not be in use any more.
    ///
    /// # Errors
    /// The host's error.
    pub fn read(file: &File) -> io::Result<Option<Self>> {
        let Some(mut contents) = Self::read_header(file)? else {
            return Ok(None);
        };
        let mut bytes = vec![0; (JOURNAL_BYTES - HEADER_WORDS * 8) as usize];
        file.read_exact_at(&mut bytes, HEADER_WORDS * 8)?;
        let words = native_words(&bytes);
        contents.records = (contents.start..contents.start + contents.changes)
            .map(|number| Record::of(|index| words[(number % RECORDS_MAX * RECORD_WORDS + index) as usize]))
            .collect();
        Ok(Some(contents))
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

/// Returns true if a journal with the boot ID `boot` was written since the host was booted. One on tmpfs always was:
/// containers have their own boot ID, which a service in them does not see if it has its own `/proc`.
fn was_written_since_boot(file: &File, boot: [u64; 2]) -> io::Result<bool> {
    Ok(is_tmpfs(&rustix::fs::fstatfs(file)?) || boot == boot_id()?)
}

/// Returns true if the words of a header are of this version, and valid.
fn is_valid(is_since_boot: bool, word: impl Fn(u64) -> u64) -> bool {
    let (start, end) = (word(WORD_START), word(WORD_END));
    is_since_boot
        && header_words([word(2), word(3)]).into_iter().zip(0..).all(|(expected, at)| word(at) == expected)
        && word(5) == RECORDS_MAX
        && start <= end
        && end - start <= RECORDS_MAX
}

/// Returns the first words of a journal.
fn header_words(boot: [u64; 2]) -> [u64; 4] {
    [MAGIC, VERSION | (RECORD_WORDS * 8) << 32, boot[0], boot[1]]
}

impl Record {
    fn of(word: impl Fn(u64) -> u64) -> Self {
        Self {
            cluster: word(0),
            count: word(1),
            old: L2Entry { word: word(2), bitmap: word(3) },
            new: L2Entry { word: word(4), bitmap: word(5) },
        }
    }
}

/// Locks a journal's file. Another process that checks whether the file can be removed holds the lock for a moment,
/// and a killed server until the kernel has ended it.
fn lock(file: &File) -> io::Result<()> {
    const BUSY_TEXT: &str = "a server of this image is running";
    let mut wait = LockWait::new(LockKind::Flock);
    loop {
        match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if wait.should_retry(file.as_fd(), &format_args!("journal: {BUSY_TEXT}")) => {
                std::thread::sleep(LOCK_RETRY_DELAY);
            }
            Err(Errno::WOULDBLOCK) => return Err(io::Error::new(io::ErrorKind::ResourceBusy, BUSY_TEXT)),
            result => return Ok(result?),
        }
    }
}

/// Returns a number for a session, at its position in the autoclear bits: 16 bits identify this boot of the host, 16
/// the session, 24 its commits, whose first number is arbitrary.
pub(crate) fn new_session() -> u64 {
    let random = RandomState::new().build_hasher().finish();
    let boot = boot_id().map_or(random, |id| id[1]);
    boot << 48 | 1 << 32 | (random >> 16) & AUTOCLEAR_SESSION
}

/// Returns `session` with the number of its next commit.
fn next_commit(session: u64) -> u64 {
    const COMMITS: u64 = AUTOCLEAR_SESSION & 0xffff_ffff;
    let one = 1 << COMMITS.trailing_zeros();
    session & !COMMITS | session.wrapping_add(one) & COMMITS
}

/// Returns true if a journal with the session `recorded` belongs to an image with the session `found`. The image may
/// have the number of the commit that was in progress.
fn session_matches(recorded: u64, found: u64) -> bool {
    found != 0 && recorded != 0 && (found == recorded || found == next_commit(recorded))
}

/// Returns true if a session was begun since the host was booted. A session of an earlier boot, or of another host,
/// is mistaken for one of this boot with a probability of 1 in 65536.
pub fn is_of_this_boot(session: u64) -> bool {
    session != 0 && boot_id().is_ok_and(|id| id[1] << 48 == session & 0xffff << 48)
}

/// A journal in memory that outlives the process.
pub struct Journal {
    words: NonNull<u64>,
    start: Cell<u64>,
    end: Cell<u64>,
    /// The number of reserved records that are not appended yet.
    reserved: Cell<u64>,
    /// The locked file, which is removed when the image is closed cleanly.
    file: Option<(PathBuf, File)>,
    /// Announces that the journal has become half full.
    pub(crate) half_full: Rc<SizeChanges>,
}

/// Space for records; the reservation ends when this value is dropped.
pub(crate) struct JournalReservation<'a> {
    journal: &'a Journal,
    records: u64,
}

impl Drop for JournalReservation<'_> {
    fn drop(&mut self) {
        let reserved = &self.journal.reserved;
        reserved.set(reserved.get() - self.records);
    }
}

impl Journal {
    /// Opens or creates the journal of an image at `path`, which should be on tmpfs, readable by this user only.
    /// Records of another image there are discarded.
    ///
    /// # Errors
    /// The host's error; `ResourceBusy` if another process uses the journal.
    pub fn open(path: &Path, image: &ImageId) -> io::Result<Self> {
        let file = Self::lock(path)?;
        let contents = JournalContents::read_header(&file)?;
        let mut journal = Self::map(&file)?;
        if contents.is_none_or(|left| left.image.identity != image.identity) {
            journal.begin_session(0);
        }
        journal.set_image(image);
        journal.file = Some((path.to_owned(), file));
        Ok(journal)
    }

    /// Opens or creates the file of a journal, and locks it as long as it is open.
    ///
    /// # Errors
    /// The host's error; `ResourceBusy` if another process uses the journal.
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

    /// Records the journal's image; a path that is too long is omitted.
    fn set_image(&self, image: &ImageId) {
        let mut bytes = image.identity.clone();
        let fits = image.identity.len() + image.path.len() <= NAMES_BYTES_MAX;
        let path: &[u8] = if fits { &image.path } else { &[] };
        bytes.extend_from_slice(path);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        for (at, word) in (WORD_NAMES..).zip(native_words(&bytes)) {
            self.store(at, word);
        }
        self.store(WORD_IDENTITY_LEN, image.identity.len() as u64);
        self.store(WORD_PATH_LEN, path.len() as u64);
    }

    /// Returns the path of the journal's file.
    pub(crate) fn path(&self) -> String {
        self.file.as_ref().map_or_else(String::new, |(path, _)| path.display().to_string())
    }

    /// Removes the journal's file: the image needs no journal any more.
    pub(crate) fn remove(&self) {
        self.begin_session(0);
        if let Some((path, _)) = &self.file {
            // A file that cannot be removed is an invalid journal.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Maps the journal in `file`, which is extended to its full length. The content is discarded unless it was
    /// written since the host was booted, by a process of this version.
    ///
    /// # Errors
    /// The host's error: no space, no memory.
    pub fn map(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() != JOURNAL_BYTES {
            rustix::fs::ftruncate(file, 0)?;
            // Allocated now, because a page without space in the file system would kill the process.
            rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, JOURNAL_BYTES)?;
        }
        // SAFETY: a new mapping, at an address of the kernel's choice.
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
            reserved: Cell::new(0),
            file: None,
            half_full: Rc::default(),
        };
        let is_since_boot = was_written_since_boot(file, [journal.load(2), journal.load(3)])?;
        if is_valid(is_since_boot, |at| journal.load(at)) {
            journal.start.set(journal.load(WORD_START));
            journal.end.set(journal.load(WORD_END));
        } else {
            journal.store(WORD_SESSION, 0);
            journal.store(WORD_START, 0);
            journal.store(WORD_END, 0);
            journal.store(5, RECORDS_MAX);
            (0..).zip(header_words(boot_id()?)).for_each(|(at, word)| journal.store(at, word));
        }
        Ok(journal)
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        debug_assert!(at < JOURNAL_BYTES / 8);
        // SAFETY: inside the mapping, which lives as long as this value; aligned; and only ever accessed atomically.
        unsafe { AtomicU64::from_ptr(self.words.as_ptr().add(at as usize)) }
    }

    fn load(&self, at: u64) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    /// Stores in program order: a process that reads after this one was killed sees a prefix of its stores.
    fn store(&self, at: u64, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }

    /// Returns true if the records belong to the image whose header has `session`.
    pub(crate) fn fits(&self, session: u64) -> bool {
        session_matches(self.load(WORD_SESSION), session)
    }

    /// Records the session and commit of the image, to which the journal belongs.
    pub(crate) fn set_session(&self, session: u64) {
        self.store(WORD_SESSION, session);
    }

    /// Returns the session and commit that the image must get before the next commit changes its tables.
    pub(crate) fn next_commit(&self) -> u64 {
        next_commit(self.load(WORD_SESSION))
    }

    /// Records a completed commit, whose number the image has, and discards the records before `end`.
    pub(crate) fn committed(&self, session: u64, end: u64) {
        self.discard_before(end);
        self.store(WORD_SESSION, session);
    }

    /// Discards all records and begins a session.
    pub(crate) fn begin_session(&self, session: u64) {
        self.store(WORD_SESSION, 0);
        self.discard_before(self.end.get());
        self.store(WORD_SESSION, session);
    }

    /// Returns the number of records that still fit.
    fn free_records(&self) -> u64 {
        RECORDS_MAX - (self.end.get() - self.start.get())
    }

    /// Reserves space for `records` records; `None` if a commit must free some first.
    pub(crate) fn reserve(&self, records: u64) -> Option<JournalReservation<'_>> {
        if self.free_records() < self.reserved.get() + records {
            return None;
        }
        self.reserved.set(self.reserved.get() + records);
        Some(JournalReservation { journal: self, records })
    }

    /// Returns true if a commit is due, so that no request has to wait for space.
    pub(crate) fn is_half_full(&self) -> bool {
        self.free_records() <= RECORDS_MAX / 2
    }

    /// Returns the present end of the records.
    pub(crate) fn end(&self) -> u64 {
        self.end.get()
    }

    /// Discards the records before `end`.
    fn discard_before(&self, end: u64) {
        self.start.set(end.max(self.start.get()));
        self.store(WORD_START, self.start.get());
    }

    /// Appends a change.
    ///
    /// # Panics
    /// If there is no space.
    pub(crate) fn append(&self, record: Record) {
        assert!(self.free_records() > 0, "cannot record a change of the mapping: the journal is full");
        let at = Self::slot(self.end.get());
        let Record { cluster, count, old, new } = record;
        for (index, word) in [cluster, count, old.word, old.bitmap, new.word, new.bitmap].into_iter().enumerate() {
            self.store(at + index as u64, word);
        }
        // After a kill before this store, the record does not exist, and its request has not completed.
        self.end.set(self.end.get() + 1);
        self.store(WORD_END, self.end.get());
        if self.free_records() == RECORDS_MAX / 2 {
            self.half_full.announce();
        }
    }

    /// Returns all records, oldest first.
    pub(crate) fn records(&self) -> Vec<Record> {
        (self.start.get()..self.end.get()).map(Self::slot).map(|at| Record::of(|index| self.load(at + index))).collect()
    }

    fn slot(number: u64) -> u64 {
        HEADER_WORDS + number % RECORDS_MAX * RECORD_WORDS
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.words.as_ptr().cast(), JOURNAL_BYTES as usize) };
    }
}

/// Returns the boot ID of the host as two words.
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
            old: L2Entry { word: number * 7, bitmap: 0 },
            new: L2Entry { word: number * 11, bitmap: number },
        }
    }

    #[test]
    fn journal_outlives_its_process() {
        let file = tempfile::tempfile().expect("a file");
        let journal = Journal::map(&file).expect("it can be mapped");
        journal.begin_session(77);
        (0..RECORDS_MAX).for_each(|number| journal.append(record(number)));
        assert!(journal.reserve(1).is_none() && journal.is_half_full());
        assert_eq!(journal.half_full.generation(), 1);
        journal.discard_before(RECORDS_MAX - 3);
        assert!(!journal.is_half_full());
        (RECORDS_MAX..RECORDS_MAX + 5).for_each(|number| journal.append(record(number)));
        drop(journal);
        let journal = Journal::map(&file).expect("it can be mapped again");
        assert!(journal.fits(77));
        let expected: Vec<Record> = (RECORDS_MAX - 3..RECORDS_MAX + 5).map(record).collect();
        assert_eq!(journal.records(), expected);
        let contents = JournalContents::read(&file).expect("it is read").expect("it is a journal");
        assert_eq!((contents.session, contents.changes), (77, RECORDS_MAX - 3 + 5 - (RECORDS_MAX - 3) + 3));
        assert_eq!(contents.records, expected);
        journal.begin_session(78);
        assert!(Journal::map(&file).expect("once more").records().is_empty());
    }
}
