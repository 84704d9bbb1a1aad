//! A file below an image that refuses effects which no image, however damaged, may have: guest data over metadata,
//! and metadata that would lead to it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use larder_block::backend::simulated::{SimulatedDevice, SparseImage};
use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, Geometry, Io, IoResult, ReadBuf, SizeChanges,
    WriteBuf, WriteFlags, ZeroFlags,
};

use super::model::STAMP;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The maximum length of an image file of the fuzzer, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// The role of a cluster of the image when it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    Header,
    L1,
    RefcountTable,
    RefcountBlock,
    L2,
    /// An L2 table that is shared with a snapshot.
    SharedL2,
}

/// The locations in a header, parsed independently of the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    pub version: u32,
    pub cluster_bits: u32,
    pub extended: bool,
    pub refcount_order: u32,
    pub l1: u64,
    pub l1_entries: u64,
    pub refcount_table: u64,
    pub refcount_table_clusters: u64,
}

impl Places {
    pub fn read(sector: &[u8]) -> Self {
        let long = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&sector[at..at + 8]);
            u64::from_be_bytes(word)
        };
        let short = |at: usize| (long(at) >> 32) as u32;
        let version = short(4);
        Self {
            version,
            cluster_bits: short(20),
            extended: version >= 3 && long(72) & 16 != 0,
            refcount_order: if version >= 3 { short(96) } else { 4 },
            l1: long(40),
            l1_entries: short(36).into(),
            refcount_table: long(48),
            refcount_table_clusters: short(56).into(),
        }
    }

    pub fn cluster_len(&self) -> u64 {
        1 << self.cluster_bits
    }
}

/// The file of an image.
pub struct Guard {
    lower: Rc<SimulatedDevice>,
    /// The content of the file, as far as it was written through this object.
    bytes: RefCell<SparseImage>,
    armed: Cell<bool>,
    places: Cell<Option<Places>>,
    roles: RefCell<HashMap<u64, Role>>,
}

impl Guard {
    pub fn new(lower: Rc<SimulatedDevice>, bytes: SparseImage) -> Rc<Self> {
        Rc::new(Self {
            lower,
            bytes: RefCell::new(bytes),
            armed: Cell::new(false),
            places: Cell::new(None),
            roles: RefCell::default(),
        })
    }

    pub fn bytes(&self) -> SparseImage {
        self.bytes.borrow().clone()
    }

    fn long(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.bytes.borrow().read(ByteOffset::new(at), &mut word);
        u64::from_be_bytes(word)
    }

    /// Guards the metadata from now on: the file is in the state in which it was opened.
    ///
    /// # Panics
    /// If two parts of the metadata lie in one cluster.
    pub fn arm(&self) {
        let mut sector = [0; 512];
        self.bytes.borrow().read(ByteOffset::ZERO, &mut sector);
        let places = Places::read(&sector);
        let size = self.lower.geometry().size.get();
        let mut roles = HashMap::new();
        let mut take = |offset: u64, len: u64, role: Role| {
            for cluster in offset >> places.cluster_bits..(offset + len).div_ceil(places.cluster_len()) {
                let other = roles.insert(cluster, role);
                assert!(other.is_none(), "cluster {cluster} is {other:?} and {role:?}");
            }
        };
        take(0, places.cluster_len(), Role::Header);
        take(places.l1, places.l1_entries * 8, Role::L1);
        let table_len = places.refcount_table_clusters << places.cluster_bits;
        take(places.refcount_table, table_len, Role::RefcountTable);
        for (at, entries, owned, shared) in [
            (places.l1, places.l1_entries, Role::L2, Role::SharedL2),
            (places.refcount_table, table_len / 8, Role::RefcountBlock, Role::RefcountBlock),
        ] {
            for index in 0..entries {
                let entry = self.long(at + index * 8);
                let offset = match owned {
                    Role::L2 => entry & OFFSET,
                    _ => entry,
                };
                if offset == 0 || !offset.is_multiple_of(places.cluster_len()) || offset >= size {
                    // An invalid entry: nothing is read or written there.
                    continue;
                }
                let role = if entry & COPIED != 0 { owned } else { shared };
                take(offset, places.cluster_len(), role);
            }
        }
        *self.roles.borrow_mut() = roles;
        self.places.set(Some(places));
        self.armed.set(true);
    }

    /// Stops guarding, because the image is not in use any more.
    pub fn disarm(&self) {
        self.armed.set(false);
    }

    fn role(&self, offset: u64) -> Option<Role> {
        let bits = self.places.get()?.cluster_bits;
        self.roles.borrow().get(&(offset >> bits)).copied()
    }

    /// Returns true if new metadata or data may be at this cluster offset.
    fn is_free_place(&self, offset: u64) -> bool {
        let aligned = self.places.get().is_some_and(|places| offset.is_multiple_of(places.cluster_len()));
        aligned && offset != 0 && self.role(offset).is_none()
    }

    fn check_write(&self, start: u64, bytes: &[u8]) {
        let Some(places) = self.places.get().filter(|_| self.armed.get()) else {
            return;
        };
        if start < places.cluster_len() {
            assert!(start == 0 && bytes.len() == 512, "a write to the header's cluster");
            return self.check_header(places, bytes);
        }
        for (at, new) in (start..).step_by(8).zip(bytes.chunks_exact(8)) {
            let Some(role) = self.role(at) else { continue };
            let old = self.long(at);
            let new = new.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
            if old == new {
                continue;
            }
            // A refcount block may overlap data of the guest. Then some of the data is changed, but none is written
            // over metadata.
            let is_stamp = |word: u64| word >> 32 == STAMP >> 32;
            assert!(!is_stamp(new) || is_stamp(old), "guest data over {role:?} at {at:#x}");
            let place = new & OFFSET;
            let sound = match role {
                Role::Header | Role::SharedL2 => false,
                Role::RefcountBlock => true,
                Role::RefcountTable => old == 0 && self.is_free_place(new),
                // The rest of the last sector after the table.
                Role::L1 if at >= places.l1 + places.l1_entries * 8 => new == 0,
                Role::L1 => new == COPIED | place && self.is_free_place(place),
                // Bitmaps of subclusters.
                Role::L2 if places.extended && at % 16 != 0 => true,
                Role::L2 if new & !1 == 0 => true,
                Role::L2 => new & COMPRESSED == 0 && new & COPIED != 0 && self.is_free_place(place),
            };
            assert!(sound, "{role:?} at {at:#x} goes from {old:#018x} to {new:#018x}");
        }
    }

    fn check_header(&self, places: Places, bytes: &[u8]) {
        let mut old = [0; 512];
        self.bytes.borrow().read(ByteOffset::ZERO, &mut old);
        for (at, (old, new)) in old.iter().zip(bytes).enumerate() {
            // Size, L1 table, refcount table, autoclear bits.
            let changes = matches!(at, 24..32 | 36..60) || (places.version >= 3 && (88..96).contains(&at));
            assert!(changes || old == new, "byte {at} of the header goes from {old} to {new}");
        }
        let new = Places::read(bytes);
        let moved = [
            (Role::L1, places.l1, new.l1, new.l1_entries * 8),
            (
                Role::RefcountTable,
                places.refcount_table,
                new.refcount_table,
                new.refcount_table_clusters << new.cluster_bits,
            ),
        ];
        for (role, from, to, len) in moved {
            if from == to {
                continue;
            }
            for offset in (to..to + len).step_by(places.cluster_len() as usize) {
                assert!(self.is_free_place(offset), "{role:?} moves to {to:#x}, which is in use");
            }
            self.roles.borrow_mut().retain(|_, other| *other != role);
        }
        self.places.set(Some(new));
    }

    /// Checks zeroes and discards: metadata may be zeroed only if the image no longer refers to it.
    fn check_zeroes(&self, range: ByteRange) {
        let Some(places) = self.places.get().filter(|_| self.armed.get() && !range.is_empty()) else {
            return;
        };
        let bits = places.cluster_bits;
        for cluster in range.start.get() >> bits..range.end().get().div_ceil(places.cluster_len()) {
            let role = self.role(cluster << bits);
            assert!(matches!(role, None | Some(Role::SharedL2)), "{role:?} at {:#x} is zeroed", cluster << bits);
            self.roles.borrow_mut().remove(&cluster);
        }
    }
}

impl BlockDevice for Guard {
    fn name(&self) -> &Rc<str> {
        self.lower.name()
    }

    fn geometry(&self) -> Geometry {
        self.lower.geometry()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        assert!(
            range.checked_end().is_some_and(|end| end.get() <= self.geometry().size.get()),
            "a read outside the file: {range:?}"
        );
        self.lower.read(start, buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        assert!(
            range.checked_end().is_some_and(|end| end.get() <= self.geometry().size.get()),
            "a write outside the file: {range:?}"
        );
        let bytes = buffer.to_vec();
        self.check_write(start.get(), &bytes);
        self.bytes.borrow_mut().write(start, &bytes);
        self.lower.write(start, buffer, flags)
    }

    fn flush(&self) -> Io<'_> {
        self.lower.flush()
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.check_zeroes(range);
        // A file may keep discarded data. The simulator tests that no code reads it.
        self.bytes.borrow_mut().zero(range);
        self.lower.write_zeroes(range, ZeroFlags::default())
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.check_zeroes(range);
        self.bytes.borrow_mut().zero(range);
        self.lower.write_zeroes(range, flags)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        self.lower.extents(range, limit)
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        match size.get() {
            // Fails like a full file system.
            FILE_BYTES_MAX.. => Box::pin(std::future::ready(Err(larder_block::IoError::new(
                self.name(),
                larder_block::Operation::Grow,
                ByteOffset::ZERO.range(size),
                larder_block::Failure::NoSpace,
            )))),
            _ => self.lower.grow(size),
        }
    }

    fn size_changes(&self) -> &SizeChanges {
        self.lower.size_changes()
    }
}
