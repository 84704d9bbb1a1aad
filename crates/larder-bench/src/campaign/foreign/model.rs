//! Allowed content of each sector of a disk: the last acknowledged content, the contents of requests in flight, or
//! another program's write.

use std::ops::Range;

use anyhow::{bail, ensure};

/// Bytes of a sector.
pub(super) const SECTOR: u64 = 512;

/// The version of zeroed sectors.
const ZEROS: u64 = 0;

/// Prefix of a version, so that no other bytes look like one.
const MAGIC: u64 = 0x6672_6e67_0000_0000;

/// Allowed content of a sector.
#[derive(Clone)]
struct Known {
    /// Versions that a read may return.
    allowed: Vec<u64>,
    /// True if another program has written the last version.
    is_foreign: bool,
}

/// Allowed content of each sector of a disk. If several versions are allowed, a read decides: later reads must return
/// the same version.
pub(super) struct Model {
    sectors: Vec<Known>,
    last_version: u64,
}

/// Kind of a mismatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Another program's write is missing.
    Stale,
    /// An acknowledged request of the guest is missing.
    Lost,
}

/// A sector with a version that is not allowed.
#[derive(Debug, thiserror::Error)]
#[error("sector {sector} holds version {found:?}, not one of {allowed:?}")]
pub(super) struct Mismatch {
    pub(super) wrong: Wrong,
    sector: u64,
    /// Version found; `None` if the bytes are no version of this sector.
    found: Option<u64>,
    allowed: Vec<u64>,
}

impl Model {
    /// Returns the model of a zeroed disk.
    pub(super) fn new(len: u64) -> Self {
        let zeros = Known { allowed: vec![ZEROS], is_foreign: false };
        Self { sectors: vec![zeros; (len / SECTOR) as usize], last_version: ZEROS }
    }

    fn of(&mut self, range: &Range<u64>) -> &mut [Known] {
        &mut self.sectors[(range.start / SECTOR) as usize..(range.end / SECTOR) as usize]
    }

    /// Creates a new version of a range, and returns its bytes.
    pub(super) fn new_version(&mut self, range: &Range<u64>) -> (u64, Vec<u8>) {
        self.last_version += 1;
        let sectors = range.start / SECTOR..range.end / SECTOR;
        let bytes = sectors.flat_map(|sector| contents(sector, self.last_version));
        (self.last_version, bytes.collect())
    }

    /// Records the start of the guest's write of a version.
    pub(super) fn begin(&mut self, range: &Range<u64>, version: u64) {
        for known in self.of(range) {
            known.allowed.push(version);
        }
    }

    /// Records the acknowledgement of the guest's write of a version.
    pub(super) fn complete(&mut self, range: &Range<u64>, version: u64) {
        self.set(range, version, false);
    }

    /// Records the guest's discard of a range: from then on it may hold its old content or zeros.
    pub(super) fn discard(&mut self, range: &Range<u64>) {
        self.begin(range, ZEROS);
    }

    /// Records another program's write of a version.
    pub(super) fn write_foreign(&mut self, range: &Range<u64>, version: u64) {
        self.set(range, version, true);
    }

    fn set(&mut self, range: &Range<u64>, version: u64, is_foreign: bool) {
        for known in self.of(range) {
            *known = Known { allowed: vec![version], is_foreign };
        }
    }

    /// Checks bytes of the disk against the model.
    ///
    /// # Errors
    /// The first [`Mismatch`].
    pub(super) fn check(&mut self, start: u64, bytes: &[u8]) -> anyhow::Result<()> {
        ensure!(
            (bytes.len() as u64).is_multiple_of(SECTOR),
            "a read of {} bytes is not a multiple of a sector",
            bytes.len()
        );
        for (sector, found) in (start / SECTOR..).zip(bytes.chunks(SECTOR as usize)) {
            let Some(known) = self.sectors.get_mut(sector as usize) else {
                bail!("sector {sector} is after the end of the disk");
            };
            let version = sector_version(sector, found);
            match version.filter(|version| known.allowed.contains(version)) {
                Some(version) => known.allowed = vec![version],
                None => {
                    return Err(Mismatch {
                        wrong: match known.is_foreign {
                            true => Wrong::Stale,
                            false => Wrong::Lost,
                        },
                        sector,
                        found: version,
                        allowed: known.allowed.clone(),
                    }
                    .into());
                }
            }
        }
        Ok(())
    }
}

/// Returns a sector's bytes in a version.
fn contents(sector: u64, version: u64) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    if version != ZEROS {
        let (pairs, _) = bytes.as_chunks_mut::<16>();
        for pair in pairs {
            pair[..8].copy_from_slice(&(MAGIC | version).to_le_bytes());
            pair[8..].copy_from_slice(&sector.to_le_bytes());
        }
    }
    bytes
}

/// Returns the version of a sector's bytes.
fn sector_version(sector: u64, bytes: &[u8]) -> Option<u64> {
    let word = u64::from_le_bytes(*bytes.first_chunk()?);
    let version = match word {
        0 => ZEROS,
        word => word ^ MAGIC,
    };
    (contents(sector, version) == *bytes).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(result: anyhow::Result<()>) -> Option<Wrong> {
        result.err().map(|error| error.downcast::<Mismatch>().expect("a mismatch").wrong)
    }

    #[test]
    /// Stale, lost and misplaced sectors are each reported as what they are.
    fn stale_lost_or_misplaced_sector_detected() {
        let (all, other) = (0..1024, 512..1024);
        let mut model = Model::new(2048);
        let (first, old) = model.new_version(&all);
        model.complete(&all, first);
        let (second, new) = model.new_version(&all);
        model.write_foreign(&other, second);
        assert_eq!(wrong(model.check(0, &old)), Some(Wrong::Stale));
        assert_eq!(wrong(model.check(0, &new)), Some(Wrong::Lost));
        assert_eq!(wrong(model.check(512, &new[512..])), None);
        assert_eq!(wrong(model.check(512, &new[..512])), Some(Wrong::Stale));
        assert_eq!(wrong(model.check(0, &[0; 512])), Some(Wrong::Lost));
        assert!(model.check(2048, &old[..512]).is_err());
    }

    #[test]
    /// After a read has returned one of several allowed versions, no other one is allowed.
    fn read_fixes_outcome_of_unacknowledged_write() {
        let all = 0..512;
        let mut model = Model::new(512);
        let (version, bytes) = model.new_version(&all);
        model.begin(&all, version);
        assert_eq!(wrong(model.check(0, &bytes)), None);
        assert_eq!(wrong(model.check(0, &[0; 512])), Some(Wrong::Lost));
        model.discard(&all);
        assert_eq!(wrong(model.check(0, &[0; 512])), None);
        assert_eq!(wrong(model.check(0, &bytes)), Some(Wrong::Lost));
    }
}
