//! What to keep, and what to let in: eviction and admission for a cache of sets.

pub mod geometry;
pub mod policy;

mod age;
mod budget;
mod class;
mod hash;
mod reuse;
mod set;
mod worth;

pub use geometry::Geometry;
pub use policy::{Access, Admission, Context, Policy, PolicyOptions};
