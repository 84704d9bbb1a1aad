//! Admission: the decision whether a missed line is stored in the cache.

use crate::class::Class;
use crate::policy::AdmissionPolicy;
use crate::score::ScoreTable;
use crate::set::Set;

/// Factor by which a line's score must exceed the victim's. It saves writes that hardly improve the cache, and since
/// scores are estimates, also many mistakes.
const SCORE_GAIN_MIN: f32 = 2.0;

/// Least probability of a hit with which a line is admitted, so that the write is worth its cost.
const HIT_PROBABILITY_MIN: f32 = 0.02;

/// Returns whether a line that was just used is admitted to a set. `scarcity` (0 to 1) is that of writes: the higher,
/// the more likely a hit must be.
pub(crate) fn should_admit(
    scores: &ScoreTable,
    set: &mut Set<'_>,
    class: Class,
    spare_ways: usize,
    admission: AdmissionPolicy,
    scarcity: f32,
) -> bool {
    if set.is_full(spare_ways) && admission == AdmissionPolicy::ByScore {
        let Some((victim_score, age)) = set.lowest(scores.ranks()).and_then(|way| set.line(way)) else {
            return true;
        };
        let victim_class = scores.value(victim_score, age);
        scores.value(class, 0) >= SCORE_GAIN_MIN * victim_class
            && scores.hit_probability(class, victim_class) >= HIT_PROBABILITY_MIN.max(scarcity)
    } else {
        scarcity == 0.0 || scores.hit_probability(class, 0.0) >= scarcity
    }
}
