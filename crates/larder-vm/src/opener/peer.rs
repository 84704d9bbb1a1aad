//! Identification of the service to which a server belongs.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, pidfd_open};

use crate::vm::config;

/// Prefix and suffix of the unit name of a VM's server.
const UNIT_AFFIXES: (&str, &str) = ("larder@", ".service");

/// Returns the file of the VM whose service the process at the other end of `channel` belongs to, according to the
/// kernel: a service cannot leave its control group.
///
/// # Errors
/// The process belongs to no such service, or has ended.
pub fn file_of_service(channel: &OwnedFd) -> io::Result<PathBuf> {
    let peer = rustix::net::sockopt::socket_peercred(channel)?;
    // The process ID is valid only while the process runs; afterwards another process may get it.
    let process = pidfd_open(peer.pid, PidfdFlags::empty())?;
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", peer.pid))?;
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&now))? > 0 {
        return Err(io::Error::other("the process that connected has exited"));
    }
    let name = groups.lines().find_map(service_of).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("process {} belongs to no service larder@NAME.service: files are opened only for those", peer.pid),
        )
    })?;
    config::vm_file_path(Path::new(name)).map_err(io::Error::other)
}

/// Returns the VM whose service's control group a line of `/proc/PID/cgroup` names, in cgroup v2 or in systemd's own
/// v1 hierarchy. All parent groups must be slices of the system: users, or programs in containers, may create other
/// groups.
fn service_of(line: &str) -> Option<&str> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    if !["", "name=systemd"].contains(&controllers) {
        return None;
    }
    let mut groups = path.strip_prefix('/')?.split('/').collect::<Vec<_>>();
    let unit = groups.pop()?;
    let all_system_slices = groups.iter().all(|group| group.ends_with(".slice") && *group != "user.slice");
    let name = unit.strip_prefix(UNIT_AFFIXES.0)?.strip_suffix(UNIT_AFFIXES.1)?;
    (all_system_slices && !groups.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_system_services_have_vm_file() {
        let of = service_of;
        assert_eq!(of("0::/system.slice/system-larder.slice/larder@my-web.service"), Some("my-web"));
        assert_eq!(of("1:name=systemd:/system.slice/system-larder.slice/larder@a.service"), Some("a"));
        assert_eq!(of("0::/vms.slice/larder@a.service"), Some("a"));
        for other in [
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/larder@a.service",
            "0::/user.slice/larder@a.service",
            "0::/machine.slice/machine-c.scope/payload/system.slice/larder@a.service",
            "0::/system.slice/larder@a.service/x",
            "0::/larder@a.service",
            "0::/system.slice/other@a.service",
            "4:memory:/system.slice/larder@a.service",
            "0::/../larder@a.service",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
