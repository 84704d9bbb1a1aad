//! `larder libvirt`, and `larder migrate` under libvirt: domains of a real libvirt, on a host of their own
//! (`host.rs`).

mod corpus;
mod guest;
mod hook;
mod host;
mod migrate;
mod packaged;
#[path = "../support/mod.rs"]
mod support;
mod words;
