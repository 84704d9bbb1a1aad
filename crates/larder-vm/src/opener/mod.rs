//! The opener of a confined server: a process with the rights of whoever has started the server, which opens for it what its
//! VM's file names, and nothing else.
//!
//! The server gives up its rights before it reads a header, a cache, a journal or a request of a guest ([`crate::confine`]).
//! What it opens from then on, at its start, when its VM's file is read again, or when the VM comes from another host, comes from
//! the opener. It reads the VM's file itself, so a server that was taken over can ask for what it has already, and no more.
//!
//! Invariants of the opener:
//! - It reads the VM's file, and nothing that a guest or an image's author has written.
//! - It opens a file only for what the VM's file has it used for: a backing file is never opened to be written.
//! - As root it follows no symbolic link that belongs to another user, who could lead it anywhere.
//! - It ends when its server does. Sockets that it has made for the server are removed then.
//!
//! A service (`larder@NAME.service`) is a user of its own, and has no rights to begin with. Its opener is root's
//! (`larder-open@.service`, one for each server), and tells by the control group of the process that has connected which service
//! it is.
//!
//! It is a process of its own, so that a server that was taken over cannot change it, and the signal that ends a server does not
//! end it first.

mod allowed;
mod client;
mod peer;
mod serve;
mod wire;

pub(crate) use client::helper;
pub use client::{Helper, connect, start};
pub use peer::file_of_service;
pub use serve::serve;
