//! A guest's memory in a file: the plain bytes of its RAM (QEMU's `pmemsave`, `memory-backend-file`), or an ELF core
//! dump (`dump-guest-memory`, `virsh dump --memory-only`), whose loadable segments are the memory.
//!
//! Only the bytes that a sample needs are read, whatever the file's size. A partial page at the end of the file or of
//! a segment is left out.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use larder_codec::PAGE;
use larder_codec::batch::BATCH_PAGES;

const PAGE_BYTES: u64 = PAGE as u64;
/// Length of the file header that identifies the format, in bytes.
const HEAD_BYTES: usize = 64;

/// `e_ident[EI_CLASS]` (64 bits) and `e_ident[EI_DATA]` (little-endian), from the ELF specification.
const ELF_64_BIT_LITTLE_ENDIAN: [u8; 2] = [2, 1];
/// `e_type` of a core dump (`ET_CORE`), from the ELF specification.
const ELF_CORE: u16 = 4;
/// `p_type` of a loadable segment (`PT_LOAD`), from the ELF specification.
const ELF_LOAD: u32 = 1;
/// Bytes of an ELF program header.
const ELF_SEGMENT_BYTES: usize = 56;
/// Value of `e_phnum` that says that the number of program headers does not fit.
const ELF_MANY_SEGMENTS: u16 = u16::MAX;

/// A file with a guest's memory.
pub(super) struct MemoryImage {
    path: PathBuf,
    file: File,
    /// Segments in the order of the file; none is empty.
    segments: Vec<Segment>,
}

/// A contiguous run of pages.
struct Segment {
    /// Offset of the first page in the file, in bytes.
    offset: u64,
    pages: u64,
}

impl MemoryImage {
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let cannot = || format!("cannot read the memory in {name}");
        // Opening a FIFO would block until it has a writer, so the type is checked first.
        let metadata = path.metadata().with_context(cannot)?;
        ensure!(
            metadata.is_file(),
            "{name} is not a file: give one that QEMU's pmemsave or dump-guest-memory has written, or that backs a guest's memory"
        );
        let bytes = metadata.len();
        ensure!(bytes > 0, "{name} is empty");
        ensure!(bytes >= PAGE_BYTES, "{name} has {bytes} bytes: that is less than a page, which has {PAGE}");
        let file = File::open(path).with_context(cannot)?;
        let mut head = [0; HEAD_BYTES];
        file.read_exact_at(&mut head, 0).with_context(cannot)?;
        ensure!(
            !head.starts_with(b"KDUMP   ") && !head.starts_with(b"makedumpfile"),
            "{name} is a dump that is compressed already: have QEMU write it without -z, -l and -s"
        );
        let mut segments = if head.starts_with(b"\x7fELF") && read_le::<2>(&head, 16) == u64::from(ELF_CORE) {
            core_dump_segments(&file, &head, bytes).with_context(|| format!("cannot read the core dump {name}"))?
        } else {
            vec![Segment { offset: 0, pages: bytes / PAGE_BYTES }]
        };
        segments.retain(|segment| segment.pages > 0);
        ensure!(!segments.is_empty(), "the core dump {name} has no memory in it");
        Ok(Self { path: path.to_owned(), file, segments })
    }

    /// Returns the size of all segments, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.pages() * PAGE_BYTES
    }

    fn pages(&self) -> u64 {
        self.segments.iter().map(|segment| segment.pages).sum()
    }

    /// Reads as many whole pages as fit into `bytes`, at most all, as batches that are evenly spaced over the memory.
    pub(super) fn sample(&self, bytes: usize) -> anyhow::Result<Vec<u8>> {
        let pages = self.pages();
        let sample_pages = usize::try_from(pages).unwrap_or(usize::MAX).min(bytes / PAGE);
        let skipped_pages = u128::from(pages - sample_pages as u64);
        let mut sample = vec![0; sample_pages * PAGE];
        let pieces = sample_pages.div_ceil(BATCH_PAGES) as u128;
        for (index, piece) in sample.chunks_mut(BATCH_PAGES * PAGE).enumerate() {
            // The gaps before the first and after the last batch are half as large as those between two.
            let before = skipped_pages * (2 * index as u128 + 1) / (2 * pieces);
            self.read(before as u64 + (index * BATCH_PAGES) as u64, piece)
                .with_context(|| format!("cannot read the memory in {}", self.path.display()))?;
        }
        Ok(sample)
    }

    /// Reads pages from page `first` on; pages are counted through all segments.
    fn read(&self, first: u64, mut to: &mut [u8]) -> std::io::Result<()> {
        let mut skipped = first;
        for segment in &self.segments {
            if to.is_empty() {
                break;
            }
            if skipped >= segment.pages {
                skipped -= segment.pages;
                continue;
            }
            let here = (segment.pages - skipped).min((to.len() / PAGE) as u64);
            let (now, later) = to.split_at_mut(here as usize * PAGE);
            self.file.read_exact_at(now, segment.offset + skipped * PAGE_BYTES)?;
            to = later;
            skipped = 0;
        }
        Ok(())
    }
}

/// Returns the memory segments of the ELF core dump with this header, in a file of `file_bytes` bytes.
fn core_dump_segments(file: &File, head: &[u8; HEAD_BYTES], file_bytes: u64) -> anyhow::Result<Vec<Segment>> {
    ensure!(
        head[4..6] == ELF_64_BIT_LITTLE_ENDIAN,
        "it is not a dump of a 64-bit little-endian machine; give the memory as pmemsave writes it"
    );
    let (table, entry_bytes, count) = (read_le::<8>(head, 32), read_le::<2>(head, 54), read_le::<2>(head, 56));
    ensure!(count != u64::from(ELF_MANY_SEGMENTS), "it has more than {} segments", ELF_MANY_SEGMENTS - 1);
    ensure!(
        entry_bytes == ELF_SEGMENT_BYTES as u64,
        "its program headers have {entry_bytes} bytes instead of {ELF_SEGMENT_BYTES}"
    );
    let mut headers = vec![0; count as usize * ELF_SEGMENT_BYTES];
    file.read_exact_at(&mut headers, table).context("its program headers cannot be read")?;
    let mut segments = Vec::new();
    for header in headers.as_chunks::<ELF_SEGMENT_BYTES>().0 {
        if read_le::<4>(header, 0) != u64::from(ELF_LOAD) {
            continue;
        }
        let (offset, bytes) = (read_le::<8>(header, 8), read_le::<8>(header, 32));
        match offset.checked_add(bytes) {
            Some(end) if end <= file_bytes => segments.push(Segment { offset, pages: bytes / PAGE_BYTES }),
            _ => bail!("it is truncated: not all of the {bytes} bytes at {offset} are within the file's {file_bytes}"),
        }
    }
    Ok(segments)
}

/// Decodes `BYTES` little-endian bytes at offset `at`.
fn read_le<const BYTES: usize>(from: &[u8], at: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..BYTES].copy_from_slice(&from[at..at + BYTES]);
    u64::from_le_bytes(wide)
}
