//! The group whose members may read the state of all VMs of the host, and change nothing.
//!
//! The package creates the group; on a host without it there are no readers. A process that listens on a control
//! socket grants the group access to the socket's file, and refuses every request of a reader that is not a read
//! ([`crate::control`]). Commands that members run find the sockets of the host ([`crate::vm::find`]).

use nix::unistd::Group;
use rustix::process::{getegid, geteuid, getgroups};

/// Name of the group.
pub const READ_GROUP: &str = "larder-read";

/// Returns the ID of the group, if it exists on this host.
pub fn read_group() -> Option<u32> {
    let found = Group::from_name(READ_GROUP).inspect_err(|error| {
        tracing::warn!("cannot look up the group {READ_GROUP}, so its members have no access: {error}");
    });
    found.ok().flatten().map(|group| group.gid.as_raw())
}

/// Returns whether the user of this process is a member of the group; false for root, which needs no group.
///
/// In a user namespace the kernel reports only the groups that are mapped there, so a service with `PrivateUsers=yes`
/// needs the group as its `Group=`.
pub(crate) fn is_reader() -> bool {
    let Some(readers) = (!geteuid().is_root()).then(read_group).flatten() else {
        return false;
    };
    let is_read_group = |group: rustix::process::Gid| group.as_raw() == readers;
    is_read_group(getegid()) || getgroups().is_ok_and(|groups| groups.into_iter().any(is_read_group))
}
