//! What to keep, and what to let in: eviction and admission for a cache of sets.

pub mod geometry;
pub mod policy;

mod hash;
mod set;

pub use geometry::Geometry;
pub use policy::{Access, Context, Policy, PolicyOptions};
