//! Admission: the decision whether a missed line is stored in the cache.

use crate::class::Class;
use crate::policy::Admission;
use crate::set::Set;
use crate::worth::Worths;

/// Factor by which a line's score must exceed the victim's. It saves writes that hardly improve the cache, and since
/// scores are estimates, also many mistakes.
const GAIN_MIN: f32 = 2.0;

/// Least probability of a hit with which a line is admitted, so that the write is worth its cost.
const CHANCE_MIN: f32 = 0.02;

/// Returns whether a line that was just used is admitted to a set. `scarcity` (0 to 1) is that of writes: the higher,
/// the more likely a hit must be.
pub(crate) fn is_worth_it(
    worths: &Worths,
    set: &mut Set<'_>,
    class: Class,
    spare_ways: usize,
    admission: Admission,
    scarcity: f32,
) -> bool {
    if set.is_full(spare_ways) && admission == Admission::Worth {
        let Some((least, age)) = set.least(worths.ranks()).and_then(|way| set.line(way)) else {
            return true;
        };
        let least = worths.value(least, age);
        worths.value(class, 0) >= GAIN_MIN * least && worths.chance(class, least) >= CHANCE_MIN.max(scarcity)
    } else {
        scarcity == 0.0 || worths.chance(class, 0.0) >= scarcity
    }
}
