//! libvirt's view of a VM, and Larder's: which of a domain's disks Larder can serve, what the domain's XML is then, and how
//! it was before.
//!
//! Invariants:
//! - Of a domain's XML only that is changed which makes a disk Larder's or the memory shared; all else stays byte for byte,
//!   known here or not.
//! - A disk of which something is said that would be lost is left alone, with the reason.
//! - What [`attach`](attach::plan) has changed, [`detach`](detach::restore) changes back, whatever else was changed
//!   meanwhile.
//!
//! Nothing here asks libvirt, or touches a file.

pub mod attach;
pub mod detach;
mod disk;
mod memory;
pub mod xml;

use std::path::Path;

use xml::Element;

pub use crate::image::state_folder;
pub use crate::runtime_folder::{hook_folder, is_ours_alone, socket_folder};

/// The disks of a domain.
fn disks(domain: &Element) -> impl Iterator<Item = &Element> {
    let devices = domain.child("devices");
    devices.into_iter().flat_map(|devices| devices.all("disk"))
}

/// What the guest's disk is called in the domain: `vda`.
fn target(disk: &Element) -> Option<&str> {
    disk.child("target")?.attribute("dev")
}

/// The socket of a disk that another process serves over vhost-user.
fn vhost_user_socket(disk: &Element) -> Option<&Path> {
    match disk.attribute("type") {
        Some("vhostuser") => disk.child("source")?.attribute("path").map(Path::new),
        _ => None,
    }
}

/// The sockets of all of a domain's disks that other processes serve over vhost-user.
pub fn vhost_user_sockets(domain: &Element) -> impl Iterator<Item = &Path> {
    disks(domain).filter_map(vhost_user_socket)
}
