//! Landlock: which files, ports and processes are still reachable.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, Scope,
};

use super::{ConfineError, Needs};

/// What is asked for; an older kernel gives what it has of it.
const WANTED: ABI = ABI::V6;

/// What a name is looked up in; the libraries for that are loaded by then, because the disks are open.
const NAMES: [&str; 6] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    // Where systemd puts new ones of what /etc/resolv.conf leads to.
    "/run/systemd/resolve",
];

/// DNS over TCP, for long answers.
const DNS_PORT: u16 = 53;

/// The restrictions, to be taken upon itself by each thread; `None` if the kernel has no Landlock.
pub(super) fn ruleset(needs: &Needs) -> Result<Option<OwnedFd>, ConfineError> {
    let version = version();
    if let Some(missing) = missing(version) {
        tracing::warn!(
            "this kernel's Landlock (version {version}) cannot keep {missing}; Linux 6.12 and later can, unless started without it (lsm=)"
        );
    }
    let made = make(needs, notify_socket_is_abstract());
    made.map(Option::from)
}

/// The version of the kernel's Landlock; 0 if it has none, or it is off.
fn version() -> i64 {
    const VERSION: u32 = 1; // LANDLOCK_CREATE_RULESET_VERSION
    // SAFETY: with that flag and no attributes the kernel only tells its version.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0usize,
            VERSION,
        )
    };
    version.max(0)
}

/// What cannot be kept from a process with that version, for people.
fn missing(version: i64) -> Option<&'static str> {
    match version {
        0 => {
            Some("files, devices, TCP ports and other processes from a confined server; seccomp alone does what it can")
        }
        1..=3 => Some("TCP ports, devices and signals to other processes from a confined server"),
        4 => Some("devices and signals to other processes from a confined server"),
        5 => Some("signals to other processes and abstract sockets from a confined server"),
        _ => None,
    }
}

fn make(needs: &Needs, keeps_abstract_sockets: bool) -> Result<RulesetCreated, ConfineError> {
    let refused = |source: RulesetError| ConfineError::Landlock {
        what: "the kernel does not take the restrictions".to_owned(),
        source: io::Error::other(source),
    };
    let scope = match keeps_abstract_sockets {
        true => Scope::Signal.into(),
        false => Scope::from_all(WANTED),
    };
    let ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(WANTED))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(WANTED)))
        .and_then(|ruleset| ruleset.scope(scope))
        .and_then(Ruleset::create);
    let mut ruleset = ruleset.map_err(refused)?;
    for (path, access) in rules(needs) {
        let Some(place) = place(&path)? else { continue };
        ruleset = ruleset.add_rule(PathBeneath::new(place, access)).map_err(refused)?;
    }
    let dns = needs.looks_up_names.then_some(DNS_PORT);
    for port in needs.ports.iter().copied().chain(dns) {
        let rule = NetPort::new(port, AccessNet::ConnectTcp);
        ruleset = ruleset.add_rule(rule).map_err(refused)?;
    }
    Ok(ruleset)
}

/// What may be done where.
fn rules(needs: &Needs) -> Vec<(PathBuf, BitFlags<AccessFs>)> {
    let written = AccessFs::MakeReg | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::RemoveFile;
    let mut rules = Vec::new();
    rules.extend(needs.written.iter().map(|path| (path.clone(), written)));
    let flushed = written | AccessFs::ReadDir;
    rules.extend(needs.flushed.iter().map(|path| (path.clone(), flushed)));
    let removed: BitFlags<AccessFs> = AccessFs::RemoveFile.into();
    rules.extend(needs.removed_from.iter().map(|path| (path.clone(), removed)));
    if needs.looks_up_names {
        rules.extend(NAMES.map(|path| (PathBuf::from(path), AccessFs::ReadFile.into())));
    }
    rules
}

/// `None` if nothing is there: then nothing is needed there, or it cannot be had.
fn place(path: &Path) -> Result<Option<PathFd>, ConfineError> {
    if !path.try_exists().unwrap_or(true) {
        return Ok(None);
    }
    let opened = PathFd::new(path);
    opened.map(Some).map_err(|source| ConfineError::Landlock {
        what: format!("{} is needed later on", path.display()),
        source: io::Error::other(source),
    })
}

/// Whoever has started this process is told how it is on an abstract socket: in some containers.
fn notify_socket_is_abstract() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some_and(|socket| socket.as_encoded_bytes().starts_with(b"@"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_are_shared_are_never_readable() {
        let mut needs = Needs::default();
        needs.write_in("/run/larder");
        needs.write_durably_in("/var/lib/larder/caches");
        needs.remove_from("/run/larder/vms");
        let rules = rules(&needs);
        assert_eq!(rules.len(), 3);
        for (path, access) in rules {
            assert!(!access.intersects(AccessFs::ReadFile | AccessFs::Execute), "{path:?}");
        }
    }

    #[test]
    fn what_an_older_kernel_lacks_is_told() {
        assert!((0..6).all(|version| missing(version).is_some()));
        assert_eq!(missing(6), None);
    }
}
