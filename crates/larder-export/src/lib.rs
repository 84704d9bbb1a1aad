//! Serves a block device: vhost-user-blk for guests, NBD for tools and other hosts.

pub mod clients;
mod error_log;
pub mod nbd;
pub mod vhost_user;
