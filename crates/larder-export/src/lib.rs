//! Exports of a block device: vhost-user-blk for guests, NBD for tools and other hosts.

pub mod activity;
pub mod clients;
pub mod descriptor_store;
pub mod external_mapping;
pub mod nbd;
pub mod piece_scheduler;
pub mod vhost_user;
