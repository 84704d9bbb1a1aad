//! Age of a line: the time since its last use, in steps that widen.
//!
//! Time is counted in ticks; [`TICKS_PER_CACHE`] ticks pass in as many uses as the cache has lines. Ages are exact to
//! a tick at first, and less exact the higher they are.

/// Ticks that pass in as many uses as the cache has lines.
pub(crate) const TICKS_PER_CACHE: u64 = 12;

/// Age in ticks from which a line counts as never used again: 18 times the uses that the cache has lines.
pub(crate) const HORIZON_TICKS: u32 = 216;

/// Ticks up to which each age is 1, 2, 4 and 8 ticks wide.
const WIDTH_BOUNDS_TICKS: [u32; 4] = [32, 64, 128, HORIZON_TICKS];

/// Number of ages; the last one is for all ticks from [`HORIZON_TICKS`] on.
pub(crate) const AGES: usize = 76;

/// Age by number of ticks; the index is the lower byte.
pub(crate) const AGE_OF: [u8; 256] = {
    let mut ages = [AGES as u8 - 1; 256];
    let (mut tick, mut age, mut piece) = (0, 0, 0);
    while piece < WIDTH_BOUNDS_TICKS.len() {
        while tick < WIDTH_BOUNDS_TICKS[piece] {
            let mut within = 0;
            while within < 1 << piece {
                ages[tick as usize] = age;
                tick += 1;
                within += 1;
            }
            age += 1;
        }
        piece += 1;
    }
    assert!(age as usize == AGES - 1);
    ages
};

/// Width of each age in ticks.
pub(crate) const AGE_WIDTH_TICKS: [f32; AGES] = {
    let mut widths = [0.0; AGES];
    let mut tick = 0;
    while tick < HORIZON_TICKS as usize {
        widths[AGE_OF[tick] as usize] += 1.0;
        tick += 1;
    }
    widths[AGES - 1] = 8.0;
    widths
};

/// Fewest ticks of each age.
pub(crate) const AGE_MIN_TICKS: [f32; AGES] = {
    let mut ticks = [0.0; AGES];
    let mut age = 1;
    while age < AGES {
        ticks[age] = ticks[age - 1] + AGE_WIDTH_TICKS[age - 1];
        age += 1;
    }
    ticks
};

/// Returns the age of a number of ticks.
pub(crate) fn age(ticks: u32) -> usize {
    usize::from(AGE_OF[ticks.min(HORIZON_TICKS) as usize])
}
