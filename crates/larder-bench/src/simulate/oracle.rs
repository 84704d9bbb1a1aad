//! The allowed content of a disk: a plain model of the contract, which knows requests, but nothing of how a device
//! works.
//!
//! For each sector it keeps the changes that the sector may hold now, or might hold after a crash. Time is a count of
//! events. A change takes effect at one moment between its start and its end, so:
//! - A change that ended before a later, completed change started is *gone*: a read that starts later does not see
//!   it.
//! - A change is gone too if it ended before a read started that saw another change.
//! - A gone change is also *lost* for a crash once a flush has completed that was called after the replacement. It is
//!   lost at once if the replacement was durable (FUA).
//!
//! Where the contract leaves a choice, the oracle allows both outcomes; it never raises a false alarm.

use std::fmt;

use larder_block::backend::simulated::DeviceStop;

use super::stamp::{SECTOR, Stamp, Unreadable};

/// A count of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Moment(u64);

/// Consecutive sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sectors {
    /// First sector.
    pub(super) first: u64,
    /// Number of sectors.
    pub(super) count: u64,
}

impl Sectors {
    fn indices(self) -> std::ops::Range<usize> {
        self.first as usize..(self.first + self.count) as usize
    }
}

/// Effect of a change on a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The sector holds the content with this stamp.
    Holds(Stamp),
    /// The sector holds zeros or any content that it once had, but always the same one.
    Forgets,
}

/// Result of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The change completed.
    Done,
    /// The change completed, and is durable.
    Forced,
    /// The change failed or was abandoned: each sector is old or new.
    Unsure,
}

/// A change in flight.
#[derive(Debug)]
pub(super) struct Change {
    number: u64,
    sectors: Sectors,
}

/// A violated invariant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    /// A read returned content that the sector cannot hold.
    #[error("sector {sector} reads as {seen}; it may hold {allowed}")]
    Impossible {
        /// The sector.
        sector: u64,
        /// Content that was read.
        seen: Shown,
        /// Contents that are allowed.
        allowed: Allowed,
    },
    /// A read returned bytes that are no content of this sector.
    #[error("sector {sector} is not readable: {why}")]
    Unreadable {
        /// The sector.
        sector: u64,
        /// The reason.
        why: Unreadable,
    },
}

/// A stamp as readable text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shown(Stamp);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Stamp::ZEROS => write!(f, "zeros"),
            Stamp(change) => write!(f, "#{change}"),
        }
    }
}

/// The first few allowed contents of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allowed {
    effects: [Option<Effect>; 6],
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, effect) in self.effects.iter().flatten().enumerate() {
            let or = if index > 0 { " or " } else { "" };
            match effect {
                Effect::Holds(stamp) => write!(f, "{or}{}", Shown(*stamp))?,
                Effect::Forgets => write!(f, "{or}any former content")?,
            }
        }
        Ok(())
    }
}

/// A change that a sector may hold.
#[derive(Clone, Copy, Debug)]
struct Entry {
    change: u64,
    effect: Effect,
    start: Moment,
    end: Option<Moment>,
    /// Moment from which no starting read sees the change.
    gone: Option<Moment>,
    /// Moment from which the call of a flush ensures that the change does not return after a crash.
    replaced: Option<Moment>,
    /// True if a crash cannot bring the change back.
    lost: bool,
    /// True if the change is from before the last power loss. The sector durably holds one of those changes.
    settled: bool,
}

impl Entry {
    fn ended_before(&self, moment: Moment) -> bool {
        self.end.is_some_and(|end| end < moment)
    }

    fn replace(&mut self, at: Moment, replaced: Option<Moment>) {
        self.gone = self.gone.or(Some(at));
        self.replaced = self.replaced.or(replaced);
    }
}

#[derive(Clone, Default)]
struct Sector {
    entries: Vec<Entry>,
    /// All contents ever written.
    history: Vec<Stamp>,
}

/// The model of one disk.
pub(super) struct Oracle {
    sectors: Vec<Sector>,
    now: Moment,
    next_change: u64,
    /// Latest call of a flush that has completed.
    flushed: Moment,
    /// Start of each read in flight.
    reads: Vec<Moment>,
}

impl Oracle {
    /// Creates the model of a disk of `sectors` zeroed sectors.
    pub(super) fn new(sectors: u64) -> Self {
        let mut oracle =
            Self { sectors: Vec::new(), now: Moment(1), next_change: 1, flushed: Moment(0), reads: Vec::new() };
        oracle.grow(sectors);
        oracle
    }

    /// Returns the current moment.
    pub(super) fn now(&self) -> Moment {
        self.now
    }

    /// Starts a change of `sectors`.
    pub(super) fn start_change(&mut self, sectors: Sectors, effect: Effect) -> Change {
        let start = self.tick();
        let number = self.next_change;
        self.next_change += 1;
        for sector in &mut self.sectors[sectors.indices()] {
            sector.add(number, effect, start);
        }
        Change { number, sectors }
    }

    /// Ends a change.
    pub(super) fn end_change(&mut self, change: Change, ending: Ending) {
        let now = self.tick();
        let purge = self.purge_limits();
        for sector in &mut self.sectors[change.sectors.indices()] {
            sector.end(change.number, ending, now);
            sector.purge(purge);
        }
    }

    /// Starts a read. The caller passes the returned moment to [`Oracle::see`] and [`Oracle::end_read`].
    pub(super) fn start_read(&mut self) -> Moment {
        let start = self.tick();
        self.reads.push(start);
        start
    }

    /// Ends a read, after its data was passed to [`Oracle::see`].
    pub(super) fn end_read(&mut self, start: Moment) {
        self.reads.retain(|read| *read != start);
    }

    /// Checks the data of a read that began at `start`; `seen` returns the stamp of each sector.
    ///
    /// # Errors
    /// The first sector with content that is not allowed.
    pub(super) fn see(
        &mut self,
        start: Moment,
        sectors: Sectors,
        mut seen: impl FnMut(u64) -> Result<Stamp, Unreadable>,
    ) -> Result<(), Violation> {
        let now = self.tick();
        let purge = self.purge_limits();
        for (index, sector) in (sectors.first..).zip(&mut self.sectors[sectors.indices()]) {
            let change_id = seen(index).map_err(|reason| Violation::Unreadable { sector: index, why: reason })?;
            if !sector.see(change_id, start, now) {
                return Err(Violation::Impossible {
                    sector: index,
                    seen: Shown(change_id),
                    allowed: sector.allowed(start),
                });
            }
            sector.purge(purge);
        }
        Ok(())
    }

    /// Starts a flush. The caller passes the returned moment to [`Oracle::end_flush`].
    pub(super) fn start_flush(&mut self) -> Moment {
        self.tick()
    }

    /// Ends a flush that succeeded.
    pub(super) fn end_flush(&mut self, start: Moment) {
        self.tick();
        self.flushed = self.flushed.max(start);
    }

    /// Records a change of the disk's size. Sectors that are cut off or added have undefined content.
    pub(super) fn resize(&mut self, from: u64, to: u64) {
        self.grow(to);
        let now = self.tick();
        let number = self.next_change;
        self.next_change += 1;
        let changed = from.min(to) as usize..from.max(to) as usize;
        for sector in &mut self.sectors[changed] {
            sector.add(number, Effect::Forgets, now);
            // A resize by an administrator is durable at once.
            sector.end(number, Ending::Forced, now);
        }
    }

    /// Stops the disk with all requests in flight; it then starts again.
    pub(super) fn stop(&mut self, how: DeviceStop) {
        let now = self.tick();
        let flushed = self.flushed;
        self.reads.clear();
        for sector in &mut self.sectors {
            sector.stop(how, now, flushed);
        }
        if how == DeviceStop::PowerLoss {
            self.flushed = Moment(0);
        }
    }

    /// Cuts off all sectors after the first `sectors`. Returns false if one of them had durable content.
    pub(super) fn cut_off(&mut self, sectors: u64) -> bool {
        let mut cut = self.sectors.drain((sectors as usize).min(self.sectors.len())..);
        let may_be_zeros = |sector: Sector| {
            let zeros = |entry: &Entry| matches!(entry.effect, Effect::Holds(Stamp::ZEROS) | Effect::Forgets);
            sector.entries.iter().any(zeros)
        };
        cut.all(may_be_zeros)
    }

    /// Extends the model to at least this number of sectors; new ones are zeros.
    pub(super) fn grow(&mut self, sectors: u64) {
        let start = self.tick();
        while (self.sectors.len() as u64) < sectors {
            let mut sector = Sector::default();
            sector.add(0, Effect::Holds(Stamp::ZEROS), start);
            sector.end(0, Ending::Forced, start);
            sector.entries[0].settled = true;
            self.sectors.push(sector);
        }
    }

    fn tick(&mut self) -> Moment {
        self.now.0 += 1;
        self.now
    }

    /// Returns the start of the first read in flight, and the call of the last flush. Changes that were gone before
    /// the former and replaced before the latter can be purged.
    fn purge_limits(&self) -> (Moment, Moment) {
        let first_read = self.reads.first().copied().unwrap_or(self.now);
        (first_read, self.flushed)
    }
}

impl Sector {
    fn add(&mut self, change: u64, effect: Effect, start: Moment) {
        if let Effect::Holds(change_id) = effect
            && !self.history.contains(&change_id)
        {
            self.history.push(change_id);
        }
        self.entries.push(Entry {
            change,
            effect,
            start,
            end: None,
            gone: None,
            replaced: None,
            lost: false,
            settled: false,
        });
    }

    fn end(&mut self, change: u64, ending: Ending, now: Moment) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.change == change) else {
            return;
        };
        entry.end = Some(now);
        let start = entry.start;
        if ending == Ending::Unsure {
            return;
        }
        for older in self.entries.iter_mut().filter(|entry| entry.ended_before(start)) {
            older.replace(now, Some(now));
            older.lost |= ending == Ending::Forced;
        }
    }

    /// Returns whether a read from `start` to `now` may have returned `change_id`. If so, updates the entries
    /// accordingly.
    fn see(&mut self, change_id: Stamp, start: Moment, now: Moment) -> bool {
        let was_ever_written = change_id == Stamp::ZEROS || self.history.contains(&change_id);
        let matches = |entry: &Entry| match entry.effect {
            _ if entry.gone.is_some_and(|gone| gone <= start) => false,
            Effect::Holds(own) => own == change_id,
            Effect::Forgets => was_ever_written,
        };
        let mut candidates = self.entries.iter().filter(|entry| matches(entry));
        let Some(first) = candidates.next().copied() else {
            return false;
        };
        let only = candidates.next().is_none();
        let all_ended = self
            .entries
            .iter()
            .filter(|entry| matches(entry))
            .try_fold(now, |latest, entry| entry.end.map(|end| end.max(latest)));
        let all_settled = self.entries.iter().filter(|entry| matches(entry)).all(|entry| entry.settled);
        for entry in &mut self.entries {
            if matches(entry) {
                // An undefined content is fixed by the first read.
                if only && entry.change == first.change {
                    entry.effect = Effect::Holds(change_id);
                }
            } else if entry.ended_before(start) {
                entry.replace(now, all_ended);
                entry.lost |= all_settled && entry.settled;
            }
        }
        true
    }

    fn allowed(&self, start: Moment) -> Allowed {
        let mut effects = [None; 6];
        let visible = self.entries.iter().filter(|entry| entry.gone.is_none_or(|gone| gone > start));
        for (into, entry) in effects.iter_mut().zip(visible) {
            *into = Some(entry.effect);
        }
        Allowed { effects }
    }

    fn stop(&mut self, how: DeviceStop, now: Moment, flushed: Moment) {
        for entry in &mut self.entries {
            entry.end = entry.end.or(Some(now));
        }
        if how == DeviceStop::Kill {
            return;
        }
        self.entries.retain(|entry| !entry.lost && entry.replaced.is_none_or(|replaced| replaced > flushed));
        for entry in &mut self.entries {
            (entry.start, entry.end) = (now, Some(now));
            (entry.gone, entry.replaced) = (None, None);
            // After a kill without power loss, the disk may still have several of them.
            entry.settled |= how == DeviceStop::PowerLoss;
        }
    }

    fn purge(&mut self, (first_read, flushed): (Moment, Moment)) {
        if self.entries.len() > 1 {
            self.entries.retain(|entry| {
                let unseen = entry.gone.is_some_and(|gone| gone <= first_read);
                let lost = entry.lost || entry.replaced.is_some_and(|replaced| replaced <= flushed);
                !(unseen && lost)
            });
        }
    }
}

/// Returns the sectors of a byte range, which must consist of whole sectors.
pub(super) fn sectors(start: u64, len: u64) -> Sectors {
    Sectors { first: start / SECTOR, count: len / SECTOR }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Sectors = Sectors { first: 0, count: 1 };

    fn write(oracle: &mut Oracle, change_id: u32, ending: Ending) {
        let change = oracle.start_change(ALL, Effect::Holds(Stamp(change_id)));
        oracle.end_change(change, ending);
    }

    fn reads(oracle: &mut Oracle, change_id: u32) -> bool {
        let start = oracle.start_read();
        let possible = oracle.see(start, ALL, |_| Ok(Stamp(change_id))).is_ok();
        oracle.end_read(start);
        possible
    }

    fn flush(oracle: &mut Oracle) {
        let start = oracle.start_flush();
        oracle.end_flush(start);
    }

    #[test]
    fn completed_write_replaces_old_content() {
        let mut oracle = Oracle::new(1);
        write(&mut oracle, 1, Ending::Done);
        assert!(!reads(&mut oracle, 0));
        assert!(reads(&mut oracle, 1));
        assert!(!reads(&mut oracle, 2));
    }

    #[test]
    /// A failed write leaves the old or the new content; the first read decides which.
    fn read_fixes_outcome_of_failed_write() {
        let mut oracle = Oracle::new(1);
        write(&mut oracle, 1, Ending::Unsure);
        assert!(reads(&mut oracle, 0));
        assert!(!reads(&mut oracle, 1));
        write(&mut oracle, 2, Ending::Unsure);
        assert!(reads(&mut oracle, 2));
        assert!(!reads(&mut oracle, 0));
    }

    #[test]
    /// Once a read has returned a write in flight, later reads return it too.
    fn in_flight_write_once_seen_stays() {
        let mut oracle = Oracle::new(1);
        let change = oracle.start_change(ALL, Effect::Holds(Stamp(1)));
        let early = oracle.start_read();
        assert!(reads(&mut oracle, 0));
        assert!(reads(&mut oracle, 1));
        assert!(!reads(&mut oracle, 0));
        // This read began before.
        assert!(oracle.see(early, ALL, |_| Ok(Stamp(0))).is_ok());
        oracle.end_change(change, Ending::Done);
    }

    #[test]
    /// After a power loss a sector holds the last flushed write or any later one, durably.
    fn power_loss_keeps_flushed_write() {
        for survivor_stamp in 0..4 {
            let mut oracle = Oracle::new(1);
            write(&mut oracle, 1, Ending::Done);
            flush(&mut oracle);
            write(&mut oracle, 2, Ending::Done);
            write(&mut oracle, 3, Ending::Done);
            oracle.stop(DeviceStop::PowerLoss);
            assert_eq!(reads(&mut oracle, survivor_stamp), survivor_stamp > 0, "{survivor_stamp}");
            if survivor_stamp > 0 {
                oracle.stop(DeviceStop::PowerLoss);
                for other in 0..4 {
                    assert!(other == survivor_stamp || !reads(&mut oracle, other));
                }
                assert!(reads(&mut oracle, survivor_stamp));
            }
        }
    }

    #[test]
    /// A flush covers only writes that had completed when it was called.
    fn flush_covers_writes_completed_before_call() {
        let mut oracle = Oracle::new(1);
        let called = oracle.start_flush();
        write(&mut oracle, 1, Ending::Done);
        oracle.end_flush(called);
        oracle.stop(DeviceStop::PowerLoss);
        assert!(reads(&mut oracle, 0));
    }

    #[test]
    /// After a power loss a FUA write is there, and earlier content does not return.
    fn fua_write_survives_power_loss() {
        let mut oracle = Oracle::new(1);
        write(&mut oracle, 1, Ending::Done);
        write(&mut oracle, 2, Ending::Forced);
        oracle.stop(DeviceStop::PowerLoss);
        assert!(!reads(&mut oracle, 1));
        assert!(reads(&mut oracle, 2));
    }

    #[test]
    /// A discarded sector holds any content that it once had, but always the same one.
    fn discarded_sector_holds_one_former_content() {
        for (first, second) in [(0, 1), (1, 2), (2, 0)] {
            let mut oracle = Oracle::new(1);
            write(&mut oracle, 1, Ending::Done);
            write(&mut oracle, 2, Ending::Done);
            let change = oracle.start_change(ALL, Effect::Forgets);
            oracle.end_change(change, Ending::Done);
            assert!(reads(&mut oracle, first));
            assert!(!reads(&mut oracle, second));
            assert!(!reads(&mut oracle, 3));
        }
    }

    #[test]
    /// A kill that loses the host's memory keeps flushed writes or later ones; the survivor is durable once flushed.
    fn lost_host_memory_keeps_flushed_writes() {
        for (survivor, after_power_loss) in [(1, 2), (2, 1)] {
            for flushed in [false, true] {
                let mut oracle = Oracle::new(1);
                write(&mut oracle, 1, Ending::Done);
                flush(&mut oracle);
                write(&mut oracle, 2, Ending::Done);
                oracle.stop(DeviceStop::KillAndClearMemory);
                assert!(!reads(&mut oracle, 0));
                assert!(reads(&mut oracle, survivor));
                assert!(!reads(&mut oracle, after_power_loss));
                if flushed {
                    flush(&mut oracle);
                }
                oracle.stop(DeviceStop::PowerLoss);
                assert_eq!(reads(&mut oracle, after_power_loss), !flushed);
            }
        }
    }

    #[test]
    /// A kill loses no completed write, but a power loss after it may.
    fn kill_keeps_completed_writes() {
        let mut oracle = Oracle::new(1);
        write(&mut oracle, 1, Ending::Done);
        oracle.stop(DeviceStop::Kill);
        assert!(!reads(&mut oracle, 0));
        oracle.stop(DeviceStop::PowerLoss);
        assert!(reads(&mut oracle, 0));
    }
}
