//! The pieces into which a long discard is split.

use std::time::Duration;

use crate::units::{ByteLen, ByteRange};

/// The maximum duration of a piece, as far as its length determines it.
const PIECE_TIME_MAX: Duration = Duration::from_millis(4);

/// The duration above which a piece is followed by [`PAUSE_TIME`], in which other requests run. Without the pause,
/// requests that wait for the file are not woken before the next piece has begun.
pub(super) const PAUSE_THRESHOLD: Duration = Duration::from_millis(1);
pub(super) const PAUSE_TIME: Duration = Duration::from_micros(200);

/// The length of the first piece, which is also the shortest, and of the longest.
const PIECE_LEN_MIN: ByteLen = ByteLen::mib(4);
const PIECE_LEN_MAX: ByteLen = ByteLen::mib(1 << 10);

/// The number of slow shortest pieces after which a longer one is tried.
const SLOW_PIECES_PER_TRIAL: u32 = 16;

/// The length of the next piece, chosen by the time that earlier pieces took. It grows while pieces take next to no
/// time, and shrinks while they are slow, as long as shorter ones are quicker: on a busy host the kernel is not the
/// cause of the delay, and more pieces would only wait more often.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiscardPieces {
    len: ByteLen,
    /// The length and time of the previous piece, if it took too long and the next one therefore has another length.
    previous: Option<(ByteLen, Duration)>,
    /// The number of shortest pieces that took too long.
    slow_count: u32,
}

impl Default for DiscardPieces {
    fn default() -> Self {
        Self { len: PIECE_LEN_MIN, previous: None, slow_count: 0 }
    }
}

impl DiscardPieces {
    /// Returns the next piece of `rest`. It ends at a multiple of the shortest length: a piece that ends inside a
    /// file system block leaves that block allocated.
    pub(super) fn next(self, rest: ByteRange) -> ByteRange {
        let end = (rest.start + self.len).align_down(PIECE_LEN_MIN.get());
        ByteRange::between(rest.start, end.min(rest.end()))
    }

    /// Records the time that a piece took.
    pub(super) fn record(&mut self, len: ByteLen, time: Duration) {
        if len != self.len {
            // A piece that was cut short says nothing about full ones.
            return;
        }
        let previous = self.previous.take();
        if time <= PIECE_TIME_MAX {
            if time < PIECE_TIME_MAX / 8 {
                self.lengthen(2);
            }
            return;
        }
        let (not_faster, not_slower) = previous.map_or((false, false), |(previous_len, previous_time)| {
            (previous_len > len && time > previous_time * 3 / 4, previous_len < len && time < previous_time * 3 / 2)
        });
        if not_faster {
            self.lengthen(4);
            return;
        }
        if not_slower {
            self.lengthen(2);
        } else if len > PIECE_LEN_MIN {
            self.len = ByteLen::new(len.get() / 2);
        } else {
            self.slow_count += 1;
            if !self.slow_count.is_multiple_of(SLOW_PIECES_PER_TRIAL) {
                return;
            }
            self.lengthen(2);
        }
        self.previous = Some((len, time));
    }

    fn lengthen(&mut self, times: u64) {
        self.len = ByteLen::new(self.len.get().saturating_mul(times)).min(PIECE_LEN_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::ByteOffset;

    /// Returns the length after many pieces, each of which takes `each` plus `per_gib` for each GiB.
    fn len_after(each: Duration, per_gib: Duration) -> ByteLen {
        let mut pieces = DiscardPieces::default();
        for _ in 0..100 {
            let len = pieces.len;
            pieces.record(len, each + per_gib * (len.get() >> 20) as u32 / 1024);
        }
        pieces.len
    }

    #[test]
    fn pieces_end_where_blocks_do() {
        let pieces = DiscardPieces::default();
        let range = ByteOffset::new(512).range(PIECE_LEN_MIN + PIECE_LEN_MIN);
        let first = pieces.next(range);
        assert_eq!((first.start, first.end()), (range.start, ByteOffset::new(PIECE_LEN_MIN.get())));
        let second = pieces.next(ByteRange::between(first.end(), range.end()));
        assert_eq!(second.len, PIECE_LEN_MIN);
        let last = pieces.next(ByteRange::between(second.end(), range.end()));
        assert_eq!(last.end(), range.end());
    }

    #[test]
    fn piece_length_adapts_to_time() {
        let (none, quick) = (Duration::ZERO, Duration::from_micros(10));
        assert_eq!(len_after(quick, none), PIECE_LEN_MAX);
        let len = len_after(quick, Duration::from_millis(20));
        assert!(len >= ByteLen::mib(16) && len <= ByteLen::mib(256), "{len}");
        assert_eq!(len_after(quick, Duration::from_secs(4)), PIECE_LEN_MIN);
    }

    /// Slow pieces are not shortened if their time does not depend on their length.
    #[test]
    fn constant_time_keeps_pieces_long() {
        for millis in [5, 10, 100] {
            let len = len_after(Duration::from_millis(millis), Duration::ZERO);
            assert!(len.get() >= PIECE_LEN_MAX.get() / 2, "{len}");
        }
    }
}
