//! Users who control which process a pid file or a QMP socket names.
//!
//! The pager stops threads of that process and shares its memory, as root. So a path is accepted only if no user
//! except root and the user of the process itself controls it: otherwise a user could name another user's process,
//! and have root manage it. A pager that is not root is restricted by the kernel to processes of its own user.
//!
//! The owner of each directory, symbolic link and file on the way controls the path, and so does every user with
//! write permission for such a directory or file. In a directory with the sticky bit only the owner of an entry can
//! replace it, and that owner is counted anyway. Concurrent changes hide no such user, because changing the way
//! requires owning, or having write permission for, a directory or link on it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use larder_block::opener::walk_path;
use rustix::fs::{FileType, Stat};
use rustix::process::{Pid, geteuid};

/// Users other than root who control a path.
#[derive(Debug, Default, PartialEq, Eq)]
struct PathControllers {
    /// User IDs.
    users: BTreeSet<u32>,
    /// A path that a group, or all users, may write to.
    writable_by_others: Option<PathBuf>,
}

/// Checks that only root and the user of a process control `path`, which names that process.
///
/// # Errors
/// A message for the user.
pub(super) fn check_path_trusted(path: &Path, process: Pid) -> Result<(), String> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let deciders = path_controllers(path).map_err(|error| error.to_string())?;
    let process_users =
        process_users(process).map_err(|error| format!("the user of process {process} is not known: {error}"))?;
    match deciders.refusal(&process_users) {
        Some(why) => Err(format!(
            "it names process {process}, but {why}; keep it where only root, or the user of that process, can write"
        )),
        None => Ok(()),
    }
}

impl PathControllers {
    /// Returns the reason why a user could name another user's process, if there is one. `process_users` has the
    /// process's users.
    fn refusal(&self, process_users: &[u32]) -> Option<String> {
        if let Some(path) = &self.writable_by_others {
            return Some(format!("users other than its owner may write to {}", path.display()));
        }
        let differs = |user: &u32| process_users.iter().any(|process_users| process_users != user);
        let user = self.users.iter().find(|user| differs(user))?;
        let process_users = process_users.first().copied().unwrap_or_default();
        Some(format!("user {user} can replace it, and the process belongs to user {process_users}"))
    }

    /// Adds the file found at `path`.
    fn add(&mut self, path: &Path, stat: &Stat) {
        if stat.st_uid != 0 {
            self.users.insert(stat.st_uid);
        }
        let others_can_write = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => stat.st_mode & libc::S_ISVTX == 0,
            FileType::RegularFile => true,
            // Write permission for a socket only permits connecting.
            _ => false,
        };
        if others_can_write && stat.st_mode & (libc::S_IWGRP | libc::S_IWOTH) != 0 {
            self.writable_by_others.get_or_insert_with(|| path.to_owned());
        }
    }
}

/// Returns the real, effective, saved and file system user of a process.
fn process_users(process: Pid) -> io::Result<Vec<u32>> {
    let status = fs::read_to_string(format!("/proc/{}/status", process.as_raw_pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let users: Vec<u32> =
        line.into_iter().flat_map(str::split_whitespace).filter_map(|user| user.parse().ok()).collect();
    match users.is_empty() {
        true => Err(io::ErrorKind::InvalidData.into()),
        false => Ok(users),
    }
}

fn path_controllers(path: &Path) -> io::Result<PathControllers> {
    let mut deciders = PathControllers::default();
    walk_path(path, |step_path, _, found| {
        deciders.add(step_path, found);
        Ok(())
    })?;
    Ok(deciders)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};

    use super::*;

    const ALICE: u32 = 12345;
    const BOB: u32 = 12346;

    /// Every owner on the way to a file controls it, and a directory that others may write to is reported.
    #[test]
    fn owners_on_path_control_file() {
        if !geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let set = |name: &str, mode| fs::set_permissions(at(name), Permissions::from_mode(mode)).expect("is ours");
        let users = |name: &str| path_controllers(&at(name)).expect("is there").users.into_iter().collect::<Vec<_>>();
        fs::create_dir(at("d")).expect("a directory");
        fs::write(at("d/pid"), "1").expect("a file");
        set("d/pid", 0o644);
        symlink("d/pid", at("link")).expect("a link");
        assert_eq!(path_controllers(&at("link")).expect("is there"), PathControllers::default());

        lchown(at("link"), Some(ALICE), None).expect("root may");
        assert_eq!(users("link"), [ALICE]);
        assert_eq!(users("d/pid"), [0_u32; 0]);
        chown(at("d"), Some(BOB), None).expect("root may");
        assert_eq!(users("link"), [ALICE, BOB]);
        assert_eq!(users("d/../link"), [ALICE, BOB]);
        chown(at("d/pid"), Some(ALICE), None).expect("root may");
        assert_eq!(users("d/pid"), [ALICE, BOB]);

        for (mode, is_open) in [(0o755, false), (0o775, true), (0o757, true), (0o1777, false)] {
            set("d", mode);
            let found = path_controllers(&at("d/pid")).expect("is there").writable_by_others;
            assert_eq!(found, is_open.then(|| at("d")), "{mode:o}");
        }
        set("d/pid", 0o664);
        let found = path_controllers(&at("d/pid")).expect("is there").writable_by_others;
        assert_eq!(found, Some(at("d/pid")));
    }

    /// A user may name only processes of that user, and none that has changed its user.
    #[test]
    fn user_may_name_own_processes_only() {
        let of = |users: &[u32]| PathControllers { users: users.iter().copied().collect(), writable_by_others: None };
        let is_refused = |deciders: &PathControllers, process: [u32; 4]| deciders.refusal(&process).is_some();
        assert!(!is_refused(&of(&[]), [0; 4]));
        assert!(!is_refused(&of(&[]), [ALICE; 4]));
        assert!(!is_refused(&of(&[ALICE]), [ALICE; 4]));
        assert!(is_refused(&of(&[ALICE]), [0; 4]));
        assert!(is_refused(&of(&[ALICE]), [BOB; 4]));
        assert!(is_refused(&of(&[ALICE, BOB]), [ALICE; 4]));
        assert!(is_refused(&of(&[ALICE]), [ALICE, 0, 0, 0]));
    }
}
