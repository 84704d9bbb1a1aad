//! Buffer for the bytes of an incomplete structure.
//!
//! The bytes have been carried already: a structure is always literal, so its bytes need not wait for its end. The
//! buffer has a copy, which is parsed once it is complete.

/// Error: the bytes do not belong to this format.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnknownFormat;

/// Beginning of a structure.
#[derive(Debug)]
pub(super) struct PartialStructure {
    bytes: [u8; PartialStructure::MAX],
    len: usize,
}

impl PartialStructure {
    /// Bytes of the longest structure: a multifd packet's header with its 128 offsets.
    pub(super) const MAX: usize = 1344;

    pub(super) const fn new() -> Self {
        Self { bytes: [0; Self::MAX], len: 0 }
    }

    pub(super) fn get(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    /// Replaces the content by `bytes`.
    pub(super) fn set(&mut self, bytes: &[u8]) {
        self.clear();
        self.fill(bytes.len(), bytes);
    }

    /// Takes the missing bytes of a structure from `data[taken..]`; returns true once it is complete. `need` returns
    /// the length of the structure, or a lower bound of it, from the bytes present. It may grow with more bytes, up
    /// to [`Self::MAX`].
    pub(super) fn complete(
        &mut self,
        data: &[u8],
        taken: &mut usize,
        need: impl Fn(&[u8]) -> Result<usize, UnknownFormat>,
    ) -> Result<bool, UnknownFormat> {
        loop {
            let need = need(self.get())?;
            if self.len >= need {
                return Ok(true);
            }
            *taken += self.fill(need, &data[*taken..]);
            if self.len < need {
                return Ok(false);
            }
        }
    }

    fn fill(&mut self, need: usize, data: &[u8]) -> usize {
        let take = need.min(Self::MAX).saturating_sub(self.len).min(data.len());
        self.bytes[self.len..][..take].copy_from_slice(&data[..take]);
        self.len += take;
        take
    }
}

/// Returns the big-endian number at `at`, which must be in bounds.
pub(super) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(super) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structure_is_held_until_complete() {
        // A length, and as many bytes.
        let need = |partial: &[u8]| Ok(1 + partial.first().map_or(0, |&len| usize::from(len)));
        let mut partial = PartialStructure::new();
        let mut taken = 0;
        assert!(!partial.complete(&[], &mut taken, need).unwrap());
        assert!(!partial.complete(&[3, 7], &mut taken, need).unwrap());
        assert_eq!(taken, 2);
        taken = 0;
        assert!(partial.complete(&[8, 9, 1, 1], &mut taken, need).unwrap());
        assert_eq!((taken, partial.get()), (2, &[3, 7, 8, 9][..]));
    }

    #[test]
    fn held_bytes_are_bounded() {
        let mut partial = PartialStructure::new();
        let mut taken = 0;
        assert!(!partial.complete(&[1; 5000], &mut taken, |_| Ok(5000)).unwrap());
        assert_eq!(taken, PartialStructure::MAX);
    }
}
