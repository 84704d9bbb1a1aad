//! Simulated devices, for the simulator and for experiments.
//!
//! - [`SimulatedDevice`] separates durable from volatile data, fails, delays and reorders requests, and can be
//!   stopped at any moment. It leaves a [`SimulatedMedium`], over which the next device is opened. All its behaviour
//!   follows from its seed. It is as weak as the contract allows: a stack that works over it relies on no more.
//! - [`SlowDevice`] slows any device down to the durations of a [`ServiceModel`], on the real or the virtual clock.

mod device;
mod fault;
mod image;
mod latency;
mod medium;
mod model;
mod options;
mod random;
mod slow;

pub use device::SimulatedDevice;
pub use fault::{FaultEffect, InjectedFault};
pub use image::SparseImage;
pub use latency::LatencyDistribution;
pub use medium::SimulatedMedium;
pub use model::{RequestDirection, ServiceModel, ServiceParameters};
pub use options::{DeviceStop, SimulatedOptions};
pub use random::SeededRng;
pub use slow::SlowDevice;
