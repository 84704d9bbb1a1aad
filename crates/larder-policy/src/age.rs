//! How long ago a line was used, in steps that widen.
//!
//! Time is counted in ticks, of which there are [`TICKS_PER_CACHE`] in as many uses as the cache has lines. Ages are told
//! apart by ticks at first, and less and less finely the higher they are.

/// Ticks in which each line of the cache could be used once.
pub(crate) const TICKS_PER_CACHE: u64 = 12;

/// From this age on, in ticks, a line counts as never used again: 18 times the uses that the cache has lines.
pub(crate) const HORIZON: u32 = 216;

/// Ages up to the first number of ticks are told apart singly, up to the second by two, by four, by eight.
const BOUNDS: [u32; 4] = [32, 64, 128, HORIZON];

/// How many ages are told apart; the last is of all that is beyond the horizon.
pub(crate) const AGES: usize = 76;

/// The age of so many ticks; index the lower byte.
pub(crate) const AGE_OF: [u8; 256] = {
    let mut ages = [AGES as u8 - 1; 256];
    let (mut tick, mut age, mut piece) = (0, 0, 0);
    while piece < BOUNDS.len() {
        while tick < BOUNDS[piece] {
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

/// How many ticks have this age.
pub(crate) const WIDTH: [f32; AGES] = {
    let mut widths = [0.0; AGES];
    let mut tick = 0;
    while tick < HORIZON as usize {
        widths[AGE_OF[tick] as usize] += 1.0;
        tick += 1;
    }
    widths[AGES - 1] = 8.0;
    widths
};

/// The fewest ticks of an age.
pub(crate) const TICKS: [f32; AGES] = {
    let mut ticks = [0.0; AGES];
    let mut age = 1;
    while age < AGES {
        ticks[age] = ticks[age - 1] + WIDTH[age - 1];
        age += 1;
    }
    ticks
};

/// The age of so many ticks.
pub(crate) fn age(ticks: u32) -> usize {
    usize::from(AGE_OF[ticks.min(HORIZON) as usize])
}
