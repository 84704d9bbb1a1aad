//! What of a disk is hot, as a text; and bringing it into a cache while the guest asks for nothing.
//!
//! ```text
//! 17+3,4+1,...      ranges in units of 4 KiB: where it begins, and how many; the hottest first
//! ```

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use larder_block::signal::Signal;
use larder_block::{ByteLen, ByteRange, Loop};
use larder_cache::Cache;

use super::inquiry::Served;
use crate::image::OpenImage;

/// The unit of the text, in bytes: the smallest line of a cache.
const UNIT: u64 = 4096;
/// Ranges of a disk that are told of at most: some 400 KiB of text.
pub const HOT_RANGES_MAX: usize = 32 << 10;
/// How often it is looked whether the guest asks for nothing.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// What was brought in is followed by a pause as long as it took, and this at least.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// The text.
pub fn text_of(ranges: &[ByteRange]) -> String {
    let parts: Vec<String> = ranges
        .iter()
        .map(|range| format!("{}+{}", range.start.get() / UNIT, range.len.get().div_ceil(UNIT)))
        .collect();
    parts.join(",")
}

/// What a text says.
///
/// # Errors
/// It is none, or of too many ranges.
pub fn ranges_of(text: &str) -> Result<Vec<ByteRange>, String> {
    let wrong = |part: &str| format!("'{part}' is no range, as 17+3 is");
    let mut ranges = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        if ranges.len() == HOT_RANGES_MAX {
            return Err(format!("there are more than {HOT_RANGES_MAX} ranges"));
        }
        let (start, len) = part.split_once('+').ok_or_else(|| wrong(part))?;
        let bytes = |digits: &str| {
            let number: u64 = digits.parse().ok()?;
            number.checked_mul(UNIT)
        };
        let range = bytes(start)
            .zip(bytes(len))
            .filter(|(start, len)| start.checked_add(*len).is_some_and(|end| end >> 63 == 0));
        let (start, len) = range.ok_or_else(|| wrong(part))?;
        ranges.push(ByteRange::new(start, len));
    }
    Ok(ranges)
}

/// What is to be brought in.
#[derive(Default)]
pub(super) struct Warming {
    left: RefCell<VecDeque<ByteRange>>,
    runs: Cell<bool>,
    stops: Cell<bool>,
    ended: Signal,
}

impl Warming {
    /// This, too, after what there is already.
    pub(super) fn add(&self, ranges: Vec<ByteRange>) {
        let mut left = self.left.borrow_mut();
        let room = HOT_RANGES_MAX.saturating_sub(left.len());
        left.extend(ranges.into_iter().take(room));
    }

    /// Begins, if there is something to do and a cache to do it with.
    pub(super) fn start(on: &Loop, served: &Rc<Served>) {
        let (Some(moving), Some(image)) = (&served.moving, served.now()) else {
            return;
        };
        let warming = &moving.warming;
        if image.cache.is_none() || warming.left.borrow().is_empty() || warming.runs.replace(true) {
            return;
        }
        warming.stops.set(false);
        let (running, served) = (on.clone(), Rc::clone(served));
        on.spawn(async move {
            let brought = run(&running, &served, &image).await;
            if brought > ByteLen::ZERO {
                tracing::info!(disk = %served.name(), "{brought} that were hot where its VM came from are in its cache");
            }
            if let Some(moving) = &served.moving {
                moving.warming.runs.set(false);
                moving.warming.ended.raise();
            }
        });
    }

    /// Completes when nothing is being brought in, nor will be.
    pub(super) async fn stop(&self) {
        self.left.borrow_mut().clear();
        self.stops.set(true);
        self.ended.when(|| !self.runs.get()).await;
    }
}

/// One piece after the other; how much there was.
async fn run(on: &Loop, served: &Rc<Served>, image: &OpenImage) -> ByteLen {
    let mut brought = ByteLen::ZERO;
    let (Some(moving), Some(place)) = (&served.moving, &image.cache) else {
        return brought;
    };
    let warming = &moving.warming;
    // Others may add to it meanwhile.
    let next_piece = || next(&mut warming.left.borrow_mut());
    while let Some(piece) = next_piece() {
        while served.activity.under_way() > 0 && !warming.stops.get() {
            on.sleep(LOOK_INTERVAL).await;
        }
        let cache = place.now();
        if warming.stops.get() || !cache.layer.has_room() {
            break;
        }
        let begin = on.now();
        match cache.layer.warm(piece).await {
            Ok(bytes) => brought += bytes,
            // The guest is told when it asks for it itself.
            Err(_) => break,
        }
        on.sleep(on.now().since(begin).max(PAUSE_MIN)).await;
    }
    warming.left.borrow_mut().clear();
    brought
}

/// What of the first range can be brought in at once, which is taken off it.
fn next(left: &mut VecDeque<ByteRange>) -> Option<ByteRange> {
    let range = left.front_mut()?;
    let len = range.len.min(ByteLen::new(Cache::WARM_LEN));
    let piece = ByteRange {
        start: range.start,
        len,
    };
    let rest = ByteRange::between(piece.end(), range.end());
    match rest.is_empty() {
        true => drop(left.pop_front()),
        false => *range = rest,
    }
    Some(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_says_what_it_was_made_of_and_what_is_none_is_refused() {
        let ranges = [ByteRange::new(17 * UNIT, 3 * UNIT), ByteRange::new(0, UNIT)];
        let text = text_of(&ranges);
        assert_eq!(text, "17+3,0+1");
        assert_eq!(ranges_of(&text).as_deref(), Ok(&ranges[..]));
        assert_eq!(ranges_of(""), Ok(Vec::new()));
        for wrong in [
            "17",
            "x+1",
            "1+",
            "18446744073709551615+1",
            "2251799813685247+1",
            "-1+1",
        ] {
            ranges_of(wrong).expect_err(wrong);
        }
        ranges_of(&"1+1,".repeat(HOT_RANGES_MAX + 1)).expect_err("too many");
    }

    #[test]
    fn a_range_goes_in_pieces() {
        let mut left = VecDeque::from([
            ByteRange::new(0, Cache::WARM_LEN + UNIT),
            ByteRange::new(UNIT << 20, UNIT),
        ]);
        let pieces: Vec<u64> = std::iter::from_fn(|| next(&mut left))
            .map(|piece| piece.len.get())
            .collect();
        assert_eq!(pieces, [Cache::WARM_LEN, UNIT, UNIT]);
    }
}
