//! Access control lists of files (`acl(5)`), with which a process that may not change a file's owner gives other
//! users access.
//!
//! The layout is the kernel's (`linux/posix_acl_xattr.h`): a version, then entries in the order of their tags.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{XattrFlags, setxattr};

use super::Access;

const ACL_XATTR: &str = "system.posix_acl_access";
const ACL_VERSION: u32 = 2;

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// Read and write permission: `connect` needs write permission, and read permission goes with it.
const READ_WRITE: u16 = 6;

/// ID in an entry that names no user or group.
const UNDEFINED_ID: u32 = u32::MAX;

/// Gives owner and group the access that the file's mode would give them if the file were theirs, and readers the
/// access that `connect` needs.
pub(super) fn grant(path: &Path, access: Access) -> io::Result<()> {
    let mode = match access.mode {
        Some(mode) => mode,
        None => fs::metadata(path)?.permissions().mode(),
    };
    setxattr(path, ACL_XATTR, &encode_acl(mode, access), XattrFlags::empty())?;
    Ok(())
}

fn encode_acl(mode: u32, access: Access) -> Vec<u8> {
    let bits = |shift: u32| (mode >> shift & 7) as u16;
    let (user, group, other) = (bits(6), bits(3), bits(0));
    // The creator's own group has no access to a file that is meant for another group.
    let creator_group = if access.group.is_some() { 0 } else { group };
    let readers = access.readers.filter(|readers| access.group != Some(*readers));
    let entries = [
        Some((USER_OBJ, user, UNDEFINED_ID)),
        access.owner.map(|id| (USER, user, id)),
        Some((GROUP_OBJ, creator_group, UNDEFINED_ID)),
        access.group.map(|id| (GROUP, group, id)),
        readers.map(|id| (GROUP, READ_WRITE, id)),
        Some((MASK, user | group | readers.map_or(0, |_| READ_WRITE), UNDEFINED_ID)),
        Some((OTHER, other, UNDEFINED_ID)),
    ];
    let mut bytes = ACL_VERSION.to_le_bytes().to_vec();
    for (tag, bits, id) in entries.into_iter().flatten() {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(bits.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}
