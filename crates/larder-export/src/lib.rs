//! Exports of a block device: vhost-user-blk for guests, NBD for tools and other hosts.

pub mod activity;
pub mod clients;
pub mod descriptor_store;
pub mod nbd;
pub mod turns;
pub mod vhost_user;
pub mod view;
