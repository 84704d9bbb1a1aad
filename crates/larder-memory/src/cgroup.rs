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
pub(crate) struct CgroupDirectory {
    pub(crate) path: PathBuf,
    /// Belongs to the unified hierarchy; otherwise to that of the requested controller.
    pub(crate) is_v2: bool,
}

impl CgroupDirectory {
    /// Reads the number in one of its files. Returns `None` if there is no such file, or no limit in it (`max`).
    pub(crate) fn read_number(&self, file: &str) -> Option<u64> {
        fs::read_to_string(self.path.join(file)).ok()?.trim().parse().ok()
    }

    /// Reads one of its files that has a key and a number on each line.
    pub(crate) fn read_table(&self, file: &str) -> FlatKeyedFile {
        FlatKeyedFile(fs::read_to_string(self.path.join(file)).unwrap_or_default())
    }
}

/// Content of a file of keys and numbers.
pub(crate) struct FlatKeyedFile(String);

impl FlatKeyedFile {
    /// Returns the number of this key, or 0.
    pub(crate) fn get(&self, key: &str) -> u64 {
        let found = self.0.lines().filter_map(|line| line.split_once(' '));
        let mut found = found.filter(|(name, _)| *name == key);
        found.next().and_then(|(_, number)| number.trim().parse().ok()).unwrap_or(0)
    }
}

/// Returns the groups of `pid`: that of version 2, and that of this controller of version 1, each followed by those
/// above it.
pub(crate) fn cgroups_of(pid: Pid, controller: &str) -> Vec<CgroupDirectory> {
    let read = |path: String| fs::read_to_string(path).unwrap_or_default();
    parse_cgroups(
        &read("/proc/self/mountinfo".to_owned()),
        &read(format!("/proc/{}/cgroup", pid.as_raw_pid())),
        controller,
    )
}

/// Returns the group that freezes `pid`, if it is frozen.
pub(crate) fn freezing_cgroup(pid: Pid) -> Option<PathBuf> {
    // Each group also reports whether one above it is frozen.
    let is_frozen = |group: &CgroupDirectory| match group.is_v2 {
        true => group.read_table("cgroup.events").get("frozen") == 1,
        false => {
            let state = fs::read_to_string(group.path.join("freezer.state")).unwrap_or_default();
            matches!(state.trim(), "FROZEN" | "FREEZING")
        }
    };
    cgroups_of(pid, "freezer").into_iter().find(is_frozen).map(|group| group.path)
}

fn parse_cgroups(mounts: &str, groups: &str, controller: &str) -> Vec<CgroupDirectory> {
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
        let matching = mounts.lines().filter_map(Mount::parse);
        let mut of_it = matching.filter(|mount| match is_unified {
            true => mount.fs_type == "cgroup2",
            false => mount.fs_type == "cgroup" && mount.options.split(',').any(|name| name == controller),
        });
        let Some((mount, below)) = of_it.find_map(|mount| {
            let relative = mount.relative_to_mount(Path::new(path))?;
            Some((mount, relative))
        }) else {
            continue;
        };
        let directories = below.ancestors().map(|below| mount.mount_point.join(below));
        found.extend(directories.map(|folder| CgroupDirectory { path: folder, is_v2: is_unified }));
    }
    found
}

/// A line of /proc/PID/mountinfo (proc(5)).
struct Mount<'a> {
    /// The part of the file system that is mounted.
    root: PathBuf,
    mount_point: PathBuf,
    fs_type: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (of_mount, of_system) = line.split_once(" - ")?;
        let mut mount_fields = of_mount.split(' ').skip(3);
        let mut fs_fields = of_system.split(' ');
        Some(Self {
            root: unescape(mount_fields.next()?),
            mount_point: unescape(mount_fields.next()?),
            fs_type: fs_fields.next()?,
            options: fs_fields.nth(1)?,
        })
    }

    /// Returns the path of a group relative to the mount point, or `None` if it is not below it.
    fn relative_to_mount(&self, group: &Path) -> Option<PathBuf> {
        let below = group.strip_prefix(&self.root).ok()?;
        let is_inside = below.components().all(|part| matches!(part, Component::Normal(_)));
        is_inside.then(|| below.to_owned())
    }
}

/// Decodes a path as the kernel writes it, with blanks and backslashes in octal.
fn unescape(path: &str) -> PathBuf {
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

    fn directories(of: &str, controller: &str) -> Vec<(String, bool)> {
        let found = parse_cgroups(MOUNTS, of, controller);
        let name = |group: CgroupDirectory| (group.path.display().to_string(), group.is_v2);
        found.into_iter().map(name).collect()
    }

    #[test]
    fn groups_include_all_parents() {
        let of = "5:memory:/vms/web\n4:freezer:/docker/ab c/x\n1:name=systemd:/a\n0::/machine\n";
        let unified = [("/sys/fs/cgroup/unified/machine", true), ("/sys/fs/cgroup/unified/", true)];
        let memory = [
            ("/sys/fs/cgroup/memory/vms/web", false),
            ("/sys/fs/cgroup/memory/vms", false),
            ("/sys/fs/cgroup/memory/", false),
        ];
        let freezer = [("/sys/fs/cgroup/freezer/x", false), ("/sys/fs/cgroup/freezer/", false)];
        for (controller, expected) in [("memory", &memory[..]), ("freezer", &freezer[..]), ("pids", &[])] {
            let expected = expected.iter().chain(&unified);
            let expected: Vec<_> = expected.map(|(name, unified)| ((*name).to_owned(), *unified)).collect();
            assert_eq!(directories(of, controller), expected, "{controller}");
        }
    }

    #[test]
    fn invisible_groups_are_ignored() {
        assert_eq!(directories("0::/../other\n", "memory"), []);
        assert_eq!(directories("4:freezer:/elsewhere\nnonsense\n", "freezer"), []);
        assert_eq!(parse_cgroups("", "0::/\n", "memory"), []);
    }

    #[test]
    fn own_groups_are_readable() {
        let us = rustix::process::getpid();
        assert_eq!(freezing_cgroup(us), None);
        for group in cgroups_of(us, "memory") {
            assert!(group.path.is_dir(), "{group:?}");
        }
    }
}
