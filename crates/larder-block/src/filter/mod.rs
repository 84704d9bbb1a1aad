//! Filters that every disk may need, whatever its format.

pub mod align;
pub mod keep_space;
pub mod stay_raw;
pub mod throttle;
