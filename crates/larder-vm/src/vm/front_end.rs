//! Whether the process that connects to a disk's socket is the QEMU of another VM.
//!
//! All QEMUs of libvirt's system instance are one user, so the rights of the sockets do not tell them apart. What does is root's:
//! libvirt notes the process of each domain in a file of its own, and a security module labels it (sVirt).

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use crate::opener::helper;

/// Where libvirt notes of each domain that runs which process it is.
const DOMAINS: &str = "/run/libvirt/qemu";

/// The longest label of a security module, in bytes.
const LABEL_BYTES_MAX: usize = 4096;

/// Says why the process at the other end of a connection may not use the disk of the domain of this UUID. A confined server asks the
/// opener, because it may look at no other process.
///
/// # Errors
/// Whose it is, for people.
pub(crate) fn may_connect(connection: BorrowedFd<'_>, uuid: &str) -> Result<(), String> {
    match helper() {
        Some(helper) => helper
            .may_connect(connection)
            .unwrap_or_else(|error| Err(format!("whose it is cannot be found out: {error}"))),
        None => refuse_of_others(connection, uuid),
    }
}

/// Refuses a connection of a process that is the QEMU of another domain than that of this UUID, as far as the host tells.
///
/// # Errors
/// Whose it is, for people.
pub(crate) fn refuse_of_others(connection: BorrowedFd<'_>, uuid: &str) -> Result<(), String> {
    let label = label_of(connection);
    if let Some(other) = label.as_deref().and_then(uuid_in_label).filter(|other| *other != uuid) {
        return Err(format!(
            "it is the QEMU of the domain {other} by its label, and this disk is of {uuid}"
        ));
    }
    let Ok(peer) = rustix::net::sockopt::socket_peercred(connection.as_fd()) else {
        return Ok(());
    };
    let process = peer.pid.as_raw_nonzero().get();
    match domain_of(Path::new(DOMAINS), process) {
        Some((name, other)) if other != uuid => Err(format!(
            "process {process} is the QEMU of the domain {name} ({other}), and this disk is of {uuid}"
        )),
        _ => Ok(()),
    }
}

/// Says of which other domain than that of this UUID a process is the QEMU, as far as the host tells.
pub(crate) fn other_domain_of(process: i32, uuid: &str) -> Option<String> {
    let label = fs::read_to_string(format!("/proc/{process}/attr/current")).unwrap_or_default();
    if let Some(other) = uuid_in_label(label.trim_end_matches(['\0', '\n'])).filter(|other| *other != uuid) {
        return Some(format!("{other} by its label"));
    }
    let (name, other) = domain_of(Path::new(DOMAINS), process)?;
    (other != uuid).then(|| format!("{name} ({other})"))
}

/// Returns the label of the process at the other end (`SO_PEERSEC`), if a security module labels processes.
fn label_of(connection: BorrowedFd<'_>) -> Option<String> {
    let mut label = vec![0_u8; LABEL_BYTES_MAX];
    let mut bytes = label.len() as libc::socklen_t;
    // SAFETY: the descriptor is open while it is borrowed, `label` owns as many bytes as `bytes` says, and the kernel writes to
    // these two only.
    let result = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERSEC,
            label.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    label.truncate(if result == 0 { bytes as usize } else { 0 });
    let label = String::from_utf8(label).ok()?;
    Some(label.trim_end_matches('\0').to_owned()).filter(|label| !label.is_empty())
}

/// Returns the domain's UUID in a label of AppArmor's as libvirt gives them: `libvirt-UUID (enforce)`.
fn uuid_in_label(label: &str) -> Option<&str> {
    let uuid = label.strip_prefix("libvirt-")?.split(' ').next()?;
    (uuid.len() == 36).then_some(uuid)
}

/// Returns the name and the UUID of the domain whose QEMU a process is, or whose control group it is in.
fn domain_of(folder: &Path, process: i32) -> Option<(String, String)> {
    let group = group_of(process).filter(|group| group.contains("qemu"));
    let entries = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let mut states = entries.filter(|path| path.extension().is_some_and(|extension| extension == "xml"));
    states.find_map(|path| {
        let (name, uuid, of_domain) = parse(&fs::read_to_string(path).ok()?)?;
        let is_it = of_domain == process || group.is_some() && group_of(of_domain) == group;
        is_it.then_some((name, uuid))
    })
}

/// Returns the lines of the control groups of a process.
fn group_of(process: i32) -> Option<String> {
    fs::read_to_string(format!("/proc/{process}/cgroup")).ok()
}

/// Returns name, UUID and process of a domain's state as libvirt writes it:
/// `<domstatus state='running' reason='booted' pid='4711'>`, and in it the domain's own XML.
fn parse(state: &str) -> Option<(String, String, i32)> {
    let between = |start: &str, end: &str| {
        let rest = &state[state.find(start)? + start.len()..];
        Some(rest[..rest.find(end)?].to_owned())
    };
    let head = between("<domstatus ", ">")?;
    let process = head.split(" pid='").nth(1)?.split('\'').next()?.parse().ok()?;
    Some((between("<name>", "</name>")?, between("<uuid>", "</uuid>")?, process))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_of_a_domain_is_known_by_libvirts_note() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = |pid: u32| {
            format!(
                "<!--\nWARNING\n-->\n<domstatus state='running' reason='booted' pid='{pid}'>\n  <taint flag='x'/>\n  <domain type='kvm' id='1'>\n    \
                 <name>other</name>\n    <uuid>11111111-2222-3333-4444-555555555555</uuid>\n  </domain>\n</domstatus>\n"
            )
        };
        let own = std::process::id() as i32;
        let of = || domain_of(folder.path(), own).map(|(_, uuid)| uuid);
        fs::write(folder.path().join("damaged.xml"), "<domstatus pid='").expect("writes");
        fs::write(folder.path().join("other.pid"), own.to_string()).expect("writes");
        fs::write(folder.path().join("other.xml"), state(1)).expect("writes");
        assert_eq!(of(), None);
        fs::write(folder.path().join("other.xml"), state(std::process::id())).expect("writes");
        assert_eq!(of().as_deref(), Some("11111111-2222-3333-4444-555555555555"));
    }

    #[test]
    fn labels_that_are_not_of_domains_tell_nothing() {
        let uuid = "11111111-2222-3333-4444-555555555555";
        assert_eq!(uuid_in_label(&format!("libvirt-{uuid} (enforce)")), Some(uuid));
        for label in [
            "unconfined",
            "libvirtd (enforce)",
            "libvirt-x",
            "system_u:system_r:svirt_t:s0:c1,c2",
        ] {
            assert_eq!(uuid_in_label(label), None, "{label}");
        }
    }
}
