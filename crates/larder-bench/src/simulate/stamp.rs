//! Content of the sectors that the simulator writes: it identifies the change that wrote the sector, and the sector.

/// Granularity of the simulator's checks, in bytes.
pub(super) const SECTOR: u64 = 512;

/// Length of a stamp, in bytes. It is repeated to fill its sector, so that a mix of two is detected.
const STAMP: usize = 16;

/// Number of the change that wrote a sector; zeroed sectors are [`Stamp::ZEROS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stamp(pub(super) u32);

impl Stamp {
    /// Content of a disk that was never written.
    pub(super) const ZEROS: Self = Self(0);
}

/// Reason why the bytes of a sector are no stamp of that sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unreadable {
    /// The bytes are from several sectors, or from none.
    #[error("it is torn inside the sector, or was never written")]
    Torn,
    /// The bytes are a whole other sector.
    #[error("it belongs to sector {sector} (change {})", stamp.0)]
    Misplaced {
        /// Sector that the bytes belong to.
        sector: u32,
        /// Change that wrote the bytes.
        stamp: Stamp,
    },
}

/// Fills `bytes`, whole sectors from `first` on, with `stamp`. `key` distinguishes the stamps of different runs.
pub(super) fn fill(bytes: &mut [u8], first: u64, change_id: Stamp, key: u64) {
    for (sector, bytes) in (first..).zip(bytes.chunks_exact_mut(SECTOR as usize)) {
        let change_id = encode(sector as u32, change_id, key);
        for part in bytes.chunks_exact_mut(STAMP) {
            part.copy_from_slice(&change_id);
        }
    }
}

/// Reads the stamp of `sector` from its bytes.
///
/// # Errors
/// If the bytes were never written to that sector.
pub(super) fn read(bytes: &[u8], sector: u64, key: u64) -> Result<Stamp, Unreadable> {
    let (first, rest) = bytes.split_at(STAMP);
    // Every part equals the preceding one.
    if rest != &bytes[..rest.len()] {
        return Err(Unreadable::Torn);
    }
    if first == [0; STAMP] {
        return Ok(Stamp::ZEROS);
    }
    let word = |at: usize| u32::from_le_bytes([first[at], first[at + 1], first[at + 2], first[at + 3]]);
    let (change_id, found) = (Stamp(word(0)), word(4));
    if first != encode(found, change_id, key) {
        return Err(Unreadable::Torn);
    }
    if u64::from(found) != sector {
        return Err(Unreadable::Misplaced { sector: found, stamp: change_id });
    }
    Ok(change_id)
}

/// Encodes change and sector in clear, followed by both scrambled with the key.
fn encode(sector: u32, change_id: Stamp, key: u64) -> [u8; STAMP] {
    let clear = u64::from(sector) << 32 | u64::from(change_id.0);
    let check = (clear ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = [0; STAMP];
    bytes[..8].copy_from_slice(&clear.to_le_bytes());
    bytes[8..].copy_from_slice(&check.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// A stamp detects a misplaced, foreign or torn sector.
    fn stamp_detects_misplaced_and_torn_sectors() {
        let mut bytes = [0; 1024];
        fill(&mut bytes, 7, Stamp(3), 99);
        assert_eq!(read(&bytes[512..], 8, 99), Ok(Stamp(3)));
        let misplaced = Unreadable::Misplaced { sector: 7, stamp: Stamp(3) };
        assert_eq!(read(&bytes[..512], 8, 99), Err(misplaced));
        assert_eq!(read(&bytes[..512], 7, 98), Err(Unreadable::Torn));
        bytes[100] ^= 1;
        assert_eq!(read(&bytes[..512], 7, 99), Err(Unreadable::Torn));
        assert_eq!(read(&[0; 512], 1, 99), Ok(Stamp::ZEROS));
    }
}
