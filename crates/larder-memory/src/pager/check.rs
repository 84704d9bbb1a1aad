//! Consistency check of the pager's counters, for simulators and tests.

use super::{Pager, Phase, StoredPages};
use crate::entry::{CopyLocation, EntryWord, Tier};
use crate::guest::GuestMemory;
use crate::segment_log::SegmentTable;
use crate::units::PageIndex;
use crate::worker::Worker;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Checks that all counters agree with the entries and the phases of the pages. Visits every page.
    ///
    /// # Errors
    /// The first counter or entry that is inconsistent.
    pub fn check(&self) -> Result<(), String> {
        let mut stored = StoredPages::default();
        let mut logs: Vec<Vec<u64>> = vec![vec![0; self.ram.count() as usize]];
        logs.extend(self.disks.all.iter().map(|disk| vec![0; disk.log.count() as usize]));
        let (mut resident, mut punching, mut reading) = (0, 0, 0);
        for page in (0..self.pages()).map(PageIndex::new) {
            let word = self.state.word(page);
            stored.change(EntryWord::NOT_STORED, word);
            let phase = self.phases.get(page);
            match phase {
                Phase::Absent => {}
                Phase::Reading => reading += 1,
                Phase::Punching => (resident, punching) = (resident + 1, punching + 1),
                Phase::Resident | Phase::Evicting(_) => resident += 1,
            }
            let has_copy = !matches!(word.decode(), Some(CopyLocation::NotStored | CopyLocation::Lost));
            if has_copy && word.is_clean() && phase != Phase::Resident {
                return Err(format!("{page:?} is {phase:?}, but its entry is marked as clean"));
            }
            if has_copy && !word.is_clean() && matches!(phase, Phase::Resident | Phase::Evicting(_)) {
                return Err(format!("{page:?} is {phase:?}, but its entry is {:#x}", word.0));
            }
            if let Some(CopyLocation::InTier { tier, object: stored, .. }) = word.decode() {
                let log = match tier {
                    Tier::Ram => Some(0),
                    Tier::Ssd | Tier::Slow => self.disks.index_of(tier).map(|disk| disk + 1),
                };
                let log = log.ok_or_else(|| format!("{page:?} is in {tier:?}, which does not exist"))?;
                logs[log][SegmentTable::index_of(stored)] += SegmentTable::bytes_of(stored);
            }
        }
        check_equal("pages stored", &self.stored, &stored)?;
        check_equal("pages in memory", &self.resident, &resident)?;
        check_equal("pages being read", &self.reading, &reading)?;
        if punching > self.punching {
            return Err(format!("{punching} pages are being removed, but {} are counted", self.punching));
        }
        let all = std::iter::once(&self.ram).chain(self.disks.all.iter().map(|disk| &disk.log));
        all.zip(&logs).try_for_each(|(log, live)| log.check(live))
    }
}

fn check_equal<T: PartialEq + std::fmt::Debug>(what: &str, counted: &T, found: &T) -> Result<(), String> {
    match counted == found {
        true => Ok(()),
        false => Err(format!("{what}: counted {counted:?}, found {found:?}")),
    }
}
