//! The pieces that a long discard is made in.

use std::time::Duration;

use crate::units::{ByteLen, ByteRange};

/// A piece takes no longer than this, as far as its length has a say in that.
const TIME_MAX: Duration = Duration::from_millis(4);

/// After a piece that took so long, others go first for this time: who waits for the file is not woken before the next
/// piece has begun, otherwise.
pub(super) const LONG: Duration = Duration::from_millis(1);
pub(super) const PAUSE: Duration = Duration::from_micros(200);

/// Bytes of the first piece, which is also the shortest, and of the longest.
const FIRST: ByteLen = ByteLen::mib(4);
const MAX: ByteLen = ByteLen::mib(1 << 10);

/// After so many shortest pieces that took long, a longer one is tried.
const LONG_PER_TRY: u32 = 16;

/// The length of the next piece, by the time that those before it took. It becomes longer while pieces take next to no time,
/// and shorter where they take long, as long as shorter ones are quicker: on a busy host the time is not the kernel's, and more
/// pieces would only be waited for more often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    len: ByteLen,
    /// The length and time of the piece before, if that took too long and the next one has another length therefore.
    before: Option<(ByteLen, Duration)>,
    /// Shortest pieces that took too long.
    long: u32,
}

impl Default for Pieces {
    fn default() -> Self {
        Self {
            len: FIRST,
            before: None,
            long: 0,
        }
    }
}

impl Pieces {
    /// The next piece of `rest`. It ends at a multiple of the shortest one: at a place inside one of the file system's
    /// blocks, that block would stay.
    pub(super) fn next(self, rest: ByteRange) -> ByteRange {
        let end = (rest.start + self.len).align_down(FIRST.get());
        ByteRange::between(rest.start, end.min(rest.end()))
    }

    /// Takes note of a piece's time.
    pub(super) fn took(&mut self, len: ByteLen, time: Duration) {
        if len != self.len {
            // One that was cut short says nothing about those that are not.
            return;
        }
        let before = self.before.take();
        if time <= TIME_MAX {
            if time < TIME_MAX / 8 {
                self.become_longer(2);
            }
            return;
        }
        let (is_no_quicker, is_no_slower) = before.map_or((false, false), |(was_len, was)| {
            (was_len > len && time > was * 3 / 4, was_len < len && time < was * 3 / 2)
        });
        if is_no_quicker {
            self.become_longer(4);
            return;
        }
        if is_no_slower {
            self.become_longer(2);
        } else if len > FIRST {
            self.len = ByteLen::new(len.get() / 2);
        } else {
            self.long += 1;
            if !self.long.is_multiple_of(LONG_PER_TRY) {
                return;
            }
            self.become_longer(2);
        }
        self.before = Some((len, time));
    }

    fn become_longer(&mut self, times: u64) {
        self.len = ByteLen::new(self.len.get().saturating_mul(times)).min(MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::ByteOffset;

    /// The length after many pieces, each of which takes some time for itself and some for each GiB.
    fn len_after(each: Duration, per_gib: Duration) -> ByteLen {
        let mut pieces = Pieces::default();
        for _ in 0..100 {
            let len = pieces.len;
            pieces.took(len, each + per_gib * (len.get() >> 20) as u32 / 1024);
        }
        pieces.len
    }

    #[test]
    fn pieces_end_where_blocks_do() {
        let pieces = Pieces::default();
        let range = ByteOffset::new(512).range(FIRST + FIRST);
        let first = pieces.next(range);
        assert_eq!((first.start, first.end()), (range.start, ByteOffset::new(FIRST.get())));
        let second = pieces.next(ByteRange::between(first.end(), range.end()));
        assert_eq!(second.len, FIRST);
        let last = pieces.next(ByteRange::between(second.end(), range.end()));
        assert_eq!(last.end(), range.end());
    }

    #[test]
    fn pieces_are_as_long_as_time_allows() {
        let (none, quick) = (Duration::ZERO, Duration::from_micros(10));
        assert_eq!(len_after(quick, none), MAX);
        let len = len_after(quick, Duration::from_millis(20));
        assert!(len >= ByteLen::mib(16) && len <= ByteLen::mib(256), "{len}");
        assert_eq!(len_after(quick, Duration::from_secs(4)), FIRST);
    }

    #[test]
    fn time_without_regard_to_length_shortens_nothing() {
        for millis in [5, 10, 100] {
            let len = len_after(Duration::from_millis(millis), Duration::ZERO);
            assert!(len.get() >= MAX.get() / 2, "{len}");
        }
    }
}
