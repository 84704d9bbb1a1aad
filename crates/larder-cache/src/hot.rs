//! Reports hot lines to a cache of the same disk on another host, and warms this cache with lines that were hot
//! there.
//!
//! Nothing depends on this: it may stop at any moment, and evicts no line.

use std::time::Duration;

use larder_block::{AlignedBuf, ByteLen, ByteOffset, ByteRange, IoResult, Operation, ReadBuf};
use larder_policy::policy::{Access, HEATS, heat_of};

use crate::Cache;
use crate::fill::FILL_LEN;
use crate::shape::Line;

/// Lines that are inspected before other tasks run.
const LINES_PER_TURN: u32 = 1 << 14;
/// The most lines that are reported: each takes 16 bytes of memory temporarily.
const LINES_MAX: usize = 1 << 20;
/// Inverse share of the slots that stays free for the guest's own requests.
const FREE_SHARE: u64 = 16;

impl Cache {
    /// Returns ranges of the disk whose lines are cached, the hottest first, at most `ranges_max`. Adjacent lines
    /// that are equally hot are one range. Other tasks run during the search.
    pub async fn hot(&self, ranges_max: usize) -> Vec<ByteRange> {
        let mut counts = [0_usize; HEATS];
        self.each_line(|_, heat| counts[usize::from(heat)] += 1).await;
        // Find the lowest heat such that the hotter lines do not fill the bound.
        let mut room = LINES_MAX;
        let least = (0..HEATS).rev().find(|heat| {
            let is_last = counts[*heat] >= room;
            room = room.saturating_sub(counts[*heat]);
            is_last
        });
        let least = least.unwrap_or(0);
        let mut lines: Vec<(u8, Line)> = Vec::new();
        self.each_line(|line, heat| {
            if usize::from(heat) >= least && lines.len() < LINES_MAX {
                lines.push((heat, line));
            }
        })
        .await;
        lines.sort_unstable_by_key(|(heat, line)| (std::cmp::Reverse(*heat), *line));
        let mut ranges: Vec<(u8, ByteRange)> = Vec::new();
        for (heat, line) in lines {
            let range = ByteRange::new(line << self.shape.line_bits, self.shape.line_len());
            let is_full = ranges.len() == ranges_max;
            match ranges.last_mut() {
                Some((last, before)) if *last == heat && before.end() == range.start => before.len += range.len,
                _ if is_full => break,
                _ => ranges.push((heat, range)),
            }
        }
        ranges.into_iter().map(|(_, range)| range).collect()
    }

    async fn each_line(&self, mut look: impl FnMut(Line, u8)) {
        let per_turn = (LINES_PER_TURN / self.shape.ways).max(1);
        let mut from = 0;
        while from < self.shape.sets && !self.has_failed() {
            let to = self.shape.sets.min(from + per_turn);
            {
                let mut index = self.index.borrow_mut();
                for set in from..to {
                    for slot in index.slots_of(set) {
                        let tag = index.tag(slot);
                        if tag != 0 {
                            let heat = heat_of(index.policy().save(slot));
                            look(self.shape.line_of(set, tag), heat);
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
        let slots = self.shape.slots();
        self.works() && self.index.borrow().lines.len() < slots - slots / FREE_SHARE
    }

    /// Fills the uncached lines of the first [`Cache::WARM_LEN`] bytes of `range`. Returns the number of bytes that
    /// are stored. Stores nothing where a line would have to be evicted, where the device is slow, or where the day's
    /// write budget of the cache device is spent.
    ///
    /// # Errors
    /// An error of the disk.
    pub async fn warm(&self, range: ByteRange) -> IoResult<ByteLen> {
        let mut brought = ByteLen::ZERO;
        let end = self
            .end()
            .min(range.end())
            .min(range.start + ByteLen::new(Self::WARM_LEN));
        if end <= range.start || !self.may_warm() {
            return Ok(brought);
        }
        let range = ByteRange::between(range.start, end);
        self.load_range(range, Operation::Read).await?;
        self.undone(Operation::Read, range).await?;
        let is_missing = |line: &Line| self.index.borrow().find(*line).is_none();
        let missing: Vec<Line> = self.shape.lines_of(range).filter(is_missing).collect();
        for run in missing.chunk_by(|one, next| one + 1 == *next) {
            let (first, lines) = (run[0], run.len() as u64);
            let start = ByteOffset::new(first << self.shape.line_bits).max(range.start);
            let stop = ByteOffset::new((first + lines) << self.shape.line_bits).min(range.end());
            let piece = ByteRange::between(start, stop);
            if !self.may_warm() {
                break;
            }
            // The number of lines may exceed `unsettled_max` in total: lines are persisted in between.
            if !self.settles_before(lines as usize).await {
                break;
            }
            self.usage.admitted(lines * self.shape.line_len());
            let context = self.context(self.turn_time(), Access::Read, piece.len.get());
            let mut memory = AlignedBuf::zeroed(piece.len.as_usize());
            self.read_and_fill(piece, ReadBuf::new(&mut memory), run, context)
                .await?;
            self.fills.ended(piece).await;
            for line in run.iter().filter(|line| !is_missing(line)) {
                brought += self.shape.part_of(*line, piece).range.len;
            }
        }
        self.counts.borrow_mut().warmed += brought.get();
        Ok(brought)
    }

    /// Bytes that [`Cache::warm`] stores at once.
    pub const WARM_LEN: u64 = FILL_LEN;

    fn may_warm(&self) -> bool {
        let now = Duration::from_nanos(self.turn_time().as_nanos());
        self.tell_written(now);
        let is_spent = self.index.borrow_mut().policy().is_spent(Self::WARM_LEN, now);
        self.has_room() && self.may_be_read() && !is_spent
    }
}
