//! A sparse array of the groups of a map: chunks of groups, of which only non-empty ones are allocated. So its memory
//! depends on the number of groups, and hardly on the size of the disk: an image's header may claim up to 2^63 bytes.

/// The number of slots of a chunk: one page of pointers.
const CHUNK_SLOTS: usize = 512;

struct Chunk<T> {
    slots: [Option<Box<T>>; CHUNK_SLOTS],
    used: usize,
}

impl<T> Chunk<T> {
    fn new() -> Box<Self> {
        Box::new(Self { slots: [const { None }; CHUNK_SLOTS], used: 0 })
    }
}

/// An array of which most elements may be absent.
pub(super) struct Directory<T> {
    chunks: Vec<Option<Box<Chunk<T>>>>,
    used: usize,
    bytes: usize,
}

impl<T: Default> Directory<T> {
    pub(super) fn new() -> Self {
        Self { chunks: Vec::new(), used: 0, bytes: 0 }
    }

    /// Extends the array to at least `len` elements.
    pub(super) fn grow(&mut self, len: usize) {
        let chunks = len.div_ceil(CHUNK_SLOTS).max(self.chunks.len());
        self.bytes += (chunks - self.chunks.len()) * size_of::<Option<Box<Chunk<T>>>>();
        self.chunks.resize_with(chunks, || None);
    }

    /// Returns the memory of the array in bytes, its elements included, but not the memory that these own.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of present elements.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<&T> {
        self.chunks[index / CHUNK_SLOTS].as_deref()?.slots[index % CHUNK_SLOTS].as_deref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.chunks[index / CHUNK_SLOTS].as_deref_mut()?.slots[index % CHUNK_SLOTS].as_deref_mut()
    }

    /// Returns an element, creating it if it is absent.
    pub(super) fn get_or_insert(&mut self, index: usize) -> &mut T {
        let (bytes, used) = (&mut self.bytes, &mut self.used);
        let chunk = self.chunks[index / CHUNK_SLOTS].get_or_insert_with(|| {
            *bytes += size_of::<Chunk<T>>();
            Chunk::new()
        });
        let chunk_used = &mut chunk.used;
        chunk.slots[index % CHUNK_SLOTS].get_or_insert_with(|| {
            *bytes += size_of::<T>();
            *used += 1;
            *chunk_used += 1;
            Box::default()
        })
    }

    /// Removes an element, if it is present.
    pub(super) fn remove(&mut self, index: usize) {
        let slot = &mut self.chunks[index / CHUNK_SLOTS];
        let Some(chunk) = slot.as_deref_mut() else { return };
        if chunk.slots[index % CHUNK_SLOTS].take().is_none() {
            return;
        }
        self.bytes -= size_of::<T>();
        self.used -= 1;
        chunk.used -= 1;
        if chunk.used == 0 {
            *slot = None;
            self.bytes -= size_of::<Chunk<T>>();
        }
    }

    /// Returns the first element at `from` or after it, or else the first one of all.
    pub(super) fn next_present(&self, from: usize) -> Option<usize> {
        let next = self.next_from(from);
        next.or_else(|| self.next_from(0))
    }

    fn next_from(&self, from: usize) -> Option<usize> {
        let first = from / CHUNK_SLOTS;
        let chunks = self.chunks.iter().enumerate().skip(first);
        chunks.filter_map(|(index, chunk)| Some((index, chunk.as_deref()?))).find_map(|(index, chunk)| {
            let skipped = if index == first { from % CHUNK_SLOTS } else { 0 };
            let slot = chunk.slots.iter().skip(skipped).position(Option::is_some)?;
            Some(index * CHUNK_SLOTS + skipped + slot)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_takes_memory_for_present_elements() {
        let mut directory: Directory<[u64; 16]> = Directory::new();
        directory.grow(1 << 28);
        let empty = directory.bytes();
        assert!(empty <= 4 << 20, "{empty}");
        let all = [0, 511, 512, 77_777_777, (1 << 28) - 1];
        for index in all {
            assert!(directory.get(index).is_none());
            directory.get_or_insert(index)[0] = index as u64;
        }
        for index in all {
            assert_eq!(directory.get(index).map(|element| element[0]), Some(index as u64));
            assert_eq!(directory.get_mut(index).map(|element| element[0]), Some(index as u64));
        }
        assert_eq!(directory.used(), all.len());
        let mut found = vec![directory.next_present(1).expect("there are some")];
        while found.len() < all.len() {
            found.push(directory.next_present(found[found.len() - 1] + 1).expect("there are some"));
        }
        assert_eq!(found, [511, 512, 77_777_777, (1 << 28) - 1, 0]);
        all.into_iter().for_each(|index| directory.remove(index));
        directory.remove(5);
        assert_eq!((directory.used(), directory.bytes(), directory.next_present(3)), (0, empty, None));
    }
}
