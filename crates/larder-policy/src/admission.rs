//! Whether a line is worth a place.

use crate::class::Class;
use crate::policy::Admission;
use crate::set::Set;
use crate::worth::Worths;

/// A line is let in only if it is worth this many times what leaves for it. A write that changes next to nothing is
/// spared; and as worths are estimates, so is many a mistake.
const GAIN_MIN: f32 = 2.0;

/// A line is let in only if this is the probability that it is hit, or more: the hits that a write must bring.
const CHANCE_MIN: f32 = 0.02;

/// Whether a line that was just used is to have a place in a set. The scarcer writes are (0 to 1), the more likely it
/// must be that it is hit.
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
