//! The page of a mark: 64-bit words in the byte order of the host, which alone reads them.
//!
//! ```text
//! word  0  magic, written last when the page is set up
//!       1  version
//!     2-3  boot ID of the host
//!       4  the host's clock minus the time since boot, in ns, when the times below were stored
//!       5  writes begun             6  writes ended
//!       7  sectors begun            8  sectors ended
//!       9  time when the last write ended, in ns since 1970
//!      10  time of the last heartbeat, in ns since 1970
//!      11  the largest size that writes begun so far may give the file
//!      12  carried finding: found by earlier openings, and not yet acted upon by any cache
//!      13  foreign finding: changes by others that this process has seen
//!      14  1 while the sectors counted by this process are not exact
//!      15  number of captures; the last one is in slot (number % 2)
//!      16  use of the image that the mark belongs to, as the caller numbers it; 0: none
//!   32-47  slot 0              48-63  slot 1
//! slot: writes begun, sectors begun, clock (as word 4), inode, size, mtime, ctime, diskseq, sectors written,
//!       sectors written through the whole disk, presence (bit 0: file times, bit 1: disk counters)
//! ```
//!
//! A process may be killed between any two stores. A page without its magic number is no mark. A capture goes to the
//! slot that is not in use, and the store of word 15 puts it into use, so a killed process leaves one whole capture
//! or none.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::verdict::{Capture, Finding, RecordFinding, Snapshot};
use crate::opener::{DiskCounters, FileTimes};

/// The size of a mark in bytes: one page.
pub(super) const PAGE_BYTES: usize = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"LrdrMark");
const VERSION: u64 = 1;
const WORDS: usize = PAGE_BYTES / 8;
const SLOTS_START: usize = 32;
const SLOT_WORDS: usize = 16;

/// The words outside the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Word {
    Magic = 0,
    Version,
    BootLow,
    BootHigh,
    ClockOffset,
    Started,
    Completed,
    StartedSectors,
    CompletedSectors,
    CompletedAt,
    HeartbeatAt,
    SizeMax,
    Carried,
    Foreign,
    Inexact,
    Captures,
    UseId,
}

/// A mark's page in memory.
pub(super) struct RecordPage(NonNull<[AtomicU64; WORDS]>);

impl RecordPage {
    /// Maps `file`, whose first [`PAGE_BYTES`] bytes are allocated.
    pub(super) fn map(file: &File) -> io::Result<Self> {
        // SAFETY: a new shared mapping of an open file, at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(address.cast()) {
            Some(page) if address != libc::MAP_FAILED => Ok(Self(page)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: the mapping has WORDS words, is aligned to a page, and lives as long as this value. Another process
        // may store to it, which atomic words allow.
        unsafe { self.0.as_ref() }
    }

    pub(super) fn load(&self, word: Word) -> u64 {
        self.words()[word as usize].load(Ordering::Relaxed)
    }

    /// Stores after all earlier stores, as seen by a process that runs after this one has exited.
    pub(super) fn store(&self, word: Word, value: u64) {
        self.words()[word as usize].store(value, Ordering::Release);
    }

    /// Makes this a new mark with no writes begun and nothing captured. The finding and the use in `finding` are
    /// carried over.
    pub(super) fn initialize(&self, boot: u128, ahead_ns: i64, now_ns: i64, size_max: u64, finding: &RecordFinding) {
        self.store(Word::Magic, 0);
        for word in &self.words()[1..] {
            word.store(0, Ordering::Release);
        }
        self.store(Word::Version, VERSION);
        self.store(Word::BootLow, boot as u64);
        self.store(Word::BootHigh, (boot >> 64) as u64);
        self.store(Word::ClockOffset, ahead_ns as u64);
        self.store(Word::CompletedAt, now_ns as u64);
        self.store(Word::HeartbeatAt, now_ns as u64);
        self.store(Word::SizeMax, size_max);
        self.store(Word::Carried, finding.finding.code());
        self.store(Word::UseId, finding.use_id);
        self.store(Word::Magic, MAGIC);
    }

    pub(super) fn store_capture(&self, capture: &Capture) {
        let number = self.load(Word::Captures) + 1;
        let slot = &self.words()[slot_words(number)];
        let file = capture.file.unwrap_or_default();
        let disk = capture.disk.unwrap_or_default();
        let values = [
            capture.started,
            capture.started_sectors,
            capture.clock_offset_ns as u64,
            file.inode,
            file.size,
            file.mtime_ns as u64,
            file.ctime_ns as u64,
            disk.sequence,
            disk.written_sectors,
            disk.written_through_disk,
            u64::from(capture.file.is_some()) | u64::from(capture.disk.is_some()) << 1,
        ];
        for (word, value) in slot.iter().zip(values) {
            word.store(value, Ordering::Release);
        }
        self.store(Word::Captures, number);
    }

    /// Replaces the shared mapping by private memory: the file keeps all that was stored so far, and receives nothing
    /// more.
    pub(super) fn detach(&self) {
        // SAFETY: replaces this mapping by private zeros of the same length. No reference to its words outlives a
        // call, and atomic words may change at any time.
        let address = unsafe {
            libc::mmap(
                self.0.as_ptr().cast(),
                PAGE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        // The kernel replaces the page at the same address, or changes nothing.
        debug_assert!(address != libc::MAP_FAILED);
    }
}

impl Drop for RecordPage {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), PAGE_BYTES) };
    }
}

fn slot_words(number: u64) -> std::ops::Range<usize> {
    let start = SLOTS_START + (number % 2) as usize * SLOT_WORDS;
    start..start + SLOT_WORDS
}

/// Reads a mark that an earlier process has left; `None` if the file is no valid mark.
pub(super) fn read(file: &File) -> io::Result<Option<Snapshot>> {
    let mut bytes = [0; PAGE_BYTES];
    match file.read_exact_at(&mut bytes, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    Ok(parse(&words))
}

fn parse(words: &[u64; WORDS]) -> Option<Snapshot> {
    let word = |word: Word| words[word as usize];
    if word(Word::Magic) != MAGIC || word(Word::Version) != VERSION {
        return None;
    }
    let number = word(Word::Captures);
    let slot = &words[slot_words(number)];
    let capture = (number > 0).then(|| Capture {
        started: slot[0],
        started_sectors: slot[1],
        clock_offset_ns: slot[2] as i64,
        file: (slot[10] & 1 != 0).then(|| FileTimes {
            inode: slot[3],
            size: slot[4],
            mtime_ns: slot[5] as i64,
            ctime_ns: slot[6] as i64,
        }),
        disk: (slot[10] & 2 != 0).then(|| DiskCounters {
            sequence: slot[7],
            written_sectors: slot[8],
            written_through_disk: slot[9],
            is_reliable: true,
            backing: None,
        }),
    });
    Some(Snapshot {
        boot: u128::from(word(Word::BootHigh)) << 64 | u128::from(word(Word::BootLow)),
        clock_offset_ns: word(Word::ClockOffset) as i64,
        started: word(Word::Started),
        completed: word(Word::Completed),
        started_sectors: word(Word::StartedSectors),
        completed_sectors: word(Word::CompletedSectors),
        completed_at_ns: word(Word::CompletedAt) as i64,
        heartbeat_at_ns: word(Word::HeartbeatAt) as i64,
        size_max: word(Word::SizeMax),
        carried: Finding::from_code(word(Word::Carried)),
        foreign: Finding::from_code(word(Word::Foreign)),
        is_inexact: word(Word::Inexact) != 0,
        use_id: word(Word::UseId),
        capture,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_page() -> (File, RecordPage) {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file");
        file.set_len(PAGE_BYTES as u64).expect("its size");
        let page = RecordPage::map(&file).expect("a mapping");
        (file, page)
    }

    fn capture_of(inode: u64) -> Capture {
        Capture {
            started: inode,
            started_sectors: 8 * inode,
            clock_offset_ns: -5,
            file: Some(FileTimes { inode, size: 1 << 40, mtime_ns: -1, ctime_ns: 7 }),
            disk: None,
        }
    }

    #[test]
    fn stored_record_is_readable_after_restart() {
        let (file, page) = new_page();
        assert_eq!(read(&file).expect("reads"), None, "zeros are no mark");
        let boot = u128::MAX - 5;
        let finding = RecordFinding { finding: Finding::Unproven, use_id: 77 };
        page.initialize(boot, -9, 1000, 4096, &finding);
        let empty = read(&file).expect("reads").expect("is a mark");
        assert_eq!((empty.boot, empty.clock_offset_ns, empty.completed_at_ns), (boot, -9, 1000));
        assert_eq!((empty.carried, empty.use_id, empty.capture), (Finding::Unproven, 77, None));
        page.store(Word::Started, 3);
        for inode in 1..4 {
            page.store_capture(&capture_of(inode));
            let found = read(&file).expect("reads").expect("is a mark");
            assert_eq!((found.started, found.capture), (3, Some(capture_of(inode))));
        }
        page.detach();
        page.store(Word::Started, 4);
        assert_eq!(read(&file).expect("reads").map(|found| found.started), Some(3));
    }

    /// A kill between any two stores of a capture leaves the previous capture intact.
    #[test]
    fn torn_capture_leaves_the_one_before() {
        let (_file, page) = new_page();
        page.initialize(1, 0, 0, 0, &RecordFinding::default());
        let words = || -> [u64; WORDS] { std::array::from_fn(|index| page.words()[index].load(Ordering::Relaxed)) };
        page.store_capture(&capture_of(1));
        let before = words();
        page.store_capture(&capture_of(2));
        let after = words();
        let mut torn = before;
        for index in (0..WORDS).filter(|index| *index != Word::Captures as usize) {
            torn[index] = after[index];
            assert_eq!(parse(&torn).and_then(|found| found.capture), Some(capture_of(1)));
        }
        assert_eq!(parse(&after).and_then(|found| found.capture), Some(capture_of(2)));
    }

    #[test]
    fn unfinished_or_unknown_page_is_rejected() {
        let (file, page) = new_page();
        page.initialize(1, 0, 0, 0, &RecordFinding::default());
        page.store(Word::Version, VERSION + 1);
        assert_eq!(read(&file).expect("reads"), None);
        page.store(Word::Version, VERSION);
        page.store(Word::Magic, 0);
        assert_eq!(read(&file).expect("reads"), None);
        file.set_len(100).expect("its size");
        assert_eq!(read(&file).expect("reads"), None);
    }
}
