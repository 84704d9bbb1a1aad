//! The bytes of a structure that is not there wholly yet.
//!
//! They have been carried already: a structure is literal whatever it says, so its bytes need not wait for its end. What
//! is held here is a copy, to be read once it is whole.

/// The bytes are none of this format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unknown;

/// The beginning of a structure.
#[derive(Debug)]
pub(super) struct Held {
    bytes: [u8; Held::MAX],
    len: usize,
}

impl Held {
    /// The longest structure: a multifd packet's header with its 128 offsets.
    pub(super) const MAX: usize = 1344;

    pub(super) const fn new() -> Self {
        Self {
            bytes: [0; Self::MAX],
            len: 0,
        }
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

    /// Holds `bytes` and nothing else.
    pub(super) fn set(&mut self, bytes: &[u8]) {
        self.clear();
        self.fill(bytes.len(), bytes);
    }

    /// Takes of `data`, from `taken` on, what is missing of a structure, and whether it is whole. `need` says how long the
    /// structure is, or at least is, for the bytes of it that are there: more with more bytes, up to [`Self::MAX`].
    pub(super) fn whole(
        &mut self,
        data: &[u8],
        taken: &mut usize,
        need: impl Fn(&[u8]) -> Result<usize, Unknown>,
    ) -> Result<bool, Unknown> {
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

/// The big-endian number at `at`, of bytes that are known to be there.
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
    fn a_structure_is_held_until_it_is_whole() {
        // A length, and so many bytes.
        let need = |held: &[u8]| Ok(1 + held.first().map_or(0, |&len| usize::from(len)));
        let mut held = Held::new();
        let mut taken = 0;
        assert!(!held.whole(&[], &mut taken, need).unwrap());
        assert!(!held.whole(&[3, 7], &mut taken, need).unwrap());
        assert_eq!(taken, 2);
        taken = 0;
        assert!(held.whole(&[8, 9, 1, 1], &mut taken, need).unwrap());
        assert_eq!((taken, held.get()), (2, &[3, 7, 8, 9][..]));
    }

    #[test]
    fn no_structure_is_longer_than_what_can_be_held() {
        let mut held = Held::new();
        let mut taken = 0;
        assert!(!held.whole(&[1; 5000], &mut taken, |_| Ok(5000)).unwrap());
        assert_eq!(taken, Held::MAX);
    }
}
