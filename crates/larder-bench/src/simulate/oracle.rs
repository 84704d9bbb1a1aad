//! What a disk may hold: a plain model of the contract, which knows requests and nothing of how a device works.
//!
//! For each sector it keeps the changes that the sector may hold now, or might hold after a crash. Time is a count of
//! events. A change takes effect at one moment between its start and its end, so:
//! - One that ended before another, which completed, had started is *gone*: a read that starts later does not see it.
//! - So is one that ended before a read started which saw another.
//! - A gone change is *lost* for a crash, too, once a flush that was called after it was replaced has completed, or at
//!   once if what replaced it was forced (FUA).
//!
//! Where the contract leaves a choice, the oracle allows both; it never raises a false alarm.

use std::fmt;

use larder_block::backend::simulated::Stop;

use super::stamp::{SECTOR, Stamp, Unreadable};

/// A count of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Moment(u64);

/// Sectors from the first on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sectors {
    /// First sector.
    pub(super) first: u64,
    /// How many.
    pub(super) count: u64,
}

impl Sectors {
    fn indices(self) -> std::ops::Range<usize> {
        self.first as usize..(self.first + self.count) as usize
    }
}

/// What a change makes of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// This.
    Holds(Stamp),
    /// Anything that it once was, or zeros; but then always the same.
    Forgets,
}

/// How a change ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// It completed.
    Done,
    /// It completed, and is durable.
    Forced,
    /// It failed or was given up: each sector is old or new.
    Unsure,
}

/// A change under way.
#[derive(Debug)]
pub(super) struct Change {
    number: u64,
    sectors: Sectors,
}

/// A promise that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    /// A read saw what the sector cannot hold.
    #[error("sector {sector} reads as {seen}; it may hold {allowed}")]
    Impossible {
        /// Which sector.
        sector: u64,
        /// What was read.
        seen: Shown,
        /// What it may hold.
        allowed: Allowed,
    },
    /// A read saw bytes that are no sector of this place.
    #[error("sector {sector} is not readable: {why}")]
    Unreadable {
        /// Which sector.
        sector: u64,
        /// Why.
        why: Unreadable,
    },
}

/// A stamp for people.
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

/// The first few of what a sector may hold.
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
                Effect::Forgets => write!(f, "{or}anything that it once was")?,
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
    /// Since when no read that starts sees it.
    gone: Option<Moment>,
    /// A flush called at or after this moment makes sure that a crash does not bring it back.
    replaced: Option<Moment>,
    /// A crash does not bring it back.
    lost: bool,
    /// It is from before the last loss of power: one of those is what the sector holds, durably.
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
    /// All that was ever written.
    history: Vec<Stamp>,
}

/// The model of one disk.
pub(super) struct Oracle {
    sectors: Vec<Sector>,
    now: Moment,
    next_change: u64,
    /// The latest call of a flush that completed.
    flushed: Moment,
    /// When the reads under way began.
    reads: Vec<Moment>,
}

impl Oracle {
    /// A disk of `sectors` sectors of zeros.
    pub(super) fn new(sectors: u64) -> Self {
        let mut oracle = Self {
            sectors: Vec::new(),
            now: Moment(1),
            next_change: 1,
            flushed: Moment(0),
            reads: Vec::new(),
        };
        oracle.grow(sectors);
        oracle
    }

    /// The present.
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

    /// Starts a read; its start is given back with what it brought, and with its end.
    pub(super) fn start_read(&mut self) -> Moment {
        let start = self.tick();
        self.reads.push(start);
        start
    }

    /// Ends a read; what it brought has been shown to [`Oracle::see`] before.
    pub(super) fn end_read(&mut self, start: Moment) {
        self.reads.retain(|read| *read != start);
    }

    /// A read that began at `start` has brought `seen` for `sectors`.
    ///
    /// # Errors
    /// The first sector that cannot be so.
    pub(super) fn see(
        &mut self,
        start: Moment,
        sectors: Sectors,
        mut seen: impl FnMut(u64) -> Result<Stamp, Unreadable>,
    ) -> Result<(), Violation> {
        let now = self.tick();
        let purge = self.purge_limits();
        for (index, sector) in (sectors.first..).zip(&mut self.sectors[sectors.indices()]) {
            let stamp = seen(index).map_err(|why| Violation::Unreadable { sector: index, why })?;
            if !sector.see(stamp, start, now) {
                return Err(Violation::Impossible {
                    sector: index,
                    seen: Shown(stamp),
                    allowed: sector.allowed(start),
                });
            }
            sector.purge(purge);
        }
        Ok(())
    }

    /// Starts a flush; its start is given back with its success.
    pub(super) fn start_flush(&mut self) -> Moment {
        self.tick()
    }

    /// Ends a flush that succeeded.
    pub(super) fn end_flush(&mut self, start: Moment) {
        self.tick();
        self.flushed = self.flushed.max(start);
    }

    /// The disk's size has changed; what is cut off or added is forgotten.
    pub(super) fn resize(&mut self, from: u64, to: u64) {
        self.grow(to);
        let now = self.tick();
        let number = self.next_change;
        self.next_change += 1;
        let changed = from.min(to) as usize..from.max(to) as usize;
        for sector in &mut self.sectors[changed] {
            sector.add(number, Effect::Forgets, now);
            // An administrator's change is durable at once.
            sector.end(number, Ending::Forced, now);
        }
    }

    /// The disk has stopped with all that was under way, and starts again.
    pub(super) fn stop(&mut self, how: Stop) {
        let now = self.tick();
        let flushed = self.flushed;
        self.reads.clear();
        for sector in &mut self.sectors {
            sector.stop(how, now, flushed);
        }
        if how == Stop::PowerLoss {
            self.flushed = Moment(0);
        }
    }

    /// What lies behind the first `sectors` sectors has gone; false if something there was durable.
    pub(super) fn cut_off(&mut self, sectors: u64) -> bool {
        let mut cut = self.sectors.drain((sectors as usize).min(self.sectors.len())..);
        let may_be_zeros = |sector: Sector| {
            let zeros = |entry: &Entry| matches!(entry.effect, Effect::Holds(Stamp::ZEROS) | Effect::Forgets);
            sector.entries.iter().any(zeros)
        };
        cut.all(may_be_zeros)
    }

    /// The disk has, or may get, so many sectors at least; new ones are zeros.
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

    /// The first read under way, and the last flush: what was gone before the one and replaced before the other is no
    /// longer needed.
    fn purge_limits(&self) -> (Moment, Moment) {
        let first_read = self.reads.first().copied().unwrap_or(self.now);
        (first_read, self.flushed)
    }
}

impl Sector {
    fn add(&mut self, change: u64, effect: Effect, start: Moment) {
        if let Effect::Holds(stamp) = effect
            && !self.history.contains(&stamp)
        {
            self.history.push(stamp);
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

    /// Whether a read from `start` to `now` may have seen `stamp`; if so, what follows from it.
    fn see(&mut self, stamp: Stamp, start: Moment, now: Moment) -> bool {
        let once = stamp == Stamp::ZEROS || self.history.contains(&stamp);
        let explains = |entry: &Entry| match entry.effect {
            _ if entry.gone.is_some_and(|gone| gone <= start) => false,
            Effect::Holds(own) => own == stamp,
            Effect::Forgets => once,
        };
        let mut explanations = self.entries.iter().filter(|entry| explains(entry));
        let Some(first) = explanations.next().copied() else {
            return false;
        };
        let only = explanations.next().is_none();
        let all_ended = self
            .entries
            .iter()
            .filter(|entry| explains(entry))
            .try_fold(now, |latest, entry| entry.end.map(|end| end.max(latest)));
        let all_settled = self
            .entries
            .iter()
            .filter(|entry| explains(entry))
            .all(|entry| entry.settled);
        for entry in &mut self.entries {
            if explains(entry) {
                // What forgets, forgets once.
                if only && entry.change == first.change {
                    entry.effect = Effect::Holds(stamp);
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
        let present = self
            .entries
            .iter()
            .filter(|entry| entry.gone.is_none_or(|gone| gone > start));
        for (into, entry) in effects.iter_mut().zip(present) {
            *into = Some(entry.effect);
        }
        Allowed { effects }
    }

    fn stop(&mut self, how: Stop, now: Moment, flushed: Moment) {
        for entry in &mut self.entries {
            entry.end = entry.end.or(Some(now));
        }
        if how == Stop::Kill {
            return;
        }
        self.entries
            .retain(|entry| !entry.lost && entry.replaced.is_none_or(|replaced| replaced > flushed));
        for entry in &mut self.entries {
            (entry.start, entry.end) = (now, Some(now));
            (entry.gone, entry.replaced) = (None, None);
            // Otherwise the disk may still have several of them.
            entry.settled |= how == Stop::PowerLoss;
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

/// The sectors of a range of bytes, both ends of which are whole sectors.
pub(super) fn sectors(start: u64, len: u64) -> Sectors {
    Sectors {
        first: start / SECTOR,
        count: len / SECTOR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Sectors = Sectors { first: 0, count: 1 };

    fn write(oracle: &mut Oracle, stamp: u32, ending: Ending) {
        let change = oracle.start_change(ALL, Effect::Holds(Stamp(stamp)));
        oracle.end_change(change, ending);
    }

    fn reads(oracle: &mut Oracle, stamp: u32) -> bool {
        let start = oracle.start_read();
        let possible = oracle.see(start, ALL, |_| Ok(Stamp(stamp))).is_ok();
        oracle.end_read(start);
        possible
    }

    fn flush(oracle: &mut Oracle) {
        let start = oracle.start_flush();
        oracle.end_flush(start);
    }

    #[test]
    fn a_completed_write_replaces_what_was_there() {
        let mut oracle = Oracle::new(1);
        write(&mut oracle, 1, Ending::Done);
        assert!(!reads(&mut oracle, 0));
        assert!(reads(&mut oracle, 1));
        assert!(!reads(&mut oracle, 2));
    }

    #[test]
    fn a_failed_write_is_old_or_new_but_does_not_change_its_mind() {
        let mut oracle = Oracle::new(1);
        write(&mut oracle, 1, Ending::Unsure);
        assert!(reads(&mut oracle, 0));
        assert!(!reads(&mut oracle, 1));
        write(&mut oracle, 2, Ending::Unsure);
        assert!(reads(&mut oracle, 2));
        assert!(!reads(&mut oracle, 0));
    }

    #[test]
    fn a_write_under_way_once_seen_stays() {
        let mut oracle = Oracle::new(1);
        let change = oracle.start_change(ALL, Effect::Holds(Stamp(1)));
        let early = oracle.start_read();
        assert!(reads(&mut oracle, 0));
        assert!(reads(&mut oracle, 1));
        assert!(!reads(&mut oracle, 0));
        // This one began before.
        assert!(oracle.see(early, ALL, |_| Ok(Stamp(0))).is_ok());
        oracle.end_change(change, Ending::Done);
    }

    #[test]
    fn a_crash_keeps_what_was_flushed_and_any_of_the_rest() {
        for survivor in 0..4 {
            let mut oracle = Oracle::new(1);
            write(&mut oracle, 1, Ending::Done);
            flush(&mut oracle);
            write(&mut oracle, 2, Ending::Done);
            write(&mut oracle, 3, Ending::Done);
            oracle.stop(Stop::PowerLoss);
            assert_eq!(reads(&mut oracle, survivor), survivor > 0, "{survivor}");
            if survivor > 0 {
                oracle.stop(Stop::PowerLoss);
                for other in 0..4 {
                    assert!(other == survivor || !reads(&mut oracle, other));
                }
                assert!(reads(&mut oracle, survivor));
            }
        }
    }

    #[test]
    fn a_flush_covers_what_had_ended_when_it_was_called() {
        let mut oracle = Oracle::new(1);
        let called = oracle.start_flush();
        write(&mut oracle, 1, Ending::Done);
        oracle.end_flush(called);
        oracle.stop(Stop::PowerLoss);
        assert!(reads(&mut oracle, 0));
    }

    #[test]
    fn a_forced_write_survives_and_what_came_before_does_not_return() {
        let mut oracle = Oracle::new(1);
        write(&mut oracle, 1, Ending::Done);
        write(&mut oracle, 2, Ending::Forced);
        oracle.stop(Stop::PowerLoss);
        assert!(!reads(&mut oracle, 1));
        assert!(reads(&mut oracle, 2));
    }

    #[test]
    fn what_is_discarded_is_anything_that_it_once_was_but_always_the_same() {
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
    fn a_kill_that_loses_memory_keeps_what_was_flushed_and_any_of_the_rest_until_that_is_flushed_too() {
        for (survivor, after_power_loss) in [(1, 2), (2, 1)] {
            for flushed in [false, true] {
                let mut oracle = Oracle::new(1);
                write(&mut oracle, 1, Ending::Done);
                flush(&mut oracle);
                write(&mut oracle, 2, Ending::Done);
                oracle.stop(Stop::KillAndForget);
                assert!(!reads(&mut oracle, 0));
                assert!(reads(&mut oracle, survivor));
                assert!(!reads(&mut oracle, after_power_loss));
                if flushed {
                    flush(&mut oracle);
                }
                oracle.stop(Stop::PowerLoss);
                assert_eq!(reads(&mut oracle, after_power_loss), !flushed);
            }
        }
    }

    #[test]
    fn a_killed_process_loses_nothing_that_was_completed() {
        let mut oracle = Oracle::new(1);
        write(&mut oracle, 1, Ending::Done);
        oracle.stop(Stop::Kill);
        assert!(!reads(&mut oracle, 0));
        oracle.stop(Stop::PowerLoss);
        assert!(reads(&mut oracle, 0));
    }
}
