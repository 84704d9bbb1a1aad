//! Control groups of a process (cgroups(7)): the directories of its group and of the groups above it, versions 1 and
//! 2.
//!
//! Groups outside Larder's own view (a container's mount, a cgroup namespace) are left out: limits that a container's
//! host sets above the container's group are invisible.

use std::fs;
use std::path::{Component, Path, PathBuf};

use rustix::process::Pid;

/// Directory of one control group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Group {
    pub(crate) folder: PathBuf,
    /// Belongs to the unified hierarchy; otherwise to that of the requested controller.
    pub(crate) is_unified: bool,
}

impl Group {
    /// Reads the number in one of its files. Returns `None` if there is no such file, or no limit in it (`max`).
    pub(crate) fn number(&self, file: &str) -> Option<u64> {
        fs::read_to_string(self.folder.join(file)).ok()?.trim().parse().ok()
    }

    /// Reads one of its files that has a key and a number on each line.
    pub(crate) fn table(&self, file: &str) -> Table {
        Table(fs::read_to_string(self.folder.join(file)).unwrap_or_default())
    }
}

/// Content of a file of keys and numbers.
pub(crate) struct Table(String);

impl Table {
    /// Returns the number of this key, or 0.
    pub(crate) fn get(&self, key: &str) -> u64 {
        let found = self.0.lines().filter_map(|line| line.split_once(' '));
        let mut found = found.filter(|(name, _)| *name == key);
        found
            .next()
            .and_then(|(_, number)| number.trim().parse().ok())
            .unwrap_or(0)
    }
}

/// Returns the groups of `pid`: that of version 2, and that of this controller of version 1, each followed by those
/// above it.
pub(crate) fn of(pid: Pid, controller: &str) -> Vec<Group> {
    let read = |path: String| fs::read_to_string(path).unwrap_or_default();
    groups(
        &read("/proc/self/mountinfo".to_owned()),
        &read(format!("/proc/{}/cgroup", pid.as_raw_pid())),
        controller,
    )
}

/// Returns the group that freezes `pid`, if it is frozen.
pub(crate) fn frozen(pid: Pid) -> Option<PathBuf> {
    // Each group also reports whether one above it is frozen.
    let is_frozen = |group: &Group| match group.is_unified {
        true => group.table("cgroup.events").get("frozen") == 1,
        false => {
            let state = fs::read_to_string(group.folder.join("freezer.state")).unwrap_or_default();
            matches!(state.trim(), "FROZEN" | "FREEZING")
        }
    };
    of(pid, "freezer").into_iter().find(is_frozen).map(|group| group.folder)
}

fn groups(mounts: &str, groups: &str, controller: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let is_unified = controllers.is_empty();
        if !is_unified && !controllers.split(',').any(|name| name == controller) {
            continue;
        }
        let of_it = mounts.lines().filter_map(Mount::parse);
        let mut of_it = of_it.filter(|mount| match is_unified {
            true => mount.kind == "cgroup2",
            false => mount.kind == "cgroup" && mount.options.split(',').any(|name| name == controller),
        });
        let Some((mount, below)) = of_it.find_map(|mount| {
            let below = mount.below(Path::new(path))?;
            Some((mount, below))
        }) else {
            continue;
        };
        let folders = below.ancestors().map(|below| mount.at.join(below));
        found.extend(folders.map(|folder| Group { folder, is_unified }));
    }
    found
}

/// A line of /proc/PID/mountinfo (proc(5)).
struct Mount<'a> {
    /// The part of the file system that is mounted.
    root: PathBuf,
    at: PathBuf,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (of_mount, of_system) = line.split_once(" - ")?;
        let mut of_mount = of_mount.split(' ').skip(3);
        let mut of_system = of_system.split(' ');
        Some(Self {
            root: unescaped(of_mount.next()?),
            at: unescaped(of_mount.next()?),
            kind: of_system.next()?,
            options: of_system.nth(1)?,
        })
    }

    /// Returns the path of a group relative to the mount point, or `None` if it is not below it.
    fn below(&self, group: &Path) -> Option<PathBuf> {
        let below = group.strip_prefix(&self.root).ok()?;
        let is_inside = below.components().all(|part| matches!(part, Component::Normal(_)));
        is_inside.then(|| below.to_owned())
    }
}

/// Decodes a path as the kernel writes it, with blanks and backslashes in octal.
fn unescaped(path: &str) -> PathBuf {
    PathBuf::from(
        [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
            .into_iter()
            .fold(path.to_owned(), |path, (from, to)| path.replace(from, to)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
        24 1 0:22 / / rw - ext4 /dev/vda rw\n\
        30 24 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
        31 24 0:27 /docker/ab\\040c /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n\
        32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    fn folders(of: &str, controller: &str) -> Vec<(String, bool)> {
        let found = groups(MOUNTS, of, controller);
        let name = |group: Group| (group.folder.display().to_string(), group.is_unified);
        found.into_iter().map(name).collect()
    }

    #[test]
    fn groups_include_all_parents() {
        let of = "5:memory:/vms/web\n4:freezer:/docker/ab c/x\n1:name=systemd:/a\n0::/machine\n";
        let unified = [
            ("/sys/fs/cgroup/unified/machine", true),
            ("/sys/fs/cgroup/unified/", true),
        ];
        let memory = [
            ("/sys/fs/cgroup/memory/vms/web", false),
            ("/sys/fs/cgroup/memory/vms", false),
            ("/sys/fs/cgroup/memory/", false),
        ];
        let freezer = [("/sys/fs/cgroup/freezer/x", false), ("/sys/fs/cgroup/freezer/", false)];
        for (controller, expected) in [("memory", &memory[..]), ("freezer", &freezer[..]), ("pids", &[])] {
            let expected = expected.iter().chain(&unified);
            let expected: Vec<_> = expected.map(|(name, unified)| ((*name).to_owned(), *unified)).collect();
            assert_eq!(folders(of, controller), expected, "{controller}");
        }
    }

    #[test]
    fn invisible_groups_are_ignored() {
        assert_eq!(folders("0::/../other\n", "memory"), []);
        assert_eq!(folders("4:freezer:/elsewhere\nnonsense\n", "freezer"), []);
        assert_eq!(groups("", "0::/\n", "memory"), []);
    }

    #[test]
    fn own_groups_are_readable() {
        let us = rustix::process::getpid();
        assert_eq!(frozen(us), None);
        for group in of(us, "memory") {
            assert!(group.folder.is_dir(), "{group:?}");
        }
    }
}
