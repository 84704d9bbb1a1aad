//! The hot ranges of a disk as text, and the warming of a cache with hot ranges while the guest is idle.
//!
//! ```text
//! 17+3,4+1,...      ranges in units of 4 KiB: start and length; the hottest first
//! ```

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use larder_block::signal::Signal;
use larder_block::{ByteLen, ByteRange, Loop};
use larder_cache::Cache;

use super::handle::RunningDisk;
use crate::image::OpenImage;

/// Unit of the text, in bytes: the smallest line of a cache.
const UNIT_BYTES: u64 = 4096;
/// Maximum number of reported ranges of a disk: about 400 KiB of text.
pub const HOT_RANGES_MAX: usize = 32 << 10;
/// Interval between checks whether the guest is idle.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Minimum pause after each piece; otherwise the pause is as long as the piece took.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// Formats ranges as text.
pub fn format_hot_ranges(ranges: &[ByteRange]) -> String {
    let parts: Vec<String> = ranges
        .iter()
        .map(|range| format!("{}+{}", range.start.get() / UNIT_BYTES, range.len.get().div_ceil(UNIT_BYTES)))
        .collect();
    parts.join(",")
}

/// Parses ranges from text.
///
/// # Errors
/// The text is malformed, or has too many ranges.
pub fn parse_hot_ranges(text: &str) -> Result<Vec<ByteRange>, String> {
    let invalid = |part: &str| format!("'{part}' is not a range like 17+3");
    let mut ranges = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        if ranges.len() == HOT_RANGES_MAX {
            return Err(format!("there are more than {HOT_RANGES_MAX} ranges"));
        }
        let (start, len) = part.split_once('+').ok_or_else(|| invalid(part))?;
        let bytes = |digits: &str| {
            let number: u64 = digits.parse().ok()?;
            number.checked_mul(UNIT_BYTES)
        };
        let range = bytes(start)
            .zip(bytes(len))
            .filter(|(start, len)| start.checked_add(*len).is_some_and(|end| end >> 63 == 0));
        let (start, len) = range.ok_or_else(|| invalid(part))?;
        ranges.push(ByteRange::new(start, len));
    }
    Ok(ranges)
}

/// Ranges to be read into the cache.
#[derive(Default)]
pub(super) struct Warming {
    queue: RefCell<VecDeque<ByteRange>>,
    is_running: Cell<bool>,
    stop_requested: Cell<bool>,
    ended: Signal,
}

impl Warming {
    /// Adds ranges after those that are already queued.
    pub(super) fn add(&self, ranges: Vec<ByteRange>) {
        let mut queue = self.queue.borrow_mut();
        let room = HOT_RANGES_MAX.saturating_sub(queue.len());
        queue.extend(ranges.into_iter().take(room));
    }

    /// Starts warming, if there are ranges and a cache.
    pub(super) fn start(on: &Loop, served: &Rc<RunningDisk>) {
        let (Some(moving), Some(image)) = (&served.moving, served.open_image()) else {
            return;
        };
        let warming = &moving.warming;
        if image.cache.is_none() || warming.queue.borrow().is_empty() || warming.is_running.replace(true) {
            return;
        }
        warming.stop_requested.set(false);
        let (running, served) = (on.clone(), Rc::clone(served));
        on.spawn(async move {
            let warmed = run(&running, &served, &image).await;
            if warmed > ByteLen::ZERO {
                tracing::info!(disk = %served.name(), "{warmed} that were hot on the previous host are in its cache");
            }
            if let Some(moving) = &served.moving {
                moving.warming.is_running.set(false);
                moving.warming.ended.raise();
            }
        });
    }

    /// Stops warming; completes when it has ended.
    pub(super) async fn stop(&self) {
        self.queue.borrow_mut().clear();
        self.stop_requested.set(true);
        self.ended.when(|| !self.is_running.get()).await;
    }
}

/// Warms one piece after the other; returns the number of bytes read into the cache.
async fn run(on: &Loop, served: &Rc<RunningDisk>, image: &OpenImage) -> ByteLen {
    let mut warmed = ByteLen::ZERO;
    let (Some(moving), Some(cache_slot)) = (&served.moving, &image.cache) else {
        return warmed;
    };
    let warming = &moving.warming;
    // Other tasks may add ranges meanwhile.
    let next_piece = || take_piece(&mut warming.queue.borrow_mut());
    while let Some(piece) = next_piece() {
        while served.activity.in_flight() > 0 && !warming.stop_requested.get() {
            on.sleep(IDLE_POLL_INTERVAL).await;
        }
        let cache = cache_slot.current();
        if warming.stop_requested.get() || !cache.layer.has_room() {
            break;
        }
        let start = on.now();
        match cache.layer.warm(piece).await {
            Ok(bytes) => warmed += bytes,
            // The guest gets the error when it reads this range itself.
            Err(_) => break,
        }
        on.sleep(on.now().since(start).max(PAUSE_MIN)).await;
    }
    warming.queue.borrow_mut().clear();
    warmed
}

/// Takes the next piece, of a size that is warmed in one step, off the first range.
fn take_piece(queue: &mut VecDeque<ByteRange>) -> Option<ByteRange> {
    let range = queue.front_mut()?;
    let len = range.len.min(ByteLen::new(Cache::WARM_LEN));
    let piece = ByteRange { start: range.start, len };
    let rest = ByteRange::between(piece.end(), range.end());
    match rest.is_empty() {
        true => drop(queue.pop_front()),
        false => *range = rest,
    }
    Some(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_text_round_trips_or_fails() {
        let ranges = [ByteRange::new(17 * UNIT_BYTES, 3 * UNIT_BYTES), ByteRange::new(0, UNIT_BYTES)];
        let text = format_hot_ranges(&ranges);
        assert_eq!(text, "17+3,0+1");
        assert_eq!(parse_hot_ranges(&text).as_deref(), Ok(&ranges[..]));
        assert_eq!(parse_hot_ranges(""), Ok(Vec::new()));
        for invalid in ["17", "x+1", "1+", "18446744073709551615+1", "2251799813685247+1", "-1+1"] {
            parse_hot_ranges(invalid).expect_err(invalid);
        }
        parse_hot_ranges(&"1+1,".repeat(HOT_RANGES_MAX + 1)).expect_err("too many");
    }

    #[test]
    fn long_range_is_warmed_in_pieces() {
        let mut queue = VecDeque::from([
            ByteRange::new(0, Cache::WARM_LEN + UNIT_BYTES),
            ByteRange::new(UNIT_BYTES << 20, UNIT_BYTES),
        ]);
        let pieces: Vec<u64> = std::iter::from_fn(|| take_piece(&mut queue)).map(|piece| piece.len.get()).collect();
        assert_eq!(pieces, [Cache::WARM_LEN, UNIT_BYTES, UNIT_BYTES]);
    }
}
