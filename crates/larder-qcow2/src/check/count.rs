//! The number of references to each cluster of the image. It takes a byte and three bits for each cluster, in chunks
//! that exist only where there are references. Counts that do not fit into a byte are stored separately.

use std::collections::BTreeMap;

const CHUNK_BITS: u32 = 15;
const CHUNK_CLUSTERS: usize = 1 << CHUNK_BITS;
const CHUNK_WORDS: usize = CHUNK_CLUSTERS / 64;
/// The smallest count that is stored in `spilled`.
const SPILLED_COUNT_MIN: u8 = u8::MAX;
/// The approximate size of an entry of `spilled`, in bytes.
const SPILLED_ENTRY_BYTES: u64 = 32;

/// The kind of a reference to a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReferenceKind {
    /// A reference as an L2 table.
    L2Table,
    /// A reference as anything else.
    Other,
}

/// The counts would take more memory than permitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OutOfMemory;

struct Chunk {
    counts: [u8; CHUNK_CLUSTERS],
    /// Set if the refcount in the image is 1.
    ones: [u64; CHUNK_WORDS],
    tables: [u64; CHUNK_WORDS],
    others: [u64; CHUNK_WORDS],
}

/// The number of references to each cluster.
pub(super) struct ReferenceCounts {
    chunks: BTreeMap<u64, Box<Chunk>>,
    spilled: BTreeMap<u64, u64>,
    memory: u64,
    memory_max: u64,
    end: u64,
}

const fn chunk_and_index(cluster: u64) -> (u64, usize) {
    (cluster >> CHUNK_BITS, (cluster & (CHUNK_CLUSTERS as u64 - 1)) as usize)
}

const fn bit(words: &[u64; CHUNK_WORDS], index: usize) -> bool {
    words[index / 64] >> (index % 64) & 1 != 0
}

const fn set_bit(words: &mut [u64; CHUNK_WORDS], index: usize, value: bool) {
    let mask = 1 << (index % 64);
    match value {
        true => words[index / 64] |= mask,
        false => words[index / 64] &= !mask,
    }
}

impl ReferenceCounts {
    /// Creates counts without references, which take at most about `memory_max` bytes.
    pub(super) fn new(memory_max: u64) -> Self {
        Self { chunks: BTreeMap::new(), spilled: BTreeMap::new(), memory: 0, memory_max, end: 0 }
    }

    /// Returns the maximum memory of the counts for an image of `clusters` clusters, in bytes.
    pub(super) const fn memory_for(clusters: u64) -> u64 {
        clusters.div_ceil(CHUNK_CLUSTERS as u64).saturating_mul(size_of::<Chunk>() as u64)
    }

    fn chunk(&mut self, number: u64) -> Result<&mut Chunk, OutOfMemory> {
        if !self.chunks.contains_key(&number) {
            self.memory += size_of::<Chunk>() as u64;
            if self.memory > self.memory_max {
                return Err(OutOfMemory);
            }
        }
        Ok(self.chunks.entry(number).or_insert_with(|| {
            Box::new(Chunk {
                counts: [0; CHUNK_CLUSTERS],
                ones: [0; CHUNK_WORDS],
                tables: [0; CHUNK_WORDS],
                others: [0; CHUNK_WORDS],
            })
        }))
    }

    /// Counts one more reference.
    pub(super) fn add(&mut self, cluster: u64, kind: ReferenceKind) -> Result<(), OutOfMemory> {
        let (number, index) = chunk_and_index(cluster);
        let chunk = self.chunk(number)?;
        let bits = match kind {
            ReferenceKind::L2Table => &mut chunk.tables,
            ReferenceKind::Other => &mut chunk.others,
        };
        set_bit(bits, index, true);
        let count = &mut chunk.counts[index];
        if *count < SPILLED_COUNT_MIN {
            *count += 1;
        }
        if *count == SPILLED_COUNT_MIN {
            if let Some(count) = self.spilled.get_mut(&cluster) {
                *count += 1;
            } else {
                self.memory += SPILLED_ENTRY_BYTES;
                self.spilled.insert(cluster, SPILLED_COUNT_MIN.into());
            }
        }
        self.end = self.end.max(cluster + 1);
        if self.memory > self.memory_max {
            return Err(OutOfMemory);
        }
        Ok(())
    }

    /// Removes a reference.
    pub(super) fn remove(&mut self, cluster: u64) {
        let (number, index) = chunk_and_index(cluster);
        let Some(chunk) = self.chunks.get_mut(&number) else {
            return;
        };
        if let Some(count) = self.spilled.get_mut(&cluster) {
            *count -= 1;
            if *count < SPILLED_COUNT_MIN.into() {
                self.spilled.remove(&cluster);
                self.memory -= SPILLED_ENTRY_BYTES;
                chunk.counts[index] = SPILLED_COUNT_MIN - 1;
            }
        } else {
            chunk.counts[index] = chunk.counts[index].saturating_sub(1);
        }
    }

    /// Returns the number of references to a cluster.
    pub(super) fn get(&self, cluster: u64) -> u64 {
        let (number, index) = chunk_and_index(cluster);
        match self.chunks.get(&number).map_or(0, |chunk| chunk.counts[index]) {
            SPILLED_COUNT_MIN => self.spilled.get(&cluster).copied().unwrap_or(SPILLED_COUNT_MIN.into()),
            count => count.into(),
        }
    }

    /// Returns the number after the last cluster that was ever counted.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Returns the clusters from `first` to before `end` that have references.
    pub(super) fn referenced_clusters(&self, first: u64, end: u64) -> impl Iterator<Item = u64> + '_ {
        let chunks = self.chunks.range(first >> CHUNK_BITS..=end.saturating_sub(1) >> CHUNK_BITS);
        chunks.flat_map(move |(number, chunk)| {
            let base = number << CHUNK_BITS;
            let from = first.saturating_sub(base).min(CHUNK_CLUSTERS as u64) as usize;
            let to = end.saturating_sub(base).min(CHUNK_CLUSTERS as u64) as usize;
            let counts = &chunk.counts[from..to.max(from)];
            let found = counts.iter().enumerate().filter(|(_, count)| **count > 0);
            found.map(move |(index, _)| base + (from + index) as u64)
        })
    }

    /// Returns true if a cluster is referred to as an L2 table and as nothing else.
    pub(super) fn is_table_only(&self, cluster: u64) -> bool {
        let (number, index) = chunk_and_index(cluster);
        self.chunks.get(&number).is_some_and(|chunk| bit(&chunk.tables, index) && !bit(&chunk.others, index))
    }

    /// Records whether a cluster's refcount in the image is 1.
    pub(super) fn set_stored_one(&mut self, cluster: u64, one: bool) -> Result<(), OutOfMemory> {
        let (number, index) = chunk_and_index(cluster);
        if one {
            set_bit(&mut self.chunk(number)?.ones, index, true);
        } else if let Some(chunk) = self.chunks.get_mut(&number) {
            set_bit(&mut chunk.ones, index, false);
        }
        Ok(())
    }

    /// Returns true if a cluster's refcount in the image is 1.
    pub(super) fn is_stored_one(&self, cluster: u64) -> bool {
        let (number, index) = chunk_and_index(cluster);
        self.chunks.get(&number).is_some_and(|chunk| bit(&chunk.ones, index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_beyond_a_byte_are_exact() {
        let mut counts = ReferenceCounts::new(u64::MAX);
        (0..700).for_each(|_| counts.add(70_000, ReferenceKind::Other).unwrap());
        assert_eq!(counts.get(70_000), 700);
        (0..460).for_each(|_| counts.remove(70_000));
        assert_eq!(counts.get(70_000), 240);
        assert_eq!(counts.get(69_999), 0);
        counts.add(70_000, ReferenceKind::L2Table).unwrap();
        assert_eq!(counts.get(70_000), 241);
        assert!(!counts.is_table_only(70_000));
        assert_eq!(counts.end(), 70_001);
        counts.add(3, ReferenceKind::L2Table).unwrap();
        assert_eq!(counts.referenced_clusters(0, 70_001).collect::<Vec<_>>(), [3, 70_000]);
        assert_eq!(counts.referenced_clusters(4, 70_000).count(), 0);
    }

    #[test]
    fn counts_take_memory_sparsely_and_bounded() {
        let mut counts = ReferenceCounts::new(2 * size_of::<Chunk>() as u64);
        counts.add(1 << 50, ReferenceKind::Other).unwrap();
        counts.add(0, ReferenceKind::Other).unwrap();
        assert_eq!(counts.add(1 << 40, ReferenceKind::Other), Err(OutOfMemory));
    }
}
