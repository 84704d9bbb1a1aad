//! The faults of a single L1 or L2 entry, and its corrected value.

use crate::check::Image;
use crate::entry::{ALL_ALLOCATED, ALL_ZERO, COPIED, L2Entry, OFFSET, ZERO};

const L1_RESERVED: u64 = !(COPIED | OFFSET);
/// The reserved bits of an entry that is not compressed. Bit 0, the zero flag, is examined separately.
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// A fault of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fault {
    pub(super) what: &'static str,
    pub(super) remedy: Remedy,
}

/// The remedy of a repair for a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Remedy {
    /// The entry is corrected, and nothing is lost.
    Correct,
    /// The entry becomes zero or unallocated, because its target does not exist.
    Drop,
    /// None.
    None,
}

/// An entry with the results of its examination.
#[derive(Debug)]
pub(super) struct Examination<E> {
    /// The faults of the entry, rarely more than one.
    pub(super) faults: smallvec::SmallVec<[Fault; 3]>,
    /// The entry as a repair leaves it.
    pub(super) corrected: E,
    /// The offset and length of the target in the image, if the entry has a valid one.
    pub(super) refers_to: Option<(u64, u64)>,
    /// The target is past the end of the file.
    pub(super) is_past_end: bool,
}

impl<E> Examination<E> {
    fn new(entry: E) -> Self {
        Self { faults: smallvec::SmallVec::new(), corrected: entry, refers_to: None, is_past_end: false }
    }

    fn add_fault(&mut self, what: &'static str, remedy: Remedy) {
        self.faults.push(Fault { what, remedy });
    }

    /// Returns true if a repair changes the entry so that it refers to nothing.
    pub(super) fn is_dropped(&self) -> bool {
        self.faults.iter().any(|fault| fault.remedy == Remedy::Drop)
    }
}

impl Image {
    /// Returns true if bytes are so far past the end of the file that the reference is invalid. The last cluster may
    /// be present partially.
    pub(super) fn is_past_end(&self, offset: u64, len: u64) -> bool {
        offset.saturating_add(len) >= self.size().saturating_add(self.cluster_len())
    }

    /// Returns true if the file contains all of `len` bytes at `offset`.
    pub(super) fn contains(&self, offset: u64, len: u64) -> bool {
        len == 0 || offset.saturating_add(len) <= self.size()
    }

    /// Examines an L1 entry that is not 0.
    pub(super) fn examine_l1(&self, entry: u64) -> Examination<u64> {
        let mut examined = Examination::new(entry & !L1_RESERVED);
        if entry & L1_RESERVED != 0 {
            examined.add_fault("has reserved bits set", Remedy::Correct);
        }
        let offset = entry & OFFSET;
        if offset == 0 {
            examined.corrected = 0;
            if entry & COPIED != 0 {
                // QEMU takes the header for the table, and reports the image as corrupt.
                examined.add_fault("is flagged as used once, but points nowhere", Remedy::Correct);
            }
            return examined;
        }
        if !self.is_aligned(offset) {
            examined.add_fault("points to an L2 table that is not aligned to clusters", Remedy::None);
        } else if self.is_past_end(offset, self.cluster_len()) {
            examined.add_fault("points past the end of the file", Remedy::Drop);
            examined.is_past_end = true;
            examined.corrected = 0;
        } else {
            examined.refers_to = Some((offset, self.cluster_len()));
        }
        examined
    }

    /// Examines the L2 entry of the cluster at offset `guest`.
    pub(super) fn examine_l2(&self, entry: L2Entry, guest: u64) -> Examination<L2Entry> {
        match entry.is_compressed() {
            true => self.examine_compressed(entry),
            false => self.examine_standard(entry, guest),
        }
    }

    fn examine_compressed(&self, entry: L2Entry) -> Examination<L2Entry> {
        let mut examined = Examination::new(entry);
        if entry.word & COPIED != 0 {
            examined.add_fault("is compressed, but flagged as used once", Remedy::Correct);
            examined.corrected.word &= !COPIED;
        }
        if self.header.shape.data_file {
            examined.add_fault("is compressed, although the data is in an external data file", Remedy::None);
            return examined;
        }
        if entry.bitmap != 0 {
            examined.add_fault("is compressed, but has a subcluster bitmap", Remedy::Correct);
            examined.corrected.bitmap = 0;
        }
        let at = entry.compressed_location(self.header.shape);
        if self.is_past_end(at.offset, at.len) {
            examined.add_fault("is compressed and points past the end of the file", Remedy::Drop);
            examined.is_past_end = true;
            examined.corrected = self.zero();
        } else {
            examined.refers_to = Some((at.offset, at.len));
        }
        examined
    }

    fn examine_standard(&self, entry: L2Entry, guest: u64) -> Examination<L2Entry> {
        let shape = self.header.shape;
        let mut examined = Examination::new(entry);
        if entry.word & L2_RESERVED != 0 {
            examined.add_fault("has reserved bits set", Remedy::Correct);
            examined.corrected.word &= !L2_RESERVED;
        }
        if entry.has_unknown_zero_flag(shape) {
            examined.add_fault("has the zero flag, which version 2 does not define", Remedy::None);
        }
        let allocated = entry.bitmap & ALL_ALLOCATED;
        let Some(host) = entry.host(shape) else {
            if allocated != 0 {
                examined.add_fault("is not allocated, but its subclusters are", Remedy::None);
            }
            return examined;
        };
        if allocated & entry.bitmap >> 32 != 0 {
            examined.add_fault("has subclusters that are both allocated and zero", Remedy::Drop);
            examined.corrected = self.zero();
            return examined;
        }
        if shape.data_file {
            self.examine_data_file_offset(&mut examined, host, guest);
            return examined;
        }
        let len = self.cluster_len();
        if !self.is_aligned(host) {
            let has_data = match shape.extended {
                true => allocated != 0,
                false => entry.word & ZERO == 0,
            };
            match has_data {
                true => examined.add_fault("points to data that is not aligned to clusters", Remedy::None),
                false => {
                    examined.add_fault("points to reserved space that is not aligned to clusters", Remedy::Drop);
                    examined.corrected = self.zero();
                }
            }
        }
        if self.is_past_end(host, len) {
            examined.add_fault("points past the end of the file", Remedy::Drop);
            examined.is_past_end = true;
            examined.corrected = self.without_target(entry);
        } else {
            examined.refers_to = Some((host, len));
        }
        examined
    }

    /// Reports an entry that points to another offset of the data file than its own. QEMU reports the image as
    /// corrupt when it reads there. Former versions of Larder wrote such entries, but the data to the right offset.
    fn examine_data_file_offset(&self, examined: &mut Examination<L2Entry>, host: u64, guest: u64) {
        if host == guest {
            return;
        }
        if guest & !OFFSET != 0 {
            examined.add_fault(
                "maps a guest offset that an entry cannot express as an offset in the data file",
                Remedy::None,
            );
            return;
        }
        examined.add_fault("points to another offset in the data file than its guest offset", Remedy::Correct);
        examined.corrected.word = examined.corrected.word & !OFFSET | guest | COPIED;
    }

    /// Returns a zero entry, or an unallocated one if the version has no zero flag.
    fn zero(&self) -> L2Entry {
        match self.header.shape.version {
            2 => L2Entry::UNALLOCATED,
            _ => L2Entry::zero(self.header.shape),
        }
    }

    /// Returns the entry without its target, which is past the end of the file and so reads as zeros. Unallocated
    /// subclusters stay unallocated.
    fn without_target(&self, entry: L2Entry) -> L2Entry {
        match self.header.shape.extended {
            true => L2Entry { word: 0, bitmap: entry.bitmap & ALL_ZERO | (entry.bitmap & ALL_ALLOCATED) << 32 },
            false => self.zero(),
        }
    }
}
