//! The opener of a confined server: a process with the rights of the user who started the server, which opens for the
//! server the files that the VM's file names, and nothing else.
//!
//! The server gives up its rights before it reads a header, a cache, a journal or a request of a guest
//! ([`crate::confine`]). All files that it opens after that come from the opener: at its start, when the VM's file is
//! reloaded, or when the VM arrives from another host. The opener reads the VM's file itself, so a compromised server
//! can request only what it has already.
//!
//! Invariants of the opener:
//! - It reads the VM's file, and nothing that a guest or an image's author has written.
//! - It opens a file only for the purpose that the VM's file gives it: a backing file is never opened for writing.
//! - As root it follows no symbolic link of another user, who could make it lead anywhere. This holds for every path,
//!   whatever a request says about it, and also when it looks for the journals and state files of the VM's images.
//! - It ends when its server does. Sockets that it has created for the server are removed then.
//!
//! A service (`larder@NAME.service`) has a user of its own, and no rights to begin with. Its opener runs as root
//! (`larder-open@.service`, one for each server), and identifies the service by the control group of the connected
//! process.
//!
//! It is a separate process, so that a compromised server cannot change it, and a signal that ends a server does not
//! end it first.

mod access_policy;
mod client;
mod peer;
mod serve;
mod wire;

pub(crate) use client::opener_client;
pub use client::{OpenerClient, connect, start};
pub use peer::file_of_service;
pub use serve::serve;
