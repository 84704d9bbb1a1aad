//! Eviction and admission policy of a set-associative cache, with miss-ratio curves and trace replay.

pub mod curve;
pub mod geometry;
pub mod policy;
pub mod reference;
pub mod replay;
pub mod synthetic;
pub mod trace;

mod admission;
mod age;
mod budget;
mod class;
mod hash;
mod reuse;
mod score;
mod set;
mod shadow;

pub use curve::MissRatioCurve;
pub use geometry::SetGeometry;
pub use policy::{AccessContext, AccessKind, AdmissionPolicy, Policy, PolicyOptions};
