//! Landlock: the files, ports and processes that remain reachable.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, Scope,
};

use super::{ConfineError, Needs};

/// Requested version; an older kernel applies the part that it supports.
const LANDLOCK_ABI: ABI = ABI::V6;

/// Files used for host name lookup; the libraries for it are loaded by then ([`Needs::add_nbd_server`]).
const NAME_LOOKUP_FILES: [&str; 6] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    // systemd replaces the target of /etc/resolv.conf in this directory.
    "/run/systemd/resolve",
];

/// Port of DNS over TCP, which long answers need.
const DNS_PORT: u16 = 53;

/// Returns the restrictions, which each thread applies to itself; `None` if the kernel has no Landlock.
pub(super) fn ruleset(needs: &Needs) -> Result<Option<OwnedFd>, ConfineError> {
    let version = version();
    if let Some(missing) = missing(version) {
        tracing::warn!(
            "this kernel's Landlock (version {version}) cannot deny a confined server {missing}; Linux 6.12 and later can, unless booted without it (lsm=)"
        );
    }
    let created = create_ruleset(needs, notify_socket_is_abstract());
    created.map(Option::from)
}

/// Locations of programs and their libraries.
const PROGRAM_PATHS: [&str; 8] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/blkid.conf", "/dev/null"];

/// Restricts this thread, and programs that it starts, to programs and to reading `file`, as far as the kernel's
/// Landlock supports that.
///
/// # Errors
/// The kernel refuses.
pub(super) fn restrict_to_programs_and(file: &File) -> io::Result<()> {
    if version() == 0 {
        return Ok(());
    }
    let run = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
    let ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK_ABI))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(LANDLOCK_ABI)))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(LANDLOCK_ABI)))
        .and_then(Ruleset::create);
    let mut ruleset = ruleset.map_err(io::Error::other)?;
    for path in PROGRAM_PATHS {
        let Ok(path_fd) = PathFd::new(path) else { continue };
        let allowed = match Path::new(path).is_dir() {
            true => run,
            false => AccessFs::ReadFile.into(),
        };
        ruleset = ruleset.add_rule(PathBeneath::new(path_fd, allowed)).map_err(io::Error::other)?;
    }
    let ruleset = ruleset.add_rule(PathBeneath::new(file, AccessFs::ReadFile)).map_err(io::Error::other)?;
    ruleset.restrict_self().map(drop).map_err(io::Error::other)
}

/// Returns the version of the kernel's Landlock; 0 if it has none, or it is off.
fn version() -> i64 {
    const VERSION: u32 = 1; // LANDLOCK_CREATE_RULESET_VERSION
    // SAFETY: with that flag and no attributes the kernel only returns its version.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, VERSION) };
    version.max(0)
}

/// Returns a description of the restrictions that this version lacks, for users.
fn missing(version: i64) -> Option<&'static str> {
    match version {
        0 => Some("access to files, devices, TCP ports and other processes, so only seccomp restricts it"),
        1..=3 => Some("access to TCP ports and devices, and signals to other processes"),
        4 => Some("access to devices, and signals to other processes"),
        5 => Some("signals to other processes, and connections to abstract sockets"),
        _ => None,
    }
}

fn create_ruleset(needs: &Needs, keeps_abstract_sockets: bool) -> Result<RulesetCreated, ConfineError> {
    let refused = |source: RulesetError| ConfineError::Landlock {
        what: "the kernel rejects the restrictions".to_owned(),
        source: io::Error::other(source),
    };
    let scope = match keeps_abstract_sockets {
        true => Scope::Signal.into(),
        false => Scope::from_all(LANDLOCK_ABI),
    };
    let ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK_ABI))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(LANDLOCK_ABI)))
        .and_then(|ruleset| ruleset.scope(scope))
        .and_then(Ruleset::create);
    let mut ruleset = ruleset.map_err(refused)?;
    for (path, access) in rules(needs) {
        let Some(path_fd) = open_rule_path(&path)? else {
            continue;
        };
        ruleset = ruleset.add_rule(PathBeneath::new(path_fd, access)).map_err(refused)?;
    }
    let dns = needs.resolves_names.then_some(DNS_PORT);
    for port in needs.ports.iter().copied().chain(dns) {
        let rule = NetPort::new(port, AccessNet::ConnectTcp);
        ruleset = ruleset.add_rule(rule).map_err(refused)?;
    }
    Ok(ruleset)
}

/// Returns the permitted access by path.
fn rules(needs: &Needs) -> Vec<(PathBuf, BitFlags<AccessFs>)> {
    let own = AccessFs::ReadFile
        | AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::RemoveFile;
    let mut rules: Vec<_> = needs.own_directories.iter().map(|path| (path.clone(), own)).collect();
    // The process may read about itself: its threads, and the locks of its open files.
    let itself = PathBuf::from(format!("/proc/{}", std::process::id()));
    rules.push((itself, AccessFs::ReadFile | AccessFs::ReadDir));
    if needs.resolves_names {
        rules.extend(NAME_LOOKUP_FILES.map(|path| (PathBuf::from(path), AccessFs::ReadFile.into())));
    }
    rules
}

/// Opens a path for a rule; `None` if it does not exist, and so cannot be accessed later.
fn open_rule_path(path: &Path) -> Result<Option<PathFd>, ConfineError> {
    if !path.try_exists().unwrap_or(true) {
        return Ok(None);
    }
    let opened = PathFd::new(path);
    opened.map(Some).map_err(|source| ConfineError::Landlock {
        what: format!("{} is needed after confinement", path.display()),
        source: io::Error::other(source),
    })
}

/// Returns whether the service manager's notification socket is abstract, which is the case in some containers.
fn notify_socket_is_abstract() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some_and(|socket| socket.as_encoded_bytes().starts_with(b"@"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_allow_no_execution_or_devices() {
        let mut needs = Needs::default();
        needs.add_directory("/run/larder/private/web");
        let rules = rules(&needs);
        assert_eq!(rules.len(), 2);
        let never =
            AccessFs::Execute | AccessFs::MakeBlock | AccessFs::MakeChar | AccessFs::MakeSock | AccessFs::MakeSym;
        for (path, access) in rules {
            assert!(!access.intersects(never), "{path:?}");
        }
    }

    #[test]
    fn missing_landlock_features_are_described() {
        assert!((0..6).all(|version| missing(version).is_some()));
        assert_eq!(missing(6), None);
    }
}
