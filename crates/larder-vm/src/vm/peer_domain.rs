//! Protection of a disk's socket against the QEMU of another VM.
//!
//! All QEMUs of libvirt's system instance run as one user, so the socket's permissions do not distinguish them. Two
//! sources that only root can change do: libvirt's own state file with the process of each domain, and the label from
//! a security module (sVirt).

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use crate::opener::opener_client;

/// Directory of libvirt's state files of running domains.
const DOMAIN_STATE_DIRECTORY: &str = "/run/libvirt/qemu";

/// Maximum length of a security module's label, in bytes.
const LABEL_BYTES_MAX: usize = 4096;

/// Checks whether the process at the other end of a connection may use the disk of the domain with this UUID. A
/// confined server asks the opener, because it cannot inspect other processes.
///
/// # Errors
/// A message for the user that names the other domain.
pub(crate) fn check_peer(connection: BorrowedFd<'_>, uuid: &str) -> Result<(), String> {
    match opener_client() {
        Some(helper) => helper
            .may_connect(connection)
            .unwrap_or_else(|error| Err(format!("its domain cannot be determined: {error}"))),
        None => check_not_other_domain(connection, uuid),
    }
}

/// Refuses a connection from a process that is the QEMU of another domain than the one with this UUID, as far as the
/// host shows.
///
/// # Errors
/// A message for the user that names the other domain.
pub(crate) fn check_not_other_domain(connection: BorrowedFd<'_>, uuid: &str) -> Result<(), String> {
    let label = peer_label(connection);
    if let Some(other) = label.as_deref().and_then(uuid_in_label).filter(|other| *other != uuid) {
        return Err(format!(
            "it is the QEMU of the domain {other}, according to its label, and this disk belongs to {uuid}"
        ));
    }
    let Ok(peer) = rustix::net::sockopt::socket_peercred(connection.as_fd()) else {
        return Ok(());
    };
    let process = peer.pid.as_raw_nonzero().get();
    match find_domain(Path::new(DOMAIN_STATE_DIRECTORY), process) {
        Some((name, other)) if other != uuid => Err(format!(
            "process {process} is the QEMU of the domain {name} ({other}), and this disk belongs to {uuid}"
        )),
        _ => Ok(()),
    }
}

/// Returns a description of the domain whose QEMU a process is, if that is another one than the domain with this
/// UUID.
pub(crate) fn find_other_domain(process: i32, uuid: &str) -> Option<String> {
    let label = fs::read_to_string(format!("/proc/{process}/attr/current")).unwrap_or_default();
    if let Some(other) = uuid_in_label(label.trim_end_matches(['\0', '\n'])).filter(|other| *other != uuid) {
        return Some(format!("{other}, according to its label"));
    }
    let (name, other) = find_domain(Path::new(DOMAIN_STATE_DIRECTORY), process)?;
    (other != uuid).then(|| format!("{name} ({other})"))
}

/// Returns the label of the process at the other end (`SO_PEERSEC`), if a security module labels processes.
fn peer_label(connection: BorrowedFd<'_>) -> Option<String> {
    let mut label = vec![0_u8; LABEL_BYTES_MAX];
    let mut bytes = label.len() as libc::socklen_t;
    // SAFETY: the descriptor is open while it is borrowed, `label` has the length that `bytes` gives, and the kernel
    // writes only to these two.
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

/// Returns the domain's UUID in an AppArmor label as libvirt assigns it: `libvirt-UUID (enforce)`.
fn uuid_in_label(label: &str) -> Option<&str> {
    let uuid = label.strip_prefix("libvirt-")?.split(' ').next()?;
    (uuid.len() == 36).then_some(uuid)
}

/// Returns name and UUID of the domain whose QEMU a process is, or whose control group it is in.
fn find_domain(directory: &Path, process: i32) -> Option<(String, String)> {
    let group = control_group(process).filter(|group| group.contains("qemu"));
    let entries = fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path());
    let mut states = entries.filter(|path| path.extension().is_some_and(|extension| extension == "xml"));
    states.find_map(|path| {
        let (name, uuid, domain_process) = parse_domain_state(&fs::read_to_string(path).ok()?)?;
        let is_match = domain_process == process || group.is_some() && control_group(domain_process) == group;
        is_match.then_some((name, uuid))
    })
}

/// Returns the control groups of a process, as the text of `/proc/PID/cgroup`.
fn control_group(process: i32) -> Option<String> {
    fs::read_to_string(format!("/proc/{process}/cgroup")).ok()
}

/// Parses a domain's state file, and returns name, UUID and process. libvirt writes `<domstatus state='running'
/// reason='booted' pid='4711'>`, with the domain's own XML inside.
fn parse_domain_state(state: &str) -> Option<(String, String, i32)> {
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
    fn libvirt_state_file_identifies_qemu() {
        let directory = tempfile::tempdir().expect("a directory");
        let state = |pid: u32| {
            format!(
                "<!--\nWARNING\n-->\n<domstatus state='running' reason='booted' pid='{pid}'>\n  <taint flag='x'/>\n  <domain type='kvm' id='1'>\n    \
                 <name>other</name>\n    <uuid>11111111-2222-3333-4444-555555555555</uuid>\n  </domain>\n</domstatus>\n"
            )
        };
        let own = std::process::id() as i32;
        let of = || find_domain(directory.path(), own).map(|(_, uuid)| uuid);
        fs::write(directory.path().join("damaged.xml"), "<domstatus pid='").expect("writes");
        fs::write(directory.path().join("other.pid"), own.to_string()).expect("writes");
        fs::write(directory.path().join("other.xml"), state(1)).expect("writes");
        assert_eq!(of(), None);
        fs::write(directory.path().join("other.xml"), state(std::process::id())).expect("writes");
        assert_eq!(of().as_deref(), Some("11111111-2222-3333-4444-555555555555"));
    }

    #[test]
    fn labels_without_domain_have_no_uuid() {
        let uuid = "11111111-2222-3333-4444-555555555555";
        assert_eq!(uuid_in_label(&format!("libvirt-{uuid} (enforce)")), Some(uuid));
        for label in ["unconfined", "libvirtd (enforce)", "libvirt-x", "system_u:system_r:svirt_t:s0:c1,c2"] {
            assert_eq!(uuid_in_label(label), None, "{label}");
        }
    }
}
