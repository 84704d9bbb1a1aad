//! Expected state of each sector of a disk: the writes that a client has made, and which of them a read may return.

use std::ops::Range;

use anyhow::{bail, ensure};

/// Bytes of a sector.
pub const SECTOR: usize = 512;

const WORDS: usize = SECTOR / 8;

/// Known state of one sector, as write numbers. Higher is later.
#[derive(Clone, Copy, Default)]
struct ExpectedSector {
    completed: u64,
    flushed: u64,
    in_flight: Option<u64>,
}

impl ExpectedSector {
    /// Returns whether a read may return write `number`, if `before` was the last completed write when the read
    /// began.
    fn has(&self, number: u64, before: u64) -> bool {
        number >= before && (number <= self.completed || Some(number) == self.in_flight)
    }
}

/// Expected state of all sectors of a disk.
pub struct ExpectedDisk(Vec<ExpectedSector>);

/// Sectors with the number of their last completed write.
pub type Completed = Vec<(u64, u64)>;

impl ExpectedDisk {
    /// Creates the state of a zeroed disk with the given number of sectors.
    pub fn new(sectors: u64) -> Self {
        Self(vec![ExpectedSector::default(); sectors as usize])
    }

    fn of(&self, sectors: &Range<u64>) -> &[ExpectedSector] {
        &self.0[sectors.start as usize..sectors.end as usize]
    }

    fn sector_states_mut(&mut self, sectors: &Range<u64>) -> &mut [ExpectedSector] {
        &mut self.0[sectors.start as usize..sectors.end as usize]
    }

    /// Returns whether a write to any of the sectors is in flight.
    pub fn has_writes_in_flight(&self, sectors: &Range<u64>) -> bool {
        self.of(sectors).iter().any(|book| book.in_flight.is_some())
    }

    /// Records the start of a write.
    pub fn begin(&mut self, sectors: &Range<u64>, number: u64) {
        for book in self.sector_states_mut(sectors) {
            book.in_flight = Some(number);
        }
    }

    /// Records the completion of a write.
    pub fn complete(&mut self, sectors: &Range<u64>, number: u64) {
        for book in self.sector_states_mut(sectors) {
            book.completed = number;
            book.in_flight = None;
        }
    }

    /// Returns the last completed write of each of these sectors.
    pub fn completed(&self, sectors: impl Iterator<Item = u64>) -> Completed {
        sectors.map(|sector| (sector, self.0[sector as usize].completed)).collect()
    }

    /// Records that a flush has made these writes durable.
    pub fn flush(&mut self, covered: Completed) {
        for (sector, number) in covered {
            let book = &mut self.0[sector as usize];
            book.flushed = book.flushed.max(number);
        }
    }

    /// Checks the data of a read that began when the writes in `before` had completed. A read that overlaps a write
    /// may return a mix of old and new words, because Linux copies from and to its page cache concurrently.
    ///
    /// # Errors
    /// If the data is older than `before`, torn without an overlapping write, or of another sector.
    pub fn compare_read(&self, before: &Completed, bytes: &[u8]) -> anyhow::Result<()> {
        for ((sector, before), got) in before.iter().zip(bytes.chunks(SECTOR)) {
            let book = &self.0[*sector as usize];
            let write_number = write_number_in(*sector, got);
            let is_allowed = match write_number {
                Some(number) => book.has(number, *before),
                None => is_mixed(*sector, got, &[*before, book.completed, book.in_flight.unwrap_or(*before)]),
            };
            if !is_allowed {
                return self.complain("returned", *sector, write_number);
            }
        }
        Ok(())
    }

    /// Checks the content of the disk: each sector holds its last completed write, or one that was in flight.
    ///
    /// # Errors
    /// If a sector holds anything else.
    pub fn compare(&self, disk: &[u8]) -> anyhow::Result<()> {
        self.compare_at_least(disk, |book| book.completed)
    }

    /// Checks an image after power loss: each sector holds its last flushed write or a later one.
    ///
    /// # Errors
    /// If a sector holds anything else.
    pub fn compare_flushed(&self, disk: &[u8]) -> anyhow::Result<()> {
        self.compare_at_least(disk, |book| book.flushed)
    }

    /// Checks that each sector holds the `oldest_allowed` write, or a later one.
    fn compare_at_least(&self, disk: &[u8], oldest_allowed: fn(&ExpectedSector) -> u64) -> anyhow::Result<()> {
        ensure!(disk.len() == self.0.len() * SECTOR, "the disk has {} bytes", disk.len());
        for ((sector, book), got) in (0..).zip(&self.0).zip(disk.chunks(SECTOR)) {
            let found = write_number_in(sector, got);
            if !found.is_some_and(|number| book.has(number, oldest_allowed(book))) {
                return self.complain("holds", sector, found);
            }
        }
        Ok(())
    }

    fn complain(&self, verb: &str, sector: u64, found: Option<u64>) -> anyhow::Result<()> {
        let ExpectedSector { completed, flushed, in_flight: under_way } = self.0[sector as usize];
        let found_text = match found {
            Some(number) => format!("write {number}"),
            None => "no write to this sector".to_owned(),
        };
        bail!(
            "sector {sector} {verb} {found_text}; last flushed {flushed}, last completed {completed}, in flight {under_way:?}"
        );
    }
}

/// Returns the bytes that write `number` puts into the sectors. Each sector's bytes contain the sector's number and
/// the write's.
pub fn contents(sectors: &Range<u64>, number: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity((sectors.end - sectors.start) as usize * SECTOR);
    for sector in sectors.clone() {
        for word in words(sector, number) {
            bytes.extend(word.to_le_bytes());
        }
    }
    bytes
}

/// Returns whether each word of a sector comes from one of these writes.
fn is_mixed(sector: u64, got: &[u8], numbers: &[u64]) -> bool {
    let writes: Vec<Vec<u64>> = numbers.iter().map(|number| words(sector, *number).collect()).collect();
    let mut indexed = (0..).zip(got.chunks(8));
    indexed.all(|(index, word): (usize, _)| writes.iter().any(|words| words[index].to_le_bytes() == word))
}

/// Words that write `number` puts into a sector; zeros for number 0, a sector that was never written.
fn words(sector: u64, number: u64) -> impl Iterator<Item = u64> {
    let mut filler = sector ^ number.rotate_left(17);
    let filled = std::iter::repeat_with(move || {
        filler = filler.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        filler
    });
    let is_written = number != 0;
    let words = [sector, number].into_iter().chain(filled).take(WORDS);
    words.map(move |word| if is_written { word } else { 0 })
}

/// Returns the write that made a sector's bytes: 0 for zeros, `None` if the bytes are not of this sector or not all
/// of one write.
fn write_number_in(sector: u64, got: &[u8]) -> Option<u64> {
    let word = |index: usize| Some(u64::from_le_bytes(got.get(index * 8..index * 8 + 8)?.try_into().ok()?));
    let number = word(1)?;
    let is_intact = is_mixed(sector, got, &[number]);
    (is_intact && got.len() == SECTOR).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// The check detects stale, torn and misplaced sectors, and accepts words mixed by an overlapping write.
    fn stale_torn_or_misplaced_sector_detected() {
        let mut books = ExpectedDisk::new(4);
        let all = 0..4;
        let zeros = vec![0; 4 * SECTOR];
        assert!(books.compare(&zeros).is_ok());
        books.begin(&all, 1);
        let first = contents(&all, 1);
        assert!(books.compare(&zeros).is_ok() && books.compare(&first).is_ok());
        let before = books.completed(all.clone());
        books.complete(&all, 1);
        assert!(books.compare(&zeros).is_err() && books.compare_flushed(&zeros).is_ok());
        assert!(books.compare_read(&before, &zeros).is_ok(), "the read began before the write completed");
        books.flush(books.completed(all.clone()));
        assert!(books.compare_flushed(&zeros).is_err() && books.compare_flushed(&first).is_ok());
        let mut elsewhere = first.clone();
        elsewhere.rotate_left(SECTOR);
        assert!(books.compare(&elsewhere).is_err());
        let mut torn = first.clone();
        torn[SECTOR - 1] ^= 1;
        assert!(books.compare(&torn).is_err());
        let before = books.completed(all.clone());
        books.begin(&all, 2);
        let second = contents(&all, 2);
        assert!(books.compare_read(&before, &second).is_ok() && books.compare_read(&before, &zeros).is_err());
        let overlapped = [&first[..64], &second[64..]].concat();
        assert!(books.compare_read(&before, &overlapped).is_ok(), "a write overlapped the read");
        books.complete(&all, 2);
        assert!(books.compare_read(&before, &overlapped).is_ok(), "a write overlapped the read");
        let before = books.completed(all.clone());
        assert!(books.compare_read(&before, &overlapped).is_err() && books.compare(&overlapped).is_err());
    }
}
