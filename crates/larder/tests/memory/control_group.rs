//! A control group for a test's processes, of version 1 if the controller is mounted that way, else of version 2.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::support::{TEST_TIMEOUT, require_root};

/// A control group; on drop it is removed, and its processes return to the parent group.
pub(crate) struct ControlGroup {
    folder: PathBuf,
    is_unified: bool,
}

impl ControlGroup {
    pub(crate) fn new(controller: &str) -> Self {
        require_root("to make a control group");
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let above = Path::new("/sys/fs/cgroup");
        let of_controller = above.join(controller);
        let is_unified = !of_controller.join("cgroup.procs").exists();
        let above = if is_unified { above } else { of_controller.as_path() };
        let folder = above.join(format!("larder-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).expect("this test needs control groups");
        Self { folder, is_unified }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.folder.join(file);
        std::fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.folder.join(file)).expect("a file of the group")
    }

    /// Returns `command` changed so that it runs in the group from its start.
    pub(crate) fn with(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]);
        inside.arg(self.folder.join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            inside.env(name, value.expect("nothing is removed"));
        }
        inside
    }

    pub(crate) fn add(&self, pid: u32) {
        self.write("cgroup.procs", &pid.to_string());
    }

    pub(crate) fn used(&self) -> u64 {
        let file = if self.is_unified { "memory.current" } else { "memory.usage_in_bytes" };
        self.read(file).trim().parse().expect("a number")
    }

    /// Sets the memory limit, or removes it.
    pub(crate) fn limit(&self, bytes: Option<u64>) {
        let bytes = bytes.map(|bytes| bytes.to_string());
        match self.is_unified {
            true => self.write("memory.max", bytes.as_deref().unwrap_or("max")),
            false => self.write("memory.limit_in_bytes", bytes.as_deref().unwrap_or("-1")),
        }
    }

    /// Freezes the processes and waits until they are frozen, or thaws them.
    pub(crate) fn freeze(&self, freeze: bool) {
        let (file, text) = match (self.is_unified, freeze) {
            (true, true) => ("cgroup.freeze", "1"),
            (true, false) => ("cgroup.freeze", "0"),
            (false, true) => ("freezer.state", "FROZEN"),
            (false, false) => ("freezer.state", "THAWED"),
        };
        let is_done = || match self.is_unified {
            true => self.read("cgroup.events").contains(&format!("frozen {text}")),
            false => self.read(file).trim() == text,
        };
        let give_up = Instant::now() + TEST_TIMEOUT;
        loop {
            // The freezer of version 1 misses a process that is just being stopped, unless the state is written
            // again.
            self.write(file, text);
            if is_done() {
                return;
            }
            assert!(Instant::now() < give_up, "it is not {text}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let write = |file: &str, text: &str| std::fs::write(self.folder.join(file), text);
        let _ = write("freezer.state", "THAWED").or_else(|_| write("cgroup.freeze", "0"));
        let _ = write("memory.limit_in_bytes", "-1");
        let above = self.folder.parent().expect("a group").join("cgroup.procs");
        let give_up = Instant::now() + TEST_TIMEOUT;
        while std::fs::remove_dir(&self.folder).is_err() && Instant::now() < give_up {
            let inside = std::fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default();
            for pid in inside.lines() {
                let _ = std::fs::write(&above, pid);
            }
            std::thread::yield_now();
        }
    }
}
