//! Reports hot lines to a cache of the same disk on another host, and warms this cache with lines that were hot
//! there.
//!
//! Nothing depends on this: it may stop at any moment, and evicts no line.

use std::time::Duration;

use larder_block::{AlignedBuf, ByteLen, ByteOffset, ByteRange, IoResult, Operation, ReadBuf};
use larder_policy::policy::{AccessKind, HEAT_LEVELS, heat};

use crate::Cache;
use crate::fill::FILL_LEN_MAX;
use crate::layout::Line;

/// Lines that are inspected before other tasks run.
const LINES_PER_SLICE: u32 = 1 << 14;
/// The most lines that are reported: each takes 16 bytes of memory temporarily.
const HOT_LINES_MAX: usize = 1 << 20;
/// Inverse share of the slots that stays free for the guest's own requests.
const FREE_SHARE: u64 = 16;

impl Cache {
    /// Returns ranges of the disk whose lines are cached, the hottest first, at most `ranges_max`. Adjacent lines
    /// that are equally hot are one range. Other tasks run during the search.
    pub async fn hot_ranges(&self, ranges_max: usize) -> Vec<ByteRange> {
        let mut counts = [0_usize; HEAT_LEVELS];
        self.for_each_line(|_, heat| counts[usize::from(heat)] += 1).await;
        // Find the lowest heat such that the hotter lines do not fill the bound.
        let mut room = HOT_LINES_MAX;
        let heat_min = (0..HEAT_LEVELS).rev().find(|heat| {
            let is_last = counts[*heat] >= room;
            room = room.saturating_sub(counts[*heat]);
            is_last
        });
        let least = heat_min.unwrap_or(0);
        let mut lines: Vec<(u8, Line)> = Vec::new();
        self.for_each_line(|line, heat| {
            if usize::from(heat) >= least && lines.len() < HOT_LINES_MAX {
                lines.push((heat, line));
            }
        })
        .await;
        lines.sort_unstable_by_key(|(heat, line)| (std::cmp::Reverse(*heat), *line));
        let mut ranges: Vec<(u8, ByteRange)> = Vec::new();
        for (heat, line) in lines {
            let range = ByteRange::new(line << self.layout.line_bits, self.layout.line_len());
            let is_full = ranges.len() == ranges_max;
            match ranges.last_mut() {
                Some((last, before)) if *last == heat && before.end() == range.start => before.len += range.len,
                _ if is_full => break,
                _ => ranges.push((heat, range)),
            }
        }
        ranges.into_iter().map(|(_, range)| range).collect()
    }

    async fn for_each_line(&self, mut visit: impl FnMut(Line, u8)) {
        let per_turn = (LINES_PER_SLICE / self.layout.ways).max(1);
        let mut from = 0;
        while from < self.layout.sets && !self.has_failed() {
            let to = self.layout.sets.min(from + per_turn);
            {
                let mut index = self.index.borrow_mut();
                for set in from..to {
                    for slot in index.slots_of(set) {
                        let tag = index.tag(slot);
                        if tag != 0 {
                            let heat = heat(index.policy().save(slot));
                            visit(self.layout.line_of(set, tag), heat);
                        }
                    }
                }
            }
            from = to;
            let Some(on) = self.on.upgrade() else { return };
            on.sleep(Duration::from_micros(100)).await;
        }
    }

    /// Returns whether [`Cache::warm`] may still store lines.
    pub fn has_room(&self) -> bool {
        let slots = self.layout.slots();
        self.is_working() && self.index.borrow().lines.len() < slots - slots / FREE_SHARE
    }

    /// Fills the uncached lines of the first [`Cache::WARM_LEN`] bytes of `range`. Returns the number of bytes that
    /// are stored. Stores nothing where a line would have to be evicted, where the device is slow, or where the day's
    /// write budget of the cache device is spent.
    ///
    /// # Errors
    /// An error of the disk.
    pub async fn warm(&self, range: ByteRange) -> IoResult<ByteLen> {
        let mut stored = ByteLen::ZERO;
        let end = self.end().min(range.end()).min(range.start + ByteLen::new(Self::WARM_LEN));
        if end <= range.start || !self.may_warm() {
            return Ok(stored);
        }
        let range = ByteRange::between(range.start, end);
        self.load_range(range, Operation::Read).await?;
        self.wait_dropped_dirty(Operation::Read, range).await?;
        let is_missing = |line: &Line| self.index.borrow().find(*line).is_none();
        let missing: Vec<Line> = self.layout.lines_of(range).filter(is_missing).collect();
        for run in missing.chunk_by(|one, next| one + 1 == *next) {
            let (first, lines) = (run[0], run.len() as u64);
            let start = ByteOffset::new(first << self.layout.line_bits).max(range.start);
            let stop = ByteOffset::new((first + lines) << self.layout.line_bits).min(range.end());
            let piece = ByteRange::between(start, stop);
            if !self.may_warm() {
                break;
            }
            // The number of lines may exceed `unsettled_max` in total: lines are persisted in between.
            if !self.make_persist_room(lines as usize).await {
                break;
            }
            self.usage.count_admitted(lines * self.layout.line_len());
            let context = self.context(self.turn_time(), AccessKind::Read, piece.len.get());
            let mut memory = AlignedBuf::zeroed(piece.len.as_usize());
            self.read_and_fill(piece, ReadBuf::new(&mut memory), run, context).await?;
            self.fills.wait_ended(piece).await;
            for line in run.iter().filter(|line| !is_missing(line)) {
                stored += self.layout.part_of(*line, piece).range.len;
            }
        }
        self.counts.borrow_mut().warmed += stored.get();
        Ok(stored)
    }

    /// Bytes that [`Cache::warm`] stores at once.
    pub const WARM_LEN: u64 = FILL_LEN_MAX;

    fn may_warm(&self) -> bool {
        let now = Duration::from_nanos(self.turn_time().as_nanos());
        self.report_written(now);
        let is_spent = self.index.borrow_mut().policy().exceeds_budget(Self::WARM_LEN, now);
        self.has_room() && self.serves_reads() && !is_spent
    }
}
