//! Conversion between libvirt's description of a VM and Larder's: which of a domain's disks Larder can serve, the
//! domain's XML with them, and the XML as it was before.
//!
//! Invariants:
//! - A domain's XML is changed only where it makes a disk Larder's, or the memory shared; the rest remains byte for
//!   byte, whether Larder knows it or not.
//! - A disk with an option that would be lost is not changed, and the reason is reported.
//! - [`detach`](detach::restore) reverts the changes of [`attach`](attach::plan), whatever else was changed
//!   meanwhile.
//!
//! This module neither calls libvirt nor accesses files.

pub mod attach;
pub mod detach;
mod disk;
mod memory;
pub mod xml;

use std::path::Path;

use xml::Element;

pub use crate::image::state_directory;
pub use crate::runtime_directory::{check_exclusive_owner, hook_directory, socket_directory};

/// Returns the disks of a domain.
fn disks(domain: &Element) -> impl Iterator<Item = &Element> {
    let devices = domain.child("devices");
    devices.into_iter().flat_map(|devices| devices.children_named("disk"))
}

/// Returns the name of a disk in the domain: `vda`.
fn target(disk: &Element) -> Option<&str> {
    disk.child("target")?.attribute("dev")
}

/// Returns the socket of a disk that another process serves over vhost-user.
fn vhost_user_socket(disk: &Element) -> Option<&Path> {
    match disk.attribute("type") {
        Some("vhostuser") => disk.child("source")?.attribute("path").map(Path::new),
        _ => None,
    }
}

/// Returns the sockets of all disks of a domain that other processes serve over vhost-user.
pub fn vhost_user_sockets(domain: &Element) -> impl Iterator<Item = &Path> {
    disks(domain).filter_map(vhost_user_socket)
}
